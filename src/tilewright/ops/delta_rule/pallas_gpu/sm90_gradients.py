"""Gradients on Hopper, one gate per head: all but dv, from the states, their gradients and dv, all chunks at once.

With S the state before a chunk, dS' the gradient of the state after it, decay_in = exp G, and decay_out = exp(G_C - G),

    Y_ij = scale (dO_i . u_j) decay_ij, i >= j        Z_ij = -(dv_i . u_j) decay_ij, i > j
    dq = scale decay_in (dO S^T) + Y beta k
    dk = decay_out beta (u dS'^T) - decay_in (dv S^T) + beta Y^T q + Z beta k + beta Z^T k
    dbeta_j = decay_out_j k_j . (u dS'^T)_j + sum_i (Y_ij (q_i . k_j) + Z_ij (k_i . k_j))

The gradient of G_i is what goes through exp(G_i) less what goes through exp(-G_i): rows of the pairs' sums less
columns.

A thread block is persistent. It takes chunks of a query head one after the other, with all value heads of its group,
whose dq and dk it sums (between heads these are in a buffer of its own, which stays in the L2 cache). Each of its two
consumer warpgroups has 64 key channels of dq and dk; one computes Y and the other Z, which both need. Values pass by 64
channels at a time (`ValueTiles`).

Numerics: S is rounded once. Y, Z, u and dS' are bf16x2: the gradients of gates and betas are sums of many terms of
either sign.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
)
from tilewright.pallas.gpu.kernel import compiler_params, processors, run_kernel
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    load_along_columns,
    load_along_rows,
    opaque_zero,
    split_hi_lo,
    transposed,
    upcast_elements,
)
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product, products, wait_for_products

SIDES = 2
"""Consumer warpgroups: the one of Y and the one of Z."""
_GATE_STAGES = 2


@dataclass(frozen=True)
class ValueTiles:
    """A pipeline over value channels, 64 per stage: dO, dv, u, S and dS', and the products that sum over them."""

    pipeline: Pipeline
    tiles: int
    """Tiles of value channels per chunk."""
    depth_tiles: int

    @staticmethod
    def scratch(sizes: Sizes, config: DeltaRuleSm90Backward) -> Pipeline:
        stages, depth_tiles = config.gradient_stages, sizes.depth_tiles
        return Pipeline.scratch(
            stages,
            copies=2 + HI_LO + depth_tiles * (1 + HI_LO),
            consumers=SIDES,
            values=bfloat16_tile(stages, 2, *SQUARE),  # [2, C, V]: dO, dv
            u=bfloat16_tile(stages, HI_LO, *SQUARE),  # [2, V, C]
            states=bfloat16_tile(stages, depth_tiles, *SQUARE),  # [depth_tiles, V, K]
            d_states=bfloat16_tile(stages, HI_LO, depth_tiles, *SQUARE),  # [2, depth_tiles, V, K]
        )

    def copy(self, index: Any, where: tuple[Any, Any, Any, Any], refs: tuple[Any, Any, Any, Any, Any]) -> None:
        """Copies the index-th chunk of this thread block, which is `where`: batch, value head, chunk and tokens."""
        (b, hv, n, tokens), (d_o_ref, d_v_ref, u_ref, states_ref, d_states_ref), to = where, refs, self.pipeline
        for t in range(self.tiles):
            step = index * self.tiles + t
            stage = to.acquire(step)
            mine = pl.ds(t * TILE, TILE)
            copies = [
                (d_o_ref.at[b, tokens, hv, mine], to.values.at[stage, 0]),
                (d_v_ref.at[b, tokens, hv, mine], to.values.at[stage, 1]),
                *((u_ref.at[b, hv, n, part, mine], to.u.at[stage, part]) for part in range(HI_LO)),
            ]
            for d in range(self.depth_tiles):
                keys = pl.ds(d * TILE, TILE)
                copies.append((states_ref.at[b, hv, n, mine, keys], to.states.at[stage, d]))
                for part in range(HI_LO):
                    copies.append((d_states_ref.at[b, hv, n, part, mine, keys], to.d_states.at[stage, part, d]))
            to.copy(step, copies, stage=stage)

    def products(
        self, index: Any, zero: Any, d: Any, side: Any, state_product: Callable[[Any, Any], jax.Array] | None
    ) -> tuple[jax.Array, ...]:
        """dO S^T, dv S^T and u dS'^T [C, 64] of the d-th key channels; dO u^T or dv u^T [C, C], by side.

        They are followed by the sum of `state_product(S, dS')`, where that is given.
        """

        def add_values(do_s: Accumulator, dv_s: Accumulator, u_ds: Accumulator, pairs: Accumulator) -> Any:
            sums, tiles = [], self.pipeline
            issued = 5 + HI_LO  # By an iteration.
            for t in range(self.tiles):
                stage = tiles.stage(index * self.tiles + t) + zero
                tiles.wait(index, stage=stage)
                d_o, d_v, state = tiles.values.at[stage, 0], tiles.values.at[stage, 1], tiles.states.at[stage, d]
                u, d_states = tiles.u.at[stage], tiles.d_states.at[stage]
                do_s.add(d_o, state)  # [C, V] [V, K]
                dv_s.add(d_v, state)
                u_ds.add(transposed(u.at[0]), d_states.at[0, d])
                u_ds.add(transposed(u.at[0]), d_states.at[1, d])
                u_ds.add(transposed(u.at[1]), d_states.at[0, d])
                for part in range(HI_LO):
                    pairs.add(tiles.values.at[stage, side], u.at[part])  # [C, V] [V, C]
                if state_product is not None:
                    sums.append(state_product(state, d_states.at[0, d]))
                if t > 0:
                    wait_for_products(issued)
                    tiles.release(index * self.tiles + t - 1)
            wait_for_products(0)
            tiles.release(index * self.tiles + self.tiles - 1)
            return (functools.reduce(jnp.add, sums),) if sums else ()

        return products((SQUARE,) * 4, add_values)


