"""Short convolution in plain JAX: a sum of shifted slices, which XLA fuses into one pass.

Floor: forward, x read and y written once; backward, x and dy read and dx written once, and W + 1 sums over time. A
slice of a fused array is read again for each tap, from the caches where they hold it.

The gradient is written by hand so that only the arguments are saved for it: autodiff would save the sum before the
activation, a float32 array of x's size.
"""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.final_state import final_state, with_final_state


def _inputs(call: ShortConvCall) -> jax.Array:
    """The inputs with the W-1 before them: [B, W-1 + T, D], of x's dtype."""
    if call.state is None:
        return jnp.pad(call.x, ((0, 0), (call.w.shape[0] - 1, 0), (0, 0)))
    return jnp.concatenate([call.state, call.x], axis=1)


def _at_lag(call: ShortConvCall, inputs: jax.Array, lag: int) -> jax.Array:
    """x_{t-lag} for each token t that reaches that far, 0 for the others: [B, T, D], in the accumulator's dtype."""
    start = call.w.shape[0] - 1 - lag
    shifted = inputs[:, start : start + call.x.shape[1]].astype(accumulator(inputs.dtype))
    return _where_reached(call, lag, shifted)


def _where_reached(call: ShortConvCall, lag: int, rows: jax.Array) -> jax.Array:
    """The rows [B, T, D] of tokens that look back `lag` tokens, and zeros for the others."""
    return rows if call.reach is None or lag == 0 else jnp.where((call.reach >= lag)[:, :, None], rows, 0.0)


def _sum_of_taps(call: ShortConvCall, inputs: jax.Array) -> jax.Array:
    wide, width = accumulator(inputs.dtype), call.w.shape[0]
    total = _at_lag(call, inputs, 0) * call.w[width - 1].astype(wide)[None, None, :]  # [B, T, D]
    for lag in range(1, width):
        total = total + _at_lag(call, inputs, lag) * call.w[width - 1 - lag].astype(wide)[None, None, :]
    return total if call.bias is None else total + call.bias.astype(wide)[None, None, :]


def _forward(call: ShortConvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and the final state."""
    total = _sum_of_taps(call, _inputs(call))
    y = (jax.nn.silu(total) if call.activation == "silu" else total).astype(call.x.dtype)
    return (y, final_state(call)), None


def output_gradients(call: ShortConvCall, dy: jax.Array) -> ShortConvCall:
    """The gradient through y alone, without the final state."""
    width, wide = call.w.shape[0], accumulator(call.x.dtype)
    inputs = _inputs(call)
    d = dy.astype(wide)  # [B, T, D]
    if call.activation == "silu":
        total = _sum_of_taps(call, inputs)
        s = jax.nn.sigmoid(total)
        d = d * s * (1.0 + total * (1.0 - s))
    dw, d_inputs = [], jnp.zeros((), wide)
    for tap in range(width):
        lag = width - 1 - tap
        dw.append(jnp.sum(d * _at_lag(call, inputs, lag), axis=(0, 1)))  # [D]
        term = _where_reached(call, lag, d) * call.w[tap].astype(wide)[None, None, :]
        d_inputs = d_inputs + jnp.pad(term, ((0, 0), (tap, lag), (0, 0)))  # [B, W-1 + T, D]
    return call.gradients(
        x=d_inputs[:, width - 1 :],
        w=jnp.stack(dw),
        bias=None if call.bias is None else jnp.sum(d, axis=(0, 1)),
        state=None if call.state is None else d_inputs[:, : width - 1],
    )


def _backward(
    call: ShortConvCall, saved: None, cotangents: tuple[jax.Array, jax.Array], launch: Launch
) -> ShortConvCall:
    dy, d_final = cotangents
    return with_final_state(call, output_gradients(call, dy), d_final)


IMPLEMENTATION = Implementation(forward=Pass(_forward), backward=Pass(_backward))
