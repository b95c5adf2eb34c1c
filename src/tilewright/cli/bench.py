"""`tilewright bench`: how fast is it, beside the other implementations, and how much memory does it take?"""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from tilewright.cli.screen import arguments, console, memory, progress_bar, rate, seconds, split_names
from tilewright.cli.ship import runs_elsewhere
from tilewright.core.dispatch import Op, Unsupported, find_op
from tilewright.core.records import Record, append_records
from tilewright.core.target import default_device
from tilewright.workbench.bench import Mode, Timing, bench_case
from tilewright.workbench.check import DTYPES


def _settle(
    op: str,
    implementation: str | None,
    case: str | None,
    dtype: str,
    *,
    plot: Path | None,
    compile_only: bool,
    **_: Any,
) -> tuple[Op, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The op, and its cases, dtypes and implementations that were named: a wrong word is an error."""
    found = find_op(op)
    if plot is not None and compile_only:
        raise ValueError("--plot draws times and --compile-only takes none; leave one of them out")
    return (
        found,
        _chosen_cases(found, case),
        split_names(dtype, DTYPES, "dtype"),
        split_names(implementation, found.implementations, "implementation"),
    )


def _show(done: list[Record], *, records: Path, plot: Path | None, quiet: bool, **_: Any) -> None:
    if not quiet:
        console().print(_table(done))
        console().print(f"{len(done)} records appended to {records}")
    if plot is not None:
        from tilewright.workbench.plot import plot_bench

        plot_bench(done, plot)
        console().print(f"plot: {plot}")


@runs_elsewhere(check=_settle, records="records", here_only=("plot",), show=_show)
def bench(
    op: Annotated[str, typer.Argument(help="The op's name; `tilewright ops` lists them.")],
    implementation: Annotated[str | None, typer.Option(help="Comma-separated; all that run here unless told.")] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Comma-separated, or `all`; on a CPU the small cases unless told, elsewhere the others."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Comma-separated: float32, bfloat16.")] = "bfloat16",
    grad: Annotated[bool, typer.Option("--grad", help="Forward and backward instead of forward alone.")] = False,
    seconds_each: Annotated[float, typer.Option("--seconds", help="Steady-state time of each entry.")] = 2.0,
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile and report memory, run nothing: for cases too large here.")
    ] = False,
    records: Annotated[Path, typer.Option(help="The JSONL file to append to.")] = Path("results/bench.jsonl"),
    plot: Annotated[Path | None, typer.Option(help="Draw the table to this PNG.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the records and print no table.")] = False,
) -> None:
    """Time an op's implementations side by side on this device.

    The first step (trace, compile, run) and the steady state are apart; the median is over repeated samples, with the
    distance between the quartiles as its spread. FLOP/s and bytes/s count useful work only, and stand beside the share
    of the chip's ceiling where that is known. Every sample goes into the records file with chip, versions and commit.
    """
    with arguments():
        found, cases, dtypes, names = _settle(op, implementation, case, dtype, plot=plot, compile_only=compile_only)
    mode: Mode = "forward+backward" if grad else "forward"
    entries = [(c, d, name) for c in cases for d in dtypes for name in names]
    done: list[Record] = []
    refused: dict[str, str] = {}
    with progress_bar() as bar:
        task = bar.add_task("benchmarking", total=len(entries))
        for case_name, dtype_name, name in entries:
            bar.update(task, description=f"{case_name} {dtype_name} {name}")
            try:
                timing = Timing(seconds=seconds_each, run=not compile_only)
                done.append(bench_case(found, found.case(case_name), name, dtype_name, mode, timing))
            except Unsupported as error:
                refused[name] = str(error)
            bar.advance(task)
    if done:
        append_records(records, done)
        _show(done, records=records, plot=plot, quiet=quiet)
    for reason in refused.values():
        console().print(f"[yellow]not timed:[/] {escape(reason)}", soft_wrap=True)
    if not done:
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
    versions = where.versions
    table = Table(
        title=f"{done[0].op}, {done[0].mode}, on {where.device_kind} (jax {versions['jax']}, {where.date[:10]})",
        title_justify="left",
    )
    for column in ("case", "dtype", "implementation"):
        table.add_column(column)
    for column in ("first step", "median", "spread", "x fastest", "FLOP/s", "bytes/s", "temp memory", "peak memory"):
        table.add_column(column, justify="right")
    for position, record in enumerate(done):
        peers = [r.median_s for r in done if (r.case, r.dtype) == (record.case, record.dtype) and r.samples_s]
        table.add_row(*_row(record, min(peers, default=None)))
        last = position + 1 == len(done)
        if not last and (done[position + 1].case, done[position + 1].dtype) != (record.case, record.dtype):
            table.add_section()
    return table


def _row(record: Record, fastest: float | None) -> tuple[str, ...]:
    metrics = record.metrics

    def number(name: str) -> float | None:
        value = metrics.get(name)
        return value if isinstance(value, (int, float)) else None

    names = (record.case, record.dtype, record.implementation)
    sizes = (memory(number("temp_bytes")), memory(number("peak_bytes")))
    if not record.samples_s or fastest is None:
        return (*names, f"compile {seconds(number('compile_s') or 0.0)}", "-", "-", "-", "-", "-", *sizes)
    return (
        *names,
        seconds(number("first_step_s") or 0.0),
        seconds(record.median_s),
        f"{record.spread:.1%}",
        f"{record.median_s / fastest:.2f}",
        rate(number("flops_per_s"), "FLOP/s", number("flops_fraction")),
        rate(number("bytes_per_s"), "B/s", number("bytes_fraction")),
        *sizes,
    )
