"""Short convolution in plain JAX: a sum of shifted slices, which XLA fuses into one pass.

Floor: forward, x read and y written once; backward, x and dy read and dx written once, and W + 1 sums over time. A
slice of a fused array is read again for each tap, from the caches where they hold it.

The gradients are JAX's, of any order and in both modes. They save the arguments only, and compute the rest again: autodiff
alone would save the sum before the activation, a float32 array of x's size.
"""

import dataclasses

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.core.unit_length import heads_of_unit_length
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.final_state import final_state


def _inputs(call: ShortConvCall) -> jax.Array:
    """The inputs with the W-1 before them: [B, W-1 + T, D], in the accumulator's dtype, in which gradients are summed."""
    x = call.x.astype(accumulator(call.x.dtype))
    if call.state is None:
        return jnp.pad(x, ((0, 0), (call.w.shape[0] - 1, 0), (0, 0)))
    return jnp.concatenate([call.state.astype(x.dtype), x], axis=1)


def _at_lag(call: ShortConvCall, inputs: jax.Array, lag: int) -> jax.Array:
    """x_{t-lag} for each token t that reaches that far, 0 for the others: [B, T, D], in the accumulator's dtype."""
    start = call.w.shape[0] - 1 - lag
    shifted = inputs[:, start : start + call.x.shape[1]]
    return shifted if call.reach is None or lag == 0 else jnp.where((call.reach >= lag)[:, :, None], shifted, 0.0)


def convolved(call: ShortConvCall) -> jax.Array:
    """y, without the final state."""
    inputs, width = _inputs(call), call.w.shape[0]
    wide = inputs.dtype
    total = _at_lag(call, inputs, 0) * call.w[width - 1].astype(wide)[None, None, :]  # [B, T, D]
    for lag in range(1, width):
        total = total + _at_lag(call, inputs, lag) * call.w[width - 1 - lag].astype(wide)[None, None, :]
    total = total if call.bias is None else total + call.bias.astype(wide)[None, None, :]
    y = jax.nn.silu(total) if call.activation == "silu" else total
    return (y if call.normalize is None else heads_of_unit_length(y, call.normalize)).astype(call.x.dtype)


def d_initial_state(call: ShortConvCall, dy: jax.Array) -> jax.Array | None:
    """The gradient of the initial state by that of y, or None where there is none: the first W-1 tokens alone reach it."""
    if call.state is None:
        return None
    first = slice(0, call.w.shape[0] - 1)
    reach = None if call.reach is None else call.reach[:, first]
    rows = dataclasses.replace(call, x=call.x[:, first], reach=reach)
    _, pull_back = jax.vjp(lambda state: convolved(dataclasses.replace(rows, state=state)), call.state)
    return pull_back(dy[:, first])[0]


def _forward(call: ShortConvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and the final state."""
    return (jax.checkpoint(convolved, prevent_cse=False)(call), final_state(call)), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
