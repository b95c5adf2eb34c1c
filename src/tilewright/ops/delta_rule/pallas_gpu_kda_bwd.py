"""The backward of KDA on Hopper: three Mosaic GPU kernels. See pallas_gpu_kda.py, whose notation this is.

With k_in = k exp G, q_in = q exp G, onward = exp(G_C - G), k_out = beta onward k, and w_ijd = exp(G_id - G_jd), a chunk's
gradients are, dS' being that of the state after it,

    dE = scale (P beta)^T dO + k_out dS'        dv = X^T dE
    dS = exp(G_C) dS' + scale q_in^T dO - k_in^T dv                                                what is sequential
    Y_ij = scale (dO_i . E_j), i >= j           Z_ij = -(dv_i . E_j), i > j
    dq_id = exp(G_id) scale (dO S^T)_id + sum_j Y_ij beta_j k_jd w_ijd
    r_id = -exp(G_id) (dv S^T)_id + sum_j Z_ij beta_j k_jd w_ijd                    of k, through exp(G_i)
    c_jd = sum_i (Y_ij q_id + Z_ij k_id) w_ijd                                      of beta k, through exp(-G_j)
    u_jd = onward_jd (E dS'^T)_jd                                                   of beta k, through exp(G_C - G_j)
    dk = r + beta (c + u)                       dbeta_j = sum_d k_jd (c_jd + u_jd)
    dg_t = sum_{i >= t} (q dq + k r - beta k c)_i + sum_{j < t} (beta k u)_j + exp(G_C) sum_v S_v dS'_v

A gate is in the sums of its token and of all later ones, and u goes through those after its token: so the last line has
no difference of like sums but those of pairs.

`_reverse_kernel` carries dS from the last chunk to the first and writes dv and each dS'. `_products_kernel` makes Y, Z,
dO S^T, dv S^T, E dS'^T and S dS', all chunks at once: products alone. `_pairs_kernel` makes the rest, a warpgroup a chunk
and 64 key channels. Its pairs are cut as the forward's are (`Round`): scaled to the chunk's start, and where gates fall
too far, in blocks and halves. All are rounds of one loop. What it gets from the other kernel lies as threads hold it: by
rows, products took 1.01 ms instead of 0.95 (stores queued up) and pairs 2.02 instead of 1.83 (H200, H96 T8192 D128).

What the forward keeps, a chunk and head of K = V = 128 in bfloat16: the state before it (32 KB), E in two halves (32 KB),
X and P beta (16 KB each), q_in, k_in (16 KB each), k_out (32 KB): 160 KB, 2 GB for H96 T8192; q, k, v and g are 80 KB. To
make them anew would be the whole forward once more, 2 of its milliseconds on an H200.

Floor for K = V = D, a token and head: q, k, v, dO read and dq, dk, dv written in bfloat16, g read and dg written in
float32, 22 D bytes. Here for D = 128: reverse, 10 D read, 10 D written; products, 20 D read, 16 D written; pairs, 24 D
read, 8 D written. That is 88 D, 8.9 GB for H96 T8192: two milliseconds of an H200.

Numerics. Accumulators, decays and dS are float32. In the reverse kernel dS, dE and dv are operands of two halves, for their
errors would pass from chunk to chunk; other operands are rounded once. A gate's gradient is a sum of many terms of either
sign: for it dS', E, Y, Z and the scaled q and k of the pairs have two halves.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import (
    Accumulator,
    accumulate,
    hidden_zero,
    padded,
    product,
    products,
    quotient,
    tile,
    wait_for_products,
)
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule.chunk import LOWEST_GATE
from tilewright.ops.delta_rule.config import GPU_TILE, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_tiles import (
    CHANNELS,
    CHUNK,
    HALVES,
    LARGE,
    LARGEST_EXPONENT,
    LOG2_E,
    SQUARE,
    WGMMA,
    Round,
    add_halves,
    along_columns,
    along_rows,
    channel_gates,
    compiler_params,
    halves,
    in_chunks,
    keep_halves,
    load_as_held,
    load_turned,
    per_chunk,
    positions,
    some_fall,
    store_as_held,
    sums_of_gates,
    turned,
    turned_states,
)

_STAGES = 2
# Of 504 that three warpgroups may have together.
_STATE_REGISTERS, _PRODUCT_REGISTERS, _FETCH_REGISTERS = 232, 232, 40
_SIDES = 2  # Warpgroups of `_products_kernel` that compute: the one of Y and the one of Z.
# What `_products_kernel` makes of a chunk and 64 key channels.
_READ, _BACK, _ONTO = range(3)
_HALF = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)  # Of a tile with both, one below the other.


def _reverse_kernel(*refs: Any, chunks: int, warpgroups: int, scale: float, interpreted: bool):
    # inputs
    q_ref, k_in_ref, k_out_ref, d_o_ref, x_ref, p_ref, across_ref, d_final_ref = refs[:8]
    # outputs
    d_v_ref, d_states_ref, d_initial_ref = refs[8:11]
    # scratch
    q_ring, k_in_ring, k_out_ring, d_o_ring, x_ring, p_ring, across_ring, d_state_tiles, arrived, consumed = refs[11:]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    warpgroup = lax.axis_index("warpgroup")
    depth = q_ring.shape[-1]
    first = pl.ds(0, CHUNK)

    def slot_of(step: Any) -> jax.Array:
        return lax.rem(step, jnp.int32(_STAGES))

    def channels(of: Any) -> Any:
        return pl.ds((block * warpgroups + of) * GPU_TILE, GPU_TILE)

    def chunk_of(step: Any) -> tuple[Any, Any]:
        n = chunks - 1 - step
        return n, pl.ds(n * CHUNK, CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _fetch():
        if warpgroups > 1:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def fetch(step: Any, carry: tuple[()]) -> tuple[()]:
            slot = slot_of(step)
            n, tokens = chunk_of(step)
            pl.when(step >= _STAGES)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            for source, ring in (
                (k_out_ref.at[b, tokens, hv, pl.ds(0, depth)], k_out_ring.at[slot]),
                *((d_o_ref.at[b, tokens, hv, channels(w)], d_o_ring.at[slot, w]) for w in range(warpgroups)),
                (p_ref.at[b, hv, tokens, first], p_ring.at[slot]),
                (x_ref.at[b, hv, tokens, first], x_ring.at[slot]),
                (q_ref.at[b, tokens, hv], q_ring.at[slot]),
                (k_in_ref.at[b, tokens, hv], k_in_ring.at[slot]),
                (across_ref.at[b, hv, n], across_ring.at[slot]),
            ):
                plgpu.copy_gmem_to_smem(source, ring, arrived.at[slot])
            return carry

        lax.fori_loop(0, chunks, fetch, ())

    @pl.when(warpgroup < warpgroups)
    def _carry_the_gradient():
        if warpgroups > 1:
            plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        mine = channels(warpgroup)
        tile_shape, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.

        def one_chunk(step: Any, d_state: jax.Array) -> jax.Array:
            slot = slot_of(step)
            n, tokens = chunk_of(step)
            plgpu.barrier_wait(arrived.at[slot])
            d_o = d_o_ring.at[slot, warpgroup]
            after = halves(d_state)  # [V, K]
            onto = product(
                tile_shape, lambda sum_: add_halves(sum_, after, turned(k_out_ring.at[slot])), interpreted=interpreted
            )  # [V, C]
            for half in range(HALVES):
                d_state_tiles[warpgroup, half] = after[half]
            plgpu.commit_smem()
            for half in range(HALVES):
                plgpu.copy_smem_to_gmem(d_state_tiles.at[warpgroup, half], d_states_ref.at[b, hv, n, half, mine])
            read = (load_turned(d_o) * scale).astype(jnp.bfloat16)
            (d_errors,) = accumulate((onto,), lambda sum_: sum_.add(read, p_ring.at[slot]), interpreted=interpreted)
            split = halves(d_errors)
            d_v = product(tile_shape, lambda sum_: add_halves(sum_, split, x_ring.at[slot]), interpreted=interpreted)
            erased = halves(-d_v)

            def add(sum_: Accumulator) -> None:
                sum_.add(read, q_ring.at[slot])
                add_halves(sum_, erased, k_in_ring.at[slot])

            left = d_state * along_columns(across_ring.at[slot], state_shape)
            (d_state,) = accumulate((left,), add, interpreted=interpreted)
            # The tile of dO has been read: dv goes out through it.
            turned(d_o)[...] = d_v.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(d_o, d_v_ref.at[b, tokens, hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return d_state

        d_state = plgpu.load(d_final_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        d_state = lax.fori_loop(0, chunks, one_chunk, d_state)
        plgpu.wait_smem_to_gmem(0)
        d_initial_ref[b, hv, mine, :] = d_state


def _products_kernel(*refs: Any, heads: int, items: int, chunks: int, scale: float, interpreted: bool):
    # inputs
    d_o_ref, d_v_ref, errors_ref, states_ref, d_states_ref = refs[:5]
    # outputs
    through_ref, pairs_ref, ends_ref = refs[5:8]
    # scratch
    value_ring, error_ring, state_ring, d_state_ring, end_tiles, arrived, consumed = refs[8:]

    parts = state_ring.shape[1]  # K is `parts` times 64 channels.
    tiles = d_v_ref.shape[-1] // GPU_TILE
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    side = lax.axis_index("warpgroup")
    count = lax.div(items - block + blocks - 1, jnp.int32(blocks))

    def place(index: Any) -> tuple[Any, Any, Any]:
        """Of the block's work, by number: batch, head, chunk."""
        rest, n = quotient(block + index * blocks, chunks)
        b, hv = quotient(rest, heads)
        return b, hv, n

    def slot_of(step: Any) -> Any:
        return lax.rem(step, jnp.int32(_STAGES))

    @pl.when(side == _SIDES)
    def _fetch():
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def one_chunk(index: Any, carry: tuple[()]) -> tuple[()]:
            b, hv, n = place(index)
            tokens = pl.ds(n * CHUNK, CHUNK)
            for t in range(tiles):
                step = index * tiles + t
                slot = slot_of(step)
                pl.when(step >= _STAGES)(lambda slot=slot: plgpu.barrier_wait(consumed.at[slot]))
                mine = pl.ds(t * GPU_TILE, GPU_TILE)
                copies = [
                    (d_o_ref.at[b, tokens, hv, mine], value_ring.at[slot, 0]),
                    (d_v_ref.at[b, tokens, hv, mine], value_ring.at[slot, 1]),
                ]
                for half in range(HALVES):
                    copies.append((errors_ref.at[b, hv, n, half, mine], error_ring.at[slot, half]))
                for part in range(parts):
                    depth = pl.ds(part * CHANNELS, CHANNELS)
                    copies.append((states_ref.at[b, hv, n, mine, depth], state_ring.at[slot, part]))
                    for half in range(HALVES):
                        source = d_states_ref.at[b, hv, n, half, mine, depth]
                        copies.append((source, d_state_ring.at[slot, half, part]))
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])
            return carry

        lax.fori_loop(0, count, one_chunk, ())

    @pl.when(side < _SIDES)
    def _compute():
        plgpu.set_max_registers(_PRODUCT_REGISTERS, action="increase")
        # With 64 key channels both warpgroups have the same ones, and the second one's are left out.
        part = side if parts > 1 else 0

        def one_chunk(index: Any, carry: tuple[()]) -> tuple[()]:
            b, hv, n = place(index)
            zero = hidden_zero(index)

            def add_values(read: Accumulator, back: Accumulator, onto: Accumulator, pairs: Accumulator) -> Any:
                ends = []
                issued = 2 + 3 + HALVES  # By a round of the loop.
                for t in range(tiles):
                    slot = slot_of(index * tiles + t) + zero
                    plgpu.barrier_wait(arrived.at[slot])
                    d_o, d_v, state = value_ring.at[slot, 0], value_ring.at[slot, 1], state_ring.at[slot, part]
                    errors, d_states = error_ring.at[slot], d_state_ring.at[slot]
                    read.add(d_o, state)  # [C, V] [V, K]
                    back.add(d_v, state)
                    onto.add(turned(errors.at[0]), d_states.at[0, part])
                    onto.add(turned(errors.at[0]), d_states.at[1, part])
                    onto.add(turned(errors.at[1]), d_states.at[0, part])
                    for half in range(HALVES):
                        pairs.add(value_ring.at[slot, side], errors.at[half])  # [C, V] [V, C]
                    # Turned: a sum over rows would go through memory that Pallas has once for all warpgroups.
                    ends.append(jnp.sum(load_turned(state) * load_turned(d_states.at[0, part]), axis=1))
                    plgpu.commit_smem()  # These were plain reads: copies into the slot are to come behind them.
                    if t > 0:
                        wait_for_products(issued, interpreted=interpreted)
                        plgpu.barrier_arrive(consumed.at[slot_of(index * tiles + t - 1)])
                wait_for_products(0, interpreted=interpreted)
                plgpu.barrier_arrive(consumed.at[slot_of(index * tiles + tiles - 1)])
                return (functools.reduce(jnp.add, ends),)

            read, back, onto, pairs, ends = products((SQUARE,) * 4, add_values, interpreted=interpreted)
            i, j = positions()
            sign = jnp.where(side == 0, scale, -1.0)
            pairs = jnp.where(i - j >= side, pairs * sign, 0.0)  # Y or Z.
            store_as_held(pairs_ref.at[b, hv, n, side], pairs, interpreted=interpreted)

            @pl.when(side < parts)
            def _through_the_states():
                for which, value in ((_READ, read * scale), (_BACK, -back), (_ONTO, onto)):
                    store_as_held(through_ref.at[b, hv, n, part, which], value, interpreted=interpreted)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                end_tiles[side] = ends
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(end_tiles.at[side], ends_ref.at[b, hv, n, pl.ds(part * CHANNELS, CHANNELS)])

            return carry

        lax.fori_loop(0, count, one_chunk, ())
        plgpu.wait_smem_to_gmem(0)


