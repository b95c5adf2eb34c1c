"""The time that a program takes on the device, from the profiler's trace: kernels by name, with warm and cold caches.

Wall time includes the host: the time to dispatch a program bounds calls of a few microseconds, such as a step of decoding.
The device time of a call is the time in which at least one of its kernels or copies runs; gaps between them are left out.

- Warm: the same call on the same arrays, back to back. What fits the cache is there.
- Cold: before each call a buffer larger than any cache is read, as the weights of a model's other layers are between two
  calls of one. (Rewritten, it would leave a cache full of lines that have yet to go to memory, which the call would wait
  for.) GPUs only: a TPU has no cache between its memory and a kernel, so that there is nothing to tell apart.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.target import default_device
from tilewright.workbench.figures import one_line
from tilewright.workbench.sampling import calls_to_trace
from tilewright.workbench.trace import Event, busy_s, read_trace, recording, split_calls

# The largest L2 cache of a GPU so far is 126 MB (B200).
_FLUSH_BYTES = 512 * 2**20
_FLUSH_MODULE = "tilewright_flush_cache"
_CPU_REASON = "this is a CPU, whose trace has no device kernels"
_NOTHING_TRACED = (
    "the profiler's trace has no kernels; on an NVIDIA GPU it needs CUPTI and the permission to use it "
    "(the driver's NVreg_RestrictProfilingToAdminUsers=0, or root)"
)
_NO_PROGRAMS = "the profiler's trace does not say which program a kernel is of"


class NoDeviceTime(Exception):
    """There is no device time. The text is the reason."""


@dataclass(frozen=True)
class DeviceTime:
    """The device time of one program, in seconds per call."""

    warm_s: tuple[float, ...]
    """One figure per call; a single mean where the calls cannot be told apart in the trace. Empty where not asked for."""
    cold_s: tuple[float, ...] = ()
    kernels_s: dict[str, float] = field(default_factory=dict)
    """Seconds per call by the name of the kernel or copy, the longest first; with warm caches, if those were asked for."""
    no_cold: str | None = None
    """Why there is no time with cold caches on a device that has them."""


def device_time(run: Callable[[], Any], seconds: float, *, warm: bool = True) -> DeviceTime:
    """Traces a compiled program that takes about `seconds` per call. Raises `NoDeviceTime` with the reason.

    Without `warm`, calls with warm caches are traced only where there are none with cold ones.
    """
    device = default_device()
    if device.platform == "cpu":
        raise NoDeviceTime(_CPU_REASON)
    calls = calls_to_trace(seconds)
    has_cache = device.platform == "gpu"
    found = of_events(_traced(run, calls), calls) if warm or not has_cache else None
    if not has_cache:
        assert found is not None
        return found
    buffer: jax.Array | None = None

    def after_a_flush() -> Any:
        nonlocal buffer
        with jax.default_device(device):
            buffer = jnp.ones(_FLUSH_BYTES // 4, jnp.float32) if buffer is None else buffer
            _flush(buffer)
        return run()

    try:
        events = _traced(after_a_flush, calls)
        program = [event for event in events if not _is_flush(event)]
        if len(program) == len(events):
            raise NoDeviceTime(_NO_PROGRAMS)
        flushed = of_events(program, calls)
    except NoDeviceTime as error:  # As where the buffer does not fit into memory.
        found = found or of_events(_traced(run, calls), calls)
        return dataclasses.replace(found, no_cold=str(error))
    if found is None:
        return dataclasses.replace(flushed, warm_s=(), cold_s=flushed.warm_s)
    return dataclasses.replace(found, cold_s=flushed.warm_s)


def of_events(events: Sequence[Event], calls: int) -> DeviceTime:
    """The device time of so many calls that these events are of."""
    if not events:
        raise NoDeviceTime(_NOTHING_TRACED)
    split = split_calls(tuple(events), calls)
    kernels: dict[str, float] = {}
    for event in events:
        kernels[event.name] = kernels.get(event.name, 0.0) + event.own_s / calls
    longest_first = dict(sorted(kernels.items(), key=lambda item: -item[1]))
    return DeviceTime(tuple(map(busy_s, split)) or (busy_s(events) / calls,), kernels_s=longest_first)


def _traced(run: Callable[[], Any], calls: int) -> tuple[Event, ...]:
    """The operations of so many calls, which are queued without waiting."""
    try:
        jax.block_until_ready(run())
        with tempfile.TemporaryDirectory(prefix="tilewright-trace-") as name:
            with recording(Path(name)):
                out = None
                for _ in range(calls):
                    out = run()
                jax.block_until_ready(out)
            trace = read_trace(Path(name))
    except (RuntimeError, OSError) as error:
        raise NoDeviceTime(f"the profiler failed: {one_line(error)}") from error
    return () if trace.platform == "cpu" else trace.busiest


def _read(x: jax.Array) -> jax.Array:
    return jnp.max(x)


# The name of the program tells its kernels apart in a trace.
_read.__name__ = _FLUSH_MODULE
_flush = jax.jit(_read)


def _is_flush(event: Event) -> bool:
    return _FLUSH_MODULE in (event.module or "")
