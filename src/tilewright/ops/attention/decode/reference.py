"""Attention over a cache, plainly: the pages gathered, and a mask of lengths given to the oracle of attention."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.decode.bounds import Outputs, within_bounds
from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.reference import flash_attention_reference


def cache_of(call: DecodeCall) -> tuple[jax.Array, jax.Array]:
    """k and v [B, S, KV, D] of each sequence in one piece, with zeros past its length.

    What the cache holds there may be anything, including NaN, and 0 times NaN is NaN.
    """

    def gathered(cache: jax.Array) -> jax.Array:
        if call.page_table is None:
            return cache
        pages = cache[call.page_table]  # [B, pages, page, KV, D]
        return pages.reshape(pages.shape[0], -1, *pages.shape[3:])

    in_use = (jnp.arange(call.room, dtype=jnp.int32)[None, :] < call.lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(in_use, cache, jnp.zeros_like(cache)) for cache in map(gathered, (call.k, call.v)))
    return k, v


def attended(call: DecodeCall) -> jax.Array:
    """Which keys each query attends to, [B, T, S]."""
    t = call.q.shape[1]
    position = call.lengths[:, None, None] - t + jnp.arange(t, dtype=jnp.int32)[None, :, None]  # [B, T, 1]
    key = jnp.arange(call.room, dtype=jnp.int32)[None, None, :]
    keep = key <= position
    return keep if call.window is None else keep & (key >= position - call.window)


def _attend(call: DecodeCall, launch: Launch) -> Outputs:
    k, v = cache_of(call)
    return flash_attention_reference(
        AttentionCall(
            q=call.q,
            k=k,
            v=v,
            bias=None,
            sinks=None if call.sinks is None else call.sinks[0],  # The api gives one set for all sequences.
            q_segments=None,
            kv_segments=None,
            keep=attended(call)[:, None],
            mask=None,
            scale=call.scale,
            soft_cap=call.soft_cap,
            q_offset=0,
        )
    )


IMPLEMENTATION = Implementation(forward=Pass(within_bounds(_attend)))
