"""`tilewright stalls`: where the warps of a GPU kernel wait, from what Nsight Compute sampled."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import Mistake, arguments, console, new_table
from tilewright.workbench.stalls import REASONS, Instruction, Stalls, read

_LEAST_SHARE = 0.01  # Of a region that is shown.
_REASONS, _OPCODES = 3, 6  # Shown of a row; all are in the document.


@prints_json
def stalls(
    export: Annotated[Path, typer.Argument(help="What `ncu --import REPORT --page source --csv` printed.")],
    kernel: Annotated[
        str | None, typer.Option(help="A regular expression; only kernels whose names it matches.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many instructions to list, with --json too.")] = 20,
) -> None:
    """Show where the warps of a GPU kernel wait: for what, in which part of its code, at which instructions.

    Nsight Compute samples the warps of a kernel. Record a report on a GPU, and export it there or elsewhere:

    ncu --clock-control none --set full -k regex:NAME -c 1 -o REPORT python SCRIPT.py

    ncu --import REPORT.ncu-rep --page source --csv > EXPORT.csv

    A kernel's name is that of the trace, or a part of it. The code is the machine's (SASS). Shares are of the samples of a
    kernel; instructions are counted per warp. What a kernel spills is words of local memory. Where they do not stay in the
    L1 cache, each reload takes as long as a load from global memory.
    """
    with arguments():
        pattern = _compiled(kernel)
        there = read(_lines(export))
    found = [one for one in there if pattern is None or pattern.search(one.kernel)]
    if not found:
        names = ", ".join(dict.fromkeys(one.kernel for one in there))
        raise Mistake(f"--kernel {kernel} matches no kernel of {export}, which has {names}")
    tell(kernels=[_document(one, top) for one in found])
    for one in found:
        _show(one, top)


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"--kernel {pattern} is no regular expression: {error}") from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no text; if it is a report (.ncu-rep), export it with `ncu --import {path} --page source --csv`"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _show(one: Stalls, top: int) -> None:
    loaded, stored = one.local_words_per_thread
    name = escape(one.kernel)
    title = (
        f"{name}: {one.samples:,} samples; {one.executed / one.warps:,.0f} instructions per warp; spilled, "
        f"words per thread: {stored:.0f} stored, {loaded:.0f} loaded"
    )
    reasons = new_table(title, ("reason", "warps waited for", "share"))
    for reason, count in one.reasons.items():
        reasons.add_row(escape(reason), REASONS.get(reason, ""), _share(one, count))
    console().print(reasons)
    regions = new_table(
        f"{name}: parts of the code, from one wait or branch to the next, with {_LEAST_SHARE:.0%} of the samples",
        ("instructions", "executed per warp", "share", "waited for", "opcodes", "ends at"),
    )
    for region in one.regions():
        if region.samples >= _LEAST_SHARE * one.samples:
            opcodes = ", ".join(
                f"{count / one.warps:.0f} {opcode}" for opcode, count in list(region.opcodes.items())[:_OPCODES]
            )
            first, last = region.instructions[0], region.instructions[-1]
            regions.add_row(
                f"{first.place}-{last.place}",
                f"{region.executed / one.warps:,.0f}",
                _share(one, region.samples),
                _most(one, region.reasons),
                escape(opcodes),
                escape(last.opcode),
            )
    console().print(regions)
    hottest = new_table(
        f"{name}: the instructions with the most samples, in the order of the code",
        ("instruction", "executed per warp", "share", "waited for", "code"),
    )
    for each in _hottest(one, top):
        row = (
            str(each.place),
            f"{each.executed / one.warps:,.0f}",
            _share(one, each.samples),
            _most(one, each.reasons),
        )
        hottest.add_row(*row, escape(each.code))
    console().print(hottest)


def _hottest(one: Stalls, top: int) -> list[Instruction]:
    most = sorted(one.instructions, key=lambda each: -each.samples)[:top]
    return sorted((each for each in most if each.samples), key=lambda each: each.place)


def _share(one: Stalls, samples: int) -> str:
    return f"{samples / max(one.samples, 1):.1%}"


def _most(one: Stalls, reasons: dict[str, int]) -> str:
    """The most frequent reasons, with their shares of all samples of the kernel."""
    ordered = sorted(reasons.items(), key=lambda item: -item[1])[:_REASONS]
    return ", ".join(f"{reason} {_share(one, count)}" for reason, count in ordered)


def _document(one: Stalls, top: int) -> dict[str, Any]:
    loaded, stored = one.local_words_per_thread

    def region_of(region: Stalls) -> dict[str, Any]:
        return {
            "first": region.instructions[0].place,
            "last": region.instructions[-1].place,
            "executed": region.executed,
            "samples": region.samples,
            "reasons": region.reasons,
            "opcodes": region.opcodes,
        }

    return {
        "kernel": one.kernel,
        "samples": one.samples,
        "warps": one.warps,
        "executed": one.executed,
        "local_words_loaded": loaded,
        "local_words_stored": stored,
        "reasons": one.reasons,
        "opcodes": one.opcodes,
        "regions": [region_of(region) for region in one.regions()],
        "instructions": [dataclasses.asdict(each) for each in _hottest(one, top)],
    }
