"""The norms, plainly. The oracle of the family: every other implementation is held to it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator
from tilewright.ops.norm.gradient import Norm

X = Float[Array, "*tokens D"]
Weights = Float[Array, " D"]


def _norm(x: X, gate: X | None, w: Weights, bias: Weights | None, *, norm: Norm) -> X:
    """Computed in float32, and in float64 where the inputs are: that is the oracle."""
    wide = accumulator(x.dtype)
    x32 = x.astype(wide)
    if norm.centered:
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + norm.eps)
    y = y * jnp.broadcast_to(norm.offset + w.astype(wide), y.shape)
    if bias is not None:
        y = y + jnp.broadcast_to(bias.astype(wide), y.shape)
    if gate is not None:
        y = y * {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[norm.activation or ""](gate.astype(wide))
    return y.astype(x.dtype)


rms_norm_reference = layer_norm_reference = gated_rms_norm_reference = _norm
