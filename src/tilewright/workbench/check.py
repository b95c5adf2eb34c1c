"""Compares the values and every gradient of an implementation with the oracle, over an op's cases."""

import contextlib
import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import KERNEL_PLATFORM, Op
from tilewright.core.implementation import DTYPES as DTYPES
from tilewright.core.numerics import Verdict, judge, rounded
from tilewright.core.target import RaceDetected, default_device, finding_races, interpret, reset_interpreters

# Simulated TensorCores, for finding races: each step of a kernel's parallel axes, up to so many, runs on one of its own.
_CORES = 64


@dataclass(frozen=True)
class Checked:
    """The verdict on one output or gradient of one implementation on one case."""

    op: str
    implementation: str
    case: str
    dtype: str
    quantity: str
    verdict: Verdict


def call(op: Op, case: Case, implementation: str | None, config: Any = None) -> Callable[..., tuple[Any, ...]]:
    """The op as a function that takes the case's arrays by keyword and returns a tuple of outputs."""

    def function(**arrays: Any) -> tuple[Any, ...]:
        out = op.function(**arrays, **case.options, implementation=implementation, config=config)
        return out if isinstance(out, tuple) else (out,)

    return function


def call_with_gradients(function: Callable[..., tuple[Any, ...]], case: Case) -> Callable[..., dict[str, Any]]:
    """(arrays, cotangents) -> every output by name, and the gradient of each differentiable input as `d <name>`."""

    def both(arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
        fixed = {name: array for name, array in arrays.items() if name not in case.differentiable}
        variable = {name: arrays[name] for name in case.differentiable}
        outputs, pullback = jax.vjp(lambda chosen: function(**fixed, **chosen), variable)
        (gradients,) = pullback(cotangents)
        named = dict(zip(case.outputs, outputs, strict=True))
        return named | {f"d {name}": gradient for name, gradient in gradients.items()}

    return both


def draw_cotangents(function: Callable[..., tuple[Any, ...]], arrays: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
    """A random cotangent for each output of `function`."""
    return cotangents_like(jax.eval_shape(function, **arrays), seed)


def cotangents_like(outputs: tuple[Any, ...], seed: int) -> tuple[Any, ...]:
    """Random cotangents of the shapes and dtypes of `outputs`."""
    if not outputs:
        return ()
    keys = jax.random.split(jax.random.key(seed + 1), len(outputs))
    return tuple(
        jax.random.normal(key, out.shape, jnp.float32).astype(out.dtype) for key, out in zip(keys, outputs, strict=True)
    )


class CaseCheck:
    """One case in one dtype: the results of the oracle and of the plain version, to compare implementations with."""

    def __init__(
        self,
        op: Op,
        case: Case,
        dtype: str,
        *,
        seed: int = 0,
        arrays: Mapping[str, Any] | None = None,
        compared: Callable[[jax.Array], jax.Array] | None = None,
    ):
        """`arrays` are used instead of drawn ones. `compared`: what is kept of each result, computed on the device.

        It is a program of its own: a compiler that sees more than the result leaves out the rounding to its dtype.
        """
        self.op, self.case, self.dtype, self._compared = op, case, dtype, compared
        self._reference = self._program(call(op, case, "reference"))
        self._set_arrays(case.draw(dtype, seed) if arrays is None else arrays, seed)

    def redrawn(self, seed: int, arrays: Mapping[str, Any] | None = None) -> "CaseCheck":
        """The same check on other values, or on `arrays`. The reference is not compiled again."""
        other = copy.copy(self)
        other._set_arrays(self.case.draw(self.dtype, seed) if arrays is None else arrays, seed)
        return other

    def against(self, function: Callable[..., tuple[Any, ...]]) -> "CaseCheck":
        """The same check with the oracle of `function`: the same op, written with other calls of the reference."""
        other = copy.copy(self)
        other._reference = self._program(function)
        other.oracle = other._oracle()
        return other

    def _program(self, function: Callable[..., tuple[Any, ...]]) -> Callable[..., dict[str, Any]]:
        """(arrays, cotangents) -> outputs and gradients; with the plain version's rounding where inputs are not float64."""
        both = call_with_gradients(function, self.case)

        def results(arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
            found = both(arrays, cotangents)
            for name in self.case.rounded:
                if name in found and found[name].dtype != jnp.float64:
                    found[name] = rounded(found[name], self.dtype)
            return found

        return jax.jit(results)

    def _kept(self, arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> dict[str, np.ndarray]:
        """What is kept of the reference's results."""
        keep = self._compared or (lambda result: result)
        return {name: np.asarray(keep(result)) for name, result in self._reference(arrays, cotangents).items()}

    def _set_arrays(self, arrays: Mapping[str, Any], seed: int) -> None:
        self.arrays = arrays
        self.cotangents = draw_cotangents(call(self.op, self.case, "reference"), arrays, seed)
        self.plain = self._kept(arrays, self.cotangents)
        self.oracle = self._oracle()

    def _oracle(self) -> dict[str, np.ndarray]:
        # TPUs have no float64, so there the oracle runs on the host.
        device = jax.local_devices(backend="cpu")[0] if default_device().platform == "tpu" else default_device()

        def to_float64(value: jax.Array) -> jax.Array:
            host = np.asarray(value)
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            return jnp.asarray(host.astype(np.float64) if floating else host)

        with jax.enable_x64(True), jax.default_device(device):
            arrays, cotangents = jax.tree.map(to_float64, (self.arrays, self.cotangents))
            return self._kept(arrays, cotangents)

    def check(self, implementation: str, config: Any = None) -> list[Checked]:
        """Runs `implementation` under the current target and interpreter, and judges each output and gradient."""
        both = jax.jit(call_with_gradients(call(self.op, self.case, implementation, config), self.case))
        got = both(self.arrays, self.cotangents)
        return [
            Checked(
                self.op.name,
                implementation,
                self.case.name,
                self.dtype,
                quantity,
                judge(got[quantity], self.plain[quantity], self.oracle[quantity]),
            )
            for quantity in (*self.case.outputs, *(f"d {name}" for name in self.case.differentiable))
        ]


def dtypes_taken(op: Op, implementation: str) -> tuple[str, ...]:
    """The dtypes of inputs that an implementation takes, on any of the architectures that it is written for."""
    taken = {dtype for one in op.architectures(implementation) for dtype in one.dtypes}
    return tuple(dtype for dtype in DTYPES if dtype in taken)


def needs_interpreter(implementation: str) -> bool:
    """Whether this machine can run the implementation only in an interpreter."""
    platform = KERNEL_PLATFORM.get(implementation)
    return platform is not None and platform != Chip.of(default_device()).platform


def check_implementation(checked: CaseCheck, implementation: str, *, races: bool = False) -> list[Checked]:
    """Checks on this device, or in the interpreter where the device cannot run the kernel.

    With `races` a kernel always runs in its interpreter, with race detection; a race raises `RaceDetected`.
    """
    try:
        if races and implementation in KERNEL_PLATFORM:
            return _check_races(checked, implementation)
        with interpret() if needs_interpreter(implementation) else contextlib.nullcontext():
            return checked.check(implementation)
    except Exception:
        reset_interpreters()
        raise


def _check_races(checked: CaseCheck, implementation: str) -> list[Checked]:
    """Looks for races inside of a step, and for TPU kernels between the steps of a grid's parallel axes.

    A TPU with two TensorCores runs the steps of a parallel axis on both, in any order. Here each of them runs on a
    simulated core of its own, whose memory begins as NaN: what steps accumulate in scratch or in a block of an output is
    NaN then, and two steps that write the same block race.
    """
    if KERNEL_PLATFORM[implementation] != "tpu":
        with finding_races():
            return checked.check(implementation)
    try:
        with finding_races(), _many_cores():
            results = checked.check(implementation)
    except RaceDetected as error:
        if block := re.search(r"write of \('hbm'.*?\)\[(.*)\] from .*, pallas_call\n", str(error.__cause__)):
            raise RaceDetected(_GRID_RACE.format(f"both write {_indices(block[1])} of an output")) from error
        raise
    if not all(result.verdict.ok for result in results) and _is_right_in_order(checked, implementation):
        raise RaceDetected(_GRID_RACE.format("one reads what another one has left in memory"))
    return results


_GRID_RACE = (
    'two steps of a grid axis that is marked "parallel" depend on each other: {}; mark the axis "arbitrary", or give each '
    "of its steps a block of its own and add them up outside of the kernel"
)


def _many_cores() -> contextlib.AbstractContextManager[None]:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.force_tpu_interpret_mode(
        pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=_CORES)
    )


def _indices(text: str) -> str:
    """A block as Python writes it, [8:16, 0:128], of "(slice(8, 16, 1), slice(0, 128, 1))"."""
    return f"[{', '.join(f'{first}:{last}' for first, last in re.findall(r'slice\((\d+), (\d+)', text))}]"


def _is_right_in_order(checked: CaseCheck, implementation: str) -> bool:
    """Whether the results are right where one core runs the steps of the grid in order, without simulated memories."""
    try:
        with interpret(plain=True):
            return all(result.verdict.ok for result in checked.check(implementation))
    except Exception:  # Not every kernel runs in this interpreter.
        return False
