"""Ranks configs for a TPU that is not here by their compiled schedule. The times are lower bounds, not measurements."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp

from tilewright.core.config import Config
from tilewright.core.dispatch import Unsupported
from tilewright.workbench.tuning.measure import Confirmed
from tilewright.workbench.tuning.pool import Worker, WorkerFailed, memory_share
from tilewright.workbench.tuning.search import Outcome
from tilewright.workbench.tuning.target import Target, targets

_LEAST_GAIN = 0.01
_CHECK_LIMIT_S = 900.0


@runtime_checkable
class Report(Protocol):
    """What a compile for a TPU says (aot)."""

    @property
    def ok(self) -> bool: ...
    @property
    def cause(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def temp_bytes(self) -> int | None: ...
    @property
    def floor_us(self) -> float | None: ...
    @property
    def kernels(self) -> tuple[Any, ...]: ...


CompileEach = Callable[[Sequence[Mapping[str, Config]]], Iterator[tuple[int, Report]]]
"""Compiles the target's case with the configs of each mapping, by direction; yields places and reports as they end."""


def _floor_s(target: Target) -> float:
    """What no config can be faster than: the time of the case's bytes and FLOPs at the chip's rates; 0 if not known."""
    chip, case = target.chip, target.case
    work = (case.work if target.direction == "forward" else case.work_grad)(jnp.dtype(target.dtype).itemsize)
    peak = chip.flops_per_s(target.dtype)
    return max(work.bytes / chip.bytes_per_s if chip.bytes_per_s else 0.0, work.flops / peak if peak else 0.0)


class Estimates:
    """Tries configs of a target by compiling them."""

    def __init__(self, target: Target, compile_each: CompileEach, *, jobs: int):
        self.target, self._compile_each, self._jobs = target, compile_each, jobs
        self.side_by_side = 1  # The first one may settle it.
        self._outcomes: dict[Config, Outcome] = {}
        self._best: float | None = None
        self.settled = False
        self._floor_s = _floor_s(target)

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        with contextlib.closing(self._compile_each([self.target.configs(config) for config in configs])) as reports:  # type: ignore[type-var]
            for place, report in reports:
                outcome = self._outcome(configs[place], report)
                self._outcomes[outcome.config] = outcome
                yield outcome
        self.side_by_side = self._jobs

    def _outcome(self, config: Config, report: Report) -> Outcome:
        metrics: dict[str, Any] = {"compile_s": report.seconds, "temp_bytes": report.temp_bytes}
        if not report.ok:
            lacking = (
                "out of memory" if "memory" in report.cause.lower() or "vmem" in report.cause.lower() else "failed"
            )
            return Outcome(config, lacking, report.cause, metrics={**metrics, "estimate_s": None})
        if report.floor_us is None:
            notes = "; ".join(dict.fromkeys(kernel.note for kernel in report.kernels if kernel.note))
            return Outcome(
                config, "failed", f"it cannot be estimated: {notes}", metrics={**metrics, "estimate_s": None}
            )
        seconds = report.floor_us / 1e6
        ratio = None if self._best is None else seconds / self._best
        better = ratio is None or ratio < 1 - _LEAST_GAIN
        if better:
            self._best = seconds
            self.settled = seconds <= (1 + _LEAST_GAIN) * self._floor_s
        metrics |= {"estimate_s": seconds, "error_against": "not checked"}
        return Outcome(config, "estimated", better=better, ratio=ratio, metrics=metrics)

    def confirm(self, chosen: Config, beside: Config) -> Confirmed:
        """Checks the chosen config in the interpreter, on a small case that takes it: a wrong one is an error.

        One that no small case takes is no gain.
        """
        one, other, checked = self._outcomes[chosen], self._outcomes.get(beside), self._checked(chosen)
        metrics = {**one.metrics, **checked}
        if other is not None:
            metrics["heuristic_s"] = other.metrics.get("estimate_s")
        gain = other is None or not metrics.get("heuristic_s") or metrics["estimate_s"] < metrics["heuristic_s"]
        prepared = Outcome(chosen, "estimated", metrics=metrics)
        if not checked:
            why = f"{chosen} could not be checked: no small case of {self.target.op.name} takes it"
            return Confirmed((), (), False, prepared, why)
        return Confirmed((), (), gain, prepared)

    def _checked(self, config: Config) -> dict[str, Any]:
        target = self.target
        for case in (case for case in target.op.cases if case.small):
            try:
                small = next(
                    each
                    for each in targets(target.op, case, target.dtype, target.implementation, target.chip)
                    if each.direction == target.direction
                )
            except (Unsupported, StopIteration):
                continue
            if small.refusal(config) is not None:
                continue
            about = {
                "op": [target.op.name, target.op.family, list(target.op.implementations)],
                "case": case.name,
                "dtype": target.dtype,
                "implementation": target.implementation,
            }
            configs = [each.to_json() for each in small.configs(config).values()]
            with (
                tempfile.TemporaryDirectory(prefix="tilewright-tune-") as folder,
                contextlib.closing(Worker(about, memory_share(1))) as worker,
            ):
                try:
                    worker.call("expect", folder=folder, exact=True, limit_s=_CHECK_LIMIT_S)
                    told = worker.call(
                        "prepare", configs=configs, mode="forward+backward", folder=folder, limit_s=_CHECK_LIMIT_S
                    )
                except WorkerFailed as error:
                    raise RuntimeError(
                        f"{config} could not be checked on {case.name}: {error.kind}: {error}"
                    ) from error
            worst = max(told["checks"], key=lambda check: (not check["ok"], check["share"]))
            if not worst["ok"]:
                raise RuntimeError(
                    f"{config} computes wrong values on {case.name}: {worst['quantity']}: {worst['text']}"
                )
            against = f"the oracle, on {case.name}, in the interpreter"
            return {"error": worst["share"], "error_in": worst["quantity"], "error_against": against}
        return {}
