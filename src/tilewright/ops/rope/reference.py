"""Rotary embedding, plainly. The oracle of the family."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator


def apply_rope_reference(
    x: Float[Array, "B T H D"], cos: Float[Array, "_ T R"], sin: Float[Array, "_ T R"], *, layout: str
) -> Float[Array, "B T H D"]:
    """The first 2 R features of each head rotated in pairs, the others as they are."""
    pairs = cos.shape[2]
    rotated, passed = x[..., : 2 * pairs].astype(accumulator(x.dtype)), x[..., 2 * pairs :]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]  # [B or 1, T, 1, R]
    cos, sin = (jnp.broadcast_to(a, (*x.shape[:3], pairs)) for a in (cos, sin))
    if layout == "half":
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    one, other = first * cos - second * sin, second * cos + first * sin
    if layout == "half":
        joined = jnp.concatenate([one, other], axis=-1)
    else:
        joined = jnp.stack([one, other], axis=-1).reshape(rotated.shape)
    return jnp.concatenate([joined.astype(x.dtype), passed], axis=-1)
