"""`tilewright tune`: searches the configs of an op for the fastest one that computes the right values."""

import contextlib
import dataclasses
import functools
import os
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.markup import escape

from tilewright.aot import TPUS, CompileReport, NotSetUp, compile_each
from tilewright.aot import compile as compile_for
from tilewright.aot.toolchain import Toolchain
from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import (
    Entries,
    arguments,
    check_name,
    check_seconds,
    console,
    new_table,
    split_names,
    try_writing,
)
from tilewright.cli.ship import runs_elsewhere
from tilewright.core import tuned
from tilewright.core.chip import Chip
from tilewright.core.config import Config
from tilewright.core.dispatch import KERNEL_PLATFORM, Op, Unsupported, find_op
from tilewright.core.target import default_device
from tilewright.workbench.check import DTYPES, call, call_with_gradients
from tilewright.workbench.figures import one_line, seconds
from tilewright.workbench.peers.beside import leave_room
from tilewright.workbench.records import Record
from tilewright.workbench.tuning import results
from tilewright.workbench.tuning.estimate import Estimates
from tilewright.workbench.tuning.measure import Bench, Crew
from tilewright.workbench.tuning.search import Budget, Outcome
from tilewright.workbench.tuning.session import Trial, Tuned
from tilewright.workbench.tuning.session import tune as tune_target
from tilewright.workbench.tuning.target import Target, targets

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_ORACLE_SHARE = 0.25  # Of a case's budget.
_MOST_JOBS = 8
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    op: Op
    cases: tuple[str, ...]
    dtype: str
    implementation: str | None
    directions: tuple[str, ...]
    budget_s: float
    chips: tuple[str, ...]
    """Chips to estimate for; none to measure here."""


def _settle(
    op: str,
    case: str | None,
    implementation: str | None,
    dtype: str,
    direction: str | None,
    budget: str,
    limit: float,
    *,
    estimate: bool,
    chip: str | None,
    records: Path,
    tables: Path | None,
    **_: Any,
) -> _Asked:
    found = find_op(op)
    check_seconds(limit, "limit", positive=True)
    if chip is not None and not estimate:
        raise ValueError("--chip is a chip to estimate for; pass --estimate too, or omit it to measure on this device")
    if estimate and "pallas_tpu" not in found.implementations:
        raise ValueError(f"{op} has no TPU kernel to estimate; its implementations: {', '.join(found.implementations)}")
    if estimate and implementation not in (None, "pallas_tpu"):
        raise ValueError(f"--estimate is for pallas_tpu, not {implementation}; omit --implementation")
    every = tuple(each.name for each in found.cases)
    for name, value, known in (
        ("implementation", implementation, found.implementations),
        ("dtype", dtype, DTYPES),
    ):
        if value is not None:
            check_name(value, known, f"--{name}")
    return _Asked(
        found,
        split_names(None if case == "all" else case, every, "case") if case is not None else (),
        dtype,
        "pallas_tpu" if estimate else implementation,
        split_names(direction, DIRECTIONS, "direction"),
        _seconds_of(budget),
        split_names(chip or "v6e", TPUS, "chip") if estimate else (),
    )


