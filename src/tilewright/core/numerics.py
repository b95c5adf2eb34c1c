"""The error of a result against the oracle, where it is largest, and whether it is within bounds.

The oracle is the op's `reference` evaluated in float64. A result passes when its error is at most twice that of the
plain version in the same dtype, plus a tiny floor:

    err(implementation, oracle) <= 2 * err(reference in the same dtype, oracle) + floor

both for the largest pointwise error and for the relative error in the 2-norm. So a float32 kernel is held to float32
precision and a bfloat16 kernel to bfloat16 precision, with no tolerance to choose. The plain version accumulates in
float32, and its products take operands of the inputs' dtype, in the backward pass too (`round_gradient`). The floor is
eight float32 roundings of the largest value, since the two versions may sum in a different order. A NaN or infinity
where the oracle has none never passes.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from tilewright.core.boundary import identity

FACTOR = 2.0
FLOOR = 8 * float(np.finfo(np.float32).eps)


def accumulator(dtype: Any) -> np.dtype:
    """The dtype of sums and statistics over `dtype`: float32, and float64 for the oracle."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x rounded to `dtype`, returned in x's own dtype.

    A cast to `dtype` and back is not enough: on a GPU, XLA removes such a pair (excess precision).
    """
    return jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def round_gradient(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns x; its gradient is rounded to `dtype`.

    For references. A product of bfloat16 arrays with a float32 result has a float32 cotangent, which autodiff would
    multiply by bfloat16 in full float32. No matrix unit does that, so the baseline would be too accurate.
    """
    return _round_gradient_p.bind(x, dtype=np.dtype(dtype))


_round_gradient_p = identity("round_gradient")
ad.deflinear2(_round_gradient_p, lambda gradient, _, *, dtype: [rounded(gradient, dtype)])


@dataclass(frozen=True)
class Discrepancy:
    """The error of a result against the expected values."""

    max_abs: float
    mean_abs: float
    relative: float
    """|got - want| / |want| in the 2-norm, over all elements."""
    scale: float
    """The largest magnitude in `want`."""
    worst: tuple[int, ...]
    """The index of the largest error, or of the first element that is counted in `not_finite`."""
    got_at_worst: float
    want_at_worst: float
    not_finite: int
    """The number of elements that are NaN or infinite where the oracle is not the same."""


def discrepancy(got: Any, want: Any) -> Discrepancy:
    """Compares elementwise in float64. The shapes must be equal."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"got has shape {got.shape} and want has {want.shape}; they must be equal")
    if got.size == 0:
        return Discrepancy(0.0, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0)
    alike = (got == want) | (np.isnan(got) & np.isnan(want))
    comparable = np.isfinite(got) & np.isfinite(want)
    broken = ~comparable & ~alike
    error = np.where(comparable, np.abs(np.where(comparable, got, 0.0) - np.where(comparable, want, 0.0)), 0.0)
    finite_want = np.where(comparable, want, 0.0)
    position = int(np.argmax(broken)) if broken.any() else int(np.argmax(error))
    worst = tuple(int(i) for i in np.unravel_index(position, got.shape))
    norm = float(np.linalg.norm(finite_want))
    return Discrepancy(
        max_abs=float(error.max()),
        mean_abs=float(error.mean()),
        relative=float(np.linalg.norm(error)) / norm if norm else float(np.linalg.norm(error)),
        scale=float(np.abs(finite_want).max()),
        worst=worst,
        got_at_worst=float(got[worst]),
        want_at_worst=float(want[worst]),
        not_finite=int(broken.sum()),
    )


@dataclass(frozen=True)
class Verdict:
    """A result's discrepancy, and the bounds that follow from the plain version's by the rule of this module."""

    error: Discrepancy
    baseline: Discrepancy
    max_abs_bound: float
    relative_bound: float

    @property
    def ok(self) -> bool:
        error = self.error
        return error.not_finite == 0 and error.max_abs <= self.max_abs_bound and error.relative <= self.relative_bound

    def __str__(self) -> str:
        error = self.error
        where = ", ".join(map(str, error.worst))
        if error.not_finite:
            return (
                f"{error.not_finite} elements are not finite where the oracle is; the first at [{where}]: "
                f"{error.got_at_worst:.6g}, should be {error.want_at_worst:.6g}"
            )
        return (
            f"max {error.max_abs:.3g} (bound {self.max_abs_bound:.3g}), mean {error.mean_abs:.3g}, "
            f"relative {error.relative:.3g} (bound {self.relative_bound:.3g}); worst at [{where}]: "
            f"{error.got_at_worst:.6g}, should be {error.want_at_worst:.6g}"
        )


def judge(got: Any, plain: Any, oracle: Any) -> Verdict:
    """Compares `got` with the oracle by the 2x rule, with `plain` as the baseline of the same dtype."""
    baseline = discrepancy(plain, oracle)
    return Verdict(
        error=discrepancy(got, oracle),
        baseline=baseline,
        max_abs_bound=FACTOR * baseline.max_abs + FLOOR * baseline.scale,
        relative_bound=FACTOR * baseline.relative + FLOOR,
    )
