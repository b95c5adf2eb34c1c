"""Mixture of experts: `moe_route`, `moe_sort`, `moe_dispatch`, `moe_combine`, and the losses of the router.

weights, experts = moe_route(logits, k=8)            # [N, E] -> [N, k] each
sorting = moe_sort(experts, num_experts)             # the pairs of token and choice, by expert
rows = moe_dispatch(x, sorting)                      # [N, D] -> [N k, D]
h = grouped_matmul(rows, gate_up, sorting.group_sizes, activation="swiglu")
y = moe_combine(grouped_matmul(h, down, sorting.group_sizes), weights, sorting)  # [N, D]
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.arguments import FLOATING, is_integer, shown
from tilewright.core.manual_axes import vary_alike
from tilewright.core.partitioning import axes_named, explicit_axes, run_explicit, run_on_parts
from tilewright.ops.moe import dispatch, losses
from tilewright.ops.moe.call import RouteCall
from tilewright.ops.moe.dispatch import ExpertOrder as ExpertOrder
from tilewright.ops.moe.routing import route

Scoring = Literal["softmax", "sigmoid"]
SCORINGS = ("softmax", "sigmoid")

__all__ = [
    "ExpertOrder",
    "check_routing",
    "moe_combine",
    "moe_dispatch",
    "moe_load_balance_loss",
    "moe_route",
    "moe_sort",
    "moe_z_loss",
]


def moe_route(
    logits: Float[Array, "*tokens E"],
    k: int,
    *,
    scoring: Scoring = "softmax",
    bias: Float[Array, " E"] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: tuple[int, int] | None = None,
) -> tuple[Float[Array, "*tokens k"], Int[Array, "*tokens k"]]:
    r"""Chooses k experts per token, and their weights.

        s = softmax(l) or sigmoid(l)
        e_1, ..., e_k = the k largest of s + bias
        w_j = scale * s[e_j],  divided by sum_j s[e_j] where `normalize`

    Everything is computed in float32. Experts are in descending order of s + bias; of equal ones the lowest index comes
    first. Gradients flow through the weights to the logits, and not through the choice.

    Args:
      logits: [..., E], float32 or bfloat16.
      k: experts per token.
      scoring: "softmax" over all experts (Qwen3), or "sigmoid" of each (DeepSeek-V3, Kimi Linear).
      bias: [E], added to the scores for the choice only, never to the weights. It takes no gradient.
      normalize: whether the weights of a token are divided by their sum (for "sigmoid" by the sum + 1e-20).
      scale: multiplies the weights: `routed_scaling_factor` of DeepSeek and Kimi.
      groups: (number of groups, groups kept): experts are chosen from the best groups only. A group is E / groups
        neighbouring experts, and its score is the sum of its two best s + bias.

    Returns:
      weights, float32 [..., k], and experts, int32 [..., k]. A token with a NaN among its logits, or +inf with "softmax",
      which is NaN there, has NaN weights; a NaN in the bias makes all weights NaN. A logit of -inf has the score 0; with
      "softmax" the weights are NaN where all logits are -inf, and where they are normalised and all the chosen ones are.
    """
    logits = jnp.asarray(logits)
    if logits.ndim < 1 or logits.dtype.name not in FLOATING:
        raise ValueError(f"logits is {shown(logits)}; it must be [..., E] of float32 or bfloat16")
    num_experts = logits.shape[-1]
    check_routing(num_experts, k, scoring=scoring, groups=groups)
    if not isinstance(normalize, bool | np.bool_):
        raise ValueError(f"normalize={normalize!r} is not True or False; pass a bool that is known when traced")
    if not isinstance(scale, int | float | np.integer | np.floating):
        raise ValueError(
            f"scale={scale!r} must be a number that is known when traced; multiply the weights by an array"
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (num_experts,):
            raise ValueError(f"bias is {shown(bias)} and logits is {shown(logits)}; bias must be [E] = [{num_experts}]")
        if bias.dtype.name not in FLOATING:
            raise ValueError(f"bias is {shown(bias)}; it must be float32 or bfloat16: bias.astype(jnp.float32)")
    call = RouteCall(
        logits=logits,
        bias=bias,
        k=int(k),
        scoring=scoring,
        normalize=bool(normalize),
        scale=float(scale),
        groups=None if groups is None else (int(groups[0]), int(groups[1])),
    )

    def run(part: Any) -> tuple[jax.Array, jax.Array]:
        return route(part.varying_alike())

    return run_explicit("moe_route", call, run)


def check_routing(num_experts: int, k: int, *, scoring: str, groups: tuple[int, int] | None) -> None:
    """Raises where k experts cannot be chosen so from `num_experts`."""
    if scoring not in SCORINGS:
        raise ValueError(f"scoring={scoring!r} is not a scoring; use {' or '.join(map(repr, SCORINGS))}")
    if isinstance(k, jax.Array):
        raise ValueError(
            f"k is {shown(k)}; it must be a Python integer that is known when traced, since it is the size of an axis: "
            f"jax.jit(..., static_argnames='k')"
        )
    if not _positive(k) or k > num_experts:
        raise ValueError(
            f"k={k!r} experts cannot be chosen from E={num_experts}; use an integer from 1 to {num_experts}"
        )
    if groups is None:
        return
    if not isinstance(groups, tuple | list) or len(groups) != 2 or not all(map(_positive, groups)):
        raise ValueError(f"groups={groups!r} must be (number of groups, groups kept), such as (8, 4); or None for none")
    count, kept = groups
    if num_experts % count:
        raise ValueError(
            f"groups={tuple(groups)}: {count} groups do not divide E={num_experts} experts; use a divisor of {num_experts}"
        )
    if kept > count:
        raise ValueError(f"groups={tuple(groups)} keeps {kept} of {count} groups; keep at most {count}")
    if kept * (num_experts // count) < k:
        raise ValueError(
            f"groups={tuple(groups)} leaves {kept * (num_experts // count)} of E={num_experts} experts to choose k={k} "
            f"from; keep at least {-(-k * count // num_experts)} groups"
        )


def moe_sort(experts: Int[Array, "N k"], num_experts: int) -> ExpertOrder:
    """The order of the N k pairs of token and choice by expert, for `moe_dispatch`, `grouped_matmul` and `moe_combine`.

    The sort is stable: the pairs of one expert stay in the order of the tokens. Pairs whose expert is below 0 or at least
    `num_experts` are last and in no group: a device that has some of the experts passes `experts - first` and their number.

    Args:
      experts: [N, k] integers, as `moe_route` returns them.
      num_experts: E.

    Returns:
      an `ExpertOrder`: `order` int32 [N k], the pair n k + j of each sorted row; `inverse` int32 [N, k], the sorted row of
      each pair; `group_sizes` int32 [E].
    """
    experts = jnp.asarray(experts)
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts is {shown(experts)}; it must be [N, k] integers, the second result of moe_route")
    if experts.ndim != 2:
        raise ValueError(f"experts is {shown(experts)}; it must be [N, k] integers: experts.reshape(-1, k)")
    if not _positive(experts.shape[1]):
        raise ValueError(f"experts is {shown(experts)}; each token has at least one expert")
    if not _positive(num_experts):
        raise ValueError(f"num_experts={num_experts!r} must be a positive integer: the number of groups")
    _refuse_explicit("moe_sort", experts=experts)
    return dispatch.sort_by_expert(experts, int(num_experts))


def moe_dispatch(x: Float[Array, "N D"], sorting: ExpertOrder) -> Float[Array, "M D"]:
    """The rows of x by expert: row r is x[order[r] // k], for each of the M = N k pairs.

    The gradient of x is the sum over a token's pairs, in float32 and in the order of its choices.

    Args:
      x: [N, D], float32 or bfloat16.
      sorting: of `moe_sort`.

    Returns:
      [N k, D] of x's dtype.
    """
    x = jnp.asarray(x)
    _check_sorting(sorting)
    n = sorting.inverse.shape[0]
    if x.ndim != 2 or x.shape[0] != n:
        raise ValueError(f"x is {shown(x)}; it must be [N, D] with N={n}, as experts had in moe_sort: x.reshape(-1, D)")
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: x.astype(jnp.bfloat16)")
    return _run_on_columns("moe_dispatch", dispatch.dispatch, x=x, sorting=sorting)


def moe_combine(rows: Float[Array, "M D"], weights: Float[Array, "N k"], sorting: ExpertOrder) -> Float[Array, "N D"]:
    r"""The weighted sum of each token's rows, from rows that are sorted by expert.

        y_n = sum_j weights[n, j] rows[inverse[n, j]]

    It is summed in float32 and in the order of the choices: the same bits in every run, in the gradients too.

    Args:
      rows: [N k, D], floating.
      weights: [N, k], as `moe_route` returns them.
      sorting: of `moe_sort`.

    Returns:
      [N, D] of the rows' dtype. Gradients flow to rows and weights.
    """
    rows, weights = jnp.asarray(rows), jnp.asarray(weights)
    _check_sorting(sorting)
    n, k = sorting.inverse.shape
    if rows.ndim != 2 or rows.shape[0] != n * k or rows.dtype.name not in FLOATING:
        raise ValueError(
            f"rows is {shown(rows)}; it must be [N k, D] = [{n * k}, D], floating, as moe_dispatch returns it"
        )
    if weights.shape != (n, k) or weights.dtype.name not in FLOATING:
        raise ValueError(
            f"weights is {shown(weights)}; it must be [N, k] = [{n}, {k}], floating: weights.reshape(-1, k)"
        )
    return _run_on_columns("moe_combine", dispatch.combine, rows=rows, weights=weights, sorting=sorting)


def moe_load_balance_loss(
    logits: Float[Array, "*tokens E"],
    experts: Int[Array, "*tokens k"],
    *,
    scoring: Scoring = "softmax",
    mask: Bool[Array, "*tokens"] | Int[Array, "*tokens"] | None = None,
) -> Float[Array, ""]:
    r"""The auxiliary loss of Switch Transformer, for k experts per token, as Qwen3-MoE is trained with.

        E sum_e f_e P_e
        f_e = (pairs of a token and a choice that go to e) / tokens,   P_e = mean over tokens of the probability of e

    It is k where all experts are equally loaded. f takes no gradient. Several layers stacked along a leading axis count as
    more tokens, which is how transformers' `load_balancing_loss_func` joins them.

    Args:
      logits: [..., E], of the router.
      experts: [..., k], as `moe_route` returns them.
      scoring: how a probability is made of logits: softmax, or sigmoids divided by their sum.
      mask: [...] booleans or 0 and 1: which tokens count. The others take no gradient, whatever their logits are. None
        counts all of them.

    Returns:
      a float32 scalar, 0 where no token counts. Inside `jax.shard_map` it is the loss of a shard's own tokens.
    """
    logits, experts, mask = _check_loss(logits, mask, scoring, experts)
    logits, experts, mask = _varying_alike(logits, experts, mask)
    return losses.load_balance_loss(logits, experts, scoring, mask)


def moe_z_loss(
    logits: Float[Array, "*tokens E"],
    *,
    mask: Bool[Array, "*tokens"] | Int[Array, "*tokens"] | None = None,
) -> Float[Array, ""]:
    """The mean of logsumexp(logits)^2 over tokens (ST-MoE), which keeps the router's logits small.

    Args:
      logits: [..., E], of the router.
      mask: [...] booleans or 0 and 1: which tokens count. The others take no gradient, whatever their logits are. None
        counts all of them.

    Returns:
      a float32 scalar, 0 where no token counts.
    """
    logits, _, mask = _check_loss(logits, mask, "softmax")
    return losses.z_loss(*_varying_alike(logits, mask))


def _check_loss(logits: Any, mask: Any, scoring: str, experts: Any = None) -> tuple[Any, Any, Any]:
    logits = jnp.asarray(logits)
    if scoring not in SCORINGS:
        raise ValueError(f"scoring={scoring!r} is not a scoring; use {' or '.join(map(repr, SCORINGS))}")
    if logits.ndim < 2 or logits.dtype.name not in FLOATING:
        raise ValueError(f"logits is {shown(logits)}; it must be [..., E] of float32 or bfloat16, with a row per token")
    if experts is not None:
        experts = jnp.asarray(experts)
        if experts.shape[:-1] != logits.shape[:-1] or not jnp.issubdtype(experts.dtype, jnp.integer):
            shape = ", ".join(map(str, (*logits.shape[:-1], "k")))
            raise ValueError(
                f"experts is {shown(experts)} and logits is {shown(logits)}; experts must be [{shape}] integers, as "
                f"moe_route returns them for these logits"
            )
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.shape != logits.shape[:-1] or jnp.issubdtype(mask.dtype, jnp.inexact):
            raise ValueError(
                f"mask is {shown(mask)}; it must be {list(logits.shape[:-1])} booleans or integers, one per token of logits"
            )
        mask = mask.astype(bool)
    return logits, experts, mask


def _check_sorting(sorting: Any) -> None:
    if not isinstance(sorting, ExpertOrder):
        raise ValueError(f"sorting is a {type(sorting).__name__}; pass what moe_sort(experts, num_experts) returns")


def _positive(value: Any) -> bool:
    return is_integer(value) and bool(value > 0)


def _refuse_explicit(name: str, *, columns: bool = False, **arrays: jax.Array) -> None:
    """Tokens are sorted as a whole: on Explicit mesh axes that is for the caller to say.

    `columns`: whether the columns of the first array may be sharded.
    """
    for number, (argument, x) in enumerate(arrays.items()):
        every = explicit_axes(x)
        over = tuple(axis for axes in (every[:1] if columns and number == 0 else every) for axis in axes)
        if over:
            raise ValueError(
                f"{name}: {argument} is sharded over {axes_named(over)}, and rows are sorted among all tokens; sort each "
                f"device's own tokens inside jax.shard_map, as tilewright.layers.MoE does"
            )


def _run_on_columns(
    name: str, function: Callable[..., jax.Array], sorting: ExpertOrder, **arrays: jax.Array
) -> jax.Array:
    """`function` of the arrays and the sorting.

    Columns of the first array may be sharded over Explicit mesh axes: each device has the rows of its own columns. A
    sharding along any other axis is an error.
    """
    _refuse_explicit(name, columns=True, **arrays)
    columns = explicit_axes(next(iter(arrays.values())))[1]

    def run(*given: Any) -> jax.Array:
        return function(*_varying_alike(*given[: len(arrays)], ExpertOrder(*given[len(arrays) :])))

    leaves = (*arrays.values(), sorting.order, sorting.inverse, sorting.group_sizes)
    return run_on_parts(run, leaves, P(None, columns)) if columns else run(*leaves)


def _varying_alike(*values: Any) -> Any:
    """The arrays in `values`, each varying over every mesh axis that any of them varies over (`jax.shard_map`)."""
    leaves, tree = jax.tree.flatten(values)
    return tree.unflatten(vary_alike(*leaves))
