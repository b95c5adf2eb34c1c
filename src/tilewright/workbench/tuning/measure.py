"""Checks and times configs on this device: prepared side by side in worker processes, timed alone, in turns."""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.core.config import Config
from tilewright.workbench.tuning.crew import Crew
from tilewright.workbench.tuning.pool import Worker, WorkerFailed, answered, on_device
from tilewright.workbench.tuning.search import Outcome
from tilewright.workbench.tuning.target import Target
from tilewright.workbench.tuning.worker import BOTH, ORACLE, Clock

# A config that takes so many times as long to prepare as the first one, and so many seconds more, hangs.
_PATIENCE, _PATIENCE_S = 4.0, 20.0
# Calls are queued, but the host takes up to about 100 us to dispatch one (H200, jax 0.11), and milliseconds where other
# configs compile on all of its cores: a call of 0.07 ms took 4.8 then. Where a call takes less than this on the device, its
# wall time may be the host's, and the time on the device counts.
_DEVICE_BELOW_S = 2e-3
# A config is ended early where so many turns in a row, and the median of all, took that many times as long as the best one.
_CLEARLY_SLOWER, _HOPELESS, _TWICE = 1.05, 1.3, 2.0
# A gain counts where three quarters of the turns show it, and by more than this.
_LEAST_GAIN, _LEAST_TURNS = 0.01, 3
# Without an oracle, a config may be so many times as far from the expected results as the heuristic's.
_FURTHER = 2.0
_SHARE_FLOOR = 0.02


@dataclass(frozen=True)
class Turns:
    """How often two configs are timed in turns by a clock."""

    most: int
    early: int
    """After so many turns, a config that was clearly slower in all of them is ended."""
    confirming: int


# Recording a trace takes longer than the calls in it; its time is the median of up to 50 calls, without the host's part.
TURNS: dict[Clock, Turns] = {"wall": Turns(9, 3, 15), "device": Turns(3, 1, 5)}


def is_gain(ratios: Sequence[float]) -> bool:
    """Whether times, divided by those of another config in the same turns, show a gain beyond the noise."""
    if len(ratios) < _LEAST_TURNS:
        return False
    upper_quartile = statistics.quantiles(ratios, n=4)[2]
    return upper_quartile < 1 - _LEAST_GAIN


def is_slow(ratios: Sequence[float], early: int = TURNS["wall"].early) -> bool:
    """Whether the turns so far are enough to know that a config is slower."""
    if ratios[0] > _TWICE or (len(ratios) > 1 and min(ratios[:2]) > _HOPELESS):
        return True
    enough = len(ratios) >= early
    return enough and min(statistics.median(ratios), *ratios[-early:]) > _CLEARLY_SLOWER


@dataclass(frozen=True)
class Confirmed:
    """The config that was chosen and the heuristic's, timed in turns once more."""

    samples_s: tuple[float, ...]
    heuristic_samples_s: tuple[float, ...]
    gain: bool
    prepared: Outcome
    """What preparing it said: its errors, its compile time, its memory."""
    no_gain: str = "the gain over the heuristic is inside the noise"
    """Why the heuristic's config stays where there is no gain."""


