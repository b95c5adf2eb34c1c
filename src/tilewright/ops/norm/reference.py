"""The norms, plainly. The oracle of the family: every other implementation is held to it."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.norm.call import NormCall


def _forward(call: NormCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    """Computed in float32, and in float64 where the inputs are: that is the oracle."""
    wide = accumulator(call.x.dtype)
    x = call.x.astype(wide)
    if call.centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + call.eps)
    y = y * jnp.broadcast_to(call.offset + call.w.astype(wide), y.shape)
    if call.bias is not None:
        y = y + jnp.broadcast_to(call.bias.astype(wide), y.shape)
    if call.gate is not None:
        y = y * {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}[call.activation or ""](call.gate.astype(wide))
    return y.astype(call.x.dtype), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
