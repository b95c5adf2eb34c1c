"""What lengths and pages that are out of range come to, for implementations in plain JAX around a call."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def room_of(k: Any, page_table: Any) -> int:
    """Keys that there is room for in each sequence."""
    return k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]


def within_bounds(run: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """`run`, which then sees pages of the pool and lengths from 0 to the room only.

    A sequence with another length is NaN. `pallas_gpu` does without: the lengths before a kernel and the factor behind it
    would be a launch each.
    """

    @functools.wraps(run)
    def bounded(
        q: Any, k: Any, v: Any, page_table: Any, lengths: Any, sinks: Any, **options: Any
    ) -> tuple[jax.Array, jax.Array]:
        in_range = (lengths >= 0) & (lengths <= room_of(k, page_table))
        if page_table is not None:
            page_table = jnp.clip(page_table, 0, k.shape[0] - 1)
        out, logsumexp = run(q, k, v, page_table, jnp.where(in_range, lengths, 0), sinks, **options)
        factor = jnp.where(in_range, 1.0, jnp.nan)
        out = out * factor.astype(out.dtype)[:, None, None, None]
        return out, logsumexp + (factor - 1.0).astype(logsumexp.dtype)[:, None, None]

    return bounded
