"""`grouped_matmul`: rows sorted by group, each times its group's matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from tilewright.core.activation import ActivationName, check_activation, parts_of
from tilewright.core.arguments import FLOATING, output_dtype, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.products import check_columns
from tilewright.core.quantized import (
    QuantizedArray,
    as_array,
    check_operands,
    check_parts,
    result_dtype,
    stored_operand,
    transposed_again,
)
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall

OP = register(
    Op(
        name="grouped_matmul",
        family="tilewright.ops.grouped_matmul",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def grouped_matmul(
    x: Float[Array, "M K"] | QuantizedArray,
    w: Float[Array, "G K N"] | Float[Array, "G K P N"] | QuantizedArray,
    group_sizes: Int[Array, " G"],
    *,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "M N"]:
    r"""Each row of x times the matrix of its group, accumulated in float32.

        y_m = activation(x_m w_g)   for the group g of row m

    Rows are sorted by group: group 0 has the first group_sizes[0] rows, and so on. The sizes are known on the device
    only, and may be unequal or 0. Rows past the last group give zeros and take no gradient.

    Args:
      x: [M, K], float32 or bfloat16; or a `QuantizedArray` of int8 or float8, with scales as in `matmul`, where w is
        quantised too.
      w: [G, K, N], of x's dtype, or a `QuantizedArray` of that shape: int8, int4 or float8 weights with any scales. Where
        x and w both have several scales along K, their blocks of K must be equal. With "swiglu" w is [G, K, 2 N], or
        [G, K, 2, N], which can be sharded along N.
      group_sizes: [G] integers whose sum is at most M. A larger sum, or a negative size, is an error where the sizes are
        known; where they are traced, every row of y is NaN, and so are the gradients.
      activation: "silu", "gelu", "relu" or "swiglu", as in `matmul`.
      out_dtype: of y; x's by default, and bfloat16 where x is quantised.
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [M, N]. Gradients reach x and w; a quantised operand has none.
    """
    check_activation(activation)
    x_values, x_scales = stored_operand("x", x)
    w_values, w_scales = stored_operand("w", w)
    sizes = as_array("group_sizes", group_sizes)
    _validate(x, w, x_values, w_values, sizes, activation)
    parts = parts_of(activation)
    groups, rows = w_values.shape[:2]
    n = int(np.prod(w_values.shape[2:])) // parts
    out = output_dtype(out_dtype, result_dtype(x_values, x_scales))
    if w_scales is not None:
        check_parts(w, parts)
        if w_scales.shape[-1] == 1:
            w_scales = jnp.broadcast_to(w_scales, (*w_scales.shape[:2], parts * n))
        w_scales = w_scales.reshape(groups, w_scales.shape[1], parts, -1)
    if x_scales is not None and x_scales.shape[0] != x_values.shape[0]:
        x_scales = jnp.repeat(x_scales, x_values.shape[0] // x_scales.shape[0], axis=0)
    call = GroupedMatmulCall(
        x=x_values,
        w=w_values.reshape(groups, rows, parts, n),
        group_sizes=_as_int32(sizes),
        x_scales=x_scales,
        w_scales=w_scales,
        activation=activation,
        out_dtype=out,
        w_dtype=w.dtype if isinstance(w, QuantizedArray) else w_values.dtype.name,
    )
    if 0 in (*x_values.shape, *w_values.shape):
        return OP.run(call, implementation="reference", config=None)
    return OP.run(call, implementation=implementation, config=config)


def _as_int32(sizes: jax.Array) -> jax.Array:
    """The sizes as int32. Those that it cannot hold stay too large or negative, so that y is NaN: a cast would cut them."""
    largest, own = jnp.iinfo(jnp.int32).max, jnp.iinfo(sizes.dtype)
    return (jnp.clip(sizes, max(own.min, -1), largest) if own.max > largest else sizes).astype(jnp.int32)


def _validate(
    x: Any, w: Any, x_values: jax.Array, w_values: jax.Array, sizes: jax.Array, activation: str | None
) -> None:
    quantized_x, quantized_w = isinstance(x, QuantizedArray), isinstance(w, QuantizedArray)
    if x_values.ndim != 2:
        raise ValueError(f"x is {shown(x_values)}; it must be [M, K] of float32 or bfloat16: x.reshape(-1, K)")
    if not quantized_x and x_values.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x_values)}; it must be [M, K] of float32 or bfloat16: x.astype(jnp.bfloat16)")
    shape, k = tuple(w.shape) if quantized_w else w_values.shape, x_values.shape[1]
    if quantized_w and len(shape) == 4 and activation == "swiglu":
        flat = [*shape[:2], shape[2] * shape[3]]
        raise ValueError(
            f"w is quantised as {list(shape)}; quantised weights of 'swiglu' are [G, K, 2 N] = {flat}: pass "
            f"quantize(w.reshape({', '.join(map(str, flat))}), {w.dtype!r})"
        )
    if len(shape) != 3 and not (len(shape) == 4 and activation == "swiglu" and shape[2] == 2 and not quantized_w):
        raise ValueError(f"w has shape {list(shape)}; it must be [G, K, N], or [G, K, 2, N] with activation='swiglu'")
    if shape[1] != k:
        transposed = len(shape) == 3 and shape[2] == k
        remedy = transposed_again(w, "w.swapaxes(1, 2)") if transposed else f"pass a w [G, {k}, N]"
        raise ValueError(f"w has shape {list(shape)} and x has K={k} channels; {remedy}")
    if activation == "swiglu" and len(shape) == 3 and shape[2] % 2:
        raise ValueError(
            f"w has {shape[2]} columns; activation='swiglu' takes [G, K, 2 N], gate and value halves: pad N"
        )
    check_operands(x if quantized_x else x_values, w if quantized_w else w_values)
    if activation == "swiglu" and len(shape) == 3:
        check_columns("w", w_values, "G, K, 2, N", quantized=quantized_w)
    if sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        remedy = "jnp.bincount(group_of_row, length=G)" if sizes.size else "jnp.zeros(0, jnp.int32) for no groups"
        raise ValueError(f"group_sizes is {shown(sizes)}; it must be [G] = [{shape[0]}] integers: {remedy}")
    if sizes.shape[0] != shape[0]:
        raise ValueError(f"group_sizes has {sizes.shape[0]} groups and w has {shape[0]} matrices; they must be equal")
    if not isinstance(sizes, Tracer) and sizes.is_fully_addressable:
        known = np.asarray(sizes).tolist()  # Python's integers: their sum cannot overflow.
        if negative := [group for group, size in enumerate(known) if size < 0]:
            raise ValueError(f"group_sizes[{negative[0]}] is negative; a group without rows has size 0")
        if sum(known) > x_values.shape[0]:
            raise ValueError(
                f"group_sizes sum to {sum(known)} and x has {x_values.shape[0]} rows; they must sum to at most that: pass "
                f"all the rows of every group, sorted by group"
            )
