"""`tilewright bench`: times the implementations of an op side by side, with their memory."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import (
    Entries,
    arguments,
    check_seconds,
    console,
    new_table,
    split_names,
    try_writing,
    writing,
)
from tilewright.cli.ship import runs_elsewhere
from tilewright.core.dispatch import Op, find_op
from tilewright.core.target import default_device
from tilewright.workbench.baseline import compare, read_baseline
from tilewright.workbench.bench import Mode, Timing, bench_case, bench_record
from tilewright.workbench.check import DTYPES
from tilewright.workbench.figures import listed, memory, rate, ratio, seconds
from tilewright.workbench.peers.agreement import Wanted
from tilewright.workbench.peers.beside import leave_room
from tilewright.workbench.peers.compare import bench_peer
from tilewright.workbench.peers.registry import Peer, absent, peers
from tilewright.workbench.plot import check_plot, plot_bench
from tilewright.workbench.records import DECODE_SIZED_S, Record, append_records, comparable_samples, relative_spread


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    op: Op
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    implementations: tuple[str, ...]
    against: tuple[Peer, ...]
    baseline: tuple[Record, ...] | None


def _settle(
    op: str,
    implementation: str | None,
    case: str | None,
    dtype: str,
    *,
    seconds_each: float,
    against: str | None,
    peer_python: str | None,
    records: Path,
    plot: Path | None,
    compile_only: bool,
    baseline: Path | None,
    **_: Any,
) -> _Asked:
    """Resolves the names on the command line (op, cases, dtypes, implementations and peers), and tries its files."""
    found = find_op(op)
    check_seconds(seconds_each, "seconds")
    if plot is not None and compile_only:
        raise ValueError("--plot draws times and --compile-only takes none; leave one of them out")
    if against is not None and compile_only:
        raise ValueError("--against times peers and --compile-only takes no times; leave one of them out")
    if baseline is not None and compile_only:
        raise ValueError("--baseline compares times and --compile-only takes none; leave one of them out")
    if peer_python is not None and against is None:
        raise ValueError("--peer-python is where peers are installed; name them with --against, or leave it out")
    known = peers()
    named = () if against is None else split_names(None if against == "all" else against, tuple(known), "against")
    chosen = tuple(known[name] for name in named)
    if any(peer.tensors is not None for peer in chosen):
        leave_room()
    asked = _Asked(
        found,
        _chosen_cases(found, case),
        split_names(dtype, DTYPES, "dtype"),
        split_names(implementation, found.implementations, "implementation"),
        chosen,
        None if baseline is None else tuple(read_baseline(baseline)),
    )
    if plot is not None:
        check_plot(plot)
    try_writing(records=records, plot=plot)
    return asked


def _show_fetched(done: list[Record], *, baseline: Path | None, **given: Any) -> None:
    """What the verb prints, of records that another machine made."""
    _show(done, **given)
    if baseline is not None and not _passes(done, read_baseline(baseline)):
        raise typer.Exit(1)


def _show(done: list[Record], *, records: Path, plot: Path | None, quiet: bool, **_: Any) -> None:
    tell(records=[told_record(record) for record in done], appended_to=records)
    if done and not quiet:
        console().print(_table(done))
        for note in _notes(done):
            console().print(note, soft_wrap=True)
        console().print(f"{len(done)} records appended to {records}")
    if plot is not None and any(record.samples_s for record in done):
        with writing("plot", plot):
            plot_bench(done, plot)
        console().print(f"plot: {plot}")


def _notes(done: list[Record]) -> list[str]:
    """What the figures of a comparison mean, and where a peer computed something else."""
    judged = [record for record in done if "agrees" in record.metrics]
    notes = _device_notes(done)
    by_device = f"; calls below {seconds(DECODE_SIZED_S)} are judged by device time where both have one"
    notes += [
        f"ours / it: the time of our first implementation divided by this one's; below 1 ours is faster{by_device}. "
        f"error: the largest of any output or gradient, against {first['error_against']}; up to "
        f"{first['error_tolerance']:g} agrees."
        for first in (record.metrics for record in judged[:1])
    ]
    for key, words in (("lacks", "does not compute"), ("instead", "was run and judged with")):
        for name, what in dict.fromkeys((r.implementation, r.metrics[key]) for r in judged if key in r.metrics):
            notes.append(f"{name} {words} {what}.")
    for record in done:
        which = f"{record.implementation} {record.case} {record.dtype}"
        if record.metrics.get("agrees") is False:
            notes.append(f"[bold red]differs:[/] {which}: {escape(str(record.metrics['error_in']))}, {_error(record)}")
        if "not_judged" in record.metrics:
            notes.append(f"[bold red]not compared:[/] {escape(f'{which}: {record.metrics["not_judged"]}')}")
    return notes


def _passes(done: list[Record], baseline: Sequence[Record]) -> bool:
    """Prints how the records compare with the baseline's. Returns whether some were compared and none is slower."""
    found, out = compare(done, baseline), console()

    def named(record: Record) -> dict[str, Any]:
        return {name: getattr(record, name) for name in ("op", "implementation", "case", "dtype", "mode")}

    tell(
        baseline=[
            named(change.now)
            | {name: getattr(change, name) for name in ("verdict", "now_s", "before_s", "noise", "basis")}
            for change in found.changes
        ],
        not_compared=[
            {"why": why} | named(record)
            for why, records in {
                "no baseline": found.without_baseline,
                "not measured now": found.not_measured,
                "baseline of another chip": [now for now, _ in found.other_chip],
            }.items()
            for record in records
        ],
    )

    def names(records: Iterable[Record]) -> str:
        return escape(", ".join(f"{each.implementation} {each.case} {each.dtype}" for each in records))

    marks = {"slower": "[bold red]slower:[/]", "faster": "[green]faster:[/]", "same": "slower, within the noise:"}
    for change in found.changes:
        if change.verdict == "same" and change.now_s <= change.before_s:
            continue
        percent = 100 * (change.now_s / change.before_s - 1)
        out.print(
            f"{marks[change.verdict]} {names([change.now])}: {seconds(change.now_s)}, was "
            f"{seconds(change.before_s)} on {change.before.provenance.date[:10]} ({percent:+.1f} %, {change.basis} time, "
            f"noise {100 * change.noise:.1f} %)",
            highlight=False,
            soft_wrap=True,
        )
    if noisy := [change.now for change in found.changes if not change.can_show_a_doubling]:
        out.print(
            f"[bold yellow]too noisy:[/] {names(noisy)}: twice the time would be within the noise; measure both runs "
            f"longer (--seconds), on an idle machine",
            highlight=False,
            soft_wrap=True,
        )
    same = sum(change.verdict == "same" for change in found.changes)
    out.print(
        f"baseline: {len(found.changes)} compared, {len(found.slower)} slower, {same} within the noise", highlight=False
    )
    if not found.changes:
        why = "nothing was timed"
        if any(record.samples_s for record in done):
            why = "no record of the baseline is of the same op, case, dtype, mode, implementation and chip"
        has = listed(found.scopes) or "these records only"
        out.print(
            f"[bold red]nothing could be compared:[/] {escape(f'{why}; the baseline has {has}')}",
            highlight=False,
            soft_wrap=True,
        )
    lines = {
        "other versions": escape(", ".join(found.other_versions)),
        **{
            f"no baseline, {mode}": names(each for each in found.without_baseline if each.mode == mode)
            for mode in ("forward", "forward+backward")
        },
        "in the baseline, not measured now": names(found.not_measured),
    }
    for chips in dict.fromkeys((now.provenance.chip, then.provenance.chip) for now, then in found.other_chip):
        those = [now for now, then in found.other_chip if (now.provenance.chip, then.provenance.chip) == chips]
        lines[f"not compared, since this is {chips[0]} and the baseline is of {chips[1]}"] = names(those)
    for what, which in lines.items():
        if which:
            out.print(f"[yellow]{what}:[/] {which}", highlight=False, soft_wrap=True)
    return found.passes


