"""Which implementation of an op runs, with which block sizes, and why not another.

An op family is a folder with a file an implementation; the file's stem is the implementation's name. Such a module has

- `<op>_<stem>(*arrays, **options)`: the implementation itself;
- `unsupported_reason(launch, *arrays, **options) -> str | None`, where it does not run everything everywhere;
- `Config` and `default_config(chip, *arrays, **options) -> Config`, where it has block sizes to choose. Then the
  implementation takes a keyword more, `launch`: the chip, config and interpreter that were settled here, in one hashable
  value. A hand-written gradient keeps it, since it may be traced after the contexts that settled it have closed.

Modules are imported when first asked for: `import tilewright` imports no kernel.
"""

import contextlib
import contextvars
import functools
import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax

from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.manual_axes import vary_alike
from tilewright.core.target import INTERPRETED_AS, Interpret, current_chip, current_interpret

_log = logging.getLogger("tilewright")

# The kernels' platforms, by the stem of their file. Everything else is plain JAX and runs anywhere.
KERNEL_PLATFORM = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}
_PLATFORM_WORD = {"tpu": "TPU", "gpu": "GPU", "cpu": "CPU"}


class Unsupported(NotImplementedError):
    """A named implementation cannot run these arguments on this device. The text has the reason and the way out."""


@dataclass(frozen=True)
class Launch:
    """What dispatch settled for one call of a kernel: hashable, and static under jit."""

    chip: Chip
    config: Any
    interpret: Interpret | None


@dataclass(frozen=True)
class Decision:
    """Which implementation one call of an op took, and why not the others."""

    op: str
    implementation: str
    launch: Launch
    config_source: str
    """Where the config is from: "argument", "heuristic", or "none" for an implementation that has no block sizes."""
    named: bool
    """Whether the caller named the implementation, or left it to us."""
    rejected: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        how = "in the interpreter" if self.launch.interpret and self.implementation in KERNEL_PLATFORM else "compiled"
        why = "named by the caller" if self.named else "the first in order of preference that can run"
        lines = [f"{self.op}: {self.implementation}, {how}, for chip {self.launch.chip.name} ({why})"]
        if self.launch.config is not None:
            lines.append(f"  config ({self.config_source}): {self.launch.config}")
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
        names = ", ".join(case.name for case in self.cases)
        raise ValueError(f"case={name!r} is not a case of {self.name}; use one of {names}")

    def module(self, implementation: str) -> ModuleType:
        return importlib.import_module(f"{self.family}.{implementation}")

    def run(
        self,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        implementation: str | None,
        config: Any,
    ) -> Any:
        """Settle which implementation takes this call, note it, and run it. For the family's api.py."""
        decision = self.decide(arrays, options, implementation=implementation, config=config)
        _note(decision)
        module = self.module(decision.implementation)
        function = getattr(module, f"{self.name}_{decision.implementation}")
        launch = {} if decision.launch.config is None else {"launch": decision.launch}
        return function(*vary_alike(*arrays), **options, **launch)

    def decide(
        self,
        arrays: tuple[Any, ...],
        options: Mapping[str, Any],
        *,
        implementation: str | None = None,
        config: Any = None,
    ) -> Decision:
        """The decision `run` would take. Raises `Unsupported` where a named implementation cannot run."""
        if implementation is not None and implementation not in self.implementations:
            known = ", ".join(repr(name) for name in self.implementations)
            raise ValueError(
                f"implementation={implementation!r} is not an implementation of {self.name}; use one of {known}, or None"
            )
        chip, interpret = current_chip(arrays), current_interpret()
        candidates = (implementation,) if implementation is not None else self.implementations
        if config is not None:
            candidates = self._candidates_for(config, candidates, implementation)
        rejected: dict[str, str] = {}
        for name in candidates:
            launch_chip, reason = self._place(name, chip, interpret, named=implementation is not None)
            if reason is None:
                module = self.module(name)
                default = getattr(module, "default_config", None)
                settled, source = config, "argument"
                if default is None:
                    settled, source = None, "none"
                elif config is None:
                    settled, source = default(launch_chip, *arrays, **options), "heuristic"
                launch = Launch(launch_chip, settled, interpret)
                check = getattr(module, "unsupported_reason", None)
                reason = check(launch, *arrays, **options) if check else None
                if reason is None:
                    named = implementation is not None
                    return Decision(self.name, name, launch, source, named, rejected)
            rejected[name] = reason
        if implementation is None:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
            raise Unsupported(f"{self.name}: no implementation can run this call ({reasons})")
        raise Unsupported(
            f"{self.name}: implementation={implementation!r} cannot run this call: {rejected[implementation]}"
        )

    def _candidates_for(self, config: Any, candidates: tuple[str, ...], named: str | None) -> tuple[str, ...]:
        """The candidates that take a config of this type; none is an error."""
        takes = {name: getattr(self.module(name), "Config", None) for name in self.implementations}
        fitting = tuple(name for name in candidates if takes[name] is type(config))
        if fitting:
            return fitting
        known = ", ".join(f"{cls.__name__} for {name!r}" for name, cls in takes.items() if cls)
        whose = f"implementation={named!r} of {self.name}" if named else self.name
        raise TypeError(f"config={config!r} is not a config that {whose} takes; configs: {known}")

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
            f"or run the kernel in its interpreter with tilewright.interpret()"
        )


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
        raise ValueError(f"op={name!r} is not an op of tilewright; use one of {', '.join(_registry)}")
    return _registry[name]


# Decisions are noted here while `explain` traces. The user context makes JAX's caches miss, so that every op decides anew.
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
    with noting_decisions() as decisions:
        try:
            jax.eval_shape(traced, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
        except Unsupported as error:
            refusal = str(error)
    return Explanation(tuple(decisions), refusal)
