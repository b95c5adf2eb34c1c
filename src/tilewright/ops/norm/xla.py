"""The norms in plain JAX: leading axes stay as they are, and XLA fuses each pass.

Floor: forward, x (and gate) read and y written once; backward, x, gate and dy read and their gradients written once. XLA
makes one fusion for the statistics and one for what uses them, so that x is read from memory once or twice.

The gradient is written by hand so that the arguments alone are kept for it: autodiff would keep x and xhat in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator
from tilewright.ops.norm.gradient import Norm, with_gradient

X = Float[Array, "*tokens D"]
Weights = Float[Array, " D"]


def _row_mean(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=-1, keepdims=True)  # [..., 1]


def _normalised(x: jax.Array, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """xhat [..., D] and 1 / sqrt(mean(x^2) + eps) [..., 1], wide."""
    x = x.astype(accumulator(x.dtype))
    x = x - _row_mean(x) if norm.centered else x
    scale = jax.lax.rsqrt(_row_mean(jnp.square(x)) + norm.eps)
    return x * scale, scale


def _activated(gate: jax.Array, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """act(gate) and its slope, wide."""
    gate = gate.astype(accumulator(gate.dtype))
    s = jax.nn.sigmoid(gate)
    return (gate * s, s * (1.0 + gate * (1.0 - s))) if norm.activation == "silu" else (s, s * (1.0 - s))


def _forward(x: Any, gate: Any, w: Any, bias: Any, norm: Norm, launch: None) -> jax.Array:
    del launch
    xhat, _ = _normalised(x, norm)
    y = xhat * jnp.broadcast_to(norm.offset + w.astype(xhat.dtype), x.shape)
    y = y if bias is None else y + jnp.broadcast_to(bias.astype(xhat.dtype), x.shape)
    y = y if gate is None else y * _activated(gate, norm)[0]
    return y.astype(x.dtype)


def _backward(x: Any, gate: Any, w: Any, bias: Any, dy: Any, norm: Norm, launch: None) -> tuple[Any, Any, Any, Any]:
    """With d the gradient of xhat * (offset + w): dx = scale (d w - mean(d w xhat) xhat), less its mean if centered."""
    del launch
    rows = tuple(range(x.ndim - 1))
    xhat, scale = _normalised(x, norm)
    weights = jnp.broadcast_to(norm.offset + w.astype(xhat.dtype), x.shape)
    d, d_gate = dy.astype(xhat.dtype), None
    if gate is not None:
        activated, slope = _activated(gate, norm)
        d_gate = (d * xhat * weights * slope).astype(gate.dtype)
        d = d * activated
    dw = jnp.sum(d * xhat, axis=rows).astype(w.dtype)
    d_bias = None if bias is None else jnp.sum(d, axis=rows).astype(bias.dtype)
    d_xhat = d * weights
    dx = d_xhat - xhat * _row_mean(d_xhat * xhat)
    dx = dx - _row_mean(d_xhat) if norm.centered else dx
    return (dx * scale).astype(x.dtype), d_gate, dw, d_bias


_with_gradient = with_gradient(_forward, _backward)


def _norm(x: X, gate: X | None, w: Weights, bias: Weights | None, *, norm: Norm) -> X:
    return _with_gradient(x, gate, w, bias, norm, None)


rms_norm_xla = layer_norm_xla = gated_rms_norm_xla = _norm
