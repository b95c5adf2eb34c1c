"""Linear cross entropy as Mosaic GPU kernels for Hopper: the forward here, the backward in pallas_gpu_bwd.py.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, soft-capped or not:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: forward 2 N H V FLOPs, x and w read once, 16 N bytes written. Backward 6 N H V FLOPs (the logits once more, dx, dw),
x and w read, dx and dw written once. Here: those FLOPs. Forward: x and w from memory about once for each band of rows, and
12 bytes written for each row and tile of block_v columns.

Blocking: gpu_tiles.py makes tiles of logits, in registers. The forward folds each into the max of its row, the sum of
exp(logit - max) and, where it is there, the label's logit. XLA joins these over the tiles, always in the same order. The
logits never leave the multiprocessor.

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. N is padded to 128, H and V to 64; each costs a copy where it is
not whole. For V = 50,257 and H = 768 that is 77 MB of w, read and written.

Numerics: logits, statistics and accumulators in float32. The max is kept in units of log 2, so that the exponential of a
difference is a multiply-add and the hardware's power of 2, to 2 units in the last place. The backward takes the max and
the sum rather than their logsumexp: at logits of 1,000 a float32 logsumexp is off by 6e-5, and exp(logit - logsumexp)
would be off by that factor.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.axes import PerRow, RowLabels, Rows, Unembedding
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import padded, refusal
from tilewright.core.manual_axes import output_like
from tilewright.ops.linear_cross_entropy.config import GPU_BLOCK_N, GPU_ROWS, GPU_WORKERS, PallasGpuConfig
from tilewright.ops.linear_cross_entropy.gpu_tiles import (
    LOG2_E,
    MASKED,
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
from tilewright.ops.linear_cross_entropy.gradient import with_gradient
from tilewright.ops.linear_cross_entropy.pallas_gpu_bwd import backward

Config = PallasGpuConfig
DTYPES = ("bfloat16",)

# What a tile leaves of a row: its max, the sum of exp(logit - max), and the label's logit, where the tile has it.
_HIGHEST, _TOTAL, _LABEL = range(3)
_STATISTICS = 3


def default_config(
    chip: Chip, x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None
) -> PallasGpuConfig:
    del chip, labels, soft_cap
    return PallasGpuConfig.for_shape(x.shape[0], w.shape[1])


def unsupported_reason(
    launch: Launch, x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None
) -> str | None:
    del w, labels, soft_cap
    return refusal(launch.chip, x, ("x", "w")) or launch.config.misfit(launch.chip)


def _forward_kernel(
    # inputs
    x_ref,  # [N, H]
    w_ref,  # [H, V]
    labels_ref,  # [N]
    special_ref,  # [N / GPU_ROWS, num_v]
    # outputs
    out_ref,  # [num_v, _STATISTICS, N]
    # scratch
    statistics_smem,  # [GPU_WORKERS, _STATISTICS, GPU_ROWS]
    *ring,
    tiles: Tiles,
    vocabulary: int,
    soft_cap: float | None,
):
    shape = (GPU_ROWS, tiles.block_v)

    def finish(worker: Any, i: Any, j: Any) -> Any:
        block = i * GPU_WORKERS + worker
        rows = pl.ds(block * GPU_ROWS, GPU_ROWS)
        special = special_ref[block, j]
        stage = statistics_smem.at[worker]

        def fold(products: jax.Array, *, with_care: bool) -> None:
            logits, factor, _ = capped(products, soft_cap)
            if with_care:
                column = columns_of(shape, j * tiles.block_v)
                is_label = column == of_row(load_rows(labels_ref.at[rows]), shape)
                stage[_LABEL] = jnp.sum(jnp.where(is_label, logits, 0.0), axis=1) * factor
                logits = jnp.where(column < vocabulary, logits, MASKED)
            highest = jnp.max(logits, axis=1) * factor
            stage[_HIGHEST] = highest
            stage[_TOTAL] = jnp.sum(jnp.exp2(logits * factor - of_row(highest, shape)), axis=1)

        def finisher(products: jax.Array) -> None:
            # The copies of the tile before have read the stage.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(special == 0)(lambda: fold(products, with_care=False))
            pl.when(special != 0)(lambda: fold(products, with_care=True))
            plgpu.commit_smem()
            for n in range(_STATISTICS):
                plgpu.copy_smem_to_gmem(stage.at[n], out_ref.at[j, n, rows])

        return finisher

    for_each_tile(tiles, (x_ref, w_ref), ring, 0, finish)


def _forward(
    x: jax.Array, w: jax.Array, labels: jax.Array, soft_cap: float | None, launch: Launch
) -> tuple[jax.Array, ...]:
    """nll, logsumexp, and what the backward makes probabilities from: max (in units of log 2) and sum exp(logit - max)."""
    n, v = x.shape[0], w.shape[1]
    block_v = launch.config.block_v
    labels = padded(labels, 0, GPU_BLOCK_N)
    x_whole, w_whole = padded_operands(x, w)
    tiles = Tiles.of(launch, x_whole.shape[0], x_whole.shape[1], v)
    out = tile_kernel(
        _forward_kernel,
        tiles,
        launch,
        out_type=output_like((tiles.num_v, _STATISTICS, x_whole.shape[0]), jnp.float32, x),
        scratch_types=(plgpu.SMEM((GPU_WORKERS, _STATISTICS, GPU_ROWS), jnp.float32), *tiles.scratch(x.dtype)),
        name="linear_cross_entropy_forward",
        vocabulary=v,
        soft_cap=soft_cap,
    )(x_whole, w_whole, labels, special_tiles(labels, v, block_v))
    out = out[:, :, :n]
    highest = jnp.max(out[:, _HIGHEST], axis=0)  # [N]
    total = jnp.sum(out[:, _TOTAL] * jnp.exp2(out[:, _HIGHEST] - highest[None]), axis=0)  # [N]
    # The tiles without a row's label have left nothing there.
    label_logit = out[labels[:n] // block_v, _LABEL, jnp.arange(n, dtype=jnp.int32)]  # [N]
    log_total = jnp.log(total)
    return (highest - label_logit) / LOG2_E + log_total, highest / LOG2_E + log_total, highest, total


_linear_cross_entropy = with_gradient(_forward, backward)


def linear_cross_entropy_pallas_gpu(
    x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None, launch: Launch
) -> tuple[PerRow, PerRow]:
    """Negative log likelihood and logsumexp of each row; labels are in [0, V)."""
    return _linear_cross_entropy(x, w, labels, soft_cap, launch)
