"""Functions with a hand-written gradient that can be differentiated in forward mode and again.

`jax.custom_vjp` gives a function a hand-written gradient, and takes forward mode away from it. `with_derivatives` takes
the function's tangents too. They are one operation to JAX (`_linear_p`): forward mode evaluates it, by `tangent`, and
reverse mode transposes it, by `backward`. Reverse mode runs what it would run under `jax.custom_vjp`, and never traces
`tangent`. `forward` and `backward` are differentiated where a derivative is differentiated again, so they are plain JAX,
or functions like these.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.extend.core import Primitive, jaxpr_as_fun, unmapped_aval
from jax.interpreters import ad, batching, mlir

from tilewright.core.partitioning import axes_of_elements, compiler_cuts, explicit_axes, placed


def with_derivatives(
    function: Callable[..., Any],
    *,
    forward: Callable[..., Any],
    tangent: Callable[..., Any],
    backward: Callable[..., Any],
    differentiable: int = 1,
    static_argnums: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """`function`, with derivatives of every order in both modes with respect to its first `differentiable` arguments.

    The arguments at `static_argnums`, the last ones, are hashable. They are the first arguments of the two rules:

        forward(*arguments) -> outputs, saved
        tangent(*static, saved, tangents) -> tangents of the outputs
        backward(*static, saved, cotangents) -> cotangents of the first `differentiable` arguments, as a tuple

    `tangent` and `backward` are linear in their last argument, and each is the transpose of the other. Every output is of
    a floating dtype.
    """
    wrapped = jax.custom_jvp(function, nondiff_argnums=static_argnums)

    def rule(*given: Any) -> tuple[Any, Any]:
        *static, arguments, tangents = given
        outputs, saved = forward(*arguments, *static)
        rules = functools.partial(tangent, *static), functools.partial(backward, *static)
        return outputs, linear(*rules, saved, tuple(tangents[:differentiable]), outputs)

    wrapped.defjvp(rule)
    return wrapped


def forward_only(kernel: Callable[..., jax.Array], plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`kernel` where nothing is differentiated, and where it is, `plain`, which has the same arguments and derivatives.

    For a kernel that takes the place of several steps and saves nothing for a gradient: a program that is differentiated is
    then the one that has the steps, with what they save and what `jax.checkpoint` knows of them. It is an operation of its
    own (`_forward_only`) and no `jax.custom_jvp`: JAX maps the rule of that one by `jax.vmap`, and what has a gradient
    but no forward mode cannot be mapped within a derivative.
    """

    def wrapped(*given: Any) -> jax.Array:
        leaves, tree = jax.tree.flatten(given)

        def flat(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            return lambda *every: function(*jax.tree.unflatten(tree, every))

        return _forward_only_p().bind(*leaves, kernel=_Kernel(flat(kernel)), plain=flat(plain))

    return wrapped


class _Kernel:
    """A function of arrays. It is traced once, where it is used first, since its implementation is decided there: what is
    current may be another chip where the program is lowered. One that is differentiated is never traced.
    """

    def __init__(self, function: Callable[..., jax.Array]):
        self.function = function
        self._traced: Any = None

    def traced(self, *operands: Any) -> Any:
        if self._traced is None:
            self._traced = jax.make_jaxpr(self.function)(*operands)
            self.function = lambda *given: jaxpr_as_fun(self._traced)(*given)[0]
        return self._traced


def _run_kernel(*operands: Any, kernel: _Kernel, plain: Any) -> jax.Array:
    kernel.traced(*operands)
    return kernel.function(*operands)


def _forward_only_jvp(primals: Any, tangents: Any, *, kernel: Any, plain: Any) -> Any:
    return _jvp_of_moving(lambda every: plain(*every), primals, tangents)


def _forward_only_batch(operands: Any, axes: Any, *, kernel: _Kernel, plain: Any) -> Any:
    run, steps = (jax.vmap(function, in_axes=tuple(axes)) for function in (kernel.function, plain))
    return _forward_only_p().bind(*operands, kernel=_Kernel(run), plain=steps), 0


def _forward_only(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(_run_kernel)
    primitive.def_abstract_eval(lambda *avals, kernel, plain: kernel.traced(*avals).out_avals[0])
    mlir.register_lowering(primitive, mlir.lower_fun(_run_kernel, multiple_results=False))
    ad.primitive_jvps[primitive] = _forward_only_jvp
    batching.primitive_batchers[primitive] = _forward_only_batch
    return primitive


# A kernel that the compiler cuts needs the devices of the program where it is lowered. JAX looks for such operations, does
# not see what is inside of this one, and has no public name for the list of them.
_asks_compiler_p, _asks_none_p = _forward_only("tilewright_forward_only"), _forward_only("tilewright_forward_only_cut")
prim_requires_devices_during_lowering.add(_asks_compiler_p)


def _forward_only_p() -> Primitive:
    return _asks_compiler_p if compiler_cuts() else _asks_none_p


def linear(
    tangent: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any], saved: Any, tangents: Any, outputs: Any
) -> Any:
    """`tangent(saved, tangents)`, a linear function whose transpose is `backward`: the tangents of `outputs`."""
    saved_leaves, saved_tree = jax.tree.flatten(saved)
    leaves, tree = jax.tree.flatten(tangents)
    output_leaves, output_tree = jax.tree.flatten(outputs)
    mesh = jax.sharding.get_abstract_mesh()

    def evaluate(saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        # Where a program is lowered this is traced once more, outside of the mesh that was current here.
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.tree.leaves(tangent(jax.tree.unflatten(saved_tree, saved), jax.tree.unflatten(tree, tangents)))

    def transpose(saved: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        found = backward(jax.tree.unflatten(saved_tree, saved), jax.tree.unflatten(output_tree, cotangents))
        assert jax.tree.structure(found) == tree
        return jax.tree.leaves(found)

    results = _linear_p.bind(
        *saved_leaves,
        *leaves,
        evaluate=evaluate,
        transpose=transpose,
        num_saved=len(saved_leaves),
        avals=tuple(jax.typeof(x).to_tangent_aval() for x in output_leaves),
    )
    return jax.tree.unflatten(output_tree, results)


_linear_p = Primitive("tilewright_linear")
_linear_p.multiple_results = True


@_linear_p.def_impl
def _evaluate(*operands: Any, evaluate: Any, num_saved: int, **_: Any) -> list[Any]:
    return evaluate(operands[:num_saved], operands[num_saved:])


_linear_p.def_abstract_eval(lambda *_, avals, **__: list(avals))
mlir.register_lowering(_linear_p, mlir.lower_fun(_evaluate, multiple_results=True))


def _jvp(primals: Any, tangents: Any, *, evaluate: Any, num_saved: int, **params: Any) -> Any:
    params = {"evaluate": evaluate, "num_saved": num_saved, **params}
    saved, of_saved = primals[:num_saved], tangents[:num_saved]
    if all(isinstance(t, ad.Zero) for t in of_saved):
        again = [ad.instantiate_zeros(t) for t in tangents[num_saved:]]
        return _linear_p.bind(*primals, **params), _linear_p.bind(*saved, *again, **params)
    return _jvp_of_moving(lambda every: evaluate(every[:num_saved], every[num_saved:]), primals, tangents)


def _jvp_of_moving(function: Callable[[list[Any]], Any], primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    """`jax.jvp` of a function of a list of arrays. Those that are not differentiated get no tangent."""
    moving = [n for n, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def moved(values: list[Any]) -> Any:
        every = list(primals)
        for n, value in zip(moving, values, strict=True):
            every[n] = value
        return function(every)

    return jax.jvp(moved, ([primals[n] for n in moving],), ([tangents[n] for n in moving],))


def _transpose(cotangents: Any, *operands: Any, transpose: Any, num_saved: int, **_: Any) -> list[Any]:
    found = transpose(operands[:num_saved], [ad.instantiate_zeros(ct) for ct in cotangents])
    wanted = map(ad.is_undefined_primal, operands[num_saved:])
    return [None] * num_saved + [d if is_wanted else None for d, is_wanted in zip(found, wanted, strict=True)]


def _batch(operands: Any, axes: Any, *, evaluate: Any, transpose: Any, num_saved: int, avals: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    over = axes_of_elements([axis is not None for axis in axes], operands)
    for n in range(num_saved, len(operands)):
        if axes[n] is None:
            many = jnp.broadcast_to(operands[n], (size, *operands[n].shape))
            operands[n] = placed(many, [over, *explicit_axes(many)[1:]])
    saved_axes = [None if axis is None else 0 for axis in axes[:num_saved]]

    def mapped(function: Any) -> Any:
        many = jax.vmap(lambda saved, linear: function(saved, linear), in_axes=(saved_axes, 0), axis_size=size)
        return lambda saved, linear: many(list(saved), list(linear))

    results = _linear_p.bind(
        *operands,
        evaluate=mapped(evaluate),
        transpose=mapped(transpose),
        num_saved=num_saved,
        avals=tuple(unmapped_aval(size, 0, aval, over or None) for aval in avals),
    )
    return results, [0] * len(results)


ad.primitive_jvps[_linear_p] = _jvp
ad.primitive_transposes[_linear_p] = _transpose
batching.primitive_batchers[_linear_p] = _batch
