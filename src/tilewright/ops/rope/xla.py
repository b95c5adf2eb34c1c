"""Rotary embedding in plain JAX. Each element is read and written once, in one fusion, which XLA joins to its neighbours.

The gradient is the rotation by the opposite angle, and keeps nothing but the tables; autodiff would keep no more, but
would transpose the slices of pairs into scatters for the interleaved layout. The interleaved layout swaps neighbours
with a reversal of the pair axis, so no strided slice is made.

There is no kernel: it moves 2 bytes a FLOP or so, which a fusion does at the memory's speed, and a kernel of its own would
keep XLA from joining it to the projection before it.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> jax.Array:
    pairs = cos.shape[2]
    rotated, passed = x[..., : 2 * pairs].astype(accumulator(x.dtype)), x[..., 2 * pairs :]
    # [..., 2, R] or [..., R, 2]: either way the other of a pair is a reversal of the axis of two.
    half = layout == "half"
    shape = (*x.shape[:3], 2, pairs) if half else (*x.shape[:3], pairs, 2)
    axis = 3 if half else 4
    split = rotated.reshape(shape)
    swapped = jnp.flip(split, axis=axis)
    sign = jnp.asarray([-1.0, 1.0], split.dtype).reshape((1, 1, 1, 2, 1) if half else (1, 1, 1, 1, 2))
    cos, sin = (jnp.expand_dims(table[:, :, None, :], axis) for table in (cos, sin))
    cos, sin, sign = (jnp.broadcast_to(a, shape) for a in (cos, sin, sign))
    out = (split * cos + swapped * (sin * sign)).reshape(rotated.shape).astype(x.dtype)
    return out if passed.shape[-1] == 0 else jnp.concatenate([out, passed], axis=-1)


def _keep(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rotate(x, cos, sin, layout), (cos, sin)


def _pull(
    layout: str, tables: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    cos, sin = tables
    return _rotate(gradient, cos, -sin, layout), jnp.zeros_like(cos), jnp.zeros_like(sin)


_rotate.defvjp(_keep, _pull)


def apply_rope_xla(
    x: Float[Array, "B T H D"], cos: Float[Array, "_ T R"], sin: Float[Array, "_ T R"], *, layout: str
) -> Float[Array, "B T H D"]:
    """The first 2 R features of each head rotated in pairs, the others as they are."""
    return _rotate(x, cos, sin, layout)
