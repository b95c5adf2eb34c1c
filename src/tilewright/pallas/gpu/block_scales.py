"""Products of quantised operands on Hopper: what their scales may be, and how a tile's products are multiplied by them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu import weight_only
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.registers import along_rows, load_along_columns, load_row_vector
from tilewright.pallas.gpu.staging import WIDTH
from tilewright.pallas.gpu.wgmma import not_bfloat16

DEPTH = 128
"""Values of the contracted axis that share a scale, and that a step of the main loop has."""


def refused_operands(call: Any, config: Any, *, parts: int = 1) -> str | None:
    """Why the operands of a call of products (core/products.py) cannot be multiplied here, in tiles of so many parts; or
    None.
    """
    x, w, x_scales, w_scales = call.x, call.w, call.x_scales, call.w_scales
    if x_scales is None and (reason := not_bfloat16(x, ("x", "w"))):
        return reason
    if config.block_m < 64 and not weight_only.converts(call, config):
        why = "w is not quantised, or x is" if w_scales is None or x_scales is not None else weight_only.refused(call)
        return f"block_m={config.block_m} is for quantised weights that the kernel converts, and {why}; use block_m=128"
    if not weight_only.converts(call, config) and config.block_n % (WIDTH * parts):
        return (
            f"block_n={config.block_n} has {config.block_n // parts} columns of gates, and a tile is stored in parts of "
            f"{WIDTH}; use block_n={2 * WIDTH} or {4 * WIDTH}"
        )
    if x_scales is None:
        return None
    if call.w_dtype == "int4":
        return "w is int4, and Hopper's tensor cores multiply 8 bits; use quantize(w, 'int8'), or implementation='xla'"
    steps, n = -(-x.shape[-1] // DEPTH), w.shape[-1]
    use = "use quantize(x, dtype, block=(1, 128)) and quantize(w, dtype, block=(128, 128)), or implementation='xla'"
    if x.dtype != w.dtype:
        return f"x is {x.dtype.name} and w is {w.dtype.name}, and the tensor cores multiply one kind at a time; {use}"
    if x_scales.shape[-1] not in (1, steps) or w_scales.shape[-3] not in (1, steps):
        return f"it takes scales per {DEPTH} of K, or one for all of K; {use}"
    if w_scales.shape[-1] not in (n, n // DEPTH if n % DEPTH == 0 else n):
        return f"it takes scales of w per column, or per {DEPTH} columns; {use}"
    if config.block_n > DEPTH and config.block_n % DEPTH and w_scales.shape[-1] != n:
        return f"block_n={config.block_n} has columns of two blocks of scales; use block_n={DEPTH} or {2 * DEPTH}"
    return None


def scale_operands(gemm: Gemm, x_scales: jax.Array, w_scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scales as the kernel reads them: x's [KX, M] in whole blocks, and w's with N in whole blocks, or 128ths of it."""
    x_scales = padded(x_scales.T, 1, gemm.block_m)
    per_column = w_scales.shape[-1] == gemm.n
    return x_scales, padded(w_scales, w_scales.ndim - 1, gemm.width) if per_column else w_scales


def scaled_at_end(gemm: Gemm, x_scales_ref: Any, w_scales_ref: Any) -> bool:
    """Whether sums are exact and scales do not differ along K, so that `Gemm.main_loop` multiplies them once."""
    if x_scales_ref is None or gemm.sum_dtype != jnp.int32:
        return False
    return x_scales_ref.shape[0] == 1 and w_scales_ref.shape[-3] == 1


def block_scale(gemm: Gemm, x_scales_ref: Any, w_scales_ref: Any, step: Any, row: Any, column: Any) -> Any:
    """A function that multiplies the products of one step by their scales, as `Gemm.main_loop` takes it.

    `row` and `column` are those of the tile; w_scales_ref is [KS, P, NS]. All loads are issued here.
    """
    x_step = step if x_scales_ref.shape[0] > 1 else 0
    w_step = step if w_scales_ref.shape[0] > 1 else 0
    of_rows = load_row_vector(x_scales_ref.at[x_step, pl.ds(row, gemm.rows)])
    if w_scales_ref.shape[-1] >= gemm.n:  # One per column.

        def per_column(part: int, first: int, x: jax.Array) -> jax.Array:
            columns = w_scales_ref.at[w_step, part, pl.ds(column + first, x.shape[1])]
            shape = (gemm.rows, x.shape[1])
            return x * along_rows(of_rows, shape) * load_along_columns(columns, shape)

        return per_column
    # A tile may have columns of two blocks, and the last one of none.
    first_block, last_block = lax.div(column, jnp.int32(DEPTH)), w_scales_ref.shape[-1] - 1
    blocks = [jnp.minimum(first_block + i, last_block) for i in range(pl.cdiv(gemm.width, DEPTH))]
    of_blocks = [[w_scales_ref[w_step, part, block] for block in blocks] for part in range(gemm.parts)]

    def per_block(part: int, first: int, x: jax.Array) -> jax.Array:
        # One number per row, so that a product is one multiplication. It is computed here, where the products are done:
        # before them, it would wait for the loads.
        return x * along_rows(of_rows * of_blocks[part][first // DEPTH], x.shape)

    return per_block
