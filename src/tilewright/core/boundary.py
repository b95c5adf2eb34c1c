"""Identity operations at the edge of an op, which turn what the op cannot do into an error with the way out.

JAX meets an op with transformations that the op does not see coming: it is differentiated forward, or twice, or lowered
for another platform than it was traced for. Each of these reaches an operation here first, and its rule tells.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Unsupported(NotImplementedError):
    """A named implementation cannot run these arguments on this device. The text has the reason and the way out."""


def identity(name: str, lower: Callable[..., Any] = lambda ctx, x, **_: [x]) -> Primitive:
    """An operation that returns its operand. Its derivatives are for the caller to define."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lower)

    def batch(args: Any, dims: Any, /, **params: Any) -> Any:
        return primitive.bind(*args, **params), dims[0]

    batching.primitive_batchers[primitive] = batch
    return primitive


def _raise(message: str) -> Any:
    raise Unsupported(message)


# Forward mode. Reverse mode transposes the tangent of an input, and forward mode evaluates it.
_tangent_p = identity("tilewright_tangent", lambda ctx, x, *, message: _raise(message))
_tangent_p.def_impl(lambda x, *, message: _raise(message))
batching.primitive_batchers[_tangent_p] = lambda args, axes, *, message: _raise(message)  # jax.jacfwd
ad.deflinear2(_tangent_p, lambda cotangent, _, **params: [cotangent])
_reverse_only_p = identity("tilewright_reverse_only")


def _reverse_only_jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    (x,), (tangent,) = primals, tangents
    tangent = tangent if isinstance(tangent, ad.Zero) else _tangent_p.bind(tangent, message=message)
    return _reverse_only_p.bind(x, message=message), tangent


ad.primitive_jvps[_reverse_only_p] = _reverse_only_jvp


def reverse_mode_only(tree: Any, message: str) -> Any:
    """The arrays; differentiating them in forward mode raises `Unsupported(message)`."""
    return jax.tree.map(lambda x: _reverse_only_p.bind(x, message=message), tree)


# Second derivatives: the inside of a pass is never differentiated otherwise.
_once_p = identity("tilewright_once")


def _once_jvp(primals: Any, tangents: Any, *, message: str) -> Any:
    if all(isinstance(tangent, ad.Zero) for tangent in tangents):
        return primals[0], tangents[0]
    return _raise(message)


ad.primitive_jvps[_once_p] = _once_jvp


def not_differentiable(tree: Any, message: str) -> Any:
    """The arrays; differentiating with respect to them raises `Unsupported(message)`."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else _once_p.bind(x, message=message), tree)


# Several devices. Callbacks run in the order of one program.
def _lower_alone(ctx: Any, x: Any, *, message: str) -> list[Any]:
    if (getattr(ctx.module_context.axis_context, "num_devices", None) or 1) > 1:
        _raise(message)
    return [x]


_alone_p = identity("tilewright_one_device", _lower_alone)


def on_one_device(tree: Any, message: str) -> Any:
    """The arrays; compiling a program that the compiler partitions over several devices raises `Unsupported(message)`."""
    return jax.tree.map(lambda x: _alone_p.bind(x, message=message), tree)


# Platforms. `jax.export` and `lower(lowering_platforms=...)` choose them after an op has decided what runs.
def _lower_on(ctx: Any, x: Any, *, refused: tuple[tuple[str, str], ...]) -> list[Any]:
    messages = dict(refused)
    for platform in getattr(ctx, "platforms", None) or ctx.module_context.platforms:
        if platform in messages:
            _raise(messages[platform])
    return [x]


def _run_on(x: Any, *, refused: tuple[tuple[str, str], ...]) -> Any:
    x = jnp.asarray(x)  # A linear map may be given NumPy arrays.
    messages, platforms = dict(refused), {device.platform for device in x.devices()}
    for platform in platforms:
        if (lowered_as := {"gpu": "cuda"}.get(platform, platform)) in messages:
            _raise(messages[lowered_as])
    return x


_on_p = identity("tilewright_platforms", _lower_on)
_on_p.def_impl(_run_on)
ad.deflinear2(_on_p, lambda cotangent, _, **params: [_on_p.bind(cotangent, **params)])


def refused_on(x: Any, refused: dict[str, str]) -> Any:
    """The array; lowering it for a platform of `refused` raises `Unsupported` with the message for it."""
    return _on_p.bind(x, refused=tuple(refused.items()))
