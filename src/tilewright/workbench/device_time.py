"""The time that a program takes on the device, from the profiler's trace: kernels by name, with warm and cold caches.

Wall time includes the host: the time to dispatch a program bounds calls of a few microseconds, such as a step of decoding.
The device time of a call is the time in which at least one of its kernels or copies runs; gaps between them are left out.

- Warm: the same call on the same arrays, back to back. What fits the cache is there.
- Cold: before each call a buffer larger than any cache is rewritten. GPUs only: a TPU has no cache between its memory and
  a kernel, so that there is nothing to tell apart.
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
_FLUSH_OPERATION = "cbrt"
_CPU_REASON = "this is a CPU, whose trace has no device kernels"
_NOTHING_TRACED = (
    "the profiler's trace has no kernels; on an NVIDIA GPU it needs CUPTI and the permission to use it "
    "(the driver's NVreg_RestrictProfilingToAdminUsers=0, or root)"
)


class NoDeviceTime(Exception):
    """There is no device time. The text is the reason."""


@dataclass(frozen=True)
class DeviceTime:
    """The device time of one program, in seconds per call."""

    warm_s: tuple[float, ...]
    """One figure per call; a single mean where the calls cannot be told apart in the trace."""
    cold_s: tuple[float, ...] = ()
    kernels_s: dict[str, float] = field(default_factory=dict)
    """With warm caches: seconds per call by the name of the kernel or copy, the longest first."""
    no_cold: str | None = None
    """Why there is no time with cold caches on a device that has them."""


def device_time(run: Callable[[], Any], seconds: float, *, cold: bool = True) -> DeviceTime:
    """Traces a compiled program that takes about `seconds` per call. Raises `NoDeviceTime` with the reason.

    Without `cold`, only calls with warm caches are traced.
    """
    device = default_device()
    if device.platform == "cpu":
        raise NoDeviceTime(_CPU_REASON)
    calls = calls_to_trace(seconds)
    warm = of_events(_traced(run, calls), calls)
    if device.platform != "gpu" or not cold:
        return warm
    buffer: jax.Array | None = None

    def after_a_flush() -> Any:
        nonlocal buffer
        with jax.default_device(device):
            buffer = _flush(jnp.zeros(_FLUSH_BYTES // 4, jnp.float32) if buffer is None else buffer)
        return run()

    try:
        flushed = of_events([event for event in _traced(after_a_flush, calls) if not _is_flush(event)], calls)
    except NoDeviceTime as error:  # As where the buffer does not fit into memory.
        return dataclasses.replace(warm, no_cold=str(error))
    return dataclasses.replace(warm, cold_s=flushed.warm_s)


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


def _rewrite(x: jax.Array) -> jax.Array:
    return jnp.cbrt(x + 1.0)


# The names of the program and of its one kernel ("wrapped_cbrt" or "loop_cbrt_fusion") tell it apart in a trace.
_rewrite.__name__ = _FLUSH_MODULE
_flush = jax.jit(_rewrite, donate_argnums=0)


def _is_flush(event: Event) -> bool:
    return _FLUSH_MODULE in (event.module or "") or (event.module is None and _FLUSH_OPERATION in event.name)
