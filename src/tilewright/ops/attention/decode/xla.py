"""Attention over a cache in plain JAX: all the logits of the few queries at once, [B, KV, T * group, S] in float32.

Floor: the cache read once, 2 (D + Dv) FLOPs for each query and key. Here the whole room of the cache is read, whatever the
lengths; pages are gathered first, which writes and reads the cache once more. The group of query heads that shares a key
head is one operand of the products, so keys and values are not repeated. Gradients are autodiff's, and linear in S.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.numerics import accumulator
from tilewright.ops.attention.decode.bounds import within_bounds
from tilewright.ops.attention.decode.reference import attended, gathered


@within_bounds
def paged_attention_xla(
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
    (b, t, h, d), (_, s, kv, dv) = q.shape, v.shape
    accumulate = accumulator(q.dtype)

    def dot(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.einsum(equation, one, other, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulate)

    held = (jnp.arange(s, dtype=jnp.int32)[None, :] < lengths[:, None])[:, :, None, None]
    k, v = (jnp.where(held, cache, jnp.zeros_like(cache)) for cache in (k, v))
    logits = dot("btkgd,bskd->bkgts", q.reshape(b, t, kv, h // kv, d), k) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    keep = attended(lengths, t, s, window)[:, None, None]  # [B, 1, 1, T, S]
    logits = jnp.where(keep, logits, -jnp.inf)
    highest = jnp.max(logits, axis=4, keepdims=True)  # [B, KV, group, T, 1]
    sink = None
    if sinks is not None:
        sink = sinks.astype(accumulate).reshape(1, kv, h // kv, 1, 1)
        highest = jnp.maximum(highest, jnp.broadcast_to(sink, highest.shape))
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = jnp.exp(logits - highest)
    total = jnp.sum(weights, axis=4, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - highest)
    nothing = total == 0
    safe_total = jnp.where(nothing, 1.0, total)
    weights = (weights / safe_total).astype(q.dtype)
    out = dot("bkgts,bskd->btkgd", weights, v).astype(q.dtype)
    logsumexp = jnp.where(nothing, -jnp.inf, highest + jnp.log(safe_total))[..., 0]
    return out.reshape(b, t, h, dv), jnp.moveaxis(logsumexp, 3, 1).reshape(b, t, h)


decode_attention_xla = paged_attention_xla
