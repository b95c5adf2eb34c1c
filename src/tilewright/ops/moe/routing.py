"""The router: which experts a token goes to, and with which weights."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.call import Static
from tilewright.core.derivatives import with_derivatives
from tilewright.core.manual_axes import vary_over, varying_axes
from tilewright.core.numerics import accumulator
from tilewright.ops.moe.call import RouteCall

_LEAST_SUM = 1e-20
_BEST_OF_A_GROUP = 2


def scores_of(logits: Float[Array, "*tokens E"], scoring: str) -> Float[Array, "*tokens E"]:
    """Scores in float32: softmax over the experts, or a sigmoid each."""
    logits = logits.astype(accumulator(logits.dtype))
    return jax.nn.softmax(logits, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(logits)


def route(call: RouteCall) -> tuple[jax.Array, jax.Array]:
    """Weights [*tokens, C] and experts [*tokens, C] of a call."""
    logits = call.logits.astype(accumulator(call.logits.dtype))
    preference = scores_of(jax.lax.stop_gradient(logits), call.scoring)
    bias = None
    if call.bias is not None:
        bias = jnp.broadcast_to(jax.lax.stop_gradient(call.bias).astype(logits.dtype), logits.shape)
        preference = preference + bias
    if call.groups is not None:
        preference = _in_best_groups(preference, *call.groups)
    _, experts = jax.lax.top_k(preference, call.k)  # [*tokens, C]; of equal ones the lowest index first.
    weights = _weights(call, logits, _taken(logits, experts)) * call.scale
    # The NaN may not be among the chosen, nor the +inf that makes a softmax NaN.
    given = jax.lax.stop_gradient(logits)
    is_nan = jnp.isnan(given) | (given == jnp.inf) if call.scoring == "softmax" else jnp.isnan(given)
    is_nan = is_nan if bias is None else is_nan | jnp.isnan(bias)
    is_nan = jnp.any(is_nan, axis=-1, keepdims=True)
    weights = jnp.where(jnp.broadcast_to(is_nan, weights.shape), jnp.nan, weights)
    return weights, experts.astype(jnp.int32)


def _weights(call: RouteCall, logits: Float[Array, "*tokens E"], chosen: Float[Array, "*tokens C"]) -> jax.Array:
    """The weights of the experts with the logits `chosen`.

    What is normalised is computed from logarithms: scores that underflow have finite gradients, and the sum over all
    experts of a softmax cancels.
    """
    if call.scoring == "softmax":
        if call.normalize:
            return jax.nn.softmax(chosen, axis=-1)
        total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.exp(chosen - jnp.broadcast_to(total, chosen.shape))
    if not call.normalize:
        return jax.nn.sigmoid(chosen)
    log_scores = jax.nn.log_sigmoid(chosen)
    # s / (sum s + least), as one more score that is dropped.
    least = jnp.full_like(chosen[..., :1], math.log(_LEAST_SUM))
    return jax.nn.softmax(jnp.concatenate([log_scores, least], axis=-1), axis=-1)[..., :-1]


def _in_best_groups(preference: Float[Array, "*tokens E"], count: int, kept: int) -> Float[Array, "*tokens E"]:
    """The preferences, with -inf outside of the `kept` best of `count` groups: those with the largest sum of two."""
    *tokens, experts = preference.shape
    grouped = preference.reshape(*tokens, count, experts // count)
    best, _ = jax.lax.top_k(grouped, min(_BEST_OF_A_GROUP, experts // count))
    _, chosen = jax.lax.top_k(jnp.sum(best, axis=-1), kept)  # [*tokens, kept]
    numbers = jnp.arange(count, dtype=chosen.dtype).reshape(*[1] * len(tokens), 1, count)
    is_kept = jnp.any(chosen[..., None] == numbers, axis=-2)  # [*tokens, count]
    masked = jnp.where(is_kept[..., None], grouped, jnp.full_like(grouped, -jnp.inf))
    return masked.reshape(preference.shape)


def _of_experts(logits: Float[Array, "*tokens E"], experts: Int[Array, "*tokens C"]) -> Float[Array, "*tokens C"]:
    """The logits of the chosen experts.

    JAX's gradient of this would scatter. Here it is a sum over the choices, in their order, of arrays as large as the
    gradient itself: one fusion without atomic additions.
    """
    return jnp.take_along_axis(logits, experts, axis=-1)


def _taken_save(logits: jax.Array, experts: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Static]]:
    return _of_experts(logits, experts), (experts, Static(logits.shape))


def _taken_tangent(saved: tuple[jax.Array, Static], tangents: tuple[jax.Array]) -> jax.Array:
    return _of_experts(tangents[0], saved[0])


def _taken_pull_back(saved: tuple[jax.Array, Static], cotangent: jax.Array) -> tuple[jax.Array]:
    experts, shape = saved[0], saved[1].value
    index = jax.lax.broadcasted_iota(experts.dtype, shape, len(shape) - 1)
    gradient = vary_over(jnp.zeros(shape, cotangent.dtype), varying_axes(cotangent))
    for choice in range(experts.shape[-1]):
        own = index == experts[..., choice, None]
        gradient = jnp.where(own, cotangent[..., choice, None], gradient)
    return (gradient,)


_taken = with_derivatives(_of_experts, forward=_taken_save, tangent=_taken_tangent, backward=_taken_pull_back)
