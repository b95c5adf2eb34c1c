"""Inside a chunk, one gate per channel (KDA): (I + A)^-1, P beta, and q and k scaled by their decays.

With G_id the sum of g over the tokens of the chunk up to i,

    A_ij = sum_d k_id k_jd exp(G_id - G_jd) beta_j below the diagonal
    P_ij = sum_d q_id k_jd exp(G_id - G_jd) on and below it
    q_in = q exp(G)        k_in = k exp(G)        k_out = beta k exp(G_C - G)

exp(G_i - G_j) does not factor without overflow. While G falls by less than 80 in the chunk, that is for gates of -1.25,
both sides are scaled to the chunk's start: q_i exp(G_i) and k_j exp(-G_j), whose exponent is positive. The rows are
then q_in and k_in, too. While it falls by less than 135, for gates of -2.1, the rows are stored a second time, times a
power of 2, and the columns times its inverse: the same bits, as exponents that bfloat16 has. Rows for which G falls
further are left out of that, and take more levels in a loop (`PairLevel`): blocks of 16 tokens, and halves of 64 and 32
tokens; where G falls so far in a block, halves of 16, 8, 4 and 2, too. Which levels a row takes depends on tokens up to
it alone: on its own G, which is the lowest so far unless positive gates brought it back.

Sums of gates are bf16x2 products of the tensor cores with zeros and ones: nothing is a difference of two sums.

Thread blocks are persistent, and each of their warpgroups takes chunks of its own, 64 channels at a time. The gates of
the next 64 channels are copied as soon as the last level no longer needs the ones before, into the same memory: there is
no other. A chunk's (I + A)^-1 is shared by the four warps (`invert_by_rows`).

Floor for K = 128: 160 KB per chunk and head, of which 64 KB are q, k and g; 0.47 ms for H96 T8192 at the 4.3 TB/s of a
copy on an H200. It takes 0.59 ms.

Numerics: rounded once are k and q as S meets them, and k in A, since they add less than half of the rounding of o. q in
P, k in P, and k as it goes into S are split.

What brought this kernel from 3.7 ms to 0.59 ms, on an H200 (jax 0.11.2), H96 T8192 D128, mild gates:
- levels in loops instead of unrolled: 2.8 ms (12,600 instructions of PTX do not stay in the instruction cache);
- no addresses and masks kept from before the loops (`tiles_at`): 1.7 ms (a thread spilled 750 bytes, and the shared
  memory leaves 20 KB of cache for that);
- blocks of 32 tokens instead of 16: 1.4 ms; of 64: 1.0 ms;
- an eighth fewer instructions, by masks that are ranges: 0.03 ms;
- sums of gates from ranges of ones (`ColumnRanges`), and the approximate reciprocal instead of the square of that of a
  square root, which checks its range: 0.95 to 0.88 ms;
- 0.88 to 0.59 ms: level 0 in code of its own, whose products add to the scores in place; gates that are copied ahead,
  where a warp loaded them to registers and waited for 22 % of the time; and one inverse per warpgroup instead of one per
  warp, which was 15 %. All of that took 2,900 of 7,300 instructions of a warp and chunk, and no time at all (0.87 ms),
  until next to nothing was spilled: the compiler hoists what a thread computes of its own number out of the persistent
  loop, 340 bytes per thread, and each reload came from the L2 cache. Hence the zeros in `load_float32_square`,
  `load_at_rows`, `store_last_row` and `invert_by_rows`, and masks that compare with constants.
  docs/measurements/2026-11-19-h200-kda.md has the counters.
- heads rotated from chunk to chunk (`place`): 580 us instead of 602 us with the gates of a layer (B4 T4096, 32 heads),
  the same with gates that are alike in all heads.
The whole forward with stronger gates: 1.17 ms for a mean of -1.6, 1.73 ms for -4.5, 2.70 ms for -12 (before those last
changes 1.54, 2.27 and 3.37 ms).

Tried and dropped:
- two chunks per thread block instead of three: 1.8 ms where three took 1.7 ms;
- q and k copied ahead as well, with -A in the tile of the columns: 0.64 ms; those of a chunk's second 64 channels alone:
  0.60 ms, and 0.66 ms instead of 0.61 ms in a layer, whose gates are stronger;
- level 1 in code of its own, and k stored once where it is row and column of a level: an eighth fewer instructions per
  level. 1.13 ms instead of 1.16 ms for gates of -4.5 and 1.91 instead of 2.13 ms for -12, but 0.66 instead of 0.63 ms
  for -1.6 and 0.594 instead of 0.588 ms for mild ones, which do not run that code: it is a fifth longer;
- chunks that a thread block's warpgroups take when they are free, from a counter in shared memory, instead of in turns:
  0.569 ms instead of 0.580 ms with the gates of a layer in two runs, and 0.573 instead of 0.567 ms in the layer in one;
- prefetches into the L2 cache: of what a later thread block reads, 1.05 to 1.07 ms; of what the state kernel reads two
  chunks later, the state kernel takes 0.58 ms instead of 0.50 ms.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import (
    BELOW_ONE,
    LARGEST_EXPONENT,
    SHIFT,
    PairLevel,
    sums_of_gates,
)
from tilewright.ops.delta_rule.pallas_gpu.sm90_inverse import invert_by_rows
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI,
    LO,
    SQUARE,
    TILE,
    Sizes,
    add_bf16x3_of_tiles,
    bfloat16_array,
    bfloat16_tile,
    float32_array,
    float32_buffer,
    keep_order,
    load,
    loop,
    query_head,
    store_hi_lo,
    store_last_row,
    tokens_of_chunk,
    zeros,
)
from tilewright.pallas.gpu.elementwise import reciprocal
from tilewright.pallas.gpu.kernel import InTurns, processors, run_kernel, tile
from tilewright.pallas.gpu.registers import (
    LOG2_E,
    WGMMA,
    ColumnRanges,
    any_row,
    load_along_columns,
    load_at_rows,
    load_float32_square,
    opaque_zero,
    split_hi_lo,
    transposed,
)
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product

_LEAST_INVERSE = 2.0**-BELOW_ONE
Sums = tuple[jax.Array, jax.Array]
"""The products k k^T and q k^T of a chunk, with their decays."""


@dataclass(frozen=True)
class _Tiles:
    """The tokens of a chunk, and the tiles of one warpgroup."""

    i: Any  # [C]
    q: Any  # [C, 64]
    k: Any  # [C, 64]
    gates: Any  # [2 C, 64], hi and lo
    rows: Any  # [3 C, 64]: q, hi and lo, and k
    columns: Any  # [2 C, 64]

    def store_rows(self, decay: jax.Array, without: jax.Array | None = None) -> None:
        """Stores q and k with their decays; zeros in the rows that `without` [C] tells."""

        def decayed(tile: Any) -> jax.Array:
            x = load(tile) * decay
            return x if without is None else jnp.where(lax.broadcast_in_dim(without, SQUARE, [0]), 0.0, x)

        store_hi_lo(self.rows, split_hi_lo(decayed(self.q)))
        keep_order()
        self.rows[_K_ROWS] = decayed(self.k).astype(jnp.bfloat16)

    def store_columns(self, decay: jax.Array) -> None:
        store_hi_lo(self.columns, split_hi_lo(load(self.k) * decay))
        plgpu.commit_smem()

    def exponents(self, tokens: ColumnRanges) -> jax.Array:
        """The sums of the gates of each row's tokens, [C, 64]."""
        return sums_of_gates(self.gates, tokens.ones())

    def add_both(self, kk: Accumulator, qk: Accumulator) -> None:
        self.add_kk(kk)
        self.add_qk(qk)

    def add_kk(self, sum_: Accumulator) -> None:
        sum_.add(self.rows.at[_K_ROWS], transposed(self.columns.at[HI]))  # [C, C]

    def add_qk(self, sum_: Accumulator) -> None:
        add_bf16x3_of_tiles(sum_, self.rows, self.columns, right=transposed)  # [C, C]


