"""`tilewright plan`: what a training or decoding step needs of devices that are not there, and how fast it could be."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from tilewright.aot import GPUS, TPUS, MemoryProbe, NotSetUp
from tilewright.aot.toolchain import Toolchain
from tilewright.cli.document import prints_json, tell
from tilewright.cli.screen import (
    Mistake,
    arguments,
    check_name,
    check_seconds,
    console,
    new_table,
    progress_bar,
    try_writing,
    writing,
)
from tilewright.core.chip import GIB, Chip
from tilewright.models.train_config import REMAT, LoraTable
from tilewright.parallel.mesh import MeshError, products_that_divide
from tilewright.parallel.pipeline import Pipeline
from tilewright.plan.compiled import CompiledStep, compile_step, probe_step
from tilewright.plan.estimate import Estimate, estimate
from tilewright.plan.place import Place
from tilewright.plan.search import search
from tilewright.plan.step import AXES, Step, ordered, read_model
from tilewright.workbench.check import DTYPES
from tilewright.workbench.figures import memory, seconds, significant
from tilewright.workbench.model_bench import PRESETS
from tilewright.workbench.records import checkout_commit, installed_versions, now, write_durably

_LARGEST = 8
_PROBED = 4
"""Of the ways that fit by estimate, how many the compiler is asked about until it agrees."""


@prints_json
def plan(
    model: Annotated[
        str, typer.Argument(help=f"A folder with config.json, that file, or a preset: {', '.join(PRESETS)}.")
    ],
    chip: Annotated[str, typer.Option(help=f"One of {', '.join((*TPUS, *GPUS))}.")] = "v6e",
    topology: Annotated[
        str | None, typer.Option(help="The slice: 4x4, 2x2x2; of GPUs 8, or 1x2x8 for two hosts. Defaults to one chip.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a step, of all devices and microbatches.")] = 8,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a row; with --decode, those in its cache.")] = 4096,
    mesh: Annotated[
        str | None,
        typer.Option(help=f"Sizes of {', '.join(AXES)}: fsdp=8,tensor=2; one may be -1. Defaults to fsdp=-1."),
    ] = None,
    remat: Annotated[str, typer.Option(help=f"What the backward pass keeps: {', '.join(REMAT)}.")] = "none",
    microbatches: Annotated[int, typer.Option(min=1, help="Parts of a training step, one after the other.")] = 1,
    stage_microbatches: Annotated[
        int,
        typer.Option(
            min=0,
            help="Parts of a batch that follow each other through the stages of a pipeline; 0: four "
            "per stage, or as many as rows can be cut into.",
        ),
    ] = 0,
    interleave: Annotated[int, typer.Option(min=1, help="Groups of layers of each stage of a pipeline.")] = 1,
    lora: Annotated[
        str | None, typer.Option(help="Train low-rank factors alone: a rank and projections, 16:q_proj,v_proj.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the computation: bfloat16 or float32.")] = "bfloat16",
    decode: Annotated[bool, typer.Option("--decode", help="A decoding step instead of a training step.")] = False,
    usable: Annotated[
        float | None, typer.Option("--memory", help="GiB of a device that a program can have, instead of the chip's.")
    ] = None,
    how: Annotated[
        str, typer.Option("--compile", help="no: estimates alone; probe: also the compiler's memory; yes: everything.")
    ] = "yes",
    tries: Annotated[int, typer.Option(min=0, help="Other ways that are traced at most, if it does not fit.")] = 10,
    limit: Annotated[float, typer.Option(help="The time limit of a compile, in seconds.")] = 3600.0,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Compile even if the result is cached on disk.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write everything to this file.")] = None,
) -> None:
    """Plan a training or decoding step of a model on TPUs or GPUs that are not there.

    Per device: memory by kind, against what a program can have, and the largest buffers; collectives by mesh axis with the
    bytes that a device sends; FLOPs; and a floor of the time, with what bounds it. If it does not fit, other remat
    policies, microbatches and meshes are tried, and those that fit are listed, the fastest first. The compiler then says
    what it assigns to the first of them, and compiles it.

    Estimates take seconds per way and need nothing but JAX (--compile no). The exit code is 1 where nothing fits, or where
    the compiler refuses it.
    """
    with arguments():
        name, values = read_model(model)
        check_name(chip, (*TPUS, *GPUS), "--chip")
        check_name(dtype, DTYPES, "--dtype")
        check_name(remat, REMAT, "--remat")
        check_name(how, _HOW, "--compile")
        if decode and (remat != "none" or microbatches > 1):
            raise ValueError("--remat and --microbatches are of a training step; leave them out with --decode")
        check_seconds(limit, "limit", positive=True)
        if usable is not None and not usable > 0:
            raise ValueError(f"--memory {usable} is not a number of GiB; use such as 31.2")
        place = Place.of(Chip.named(chip), topology, None if usable is None else int(usable * GIB))
        if decode and lora is not None:
            raise ValueError("--lora is of a training step: merged weights decode as others do; leave it out")
        step = Step(
            json.dumps(values),
            batch,
            seq,
            _mesh(mesh, place.num_devices),
            remat,
            microbatches,
            dtype,
            decode,
            Pipeline(stage_microbatches, interleave),
            _lora(lora),
        )
        if "pipeline" not in step.sizes and step.pipeline != Pipeline():
            raise ValueError("--stage-microbatches and --interleave are of a pipeline; give --mesh pipeline=4,data=-1")
        step.check()
        try_writing(out=out)
    if not decode:
        try:
            import optax  # noqa: F401
        except ImportError as error:
            raise Mistake("planning a training step needs optax: pip install 'tilewright[models]'") from error
    if how != "no":
        with _compiler():
            Toolchain.here(place.chip.platform)
    kept = _Kept(out, {"model": name, "chip": chip, "topology": topology, "step": _described(step)})
    title = f"{name} {'decoding' if decode else 'training'} {batch} x {seq} on {place.num_devices} x {chip}"
    with _waiting(f"tracing {step.named()}"):
        first = estimate(step, place)
    kept.add(estimate=first.to_dict())
    _show(first, title)
    fitting = [first] if first.fits else []
    if not first.fits and tries:
        fitting = _alternatives(first, tries, kept)
    agreed = False
    if how != "no" and fitting:
        agreed = _ask(fitting, how, limit, kept, use_cache=not no_cache)
    elif how != "no" and not fitting:
        console().print("Nothing was compiled: no way fits by estimate.")
    if out is not None:
        console().print(f"plan: {out}")
    if not fitting or (how != "no" and not agreed):
        raise typer.Exit(1)


_HOW = ("no", "probe", "yes")


class _Kept:
    """What is written to --out, whole after every part, and what --json prints."""

    def __init__(self, path: Path | None, head: dict[str, Any]):
        where = {"versions": installed_versions(), "commit": checkout_commit(), "date": now()}
        self._path, self._content = path, {"kind": "estimate", **head, **where}

    def add(self, **part: Any) -> None:
        self._content |= part
        tell(**self._content)
        if self._path is not None:
            with writing("out", self._path):
                write_durably(self._path, json.dumps(self._content, indent=1))


@contextlib.contextmanager
def _compiler() -> Iterator[None]:
    """A context in which a compiler that is missing is the caller's mistake."""
    try:
        with arguments(mistakes=(NotSetUp,)):
            yield
    except Exception as error:
        if isinstance(error.__cause__, NotSetUp):
            error.args = (f"{error}; or use --compile no, for estimates alone",)
        raise


