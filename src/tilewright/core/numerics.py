"""How far a result is from the oracle, where it is worst, and whether that is close enough.

The oracle is the op's `reference` evaluated in float64. A result passes when its error is at most twice that of the
plain version in the same dtype, plus a tiny floor:

    err(implementation, oracle) <= 2 * err(reference in the same dtype, oracle) + floor

for the largest pointwise error and for the relative error (in the 2-norm) alike. So a float32 kernel is held to what
float32 can do and a bfloat16 kernel to what bfloat16 can do, with no tolerance to choose. The plain version sums in
float32, and its products take operands of the inputs' dtype, in the backward too (`round_gradient`). The floor is eight
float32 roundings of the largest value: the two versions may add in another order. A NaN or infinity that the oracle does
not have, too, never passes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FACTOR = 2.0
FLOOR = 8 * float(np.finfo(np.float32).eps)


def accumulator(dtype: Any) -> np.dtype:
    """The dtype that sums and statistics of `dtype` are kept in: float32, and float64 for the oracle."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """The values that are left of x in `dtype`, in x's own dtype.

    A cast there and back may leave more: XLA takes such a pair out on a GPU, for the excess precision.
    """
    return jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def round_gradient(x: jax.Array, dtype: Any) -> jax.Array:
    """The argument itself; its gradient is rounded to `dtype` on the way back.

    For references. A product of bfloat16 arrays with a float32 result has a float32 gradient, and autodiff would multiply
    that by bfloat16 in full float32, which no matrix unit does: the plain version would be better than plain.
    """
    del dtype
    return x


round_gradient.defvjp(
    lambda x, dtype: (x, None),
    lambda dtype, _, gradient: (rounded(gradient, dtype),),
)


@dataclass(frozen=True)
class Discrepancy:
    """The distance between a result and what it should be."""

    max_abs: float
    mean_abs: float
    relative: float
    """|got - want| / |want| in the 2-norm, over all elements."""
    scale: float
    """The largest magnitude in `want`."""
    worst: tuple[int, ...]
    """The index of the largest error, or of the first element that is not finite where it should be."""
    got_at_worst: float
    want_at_worst: float
    not_finite: int
    """Elements that are NaN or infinite without the oracle's being the same."""


def discrepancy(got: Any, want: Any) -> Discrepancy:
    """Compare elementwise, in float64. Shapes must be equal."""
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
    """A discrepancy held against the plain version's, by the rule of this module."""

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
    """Hold `got` against the oracle by the 2x rule, with `plain` as the same-dtype baseline."""
    baseline = discrepancy(plain, oracle)
    return Verdict(
        error=discrepancy(got, oracle),
        baseline=baseline,
        max_abs_bound=FACTOR * baseline.max_abs + FLOOR * baseline.scale,
        relative_bound=FACTOR * baseline.relative + FLOOR,
    )
