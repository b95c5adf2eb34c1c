"""`tilewright bench model`: times a whole language model with random weights, training and generating."""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from tilewright.cli.bench import told_record
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
from tilewright.cli.ship import runs_elsewhere
from tilewright.core.quantized import LARGEST
from tilewright.core.target import default_device
from tilewright.models.train_config import REMAT
from tilewright.plan.advice import OutOfMemory, advise, is_out_of_memory
from tilewright.plan.step import Step
from tilewright.workbench.bench import Timing
from tilewright.workbench.check import DTYPES
from tilewright.workbench.figures import memory, one_line, rate, seconds, significant
from tilewright.workbench.model_bench import (
    PRESETS,
    TRANSFORMERS,
    Subject,
    Workload,
    bench_peer_model,
    default_workloads,
    failure_record,
)
from tilewright.workbench.model_bench import bench_model as bench_ours
from tilewright.workbench.peers.beside import leave_room
from tilewright.workbench.peers.registry import absent
from tilewright.workbench.records import Record, append_records


class Verbs(TyperGroup):
    """The verbs, of which one has two words: `bench model` is not `bench` of an op called "model"."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, ["bench model", *args[2:]] if args[:2] == ["bench", "model"] else args)


@dataclass(frozen=True)
class _Asked:
    """What the command line asks for."""

    subject: Subject
    workloads: tuple[Workload, ...]


def _settle(
    preset: str,
    run: str | None,
    layers: int | None,
    dtype: str,
    quantize: str | None,
    remat: str,
    *,
    seconds_each: float,
    against: str | None,
    peer_python: str | None,
    records: Path,
    **_: Any,
) -> _Asked:
    """Resolves the names on the command line, and tries its file."""
    check_name(preset, PRESETS, "PRESET")
    check_name(dtype, DTYPES, "--dtype")
    check_name(remat, REMAT, "--remat")
    if quantize is not None:
        check_name(quantize, LARGEST, "--quantize")
    if against is not None:
        split_names(against, (TRANSFORMERS.name,), "against")
    elif peer_python is not None:
        raise ValueError("--peer-python is where peers are installed; name them with --against, or leave it out")
    check_seconds(seconds_each, "seconds")
    texts = default_workloads(preset) if run is None else [text for text in run.split(",") if text.strip()]
    workloads = tuple(dict.fromkeys(Workload.parse(text) for text in texts))
    if not workloads:
        raise ValueError(f"--run {run!r} names nothing; use such as {','.join(default_workloads(preset))}")
    if quantize is not None:
        if any(workload.what == "train" for workload in workloads):
            raise ValueError(f"--quantize {quantize} is for prefill and decode; name them with --run")
        if against is not None:
            raise ValueError(f"--quantize {quantize} is for ours alone; leave --against out")
    subject = Subject(preset, layers, dtype, quantize, remat)
    assert subject.config  # Raises where --layers is outside of what there is.
    leave_room()
    try_writing(records=records)
    return _Asked(subject, workloads)


def _show(done: list[Record], *, records: Path, quiet: bool, **_: Any) -> None:
    tell(records=[told_record(record) for record in done], appended_to=records)
    if not done or quiet:
        return
    console().print(_table(done))
    for note in _notes(done):
        console().print(note, soft_wrap=True)
    console().print(f"{len(done)} records appended to {records}")


@prints_json
@runs_elsewhere(check=_settle, records="records", show=_show)
def bench_model(
    asked: _Asked,
    preset: Annotated[str, typer.Argument(help=f"The model: {', '.join(PRESETS)}.")],
    run: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: train, prefill or decode with rows and tokens. Defaults to "
            f"{','.join(default_workloads(''))}; of tiny to smaller ones."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Only the first so many layers.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quantize: Annotated[
        str | None, typer.Option(help="int8, int4 or float8_e4m3fn weights, for prefill and decode.")
    ] = None,
    remat: Annotated[
        str,
        typer.Option(
            help="What a training step keeps: none (everything), full, dots, ops. A peer recomputes unless none."
        ),
    ] = "none",
    seconds_each: Annotated[
        float, typer.Option("--seconds", help="Seconds of steady state to measure per entry.")
    ] = 2.0,
    records: Annotated[Path, typer.Option(help="The JSONL file to append to, entry by entry.")] = Path(
        "results/bench.jsonl"
    ),
    quiet: Annotated[bool, typer.Option("--quiet", help="Write the records without printing a table.")] = False,
    against: Annotated[str | None, typer.Option(help="Time the same model of a peer: transformers.")] = None,
    peer_python: Annotated[
        str | None, typer.Option(help="The Python that the peer is installed in; defaults to this one.")
    ] = None,
) -> None:
    """Time a language model of real shapes with random weights: a training step, reading a prompt, decoding.

    `train:4x4096` is a step on 4 rows of 4,096 tokens: forward, backward, clipping and AdamW with float32 master weights.
    `prefill:1x8192` reads a prompt up to the next token's logits. `decode:64x1024` is one greedy token of 64 rows that have
    1,024 tokens each in their caches. MFU counts the model's FLOPs without recomputation; bytes/s of decoding the weights,
    caches and states that a step needs. Ctrl-C ends with the table so far; what is measured is already in the records file.

    With --against transformers the same model is timed there first, in a process of its own: with FlashAttention, and with
    fla's kernels where it has delta layers. It is never installed for you.
    """
    subject, timing = asked.subject, Timing(seconds=seconds_each)
    with arguments():
        missing = {} if against is None else absent((TRANSFORMERS,), peer_python)
    default_device()  # Raises where JAX_PLATFORMS names a device that is not here.
    done: list[Record] = []

    def keep(record: Record) -> None:
        done.append(record)
        with writing("records", records):
            append_records(records, [record])

    entrants = {"tilewright": bench_ours}
    if against is not None and not missing:
        # First: JAX keeps the memory that it once allocated.
        theirs = functools.partial(bench_peer_model, TRANSFORMERS, python=peer_python)
        entrants = {TRANSFORMERS.name: theirs, **entrants}
    with Entries("benchmarking", total=len(asked.workloads) * len(entrants)) as entries:
        for name, measure in entrants.items():
            peer = {"peer": True} if name == TRANSFORMERS.name else {}
            for workload in asked.workloads:
                with entries.one(f"{name} {subject.name} {workload}") as raised, _advising(subject, workload):
                    keep(measure(subject=subject, workload=workload, timing=timing))
                for error in raised:
                    keep(failure_record(subject, workload, name, {"failure": error, **peer}))
    _show(done, records=records, quiet=quiet)
    tell(absent=missing)
    for name, remedy in missing.items():
        console().print(f"[yellow]absent:[/] {escape(f'{name}: {remedy}')}", soft_wrap=True)
    entries.end(ok=any(not record.metrics.get("peer") for record in done), refused="not timed")


@contextlib.contextmanager
def _advising(subject: Subject, workload: Workload) -> Iterator[None]:
    """A context in which a device that runs out of memory is answered with what was largest, and what would fit."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if workload.what == "prefill" or subject.quantize is not None:
            raise OutOfMemory(
                f"out of memory: {one_line(error)}; use fewer rows or tokens, or fewer --layers"
            ) from None
        step = Step(json.dumps(subject.config), workload.batch, workload.tokens, dtype=subject.dtype)
        if workload.what == "train":
            step = dataclasses.replace(step, remat=subject.remat)
        else:
            step = dataclasses.replace(step, decode=True)
        # Raised from nothing: the frames of the error hold the arrays that fill the device.
        raise OutOfMemory(advise(step, same_mesh=True)) from None


