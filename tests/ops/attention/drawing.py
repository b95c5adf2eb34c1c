"""What the tests of attention draw, and how they differentiate it."""

import jax
import jax.numpy as jnp


def draw(b=1, t=40, s=40, h=4, kv=2, d=16, dv=None, dtype="float32", seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((b, t, h, d), (b, s, kv, d), (b, s, kv, dv or d))
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


def gradients(function, *arrays):
    """The outputs, and the gradients of a sum that weighs every output."""

    def total(*arrays):
        out, logsumexp = function(*arrays)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        finite = jnp.where(jnp.isfinite(logsumexp), logsumexp, 0.0)
        return jnp.sum(out * weights).astype(finite.dtype) + jnp.sum(jnp.sin(finite)), (out, logsumexp)

    (_, outputs), grads = jax.jit(jax.value_and_grad(total, tuple(range(len(arrays))), has_aux=True))(*arrays)
    return (*outputs, *grads)
