"""Arrays inside `jax.shard_map`: the mesh axes that a value varies over, and how an op takes such values.

Inside `shard_map` a replicated weight and a sharded activation have different types. An op with a hand-written gradient
must see one type, or the gradient of the weight would be that of a single shard. So every array of a call is cast to
vary alike before the op (`vary_alike`): the transpose of that cast is the sum over the mesh axis.

Implementations themselves see values without such types. A pass has no collectives, so the types say nothing there, and
kernels, interpreters and loops that start from constants would have to respect them. `without_axes` removes them in
front of a pass, and `with_axes` brings them back behind it. Each is the other's transpose: no device sums anything.
"""

from typing import Any

import jax
from jax.interpreters import ad

from tilewright.core.boundary import identity


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The mesh axes that any of the arrays varies over; empty outside `shard_map`."""
    return frozenset().union(*(jax.typeof(a).manual_axis_type.varying for a in arrays if a is not None))


def vary_over(array: Any, axes: frozenset[str]) -> Any:
    """`array`, cast to vary over all of `axes`."""
    missing = axes - jax.typeof(array).manual_axis_type.varying
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


def vary_alike(*arrays: Any) -> tuple[Any, ...]:
    """The arrays, each cast to vary over every mesh axis that any of them varies over."""
    axes = varying_axes(*arrays)
    return tuple(vary_over(a, axes) for a in arrays) if axes else arrays


def without_axes(array: Any) -> Any:
    """`array`, with the type of a value that varies over no mesh axis."""
    if isinstance(array, jax.ShapeDtypeStruct) or not varying_axes(array):
        return array
    return _without_axes_p.bind(array)


# JAX has no public operation for this: with its check off it does the same inside of kernels.
_without_axes_p = identity("without_axes")
_without_axes_p.def_abstract_eval(lambda x: x.update(manual_axis_type=type(x.manual_axis_type)()))


def with_axes(array: Any, axes: frozenset[str]) -> Any:
    """The inverse of `without_axes`: `array`, with the type of a value that varies over `axes`."""
    return _with_axes_p.bind(array, axes=axes) if axes else array


_with_axes_p = identity("tilewright_with_axes")
_with_axes_p.def_abstract_eval(lambda x, axes: x.update(manual_axis_type=type(x.manual_axis_type)(varying=axes)))
ad.deflinear2(_without_axes_p, lambda cotangent, x: [with_axes(cotangent, x.aval.manual_axis_type.varying)])
ad.deflinear2(_with_axes_p, lambda cotangent, x, axes: [without_axes(cotangent)])


def output_like(shape: tuple[int, ...], dtype: Any, like: Any) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's output that varies over the same mesh axes as `like`, which JAX asks to be said."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
