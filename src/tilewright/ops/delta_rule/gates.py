"""Log-decays as the chunked implementations take them: bounded below, and summed without rounding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_COARSE = 16.0

LOWEST_GATE = -16384.0
"""A lower gate counts as this one: exp(-16384) is 0 in float64 too, and sums of 64 coarse parts are exact to here."""


def coarse_and_fine(g: jax.Array, sums: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Cumulative sums of the two parts of g: its nearest multiple of 1/16, and the rest.

    The sums of the coarse part are exact, and those of the fine part are below C / 32. So a difference of two sums is
    as exact as its terms, where the difference of two sums of g would have the rounding error of the larger.
    """
    coarse = jnp.round(g * _COARSE) / _COARSE
    return sums(coarse), sums(g - coarse)
