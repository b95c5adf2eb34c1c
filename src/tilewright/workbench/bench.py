"""How fast an implementation is, how long its first step takes, and how much memory it was compiled to use.

The first step (trace, compile, run once) and the steady state are timed apart. A sample is the mean of enough calls in a
row to outlast the clock's noise, ended by waiting for the device; the median is over many samples, and all are kept.
Inputs are random. Calls inside a sample are queued without waiting, as in training, so the launch of one hides behind the
run of another.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tilewright.core.case import Case, Work
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Decision, Op, noting_decisions
from tilewright.core.records import Provenance, Record
from tilewright.core.target import default_device
from tilewright.workbench.check import call, call_with_gradients, draw_cotangents

Mode = Literal["forward", "forward+backward"]

_SAMPLE_SECONDS = 0.005
_LEAST_SAMPLES = 5
_MOST_SAMPLES = 100


@dataclass(frozen=True)
class Timing:
    """How long to measure one entry."""

    seconds: float = 2.0
    """Time to spend on steady-state samples; at least five are taken whatever it costs."""
    run: bool = True
    """False compiles only, for the memory figures of a case too large to run here."""


def bench_case(op: Op, case: Case, implementation: str, dtype: str, mode: Mode, timing: Timing) -> Record:
    """Compile, run and time one implementation on one case. `Unsupported` where it cannot run on this device."""
    function = call(op, case, implementation)
    both = call_with_gradients(function, case)
    structs = case.structs(dtype)
    if timing.run:
        arrays: Any = case.draw(dtype)
        cotangents = draw_cotangents(function, arrays, seed=0) if mode == "forward+backward" else ()
        jax.block_until_ready((arrays, cotangents))
    else:
        arrays = structs
        cotangents = jax.eval_shape(function, **structs) if mode == "forward+backward" else ()
    jitted = jax.jit(both) if mode == "forward+backward" else jax.jit(lambda arrays, _: function(**arrays))

    began = time.perf_counter()
    with noting_decisions() as decisions:
        compiled = jitted.lower(arrays, cotangents).compile()
    compiled_s = time.perf_counter() - began
    metrics: dict[str, float | int | str | bool | None] = {"compile_s": compiled_s, **_memory(compiled)}
    samples: tuple[float, ...] = ()
    if timing.run:
        jax.block_until_ready(compiled(arrays, cotangents))
        metrics["first_step_s"] = time.perf_counter() - began
        samples = _samples(lambda: compiled(arrays, cotangents), timing.seconds)
        work = (case.work_grad if mode == "forward+backward" else case.work)(jax.numpy.dtype(dtype).itemsize)
        metrics |= _achieved(work, statistics.median(samples), dtype, Chip.of(default_device()))
    decision: Decision = decisions[0]
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
        samples_s=samples,
        metrics=metrics,
    )


def _samples(run: Callable[[], Any], seconds: float) -> tuple[float, ...]:
    def sample(calls: int) -> float:
        began = time.perf_counter()
        out = None
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    sample(1)
    one = min(sample(1), sample(1))
    calls = max(1, round(_SAMPLE_SECONDS / one))
    count = int(seconds / (calls * one))
    return tuple(sample(calls) for _ in range(min(max(count, _LEAST_SAMPLES), _MOST_SAMPLES)))


def _memory(compiled: Any) -> dict[str, int | None]:
    """What the compiler allotted: `temp_bytes` beyond arguments and results, `peak_bytes` with them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {"temp_bytes": None, "peak_bytes": None}
    temporary = analysis.temp_size_in_bytes
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"temp_bytes": temporary, "peak_bytes": temporary + held}


def _achieved(work: Work, seconds: float, dtype: str, chip: Chip) -> dict[str, float | None]:
    """Useful FLOP/s and bytes/s, and the fractions of the device's ceilings where those are known."""
    flops_per_s, bytes_per_s = work.flops / seconds, work.bytes / seconds
    peak_flops, peak_bytes = chip.flops_per_s(dtype), chip.bytes_per_s
    return {
        "flops_per_s": flops_per_s,
        "bytes_per_s": bytes_per_s,
        "flops_fraction": flops_per_s / peak_flops if peak_flops else None,
        "bytes_fraction": bytes_per_s / peak_bytes if peak_bytes else None,
    }
