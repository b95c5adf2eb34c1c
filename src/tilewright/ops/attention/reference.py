"""Attention, plainly: all the logits of a head at once. The oracle of the family, decoding included."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tilewright.core.axes import Size
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.masks.algebra import Mask
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.softmax_rows import MASKED_BELOW


def flash_attention_reference(call: AttentionCall) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """out and logsumexp. Computed in float32, and in float64 where the inputs are: that is the oracle."""
    q, wide = call.q, accumulator(call.q.dtype)
    keys, values = (jnp.repeat(a, call.group, axis=2) for a in (call.k, call.v))  # [B, S, H, ...]
    logits = jnp.einsum("bthd,bshd->bhts", q, keys, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)
    logits = round_gradient(logits, q.dtype) * call.scale  # [B, H, T, S]
    if call.soft_cap is not None:
        logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
    if call.bias is not None:
        logits = logits + jnp.broadcast_to(call.bias.astype(wide), logits.shape)
    allowed = logits > MASKED_BELOW
    if call.mask is not None:
        allowed = allowed & dense_mask(call.mask, q.shape[1], call.k.shape[1], call.q_offset)[None]
    if call.q_segments is not None and call.kv_segments is not None:
        allowed = allowed & (call.q_segments[:, None, :, None] == call.kv_segments[:, None, None, :])
    if call.keep is not None:
        allowed = allowed & call.keep
    logits = jnp.where(allowed, logits, -jnp.inf)

    row_max = jnp.max(logits, axis=3)  # [B, H, T]
    sink = None
    if call.sinks is not None:
        sink = jnp.broadcast_to(call.sinks.astype(wide)[None, :, None], row_max.shape)
        row_max = jnp.maximum(row_max, sink)
    row_max = jax.lax.stop_gradient(jnp.where(jnp.isfinite(row_max), row_max, 0.0))
    weights = jnp.exp(logits - row_max[..., None])  # 0 where not allowed.
    total = jnp.sum(weights, axis=3)
    if sink is not None:
        total = total + jnp.exp(sink - row_max)
    nothing = total == 0
    log_total = jnp.log(jnp.where(nothing, 1.0, total))
    logsumexp = jnp.where(nothing, -jnp.inf, row_max + log_total)  # [B, H, T]
    weights = (weights / jnp.where(nothing, 1.0, total)[..., None]).astype(q.dtype)
    out = jnp.einsum(
        "bhts,bshd->bthd", weights, values, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide
    )
    return round_gradient(out, q.dtype).astype(q.dtype), logsumexp.transpose(0, 2, 1)


def dense_mask(mask: Mask, t: Size, s: Size, q_offset: int) -> Bool[Array, "_ T S"]:
    """The whole of a static mask, computed from positions where it can be."""
    if mask.computable:
        rows = jax.lax.broadcasted_iota(jnp.int32, (1, t, s), 1)
        columns = jax.lax.broadcasted_iota(jnp.int32, (1, t, s), 2)
        return mask.keep(rows, columns, q_offset)
    return jnp.asarray(mask.dense(t, s, q_offset))


def _forward(call: AttentionCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    return flash_attention_reference(call), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
