"""Compare Kimi Delta Attention, Gated DeltaNet, DeltaNet and softmax attention on this device.

    uv run python delta_attention_comparison/benchmark_script.py

It has three parts: the speed and memory of the layers over sequence lengths, the numerics of every implementation of their
ops, and how well a small model of each layer learns associative recall. It writes a folder: records.jsonl, three plots and
report.md.
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

# When this file is run by its path, Python looks for modules in its folder; the package is one folder up.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import typer
from rich.markup import escape
from rich.progress import Progress, TaskID

from delta_attention_comparison import recall
from delta_attention_comparison.contenders import LAYERS, OPS, PRESETS, TITLES, layer_op, make_layer, own_decision
from delta_attention_comparison.report import MODES, Findings, write_report
from tilewright.cli.screen import Mistake, arguments, console, progress_bar, split_names
from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op, find_op
from tilewright.core.numerics import judge
from tilewright.core.target import default_device
from tilewright.workbench.bench import Compiled, Mode, Timing, compile_case, decided_configs, time_case
from tilewright.workbench.check import (
    CaseCheck,
    call,
    call_with_gradients,
    check_implementation,
    draw_cotangents,
    needs_interpreter,
)
from tilewright.workbench.records import Provenance, Record, append_records

_PARTS = ("speed", "numerics", "recall")
_PROFILED_STEPS = 3
_MOST_WORKERS = 4
_LEAST_LENGTHS = 4


def compare(
    preset: Annotated[str | None, typer.Option(help="cpu, gpu, tpu or full; defaults to this device's.")] = None,
    layers: Annotated[str | None, typer.Option(help="Comma-separated: kda, gdn, deltanet, softmax.")] = None,
    seq_lens: Annotated[str | None, typer.Option(help="Comma-separated; defaults to the preset's.")] = None,
    parts: Annotated[str | None, typer.Option(help="Comma-separated: speed, numerics, recall.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each layer; defaults to the preset's.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Write a trace of a few steps of each layer to this folder, for Perfetto or XProf."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write the results to.")] = Path("results/comparison"),
) -> None:
    """Compare the layers in speed, memory, numerics and recall, and write the results to a folder with a report."""
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
    # Each record is written as soon as it exists, so that a run that is stopped leaves what it has measured.
    found = Findings(preset_name, size, chosen, where, keep=lambda record: append_records(records, [record]))
    with progress_bar() as bar:
        if "speed" in wanted:
            _measure_speed(found, bar)
        if profile is not None:
            _write_trace(found, profile, bar)
        # Nothing is timed from here on, so jobs run in parallel: one compiles while another runs.
        jobs = _numerics_jobs(found, bar) if "numerics" in wanted else []
        jobs += _recall_jobs(found, bar) if "recall" in wanted else []
        _run_in_parallel(list(reversed(jobs)), min(_MOST_WORKERS, max(2, (os.cpu_count() or 2) // 2)))
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
    """Times each layer at each length, forward and forward with backward, the shortest lengths first.

    The first lengths are measured however long they take: fewer than four do not show how a layer grows. A longer one is
    begun only within the preset's time. Programs are compiled in parallel where the preset says so, and run one by one.
    """
    size = found.preset
    task = bar.add_task("speed", total=4 * len(found.layers) * len(size.seq_lens))
    began = time.perf_counter()
    together = _LEAST_LENGTHS if size.compile_workers > 1 else 1
    groups = [size.seq_lens[:together], *((t,) for t in size.seq_lens[together:])]
    done = 0
    for lengths in groups:
        elapsed = time.perf_counter() - began
        if done >= _LEAST_LENGTHS and size.speed_seconds is not None and elapsed > size.speed_seconds:
            found.missing += [
                f"speed at T={t}: the shorter lengths took {elapsed:.0f} s here, and another one is begun only within "
                f"{size.speed_seconds:.0f} s"
                for t in lengths
            ]
            bar.advance(task, 4 * len(found.layers) * len(lengths))
            continue
        _measure_lengths(found, lengths, bar, task)
        done += len(lengths)


def _measure_lengths(found: Findings, lengths: tuple[int, ...], bar: Progress, task: TaskID) -> None:
    """Compiles the layers for these lengths, then times them: nothing else runs while they are timed."""
    size = found.preset
    compiled: dict[tuple[int, str, Mode], Compiled] = {}

    def too_large(name: str, t: int, mode: Mode, error: Exception) -> None:
        # Softmax over a long sequence, for example: that it does not fit this device is a finding, not a failure.
        found.missing.append(f"{TITLES[name]}, T={t}, {mode}: {str(error).splitlines()[0][:200]}")
        bar.advance(task)

    def compile_one(t: int, name: str, mode: Mode) -> None:
        bar.update(task, description=f"compiling {TITLES[name]} T={t} {mode}")
        op, case, decision = layer_op(name, size, t)
        try:
            y = case.structs(size.dtype)["x"]  # A layer's output is like its input.
            compiled[t, name, mode] = compile_case(op, case, decision.implementation, size.dtype, mode, outputs=(y,))
        except jax.errors.JaxRuntimeError as error:
            too_large(name, t, mode, error)
        bar.advance(task)

    entries: list[tuple[int, str, Mode]] = [(t, name, mode) for t in lengths for name in found.layers for mode in MODES]
    # The backward passes take the longest to compile, so they are begun first.
    jobs = sorted(entries, key=lambda entry: (entry[2] == "forward", LAYERS.index(entry[1])))
    _run_in_parallel([functools.partial(compile_one, *entry) for entry in jobs], size.compile_workers)
    for t, name, mode in entries:
        program = compiled.pop((t, name, mode), None)
        if program is None:
            continue
        bar.update(task, description=f"{TITLES[name]} T={t} {mode}")
        _, case, decision = layer_op(name, size, t)
        try:
            record = time_case(program, Timing(size.seconds))
        except jax.errors.JaxRuntimeError as error:
            too_large(name, t, mode, error)
            continue
        extra = {
            "tokens": size.batch * t,
            "tokens_per_s": size.batch * t / record.median_s,
            "parameters": sum(math.prod(spec.shape) for key, spec in case.inputs.items() if key != "x"),
            "device_peak_bytes": _device_peak(),
        }
        directions = ("forward", "backward") if mode == "forward+backward" else ("forward",)
        configs, sources = decided_configs(decision, directions)
        metrics = {**record.metrics, **extra}
        found.add(dataclasses.replace(record, configs=configs, config_sources=sources, metrics=metrics))
        bar.advance(task)


def _run_in_parallel(jobs: list[Callable[[], None]], workers: int) -> None:
    """Runs the jobs in so many threads, in order. An error of any of them is raised."""
    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(job) for job in jobs]:
            future.result()


def _device_peak() -> int | None:
    """The most memory in use on the device since the program began, where the platform reports it."""
    stats = default_device().memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


def _write_trace(found: Findings, folder: Path, bar: Progress) -> None:
    """Traces a few steps of each layer at the shortest length: traces of longer ones are too large for a viewer."""
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
    """Jobs that compare every implementation of the layers' ops that runs here with the oracle, over some of the cases."""
    size = found.preset
    entries: list[tuple[Op, Case, str]] = []
    passed_over = []
    for name in found.layers:
        op = find_op(OPS[name])
        # The longest of the small cases: with a few tokens there is one chunk, and nothing passes between chunks.
        cases = sorted((c for c in op.cases if c.small), key=lambda c: -next(iter(c.inputs.values())).shape[1])
        entries += [(op, case, dtype) for case in cases[: size.check_cases] for dtype in size.check_dtypes]
        passed_over += [f"{op.name} {i}" for i in op.implementations if needs_interpreter(i) and not size.interpreted]
    if passed_over:
        kernels = ", ".join(passed_over)
        found.missing.append(
            f"numerics of kernels that run only in an interpreter here (--preset full checks them): {kernels}"
        )
    task = bar.add_task("numerics", total=len(entries))

    def check(op: Op, case: Case, dtype: str) -> None:
        held = CaseCheck(op, case, dtype)
        for implementation in op.implementations:
            interpreted = needs_interpreter(implementation)
            if interpreted and not size.interpreted:
                continue
            if implementation == "reference":
                # It is the plain version that the others are compared with, and has run already.
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
    """Jobs that train a small model of each layer on associative recall."""
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
