"""Tunes one target: goes on from earlier records, searches, confirms what it found, and makes the entry of the table."""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tilewright.core import tuned
from tilewright.core.config import Config
from tilewright.workbench.records import Record
from tilewright.workbench.tuning import results
from tilewright.workbench.tuning.measure import Confirmed
from tilewright.workbench.tuning.search import Budget, Evaluator, Outcome, Reach, Search
from tilewright.workbench.tuning.space import Space
from tilewright.workbench.tuning.target import Target


@runtime_checkable
class Trial(Evaluator, Protocol):
    """An evaluator that can also time its choice once more."""

    def confirm(self, chosen: Config, beside: Config) -> Confirmed: ...


@dataclass(frozen=True)
class Tuned:
    """What came of tuning a target."""

    target: Target
    chosen: Config | None
    """None where no config could run."""
    record: Record | None
    """The record to make an entry of; None where the table keeps what it has."""
    seconds: float | None
    """The time of the entry, new or kept; None where there is none."""
    heuristic_s: float | None
    counts: Mapping[str, int]
    complete: bool
    """Whether the search ended by itself, and not with its budget."""
    note: str = ""
    of: int | None = None
    """How many configs there are; None where they are too many to count."""
    clock: str | None = None
    """What the times are of: "wall" or "device"; None for estimates."""
    interrupted: bool = False

    @property
    def gain(self) -> float | None:
        return self.heuristic_s / self.seconds if self.heuristic_s and self.seconds else None


def tune(
    target: Target,
    trial: Trial,
    *,
    budget_s: float,
    records: Path,
    say: Callable[[Outcome], None],
    reach: Reach = "all",
) -> Tuned:
    """Searches the configs of a target. Each is a line of `records` as soon as it was tried."""
    heuristic = target.heuristic
    known = target.known()
    held = next((found for found in known if found.exact), None)
    # What was measured before is what a new config has to beat.
    keeps = held is not None and held.entry.kind == "measured" and target.refusal(held.config) is None
    start = held.config if held is not None and keeps else heuristic
    kind = type(heuristic)
    before = {tuned.read_config(json.loads(text), kind): record for text, record in _earlier(records, target).items()}
    lent = [config for found in known[:2] if (config := found.config_with(lambda: heuristic)) is not None]
    first = [heuristic, *(config for config in lent if target.refusal(config) is None)]
    first += [tuned.read_config(each.configs[target.direction], kind) for each in results.best_of(before.values())]
    tried = {
        config: str(record.metrics["outcome"]) for config, record in before.items() if config not in (start, *first)
    }
    outcomes: dict[Config, Outcome] = {}
    budget = Budget(budget_s)
    search = Search(Space(start, target.refusal), trial, budget, tried, reach, always=(heuristic,))
    for outcome in search.run(first):
        outcomes[outcome.config] = outcome
        results.append(records, results.record_of(target, outcome))
        say(outcome)
    counts = Counter(outcome.status for outcome in outcomes.values())
    if skipped := len(before.keys() - outcomes.keys()):
        counts["from before"] = skipped
    if search.best is None:
        note = "no config could run and was right"
        return Tuned(target, None, None, None, None, counts, search.complete, note, search.space.size())
    confirmed = None if search.best == heuristic else trial.confirm(search.best, heuristic)
    return _settled(target, search, outcomes, confirmed, counts, held if keeps else None, records)


def _earlier(records: Path, target: Target) -> dict[str, Record]:
    return results.earlier(results.read(records), target)


def _settled(
    target: Target,
    search: Search,
    outcomes: Mapping[Config, Outcome],
    confirmed: Confirmed | None,
    counts: Mapping[str, int],
    held: tuned.Found | None,
    records: Path,
) -> Tuned:
    """Takes the best config if it is faster than the heuristic's beyond the noise, and the heuristic's if not."""
    heuristic, chosen = target.heuristic, search.best
    assert chosen is not None
    if confirmed is None:
        outcome = outcomes[heuristic]
        theirs = outcome.samples_s
        heuristic_s = _seconds(outcome)
    else:
        outcome = dataclasses.replace(confirmed.prepared, samples_s=confirmed.samples_s, status="timed")
        theirs = confirmed.heuristic_samples_s
        heuristic_s = _median(theirs) or confirmed.prepared.metrics.get("heuristic_s")
    seconds, note = _seconds(outcome), ""
    if confirmed is not None and not confirmed.gain:
        note = confirmed.no_gain
        chosen, seconds = heuristic, heuristic_s
        outcome = dataclasses.replace(
            outcomes.get(heuristic, outcome), config=heuristic, samples_s=theirs or outcome.samples_s
        )
    complete, of, clock = search.complete, search.space.size(), outcome.metrics.get("clock")
    if not complete and chosen == heuristic and held is None:
        note = (
            note or "nothing that was tried is faster than the heuristic's config, and the search did not end: no entry"
        )
        return Tuned(target, chosen, None, None, heuristic_s, counts, complete, note, of, clock)
    unchanged = held is not None and (held.config == chosen or (confirmed is not None and not confirmed.gain))
    if unchanged and held is not None and held.entry.provenance.get("source") == target.source:
        note = note or "the table has this config already"
        return Tuned(target, held.config, None, seconds, heuristic_s, counts, complete, note, of, clock)
    record = results.record_of(
        target,
        outcome,
        results.CHOSEN,
        heuristic_s=heuristic_s,
        heuristic=json.dumps(heuristic.to_json()),
        on_chip_bytes=json.dumps(target.on_chip_bytes(chosen)),
        complete=complete,
        reach=search.reach,
        tried=len(search.tried),
        of=of,
    )
    results.append(records, record)
    return Tuned(target, chosen, record, seconds, heuristic_s, counts, complete, note, of, clock)


def _seconds(outcome: Outcome) -> float | None:
    estimate: Any = outcome.metrics.get("estimate_s")
    return _median(outcome.samples_s) if estimate is None else float(estimate)


def _median(samples_s: tuple[float, ...]) -> float | None:
    return statistics.median(samples_s) if samples_s else None
