"""The final state of a short convolution and its gradient, which the implementations share."""

import jax
import jax.numpy as jnp

from tilewright.ops.short_conv.call import ShortConvCall


def final_state(call: ShortConvCall) -> jax.Array:
    """The last W-1 inputs [B, W-1, D], with zeros for those that the last token does not reach."""
    x, keep = call.x, call.w.shape[0] - 1
    if isinstance(x.shape[1], int) and x.shape[1] >= keep:  # It may be symbolic (`jax.export`).
        last = x[:, x.shape[1] - keep :]
    else:
        before = jnp.zeros((x.shape[0], keep, x.shape[2]), x.dtype) if call.state is None else call.state
        last = jnp.concatenate([before, x], axis=1)[:, x.shape[1] :]
    return last if call.reach is None else jnp.where(_reached(call.reach, keep), last, jnp.zeros_like(last))


def _reached(reach: jax.Array, keep: int) -> jax.Array:
    """Which inputs of the final state the last token reaches: [B, W-1, 1]."""
    distance = jnp.arange(keep - 1, -1, -1, dtype=jnp.int32)  # From the last token to each input of the state.
    return (distance[None, :] <= reach[:, -1:])[:, :, None]


def with_final_state(call: ShortConvCall, gradients: ShortConvCall, d_final: jax.Array) -> ShortConvCall:
    """The gradients of y, plus those of the final state: added to a few rows in place, not in another pass over dx."""
    d_final, dx = d_final_reached(call, d_final), gradients.x
    keep, length = d_final.shape[1], call.x.shape[1]
    from_x = min(length, keep)  # The last rows of the final state are rows of x.
    dx = dx.at[:, length - from_x :].add(d_final[:, keep - from_x :].astype(dx.dtype))
    d_state = with_earlier_rows(gradients.state, d_final, length)
    return call.gradients(x=dx, w=gradients.w, bias=gradients.bias, state=d_state)


def d_final_reached(call: ShortConvCall, d_final: jax.Array) -> jax.Array:
    """The gradient of the final state, with zeros for the inputs that the last token does not reach."""
    if call.reach is None:
        return d_final
    return jnp.where(_reached(call.reach, d_final.shape[1]), d_final, jnp.zeros_like(d_final))


def with_earlier_rows(d_state: jax.Array | None, d_final: jax.Array, length: int) -> jax.Array | None:
    """d_state, plus the rows of the final state's gradient that are rows of the initial one: there is less x than that."""
    keep = d_final.shape[1]
    if d_state is None or length >= keep:
        return d_state
    return d_state.at[:, length:].add(d_final[:, : keep - length].astype(d_state.dtype))