def _seconds_of(budget: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", budget)
    if match is None:
        raise ValueError(f"--budget {budget} is not a time; write 90s, 10m or 2h")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _default_cases(op: Op, *, large: bool) -> tuple[str, ...]:
    """The large cases; on a CPU the small one with the most work."""
    if large and any(not case.small for case in op.cases):
        return tuple(case.name for case in op.cases if not case.small)
    small = [case for case in op.cases if case.small] or list(op.cases)
    return (max(small, key=lambda case: case.work(2).flops).name,)


def _show_remote(made: list[Record], *, tables: Path | None, records: Path, quiet: bool, **_: Any) -> None:
    tell(records=[dataclasses.asdict(record) for record in made])
    for line in _keep(made, tables):
        console().print(line, soft_wrap=True)
    console().print(
        f"{len(made)} records appended to {records}; the same as CSV: {results.write_csv(records)}", soft_wrap=True
    )


def _keep(made: Sequence[Record], tables: Path | None) -> Iterator[str]:
    """Puts the configs that were chosen into the tables, and says so."""
    folder = tables or tuned.user_tables()
    for record in made:
        if record.metrics.get("outcome") != results.CHOSEN:
            continue
        chip, entry = str(record.metrics["chip"]), results.entry_of(record)
        path = tuned.table_path(folder, chip, record.op)
        taken = results.put(folder, chip, record.op, [entry])
        name = f"{record.case} {record.dtype} {record.implementation} {entry.direction}"
        yield f"{name}: written to {path}" if taken else f"{name}: {path} keeps a newer or measured entry"


@prints_json
@runs_elsewhere(check=_settle, records="records", here_only=("tables",), show=_show_remote)
def tune(
    asked: _Asked,
    op: Annotated[str, typer.Argument(help="The op's name; `tilewright ops` lists them.")],
    case: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, or `all`; defaults to the large cases, and on a CPU to the largest small one."
        ),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Defaults to the first that runs here and has configs to search.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    direction: Annotated[str | None, typer.Option(help="forward or backward; defaults to both, forward first.")] = None,
    budget: Annotated[str, typer.Option(help="Time to spend on all of it: 90s, 10m, 2h.")] = "10m",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Configs that are compiled and checked side by side.")
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds that one config, or the oracle, may take to compile and to run.")
    ] = 300.0,
    estimate: Annotated[
        bool,
        typer.Option("--estimate", help="Rank configs of the TPU kernel by their compiled schedule, without a TPU."),
    ] = False,
    chip: Annotated[
        str | None, typer.Option(help=f"With --estimate, comma-separated: {', '.join(TPUS)}. Defaults to v6e.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="The folder of the tables to write to; defaults to the user's.")
    ] = None,
    records: Annotated[
        Path, typer.Option(help="The JSONL file that every config is a line of; a CSV file is written beside it.")
    ] = Path("results/tune.jsonl"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line per config.")] = False,
) -> None:
    """Search an op's block sizes for the fastest that compute the right values, and put them into a table for dispatch.

    The search starts from the heuristic's config and what the tables have, and tries what the op declares and what its
    memory model admits: all of it where that is little, else a local search. Each config is compiled and checked in a
    process of its own: every output and gradient, against the oracle. Only then is it timed, alone, in turns with the best
    one so far. A crash, a hang or too much memory costs one line, and configs that need more are not tried. A gain inside
    the noise changes nothing. The same command goes on where an interrupted one was.
    """
    with arguments():
        try_writing(records=records)
    if not asked.chips:
        leave_room()
    device = default_device()
    cases = asked.cases or _default_cases(asked.op, large=bool(asked.chips) or device.platform != "cpu")
    if asked.chips:
        with arguments(mistakes=(NotSetUp,)):
            Toolchain.here()
    how = _How(jobs or min(_MOST_JOBS, len(os.sched_getaffinity(0))), limit, records, tables, quiet)
    work: list[tuple[str, str | None]] = [(name, chip) for chip in asked.chips or (None,) for name in cases]
    whole = Budget(asked.budget_s)
    done: list[Tuned] = []
    with _looking_in(tables), Entries(f"tuning {op}", total=len(work)) as entries:
        for place, (name, chip_name) in enumerate(work):
            with entries.one(f"{name} {chip_name}" if chip_name else name):
                budget_of_case = Budget(whole.left_s / (len(work) - place))
                for result in _tune_case(_targets(asked, name, chip_name), budget_of_case, how, estimate=estimate):
                    done.append(result)
    tell(op=op, tuned=[_told(one) for one in done], every_config=records)
    if done and not quiet:
        _show(op, done)
    if records.exists() and not quiet:
        console().print(f"every config: {records} and {results.write_csv(records)}", soft_wrap=True)
    if not entries.complete:
        console().print("The same command goes on from there.")
    ok = bool(done) and all(one.chosen is not None for one in done)
    entries.end(ok=ok, refused="not tuned", named=bool(asked.cases))


@dataclass(frozen=True)
class _How:
    """What the command line says of every case."""

    jobs: int
    limit_s: float
    records: Path
    tables: Path | None
    quiet: bool

    def say(self, text: str) -> None:
        if not self.quiet:
            console().print(text, soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _looking_in(tables: Path | None) -> Iterator[None]:
    """Makes the folder that is written to the one where what is known is looked up, here and in the workers."""
    before = os.environ.get("TILEWRIGHT_TUNED")
    if tables is not None:
        os.environ["TILEWRIGHT_TUNED"] = str(tables.resolve())
    try:
        yield
    finally:
        if tables is not None:
            del os.environ["TILEWRIGHT_TUNED"]
            os.environ |= {} if before is None else {"TILEWRIGHT_TUNED": before}


def _tune_case(of_case: list[Target], budget: Budget, how: _How, *, estimate: bool) -> Iterator[Tuned]:
    """Tunes the directions of a case, the forward first: the backward is timed with the config that it got."""
    forward: Config | None = None
    with _trials(of_case[0], how, budget, estimate=estimate) as trial_of:
        for number, target in enumerate(of_case):
            if target.direction == "backward" and forward is not None:
                target = target.beside(forward)
            how.say(f"[bold]{escape(target.name)}[/] on {target.chip.name}")
            result = tune_target(
                target,
                trial_of(target),
                budget_s=budget.left_s / (len(of_case) - number),
                records=how.records,
                say=lambda outcome: how.say(_line(outcome)),
            )
            if target.direction == "forward":
                forward = result.chosen
            for line in _keep([] if result.record is None else [result.record], how.tables):
                how.say(f"  {line}")
            if result.note:
                how.say(f"  {result.note}")
            yield result


def _targets(asked: _Asked, case: str, chip: str | None) -> list[Target]:
    """What there is to tune of a case. Nothing is an error that says why."""
    if asked.implementation is not None:
        platform = KERNEL_PLATFORM.get(asked.implementation)
        if chip is None and platform not in (None, Chip.of(default_device()).platform):
            raise Unsupported(
                f"{asked.implementation} is a kernel for another device than this {default_device().device_kind}; tune it "
                f"where it runs (--on), or estimate it for a TPU (--estimate)"
            )
        names: tuple[str, ...] = (asked.implementation,)
    else:
        names = asked.op.implementations
    reasons: list[str] = []
    for name in names:
        try:
            found = targets(
                asked.op, asked.op.case(case), asked.dtype, name, None if chip is None else Chip.named(chip)
            )
        except Unsupported as error:
            reasons.append(one_line(error))
            continue
        wanted = [target for target in found if target.direction in asked.directions]
        if wanted:
            return wanted
        reasons.append(f"{name} declares no block sizes to search for {' or '.join(asked.directions)}")
    raise Unsupported(f"{asked.op.name} has nothing to tune here: {'; '.join(reasons)}")


@contextlib.contextmanager
def _trials(target: Target, how: _How, budget: Budget, *, estimate: bool) -> Iterator[Callable[[Target], Trial]]:
    """What tries the configs of a target, of the same case as this one."""
    if estimate:
        yield lambda one: Estimates(one, functools.partial(_compile_each, one, how), jobs=how.jobs)
        return
    about = (target.op, target.case, target.dtype, target.implementation)
    oracle_s = min(how.limit_s, _ORACLE_SHARE * budget.left_s)
    with Crew(*about, jobs=how.jobs, limit_s=how.limit_s, oracle_s=oracle_s) as crew:
        yield lambda one: Bench(one, crew, limit_s=how.limit_s)


def _compile_each(
    target: Target, how: _How, configs: Sequence[Mapping[str, Config]]
) -> Iterator[tuple[int, CompileReport]]:
    structs = target.case.structs(target.dtype)

    def job(given: Mapping[str, Config]) -> CompileReport:
        function = call(target.op, target.case, target.implementation, tuple(given.values()))
        if target.mode == "forward+backward":
            cotangents = jax.eval_shape(call(target.op, target.case, "reference"), **structs)
            both = call_with_gradients(function, target.case)
            return compile_for(both, structs, cotangents, chip=target.chip, limit_s=how.limit_s)
        return compile_for(lambda arrays: function(**arrays), structs, chip=target.chip, limit_s=how.limit_s)

    todo = [functools.partial(job, given) for given in configs]
    with contextlib.closing(compile_each(todo, side_by_side=how.jobs)) as ended:
        for place, future in ended:
            yield place, future.result()


def _line(outcome: Outcome) -> str:
    """One line about a config."""
    estimate = outcome.metrics.get("estimate_s")
    if outcome.samples_s or estimate:
        time = seconds(float(estimate) if estimate else statistics.median(outcome.samples_s))
        against = "" if outcome.ratio is None else f", {outcome.ratio:.3f} of the best so far"
        what = f"{time}{' (estimate)' if estimate else ''}{against}"
        mark = "[green]better[/] " if outcome.better else f"{'slow' if outcome.status == 'slow' else '':<7}"
    else:
        what, mark = outcome.reason.partition("\n")[0], f"[yellow]{outcome.status}[/] "
    return f"  {mark}{escape(f'{results.shown(outcome.config)}: {what}')}"


def _show(op: str, done: list[Tuned]) -> None:
    estimated = any(one.record is not None and one.record.kind == "estimate" for one in done)
    table = new_table(
        f"{op}, tuned{' (times are estimates)' if estimated else ''}",
        ("case", "implementation", "direction", "chip", "config"),
        ("heuristic", "tuned", "gain", "tried"),
    )
    for one in done:
        table.add_row(
            one.target.case.name,
            one.target.implementation,
            one.target.direction + (" (with forward)" if one.target.mode != one.target.direction else ""),
            one.target.chip.name,
            "-" if one.chosen is None else results.shown(one.chosen),
            "-" if one.heuristic_s is None else seconds(one.heuristic_s),
            "-" if one.seconds is None else seconds(one.seconds),
            "-" if one.gain is None else f"{one.gain:.2f}x",
            _counts(one),
        )
    console().print(table)
    for one in done:
        if not one.complete:
            console().print(
                f"{one.target.name}: the budget ended before the search did; a longer one goes on from here."
            )


def _told(one: Tuned) -> dict[str, Any]:
    target = one.target
    return {
        "case": target.case.name,
        "dtype": target.dtype,
        "implementation": target.implementation,
        "direction": target.direction,
        "mode": target.mode,
        "chip": target.chip.name,
        "config": None if one.chosen is None else one.chosen.to_json(),
        "kind": None if one.record is None else one.record.kind,
        "heuristic_s": one.heuristic_s,
        "seconds": one.seconds,
        "gain": one.gain,
        "tried": one.counts,
        "complete": one.complete,
        "note": one.note,
    }


def _counts(one: Tuned) -> str:
    return ", ".join(f"{count} {status}" for status, count in one.counts.items())
