"""Short convolution, plainly: each tap is a shifted copy of the inputs. The oracle of the family."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.numerics import accumulator
from tilewright.ops.short_conv.gradient import final_state


def short_conv_reference(
    x: Float[Array, "B T D"],
    w: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    state: Float[Array, "B W-1 D"] | None,
    reach: Int[Array, "B T"] | None,
    *,
    activation: str | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """y and the final state; a token t looks back reach_t tokens, or W-1 where reach is None."""
    wide, width, length = accumulator(x.dtype), w.shape[0], x.shape[1]
    before = jnp.zeros((x.shape[0], width - 1, x.shape[2]), x.dtype) if state is None else state
    inputs = jnp.concatenate([before, x], axis=1).astype(wide)  # [B, W-1 + T, D]
    y = jnp.zeros(x.shape, wide) if bias is None else jnp.broadcast_to(bias.astype(wide), x.shape)
    for tap in range(width):
        term = inputs[:, tap : tap + length] * w[tap].astype(wide)[None, None, :]  # [B, T, D]
        if reach is not None:
            term = jnp.where((reach >= width - 1 - tap)[:, :, None], term, 0.0)
        y = y + term
    y = jax.nn.silu(y) if activation == "silu" else y
    return y.astype(x.dtype), final_state(x, state, reach, width)
