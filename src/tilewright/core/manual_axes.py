"""Arrays inside `shard_map`: the mesh axes that a value varies over, and casts that make several values agree.

Inside `shard_map` a replicated weight and a sharded activation have different types. An op with a hand-written gradient
must see one type, or the weight gradient would be that of a single shard. So the weight is cast to "varying" before the
op: the transpose of that cast is the sum over the mesh axis.
"""

from typing import Any

import jax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays if a is not None))


def vary_over(array: Any, axes: frozenset[str]) -> Any:
    """`array`, cast to vary over all of `axes`."""
    if array is None:
        return array
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each cast to vary over every mesh axis that any of them varies over."""
    axes = varying_axes(*arrays)
    return tuple(vary_over(a, axes) for a in arrays) if axes else arrays


def output_like(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The shape of a `pallas_call` output that varies over the same mesh axes as `like`."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