class Bench:
    """Tries configs of a target on this device, with the workers of a crew."""

    settled = False

    def __init__(self, target: Target, crew: Crew, *, limit_s: float):
        self.target, self.side_by_side, self._crew, self._limit_s = target, crew.pool.jobs, crew, limit_s
        crew.recall()
        self._heuristic = target.heuristic
        """The heuristic's config, or one of the same program that was timed before it, such as what a table has."""
        self._best: Config | None = None
        self._ready: dict[Config, tuple[Worker, Outcome]] = {}
        """The best config so far and the heuristic's, with the workers that have them."""
        self._clock: Clock | None = None
        """The one clock of this target, which the first config that runs decides: times of two clocks are not compared."""
        self._no_device_time: str | None = None
        self._patience_s = limit_s
        """How long a config may take to be prepared: much longer than the first one, and it hangs."""
        self._allowed: dict[str, float] = {}
        """Errors that configs are held to where the oracle is not known: about those of the heuristic's config."""
        self._programs: dict[str, Config] = {}
        """The first config of each program: another one of the same program is not timed, since it cannot be faster."""

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        """Prepares configs side by side; times each that is right against the best one before it."""
        pool, began = self._crew.pool, time.monotonic()
        left, busy = list(configs), dict[Worker, Config]()
        prepared: dict[Config, tuple[Worker, dict[str, Any] | WorkerFailed]] = {}
        first = configs[0] if self._best is None else None  # The heuristic's, which others are compared with.
        try:
            while left or busy or prepared:
                for worker in pool.take(self._crew.about, len(left), wait=not busy and not prepared) if left else ():
                    busy[worker] = left.pop(0)
                    worker.ask("prepare", **self._request(busy[worker]), mode=self.target.mode)
                for worker, answer in answered(list(busy), self._patience_s).items() if busy else ():
                    prepared[busy.pop(worker)] = worker, answer
                while prepared and (pool.overlap or not busy) and first in (None, *prepared):
                    config = min(prepared, key=configs.index)
                    if config == first:
                        first, taken_s = None, time.monotonic() - began
                        self._patience_s = min(self._limit_s, _PATIENCE * taken_s + _PATIENCE_S)
                    worker, answer = prepared[config]
                    outcome = self._tried(worker, config, answer)
                    del prepared[config]
                    self._keep(worker, outcome)
                    yield outcome
        finally:
            for worker in (*busy, *(worker for worker, _ in prepared.values())):
                worker.close()
                self._crew.give_back(worker)

    def _request(self, config: Config) -> dict[str, Any]:
        configs = [each.to_json() for each in self.target.configs(config).values()]
        return {"configs": configs, "folder": self._crew.folder}

    def _tried(self, worker: Worker, config: Config, answer: dict[str, Any] | WorkerFailed) -> Outcome:
        """Judges and times a config that a worker has prepared."""
        if isinstance(answer, WorkerFailed):
            return Outcome(config, answer.kind, str(answer))
        metrics = {name: answer.get(name) for name in ("compile_s", "temp_bytes", "peak_bytes")}
        outcome = self._judged(Outcome(config, "prepared", metrics=metrics), answer["checks"])
        if outcome.status == "prepared":
            program = answer.get("program")
            first = config if program is None else self._programs.setdefault(program, config)
            # The heuristic's is timed if no worker has its program ready: the chosen config is compared with it.
            if first != config and (config != self._heuristic or first in self._ready):
                self._heuristic = first if config == self._heuristic else self._heuristic
                return dataclasses.replace(outcome, status="same", reason=f"the program is that of {first}")
            outcome = self._timed(worker, outcome)
        # The first one is what dispatch takes already.
        if outcome.better and self._best is not None and self.target.mode != BOTH and self.target.has_gradients:
            outcome = self._differentiated(worker, outcome)
        return outcome

    def _differentiated(self, worker: Worker, outcome: Outcome) -> Outcome:
        """Checks the gradients of a forward that is faster: what it saves for the backward may be wrong."""
        try:
            answer = worker.call("differentiate", limit_s=self._limit_s, **self._request(outcome.config))
            judged = self._judged(outcome, answer["checks"])
        except WorkerFailed as error:
            judged = dataclasses.replace(outcome, status=error.kind, reason=f"with its gradients: {error}")
        same = judged.status == outcome.status
        return judged if same else dataclasses.replace(judged, better=False, samples_s=())

    def _judged(self, outcome: Outcome, checks: Sequence[Mapping[str, Any]]) -> Outcome:
        """The outcome with the largest error; or that the config is wrong."""
        worst = max(checks, key=lambda check: (not check["ok"], check["share"]))
        errors = {"error": worst["share"], "error_in": worst["quantity"], "error_against": self._crew.expected_from}
        outcome = dataclasses.replace(outcome, metrics={**outcome.metrics, **errors})
        for check in checks:
            if not check["ok"] or not check["share"] <= self._allowed.get(check["quantity"], 1.0):
                reason = f"{check['quantity']}: {check['text']}"
                if check["ok"]:
                    reason += f", and the heuristic's config is more than {_FURTHER:g} times as close"
                return dataclasses.replace(outcome, status="wrong", reason=reason)
        if not self._allowed and self._crew.expected_from != ORACLE:
            self._allowed = {each["quantity"]: _FURTHER * each["share"] + _SHARE_FLOOR for each in checks}
        return outcome

    def _timed(self, worker: Worker, prepared: Outcome) -> Outcome:
        """Times a prepared config; in turns with the best one so far, where there is one."""
        ours: list[float] = []
        ratios: list[float] = []
        best = None if self._best is None else self._ready[self._best][0]
        try:
            with on_device(self._crew.pool.lock, alone=True):
                clock = self._clock_of(worker)
                for _ in range(TURNS[clock].most):
                    before = None if best is None else self._again(best, clock)["median"]
                    taken = self._sample(worker, clock)
                    ours += taken["samples"]
                    if before is not None:
                        ratios.append(taken["median"] / before)
                        if is_slow(ratios, TURNS[clock].early):
                            break
        except WorkerFailed as error:
            return dataclasses.replace(prepared, status=error.kind, reason=f"while it was timed: {error}")
        complete = not ratios or len(ratios) == TURNS[clock].most
        no_device_time = {"no_device_time": self._no_device_time} if self._no_device_time else {}
        return Outcome(
            prepared.config,
            "timed" if complete else "slow",
            better=best is None or (complete and is_gain(ratios)),
            ratio=statistics.median(ratios) if ratios else None,
            samples_s=tuple(ours),
            metrics={**prepared.metrics, "clock": clock, **no_device_time},
        )

    def _clock_of(self, worker: Worker) -> Clock:
        """The clock of this target. The first config that is timed decides it, by its time on the device.

        Not by its wall time, which may be the host's: a forward of 0.07 ms was judged by a wall time of 4.8 ms, and a
        config "gained" a factor of 7 because the host was less busy when it had its turns.
        """
        if self._clock is not None:
            return self._clock
        self._clock = "wall"
        if self.target.chip.platform != "cpu":
            try:
                if self._sample(worker, "device")["median"] < _DEVICE_BELOW_S:
                    self._clock = "device"
            except _NoDeviceTime as error:
                self._no_device_time = str(error)
        return self._clock

    def _sample(self, worker: Worker, clock: Clock) -> dict[str, Any]:
        taken = worker.call("sample", limit_s=self._limit_s, clock=clock)
        if "no_device_time" in taken:
            raise _NoDeviceTime("failed", taken["no_device_time"])
        return taken

    def _again(self, worker: Worker, clock: Clock) -> dict[str, Any]:
        """A turn of the best config or of the heuristic's. That it fails is an error of the tuner's, not of a config's."""
        try:
            return self._sample(worker, clock)
        except WorkerFailed as error:
            raise RuntimeError(
                f"{self.target.name}: a config that ran before failed when it was timed again: {error}"
            ) from error

    def _keep(self, worker: Worker, outcome: Outcome) -> None:
        """Sets the worker aside that has the best config or the heuristic's, and gives back the others."""
        before = self._best
        if outcome.better:
            self._best = outcome.config
        if outcome.better or (outcome.config == self._heuristic and outcome.status in ("timed", "slow")):
            self._ready[outcome.config] = worker, outcome
            self._crew.set_aside(worker)
        else:
            self._crew.give_back(worker)
        if before is not None and before not in (self._best, self._heuristic):
            self._crew.give_back(self._ready.pop(before)[0])

    def confirm(self, chosen: Config, beside: Config) -> Confirmed:
        """Times the best config and the heuristic's, which workers have ready, in more turns."""
        beside = self._heuristic if beside == self.target.heuristic else beside
        worker, prepared = self._ready[chosen]
        other = self._ready[beside][0] if beside in self._ready else None
        ours: list[float] = []
        theirs: list[float] = []
        ratios: list[float] = []
        assert self._clock is not None
        with on_device(self._crew.pool.lock, alone=True):
            for _ in range(TURNS[self._clock].confirming):
                before = None if other is None else self._again(other, self._clock)
                taken = self._again(worker, self._clock)
                ours += taken["samples"]
                if before is not None:
                    theirs += before["samples"]
                    ratios.append(taken["median"] / before["median"])
        gain = is_gain(ratios) if ratios else True
        return Confirmed(tuple(ours), tuple(theirs), gain, prepared)


class _NoDeviceTime(WorkerFailed):
    """The profiler has no device time of a config."""
