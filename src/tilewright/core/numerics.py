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
SUMMED_ABOVE = 2**22
"""Arrays of more elements than this are compared by `signed_sums`."""
_PART = 2**22


def accumulator(dtype: Any) -> np.dtype:
    """The dtype of sums and statistics over `dtype`: float32, and float64 for the oracle."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x rounded to `dtype`, returned in x's own dtype.

    A cast to `dtype` and back is not enough: on a GPU, XLA removes such a pair (excess precision).
    """
    return jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


def signed_sums(x: jax.Array) -> jax.Array:
    """x itself, or of an array of more than `SUMMED_ABOVE` elements so many sums of runs of them, with random signs.

    For comparing large arrays without bringing them to the host. A wrong element changes a sum by as much, and the errors
    of roundings add up to the square root of a run's length in the results of a kernel and of the plain version alike. Sums
    are float64 where that is enabled.
    """
    if x.size <= SUMMED_ABOVE:
        return x
    length = -(-x.size // SUMMED_ABOVE)
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    signs = np.random.default_rng(0).choice(np.asarray([-1, 1], dtype), (1, length))
    runs = jnp.pad(x.reshape(-1), (0, -x.size % length)).reshape(-1, length)
    return jnp.sum(runs.astype(dtype) * signs, axis=1)


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
    """Compares elementwise in float64. The shapes must be equal.

    It goes through the elements in parts: a gradient may have hundreds of millions, which in float64 and with all
    intermediates would take tens of GB.
    """
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise ValueError(f"got has shape {got.shape} and want has {want.shape}; they must be equal")
    if got.size == 0:
        return Discrepancy(0.0, 0.0, 0.0, 0.0, (), 0.0, 0.0, 0)
    flat_got, flat_want = got.reshape(-1), want.reshape(-1)
    max_abs, total, squares, want_squares, scale, not_finite, position, first_broken = (
        -1.0,
        0.0,
        0.0,
        0.0,
        0.0,
        0,
        0,
        -1,
    )
    for start in range(0, got.size, _PART):
        one, other = (np.asarray(flat[start : start + _PART], np.float64) for flat in (flat_got, flat_want))
        comparable = np.isfinite(one) & np.isfinite(other)
        broken = ~comparable & ~((one == other) | (np.isnan(one) & np.isnan(other)))
        finite_want = np.where(comparable, other, 0.0)
        error = np.abs(np.where(comparable, one, 0.0) - finite_want)
        at = int(np.argmax(error))
        if error[at] > max_abs:
            max_abs, position = float(error[at]), start + at
        if first_broken < 0 and broken.any():
            first_broken = start + int(np.argmax(broken))
        total, squares = total + float(error.sum()), squares + float(error @ error)
        want_squares, scale = (
            want_squares + float(finite_want @ finite_want),
            max(scale, float(np.abs(finite_want).max())),
        )
        not_finite += int(broken.sum())
    position = first_broken if first_broken >= 0 else position
    error_norm, want_norm = squares**0.5, want_squares**0.5
    return Discrepancy(
        max_abs=max_abs,
        mean_abs=total / got.size,
        relative=error_norm / want_norm if want_norm else error_norm,
        scale=scale,
        worst=tuple(int(i) for i in np.unravel_index(position, got.shape)),
        got_at_worst=float(flat_got[position]),
        want_at_worst=float(flat_want[position]),
        not_finite=not_finite,
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
    return judge_beside(got, discrepancy(plain, oracle), oracle)


def judge_beside(got: Any, baseline: Discrepancy, oracle: Any) -> Verdict:
    """`judge`, where the error of the plain version is known."""
    return Verdict(
        error=discrepancy(got, oracle),
        baseline=baseline,
        max_abs_bound=FACTOR * baseline.max_abs + FLOOR * baseline.scale,
        relative_bound=FACTOR * baseline.relative + FLOOR,
    )
