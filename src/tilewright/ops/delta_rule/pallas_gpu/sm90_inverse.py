"""Inside a chunk, one gate per head: the (I + A)^-1 of the WY transform.

A_ij = (k_i . k_j) decay_ij beta_j below the diagonal. A thread block of one warpgroup inverts four of these matrices, all
at once for the whole sequence: those of four value heads that share a key head, of two heads in two chunks, or of four
chunks of one head. k k^T is a wgmma product of the warpgroup, one for all of its heads. From then on each warp has a matrix
of its own in registers, as blocks of 16 by 16, and multiplies these by itself (mma): no warp waits for another, and the
blocks above the diagonal cost nothing. The blocks on the diagonal are inverted by Newton's steps, those below it by
substitution, as bf16x3 products. Threads hold -A^T, not A: that is how the tensor cores take a right operand.

Measured on an H200 (driver 580.159.04, jax 0.11.2), T8192 D128: 61 to 63 us for 16 qk / 64 v heads, 37 us for 16 / 32,
112 us for 96. A matrix takes about 2,400 instructions of one warp. Without the inverting this kernel takes 52 us for
16 / 64 heads; its bytes alone take 40 us at the bandwidth of a copy.

KDA's kernel (sm90_scores.py) inverts in the same way, with one matrix per warpgroup: each warp inverts a block on the
diagonal and computes that row of blocks (`invert_by_rows`).

Tried and dropped, on that H200:
- a warpgroup per matrix: Newton's steps up to blocks of 64, as wgmma products of the whole matrix, with those up to blocks
  of 16 in the registers of each warp. 121 us for 16 / 64 heads, 62 us for 16 / 32, 175 us for 96: 1,800 instructions of
  each of four warps, six times the multiplications, and barriers between the products. KDA's kernel took 0.9 % less with
  it than with all of the inverse in each warp, 573 us instead of 578 us (mild gates, B4 T4096, 32 heads);
- the whole of -A^T before the first inverse: 190 registers instead of 150, and so two thread blocks to a multiprocessor
  instead of three; with three warpgroups per thread block, which bounds the registers, it spills. Neither was timed;
- Newton's steps unrolled: 63.5 us where the loop takes 62.8 us;
- hi above lo in shared memory, with two copies per inverse: 55 us instead of 52 us without the inverting.

Tried and dropped with a warpgroup per matrix, for 96 heads (it took 255 us before its first steps were in registers, then
200 us, and 175 us with `upcast`):
- the inverse in the state kernel, by the warpgroups that copy: 2.4 ms for the whole forward. The products of an inverse
  depend on each other; three chunks side by side hide each other's latency;
- bf16x2 products throughout, 30 instead of 18: 0.46 ms, then 0.32 ms. Of these, 0.16 ms are for the operands and the
  copies. With three warpgroups per thread block 0.37 ms; with four, registers spill, 0.39 ms. With `upcast` instead of
  conversions it is 0.26 ms;
- Newton's steps unrolled instead of in a loop: a tenth more (the instruction cache);
- the gates in this kernel, with persistent thread blocks that copy the keys of their next chunk early: 0.31 ms. It has
  a third more instructions, and the thread blocks of a multiprocessor already hide each other's copies.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI_LO,
    MASKED,
    SQUARE,
    Row,
    Sizes,
    bfloat16_array,
    bfloat16_tile,
    float32_buffer,
    query_head,
)
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import (
    BF16X3,
    WGMMA,
    split_hi_lo,
    tile_of_zeros,
    transposed,
    upcast,
)
from tilewright.pallas.gpu.warp_mma import (
    BLOCK,
    BLOCKS,
    WARPS,
    DealtSquares,
    OfWarp,
    add_block_products,
    load_along_block_columns,
    load_along_block_rows,
    load_per_block,
    load_transposed_block,
    store_block,
    transposed_blocks,
)
from tilewright.pallas.gpu.wgmma import Accumulator, products

MATRICES = WARPS
"""Matrices of a thread block, one per warp."""
_SIDE = CHUNK // BLOCK
"""Blocks along a side of a matrix."""
_GATES = 3
"""The rows of a chunk's gates that are read, which are the first: COARSE, FINE and BETA."""