def _device_notes(done: list[Record]) -> list[str]:
    """What a device time is, and why some have none."""
    on_device = any(record.device_samples_s for record in done)
    notes = []
    if on_device:
        notes.append(
            "device: the time in which the device works, from the profiler's trace, with warm caches; in brackets with "
            "caches flushed before each call."
        )
    reasons: dict[str, list[str]] = {}
    for record in done:
        if "no_device_time" in record.metrics:
            reasons.setdefault(str(record.metrics["no_device_time"]), []).append(record.implementation)
    for reason, names in reasons.items():
        whose = f" of {', '.join(dict.fromkeys(names))}" if on_device else ""
        wall = "" if on_device else " Times are wall times."
        notes.append(escape(f"device time{whose} is not available: {reason}.{wall}"))
    return notes


@prints_json
@runs_elsewhere(check=_settle, records="records", here_only=("plot", "baseline"), show=_show_fetched)
def bench(
    asked: _Asked,
    op: Annotated[str, typer.Argument(help="The op's name; `tilewright ops` lists them.")],
    implementation: Annotated[str | None, typer.Option(help="Comma-separated; defaults to all that run here.")] = None,
    case: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, or `all`; defaults to the small cases on a CPU, and to the others elsewhere."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16.")] = "bfloat16",
    grad: Annotated[bool, typer.Option("--grad", help="Forward and backward instead of forward alone.")] = False,
    seconds_each: Annotated[
        float, typer.Option("--seconds", help="Seconds of steady state to measure per entry.")
    ] = 2.0,
    compile_only: Annotated[
        bool,
        typer.Option(
            "--compile-only", help="Compile and report memory without running: for cases that are too large here."
        ),
    ] = False,
    records: Annotated[Path, typer.Option(help="The JSONL file to append to, entry by entry.")] = Path(
        "results/bench.jsonl"
    ),
    plot: Annotated[Path | None, typer.Option(help="Plot the table to this file: .png, .pdf, .svg.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the records without printing a table.")] = False,
    against: Annotated[
        str | None,
        typer.Option(
            help="Peers to time on the same inputs, comma-separated, or `all`: fla, cudnn, jax, torch, liger."
        ),
    ] = None,
    peer_python: Annotated[
        str | None, typer.Option(help="The Python that fla, torch and liger are installed in; defaults to this one.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(help="Earlier records to compare with: what became slower is named, and the exit code is 1."),
    ] = None,
) -> None:
    """Time an op's implementations side by side on this device.

    The first step (trace, compile, run) and the steady state are timed separately. The median is over repeated samples,
    and the spread is the interquartile range divided by the median. FLOP/s and bytes/s count useful work only, and are
    shown with their fraction of the chip's peak where that is known. Every sample goes into the records file as soon as
    its entry is measured, with the chip, versions, commit, and the forward and backward configs. An entry that fails is a
    row of its own and the exit code is 1; Ctrl-C ends with the table so far.

    With --against, other libraries' kernels are timed on the same inputs in the same way, and every result is compared
    with the reference; a ratio is shown only for those that agree. Peers that are not installed are listed, never
    installed.

    On a GPU and a TPU the time on the device is taken from the profiler's trace, beside wall time; on a GPU also with cold
    caches. Calls of the size of a decoding step are judged by it.
    """
    with arguments():
        missing = absent(tuple(peer for peer in asked.against if op in peer.ops), peer_python)
    default_device()  # Raises where JAX_PLATFORMS names a device that is not here.
    mode: Mode = "forward+backward" if grad else "forward"
    timing = Timing(seconds=seconds_each, run=not compile_only)
    done: list[Record] = []

    def ours(name: str, wanted: Wanted) -> Record:
        judge = (lambda results: wanted.judge(results).metrics()) if asked.against else None
        return bench_case(asked.op, wanted.case, name, wanted.dtype, mode, timing, judge)

    def keep(record: Record) -> None:
        done.append(record)
        with writing("records", records):
            append_records(records, [record])

    entrants = {name: functools.partial(ours, name) for name in asked.implementations} | {
        adapter.name: functools.partial(bench_peer, peer, adapter, timing=timing, python=peer_python)
        for peer in asked.against
        if peer.name not in missing
        for adapter in peer.adapters
        if op in adapter.ops
    }
    with Entries("benchmarking", total=len(asked.cases) * len(asked.dtypes) * len(entrants)) as entries:
        for chosen, dtype_name in ((asked.op.case(c), d) for c in asked.cases for d in asked.dtypes):
            wanted = Wanted(asked.op, chosen, dtype_name, mode)
            for name, measure in entrants.items():
                peer = {} if name in asked.implementations else {"peer": True}
                with entries.one(f"{name} {chosen.name} {dtype_name}") as raised:
                    keep(measure(wanted))
                for error in raised:
                    keep(bench_record(asked.op, chosen, name, dtype_name, mode, metrics={"failure": error, **peer}))
    _show(done, records=records, plot=plot, quiet=quiet)
    passes = asked.baseline is None or _passes(done, asked.baseline)
    if others := [peer.name for peer in asked.against if op not in peer.ops]:
        console().print(f"[yellow]not timed:[/] {', '.join(others)}, without {op}")
    tell(absent=missing)
    for name, remedy in missing.items():
        console().print(f"[yellow]absent:[/] {escape(f'{name}: {remedy}')}", soft_wrap=True)
    entries.end(ok=passes and any(not record.metrics.get("peer") for record in done), refused="not timed")


