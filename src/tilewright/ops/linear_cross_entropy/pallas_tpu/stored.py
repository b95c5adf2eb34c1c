"""Exponentials that the forward stores on TPU, and the backward kernel that makes both gradients from them.

Where a gradient is asked for, the forward kernel writes e_nv = exp(a_nv - m), 2 bytes each, with m the largest logit of
row n so far. With the row's final max M and sum, the gradient of a logit is then

    d_nv = scale_n e_nv,   scale_n = (d_nll_n + d_logsumexp_n) / sum_n exp(m - M)      for v != label_n

and one kernel computes dx = d w^T and dw = x^T d from it: 4 N H V FLOPs, where the two kernels of bwd.py, which recompute
the logits, need 8. That is 6 N H V with the forward, as few as with all logits in memory. It costs 2 N V bytes of memory.

Floor: 4 N H V FLOPs; the exponentials, x and w read once, dx and dw written once. Here: those FLOPs; the exponentials and
x are read once per block_h of H, and x once more per block of the vocabulary.

Blocking: grid (H / block_h, V / block_v, N / block_n), H in parallel. dx of all rows and block_h of H is accumulated in
VMEM while blocks of the vocabulary pass, and dw of one block of the vocabulary while blocks of rows pass. So N bounds
block_h: 8,192 rows of all of H = 768 take 24 MiB. Within a step, tiles take turns: the gradients of the next tile's
logits are computed while the MXU multiplies those of this one.

Format: e is at most 1, so bits 14 to 29 of its float32 have all there is of its sign and exponent, and 9 bits of its
mantissa. A word has two of them: those of columns 256 k + i and 256 k + 128 + i, for i below 128. They are truncated, and
a row's scale makes up for what that takes off on average. Any word is two finite numbers, so what lies past the end of an
array cannot become NaN. An array of bfloat16 would take 3.5 operations per register instead of 2 (v6e), for its layout.

Numerics: the gradient of a logit is rounded to bfloat16 from that: an error of about 2^-10 beside one of 2^-9. The
gradient of a label is the difference of two numbers that may be close, so it is computed from float32 alone. For float32
inputs nothing is stored.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip
from tilewright.core.implementation import Launch
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyTpuBackward
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics, StoredBits
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.gemm import round_up, up_to
from tilewright.pallas.tpu.kernel import VMEM_SHARE, Axis, Block, Kernel, Output

PAIR = 2 * LANES
"""The columns that LANES words have."""
# The upper 16 bits of a word; where the bits of one number are in a float32; and how far they are moved.
_UPPER, _IN_FLOAT32, _UP, _DOWN = -(2**16), (2**16 - 1) << 14, 2, 14
# What truncation takes off is on average half of 2^-9, in relation to a mantissa between 1 and 2.
_TRUNCATED = 1.0 + 0.7 * 2.0**-10

# At most this much is stored, and at most this part of the chip's memory.
_STORED_BYTES = 2560 * MIB
_STORED_SHARE = 1 / 12
LONG_ROWS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
_SHORT = 1024
# Columns of the vocabulary to choose from and most of H, for MXUs that are 256 wide and for others. More would make the
# code longer: products of tiles are unrolled.
_WIDE, _NARROW = ((1024, 512), 1024), ((512,), 512)
BLOCKS = LANES - 2
"""The forward writes the maxima of this many blocks into LANES columns. Their scales take the same places, and after them
come the label's bits and the gradient of the label's logit."""
_LABEL, _OF_LABEL = BLOCKS, BLOCKS + 1


def wide_mxu(chip: Chip) -> bool:
    """Whether the chip's MXUs are 256 wide, as from v6e on: they need more beside their products to stay busy."""
    return (chip.mxu_size or 0) > LANES


def sizes_of_rows(n: int, sizes: Sequence[int]) -> list[int]:
    """Those of `sizes` that fit `n` rows. The long ones only where they compute no more rows than 1,024 would."""
    found = [size for size in sizes if size < n + ROW_TILE]
    return [size for size in found if size <= _SHORT or round_up(n, size) == round_up(n, _SHORT)] or [ROW_TILE]


