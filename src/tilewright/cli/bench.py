"""`tilewright bench`: times the implementations of an op side by side, with their memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tilewright.cli.screen import arguments, console, progress_bar, split_names
from tilewright.cli.ship import runs_elsewhere
from tilewright.core.dispatch import Op, Unsupported, find_op
from tilewright.core.target import default_device
from tilewright.workbench.bench import Mode, Timing, bench_case
from tilewright.workbench.check import DTYPES
from tilewright.workbench.figures import memory, rate, seconds
from tilewright.workbench.peers.agreement import Wanted
from tilewright.workbench.peers.beside import leave_room
from tilewright.workbench.peers.compare import bench_peer
from tilewright.workbench.peers.registry import Adapter, Peer, Refused, absent, peers
from tilewright.workbench.records import Record, append_records


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    op: Op
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    implementations: tuple[str, ...]
    against: tuple[Peer, ...]


def _settle(
    op: str,
    implementation: str | None,
    case: str | None,
    dtype: str,
    *,
    against: str | None,
    peer_python: str | None,
    plot: Path | None,
    compile_only: bool,
    **_: Any,
) -> _Asked:
    """Resolves the names on the command line: op, cases, dtypes, implementations and peers. An unknown one is an error."""
    found = find_op(op)
    if plot is not None and compile_only:
        raise ValueError("--plot draws times and --compile-only takes none; leave one of them out")
    if against is not None and compile_only:
        raise ValueError("--against times peers and --compile-only takes no times; leave one of them out")
    if peer_python is not None and against is None:
        raise ValueError("--peer-python is where peers are installed; name them with --against, or leave it out")
    known = peers()
    named = () if against is None else split_names(None if against == "all" else against, tuple(known), "against")
    chosen = tuple(known[name] for name in named)
    if any(peer.tensors is not None for peer in chosen):
        leave_room()
    return _Asked(
        found,
        _chosen_cases(found, case),
        split_names(dtype, DTYPES, "dtype"),
        split_names(implementation, found.implementations, "implementation"),
        chosen,
    )


def _show(done: list[Record], *, records: Path, plot: Path | None, quiet: bool, **_: Any) -> None:
    if not quiet:
        console().print(_table(done))
        for note in _notes(done):
            console().print(note, soft_wrap=True)
        console().print(f"{len(done)} records appended to {records}")
    if plot is not None:
        from tilewright.workbench.plot import plot_bench

        plot_bench(done, plot)
        console().print(f"plot: {plot}")


def _notes(done: list[Record]) -> list[str]:
    """What the figures of a comparison mean, and where a peer computed something else."""
    judged = [record for record in done if "agrees" in record.metrics]
    if not judged:
        return []
    first = judged[0].metrics
    notes = [
        f"ours / it: the time of our first implementation divided by this one's; below 1 ours is faster. "
        f"error: the largest of any output or gradient, against {first['error_against']}; up to "
        f"{first['error_tolerance']:g} agrees."
    ]
    for key, words in (("lacks", "does not compute"), ("instead", "was run and judged with")):
        for name, what in dict.fromkeys((r.implementation, r.metrics[key]) for r in judged if key in r.metrics):
            notes.append(f"{name} {words} {what}.")
    for record in judged:
        if not record.metrics["agrees"]:
            which = f"{record.implementation} {record.case} {record.dtype}"
            notes.append(f"[bold red]differs:[/] {which}: {escape(str(record.metrics['error_in']))}, {_error(record)}")
    return notes


@runs_elsewhere(check=_settle, records="records", here_only=("plot",), show=_show)
def bench(
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
    records: Annotated[Path, typer.Option(help="The JSONL file to append to.")] = Path("results/bench.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Plot the table to this PNG file.")] = None,
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
) -> None:
    """Time an op's implementations side by side on this device.

    The first step (trace, compile, run) and the steady state are timed separately. The median is over repeated samples,
    and the spread is the interquartile range divided by the median. FLOP/s and bytes/s count useful work only, and are
    shown with their fraction of the chip's peak where that is known. Every sample goes into the records file, with the
    chip, versions, commit, and the forward and backward configs.

    With --against, other libraries' kernels are timed on the same inputs in the same way, and every result is compared
    with the reference; a ratio is shown only for those that agree. Peers that are not installed are listed, never
    installed.
    """
    with arguments():
        asked = _settle(
            op,
            implementation,
            case,
            dtype,
            against=against,
            peer_python=peer_python,
            plot=plot,
            compile_only=compile_only,
        )
        missing = absent(tuple(peer for peer in asked.against if op in peer.ops), peer_python)
    mode: Mode = "forward+backward" if grad else "forward"
    timing = Timing(seconds=seconds_each, run=not compile_only)
    done: list[Record] = []
    refused: dict[str, list[str]] = {}
    rivals: list[tuple[Peer, Adapter]] = []
    installed = [peer for peer in asked.against if op in peer.ops and peer.name not in missing]
    for peer, adapter in ((each, one) for each in installed for one in each.adapters):
        if (reason := adapter.unavailable()) is not None:
            refused[f"{adapter.name}: {reason}"] = []
        elif asked.op.name in adapter.ops:
            rivals.append((peer, adapter))
    with progress_bar() as bar:
        each = len(asked.implementations) + len(rivals)
        task = bar.add_task("benchmarking", total=len(asked.cases) * len(asked.dtypes) * each)
        for case_name, dtype_name in ((c, d) for c in asked.cases for d in asked.dtypes):
            chosen = asked.op.case(case_name)
            wanted = Wanted(asked.op, chosen, dtype_name, mode) if asked.against else None
            judge = None if wanted is None else lambda results, wanted=wanted: wanted.judge(results).metrics()
            for name in asked.implementations:
                bar.update(task, description=f"{case_name} {dtype_name} {name}")
                try:
                    done.append(bench_case(asked.op, chosen, name, dtype_name, mode, timing, judge))
                except Unsupported as error:
                    refused.setdefault(str(error), [])
                bar.advance(task)
            for peer, adapter in rivals:
                bar.update(task, description=f"{case_name} {dtype_name} {adapter.name}")
                try:
                    assert wanted is not None
                    done.append(bench_peer(peer, adapter, wanted, timing, peer_python))
                except Refused as error:
                    refused.setdefault(f"{adapter.name}: {error}", []).append(f"{case_name} {dtype_name}")
                bar.advance(task)
    if done:
        append_records(records, done)
        _show(done, records=records, plot=plot, quiet=quiet)
    for reason, where in refused.items():
        of = f" [{', '.join(where)}]" if where else ""
        console().print(f"[yellow]not timed:[/] {escape(reason + of)}", soft_wrap=True)
    if others := [peer.name for peer in asked.against if op not in peer.ops]:
        console().print(f"[yellow]no {op}:[/] {', '.join(others)}")
    for name, remedy in missing.items():
        console().print(f"[yellow]absent:[/] {escape(f'{name}: {remedy}')}", soft_wrap=True)
    if not any(not record.metrics.get("peer") for record in done):
        raise typer.Exit(1)


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
    compared = any("agrees" in record.metrics for record in done)
    table = Table(
        title=f"{done[0].op}, {done[0].mode}, on {where.device_kind} (jax {where.versions['jax']}, {where.date[:10]})",
        title_justify="left",
    )
    for column in ("case", "dtype", "implementation"):
        table.add_column(column)
    relative = ("ours / it", "error") if compared else ("x fastest",)
    for column in ("first step", "median", "spread", *relative, "FLOP/s", "bytes/s", "temp memory", "peak memory"):
        table.add_column(column, justify="right")
    for position, record in enumerate(done):
        beside = [r for r in done if (r.case, r.dtype) == (record.case, record.dtype) and r.samples_s]
        table.add_row(*_row(record, beside, compared=compared))
        last = position + 1 == len(done)
        if not last and (done[position + 1].case, done[position + 1].dtype) != (record.case, record.dtype):
            table.add_section()
    return table


def _row(record: Record, beside: list[Record], *, compared: bool) -> tuple[str, ...]:
    metrics = record.metrics

    def number(name: str) -> float | None:
        value = metrics.get(name)
        return value if isinstance(value, (int, float)) else None

    names = (record.case, record.dtype, record.implementation)
    sizes = (memory(number("temp_bytes")), memory(number("peak_bytes")))
    if not record.samples_s:
        return (*names, f"compile {seconds(number('compile_s') or 0.0)}", "-", "-", "-", "-", "-", *sizes)
    fastest = min(each.median_s for each in beside)
    return (
        *names,
        seconds(number("first_step_s") or 0.0),
        seconds(record.median_s),
        f"{record.spread:.1%}",
        *((_ratio(record, beside), _error(record)) if compared else (f"{record.median_s / fastest:.2f}",)),
        rate(number("flops_per_s"), "FLOP/s", number("flops_fraction")),
        rate(number("bytes_per_s"), "B/s", number("bytes_fraction")),
        *sizes,
    )


def _ours(beside: list[Record]) -> Record | None:
    """The record that the others are compared with: our first, which is the preferred one unless the caller named them."""
    return next((record for record in beside if not record.metrics.get("peer")), None)


def _ratio(record: Record, beside: list[Record]) -> str:
    """Our time divided by this one's; none where either of the two results is wrong."""
    ours = _ours(beside)
    if record is ours:
        return "ours"
    if ours is None or not (record.metrics["agrees"] and ours.metrics["agrees"]):
        return "-"
    return f"{ours.median_s / record.median_s:.2f}"


def _error(record: Record) -> str:
    error = record.metrics["error"]
    shown = f"{error:.1e}" if isinstance(error, float) else "not finite"
    return shown if record.metrics["agrees"] else f"[bold red]{shown} DIFFERS[/]"
