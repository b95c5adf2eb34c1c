"""The delta rules on Hopper, one part of the sequence after another: less memory for more time.

The forward keeps the state at the start of each part, and nothing else, for the backward. The backward goes through the
parts from the last to the first: it computes the forward of a part again, with all that is saved for gradients, then the
gradients of the part, and passes the gradient of the state on to the part before. So what the kernels write for each other
exists for one part at a time. The cost is a second forward, and copies of the parts of inputs and results.

States at the starts are float32, as they are between chunks: results differ from those in one piece by rounding alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.pallas_gpu.tiles import CHUNK

ALONG_T = ("q", "k", "v", "g", "beta", "resets")
"""The arrays of a call with an axis of tokens, the second."""


def unsupported_reason(call: DeltaRuleCall, parts: int) -> str | None:
    t = call.q.shape[1]
    if parts > 1 and t % (parts * CHUNK):
        return f"T={t} is not parts={parts} of whole chunks of {CHUNK} tokens; use parts=1, or a T that is"
    return None


def _part(call: DeltaRuleCall, number: Any, parts: int, state: jax.Array) -> DeltaRuleCall:
    size = call.q.shape[1] // parts
    own = {
        name: lax.dynamic_slice_in_dim(array, number * size, size, axis=1)
        for name, array in call.given().items()
        if name in ALONG_T
    }
    return call.with_arrays({**own, "initial_state": state})


def _put(whole: jax.Array, number: Any, part: jax.Array) -> jax.Array:
    """`whole`, with a part of its axis of tokens written."""
    return lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[1], axis=1)


def forward(
    call: DeltaRuleCall, launch: Launch, run: Callable[..., Any], *, save: bool
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """`run` in the parts of the config."""
    parts = launch.config.parts
    alone = dataclasses.replace(launch, config=dataclasses.replace(launch.config, parts=1))

    def step(number: Any, carry: Any) -> Any:
        o, state, starts = carry
        (own, end), _ = run(_part(call, number, parts, state), alone, save=False)
        return _put(o, number, own), end, starts.at[:, number].set(state)

    state = call.initial_state
    starts = jnp.zeros((state.shape[0], parts, *state.shape[1:]), state.dtype)
    o, final, starts = lax.fori_loop(0, parts, step, (jnp.zeros(call.v.shape, call.v.dtype), state, starts))
    return (o, final), {"starts": starts, "v": call.v} if save else None


def backward(
    call: DeltaRuleCall,
    saved: dict[str, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
    launch: Launch,
    *,
    again: Callable[[DeltaRuleCall], Any],
    run: Callable[..., DeltaRuleCall],
) -> DeltaRuleCall:
    """`run` in the parts that `forward` had. `again` is what the forward of a part saves for it."""
    (d_o, d_state), parts = cotangents, saved["starts"].shape[1]
    call = call.with_arrays({"v": saved["v"]})
    names = [name for name in call.given() if name in ALONG_T and name in call.differentiable_arrays]

    def step(done: Any, carry: Any) -> Any:
        gradients, d_state = carry
        number = parts - 1 - done
        part = _part(call, number, parts, saved["starts"][:, number])
        size = part.q.shape[1]
        own = run(part, again(part), (lax.dynamic_slice_in_dim(d_o, number * size, size, axis=1), d_state), launch)
        return {name: _put(gradients[name], number, getattr(own, name)) for name in names}, own.initial_state

    zeros = {name: jnp.zeros_like(getattr(call, name)) for name in names}
    gradients, d_initial = lax.fori_loop(0, parts, step, (zeros, d_state))
    return call.gradients(**gradients, initial_state=d_initial)
