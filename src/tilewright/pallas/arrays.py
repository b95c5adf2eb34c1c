"""Arrays around kernels and inside of them: padding, and products that accumulate in float32."""

import jax
import jax.numpy as jnp


def padded(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros behind it along an axis, to a multiple."""
    size = array.shape[axis]
    missing = -(-size // multiple) * multiple - size
    if isinstance(missing, int) and missing == 0:  # A size may be symbolic (`jax.export`).
        return array
    return jnp.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])


def dot_f32(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a and b contracted over one axis each; accumulated in float32, and multiplied in float32 where they are."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
