"""Compare Kimi Delta Attention, Gated DeltaNet, DeltaNet and softmax attention on this device.

    uv run python delta_attention_comparison/benchmark_script.py

Three parts: the layers' speed and memory over sequence lengths, the numerics of every implementation of their ops, and how
well a small model of each learns associative recall. They go into a folder: records.jsonl, three plots, report.md.
"""

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

# Run as a file, Python looks for modules beside this one: the package is one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import typer
from rich.markup import escape
from rich.progress import Progress

from delta_attention_comparison import recall
from delta_attention_comparison.contenders import LAYERS, OPS, PRESETS, TITLES, layer_op, make_layer, own_decision
from delta_attention_comparison.report import Findings, write_report
from tilewright.cli.screen import Mistake, arguments, console, progress_bar, split_names
from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, find_op
from tilewright.core.numerics import judge
from tilewright.core.records import Provenance, Record, append_records
from tilewright.core.target import default_device
from tilewright.workbench.bench import Timing, bench_case
from tilewright.workbench.check import (
    CaseCheck,
    call,
    call_with_gradients,
    check_implementation,
    draw_cotangents,
    needs_interpreter,
)

_PARTS = ("speed", "numerics", "recall")
_PROFILED_STEPS = 3
_MOST_WORKERS = 4


def compare(
    preset: Annotated[str | None, typer.Option(help="cpu, gpu, tpu or full; this device's own unless told.")] = None,
    layers: Annotated[str | None, typer.Option(help="Comma-separated: kda, gdn, deltanet, softmax.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Comma-separated; the preset's unless told.")] = None,
    parts: Annotated[str | None, typer.Option(help="Comma-separated: speed, numerics, recall.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each layer; the preset's unless told.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a trace of each layer's steps here, for Perfetto or XProf.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the results.")] = Path("results/comparison"),
) -> None:
    """Compare the layers: speed, memory, numerics, and recall. Results go into a folder, with a report to read."""
    with arguments():
        platform = Chip.of(default_device()).platform
        (preset_name,) = split_names(preset or platform, tuple(PRESETS), "preset")[:1]
        chosen = split_names(layers, LAYERS, "layers")
        wanted = split_names(parts, _PARTS, "parts")
        size = PRESETS[preset_name]
        if seq_lens is not None:
            size = dataclasses.replace(size, seq_lens=_lengths(seq_lens))
        if steps is not None:
            if steps < 10:
                raise ValueError(f"--steps {steps} is too few to learn anything; use 10 or more")
            size = dataclasses.replace(size, budget=dataclasses.replace(size.budget, steps=steps))
    began = time.perf_counter()
    where = Provenance.here(default_device())
    out.mkdir(parents=True, exist_ok=True)
    records = out / "records.jsonl"
    records.unlink(missing_ok=True)
    # Each record is written when it is made: a run that is stopped has not run for nothing.
    found = Findings(preset_name, size, chosen, where, keep=lambda record: append_records(records, [record]))
    with progress_bar() as bar:
        if "speed" in wanted:
            _measure_speed(found, bar)
        if profile is not None:
            _write_trace(found, profile, bar)
        # Nothing is timed from here on, so jobs run beside each other: one compiles while another runs.
        jobs = _numerics_jobs(found, bar) if "numerics" in wanted else []
        jobs += _recall_jobs(found, bar) if "recall" in wanted else []
        _run_together(jobs)
    found.missing += [f"{part}: left out by --parts" for part in _PARTS if part not in wanted]
    found.seconds = time.perf_counter() - began
    report = write_report(found, out)
    console().print(f"{len(found.records)} records in {records}")
    if profile is not None:
        console().print(f"traces in {profile}: open perfetto_trace.json.gz in ui.perfetto.dev")
    console().print(f"report: {report}, after {found.seconds:.0f} s", soft_wrap=True)


def _lengths(given: str) -> tuple[int, ...]:
    try:
        lengths = tuple(sorted({int(word) for word in given.split(",")}))
    except ValueError:
        raise ValueError(f"--seq-lens {given} must be whole numbers with commas between; use 256,1024,4096") from None
    if not lengths or lengths[0] < 2:
        raise ValueError(f"--seq-lens {given} must be at least 2 tokens each; use 256,1024,4096")
    return lengths


def _measure_speed(found: Findings, bar: Progress) -> None:
    """Forward, and forward with backward, of each layer at each length, the shortest first."""
    size = found.preset
    task = bar.add_task("speed", total=2 * len(found.layers) * len(size.seq_lens))
    began = time.perf_counter()
    for position, t in enumerate(size.seq_lens):
        # Two lengths are measured whatever they take: one tells nothing of how a layer grows.
        if position > 1 and size.speed_seconds is not None and time.perf_counter() - began > size.speed_seconds:
            found.missing.append(f"speed at T={t}: this device took its {size.speed_seconds:.0f} s for shorter ones")
            bar.advance(task, 2 * len(found.layers))
            continue
        for name in found.layers:
            op, case, decision = layer_op(name, size, t)
            for mode in ("forward", "forward+backward"):
                bar.update(task, description=f"{TITLES[name]} T={t} {mode}")
                try:
                    record = bench_case(op, case, decision.implementation, size.dtype, mode, Timing(size.seconds))
                except jax.errors.JaxRuntimeError as error:
                    # Softmax over a long sequence, say: too large for this device is a finding, not a failure.
                    found.missing.append(f"{TITLES[name]}, T={t}, {mode}: {str(error).splitlines()[0][:200]}")
                    bar.advance(task)
                    continue
                extra = {
                    "tokens": size.batch * t,
                    "tokens_per_s": size.batch * t / record.median_s,
                    "parameters": sum(math.prod(spec.shape) for key, spec in case.inputs.items() if key != "x"),
                    "device_peak_bytes": _device_peak(),
                }
                found.add(
                    dataclasses.replace(
                        record,
                        config=None if decision.launch.config is None else str(decision.launch.config),
                        config_source=decision.config_source,
                        metrics={**record.metrics, **extra},
                    )
                )
                bar.advance(task)


