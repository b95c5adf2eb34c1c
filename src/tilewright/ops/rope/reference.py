"""Rotary embedding, plainly. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.rope.call import RopeCall


def _forward(call: RopeCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    x, pairs = call.x, call.cos.shape[2]
    rotated, rest = x[..., : 2 * pairs].astype(accumulator(x.dtype)), x[..., 2 * pairs :]
    tables = (table[:, :, None, :] for table in (call.cos, call.sin))  # [B or 1, T, 1, R]
    cos, sin = (jnp.broadcast_to(table, (*x.shape[:3], pairs)) for table in tables)
    if call.layout == "half":
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    one, other = first * cos - second * sin, second * cos + first * sin
    if call.layout == "half":
        joined = jnp.concatenate([one, other], axis=-1)
    else:
        joined = jnp.stack([one, other], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([joined.astype(x.dtype), rest], axis=-1), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