SplitBlock = tuple[jax.Array, jax.Array]
"""A block per warp as bf16x2, [64, 16] each."""
Inverse = dict[tuple[int, int], SplitBlock]
"""A matrix per warp: its blocks on and below the diagonal, by row and column."""


def invert(erased: Callable[[int, int], SplitBlock]) -> Inverse:
    """(I + A)^-1 of each warp's strictly lower triangular A [C, C].

    `erased` gives the blocks of -(I + A)^T, on and above the diagonal, by row and column. Blocks of 16 on the diagonal are
    inverted by themselves (`_invert_blocks`) and merged by substitution, from the last column to the first:
    X_ij = -(sum of X_is A_sj over s from j + 1 to i) X_jj. Blocks of tokens are merged, never powers of A summed: those
    overflow where keys are alike.

    The right operands of all these products are at hand as the tensor cores take them, which is transposed.
    """
    diagonal = _invert_blocks([erased(block, block) for block in range(_SIDE)])
    nothing = tile_of_zeros(BLOCKS)
    inverse = {(block, block): split_hi_lo(x) for block, x in enumerate(diagonal)}
    for j in reversed(range(_SIDE)):
        hi, lo = inverse[j, j]
        own = transposed_blocks(hi), transposed_blocks(lo)
        of_column = {s: erased(j, s) for s in range(j + 1, _SIDE)}
        for i in range(j + 1, _SIDE):
            sums = nothing
            for s in range(j + 1, i + 1):
                sums = _add_bf16x3(sums, inverse[i, s], of_column[s])
            inverse[i, j] = split_hi_lo(_add_bf16x3(nothing, split_hi_lo(sums), own))
    return inverse


def invert_by_rows(erased: Any, inverse: Any, zero: Any) -> None:
    """(I + A)^-1 of a matrix per warpgroup, as `invert` computes it: each warp has a row of its blocks.

    `erased` is -A in a tile [1, 2 C, C], with hi above lo, and `inverse` is such a tile, for the result. The caller
    has a barrier before, and one behind it. `zero` is one that the compiler cannot fold.
    """

    def transposed_of(tile: Any, row: int, column: int) -> SplitBlock:
        """A block, transposed, so many blocks behind each warp's own on the diagonal."""
        hi, lo = (load_transposed_block(tile, OfWarp(row, part * _SIDE), OfWarp(column), zero) for part in range(HI_LO))
        return hi, lo

    def store_own(behind: int, block: SplitBlock) -> None:
        for part, value in enumerate(block):
            store_block(inverse, OfWarp(0, part * _SIDE), OfWarp(behind), value, zero)

    hi, lo = transposed_of(erased, 0, 0)
    row, column = _positions_in_block()
    hi = jnp.where(row + zero == column, -1.0, upcast(hi)).astype(jnp.bfloat16)
    (diagonal,) = _invert_blocks([(hi, lo)], zero)
    row = [split_hi_lo(diagonal)]  # From the diagonal to the left.
    store_own(0, row[0])
    plgpu.commit_smem()  # Every warp reads the blocks of the diagonal.
    nothing = tile_of_zeros(BLOCKS)
    token = plgpu.broadcasted_iota(jnp.int32, BLOCKS, 0, layout=WGMMA) + zero
    for behind in range(1, _SIDE):
        sums = nothing
        for s in range(behind):
            sums = _add_bf16x3(sums, row[s], transposed_of(erased, s, behind))
        x = _add_bf16x3(nothing, split_hi_lo(sums), transposed_of(inverse, behind, behind))
        # Left of the first column it would be the last one, above the diagonal, whose blocks are zeros.
        row.append(split_hi_lo(jnp.where(token >= behind * BLOCK, x, 0.0)))
        store_own(behind, row[-1])


