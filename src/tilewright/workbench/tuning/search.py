"""The order in which configs are tried: all of a small space, nearest first; in a large one, a local search."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tilewright.core.config import Config
from tilewright.workbench.tuning.space import Space, dominates

# A space with no more configs than this is tried as a whole.
EXHAUSTIVE = 64
# What ends a config for good, and those that need as much memory or more.
DEADLY = ("crashed", "hung", "out of memory")


@dataclass(frozen=True)
class Outcome:
    """What became of one config. `status`: timed, slow, estimated, wrong, refused, failed, crashed, hung, out of memory."""

    config: Config
    status: str
    reason: str = ""
    better: bool = False
    """Whether it is faster than the best one before it, beyond the noise."""
    ratio: float | None = None
    """Its time divided by that of the best one before it, in the same turns."""
    samples_s: tuple[float, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """compile_s, temp_bytes, peak_bytes, error (as a fraction of its bound), error_in, error_against, estimate_s."""


@runtime_checkable
class Evaluator(Protocol):
    """Tries configs, one after another, each against the best one before it."""

    side_by_side: int
    """How many configs are prepared at the same time."""
    settled: bool
    """Whether no config can be faster than the best one so far."""

    def evaluate(self, configs: Sequence[Config]) -> Iterator[Outcome]: ...


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @property
    def spent(self) -> bool:
        return self.left_s <= 0


@dataclass
class Search:
    """A search from `space.start`. `best` is the best config so far; None until one could run."""

    space: Space
    evaluator: Evaluator
    budget: Budget
    tried: dict[Config, str] = field(default_factory=dict)
    """The status of every config that is not to be tried (again)."""
    best: Config | None = None
    complete: bool = False
    """Whether it ended by itself, and not with its budget."""
    _began: bool = False
    """The first config is tried even if the budget is spent."""

    def run(self, first: Sequence[Config]) -> Iterator[Outcome]:
        """Tries configs until none is left or the budget is spent. `first` are tried before the others."""
        every = self.space.every(EXHAUSTIVE)
        start = [self.space.start, *first]
        # What is tried beside the first ones, while there are workers for it.
        name = next(iter(self.space.choices), None)
        yield from self._try([*start, *(every or (self.space.line(self.space.start, name) if name else ()))])
        if every is None:
            yield from self._local()
        self.complete = self.evaluator.settled or not self.budget.spent

    def _local(self) -> Iterator[Outcome]:
        """Goes through the fields, taking the best value of each, until nothing changes; then sweeps the neighbours."""
        before: Any = self
        while before != self.best and not self._over:
            before = self.best
            for name in self.space.choices:
                yield from self._try(self.space.line(self.best or self.space.start, name))
        before = self
        while before != self.best and not self._over:
            before = self.best
            yield from self._try(list(self.space.neighbours(self.best or self.space.start)))

    def _try(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        left = list(dict.fromkeys(configs))
        while left and not (self._began and self._over):
            batch: list[Config] = []
            most = 1 if self._over else self.evaluator.side_by_side
            while left and len(batch) < most:
                config = left.pop(0)
                if config not in self.tried and not self._pruned(config):
                    batch.append(config)
            if not batch:
                return
            self._began = True
            for outcome in self.evaluator.evaluate(batch):
                self.tried[outcome.config] = outcome.status
                if outcome.better:
                    self.best = outcome.config
                yield outcome

    @property
    def _over(self) -> bool:
        return self.budget.spent or self.evaluator.settled

    def _pruned(self, config: Config) -> bool:
        return any(status in DEADLY and dominates(config, failed) for failed, status in self.tried.items())
