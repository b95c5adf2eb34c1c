"""Activations of a product z = x w + bias, and their derivatives, on float32 values inside and outside of kernels.

z comes in parts: one, and two for swiglu, whose result is silu of the first times the second.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tilewright.core.nearest import did_you_mean

ActivationName = Literal["silu", "gelu", "relu", "swiglu"]
ACTIVATIONS: tuple[str, ...] = get_args(ActivationName)

_GELU_SLOPE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
Parts = tuple[jax.Array, ...]


def parts_of(activation: str | None) -> int:
    """The number of parts of z."""
    return 2 if activation == "swiglu" else 1


def activate(activation: str | None, z: Parts, *, sigmoid: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """The activation of z. gelu is the tanh form, as in `jax.nn.gelu`.

    `sigmoid`: a kernel's own. gelu is computed with it then: (1 + tanh u) / 2 is the sigmoid of 2 u.
    """
    if activation is None:
        return z[0]
    if activation == "relu":
        return jnp.maximum(z[0], 0.0)
    if activation == "gelu":
        u = _GELU_SLOPE * (z[0] + _GELU_CUBE * z[0] * z[0] * z[0])
        return 0.5 * z[0] * (1.0 + jnp.tanh(u)) if sigmoid is None else z[0] * sigmoid(2.0 * u)
    silu = z[0] * (sigmoid or jax.nn.sigmoid)(z[0])
    return silu if activation == "silu" else silu * z[1]


def pull_back(activation: str | None, z: Parts, dy: jax.Array) -> Parts:
    """The gradient of z, from z and the gradient of its activation."""
    if activation is None:
        return (dy,)
    if activation == "relu":
        return (jnp.where(z[0] > 0.0, dy, jnp.zeros_like(dy)),)
    if activation == "gelu":
        square = z[0] * z[0]
        tanh = jnp.tanh(_GELU_SLOPE * z[0] * (1.0 + _GELU_CUBE * square))
        slope = _GELU_SLOPE * (1.0 + 3.0 * _GELU_CUBE * square)
        return (dy * (0.5 * (1.0 + tanh) + 0.5 * z[0] * (1.0 - tanh * tanh) * slope),)
    sigmoid = jax.nn.sigmoid(z[0])
    d_silu = sigmoid * (1.0 + z[0] * (1.0 - sigmoid))
    if activation == "silu":
        return (dy * d_silu,)
    return dy * z[1] * d_silu, dy * z[0] * sigmoid


def check_activation(activation: Any) -> None:
    """Raises where this is not an activation."""
    if activation is not None and activation not in ACTIVATIONS:
        known, hint = ", ".join(map(repr, ACTIVATIONS)), did_you_mean(activation, ACTIVATIONS)
        raise ValueError(f"activation={activation!r} is not an activation; use one of {known}, or None{hint}")
