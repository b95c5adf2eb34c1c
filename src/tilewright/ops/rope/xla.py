"""Rotary embedding in plain JAX. One fusion reads and writes each element once, and XLA joins it to its neighbours.

The gradients are JAX's, of any order and in both modes: the transpose of a rotation is the rotation by the opposite angle,
and needs nothing but the tables. The interleaved layout swaps neighbours by reversing the pair axis, so it needs no strided
slice, which would transpose into a scatter.

There is no kernel: the op moves about 2 bytes per FLOP, which a fusion does at the memory's speed, and a kernel would
keep XLA from fusing it with the projection before it.
"""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.rope.call import RopeCall


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
    pairs = cos.shape[2]
    rotated, rest = x[..., : 2 * pairs].astype(accumulator(x.dtype)), x[..., 2 * pairs :]
    # [..., 2, R] or [..., R, 2]: either way, reversing the axis of two swaps the elements of each pair.
    half = layout == "half"
    shape = (*x.shape[:3], 2, pairs) if half else (*x.shape[:3], pairs, 2)
    axis = 3 if half else 4
    split = rotated.reshape(shape)
    swapped = jnp.flip(split, axis=axis)
    sign = jnp.asarray([-1.0, 1.0], split.dtype).reshape((1, 1, 1, 2, 1) if half else (1, 1, 1, 1, 2))
    cos, sin = (jnp.expand_dims(table[:, :, None, :], axis) for table in (cos, sin))
    cos, sin, sign = (jnp.broadcast_to(a, shape) for a in (cos, sin, sign))
    out = (split * cos + swapped * (sin * sign)).reshape(rotated.shape).astype(x.dtype)
    return out if rest.shape[-1] == 0 else jnp.concatenate([out, rest], axis=-1)


def _forward(call: RopeCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    return _rotated(call.x, call.cos, call.sin, call.layout), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