@contextlib.contextmanager
def _waiting(what: str) -> Iterator[Any]:
    with progress_bar() as bar:
        task = bar.add_task(what, total=None)
        yield lambda text: bar.update(task, description=text)


def _mesh(given: str | None, devices: int) -> tuple[tuple[str, int], ...]:
    """The mesh of "fsdp=8,tensor=2", over all devices."""
    sizes: dict[str, int] = {}
    for pair in (given or "fsdp=-1").split(","):
        found = re.fullmatch(r"\s*(\w+)\s*=\s*(-1|[1-9]\d*)\s*", pair)
        if found is None or found[1] not in AXES or found[1] in sizes:
            raise ValueError(f"--mesh {pair.strip()} is not a size of {', '.join(AXES)}; write --mesh fsdp=8,tensor=2")
        sizes[found[1]] = int(found[2])
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(
            f"--mesh {given}: {' and '.join(open_axes)} are -1; only one can take the devices that are left"
        )
    others = 1
    for size in sizes.values():
        others *= size if size != -1 else 1
    if devices % others:
        raise MeshError(
            f"--mesh {given} has {others} devices, which do not divide the {devices} of the topology; "
            f"{products_that_divide(devices, others)}"
        )
    if open_axes:
        sizes[open_axes[0]] = devices // others
    elif others != devices:
        raise MeshError(
            f"--mesh {given} has {others} devices, and the topology has {devices}; make one of its sizes -1 for all of them"
        )
    return ordered(sizes)


