"""Checks and times configs on this device: prepared side by side in worker processes, timed alone, in turns."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.case import Case
from tilewright.core.config import Config
from tilewright.core.dispatch import Op
from tilewright.workbench.tuning.pool import Worker, WorkerFailed, collect, memory_share
from tilewright.workbench.tuning.search import Outcome
from tilewright.workbench.tuning.target import Target
from tilewright.workbench.tuning.worker import ORACLE

_TURNS = 9
_CONFIRMING_TURNS = 15
_EARLY_WORKERS = 8  # Workers that start before there is work for them.
# A config that takes so many times as long to prepare as the first one, and so many seconds more, hangs.
_PATIENCE, _PATIENCE_S = 4.0, 20.0
# A config is ended early where so many turns in a row, and the median of all, took that many times as long as the best one.
_EARLY_TURNS, _CLEARLY_SLOWER, _HOPELESS = 3, 1.05, 1.3
# A gain counts where three quarters of the turns show it, and by more than this.
_LEAST_GAIN = 0.01
# Without an oracle, a config may be so many times as far from the expected results as the heuristic's.
_FURTHER = 2.0
_SHARE_FLOOR = 0.02


def is_gain(ratios: Sequence[float]) -> bool:
    """Whether times, divided by those of another config in the same turns, show a gain beyond the noise."""
    if len(ratios) < _EARLY_TURNS:
        return False
    upper_quartile = statistics.quantiles(ratios, n=4)[2]
    return upper_quartile < 1 - _LEAST_GAIN


def is_slow(ratios: Sequence[float]) -> bool:
    """Whether the turns so far are enough to know that a config is slower."""
    if ratios[0] > _HOPELESS and len(ratios) > 1 and ratios[1] > _HOPELESS:
        return True
    enough = len(ratios) >= _EARLY_TURNS
    return enough and min(statistics.median(ratios), *ratios[-_EARLY_TURNS:]) > _CLEARLY_SLOWER


@dataclass(frozen=True)
class Confirmed:
    """The config that was chosen and the heuristic's, timed in turns once more."""

    samples_s: tuple[float, ...]
    heuristic_samples_s: tuple[float, ...]
    gain: bool
    prepared: Outcome
    """What preparing it said: its errors, its compile time, its memory."""


class Crew:
    """The workers of one implementation on one case, and the results that they expect. A context: they end with it.

    Workers start while the expected results are computed. The oracle may take `oracle_s`, and everything else `limit_s`.
    """

    def __init__(
        self, op: Op, case: Case, dtype: str, implementation: str, *, jobs: int, limit_s: float, oracle_s: float
    ):
        self.name, self.jobs, self._limit_s, self._oracle_s = f"{case.name} {dtype}", jobs, limit_s, oracle_s
        self.expected_from = ""
        self._about = {
            "op": [op.name, op.family, list(op.implementations)],
            "case": case.name,
            "dtype": dtype,
            "implementation": implementation,
        }
        self._open = contextlib.ExitStack()
        self._all: list[Worker] = []
        self._free: list[Worker] = []

    def __enter__(self) -> "Crew":  # noqa: PYI034, as in core/call.py
        self.folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-tune-"))
        self._memory = memory_share(self.jobs + 1)
        try:
            self._expect()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def take(self) -> Worker:
        """A worker that has nothing to do."""
        if not self._free:
            self._all.append(self._new(self._memory))
            return self._all[-1]
        return self._free.pop()

    def recall(self) -> None:
        """Makes every worker free, for another target."""
        self._free = list(self._all)

    def give_back(self, *workers: Worker) -> None:
        self._free += workers

    def _new(self, memory_bytes: int) -> Worker:
        return self._open.enter_context(contextlib.closing(Worker(self._about, memory_bytes)))

    def _expect(self) -> None:
        """Computes the expected results in a process that ends: the oracle may take most of the device's memory."""
        reasons: list[str] = []
        for exact in (True, False):
            worker = self._new(memory_share(1))
            try:
                worker.ask("expect", folder=self.folder, exact=exact)
                if exact:
                    self._all = [self._new(self._memory) for _ in range(min(self.jobs, _EARLY_WORKERS))]
                    for one in self._all:
                        one.start()
                    self.recall()
                (told,) = collect([worker], self._oracle_s if exact else self._limit_s)
            finally:
                worker.close()
            if not isinstance(told, WorkerFailed):
                self.expected_from = told["against"]
                return
            reasons.append(f"{told.kind}: {told}")
        raise RuntimeError(
            f"{self.name}: the expected results could not be computed ({'; then '.join(reasons)}); use a smaller case"
        )


