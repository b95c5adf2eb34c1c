"""Products of quantised operands on Hopper: what their scales may be, and how a tile's products are multiplied by them."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class BlockScale:
    """The scales of one step of a tile's products, as `Gemm.main_loop` takes them (`StepScale`)."""

    gemm: Gemm
    x_scales_ref: Any  # [KX, M]
    w_scales_ref: Any  # [KS, P, NS]
    step: Any
    row: Any
    """The consumer's first row."""
    column: Any
    """The tile's first column of each part."""

    @property
    def _w_step(self) -> Any:
        return self.step if self.w_scales_ref.shape[0] > 1 else 0

    @property
    def _per_column(self) -> bool:
        return self.w_scales_ref.shape[-1] >= self.gemm.n

    def load(self) -> tuple[jax.Array, list[list[jax.Array]]]:
        """Returns x's scale of each row, and for each part w's of each block of columns; no such blocks where w has a scale
        per column, since all of those would take too many registers.
        """
        x_step = self.step if self.x_scales_ref.shape[0] > 1 else 0
        of_rows = load_row_vector(self.x_scales_ref.at[x_step, pl.ds(self.row, self.gemm.rows)])
        if self._per_column:
            return of_rows, []
        # A tile may have columns of two blocks, and the last one of none.
        first, last = lax.div(self.column, jnp.int32(DEPTH)), self.w_scales_ref.shape[-1] - 1
        blocks = [jnp.minimum(first + i, last) for i in range(pl.cdiv(self.gemm.width, DEPTH))]
        parts = range(self.gemm.parts)
        return of_rows, [[self.w_scales_ref[self._w_step, part, block] for block in blocks] for part in parts]

    def factors(self, loaded: Any) -> Any:
        """Returns one number per row and block of columns, so that a product is multiplied once; x's scales where w has one
        per column.
        """
        of_rows, of_blocks = loaded
        return of_rows if self._per_column else [[of_rows * block for block in blocks] for blocks in of_blocks]

    def apply(self, factors: Any, part: int, first: int, x: jax.Array) -> jax.Array:
        """Returns the products x [rows, columns] of a part, from its column `first` on, times their scales."""
        if self._per_column:
            shape = (self.gemm.rows, x.shape[1])
            columns = self.w_scales_ref.at[self._w_step, part, pl.ds(self.column + first, shape[1])]
            return x * along_rows(factors, shape) * load_along_columns(columns, shape)
        return x * along_rows(factors[part][first // DEPTH], x.shape)
