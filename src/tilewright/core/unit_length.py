"""Vectors divided by their length, n = x / sqrt(sum x^2 + 1e-6), and the gradient, inside and outside of kernels.

`sums` adds up the elements of each vector and returns the sums in a shape that broadcasts against the elements. A kernel
passes its own, since the elements of a vector lie in lanes or in threads there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

EPSILON = 1e-6

Sums = Callable[[jax.Array], jax.Array]


def along_last_axis(x: jax.Array) -> jax.Array:
    """The sums of vectors that are the last axis of an array."""
    return jnp.sum(x, axis=-1, keepdims=True)


def unit_length(x: jax.Array, sums: Sums = along_last_axis) -> jax.Array:
    """n, in the dtype of x, which should be float32."""
    return x * jax.lax.rsqrt(sums(x * x) + EPSILON)


def pull_back(x: jax.Array, d: jax.Array, sums: Sums, slope: jax.Array | None = None) -> jax.Array:
    """The gradient of x, from x and the gradient d of n: r (d - n (n . d)) with r = 1 / sqrt(sum x^2 + 1e-6).

    With `slope`, the derivative of x by what it was computed from, that one's gradient instead. Neither sum waits for the
    other, and while a kernel waits for both, it holds two values per element.
    """
    squares, dots = sums(x * x), sums(x * d)
    if slope is not None:
        x, d = x * slope, d * slope
    r = jax.lax.rsqrt(squares + EPSILON)
    return r * (d - x * (r * r * dots))


def heads_of_unit_length(x: jax.Array, size: int) -> jax.Array:
    """n of each `size` neighbouring channels of the last axis, in x's shape."""
    return unit_length(x.reshape(*x.shape[:-1], x.shape[-1] // size, size)).reshape(x.shape)