def fits_memory(chip: Chip, call: LinearCrossEntropyCall) -> bool:
    """Whether the exponentials of a call are few enough to be stored by default."""
    most = min(_STORED_BYTES, _STORED_SHARE * (chip.memory_bytes or 0))
    return call.x.dtype == jnp.bfloat16 and 2 * call.x.shape[0] * call.w.shape[1] <= most


def encoded(first: jax.Array, second: jax.Array) -> jax.Array:
    """Two arrays of numbers in [0, 1] as one array of words."""
    upper, lower = (jax.lax.bitcast_convert_type(each, jnp.int32) for each in (first, second))
    return ((upper << _UP) & _UPPER) | (lower >> _DOWN)


def decoded(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What was encoded, in float32."""
    upper, lower = (words >> _UP) & _IN_FLOAT32, (words << _DOWN) & _IN_FLOAT32
    return jax.lax.bitcast_convert_type(upper, jnp.float32), jax.lax.bitcast_convert_type(lower, jnp.float32)


def take_turns(count: int, begin: Callable[[Any, int], None], finish: Callable[[Any, int], None]) -> None:
    """Calls begin(pair, slot) and finish(pair, slot) for an even number of tiles, those of a pair beside the begin of the
    next pair.

    A tile is number 2 pair + slot. In the body of the loop no begin is followed by its finish, so all of it may overlap:
    a slot is read by one and then written by the other. The last pair that is begun is past the end, and nothing must come
    of it.
    """

    def take_pair(pair: Any, _: None) -> None:
        finish(pair, 0)
        finish(pair, 1)
        begin(pair + 1, 0)
        begin(pair + 1, 1)

    begin(0, 0)
    begin(0, 1)
    jax.lax.fori_loop(0, count // 2, take_pair, None)


def tile_rows(index: Any, tile: int) -> Any:
    """The rows of a tile, as a slice of a ref."""
    return pl.ds(pl.multiple_of(index * tile, tile), tile)


def for_tiles(rows: int, tile: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with a slice `pl.ds` for each tile of rows, in a loop."""

    def step(index: Any, _: None) -> None:
        body(tile_rows(index, tile))

    jax.lax.fori_loop(0, rows // tile, step, None)


def _gradients_kernel(
    *,
    # inputs
    x_ref,  # [block_h, block_n], transposed
    w_ref,  # [block_h, block_v]
    bits_ref,  # [block_n, block_v / 2]
    factors_ref,  # [block_n, LANES]: scales of blocks, label, gradient of the label's logit
    # outputs
    dx_ref,  # [block_n, block_h]
    dw_ref,  # [block_h, block_v]
    # scratch
    w_scratch,  # [block_h, block_v]: w with zeros past the end of the vocabulary, or None where it has whole blocks
    dx_scratch,  # [N, block_h] float32
    dw_scratch,  # [block_h, block_v] float32
    d_0_scratch,  # [tile_n, block_v / 2], the gradients of the logits of a tile
    d_1_scratch,  # [tile_n, block_v / 2]
    # static
    call: LinearCrossEntropyCall,
    tile_n: int,
    stored_block_v: int,
):
    column, row = pl.program_id(1), pl.program_id(2)
    (block_h, block_n), block_v, (n, v) = x_ref.shape, w_ref.shape[1], (call.x.shape[0], call.w.shape[1])
    half, first_row = block_v // 2, row * block_n
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    slots = (d_0_scratch, d_1_scratch)
    # The place of this block's scales in `factors`.
    stored_block = jax.lax.div(column * block_v, jnp.int32(stored_block_v))
    scale_lane = jax.lax.rem(stored_block, jnp.int32(BLOCKS))

    @pl.when(column == 0)
    def _start_dx():
        def clear(rows: Any) -> None:
            here = pl.ds(first_row + rows.start, rows.size)
            dx_scratch[here, :] = jnp.zeros((rows.size, block_h), jnp.float32)

        for_tiles(block_n, tile_n, clear)

    @pl.when(row == 0)
    def _start_dw():
        def clear(rows: Any) -> None:
            dw_scratch[rows, :] = jnp.zeros((rows.size, block_v), jnp.float32)
            if w_scratch is not None:
                w_scratch[rows, :] = up_to(v, w_ref[rows, :], 1, column * block_v)

        for_tiles(block_h, LANES, clear)

    def begin(tile: Any, part: int) -> None:
        """The gradients of the logits of a tile of rows and half of the columns."""
        rows, slot = tile_rows(jnp.minimum(tile, block_n // tile_n - 1), tile_n), slots[part]
        factors = factors_ref[rows, :]  # [tile_n, LANES]
        if n % block_n:
            factors = up_to(n, factors, 0, first_row + rows.start)
        scale = jnp.sum(jnp.where(lane == scale_lane, factors, 0.0), axis=1, keepdims=True)  # [tile_n, 1]
        label = jax.lax.bitcast_convert_type(factors[:, _LABEL : _LABEL + 1], jnp.int32)
        label = label - (column * block_v + part * half)  # [tile_n, 1], from the first of these columns
        of_label = factors[:, _OF_LABEL : _OF_LABEL + 1]
        for pair in range(0, half, PAIR):
            words = bits_ref[rows, pl.ds((part * half + pair) // 2, LANES)]  # [tile_n, LANES]
            for start, exponentials in zip((pair, pair + LANES), decoded(words), strict=True):
                d_logits = jnp.where(lane + start == label, of_label, exponentials * scale)
                slot[:, start : start + LANES] = d_logits.astype(slot.dtype)

    def finish(tile: Any, part: int) -> None:
        """The products of the same tile and columns."""
        rows, columns = tile_rows(tile, tile_n), slice(part * half, (part + 1) * half)
        w = (w_ref if w_scratch is None else w_scratch)[:, columns]  # [block_h, half]
        x = x_ref[:, rows]  # [block_h, tile_n]
        if n % block_n:
            x = up_to(n, x, 1, first_row + rows.start)
        here = pl.ds(pl.multiple_of(first_row + rows.start, tile_n), tile_n)
        dx_scratch[here, :] += dot_f32(slots[part][...], w, (1, 1))  # [tile_n, block_h]
        dw_scratch[:, columns] += dot_f32(x, slots[part][...], (1, 0))  # [block_h, half]

    take_turns(2 * (block_n // tile_n), begin, finish)

    @pl.when(row == pl.num_programs(2) - 1)
    def _finish_dw():
        def write(rows: Any) -> None:
            dw_ref[rows, :] = dw_scratch[rows, :].astype(dw_ref.dtype)

        for_tiles(block_h, LANES, write)

    @pl.when(column == pl.num_programs(1) - 1)
    def _finish_dx():
        def write(rows: Any) -> None:
            here = pl.ds(first_row + rows.start, rows.size)
            dx_ref[rows, :] = dx_scratch[here, :].astype(dx_ref.dtype)

        for_tiles(block_n, tile_n, write)


def stored_blocks(chip: Chip, call: LinearCrossEntropyCall) -> dict[str, int] | None:
    """The blocks for stored exponentials, as fields of the backward's config; None where none fits the chip's VMEM.

    As much of H as fits comes first, since the exponentials are read once for each part. Every core gets a part.
    """
    (n, h), v = call.x.shape, call.w.shape[1]
    columns, most_h = _WIDE if wide_mxu(chip) else _NARROW
    parts = (round_up(pl.cdiv(h, count), LANES) for count in range(1, pl.cdiv(h, LANES) + 1))
    hidden = [part for part in dict.fromkeys(parts) if part <= most_h]
    several = [part for part in hidden if pl.cdiv(h, part) >= chip.cores_per_device]
    columns = [size for size in columns if size < v + LANES]
    for block_h, block_v, block_n in itertools.product(several or hidden, columns, sizes_of_rows(n, LONG_ROWS)):
        fields = {"block_n_stored": block_n, "block_v_stored": block_v, "block_h_stored": block_h}
        config = LinearCrossEntropyTpuBackward(ROW_TILE, LANES, ROW_TILE, LANES, **fields)
        if stored_vmem_bytes(call, config) <= VMEM_SHARE * (chip.vmem_bytes or 0):
            return fields
    return None


def _tile(config: LinearCrossEntropyTpuBackward) -> int:
    return min(config.tile_n, config.block_n_stored)


def stored_kernel(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuBackward, stored_block_v: int) -> Kernel:
    """The kernel that takes exponentials which were stored in blocks of `stored_block_v` columns."""
    (n, h), v, dtype = call.x.shape, call.w.shape[1], call.x.dtype
    block_n, block_h = config.block_n_stored, config.block_h_stored
    block_v = math.gcd(config.block_v_stored, stored_block_v)
    num_n, num_v = pl.cdiv(n, block_n), pl.cdiv(v, block_v)

    def group(j: Any) -> Any:
        return jax.lax.div(jax.lax.div(j * block_v, jnp.int32(stored_block_v)), jnp.int32(BLOCKS))

    # Written once, with the last block of the vocabulary: until then the first block is held.
    dx = Block((block_n, block_h), dtype, lambda k, j, i: (jnp.where(j == num_v - 1, i, 0), k))
    dw = Block((block_h, block_v), dtype, lambda k, j, i: (k, j))
    d_logits = pltpu.VMEM((_tile(config), block_v // 2), dtype)
    return Kernel(
        name="linear_cross_entropy_gradients",
        grid={"hidden": Axis(pl.cdiv(h, block_h), "parallel"), "column": Axis(num_v), "row": Axis(num_n)},
        inputs={
            "x": Block((block_h, block_n), dtype, lambda k, j, i: (k, i)),
            "w": Block((block_h, block_v), dtype, lambda k, j, i: (k, j)),
            "bits": Block((block_n, block_v // 2), jnp.int32, lambda k, j, i: (i, j)),
            "factors": Block((block_n, LANES), jnp.float32, lambda k, j, i: (i, group(j))),
        },
        outputs={"dx": Output((n, h), dx), "dw": Output((h, v), dw)},
        scratch={
            "w_scratch": pltpu.VMEM((block_h, block_v), dtype) if v % block_v else None,
            "dx_scratch": pltpu.VMEM((num_n * block_n, block_h), jnp.float32),
            "dw_scratch": pltpu.VMEM((block_h, block_v), jnp.float32),
            "d_0_scratch": d_logits,
            "d_1_scratch": d_logits,
        },
    )


def stored_vmem_bytes(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuBackward) -> int:
    """An estimate: the kernel's blocks and scratch, and the products of a tile before they are added."""
    block_h, half, tile_n = config.block_h_stored, config.block_v_stored // 2, _tile(config)
    temporaries = (tile_n * block_h + block_h * half) * jnp.dtype(jnp.float32).itemsize
    return stored_kernel(call, config, config.block_v_stored).vmem_bytes(temporaries)


def gradients_of_stored(
    call: LinearCrossEntropyCall, saved: RowStatistics, cotangents: Any, launch: Launch
) -> LinearCrossEntropyCall:
    """dx and dw from what the forward stored."""
    stored, (d_nll, d_logsumexp), x, w = saved.stored, cotangents, call.x, call.w
    assert isinstance(stored, StoredBits)
    (n, h), v, stored_block_v = x.shape, w.shape[1], stored.block_v.value
    factor = (d_nll + d_logsumexp) / saved.total  # [N]
    of_label = factor * jnp.exp(stored.label_logit - saved.highest) - d_nll  # [N]
    if call.soft_cap is not None:
        of_label = of_label * (1.0 - jnp.square(stored.label_logit * (1.0 / call.soft_cap)))
    scales = (factor * _TRUNCATED)[:, None] * jnp.exp(stored.highest - saved.highest[:, None])  # [N, groups * LANES]
    place = jnp.arange(scales.shape[1], dtype=jnp.int32)[None, :] % LANES
    label_bits = jax.lax.bitcast_convert_type(call.labels, jnp.float32)
    factors = jnp.where(place == _OF_LABEL, of_label[:, None], jnp.where(place == _LABEL, label_bits[:, None], scales))
    kernel = stored_kernel(call, launch.config, stored_block_v)
    hidden, columns, _ = (axis.size for axis in kernel.grid.values())
    gradients = kernel.run(
        functools.partial(_gradients_kernel, call=call, tile_n=_tile(launch.config), stored_block_v=stored_block_v),
        {"x": x.T, "w": w, "bits": stored.bits, "factors": factors},
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=4 * n * h * v,
            transcendentals=0,
            bytes_accessed=(n * h + 2 * h * v + columns * n * h + hidden * n * v) * x.dtype.itemsize
            + hidden * columns * factors.nbytes,
        ),
    )
    return call.gradients(x=gradients["dx"], w=gradients["dw"])
