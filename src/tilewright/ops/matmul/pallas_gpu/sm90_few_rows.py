"""`matmul` of few bfloat16 rows on Hopper, as decoding has them: the weights are read once, by all multiprocessors.

    z = x w        y = activation(z + bias) + residual

Floor: every weight is read once, 2 K N bytes; with few rows nothing else matters. Here: that, and x once per 128 columns,
from the L2 cache.

Blocking: the main loop of pallas/gpu/gemm.py computes z^T = w^T x^T, so a tile has 128 columns of w and 16 to 64 rows of
x, and few rows waste little. Both operands are read as they lie in memory. A matrix has fewer tiles than the chip has
multiprocessors, so the contracted axis is divided between `splits` thread blocks, and each writes a float32 sum of its own.
XLA adds them up in order, which gives the same bits each time, and applies what follows in the same pass.

Tried and dropped: XLA's own product. For one row it writes the elementwise products of x and w to memory and adds them up
in a second kernel; for more rows it copies the weights of a layer out of a stack of layers first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulSm90Forward
from tilewright.pallas.gpu.gemm import BAND, BLOCK_N, Gemm, Plan
from tilewright.pallas.gpu.kernel import aligned, smem_bytes, whole, whole_shape
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.staging import store_transposed

TILE_ROWS = (16, 32, 64)
"""The rows of x that a tile may have."""

_COLUMNS = 128  # Of w, per tile: 64 for each of two consumer warpgroups.
_DEPTH = 128  # Of the contracted axis, per step: 32 KB of weights.
_STAGE_BYTES = 200 * 1024  # Of all stages together.
_MOST_SPLITS = 16
_SUM_COST = 0.125  # Of one more sum to add up, in steps.


def takes(call: MatmulCall, config: MatmulSm90Forward) -> bool:
    """Whether this kernel computes a call with a config."""
    return call.w_scales is None and config.block_m in TILE_ROWS


def heuristic(chip: Chip, call: MatmulCall) -> MatmulSm90Forward | None:
    """The config for a call of few rows; None for others."""
    m, k, n = call.sizes
    if call.w_scales is not None or m > TILE_ROWS[-1]:
        return None
    rows = next(each for each in TILE_ROWS if m <= each)
    tiles, steps = pl.cdiv(call.parts * n, _COLUMNS), pl.cdiv(k, _DEPTH)

    def cost(splits: int) -> float:
        """The steps of the thread block that has most of them."""
        return pl.cdiv(tiles * splits, chip.multiprocessors or 1) * pl.cdiv(steps, splits) + _SUM_COST * splits

    splits = min(range(1, min(steps, _MOST_SPLITS) + 1), key=cost)
    stages = _STAGE_BYTES // (2 * _DEPTH * (_COLUMNS + rows))
    return MatmulSm90Forward(BLOCK_N, stages, BAND, block_m=rows, splits=splits)


def _gemm(call: MatmulCall, launch: Launch) -> Gemm:
    """z^T = w^T x^T. The tiles of all splits count."""
    m, k, n = call.sizes
    config, columns = launch.config, call.parts * n
    return Gemm(
        chip=launch.chip,
        m=columns,
        n=m,
        k=k,
        dtype=jnp.bfloat16,
        block_m=_COLUMNS,
        block_n=config.block_m,
        block_k=_DEPTH,
        stages=config.stages,
        band=1,
        a_transposed=True,
        b_transposed=True,
        consumer_registers=config.consumer_registers,
        producer_registers=config.producer_registers,
        most_tiles=pl.cdiv(columns, _COLUMNS) * pl.cdiv(m, config.block_m) * config.splits,
    )


def memory(call: MatmulCall, launch: Launch) -> int:
    return smem_bytes(_gemm(call, launch).scratch())


def _kernel(
    *,
    # inputs
    w_ref,  # [K, P N]
    x_ref,  # [M, K]
    # outputs
    z_ref,  # [splits, M, P N] float32
    # scratch
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    splits: int,
):
    row_tiles, steps = pl.cdiv(gemm.n, gemm.block_n), pl.cdiv(gemm.steps, splits)
    order = RoundRobin(gemm.most_tiles or 1, lax.axis_size("program"), lax.axis_index("program"))

    def locate(done: Any) -> tuple[Any, Any, Any]:
        """The block of columns, the tile of rows and the split. Tiles of the same weights follow each other."""
        rest, row = divmod_nonnegative(order.tile(done), row_tiles)
        column, split = divmod_nonnegative(rest, splits)
        return column, row, split

    def sources(step: Any, column: Any, row: Any, split: Any) -> tuple[Any, list[Any]]:
        depth = pl.ds((split * steps + step) * _DEPTH, _DEPTH)
        rows = pl.ds(row * gemm.block_n, gemm.block_n)
        return w_ref.at[depth, pl.ds(column * _COLUMNS, _COLUMNS)], [x_ref.at[rows, depth]]

    def epilogue(consumer: Any, column: Any, row: Any, split: Any) -> Any:
        first_column, first_row = column * _COLUMNS + consumer * gemm.rows, row * gemm.block_n

        def finish(z: jax.Array) -> None:  # [64, rows]
            end = jnp.minimum(gemm.n - first_row, gemm.block_n)
            store_transposed(z, z_ref.at[split], first_row, first_column, jnp.int32(0), end)

        return finish

    plan = Plan(count=order.count, locate=locate, sources=sources, steps=lambda column, row, split: steps)
    gemm.main_loop(w_ref, x_ref, pipeline, epilogue, plan=plan)


def forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    gemm, splits = _gemm(call, launch), launch.config.splits
    (m, k, n), columns = call.sizes, gemm.m
    depth = pl.cdiv(gemm.steps, splits) * splits * _DEPTH
    outputs = gemm.run(
        functools.partial(_kernel, gemm=gemm, splits=splits),
        name="matmul_few_rows",
        inputs={
            "w": whole(aligned(call.w.reshape(k, columns)), depth, _COLUMNS),
            "x": whole(aligned(call.x), gemm.block_n, depth),
        },
        outputs={"z": jax.ShapeDtypeStruct((splits, *whole_shape((m, columns), 1, _COLUMNS)), jnp.float32)},
        scratch={},
    )
    z = jnp.sum(outputs["z"][:, :m, :columns], axis=0).reshape(m, call.parts, n)
    if call.bias is not None:
        z = z + call.bias.astype(jnp.float32)[None]
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    if call.residual is not None:
        y = y + call.residual.astype(jnp.float32)
    saved = z.astype(jnp.bfloat16) if save and call.activation is not None else None
    return y.astype(call.out_dtype), saved
