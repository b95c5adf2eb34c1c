"""`tilewright compile`: compiles an op's kernels for TPUs and GPUs that are not attached, and says what bounds them."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.markup import escape
from rich.table import Table

from tilewright.aot import GPUS, TPUS, Binary, CompileReport, KernelReport, NotSetUp, compile_each, doctor
from tilewright.aot import compile as compile_for
from tilewright.aot.sass import count_kinds
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
    writing,
)
from tilewright.core.case import Case
from tilewright.core.chip import Chip, Platform
from tilewright.core.dispatch import Op, explain, find_op
from tilewright.core.nearest import did_you_mean
from tilewright.core.target import default_device, target
from tilewright.workbench.check import DTYPES, call, call_with_gradients
from tilewright.workbench.figures import memory, seconds
from tilewright.workbench.records import checkout_commit, installed_versions, now, write_durably

# The kinds of instructions of a GPU kernel that have columns. --out and --json have all of them.
_COUNTED = ("wgmma", "mma", "async copy", "MUFU", "FP32", "convert", "shared", "barrier")


@prints_json
def compile_verb(
    op: Annotated[str | None, typer.Argument(help="The op's name; `tilewright ops` lists them.")] = None,
    case: Annotated[str | None, typer.Option(help="Comma-separated; defaults to the op's first large case.")] = None,
    chip: Annotated[
        str | None,
        typer.Option(help=f"Comma-separated; defaults to the TPUs: {','.join(TPUS)}. GPUs: {','.join(GPUS)}."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    grad: Annotated[bool, typer.Option("--grad", help="Forward and backward instead of forward alone.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            help="Fields that replace the heuristic's, in whichever of the forward and backward configs have them: "
            "block_n=512,backward.block_v=256"
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("-j", min=1, help="How many compiles run in parallel.")] = os.cpu_count() or 1,
    limit: Annotated[float, typer.Option(help="The time limit of a compile, in seconds.")] = 1800.0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile even if the result is cached on disk.")] = False,
    no_schedule: Annotated[
        bool,
        typer.Option("--no-schedule", help="Report only whether it compiles, on TPUs in half the time: no figures."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Write the full reports to this file, as they are made.")
    ] = None,
    ask_doctor: Annotated[
        bool, typer.Option("--doctor", help="Report what this machine has and lacks for compiling, and stop.")
    ] = False,
) -> None:
    """Compile an op's kernels for TPUs and GPUs, on a machine that has none.

    For each chip and kernel it reports whether it compiles, and if not the cause and the remedy. On TPUs (libtpu): its VMEM
    and the chip's; the bundles of a steady-state step and the fraction of its stores that are spills; the busiest unit; HBM
    traffic; and a lower bound of its time. On GPUs (Mosaic and ptxas): its registers and shared memory, the blocks of a
    multiprocessor, spills and which of them are in loops, the instructions of the steady-state loop by kind, and ptxas's
    warnings of serialised wgmma. Times are estimated from the schedule: they are not measurements, and there are none for
    GPUs. The exit code is 1 if a compile fails; Ctrl-C ends with the reports so far.
    """
    if ask_doctor:
        with arguments():
            _show_doctor(tuple(dict.fromkeys(Chip.named(each).platform for each in _chips(chip, (*TPUS, *GPUS)))))
        return
    with arguments():
        if op is None:
            raise ValueError("OP is missing; name an op (`tilewright ops` lists them), or pass --doctor")
        found = find_op(op)
        chips = tuple(Chip.named(each) for each in _chips(chip, TPUS))
        platforms: tuple[Platform, ...] = tuple(dict.fromkeys(each.platform for each in chips))
        for platform in platforms:
            if f"pallas_{platform}" not in found.implementations:
                raise ValueError(
                    f"{op} has no {platform.upper()} kernel to compile; its implementations: "
                    f"{', '.join(found.implementations)}"
                )
        check_name(dtype, DTYPES, "--dtype")
        check_seconds(limit, "limit", positive=True)
        every = tuple(c.name for c in found.cases)
        large = [c.name for c in found.cases if not c.small] or list(every)
        cases = split_names(case, every, "case") if case is not None else (large[0],)
        changes = _parse_config(config)
        work = [(found.case(name), on) for name in cases for on in chips]
        settled = [_changed_configs(found, each, on, dtype, changes) for each, on in work]
        try_writing(out=out)
    default_device()  # Raises where JAX_PLATFORMS names a device that is not here.
    with arguments(mistakes=(NotSetUp,)):
        for platform in platforms:
            Toolchain.here(platform)

    def job(each: Case, on: Chip, configs: Any) -> CompileReport:
        function = call(found, each, f"pallas_{on.platform}", configs)
        structs = each.structs(dtype)
        how: Any = {"chip": on, "limit_s": limit, "use_cache": not no_cache, "schedule": not no_schedule}
        if grad:
            cotangents = jax.eval_shape(call(found, each, "reference"), **structs)
            return compile_for(call_with_gradients(function, each), structs, cotangents, **how)
        return compile_for(lambda arrays: function(**arrays), structs, **how)

    todo = [functools.partial(job, each, on, configs) for (each, on), configs in zip(work, settled, strict=True)]
    mode = "forward+backward" if grad else "forward"
    where = {"versions": installed_versions(), "commit": checkout_commit(), "date": now()}
    reports: dict[int, CompileReport] = {}

    def keep(place: int, report: CompileReport) -> None:
        """Adds a report, and writes all of them, in order: the file is whole after every one."""
        reports[place] = dataclasses.replace(report, remedy=_for_this_verb(report.remedy, found, work[place][1]))
        named = {"kind": "estimate", "op": op, "dtype": dtype, "mode": mode, **where}
        whole = [{**named, "case": work[n][0].name, **reports[n].to_dict()} for n in sorted(reports)]
        tell(reports=whole)
        if out is not None:
            with writing("out", out):
                write_durably(out, json.dumps(whole, indent=1))

    with (
        Entries(f"compiling {op}", total=len(work)) as entries,
        contextlib.closing(compile_each(todo, side_by_side=jobs)) as ended,
    ):
        for place, future in ended:
            each, on = work[place]
            with entries.one(f"{each.name} {on.name}"):
                keep(place, future.result())
    for name, platform in itertools.product(cases, platforms):
        those = [reports[n] for n in sorted(reports) if work[n][0].name == name and work[n][1].platform == platform]
        if those:
            title, prefix = f"{op} {name} {dtype}, {mode}", f"{op}_"
            if no_schedule:
                console().print(_outcomes_table(title, those))
                continue
            if platform == "tpu":
                console().print(_tpu_table(title, those, prefix=prefix))
                continue
            console().print(_gpu_table(title, those, prefix=prefix))
            if (loops := _loop_table(title, those, prefix=prefix)) is not None:
                console().print(loops)
            _show_remarks(those)
    _show_failures(list(reports.values()))
    if not no_schedule and "tpu" in platforms:
        console().print("Times are lower bounds, estimated from the schedule; they are not measurements.")
    if not no_schedule and "gpu" in platforms:
        console().print(
            "Figures of GPU kernels are read from the machine code; nothing was run, and no time is estimated."
        )
    if out is not None:
        console().print(f"reports: {out}")
    entries.end(refused="not compiled", ok=bool(reports) and all(report.ok for report in reports.values()))


def _chips(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return default if given is None else split_names(given, (*TPUS, *GPUS), "chip")


def _parse_config(given: str | None) -> dict[str, int]:
    """{"block_n": 512, "backward.block_v": 256} of "block_n=512,backward.block_v=256"."""
    changes: dict[str, int] = {}
    for pair in (given or "").split(","):
        if pair.strip():
            name, separator, value = pair.partition("=")
            if not separator or not value.strip().isdigit():
                raise ValueError(f"--config {pair.strip()} is not name=number; write --config block_n=512,block_v=256")
            changes[name.strip()] = int(value)
    return changes


def _changed_configs(op: Op, case: Case, chip: Chip, dtype: str, changes: dict[str, int]) -> Any:
    """The heuristic's configs with the changes of the command line; None where there are no changes.

    A change applies to the forward and to the backward config, wherever it has that field; "backward.block_n" applies to
    one of them.
    """
    if not changes:
        return None
    with target(chip):
        implementation = f"pallas_{chip.platform}"
        explanation = explain(op.name, **case.structs(dtype), **case.options, implementation=implementation)
    if explanation.refusal is not None:
        raise ValueError(_for_this_verb(explanation.refusal, op, chip))
    configs = explanation.decisions[0].configs
    fields = {name: [field.name for field in dataclasses.fields(config)] for name, config in configs.items()}  # type: ignore[arg-type]
    applied: dict[str, dict[str, int]] = {direction: {} for direction in configs}
    for name, value in changes.items():
        direction, _, field = name.rpartition(".")
        fitting = [each for each in configs if direction in ("", each) and field in fields[each]]
        if not fitting:
            known = "; ".join(f"{each}: {', '.join(names)}" for each, names in fields.items()) or "none"
            hint = did_you_mean(field, [each for names in fields.values() for each in names])
            raise ValueError(f"--config {name} is not a block size of {op.name}; use one of {known}{hint}")
        for each in fitting:
            applied[each][field] = value
    return tuple(dataclasses.replace(config, **applied[each]) for each, config in configs.items())  # type: ignore[type-var]


def _for_this_verb(text: str, op: Op, chip: Chip) -> str:
    """The remedy of a refusal, which is written for callers of the op, in words of this command line."""
    text = re.sub(r"\w+\.astype\(jnp\.(\w+)\)|(?<=pass )[\w, ]+ as (bfloat16)", r"--dtype \1\2", text)
    taken = {one.architecture for one in op.architectures(f"pallas_{chip.platform}")}
    if taken & {None, chip.compute_capability}:
        otherwise = r"another case: here a call takes '\1', which has no kernel to compile"
    else:
        otherwise = f"--chip {' or '.join(name for name in GPUS if Chip.named(name).compute_capability in taken)}"
    return re.sub(r"implementation='(xla|reference)'", otherwise, text)


def _show_doctor(platforms: tuple[Platform, ...]) -> None:
    findings = {platform: doctor(platform) for platform in platforms}
    tell(findings=findings)
    lacks = False
    for platform in platforms:
        table = new_table(
            f"What this machine has for compiling for {platform.upper()}s", ("what", "", "found", "remedy")
        )
        for finding in findings[platform]:
            sign = "[green]ok[/]" if finding.ok else "[bold red]no[/]" if finding.needed else "[yellow]old[/]"
            table.add_row(finding.what, sign, escape(finding.found), "" if finding.ok else finding.remedy)
            lacks |= not finding.ok and finding.needed
        console().print(table)
    if lacks:
        raise typer.Exit(1)


def _outcomes_table(title: str, reports: list[CompileReport]) -> Table:
    """Whether each compiles, and nothing else: what --no-schedule asks for."""
    table = new_table(f"{title} ({reports[0].compiler})", ("chip", "result"), ("compile", "code"))
    for report in reports:
        result = "[green]compiles[/]" if report.ok else f"[bold red]{report.stage} failed[/]"
        took = "cached" if report.cached else f"{report.seconds:.0f} s"
        table.add_row(report.chip, result, took, memory(report.code_bytes))
    return table


def _tpu_table(title: str, reports: list[CompileReport], *, prefix: str) -> Table:
    table = new_table(
        f"{title} ({reports[0].compiler}; times are estimates)",
        ("chip", "kernel"),
        (
            *("compile", "code", "VMEM", "bundles per step", "spilled stores"),
            *("bottleneck", "HBM", "est. floor", "of roofline"),
        ),
    )
    for report in reports:
        capacity = Chip.named(report.chip).vmem_bytes
        if not report.ok:
            table.add_row(report.chip, f"[bold red]{report.stage} failed[/]", *[""] * 9)
        for position, kernel in enumerate(report.kernels):
            first = position == 0
            table.add_row(
                report.chip if first else "",
                kernel.name.removeprefix(prefix),
                ("cached" if report.cached else f"{report.seconds:.0f} s") if first else "",
                memory(report.code_bytes) if first else "",
                *_figures(kernel, capacity),
            )
        if report.ok and not report.kernels:
            table.add_row(
                report.chip, "(no Pallas kernel)", f"{report.seconds:.0f} s", memory(report.code_bytes), *[""] * 7
            )
        if len(report.kernels) > 1 and report.floor_us is not None:
            table.add_row("", "[bold]all[/]", *[""] * 7, f"[bold]{_estimate(report.floor_us)}[/]", "")
        table.add_section()
    return table


def _gpu_table(title: str, reports: list[CompileReport], *, prefix: str) -> Table:
    capacity = " or ".join(dict.fromkeys(memory(Chip.named(report.chip).smem_bytes) for report in reports))
    table = new_table(
        f"{title} ({reports[0].compiler}; from machine code, not measured)",
        ("chip", "kernel"),
        (
            *("compile", "threads", "registers", "setmaxnreg", f"SMEM of {capacity}", "blocks per SM", "limited by"),
            *("spilled", "in loops", "steady state"),
        ),
    )
    for report in reports:
        if not report.ok:
            table.add_row(report.chip, f"[bold red]{report.stage} failed[/]", *[""] * 10)
        elif not report.kernels:
            table.add_row(report.chip, "(no Pallas kernel)", f"{report.seconds:.0f} s", *[""] * 9)
        for position, kernel in enumerate(report.kernels):
            first = position == 0
            table.add_row(
                report.chip if first else "",
                kernel.name.removeprefix(prefix),
                ("cached" if report.cached else f"{report.seconds:.0f} s") if first else "",
                *_gpu_figures(kernel),
            )
        table.add_section()
    return table


def _gpu_figures(kernel: KernelReport) -> tuple[str, ...]:
    binary, resident = kernel.binary, kernel.occupancy
    assert binary is not None
    assert resident is not None
    steady = binary.steady_state
    return (
        f"{binary.threads}",
        f"{binary.registers}",
        ", ".join(map(str, binary.setmaxnreg)) or "-",
        memory(binary.smem_bytes),
        f"{resident.blocks}",
        ", ".join(resident.limits),
        _spilled(binary.spill_store_bytes + binary.spill_load_bytes),
        _spilled(binary.spill_bytes_in_loops),
        "no loop" if steady is None else f"{steady.instructions:,}",
    )


def _spilled(size: int) -> str:
    return f"[bold red]{size} B[/]" if size else "0"


def _loop_table(title: str, reports: list[CompileReport], *, prefix: str) -> Table | None:
    """The instructions of every loop, by kind. Chips that have the same code share their rows."""
    chips: dict[str, list[str]] = {}
    binaries: dict[str, list[Binary]] = {}
    for report in reports:
        found = [kernel.binary for kernel in report.kernels if kernel.binary is not None]
        if found:
            key = json.dumps([binary.to_dict() for binary in found])
            chips.setdefault(key, []).append(report.chip)
            binaries[key] = found
    if not chips:
        return None
    every = [count_kinds(binary.opcodes) for found in binaries.values() for binary in found]
    listed = tuple(kind for kind in _COUNTED if any(kind in kinds for kinds in every))

    def counted(kinds: dict[str, int]) -> tuple[str, ...]:
        return tuple(f"{kinds.get(kind, 0):,}" for kind in listed)

    table = new_table(
        f"{title}: instructions of each loop, without those inside of it (*: steady state)",
        ("chip", "kernel", "loop"),
        ("depth", "instructions", "spilled", *listed),
    )
    for key, found in binaries.items():
        for position, binary in enumerate(found):
            name = binary.name.removeprefix(prefix)
            rows = [
                (
                    f"0x{loop.start:04x}{' *' if loop == binary.steady_state else ''}",
                    f"{loop.depth}",
                    f"{loop.instructions:,}",
                    _spilled(loop.spill_bytes),
                    *counted(loop.kinds),
                )
                for loop in binary.loops
            ] or [("no loop", "", f"{sum(binary.opcodes.values()):,}", "", *counted(count_kinds(binary.opcodes)))]
            for place, row in enumerate(rows):
                first = position == place == 0
                table.add_row(", ".join(chips[key]) if first else "", name if place == 0 else "", *row)
        table.add_section()
    return table


def _show_remarks(reports: list[CompileReport]) -> None:
    """What ptxas says about performance: once per kernel, and serialised wgmma first."""
    said: dict[str, list[str]] = {}
    for report in reports:
        for kernel in report.kernels:
            for remark in kernel.binary.remarks if kernel.binary is not None else ():
                said.setdefault(f"{kernel.name}: {remark}", []).append(report.chip)
    for remark, chips in sorted(said.items(), key=lambda item: "serialized" not in item[0]):
        console().print(f"[bold yellow]{', '.join(chips)}[/] {escape(remark)}", soft_wrap=True)


def _figures(kernel: KernelReport, capacity: int | None) -> tuple[str, ...]:
    schedule = kernel.schedule
    if schedule is None:
        return ("-", "-", "-", "-", memory(kernel.hbm_bytes), "-", escape(kernel.note))
    bound = kernel.bottleneck
    share = f" of {memory(capacity)}" if capacity else ""
    fraction = kernel.roofline_fraction
    return (
        f"{memory(schedule.vmem_bytes)}{share}" if schedule.vmem else "-",
        f"{schedule.bundles:,}",
        f"{schedule.spill_stores / schedule.stores:.0%}" if schedule.stores else "-",
        f"{bound[0]} {bound[1]:.0%}" if bound else "-",
        memory(kernel.hbm_bytes),
        _estimate(kernel.floor_us),
        f"{fraction:.0%}" if fraction is not None else escape(kernel.note) or "-",
    )


def _estimate(microseconds: float | None) -> str:
    return "unknown" if microseconds is None else seconds(microseconds / 1e6)


def _show_failures(reports: list[CompileReport]) -> None:
    for report in reports:
        if not report.ok:
            console().print(f"[bold red]{report.chip}:[/] {escape(report.cause)}", soft_wrap=True)
            console().print(f"  remedy: {escape(report.remedy)}", soft_wrap=True)
