"""The one wrapper that makes an implementation differentiable, batch-aware and partitionable.

`run` takes a call through an implementation. Under `jax.grad` its backward pass runs, from what its forward pass saved.
Passes that are plain JAX, or stand for such a pass, are differentiated by JAX in forward mode and for second derivatives
(`run_plain`).
Under `jax.vmap` the calls become one call with a larger batch wherever that is the same thing (`can_merge`), and the
config is chosen for that larger call: JAX's own rule would give a kernel a loop, or one more grid axis, around blocks
that were chosen for one element. Where the compiler partitions a program, each device runs a pass on its part of the
call (core/partitioning.py).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jax.ad_checkpoint import checkpoint_name

from tilewright.core.boundary import not_differentiable
from tilewright.core.call import Call, Shard, Static, batch_size, can_merge, element_of, merge, merge_array, split_array
from tilewright.core.derivatives import with_derivatives
from tilewright.core.implementation import KERNEL_PLATFORM, Implementation
from tilewright.core.manual_axes import varying_axes, with_axes, without_axes
from tilewright.core.partitioning import (
    Axes,
    CallPass,
    Letters,
    axes_of_compiler,
    axes_of_elements,
    run_elements,
    run_partitioned,
    run_replicated,
)


@dataclass(frozen=True)
class Settled:
    """What runs a call: an implementation, and the decision (core/dispatch.py) that took it, which `explain` shows."""

    implementation: Implementation
    decision: Any


@runtime_checkable
class Request(Protocol):
    """Everything static about a call that was asked for; hashable. It decides what runs the call (dispatch)."""

    @property
    def name(self) -> str:
        """The op's."""
        ...

    def settle(self, call: Call, *, differentiated: bool, chosen: str | None = None) -> Settled:
        """`chosen` names the implementation that ran the forward pass, where the backward pass is decided."""
        ...

    def note(self, decision: Any) -> None:
        """Shows a decision to `explain` and the log."""
        ...

    def forget(self, decision: Any) -> None:
        """Takes back what was noted: the call became part of a larger one."""
        ...


def run(request: Request, call: Call) -> Any:
    """The outputs of a call. Differentiable, and merged into a larger call under `jax.vmap`."""
    return _differentiable(request, call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(request: Request, call: Call) -> Any:
    return _forward(request, call, save=False)[0]


def _save(request: Request, call: Call) -> tuple[Any, Any]:
    outputs, saved, chosen = _forward(request, call, save=True)
    if chosen.value in KERNEL_PLATFORM:
        # In a loop over layers XLA for GPUs would run a kernel twice: for its result, and to write what is saved of it.
        outputs, saved = jax.lax.optimization_barrier((outputs, saved))
    # A policy of `jax.checkpoint` may keep these by the op's name: the backward pass then runs without the forward pass.
    outputs, saved = jax.tree.map(lambda x: checkpoint_name(x, request.name), (outputs, saved))
    backward = request.settle(call, differentiated=True, chosen=chosen.value).implementation.backward
    reads = backward.reads if backward is not None else ()
    dropped = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype)
        for name, value in call.given().items()
        if reads is not None and name not in reads
    }
    kept = call.with_arrays(dict.fromkeys(dropped))
    return outputs, (kept, Static(tuple(dropped.items())), saved, chosen)


def _pull_back(request: Request, residuals: Any, cotangents: Any) -> tuple[Any]:
    call, dropped, saved, chosen = residuals
    return (_backward(request, chosen.value, dict(dropped.value), call, saved, cotangents),)


_differentiable.defvjp(_save, _pull_back)


def run_plain(request: Request, call: Call) -> Any:
    """`run`, for an implementation whose passes JAX can differentiate: in forward mode too, and any number of times."""
    arrays = {name: x for name, x in call.given().items() if name in call.differentiable_arrays}
    return _plain(arrays, call.with_arrays(dict.fromkeys(arrays)), request)


def _plain_run(arrays: dict[str, Any], rest: Call, request: Request) -> Any:
    return _forward(request, rest.with_arrays(arrays), save=False)[0]


