"""`decode_residual` in plain JAX: a product, a sum and a norm. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.attention.decode_residual.call import DecodeResidualCall


def _forward(call: DecodeResidualCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    dtype, exact = call.x.dtype, accumulator(call.x.dtype)
    product = jnp.dot(call.x.astype(exact), call.w.astype(exact), precision=jax.lax.Precision.HIGHEST)
    y = call.residual.astype(exact) + round_gradient(product, dtype)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + call.eps)
    normed = y * scale * jnp.broadcast_to(call.norm_offset + call.norm.astype(exact), y.shape)
    return (y.astype(dtype), normed.astype(dtype)), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
