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
    keep, length = d_final.shape[1], call.x.shape[1]
    if call.reach is not None:
        d_final = jnp.where(_reached(call.reach, keep), d_final, jnp.zeros_like(d_final))
    dx, d_state = gradients.x, gradients.state
    from_x = min(length, keep)  # The last rows of the final state are rows of x.
    dx = dx.at[:, length - from_x :].add(d_final[:, keep - from_x :].astype(dx.dtype))
    if d_state is not None and from_x < keep:
        d_state = d_state.at[:, length:].add(d_final[:, : keep - length].astype(d_state.dtype))
    return call.gradients(x=dx, w=gradients.w, bias=gradients.bias, state=d_state)
