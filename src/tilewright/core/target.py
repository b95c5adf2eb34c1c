"""For which chip the ops are traced, and whether Pallas kernels run compiled or in their interpreters.

Both are contexts that JAX's caches know of: a jitted function that was traced for the local device is traced anew inside
`with target("v6e"):`, and the other way round.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer

from tilewright.core.chip import Chip, Device

# What a kernel is configured for when it is interpreted on a machine that has no such chip, and no target is set.
INTERPRETED_AS = {"tpu": "v6e", "gpu": "h100"}
# Of JAX's CPU, for an interpreted GPU kernel: its warpgroups wait for each other, each in a thread.
_INTERPRETER_THREADS = 4

_target = jax.make_user_context(None)
_interpret = jax.make_user_context(None)


@dataclass(frozen=True)
class Interpret:
    """How Pallas kernels are interpreted. Hashable: part of JAX's cache key."""

    detect_races: bool = False
    plain: bool = False


@contextlib.contextmanager
def target(chip: str | Chip) -> Iterator[Chip]:
    """Trace for `chip` instead of the local device: dispatch and block sizes are that chip's.

    `with tilewright.target("v6e"): jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))` lowers a TPU kernel on a
    machine without one. Running what was traced so needs that chip, or `tilewright.interpret()` beside it.
    """
    chip = Chip.named(chip) if isinstance(chip, str) else chip
    with _target(chip):
        yield chip


@contextlib.contextmanager
def interpret(*, detect_races: bool = False, plain: bool = False) -> Iterator[None]:
    """Run TPU and GPU kernels in Pallas' interpreters, on any device.

    It decides how a kernel runs, not which one: `implementation="pallas_tpu"` then works on a CPU, and
    `implementation=None` still takes what suits the device or the `target`.

    The interpreter simulates the chip's memories and copies; uninitialised memory reads as NaN. With `detect_races=True`
    a data race is an error in jax 0.12 and printed by 0.11; `finding_races` has both raise. It works through callbacks,
    which `jax.vmap` and `jax.checkpoint` do not take: `plain=True` is for these, an interpreter without the simulation.
    Most GPU kernels need four threads of JAX's CPU: with fewer cores, set JAX_NUM_CPU_DEVICES=4 (`tilewright check` does).
    """
    if plain and detect_races:
        raise ValueError("plain=True has no memory to find races in; leave plain or detect_races out")
    with _interpret(Interpret(detect_races, plain)):
        yield


def current_target() -> Chip | None:
    return _target.value


def current_interpret() -> Interpret | None:
    return _interpret.value


def default_device() -> Device:
    """The device that JAX would put a new array on."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device or None)[0]


def current_chip(arrays: tuple[Any, ...] = ()) -> Chip:
    """The target's chip if one is set; else that of the arrays, where they are concrete; else the default device's."""
    if (chip := current_target()) is not None:
        return chip
    concrete = [a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer)]
    if concrete and len(concrete) == len([a for a in arrays if a is not None]):
        return Chip.of(next(iter(concrete[0].devices())))
    return Chip.of(default_device())


def tpu_interpret_params(how: Interpret | None) -> Any:
    """What `pl.pallas_call(interpret=...)` takes for a TPU kernel."""
    if how is None or how.plain:
        return how is not None
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(detect_races=how.detect_races, uninitialized_memory="nan")


def gpu_interpret_params(how: Interpret | None, *, alone: bool = False) -> Any:
    """What `plgpu.kernel(interpret=...)` takes for a Mosaic GPU kernel. It has no plain interpreter: there is one only.

    `alone`: the kernel is of one warpgroup, which waits for no other.
    """
    if how is None:
        return None
    if not alone and (threads := max(_cores(), len(jax.devices("cpu")))) < _INTERPRETER_THREADS:
        raise RuntimeError(
            f"Pallas' interpreter for GPUs would wait forever: it has a thread for each warpgroup, and JAX's CPU has "
            f"{threads} here; set JAX_NUM_CPU_DEVICES={_INTERPRETER_THREADS} before JAX starts"
        )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=how.detect_races, uninitialized_memory="nan")


def make_room_for_interpreters() -> None:
    """As many threads for JAX's CPU as interpreted kernels need, unless it has started or been told how many devices.

    It has a thread for each core, or for each of its devices if there are more.
    """
    told = jax.config.jax_num_cpu_devices > 0 or "xla_force_host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if told or _cores() >= _INTERPRETER_THREADS:
        return
    with contextlib.suppress(RuntimeError):  # It has started.
        jax.config.update("jax_num_cpu_devices", _INTERPRETER_THREADS)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RaceDetected(RuntimeError):
    """A kernel has a data race. The text has the two accesses."""


@contextlib.contextmanager
def finding_races() -> Iterator[None]:
    """Run kernels in their interpreters with race detection, and raise `RaceDetected` where one has a race."""
    with interpret(detect_races=True):
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RACE DETECTED" not in str(error):
                raise
            _reset_interpreters()
            raise RaceDetected(_accesses(str(error))) from error
    # jax 0.11 prints a race and goes on.
    if _race_was_noted():
        _reset_interpreters()
        raise RaceDetected("the interpreter printed the two accesses above")


def _accesses(text: str) -> str:
    """The two accesses of a race, each with its line in the kernel."""
    found = re.findall(r"(read|write) of .*?, (\S+:\d+:\d+ \([^)]*\)+)", text.split("RACE DETECTED", 1)[1])
    return " and ".join(f"a {kind} at {where}" for kind, where in found[:2]) or text[-500:]


def _race_was_noted() -> bool:
    for name, attribute in (
        ("jax._src.pallas.mosaic.interpret.interpret_pallas_call", "races"),
        ("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks", "_races"),
    ):
        # Only an interpreter that ran has been imported.
        state = getattr(sys.modules.get(name), attribute, None)
        if state is not None and state.races_found:
            return True
    return False


def _reset_interpreters() -> None:
    """After an error the interpreters do not start again by themselves."""
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    gpu = sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    if gpu is not None:
        gpu.reset_gpu_interpret_mode_state()