def _plain_save(arrays: dict[str, Any], rest: Call, request: Request) -> tuple[Any, Any]:
    outputs, saved, chosen = _saving(arrays, rest, request)
    outputs, saved = jax.tree.map(lambda x: checkpoint_name(x, request.name), (outputs, saved))
    return outputs, (arrays, rest, saved, chosen)


def _plain_tangent(request: Request, residuals: Any, tangents: Any) -> Any:
    arrays, rest, _, _ = residuals

    def outputs(arrays: dict[str, Any]) -> Any:
        return _forward_again(request, rest.with_arrays(arrays), save=False)[0]

    return jax.jvp(outputs, (arrays,), tangents)[1]


def _plain_pull_back(request: Request, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    arrays, rest, saved, chosen = residuals
    return (_gradient(arrays, saved, cotangents, rest, request, chosen.value),)


_plain = with_derivatives(
    _plain_run, forward=_plain_save, tangent=_plain_tangent, backward=_plain_pull_back, static_argnums=(2,)
)


# What is differentiated is a pass by itself: without its rule for vmap, which JAX cannot differentiate in reverse mode.


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _saving(arrays: dict[str, Any], rest: Call, request: Request) -> tuple[Any, Any, Static]:
    return _forward(request, rest.with_arrays(arrays), save=True)


@_saving.defjvp
def _saving_tangent(request: Request, primals: Any, tangents: Any) -> tuple[Any, Any]:
    arrays, rest = primals
    return jax.jvp(lambda arrays: _forward_again(request, rest.with_arrays(arrays), save=True), (arrays,), tangents[:1])


@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _gradient(
    arrays: dict[str, Any], saved: Any, cotangents: Any, rest: Call, request: Request, chosen: str
) -> dict[str, Any]:
    return _backward(request, chosen, {}, rest.with_arrays(arrays), saved, cotangents).given()


@_gradient.defjvp
def _gradient_tangent(request: Request, chosen: str, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *moving, rest = primals

    def gradient(arrays: dict[str, Any], saved: Any, cotangents: Any) -> dict[str, Any]:
        call, one = rest.with_arrays(arrays), _BackwardPass(request, chosen, differentiated=True)
        settled = one.settle(call)
        found = _execute(one, call, (saved, cotangents), settled, partitioned=False, differentiated=True)
        return found.given()

    return jax.jvp(gradient, tuple(moving), tangents[:3])


def _forward_again(request: Request, call: Call, *, save: bool) -> tuple[Any, Any, Static]:
    one = _ForwardPass(request, save)
    settled = one.settle(call)
    outputs, saved = _execute(one, call, (), settled, partitioned=False, differentiated=True)
    return outputs, saved, Static(settled.decision.implementation)


@dataclass(frozen=True)
class _ForwardPass:
    """The forward pass of a call, or of one device's part. Its results are the outputs and what is saved."""

    request: Request
    save: bool
    sums: ClassVar[bool] = False

    def settle(self, call: Call) -> Settled:
        return self.request.settle(call, differentiated=self.save)

    def run(self, call: Call, operands: Any, settled: Settled, shard: Shard | None = None) -> Any:
        launch, part = settled.decision.forward.launch, call if shard is None else shard.compiled_call
        with launch.active():
            results = settled.implementation.forward.run(part.flattened(), launch, save=self.save)
        outputs, saved = call.unflattened(results)
        outputs, saved = (outputs, saved) if shard is None else shard.combine(outputs, saved)
        return outputs, saved if self.save else None

    def operand_letters(self, axes: Axes, operands: Any, settled: Settled) -> list[Letters]:
        return []

    def result_letters(self, axes: Axes, results: Any, settled: Settled) -> list[Letters]:
        outputs, saved = results
        return [*axes.of_outputs(outputs), *axes.of_leaves(saved, settled.implementation.forward.saved)]


@dataclass(frozen=True)
class _BackwardPass:
    """The backward pass of a call that `chosen` ran forward. `operands` are what was saved and the cotangents.

    `differentiated`: JAX differentiates this pass.
    """

    request: Request
    chosen: str
    differentiated: bool = False
    sums: ClassVar[bool] = True

    def settle(self, call: Call) -> Settled:
        return self.request.settle(call, differentiated=True, chosen=self.chosen)

    def run(self, call: Call, operands: Any, settled: Settled, shard: Shard | None = None) -> Any:
        saved, cotangents = operands
        backward, launch = settled.implementation.backward, settled.decision.backward.launch
        assert backward is not None
        backward = (backward.differentiated_as or backward) if self.differentiated else backward
        part = call if shard is None else shard.compiled_call
        cotangents = cotangents if shard is None else shard.cotangents(cotangents)
        with launch.active():
            gradients = backward.run(part.flattened(), *call.flattened_leaves((saved, cotangents)), launch)
        return call.unflattened(gradients)

    def operand_letters(self, axes: Axes, operands: Any, settled: Settled) -> list[Letters]:
        saved, cotangents = operands
        return [*axes.of_leaves(saved, settled.implementation.forward.saved), *axes.of_outputs(cotangents)]

    def result_letters(self, axes: Axes, results: Any, settled: Settled) -> list[Letters]:
        return [axes.arrays[name] for name in results.given()]


def _execute(
    one: CallPass, call: Call, operands: Any, settled: Settled, *, partitioned: bool, differentiated: bool = False
) -> Any:
    """Runs a pass on values without mesh axes in their types; its results vary over those of the arguments.

    `differentiated`: whether JAX may differentiate the pass itself.
    """
    arrays = [x for x in jax.tree.leaves((call, operands)) if not isinstance(x, jax.ShapeDtypeStruct)]
    axes = varying_axes(*arrays)
    call, operands = jax.tree.map(without_axes, (call, operands))
    if not differentiated:
        call, operands = not_differentiable((call, operands), _once_only(settled.decision))
    kernel = settled.decision.implementation in KERNEL_PLATFORM
    left = axes_of_compiler()
    if left and kernel:
        results = run_replicated(one, call, operands, settled, left)
    elif partitioned and left is None and (kernel or call.rows):
        # The compiler partitions plain JAX by itself, but cannot keep two sharded axes apart that are flattened into rows.
        results = run_partitioned(one, call, operands, settled)
    else:
        results = one.run(call, operands, settled)
    return jax.tree.map(lambda x: with_axes(x, axes), results)


def _once_only(decision: Any) -> str:
    return (
        f"{decision.op}: implementation={decision.implementation!r} has no second derivative; use "
        f"implementation={decision.request.op.plainly_differentiable!r}"
    )


def _forward(request: Request, call: Call, *, save: bool) -> tuple[Any, Any, Static]:
    """Outputs, what was saved, and the name of the implementation that ran."""
    noted: list[Any] = []

    def body(call: Call, *, partitioned: bool = True) -> tuple[Any, Any, Static]:
        settled = request.settle(call, differentiated=save)
        request.note(settled.decision)
        noted.append(settled.decision)
        if settled.implementation.backward is None:
            # Plain JAX, of which every transformation is JAX's own.
            launch, run = settled.decision.forward.launch, settled.implementation.forward.run
            with launch.active():

                def function(call: Call) -> Any:
                    return run(call, launch, save=False)[0]

                outputs, saved = jax.vjp(function, call) if save else (function(call), None)
        else:
            outputs, saved = _execute(_ForwardPass(request, save), call, (), settled, partitioned=partitioned)
        return outputs, saved, Static(settled.decision.implementation)

    @jax.custom_batching.custom_vmap
    def function(call: Call) -> tuple[Any, Any, Static]:
        return body(call)

    @function.def_vmap
    def _(size: int, batched: Any, call: Call) -> tuple[Any, Any]:
        for decision in noted:
            request.forget(decision)
        if over := axes_of_elements(batched, (call,)):
            results = run_elements(functools.partial(_forward, request, save=save), batched, (call,), over)
            return results, jax.tree.map(lambda _: True, results)
        joined, flags = call.join_shared(batched[0], size)
        element = element_of(joined, flags)
        settled = request.settle(element, differentiated=save)
        if can_merge(element, flags, backward=False) and not (save and settled.implementation.backward is None):
            larger, chosen = merge(joined, flags, size), settled.decision.implementation
            # The backward pass is this implementation's, and another one saves other things.
            if not save or request.settle(larger, differentiated=True).decision.implementation == chosen:
                outputs, saved, _ = _forward(request, larger, save=save)
                results = jax.tree.map(lambda x: split_array(x, size, call.vmapped), (outputs, saved, Static(chosen)))
                return results, jax.tree.map(lambda _: True, results)
        return _by_jax(functools.partial(body, partitioned=False), size, batched, (call,))

    return function(call)


def _backward(
    request: Request, chosen: str, dropped: dict[str, jax.ShapeDtypeStruct], call: Call, saved: Any, cotangents: Any
) -> Call:
    """The gradient of a call. `dropped` has the shapes of the arrays that were not kept for this pass."""

    def body(call: Call, saved: Any, cotangents: Any, *, partitioned: bool = True) -> Call:
        whole = call.with_arrays(dropped)
        settled = request.settle(whole, differentiated=True, chosen=chosen)
        if settled.implementation.backward is None:
            return saved(cotangents)[0]
        one = _BackwardPass(request, chosen)
        return _execute(one, whole, (saved, cotangents), settled, partitioned=partitioned)

    @jax.custom_batching.custom_vmap
    def function(call: Call, saved: Any, cotangents: Any) -> Call:
        return body(call, saved, cotangents)

    @function.def_vmap
    def _(size: int, batched: Any, call: Call, saved: Any, cotangents: Any) -> tuple[Any, Any]:
        if over := axes_of_elements(batched, (call, saved, cotangents)):
            backward = functools.partial(_backward, request, chosen, dropped)
            gradients = run_elements(backward, batched, (call, saved, cotangents), over)
            return gradients, jax.tree.map(lambda _: True, gradients)
        whole = call.with_arrays(dropped)
        element = element_of(whole, batched[0])
        implementation = request.settle(element, differentiated=True, chosen=chosen).implementation
        if not can_merge(element, batched[0], backward=True) or implementation.backward is None:
            return _by_jax(functools.partial(body, partitioned=False), size, batched, (call, saved, cotangents))
        batch = batch_size(element)

        def larger(x: Any, is_batched: Any) -> Any:
            return merge_array(x, bool(is_batched), size, call.vmapped)

        more = {
            name: merge_array(x, True, size, call.vmapped, batch) if name in call.batch_arrays else x
            for name, x in dropped.items()
        }
        saved, cotangents = (
            jax.tree.map(larger, tree, flags) for tree, flags in ((saved, batched[1]), (cotangents, batched[2]))
        )
        merged = merge(whole, _filled(batched[0], dropped), size).with_arrays(dict.fromkeys(dropped))
        gradients = _backward(request, chosen, more, merged, saved, cotangents)
        gradients = jax.tree.map(lambda x: split_array(x, size, call.vmapped), gradients)
        return gradients, jax.tree.map(lambda _: True, gradients)

    return function(call, saved, cotangents)


def _filled(batched: Call, dropped: dict[str, Any]) -> Call:
    """The flags of a call whose dropped arrays are None, with True for those: shapes have no flag of their own."""
    return batched.with_arrays(dict.fromkeys(dropped, True))


def _by_jax(body: Callable[..., Any], size: int, batched: Any, arguments: tuple[Any, ...]) -> Any:
    """A vmapped pass that is no single larger one, by JAX's own rules: a kernel gets one more grid axis."""
    axes = jax.tree.map(lambda flag: 0 if flag else None, tuple(batched))
    results = jax.vmap(lambda arguments: body(*arguments), in_axes=(axes,), axis_size=size)(arguments)
    return results, jax.tree.map(lambda _: True, results)
