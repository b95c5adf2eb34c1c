"""`decode_qkv` in plain JAX: three products, two norms, two rotations and two writes. The oracle of the family."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.attention.decode_qkv.call import DecodeQkvCall
from tilewright.ops.rope.api import rope_tables


def written(call: Any, cache: jax.Array, new: jax.Array) -> jax.Array:
    """The cache with a token per sequence behind its length; one that does not fit is not written.

    `call` is a `StackedCall` with `lengths` and `layer`.
    """
    _, rows, capacity = cache.shape[:3]
    layer = jnp.int32(0) if call.layer is None else jnp.where(call.layer < 0, call.layers, call.layer)
    position = jnp.where(call.lengths < 0, capacity, call.lengths)

    def write(own: jax.Array, token: jax.Array, at: jax.Array) -> jax.Array:  # [L, S, ...]
        return own.at[layer, at].set(token.astype(cache.dtype), mode="drop")

    # Mapped over the calls that were joined and their rows: a mesh may cut the rows.
    stacks = cache.reshape(call.joined, call.layers, *cache.shape[1:])
    of_rows = jax.vmap(jax.vmap(write, in_axes=(1, 0, 0), out_axes=1))
    new, position = (x.reshape(call.joined, rows, *x.shape[1:]) for x in (new, position))
    return of_rows(stacks, new, position).reshape(cache.shape)


def _forward(call: DecodeQkvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    dtype, exact = call.x.dtype, accumulator(call.x.dtype)

    def project(w: jax.Array) -> jax.Array:  # [B, heads, C]
        y = jnp.einsum("bd,dhc->bhc", call.x.astype(exact), w.astype(exact), precision=jax.lax.Precision.HIGHEST)
        return round_gradient(y, dtype)

    def normed(y: jax.Array, w: jax.Array | None) -> jax.Array:
        if w is None:
            return y
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + call.eps)
        return y * jnp.broadcast_to(call.norm_offset + w.astype(exact), y.shape)

    def rotated(y: jax.Array) -> jax.Array:
        if call.theta is None:
            return y
        options = {"theta": call.theta, "scaling": call.scaling, "dtype": exact}
        tables = rope_tables(call.lengths, call.rotary_dim, **options)
        half = call.rotary_dim // 2
        one, other, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        cos, sin = (jnp.broadcast_to(table[:, None], one.shape) for table in tables)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)

    q = rotated(normed(project(call.q_proj), call.q_norm))
    k = rotated(normed(project(call.k_proj), call.k_norm))
    return (q.astype(dtype), written(call, call.keys, k), written(call, call.values, project(call.v_proj))), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
