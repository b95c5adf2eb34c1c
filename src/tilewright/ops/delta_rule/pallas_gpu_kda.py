"""KDA as Mosaic GPU kernels for Hopper: two forward kernels. The backward is pallas_gpu_kda_bwd.py.

Notation as in pallas_gpu_bwd.py, with gates a channel: G_id is the sum of g over the tokens of the chunk to i. A chunk is

    M_ij = sum_d k_id k_jd exp(G_id - G_jd) below the diagonal,   X = (I + M diag(beta))^-1
    P_ij = sum_d q_id k_jd exp(G_id - G_jd) on and below it
    E = X (v - (k exp G) S),   o = scale ((q exp G) S + P beta E),   S' = exp(G_C) S + (k exp(G_C - G) beta)^T E

`_scores_kernel` makes X, P beta and the three scaled operands of every chunk, all chunks at once; `_state_kernel`
carries S through them with nothing but products.

Scores. exp(G_i - G_j) does not factor without overflow. While G falls by less than 80 in the chunk, gates of -1.25, both
sides are scaled to its start: q_i exp(G_i) and k_j exp(-G_j), whose exponent is positive. The rows are then what S meets,
too. Rows for which G falls further take more rounds (`Round`): blocks of 32 tokens, and halves of 32, 16, 8, 4, 2 and 1.
A loop has one round where no row of the chunk needs more, three, or nine. Which ones a row takes depends on tokens up to
it alone: on its own G, which is the lowest so far unless positive gates brought it back.

Sums of gates are products of the matrix unit with zeros and ones, of the gates' bfloat16 and the rest: nothing is a
difference of two sums.

Floor for K = V = D, a token and head: q, k, v read and o written in bfloat16 and g read in float32, 12 D bytes. Here:
scaled operands, X and P are written and read, 26 D bytes more at D = 128. H96 T8192: 3.8 GB, 0.9 ms of an H200.

Numerics: as in pallas_gpu.py. Rounded once, since they add less than half of the rounding of o: k and q as S meets them,
and k in M. q in P, k in P, and k as it goes into S are split.

By an H200 (driver 580.159.04, jax 0.11.2), H96 T8192 D128, what brought `_scores_kernel` from 3.7 ms to 1.0: rounds in
loops instead of one by one, 2.8 (12,600 instructions of PTX do not stay in the instruction cache); no addresses and masks
kept from before the loops (`place`), 1.7 (a thread spilled 750 bytes, and the shared memory leaves 20 KB of cache for
that); blocks of 32 tokens instead of 16, 1.4; of 64, 1.0. Two chunks to a thread block instead of three: 1.8 where three
took 1.7. Blocks of 64 with the rounds of 32 and less in code of their own spilled 490 bytes: 1.4 again. Stronger gates pay
for it: of -1.6 in the mean 1.7 ms instead of 1.3, of -4 3.7 instead of 2.8.
An eighth fewer instructions, by masks that are ranges and a reciprocal without a division, are 0.03 ms of it: three warps
to a scheduler do not hide latency, 9 % of the time that of g. Copies into the L2 ahead of time make it slower: what a later
block reads, 1.05 to 1.07 ms; what the states read two chunks later, 0.58 where they take 0.50.
`_state_kernel`, keeping for a backward: 1.1 ms with stores of 4 bytes from registers, 0.64 with copies; the room for those
is that of a second place for P and the keys that go into S, which are asked for last.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, hidden_zero, padded, product, products, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule.chunk import LOWEST_GATE
from tilewright.ops.delta_rule.config import GPU_TILE, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_parts import Columns, Parts, carry_in_parts
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
    add_split,
    along_columns,
    along_rows,
    channel_gates,
    compiler_params,
    halves,
    in_chunks,
    invert,
    keep_halves,
    load_turned,
    per_chunk,
    positions,
    some_fall,
    sums_of_gates,
    turned,
    turned_states,
)
from tilewright.ops.delta_rule.gradient import with_gradient
from tilewright.ops.delta_rule.pallas_gpu_kda_bwd import backward

_STAGES = 2
# Chunks that a thread block of `_scores_kernel` works on at once: they hide each other's latency.
_SIDE_BY_SIDE = 3
_STATE_REGISTERS, _FETCH_REGISTERS = 240, 24


@dataclass(frozen=True)
class _Place:
    """Where a warpgroup of `_scores_kernel` works: positions in a square of tokens, and its tiles."""

    i: Any  # [C, C]
    j: Any  # [C, C]
    q: Any  # [C, 64]
    k: Any  # [C, 64]
    g_both: Any  # [2 C, 64]
    rows: Any  # [3 C, 64]
    columns: Any  # [2 C, 64]


def _scores_kernel(*refs: Any, chunks: int, group: int, interpreted: bool):
    # inputs
    q_ref, k_ref, g_ref, beta_ref = refs[:4]
    # outputs
    x_ref, p_ref, q_into_ref, k_into_ref, k_onward_ref, across_ref = refs[4:10]
    # scratch
    q_tiles, k_tiles, g_tiles, row_tiles, column_tiles, beta_tiles, across_tiles, lowest_tiles, arrived = refs[10:]

    b, hv, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    n = lax.axis_index("chunk") * _SIDE_BY_SIDE + warpgroup
    tokens = pl.ds(n * CHUNK, CHUNK)
    first, second, third = (pl.ds(part * CHUNK, CHUNK) for part in range(3))
    depth = k_into_ref.shape[-1]

    @pl.when(n < chunks)
    def _one_chunk():
        ready = arrived.at[warpgroup]

        def read(ref: Any) -> jax.Array:
            return plgpu.load(ref, layout=WGMMA, optimized=False).astype(jnp.float32)

        def in_turn() -> None:
            """What is behind is not begun before: with all tiles in registers at once they would be spilled."""
            plgpu.commit_smem()

        def place(number: Any) -> _Place:
            zero = hidden_zero(n + number)
            i, j = positions()
            which = warpgroup + zero
            return _Place(
                i + zero,
                j,
                q_tiles.at[which],
                k_tiles.at[which],
                g_tiles.at[which],
                row_tiles.at[which],
                column_tiles.at[which],
            )

        def sums(here: _Place, mask: jax.Array) -> jax.Array:
            return sums_of_gates(here.g_both, mask, interpreted=interpreted)

        def scores(here: _Place, of_k: jax.Array, of_q: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows, columns = here.rows, here.columns
            plgpu.commit_smem()
            alike = product(
                SQUARE, lambda sum_: sum_.add(rows.at[third], turned(columns.at[first])), interpreted=interpreted
            )  # [C, C]
            of_k = of_k + jnp.where(mask, alike, 0.0)

            def add_q(sum_: Accumulator) -> None:
                for one, another in LARGE:
                    sum_.add(rows.at[(first, second)[one]], turned(columns.at[(first, second)[another]]))

            asked = product(SQUARE, add_q, interpreted=interpreted)
            plgpu.commit_smem()  # Other warps may still be multiplying: only behind them are tiles written again.
            return of_k, of_q + jnp.where(mask, asked, 0.0)

        def one_round(
            part: Any, level: Any, fallen: tuple[jax.Array, jax.Array], kept: tuple[jax.Array, jax.Array]
        ) -> Any:
            """Scores of the pairs of a `Round`, added to those that are kept; and how low each row falls."""
            here, now = place(part + level), Round.of(level)
            exponent = sums(here, now.exponents(here.i, here.j))
            lowest = jnp.min(exponent, axis=1)
            fallen = jnp.where(level == 0, lowest, fallen[0]), jnp.where(level == 1, lowest, fallen[1])
            decay = jnp.exp2(exponent)
            # What the copies of level 0 read is written again.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            keep_halves(here.rows, halves(read(here.q) * decay))
            in_turn()
            here.rows[third] = (read(here.k) * decay).astype(jnp.bfloat16)
            in_turn()
            # A reciprocal: a division would look at its range, and six instructions more.
            root = lax.rsqrt(jnp.maximum(decay, 2.0**-LARGEST_EXPONENT))
            decay = jnp.where(now.from_start, root * root, decay)
            keep_halves(here.columns, halves(read(here.k) * decay))
            here = place(part + level + CHUNK)  # Made anew, not kept: registers are scarce.
            return lowest, fallen, scores(here, *kept, now.pairs(here.i, here.j, *fallen))

        def some_channels(part: Any, kept: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            here = place(part)
            channels = pl.ds(part * CHANNELS, CHANNELS)
            h = lax.div(hv, jnp.int32(group))
            plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, h, channels], here.q, ready)
            plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, h, channels], here.k, ready)
            plgpu.copy_gmem_to_smem(beta_ref.at[b, hv, n], beta_tiles.at[warpgroup], ready)
            g = jnp.maximum(read(g_ref.at[b, tokens, hv, channels]), LOWEST_GATE) * LOG2_E
            keep_halves(here.g_both, halves(g))
            plgpu.commit_smem()
            # Turned, since a sum over rows would go through memory that Pallas has once for all warpgroups.
            turned_g = read(turned(here.g_both.at[first])) + read(turned(here.g_both.at[second]))
            across = across_tiles.at[warpgroup]
            across[...] = jnp.exp2(jnp.sum(turned_g, axis=1))
            plgpu.barrier_wait(ready)

            def another_round(carry: Any) -> Any:
                level, until, fallen, kept = carry
                lowest, fallen, kept = one_round(part, level, fallen, kept)

                @pl.when(level == 0)
                def _copy_out():
                    # The rows are scaled with their decay from the chunk's start: as S meets them.
                    plgpu.copy_smem_to_gmem(here.rows.at[first], q_into_ref.at[b, tokens, hv, channels])
                    plgpu.copy_smem_to_gmem(here.rows.at[third], k_into_ref.at[b, tokens, hv, channels])

                falls = some_fall(lowest, lowest_tiles.at[warpgroup])
                # Round 0 tells who falls in the chunk, round 1, which is there only if some do, who falls in a block.
                until = jnp.where(level == 0, Round.until(falls, jnp.int32(0)), until)
                until = jnp.where(level == 1, Round.until(jnp.int32(1), falls), until)
                return level + 1, until, fallen, kept

            unknown = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), WGMMA.reduce(1))
            first_round = jnp.int32(0), jnp.int32(1), (unknown, unknown), kept
            _, _, _, kept = lax.while_loop(lambda carry: carry[0] < carry[1], another_round, first_round)

            here = place(part + CHUNK)
            onward = jnp.exp2(sums(here, here.j > here.i)) * along_rows(beta_tiles.at[warpgroup], SQUARE)
            keep_halves(here.columns, halves(read(here.k) * onward))
            plgpu.commit_smem()
            onward_rest = pl.ds(depth + part * CHANNELS, CHANNELS)
            plgpu.copy_smem_to_gmem(here.columns.at[first], k_onward_ref.at[b, tokens, hv, channels])
            plgpu.copy_smem_to_gmem(here.columns.at[second], k_onward_ref.at[b, tokens, hv, onward_rest])
            plgpu.copy_smem_to_gmem(across, across_ref.at[b, hv, n, channels])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return kept

        nothing = plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)
        of_k, of_q = lax.fori_loop(0, depth // CHANNELS, some_channels, (nothing, nothing))

        def write(ref: Any, both: Any) -> None:
            plgpu.commit_smem()
            for part in (first, second):
                plgpu.copy_smem_to_gmem(both.at[part], ref.at[b, hv, tokens, part])

        here, beta = place(0), beta_tiles.at[warpgroup]
        keep_halves(here.rows, halves(of_q * along_columns(beta, SQUARE)))
        write(p_ref, here.rows)
        lower = jnp.where(here.i > here.j, of_k * along_columns(beta, SQUARE), 0.0)
        x = invert(lower, here.i, here.j, here.g_both, here.columns, interpreted=interpreted)
        keep_halves(here.columns, halves(x))
        write(x_ref, here.columns)
        plgpu.wait_smem_to_gmem(0)


def _state_kernel(*refs: Any, parts: Parts, ends: bool, warpgroups: int, scale: float, interpreted: bool):
    """The state through the chunks of a part. For its `ends`: of values and of the identity, and no outputs."""
    # inputs
    q_ref, k_in_ref, k_out_ref, v_ref, x_ref, p_ref, across_ref, initial_ref = refs[:8]
    # scratch, behind the outputs
    *outputs, k_in_ring, k_out_tiles, v_ring, x_ring, across_ring, q_ring, p_tiles, end_tiles, kept_tiles = refs[8:-3]
    arrived, late_arrived, consumed = refs[-3:]
    # outputs
    o_ref, final_ref = end_ref, transition_ref = outputs[:2]
    kept_refs = outputs[2:]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    part, warpgroup = lax.axis_index("part"), lax.axis_index("warpgroup")
    begin, count = parts.range_of(part)
    depth = k_in_ring.shape[-1]
    first = pl.ds(0, CHUNK)

    def slot_of(n: Any) -> jax.Array:
        return lax.rem(n, jnp.int32(_STAGES))

    def half_of(n: Any, half: int) -> jax.Array:
        """Where a half lies of what has no ring. They change places, or the compiler keeps their addresses, and spills."""
        return lax.rem(n + half, jnp.int32(HALVES))

    def columns(of: Any) -> Columns:
        return Columns(block * warpgroups + of, v_ref.shape[3] // GPU_TILE)

    def tokens(n: Any) -> Any:
        return pl.ds((begin + n) * CHUNK, CHUNK)

    busy = columns(0).needed(part) if ends else True

    @pl.when((warpgroup == warpgroups) & busy)
    def _fetch():
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def fetch_early(n: Any) -> None:
            slot = slot_of(n)
            for source, ring in (
                (k_in_ref.at[b, tokens(n), hv], k_in_ring),
                (x_ref.at[b, hv, tokens(n)], x_ring),
                (across_ref.at[b, hv, begin + n], across_ring),
                *(() if ends else ((q_ref.at[b, tokens(n), hv], q_ring),)),
            ):
                plgpu.copy_gmem_to_smem(source, ring.at[slot], arrived.at[slot])
            for w in range(warpgroups):
                source = v_ref.at[b, tokens(n), hv, columns(w).channels]
                plgpu.copy_gmem_to_smem(source, v_ring.at[slot, w], arrived.at[slot])

        def fetch_late(n: Any) -> None:
            for half in range(HALVES):
                place = half_of(n, half)
                keys = k_out_ref.at[b, tokens(n), hv, pl.ds(half * depth, depth)]
                plgpu.copy_gmem_to_smem(keys, k_out_tiles.at[place], late_arrived)
                if not ends:
                    scores = p_ref.at[b, hv, tokens(n), pl.ds(half * CHUNK, CHUNK)]
                    plgpu.copy_gmem_to_smem(scores, p_tiles.at[place], late_arrived)

        def one_chunk(n: Any, carry: tuple[()]) -> tuple[()]:
            # What is asked for last has no ring: the chunk before must be done with it.
            pl.when(n > 0)(lambda: plgpu.barrier_wait(consumed.at[slot_of(n + 1)]))
            fetch_late(n)
            pl.when(n + 1 < count)(lambda: fetch_early(n + 1))
            return carry

        fetch_early(jnp.int32(0))
        lax.fori_loop(0, count, one_chunk, ())

    @pl.when((warpgroup < warpgroups) & busy)
    def _carry_the_state():
        plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        carried = columns(warpgroup)
        mine = carried.channels
        tile_shape, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            k_in, x_both, values = k_in_ring.at[slot], x_ring.at[slot], v_ring.at[slot, warpgroup]
            before = halves(state)  # [V, K]
            if kept_refs:
                tiles = kept_tiles.at[warpgroup]
                for c in range(depth // CHUNK):
                    tiles[c] = before[0][:, c * CHUNK : (c + 1) * CHUNK]
                plgpu.commit_smem()
                for c in range(depth // CHUNK):
                    to = kept_refs[0].at[b, hv, begin + n, mine, pl.ds(c * CHUNK, CHUNK)]
                    plgpu.copy_smem_to_gmem(tiles.at[c], to)

            def ask(of_k: Accumulator, *of_q: Accumulator) -> tuple[jax.Array, jax.Array]:
                """v less what the state has of it, split, while the queries' products are in flight."""
                add_halves(of_k, before, turned(k_in))
                for sum_ in of_q:
                    add_halves(sum_, before, turned(q_ring.at[slot]))
                v = load_turned(values)
                return halves((carried.of_values(v) if ends else v) - of_k.read(in_flight=2 * len(of_q)))

            _, *q_s, wanted, rest = products(
                (tile_shape,) * (1 if ends else 2), ask, interpreted=interpreted
            )  # [V, C] each

            def add_x(sum_: Accumulator) -> None:
                add_split(sum_, (wanted, rest), turned(x_both), turned(x_both.at[:, first]))

            errors = halves(product(tile_shape, add_x, interpreted=interpreted))
            if kept_refs:
                # They leave through the state's tile, and the one behind it.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                tiles = [kept_tiles.at[warpgroup, c] for c in (0, depth // CHUNK)]
                for target, value in zip(tiles, errors, strict=True):
                    target[...] = value
                plgpu.commit_smem()
                for half, source in enumerate(tiles):
                    plgpu.copy_smem_to_gmem(source, kept_refs[1].at[b, hv, begin + n, half, mine])
            plgpu.barrier_wait(late_arrived)

            def add_p(sum_: Accumulator) -> None:
                for one, another in LARGE:
                    sum_.add(errors[one], turned(p_tiles.at[half_of(n, another)]))

            if q_s:
                (o,) = accumulate((q_s[0],), add_p, interpreted=interpreted)
                # v's tile has been read: o goes out through it.
                turned(values)[...] = (o * scale).astype(jnp.bfloat16)

            def add_k(sum_: Accumulator) -> None:
                for one, another in LARGE:
                    sum_.add(errors[one], k_out_tiles.at[half_of(n, another)])

            kept = state * along_columns(across_ring.at[slot], state_shape)
            (state,) = accumulate((kept,), add_k, interpreted=interpreted)
            if not ends:
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(values, o_ref.at[b, tokens(n), hv, mine])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return state

        def through(state: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, one_chunk, state)

        if ends:
            state = through(carried.first_state(initial_ref.at[b, hv, 0], part, depth))
            carried.keep_end(state, end_ref.at[b, hv, part], transition_ref.at[b, hv, part], end_tiles.at[warpgroup])
            return
        state = through(plgpu.load(initial_ref.at[b, hv, part, mine], layout=WGMMA, optimized=False))
        plgpu.wait_smem_to_gmem(0)

        @pl.when(part == parts.count - 1)
        def _last():
            final_ref[b, hv, mine, :] = state