def _invert_blocks(erased: list[SplitBlock], zero: Any = 0) -> tuple[jax.Array, ...]:
    """The inverses of blocks of I + A, given those of -(I + A)^T.

    Blocks of 2 tokens are inverted directly. Then X <- X + (I - X (I + A)) X, Newton's step, four times, with X and the
    bracket rounded. The bracket is taken inside of blocks that double each time: the X A term alone merges two blocks, and
    the rest corrects the rounding of the steps before; the fourth step does nothing else.
    """
    row, column = _positions_in_block()
    apart = lax.bitwise_xor(row + zero, column)

    def invert_pairs(erased: jax.Array) -> jax.Array:
        pairs = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, upcast(erased), 0.0)).astype(jnp.bfloat16)
        return upcast(transposed_blocks(pairs))

    def newton_step(level: Any, x: jax.Array, erased: SplitBlock) -> jax.Array:
        rounded = x.astype(jnp.bfloat16)
        missing = tile_of_zeros(BLOCKS)
        for part in erased:
            missing = add_block_products(missing, rounded, part)
        # Elements are less than 2^level apart in the same block of 2^level. On the diagonal X (I + A) is 1 to the bit, so
        # nothing is missing there. The compiler would select after the rounding, and then round element by element.
        inside = (apart < lax.shift_left(jnp.int32(1), level)) & (apart > 0)
        missing = lax.optimization_barrier(jnp.where(inside, missing, 0.0)).astype(jnp.bfloat16)
        return add_block_products(upcast(rounded), missing, transposed_blocks(rounded))

    def step(level: Any, blocks: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(newton_step(level, x, each) for x, each in zip(blocks, erased, strict=True))

    pairs = tuple(invert_pairs(hi) for hi, _ in erased)
    return lax.fori_loop(2, BLOCK.bit_length() + 1, step, pairs)


def _add_bf16x3(sums: jax.Array, x: SplitBlock, y_transposed: SplitBlock) -> jax.Array:
    for one, another in BF16X3:
        sums = add_block_products(sums, x[one], y_transposed[another])
    return sums


def _positions_in_block() -> tuple[jax.Array, jax.Array]:
    """The row and the column of each element in its block, [64, 16]."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, BLOCKS, axis, layout=WGMMA) for axis in (0, 1))
    return lax.rem(row, jnp.int32(BLOCK)), column


def _store(tiles: Any, inverse: Inverse) -> None:
    """Stores each warp's inverse into its tile [C, 2 C], hi and lo side by side."""
    blank = tile_of_zeros(BLOCKS).astype(jnp.bfloat16)
    for i in range(_SIDE):
        for j in range(_SIDE):
            for part, block in enumerate(inverse.get((i, j), (blank, blank))):
                store_block(tiles, i, part * _SIDE + j, block)


class _Erased:
    """-(I + A)^T of each warp's matrix, by blocks on and above the diagonal, which are computed where they are used."""

    def __init__(self, kk: DealtSquares, gates: Any):
        self.kk, self.gates = kk, gates

    def block(self, row: int, column: int) -> SplitBlock:
        minus_beta = -load_along_block_rows(self.gates.at[:, Row.BETA, pl.ds(row * BLOCK, BLOCK)])
        rows = self._sums(load_along_block_rows, row)
        columns = self._sums(load_along_block_columns, column)
        kk = self.kk.block(row, column)
        if row == column:
            i, j = _positions_in_block()
            after = j - i
            exponent = jnp.where(after > 0, _difference(columns, rows), MASKED)
            return split_hi_lo(jnp.where(after == 0, -1.0, kk * jnp.exp(exponent) * minus_beta))
        # The decay to the first token of the later block, per row, times that from it, per column.
        between = self._sums(load_per_block, column, count=1)
        to_first = jnp.exp(_difference(between, rows)) * minus_beta
        return split_hi_lo(kk * to_first * jnp.exp(_difference(columns, between)))

    def _sums(self, load: Callable[[Any], jax.Array], block: int, count: int = BLOCK) -> tuple[jax.Array, jax.Array]:
        """Both parts of G, of the first `count` tokens of a block."""
        tokens = pl.ds(block * BLOCK, count)
        coarse, fine = (load(self.gates.at[:, row, tokens]) for row in (Row.COARSE, Row.FINE))
        return coarse, fine


def _difference(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> jax.Array:
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def _inverse_kernel(
    *,
    # inputs
    k_ref,  # [B, T, H, K]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    # outputs
    inverse_ref,  # [B, HV, T, 2 C]: hi and lo side by side
    # scratch
    tiles,  # [4, C, 2 C]: the keys of each chunk, then k k^T, then each warp's inverse, hi and lo side by side
    keys,  # [chunks, C, K] where these are narrower, or None
    gates,  # [4, 3, C]
    full,
    # static
    sizes: Sizes,
    heads: int,
):  # fmt: skip
    b, first_head = lax.axis_index("batch"), lax.axis_index("heads") * heads
    chunks = MATRICES // heads
    first_chunk = lax.axis_index("chunks") * chunks
    key_head = query_head(first_head, sizes.group)
    key_tiles = tiles if keys is None else keys

    def tokens(n: Any) -> Any:
        return pl.ds(n * CHUNK, CHUNK)

    for c in range(chunks):
        n = jnp.minimum(first_chunk + c, sizes.chunks - 1)  # What is past the end is not written.
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens(n), key_head], key_tiles.at[c], full)
        for head in range(heads):
            rows = gates_ref.at[b, first_head + head, n, pl.ds(0, _GATES)]
            plgpu.copy_gmem_to_smem(rows, gates.at[c * heads + head], full)
    plgpu.barrier_wait(full)

    def add_products(*sums: Accumulator) -> None:
        for c, sum_ in enumerate(sums):
            sum_.add(key_tiles.at[c], transposed(key_tiles.at[c]))

    kk = products((SQUARE,) * chunks, add_products)
    plgpu.commit_smem()  # Other warps may still be multiplying.
    inverse = invert(_Erased(DealtSquares(list(kk), tiles), gates).block)
    plgpu.commit_smem()  # All warps have loaded their blocks of k k^T.
    _store(tiles, inverse)
    plgpu.commit_smem()
    for c in range(chunks):

        @pl.when(first_chunk + c < sizes.chunks)
        def _write(c: int = c) -> None:
            for head in range(heads):
                to = inverse_ref.at[b, first_head + head, tokens(first_chunk + c)]
                plgpu.copy_smem_to_gmem(tiles.at[c * heads + head], to)

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _heads(sizes: Sizes) -> int:
    """Value heads of a thread block. They share a key head."""
    return math.gcd(sizes.group, MATRICES)


def scratch(sizes: Sizes) -> dict[str, Any]:
    chunks, width = MATRICES // _heads(sizes), HI_LO * CHUNK
    return {
        "tiles": bfloat16_tile(MATRICES, CHUNK, width),
        "keys": None if sizes.depth == width else bfloat16_tile(chunks, CHUNK, sizes.depth),
        "gates": float32_buffer(MATRICES, _GATES, CHUNK),
        "full": plgpu.Barrier(num_arrivals=chunks + MATRICES),
    }


def inverses(k: jax.Array, gates: jax.Array, sizes: Sizes) -> jax.Array:
    """(I + A)^-1 of every chunk, [B, HV, T, 2 C] bfloat16: hi and lo side by side."""
    heads = _heads(sizes)
    return run_kernel(
        functools.partial(_inverse_kernel, sizes=sizes, heads=heads),
        name="delta_rule_inverses",
        inputs={"k": k, "gates": gates},
        outputs={"inverse": bfloat16_array(sizes.b, sizes.hv, sizes.t, HI_LO * CHUNK)},
        scratch=scratch(sizes),
        grid={"chunks": pl.cdiv(sizes.chunks, MATRICES // heads), "heads": sizes.hv // heads, "batch": sizes.b},
    )["inverse"]
