"""Attention over a cache, plainly: the pages gathered, and a mask of lengths given to the oracle of attention."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.ops.attention.decode.bounds import within_bounds
from tilewright.ops.attention.reference import flash_attention_reference


@within_bounds
def paged_attention_reference(
    q: Float[Array, "B T H D"],
    k: Float[Array, "_ _ KV D"],
    v: Float[Array, "_ _ KV Dv"],
    page_table: Int[Array, "B pages"] | None,
    lengths: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Out and logsumexp."""
    k, v = (gathered(cache, page_table) for cache in (k, v))
    keep = attended(lengths, q.shape[1], k.shape[1], window)
    # What lies past the length may be anything, NaN too, and 0 times NaN is NaN.
    held = (jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(held, cache, jnp.zeros_like(cache)) for cache in (k, v))
    return flash_attention_reference(
        q,
        k,
        v,
        None,
        sinks,
        None,
        None,
        keep[:, None],
        mask=None,
        scale=scale,
        soft_cap=soft_cap,
        q_offset=0,
    )


decode_attention_reference = paged_attention_reference


def gathered(cache: jax.Array, page_table: jax.Array | None) -> jax.Array:
    """The cache of each sequence in one piece, [B, S, KV, D]."""
    if page_table is None:
        return cache
    pages = cache[page_table]  # [B, pages, page, KV, D]
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])


def attended(lengths: jax.Array, t: int, s: int, window: int | None) -> jax.Array:
    """Which keys each query attends to, [B, T, S]."""
    position = lengths[:, None, None] - t + jnp.arange(t, dtype=jnp.int32)[None, :, None]  # [B, T, 1]
    key = jnp.arange(s, dtype=jnp.int32)[None, None, :]
    keep = key <= position
    return keep if window is None else keep & (key >= position - window)