def _forward(
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
    keep: bool,
) -> tuple[jax.Array, ...]:
    """o, the final state, and, to keep for a backward, what its arguments from x to errors are."""
    config: PallasGpuConfig = launch.config
    (_, true_t, _, true_depth), true_width = q.shape, v.shape[3]
    g = channel_gates(g, resets)
    # Channels of zeros add nothing.
    q, k = (padded(in_chunks(x), 3, GPU_TILE) for x in (q, k))
    v = padded(in_chunks(v), 3, config.block_v)
    states = turned_states(initial_state, config.block_v)[:, :, None]  # [B, HV, parts, V, K]
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    chunks, group = t // CHUNK, hv // h
    beta = per_chunk(in_chunks(beta))
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
            bfloat16_tile(_SIDE_BY_SIDE, CHUNK, CHANNELS),
            bfloat16_tile(_SIDE_BY_SIDE, CHUNK, CHANNELS),
            bfloat16_tile(_SIDE_BY_SIDE, 2 * CHUNK, CHANNELS),
            bfloat16_tile(_SIDE_BY_SIDE, 3 * CHUNK, CHANNELS),
            bfloat16_tile(_SIDE_BY_SIDE, 2 * CHUNK, CHANNELS),
            plgpu.SMEM((_SIDE_BY_SIDE, CHUNK), jnp.float32),
            plgpu.SMEM((_SIDE_BY_SIDE, CHANNELS), jnp.float32),
            plgpu.SMEM((_SIDE_BY_SIDE, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=3, num_barriers=_SIDE_BY_SIDE),
        ],
        grid=(-(-chunks // _SIDE_BY_SIDE), hv, b),
        grid_names=("chunk", "head", "batch"),
        num_threads=_SIDE_BY_SIDE,
        kernel_name="kda_scores",
        **common,
    )(q, k, g, beta)

    def carry(parts: Parts, states: jax.Array, out_type: list[Any], *, warpgroups: int, ends: bool) -> Any:
        body = functools.partial(
            _state_kernel, parts=parts, ends=ends, warpgroups=warpgroups, scale=scale, interpreted=interpreted
        )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=[
                bfloat16_tile(_STAGES, CHUNK, depth),
                bfloat16_tile(HALVES, CHUNK, depth),
                bfloat16_tile(_STAGES, warpgroups, CHUNK, GPU_TILE),
                bfloat16_tile(_STAGES, CHUNK, 2 * CHUNK),
                plgpu.SMEM((_STAGES, depth), jnp.float32),
                None if ends else bfloat16_tile(_STAGES, CHUNK, depth),
                None if ends else bfloat16_tile(HALVES, CHUNK, CHUNK),
                bfloat16_tile(warpgroups, GPU_TILE, depth) if ends else None,
                bfloat16_tile(warpgroups, depth // CHUNK + 1, GPU_TILE, CHUNK) if keep and not ends else None,
                plgpu.Barrier(num_arrivals=(3 if ends else 4) + warpgroups, num_barriers=_STAGES),
                plgpu.Barrier(num_arrivals=HALVES if ends else 2 * HALVES),
                plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
            ],
            grid=(hv, (width + (depth if ends else 0)) // (warpgroups * GPU_TILE), parts.count, b),
            grid_names=("head", "values", "part", "batch"),
            num_threads=1 + warpgroups,
            kernel_name="kda_ends" if ends else "kda_states",
            **common,
        )(q_into, k_into, k_onward, v, x, p, across, states)

    o, final, *kept = carry_in_parts(carry, states, v, chunks, launch, keep=keep)
    final = jnp.swapaxes(final, 2, 3)[..., :true_depth, :true_width]
    kept = (x, p, q_into, k_into, k_onward, across, *kept) if keep else ()
    return o[:, :true_t, :, :true_width], final, *kept


kda = with_gradient(_forward, backward)
