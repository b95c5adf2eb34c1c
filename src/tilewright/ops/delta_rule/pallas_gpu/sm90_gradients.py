"""Gradients on Hopper, one gate per head: all but dv, from the states, their gradients and dv, all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, decay_in = exp G, and decay_out = exp(G_C - G),

    Y_ij = scale (dO_i . u_j) decay_ij, i >= j        Z_ij = -(dv_i . u_j) decay_ij, i > j
    dq = scale decay_in (dO S^T) + Y beta k
    dk = decay_out beta (u dS'^T) - decay_in (dv S^T) + beta Y^T q + Z beta k + beta Z^T k
    dbeta_j = decay_out_j k_j . (u dS'^T)_j + sum_i (Y_ij (q_i . k_j) + Z_ij (k_i . k_j))

The gradient of G_i is what goes through exp(G_i) less what goes through exp(-G_i): rows of the pairs' sums less
columns.

A thread block is persistent. It takes chunks of a query head one after the other, with all value heads of its group,
whose dq and dk it sums in registers. Each of its two consumer warpgroups has 64 key channels of dq and dk; one computes
Y and the other Z, which both need. Values pass by 64 channels at a time (`ValueTiles`).

With dq and dk of the heads before in registers there is no room for the four products through the states at once, so
they follow each other (`_Head.one_by_one`). Tiles are held longer for that: with one value head per query head, where
nothing is carried, they run at once (`_Head.at_once`).

In a Gated DeltaNet layer (16 / 32 heads, B4 T4096, H200) it takes 565 us, and 792 us with 96 heads of T8192. Tried and
dropped there: sums between heads in a buffer in global memory (775 to 790 us; 500 without them, which is wrong), since the
values that pass by evict it from the L2 cache, with hints, too. One by one where nothing is carried: 896 us for the 96
heads. One by one for each tile by itself, in a loop that releases each: 805 and 1,361 us; unrolled, the compiler
serialises the products.

Numerics: S is rounded once. Y, Z, u and dS' are bf16x2: the gradients of gates and betas are sums of many terms of
either sign.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleSm90Backward
from tilewright.ops.delta_rule.pallas_gpu.sm90_gate_gradients import SumRow, gate_gradients
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI_LO,
    REGISTERS,
    SQUARE,
    TILE,
    WARPS,
    Row,
    Sizes,
    bfloat16_array,
    bfloat16_tile,
    decay,
    fence_interpreted_load,
    float32_array,
    float32_buffer,
    loop,
    positions,
    store_column_sums,
    zeros,
)
from tilewright.ops.delta_rule.pallas_gpu.value_tiles import SIDES, ValueTile, ValueTiles
from tilewright.pallas.gpu.kernel import compiler_params, processors, run_kernel
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    load_along_columns,
    load_along_rows,
    opaque_zero,
    split_hi_lo,
    store,
    transposed,
)
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product, with_accumulators

_GATE_STAGES = 2


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


class _Terms(NamedTuple):
    """What else the products through the states give."""

    pairs: jax.Array  # dO u^T or dv u^T [C, C], by side
    k_u_ds: jax.Array  # [C]: k . (u dS'^T), by token
    rows: jax.Array  # [C]: what goes through exp(G), of the states, by token
    states: jax.Array | None  # [64]: S . dS', by value channel of a tile; for a gate


@dataclass(frozen=True)
class _Head:
    """A chunk of a value head in one of the warpgroups, and the products through its states."""

    values: ValueTiles
    index: Any
    zero: Any
    d: Any  # Its tile of key channels.
    side: Any
    queries: Any  # [C, 64]
    keys: Any  # [C, 64]
    gates: Any  # [Row.COUNT, C]
    wait_for_others: Callable[[], None]
    """Waits for queries, keys and gates; the values come before them."""
    scale: float
    gated: bool

    def at_once(self) -> tuple[tuple[jax.Array, jax.Array], _Terms]:
        """dq and dk through the states."""
        state_product = self._state_product if self.gated else None
        do_s, dv_s, u_ds, pairs, *states = self.values.products(self.index, self.zero, self.d, self.side, state_product)
        self.wait_for_others()
        decay_in = self._decay(Row.DECAY_IN)
        do_s, dv_s = do_s * (decay_in * self.scale), dv_s * decay_in
        keys = _load(self.keys)
        k_u_ds, rows = jnp.sum(keys * u_ds, axis=1), jnp.sum(_load(self.queries) * do_s - keys * dv_s, axis=1)
        return (do_s, u_ds * self._decay(Row.DECAY_OUT) - dv_s), _Terms(pairs, k_u_ds, rows, *(states or (None,)))

    def one_by_one(self, d_q: jax.Array, d_k: jax.Array) -> tuple[tuple[jax.Array, jax.Array], _Terms]:
        """The given dq and dk and those through the states.

        A product is used while the next one runs. All tiles that are in shared memory together are summed up before.
        """
        sums, every = (d_q, d_k), []
        for tiles in self.values.rounds():
            sums, terms = self._one_by_one(tiles, *sums)
            every.append(terms)
        return sums, functools.reduce(functools.partial(jax.tree.map, jnp.add), every)

    def _one_by_one(self, tiles: range, d_q: jax.Array, d_k: jax.Array) -> Any:
        """That of some tiles. Each product has its registers from where it begins."""
        views: list[ValueTile] = []
        one = functools.partial(with_accumulators, (SQUARE,))

        def begin(u_ds: Accumulator) -> Any:
            for t in tiles:
                view = self.values.wait(self.index, t, self.zero)
                view.add_u_d_states(u_ds, self.d)
                views.append(view)
            if tiles.start == 0:
                self.wait_for_others()
            return one(functools.partial(add_dv, u_ds))

        def add_dv(u_ds: Accumulator, dv_s: Accumulator) -> Any:
            for view in views:
                dv_s.add(view.values.at[1], view.states.at[self.d])
            product_ = u_ds.read(in_flight=len(views))
            k_u_ds = jnp.sum(_load(self.keys) * product_, axis=1)
            return one(functools.partial(add_do, d_k + product_ * self._decay(Row.DECAY_OUT), k_u_ds, dv_s))

        def add_do(d_k: jax.Array, k_u_ds: jax.Array, dv_s: Accumulator, do_s: Accumulator) -> Any:
            for view in views:
                do_s.add(view.values.at[0], view.states.at[self.d])
            product_ = dv_s.read(in_flight=len(views)) * self._decay(Row.DECAY_IN)
            rows = -jnp.sum(_load(self.keys) * product_, axis=1)
            return one(functools.partial(add_pairs, d_k - product_, k_u_ds, rows, do_s))

        def add_pairs(d_k: jax.Array, k_u_ds: jax.Array, rows: jax.Array, do_s: Accumulator, pairs: Accumulator) -> Any:
            for view in views:
                view.add_pairs(pairs, self.side)
            decay_in = self._decay(Row.DECAY_IN) * self.scale
            product_ = do_s.read(in_flight=HI_LO * len(views)) * decay_in
            rows = rows + jnp.sum(_load(self.queries) * product_, axis=1)
            states = None
            if self.gated:
                of_tiles = (self._state_product(view.states.at[self.d], view.d_states.at[0, self.d]) for view in views)
                states = functools.reduce(jnp.add, of_tiles)
            sums = d_q + product_, d_k
            terms = _Terms(pairs.read(), k_u_ds, rows, states)
            for t in tiles:
                self.values.release(self.index, t)
            return sums, terms

        return one(begin)

    def _decay(self, row: int) -> jax.Array:
        return load_along_rows(self.gates.at[row], SQUARE)

    def _state_product(self, state: Any, d_state: Any) -> jax.Array:
        sum_ = jnp.sum(_load(state) * _load(d_state), axis=1)
        fence_interpreted_load()
        return sum_


def _gradient_kernel(
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    d_o_ref, d_v_ref,  # [B, T, HV, V]
    u_ref,  # [B, HV, chunks, 2, V, C]
    states_ref,  # [B, HV, chunks, V, K]
    d_states_ref,  # [B, HV, chunks, 2, V, K]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    # outputs
    d_q_ref, d_k_ref,  # [B, T, H, K]
    sums_ref,  # [B, HV, chunks, SIDES, SumRow.count, C]
    # scratch
    qk_tiles,  # [2, depth_tiles, C, 64]
    value_tiles: Pipeline,  # `ValueTiles`
    pair_tiles,  # [SIDES, C, C]
    qk_full, qk_empty,
    gate_tiles: Pipeline,  # rows [Row.COUNT, C]
    exchanged, finished,
    # static
    sizes: Sizes,
    tiles: int,
    config: DeltaRuleSm90Backward,
    scale: float,
    gated: bool,
):  # fmt: skip
    group, depth_tiles = sizes.group, sizes.depth_tiles
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    side = lax.axis_index("warpgroup")
    scheduler = RoundRobin(sizes.b * sizes.h * sizes.chunks, blocks, block)
    count = scheduler.count
    values = ValueTiles(value_tiles, tiles, depth_tiles)

    def coordinates(index: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Batch, query head, value head, chunk, and the head's number in its group."""
        number, member = divmod_nonnegative(index, group)
        rest, n = divmod_nonnegative(scheduler.tile(number), sizes.chunks)
        b, h = divmod_nonnegative(rest, sizes.h)
        return b, h, h * group + member, n, member

    @pl.when(side == SIDES)
    def _produce():
        plgpu.set_max_registers(REGISTERS - SIDES * config.gradient_registers, action="decrease")

        @loop(count * group)
        def _one_head(index: Any) -> None:
            b, h, hv, n, member = coordinates(index)
            tokens = pl.ds(n * CHUNK, CHUNK)
            gate_tiles.fetch(index, rows=gates_ref.at[b, hv, n])

            def copy_queries_and_keys() -> None:
                pl.when(index > 0)(lambda: plgpu.barrier_wait(qk_empty))
                for which, ref in enumerate((q_ref, k_ref)):
                    for d in range(depth_tiles):
                        source = ref.at[b, tokens, h, pl.ds(d * TILE, TILE)]
                        plgpu.copy_gmem_to_smem(source, qk_tiles.at[which, d], qk_full)

            for number, round_ in enumerate(values.rounds()):
                for t in round_:
                    values.copy(index, t, (b, hv, n, tokens), (d_o_ref, d_v_ref, u_ref, states_ref, d_states_ref))
                # After the first values, which are needed first: the chunk before still has these tiles. Before the
                # others, whose stages are released by those who wait for these.
                if number == 0:
                    pl.when(member == 0)(copy_queries_and_keys)

    @pl.when(side < SIDES)
    def _compute():
        plgpu.set_max_registers(config.gradient_registers, action="increase")
        # With 64 key channels both warpgroups have the same ones, and the second one's sums are left out.
        d = side if depth_tiles > 1 else 0
        own = 1.0 if depth_tiles > 1 else jnp.where(side == 0, 1.0, 0.0)

        def one_head(index: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """dq and dk of a chunk with those of a value head, given those of the heads of its group before it."""
            b, h, hv, n, member = coordinates(index)
            zero = opaque_zero(index)
            queries, keys = qk_tiles.at[zero, d], qk_tiles.at[zero + 1, d]  # [C, 64]
            gates = gate_tiles.rows.at[gate_tiles.stage(index)]

            def wait_for_others() -> None:
                gate_tiles.wait(index)
                pl.when(member == 0)(lambda: plgpu.barrier_wait(qk_full))

            head = _Head(values, index, zero, d, side, queries, keys, gates, wait_for_others, scale, gated)
            if group > 1:
                sums, terms = head.one_by_one(*(jnp.where(member > 0, sum_, 0.0) for sum_ in sums))
            else:
                sums, terms = head.at_once()

            def put(row: int, sum_: jax.Array) -> None:
                store(sums_ref.at[b, hv, n, side, row], sum_)

            put(SumRow.K_U_DS, terms.k_u_ds * own)
            if terms.states is not None:
                put(SumRow.STATES, terms.states * own)

            # Between the tokens.
            def add_scores(sum_: Accumulator) -> None:
                for p in range(depth_tiles):
                    sum_.add(qk_tiles.at[side + zero, p], transposed(qk_tiles.at[zero + 1, p]))

            scores = product(SQUARE, add_scores)  # q_i . k_j, or k_i . k_j
            sign = jnp.where(side == 0, scale, -1.0)
            # Masked by `with_decay` it spills more: 325 us instead of 299 us (H200, T8192, 16 / 32 heads).
            i, j = positions()
            pair = jnp.where(i - j >= side, terms.pairs * decay(gates, i >= j) * sign, 0.0)  # Y or Z
            scores = scores * pair
            beta = load_along_columns(gates.at[Row.BETA], SQUARE)
            if gated:
                put(SumRow.ROWS, terms.rows * own + jnp.sum(scores * beta, axis=1))
            store_column_sums(sums_ref.at[b, hv, n, side, pl.ds(SumRow.COLUMNS, WARPS)], scores)

            def add_pairs(d_q: Accumulator, d_k: Accumulator) -> None:
                y, z = pair_tiles.at[zero], pair_tiles.at[zero + 1]
                d_q.add(y, keys)
                d_k.add(transposed(y), queries)
                d_k.add(z, keys)
                d_k.add(transposed(z), keys)

            # Hi, then lo: there is no room for a tile of each.
            for part in split_hi_lo(pair * beta):
                pair_tiles[side] = part
                plgpu.commit_smem()
                plgpu.barrier_arrive(exchanged)
                plgpu.barrier_wait(exchanged)
                sums = accumulate(sums, add_pairs)
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)
            gate_tiles.release(index)

            @pl.when(member == group - 1)
            def _last_of_group() -> None:
                @pl.when(side < depth_tiles)
                def _store() -> None:
                    # The tiles of queries and keys have been read: the gradients go out through them.
                    queries[...], keys[...] = (sum_.astype(jnp.bfloat16) for sum_ in sums)
                    plgpu.commit_smem()
                    for tile, ref in ((queries, d_q_ref), (keys, d_k_ref)):
                        place = ref.at[b, pl.ds(n * CHUNK, CHUNK), h, pl.ds(d * TILE, TILE)]
                        plgpu.copy_smem_to_gmem(tile, place)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                plgpu.barrier_arrive(qk_empty)

            return sums if group > 1 else ()

        lax.fori_loop(0, count * group, one_head, (zeros(), zeros()) if group > 1 else ())
        plgpu.wait_smem_to_gmem(0)


