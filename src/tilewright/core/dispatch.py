"""Which implementation of an op runs forward and backward, with which configs, and why not another.

An op family is a folder with a file or package per implementation; its name is the implementation's
(core/implementation.py). They are imported when first asked for: `import tilewright` imports no kernel.
"""

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, Literal

import jax

from tilewright.core import differentiable, tuned
from tilewright.core.boundary import Unsupported as Unsupported
from tilewright.core.boundary import refused_on, reverse_mode_only
from tilewright.core.call import Call, CallShapes
from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.config import Config
from tilewright.core.differentiable import Settled
from tilewright.core.implementation import KERNEL_PLATFORM as KERNEL_PLATFORM
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.nearest import did_you_mean
from tilewright.core.partitioning import run_explicit
from tilewright.core.target import INTERPRETED_AS, Interpret, current_chip, current_interpret, without_kernel_bodies

_log = logging.getLogger("tilewright")

ImplementationName = Literal["pallas_tpu", "pallas_gpu", "xla", "reference"]
"""The implementations that ops have, by the name of their file. `pallas_tpu` and `pallas_gpu` are kernels."""
_PLATFORM_WORD = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}
# JAX's name of each platform that a program is lowered for, and a chip of it to name in messages.
_LOWERED_AS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
_TARGET = {"tpu": "v6e", "gpu": "h200", "cpu": "cpu"}


@dataclass(frozen=True)
class PassDecision:
    """The config that one pass of an implementation runs with, or why the pass cannot run."""

    launch: Launch | None
    config_source: str = "none"
    """Where the config is from: "argument", "tuned" for the call's shape bucket, "tuned nearby", "heuristic", or "none" for
    a pass that takes none."""
    refusal: str | None = None
    note: str = ""
    entry: str = ""
    """Which entry of a tuned table it is."""

    @property
    def config(self) -> Any:
        return None if self.launch is None else self.launch.config

    def __str__(self) -> str:
        if self.refusal is not None:
            return f"cannot run: {self.refusal}"
        source = f"{self.config_source}: {self.entry}" if self.entry else self.config_source
        config = "" if self.config is None else f"{self.config} ({source})"
        return "; ".join(part for part in (config, self.note) if part) or "no block sizes to choose"


