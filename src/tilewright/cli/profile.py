"""`tilewright profile`: a trace of the steady state of an op, a script or a training run, and its summary."""

import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import typer
from rich.markup import escape
from rich.table import Table

from tilewright.cli import interrupt
from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import (
    INTERRUPTED,
    Mistake,
    arguments,
    check_seconds,
    console,
    new_table,
    progress_bar,
    split_names,
    writing,
)
from tilewright.core.case import Work
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, find_op, registered
from tilewright.core.nearest import did_you_mean
from tilewright.core.target import default_device
from tilewright.workbench.bench import Mode, Program
from tilewright.workbench.check import DTYPES, call, draw_cotangents
from tilewright.workbench.figures import rate, seconds
from tilewright.workbench.profile import (
    WARM_UP_CALLS,
    NothingTraced,
    Operation,
    Profile,
    ScriptFailed,
    trace_calls,
    trace_script,
    trace_steps,
)
from tilewright.workbench.trace import files

_SHOWN_GAPS = 5
_LONGEST_NAME = 70
_OF_AN_OP = {"case": None, "implementation": None, "dtype": "bfloat16", "grad": False}


@prints_json
def profile(
    what: Annotated[str, typer.Argument(help="An op's name, the path of a Python script, or `train`.")],
    words: Annotated[
        list[str] | None, typer.Argument(help="The script's own words, after `--`; or the TOML file of `train`.")
    ] = None,
    case: Annotated[
        str | None,
        typer.Option(help="Of an op; defaults to its first small one on a CPU, its first large one elsewhere."),
    ] = None,
    implementation: Annotated[
        str | None, typer.Option(help="Of an op; defaults to what dispatch takes here for this case.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of an op: float32 or bfloat16.")] = "bfloat16",
    grad: Annotated[bool, typer.Option("--grad", help="Of an op: forward and backward.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="How many calls of an op, or steps of training, are traced.")] = 10,
    settle: Annotated[
        float,
        typer.Option(help="Of a script: the trace begins once so many seconds have passed without a compilation."),
    ] = 1.0,
    length: Annotated[float, typer.Option("--seconds", help="Of a script: how long the trace is.")] = 1.0,
    top: Annotated[int, typer.Option(min=1, help="How many operations are printed.")] = 20,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The folder for the trace; defaults to one in results/profile.")
    ] = None,
) -> None:
    """Trace the steady state of an op, a script or a training run, and print what the device did.

    Compilation and warm-up are not in the trace. The terminal shows the operations that took longest, gaps in which the
    device waited, the share of this package's kernels, and FLOP/s and bytes/s where the work is known. The folder is for
    XProf (`xprof --logdir FOLDER`), and its trace.json.gz for ui.perfetto.dev.

    A script runs as `python SCRIPT WORDS` would, to its end or to Ctrl-C, and its exit code is this command's; if it
    raises, its traceback is printed before what was traced, and the exit code is 1. Training steps are made in a folder
    of their own: the run's checkpoints are not touched. On a CPU the times are those of XLA's operations on the host's
    threads.
    """
    words = words or []
    is_op = what in registered()
    script = Path(what)
    with arguments():
        given = {"case": case, "implementation": implementation, "dtype": dtype, "grad": grad}
        if is_op and words:
            raise ValueError(f"{what} is an op and takes no words: {' '.join(words)}; leave them out")
        if not is_op and (misplaced := [name for name, value in given.items() if value != _OF_AN_OP[name]]):
            raise ValueError(f"--{misplaced[0]} is for ops; leave it out, or name an op")
        if not is_op and what != "train" and not script.is_file():
            raise ValueError(
                f"{what} is neither an op (`tilewright ops` lists them), nor a file, nor train; pass one of them"
                f"{did_you_mean(what, (*registered(), 'train'))}"
            )
        check_seconds(settle, "settle")
        check_seconds(length, "seconds")
        folder = out or Path("results/profile") / f"{script.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        with writing("out", folder):
            folder.mkdir(parents=True, exist_ok=True)
    default_device()  # Raises where JAX_PLATFORMS names a device that is not here.
    title, code = f"{script.name}, {length:g} s of its steady state", 0
    try:
        if is_op:
            title, made = _of_op(find_op(what), case, implementation, dtype, folder, steps, grad=grad)
        elif what == "train":
            title, made = _of_training(words, folder, steps)
        else:
            made, code = trace_script(script, words, folder, settle_s=settle, seconds=length, told=_tell)
    except NothingTraced as error:
        console(stderr=True).print(
            f"[bold red]nothing traced:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        if out is None:
            with contextlib.suppress(OSError):  # Something is in it.
                folder.rmdir()
        raise typer.Exit(error.code) from error
    except ScriptFailed as error:
        print(error, end="", file=sys.stderr)
        if error.profile is None:
            raise typer.Exit(1) from error
        made, code = error.profile, 1
    except KeyboardInterrupt:
        interrupt.answered()
        console(stderr=True).print("[bold red]interrupted[/] before the trace was complete")
        raise typer.Exit(INTERRUPTED) from None
    interrupt.answered()  # A Ctrl-C that ended the script, after its trace was there.
    _show(title, made, top, dtype if is_op else None)
    if code:
        raise typer.Exit(code)


def _tell(line: str) -> None:
    console(stderr=True).print(escape(line), highlight=False, soft_wrap=True)


def _of_op(
    op: Op, case: str | None, implementation: str | None, dtype: str, folder: Path, steps: int, *, grad: bool
) -> tuple[str, Profile]:
    with arguments():
        on_cpu = default_device().platform == "cpu"
        default = next((each.name for each in op.cases if each.small == on_cpu), op.cases[0].name)
        (case_name,) = _one(case or default, tuple(each.name for each in op.cases), "case")
        (dtype,) = _one(dtype, DTYPES, "dtype")
        if implementation is not None:
            _one(implementation, op.implementations, "implementation")
    chosen = op.case(case_name)
    mode: Mode = "forward+backward" if grad else "forward"
    with progress_bar() as bar:
        bar.add_task(f"compiling {op.name} {case_name}", total=None)
        function, arrays = call(op, chosen, implementation), chosen.draw(dtype)
        cotangents = draw_cotangents(function, arrays, seed=0) if grad else ()
        program = Program.of(function, chosen, arrays, cotangents, dtype, mode)
    work = (chosen.work_grad if grad else chosen.work)(jnp.dtype(dtype).itemsize)
    title = f"{op.name} {case_name} {dtype}, {mode}, {program.decisions[0].implementation}"
    return title, trace_calls(lambda: program.run(arrays, cotangents), folder, steps, work)


def _one(given: str, known: tuple[str, ...], argument: str) -> tuple[str, ...]:
    names = split_names(given, known, argument)
    if len(names) > 1:
        raise ValueError(f"--{argument} {given} names several; a profile is of one: {names[0]}")
    return names


def _of_training(words: list[str], folder: Path, steps: int) -> tuple[str, Profile]:
    from tilewright.cli.train import begin

    if len(words) != 1:
        raise Mistake("`tilewright profile train` takes one TOML file; docs/train.md lists its keys")
    needed = WARM_UP_CALLS + steps + 1  # A step is reported while the next one runs.
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as name:

        def without_checkpoints(read: Any) -> Any:
            read = read if read.train.steps > needed else read.with_steps(needed + 1)
            return dataclasses.replace(
                read, checkpoint=dataclasses.replace(read.checkpoint, every=read.train.steps + 1)
            )

        read, run = begin(Path(words[0]), Path(name), without_checkpoints)
        work = Work(run.flops_per_token * run.tokens_per_step, bytes=0.0)
        title = f"training {words[0]}, {run.tokens_per_step:,} tokens per step in {read.train.dtype}"
        with contextlib.closing(run), progress_bar() as bar:
            task = bar.add_task("training", total=WARM_UP_CALLS + steps)
            made = (bar.advance(task) for _ in run.steps())
            return title, trace_steps(made, folder, steps, work)


def _show(title: str, made: Profile, top: int, dtype: str | None) -> None:
    chip, out = Chip.of(default_device()), console()
    shares = {"total_s": made.total_s, "our_share": made.our_share}
    tell(title=title, device=default_device().device_kind, chip=chip.name, **dataclasses.asdict(made), **shares)
    out.print(_table(title, made, top, chip, dtype))
    for line in _lines(made, chip, dtype):
        out.print(line, highlight=False, soft_wrap=True)
    xplane, perfetto = files(made.folder)
    out.print(f"XProf: xprof --logdir {shlex.quote(str(made.folder))}", highlight=False, markup=False, soft_wrap=True)
    if perfetto is not None:
        out.print(f"Perfetto: open {perfetto} in ui.perfetto.dev", highlight=False, markup=False, soft_wrap=True)
    else:
        out.print(f"the profiler wrote no file for Perfetto beside {xplane}", highlight=False, soft_wrap=True)


def _table(title: str, made: Profile, top: int, chip: Chip, dtype: str | None) -> Table:
    per = "per step" if made.steps else "in the trace"
    of_trace = any(operation.flops or operation.bytes for operation in made.operations)
    figures = ("FLOP/s", "bytes/s") if of_trace else ()
    what = "operation" if made.platform == "cpu" else "operation on the device"
    table = new_table(
        f"{title}, on {default_device().device_kind}", (what, "of"), (f"calls {per}", f"time {per}", "share", *figures)
    )
    steps = made.steps or 1
    for operation in made.operations[:top]:
        rates = (
            _rate(operation.flops, operation.seconds, "FLOP/s", chip.flops_per_s(dtype) if dtype else None),
            _rate(operation.bytes, operation.seconds, "B/s", chip.bytes_per_s),
        )
        table.add_row(
            escape(_short(operation.name)),
            "[green]tilewright[/]" if operation.ours else "XLA",
            _count(operation.calls / steps),
            seconds(operation.seconds / steps),
            f"{operation.seconds / made.total_s:.1%}",
            *(rates if of_trace else ()),
        )
    rest: tuple[Operation, ...] = made.operations[top:]
    if rest:
        together = sum(operation.seconds for operation in rest)
        count = sum(operation.calls for operation in rest) / steps
        cells = (_count(count), seconds(together / steps), f"{together / made.total_s:.1%}", *["-"] * len(figures))
        table.add_row(f"{len(rest)} more", "", *cells)
    return table


def _lines(made: Profile, chip: Chip, dtype: str | None) -> list[str]:
    """What the table does not say: how busy the device was, whose kernels ran, gaps, and rates."""
    where = "XLA's threads were" if made.platform == "cpu" else "the device was"
    idle = made.span_s - made.busy_s
    lines = [
        f"{where} busy for {seconds(made.busy_s)} of {seconds(made.span_s)} ({made.busy_s / made.span_s:.1%}); "
        f"this package's kernels had {made.our_share:.1%} of the operations' time"
    ]
    if made.devices > 1:
        lines.append(f"{made.devices} devices worked; the figures are of the busiest")
    if made.gaps:
        lines.append(f"{len(made.gaps)} gaps, {seconds(idle)} in total ({idle / made.span_s:.1%}), most of it between:")
        where_lost: dict[tuple[str, str], list[float]] = {}
        for gap in made.gaps:
            where_lost.setdefault((gap.after, gap.before), []).append(gap.seconds)
        for (after, before), those in sorted(where_lost.items(), key=lambda item: -sum(item[1]))[:_SHOWN_GAPS]:
            pair = escape(f"{_short(after)} and {_short(before)}")
            lines.append(f"  {pair}: {seconds(sum(those))} in {len(those)}, the longest {seconds(max(those))}")
    if made.work is not None and made.steps:
        peak_flops = chip.flops_per_s(dtype) if dtype else None
        busy = made.busy_s / made.steps
        flops = _rate(made.work.flops, busy, "FLOP/s", peak_flops)
        moved = f", {_rate(made.work.bytes, busy, 'B/s', chip.bytes_per_s)}" if made.work.bytes else ""
        lines.append(f"useful work per step, over the {seconds(busy)} of it that {where} busy: {flops}{moved}")
    return lines


def _rate(amount: float | None, over_s: float, unit: str, peak: float | None) -> str:
    if not amount or not over_s:
        return "-"
    return rate(amount / over_s, unit, amount / over_s / peak if peak else None)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."
