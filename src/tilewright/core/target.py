"""The chip that ops are traced for, and whether Pallas kernels run compiled or in their interpreters.

Both are contexts that are part of JAX's cache keys: a jitted function that was traced for the local device is traced
again inside `with target("v6e"):`, and vice versa.
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

# The chip that an interpreted kernel is configured for, where the machine has no such chip and no target is set.
INTERPRETED_AS = {"tpu": "v6e", "gpu": "h100"}
# Threads of JAX's CPU backend that an interpreted GPU kernel needs: one per warpgroup, since they wait for each other.
_INTERPRETER_THREADS = 4

_target = jax.make_user_context(None)
_interpret = jax.make_user_context(None)
_bodies_traced = jax.make_user_context(True)


@dataclass(frozen=True)
class Interpret:
    """How Pallas kernels are interpreted. Hashable: part of JAX's cache key."""

    detect_races: bool = False
    plain: bool = False


@contextlib.contextmanager
def target(chip: str | Chip) -> Iterator[Chip]:
    """Traces for `chip` instead of the local device: dispatch and block sizes are that chip's.

    `with tilewright.target("v6e"): jax.jit(f).trace(x).lower(lowering_platforms=("tpu",))` lowers a TPU kernel on a
    machine without a TPU. Running the result needs that chip, or `tilewright.interpret()` in addition.
    """
    chip = Chip.named(chip) if isinstance(chip, str) else chip
    with _target(chip):
        yield chip


@contextlib.contextmanager
def interpret(*, detect_races: bool = False, plain: bool = False) -> Iterator[None]:
    """Runs TPU and GPU kernels in Pallas' interpreters, on any device.

    It changes how a kernel runs, not which implementation is chosen: `implementation="pallas_tpu"` works on a CPU, and
    `implementation=None` still takes the best implementation for the device or the `target`.

    The interpreter simulates the chip's memories and copies; uninitialised memory reads as NaN. With
    `detect_races=True` a data race is an error in jax 0.12 and is only printed by 0.11; `finding_races` raises in both.
    The interpreter works through callbacks, which `jax.vmap` and `jax.checkpoint` do not support. `plain=True` takes an
    interpreter without the simulation, for these. Most GPU kernels need four threads of JAX's CPU backend: on a machine
    with fewer cores, set JAX_NUM_CPU_DEVICES=4 (`tilewright check` does).
    """
    if plain and detect_races:
        raise ValueError("plain=True has no memory to find races in; omit plain or detect_races")
    with _interpret(Interpret(detect_races, plain)):
        yield


def interpreting_as(how: Interpret | None) -> contextlib.AbstractContextManager[Any]:
    """Makes `how`, an earlier `current_interpret()`, current again."""
    return _interpret(how)


def without_kernel_bodies() -> contextlib.AbstractContextManager[Any]:
    """Leaves the bodies of kernels untraced, which takes seconds for the largest; their outputs have only shapes."""
    return _bodies_traced(False)


def kernel_bodies_traced() -> bool:
    return _bodies_traced.value


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
    """The target if one is set; else the chip of the arrays, where they are concrete; else the default device's."""
    if (chip := current_target()) is not None:
        return chip
    concrete = [a for a in arrays if isinstance(a, jax.Array) and not isinstance(a, Tracer)]
    if concrete and len(concrete) == len([a for a in arrays if a is not None]):
        return Chip.of(next(iter(concrete[0].devices())))
    return Chip.of(default_device())


def tpu_interpret_params(how: Interpret | None) -> Any:
    """The value of `pl.pallas_call(interpret=...)` for a TPU kernel."""
    if how is None or how.plain:
        return how is not None
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(detect_races=how.detect_races, uninitialized_memory="nan")


def gpu_interpret_params(how: Interpret | None, *, alone: bool = False) -> Any:
    """The value of `plgpu.kernel(interpret=...)` for a Mosaic GPU kernel. Mosaic GPU has no plain interpreter.

    `alone`: the kernel has a single warpgroup, so no thread waits for another.
    """
    if how is None:
        return None
    if not alone and (threads := max(_cores(), len(jax.devices("cpu")))) < _INTERPRETER_THREADS:
        raise RuntimeError(
            f"Pallas' interpreter for GPUs would deadlock: it needs one thread per warpgroup, and JAX's CPU backend has "
            f"{threads}; set JAX_NUM_CPU_DEVICES={_INTERPRETER_THREADS} before JAX starts"
        )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=how.detect_races, uninitialized_memory="nan")


def make_room_for_interpreters() -> None:
    """Gives JAX's CPU backend the threads that interpreted kernels need, if it has not started and its number of
    devices is not set. It has one thread per core, or one per device if there are more devices.
    """
    is_set = jax.config.jax_num_cpu_devices > 0 or "xla_force_host_platform_device_count" in os.environ.get(
        "XLA_FLAGS", ""
    )
    if is_set or _cores() >= _INTERPRETER_THREADS:
        return
    with contextlib.suppress(RuntimeError):  # The backend has started.
        jax.config.update("jax_num_cpu_devices", _INTERPRETER_THREADS)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RaceDetected(RuntimeError):
    """A kernel has a data race. The text names the two accesses."""


@contextlib.contextmanager
def finding_races() -> Iterator[None]:
    """Runs kernels in their interpreters with race detection, and raises `RaceDetected` where one has a race."""
    with interpret(detect_races=True):
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RACE DETECTED" not in str(error):
                raise
            reset_interpreters()
            raise RaceDetected(_accesses(str(error))) from error
    # jax 0.11 prints a race and continues.
    if _race_was_noted():
        reset_interpreters()
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
        # An interpreter that has not run is not imported.
        state = getattr(sys.modules.get(name), attribute, None)
        if state is not None and state.races_found:
            return True
    return False


def reset_interpreters() -> None:
    """Resets the interpreters, which otherwise stay in their error state."""
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    gpu = sys.modules.get("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    if gpu is not None:
        gpu.reset_gpu_interpret_mode_state()
