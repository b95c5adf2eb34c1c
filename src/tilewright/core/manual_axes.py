"""Arrays inside `shard_map`: which mesh axes a value varies over, and how to make several values agree.

Inside `shard_map` a replicated weight and a sharded activation have different types. An op with a hand-written gradient
must see one type, or its weight gradient would be one shard's own. Casting the weight to "varying" before the op does
it: the transpose of that cast is the sum over the mesh axis.
"""

from typing import Any

import jax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays if a is not None))


def vary_over(array: Any, axes: frozenset[str]) -> Any:
    """`array` as a value that varies over all of `axes`."""
    if array is None:
        return array
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each cast to vary over every mesh axis that any of them varies over."""
    axes = varying_axes(*arrays)
    return tuple(vary_over(a, axes) for a in arrays) if axes else arrays


def output_like(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """A `pallas_call` output that varies over the mesh axes that `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