def _lora(given: str | None) -> LoraTable | None:
    """The factors of "16:q_proj,v_proj"."""
    if given is None:
        return None
    found = re.fullmatch(r"([1-9]\d*):(\w+(?:,\w+)*)", given.replace(" ", ""))
    if found is None:
        raise ValueError(f"--lora {given} is not a rank and names of projections; write --lora 16:q_proj,v_proj")
    rank = int(found[1])
    return LoraTable(rank=rank, alpha=float(rank), targets=tuple(found[2].split(",")))


def _described(step: Step) -> dict[str, Any]:
    described = {"batch": step.batch, "tokens": step.tokens, "dtype": step.dtype, "decode": step.decode}
    if step.lora is not None:
        described["lora"] = {"rank": step.lora.rank, "targets": list(step.lora.targets)}
    return described


def _way(step: Step) -> str:
    """The mesh and, of a training step, what else can be changed."""
    if step.decode:
        return step.named()
    trained = "" if step.lora is None else f", LoRA of rank {step.lora.rank}"
    return f"{step.named()}, remat {step.remat}, {step.accumulate} microbatch{'es' * (step.accumulate > 1)}{trained}"


def _show(found: Estimate, title: str) -> None:
    place, work = found.place, found.work
    console().print(f"[bold]{escape(title)}[/]: {escape(_way(found.step))}", highlight=False, soft_wrap=True)
    table = new_table("memory of a device (estimate)", ("kind",), ("size", "of what it can have"))
    for kind, size in work.memory().items():
        table.add_row(kind, memory(size), f"{size / place.usable_bytes:.1%}")
    table.add_section()
    verdict = "[bold green]fits[/]" if found.fits else "[bold red]does not fit[/]"
    table.add_row(f"together: {verdict}", memory(found.bytes), f"{found.bytes / place.usable_bytes:.1%}")
    console().print(table)
    nominal = place.chip.memory_bytes
    console().print(
        f"A program can have {memory(place.usable_bytes)} of a device"
        + (f" ({memory(nominal * place.chip.device_share)} nominally)." if nominal else "."),
        highlight=False,
    )
    table = new_table("largest buffers at the peak (estimate)", ("what", "shape of a device", "kind"), ("size",))
    for each in work.buffers[:_LARGEST]:
        table.add_row(escape(each.name), escape(each.shape), each.kind, memory(each.bytes))
    console().print(table)
    if work.collectives:
        table = new_table("collectives of a step (estimate)", ("mesh axes", "kind"), ("times", "a device sends"))
        for each in work.collectives:
            if each.bytes >= 1:
                table.add_row(" x ".join(each.axes), each.kind, f"{each.count:.0f}", memory(each.bytes))
        console().print(table)
    _show_time(found)
    for note in work.notes:
        console().print(f"[yellow]note:[/] {escape(note)}", highlight=False)


def _show_time(found: Estimate) -> None:
    work, tokens = found.work, found.step.batch * (1 if found.step.decode else found.step.tokens)
    links = "; ".join(
        f"{axes} {seconds(taken)}" for axes, (_, taken) in found.links.items() if taken >= 0.01 * found.links_s
    )
    table = new_table("time of a step (estimate, at peak rates)", ("what", "amount of a device"), ("time",))
    table.add_row("compute", f"{significant(work.flops / 1e12)} TFLOP", seconds(found.compute_s))
    table.add_row("HBM", memory(work.hbm_bytes), seconds(found.hbm_s))
    table.add_row("links", escape(links) or "-", seconds(found.links_s))
    table.add_section()
    table.add_row(f"floor, bound by {found.bound}", f"{tokens / found.floor_s:,.0f} tokens/s", seconds(found.floor_s))
    table.add_row("with no exchange behind the work", f"{tokens / found.apart_s:,.0f} tokens/s", seconds(found.apart_s))
    console().print(table)
    if (stages := found.pipeline) is not None:
        rounds = f" of {stages['interleave']} rounds" if stages["interleave"] > 1 else ""
        console().print(
            f"A pass over the {stages['stages']} stages has {stages['steps']} steps for {stages['microbatches']} "
            f"microbatches{rounds}: a bubble of {stages['bubble']:.1%}, which is part of compute.",
            highlight=False,
            soft_wrap=True,
        )


