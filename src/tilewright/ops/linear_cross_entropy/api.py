"""`linear_cross_entropy`: the loss of a language model's head, from hidden states."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.axes import Hidden, Labels, PerToken, Scalar, Unembedding
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.nearest import did_you_mean
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.core.quantized import as_array
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall

IGNORED_LABEL = -100
_REDUCTIONS = ("none", "sum", "mean")

OP = register(
    Op(
        name="linear_cross_entropy",
        family="tilewright.ops.linear_cross_entropy",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def linear_cross_entropy(
    x: Hidden,
    w: Unembedding,
    labels: Labels,
    *,
    weights: PerToken | None = None,
    z_loss: float | Scalar = 0.0,
    soft_cap: float | None = None,
    reduction: Literal["none", "sum", "mean"] = "none",
    return_logsumexp: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Array | tuple[Array, PerToken]:
    r"""Cross entropy of softmax(x w) against labels, without the logits in memory.

    With a_t = x_t w (and a_t = soft_cap * tanh(x_t w / soft_cap) under a soft cap), for each token t

        logsumexp_t = log sum_v exp(a_tv)
        loss_t = weights_t * (logsumexp_t - a_t[labels_t] + z_loss * logsumexp_t^2)

    Args:
      x: hidden states [..., H], float32 or bfloat16.
      w: the unembedding [H, V], of x's dtype.
      labels: [...] integers in [0, V). A token whose label is -100 is ignored: its loss and gradients are 0, and the
        mean does not count it. Any other label outside [0, V) makes the loss of its token NaN, and with it the
        gradients that depend on that loss, in every implementation.
      weights: [...] a factor for each token's loss, or None for ones. Differentiable.
      z_loss: the factor of logsumexp^2, which keeps the logits from drifting.
      soft_cap: bounds the logits to (-soft_cap, soft_cap); a Python number, known when traced.
      reduction: "none" returns [...]; "sum" and "mean" return a scalar. The mean is sum(loss) / sum(weights) over the
        tokens that are not ignored, and 0 where all are.
      return_logsumexp: whether to also return logsumexp [...] of every token, ignored ones too. Differentiable.
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      loss, float32; with return_logsumexp a pair (loss, logsumexp).
    """
    x, w, labels = as_array("x", x), as_array("w", w), as_array("labels", labels)
    weights = None if weights is None else as_array("weights", weights)
    _validate(x, w, labels, weights, z_loss, soft_cap, reduction)
    labels = _where_rows_are(labels, x)
    counted = labels != IGNORED_LABEL
    in_range = (labels >= 0) & (labels < w.shape[1])
    # Implementations see labels in range only, so none of them can read out of bounds.
    safe_labels = jnp.where(in_range, labels, 0).astype(jnp.int32)
    if labels.size:
        cap = None if soft_cap is None else float(soft_cap)
        call = LinearCrossEntropyCall(x=x, w=w, labels=safe_labels, soft_cap=cap, whole_v=None)
        nll, logsumexp = OP.run(call, implementation=implementation, config=config)
    else:
        nll = logsumexp = jnp.zeros(labels.shape, accumulator(x.dtype))

    loss = nll
    if not (isinstance(z_loss, (int, float)) and z_loss == 0):
        loss = loss + jnp.asarray(z_loss, loss.dtype) * jnp.square(logsumexp)
    # A factor, not a replacement, so that a label out of range makes the gradients NaN too.
    loss = loss * jnp.where(in_range | ~counted, 1.0, jnp.nan).astype(loss.dtype)
    loss = jnp.where(counted, loss, 0.0)
    counts = counted.astype(loss.dtype)
    if weights is not None:
        weights = _where_rows_are(weights, loss)
        loss, counts = loss * weights.astype(loss.dtype), counts * weights.astype(loss.dtype)

    loss = loss if reduction == "none" else jnp.sum(loss)
    if reduction == "mean":
        total = jnp.sum(counts)
        loss = jnp.where(total == 0, jnp.zeros_like(loss), loss) / jnp.where(total == 0, jnp.ones_like(total), total)
    return (loss, logsumexp) if return_logsumexp else loss


def _where_rows_are(values: jax.Array, rows: jax.Array) -> jax.Array:
    """Values per row: an axis that is sharded over other Explicit mesh axes than that of the rows is moved to theirs."""
    there = explicit_axes(rows)
    used = {axis for each in there for axis in each}
    pairs = zip(explicit_axes(values), there, strict=False)
    return placed(values, [of if own and of else tuple(axis for axis in own if axis not in used) for own, of in pairs])


def _validate(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    z_loss: Any,
    soft_cap: Any,
    reduction: str,
) -> None:
    if x.ndim < 1 or x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be [..., H] of float32 or bfloat16: x.astype(jnp.bfloat16)")
    if w.ndim != 2:
        raise ValueError(f"w is {shown(w)}; it must be [H, V], two axes")
    if w.shape[0] != x.shape[-1]:
        transposed = w.shape[1] == x.shape[-1]
        remedy = "it looks transposed: pass w.T" if transposed else f"pass a w with {x.shape[-1]} rows"
        raise ValueError(
            f"w is {shown(w)} and x is {shown(x)}; the first axis of w must be the last of x "
            f"(H={x.shape[-1]}); {remedy}"
        )
    if w.dtype != x.dtype:
        raise ValueError(
            f"w has dtype {w.dtype.name} and x has {x.dtype.name}; they must be equal: pass w.astype(x.dtype)"
        )
    if 0 in w.shape:
        raise ValueError(f"w is {shown(w)}; H and V must be at least 1")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels has dtype {labels.dtype.name}; labels must be integers: pass labels.astype(jnp.int32)"
        )
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels is {shown(labels)} and x is {shown(x)}; labels must have x's leading axes {list(x.shape[:-1])}"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights is {shown(weights)} and labels is {shown(labels)}; weights must have the shape of labels: "
            f"use jnp.broadcast_to(weights, labels.shape)"
        )
    if weights is not None and not jnp.issubdtype(weights.dtype, jnp.floating):
        raise ValueError(
            f"weights has dtype {weights.dtype.name}; weights must be floating: pass weights.astype(jnp.float32)"
        )
    if reduction not in _REDUCTIONS:
        known, hint = ", ".join(map(repr, _REDUCTIONS)), did_you_mean(reduction, _REDUCTIONS)
        raise ValueError(f"reduction={reduction!r} is not a reduction; use one of {known}{hint}")
    if jnp.ndim(z_loss) != 0:
        raise ValueError(f"z_loss has shape {jnp.shape(z_loss)}; it must be a scalar")
    if isinstance(z_loss, (int, float)) and z_loss < 0:
        raise ValueError(f"z_loss={z_loss} is negative; it must be 0 (off) or a small positive factor such as 1e-4")
    if soft_cap is not None:
        if not isinstance(soft_cap, (int, float, np.integer, np.floating)):
            raise ValueError(
                f"soft_cap={soft_cap!r} is not a Python number; it is built into the kernel, so it must be known when "
                f"traced: pass a float, or close over it"
            )
        if not 0 < soft_cap < float("inf"):
            raise ValueError(f"soft_cap={soft_cap} must be positive and finite; use None for no cap")
