"""Products of few bfloat16 rows on Hopper, as decoding has them: the weights are read once, by all multiprocessors.

    products = FewRows(chip=chip, m=m, k=k, columns=(n,), rows=16, stages=5, splits=8)
    z = products.run(x, [w], name="matmul_few_rows")  # [splits, m, n], to be summed over the splits

Floor: every weight is read once, 2 K N bytes; with few rows nothing else matters. Here: that, and x once per 128 columns,
from the L2 cache.

Blocking: the main loop of pallas/gpu/gemm.py computes z^T = w^T x^T, so a tile has 128 columns of w and 16 to 64 rows of
x, and few rows waste little. Both operands are read as they lie in memory. A matrix has fewer tiles than the chip has
multiprocessors, so the contracted axis is divided between `splits` thread blocks, and each writes a float32 sum of its own.
Whoever reads z adds them up in order, which gives the same bits each time, and does what follows in the same pass.

Several matrices of the same rows are one launch: each tile belongs to one of them, so none is copied. The columns of each
but the last are whole tiles then, and z has them side by side.

A single row needs no padding where the splits are a multiple of eight: copies of tiles take whole eights of rows, so x
[1, k] is read as [8, k / 8]. A split lies in one of these rows, and only that one of its results is stored.

Tried and dropped:
- XLA's own product. For one row it writes the elementwise products of x and w to memory and adds them up in a second
  kernel; for more rows it copies the weights of a layer out of a stack of layers first.
- programmatic dependent launches (`griddepcontrol`), in a chain of `decode_residual`, a product with swiglu and
  `decode_residual` for 64 rows (H200, jax 0.11.2, D 2048, F 5376). XLA puts the kernels into CUDA graphs, where the chain
  takes 35.0 to 35.5 us; launched one by one they take 41.5 to 42.4 us. One by one, with each kernel waiting for the one
  before it as its first step: 33.6 to 35.5 us, and where kernels release the next one earlier 34.9 to 37.8 us. Where the
  products prefetch weights into the L2 cache before they wait: 36.6 to 38.3 us, and 38.8 to 40.8 us in graphs.
- leaving the registers per thread to the compiler (58 for 64 rows), instead of moving them from the producer to the
  consumers: the same chain is busy for 32.0 us instead of 32.1 us.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.pallas.gpu.gemm import Gemm, Plan
from tilewright.pallas.gpu.kernel import aligned, smem_bytes, whole, whole_shape
from tilewright.pallas.gpu.pipeline import OneOfSeveral, Pipeline
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.staging import store_transposed

TILE_ROWS = (16, 32, 64)
"""The rows of x that a tile may have."""
TILE_COLUMNS = 128
"""The columns of w of a tile: 64 for each of two consumer warpgroups."""

_EIGHT = 8  # Rows that a tile in shared memory is made of.
_DEPTH = 128  # Of the contracted axis, per step: 32 KB of weights.
_STAGE_BYTES = 200 * 1024  # Of all stages together.
_MOST_SPLITS = 16
_SUM_COST = 0.125  # Of one more sum to add up, in steps.


def chosen_tiles(chip: Chip, m: int, k: int, columns: int) -> tuple[int, int, int]:
    """The rows of a tile, the stages and the splits for m rows, at most 64 of them."""
    rows = next(each for each in TILE_ROWS if m <= each)
    tiles, steps = pl.cdiv(columns, TILE_COLUMNS), pl.cdiv(k, _DEPTH)

    def cost(splits: int) -> float:
        """The steps of the thread block that has most of them."""
        return pl.cdiv(tiles * splits, chip.multiprocessors or 1) * pl.cdiv(steps, splits) + _SUM_COST * splits

    splits = min(range(1, min(steps, _MOST_SPLITS) + 1), key=cost)
    return rows, _STAGE_BYTES // (2 * _DEPTH * (TILE_COLUMNS + rows)), splits


@dataclass(frozen=True, kw_only=True)
class FewRows:
    """The products of x [m, k] with one or several matrices, and how a kernel on this chip computes them."""

    chip: Chip
    m: int
    k: int
    columns: tuple[int, ...]
    """The columns of each matrix: multiples of TILE_COLUMNS, but for the last one's, which may be any number."""
    rows: int
    """Rows of x of a tile: one of TILE_ROWS."""
    stages: int
    splits: int
    consumer_registers: int = 232
    producer_registers: int = 40

    @property
    def gemm(self) -> Gemm:
        """z^T = w^T x^T. The tiles of all splits count."""
        columns = sum(self.columns)
        return Gemm(
            chip=self.chip,
            m=columns,
            n=self.m,
            k=self.k,
            dtype=jnp.bfloat16,
            block_m=TILE_COLUMNS,
            block_n=self.rows,
            block_k=_DEPTH,
            stages=self.stages,
            band=1,
            a_transposed=True,
            b_transposed=True,
            consumer_registers=self.consumer_registers,
            producer_registers=self.producer_registers,
            most_tiles=pl.cdiv(columns, TILE_COLUMNS) * pl.cdiv(self.m, self.rows) * self.splits,
        )

    @property
    def folded(self) -> bool:
        """Whether x [1, k] is read as [8, k / 8]."""
        return self.m == 1 and self.splits % _EIGHT == 0 and self.k % (self.splits * _DEPTH) == 0

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return smem_bytes(self.gemm.scratch())

    def run(self, x: jax.Array, weights: Sequence[jax.Array], *, name: str) -> jax.Array:
        """x [m, k] times each of the weights [k, columns], side by side: [splits, m, columns] float32."""
        gemm, columns = self.gemm, sum(self.columns)
        depth = pl.cdiv(gemm.steps, self.splits) * self.splits * _DEPTH
        x, depth_of_x = (x.reshape(_EIGHT, -1), depth // _EIGHT) if self.folded else (x, depth)
        outputs = gemm.run(
            functools.partial(_kernel, gemm=gemm, columns=self.columns, splits=self.splits, folded=self.folded),
            name=name,
            inputs={
                **{f"w{n}": whole(aligned(w), depth, TILE_COLUMNS) for n, w in enumerate(weights)},
                "x": whole(aligned(x), gemm.block_n, depth_of_x),
            },
            outputs={
                "z": jax.ShapeDtypeStruct((self.splits, *whole_shape((self.m, columns), 1, TILE_COLUMNS)), jnp.float32)
            },
            scratch={},
        )
        return outputs["z"][:, : self.m, :columns]


def unpadded_tiles(chip: Chip, m: int, k: int, columns: tuple[int, ...]) -> tuple[int, int, int]:
    """`chosen_tiles` for weights of so many columns each, where a launch more would cost more than other splits.

    A single row is not padded with eight splits, or sixteen (`FewRows.folded`): the number that is nearest to the best one
    is taken.
    """
    rows, stages, best = chosen_tiles(chip, min(m, TILE_ROWS[-1]), k, sum(columns))
    sizes = {"chip": chip, "m": m, "k": k, "columns": columns, "rows": rows, "stages": stages}
    whole = [splits for splits in (8, 16) if FewRows(**sizes, splits=splits).folded]
    return rows, stages, min(whole, key=lambda splits: abs(splits - best), default=best)


def _kernel(
    *,
    # inputs
    x_ref,  # [M, K], or [8, K / 8]
    # outputs
    z_ref,  # [splits, M, the columns of all weights] float32
    # scratch
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    columns: tuple[int, ...],
    splits: int,
    folded: bool,
    **w_refs,  # [K, columns] each
):
    row_tiles, steps = pl.cdiv(gemm.n, gemm.block_n), pl.cdiv(gemm.steps, splits)
    order = RoundRobin(gemm.most_tiles or 1, lax.axis_size("program"), lax.axis_index("program"))
    first_tiles = [0, *itertools.accumulate(pl.cdiv(size, TILE_COLUMNS) for size in columns)]

    def locate(done: Any) -> tuple[Any, Any, Any]:
        """The block of columns, the tile of rows and the split. Tiles of the same weights follow each other."""
        rest, row = divmod_nonnegative(order.tile(done), row_tiles)
        column, split = divmod_nonnegative(rest, splits)
        return column, row, split

    def folded_row(split: Any) -> Any:
        return lax.div(split, jnp.int32(splits // _EIGHT))

    def sources(step: Any, column: Any, row: Any, split: Any) -> tuple[Any, list[Any]]:
        start = (split * steps + step) * _DEPTH
        depth, rows = pl.ds(start, _DEPTH), pl.ds(row * gemm.block_n, gemm.block_n)
        of_x = pl.ds(start - folded_row(split) * (gemm.k // _EIGHT), _DEPTH) if folded else depth
        of_each = [
            (
                len(columns) == 1 or (column >= first) & (column < end),
                w_refs[f"w{n}_ref"].at[depth, pl.ds((column - first) * TILE_COLUMNS, TILE_COLUMNS)],
            )
            for n, (first, end) in enumerate(itertools.pairwise(first_tiles))
        ]
        return of_each, [x_ref.at[rows, of_x]]

    def epilogue(consumer: Any, column: Any, row: Any, split: Any) -> Any:
        first_column, first_row = column * TILE_COLUMNS + consumer * gemm.rows, row * gemm.block_n

        def finish(z: jax.Array) -> None:  # [64, rows]
            if folded:
                own = folded_row(split)
                store_transposed(z, z_ref.at[split], -own, first_column, own, own + 1)
                return
            end = jnp.minimum(gemm.n - first_row, gemm.block_n)
            store_transposed(z, z_ref.at[split], first_row, first_column, jnp.int32(0), end)

        return finish

    plan = Plan(count=order.count, locate=locate, sources=sources, steps=lambda column, row, split: steps)
    gemm.main_loop(None, x_ref, OneOfSeveral.of(pipeline), epilogue, plan=plan)
