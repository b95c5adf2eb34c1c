"""What calls of products share, whether there is one matrix w [K, P, N] or one per group, [G, K, P, N].

Such a call has x [M, K], w, `x_scales` and `w_scales` (None where they are not quantised), `w_dtype` and `activation`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import parts_of, pull_back
from tilewright.core.partitioning import explicit_axes
from tilewright.core.quantized import expanded_scales, unpacked


def weight_values(call: Any) -> Any:
    """The values of w as [..., K, P, N]: floating, float8 or int8."""
    if call.w_dtype != "int4":
        return call.w
    *outer, rows, parts, n = call.w.shape
    return unpacked(call.w.reshape(*outer, rows, parts * n)).reshape(*outer, 2 * rows, parts, n)


def dequantized_weights(call: Any, dtype: Any) -> jax.Array:
    """w as [..., K, P N] in `dtype`, scales included."""
    values = dequantized_parts(call, dtype)
    *outer, k, parts, n = values.shape
    return values.reshape(*outer, k, parts * n)


def dequantized_parts(call: Any, dtype: Any) -> jax.Array:
    """w as [..., K, P, N] in `dtype`, scales included. Columns that are sharded stay so."""
    values = weight_values(call)
    *_, k, _, n = values.shape
    if call.w_scales is not None:
        scales = expanded_scales(jnp.moveaxis(call.w_scales, -2, -3), (k, n))  # [..., P, K or 1, N]
        values = values.astype(jnp.float32) * jnp.moveaxis(scales, -3, -2)
    return values.astype(dtype)


def check_columns(name: str, x: Any, axes: str, *, quantized: bool = False) -> None:
    """Raises where the columns of an array of gates and values side by side are sharded over an Explicit mesh axis.

    `axes` are those of the array with gates and values apart, such as "K, 2, N".
    """
    if explicit_axes(x)[-1]:
        remedy = f"jax.sharding.reshard({name}, ...) without it" if quantized else f"it as [{axes}]"
        raise ValueError(
            f"{name} [{axes.replace('2, N', '2 N')}] is sharded along its columns, which cuts gates from values; pass "
            f"{remedy}"
        )


def saved_dtype(call: Any) -> Any:
    """The dtype that z = x w is saved in for the backward pass."""
    return jnp.float32 if call.x_scales is not None else call.x.dtype


def d_product(call: Any, saved: Any, dy: jax.Array) -> jax.Array:
    """The gradient of z, float32 [M, P, N], from the z that was saved where there is an activation."""
    dy = dy.astype(jnp.float32)
    if call.activation is None:
        return dy[:, None]
    z = tuple(saved[:, part].astype(jnp.float32) for part in range(parts_of(call.activation)))
    dz = tuple(each[:, None] for each in pull_back(call.activation, z, dy))
    if len(dz) == 1:
        return dz[0]
    # Not a concatenation, which XLA computes at half of the memory's bandwidth on a GPU.
    part = jax.lax.broadcasted_iota(jnp.int32, saved.shape, 1)
    return jnp.where(part == 0, dz[0], dz[1])