def _table(done: list[Record]) -> Table:
    where = done[0].provenance
    table = new_table(
        f"models on {where.device_kind} (jax {where.versions['jax']}, {where.date[:10]})",
        ("model and workload", "dtype", "implementation"),
        ("first step", "median", "spread", "ours / it", "tokens/s", "FLOP/s (MFU)", "bytes/s", "peak memory"),
    )
    ordered = sorted(done, key=lambda record: [each.case for each in done].index(record.case))
    for _, group in itertools.groupby(ordered, key=lambda record: record.case):
        rows = sorted(group, key=lambda record: bool(record.metrics.get("peer")))
        ours = next((row.median_s for row in rows if row.samples_s and not row.metrics.get("peer")), None)
        for row in rows:
            table.add_row(*_row(row, ours))
        table.add_section()
    return table


def _row(record: Record, ours: float | None) -> tuple[str, ...]:
    names = (record.case, record.dtype, record.implementation)
    numbers: dict[str, Any] = {name: value for name, value in record.metrics.items() if isinstance(value, int | float)}
    if not record.samples_s:
        return (*names, "[bold red]failed[/]", *["-"] * 6, "-")
    first = numbers.get("first_step_s")
    ratio = "ours" if not record.metrics.get("peer") else "-" if ours is None else f"{ours / record.median_s:.2f}"
    return (
        *names,
        "-" if first is None else seconds(first),
        seconds(record.median_s),
        f"{record.spread:.1%}",
        ratio,
        significant(numbers["tokens_per_s"]),
        rate(numbers["flops_per_s"], "FLOP/s", numbers.get("flops_fraction")),
        rate(numbers.get("bytes_per_s"), "B/s", numbers.get("bytes_fraction")),
        memory(numbers.get("peak_bytes")),
    )


def _notes(done: list[Record]) -> list[str]:
    """What a peer ran, and whether it is the same model."""
    notes = []
    theirs = [record for record in done if record.metrics.get("peer") and record.samples_s]
    if theirs:
        notes.append("ours / it: our time divided by the peer's; below 1 ours is faster.")
    for text in dict.fromkeys(f"{each.implementation}: {each.metrics.get('kernels')}" for each in theirs):
        notes.append(escape(text))
    counts = {
        name: {each.metrics["parameters"] for each in done if each.implementation == name and each.samples_s}
        for name in dict.fromkeys(each.implementation for each in done)
    }
    if len({count for each in counts.values() for count in each}) > 1:
        shown = ", ".join(f"{name} {sorted(map(str, each))}" for name, each in counts.items())
        notes.append(f"[bold red]not the same model:[/] parameters {escape(shown)}")
    return notes
