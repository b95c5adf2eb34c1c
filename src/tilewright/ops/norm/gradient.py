"""What tells the norms apart, and the hand-written gradient that their implementations share."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from tilewright.core.dispatch import Launch


@dataclass(frozen=True)
class Norm:
    """A norm over the last axis: y = xhat * (offset + w) [+ bias] [* act(gate)], with xhat = x / sqrt(mean(x^2) + eps).

    `centered` takes the mean out of x first: layer norm. `activation` is the gate's, None where there is no gate.
    """

    eps: float
    offset: float = 0.0
    centered: bool = False
    activation: str | None = None


def with_gradient(
    forward: Callable[..., jax.Array], backward: Callable[..., tuple[Any, Any, Any, Any]]
) -> Callable[..., jax.Array]:
    """(x, gate, w, bias, norm, launch) -> y; gate and bias may be None. Only the arguments are kept for the gradient.

    `backward` takes (x, gate, w, bias, dy, norm, launch) and returns the four gradients, None for what is None.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
    def function(
        x: jax.Array, gate: jax.Array | None, w: jax.Array, bias: jax.Array | None, norm: Norm, launch: Launch | None
    ) -> jax.Array:
        return forward(x, gate, w, bias, norm, launch)

    def keep(x: Any, gate: Any, w: Any, bias: Any, norm: Norm, launch: Launch | None) -> tuple[jax.Array, Any]:
        return forward(x, gate, w, bias, norm, launch), (x, gate, w, bias)

    def pull(norm: Norm, launch: Launch | None, saved: Any, dy: jax.Array) -> tuple[Any, Any, Any, Any]:
        return backward(*saved, dy, norm, launch)

    function.defvjp(keep, pull)
    return function
