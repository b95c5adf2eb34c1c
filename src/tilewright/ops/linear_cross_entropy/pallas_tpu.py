"""Linear cross entropy as Mosaic TPU kernels: the forward one here, the two of the backward in pallas_tpu_bwd.py.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, soft-capped or not:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: 2 N H V FLOPs; x and w read once, 16 N bytes written. Backward: 6 N H V FLOPs, x and w read and dx and dw written
once. Here: forward 2 N H V FLOPs, x read once, w read N / block_n times. Backward 8 N H V FLOPs, since dx and dw are
separate kernels and each makes the logits anew: dx reads w N / block_n_dx times, dw reads x V / block_v_dw times.

Blocking: grid (num_n, num_v), rows in parallel, vocabulary in order. A block of rows [block_n, H] stays in VMEM while the
blocks [H, block_v] of w stream past. Inside a step a loop takes tile_n rows at a time, and a product block_h of H, so that
the code stays small; H is whole in a block. The smallest blocks bound H: about 8,000 on a v4 and 40,000 on a v5p in
bfloat16; `unsupported_reason` says.

The online logsumexp is kept per lane: each of the 128 lanes is an online logsumexp of its own over every 128th column.
So a step needs no reduction across lanes, which would go through the XLU; the lanes are joined once, after the last block.

Edges: N and V need not be multiples of the blocks. What a block holds past the end of an array is not defined, so columns
past V are masked after the product and rows past N are never written.

Numerics: logits, statistics and accumulators in float32. Masked logits are a large negative number, not -inf: a lane that
has seen nothing yet would make exp(-inf - -inf). float32 inputs are multiplied in float32 (six passes of the MXU).
The backward takes the max and sum exp(logit - max) of a row, not its logsumexp: at logits of 1,000 a float32 logsumexp
is off by 6e-5, and exp(logit - logsumexp) would be off by that factor. Gradients of logits are rounded to the inputs'
dtype for the two products that use them.

Tried and dropped: statistics as [1, N] rows, which needs a transpose in the kernel to save 0.5 KB of HBM a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.axes import PerRow, RowLabels, Rows, Unembedding
from tilewright.core.chip import LANES, Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.linear_cross_entropy.config import PallasTpuConfig
from tilewright.ops.linear_cross_entropy.gradient import with_gradient
from tilewright.ops.linear_cross_entropy.pallas_tpu_bwd import backward, for_row_tiles, logits_tile

Config = PallasTpuConfig

# Far below any logit, and far enough from float32's end that a difference of two stays finite.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def default_config(
    chip: Chip, x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None
) -> PallasTpuConfig:
    del labels, soft_cap
    return PallasTpuConfig.for_shape(chip, x.shape[0], x.shape[1], w.shape[1], x.dtype.itemsize)


def unsupported_reason(
    launch: Launch, x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None
) -> str | None:
    del w, labels, soft_cap
    if x.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    return launch.config.misfit(launch.chip, x.shape[1], x.dtype.itemsize)


def _forward_kernel(
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    labels_ref,  # [block_n, 1]
    # outputs
    out_ref,  # [block_n, 4]: nll, logsumexp, max, sum exp(logit - max)
    # scratch, one online logsumexp a lane
    highest_scratch,  # [block_n, LANES]
    total_scratch,  # [block_n, LANES]
    label_logit_scratch,  # [block_n, LANES]
    *,
    vocabulary: int,
    soft_cap: float | None,
    block_h: int,
    tile_n: int,
):
    step = pl.program_id(1)
    block_v = w_ref.shape[1]

    @pl.when(step == 0)
    def _start():
        highest_scratch[...] = jnp.full_like(highest_scratch, _MASKED)
        total_scratch[...] = jnp.zeros_like(total_scratch)
        label_logit_scratch[...] = jnp.zeros_like(label_logit_scratch)

    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    starts = range(0, block_v, LANES)
    columns = [step * block_v + start + lane for start in starts]  # each [1, LANES]

    def add_tile(rows: Any) -> None:
        logits = logits_tile(x_ref, w_ref, rows, soft_cap, block_h)  # [tile_n, block_v]
        groups = [logits[:, start : start + LANES] for start in starts]  # each [tile_n, LANES]
        if vocabulary % block_v:
            groups = [jnp.where(column < vocabulary, g, _MASKED) for column, g in zip(columns, groups, strict=True)]
        labels = labels_ref[rows, :]  # [tile_n, 1]
        before = highest_scratch[rows, :]
        highest = functools.reduce(jnp.maximum, groups, before)  # [tile_n, LANES]
        total = total_scratch[rows, :] * jnp.exp(before - highest)
        label_logit = label_logit_scratch[rows, :]
        for column, group in zip(columns, groups, strict=True):
            total = total + jnp.exp(group - highest)
            label_logit = label_logit + jnp.where(column == labels, group, 0.0)
        highest_scratch[rows, :] = highest
        total_scratch[rows, :] = total
        label_logit_scratch[rows, :] = label_logit

    for_row_tiles(x_ref.shape[0], tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        highest = highest_scratch[...]  # [block_n, LANES]
        row_highest = jnp.max(highest, axis=1, keepdims=True)  # [block_n, 1]
        row_total = jnp.sum(total_scratch[...] * jnp.exp(highest - row_highest), axis=1, keepdims=True)
        log_total = jnp.log(row_total)
        label_logit = jnp.sum(label_logit_scratch[...], axis=1, keepdims=True)
        out_ref[:, 0:1] = (row_highest - label_logit) + log_total
        out_ref[:, 1:2] = row_highest + log_total
        out_ref[:, 2:3] = row_highest
        out_ref[:, 3:4] = row_total


def _forward(
    x: jax.Array, w: jax.Array, labels: jax.Array, soft_cap: float | None, launch: Launch
) -> tuple[jax.Array, ...]:
    """nll, logsumexp, and the two numbers that the backward makes probabilities from: max and sum exp(logit - max)."""
    (n, h), v = x.shape, w.shape[1]
    config: PallasTpuConfig = launch.config
    block_n, block_v = config.block_n, config.block_v
    num_n, num_v = pl.cdiv(n, block_n), pl.cdiv(v, block_v)
    statistics = pltpu.VMEM((block_n, LANES), jnp.float32)
    out = pl.pallas_call(
        functools.partial(
            _forward_kernel, vocabulary=v, soft_cap=soft_cap, block_h=config.block_h, tile_n=config.tile_n
        ),
        out_shape=output_like((n, 4), jnp.float32, x),
        grid=(num_n, num_v),
        in_specs=[
            pl.BlockSpec((block_n, h), lambda i, j: (i, 0)),
            pl.BlockSpec((h, block_v), lambda i, j: (0, j)),
            pl.BlockSpec((block_n, 1), lambda i, j: (i, 0)),
        ],
        out_specs=pl.BlockSpec((block_n, 4), lambda i, j: (i, 0)),
        scratch_shapes=[statistics, statistics, statistics],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * n * h * v,
            transcendentals=n * v,
            bytes_accessed=(n * h + num_n * h * v) * x.dtype.itemsize + 20 * n,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="linear_cross_entropy_forward",
    )(x, w, labels[:, None])
    return tuple(out[:, column] for column in range(4))


_linear_cross_entropy = with_gradient(_forward, backward)


def linear_cross_entropy_pallas_tpu(
    x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None, launch: Launch
) -> tuple[PerRow, PerRow]:
    """Negative log likelihood and logsumexp of each row; labels are in [0, V)."""
    return _linear_cross_entropy(x, w, labels, soft_cap, launch)
