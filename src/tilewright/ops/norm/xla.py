"""The norms in plain JAX: leading axes stay as they are, and XLA fuses each pass.

Floor: forward, x (and gate) read and y written once; backward, x, gate and dy read and their gradients written once.
XLA makes one fusion for the statistics and one for what uses them, so that x is read from memory once or twice.

The gradient is written by hand so that only the arguments are saved for it: autodiff would save x and xhat in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.norm.call import NormCall


def _row_mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=-1, keepdims=True)  # [..., 1]


def _normalised(call: NormCall) -> tuple[jax.Array, jax.Array]:
    """xhat [..., D] and 1 / sqrt(mean(x^2) + eps) [..., 1], in the accumulator's dtype."""
    x = call.x.astype(accumulator(call.x.dtype))
    x = x - _row_mean(x) if call.centered else x
    scale = jax.lax.rsqrt(_row_mean(jnp.square(x)) + call.eps)
    return x * scale, scale


def _activated(gate: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array]:
    """act(gate) and its slope, in the accumulator's dtype."""
    gate = gate.astype(accumulator(gate.dtype))
    s = jax.nn.sigmoid(gate)
    return (gate * s, s * (1.0 + gate * (1.0 - s))) if activation == "silu" else (s, s * (1.0 - s))


def _forward(call: NormCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    x = call.x
    xhat, _ = _normalised(call)
    y = xhat * jnp.broadcast_to(call.offset + call.w.astype(xhat.dtype), x.shape)
    y = y if call.bias is None else y + jnp.broadcast_to(call.bias.astype(xhat.dtype), x.shape)
    y = y if call.gate is None else y * _activated(call.gate, call.activation)[0]
    return y.astype(x.dtype), None


def _backward(call: NormCall, saved: None, dy: Any, launch: Launch) -> NormCall:
    """With d the gradient of xhat * (offset + w): dx = scale (d w - mean(d w xhat) xhat), less its mean if centered."""
    x, rows = call.x, tuple(range(call.x.ndim - 1))
    xhat, scale = _normalised(call)
    weights = jnp.broadcast_to(call.offset + call.w.astype(xhat.dtype), x.shape)
    d, d_gate = dy.astype(xhat.dtype), None
    if call.gate is not None:
        activated, slope = _activated(call.gate, call.activation)
        d_gate = d * xhat * weights * slope
        d = d * activated
    d_xhat = d * weights
    dx = d_xhat - xhat * _row_mean(d_xhat * xhat)
    dx = dx - _row_mean(d_xhat) if call.centered else dx
    d_bias = None if call.bias is None else jnp.sum(d, axis=rows)
    return call.gradients(x=dx * scale, gate=d_gate, w=jnp.sum(d * xhat, axis=rows), bias=d_bias)


IMPLEMENTATION = Implementation(forward=Pass(_forward), backward=Pass(_backward))
