"""The gradient of swiglu on a GPU, in one pass over memory.

    d gates = dy values silu'(gates)        d values = dy silu(gates)

Floor: z [M, 2, N] and dy [M, N] are read once, and dz [M, 2, N] is written once. Here: that. A thread block has a part of
one row.

Tried and dropped: XLA, which writes one of the two gradients to memory as float32 first, since it does not compute an
exponential twice: on an H200 0.60 ms for M = 16,384 and N = 6,144, whose bytes need 0.21 ms.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.activation import pull_back
from tilewright.core.products import d_product
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import store

_THREADS = 128
_LEAST = 2 * _THREADS  # Columns of a thread block: two adjacent ones per thread.
_MOST = 16 * _THREADS


def rounded_d_product(call: Any, saved: Any, dy: jax.Array) -> jax.Array:
    """The gradient of z for a call of products (core/products.py): bfloat16 [M, P N]."""
    dz = _d_swiglu(saved, dy) if call.activation == "swiglu" and _takes(saved, dy) else d_product(call, saved, dy)
    return dz.reshape(dy.shape[0], -1).astype(jnp.bfloat16)


def _takes(z: jax.Array, dy: jax.Array) -> bool:
    return z.dtype == dy.dtype == jnp.bfloat16 and z.shape[0] > 0 and z.shape[2] > 0 and z.shape[2] % _LEAST == 0


def _d_swiglu(z: jax.Array, dy: jax.Array) -> jax.Array:
    """dz [M, 2, N], from z and dy [M, N]."""
    rows, _, n = z.shape
    columns = next(size for size in range(min(n, _MOST), 0, -_LEAST) if n % size == 0)
    outputs = run_kernel(
        _kernel,
        name="swiglu_gradient",
        inputs={"z": z, "dy": dy},
        outputs={"dz": jax.ShapeDtypeStruct(z.shape, z.dtype)},
        scratch={},
        grid={"column": n // columns, "row": rows},  # The last axis alone may have more than 65,535.
    )
    return outputs["dz"]


def _kernel(
    *,
    # inputs
    z_ref,  # [M, 2, N]
    dy_ref,  # [M, N]
    # outputs
    dz_ref,  # [M, 2, N]
):
    columns = dy_ref.shape[1] // lax.axis_size("column")
    vector = math.gcd(columns // _THREADS, 8)
    layout = plgpu.Layout.WG_STRIDED((columns,), vec_size=vector)
    row, own = lax.axis_index("row"), pl.ds(lax.axis_index("column") * columns, columns)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    z = load(z_ref.at[row, 0, own]), load(z_ref.at[row, 1, own])
    for part, dz in enumerate(pull_back("swiglu", z, load(dy_ref.at[row, own]))):
        store(dz_ref.at[row, part, own], dz.astype(dz_ref.dtype))
