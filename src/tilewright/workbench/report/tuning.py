"""The section on tuning: each search, what it tried, and what was dropped."""

import math
from collections.abc import Mapping, Sequence

from tilewright.workbench.figures import seconds
from tilewright.workbench.report.charts import Axis, Line, Mark, draw
from tilewright.workbench.report.entries import Trial
from tilewright.workbench.report.parts import (
    Cell,
    Chart,
    Row,
    Section,
    Table,
    facets_of,
    kind_cell,
    name_cell,
    time_cell,
)

_LEAST_CHARTED = 3


def tuning(trials: Sequence[Trial]) -> Section | None:
    """The section; None where nothing was tuned."""
    searches: dict[tuple[str, ...], list[Trial]] = {}
    for trial in trials:
        searches.setdefault(trial.search, []).append(trial)
    rows, charts, wrong, of_others = [], [], list[Trial](), 0
    for every in searches.values():
        every.sort(key=lambda trial: trial.date)
        those = [trial for trial in every if trial.versions == every[-1].versions]
        of_others += len(every) - len(those)
        first, estimate = those[0], those[0].kind == "estimate"
        tried = _tried(those)
        wrong += [trial for trial in tried if not trial.counts and trial.verdict != "same"]
        counted = [trial for trial in tried if trial.counts and trial.seconds]
        verdicts: dict[str, int] = {}
        for trial in tried:
            verdicts[trial.verdict] = verdicts.get(trial.verdict, 0) + 1
        # Without one the search was not ended: the least time of a trial may be that of a quiet moment.
        chosen = next((trial for trial in reversed(those) if trial.verdict == "chosen"), None)
        # Both were timed in turns at the end; the first trial was timed when the device may have been in another state.
        beside = None if chosen is None else chosen.heuristic_s
        begun = beside or (counted[0].seconds if counted else None)
        gain = begun / chosen.seconds if begun and chosen is not None and chosen.seconds else None
        what = " ".join(filter(None, (first.implementation, first.direction, first.dtype)))
        cells = (
            kind_cell(first.kind),
            name_cell(first),
            Cell(what),
            Cell(first.chip),
            Cell(str(len(tried)), len(tried), under=f"({_counts(verdicts)})"),
            time_cell(begun, estimate=estimate),
            time_cell(None if chosen is None else chosen.seconds, estimate=estimate),
            Cell() if gain is None else Cell(f"{gain:.2f}x", gain, "good" if gain > 1 else ""),
            Cell("none: the search was not ended" if chosen is None else chosen.config),
        )
        rows.append(Row(cells, facets_of(first)))
        if len(counted) >= _LEAST_CHARTED:
            charts.append(
                _search_chart(f"tuning-{len(charts) + 1}", f"{first.op} {first.case}, {what}, {first.chip}", tried)
            )
    if not rows:
        return None
    columns = ("kind", "what", "search", "chip", "tried", "heuristic", "chosen", "gain", "its config")
    table = Table("tuning", columns, tuple(rows), right=columns[4:8])
    failed = Table(
        "dropped",
        ("what", "config", "verdict", "reason"),
        tuple(
            Row(
                (name_cell(trial), Cell(trial.config), Cell(trial.verdict, mark="bad"), Cell(trial.reason)),
                facets_of(trial),
            )
            for trial in wrong
        ),
    )
    text = (
        "Each search starts from the heuristic's config, so that the gain is what tuning brings over it. In a chart each "
        "mark is a config in the order in which they were tried, and the line is the best so far.",
        f"{len(wrong)} configs were dropped: a wrong, failed or pruned one never counts." if wrong else "",
        f"{of_others} earlier trials are not shown: they are of another version of the kernel or of jax."
        if of_others
        else "",
    )
    blocks: tuple[Table | Chart, ...] = (table, *charts, *((failed,) if wrong else ()))
    return Section("tuning", "Tuning", tuple(filter(None, text)), blocks)


def _tried(trials: Sequence[Trial]) -> list[Trial]:
    """One trial of each config, in the order in which they were first tried.

    A search that goes on tries some again. The last one counts, unless it found only that the program was timed already.
    """
    tried: dict[str, Trial] = {}
    for trial in trials:
        if trial.verdict != "chosen" and (trial.verdict != "same" or trial.config not in tried):
            tried[trial.config] = trial
    return list(tried.values())


def _counts(verdicts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in verdicts.items())


def _search_chart(name: str, title: str, tried: Sequence[Trial]) -> Chart:
    marks, best, line = [], math.inf, []
    for place, trial in enumerate(tried, 1):
        if trial.counts and trial.seconds:
            best = min(best, trial.seconds)
            line.append((float(place), best))
            marks.append(
                Mark(
                    place,
                    trial.seconds,
                    0,
                    f"{trial.config}: {seconds(trial.seconds)}",
                    estimate=trial.kind == "estimate",
                    facets=facets_of(trial),
                )
            )
    svg = draw(
        marks,
        [Line(tuple(line), 1, steps=True)],
        Axis("configs tried", lambda value: f"{value:g}", base=None),
        Axis("time", lambda value: seconds(value, 2)),
        label=f"{title}: time of each config tried, and the best so far",
        width=440,
        height=290,
    )
    return Chart(name, title, svg, small=True)
