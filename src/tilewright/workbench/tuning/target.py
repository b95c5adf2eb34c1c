"""What is tuned: one direction of one implementation, for one case; its heuristic, and what its configs may be."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.core import tuned
from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.config import Config
from tilewright.core.dispatch import Decision, Op, Unsupported, explain
from tilewright.core.implementation import Launch, Pass
from tilewright.core.target import target
from tilewright.workbench.bench import Mode
from tilewright.workbench.check import call
from tilewright.workbench.tuning.source import source_hash
from tilewright.workbench.tuning.space import Space


@dataclass(frozen=True)
class Target:
    """One pass on one case."""

    op: Op
    case: Case
    dtype: str
    implementation: str
    direction: tuned.Direction
    decision: Decision
    """What dispatch would take now: it has the chip, the call, and the config of the other direction."""
    fixed: tuple[Config, ...]
    """The config of the other direction, if it has one."""

    @property
    def name(self) -> str:
        return f"{self.case.name} {self.dtype} {self.implementation} {self.direction}"

    @property
    def chip(self) -> Chip:
        return self.decision.chip

    @property
    def bucket(self) -> Mapping[str, Any]:
        return self.decision.call.bucket()

    @property
    def mode(self) -> Mode:
        """What is timed: both passes where the backward is tuned, or takes its blocks from the forward."""
        backward = _passes(self.op, self.implementation, self.decision)[1]
        alone = self.direction == "forward" and not (backward is not None and backward.follows_forward)
        return "forward" if alone else "forward+backward"

    @property
    def has_gradients(self) -> bool:
        return bool(self.case.differentiable) and self.decision.backward.refusal is None

    @property
    def tuned_pass(self) -> Pass:
        forward, backward = _passes(self.op, self.implementation, self.decision)
        one = forward if self.direction == "forward" else backward
        assert one is not None
        return one

    @property
    def heuristic(self) -> Config:
        one = self.tuned_pass
        assert one.heuristic is not None
        return one.heuristic(self.chip, self.decision.call)

    @property
    def source(self) -> str:
        return source_hash(self.op, self.implementation)

    def refusal(self, config: Config) -> str | None:
        """Why a config cannot run this call, by the kernel's rules and its memory model."""
        return self.tuned_pass.refusal(self.decision.call, Launch(self.chip, config, None))

    def space(self) -> Space:
        return Space(self.heuristic, self.refusal)

    def on_chip_bytes(self, config: Config) -> dict[str, int]:
        one = self.tuned_pass
        return {} if one.memory is None else dict(one.memory(self.decision.call, Launch(self.chip, config, None)))

    def known(self) -> list[tuned.Found]:
        """What the tables have for this bucket and nearby ones, the best match first."""
        kind = self.tuned_pass.config
        assert kind is not None
        return tuned.candidates(self.op.name, self.implementation, self.direction, self.chip, self.bucket, kind)

    @property
    def is_measured(self) -> bool:
        """Whether a table has a measurement of this bucket by the kernel as it is now."""
        exact = (found.entry for found in self.known() if found.exact)
        return any(entry.kind == "measured" and entry.provenance.get("source") == self.source for entry in exact)

    def configs(self, config: Config) -> dict[str, Config]:
        """The configs of both directions, with `config` for the one that is tuned."""
        other = "backward" if self.direction == "forward" else "forward"
        return {self.direction: config} | ({other: self.fixed[0]} if self.fixed else {})

    def beside(self, config: Config) -> "Target":
        """The same with another config of the other direction, such as one that was found for it."""
        return dataclasses.replace(self, fixed=(config,))


def _passes(op: Op, implementation: str, decision: Decision) -> tuple[Pass, Pass | None]:
    found, reason = op._for_architecture(implementation, decision.chip)
    if found is None:
        raise Unsupported(f"{op.name}: implementation={implementation!r}: {reason}")
    return found.forward, found.backward


def targets(op: Op, case: Case, dtype: str, implementation: str, chip: Chip | None = None) -> list[Target]:
    """The passes of an implementation that have something to tune on a case, forward first.

    `chip` is one that is not here, to estimate for. Raises `Unsupported` where the implementation cannot run the case.
    """
    with contextlib.nullcontext() if chip is None else target(chip):
        explanation = explain(call(op, case, implementation), **case.structs(dtype))
    if explanation.refusal is not None:
        raise Unsupported(explanation.refusal)
    (decision,) = explanation.decisions
    passes = dict(zip(("forward", "backward"), _passes(op, implementation, decision), strict=True))
    found: list[Target] = []
    for direction, one in passes.items():
        refused = direction == "backward" and decision.backward.refusal is not None
        if one is None or one.config is None or not one.config.choices or refused:
            continue
        if direction == "backward" and not case.differentiable:
            continue
        fixed = tuple(config for name, config in decision.configs.items() if name != direction)
        found.append(Target(op, case, dtype, implementation, direction, decision, fixed))  # type: ignore[arg-type]
    return found
