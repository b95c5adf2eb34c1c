"""JAX's own products: `jnp.dot` and `jax.lax.ragged_dot` as XLA compiles them by default, and XLA's activation after them.

On GPUs XLA times its Triton products against cuBLAS and takes the faster one (`with_cublas.py` has cuBLAS alone), and
`ragged_dot` is a dense product over every group (`with_jax_ragged_dot_fusion.py` has the other lowering).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

DISTRIBUTIONS = ("jax", "jaxlib")


def unavailable() -> str | None:
    return None


def activated(z: jax.Array, activation: str | None) -> jax.Array:
    """The activation of a product, computed in float32 in z's place and rounded to its dtype."""
    if activation is None:
        return z
    wide = z.astype(jnp.float32)
    if activation == "swiglu":
        gate, value = jnp.split(wide, 2, axis=-1)
        return (jax.nn.silu(gate) * value).astype(z.dtype)
    return {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}[activation](wide).astype(z.dtype)


def refuse_quantized(*operands: Any) -> None:
    if any(hasattr(x, "scales") for x in operands):
        raise NotImplementedError("it has no product of quantised operands with a scale per block")


def matmul(
    x: Any, w: Any, *, bias: Any = None, activation: str | None = None, residual: Any = None
) -> tuple[jax.Array]:
    """`jnp.dot`, with operands and result of one dtype."""
    refuse_quantized(x, w)
    z = jnp.dot(x, w)
    if bias is not None:
        z = z + jnp.broadcast_to(bias, z.shape)
    y = activated(z, activation)
    return (y if residual is None else y + residual,)


def grouped_by(ragged_dot: Callable[..., Any]) -> Callable[..., tuple[Any]]:
    """A function like `jax.lax.ragged_dot` as an adapter's function."""

    def grouped_matmul(x: Any, w: Any, group_sizes: Any, *, activation: str | None = None) -> tuple[jax.Array]:
        refuse_quantized(x, w)
        return (activated(ragged_dot(x, w, group_sizes), activation),)

    return grouped_matmul


OPS = {"matmul": matmul, "grouped_matmul": grouped_by(jax.lax.ragged_dot)}