_K_ROWS = pl.ds(2 * CHUNK, CHUNK)


def _scores_kernel(
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    g_ref,  # [B, T, HV, K]
    beta_ref,  # [B, HV, chunks, C]
    # outputs
    inverse_ref,  # [B, HV, T, 2 C]: hi and lo side by side
    p_ref,  # [B, HV, T, 2 C]
    q_in_ref, k_in_ref,  # [B, T, HV, K]
    k_out_ref,  # [B, T, HV, 2 K]: hi and lo side by side
    decay_ref,  # [B, HV, chunks, K]: exp(G_C)
    # scratch, for each warpgroup
    key_tiles,  # [2 C, 64]: q above k, and behind the last channels -A, hi above lo
    gate_tiles,  # g as it is loaded, [C, 64], in turns with `_Tiles.gates`
    row_tiles, column_tiles,  # `_Tiles`
    beta_tiles,  # [C]
    keys_full, gates_full,
    # static
    sizes: Sizes,
    blocks: int,
    side_by_side: int,
):  # fmt: skip
    warpgroup, depth = lax.axis_index("warpgroup"), sizes.depth
    count, workers = sizes.b * sizes.chunks * sizes.hv, blocks * side_by_side
    first = warpgroup * blocks + lax.axis_index("block")
    loaded_tiles, split_tiles = gate_tiles
    beta_tile, loaded_gates = beta_tiles.at[warpgroup], loaded_tiles.at[warpgroup]

    def place(n: Any) -> tuple[Any, Any, Any, Any]:
        """The n-th chunk of this warpgroup: its batch element and head, its number, and its tokens.

        Heads that forget fast take longer. The order of the heads is rotated by one from chunk to chunk: otherwise a
        warpgroup would only meet those that the common divisors of `workers` and the number of heads leave it.
        """
        rest, hv = divmod_nonnegative(first + n * workers, sizes.hv)
        b, chunk = divmod_nonnegative(rest, sizes.chunks)
        _, hv = divmod_nonnegative(hv + rest, sizes.hv)
        return b, hv, chunk, pl.ds(chunk * CHUNK, CHUNK)

    def copy_gates(n: Any, d: Any) -> None:
        """The gates of the d-th 64 channels of the n-th chunk, or of the chunk behind its last channels."""
        n, d = jnp.where(d < sizes.depth_tiles, n, n + 1), jnp.where(d < sizes.depth_tiles, d, 0)

        @pl.when(first + n * workers < count)
        def _copy():
            b, hv, _, tokens = place(n)
            source = g_ref.at[b, tokens, hv, pl.ds(d * TILE, TILE)]
            plgpu.copy_gmem_to_smem(source, loaded_gates, gates_full.at[warpgroup])

    copy_gates(jnp.int32(0), jnp.int32(0))

    def one_chunk(n: Any) -> None:
        b, hv, chunk, tokens = place(n)

        def tiles_at(index: Any) -> _Tiles:
            """Addresses and masks, recomputed wherever they are used: registers are scarce."""
            zero = opaque_zero(n + index)
            keys = key_tiles.at[warpgroup + zero]
            tiles = (each.at[warpgroup + zero] for each in (split_tiles, row_tiles, column_tiles))
            return _Tiles(tokens_of_chunk() + zero, keys.at[HI], keys.at[LO], *tiles)

        def add_channels(d: Any, sums: Sums) -> Sums:
            """Adds the scores over the d-th 64 key channels, and writes those channels of the scaled operands."""
            at, channels, h = tiles_at(d), pl.ds(d * TILE, TILE), query_head(hv, sizes.group)
            ready = keys_full.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h, channels], at.q, ready)
            plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h, channels], at.k, ready)
            plgpu.copy_gmem_to_smem(beta_ref.at[b, hv, chunk], beta_tile, ready)
            plgpu.barrier_wait(gates_full.at[warpgroup])
            g = jnp.maximum(load_float32_square(loaded_gates, opaque_zero(n + d)), LOWEST_GATE) * LOG2_E
            plgpu.commit_smem()  # All warps have loaded the gates, whose memory is that of the parts.
            store_hi_lo(at.gates, split_hi_lo(g))
            plgpu.commit_smem()

            out = jnp.exp2(at.exponents(ColumnRanges(at.i + 1, None)))
            plgpu.barrier_wait(ready)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # What is still copied from the tiles is written again.
            at.store_columns(out * load_at_rows(beta_tile, at.i, SQUARE))
            for part, first in ((HI, 0), (LO, depth)):
                to = k_out_ref.at[b, tokens, hv, pl.ds(first + d * TILE, TILE)]
                plgpu.copy_smem_to_gmem(at.columns.at[part], to)

            at = tiles_at(d + CHUNK)
            exponent = at.exponents(ColumnRanges(None, at.i + 1))
            in_chunk = jnp.min(exponent, axis=1)
            decay = jnp.exp2(exponent)
            store_last_row(decay_ref.at[b, hv, chunk, channels], decay, opaque_zero(n + d))
            at.store_rows(decay)
            shifts = any_row(in_chunk < -BELOW_ONE)
            # The rows are scaled with their decay from the chunk's start: as S meets them.
            plgpu.copy_smem_to_gmem(at.rows.at[HI], q_in_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(at.rows.at[_K_ROWS], k_in_ref.at[b, tokens, hv, channels])
            pl.when(shifts == 0)(lambda: copy_gates(n, d + 1))

            def shift(turn: Any, _: Any) -> tuple[jax.Array, jax.Array]:
                """Stores the rows again, shifted: those that need none get the same bits. Rows that decayed too far
                take no part in this level.
                """
                at = tiles_at(d + turn)
                exponent = at.exponents(ColumnRanges(None, at.i + 1))
                low, too_far = exponent < -BELOW_ONE, jnp.min(exponent, axis=1) < -LARGEST_EXPONENT
                decay = jnp.exp2(jnp.where(low, exponent + SHIFT, exponent)) * jnp.where(low, 1.0, 2.0**SHIFT)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                at.store_rows(decay, without=too_far)
                return decay, jnp.where(any_row(too_far) > 0, PairLevel.count(True, False), 1)

            decay, levels = lax.fori_loop(0, shifts, shift, (decay, jnp.int32(1)))
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)  # The copies of the columns: those of the rows came later.
            at = tiles_at(d + CHUNK)
            at.store_columns(reciprocal(jnp.maximum(decay, _LEAST_INVERSE), WGMMA))
            at = tiles_at(d + CHUNK)
            kk, qk = accumulate(sums, at.add_both)
            sums = kk, qk
            plgpu.commit_smem()  # Other warps may still be multiplying: the tiles are written again only after this.

            def add_level(carry: Any) -> Any:
                """Adds the scores of the rows that decayed too far, in one more level."""
                level, levels, rank, (kk, qk) = carry
                at, now = tiles_at(d + level), PairLevel.of(level)
                exponent = at.exponents(ColumnRanges(*now.exponents(at.i)))
                # Level 1 tells which rows decay too far in a block.
                in_block = jnp.where(level == 1, jnp.min(exponent, axis=1), 0.0)
                rank = jnp.where(in_block < -LARGEST_EXPONENT, rank * 2, rank)
                decay = jnp.exp2(exponent + jnp.where(level == 1, SHIFT, 0.0))
                at.store_rows(decay)
                levels = jnp.where(any_row(rank == 2) > 0, PairLevel.count(True, True), levels)
                inverse = reciprocal(jnp.maximum(decay, _LEAST_INVERSE), WGMMA)
                at.store_columns(jnp.where(now.from_start, inverse, decay))
                at = tiles_at(d + level + CHUNK)
                pairs = ColumnRanges(*now.pairs(at.i, rank))
                kk = kk + pairs.keep(product(SQUARE, at.add_kk))  # One after the other: registers are scarce.
                qk = qk + pairs.keep(product(SQUARE, at.add_qk))
                plgpu.commit_smem()
                return level + 1, levels, rank, (kk, qk)

            more = jnp.int32(1), levels, PairLevel.rank(in_chunk, jnp.zeros_like(in_chunk)), sums
            *_, sums = lax.while_loop(lambda carry: carry[0] < carry[1], add_level, more)
            pl.when(shifts > 0)(lambda: copy_gates(n, d + 1))
            return sums

        kk, qk = lax.fori_loop(0, sizes.depth_tiles, add_channels, (zeros(), zeros()))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        at = tiles_at(0)
        p = ColumnRanges(None, at.i + 1).keep(qk * load_along_columns(beta_tile, SQUARE))
        store_hi_lo(at.rows, split_hi_lo(p))
        erased = ColumnRanges(None, at.i).keep(kk * -load_along_columns(beta_tile, SQUARE))
        store_hi_lo(key_tiles.at[warpgroup], split_hi_lo(erased))
        plgpu.commit_smem()

        def write(ref: Any, hi_lo: Any) -> None:
            for part in (HI, LO):
                plgpu.copy_smem_to_gmem(hi_lo.at[part], ref.at[b, hv, tokens, part])

        write(p_ref, at.rows)
        own = pl.ds(warpgroup, 1)
        invert_by_rows(key_tiles.at[own], column_tiles.at[own], opaque_zero(n))
        plgpu.commit_smem()
        write(inverse_ref, at.columns)

    @loop(pl.cdiv(count, workers))  # The same for all warpgroups, so that the compiler counts it once for a warp.
    def _chunks(n: Any) -> None:
        pl.when(first + n * workers < count)(functools.partial(one_chunk, n))

    plgpu.wait_smem_to_gmem(0)


