"""`matmul`: a product with bias, activation and residual, of float and of quantised operands."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

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
from tilewright.ops.matmul.call import MatmulCall

OP = register(
    Op(
        name="matmul",
        family="tilewright.ops.matmul",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def matmul(
    x: Float[Array, "*tokens K"] | QuantizedArray,
    w: Float[Array, "K N"] | Float[Array, "K P N"] | QuantizedArray,
    *,
    bias: Float[Array, " N"] | Float[Array, "P N"] | None = None,
    activation: ActivationName | None = None,
    residual: Float[Array, "*tokens N"] | None = None,
    out_dtype: Any = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens N"]:
    r"""A matrix product with an epilogue, accumulated in float32.

        y = activation(x w + bias) + residual

    Products of float32 arrays are computed in float32, whatever JAX's default precision is.

    Args:
      x: [..., K], float32 or bfloat16; or a `QuantizedArray` of int8 or float8 where w is quantised too. It has a scale
        per row or one for all rows, for all of K or per block of K.
      w: [K, N], of x's dtype, or a `QuantizedArray` of that shape (`tilewright.quantize`): int8, int4 or float8 weights
        with any scales. Where x and w both have several scales along K, their blocks of K must be equal. With "swiglu" w
        is [K, 2 N], or [K, 2, N], which can be sharded along N.
      bias: [N]; [2 N] or [2, N] with "swiglu".
      activation: "silu", "gelu" (the tanh form), "relu", or "swiglu": silu of the first half of the columns times the
        second half. None for none.
      residual: [..., N], added last.
      out_dtype: of y; x's by default, and bfloat16 where x is quantised.
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [..., N]. Gradients reach x, w, bias and residual; a quantised operand has none.
    """
    check_activation(activation)
    x_values, x_scales = stored_operand("x", x)
    w_values, w_scales = stored_operand("w", w)
    bias = None if bias is None else as_array("bias", bias)
    residual = None if residual is None else as_array("residual", residual)
    w_dtype = w.dtype if isinstance(w, QuantizedArray) else w_values.dtype.name
    _validate_operands(x, w, x_values, w_values, activation)
    parts = parts_of(activation)
    n = w_values.shape[-1] * (w_values.shape[-2] if w_values.ndim == 3 else 1) // parts
    _validate_epilogue(x_values, bias, residual, n, parts)
    out = output_dtype(out_dtype, result_dtype(x_values, x_scales))
    if w_scales is not None:
        check_parts(w, parts)
        rows = w_scales.shape[0]
        # One scale for all columns is one per column, so that both can be sharded alike.
        per_column = w_scales.shape[-1] == 1 and w_scales.ndim == 2
        w_scales = jnp.broadcast_to(w_scales, (rows, parts * n)) if per_column else w_scales
        w_scales = w_scales.reshape(rows, parts, -1)
    if x_scales is not None and x_scales.shape[:-1] != x_values.shape[:-1]:
        x_scales = jnp.broadcast_to(
            jnp.repeat(x_scales, x_values.shape[-2] // x_scales.shape[-2], axis=-2),
            (*x_values.shape[:-1], x_scales.shape[-1]),
        )
    call = MatmulCall(
        x=x_values,
        w=w_values.reshape(w_values.shape[0], parts, n),
        bias=None if bias is None else bias.reshape(parts, n),
        residual=residual,
        x_scales=x_scales,
        w_scales=w_scales,
        activation=activation,
        out_dtype=out,
        w_dtype=w_dtype,
    )
    if 0 in (*x_values.shape, *w_values.shape):
        return OP.run(call, implementation="reference", config=None)
    return OP.run(call, implementation=implementation, config=config)


def _validate_operands(x: Any, w: Any, x_values: jax.Array, w_values: jax.Array, activation: str | None) -> None:
    quantized_x, quantized_w = isinstance(x, QuantizedArray), isinstance(w, QuantizedArray)
    if x_values.ndim < 1:
        raise ValueError(f"x is {shown(x_values)}, a scalar; it must be [..., K]: pass a row of K channels")
    if not quantized_x and x_values.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x_values)}; it must be [..., K] of float32 or bfloat16: x.astype(jnp.bfloat16)")
    k, shape = x_values.shape[-1], tuple(w.shape) if quantized_w else w_values.shape
    if quantized_w and len(shape) == 3 and activation == "swiglu":
        flat = [shape[0], shape[1] * shape[2]]
        raise ValueError(
            f"w is quantised as {list(shape)}; quantised weights of 'swiglu' are [K, 2 N] = {flat}: pass "
            f"quantize(w.reshape({flat[0]}, {flat[1]}), {w.dtype!r})"
        )
    if len(shape) != 2 and not (len(shape) == 3 and activation == "swiglu" and shape[1] == 2 and not quantized_w):
        raise ValueError(f"w has shape {list(shape)}; it must be [K, N], or [K, 2, N] with activation='swiglu'")
    if shape[0] != k:
        transposed = len(shape) == 2 and shape[1] == k
        remedy = transposed_again(w, "w.T") if transposed else f"pass a w with {k} rows"
        raise ValueError(f"w has shape {list(shape)} and x has K={k} channels; {remedy}")
    if activation == "swiglu" and len(shape) == 2 and shape[1] % 2:
        raise ValueError(f"w has {shape[1]} columns; activation='swiglu' takes [K, 2 N], gate and value halves: pad N")
    check_operands(x if quantized_x else x_values, w if quantized_w else w_values)
    if activation == "swiglu" and len(shape) == 2:
        check_columns("w", w_values, "K, 2, N", quantized=quantized_w)


def _validate_epilogue(x: jax.Array, bias: jax.Array | None, residual: jax.Array | None, n: int, parts: int) -> None:
    shapes = [(n,)] if parts == 1 else [(parts * n,), (parts, n)]
    if bias is not None and (bias.shape not in shapes or bias.dtype.name not in FLOATING):
        raise ValueError(
            f"bias is {shown(bias)}; it must be {' or '.join(str(list(each)) for each in shapes)}, floating"
        )
    if bias is not None and parts == 2 and bias.ndim == 1:
        check_columns("bias", bias, "2, N")
    if residual is not None and (residual.shape != (*x.shape[:-1], n) or residual.dtype.name not in FLOATING):
        raise ValueError(f"residual is {shown(residual)}; it must be {[*x.shape[:-1], n]}, floating, as y is")
