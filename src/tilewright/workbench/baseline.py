"""A regression gate: records of now beside earlier ones of the same op, case, dtype, mode, implementation and chip.

A change is within the noise unless the medians differ by more than the spreads (interquartile ranges) of both runs
together, and by more than a floor. The floor is for what differs between two runs and not within one, such as clocks and
where the arrays lie.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright.workbench.records import Record, comparable_samples, read_records, relative_spread

_FLOORS = {"wall": 0.05, "device": 0.02}
_VERSIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclass(frozen=True)
class Change:
    """A record of now and the earlier one that it is compared with."""

    now: Record
    before: Record
    basis: Literal["device", "wall"]
    now_s: float
    before_s: float
    noise: float
    """How far a ratio may be from 1, as a fraction."""

    @property
    def can_show_a_doubling(self) -> bool:
        """Whether the noise is low enough to tell twice the time from the same time."""
        return self.noise < 1

    @property
    def verdict(self) -> Literal["slower", "faster", "same"]:
        if self.now_s > self.before_s * (1 + self.noise):
            return "slower"
        return "faster" if self.now_s * (1 + self.noise) < self.before_s else "same"


@dataclass(frozen=True)
class Comparison:
    """What became of the entries of a baseline."""

    changes: tuple[Change, ...]
    without_baseline: tuple[Record, ...]
    """Measured now, with no earlier record at all."""
    other_chip: tuple[tuple[Record, Record], ...]
    """Measured now, with an earlier record of another chip, which is not compared."""
    not_measured: tuple[Record, ...]
    """Of the same ops, modes, dtypes and chip in the baseline, and not measured now."""

    scopes: tuple[str, ...]
    """What the baseline has, such as "rms_norm forward bfloat16 on h200"."""

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == "slower")

    @property
    def passes(self) -> bool:
        """Whether something was compared, and nothing is slower."""
        return bool(self.changes) and not self.slower

    @property
    def other_versions(self) -> list[str]:
        """The versions that differ from the baseline's, such as "jax 0.12.0 (then 0.11.2)"."""
        found = dict.fromkeys(
            f"{name} {now} (then {before})"
            for change in self.changes
            for name in _VERSIONS
            if (now := change.now.provenance.versions.get(name)) is not None
            and (before := change.before.provenance.versions.get(name)) is not None
            and now != before
        )
        return list(found)


def read_baseline(path: Path) -> list[Record]:
    """The measurements in a file of records. Raises `ValueError` with the line where one cannot be read."""
    if not path.is_file():
        raise ValueError(f"--baseline {path} is not a file; pass a file that --records wrote")
    try:
        timed = [record for record in read_records(path) if record.kind == "bench" and record.samples_s]
    except ValueError as error:
        raise ValueError(f"--baseline {error}") from error
    if not timed:
        raise ValueError(f"--baseline {path} has no measurement; pass a file that --records wrote")
    return timed


def compare(records: Iterable[Record], baseline: Sequence[Record]) -> Comparison:
    """Compares each record that has samples with the last one of the baseline that it can be compared with."""
    timed = [record for record in records if record.samples_s]
    earlier = [record for record in baseline if record not in timed]
    changes: list[Change] = []
    without: list[Record] = []
    other_chip: list[tuple[Record, Record]] = []
    for now in timed:
        same = [record for record in earlier if _key(record) == _key(now)]
        here = [record for record in same if record.provenance.chip == now.provenance.chip]
        if here:
            changes.append(_change(now, here[-1]))
        elif same:
            other_chip.append((now, same[-1]))
        else:
            without.append(now)
    scopes = {_scope(record) for record in timed}
    keys = {_key(record) for record in timed}
    left = {_key(record): record for record in earlier if _scope(record) in scopes and _key(record) not in keys}
    had = dict.fromkeys(f"{op} {mode} {dtype} on {chip}" for op, dtype, mode, chip in map(_scope, earlier))
    return Comparison(tuple(changes), tuple(without), tuple(other_chip), tuple(left.values()), tuple(had))


def _key(record: Record) -> tuple[str, ...]:
    return (record.op, record.case, record.dtype, record.mode, record.implementation)


def _scope(record: Record) -> tuple[str, ...]:
    return (record.op, record.dtype, record.mode, record.provenance.chip)


def _change(now: Record, before: Record) -> Change:
    samples, samples_before, basis = comparable_samples(now, before)
    spreads = [relative_spread(each) for each in (samples, samples_before)]
    noise = max(_FLOORS[basis], math.hypot(*(0.0 if math.isnan(each) else each for each in spreads)))
    return Change(now, before, basis, statistics.median(samples), statistics.median(samples_before), noise)