def told_record(record: Record) -> dict[str, Any]:
    """A record as the document of --json has it: its fields, and the median of its samples and its spread."""
    figures = {"median_s": record.median_s, "spread": record.spread} if record.samples_s else {}
    return {**dataclasses.asdict(record), **figures}


def _chosen_cases(op: Op, given: str | None) -> tuple[str, ...]:
    every = tuple(case.name for case in op.cases)
    if given == "all":
        return every
    if given is not None:
        return split_names(given, every, "case")
    on_cpu = default_device().platform == "cpu"
    return tuple(case.name for case in op.cases if case.small == on_cpu)


def _table(done: list[Record]) -> Table:
    where = done[0].provenance
    compared = any({"agrees", "not_judged"} & record.metrics.keys() for record in done)
    relative = ("ours / it", "error") if compared else ("x fastest",)
    on_device = any(record.device_samples_s for record in done)
    table = new_table(
        f"{done[0].op}, {done[0].mode}, on {where.device_kind} (jax {where.versions['jax']}, {where.date[:10]})",
        ("case", "dtype", "implementation"),
        (
            *("first step", "median", "spread"),
            *(("device (cold)",) if on_device else ()),
            *relative,
            "FLOP/s",
            "bytes/s",
            "temp memory",
            "peak memory",
        ),
    )
    for _, group in itertools.groupby(done, key=lambda record: (record.case, record.dtype)):
        rows = list(group)
        for record in rows:
            timed = [each for each in rows if each.samples_s]
            table.add_row(*_row(record, timed, compared=compared, on_device=on_device))
        table.add_section()
    return table