class Bench:
    """Tries configs of a target on this device, with the workers of a crew."""

    settled = False

    def __init__(self, target: Target, crew: Crew, *, limit_s: float):
        self.target, self.side_by_side, self._crew, self._limit_s = target, crew.jobs, crew, limit_s
        crew.recall()
        self._incumbent: Worker | None = None
        self._patience_s = limit_s
        """How long a config may take to be prepared: much longer than the first one, and it hangs."""
        self._allowed: dict[str, float] = {}
        """Errors that configs are held to where the oracle is not known: about those of the heuristic's config."""

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        """Prepares configs side by side; then times each that is right against the best one before it."""
        workers = [self._crew.take() for _ in configs]
        began = time.monotonic()
        for worker, config in zip(workers, configs, strict=True):
            worker.ask("prepare", **self._request(config))
        answers = collect(workers[:1], self._patience_s)
        if self._incumbent is None:
            self._patience_s = min(self._limit_s, _PATIENCE * (time.monotonic() - began) + _PATIENCE_S)
        answers += collect(workers[1:], self._patience_s)
        for worker, config, answer in zip(workers, configs, answers, strict=True):
            outcome = self._judged(config, answer)
            if outcome.status == "prepared":
                outcome = self._timed(worker, outcome)
            slower = worker
            if outcome.better:
                slower, self._incumbent = self._incumbent, worker
            if slower is not None:
                self._crew.give_back(slower)
            yield outcome

    def _request(self, config: Config) -> dict[str, Any]:
        configs = [each.to_json() for each in self.target.configs(config).values()]
        return {"configs": configs, "mode": self.target.mode, "folder": self._crew.folder}

    def _judged(self, config: Config, answer: dict[str, Any] | WorkerFailed) -> Outcome:
        if isinstance(answer, WorkerFailed):
            return Outcome(config, answer.kind, str(answer))
        checks = answer["checks"]
        worst = max(checks, key=lambda check: (not check["ok"], check["share"]))
        metrics = {name: answer.get(name) for name in ("compile_s", "temp_bytes", "peak_bytes")} | {
            "error": worst["share"],
            "error_in": worst["quantity"],
            "error_against": self._crew.expected_from,
        }
        for check in checks:
            allowed = self._allowed.get(check["quantity"], 1.0)
            if not check["ok"] or not check["share"] <= allowed:
                reason = f"{check['quantity']}: {check['text']}"
                if check["ok"]:
                    reason += f", and the heuristic's config is more than {_FURTHER:g} times as close"
                return Outcome(config, "wrong", reason, metrics=metrics)
        if not self._allowed and self._crew.expected_from != ORACLE:
            self._allowed = {each["quantity"]: _FURTHER * each["share"] + _SHARE_FLOOR for each in checks}
        return Outcome(config, "prepared", metrics=metrics)

    def _timed(self, worker: Worker, prepared: Outcome) -> Outcome:
        """Times a prepared config; in turns with the incumbent, where there is one."""
        ours: list[float] = []
        ratios: list[float] = []
        try:
            for _ in range(_TURNS):
                before = self._turn(self._incumbent) if self._incumbent is not None else None
                taken = worker.call("sample", limit_s=self._limit_s)
                ours += taken["samples"]
                if before is not None:
                    ratios.append(taken["median"] / before)
                    if is_slow(ratios):
                        break
        except WorkerFailed as error:
            return Outcome(prepared.config, error.kind, f"while it was timed: {error}", metrics=prepared.metrics)
        complete = not ratios or len(ratios) == _TURNS
        return Outcome(
            prepared.config,
            "timed" if complete else "slow",
            better=self._incumbent is None or (complete and is_gain(ratios)),
            ratio=statistics.median(ratios) if ratios else None,
            samples_s=tuple(ours),
            metrics=prepared.metrics,
        )

    def _turn(self, incumbent: Worker) -> float:
        """The incumbent's time of one turn. That it fails here is an error of the tuner's, not of a config's."""
        try:
            return incumbent.call("sample", limit_s=self._limit_s)["median"]
        except WorkerFailed as error:
            raise RuntimeError(
                f"{self.target.name}: the best config so far failed when it was timed again: {error}"
            ) from error

    def confirm(self, chosen: Config, beside: Config) -> Confirmed:
        """Times the chosen config and another one, the heuristic's, in more turns."""
        if self._incumbent is not None:
            self._crew.give_back(self._incumbent)
            self._incumbent = None
        workers = [self._crew.take() for _ in range(2)]
        for worker, config in zip(workers, (chosen, beside), strict=True):
            worker.ask("prepare", **self._request(config))
        outcomes = [
            self._judged(config, answer)
            for config, answer in zip((chosen, beside), collect(workers, self._limit_s), strict=True)
        ]
        if outcomes[0].status != "prepared":
            raise RuntimeError(
                f"{chosen} was right before, and is not again: {outcomes[0].status}: {outcomes[0].reason}"
            )
        ours: list[float] = []
        theirs: list[float] = []
        ratios: list[float] = []
        for _ in range(_CONFIRMING_TURNS):
            other = None
            if outcomes[1].status == "prepared":
                other = workers[1].call("sample", limit_s=self._limit_s)
                theirs += other["samples"]
            one = workers[0].call("sample", limit_s=self._limit_s)
            ours += one["samples"]
            if other is not None:
                ratios.append(one["median"] / other["median"])
        self._crew.give_back(*workers)
        gain = is_gain(ratios) if ratios else True
        return Confirmed(tuple(ours), tuple(theirs), gain, outcomes[0])
