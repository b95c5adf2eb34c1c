"""The forward kernel of linear cross entropy on TPU, and what the backward kernels share with it.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, with or without a soft cap:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: 2 N H V FLOPs; x and w read once, 16 N bytes written. Backward: 6 N H V FLOPs, x and w read and dx and dw written
once. Here: forward 2 N H V FLOPs, x read once, w read N / block_n times. Backward 8 N H V FLOPs, since dx and dw are
separate kernels and each recomputes the logits: dx reads w N / block_n_dx times, dw reads x V / block_v_dw times.

Blocking: grid (num_n, num_v), rows in parallel, vocabulary in order. A block of rows [block_n, H] stays in VMEM while
the blocks [H, block_v] of w stream past. Inside a step a loop takes tile_n rows at a time, and a product takes block_h
of H, so that the code stays small; H is whole in a block. The smallest blocks bound H: about 8,000 on a v4 and 40,000
on a v5p in bfloat16; calls with more are refused.

The online logsumexp is kept per lane: each of the 128 lanes is an online logsumexp of its own over every 128th column.
So a step needs no reduction across lanes, which would go through the XLU; the lanes are joined once, after the last
block.

Edges: N and V need not be multiples of the blocks. What a block holds past the end of an array is not defined, so
columns past V are masked after the product and rows past N are never written.

Numerics: logits, statistics and accumulators in float32. Masked logits are a large negative number, not -inf: a lane
that has seen no column yet would compute exp(-inf - -inf). float32 inputs are multiplied in float32 (six passes of the
MXU). The max and sum exp(logit - max) of a row are saved for the backward, not its logsumexp: at logits of 1,000 a
float32 logsumexp is off by 6e-5, and exp(logit - logsumexp) would be off by that factor. Gradients of logits are
rounded to the inputs' dtype for the two products that use them.

Tried and dropped: statistics as [1, N] rows, which needs a transpose in the kernel to save 0.5 KB of HBM per token.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, ROW_TILE, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyTpuForward
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.gemm import for_row_tiles
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, not_float64

# Far below any logit, and far enough from float32's end that a difference of two stays finite.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
_FLOAT32_BYTES = 4

# Block sizes to choose from, largest first. At these a step moves at most one byte per 1,024 FLOPs, which every TPU's
# memory keeps up with; wider ones double the code, and the time to compile it (v5p, 1,024 columns, H=2048: 3.7 MB).
_ROWS = (1024, 512, 256, 128, 64, 32, 16)
_COLUMNS = (512, 256, 128)
# The MXU is 256 wide on v6e and later: a narrower stream starves it.
_WIDE = 256
# The compiler needs VMEM of its own, for spills and for parts of a tile that live between passes.
_VMEM_SHARE = 0.75


def unsupported_reason(call: LinearCrossEntropyCall, launch: Launch) -> str | None:
    return not_float64(call.x)


def largest_blocks(
    chip: Chip, call: LinearCrossEntropyCall, vmem_bytes: Callable[[int, int], int], *, rows_stay: bool
) -> tuple[int, int]:
    """The largest block_n and block_v that fit the chip's VMEM; the smallest if none does.

    What stays comes before what streams, but every wide stream comes before a narrow one.
    """
    n, v = call.x.shape[0], call.w.shape[1]
    rows = [size for size in _ROWS if size < n + ROW_TILE] or [ROW_TILE]
    columns = [size for size in _COLUMNS if size < v + LANES] or [LANES]
    if rows_stay:
        pairs = sorted(itertools.product(rows, columns), key=lambda pair: pair[1] < _WIDE)
    else:
        by_columns = ((block_n, block_v) for block_v, block_n in itertools.product(columns, rows))
        pairs = sorted(by_columns, key=lambda pair: pair[0] < _WIDE)
    budget = _VMEM_SHARE * (chip.vmem_bytes or 0)
    return next((pair for pair in pairs if vmem_bytes(*pair) <= budget), (ROW_TILE, LANES))


def temporaries_bytes(call: LinearCrossEntropyCall, block_n: int, block_v: int, tile_n: int, *, row_arrays: int) -> int:
    """VMEM beside blocks and scratch: a tile's logits, exponentials and mask in float32 and its d_logits in the inputs'
    dtype; and `row_arrays` float32 values per row of a block, which are padded to a row of lanes.
    """
    tile = min(block_n, tile_n) * block_v * (3 * _FLOAT32_BYTES + call.x.dtype.itemsize)
    return tile + row_arrays * block_n * LANES * _FLOAT32_BYTES


def hidden_slices(h: int, block_h: int) -> list[slice]:
    """H in slices of block_h, the last one shorter where it does not divide."""
    return [slice(start, min(start + block_h, h)) for start in range(0, h, block_h)]


def logits_tile(x_ref, w_ref, rows: Any, soft_cap: float | None, block_h: int) -> jax.Array:
    """The logits of a tile of rows and a block of the vocabulary: [tile_n, block_v]."""
    products = (dot_f32(x_ref[rows, part], w_ref[part, :], (1, 0)) for part in hidden_slices(x_ref.shape[1], block_h))
    logits = functools.reduce(jnp.add, products)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits * (1.0 / soft_cap))


def _forward_kernel(
    *,
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    labels_ref,  # [block_n, 1]
    # outputs
    rows_ref,  # [block_n, 4]: nll, logsumexp, max, sum exp(logit - max)
    # scratch, one online logsumexp per lane
    highest_scratch,  # [block_n, LANES]
    total_scratch,  # [block_n, LANES]
    label_logit_scratch,  # [block_n, LANES]
    # static
    call: LinearCrossEntropyCall,
    config: LinearCrossEntropyTpuForward,
):
    step, vocabulary, block_v = pl.program_id(1), call.w.shape[1], w_ref.shape[1]

    @pl.when(step == 0)
    def _start():
        highest_scratch[...] = jnp.full_like(highest_scratch, _MASKED)
        total_scratch[...] = jnp.zeros_like(total_scratch)
        label_logit_scratch[...] = jnp.zeros_like(label_logit_scratch)

    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    starts = range(0, block_v, LANES)
    columns = [step * block_v + start + lane for start in starts]  # each [1, LANES]

    def add_tile(rows: Any) -> None:
        logits = logits_tile(x_ref, w_ref, rows, call.soft_cap, config.block_h)  # [tile_n, block_v]
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

    for_row_tiles(x_ref.shape[0], config.tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        highest = highest_scratch[...]  # [block_n, LANES]
        row_highest = jnp.max(highest, axis=1, keepdims=True)  # [block_n, 1]
        row_total = jnp.sum(total_scratch[...] * jnp.exp(highest - row_highest), axis=1, keepdims=True)
        log_total = jnp.log(row_total)
        label_logit = jnp.sum(label_logit_scratch[...], axis=1, keepdims=True)
        rows_ref[:, 0:1] = (row_highest - label_logit) + log_total
        rows_ref[:, 1:2] = row_highest + log_total
        rows_ref[:, 2:3] = row_highest
        rows_ref[:, 3:4] = row_total


def _declaration(call: LinearCrossEntropyCall, block_n: int, block_v: int) -> Kernel:
    (n, h), v = call.x.shape, call.w.shape[1]
    statistics = pltpu.VMEM((block_n, LANES), jnp.float32)
    return Kernel(
        name="linear_cross_entropy_forward",
        grid={"row": Axis(pl.cdiv(n, block_n), "parallel"), "column": Axis(pl.cdiv(v, block_v))},
        inputs={
            "x": Block((block_n, h), call.x.dtype, lambda i, j: (i, 0)),
            "w": Block((h, block_v), call.w.dtype, lambda i, j: (0, j)),
            "labels": Block((block_n, 1), jnp.int32, lambda i, j: (i, 0)),
        },
        outputs={"rows": Output((n, 4), Block((block_n, 4), jnp.float32, lambda i, j: (i, 0)))},
        scratch=dict.fromkeys(("highest_scratch", "total_scratch", "label_logit_scratch"), statistics),
    )


def _vmem_bytes(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuForward) -> int:
    temporaries = temporaries_bytes(call, config.block_n, config.block_v, config.tile_n, row_arrays=1)
    return _declaration(call, config.block_n, config.block_v).vmem_bytes(temporaries)


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropyTpuForward:
    def needed(block_n: int, block_v: int) -> int:
        return _vmem_bytes(call, LinearCrossEntropyTpuForward(block_n, block_v))

    return LinearCrossEntropyTpuForward(*largest_blocks(chip, call, needed, rows_stay=True))


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves the max and sum exp(logit - max) of each row, which give the backward the probabilities."""
    x, w, config = call.x, call.w, launch.config
    (n, h), v = x.shape, w.shape[1]
    kernel = _declaration(call, config.block_n, config.block_v)
    rows = kernel.run(
        functools.partial(_forward_kernel, call=call, config=config),
        {"x": x, "w": w, "labels": call.labels[:, None]},
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=2 * n * h * v,
            transcendentals=n * v,
            bytes_accessed=(n * h + kernel.grid["row"].size * h * v) * x.dtype.itemsize + 20 * n,
        ),
    )["rows"]  # [N, 4]
    nll, logsumexp, highest, total = (rows[:, column] for column in range(4))
    return (nll, logsumexp), RowStatistics(highest, total)


FORWARD = Pass(
    _forward,
    saved="*tokens",
    config=LinearCrossEntropyTpuForward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=lambda call, launch: {"forward": _vmem_bytes(call, launch.config)},
    memory_fields="a smaller block_n or block_v",
)
