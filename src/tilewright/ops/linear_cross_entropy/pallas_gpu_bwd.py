"""The backward of linear cross entropy on Hopper: a chunk of the vocabulary at a time, in three products.

    g_nv = (d_nll_n + d_logsumexp_n) p_nv - d_nll_n [v = label_n], times the soft cap's slope      p_nv = exp(a_nv) / sum
    dx = g w^T        dw = x^T g

A kernel makes a chunk's logits anew (gpu_tiles.py) and writes their gradients, [N, chunk_v] in bfloat16. XLA's own products
make of them the chunk's columns of dw, which are then finished, and what is added to dx, in float32.

Why the gradients of a chunk are stored: a kernel that kept them on the multiprocessor would need the logits twice, once for
dx and once for dw, or sum one of the two through memory: 8 N H V FLOPs against 6, a quarter of the time of all. Writing the
chunk and reading it twice moves 6 bytes for an element that costs 6 H FLOPs: at H = 2,048 and an H200's rates, 8 % of the
time of its products, and hidden behind them but for the writing.

Memory beyond inputs and gradients: 2 N chunk_v bytes, a chunk's columns of w and of dw, and dx in float32 (4 N H bytes).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import padded, tile
from tilewright.core.manual_axes import output_like, vary_over, varying_axes
from tilewright.ops.linear_cross_entropy.config import GPU_BLOCK_N, GPU_ROWS, GPU_WIDTH, GPU_WORKERS, PallasGpuConfig
from tilewright.ops.linear_cross_entropy.gpu_tiles import (
    Tiles,
    capped,
    columns_of,
    for_each_tile,
    load_rows,
    of_row,
    padded_operands,
    special_tiles,
    tile_kernel,
)

# What the kernel reads of a row: its max, (d_nll + d_logsumexp) / total, and d_nll.
_HIGHEST, _FACTOR, _LABEL_FACTOR = range(3)
_STAGED = 2


def _gradient_kernel(
    # inputs
    x_ref,  # [N, H]
    w_ref,  # [H, V]
    labels_ref,  # [N]
    special_ref,  # [N / GPU_ROWS, V / block_v]
    rows_ref,  # [3, N]
    first_ref,  # [1]: the chunk's first block of columns
    # outputs
    out_ref,  # [N, chunk_v]
    # scratch
    staged_smem,  # [GPU_WORKERS, _STAGED, GPU_ROWS, GPU_WIDTH]
    *ring,
    tiles: Tiles,
    vocabulary: int,
    soft_cap: float | None,
):
    part_shape = (GPU_ROWS, GPU_WIDTH)
    width = out_ref.shape[1]
    first_block = first_ref[0]

    def finish(worker: Any, i: Any, j: Any) -> Any:
        block = i * GPU_WORKERS + worker
        rows = pl.ds(block * GPU_ROWS, GPU_ROWS)
        special = special_ref[block, first_block + j]
        highest, factor = (load_rows(rows_ref.at[which, rows]) for which in (_HIGHEST, _FACTOR))

        def differentiate(products: jax.Array, *, with_care: bool) -> None:
            label = []  # The labels and d_nll, along the rows.
            if with_care:
                label = [
                    of_row(load_rows(ref), part_shape)
                    for ref in (labels_ref.at[rows], rows_ref.at[_LABEL_FACTOR, rows])
                ]
            parts = tiles.block_v // GPU_WIDTH
            # A chunk is whole parts, not whole blocks; the last block of the vocabulary is special if it is not whole.
            ragged = with_care and width % tiles.block_v != 0
            for part in range(parts):

                def one_part(part: int = part) -> None:
                    columns = slice(part * GPU_WIDTH, (part + 1) * GPU_WIDTH)
                    logits, per_nat, slope = capped(products[:, columns], soft_cap)
                    gradient = of_row(factor, part_shape) * jnp.exp2(logits * per_nat - of_row(highest, part_shape))
                    if with_care:
                        column = columns_of(part_shape, (first_block + j) * tiles.block_v + part * GPU_WIDTH)
                        gradient = gradient - jnp.where(column == label[0], label[1], 0.0)
                        # Past the end a logit is 0, which may be anything beside the others.
                        gradient = jnp.where(column < vocabulary, gradient, 0.0)
                    if slope is not None:
                        gradient = gradient * (1.0 - slope * slope)
                    staged = staged_smem.at[worker, part % _STAGED]
                    # The copy of the part before the last has read its stage.
                    plgpu.wait_smem_to_gmem(_STAGED - 1, wait_read_only=True)
                    staged[...] = gradient.astype(out_ref.dtype)
                    plgpu.commit_smem()
                    at = pl.ds(j * tiles.block_v + part * GPU_WIDTH, GPU_WIDTH)
                    plgpu.copy_smem_to_gmem(staged, out_ref.at[rows, at])

                if ragged:
                    pl.when(j * tiles.block_v + part * GPU_WIDTH < width)(one_part)
                else:
                    one_part()
            if ragged or parts % _STAGED:
                # The next tile begins with the stage that this one may have ended with.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def finisher(products: jax.Array) -> None:
            pl.when(special == 0)(lambda: differentiate(products, with_care=False))
            pl.when(special != 0)(lambda: differentiate(products, with_care=True))

        return finisher

    for_each_tile(tiles, (x_ref, w_ref), ring, first_block * tiles.block_v, finish)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A and b contracted over one axis each, summed in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _columns_of_dw(x: jax.Array, gradients: jax.Array) -> jax.Array:
    return _product(x, gradients, (0, 0)).astype(x.dtype)  # [H, width]


def backward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    highest: jax.Array,
    total: jax.Array,
    d_nll: jax.Array,
    d_logsumexp: jax.Array,
    *,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """dx and dw. `highest` is in units of log 2."""
    (n, h), v = x.shape, w.shape[1]
    config: PallasGpuConfig = launch.config
    labels = padded(labels, 0, GPU_BLOCK_N)
    special = special_tiles(labels, v, config.block_v)
    # Padded rows have a factor of 0.
    rows = padded(jnp.stack([highest, (d_nll + d_logsumexp) / total, d_nll]), 1, GPU_BLOCK_N)  # [3, N]
    x_whole, w_whole = padded_operands(x, w)
    whole_n, whole_v = x_whole.shape[0], w_whole.shape[1]
    staged = tile(GPU_WORKERS, _STAGED, GPU_ROWS, GPU_WIDTH, dtype=x.dtype)

    def add_chunk(first_block: Any, width: int, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx, dw = sums  # [N, H] float32, [H, V]
        tiles = Tiles.of(launch, whole_n, x_whole.shape[1], width)
        gradients = tile_kernel(
            _gradient_kernel,
            tiles,
            launch,
            out_type=output_like((whole_n, width), x.dtype, x),
            scratch_types=(staged, *tiles.scratch(x.dtype)),
            name="linear_cross_entropy_backward",
            vocabulary=v,
            soft_cap=soft_cap,
        )(x_whole, w_whole, labels, special, rows, jnp.reshape(first_block, (1,)))  # [N, width]
        start = first_block * config.block_v
        w_chunk = jax.lax.dynamic_slice_in_dim(w_whole, start, width, axis=1)  # [H, width]
        dw = jax.lax.dynamic_update_slice_in_dim(dw, _columns_of_dw(x_whole, gradients), start, axis=1)
        return dx + _product(gradients, w_chunk, (1, 1)), dw

    # A loop: one chunk's gradients take the place of the last one's, and there is one kernel to compile, or two.
    axes = varying_axes(x)
    sums = (
        vary_over(jnp.zeros(x_whole.shape, jnp.float32), axes),
        vary_over(jnp.zeros(w_whole.shape, w.dtype), axes),
    )
    whole, rest = divmod(whole_v, config.chunk_v)
    blocks = jnp.int32(config.chunk_v // config.block_v)
    if whole:
        sums = jax.lax.fori_loop(0, whole, lambda n, sums: add_chunk(n * blocks, config.chunk_v, sums), sums)
    if rest:
        sums = add_chunk(whole * blocks, rest, sums)
    dx, dw = sums
    return dx[:n, :h].astype(x.dtype), dw[:h, :v]
