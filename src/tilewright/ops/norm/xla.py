"""The norms in plain JAX: leading axes stay as they are, and XLA fuses each pass.

Floor: forward, x (and gate) read and y written once; backward, x, gate and dy read and their gradients written once.
XLA makes one fusion for the statistics and one for what uses them, so that x is read from memory once or twice.

The gradients are JAX's, of any order and in both modes. They save the arguments only, and compute the rest again: autodiff
alone would save x and xhat in float32.
"""

import functools

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.norm.call import NormCall


def _row_mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=-1, keepdims=True)  # [..., 1]


def activate(gate: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array]:
    """act(gate) and its slope, in the accumulator's dtype."""
    gate = gate.astype(accumulator(gate.dtype))
    s = jax.nn.sigmoid(gate)
    return (gate * s, s * (1.0 + gate * (1.0 - s))) if activation == "silu" else (s, s * (1.0 - s))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _normalised(x: jax.Array, eps: float) -> jax.Array:
    """xhat = x / sqrt(mean(x^2) + eps)."""
    return x * jax.lax.rsqrt(_row_mean(jnp.square(x)) + eps)


@_normalised.defjvp
def _(eps: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """By hand: JAX's derivative goes through the cube of the scale, and is less accurate."""
    (x,), (dx,) = primals, tangents
    scale = jax.lax.rsqrt(_row_mean(jnp.square(x)) + eps)
    xhat = x * scale
    return xhat, scale * (dx - xhat * _row_mean(dx * xhat))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _normed(call: NormCall) -> jax.Array:
    x = call.x.astype(accumulator(call.x.dtype))
    x = x - _row_mean(x) if call.centered else x
    y = _normalised(x, call.eps)
    y = y * jnp.broadcast_to(call.offset + call.w.astype(y.dtype), x.shape)
    y = y if call.bias is None else y + jnp.broadcast_to(call.bias.astype(y.dtype), x.shape)
    y = y if call.gate is None else y * activate(call.gate, call.activation)[0]
    return y.astype(call.x.dtype)


def _forward(call: NormCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    return _normed(call), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
