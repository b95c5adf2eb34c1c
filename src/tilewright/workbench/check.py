"""Values and every gradient of an implementation, held to the oracle over an op's cases."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import KERNEL_PLATFORM, Op
from tilewright.core.numerics import Verdict, judge
from tilewright.core.target import default_device, finding_races, interpret

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Checked:
    """One output or gradient of one implementation on one case."""

    op: str
    implementation: str
    case: str
    dtype: str
    quantity: str
    verdict: Verdict


def call(op: Op, case: Case, implementation: str | None, config: Any = None) -> Callable[..., tuple[Any, ...]]:
    """The op on the case's arrays by keyword, as a function that returns a tuple."""

    def function(**arrays: Any) -> tuple[Any, ...]:
        out = op.function(**arrays, **case.options, implementation=implementation, config=config)
        return out if isinstance(out, tuple) else (out,)

    return function


def call_with_gradients(function: Callable[..., tuple[Any, ...]], case: Case) -> Callable[..., dict[str, Any]]:
    """(arrays, cotangents) -> every output, and the gradient of each differentiable input as `d <name>`."""

    def both(arrays: Mapping[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
        fixed = {name: array for name, array in arrays.items() if name not in case.differentiable}
        variable = {name: arrays[name] for name in case.differentiable}
        outputs, pullback = jax.vjp(lambda chosen: function(**fixed, **chosen), variable)
        (gradients,) = pullback(cotangents)
        named = dict(zip(case.outputs, outputs, strict=True))
        return named | {f"d {name}": gradient for name, gradient in gradients.items()}

    return both


def draw_cotangents(function: Callable[..., tuple[Any, ...]], arrays: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
    """A random gradient for each output of `function`."""
    outputs = jax.eval_shape(function, **arrays)
    keys = jax.random.split(jax.random.key(seed + 1), len(outputs))
    return tuple(
        jax.random.normal(key, out.shape, jnp.float32).astype(out.dtype) for key, out in zip(keys, outputs, strict=True)
    )


class CaseCheck:
    """One case in one dtype: the oracle's and the plain version's answers, to hold implementations against."""

    def __init__(self, op: Op, case: Case, dtype: str, *, seed: int = 0):
        self.op, self.case, self.dtype = op, case, dtype
        self.arrays = case.draw(dtype, seed)
        self.cotangents = draw_cotangents(call(op, case, "reference"), self.arrays, seed)
        self.plain = {
            name: value.astype(jnp.dtype(dtype)).astype(value.dtype) if name in case.rounded else value
            for name, value in self._evaluate("reference").items()
        }
        self.oracle = self._oracle()

    def _evaluate(self, implementation: str, config: Any = None) -> dict[str, np.ndarray]:
        both = call_with_gradients(call(self.op, self.case, implementation, config), self.case)
        return {name: np.asarray(value) for name, value in jax.jit(both)(self.arrays, self.cotangents).items()}

    def _oracle(self) -> dict[str, np.ndarray]:
        # TPUs have no float64: there the oracle is computed on the host.
        device = jax.local_devices(backend="cpu")[0] if default_device().platform == "tpu" else default_device()
        both = call_with_gradients(call(self.op, self.case, "reference"), self.case)

        def widened(value: jax.Array) -> jax.Array:
            host = np.asarray(value)
            floating = jnp.issubdtype(value.dtype, jnp.floating)
            return jnp.asarray(host.astype(np.float64) if floating else host)

        with jax.enable_x64(True), jax.default_device(device):
            arrays, cotangents = jax.tree.map(widened, (self.arrays, self.cotangents))
            return {name: np.asarray(value) for name, value in jax.jit(both)(arrays, cotangents).items()}

    def check(self, implementation: str, config: Any = None) -> list[Checked]:
        """Run `implementation` as the contexts around this call say, and judge each output and gradient."""
        got = self._evaluate(implementation, config)
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
    """The inputs' dtypes that an implementation takes: its module's `DTYPES`, where it does not take all."""
    return getattr(op.module(implementation), "DTYPES", DTYPES)


def needs_interpreter(implementation: str) -> bool:
    """Whether this machine can run the implementation only in an interpreter."""
    platform = KERNEL_PLATFORM.get(implementation)
    return platform is not None and platform != Chip.of(default_device()).platform


def check_implementation(checked: CaseCheck, implementation: str, *, races: bool = False) -> list[Checked]:
    """Check on this device, or in the interpreter where the device cannot run the kernel.

    With `races` a kernel runs in its interpreter anyway, with race detection: `RaceDetected` where it has one.
    """
    if races and implementation in KERNEL_PLATFORM:
        with finding_races():
            return checked.check(implementation)
    if needs_interpreter(implementation):
        with interpret():
            return checked.check(implementation)
    return checked.check(implementation)
