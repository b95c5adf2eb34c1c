"""Attention, plainly: all the logits of a head at once. The oracle of the family."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.attention.mask_algebra import Mask

# Logits below it are masked, in every implementation: what people add to a logit to mask it is lower.
MASKED_BELOW = -1e30


def flash_attention_reference(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S KV D"],
    v: Float[Array, "B S KV Dv"],
    bias: Float[Array, "_ _ _ S"] | None,
    sinks: Float[Array, " H"] | None,
    q_segments: Int[Array, "B T"] | None,
    kv_segments: Int[Array, "B S"] | None,
    keep: Bool[Array, "_ _ T S"] | None,
    *,
    mask: Mask | None,
    scale: float,
    soft_cap: float | None,
    q_offset: int,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Out and logsumexp. Static masks, segments and `keep` all have to allow a pair."""
    accumulate = accumulator(q.dtype)
    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(a, group, axis=2) for a in (k, v))  # [B, S, H, ...]
    logits = jnp.einsum(
        "bthd,bshd->bhts", q, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulate
    )
    logits = round_gradient(logits, q.dtype) * scale  # [B, H, T, S]
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + jnp.broadcast_to(bias.astype(accumulate), logits.shape)
    allowed = logits > MASKED_BELOW
    if mask is not None:
        allowed = allowed & dense_mask(mask, q.shape[1], k.shape[1], q_offset)[None]
    if q_segments is not None and kv_segments is not None:
        allowed = allowed & (q_segments[:, None, :, None] == kv_segments[:, None, None, :])
    if keep is not None:
        allowed = allowed & keep
    logits = jnp.where(allowed, logits, -jnp.inf)

    highest = jnp.max(logits, axis=3)  # [B, H, T]
    sink = None
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(accumulate)[None, :, None], highest.shape)
        highest = jnp.maximum(highest, sink)
    highest = jax.lax.stop_gradient(jnp.where(jnp.isfinite(highest), highest, 0.0))
    weights = jnp.exp(logits - highest[..., None])  # 0 where not allowed.
    total = jnp.sum(weights, axis=3)
    if sink is not None:
        total = total + jnp.exp(sink - highest)
    nothing = total == 0
    log_total = jnp.log(jnp.where(nothing, 1.0, total))
    logsumexp = jnp.where(nothing, -jnp.inf, highest + log_total)  # [B, H, T]
    weights = (weights / jnp.where(nothing, 1.0, total)[..., None]).astype(q.dtype)
    out = jnp.einsum(
        "bhts,bshd->bthd", weights, values, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulate
    )
    return round_gradient(out, q.dtype).astype(q.dtype), logsumexp.transpose(0, 2, 1)


def dense_mask(mask: Mask, t: int, s: int, q_offset: int) -> Bool[Array, "_ T S"]:
    """The whole of a static mask, made from positions where it can be."""
    if mask.computable:
        rows = jax.lax.broadcasted_iota(jnp.int32, (1, t, s), 1)
        columns = jax.lax.broadcasted_iota(jnp.int32, (1, t, s), 2)
        return mask.keep(rows, columns, q_offset)
    return jnp.asarray(mask.dense(t, s, q_offset))
