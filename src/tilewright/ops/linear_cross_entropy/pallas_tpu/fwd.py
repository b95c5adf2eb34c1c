"""The forward kernel of linear cross entropy on TPU, and what the backward kernels share with it.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, with or without a soft cap:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: 2 N H V FLOPs; x and w read once, 16 N bytes written. Backward: 4 N H V FLOPs with stored exponentials, 6 without;
x and w read and dx and dw written once. Here: forward 2 N H V FLOPs, x read once, w read N / block_n times; with
`stored`, where a gradient is asked for, 2 N V bytes written, from which one kernel makes both gradients (stored.py).
Otherwise the backward takes 8 N H V FLOPs, since dx and dw are separate kernels and each recomputes the logits: dx reads w
N / block_n_dx times, dw reads x V / block_v_dw times.

Blocking: grid (num_n, num_v), rows in parallel, vocabulary in order. A block of rows [block_n, H] stays in VMEM while
the blocks [H, block_v] of w stream past. Inside a step a loop takes tile_n rows at a time, and a product takes block_h
of H, so that the code stays small; H is whole in a block. The smallest blocks bound H: about 8,000 on a v4 and 40,000
on a v5p in bfloat16; calls with more are refused.

Two slots: within a step the MXU multiplies the next two tiles of rows while the VPU takes the exponentials of these two,
whose logits wait in scratch. In the body of the loop nothing waits for a product of the same body. On MXUs that are 256
wide the VPU is the busier of the two at H = 768.

The online logsumexp has one max per row, since exponentials are stored relative to it, and one sum per lane: the lanes
are added up once, after the last block. The max goes across lanes (XLU) once per tile and eight rows.

Edges: N and V need not be multiples of the blocks. What a block holds past the end of an array is not defined, so
columns past V are masked after the product and rows past N are never written.

Numerics: logits, statistics and accumulators in float32. Masked logits are a large negative number, not -inf: a lane
that has seen no column yet would compute exp(-inf - -inf). float32 inputs are multiplied in float32 (six passes of the
MXU). The max and sum exp(logit - max) of a row are saved for the backward, not its logsumexp: at logits of 1,000 a
float32 logsumexp is off by 6e-5, and exp(logit - logsumexp) would be off by that factor. Gradients of logits are
rounded to the inputs' dtype for the two products that use them.

Tried and dropped: statistics as [1, N] rows, which needs a transpose in the kernel to save 0.5 KB of HBM per token. A max
per lane, which needs no XLU, but 512 bytes per row and block beside what is stored.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.call import Static
from tilewright.core.chip import LANES, ROW_TILE, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import STORED_COLUMNS, LinearCrossEntropyTpuForward
from tilewright.ops.linear_cross_entropy.pallas_tpu.stored import (
    BLOCKS,
    LONG_ROWS,
    encoded,
    fits_memory,
    for_tiles,
    sizes_of_rows,
    stored_blocks,
    take_turns,
    tile_rows,
    wide_mxu,
)
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics, StoredBits
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.kernel import VMEM_SHARE, Axis, Block, Kernel, Output, not_float64

# Far below any logit, and far enough from float32's end that a difference of two stays finite.
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
_FLOAT32_BYTES = 4

# Block sizes to choose from, largest first. At these a step moves at most one byte per 1,024 FLOPs, which every TPU's
# memory keeps up with; wider ones double the code, and the time to compile it (v5p, 1,024 columns, H=2048: 3.7 MB).
_ROWS = (1024, 512, 256, 128, 64, 32, 16)
_COLUMNS = (512, 256, 128)
# The MXU is 256 wide on v6e and later: a narrower stream starves it.
_WIDE = 256
# With two slots, the products of three tiles are unrolled: at most this many multiplications each, for columns of these.
_WIDE_COLUMNS = (1024, 512)
_UNROLLED = 2**28
_TILE = 256


def unsupported_reason(call: LinearCrossEntropyCall, launch: Launch) -> str | None:
    if getattr(launch.config, "stored", False) and call.x.dtype != jnp.bfloat16:
        return f"stored=True is for bfloat16, and x is {call.x.dtype.name}; use a config with stored=False"
    return not_float64(call.x)


def largest_blocks(
    chip: Chip,
    call: LinearCrossEntropyCall,
    vmem_bytes: Callable[[int, int], int],
    *,
    rows_stay: bool,
    rows: Sequence[int] = _ROWS,
    columns: Sequence[int] = _COLUMNS,
) -> tuple[int, int]:
    """The largest block_n and block_v that fit the chip's VMEM; the smallest if none does.

    What stays comes before what streams, but every wide stream comes before a narrow one.
    """
    rows = sizes_of_rows(call.x.shape[0], rows)
    columns = [size for size in columns if size < call.w.shape[1] + LANES] or [min(columns)]
    if rows_stay:
        pairs = sorted(itertools.product(rows, columns), key=lambda pair: pair[1] < _WIDE)
    else:
        by_columns = ((block_n, block_v) for block_v, block_n in itertools.product(columns, rows))
        pairs = sorted(by_columns, key=lambda pair: pair[0] < _WIDE)
    budget = VMEM_SHARE * (chip.vmem_bytes or 0)
    return next((pair for pair in pairs if vmem_bytes(*pair) <= budget), (ROW_TILE, min(columns)))


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
    rows_ref,  # [block_n, 5]: nll, logsumexp, max, sum exp(logit - max), the label's logit
    bits_ref,  # [block_n, block_v / 2], or None
    block_max_ref,  # [block_n, LANES], or None
    # scratch
    highest_scratch,  # [rows, LANES], lanes that are alike; with two slots there are two tiles past the end of the block
    total_scratch,  # [rows, LANES], lanes that add up to the total
    label_logit_scratch,  # [rows, LANES], 0 but for one lane
    columns_scratch,  # [1, block_v] int32, 0 to block_v - 1: loaded where it is compared, not computed
    logits_0_scratch,  # [tile_n, block_v]
    logits_1_scratch,  # [tile_n, block_v], or None with one slot
    # static
    call: LinearCrossEntropyCall,
    config: LinearCrossEntropyTpuForward,
):
    step, vocabulary, block_v = pl.program_id(1), call.w.shape[1], w_ref.shape[1]
    tile_n, slots = logits_0_scratch.shape[0], (logits_0_scratch, logits_1_scratch)
    tiles = x_ref.shape[0] // tile_n

    @pl.when(step == 0)
    def _start():
        def clear(rows: Any) -> None:
            of_tile = (tile_n, LANES)
            highest_scratch[rows, :] = jnp.full(of_tile, _MASKED, jnp.float32)
            total_scratch[rows, :] = jnp.zeros(of_tile, jnp.float32)
            label_logit_scratch[rows, :] = jnp.zeros(of_tile, jnp.float32)

        for_tiles(highest_scratch.shape[0], tile_n, clear)
        columns_scratch[...] = jax.lax.broadcasted_iota(jnp.int32, (1, block_v), 1)

    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    columns_of_last = (vocabulary - 1) % block_v + 1  # Only what the last block of the vocabulary lacks is masked.

    def begin(tile: Any, slot: int) -> None:
        """The logits of a tile, and the max of its rows so far."""
        rows, of_x = tile_rows(tile, tile_n), tile_rows(jnp.minimum(tile, tiles - 1), tile_n)
        of_lanes = jnp.full((tile_n, LANES), _MASKED, jnp.float32)
        logits = logits_tile(x_ref, w_ref, of_x, call.soft_cap, config.block_h)  # [tile_n, block_v]
        for start in range(0, block_v, LANES):
            group = logits[:, start : start + LANES]  # [tile_n, LANES]
            if start + LANES > columns_of_last:
                group = jnp.where(lane < vocabulary - step * block_v - start, group, _MASKED)
            slots[slot][:, start : start + LANES] = group
            of_lanes = jnp.maximum(of_lanes, group)
        before = highest_scratch[rows, :]
        highest = jnp.maximum(before, jnp.max(of_lanes, axis=1, keepdims=True))  # [tile_n, LANES]
        highest_scratch[rows, :] = highest
        total_scratch[rows, :] = total_scratch[rows, :] * jnp.exp(before - highest)

    def finish(tile: Any, slot: int) -> None:
        """The exponentials of a tile."""
        rows = tile_rows(tile, tile_n)
        label = labels_ref[rows, :] - step * block_v  # [tile_n, 1]
        highest, total, label_logit = (
            scratch[rows, :] for scratch in (highest_scratch, total_scratch, label_logit_scratch)
        )
        pair: list[jax.Array] = []
        for start in range(0, block_v, LANES):
            logits = slots[slot][:, start : start + LANES]  # [tile_n, LANES]
            label_logit = jnp.where(columns_scratch[:, start : start + LANES] == label, logits, label_logit)
            exponentials = jnp.exp(logits - highest)
            total = total + exponentials
            if bits_ref is None:
                continue
            if call.soft_cap is not None:
                slope = 1.0 - jnp.square(logits * (1.0 / call.soft_cap))
                exponentials = exponentials * jnp.maximum(slope, 0.0)
            pair.append(exponentials)
            if len(pair) == 2:
                bits_ref[rows, (start - LANES) // 2 : (start + LANES) // 2] = encoded(*pair)
                pair = []
        total_scratch[rows, :] = total
        label_logit_scratch[rows, :] = label_logit
        if block_max_ref is not None:
            here = lane == jax.lax.rem(step, jnp.int32(BLOCKS))
            block_max_ref[rows, :] = jnp.where(here, highest, block_max_ref[rows, :])

    if logits_1_scratch is not None:
        take_turns(
            tiles, lambda pair, slot: begin(2 * pair + slot, slot), lambda pair, slot: finish(2 * pair + slot, slot)
        )
    else:

        def one_tile(tile: Any, _: None) -> None:
            begin(tile, 0)
            finish(tile, 0)

        jax.lax.fori_loop(0, tiles, one_tile, None)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        def write(rows: Any) -> None:
            highest = highest_scratch[rows, 0:1]  # [tile_n, 1]
            total = jnp.sum(total_scratch[rows, :], axis=1, keepdims=True)
            label_logit = jnp.sum(label_logit_scratch[rows, :], axis=1, keepdims=True)
            log_total = jnp.log(total)
            values = ((highest - label_logit) + log_total, highest + log_total, highest, total, label_logit)
            for column, value in enumerate(values):
                rows_ref[rows, column : column + 1] = value

        for_tiles(x_ref.shape[0], tile_n, write)


def _declaration(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuForward, *, stored: bool) -> Kernel:
    (n, h), v, block_n, block_v = call.x.shape, call.w.shape[1], config.block_n, config.block_v
    num_v, tile_n = pl.cdiv(v, block_v), min(block_n, config.tile_n)
    turns = config.slots == 2 and block_n % (2 * tile_n) == 0
    statistics = pltpu.VMEM((block_n + 2 * tile_n if turns else block_n, LANES), jnp.float32)
    logits = pltpu.VMEM((tile_n, block_v), jnp.float32)
    bits = Block((block_n, block_v // 2), jnp.int32, lambda i, j: (i, j))
    block_max = Block((block_n, LANES), jnp.float32, lambda i, j: (i, jax.lax.div(j, jnp.int32(BLOCKS))))
    return Kernel(
        name="linear_cross_entropy_forward",
        grid={"row": Axis(pl.cdiv(n, block_n), "parallel"), "column": Axis(num_v)},
        inputs={
            "x": Block((block_n, h), call.x.dtype, lambda i, j: (i, 0)),
            "w": Block((h, block_v), call.w.dtype, lambda i, j: (0, j)),
            "labels": Block((block_n, 1), jnp.int32, lambda i, j: (i, 0)),
        },
        outputs={
            "rows": Output((n, 5), Block((block_n, 5), jnp.float32, lambda i, j: (i, 0))),
            "bits": Output((n, num_v * block_v // 2), bits) if stored else None,
            "block_max": Output((n, _max_columns(num_v)), block_max) if stored else None,
        },
        scratch={
            **dict.fromkeys(("highest_scratch", "total_scratch", "label_logit_scratch"), statistics),
            "columns_scratch": pltpu.VMEM((1, block_v), jnp.int32),
            "logits_0_scratch": logits,
            "logits_1_scratch": logits if turns else None,
        },
    )


def _max_columns(blocks: int) -> int:
    """The columns of the maxima of blocks."""
    return pl.cdiv(blocks, BLOCKS) * LANES


def _vmem_bytes(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuForward) -> int:
    temporaries = temporaries_bytes(call, config.block_n, config.block_v, config.tile_n, row_arrays=1)
    return _declaration(call, config, stored=config.stored).vmem_bytes(temporaries)


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropyTpuForward:
    stored = fits_memory(chip, call) and stored_blocks(chip, call) is not None
    config = _blocks(chip, call, stored=stored)
    fits = _vmem_bytes(call, config) <= (chip.vmem_bytes or 0)
    return config if fits or not stored else _blocks(chip, call, stored=False)


def _blocks(chip: Chip, call: LinearCrossEntropyCall, *, stored: bool) -> LinearCrossEntropyTpuForward:
    # With two slots the first and the last tile of a step have nothing beside them, so steps are long.
    unrolled = [size for size in _WIDE_COLUMNS if _TILE * size * call.x.shape[1] <= _UNROLLED]
    turns = wide_mxu(chip) and bool(unrolled)
    rows, columns = (LONG_ROWS, unrolled) if turns else (_ROWS, _COLUMNS)
    columns = [*columns, *(size for size in _COLUMNS if size < min(columns))]
    columns = [size for size in columns if not stored or size % STORED_COLUMNS == 0]

    def config(block_n: int, block_v: int) -> LinearCrossEntropyTpuForward:
        return LinearCrossEntropyTpuForward(block_n, block_v, tile_n=_TILE, slots=2 if turns else 1, stored=stored)

    def needed(block_n: int, block_v: int) -> int:
        return _vmem_bytes(call, config(block_n, block_v))

    return config(*largest_blocks(chip, call, needed, rows_stay=True, rows=rows, columns=columns))


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves the max and sum exp(logit - max) of each row, which give the backward the probabilities; and exponentials."""
    x, w, config = call.x, call.w, launch.config
    (n, h), v = x.shape, w.shape[1]
    stored = save and config.stored and call.whole_v is None
    kernel = _declaration(call, config, stored=stored)
    results = kernel.run(
        functools.partial(_forward_kernel, call=call, config=config),
        {"x": x, "w": w, "labels": call.labels[:, None]},
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=2 * n * h * v,
            transcendentals=n * v,
            bytes_accessed=(n * h + kernel.grid["row"].size * h * v + stored * n * v) * x.dtype.itemsize + 24 * n,
        ),
    )
    nll, logsumexp, highest, total, label_logit = (results["rows"][:, column] for column in range(5))
    saved = None
    if stored:
        saved = StoredBits(results["bits"], results["block_max"], label_logit, Static(config.block_v))
    elif save and config.stored and call.whole_v is not None:
        # The backward of a part that the compiler cut does not read these; they have the shapes that the whole call saves.
        blocks = pl.cdiv(call.whole_v, config.block_v)
        bits = jnp.zeros((n, blocks * config.block_v // 2), jnp.int32)
        block_max = jnp.zeros((n, _max_columns(blocks)), jnp.float32)
        saved = StoredBits(bits, block_max, label_logit, Static(config.block_v))
    return (nll, logsumexp), RowStatistics(highest, total, stored=saved)


FORWARD = Pass(
    _forward,
    saved="*tokens",
    config=LinearCrossEntropyTpuForward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=lambda call, launch: {"forward": _vmem_bytes(call, launch.config)},
    memory_fields="a smaller block_n or block_v",
)
