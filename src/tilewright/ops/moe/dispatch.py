"""Rows sorted by expert and back. Values and gradients are gathers and sums in a fixed order.

Nothing here adds with atomics, which on GPUs sum in another order from run to run, and no array has a size of tokens times
experts. A pair p = n k + j is choice j of token n; `grouped_matmul` takes the pairs sorted by expert.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from tilewright.core.derivatives import with_derivatives
from tilewright.core.numerics import accumulator
from tilewright.core.target import current_chip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertOrder:
    """The pairs of token and choice, sorted by expert; those of one expert are in the order of the tokens."""

    order: Any
    """int32 [N k]: the pair of each sorted row."""
    inverse: Any
    """int32 [N, k]: the sorted row of each pair."""
    group_sizes: Any
    """int32 [E]: rows per expert. Rows after them belong to none."""


def sort_by_expert(experts: Int[Array, "N C"], num_experts: int) -> ExpertOrder:
    """The order of the pairs. Experts below 0 or from `num_experts` on are none: their pairs are last, in no group."""
    n, k = experts.shape
    flat = experts.reshape(n * k)
    none = (flat < 0) | (flat >= num_experts)
    # XLA's GPU backend has a radix sort for pairs with unsigned keys only, and narrow keys take it fewer passes.
    narrow = jnp.uint16 if num_experts < 2**16 else jnp.uint32
    keys = jnp.where(none, jnp.full_like(flat, num_experts), flat).astype(narrow)
    index = jax.lax.iota(jnp.int32, n * k)
    keys, order = jax.lax.sort((keys, index), num_keys=1, is_stable=True)
    _, inverse = jax.lax.sort((order.astype(jnp.uint32), index), num_keys=1)
    return ExpertOrder(order, inverse.reshape(n, k), count_sorted(keys, num_experts))


def count_sorted(keys: UInt[Array, " M"], num_experts: int) -> Int[Array, " E"]:
    """The number of times that each of 0, 1, ..., E - 1 occurs in sorted keys."""
    if not isinstance(keys.shape[0], int):
        # A search of a symbolic number of keys (`jax.export`) has no known number of steps. XLA fuses comparison and sum.
        number = jnp.arange(num_experts, dtype=keys.dtype)[:, None]
        return jnp.sum(keys[None] == number, axis=1, dtype=jnp.int32)
    # Unrolled, the binary search is one fusion; as a loop it would be a kernel per step.
    edges = jnp.searchsorted(keys, jnp.arange(num_experts + 1, dtype=keys.dtype), method="scan_unrolled")
    return jnp.diff(edges).astype(jnp.int32)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """The rows of x at an index that is always in range."""
    return x.at[index].get(mode="promise_in_bounds")


def _moves_pairs(x: jax.Array) -> bool:
    """Whether rows of x are better copied as 32 bits. On GPUs XLA copies an element at a time: 16 bits take 1.4 times as
    long.
    """
    return x.dtype == jnp.bfloat16 and x.shape[1] % 2 == 0 and current_chip((x,)).platform == "gpu"


def _as_pairs(x: jax.Array) -> jax.Array:
    """[N, D] of 16 bits as [N, D / 2] of 32."""
    return jax.lax.bitcast_convert_type(x.reshape(x.shape[0], -1, 2), jnp.uint32)


def _of_pairs(pairs: jax.Array, dtype: Any) -> jax.Array:
    return jax.lax.bitcast_convert_type(pairs, dtype).reshape(pairs.shape[0], -1)


def _copied_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """`_rows`, where they are written to memory as they are."""
    return _copied_pairs(x, index) if _moves_pairs(x) else _rows(x, index)


def _scaled_rows(x: jax.Array, index: jax.Array, scales: jax.Array) -> jax.Array:
    """The rows of x [N, D] at an index, each times its scale, in the dtype of x. Scales have that of its sums."""
    return _scaled_pairs(x, scales, index) if _moves_pairs(x) else _multiplied(x, scales, index)


def _multiplied(x: jax.Array, scales: jax.Array, index: jax.Array) -> jax.Array:
    return (_rows(x, index).astype(scales.dtype) * scales[:, None]).astype(x.dtype)


# Bits have no derivative: where these are differentiated, it is as the products that they compute.


@jax.custom_jvp
def _copied_pairs(x: jax.Array, index: jax.Array) -> jax.Array:
    """`_rows`, copied as 32 bits."""
    return _of_pairs(_rows(_as_pairs(x), index), x.dtype)


@_copied_pairs.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _copied_pairs(*primals), _rows(tangents[0], primals[1])


@jax.custom_jvp
def _scaled_pairs(x: jax.Array, scales: jax.Array, index: jax.Array) -> jax.Array:
    """`_multiplied`, copied as 32 bits."""
    pairs = _rows(_as_pairs(x), index)
    # The float32 values of the two halves, and the products' bfloat16 bits.
    values = pairs << 16, pairs & jnp.uint32(0xFFFF0000)
    products = (jax.lax.bitcast_convert_type(each, jnp.float32) * scales[:, None] for each in values)
    low, high = (jax.lax.bitcast_convert_type(each.astype(x.dtype), jnp.uint16).astype(jnp.uint32) for each in products)
    return _of_pairs(low | (high << 16), x.dtype)


@_scaled_pairs.defjvp
def _(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, scales, index = primals
    return _scaled_pairs(*primals), jax.jvp(lambda x, scales: _multiplied(x, scales, index), (x, scales), tangents[:2])[
        1
    ]


def _dispatch(x: Float[Array, "N D"], sorting: ExpertOrder) -> Float[Array, "M D"]:
    """Each pair's row of x, sorted by expert."""
    return _copied_rows(x, sorting.order // sorting.inverse.shape[1])


def _dispatch_save(x: jax.Array, sorting: ExpertOrder) -> tuple[jax.Array, ExpertOrder]:
    return _dispatch(x, sorting), sorting


def _dispatch_tangent(sorting: ExpertOrder, tangents: tuple[jax.Array]) -> jax.Array:
    return _dispatch(tangents[0], sorting)


def _dispatch_pull_back(sorting: ExpertOrder, d_rows: jax.Array) -> tuple[jax.Array]:
    """The sum of the gradients of a token's pairs, in float32."""
    total = None
    for choice in range(sorting.inverse.shape[1]):
        own = _rows(d_rows, sorting.inverse[:, choice]).astype(accumulator(d_rows.dtype))  # [N, D]
        total = own if total is None else total + own
    assert total is not None
    return (total.astype(d_rows.dtype),)


dispatch = with_derivatives(_dispatch, forward=_dispatch_save, tangent=_dispatch_tangent, backward=_dispatch_pull_back)


def _combine(rows: Float[Array, "M D"], weights: Float[Array, "N C"], sorting: ExpertOrder) -> Float[Array, "N D"]:
    """The weighted sum of a token's rows, in float32 and in the order of its choices, in the dtype of the rows."""
    accumulate = accumulator(rows.dtype)
    total = None
    for choice in range(weights.shape[1]):
        own = _rows(rows, sorting.inverse[:, choice]).astype(accumulate)  # [N, D]
        own = own * weights[:, choice, None].astype(accumulate)
        total = own if total is None else total + own
    assert total is not None
    return total.astype(rows.dtype)


def _combine_save(rows: jax.Array, weights: jax.Array, sorting: ExpertOrder) -> tuple[jax.Array, Any]:
    return _combine(rows, weights, sorting), (rows, weights, sorting)


def _combine_tangent(saved: Any, tangents: tuple[jax.Array, jax.Array]) -> jax.Array:
    rows, weights, sorting = saved
    return _combine(tangents[0], weights, sorting) + _combine(rows, tangents[1], sorting)


def _combine_pull_back(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, weights, sorting = saved
    k, accumulate = weights.shape[1], accumulator(rows.dtype)
    of_row = _rows(weights.reshape(-1), sorting.order).astype(accumulate)  # [M]
    d_rows = _scaled_rows(dy, sorting.order // k, of_row)  # [M, D]
    wide = dy.astype(accumulate)
    d_weights = [
        jnp.sum(_rows(rows, sorting.inverse[:, choice]).astype(accumulate) * wide, axis=1) for choice in range(k)
    ]
    return d_rows, jnp.stack(d_weights, axis=1).astype(weights.dtype)


combine = with_derivatives(
    _combine, forward=_combine_save, tangent=_combine_tangent, backward=_combine_pull_back, differentiable=2
)
