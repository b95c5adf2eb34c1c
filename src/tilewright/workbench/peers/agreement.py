"""Whether what is timed computes the same function: its results are compared with the reference on the bench's inputs.

`tilewright check` measures how exact an implementation is, by the 2x rule, on small cases. This module decides whether any
library's kernel is the same function, on the case that is timed. The error of an output or gradient is the larger of

    |got - want| / |want|  in the 2-norm,  and  max |got - want| / max |want|

and may be 2 % in bfloat16 and 0.2 % in float32, which tensor cores round to TF32: about five roundings of the operands of a
product. The errors of ours and of the peers are shown, so that a kernel which is fast because it is less exact shows.

The expected results are those of the reference in float32 on the same inputs, upcast. Where the reference would take more
than a quarter of the memory (the gradient of a recurrence over tokens saves every state), they are those of `xla` in
float32, which the tests compare with the reference.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.case import Case
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Op
from tilewright.core.target import default_device
from tilewright.workbench.bench import Metrics, Mode
from tilewright.workbench.check import call, call_with_gradients, draw_cotangents

TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-3}
_SHARE_OF_MEMORY = 0.25
_PART = 2**24


@dataclass(frozen=True)
class Agreement:
    """The largest error of the outputs and gradients."""

    error: float
    quantity: str
    tolerance: float
    wanted_from: str

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance  # False for NaN.

    def metrics(self) -> Metrics:
        """Metrics of a record. JSON has no infinity: a result that is not finite has no error there, and does not agree."""
        return {
            "agrees": self.ok,
            "error": self.error if np.isfinite(self.error) else None,
            "error_in": self.quantity,
            "error_tolerance": self.tolerance,
            "error_against": self.wanted_from,
        }


class Wanted:
    """The expected results of one case in one dtype, with its inputs and cotangents, which are those of `bench_case`."""

    def __init__(self, op: Op, case: Case, dtype: str, mode: Mode):
        self.op, self.case, self.dtype = op, case, dtype
        self.mode: Mode = mode
        self._known: list[tuple[Case, tuple[dict[str, np.ndarray], str]]] = []

    @functools.cached_property
    def arrays(self) -> Mapping[str, Any]:
        return self.case.draw(self.dtype)

    def cotangents(self, case: Case) -> tuple[jax.Array, ...] | None:
        """Cotangents for the outputs of `case`, which is ours or a peer's version of it; None for a forward pass alone.

        They are those of the bench; for a peer's version with other options they are 1, as those of a loss.
        """
        if self.mode == "forward":
            return None
        function = call(self.op, case, "reference")
        if case.options == self.case.options:
            drawn = dict(zip(self.case.outputs, draw_cotangents(function, self.arrays, seed=0), strict=True))
            return tuple(drawn[name] for name in case.outputs)
        return tuple(jnp.ones(out.shape, out.dtype) for out in jax.eval_shape(function, **self.arrays))

    def judge(self, results: Mapping[str, Any], case: Case | None = None) -> Agreement:
        """Compares results, by name, with the expected ones. `case` is a peer's version of ours, where it has one.

        Raises ValueError where a result has another shape than expected.
        """
        case = self.case if case is None else case
        wanted, origin = self.expected(case)
        worst, at = -1.0, ""
        for name, got in results.items():
            got = np.asarray(got)
            if got.shape != wanted[name].shape:
                raise ValueError(f"{name} has shape {list(got.shape)} and should have {list(wanted[name].shape)}")
            error = relative_error(got, wanted[name])
            if not error <= worst:
                worst, at = error, name
        return Agreement(worst, at, TOLERANCE[self.dtype], origin)

    def expected(self, case: Case) -> tuple[dict[str, np.ndarray], str]:
        """The expected results by name, and what computed them."""
        for known, answer in self._known:
            if (known.outputs, known.options) == (case.outputs, case.options):
                return answer
        self._known.append((case, self._evaluate(case)))
        return self._known[-1][1]

    def _evaluate(self, case: Case) -> tuple[dict[str, np.ndarray], str]:
        def wide(array: jax.Array) -> jax.Array:
            return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array

        arrays = jax.tree.map(wide, dict(self.arrays))  # Leaf by leaf, where an array is quantised.
        own = self.case.outputs if case.options == self.case.options else case.outputs
        whole = dataclasses.replace(case, outputs=own)
        given = self.cotangents(case)
        cotangents: tuple[jax.Array, ...] = ()
        if given is not None:
            shapes = jax.eval_shape(call(self.op, whole, "reference"), **arrays)
            named = dict(zip(case.outputs, given, strict=True))
            # The cotangent of an output that a peer does not compute is 0.
            cotangents = tuple(
                wide(named[name]) if name in named else jnp.zeros(out.shape, out.dtype)
                for name, out in zip(own, shapes, strict=True)
            )

        def program(implementation: str) -> Any:
            function = call(self.op, whole, implementation)
            if self.mode == "forward":
                named = jax.jit(lambda arrays, _: dict(zip(own, function(**arrays), strict=True)))
            else:
                named = jax.jit(call_with_gradients(function, whole))
            return named.lower(arrays, cotangents).compile()

        chosen, compiled = "reference", None
        try:
            compiled = program(chosen)
            analysis = compiled.memory_analysis()
            fits = analysis is None or analysis.temp_size_in_bytes <= _SHARE_OF_MEMORY * _memory_bytes()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            fits = False
        if not fits and "xla" in self.op.implementations:
            chosen = "xla"
            compiled = program(chosen)
        if compiled is None:
            raise MemoryError(f"{self.op.name} {self.case.name}: the reference does not fit into this device's memory")
        return {name: np.asarray(value) for name, value in compiled(arrays, cotangents).items()}, f"{chosen}, float32"


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The error by the rule of this module; infinite where `got` is not finite and `want` is not the same.

    It is computed in parts: a gradient may have hundreds of millions of elements, which in float64 and with all the
    intermediates take tens of GB.
    """
    got, want = got.reshape(-1), want.reshape(-1)
    squares = wanted_squares = largest = scale = 0.0
    for start in range(0, got.size, _PART):
        ours, theirs = (part[start : start + _PART].astype(np.float64) for part in (want, got))
        alike = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        finite = np.isfinite(ours) & np.isfinite(theirs)
        if not np.all(alike | finite):
            return float("inf")
        ours, theirs = np.where(finite, ours, 0.0), np.where(finite, theirs, 0.0)
        off = theirs - ours
        squares, wanted_squares = squares + float(off @ off), wanted_squares + float(ours @ ours)
        largest, scale = max(largest, float(np.abs(off).max())), max(scale, float(np.abs(ours).max()))
    if not scale:
        return largest
    return max((squares / wanted_squares) ** 0.5, largest / scale)


def _memory_bytes() -> float:
    """The memory of the default device; of the machine, where the device is a CPU or not known."""
    known = Chip.of(default_device()).memory_bytes
    return float(known) if known else float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