def _pairs_kernel(*refs: Any, group: int, interpreted: bool):
    # inputs
    q_ref, k_ref, g_ref, beta_ref, through_ref, pairs_ref, ends_ref = refs[:7]
    # outputs
    d_q_ref, d_k_ref, d_g_ref, d_beta_ref = refs[7:11]
    # scratch
    qk_tiles, g_tiles, pair_tiles, row_tiles, column_tiles, beta_tile, end_tile, sum_tile, arrived = refs[11:]

    b, hv, n, part = (lax.axis_index(name) for name in ("batch", "head", "chunk", "part"))
    tokens, channels = pl.ds(n * CHUNK, CHUNK), pl.ds(part * CHANNELS, CHANNELS)
    h = lax.div(hv, jnp.int32(group))

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)

    def in_turn() -> None:
        """What is behind is not begun before: with all tiles in registers at once they would be spilled."""
        plgpu.commit_smem()

    def apart(zero: Any) -> tuple[jax.Array, jax.Array]:
        i, j = positions()
        return i + zero, j

    def sums(zero: Any, mask: jax.Array) -> jax.Array:
        return sums_of_gates(g_tiles.at[zero], mask, interpreted=interpreted)  # [C, 64]

    for source, target in (
        (q_ref.at[b, tokens, h, channels], qk_tiles.at[0]),
        (k_ref.at[b, tokens, h, channels], qk_tiles.at[1]),
        (beta_ref.at[b, hv, n], beta_tile),
        (ends_ref.at[b, hv, n, channels], end_tile),
    ):
        plgpu.copy_gmem_to_smem(source, target, arrived)
    g = jnp.maximum(load(g_ref.at[b, tokens, hv, channels]), LOWEST_GATE) * LOG2_E
    keep_halves(g_tiles.at[0], halves(g))
    plgpu.commit_smem()

    def lowest_since_start(number: Any, level: int) -> tuple[jax.Array, jax.Array]:
        """How low each row falls from where a round scales it to; and whether one falls too far."""
        zero = hidden_zero(n + number)
        lowest = jnp.min(sums(zero, Round.of(jnp.int32(level)).exponents(*apart(zero))), axis=1)
        return lowest, some_fall(lowest, sum_tile)

    in_chunk, falls = lowest_since_start(0, 0)
    in_block, more_falls = lax.fori_loop(
        0, falls, lambda once, _: lowest_since_start(once, 1), (in_chunk, jnp.int32(0))
    )
    plgpu.barrier_wait(arrived)

    def one_round(level: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Pairs of one kind, as in `Round`."""
        zero = hidden_zero(n + level)
        now = Round.of(level)
        i, j = apart(zero)
        exponent = sums(zero, now.exponents(i, j))
        exponent = jnp.maximum(exponent, jnp.where(now.from_start, -LARGEST_EXPONENT, CHUNK * LOWEST_GATE * LOG2_E))
        by_row, by_column = jnp.exp2(exponent), jnp.exp2(exponent * jnp.where(now.from_start, -1.0, 1.0))  # [C, 64]
        columns = column_tiles.at[zero]
        keep_halves(columns, halves(load(qk_tiles.at[zero + 1]) * along_rows(beta_tile, SQUARE) * by_column))
        in_turn()

        def of_queries_or_keys(which: Any, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            of_rows, other, of_columns = gradients
            zero = hidden_zero(n + level + which)
            rows, both = row_tiles.at[zero], pair_tiles.at[zero]
            keep_halves(rows, halves(load(qk_tiles.at[zero + which]) * by_row))
            in_turn()
            i, j = apart(zero)
            mask = now.pairs(i, j, in_chunk, in_block)
            pairs = load_as_held(pairs_ref.at[b, hv, n, which], interpreted=interpreted)
            keep_halves(both, halves(jnp.where(mask, pairs, 0.0)))
            plgpu.commit_smem()

            def add_rows(sum_: Accumulator) -> None:
                for one, another in LARGE:
                    sum_.add(both.at[_HALF[one]], columns.at[_HALF[another]])

            def add_columns(sum_: Accumulator) -> None:
                for one, another in LARGE:
                    sum_.add(turned(both.at[_HALF[one]]), rows.at[_HALF[another]])

            of_rows = of_rows + by_row * product(SQUARE, add_rows, interpreted=interpreted)
            of_columns = of_columns + by_column * product(SQUARE, add_columns, interpreted=interpreted)
            plgpu.commit_smem()  # Other warps may still be multiplying: only behind them are tiles written again.
            # Queries and keys take turns: after two rounds each is in its place again.
            return other, of_rows, of_columns

        return lax.fori_loop(0, 2, of_queries_or_keys, gradients)

    nothing = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)
    rounds = Round.until(falls, more_falls)
    d_q, d_k, d_columns = lax.fori_loop(0, rounds, one_round, (nothing, nothing, nothing))

    zero = hidden_zero(n + CHUNK)
    i, j = apart(zero)
    rows, columns = row_tiles.at[zero], column_tiles.at[zero]
    queries, keys = qk_tiles.at[zero], qk_tiles.at[zero + 1]

    def through(which: int) -> jax.Array:
        return load_as_held(through_ref.at[b, hv, n, part, which], interpreted=interpreted)

    into = jnp.exp2(sums(zero, j <= i))
    d_q = d_q + into * through(_READ)
    in_turn()
    d_k = d_k + into * through(_BACK)
    in_turn()
    beta = along_rows(beta_tile, SQUARE)
    keep_halves(rows, halves(load(queries) * d_q + load(keys) * (d_k - beta * d_columns)))
    in_turn()
    onto = jnp.exp2(sums(zero, j > i)) * through(_ONTO)
    keep_halves(columns, halves(load(keys) * (beta * onto)))
    in_turn()
    d_columns = d_columns + onto
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
    plgpu.copy_smem_to_gmem(sum_tile, d_beta_ref.at[b, hv, n, part])
    if group == 1:
        plgpu.copy_smem_to_gmem(queries, d_q_ref.at[b, tokens, hv, channels])
        plgpu.copy_smem_to_gmem(keys, d_k_ref.at[b, tokens, hv, channels])

    def add_sums(sum_: Accumulator) -> None:
        for mask, tiles in ((j >= i, rows), (j < i, columns)):
            ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
            sum_.add(jnp.concatenate([ones, ones], axis=1), tiles)

    d_g = product(SQUARE, add_sums, interpreted=interpreted)
    d_g_ref.at[b, tokens, hv, channels][...] = d_g + along_columns(end_tile, SQUARE)
    plgpu.wait_smem_to_gmem(0)


def backward(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    resets: jax.Array | None,
    x: jax.Array,
    p: jax.Array,
    q_into: jax.Array,
    k_into: jax.Array,
    k_onward: jax.Array,
    across: jax.Array,
    states: jax.Array,
    errors: jax.Array,
    d_o: jax.Array,
    d_final: jax.Array,
    *,
    scale: float,
    launch: Launch,
) -> tuple[Any, ...]:
    """The gradients of q, k, v, g, beta and the initial state. What is from x to errors the forward kept."""
    config: PallasGpuConfig = launch.config
    (_, true_t, h, true_depth), true_width = q.shape, d_o.shape[3]
    b, hv, chunks, width, depth = states.shape
    t, group, warpgroups, parts = chunks * CHUNK, hv // h, config.warpgroups, depth // CHANNELS
    q, k = (padded(in_chunks(array), 3, GPU_TILE) for array in (q, k))
    d_o = padded(in_chunks(d_o), 3, config.block_v)
    d_state = turned_states(d_final, config.block_v)  # [B, HV, V, K]
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {"interpret": gpu_interpret_params(launch.interpret), "thread_name": "warpgroup"}
    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)
    d_v, d_states, d_initial = plgpu.kernel(
        functools.partial(_reverse_kernel, chunks=chunks, warpgroups=warpgroups, scale=scale, interpreted=interpreted),
        out_type=[
            output_like(d_o.shape, jnp.bfloat16, d_o),
            output_like((b, hv, chunks, HALVES, width, depth), jnp.bfloat16, d_o),
            output_like((b, hv, width, depth), jnp.float32, d_o),
        ],
        scratch_types=[
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, warpgroups, CHUNK, GPU_TILE),
            bfloat16_tile(_STAGES, *SQUARE),
            bfloat16_tile(_STAGES, *SQUARE),
            plgpu.SMEM((_STAGES, depth), jnp.float32),
            bfloat16_tile(warpgroups, HALVES, GPU_TILE, depth),
            plgpu.Barrier(num_arrivals=6 + warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
        ],
        grid=(hv, width // config.block_v, b),
        grid_names=("head", "values", "batch"),
        num_threads=1 + warpgroups,
        kernel_name="kda_reverse",
        compiler_params=compiler_params(barriers=True),
        **common,
    )(q_into, k_into, k_onward, d_o, x, p, across, d_state)
    # In the interpreter two: a block is to have several chunks there, too.
    items = b * hv * chunks
    blocks = min(items, 2 if interpreted else launch.chip.multiprocessors or 1)
    through, pairs, ends = plgpu.kernel(
        functools.partial(_products_kernel, heads=hv, items=items, chunks=chunks, scale=scale, interpreted=interpreted),
        out_type=[
            output_like((b, hv, chunks, parts, 3, CHUNK, CHANNELS), jnp.float32, d_o),
            output_like((b, hv, chunks, _SIDES, *SQUARE), jnp.float32, d_o),
            output_like((b, hv, chunks, depth), jnp.float32, d_o),
        ],
        scratch_types=[
            bfloat16_tile(_STAGES, 2, *SQUARE),
            bfloat16_tile(_STAGES, HALVES, *SQUARE),
            bfloat16_tile(_STAGES, parts, *SQUARE),
            bfloat16_tile(_STAGES, HALVES, parts, *SQUARE),
            plgpu.SMEM((_SIDES, CHANNELS), jnp.float32),
            plgpu.Barrier(num_arrivals=2 + HALVES + parts * (1 + HALVES), num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_SIDES, num_barriers=_STAGES),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1 + _SIDES,
        kernel_name="kda_products",
        compiler_params=compiler_params(barriers=True),
        **common,
    )(d_o, d_v, errors, states, d_states)
    of_keys = jnp.bfloat16 if group == 1 else jnp.float32
    d_q, d_k, d_g, d_beta = plgpu.kernel(
        functools.partial(_pairs_kernel, group=group, interpreted=interpreted),
        out_type=[
            output_like((b, t, hv, depth), of_keys, d_o),
            output_like((b, t, hv, depth), of_keys, d_o),
            output_like((b, t, hv, depth), jnp.float32, d_o),
            output_like((b, hv, chunks, parts, CHUNK), jnp.float32, d_o),
        ],
        scratch_types=[
            bfloat16_tile(2, CHUNK, CHANNELS),
            bfloat16_tile(1, 2 * CHUNK, CHANNELS),
            bfloat16_tile(1, 2 * CHUNK, CHUNK),
            bfloat16_tile(1, 2 * CHUNK, CHANNELS),
            bfloat16_tile(1, 2 * CHUNK, CHANNELS),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.SMEM((CHANNELS,), jnp.float32),
            plgpu.SMEM((CHUNK,), jnp.float32),
            plgpu.Barrier(num_arrivals=4),
        ],
        grid=(parts, chunks, hv, b),
        grid_names=("part", "chunk", "head", "batch"),
        num_threads=1,
        kernel_name="kda_pairs",
        compiler_params=compiler_params(),
        **common,
    )(q, k, channel_gates(g, resets), per_chunk(in_chunks(beta)), through, pairs, across * ends)
    if group > 1:
        d_q, d_k = (jnp.sum(array.reshape(b, t, h, group, depth), axis=3).astype(jnp.bfloat16) for array in (d_q, d_k))
    d_q, d_k, d_g = (array[:, :true_t, :, :true_depth] for array in (d_q, d_k, d_g))
    if resets is not None:
        d_g = jnp.where(resets[:, :, None, None].astype(bool), 0.0, d_g)
    d_beta = jnp.moveaxis(jnp.sum(d_beta, axis=3).reshape(b, hv, t), 1, 2)[:, :true_t]
    d_initial = jnp.swapaxes(d_initial, 2, 3)[..., :true_depth, :true_width]
    return d_q, d_k, d_v[:, :true_t, :, :true_width], d_g.astype(g.dtype), d_beta.astype(beta.dtype), d_initial