def _row(record: Record, timed: list[Record], *, compared: bool, on_device: bool) -> tuple[str, ...]:
    """A record as a row; `timed` are those of the same case and dtype that have samples."""
    numbers = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
    names = (record.case, record.dtype, record.implementation)
    sizes = (memory(numbers.get("temp_bytes")), memory(numbers.get("peak_bytes")))
    if not record.samples_s:
        what = "[bold red]failed[/]" if "failure" in record.metrics else f"compile {seconds(numbers['compile_s'])}"
        return (*names, what, *["-"] * (5 + compared + on_device), *sizes)
    return (
        *names,
        seconds(numbers.get("first_step_s", 0.0)),
        seconds(record.median_s),
        f"{record.spread:.1%}",
        *((_on_device(numbers),) if on_device else ()),
        *((_ratio(record, timed), _error(record)) if compared else (_of_fastest(record, timed),)),
        rate(numbers.get("flops_per_s"), "FLOP/s", numbers.get("flops_fraction")),
        rate(numbers.get("bytes_per_s"), "B/s", numbers.get("bytes_fraction")),
        *sizes,
    )


def _on_device(numbers: Mapping[str, float]) -> str:
    """The time on the device with warm caches, and with cold ones in brackets."""
    if "device_s" not in numbers:
        return "-"
    cold = f" ({seconds(numbers['device_cold_s'])})" if "device_cold_s" in numbers else ""
    return f"{seconds(numbers['device_s'])}{cold}"


def _ratio(record: Record, timed: list[Record]) -> str:
    """The time of our first implementation divided by this one's; none where either of the two results is wrong.

    Our first is the preferred one, unless the caller named them.
    """
    ours = next((each for each in timed if not each.metrics.get("peer")), None)
    if record is ours:
        return "ours"
    if ours is None or not (record.metrics.get("agrees") and ours.metrics.get("agrees")):
        return "-"
    return _quotient(ours, record)[1]


def _of_fastest(record: Record, timed: list[Record]) -> str:
    """The time of a record divided by that of the fastest one of its case and dtype."""
    others = [each for each in timed if each is not record]
    value, text = max((_quotient(record, each) for each in others), default=(1.0, ratio(1.0)))
    return text if value > 1 else ratio(1.0)


def _quotient(one: Record, other: Record) -> tuple[float, str]:
    """The time of one record divided by another's, by the times that they are judged by."""
    times, others, _ = comparable_samples(one, other)
    value = statistics.median(times) / statistics.median(others)
    return value, ratio(value, relative_spread(times), relative_spread(others))


def _error(record: Record) -> str:
    if "agrees" not in record.metrics:
        return "[bold red]not compared[/]"
    error = record.metrics["error"]
    shown = f"{error:.1e}" if isinstance(error, float) else "not finite"
    return shown if record.metrics["agrees"] else f"[bold red]{shown} DIFFERS[/]"
