"""The statistics of each query's softmax, and what the backward pass derives from them: shared by the implementations.

With p_ts = exp(a_ts - logsumexp_t), the gradient of a logit is

    d a_ts = p_ts (d_out_t . v_s - delta_t)        delta_t = d_out_t . out_t - d_logsumexp_t

and that of a sink is the same without a value: -exp(sink - logsumexp_t) delta_t, summed over the queries. The forward
pass saves the maximum and the total of each row, not its logsumexp: at logits of 1,000 a float32 logsumexp is off by
6e-5, and so would be every weight computed from it.

delta is computed from `out` as it was returned. In bfloat16 that contains two roundings, of the weights and of `out`
itself. The gradient of a logit is rounded to bfloat16 anyway. The gradient of a sink is one float32 number per head,
and its error was measured at 12 times that of the plain version (D = 128, T = 400, two heads). So a backward pass sums
p_ts (d_out_t . v_s), which it has in float32, for the sinks by itself (`sink_pull`).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilewright.core.numerics import accumulator
from tilewright.ops.attention.call import AttentionCall

LOG2_E = math.log2(math.e)
# Logits below this are masked, in every implementation: what people add to a logit to mask it is lower.
MASKED_BELOW = -1e30
# In kernels, whose logits are in units of log 2: the initial maximum of a row, and, far below it, the logit of a masked
# pair. So a masked pair has a weight of 0 even in a row without any other.
LOWEST = MASKED_BELOW * LOG2_E
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


class SavedRows(NamedTuple):
    """What the forward pass saves for the backward pass."""

    out: jax.Array  # [B, T, H, Dv]
    row_max: jax.Array  # [B, H, T], the maximum of the logits, in the implementation's unit
    total: jax.Array  # [B, H, T], the sum of exp(logit - row_max); 0 for a row that attends to nothing


SAVED_AXES = ("B T H", "B H T", "B H T")


def outputs_of(rows: SavedRows, *, per_nat: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, Dv] and logsumexp [B, T, H], which is -inf for a row that attends to nothing.

    `per_nat` is the unit of `row_max`: 1, or log2(e) where logits are computed for exp2.
    """
    nothing = rows.total == 0
    value = rows.row_max / per_nat + jnp.log(jnp.where(nothing, 1.0, rows.total))
    return rows.out, jnp.where(nothing, -jnp.inf, value).transpose(0, 2, 1)


@dataclass(frozen=True)
class BackwardRows:
    """What a backward pass needs per query."""

    d_out: jax.Array  # [B, T, H, Dv]
    d_logsumexp: jax.Array  # [B, H, T]
    row_max: jax.Array  # [B, H, T], in the implementation's unit
    total: jax.Array  # [B, H, T]
    delta: jax.Array  # [B, H, T]
    sink_weight: jax.Array | None  # [B, H, T], the softmax weight of the sink

    def in_nats(self) -> "BackwardRows":
        """The rows of a kernel whose unit is log 2, for plain JAX."""
        return dataclasses.replace(self, row_max=self.row_max / LOG2_E)

    @property
    def log2_total(self) -> jax.Array:
        return jnp.log2(jnp.where(self.total == 0, 1.0, self.total))

    def d_sinks(self, sink_pull: jax.Array | None) -> jax.Array | None:
        """The gradient of the sinks [H]. `sink_pull`: sum over b, t, s of p_ts (d_out_t . v_s) sink_weight_t, [H]."""
        if self.sink_weight is None or sink_pull is None:
            return None
        return jnp.sum(self.sink_weight * self.d_logsumexp, axis=(0, 2)) - sink_pull


def backward_rows(call: AttentionCall, saved: SavedRows, cotangents: Any, *, per_nat: float = 1.0) -> BackwardRows:
    """The rows of a backward pass, from what the forward pass saved and the cotangents of out and logsumexp."""
    out, row_max, total = saved
    d_out, d_logsumexp = cotangents
    wide = accumulator(out.dtype)
    d_logsumexp = d_logsumexp.transpose(0, 2, 1)  # [B, H, T]
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=3)  # [B, T, H]
    delta = delta.transpose(0, 2, 1) - d_logsumexp
    weight = None
    if call.sinks is not None:
        sink = call.sinks.astype(wide)[None, :, None]
        weight = jnp.exp((sink * per_nat - row_max) / per_nat) / jnp.where(total == 0, 1.0, total)  # [B, H, T]
    return BackwardRows(d_out, d_logsumexp, row_max, total, delta, weight)