def scratch(sizes: Sizes, config: DeltaRuleSm90Backward, *, gated: bool) -> dict[str, Any]:
    gates = float32_buffer(_GATE_STAGES, Row.COUNT, CHUNK)
    return {
        "qk_tiles": bfloat16_tile(2, sizes.depth_tiles, *SQUARE),
        "value_tiles": ValueTiles.scratch(sizes, config),
        "pair_tiles": bfloat16_tile(SIDES, *SQUARE),
        "qk_full": plgpu.Barrier(num_arrivals=2 * sizes.depth_tiles),
        "qk_empty": plgpu.Barrier(num_arrivals=SIDES),
        "gate_tiles": Pipeline.scratch(_GATE_STAGES, copies=1, consumers=SIDES, rows=gates),
        "exchanged": plgpu.Barrier(num_arrivals=SIDES),
        "finished": plgpu.Barrier(num_arrivals=SIDES),
    }


def head_gate_gradients(
    call: DeltaRuleCall, launch: Launch, inputs: dict[str, jax.Array], tiles: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """dq and dk [B, T, H, K], dbeta and dg [B, HV, chunks, C]. `tiles`: the tiles of 64 value channels to sum over."""
    config, gated = launch.config, call.g is not None
    sizes = Sizes.of(call, config.block_v)
    blocks = min(sizes.b * sizes.h * sizes.chunks, processors(launch.chip))
    keys = bfloat16_array(sizes.b, sizes.t, sizes.h, sizes.depth)
    outputs = run_kernel(
        functools.partial(_gradient_kernel, sizes=sizes, tiles=tiles, config=config, scale=call.scale, gated=gated),
        name="delta_rule_gradients",
        inputs=inputs,
        outputs={
            "d_q": keys,
            "d_k": keys,
            "sums": float32_array(sizes.b, sizes.hv, sizes.chunks, SIDES, SumRow.count(gated=gated), CHUNK),
        },
        scratch=scratch(sizes, config, gated=gated),
        grid={"block": blocks},
        warpgroups=1 + SIDES,
        params=compiler_params(automatic_barriers=True),
    )
    d_beta, d_g = gate_gradients(outputs["sums"], inputs["gates"], gated=gated)
    return outputs["d_q"], outputs["d_k"], d_beta, d_g
