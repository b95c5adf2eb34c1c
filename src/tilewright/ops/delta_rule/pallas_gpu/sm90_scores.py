"""Inside a chunk, one gate per channel (KDA): (I + A)^-1, P beta, and q and k scaled by their decays.

With G_id the sum of g over the tokens of the chunk up to i,

    A_ij = sum_d k_id k_jd exp(G_id - G_jd) beta_j below the diagonal
    P_ij = sum_d q_id k_jd exp(G_id - G_jd) on and below it
    q_in = q exp(G)        k_in = k exp(G)        k_out = beta k exp(G_C - G)

exp(G_i - G_j) does not factor without overflow. While G falls by less than 80 in the chunk, that is for gates of -1.25,
both sides are scaled to the chunk's start: q_i exp(G_i) and k_j exp(-G_j), whose exponent is positive. The rows are
then q_in and k_in, too. While it falls by less than 135, for gates of -2.1, the rows are stored a second time, times a
power of 2, and the columns times its inverse: the same bits, as exponents that bfloat16 has. Rows for which G falls
further take more levels (`PairLevel`): blocks of 16 tokens, and halves of 64, 32, 16, 8, 4 and 2. A loop has one level
where no row of the chunk needs more, four, or nine. Which levels a row takes depends on tokens up to it alone: on its own
G, which is the lowest so far unless positive gates brought it back.

Sums of gates are bf16x2 products of the tensor cores with zeros and ones: nothing is a difference of two sums.

Numerics: rounded once are k and q as S meets them, and k in A, since they add less than half of the rounding of o. q in
P, k in P, and k as it goes into S are split.

What brought this kernel from 3.7 ms to 0.88 ms, on an H200 (driver 580.159.04, jax 0.11.2), H96 T8192 D128:
- levels in loops instead of unrolled: 2.8 ms (12,600 instructions of PTX do not stay in the instruction cache);
- no addresses and masks kept from before the loops (`tiles_at`): 1.7 ms (a thread spilled 750 bytes, and the shared
  memory leaves 20 KB of cache for that);
- blocks of 32 tokens instead of 16: 1.4 ms; of 64: 1.0 ms;
- an eighth fewer instructions, by masks that are ranges: 0.03 ms. Three warps per scheduler do not hide latency; 9 % of
  the time is that of g;
- sums of gates from a bit per token (`ColumnRanges`), and the approximate reciprocal instead of the square of that of a
  square root, which checks its range: 0.95 to 0.88 ms.
The whole forward with stronger gates, before and after the shift and blocks of 16 in place of 32: 1.96 and 1.54 ms for a
mean of -1.6, 3.63 and 2.19 ms for -4.5, 3.60 and 3.37 ms for -12.

Tried and dropped:
- two chunks per thread block instead of three: 1.8 ms where three took 1.7 ms;
- level 0, and the blocks of 16, in code of their own: 0.91 ms where one loop takes 0.88 ms with mild gates, 1.63 and
  1.66 ms with a mean of -4.5, 2.63 and 2.83 ms with -12;
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

from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import (
    BELOW_ONE,
    SHIFT,
    PairLevel,
    lowest_of_all,
    sums_of_gates,
)
from tilewright.ops.delta_rule.pallas_gpu.sm90_inverse import invert, store_inverse
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI,
    HI_LO,
    LO,
    SQUARE,
    TILE,
    Sizes,
    bf16x3_product,
    bfloat16_array,
    bfloat16_tile,
    float32_array,
    float32_buffer,
    keep_order,
    load,
    positions,
    query_head,
    store_hi_lo,
    tokens_of_chunk,
    zeros,
)
from tilewright.pallas.gpu.elementwise import reciprocal
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import (
    LOG2_E,
    WGMMA,
    ColumnRanges,
    load_along_columns,
    load_along_rows,
    opaque_zero,
    split_hi_lo,
    transposed,
    upcast_elements,
)
from tilewright.pallas.gpu.warp_mma import BLOCK, load_transposed_block
from tilewright.pallas.gpu.wgmma import product

# With pairs of elements at a time this kernel takes as long as before the inverse's blocks of 16: 1.00 ms, not 0.955.
_split = functools.partial(split_hi_lo, widen=upcast_elements)


@dataclass(frozen=True)
class _Tiles:
    """The tokens of a chunk, and the tiles of one warpgroup."""

    i: Any  # [C]
    q: Any  # [C, 64]
    k: Any  # [C, 64]
    g_hi_lo: Any  # [2 C, 64]
    rows: Any  # [3 C, 64]: q, hi and lo, and k
    columns: Any  # [2 C, 64]


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
    q_tiles, k_tiles, g_tiles, row_tiles, column_tiles,  # `_Tiles`
    beta_tiles,  # [C]
    decay_tiles,  # [64]
    lowest_tiles,  # [C]
    full,
    # static
    chunks: int,
    side_by_side: int,
    group: int,
):  # fmt: skip
    b, hv, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    n = lax.axis_index("chunk") * side_by_side + warpgroup
    tokens = pl.ds(n * CHUNK, CHUNK)
    k_rows = pl.ds(2 * CHUNK, CHUNK)
    depth = k_in_ref.shape[-1]

    @pl.when(n < chunks)
    def _one_chunk():
        ready = full.at[warpgroup]

        def tiles_at(index: Any) -> _Tiles:
            """Addresses and masks, recomputed wherever they are used: registers are scarce."""
            zero = opaque_zero(n + index)
            tiles = (q_tiles, k_tiles, g_tiles, row_tiles, column_tiles)
            return _Tiles(tokens_of_chunk() + zero, *(each.at[warpgroup + zero] for each in tiles))

        def scores(at: _Tiles, pairs: ColumnRanges, kk: jax.Array, qk: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows, columns = at.rows, at.columns
            plgpu.commit_smem()
            more = product(SQUARE, lambda sum_: sum_.add(rows.at[k_rows], transposed(columns.at[HI])))  # [C, C]
            kk = kk + pairs.keep(more)
            more = bf16x3_product(rows, columns, right=transposed)
            plgpu.commit_smem()  # Other warps may still be multiplying: the tiles are written again only after this.
            return kk, qk + pairs.keep(more)

        def add_level(
            at: _Tiles, d: Any, level: Any, exponents: tuple[jax.Array, jax.Array], sums: tuple[jax.Array, jax.Array]
        ) -> Any:
            """Adds a level's scores to the sums. Returns the lowest exponents too: of all rows, and of each row in the
            first two levels.
            """
            now, channels = PairLevel.of(level), pl.ds(d * TILE, TILE)

            def store_rows(decay: jax.Array) -> None:
                store_hi_lo(at.rows, _split(load(at.q) * decay))
                keep_order()
                at.rows[k_rows] = (load(at.k) * decay).astype(jnp.bfloat16)
                plgpu.commit_smem()

            exponent = sums_of_gates(at.g_hi_lo, ColumnRanges(*now.exponents(at.i)).ones())
            of_rows = jnp.min(exponent, axis=1)
            exponents = jnp.where(level == 0, of_rows, exponents[0]), jnp.where(level == 1, of_rows, exponents[1])
            decay = jnp.exp2(exponent + jnp.where(level == 1, SHIFT, 0.0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # What the copies of level 0 read is written again.
            store_rows(decay)
            lowest = lowest_of_all(of_rows, lowest_tiles.at[warpgroup])

            @pl.when(level == 0)
            def _copy_out():
                # The rows are scaled with their decay from the chunk's start: as S meets them.
                plgpu.copy_smem_to_gmem(at.rows.at[HI], q_in_ref.at[b, tokens, hv, channels])
                plgpu.copy_smem_to_gmem(at.rows.at[k_rows], k_in_ref.at[b, tokens, hv, channels])

            def shift(n: Any, _: jax.Array) -> jax.Array:
                """Stores the rows again. Those that need no shift get the same bits, shifted."""
                at = tiles_at(d + n)
                exponent = sums_of_gates(at.g_hi_lo, ColumnRanges(*now.exponents(at.i)).ones())
                low = exponent < -BELOW_ONE
                decay = jnp.exp2(jnp.where(low, exponent + SHIFT, exponent)) * jnp.where(low, 1.0, 2.0**SHIFT)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_rows(decay)
                return decay

            decay = lax.fori_loop(0, jnp.where((level == 0) & (lowest < -BELOW_ONE), 1, 0), shift, decay)
            inverse = reciprocal(jnp.maximum(decay, 2.0**-BELOW_ONE), WGMMA)
            store_hi_lo(at.columns, _split(load(at.k) * jnp.where(now.from_start, inverse, decay)))
            at = tiles_at(d + level + CHUNK)
            return lowest, exponents, scores(at, ColumnRanges(*now.pairs(at.i, *exponents)), *sums)

        def add_channels(d: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Adds the scores over the d-th 64 key channels, and writes those channels of the scaled operands."""
            at = tiles_at(d)
            channels = pl.ds(d * TILE, TILE)
            h = query_head(hv, group)
            plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h, channels], at.q, ready)
            plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h, channels], at.k, ready)
            plgpu.copy_gmem_to_smem(beta_ref.at[b, hv, n], beta_tiles.at[warpgroup], ready)
            g = jnp.maximum(load(g_ref.at[b, tokens, hv, channels]), LOWEST_GATE) * LOG2_E
            store_hi_lo(at.g_hi_lo, _split(g))
            plgpu.commit_smem()
            # Transposed: a sum over rows would go through memory that Pallas has once for all warpgroups.
            g_transposed = load(transposed(at.g_hi_lo.at[HI])) + load(transposed(at.g_hi_lo.at[LO]))
            whole_decay = decay_tiles.at[warpgroup]
            whole_decay[...] = jnp.exp2(jnp.sum(g_transposed, axis=1))
            plgpu.barrier_wait(ready)

            def next_level(carry: Any) -> Any:
                level, levels, exponents, sums = carry
                lowest, exponents, sums = add_level(tiles_at(d + level), d, level, exponents, sums)
                # Level 0 tells which rows decay too far in the chunk; level 1, which runs if some do, which in a block.
                levels = jnp.where(level == 0, PairLevel.count(lowest, 0.0), levels)
                levels = jnp.where(level == 1, PairLevel.count(-jnp.inf, lowest), levels)
                return level + 1, levels, exponents, sums

            unknown = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), WGMMA.reduce(1))
            first = jnp.int32(0), jnp.int32(1), (unknown, unknown), sums
            _, _, _, sums = lax.while_loop(lambda carry: carry[0] < carry[1], next_level, first)

            at = tiles_at(d + CHUNK)
            after = ColumnRanges(at.i + 1, jnp.full_like(at.i, CHUNK)).ones()
            out = jnp.exp2(sums_of_gates(at.g_hi_lo, after)) * load_along_rows(beta_tiles.at[warpgroup], SQUARE)
            store_hi_lo(at.columns, _split(load(at.k) * out))
            plgpu.commit_smem()
            lo_channels = pl.ds(depth + d * TILE, TILE)
            plgpu.copy_smem_to_gmem(at.columns.at[HI], k_out_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(at.columns.at[LO], k_out_ref.at[b, tokens, hv, lo_channels])
            plgpu.copy_smem_to_gmem(whole_decay, decay_ref.at[b, hv, n, channels])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return sums

        zero = zeros()
        kk, qk = lax.fori_loop(0, depth // TILE, add_channels, (zero, zero))

        def write(ref: Any, hi_lo: Any) -> None:
            plgpu.commit_smem()
            for part in (HI, LO):
                plgpu.copy_smem_to_gmem(hi_lo.at[part], ref.at[b, hv, tokens, part])

        at, beta = tiles_at(0), beta_tiles.at[warpgroup]
        store_hi_lo(at.rows, _split(qk * load_along_columns(beta, SQUARE)))
        write(p_ref, at.rows)
        i, j = positions()
        erased = jnp.where(i > j, kk * -load_along_columns(beta, SQUARE), jnp.where(i == j, -1.0, 0.0))
        store_hi_lo(at.g_hi_lo, _split(erased))
        plgpu.commit_smem()
        own = pl.ds(warpgroup, 1)

        def erased_block(row: int, column: int) -> tuple[jax.Array, jax.Array]:
            hi, lo = (
                load_transposed_block(g_tiles.at[own], part * CHUNK // BLOCK + column, row) for part in range(HI_LO)
            )
            return hi, lo

        # Each of the four warps computes all of the inverse: none waits for another.
        store_inverse(column_tiles.at[own], invert(erased_block), below=True)
        write(inverse_ref, at.columns)
        plgpu.wait_smem_to_gmem(0)


def scratch(side_by_side: int) -> dict[str, Any]:
    return {
        "q_tiles": bfloat16_tile(side_by_side, CHUNK, TILE),
        "k_tiles": bfloat16_tile(side_by_side, CHUNK, TILE),
        "g_tiles": bfloat16_tile(side_by_side, 2 * CHUNK, TILE),
        "row_tiles": bfloat16_tile(side_by_side, 3 * CHUNK, TILE),
        "column_tiles": bfloat16_tile(side_by_side, 2 * CHUNK, TILE),
        "beta_tiles": float32_buffer(side_by_side, CHUNK),
        "decay_tiles": float32_buffer(side_by_side, TILE),
        "lowest_tiles": float32_buffer(side_by_side, CHUNK),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=side_by_side),
    }


def scores(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, sizes: Sizes, side_by_side: int
) -> dict[str, jax.Array]:
    """`inverse`, `p`, `q_in`, `k_in`, `k_out` and `decay`, as the kernel's outputs are declared."""
    b, t, hv, depth = sizes.b, sizes.t, sizes.hv, sizes.depth
    pairs, keys = bfloat16_array(b, hv, t, 2 * CHUNK), bfloat16_array(b, t, hv, depth)
    return run_kernel(
        functools.partial(_scores_kernel, chunks=sizes.chunks, side_by_side=side_by_side, group=sizes.group),
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
        grid={"chunk": pl.cdiv(sizes.chunks, side_by_side), "head": hv, "batch": b},
        warpgroups=side_by_side,
    )