@dataclass(frozen=True)
class Decision:
    """Which implementation one call of an op took, with which configs, and why not the others."""

    op: str
    implementation: str
    chip: Chip
    interpret: Interpret | None
    forward: PassDecision
    backward: PassDecision
    named: bool
    """Whether the caller named the implementation, or left it to us."""
    rejected: Mapping[str, str] = field(default_factory=dict)
    request: Any = field(default=None, repr=False, compare=False)
    """The request that this decision is for."""
    call: Any = field(default=None, repr=False, compare=False)
    """The shapes and options of the call, as implementations see it."""

    @property
    def configs(self) -> dict[str, Config]:
        """The configs by direction; a pass that takes none is left out."""
        passes = {"forward": self.forward, "backward": self.backward}
        return {direction: one.config for direction, one in passes.items() if one.config is not None}

    def __str__(self) -> str:
        how = "in the interpreter" if self.interpret and self.implementation in KERNEL_PLATFORM else "compiled"
        why = "named by the caller" if self.named else "the first in order of preference that can run"
        lines = [f"{self.op}: {self.implementation}, {how}, for chip {self.chip.name} ({why})"]
        lines += [f"  forward: {self.forward}", f"  backward: {self.backward}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Op:
    """A public op: its name, the package of its family, and its implementations in order of preference."""

    name: str
    family: str
    implementations: tuple[str, ...]

    @property
    def plain(self) -> str:
        """The first implementation that is plain JAX, and so runs anywhere."""
        return next(name for name in self.implementations if name not in KERNEL_PLATFORM)

    @property
    def plainly_differentiable(self) -> str:
        """The first implementation that JAX can differentiate in forward mode, and any number of times."""

        def is_plain(name: str) -> bool:
            found = self.architectures(name)[0]
            return found.backward is None or found.backward.has_derivatives

        plain = (name for name in self.implementations if name not in KERNEL_PLATFORM)
        return next(name for name in plain if is_plain(name))

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        return getattr(importlib.import_module(f"{self.family}.api"), self.name)

    @functools.cached_property
    def cases(self) -> tuple[Case, ...]:
        """The op's named shapes, from the family's cases.py."""
        every = importlib.import_module(f"{self.family}.cases").CASES
        return tuple(case for case in every if case.op == self.name)

    def case(self, name: str) -> Case:
        for case in self.cases:
            if case.name == name:
                return case
        names = [case.name for case in self.cases]
        hint = did_you_mean(name, names)
        raise ValueError(f"case={name!r} is not a case of {self.name}; use one of {', '.join(names)}{hint}")

    def module(self, implementation: str) -> ModuleType:
        return importlib.import_module(f"{self.family}.{implementation}")

    def architectures(self, implementation: str) -> tuple[Implementation, ...]:
        """The implementation of that name, one per GPU architecture it is written for."""
        found = self.module(implementation).IMPLEMENTATION
        found = found[self.name] if isinstance(found, Mapping) else found
        return found if isinstance(found, tuple) else (found,)

    def run(self, call: Call, *, implementation: str | None, config: Any) -> Any:
        """Decide which implementation takes this call, and run it. For the family's api.py."""
        request = self._request(call, implementation, config)
        try:
            return run_explicit(self.name, call, lambda part: self._run(request, part.varying_alike()))
        except Exception as error:
            if isinstance(error, Unsupported) or not (symbolic := call.symbolic_sizes()):
                raise
            taken = request.decide(call, differentiated=False)[0].implementation
            raise Unsupported(_not_symbolic(self.name, taken, symbolic, error)) from error

    def _run(self, request: "_Request", call: Call) -> Any:
        decision, found = request.decide(call, differentiated=False)
        given = call.given()
        if refused := self._refused_platforms(decision):
            first = next(iter(given))
            call = call.with_arrays({first: refused_on(given[first], refused)})
        if found.backward is not None and found.backward.has_derivatives:
            return differentiable.run_plain(request, call)
        if found.backward is not None:
            arrays = {name: x for name, x in call.given().items() if name in call.differentiable_arrays}
            return differentiable.run(request, call.with_arrays(reverse_mode_only(arrays, _reverse_only(decision))))
        _note(decision)
        launch = decision.forward.launch
        assert launch is not None
        with launch.active():
            return found.forward.run(call, launch, save=False)[0]

    def _refused_platforms(self, decision: Decision) -> dict[str, str]:
        """The platforms that what was decided must not be lowered for, each with the reason and the way out."""
        refused: dict[str, str] = {}
        for platform, lowered_as in _LOWERED_AS.items():
            kernel = KERNEL_PLATFORM.get(decision.implementation)
            here = f"{self.name}: traced for {decision.chip.name}, where it takes {decision.implementation!r}"
            if kernel not in (None, platform) and decision.interpret is None:
                refused[lowered_as] = (
                    f"{here}, and lowered for {lowered_as}, which has no such kernel; lower it once per platform, traced "
                    f"under tilewright.target({_TARGET[platform]!r}) for this one, or name implementation={self.plain!r}"
                )
            has = [name for name, on in KERNEL_PLATFORM.items() if on == platform and name in self.implementations]
            if kernel is None and not decision.named and has and platform != decision.chip.platform:
                refused[lowered_as] = (
                    f"{here}, and lowered for {lowered_as}, which has the kernel {has[0]!r}; trace it under "
                    f"tilewright.target({_TARGET[platform]!r}), or name implementation={self.plain!r}"
                )
        return refused

    def decide(self, call: Call, *, implementation: str | None = None, config: Any = None) -> Decision:
        """The decision `run` would take. Raises `Unsupported` where a named implementation cannot run."""
        return self._request(call, implementation, config).decide(call, differentiated=False)[0]

    def takes_kernel(self, call: Call) -> bool:
        """Whether a call of static sizes is run by a kernel on this device: for layers that do without the op otherwise."""
        return not call.symbolic_sizes() and self.decide(call).implementation in KERNEL_PLATFORM

    def _request(self, call: Call, implementation: str | None, config: Any) -> "_Request":
        if implementation is not None and implementation not in self.implementations:
            known = ", ".join(repr(name) for name in self.implementations)
            raise ValueError(
                f"implementation={implementation!r} is not an implementation of {self.name}; use one of {known}, or None"
                f"{did_you_mean(implementation, self.implementations)}"
            )
        configs = config if isinstance(config, tuple) else () if config is None else (config,)
        if isinstance(config, list):
            raise TypeError(f"config={config!r} is a list; pass one config, or a tuple of a forward and a backward one")
        if len({type(each) for each in configs}) < len(configs):
            raise TypeError(f"config={config!r} has two of one kind; pass a forward and a backward one at most")
        if configs:
            self._candidates_for(configs, implementation)
        return _Request(self, implementation, configs, current_chip(tuple(call.given().values())), current_interpret())

    def _decide(self, request: "_Request", call: Call, implementation: str | None, *, differentiated: bool) -> Decision:
        """Takes the first candidate that can run forward, and where the call is differentiated, backward too."""
        symbolic, call = call.symbolic_sizes(), call.flattened().with_known_sizes()
        configs, interpret, named = request.configs, request.interpret, request.implementation is not None
        candidates = (implementation,) if implementation is not None else self.implementations
        if configs and implementation is None:
            candidates = self._candidates_for(configs, None)
        rejected: dict[str, str] = {}
        for name in candidates:
            launch_chip, reason = self._place(name, request.chip, interpret, named=named)
            found = None
            if reason is None and symbolic and name in KERNEL_PLATFORM:
                # Not a reason to take another in silence.
                raise Unsupported(
                    f"{self.name}: implementation={name!r} needs sizes that are known when it is traced, and "
                    f"{', '.join(symbolic)} are symbolic; export it for fixed sizes, or name "
                    f"implementation={self.plain!r}"
                )
            if reason is None:
                found, reason = self._for_architecture(name, launch_chip)
            if reason is None and found is not None:
                decide = functools.partial(_decide_pass, self, name, call, launch_chip, configs, interpret)
                forward = decide("forward", found.forward)
                backward = (
                    PassDecision(None, note="JAX differentiates the forward pass")
                    if found.backward is None
                    else decide("backward", found.backward)
                )
                reason = forward.refusal or (backward.refusal if differentiated else None)
                if reason is None:
                    return Decision(
                        self.name, name, launch_chip, interpret, forward, backward, named, rejected, request, call
                    )
            rejected[name] = reason or ""
        if implementation is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            whose = f" with config={configs[0] if len(configs) == 1 else configs!r}" if configs else ""
            remedy = "; leave config out for another implementation" if configs else ""
            raise Unsupported(f"{self.name}: no implementation can run this call{whose} ({reasons}){remedy}")
        what = "differentiate" if differentiated else "run"
        raise Unsupported(
            f"{self.name}: implementation={implementation!r} cannot {what} this call: {rejected[implementation]}"
        )

    def _for_architecture(self, name: str, chip: Chip) -> tuple[Implementation | None, str | None]:
        """The implementation for the chip's architecture, or why there is none."""
        every = self.architectures(name)
        for one in every:
            if one.architecture is None or one.architecture == chip.compute_capability:
                return one, None
        written = ", ".join(_architecture_name(one.architecture) for one in every)
        has = "an unknown one" if chip.compute_capability is None else ".".join(map(str, chip.compute_capability))
        return None, (
            f"it is written for {written}, and the chip is {chip.name}, with compute capability {has}; "
            f"use implementation={self.plain!r}"
        )

    def _candidates_for(self, configs: tuple[Any, ...], named: str | None) -> tuple[str, ...]:
        """The implementations, or the named one, that take configs of these types; none is an error."""
        takes = {
            name: [config for one in self.architectures(name) for config in one.configs]
            for name in self.implementations
        }
        candidates = self.implementations if named is None else (named,)
        fitting = tuple(name for name in candidates if all(type(config) in takes[name] for config in configs))
        if fitting:
            return fitting
        known = ", ".join(f"{config.__name__} for {name!r}" for name, each in takes.items() for config in each)
        whose = f"implementation={named!r} of {self.name}" if named else self.name
        shown = configs[0] if len(configs) == 1 else configs
        raise TypeError(f"config={shown!r} is not a config that {whose} takes; configs: {known or 'none'}")

    def _place(self, name: str, chip: Chip, interpret: Interpret | None, *, named: bool) -> tuple[Chip, str | None]:
        """The chip that implementation `name` is to be configured for, and why it cannot run there, if it cannot."""
        platform = KERNEL_PLATFORM.get(name)
        if platform is None or platform == chip.platform:
            return chip, None
        if interpret is not None and named:
            return Chip.named(INTERPRETED_AS[platform]), None
        word, here = _PLATFORM_WORD[platform], _PLATFORM_WORD[chip.platform]
        kind = chip.device_kinds[0] if chip.name == "unknown" else chip.name
        described = f"this is a {here}" if kind.lower() == here.lower() else f"this is a {here} ({kind})"
        return chip, (
            f"it is a {word} kernel and {described}; use implementation='{self.plain}', "
            f"or name implementation={name!r} inside of tilewright.interpret()"
        )


def _architecture_name(architecture: tuple[int, int] | None) -> str:
    names = {(9, 0): "Hopper GPUs (compute capability 9.0: H100, H200)"}
    return names.get(architecture or (0, 0), f"compute capability {architecture}")


def _decide_pass(
    op: Op,
    implementation: str,
    call: Call,
    chip: Chip,
    configs: tuple[Config, ...],
    interpret: Interpret | None,
    direction: tuned.Direction,
    one: Pass,
) -> PassDecision:
    known: Iterable[tuned.Found] = ()
    if one.config is not None:
        known = tuned.candidates(op.name, implementation, direction, chip, call.bucket(), one.config)
    config, source, entry = one.config_for(chip, call, configs, known)
    launch = Launch(chip, config, interpret)
    note = one.note(call) if callable(one.note) else one.note
    refusal = one.refusal(call, launch)
    if refusal is not None:
        # What kernels share names 'xla', which not every op has.
        refusal = refusal.replace("implementation='xla'", f"implementation={op.plain!r}")
    return PassDecision(launch, source, refusal, note, entry)


@functools.lru_cache(maxsize=4096)
def _decided(
    request: "_Request", shapes: CallShapes, implementation: str | None, differentiated: bool, tables: tuple[int, str]
) -> Decision:
    return request.op._decide(request, shapes.call, implementation, differentiated=differentiated)


def _reverse_only(decision: Decision) -> str:
    return (
        f"{decision.op}: implementation={decision.implementation!r} has no forward-mode derivative (jax.jvp, jax.jacfwd, "
        f"jax.linearize); use reverse mode (jax.grad, jax.vjp, jax.jacrev), or "
        f"implementation={decision.request.op.plainly_differentiable!r}"
    )


def _not_symbolic(op: str, implementation: str, symbolic: tuple[str, ...], error: Exception) -> str:
    """Why an implementation cannot be traced with symbolic sizes, and what to do."""
    undecided = re.search(r"comparison '([^']*)' (\S+) '([^']*)' is inconclusive", str(error))
    what = (
        f"it has to know whether {' '.join(undecided.groups())}"
        if undecided
        else str(error).splitlines()[0].rstrip(".")
    )
    remedies = ["export it for fixed sizes"]
    if undecided:
        remedies.insert(0, "say so in constraints=[...] of jax.export.symbolic_shape")
    if implementation != "reference":
        remedies.append("name implementation='reference'")
    return (
        f"{op}: implementation={implementation!r} cannot be traced with the symbolic sizes {', '.join(symbolic)}: {what}; "
        f"{', '.join(remedies[:-1])}{', or ' if remedies[:-1] else ''}{remedies[-1]}"
    )


@dataclass(frozen=True)
class _Request:
    """How a call was asked for: static, and enough to decide again for the call that reaches an implementation."""

    op: Op
    implementation: str | None
    configs: tuple[Config, ...]
    chip: Chip
    interpret: Interpret | None

    @property
    def name(self) -> str:
        return self.op.name

    def decide(self, call: Call, *, differentiated: bool, chosen: str | None = None) -> tuple[Decision, Implementation]:
        """`chosen` is what ran the forward pass of a call, where the backward pass of it is decided."""
        decision = _decided(self, CallShapes(call), chosen or self.implementation, differentiated, tuned.state())
        found, _ = self.op._for_architecture(decision.implementation, decision.chip)
        assert found is not None
        return dataclasses.replace(decision, request=self), found

    def settle(self, call: Call, *, differentiated: bool, chosen: str | None = None) -> Settled:
        decision, found = self.decide(call, differentiated=differentiated, chosen=chosen)
        return Settled(found, decision)

    def note(self, decision: Decision) -> None:
        # JAX may trace a call twice to differentiate it: inside of `jax.jit` for its value, and again for what is saved.
        if any(one.request is decision.request and one == decision for one in _noted.get() or ()):
            return
        _note(decision)

    def forget(self, decision: Decision) -> None:
        noted = _noted.get()
        if noted is not None:
            noted[:] = [one for one in noted if one is not decision]


_registry: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Make an op known to the workbench. Importing its api is what registers it."""
    _registry[op.name] = op
    return op


def registered() -> Mapping[str, Op]:
    """Every op, by name."""
    return dict(_registry)


def find_op(name: str) -> Op:
    if name not in _registry:
        if isinstance(getattr(sys.modules.get("tilewright"), name, None), FunctionType):
            raise ValueError(
                f"op={name!r} is a plain function of tilewright, not an op: check, bench, tune, compile and profile have "
                f"no cases of it; call it in a script for tilewright profile SCRIPT, or use one of the ops "
                f"{', '.join(_registry)}"
            )
        if "," in name:
            first = name.partition(",")[0].strip()
            raise ValueError(f"op={name!r} names several ops, and it takes one at a time; pass {first}, then the next")
        raise ValueError(
            f"op={name!r} is not an op of tilewright; use one of {', '.join(_registry)}{did_you_mean(name, _registry)}"
        )
    return _registry[name]


# Decisions are noted here while `explain` traces. The user context makes JAX's caches miss, so that every op decides.
_noted: contextvars.ContextVar[list[Decision] | None] = contextvars.ContextVar("tilewright_decisions", default=None)
_explaining = jax.make_user_context(0)
_explain_calls = itertools.count(1)


def _note(decision: Decision) -> None:
    _log.debug("%s", decision)
    if (noted := _noted.get()) is not None:
        noted.append(decision)


@contextlib.contextmanager
def noting_decisions() -> Iterator[list[Decision]]:
    """Collects the decision of every op traced inside."""
    decisions: list[Decision] = []
    token = _noted.set(decisions)
    try:
        with _explaining(next(_explain_calls)):
            yield decisions
    finally:
        _noted.reset(token)


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: a decision for each op call, in order, and the refusal that ended the trace, if one did."""

    decisions: tuple[Decision, ...]
    refusal: str | None = None

    def __str__(self) -> str:
        lines = [str(decision) for decision in self.decisions]
        if self.refusal:
            lines.append(self.refusal)
        return "\n".join(lines) or "no tilewright op was called"


def explain(function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which implementation each op call inside `function(*args, **kwargs)` takes, with which config, and why.

    `function` is an op (`tilewright.linear_cross_entropy`, or its name) or any JAX function that calls ops: a layer, a
    model, a training step. It is traced, not run; arguments may be `jax.ShapeDtypeStruct`s. Print the result.
    """
    if isinstance(function, str):
        function = find_op(function).function
    # Numbers, strings and None stay as they are: they are static arguments of an op. Arrays are traced.
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda leaf: leaf is None)
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def traced(arrays: list[Any]) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
        return function(*inner_args, **inner_kwargs)

    refusal = None
    with noting_decisions() as decisions, without_kernel_bodies():
        try:
            jax.eval_shape(traced, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
        except Unsupported as error:
            refusal = str(error)
    return Explanation(tuple(decisions), refusal)
