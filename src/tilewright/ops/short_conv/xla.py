"""Short convolution in plain JAX: a sum of shifted slices, which XLA fuses into one pass.

Floor: forward, x read and y written once; backward, x and dy read and dx written once, and W + 1 sums over time. A slice
of a fused array is read again for each tap, from caches where they hold it.

The gradient is written by hand so that the arguments alone are kept for it: autodiff would keep the sum before the
activation, a float32 array of x's size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.numerics import accumulator
from tilewright.ops.short_conv.gradient import with_gradient


def _inputs(x: jax.Array, state: jax.Array | None, width: int) -> jax.Array:
    """The inputs with the W-1 before them: [B, W-1 + T, D], of x's dtype."""
    if state is None:
        return jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return jnp.concatenate([state, x], axis=1)


def _at_lag(inputs: jax.Array, reach: jax.Array | None, lag: int, width: int) -> jax.Array:
    """x_{t-lag} for each token t that reaches so far, 0 for the others: [B, T, D], wide."""
    length = inputs.shape[1] - (width - 1)
    start = width - 1 - lag
    shifted = inputs[:, start : start + length].astype(accumulator(inputs.dtype))
    return shifted if reach is None or lag == 0 else jnp.where((reach >= lag)[:, :, None], shifted, 0.0)


def _sum_of_taps(inputs: jax.Array, w: jax.Array, bias: jax.Array | None, reach: jax.Array | None) -> jax.Array:
    wide, width = accumulator(inputs.dtype), w.shape[0]
    total = _at_lag(inputs, reach, 0, width) * w[width - 1].astype(wide)[None, None, :]  # [B, T, D]
    for lag in range(1, width):
        total = total + _at_lag(inputs, reach, lag, width) * w[width - 1 - lag].astype(wide)[None, None, :]
    return total if bias is None else total + bias.astype(wide)[None, None, :]


def _forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    reach: jax.Array | None,
    *,
    activation: str | None,
    launch: None,
) -> jax.Array:
    del launch
    total = _sum_of_taps(_inputs(x, state, w.shape[0]), w, bias, reach)
    return (jax.nn.silu(total) if activation == "silu" else total).astype(x.dtype)


def backward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    reach: jax.Array | None,
    dy: jax.Array,
    *,
    activation: str | None,
    launch: None,
) -> tuple[Any, Any, Any, Any]:
    """dx, dw, d_bias and d_state; None for what is None."""
    del launch
    width, wide = w.shape[0], accumulator(x.dtype)
    inputs = _inputs(x, state, width)
    d = dy.astype(wide)  # [B, T, D]
    if activation == "silu":
        total = _sum_of_taps(inputs, w, bias, reach)
        s = jax.nn.sigmoid(total)
        d = d * s * (1.0 + total * (1.0 - s))
    dw, d_inputs = [], jnp.zeros((), wide)
    for tap in range(width):
        lag = width - 1 - tap
        dw.append(jnp.sum(d * _at_lag(inputs, reach, lag, width), axis=(0, 1)))  # [D]
        reaching = d if reach is None or lag == 0 else jnp.where((reach >= lag)[:, :, None], d, 0.0)
        term = reaching * w[tap].astype(wide)[None, None, :]
        d_inputs = d_inputs + jnp.pad(term, ((0, 0), (tap, lag), (0, 0)))  # [B, W-1 + T, D]
    d_bias = None if bias is None else jnp.sum(d, axis=(0, 1)).astype(bias.dtype)
    d_state = None if state is None else d_inputs[:, : width - 1].astype(state.dtype)
    return d_inputs[:, width - 1 :].astype(x.dtype), jnp.stack(dw).astype(w.dtype), d_bias, d_state


_short_conv = with_gradient(_forward, backward)


def short_conv_xla(
    x: Float[Array, "B T D"],
    w: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    state: Float[Array, "B W-1 D"] | None,
    reach: Int[Array, "B T"] | None,
    *,
    activation: str | None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """y and the final state; a token t looks back reach_t tokens, or W-1 where reach is None."""
    return _short_conv(x, w, bias, state, reach, activation, None)
