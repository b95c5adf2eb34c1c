"""`tilewright check`: compares the values and every gradient of an implementation with the oracle."""

import dataclasses
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import Entries, console, new_table, split_names
from tilewright.cli.ship import runs_elsewhere
from tilewright.core.dispatch import KERNEL_PLATFORM, Op, find_op
from tilewright.core.target import RaceDetected, default_device, make_room_for_interpreters
from tilewright.workbench.check import (
    DTYPES,
    CaseCheck,
    Checked,
    check_implementation,
    dtypes_taken,
    needs_interpreter,
)


def _settle(
    op: str, implementation: str | None, case: str | None, dtype: str | None, *, races: bool, **_: Any
) -> tuple[Op, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Resolves the names on the command line: op, implementations, cases and dtypes. An unknown one is an error."""
    make_room_for_interpreters()
    found = find_op(op)
    known = tuple(name for name in found.implementations if not races or name in KERNEL_PLATFORM)
    if not known:
        raise ValueError(
            f"{op} has no kernel to look for races in; its implementations, "
            f"{' and '.join(found.implementations)}, are plain JAX: leave out --races, or check another op"
        )
    implementations = split_names(implementation, known, "implementation")
    small = tuple(c.name for c in found.cases if c.small)
    every = tuple(c.name for c in found.cases)
    cases = every if case == "all" else small if case is None else split_names(case, every, "case")
    return found, implementations, cases, split_names(dtype, DTYPES, "dtype")


@prints_json
@runs_elsewhere(check=_settle)
def check(
    asked: tuple[Op, tuple[str, ...], tuple[str, ...], tuple[str, ...]],
    op: Annotated[str, typer.Argument(help="The op's name; `tilewright ops` lists them.")],
    implementation: Annotated[str | None, typer.Option(help="Comma-separated; defaults to all.")] = None,
    case: Annotated[str | None, typer.Option(help="Comma-separated, or `all`; defaults to the small cases.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16; defaults to what each implementation takes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="The seed of the random inputs and cotangents.")] = 0,
    races: Annotated[
        bool, typer.Option("--races", help="Run kernels in their interpreters, with race detection.")
    ] = False,
) -> None:
    """Check the values and every gradient of an op against the oracle, over its cases.

    The oracle is the reference in float64. An error may be at most twice that of the reference in the same dtype, plus a
    tiny floor; NaN never passes. A kernel for another device runs in its interpreter, where uninitialised memory is NaN.
    With --races the steps of a TPU kernel's parallel grid axes run on simulated cores of their own, so that one which
    depends on another is found. The exit code is 1 if an error exceeds its bound, a race is found, or an entry fails.
    """
    found, implementations, cases, dtypes = asked
    default_device()  # Raises where JAX_PLATFORMS names a device that is not here.
    # A dtype or case that was named is tried, and refused with its reason. Otherwise only what is supported is checked.
    taken = {name: dtypes if dtype else dtypes_taken(found, name) for name in implementations}
    results: list[Checked] = []
    raced: dict[str, str] = {}
    failed: list[tuple[str, ...]] = []
    with Entries("checking", total=len(cases) * len(dtypes) * (1 + len(implementations))) as entries:
        for case_name, dtype_name in ((c, d) for c in cases for d in dtypes):
            held = None
            with entries.one(f"reference {case_name} {dtype_name}"):
                held = CaseCheck(found, found.case(case_name), dtype_name, seed=seed)
            for name in implementations if held is not None else ():
                with entries.one(f"{name} {case_name} {dtype_name}") as raised:
                    try:
                        if dtype_name in taken[name]:
                            results += check_implementation(held, name, races=races)
                    except RaceDetected as error:
                        raced[f"{name} {case_name} {dtype_name}"] = str(error)
                failed += [(case_name, dtype_name, name) for _ in raised]

    interpreted = [name for name in implementations if races or needs_interpreter(name)]
    tell(op=op, checked=[_told(result) for result in results], races=raced, interpreter=interpreted)
    table = new_table(
        f"{op} against the oracle (the reference in float64)",
        ("case", "dtype", "implementation", "quantity"),
        ("max error", "bound", "mean error", "relative", "bound", "worst at", ""),
    )
    for result in results:
        table.add_row(*_row(result))
    for row in failed:
        table.add_row(*row, *["-"] * 7, "[bold red]failed[/]")
    console().print(table)
    misses = [result for result in results if not result.verdict.ok]
    if interpreted:
        why = "with race detection" if races else "since this device cannot run it"
        console().print(f"In the interpreter, {why}: {', '.join(interpreted)}.")
    for name, those in taken.items():
        if left_out := [dtype_name for dtype_name in dtypes if dtype_name not in those]:
            console().print(f"{name} does not take {' or '.join(left_out)}.")
    console().print(f"{len(results) - len(misses)} of {len(results)} within bounds.")
    for miss in misses:
        what = f"{miss.implementation} {miss.case} {miss.dtype} {miss.quantity}: {miss.verdict}"
        console().print(f"[bold red]miss:[/] {escape(what)}")
    for what, accesses in raced.items():
        console().print(f"[bold red]race:[/] {escape(f'{what}: {accesses}')}")
    if races and results and not raced and entries.complete:
        wrong = "The values are wrong, by another cause than a data race that the interpreter knows."
        console().print(wrong if misses else "No data race found.")
    entries.end(ok=bool(results) and not misses and not raced, refused="not taken", named=case is not None)


def _told(result: Checked) -> dict[str, Any]:
    verdict = result.verdict
    bounds = {"max_abs_bound": verdict.max_abs_bound, "relative_bound": verdict.relative_bound}
    names = {name: getattr(result, name) for name in ("case", "dtype", "implementation", "quantity")}
    return {**names, "ok": verdict.ok, **dataclasses.asdict(verdict.error), **bounds}


def _row(result: Checked) -> tuple[str, ...]:
    verdict = result.verdict
    return (
        result.case,
        result.dtype,
        result.implementation,
        result.quantity,
        f"{verdict.error.max_abs:.2e}",
        f"{verdict.max_abs_bound:.2e}",
        f"{verdict.error.mean_abs:.2e}",
        f"{verdict.error.relative:.2e}",
        f"{verdict.relative_bound:.2e}",
        str(list(verdict.error.worst)),
        "[green]ok[/]" if verdict.ok else "[bold red]MISS[/]",
    )
