"""How fast an implementation is, how long its first step takes, and how much memory it was compiled to use.

The first step (trace, compile, run once) and the steady state are timed apart. A sample is the mean of enough calls in a
row to outlast the clock's noise, ended by waiting for the device; the median is over many samples, and all are kept.
Inputs are random. Calls inside a sample are queued without waiting, as in training, so the launch of one hides behind the
run of another.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tilewright.core.case import Case, Work
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Decision, Op, noting_decisions
from tilewright.core.records import Provenance, Record
from tilewright.core.target import default_device
from tilewright.workbench.check import call, call_with_gradients, draw_cotangents
from tilewright.workbench.sampling import samples

Mode = Literal["forward", "forward+backward"]
Metrics = dict[str, float | int | str | bool | None]


@dataclass(frozen=True)
class Timing:
    """How long to measure one entry."""

    seconds: float = 2.0
    """Time to spend on steady-state samples; at least five are taken whatever it costs."""
    run: bool = True
    """False compiles only, for the memory figures of a case too large to run here."""


@dataclass(frozen=True)
class Measured:
    """What was seen of one function on one case."""

    samples_s: tuple[float, ...]
    metrics: Metrics
    decisions: tuple[Decision, ...]
    results: Mapping[str, Any]
    """Its outputs, and with gradients `d <name>` of each differentiable input; nothing where it was compiled only."""


def bench_case(
    op: Op,
    case: Case,
    implementation: str,
    dtype: str,
    mode: Mode,
    timing: Timing,
    judge: Callable[[Mapping[str, Any]], Metrics] | None = None,
) -> Record:
    """Compile, run and time one implementation on one case. `Unsupported` where it cannot run on this device.

    `judge` is shown its results, and what it says of them is added to the metrics.
    """
    function = call(op, case, implementation)
    backward = mode == "forward+backward"
    if timing.run:
        arrays: Any = case.draw(dtype)
        cotangents = draw_cotangents(function, arrays, seed=0) if backward else ()
    else:
        arrays = case.structs(dtype)
        cotangents = jax.eval_shape(function, **arrays) if backward else ()
    measured = measure(function, case, arrays, cotangents, dtype, mode, timing)
    decision = measured.decisions[0]
    return Record(
        kind="bench",
        op=op.name,
        implementation=implementation,
        case=case.name,
        dtype=dtype,
        mode=mode,
        provenance=Provenance.here(default_device()),
        config=None if decision.launch.config is None else str(decision.launch.config),
        config_source=decision.config_source,
        samples_s=measured.samples_s,
        metrics=measured.metrics | (judge(measured.results) if judge is not None and timing.run else {}),
    )


def measure(
    function: Callable[..., tuple[Any, ...]],
    case: Case,
    arrays: Mapping[str, Any],
    cotangents: tuple[Any, ...],
    dtype: str,
    mode: Mode,
    timing: Timing,
) -> Measured:
    """Compile, run and time a JAX function of the case's arrays that returns the case's outputs in order."""
    if mode == "forward+backward":
        jitted = jax.jit(call_with_gradients(function, case))
    else:
        jitted = jax.jit(lambda arrays, _: dict(zip(case.outputs, function(**arrays), strict=True)))
    if timing.run:
        jax.block_until_ready((arrays, cotangents))
    began = time.perf_counter()
    with noting_decisions() as decisions:
        compiled = jitted.lower(arrays, cotangents).compile()
    compiled_s = time.perf_counter() - began
    metrics: Metrics = {"compile_s": compiled_s, **_memory(compiled)}
    if not timing.run:
        return Measured((), metrics, tuple(decisions), {})
    results = jax.block_until_ready(compiled(arrays, cotangents))
    metrics["first_step_s"] = time.perf_counter() - began
    taken = samples(lambda: compiled(arrays, cotangents), jax.block_until_ready, timing.seconds)
    metrics |= achieved(case, taken, dtype, mode)
    return Measured(taken, metrics, tuple(decisions), results)


def _memory(compiled: Any) -> dict[str, int | None]:
    """What the compiler allotted: `temp_bytes` beyond arguments and results, `peak_bytes` with them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {"temp_bytes": None, "peak_bytes": None}
    temporary = analysis.temp_size_in_bytes
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"temp_bytes": temporary, "peak_bytes": temporary + held}


def achieved(case: Case, samples_s: tuple[float, ...], dtype: str, mode: Mode) -> dict[str, float | None]:
    """Useful FLOP/s and bytes/s, and the fractions of the device's ceilings where those are known."""
    work: Work = (case.work_grad if mode == "forward+backward" else case.work)(jax.numpy.dtype(dtype).itemsize)
    chip, seconds = Chip.of(default_device()), statistics.median(samples_s)
    flops_per_s, bytes_per_s = work.flops / seconds, work.bytes / seconds
    peak_flops, peak_bytes = chip.flops_per_s(dtype), chip.bytes_per_s
    return {
        "flops_per_s": flops_per_s,
        "bytes_per_s": bytes_per_s,
        "flops_fraction": flops_per_s / peak_flops if peak_flops else None,
        "bytes_fraction": bytes_per_s / peak_bytes if peak_bytes else None,
    }
