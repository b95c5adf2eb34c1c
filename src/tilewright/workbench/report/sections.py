"""What a report tells, as tables, charts and sentences, for a page or for Markdown."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tilewright.core.dispatch import registered
from tilewright.workbench.figures import listed, memory, rate, ratio, seconds
from tilewright.workbench.records import DECODE_SIZED_S, now
from tilewright.workbench.report.charts import Axis, Line, Mark, colours_of, draw, legend
from tilewright.workbench.report.entries import NOT_SAID, Check, Entry, Found, MachineCode, chip_peaks, find_case
from tilewright.workbench.report.parts import (
    FACETS,
    Cell,
    Chart,
    Report,
    Row,
    Section,
    Table,
    facets_of,
    kind_cell,
    name_cell,
    time_cell,
)
from tilewright.workbench.report.tuning import tuning

_FITTED = 4
_LEAST_LENGTHS = 3
_LONGEST_LIST = 12
_SPEED = (
    *("kind", "what", "how", "implementation", "chip", "wall time", "device", "device, cold", "x fastest"),
    *("beside peers", "of ceiling", "rate", "temporary memory"),
)
"""The columns of the table of speed; those with nothing in them are left out."""


def build(found: Found, title: str) -> Report:
    """The report of what was read. A section with nothing in it is left out."""
    latest = sorted(found.latest, key=_order)
    timed = [entry for entry in latest if entry.wall_s is not None]
    sections = [
        _where(found),
        _speed(timed),
        _kernels(latest),
        _roofline(timed),
        _growth(timed),
        _errors(latest, found.checks),
        tuning(found.trials),
        _not_measured(found, latest),
    ]
    measured = [entry for entry in timed if entry.kind == "measured"]
    estimates = [entry for entry in timed if entry.kind == "estimate"]
    figures = {
        "measured": f"{len(measured):,}",
        "estimated": f"{len(estimates):,}",
        "checked": f"{sum(check.ok for check in found.checks)} of {len(found.checks)}" if found.checks else "",
        "tuning trials": f"{sum(trial.verdict != 'chosen' for trial in found.trials):,}" if found.trials else "",
        "failed": str(sum(bool(entry.failure) for entry in latest)),
        "chips": ", ".join(dict.fromkeys(entry.chip for entry in latest)),
        "dates": _between(entry.date[:10] for entry in found.entries),
    }
    facets = {
        name: tuple(
            dict.fromkeys(str(getattr(entry, name)) for entry in sorted(latest, key=lambda e: getattr(e, name)))
        )
        for name in FACETS
    }
    return Report(
        title,
        now(),
        {name: value for name, value in figures.items() if value},
        tuple(section for section in sections if section is not None),
        {name: values for name, values in facets.items() if len(values) > 1},
    )


def _order(entry: Entry) -> tuple[Any, ...]:
    """By op and case, with the numbers in their names as numbers: t2048 is before t16384."""
    pieces = [int(each) if each.isdigit() else each for each in re.split(r"(\d+)", entry.case)]
    return (entry.op, pieces, entry.dtype, entry.mode, entry.chip, entry.kind)


def _between(dates: Iterable[str]) -> str:
    known = sorted({date for date in dates if date})
    return "" if not known else known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _where(found: Found) -> Section:
    """Machines, versions and files."""
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in found.entries:
        versions = entry.versions
        key = (entry.chip, entry.device_kind, versions.get("jax", ""), entry.commit, entry.kind)
        groups.setdefault(key, []).append(entry)
    rows = []
    for (chip, device, jax_version, commit, kind), entries in groups.items():
        short = commit[:9] + ("-dirty" if commit.endswith("-dirty") else "")
        ops = list(dict.fromkeys(entry.op for entry in entries))
        files = list(dict.fromkeys(entry.source for entry in entries))
        others = {name: text for entry in entries for name, text in entry.versions.items() if name != "jax"}
        cells = (
            kind_cell(kind),
            Cell(chip, chip, under="" if device == chip else device),
            Cell(jax_version or NOT_SAID, jax_version, title=", ".join(f"{n} {v}" for n, v in others.items())),
            Cell(short or NOT_SAID, short, title=commit),
            Cell(_between(entry.date[:10] for entry in entries) or NOT_SAID),
            Cell(str(len(entries)), len(entries)),
            Cell(listed(ops), title=", ".join(ops)),
            Cell(listed(files, 3), mark="faint", title="\n".join(files)),
        )
        rows.append(Row(cells, {"kind": kind, "chip": chip}))
    earlier = len(found.entries) - len(found.latest)
    columns = ("kind", "chip", "jax", "commit", "date", "records", "ops", "files")
    table = Table("where", columns, tuple(rows), right=("records",))
    text = (
        "Each row is one chip, version and commit. A figure marked as an estimate was computed from a compiled schedule; "
        "no such chip was there, and it is a lower bound.",
        f"Earlier records are not shown ({earlier} of them): only the last one of each thing is." if earlier else "",
        f"Records that were read again count once: {found.repeated} were left out." if found.repeated else "",
    )
    return Section("where", "What ran where", tuple(filter(None, text)), (table,) if rows else ())


def _compared_s(one: Entry, other: Entry) -> tuple[float, float]:
    """The times by which two entries are compared, as records are (`comparable_samples`)."""
    assert one.wall_s is not None
    assert other.wall_s is not None
    small = min(one.wall_s, other.wall_s) < DECODE_SIZED_S
    if small and one.device_s is not None and other.device_s is not None:
        return one.device_s, other.device_s
    return one.wall_s, other.wall_s


def _speed(timed: Sequence[Entry]) -> Section | None:
    if not timed:
        return None
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in timed:
        groups.setdefault(entry.group, []).append(entry)
    has = {
        "device": any(entry.device_s is not None for entry in timed),
        "device, cold": any(entry.cold_s is not None for entry in timed),
        "beside peers": any(entry.peer and entry.agrees for entry in timed),
        "of ceiling": any(entry.of_ceiling is not None for entry in timed),
    }
    rows = []
    for group in groups.values():
        group.sort(key=lambda entry: entry.wall_s or math.inf)
        peers = [entry for entry in group if entry.peer and entry.agrees]
        right = [entry for entry in group if entry.agrees is not False]
        for entry in group:
            estimate = entry.kind == "estimate"
            cells = {
                "kind": kind_cell(entry.kind),
                "what": name_cell(entry),
                "how": Cell(entry.dtype, f"{entry.dtype} {entry.mode}", under=entry.mode),
                "implementation": Cell(
                    entry.implementation,
                    entry.implementation,
                    "peer" if entry.peer else "",
                    under="another library" if entry.peer else entry.config_source,
                    title=entry.config,
                ),
                "chip": Cell(entry.chip, entry.chip),
                "wall time": time_cell(
                    entry.wall_s, estimate=estimate, under="" if entry.spread is None else f"± {entry.spread:.1%}"
                ),
                "device": time_cell(entry.device_s, title=entry.no_device_time),
                "device, cold": time_cell(entry.cold_s),
                "x fastest": _of_fastest(entry, right),
                "beside peers": _beside_peers(entry, peers),
                "of ceiling": _share(None if entry.agrees is False else entry.of_ceiling),
                "rate": _rates(entry),
                "temporary memory": Cell(
                    "" if entry.temp_bytes is None else memory(entry.temp_bytes), entry.temp_bytes
                ),
            }
            rows.append(Row(tuple(cells[name] for name in _SPEED if has.get(name, True)), facets_of(entry)))
    columns = tuple(name for name in _SPEED if has.get(name, True))
    table = Table("speed", columns, tuple(rows), right=columns[5:])
    text = [
        "Wall time is the median of repeated samples, with the interquartile range divided by the median. x fastest "
        "compares with the fastest implementation of the same call on the same chip. A ratio with ~ is within the "
        "noise: no further from 1 than both spreads together.",
    ]
    if has["device"]:
        text.append(
            "Device time is the time in which the device works, from the profiler's trace; cold, with caches flushed "
            f"before each call. Calls below {seconds(DECODE_SIZED_S)} are compared by it."
        )
    if has["beside peers"]:
        text.append(
            "Beside peers: our time divided by that of the fastest other library that agrees; below 1 ours is faster."
        )
    if has["of ceiling"]:
        text.append(
            "The ceiling is the longer of the FLOPs at the chip's peak and the bytes at its bandwidth, with each input "
            "read and each output written once."
        )
    return Section("speed", "Speed", tuple(text), (table,))


def _of_fastest(entry: Entry, right: Sequence[Entry]) -> Cell:
    """The time divided by that of the fastest one whose results are right."""
    if entry.agrees is False:
        return Cell(
            "differs", None, "bad", title="its results differ from the reference's, so that its time does not count"
        )
    others = [each for each in right if each is not entry]
    if not others:
        return Cell()
    value, text = max(_quotient(entry, each) for each in others)
    return Cell(text, value) if value > 1 else Cell(ratio(1.0), 1.0, "good")


def _quotient(one: Entry, other: Entry) -> tuple[float, str]:
    times = _compared_s(one, other)
    value = times[0] / times[1] if times[1] else math.nan
    spreads = (one.spread, other.spread) if times == (one.wall_s, other.wall_s) else ()
    return value, ratio(value, *spreads)


def _beside_peers(entry: Entry, peers: Sequence[Entry]) -> Cell:
    if entry.peer or not peers:
        return Cell()
    best = max(peers, key=lambda peer: _quotient(entry, peer))
    if entry.agrees is False:
        return Cell("differs", None, "bad")
    value, text = _quotient(entry, best)
    return Cell(text, value, "good" if value <= 1 else "bad", under=f"of {best.implementation}")


def _share(value: float | None) -> Cell:
    return Cell() if value is None else Cell(f"{value:.{0 if value >= 0.095 else 1}%}", value, bar=min(value, 1.0))


def _rates(entry: Entry) -> Cell:
    time_s = entry.judged_s
    if not time_s or entry.flops is None or entry.kind == "estimate":
        return Cell()
    moved = "" if entry.bytes is None else rate(entry.bytes / time_s, "B/s", None)
    return Cell(rate(entry.flops / time_s, "FLOP/s", None), entry.flops / time_s, under=moved)


def _kernels(latest: Sequence[Entry]) -> Section | None:
    """Device time by kernel, and what the machine code of kernels that were compiled for a GPU has."""
    rows, blocks, text = [], [], []
    for entry in latest:
        total = sum(entry.kernels_s.values())
        for kernel, time_s in entry.kernels_s.items():
            cells = (
                kind_cell(entry.kind),
                name_cell(entry),
                Cell(entry.implementation, under=f"{entry.dtype} {entry.mode}"),
                Cell(entry.chip),
                Cell(kernel, kernel),
                time_cell(time_s, estimate=entry.kind == "estimate"),
                _share(time_s / total if total else None),
            )
            rows.append(Row(cells, facets_of(entry)))
    if rows:
        columns = ("kind", "what", "implementation", "chip", "kernel", "time", "share")
        text.append(
            "The time of each kernel on the device, per call, with warm caches; of an estimate, its lower bound."
        )
        blocks.append(Table("kernels", columns, tuple(rows), right=columns[5:]))
    if codes := [_machine_code(entry, code) for entry in latest for code in entry.machine_codes]:
        columns = (
            *("kind", "what", "implementation", "chip", "kernel", "registers", "shared memory", "blocks per SM"),
            *("spilled", "in loops", "steady state"),
        )
        text.append(
            "Kernels that were compiled for a GPU: figures of their machine code. Nothing was run, and no time is known."
        )
        blocks.append(Table("machine_code", columns, tuple(codes), right=columns[5:]))
    return Section("kernels", "Kernels", tuple(text), tuple(blocks)) if blocks else None


def _machine_code(entry: Entry, code: MachineCode) -> Row:
    cells = (
        kind_cell(entry.kind),
        name_cell(entry),
        Cell(entry.implementation, under=f"{entry.dtype} {entry.mode}"),
        Cell(entry.chip),
        Cell(code.kernel, code.kernel),
        Cell(str(code.registers), code.registers),
        Cell(memory(code.smem_bytes), code.smem_bytes),
        Cell(str(code.blocks), code.blocks),
        *(Cell(f"{size} B", size, "bad" if size else "") for size in (code.spilled_bytes, code.spilled_in_loops_bytes)),
        Cell("no loop") if code.steady_state is None else Cell(f"{code.steady_state:,}", code.steady_state),
    )
    return Row(cells, facets_of(entry))


def _tera(value: float) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:g} {prefix}"
    return f"{value:g}"


def _roofline(timed: Sequence[Entry]) -> Section | None:
    """FLOP/s over FLOPs per byte, below the roofs of each chip."""
    charts = []
    for chip in dict.fromkeys(entry.chip for entry in timed):
        here = [entry for entry in timed if entry.chip == chip and entry.agrees is not False]
        shown = [entry for entry in here if entry.of_ceiling and entry.flops and entry.bytes and entry.judged_s]
        if not shown:
            continue
        colours = colours_of(entry.implementation for entry in shown)
        marks = [
            Mark(
                entry.flops / entry.bytes,
                entry.flops / entry.judged_s,
                colours[entry.implementation],
                f"{entry.op} {entry.case} {entry.dtype}, {entry.mode}, {entry.implementation}: "
                f"{'at most ' if entry.kind == 'estimate' else ''}{rate(entry.flops / entry.judged_s, 'FLOP/s', None)}, "
                f"{entry.of_ceiling:.0%} of the ceiling{' (estimate)' if entry.kind == 'estimate' else ''}",
                estimate=entry.kind == "estimate",
                peer=entry.peer,
                facets=facets_of(entry),
            )
            for entry in shown
            if entry.flops and entry.bytes and entry.judged_s and entry.of_ceiling
        ]
        peaks_of = {dtype: chip_peaks(chip, dtype) for dtype in dict.fromkeys(entry.dtype for entry in shown)}
        ridges = [peaks[0] / peaks[1] for peaks in peaks_of.values() if peaks is not None]
        low, high = min(*ridges, *(mark.x for mark in marks)) / 4, max(*ridges, *(mark.x for mark in marks)) * 4
        lines = []
        for dtype, peaks in peaks_of.items():
            assert peaks is not None
            points = tuple((each, min(peaks[0], peaks[1] * each)) for each in (low, peaks[0] / peaks[1], high))
            lines.append(Line(points, label=f"{dtype}: {_tera(peaks[0])}FLOP/s, {_tera(peaks[1])}B/s"))
        svg = draw(
            marks,
            lines,
            Axis("FLOPs per byte", lambda value: f"{value:g}"),
            Axis("FLOP/s", _tera),
            label=f"Roofline of {chip}: {len(marks)} entries",
        )
        peers = {entry.implementation for entry in shown if entry.peer}
        estimates = any(mark.estimate for mark in marks)
        charts.append(Chart(f"roofline-{chip}", chip, svg, legend(colours, estimates=estimates, peers=peers)))
    if not charts:
        return None
    text = (
        "Each mark is one call: how many FLOPs it has per byte that it must move, and how many it does per second. The "
        "line is the most that the chip can do. A call on its sloped part is bound by memory, on its flat part by "
        "arithmetic.",
    )
    return Section("roofline", "Roofline", text, tuple(charts))


def _growth(timed: Sequence[Entry]) -> Section | None:
    """Time over length, for cases that differ in nothing else."""
    groups: dict[tuple[str, ...], dict[str, dict[float, Entry]]] = {}
    for entry in timed:
        placed = _length(entry)
        if placed is not None:
            family, series, length = placed
            key = (family, entry.mode, entry.dtype, entry.chip, entry.kind)
            groups.setdefault(key, {}).setdefault(series, {})[length] = entry
    charts = []
    for (family, mode, dtype, chip, kind), series in groups.items():
        if len({length for each in series.values() for length in each}) < _LEAST_LENGTHS:
            continue
        colours = colours_of(series)
        marks, lines, names = [], [], {}
        for name, by_length in series.items():
            points = [(length, entry.wall_s) for length, entry in sorted(by_length.items()) if entry.wall_s]
            slope = _slope(points)
            names[name if slope is None else f"{name}: T^{slope:.2f}"] = colours[name]
            lines.append(Line(tuple(points), colours[name], dashed=kind == "estimate"))
            marks += [
                Mark(
                    length,
                    time_s,
                    colours[name],
                    f"{name}, {length:,.0f} tokens: {seconds(time_s)}",
                    estimate=kind == "estimate",
                    facets=facets_of(by_length[length]),
                )
                for length, time_s in points
            ]
        svg = draw(
            marks,
            lines,
            Axis("tokens", _short_count, base=2),
            Axis("wall time" if kind == "measured" else "lower bound of the time", lambda value: seconds(value, 1)),
            label=f"{family}: time over tokens",
            width=440,
            height=290,
        )
        title = f"{family}, {mode}, {dtype}, {chip}{' (estimate)' if kind == 'estimate' else ''}"
        charts.append(Chart(f"growth-{len(charts) + 1}", title, svg, legend(names), small=True))
    if not charts:
        return None
    text = (
        f"Cases that differ in their length alone. T^p is the growth over the last {_FITTED} lengths: 1 is linear, 2 is "
        "quadratic.",
    )
    return Section("growth", "Growth with length", text, tuple(charts))


def _short_count(value: float) -> str:
    return f"{value / 1024:g}k" if value >= 1024 else f"{value:g}"


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    last = [(math.log(x), math.log(y)) for x, y in points[-_FITTED:] if y > 0]
    if len(last) < _LEAST_LENGTHS:
        return None
    return statistics.linear_regression([x for x, _ in last], [y for _, y in last]).slope


def _length(entry: Entry) -> tuple[str, str, float] | None:
    """What an entry is a length of: its family of cases, its series in the chart, and the length.

    Records of layers have their tokens. The cases of an op are of one family where their arrays differ in nothing but the
    second size of the first array, wherever it occurs.
    """
    if entry.tokens:
        return "layers", f"{entry.op} ({entry.implementation})", entry.tokens
    case = find_case(entry.op, entry.case)
    shapes = [] if case is None else [spec.shape for spec in case.inputs.values()]
    if case is None or not shapes or len(shapes[0]) < 3:
        return None
    length = shapes[0][1]
    rest = [[("T" if size == length else str(size)) for size in shape] for shape in shapes]
    arrays = ", ".join(f"{name} [{', '.join(shape)}]" for name, shape in zip(case.inputs, rest, strict=True))
    options = "".join(f", {name}={value!r}" for name, value in sorted(case.options.items()))
    return f"{entry.op}: {arrays}{options}", entry.implementation, float(length)


def _errors(latest: Sequence[Entry], checks: Sequence[Check]) -> Section | None:
    rows = []
    for check in checks:
        share = check.error / check.bound if check.error is not None and check.bound else None
        where = f"{check.chip}, in the interpreter" if check.interpreted else check.chip
        rows.append(
            _error_row(
                check, where, "the oracle, in float64", check.worst, check.error, check.bound, share, ok=check.ok
            )
        )
    for entry in latest:
        if entry.agrees is not None:
            share = entry.error / entry.error_bound if entry.error is not None and entry.error_bound else None
            rows.append(
                _error_row(
                    entry,
                    entry.chip,
                    "the reference",
                    entry.error_in,
                    entry.error,
                    entry.error_bound,
                    share,
                    ok=entry.agrees,
                )
            )
    if not rows:
        return None
    columns = ("verdict", "what", "implementation", "where", "against", "worst in", "error", "bound", "of bound")
    bad = sum(row.cells[0].mark == "bad" for row in rows)
    text = (
        f"{len(rows) - bad} of {len(rows)} are within their bounds. Each row is the output or gradient that came closest "
        "to its bound, or went beyond it.",
    )
    return Section("errors", "Errors", text, (Table("errors", columns, tuple(rows), right=columns[6:]),))


def _error_row(
    of: Check | Entry,
    where: str,
    against: str,
    worst: str,
    error: float | None,
    bound: float | None,
    share: float | None,
    *,
    ok: bool,
) -> Row:
    cells = (
        Cell("agrees" if ok else "DIFFERS", "1" if ok else "0", "good" if ok else "bad"),
        name_cell(of),
        Cell(of.implementation, under=of.dtype),
        Cell(where),
        Cell(against),
        Cell(worst),
        Cell("not finite" if error is None else f"{error:.1e}", error),
        Cell("" if bound is None else f"{bound:.1e}", bound),
        _share(share) if share is not None else Cell(),
    )
    return Row(cells, facets_of(of))


def _not_measured(found: Found, latest: Sequence[Entry]) -> Section:
    rows = [Row((Cell(what), Cell(which), Cell(why)), {}) for what, which, why in _gaps(found, latest)]
    table = Table("not_measured", ("what", "which", "why"), tuple(rows))
    text = ("What these records do not show, among the ops, cases and implementations of this version.",)
    return Section("not_measured", "What was not measured", text, (table,) if rows else ())


def _gaps(found: Found, latest: Sequence[Entry]) -> Iterator[tuple[str, str, str]]:
    for entry in latest:
        which = f"{entry.op} {entry.case} {entry.dtype}, {entry.mode}, {entry.implementation}, {entry.chip}"
        if entry.failure:
            yield "failed", which, entry.failure
        if entry.not_judged:
            yield "timed, not compared with the reference", which, entry.not_judged
        if entry.kind == "estimate" and entry.wall_s is None and not (entry.failure or entry.machine_codes):
            yield "estimated time", which, "it compiled, and its schedule could not be estimated"
    timed = [entry for entry in latest if entry.wall_s is not None]
    measured = [entry for entry in timed if entry.kind == "measured"]
    reasons: dict[str, list[Entry]] = {}
    for entry in measured:
        if entry.device_s is None:
            reasons.setdefault(
                entry.no_device_time or "the record does not say; it may be of an earlier version", []
            ).append(entry)
    for reason, entries in reasons.items():
        chips = ", ".join(dict.fromkeys(entry.chip for entry in entries))
        yield "device time", f"{len(entries)} entries on {chips}", reason
    both = {(entry.op, entry.chip): entry.kind for entry in sorted(timed, key=lambda entry: entry.kind)}
    for (op, chip), kind in both.items():
        if kind == "estimate":
            yield "measured time", f"{op} on {chip}", "estimated only: no such chip was there"
    ops = registered()
    for op in dict.fromkeys(entry.op for entry in measured if entry.op in ops):
        mine = [entry for entry in measured if entry.op == op]
        absent = [name for name in ops[op].implementations if name not in {entry.implementation for entry in mine}]
        if absent:
            yield "implementations", f"{op}: {', '.join(absent)}", "no measurement of them"
        for chip in dict.fromkeys(entry.chip for entry in mine if entry.chip != NOT_SAID):
            had = {entry.case for entry in mine if entry.chip == chip}
            cases = [case.name for case in ops[op].cases if case.name not in had and case.small == (chip == "cpu")]
            if cases:
                yield (
                    "cases",
                    f"{op} on {chip}: {listed(cases, _LONGEST_LIST)}",
                    f"no measurement of {len(cases)} of them",
                )
    if missing := [op for op in ops if op not in {entry.op for entry in measured}]:
        yield "ops", listed(missing, len(missing)), "no measurement of them"
    for place in found.unread[:_LONGEST_LIST]:
        where, _, why = place.partition(": ")
        yield "lines that were not read", where, why
    if len(found.unread) > _LONGEST_LIST:
        yield "lines that were not read", f"{len(found.unread) - _LONGEST_LIST} more", "as above"