def _run_together(jobs: list[Callable[[], None]]) -> None:
    """A job for each two cores or so; the longest, which come last, begin first. An error of any is raised."""
    workers = max(2, (os.cpu_count() or 2) // 2)
    with ThreadPoolExecutor(min(workers, _MOST_WORKERS)) as pool:
        for future in [pool.submit(job) for job in reversed(jobs)]:
            future.result()


def _device_peak() -> int | None:
    """The most that was allotted on the device since the program began, where the platform tells."""
    stats = default_device().memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def _write_trace(found: Findings, folder: Path, bar: Progress) -> None:
    """A few steps of each layer at the shortest length: longer ones make traces that no viewer opens."""
    size, t = found.preset, found.preset.seq_lens[0]
    task = bar.add_task("profile", total=len(found.layers))
    ready = []
    for name in found.layers:
        bar.update(task, description=f"compiling {TITLES[name]} for the trace")
        op, case, decision = layer_op(name, size, t)
        function = call(op, case, decision.implementation)
        arrays = case.draw(size.dtype)
        cotangents = draw_cotangents(function, arrays, seed=0)
        step = jax.jit(call_with_gradients(function, case))
        jax.block_until_ready(step(arrays, cotangents))
        ready.append((name, step, arrays, cotangents))
        bar.advance(task)
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        for name, step, arrays, cotangents in ready:
            with jax.profiler.TraceAnnotation(f"{TITLES[name]} T={t} forward+backward"):
                for _ in range(_PROFILED_STEPS):
                    jax.block_until_ready(step(arrays, cotangents))


def _numerics_jobs(found: Findings, bar: Progress) -> list[Callable[[], None]]:
    """Every implementation of the layers' ops that can be run, against the oracle, over some of the ops' cases."""
    size = found.preset
    entries: list[tuple[Op, Case, str]] = []
    passed_over = []
    for name in found.layers:
        op = find_op(OPS[name])
        # The longest of the small ones: a few tokens are one chunk or block, and show nothing of what passes between them.
        cases = sorted((c for c in op.cases if c.small), key=lambda c: -next(iter(c.inputs.values())).shape[1])
        entries += [(op, case, dtype) for case in cases[: size.check_cases] for dtype in size.check_dtypes]
        passed_over += [f"{op.name} {i}" for i in op.implementations if needs_interpreter(i) and not size.interpreted]
    if passed_over:
        kernels = ", ".join(passed_over)
        found.missing.append(
            f"numerics of kernels that run in an interpreter only here (--preset full does it): {kernels}"
        )
    task = bar.add_task("numerics", total=len(entries))

    def check(op: Op, case: Case, dtype: str) -> None:
        held = CaseCheck(op, case, dtype)
        for implementation in op.implementations:
            interpreted = needs_interpreter(implementation)
            if interpreted and not size.interpreted:
                continue
            if implementation == "reference":
                # It is the plain version that the others are held to, and has been run for it.
                verdicts = {q: judge(held.plain[q], held.plain[q], held.oracle[q]) for q in held.oracle}
            else:
                verdicts = {c.quantity: c.verdict for c in check_implementation(held, implementation)}
            metrics: dict[str, Any] = {"interpreted": interpreted, "ok": all(v.ok for v in verdicts.values())}
            for quantity, verdict in verdicts.items():
                metrics[f"{quantity}: relative error"] = verdict.error.relative
                metrics[f"{quantity}: bound"] = verdict.relative_bound
            found.add(
                Record(
                    kind="check",
                    op=op.name,
                    implementation=implementation,
                    case=case.name,
                    dtype=dtype,
                    mode="forward+backward",
                    provenance=found.where,
                    metrics=metrics,
                )
            )
        bar.advance(task)

    return [functools.partial(check, *entry) for entry in entries]


def _recall_jobs(found: Findings, bar: Progress) -> list[Callable[[], None]]:
    """A small model of each layer on associative recall."""
    size = found.preset
    budget = size.budget
    task = bar.add_task("recall", total=len(found.layers) * budget.steps)

    def train(name: str) -> None:
        layer = make_layer(name, budget.d_model, budget.num_heads, budget.head_dim)
        implementation = None if name == "softmax" else size.recall_implementation
        shape = (budget.rows, size.task.length, budget.d_model)
        decision = own_decision(name, layer, shape, "float32", implementation)
        learned = recall.train(
            layer, size.task, budget, implementation=implementation, progress=lambda steps: bar.advance(task, steps)
        )
        for pairs, accuracy in learned.accuracy.items():
            metrics = {
                "pairs": pairs,
                "accuracy": accuracy,
                "chance": size.task.chance,
                "steps": budget.steps,
                "rows": budget.rows,
                "parameters": learned.parameters,
                "last_loss": learned.losses[-1],
            }
            found.add(
                Record(
                    kind="bench",
                    op=TITLES[name],
                    implementation=decision.implementation,
                    case=f"recall_{pairs}_pairs",
                    dtype="float32",
                    mode="forward+backward",
                    provenance=found.where,
                    metrics=metrics,
                )
            )

    return [functools.partial(train, name) for name in reversed(found.layers)]


if __name__ == "__main__":
    try:
        typer.run(compare)
    except Mistake as mistake:
        console(stderr=True).print(f"[bold red]error:[/] {escape(str(mistake))}", highlight=False, soft_wrap=True)
        sys.exit(2)
