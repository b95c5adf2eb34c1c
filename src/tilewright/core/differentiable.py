"""The one wrapper that makes an implementation differentiable and batch-aware.

`run` takes a call through an implementation. Under `jax.grad` its backward pass runs, from what its forward pass saved.
Under `jax.vmap` the calls become one call with a larger batch wherever that is the same thing (`can_merge`), and the
config is chosen for that larger call: JAX's own rule would give a kernel a loop, or one more grid axis, around blocks
that were chosen for one element.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax

from tilewright.core.call import Call, Static, batch_size, can_merge, element_of, merge, merge_array, split_array
from tilewright.core.implementation import Implementation


@dataclass(frozen=True)
class Settled:
    """What runs a call: an implementation, and the decision (core/dispatch.py) that took it, which `explain` shows."""

    implementation: Implementation
    decision: Any


@runtime_checkable
class Request(Protocol):
    """Everything static about a call that was asked for; hashable. It decides what runs the call (dispatch)."""

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


def _forward(request: Request, call: Call, *, save: bool) -> tuple[Any, Any, Static]:
    """Outputs, what was saved, and the name of the implementation that ran."""
    noted: list[Any] = []

    def body(call: Call) -> tuple[Any, Any, Static]:
        settled = request.settle(call, differentiated=save)
        request.note(settled.decision)
        noted.append(settled.decision)
        run, launch = settled.implementation.forward.run, settled.decision.forward.launch
        with launch.active():
            if save and settled.implementation.backward is None:
                outputs, saved = jax.vjp(lambda call: run(call, launch, save=False)[0], call)
            else:
                outputs, saved = run(call, launch, save=save)
        return outputs, saved if save else None, Static(settled.decision.implementation)

    @jax.custom_batching.custom_vmap
    def function(call: Call) -> tuple[Any, Any, Static]:
        return body(call)

    @function.def_vmap
    def _(size: int, batched: Any, call: Call) -> tuple[Any, Any]:
        for decision in noted:
            request.forget(decision)
        joined, flags = call.join_shared(batched[0], size)
        element = element_of(joined, flags)
        implementation = request.settle(element, differentiated=save).implementation
        if not can_merge(element, flags, backward=False) or (save and implementation.backward is None):
            return _by_jax(body, size, batched, (call,))
        results = _forward(request, merge(joined, flags, size), save=save)
        results = jax.tree.map(lambda x: split_array(x, size, call.vmapped), results)
        return results, jax.tree.map(lambda _: True, results)

    return function(call)


def _backward(
    request: Request, chosen: str, dropped: dict[str, jax.ShapeDtypeStruct], call: Call, saved: Any, cotangents: Any
) -> Call:
    """The gradient of a call. `dropped` has the shapes of the arrays that were not kept for this pass."""

    def body(call: Call, saved: Any, cotangents: Any) -> Call:
        whole = call.with_arrays(dropped)
        settled = request.settle(whole, differentiated=True, chosen=chosen)
        backward, launch = settled.implementation.backward, settled.decision.backward.launch
        if backward is None:
            return saved(cotangents)[0]
        with launch.active():
            return backward.run(whole, saved, cotangents, launch)

    @jax.custom_batching.custom_vmap
    def function(call: Call, saved: Any, cotangents: Any) -> Call:
        return body(call, saved, cotangents)

    @function.def_vmap
    def _(size: int, batched: Any, call: Call, saved: Any, cotangents: Any) -> tuple[Any, Any]:
        whole = call.with_arrays(dropped)
        element = element_of(whole, batched[0])
        implementation = request.settle(element, differentiated=True, chosen=chosen).implementation
        if not can_merge(element, batched[0], backward=True) or implementation.backward is None:
            return _by_jax(body, size, batched, (call, saved, cotangents))
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
