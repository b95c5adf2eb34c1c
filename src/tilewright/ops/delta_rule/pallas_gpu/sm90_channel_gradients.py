"""Gradients on Hopper, one gate per channel (KDA): all but dv, from the states, their gradients and dv, all chunks at
once.

With q_in, k_in and k_out as in sm90_scores.py, decay_out = exp(G_C - G) and w_ijd = exp(G_id - G_jd),

    Y_ij = scale (dO_i . u_j), i >= j           Z_ij = -(dv_i . u_j), i > j
    dq_id = exp(G_id) scale (dO S^T)_id + sum_j Y_ij beta_j k_jd w_ijd
    r_id = -exp(G_id) (dv S^T)_id + sum_j Z_ij beta_j k_jd w_ijd                    of k, through exp(G_i)
    c_jd = sum_i (Y_ij q_id + Z_ij k_id) w_ijd                                      of beta k, through exp(-G_j)
    e_jd = decay_out_jd (u dS'^T)_jd                                                of beta k, through exp(G_C - G_j)
    dk = r + beta (c + e)                       dbeta_j = sum_d k_jd (c_jd + e_jd)
    dg_t = sum_{i >= t} (q dq + k r - beta k c)_i + sum_{j < t} (beta k e)_j + exp(G_C) sum_v S_v dS'_v

A gate is in the sums of its token and of all later ones, and e goes through those after its token: so the last line has
no difference of similar sums but those of pairs.

`_products_kernel` computes Y, Z, dO S^T, dv S^T, u dS'^T and S . dS': products alone, in persistent thread blocks.
`_pairs_kernel` computes the rest, one warpgroup per chunk and 64 key channels. It takes pairs in the levels of the
forward (`PairLevel`), the first in code of its own, the others in a loop. What it reads of the other kernel lies in the
order in which threads hold it: by rows, the products took 1.01 ms instead of 0.95 ms (stores queued up) and the pairs
2.02 ms instead of 1.83 ms (H200, H96 T8192 D128).

What brought the pairs from 1.57 ms to 1.19 ms there, with mild gates: Y, Z and the products are copied to shared memory
ahead, where a warp loaded them to registers and waited for 36 % of the time (1.31 ms); the first level, whose gradients
add to nothing, apart, with one exp per element and its reciprocal (1.19 ms).

Numerics: a gate's gradient is a sum of many terms of either sign. For it dS', u, Y, Z and the scaled q and k of the
pairs are bf16x2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleSm90Backward
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import (
    BELOW_ONE,
    LARGEST_EXPONENT,
    SHIFT,
    PairLevel,
    sums_of_gates,
)
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    REGISTERS,
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
    load_in_register_order,
    load_transposed,
    loop,
    positions,
    query_head,
    store_hi_lo,
    store_in_register_order,
    tokens_of_chunk,
)
from tilewright.ops.delta_rule.pallas_gpu.value_tiles import SIDES, ValueTiles
from tilewright.pallas.gpu.elementwise import reciprocal
from tilewright.pallas.gpu.kernel import InTurns, compiler_params, processors, run_kernel, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    LOG2_E,
    WGMMA,
    ColumnRanges,
    any_row,
    load_along_columns,
    load_along_rows,
    load_float32_square,
    opaque_zero,
    split_hi_lo,
    transposed,
)
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.wgmma import Accumulator, product

# What `_products_kernel` makes of a chunk and 64 key channels.
_DO_S, _DV_S, _U_DS = range(3)


def _products_kernel(
    *,
    # inputs
    d_o_ref, d_v_ref,  # [B, T, HV, V]
    u_ref,  # [B, HV, chunks, 2, V, C]
    states_ref,  # [B, HV, chunks, V, K]
    d_states_ref,  # [B, HV, chunks, 2, V, K]
    # outputs
    through_ref,  # [B, HV, chunks, depth_tiles, 3, C, 64]
    pairs_ref,  # [B, HV, chunks, SIDES, C, C]
    ends_ref,  # [B, HV, chunks, K]: S . dS'
    # scratch
    value_tiles: Pipeline,  # `ValueTiles`
    end_tiles,  # [SIDES, 64]
    # static
    sizes: Sizes,
    tiles: int,
    config: DeltaRuleSm90Backward,
    scale: float,
):  # fmt: skip
    depth_tiles = sizes.depth_tiles
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    side = lax.axis_index("warpgroup")
    scheduler = RoundRobin(sizes.b * sizes.hv * sizes.chunks, blocks, block)
    count = scheduler.count
    values = ValueTiles(value_tiles, tiles, depth_tiles)

    def coordinates(index: Any) -> tuple[Any, Any, Any]:
        """Batch, head and chunk."""
        rest, n = divmod_nonnegative(scheduler.tile(index), sizes.chunks)
        b, hv = divmod_nonnegative(rest, sizes.hv)
        return b, hv, n

    @pl.when(side == SIDES)
    def _produce():
        plgpu.set_max_registers(REGISTERS - SIDES * config.gradient_registers, action="decrease")

        @loop(count)
        def _one_chunk(index: Any) -> None:
            b, hv, n = coordinates(index)
            where = b, hv, n, pl.ds(n * CHUNK, CHUNK)
            for t in range(tiles):
                values.copy(index, t, where, (d_o_ref, d_v_ref, u_ref, states_ref, d_states_ref))

    @pl.when(side < SIDES)
    def _compute():
        plgpu.set_max_registers(config.gradient_registers, action="increase")
        # With 64 key channels both warpgroups have the same ones, and the second one's are left out.
        d = side if depth_tiles > 1 else 0

        def state_product(state: Any, d_state: Any) -> jax.Array:
            # Transposed: a sum over rows would go through memory that Pallas has once for all warpgroups.
            summed = jnp.sum(load_transposed(state) * load_transposed(d_state), axis=1)
            plgpu.commit_smem()  # These were plain loads: copies into the stage have to come after them.
            return summed

        @loop(count)
        def _one_chunk(index: Any) -> None:
            b, hv, n = coordinates(index)
            do_s, dv_s, u_ds, pairs, ends = values.products(index, opaque_zero(index), d, side, state_product)
            i, j = positions()
            sign = jnp.where(side == 0, scale, -1.0)
            pairs = jnp.where(i - j >= side, pairs * sign, 0.0)  # Y or Z
            store_in_register_order(pairs_ref.at[b, hv, n, side], pairs)

            @pl.when(side < depth_tiles)
            def _through_the_states():
                for which, value in ((_DO_S, do_s * scale), (_DV_S, -dv_s), (_U_DS, u_ds)):
                    store_in_register_order(through_ref.at[b, hv, n, d, which], value)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                end_tiles[side] = ends
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(end_tiles.at[side], ends_ref.at[b, hv, n, pl.ds(d * TILE, TILE)])

        plgpu.wait_smem_to_gmem(0)


def products_scratch(sizes: Sizes, config: DeltaRuleSm90Backward) -> dict[str, Any]:
    return {"value_tiles": ValueTiles.scratch(sizes, config), "end_tiles": float32_buffer(SIDES, TILE)}


def _pairs_kernel(
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    g_ref,  # [B, T, HV, K]
    beta_ref,  # [B, HV, chunks, C]
    through_ref,  # [B, HV, chunks, depth_tiles, 3, C, 64]
    pairs_ref,  # [B, HV, chunks, SIDES, C, C]
    ends_ref,  # [B, HV, chunks, K]
    # outputs
    d_q_ref, d_k_ref, d_g_ref,  # [B, T, HV, K]
    d_beta_ref,  # [B, HV, chunks, depth_tiles, C]
    # scratch: tiles [1, ...] are indexed with an opaque zero
    qk_tiles,  # [2, C, 64]
    g_tiles,  # [1, 2 C, 64]
    pair_tiles,  # [1, 2 C, C], in turns with g as it is loaded, [1, C, 64], and with a square [1, C, C]
    row_tiles, column_tiles,  # [1, 2 C, 64]
    square,  # [C, C] float32: what the products' kernel made, as it is loaded
    beta_tile,  # [C]
    end_tile,  # [64]
    sum_tile,  # [C]
    full, square_full, other_full,
    # static
    group: int,
):  # fmt: skip
    b, hv, n, d = (lax.axis_index(name) for name in ("batch", "head", "chunk", "depth"))
    tokens, channels = pl.ds(n * CHUNK, CHUNK), pl.ds(d * TILE, TILE)
    h = query_head(hv, group)

    def tokens_at(zero: Any) -> jax.Array:
        return tokens_of_chunk() + zero

    def sums(zero: Any, of: ColumnRanges) -> jax.Array:
        """The sums of the gates of each row's tokens, [C, 64]."""
        return sums_of_gates(g_tiles.at[zero], of.ones())

    for source, target in (
        (q_ref.at[b, tokens, h, channels], qk_tiles.at[0]),
        (k_ref.at[b, tokens, h, channels], qk_tiles.at[1]),
        (beta_ref.at[b, hv, n], beta_tile),
        (ends_ref.at[b, hv, n, channels], end_tile),
    ):
        plgpu.copy_gmem_to_smem(source, target, full)
    pair_tiles, loaded_gates, other_square = pair_tiles

    def copy_pairs(which: Any) -> None:
        plgpu.copy_gmem_to_smem(pairs_ref.at[b, hv, n, which], square, square_full)

    def copy_through(which: int, target: Any = square, barrier: Any = square_full) -> None:
        plgpu.copy_gmem_to_smem(through_ref.at[b, hv, n, d, which], target, barrier)

    plgpu.copy_gmem_to_smem(g_ref.at[b, tokens, hv, channels], loaded_gates.at[0], other_full)
    copy_pairs(0)
    plgpu.barrier_wait(other_full)
    g = jnp.maximum(load_float32_square(loaded_gates.at[0], opaque_zero(n)), LOWEST_GATE) * LOG2_E
    store_hi_lo(g_tiles.at[0], split_hi_lo(g))
    plgpu.commit_smem()  # All warps have loaded the gates, too, whose memory is that of the pairs.

    exponent = sums(opaque_zero(n), ColumnRanges(None, tokens_of_chunk() + 1))
    in_chunk = jnp.min(exponent, axis=1)
    shifts, too_far = any_row(in_chunk < -BELOW_ONE), any_row(in_chunk < -LARGEST_EXPONENT)

    def in_blocks(once: Any, _: Any) -> tuple[jax.Array, jax.Array]:
        zero = opaque_zero(n + once)
        lowest = jnp.min(sums(zero, ColumnRanges(*PairLevel.of(once + 1).exponents(tokens_at(zero)))), axis=1)
        return lowest, any_row(lowest < -LARGEST_EXPONENT)

    in_block, further = lax.fori_loop(0, too_far, in_blocks, (in_chunk, jnp.int32(0)))
    levels, rank = PairLevel.count(too_far > 0, further > 0), PairLevel.rank(in_chunk, in_block)
    plgpu.barrier_wait(full)

    def store_columns(zero: Any, by_column: jax.Array) -> Any:
        columns = column_tiles.at[zero]
        store_hi_lo(columns, split_hi_lo(load(qk_tiles.at[zero + 1]) * load_along_rows(beta_tile, SQUARE) * by_column))
        keep_order()
        return columns

    def store_rows(zero: Any, which: Any, by_row: jax.Array, taken: ColumnRanges, *, last: Any) -> tuple[Any, Any]:
        """Stores the pairs of queries or of keys, and these as rows, and returns both tiles. Begins the copy of the next
        pairs, or of what is needed behind the last ones.
        """
        rows, pairs_hi_lo = row_tiles.at[zero], pair_tiles.at[zero]
        store_hi_lo(rows, split_hi_lo(load(qk_tiles.at[zero + which]) * by_row))
        keep_order()
        plgpu.barrier_wait(square_full)
        store_hi_lo(pairs_hi_lo, split_hi_lo(taken.keep(load_in_register_order(square))))
        plgpu.commit_smem()
        if last is False:
            copy_pairs(1 - which)
        else:
            pl.when(last)(lambda: copy_through(_DO_S))
            pl.when(jnp.logical_not(last))(lambda: copy_pairs(1 - which))
        return rows, pairs_hi_lo

    def first_level() -> tuple[jax.Array, jax.Array, jax.Array]:
        """The gradients of the pairs that are scaled to the chunk's start."""
        scaled = jnp.maximum(exponent, -LARGEST_EXPONENT) + jnp.where(shifts > 0, SHIFT, 0.0)
        by_row = jnp.exp2(scaled)  # [C, 64]
        by_column = functools.partial(reciprocal, by_row, WGMMA, again=True)  # Registers are scarce.
        columns = store_columns(opaque_zero(n + CHUNK), by_column())

        def of_queries_or_keys(which: int, last: Any) -> tuple[jax.Array, jax.Array]:
            zero = opaque_zero(n + CHUNK + which)
            taken = ColumnRanges(None, jnp.where(rank == 0, tokens_at(zero) + 1, 0))
            rows, pairs_hi_lo = store_rows(zero, which, by_row, taken, last=last)
            of_rows = by_row * bf16x3_product(pairs_hi_lo, columns)
            of_columns = by_column() * bf16x3_product(pairs_hi_lo, rows, left=transposed)
            plgpu.commit_smem()  # Other warps may still be multiplying: the tiles are written again only after this.
            return of_rows, of_columns

        d_q, d_columns = of_queries_or_keys(0, False)
        d_k, more = of_queries_or_keys(1, levels == 1)
        return d_q, d_k, d_columns + more

    def next_level(level: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Adds the pairs of a `PairLevel` of rows that decayed too far."""
        zero = opaque_zero(n + level)
        now = PairLevel.of(level)
        least = jnp.where(now.from_start, -LARGEST_EXPONENT, CHUNK * LOWEST_GATE * LOG2_E)
        scaled = sums(zero, ColumnRanges(*now.exponents(tokens_at(zero))))
        scaled = jnp.maximum(scaled, least) + jnp.where(now.from_start, SHIFT, 0.0)
        by_row = jnp.exp2(scaled)  # [C, 64]

        def by_column() -> jax.Array:
            return jnp.where(now.from_start, reciprocal(by_row, WGMMA, again=True), by_row)

        columns = store_columns(zero, by_column())

        def of_queries_or_keys(which: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            of_rows, other, of_columns = gradients
            zero = opaque_zero(n + level + which)
            taken = ColumnRanges(*now.pairs(tokens_at(zero), rank))
            last = (level + 1 == levels) & (which == 1)
            rows, pairs_hi_lo = store_rows(zero, which, by_row, taken, last=last)
            of_rows = of_rows + by_row * bf16x3_product(pairs_hi_lo, columns)
            of_columns = of_columns + by_column() * bf16x3_product(pairs_hi_lo, rows, left=transposed)
            plgpu.commit_smem()
            # Queries and keys take turns: after two iterations each is in its place again.
            return other, of_rows, of_columns

        return lax.fori_loop(0, 2, of_queries_or_keys, gradients)

    d_q, d_k, d_columns = lax.fori_loop(1, levels, next_level, first_level())

    copy_through(_DV_S, other_square.at[0], other_full)
    zero = opaque_zero(n + CHUNK)
    up_to = ColumnRanges(None, tokens_at(zero) + 1)
    after = ColumnRanges(tokens_at(zero) + 1, None)
    rows, columns = row_tiles.at[zero], column_tiles.at[zero]
    queries, keys = qk_tiles.at[zero], qk_tiles.at[zero + 1]

    decay_in = jnp.exp2(sums(zero, up_to))
    plgpu.barrier_wait(square_full)
    d_q = d_q + decay_in * load_in_register_order(square)
    keep_order()
    copy_through(_U_DS)
    plgpu.barrier_wait(other_full)
    d_k = d_k + decay_in * load_in_register_order(other_square.at[0])
    keep_order()
    beta = load_along_rows(beta_tile, SQUARE)
    store_hi_lo(rows, split_hi_lo(load(queries) * d_q + load(keys) * (d_k - beta * d_columns)))
    keep_order()
    decay_out = jnp.exp2(sums(zero, after))
    plgpu.barrier_wait(square_full)
    through_end = decay_out * load_in_register_order(square)
    store_hi_lo(columns, split_hi_lo(load(keys) * (beta * through_end)))
    keep_order()
    d_columns = d_columns + through_end
    sum_tile[...] = jnp.sum(load(keys) * d_columns, axis=1)
    d_k = d_k + beta * d_columns
    if group > 1:
        d_q_ref.at[b, tokens, hv, channels][...] = d_q
        d_k_ref.at[b, tokens, hv, channels][...] = d_k
    else:
        # The tiles of queries and keys have been read: the gradients go out through them.
        queries[...] = d_q.astype(jnp.bfloat16)
        keys[...] = d_k.astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sum_tile, d_beta_ref.at[b, hv, n, d])
    if group == 1:
        plgpu.copy_smem_to_gmem(queries, d_q_ref.at[b, tokens, hv, channels])
        plgpu.copy_smem_to_gmem(keys, d_k_ref.at[b, tokens, hv, channels])

    def add_sums(sum_: Accumulator) -> None:
        i = tokens_at(zero)
        for of, tiles in ((ColumnRanges(i, None), rows), (ColumnRanges(None, i), columns)):
            ones = of.ones()
            sum_.add(jnp.concatenate([ones, ones], axis=1), tiles)

    d_g = product(SQUARE, add_sums)
    d_g_ref.at[b, tokens, hv, channels][...] = d_g + load_along_columns(end_tile, SQUARE)
    plgpu.wait_smem_to_gmem(0)


def pairs_scratch() -> dict[str, Any]:
    return {
        "qk_tiles": bfloat16_tile(2, CHUNK, TILE),
        "g_tiles": bfloat16_tile(1, 2 * CHUNK, TILE),
        "pair_tiles": InTurns(
            (
                bfloat16_tile(1, 2 * CHUNK, CHUNK),
                tile(1, CHUNK, TILE, dtype=jnp.float32),
                float32_buffer(1, *SQUARE),
            )
        ),
        "row_tiles": bfloat16_tile(1, 2 * CHUNK, TILE),
        "column_tiles": bfloat16_tile(1, 2 * CHUNK, TILE),
        "square": float32_buffer(*SQUARE),
        "beta_tile": float32_buffer(CHUNK),
        "end_tile": float32_buffer(TILE),
        "sum_tile": float32_buffer(CHUNK),
        "full": plgpu.Barrier(num_arrivals=4),
        "square_full": plgpu.Barrier(num_arrivals=1),
        "other_full": plgpu.Barrier(num_arrivals=1),
    }


def channel_gate_gradients(
    call: DeltaRuleCall,
    launch: Launch,
    keys: dict[str, jax.Array],
    values: dict[str, jax.Array],
    decay: jax.Array,
    tiles: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """dq and dk [B, T, H, K], dbeta [B, HV, chunks, C], and dg [B, T, HV, K].

    `keys` are q, k, g and beta, `values` the inputs of `_products_kernel`, `decay` the exp(G_C) of each chunk. `tiles`
    are the tiles of 64 value channels to sum over.
    """
    config = launch.config
    sizes = Sizes.of(call, config.block_v)
    b, t, hv, chunks, depth_tiles = sizes.b, sizes.t, sizes.hv, sizes.chunks, sizes.depth_tiles
    made = run_kernel(
        functools.partial(_products_kernel, sizes=sizes, tiles=tiles, config=config, scale=call.scale),
        name="kda_products",
        inputs=values,
        outputs={
            "through": float32_array(b, hv, chunks, depth_tiles, 3, CHUNK, TILE),
            "pairs": float32_array(b, hv, chunks, SIDES, *SQUARE),
            "ends": float32_array(b, hv, chunks, sizes.depth),
        },
        scratch=products_scratch(sizes, config),
        grid={"block": min(b * hv * chunks, processors(launch.chip))},
        warpgroups=1 + SIDES,
        params=compiler_params(automatic_barriers=True),
    )
    per_head = (bfloat16_array if sizes.group == 1 else float32_array)(b, t, hv, sizes.depth)
    gradients = run_kernel(
        functools.partial(_pairs_kernel, group=sizes.group),
        name="kda_pairs",
        inputs={**keys, **made, "ends": decay * made["ends"]},
        outputs={
            "d_q": per_head,
            "d_k": per_head,
            "d_g": float32_array(b, t, hv, sizes.depth),
            "d_beta": float32_array(b, hv, chunks, depth_tiles, CHUNK),
        },
        scratch=pairs_scratch(),
        grid={"depth": depth_tiles, "chunk": chunks, "head": hv, "batch": b},
        warpgroups=1,
    )
    d_q, d_k = gradients["d_q"], gradients["d_k"]
    if sizes.group > 1:
        by_group = (b, t, sizes.h, sizes.group, sizes.depth)
        d_q, d_k = (jnp.sum(x.reshape(by_group), axis=3).astype(jnp.bfloat16) for x in (d_q, d_k))
    return d_q, d_k, jnp.sum(gradients["d_beta"], axis=3), gradients["d_g"]
