"""How fast an implementation is, how long its first step takes, and how much memory the compiler allots to it.

The first step (trace, compile, run once) and the steady state are timed separately. A sample is the mean over enough
consecutive calls to exceed the clock's noise, and ends by waiting for the device. The median is over many samples, and
all of them are recorded. Inputs are random. The calls of a sample are queued without waiting, as in training, so that
the launch of one call overlaps the execution of another. On a GPU and a TPU a few more calls are traced for the time that
the kernels take on the device (device_time.py).
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Work
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Decision, Op, noting_decisions
from tilewright.core.target import default_device
from tilewright.workbench.check import call, call_with_gradients, cotangents_like
from tilewright.workbench.device_time import DeviceTime, NoDeviceTime, device_time
from tilewright.workbench.figures import one_line
from tilewright.workbench.records import Provenance, Record
from tilewright.workbench.sampling import samples

Mode = Literal["forward", "forward+backward"]
Metrics = dict[str, float | int | str | bool | None]
Judge = Callable[[Mapping[str, Any]], Metrics]


@dataclass(frozen=True)
class Timing:
    """How long to measure one entry."""

    seconds: float = 2.0
    """Time to spend on steady-state samples; at least five are taken, however long they take."""
    run: bool = True
    """False compiles only, to get the memory figures of a case that is too large to run here."""


@dataclass(frozen=True)
class Measured:
    """The measurements of one function on one case."""

    samples_s: tuple[float, ...]
    metrics: Metrics
    results: Mapping[str, Any]
    """The outputs by name, and the gradients as `d <name>`; empty where the function was only compiled."""
    device: DeviceTime | None = None
    """None where there is none; the metric `no_device_time` has the reason."""


def with_device(measured: Measured, device: DeviceTime) -> Measured:
    """The measurements with the time on the device."""
    metrics: Metrics = {"device_s": statistics.median(device.warm_s)}
    if device.cold_s:
        metrics["device_cold_s"] = statistics.median(device.cold_s)
    if device.no_cold is not None:
        metrics["no_device_time"] = f"with cold caches: {device.no_cold}"
    return dataclasses.replace(measured, metrics=measured.metrics | metrics, device=device)


def device_fields(device: DeviceTime | None) -> dict[str, Any]:
    """The fields of a record that a device time fills."""
    if device is None:
        return {}
    return {
        "device_samples_s": device.warm_s,
        "device_cold_samples_s": device.cold_s,
        "kernels_s": device.kernels_s,
    }


@dataclass(frozen=True)
class Program:
    """A function compiled for one case, of (arrays, cotangents), that returns results by name."""

    case: Case
    dtype: str
    mode: Mode
    run: Callable[[Any, Any], dict[str, Any]]
    """Arrays that the case updates in place are copied at the first call, and each call gets what the last one returned:
    they hold until the next call."""
    cotangents: tuple[Any, ...]
    """Their shapes and dtypes; empty for a forward pass alone."""
    metrics: Metrics
    decisions: tuple[Decision, ...]
    lowered: Any
    """What was compiled (`jax.stages.Lowered`)."""

    @staticmethod
    def of(
        function: Callable[..., tuple[Any, ...]],
        case: Case,
        arrays: Mapping[str, Any],
        cotangents: tuple[Any, ...],
        dtype: str,
        mode: Mode,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> "Program":
        """Compiles a JAX function of the case's arrays that returns the case's outputs in order."""
        in_place: tuple[str, ...] = ()
        if mode == "forward+backward":
            passes = call_with_gradients(function, case)
        else:
            in_place = case.in_place

            def passes(arrays: dict[str, Any], _: Any) -> dict[str, Any]:
                return dict(zip(case.outputs, function(**arrays), strict=True))

        jitted = jax.jit(lambda held, rest, cotangents: passes({**held, **rest}, cotangents), donate_argnums=0)
        began = time.perf_counter()
        with noting_decisions() as decisions:
            lowered = jitted.lower(*_apart(arrays, in_place), cotangents)
            compiled = lowered.compile(dict(compiler_options) if compiler_options else None)
        metrics: Metrics = {"compile_s": time.perf_counter() - began, **compiled_memory(compiled)}
        run = _Updating(compiled, in_place)
        return Program(case, dtype, mode, run, cotangents, metrics, tuple(decisions), lowered)

    def time(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...], timing: Timing) -> Measured:
        """Runs and times it."""
        arrays = dict(arrays)
        jax.block_until_ready((arrays, cotangents))
        began = time.perf_counter()
        results = jax.block_until_ready(self.run(arrays, cotangents))
        first_run_s = time.perf_counter() - began
        results |= {name: jnp.copy(results[name]) for name in self.case.in_place}
        taken = samples(lambda: self.run(arrays, cotangents), jax.block_until_ready, timing.seconds)
        compile_s = self.metrics["compile_s"]
        assert isinstance(compile_s, float)
        metrics = self.metrics | {"first_step_s": compile_s + first_run_s}
        metrics |= achieved(self.case, taken, self.dtype, self.mode)
        measured = Measured(taken, metrics, results)
        try:
            return with_device(measured, device_time(lambda: self.run(arrays, cotangents), statistics.median(taken)))
        except NoDeviceTime as error:
            return dataclasses.replace(measured, metrics=metrics | {"no_device_time": str(error)})


def _apart(arrays: Mapping[str, Any], in_place: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays that are updated in place, and the others."""
    rest = dict(arrays)
    return {name: rest.pop(name) for name in in_place}, rest


