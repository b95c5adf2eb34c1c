"""`tilewright tune`: searches the configs of ops for the fastest ones that compute the right values."""

import contextlib
import dataclasses
import functools
import itertools
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_args

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
    check_tables,
    console,
    new_table,
    split_names,
    try_writing,
    writing,
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
from tilewright.workbench.records import Record, try_destination
from tilewright.workbench.tuning import results
from tilewright.workbench.tuning.crew import Crew, Pool
from tilewright.workbench.tuning.estimate import Estimates
from tilewright.workbench.tuning.measure import Bench
from tilewright.workbench.tuning.pool import Stopped
from tilewright.workbench.tuning.search import Budget, Outcome, Reach
from tilewright.workbench.tuning.session import Trial, Tuned
from tilewright.workbench.tuning.session import tune as tune_target
from tilewright.workbench.tuning.target import Target, targets

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_ORACLE_SHARE, _ORACLE_LEAST_S = 0.25, 40.0  # Of a case's part of the budget.
_MOST_JOBS = 8  # Where compiling takes the cores that are timed.
_JOBS_PER_CASE = 3
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    ops: tuple[Op, ...]
    cases: tuple[str, ...]
    """Those that were named, in this order."""
    dtype: str
    implementation: str | None
    directions: tuple[str, ...]
    budget_s: float
    chips: tuple[str, ...]
    """Chips to estimate for; none to measure here."""
    missing: bool = False
    """Leave out what is measured already."""

    def work(self, *, large: bool) -> list["_Work"]:
        """Each op's cases, what is to be tuned first in front: as they were named, or of each op in turn."""
        if self.cases:
            found = [(op, name) for name in self.cases for op in self.ops if name in _names(op)]
        else:
            rounds = itertools.zip_longest(*(_default_cases(op, large=large) for op in self.ops))
            found = [
                (op, name) for names in rounds for op, name in zip(self.ops, names, strict=True) if name is not None
            ]
        return [_Work(op, name, chip) for chip in self.chips or (None,) for op, name in found]


@dataclass(frozen=True)
class _Work:
    """A case to tune, for a chip that is not here, or None."""

    op: Op
    case: str
    chip: str | None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.op.name, self.case, self.chip)))


def _names(op: Op) -> tuple[str, ...]:
    return tuple(case.name for case in op.cases)


def _settle(
    op: str,
    case: str | None,
    implementation: str | None,
    dtype: str,
    direction: str | None,
    budget: str,
    limit: float,
    *,
    search: str,
    estimate: bool,
    chip: str | None,
    missing: bool,
    records: Path,
    tables: Path | None,
    **_: Any,
) -> _Asked:
    found = tuple(find_op(name.strip()) for name in op.split(","))
    check_seconds(limit, "limit", positive=True)
    if chip is not None and not estimate:
        raise ValueError("--chip is a chip to estimate for; pass --estimate too, or omit it to measure on this device")
    for each in found if estimate else ():
        if "pallas_tpu" not in each.implementations:
            names = ", ".join(each.implementations)
            raise ValueError(f"{each.name} has no TPU kernel to estimate; its implementations: {names}")
    if estimate and implementation not in (None, "pallas_tpu"):
        raise ValueError(f"--estimate is for pallas_tpu, not {implementation}; omit --implementation")
    every = tuple(dict.fromkeys(name for each in found for name in _names(each)))
    implementations = tuple(dict.fromkeys(name for each in found for name in each.implementations))
    for name, value, known in (
        ("implementation", implementation, implementations),
        ("dtype", dtype, DTYPES),
        ("search", search, get_args(Reach)),
    ):
        if value is not None:
            check_name(value, known, f"--{name}")
    return _Asked(
        found,
        tuple(dict.fromkeys(split_names(None if case == "all" else case, every, "case"))) if case is not None else (),
        dtype,
        "pallas_tpu" if estimate else implementation,
        split_names(direction, DIRECTIONS, "direction"),
        _seconds_of(budget),
        split_names(chip or "v6e", TPUS, "chip") if estimate else (),
        missing,
    )


