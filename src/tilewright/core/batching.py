"""`jax.vmap` of functions that have a batch axis of their own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def folded(function: Callable[..., tuple[Any, ...]], *arrays: Any) -> tuple[Any, ...]:
    """`function`, which `jax.vmap` turns into a larger batch: by JAX's own rule the calls would follow each other.

    All arrays begin with the axis of the batch. An argument or result may be None.
    """

    @jax.custom_batching.custom_vmap
    def run(*arrays: Any) -> tuple[Any, ...]:
        return function(*arrays)

    @run.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def fold(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        given = [None if x is None else fold(x, is_batched) for x, is_batched in zip(arrays, batched, strict=True)]
        results = folded(function, *given)
        unfolded = tuple(None if x is None else x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return unfolded, tuple(None if x is None else True for x in results)

    return run(*arrays)