def _load(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


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
    rows_ref,  # [B, HV, chunks, SIDES, 2 or 4, C]
    partial_ref,  # [blocks, SIDES, 2, C, 64]: dq and dk between the heads of a group
    # scratch
    qk_tiles,  # [2, depth_tiles, C, 64]
    value_tiles: Pipeline,  # `ValueTiles`
    pair_tiles,  # [SIDES, C, C]
    qk_full, qk_empty,
    gate_tiles: Pipeline,  # rows [Row.COUNT, C]
    row_tiles,  # [SIDES, 2 or 4, C]
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
            values.copy(index, (b, hv, n, tokens), (d_o_ref, d_v_ref, u_ref, states_ref, d_states_ref))

            # After the values: those are needed first, and these wait until the chunk before is done.
            @pl.when(member == 0)
            def _queries_and_keys():
                pl.when(index > 0)(lambda: plgpu.barrier_wait(qk_empty))
                for which, ref in enumerate((q_ref, k_ref)):
                    for d in range(depth_tiles):
                        source = ref.at[b, tokens, h, pl.ds(d * TILE, TILE)]
                        plgpu.copy_gmem_to_smem(source, qk_tiles.at[which, d], qk_full)

    @pl.when(side < SIDES)
    def _compute():
        plgpu.set_max_registers(config.gradient_registers, action="increase")
        # With 64 key channels both warpgroups have the same ones, and the second one's sums are left out.
        d = side if depth_tiles > 1 else 0
        own = 1.0 if depth_tiles > 1 else jnp.where(side == 0, 1.0, 0.0)
        rows = row_tiles.at[side]

        def state_product(state: Any, d_state: Any) -> jax.Array:
            summed = jnp.sum(_load(state) * _load(d_state), axis=1)
            fence_interpreted_load()
            return summed

        @loop(count * group)
        def _one_head(index: Any) -> None:
            b, h, hv, n, member = coordinates(index)
            tokens = pl.ds(n * CHUNK, CHUNK)
            zero = opaque_zero(index)
            queries, keys = qk_tiles.at[zero, d], qk_tiles.at[zero + 1, d]  # [C, 64]
            do_s, dv_s, u_ds, pairs, *state_sums = values.products(
                index, zero, d, side, state_product if gated else None
            )
            gate_stage = gate_tiles.wait(index)
            gates = gate_tiles.rows.at[gate_stage]
            pl.when(member == 0)(lambda: plgpu.barrier_wait(qk_full))
            # The rows of the chunk before have been copied.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            # Through the states.
            decay_in = load_along_rows(gates.at[Row.DECAY_IN], SQUARE)
            do_s, dv_s = do_s * (decay_in * scale), dv_s * decay_in
            k_tile = _load(keys)
            rows.at[SumRow.K_U_DS][...] = jnp.sum(k_tile * u_ds, axis=1) * own
            d_q, d_k = do_s, u_ds * load_along_rows(gates.at[Row.DECAY_OUT], SQUARE) - dv_s
            if group > 1:
                before = (partial_ref.at[block, side, which] for which in (0, 1))
                d_q, d_k = (
                    gradient + jnp.where(member > 0, plgpu.load(ref, layout=WGMMA, optimized=False), 0.0)
                    for gradient, ref in zip((d_q, d_k), before, strict=True)
                )
            through_states = None
            if gated:
                through_states = jnp.sum(_load(queries) * do_s - k_tile * dv_s, axis=1) * own
                rows.at[SumRow.STATES][...] = state_sums[0] * own

            # Between the tokens.
            def add_scores(sum_: Accumulator) -> None:
                for p in range(depth_tiles):
                    sum_.add(qk_tiles.at[side + zero, p], transposed(qk_tiles.at[zero + 1, p]))

            scores = product(SQUARE, add_scores)  # q_i . k_j, or k_i . k_j
            i, j = positions()
            sign = jnp.where(side == 0, scale, -1.0)
            pairs = jnp.where(i - j >= side, pairs * decay(gates, i, j) * sign, 0.0)  # Y or Z
            scores = scores * pairs
            beta = load_along_columns(gates.at[Row.BETA], SQUARE)
            if through_states is not None:
                rows.at[SumRow.ROWS][...] = through_states + jnp.sum(scores * beta, axis=1)

            def add_pairs(d_q: Accumulator, d_k: Accumulator) -> None:
                y, z = pair_tiles.at[zero], pair_tiles.at[zero + 1]
                d_q.add(y, keys)
                d_k.add(transposed(y), queries)
                d_k.add(z, keys)
                d_k.add(transposed(z), keys)

            def both_have_read() -> None:
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)

            # Hi, then lo: there is no room for a tile of each.
            for part, value in enumerate(split_hi_lo(pairs * beta, widen=upcast_elements)):
                if part > 0:
                    both_have_read()
                pair_tiles[side] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(exchanged)
                plgpu.barrier_wait(exchanged)
                d_q, d_k = accumulate((d_q, d_k), add_pairs)
            gate_tiles.release(index, stage=gate_stage)

            def add_columns() -> None:
                rows.at[SumRow.COLUMNS][...] = jnp.sum(scores, axis=0)

            # Sums over rows pass between warps through memory that the warpgroups share: one after the other.
            pl.when(side == 0)(add_columns)
            both_have_read()  # The pairs, and queries and keys.
            pl.when(side == 1)(add_columns)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows, rows_ref.at[b, hv, n, side])

            def store_partial() -> None:
                for which, gradient in enumerate((d_q, d_k)):
                    partial_ref[block, side, which] = gradient

            def store() -> None:
                # The tiles of queries and keys have been read: the gradients go out through them.
                queries[...] = d_q.astype(jnp.bfloat16)
                keys[...] = d_k.astype(jnp.bfloat16)
                plgpu.commit_smem()
                channels = pl.ds(d * TILE, TILE)
                plgpu.copy_smem_to_gmem(queries, d_q_ref.at[b, tokens, h, channels])
                plgpu.copy_smem_to_gmem(keys, d_k_ref.at[b, tokens, h, channels])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            last = group - 1
            if group > 1:
                pl.when(member < last)(store_partial)
            pl.when((member == last) & (side < depth_tiles))(store)
            pl.when(member == last)(lambda: plgpu.barrier_arrive(qk_empty))

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
        "row_tiles": float32_buffer(SIDES, SumRow.count(gated=gated), CHUNK),
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
            "rows": float32_array(sizes.b, sizes.hv, sizes.chunks, SIDES, SumRow.count(gated=gated), CHUNK),
            # Partial sums of dq and dk between the heads of a group: registers have no room for them beside the rest.
            "partial": float32_array(blocks if sizes.group > 1 else 1, SIDES, 2, *SQUARE),
        },
        scratch=scratch(sizes, config, gated=gated),
        grid={"block": blocks},
        warpgroups=1 + SIDES,
        params=compiler_params(automatic_barriers=True),
    )
    d_beta, d_g = gate_gradients(outputs["rows"], inputs["gates"], gated=gated)
    return outputs["d_q"], outputs["d_k"], d_beta, d_g