def _seconds_of(budget: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", budget)
    if match is None:
        raise ValueError(f"--budget {budget} is not a time; write 90s, 10m or 2h")
    if not (taken := float(match[1]) * _UNITS[match[2] or "s"]):
        raise ValueError(f"--budget {budget} leaves no time to try a config in; write 90s, 10m or 2h")
    return taken


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
        taken = results.put(folder, chip, record.op, [entry])[results.TAKEN]
        name = f"{record.case} {record.dtype} {record.implementation} {entry.direction}"
        yield f"{name}: written to {path}" if taken else f"{name}: {path} keeps a newer or measured entry"


@prints_json
@runs_elsewhere(check=_settle, records="records", here_only=("tables",), show=_show_remote)
def tune(
    asked: _Asked,
    op: Annotated[str, typer.Argument(help="The op's name, or several, comma-separated; `tilewright ops` lists them.")],
    case: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated, the most important first, or `all`; defaults to the large cases, one of each op in "
            "turn, and on a CPU to the largest small one."
        ),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Defaults to the first that runs here and has configs to search.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    direction: Annotated[str | None, typer.Option(help="forward or backward; defaults to both, forward first.")] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time to try configs in, for all of it: 90s, 10m, 2h. Where it is spent, a case that was begun still "
            "tries its first config, and times it against the heuristic's."
        ),
    ] = "10m",
    search: Annotated[
        str,
        typer.Option(
            help="all, or neighbours: what differs from the best config by one step in one field, until none is faster."
        ),
    ] = "all",
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            "-j",
            min=1,
            help="Configs that are compiled side by side; defaults to the machine's cores, on a GPU all but one and on a "
            "CPU at most eight.",
        ),
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
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Leave out what the tables have a measurement of by the kernel as it is now."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the summary only, and no line per config.")] = False,
) -> None:
    """Search an op's block sizes for the fastest that compute the right values, and put them into a table for dispatch.

    The search starts from the heuristic's config and what the tables have, and tries what the op declares and what its
    memory model admits: all of it where that is little, else a local search. With `--search neighbours` it is over in
    minutes, and the budget goes to one search after another, each to its end. Each config is compiled and checked against
    the oracle in a process of its own. Only then is it timed, alone, in turns with the best one so far; calls that are
    shorter than their launch, by the time on the device. A crash, a hang or too much memory costs one line, and configs
    that need more are not tried. A gain inside the noise changes nothing. The same command goes on where an interrupted
    one was. The exit code is 2 where there was nothing to tune, or a case that was named could not be; and 1 where no
    config of a search was right, or an entry failed.
    """
    with arguments():
        try_writing(records=records)
        check_tables(tables)
        if records.exists():
            results.write_csv(records)  # A tuner that was killed has left it behind.
        folder = tables or tuned.user_tables()
        with writing("tables", folder, from_default=tables is None):
            # A file of its own: another tuner may be writing to a table.
            try_destination(folder / f".tried-{os.getpid()}")
    if not asked.chips:
        leave_room()
    device = default_device()
    if asked.chips:
        with arguments(mistakes=(NotSetUp,)):
            Toolchain.here()
    work = asked.work(large=bool(asked.chips) or device.platform != "cpu")
    overlap = not asked.chips and device.platform == "gpu"
    cores = len(os.sched_getaffinity(0))
    # On a GPU one core is for the process that is timed.
    jobs = jobs or (max(1, cores - 1) if overlap else min(_MOST_JOBS, cores))
    together = min(len(work), max(1, jobs // _JOBS_PER_CASE)) if overlap else 1
    how = _How(jobs, together, limit, cast(Reach, search), records, tables, quiet)
    done: list[Tuned] = []
    with _looking_in(tables), Entries(f"tuning {op}", total=len(work)) as entries:
        _tune_all(asked, work, how, entries, done, overlap=overlap)
    tell(op=op, tuned=[_told(one) for one in done], every_config=records if records.exists() else None)
    if done:
        _show(op, done)
    if records.exists():
        as_csv = results.write_csv(records)
        if done or entries.failed:
            console().print(f"every config: {records} and {as_csv}", soft_wrap=True)
    if not entries.complete:
        console().print("The same command goes on from there.")
    elif missing and not done and not entries.refused:
        console().print("The tables have a measurement of all of it.")
    ok = (bool(done) or missing) and all(one.chosen is not None for one in done)
    entries.end(ok=ok, refused="not tuned", named=bool(asked.cases) or not (done or missing))


def _tune_all(
    asked: _Asked, work: Sequence[_Work], how: "_How", entries: Entries, done: list[Tuned], *, overlap: bool
) -> None:
    """Tunes one case after another, or some at a time. `done` gets what is done."""
    whole, waiting = Budget(asked.budget_s), list(work)
    with Pool(how.jobs, together=how.together, overlap=overlap) as pool:

        def begin() -> tuple[str, Callable[[], None]] | None:
            """The next case; None where there is none, or no time for it."""
            if not waiting or (whole.spent and len(waiting) < len(work)):
                return None
            # The neighbours are searched to the end, case after case; otherwise every case has its part of the budget.
            share_s = min(whole.left_s, whole.left_s * how.together / len(waiting))
            budget = Budget(whole.left_s if how.reach == "neighbours" else share_s)
            oracle_s = min(how.limit_s, max(_ORACLE_LEAST_S, _ORACLE_SHARE * share_s))
            one = waiting.pop(0)
            return one.name, functools.partial(_tune_case, asked, one, budget, oracle_s, how, pool, done)

        if how.together == 1:
            while (job := begin()) is not None:
                with entries.one(job[0]):
                    job[1]()
        else:
            _in_threads(begin, how.together, pool, entries)
    left: list[str] = []
    for one in waiting:
        with entries.one(one.name):
            _targets(asked, one)  # Raises where there is nothing to tune, which a longer budget does not change.
            left.append(one.name)
    if left:
        text = f"The budget ended before these were begun; the same command goes on with them: {', '.join(left)}"
        console().print(escape(text), soft_wrap=True, highlight=False)


def _in_threads(
    begin: Callable[[], tuple[str, Callable[[], None]] | None], together: int, pool: Pool, entries: Entries
) -> None:
    """Runs so many jobs at a time, each in a thread that waits for its workers."""
    running: dict[Future[None], str] = {}
    # Linux ends a worker with the thread that has started it, so that these threads stay until all is done.
    with ThreadPoolExecutor(together) as threads:
        try:
            while True:
                while len(running) < together and (job := begin()) is not None:
                    running[threads.submit(job[1])] = job[0]
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    with entries.one(running.pop(future)):
                        future.result()
        finally:
            pool.stop()  # After Ctrl-C the threads wait for workers that may take minutes.


@dataclass(frozen=True)
class _How:
    """What the command line says of every case."""

    jobs: int
    together: int
    limit_s: float
    reach: Reach
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


def _tune_case(
    asked: _Asked, work: _Work, budget: Budget, oracle_s: float, how: _How, pool: Pool, done: list[Tuned]
) -> None:
    """Tunes the directions of a case, the forward first: the backward is timed with the config that it got."""
    forward: Config | None = None
    of_case = [each for each in _targets(asked, work) if not (asked.missing and each.is_measured)]
    if not of_case:
        return
    with _trials(of_case[0], how, pool, oracle_s, estimate=bool(asked.chips)) as trial_of:
        for number, target in enumerate(of_case):
            if how.reach == "neighbours" and budget.spent and done:
                how.say(f"{work.op.name} {escape(target.name)}: the budget ended before it was begun")
                return
            if target.direction == "backward" and forward is not None:
                target = target.beside(forward)
            # Lines of cases that are tuned at the same time are mixed.
            prefix = f"{work.op.name} {target.name}: " if how.together > 1 else "  "
            how.say(f"[bold]{escape(target.name)}[/] of {work.op.name} on {target.chip.name}")
            parts = 1 if how.reach == "neighbours" else len(of_case) - number
            statuses: list[str] = []
            try:
                result = tune_target(
                    target,
                    trial_of(target),
                    budget_s=budget.left_s / parts,
                    records=how.records,
                    say=functools.partial(_tell_tried, how, prefix, statuses),
                    reach=how.reach,
                )
            except (KeyboardInterrupt, Stopped):
                done.append(_interrupted(target, statuses))
                raise
            if target.direction == "forward":
                forward = result.chosen
            for line in _keep([] if result.record is None else [result.record], how.tables):
                how.say(f"{work.op.name if how.together > 1 else ' '} {line}")
            if result.note:
                how.say(f"{escape(prefix)}{result.note}")
            done.append(result)


def _tell_tried(how: _How, prefix: str, statuses: list[str], outcome: Outcome) -> None:
    statuses.append(outcome.status)
    how.say(f"{escape(prefix)}{_line(outcome)}")


def _interrupted(target: Target, statuses: Sequence[str]) -> Tuned:
    """What came of a search that Ctrl-C has ended, after configs of these statuses."""
    why = "it was interrupted: no entry"
    return Tuned(target, None, None, None, None, Counter(statuses), complete=False, note=why, interrupted=True)


def _targets(asked: _Asked, work: _Work) -> list[Target]:
    """What there is to tune of a case. Nothing is an error that says why."""
    op, chip = work.op, work.chip
    names = op.implementations if asked.implementation is None else (asked.implementation,)
    reasons: list[str] = []
    for name in names:
        platform = KERNEL_PLATFORM.get(name)
        if chip is None and platform not in (None, Chip.of(default_device()).platform):
            reasons.append(
                f"{name} is a kernel for another device than this {default_device().device_kind}; tune it where it runs "
                f"(--on)" + (", or estimate it for a TPU (--estimate)" if platform == "tpu" else "")
            )
            continue
        try:
            found = targets(op, op.case(work.case), asked.dtype, name, None if chip is None else Chip.named(chip))
        except Unsupported as error:
            reasons.append(one_line(error))
            continue
        wanted = [target for target in found if target.direction in asked.directions]
        if wanted:
            return wanted
        reasons.append(f"{name} declares no block sizes to search for {' or '.join(asked.directions)}")
    raise Unsupported(f"{op.name} has nothing to tune here: {'; '.join(reasons)}")


@contextlib.contextmanager
def _trials(
    target: Target, how: _How, pool: Pool, oracle_s: float, *, estimate: bool
) -> Iterator[Callable[[Target], Trial]]:
    """What tries the configs of a target, of the same case as this one."""
    if estimate:
        yield lambda one: Estimates(one, functools.partial(_compile_each, one, how), jobs=how.jobs)
        return
    about = (target.op, target.case, target.dtype, target.implementation)
    with Crew(pool, *about, limit_s=how.limit_s, oracle_s=oracle_s) as crew:
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
        turns = "" if estimate else " in the same turns"
        against = "" if outcome.ratio is None else f", {outcome.ratio:.2f} times the best one{turns}"
        what = f"{time}{' (estimate)' if estimate else ''}{against}"
        first = outcome.better and outcome.ratio is None
        mark = f"{'first' if first else 'slow' if outcome.status == 'slow' else '':<7}"
        mark = "[green]better[/] " if outcome.better and not first else mark
    else:
        what, mark = outcome.reason.partition("\n")[0], f"[yellow]{outcome.status}[/] "
    return f"{mark}{escape(f'{results.shown(outcome.config)}: {what}')}"


def _show(op: str, done: list[Tuned]) -> None:
    estimated = any(one.record is not None and one.record.kind == "estimate" for one in done)
    table = new_table(
        f"{op}, tuned{' (times are estimates)' if estimated else ''}",
        ("op", "case", "implementation", "direction", "chip", "config"),
        ("heuristic", "tuned", "gain", "clock", "tried"),
    )
    for one in done:
        table.add_row(
            one.target.op.name,
            one.target.case.name,
            one.target.implementation,
            _timed(one.target),
            one.target.chip.name,
            _chosen(one),
            "-" if one.heuristic_s is None else seconds(one.heuristic_s),
            "-" if one.seconds is None else seconds(one.seconds),
            "-" if one.gain is None else f"{one.gain:.2f}x",
            one.clock or "-",
            _counts(one),
        )
    console().print(table)
    for one in done:
        if not one.complete:
            name = f"{one.target.op.name} {one.target.name}"
            why = (
                "interrupted; the same command"
                if one.interrupted
                else "the budget ended before the search did; a longer one"
            )
            console().print(f"{name}: {why} goes on from here.")
    ended = sum(one.complete for one in done)
    console().print(f"{ended} of {len(done)} searches ended by themselves.")


def _chosen(one: Tuned) -> str:
    """The config of the entry, new or kept; or why there is none."""
    if one.chosen is not None and one.seconds is not None:
        return results.shown(one.chosen)
    return "no entry: the search was not ended" if not one.complete else f"no entry: {one.note}"


def _timed(target: Target) -> str:
    """The direction that was tuned, and what was timed with it."""
    other = "forward" if target.direction == "backward" else "backward"
    return target.direction if target.mode == target.direction else f"{target.direction} (with {other})"


def _told(one: Tuned) -> dict[str, Any]:
    target = one.target
    return {
        "op": target.op.name,
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
        "clock": one.clock,
        "tried": one.counts,
        "of": one.of,
        "complete": one.complete,
        "note": one.note,
    }


def _counts(one: Tuned) -> str:
    counted = ", ".join(f"{count} {status}" for status, count in one.counts.items())
    return counted if one.of is None else f"{counted} of {one.of:,}"
