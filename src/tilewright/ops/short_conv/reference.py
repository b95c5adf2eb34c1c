"""Short convolution, plainly: each tap is a shifted copy of the inputs. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.core.unit_length import heads_of_unit_length
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.final_state import final_state


def _forward(call: ShortConvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and the final state."""
    x, wide, width, length = call.x, accumulator(call.x.dtype), call.w.shape[0], call.x.shape[1]
    before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype) if call.state is None else call.state
    inputs = jnp.concatenate([before, x], axis=1).astype(wide)  # [B, W-1 + T, D]
    y = jnp.zeros(x.shape, wide) if call.bias is None else jnp.broadcast_to(call.bias.astype(wide), x.shape)
    for tap in range(width):
        term = inputs[:, tap : tap + length] * call.w[tap].astype(wide)[None, None, :]  # [B, T, D]
        if call.reach is not None:
            term = jnp.where((call.reach >= width - 1 - tap)[:, :, None], term, 0.0)
        y = y + term
    y = jax.nn.silu(y) if call.activation == "silu" else y
    y = y if call.normalize is None else heads_of_unit_length(y, call.normalize)
    return (y.astype(x.dtype), final_state(call)), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
