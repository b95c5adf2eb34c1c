"""KDA as Mosaic GPU kernels for Hopper: two forward kernels. The backward is `xla`'s.

Notation as in pallas_gpu.py, with gates a channel: G_id is the sum of g over the tokens of the chunk to i. A chunk is

    L_ij = beta_i sum_d k_id k_jd exp(G_id - G_jd),   P_ij = sum_d q_id k_jd exp(G_id - G_jd),   X = (I + L)^-1
    n = X diag(beta) (v - (k exp G) S),   o = scale ((q exp G) S + P n),   S <- exp(G_C) S + (k exp(G_C - G))^T n

`_scores_kernel` makes X diag(beta), P and the three scaled operands of every chunk, all chunks at once; `_state_kernel`
carries S through them with nothing but products.

Scores. exp(G_i - G_j) does not factor without overflow, so the chunk is cut: for i in the second half of a block of 2 h
tokens and j in its first, both sides are scaled to the middle, exponents at most 0, for h = 32 and 16. Inside 16 tokens both
are scaled to the block's start: q_i exp(G_i - G_start) and k_j exp(G_start - G_j), whose exponent is positive. That is right
while no gate lets G fall by more than 80 in 16 tokens; gates of -5 do not. Rows where it does are made by halves of 8, 4, 2
and 1 tokens instead, in a loop that is empty where there are none. Which way a row takes depends on tokens up to it alone.

Sums of gates are products of the matrix unit with zeros and ones, of the gates' bfloat16 and the rest: nothing is a
difference of two sums.

Floor for K = V = D, a token and head: q, k, v read and o written in bfloat16 and g read in float32, 12 D bytes. Here:
scaled operands, X and P are written and read, 26 D bytes more at D = 128. H96 T8192: 3.8 GB, 0.9 ms of an H200.

Numerics: as in pallas_gpu.py. Rounded once, since they add less than half of the rounding of o: k and q as S meets them, and k
in L. q in P, k in P, and k as it goes into S are split.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, padded, product, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule.chunk import LOWEST_GATE
from tilewright.ops.delta_rule.config import GPU_TILE, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_tiles import (
    CHUNK,
    SIDE_BY_SIDE,
    SQUARE,
    WGMMA,
    add_split,
    along_columns,
    along_rows,
    compiler_params,
    halves,
    invert,
    keep_halves,
    positions,
    turned,
)

_STAGES = 2
_STATE_REGISTERS, _FETCH_REGISTERS = 240, 24
_BLOCK = 16
_LARGEST_EXPONENT = 80.0
_CHANNELS = 64  # Of a half of the keys: a tile of them in float32 is 32 registers a thread.


def _scores_kernel(*refs: Any, chunks: int, group: int, interpreted: bool):
    # inputs
    q_ref, k_ref, g_ref, beta_ref = refs[:4]
    # outputs
    x_ref, p_ref, q_into_ref, k_into_ref, k_onward_ref, across_ref = refs[4:10]
    # scratch
    q_tiles, k_tiles, g_tiles, row_tiles, column_tiles, beta_tiles, across_tiles, lowest_tiles, arrived = refs[10:]

    b, hv, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    n = lax.axis_index("chunk") * SIDE_BY_SIDE + warpgroup
    tokens = pl.ds(n * CHUNK, CHUNK)
    first, second = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
    depth = k_into_ref.shape[-1]

    @pl.when(n < chunks)
    def _one_chunk():
        q_tile, k_tile, g_both = q_tiles.at[warpgroup], k_tiles.at[warpgroup], g_tiles.at[warpgroup]
        rows, columns = row_tiles.at[warpgroup], column_tiles.at[warpgroup]  # [2 C, 64], [2 C, 64]
        k_rows = rows.at[pl.ds(2 * CHUNK, CHUNK)]
        beta, across = beta_tiles.at[warpgroup], across_tiles.at[warpgroup]
        ready = arrived.at[warpgroup]

        def read(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)

        def some_channels(part: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            of_k, of_q = carry
            # Masks are cheaper to make than to keep: this zero, which differs from round to round for all that the compiler
            # knows, keeps it from making them all before the loop, and spilling them.
            zero = lax.shift_right_logical(n + part, 30)
            i, j = positions()
            i = i + zero
            apart = lax.bitwise_xor(i, j)

            def sums(mask: jax.Array) -> jax.Array:
                """Of the gates of the tokens j that the mask has for i, [C, 64]."""
                ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
                return product(
                    SQUARE,
                    lambda sum_: sum_.add(jnp.concatenate([ones, ones], axis=1), g_both),
                    interpreted=interpreted,
                )

            def scores(keys: Any, of_k: jax.Array, of_q: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
                plgpu.commit_smem()
                alike = product(
                    SQUARE, lambda sum_: sum_.add(keys, turned(columns.at[first])), interpreted=interpreted
                )  # [C, C]
                of_k = of_k + jnp.where(mask, alike, 0.0)

                def add_q(sum_: Accumulator) -> None:
                    sum_.add(rows.at[first], turned(columns.at[first]))
                    sum_.add(rows.at[first], turned(columns.at[second]))
                    sum_.add(rows.at[second], turned(columns.at[first]))

                asked = product(SQUARE, add_q, interpreted=interpreted)
                plgpu.commit_smem()  # Other warps may still be multiplying: only behind them are tiles written again.
                return of_k, of_q + jnp.where(mask, asked, 0.0)

            def falls(lowest: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(lowest, SQUARE, [0]) < -_LARGEST_EXPONENT  # [C, C]

            def between_halves(
                half: Any, of_k: jax.Array, of_q: jax.Array, lowest: jax.Array
            ) -> tuple[jax.Array, jax.Array]:
                """Tokens i in the second half of a block of 2 * half, j in its first; without a half i = j."""
                reached = jnp.where((i & half) != 0, j <= i, j > i) & (apart < half)
                left = jnp.exp(sums(reached))
                keep_halves(rows, halves(read(q_tile) * left))
                keep_halves(columns, halves(read(k_tile) * left))
                pairs = (apart >= half) & (apart < jnp.maximum(2 * half, 1)) & (i >= j)
                return scores(columns.at[first], of_k, of_q, pairs & (falls(lowest) | (half >= _BLOCK)))

            channels = pl.ds(part * _CHANNELS, _CHANNELS)
            h = lax.div(hv, jnp.int32(group))
            plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h, channels], q_tile, ready)
            plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h, channels], k_tile, ready)
            plgpu.copy_gmem_to_smem(beta_ref.at[b, hv, n], beta, ready)
            g = jnp.maximum(read(g_ref.at[b, tokens, hv, channels]), LOWEST_GATE)
            keep_halves(g_both, halves(g))
            plgpu.commit_smem()
            # Turned, since a sum over rows would go through memory that Pallas has once for all warpgroups.
            turned_g = read(turned(g_both.at[first])) + read(turned(g_both.at[second]))
            across[...] = jnp.exp(jnp.sum(turned_g, axis=1))
            plgpu.barrier_wait(ready)
            from_start = sums((apart < _BLOCK) & (j <= i))
            lowest = jnp.min(from_start, axis=1)
            decay = jnp.exp(from_start)
            keep_halves(rows, halves(read(q_tile) * decay))
            k_rows[...] = (read(k_tile) * decay).astype(jnp.bfloat16)
            keep_halves(columns, halves(read(k_tile) * jnp.exp(jnp.minimum(-from_start, _LARGEST_EXPONENT))))
            inside = (apart < _BLOCK) & (i >= j)
            of_k, of_q = scores(k_rows, of_k, of_q, inside & ~falls(lowest))
            lowest_tile = lowest_tiles.at[warpgroup]
            lowest_tile[...] = lowest
            plgpu.commit_smem()
            lowest_of_all = jnp.min(along_columns(lowest_tile, SQUARE), axis=1)
            plgpu.commit_smem()
            lowest_tile[...] = lowest_of_all
            plgpu.commit_smem()
            # Halves of 32 and 16 tokens, and for rows that fall of 8, 4, 2, 1 and the token itself.
            of_k, of_q = lax.fori_loop(
                0,
                jnp.where(lowest_tile[0] < -_LARGEST_EXPONENT, 7, 2),
                lambda level, kept: between_halves(lax.shift_right_logical(CHUNK // 2, level), *kept, lowest),
                (of_k, of_q),
            )

            into = jnp.exp(sums(j <= i))
            keys = read(k_tile)
            q_tile[...] = (read(q_tile) * into).astype(jnp.bfloat16)
            k_tile[...] = (keys * into).astype(jnp.bfloat16)
            keep_halves(rows, halves(keys * jnp.exp(sums(j > i))))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_tile, q_into_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(k_tile, k_into_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(rows.at[first], k_onward_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(
                rows.at[second], k_onward_ref.at[b, tokens, hv, pl.ds(depth + part * _CHANNELS, _CHANNELS)]
            )
            plgpu.copy_smem_to_gmem(across, across_ref.at[b, hv, n, channels])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return of_k, of_q

        nothing = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)
        of_k, of_q = lax.fori_loop(0, depth // _CHANNELS, some_channels, (nothing, nothing))

        def write(ref: Any, both: Any) -> None:
            plgpu.commit_smem()
            for part in (first, second):
                plgpu.copy_smem_to_gmem(both.at[part], ref.at[b, hv, tokens, part])

        i, j = positions()
        keep_halves(rows, halves(of_q))
        write(p_ref, rows)
        lower = jnp.where(i > j, of_k * along_rows(beta, SQUARE), 0.0)
        x = invert(lower, i, j, g_both, columns, interpreted=interpreted)
        keep_halves(columns, halves(x * along_columns(beta, SQUARE)))
        write(x_ref, columns)
        plgpu.wait_smem_to_gmem(0)


def _state_kernel(*refs: Any, chunks: int, chunks_a_block: int, warpgroups: int, scale: float, interpreted: bool):
    # inputs
    q_ref, k_in_ref, k_out_ref, v_ref, x_ref, p_ref, across_ref, initial_ref = refs[:8]
    # outputs
    o_ref, final_ref, *starts_ref = refs[8:-9]
    # scratch
    q_ring, k_in_ring, k_out_ring, v_ring, x_ring, p_ring, across_ring, arrived, consumed = refs[-9:]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    warpgroup = lax.axis_index("warpgroup")
    depth = q_ring.shape[-1]
    first = pl.ds(0, CHUNK)

    def slot_of(n: Any) -> jax.Array:
        return lax.rem(n, jnp.int32(_STAGES))

    def channels(of: Any) -> Any:
        return pl.ds((block * warpgroups + of) * GPU_TILE, GPU_TILE)

    def tokens(n: Any) -> Any:
        return pl.ds(n * CHUNK, CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _fetch():
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def fetch(n: Any, carry: tuple[()]) -> tuple[()]:
            slot = slot_of(n)
            pl.when(n >= _STAGES)(lambda: plgpu.barrier_wait(consumed.at[slot]))
            for source, ring in (
                (k_in_ref.at[b, tokens(n), hv], k_in_ring.at[slot]),
                *((v_ref.at[b, tokens(n), hv, channels(w)], v_ring.at[slot, w]) for w in range(warpgroups)),
                (x_ref.at[b, hv, tokens(n)], x_ring.at[slot]),
                (q_ref.at[b, tokens(n), hv], q_ring.at[slot]),
                (p_ref.at[b, hv, tokens(n)], p_ring.at[slot]),
                (across_ref.at[b, hv, n], across_ring.at[slot]),
                (k_out_ref.at[b, tokens(n), hv], k_out_ring.at[slot]),
            ):
                plgpu.copy_gmem_to_smem(source, ring, arrived.at[slot])
            return carry

        lax.fori_loop(0, chunks, fetch, ())

    @pl.when(warpgroup < warpgroups)
    def _carry_the_state():
        plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        mine = channels(warpgroup)
        tile_shape, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            k_in, k_out, queries = k_in_ring.at[slot], k_out_ring.at[slot], q_ring.at[slot]
            x_both, p_both, values = x_ring.at[slot], p_ring.at[slot], v_ring.at[slot, warpgroup]
            if starts_ref:

                @pl.when(lax.rem(n, jnp.int32(chunks_a_block)) == 0)
                def _keep():
                    starts_ref[0][b, hv, lax.div(n, jnp.int32(chunks_a_block)), mine, :] = state

            rounded, rest = halves(state)  # [V, K]

            def state_times(tokens: Any) -> jax.Array:
                def add(sum_: Accumulator) -> None:
                    sum_.add(rounded, turned(tokens))
                    sum_.add(rest, turned(tokens))

                return product(tile_shape, add, interpreted=interpreted)  # [V, C]

            k_s, q_s = state_times(k_in), state_times(queries)
            v = plgpu.load(turned(values), layout=WGMMA, optimized=False).astype(jnp.float32)
            wanted = halves(v - k_s)

            def add_x(sum_: Accumulator) -> None:
                add_split(sum_, wanted, turned(x_both), turned(x_both.at[:, first]))

            corrections = halves(product(tile_shape, add_x, interpreted=interpreted))

            def add_p(sum_: Accumulator) -> None:
                add_split(sum_, corrections, turned(p_both), turned(p_both.at[:, first]))

            (o,) = accumulate((q_s,), add_p, interpreted=interpreted)
            # v's tile has been read: o goes out through it.
            turned(values)[...] = (o * scale).astype(jnp.bfloat16)

            def add_k(sum_: Accumulator) -> None:
                sum_.add(corrections[0], k_out.at[:, pl.ds(0, depth)])
                sum_.add(corrections[1], k_out.at[:, pl.ds(0, depth)])
                sum_.add(corrections[0], k_out.at[:, pl.ds(depth, depth)])

            kept = state * along_columns(across_ring.at[slot], state_shape)
            (state,) = accumulate((kept,), add_k, interpreted=interpreted)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(values, o_ref.at[b, tokens(n), hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return state

        state = plgpu.load(initial_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        state = lax.fori_loop(0, chunks, one_chunk, state)
        plgpu.wait_smem_to_gmem(0)
        final_ref[b, hv, mine, :] = state


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    resets: jax.Array | None,
    *,
    scale: float,
    launch: Launch,
    tokens_a_block: int | None,
) -> tuple[jax.Array, ...]:
    """o, the final state, and, given `tokens_a_block`, the state before each so many tokens, [B, HV, num, K, V]."""
    config: PallasGpuConfig = launch.config
    (_, true_t, _, true_depth), true_width = q.shape, v.shape[3]
    time = functools.partial(padded, axis=1, multiple=CHUNK)
    if resets is not None:
        g = jnp.where(resets[:, :, None, None] > 0, LOWEST_GATE, g)
    # Tokens of zeros leave the state as it is; channels of zeros add nothing.
    g = padded(time(g.astype(jnp.float32)), 3, GPU_TILE)
    q, k = (padded(time(x), 3, GPU_TILE) for x in (q, k))
    v = padded(time(v), 3, config.block_v)
    state = padded(padded(jnp.swapaxes(initial_state, 2, 3), 2, config.block_v), 3, GPU_TILE)  # [B, HV, V, K]
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    chunks, group, warpgroups = t // CHUNK, hv // h, config.warpgroups
    beta = jnp.moveaxis(time(beta.astype(jnp.float32)), 1, 2).reshape(b, hv, chunks, CHUNK)
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {
        "compiler_params": compiler_params(),
        "interpret": gpu_interpret_params(launch.interpret),
        "thread_name": "warpgroup",
    }
    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)
    pairs = output_like((b, hv, t, 2 * CHUNK), jnp.bfloat16, g)

    x, p, q_into, k_into, k_onward, across = plgpu.kernel(
        functools.partial(_scores_kernel, chunks=chunks, group=group, interpreted=interpreted),
        out_type=[
            pairs,
            pairs,
            output_like((b, t, hv, depth), jnp.bfloat16, g),
            output_like((b, t, hv, depth), jnp.bfloat16, g),
            output_like((b, t, hv, 2 * depth), jnp.bfloat16, g),
            output_like((b, hv, chunks, depth), jnp.float32, g),
        ],
        scratch_types=[
            bfloat16_tile(SIDE_BY_SIDE, CHUNK, _CHANNELS),
            bfloat16_tile(SIDE_BY_SIDE, CHUNK, _CHANNELS),
            bfloat16_tile(SIDE_BY_SIDE, 2 * CHUNK, _CHANNELS),
            bfloat16_tile(SIDE_BY_SIDE, 3 * CHUNK, _CHANNELS),
            bfloat16_tile(SIDE_BY_SIDE, 2 * CHUNK, _CHANNELS),
            plgpu.SMEM((SIDE_BY_SIDE, CHUNK), jnp.float32),
            plgpu.SMEM((SIDE_BY_SIDE, _CHANNELS), jnp.float32),
            plgpu.SMEM((SIDE_BY_SIDE, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=SIDE_BY_SIDE),
        ],
        grid=(-(-chunks // SIDE_BY_SIDE), hv, b),
        grid_names=("chunk", "head", "batch"),
        num_threads=SIDE_BY_SIDE,
        **common,
    )(q, k, g, beta)
    out_type = [output_like(v.shape, jnp.bfloat16, v), output_like((b, hv, width, depth), jnp.float32, v)]
    if tokens_a_block is not None:
        out_type.append(output_like((b, hv, -(-true_t // tokens_a_block), width, depth), jnp.float32, v))
    o, final, *starts = plgpu.kernel(
        functools.partial(
            _state_kernel,
            chunks=chunks,
            chunks_a_block=max(1, (tokens_a_block or CHUNK) // CHUNK),
            warpgroups=warpgroups,
            scale=scale,
            interpreted=interpreted,
        ),
        out_type=out_type,
        scratch_types=[
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, CHUNK, 2 * depth),
            bfloat16_tile(_STAGES, warpgroups, CHUNK, GPU_TILE),
            bfloat16_tile(_STAGES, CHUNK, 2 * CHUNK),
            bfloat16_tile(_STAGES, CHUNK, 2 * CHUNK),
            plgpu.SMEM((_STAGES, depth), jnp.float32),
            plgpu.Barrier(num_arrivals=6 + warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
        ],
        grid=(hv, width // config.block_v, b),
        grid_names=("head", "values", "batch"),
        num_threads=1 + warpgroups,
        **common,
    )(q_into, k_into, k_onward, v, x, p, across, state)
    states = [jnp.swapaxes(s, -1, -2)[..., :true_depth, :true_width] for s in (final, *starts)]
    return o[:, :true_t, :, :true_width], *states
