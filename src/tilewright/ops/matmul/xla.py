"""`matmul` in plain JAX: XLA's product, its epilogue, and hand-written gradients.

The gradients are products of the inputs' dtype: JAX's own rule would multiply a float32 cotangent, at a fraction of the
speed of a bfloat16 one.

Quantised operands. A scale per output column is multiplied to the result, so weights enter the product as they are,
exact in bfloat16. With scales along K the weights are dequantised to x's dtype first, which rounds each of them once.
Where x is quantised too, products of a scale's block of K are computed in turn and added up in float32; int8 times int8
with one scale per row and column is a product of integers, which is exact.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.products import d_product, dequantized_weights, saved_dtype, weight_values
from tilewright.core.quantized import expanded_scales
from tilewright.ops.matmul.call import MatmulCall
from tilewright.pallas.arrays import dot_f32


def _column_scales(call: MatmulCall) -> jax.Array:
    """The scales of a w that has none along K, [1, P N]."""
    assert call.w_scales is not None
    _, parts, n = weight_values(call).shape
    return expanded_scales(call.w_scales[0], (parts, n)).reshape(1, parts * n)


def _product(call: MatmulCall) -> jax.Array:
    """x w in float32, [M, P N]."""
    if call.w_scales is None:
        return dot_f32(call.x, dequantized_weights(call, call.x.dtype), (1, 0))
    if call.x_scales is not None:
        return _quantized_product(call)
    if call.w_scales.shape[0] == 1:
        values = weight_values(call).reshape(call.x.shape[1], -1).astype(call.x.dtype)
        return dot_f32(call.x, values, (1, 0)) * _column_scales(call)
    return dot_f32(call.x, dequantized_weights(call, call.x.dtype), (1, 0))


def _quantized_product(call: MatmulCall) -> jax.Array:
    """x w of two quantised operands in float32, [M, P N]."""
    assert call.x_scales is not None
    assert call.w_scales is not None
    values, m = weight_values(call), call.x.shape[0]
    k, parts, n = values.shape
    x, w = call.x, values.reshape(k, parts * n)
    both_integers = x.dtype == w.dtype == jnp.int8

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        if both_integers:
            return jnp.dot(x, w, preferred_element_type=jnp.int32).astype(jnp.float32)
        return dot_f32(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), (1, 0))  # Exact for 8 bits.

    blocks = max(call.x_scales.shape[1], call.w_scales.shape[0])
    if blocks == 1:
        return product(x, w) * call.x_scales * _column_scales(call)
    depth = k // blocks

    def step(total: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, w, x_scales, w_scales = block
        w_scales = expanded_scales(w_scales, (parts, n)).reshape(1, parts * n)
        return total + product(x, w) * x_scales[:, None] * w_scales, None

    x_scales = jnp.broadcast_to(expanded_scales(call.x_scales, (m, blocks)), (m, blocks))
    w_scales = jnp.broadcast_to(
        expanded_scales(call.w_scales.reshape(call.w_scales.shape[0], -1), (blocks, parts * call.w_scales.shape[2])),
        (blocks, parts * call.w_scales.shape[2]),
    ).reshape(blocks, parts, -1)
    by_block = (
        jnp.moveaxis(x.reshape(m, blocks, depth), 1, 0),
        w.reshape(blocks, depth, parts * n),
        x_scales.T,
        w_scales,
    )
    return jax.lax.scan(step, jnp.zeros((m, parts * n), jnp.float32), by_block)[0]


def finished(call: MatmulCall, z: jax.Array) -> jax.Array:
    """y [M, N] of z = x w + bias [M, P, N]."""
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    y = y if call.residual is None else y + call.residual.astype(y.dtype)
    return y.astype(call.out_dtype)


def _forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    m, _, n = call.sizes
    z = _product(call).reshape(m, call.parts, n)
    z = z if call.bias is None else z + call.bias.astype(jnp.float32)[None]
    return finished(call, z), None if call.activation is None else z.astype(saved_dtype(call))


def _backward(call: MatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> MatmulCall:
    dz = d_product(call, saved, dy)
    gradients: dict[str, Any] = {}
    if call.x_scales is None:
        rounded = dz.reshape(dz.shape[0], -1).astype(call.x.dtype)
        gradients["x"] = dot_f32(rounded, dequantized_weights(call, call.x.dtype), (1, 1))
        if call.w_scales is None:
            gradients["w"] = dot_f32(call.x, rounded, (0, 0)).reshape(call.w.shape)
    if call.bias is not None:
        gradients["bias"] = jnp.sum(dz, axis=0)
    if call.residual is not None:
        gradients["residual"] = dy
    return call.gradients(**gradients)


def _backward_note(call: MatmulCall) -> str:
    if call.x_scales is not None:
        return "no products: quantised operands take no gradient"
    return "products of x's dtype, accumulated in float32"


IMPLEMENTATION = Implementation(
    forward=Pass(_forward, saved="*tokens . N"),
    backward=Pass(_backward, note=_backward_note),
)
