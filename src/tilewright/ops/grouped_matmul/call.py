"""A call of `grouped_matmul`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from tilewright.core.activation import parts_of
from tilewright.core.axes import Size
from tilewright.core.call import Call, array, option, power_of_two


class GroupedMatmulCall(Call):
    """y_m = activation(x_m w_g) for each row m of group g; rows past the last group are zeros.

    Group g has group_sizes[g] rows, after those of the groups before it. z = x w is [M, P, N] with P = 2 parts for swiglu
    and one otherwise. Quantised operands are values and scales, as in ops/matmul/call.py, per group.
    """

    independent = (("N", "NS"),)
    outputs = ("M N",)
    arguments: ClassVar[Mapping[str, str]] = {
        "w": "w G K 2 N",
        "x_scales": "x.scales M K",
        "w_scales": "w.scales G K 2 N",
    }

    x: Num[Array, "M K"] = array()
    w: Num[Array, "G KW P N"] = array()
    group_sizes: Int[Array, " G"] = array(differentiable=False)
    x_scales: Float[Array, "M KX"] | None = array(differentiable=False)
    w_scales: Float[Array, "G KS P NS"] | None = array(differentiable=False)
    activation: str | None = option()
    out_dtype: str = option()
    w_dtype: str = option()
    """Of the values of w: "int4" is stored as int8 of half the rows (core/quantized.py)."""

    @property
    def parts(self) -> int:
        return parts_of(self.activation)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """G, M, K and N: groups, rows of x, channels that are contracted, columns of y."""
        (m, k), groups, n = self.x.shape, self.w.shape[0], self.w.shape[-1]
        return groups, m, k, n

    def bucket(self) -> Mapping[str, Any]:
        groups, m, k, n = self.sizes
        return {
            "dtype": self.x.dtype.name,
            "w": None if self.w_dtype == self.x.dtype.name else self.w_dtype,
            "G": groups,
            "M": power_of_two(m),
            "K": k,
            "N": n,
            "activation": self.activation,
        }


MOST_MASKED = 1024
"""Groups up to which sums over masks take the place of sums and sorts of several kernels."""


def group_starts(group_sizes: jax.Array, m: Size) -> jax.Array:
    """The first row of each group, and the end of the last one: int32 [G + 1], ascending, at most m.

    Sizes that are negative count as 0, and groups end with the rows that there are: no implementation can read or write
    past them. `poison` tells of both.
    """
    sizes = jnp.maximum(group_sizes, 0)
    ends, rough = sums_before(sizes), sums_before(sizes.astype(jnp.float32))
    return jnp.minimum(jnp.where(_overflowed(ends, rough), jnp.iinfo(jnp.int32).max, ends), m)


def sums_before(counts: jax.Array) -> jax.Array:
    """The sum of the counts before each, and that of all: [G + 1] of their dtype.

    A sum over a mask is one kernel on a GPU, where a cumulative sum is several: they would cost more than the products of a
    few tokens. For more groups than experts of any model the mask would be large.
    """
    groups = counts.shape[0]
    if groups > MOST_MASKED:
        return jnp.concatenate([jnp.zeros((1,), counts.dtype), jnp.cumsum(counts, dtype=counts.dtype)])
    before = jnp.arange(groups)[None, :] < jnp.arange(groups + 1)[:, None]  # [G + 1, G]
    return jnp.sum(jnp.where(before, counts[None, :], 0), axis=1, dtype=counts.dtype)


def poison(group_sizes: jax.Array, m: Size) -> jax.Array:
    """float32 scalar: NaN where the sizes are negative or sum past m, else 0. Added, it makes results and gradients NaN."""
    sizes = jnp.maximum(group_sizes, 0)
    total, rough = jnp.sum(sizes, dtype=jnp.int32), jnp.sum(sizes.astype(jnp.float32))
    wrong = jnp.any(group_sizes < 0) | (total > m) | _overflowed(total, rough)
    return jnp.where(wrong, jnp.float32(jnp.nan), jnp.float32(0.0))


def _overflowed(total: jax.Array, rough: jax.Array) -> jax.Array:
    """Whether an int32 sum of sizes that are not negative wrapped around. `rough` is the same sum in float32.

    A sum from 2^31 to 2^32 wraps to a negative number. For a larger one `rough` is above 3 * 2^30, and for one that fits
    it is below: of fewer than four million sizes it is off by less than a quarter.
    """
    return (total < 0) | (rough > 3 * 2.0**30)
