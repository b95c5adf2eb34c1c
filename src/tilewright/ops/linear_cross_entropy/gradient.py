"""The hand-written gradient that the implementations of linear cross entropy share."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tilewright.core.dispatch import Launch

Forward = Callable[..., tuple[jax.Array, ...]]
"""(x, w, labels, soft_cap, launch) -> nll, logsumexp, and what the backward makes probabilities from: max and total."""

Backward = Callable[..., tuple[jax.Array, jax.Array]]
"""(x, w, labels, max, total, d_nll, d_logsumexp, soft_cap=, launch=) -> dx, dw."""


def with_gradient(forward: Forward, backward: Backward) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(x, w, labels, soft_cap, launch) -> nll, logsumexp; differentiable in x and w through both results."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
    def function(
        x: jax.Array, w: jax.Array, labels: jax.Array, soft_cap: float | None, launch: Launch
    ) -> tuple[jax.Array, jax.Array]:
        nll, logsumexp, _, _ = forward(x, w, labels, soft_cap, launch)
        return nll, logsumexp

    def keep(x: jax.Array, w: jax.Array, labels: jax.Array, soft_cap: float | None, launch: Launch) -> tuple[Any, Any]:
        nll, logsumexp, highest, total = forward(x, w, labels, soft_cap, launch)
        return (nll, logsumexp), (x, w, labels, highest, total)

    def pull(soft_cap: float | None, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, Any, None]:
        dx, dw = backward(*saved, *cotangents, soft_cap=soft_cap, launch=launch)
        return dx, dw, None

    function.defvjp(keep, pull)
    return function