def scratch(side_by_side: int) -> dict[str, Any]:
    return {
        "key_tiles": bfloat16_tile(side_by_side, 2 * CHUNK, TILE),
        "gate_tiles": InTurns(
            (tile(side_by_side, CHUNK, TILE, dtype=jnp.float32), bfloat16_tile(side_by_side, 2 * CHUNK, TILE))
        ),
        "row_tiles": bfloat16_tile(side_by_side, 3 * CHUNK, TILE),
        "column_tiles": bfloat16_tile(side_by_side, 2 * CHUNK, TILE),
        "beta_tiles": float32_buffer(side_by_side, CHUNK),
        "keys_full": plgpu.Barrier(num_arrivals=3, num_barriers=side_by_side),
        "gates_full": plgpu.Barrier(num_arrivals=1, num_barriers=side_by_side),
    }


def scores(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, sizes: Sizes, launch: Launch
) -> dict[str, jax.Array]:
    """`inverse`, `p`, `q_in`, `k_in`, `k_out` and `decay`, as the kernel's outputs are declared."""
    b, t, hv, depth, side_by_side = sizes.b, sizes.t, sizes.hv, sizes.depth, launch.config.score_chunks
    pairs, keys = bfloat16_array(b, hv, t, 2 * CHUNK), bfloat16_array(b, t, hv, depth)
    # As many as run at the same time: a multiprocessor has room for two of one warpgroup.
    blocks = min(processors(launch.chip) * max(2 // side_by_side, 1), b * hv * sizes.chunks)
    return run_kernel(
        functools.partial(_scores_kernel, sizes=sizes, blocks=blocks, side_by_side=side_by_side),
        name="kda_scores",
        inputs={"q": q, "k": k, "g": g, "beta": beta},
        outputs={
            "inverse": pairs,
            "p": pairs,
            "q_in": keys,
            "k_in": keys,
            "k_out": bfloat16_array(b, t, hv, 2 * depth),
            "decay": float32_array(b, hv, sizes.chunks, depth),
        },
        scratch=scratch(side_by_side),
        grid={"block": blocks},
        warpgroups=side_by_side,
    )