def _alternatives(first: Estimate, tries: int, kept: _Kept) -> list[Estimate]:
    with _waiting("searching") as say:
        fitting = search(first, tries=tries, watch=lambda step: say(f"tracing {_way(step)}"))
    kept.add(alternatives=[each.to_dict() for each in fitting])
    if not fitting:
        console().print(
            "[bold red]nothing fits[/] among the remat policies, microbatches and meshes that were tried; use more "
            "devices, fewer rows, or shorter ones"
        )
        return []
    table = new_table(
        "what fits, the fastest first (estimates)",
        ("mesh", "remat"),
        ("microbatches", "memory", "free", "floor", "no overlap", "bound by"),
    )
    for each in fitting:
        free = each.place.usable_bytes - each.bytes
        table.add_row(
            each.step.named(),
            each.step.remat,
            f"{each.step.accumulate}",
            memory(each.bytes),
            memory(free),
            seconds(each.floor_s),
            seconds(each.apart_s),
            each.bound,
        )
    console().print(table)
    return fitting


def _ask(fitting: list[Estimate], how: str, limit: float, kept: _Kept, *, use_cache: bool) -> bool:
    """Asks the compiler about the first ways, until one fits; compiles that one."""
    probes = []
    for found in fitting[:_PROBED]:
        place, way = found.place, _way(found.step)
        if place.chip.platform == "gpu" and how == "yes":
            # There is no quicker question to this compiler than the whole compile.
            compiled = _compiled(found, limit, use_cache=use_cache)
            probe = MemoryProbe(compiled.peak_bytes if compiled.ok else None, compiled.seconds, compiled.cause)
        else:
            compiled = None
            with _waiting(f"probing the memory of {way}"), _compiler():
                probe = probe_step(found.step, place, limit_s=limit, use_cache=use_cache)
        probes.append({"way": way, "bytes": probe.bytes, "seconds": probe.seconds, "cause": probe.cause})
        kept.add(probes=probes)
        if probe.bytes is None:
            console().print(f"[bold red]{escape(way)}:[/] {escape(probe.cause)}", soft_wrap=True)
            continue
        fits = probe.bytes <= place.usable_bytes
        console().print(
            f"{escape(way)}: the compiler assigns [bold]{memory(probe.bytes)}[/] of {memory(place.usable_bytes)}, which "
            f"{'fits' if fits else '[bold red]does not fit[/]'}; the estimate was {memory(found.bytes)} "
            f"({seconds(probe.seconds)})",
            highlight=False,
            soft_wrap=True,
        )
        if not fits:
            continue
        if how == "yes":
            compiled = compiled or _compiled(found, limit, use_cache=use_cache)
            kept.add(compiled=compiled.to_dict())
            _show_compiled(compiled, way)
            return compiled.ok
        return True
    return False


def _compiled(found: Estimate, limit: float, *, use_cache: bool) -> CompiledStep:
    with _waiting(f"compiling {_way(found.step)}"), _compiler():
        return compile_step(found.step, found.place, limit_s=limit, use_cache=use_cache)


def _show_compiled(compiled: CompiledStep, way: str) -> None:
    if not compiled.ok:
        console().print(f"[bold red]{escape(way)}:[/] {escape(compiled.cause)}", soft_wrap=True)
        return
    console().print(
        f"compiled by {compiled.compiler} in {seconds(compiled.seconds)}: arguments {memory(compiled.argument_bytes)}, "
        f"temporaries {memory(compiled.temp_bytes)}, peak {memory(compiled.peak_bytes)} of a device",
        highlight=False,
        soft_wrap=True,
    )
    if compiled.collectives:
        table = new_table(
            "collectives of the compiled step", ("mesh axes", "kind"), ("times", "asynchronous", "a device sends")
        )
        for each in compiled.collectives:
            axes = " x ".join(each.axes) or "all devices"
            table.add_row(axes, each.kind, f"{each.count:.0f}", f"{each.asynchronous:.0f}", memory(each.bytes))
        console().print(table)
    table = new_table("largest results of the compiled step", ("made by", "shape of a device"), ("size",))
    for name, shape, size in compiled.largest[:_LARGEST]:
        table.add_row(escape(name), escape(shape), memory(size))
    console().print(table)