class _Updating:
    """Calls a compiled program with arrays that it updates in place, as a loop over tokens does: none is copied."""

    def __init__(self, compiled: Any, in_place: tuple[str, ...]):
        self._compiled, self._in_place = compiled, in_place
        self._held: dict[str, Any] | None = None

    def __call__(self, arrays: Mapping[str, Any], cotangents: Any) -> dict[str, Any]:
        first, rest = _apart(arrays, self._in_place)
        held = {name: jnp.copy(array) for name, array in first.items()} if self._held is None else self._held
        results = self._compiled(held, rest, cotangents)
        self._held = {name: results[name] for name in self._in_place}
        return results


@dataclass(frozen=True)
class Compiled:
    """One implementation compiled for one case: `time_case` runs and times it."""

    op: Op
    implementation: str
    program: Program


def bench_case(
    op: Op,
    case: Case,
    implementation: str,
    dtype: str,
    mode: Mode,
    timing: Timing,
    judge: Judge | None = None,
) -> Record:
    """Compiles, runs and times one implementation on one case. Raises `Unsupported` where it cannot run on this device.

    `judge` takes the results by name; the metrics that it returns are added to the record.
    """
    return time_case(compile_case(op, case, implementation, dtype, mode), timing, judge)


def compile_case(
    op: Op, case: Case, implementation: str, dtype: str, mode: Mode, outputs: tuple[Any, ...] | None = None
) -> Compiled:
    """Compiles one implementation for one case, without arrays: several may be compiled in parallel and timed later.

    `outputs` are the shapes and dtypes of the outputs, where the caller knows them; otherwise they are found by tracing.
    """
    function, structs = call(op, case, implementation), case.structs(dtype)
    cotangents: tuple[Any, ...] = ()
    if mode == "forward+backward":
        cotangents = jax.eval_shape(function, **structs) if outputs is None else outputs
    return Compiled(op, implementation, Program.of(function, case, structs, cotangents, dtype, mode))


def time_case(compiled: Compiled, timing: Timing, judge: Judge | None = None) -> Record:
    """Runs and times a compiled case on random inputs. See `bench_case`."""
    program = compiled.program
    measured = Measured((), program.metrics, {})
    if timing.run:
        cotangents = cotangents_like(program.cotangents, seed=0)
        measured = program.time(program.case.draw(program.dtype), cotangents, timing)
    directions = ("forward", "backward") if program.mode == "forward+backward" else ("forward",)
    configs, sources = decided_configs(program.decisions[0], directions)
    return bench_record(
        compiled.op,
        program.case,
        compiled.implementation,
        program.dtype,
        program.mode,
        configs=configs,
        config_sources=sources,
        samples_s=measured.samples_s,
        **device_fields(measured.device),
        metrics=measured.metrics | (judged(judge, measured.results) if judge is not None and timing.run else {}),
    )


def bench_record(op: Op, case: Case, implementation: str, dtype: str, mode: Mode, **fields: Any) -> Record:
    """A record of a measurement, or of its failure, that is made here and now."""
    where = {"provenance": Provenance.here(default_device())}
    names = {"op": op.name, "case": case.name, "implementation": implementation, "dtype": dtype, "mode": mode}
    return Record(**{"kind": "bench", **names, **where, **fields})


def judged(judge: Judge, results: Mapping[str, Any]) -> Metrics:
    """The judge's metrics. Where it fails, as for want of memory, the measurement is kept with the reason."""
    try:
        return judge(results)
    except Exception as error:
        return {"not_judged": one_line(error)}


def decided_configs(decision: Decision, directions: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configs that a decision has for these directions as JSON, and where each is from: two fields of a record."""
    passes = {"forward": decision.forward, "backward": decision.backward}
    chosen = {name: config for name, config in decision.configs.items() if name in directions}
    configs = {name: config.to_json() for name, config in chosen.items()}
    return configs, {name: passes[name].config_source for name in chosen}


def compiled_memory(compiled: Any) -> dict[str, int | None]:
    """What the compiler allotted: `temp_bytes` is without arguments and results, `peak_bytes` includes them."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return {"temp_bytes": None, "peak_bytes": None}
    temporary = analysis.temp_size_in_bytes
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {"temp_bytes": temporary, "peak_bytes": temporary + held}


def achieved(case: Case, samples_s: tuple[float, ...], dtype: str, mode: Mode) -> dict[str, float | None]:
    """Useful FLOP/s and bytes/s, and as fractions of the device's peaks where those are known."""
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
