"""The final state, and the hand-written gradient that the implementations of short convolution share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.dispatch import Launch

Forward = Callable[..., jax.Array]
"""(x, w, bias, state, reach, activation, launch) -> y."""

Backward = Callable[..., tuple[Any, Any, Any, Any]]
"""(x, w, bias, state, reach, dy, activation=, launch=) -> dx, dw, dbias, dstate; None for what is None."""


def final_state(x: jax.Array, state: jax.Array | None, reach: jax.Array | None, width: int) -> jax.Array:
    """The last W-1 inputs [B, W-1, D], those that the last token does not reach replaced by zeros."""
    keep = width - 1
    if x.shape[1] >= keep:
        last = x[:, x.shape[1] - keep :]
    else:
        before = jnp.zeros((x.shape[0], keep, x.shape[2]), x.dtype) if state is None else state
        last = jnp.concatenate([before, x], axis=1)[:, x.shape[1] :]
    return last if reach is None else jnp.where(_reached(reach, width), last, jnp.zeros_like(last))


def _reached(reach: jax.Array, width: int) -> jax.Array:
    """Which of the final state's inputs the last token reaches: [B, W-1, 1]."""
    distance = jnp.arange(width - 2, -1, -1, dtype=jnp.int32)  # Of each input of the state from the last token.
    return (distance[None, :] <= reach[:, -1:])[:, :, None]


def _add_final(
    dx: jax.Array, d_state: jax.Array | None, reach: jax.Array | None, d_final: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """dx and d_state, with what comes through the final state added: to a few rows in place, not in a pass over dx."""
    width, length = d_final.shape[1] + 1, dx.shape[1]
    if reach is not None:
        d_final = jnp.where(_reached(reach, width), d_final, jnp.zeros_like(d_final))
    fresh = min(length, width - 1)  # The last rows of the final state are x's.
    dx = dx.at[:, length - fresh :].add(d_final[:, width - 1 - fresh :].astype(dx.dtype))
    if d_state is not None and fresh < width - 1:
        d_state = d_state.at[:, length:].add(d_final[:, : width - 1 - length].astype(d_state.dtype))
    return dx, d_state


def with_gradient(forward: Forward, backward: Backward) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(x, w, bias, state, reach, activation, launch) -> y, final state. Only the arguments are kept for the gradient."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
    def function(
        x: jax.Array,
        w: jax.Array,
        bias: jax.Array | None,
        state: jax.Array | None,
        reach: jax.Array | None,
        activation: str | None,
        launch: Launch | None,
    ) -> tuple[jax.Array, jax.Array]:
        y = forward(x, w, bias, state, reach, activation=activation, launch=launch)
        return y, final_state(x, state, reach, w.shape[0])

    def keep(x: Any, w: Any, bias: Any, state: Any, reach: Any, activation: Any, launch: Any) -> tuple[Any, Any]:
        return function(x, w, bias, state, reach, activation, launch), (x, w, bias, state, reach)

    def pull(activation: str | None, launch: Launch | None, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        dy, d_final = cotangents
        dx, dw, d_bias, d_state = backward(*saved, dy, activation=activation, launch=launch)
        dx, d_state = _add_final(dx, d_state, saved[4], d_final)
        return dx, dw, d_bias, d_state, None

    function.defvjp(keep, pull)
    return function
