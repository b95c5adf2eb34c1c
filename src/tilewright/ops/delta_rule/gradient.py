"""A forward and a backward of Hopper kernels as one differentiable function, which `jax.vmap` makes a larger batch of."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tilewright.core.batching import folded
from tilewright.core.dispatch import Launch

Kernels = Callable[..., tuple[Any, ...]]


def with_gradient(forward: Kernels, backward: Kernels) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(q, k, v, g, beta, initial_state, resets, scale, launch) -> o, final state.

    `forward` takes the arrays, `scale`, `launch` and `keep`. To keep, it returns more than o and the state: that, behind q,
    k, g, beta and resets and before the two cotangents, is what `backward` takes.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
    def function(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
    ) -> tuple[jax.Array, jax.Array]:
        run = functools.partial(forward, scale=scale, launch=launch, keep=False)
        o, final = folded(run, q, k, v, g, beta, initial_state, resets)
        return o, final

    def keep(
        q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
    ) -> tuple[Any, Any]:
        run = functools.partial(forward, scale=scale, launch=launch, keep=True)
        o, final, *kept = folded(run, q, k, v, g, beta, initial_state, resets)
        return (o, final), (q, k, g, beta, resets, *kept)

    def pull(scale: float, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        run = functools.partial(backward, scale=scale, launch=launch)
        return *folded(run, *saved, *cotangents), None

    function.defvjp(keep, pull)
    return function
