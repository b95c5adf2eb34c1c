"""The order in which configs are tried: all of a small space, nearest first; in a large one, a local search.

A search of the neighbours is shorter: it tries what is one step away in one field, goes on from the best of them, and ends
where none is faster.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from tilewright.core.config import Config
from tilewright.workbench.tuning.space import Space, dominates

Reach = Literal["all", "neighbours"]
# A space with no more configs than this is tried as a whole.
EXHAUSTIVE = 64
# What ends a config for good, and those that need as much memory or more.
DEADLY = ("crashed", "hung", "out of memory")


@dataclass(frozen=True)
class Outcome:
    """What became of one config.

    `status`: timed, slow, estimated, same (a program that was timed), wrong, refused, failed, crashed, hung, out of memory.
    """

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
    reach: Reach = "all"
    always: Sequence[Config] = ()
    """What is tried even if the budget is spent, as the start is: others are compared with it."""
    best: Config | None = None
    complete: bool = False
    """Whether it ended by itself, and not with its budget."""
    _cut_off: bool = False
    """Whether the budget has left something untried."""

    def run(self, first: Sequence[Config]) -> Iterator[Outcome]:
        """Tries configs until none is left or the budget is spent. `first` are tried before the others."""
        start, sweeps = self.space.start, [self._line_of(name) for name in self.space.choices]
        every = self.space.every(EXHAUSTIVE) if self.reach == "all" else None
        # What is tried beside the first ones, while there are workers for it.
        beside = self._nearest() if self.reach == "neighbours" or not sweeps else sweeps[0]()
        yield from self._try([start, *first, *(every or beside)])
        if every is None and self.reach == "all":
            yield from self._until_unchanged(*sweeps)
        if every is None:
            yield from self._until_unchanged(self._nearest)
        self.complete = self.evaluator.settled or not self._cut_off

    def _line_of(self, name: str) -> Callable[[], list[Config]]:
        return lambda: self.space.line(self.best or self.space.start, name)

    def _nearest(self) -> list[Config]:
        around = self.best or self.space.start
        return list(self.space.neighbours(around, fields=1 if self.reach == "neighbours" else 2))

    def _until_unchanged(self, *sweeps: Callable[[], list[Config]]) -> Iterator[Outcome]:
        """Tries what each sweep has for the best config so far, again and again until that one stays the best."""
        before: Any = self
        while before != self.best and not self._cut_off and not self.evaluator.settled:
            before = self.best
            for sweep in sweeps:
                yield from self._try(sweep())

    def _try(self, configs: Sequence[Config]) -> Iterator[Outcome]:
        left = list(dict.fromkeys(configs))
        while left := [config for config in left if config not in self.tried and not self._pruned(config)]:
            admitted = [config for config in left if self._admits(config)]
            if not admitted:
                self._cut_off = True
                return
            batch = admitted[: self.evaluator.side_by_side]
            for outcome in self.evaluator.evaluate(batch):
                self.tried[outcome.config] = outcome.status
                if outcome.better:
                    self.best = outcome.config
                yield outcome

    def _admits(self, config: Config) -> bool:
        due = config in (self.space.start, *self.always)
        return not self.evaluator.settled and (due or not self.budget.spent)

    def _pruned(self, config: Config) -> bool:
        return any(status in DEADLY and dominates(config, failed) for failed, status in self.tried.items())
