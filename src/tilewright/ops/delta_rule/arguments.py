"""What the ops of the family and their steps do with their arguments, behind validation."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator, rounded

_NORMALIZE_EPSILON = 1e-6


def given_arrays(**given: Any) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in given.items() if value is not None}


def normalized(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + 1e-6) along the last axis, summed in float32, rounded to x's dtype.

    Every implementation sees the rounded values: XLA is not to pass the others on to one that goes on in float32.
    """
    wide = x.astype(accumulator(x.dtype))
    squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return rounded(wide * jax.lax.rsqrt(squares + _NORMALIZE_EPSILON), x.dtype).astype(x.dtype)
