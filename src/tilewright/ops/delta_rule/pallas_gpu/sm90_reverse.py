"""The reverse passage on Hopper: the gradient of the state from the last chunk to the first, for both kinds of gates.

With dS' the gradient of the state after a chunk, and operands scaled as in sm90_states.py,

    du = scale (P beta)^T dO + k_out dS'        dv = (I + A)^-T du        dS = decay dS' + scale q_in^T dO - k_in^T dv

It writes dv and each dS'; everything else is computed from these for all chunks at once. Blocking is that of the state
passage: a warpgroup carries the transposed dS [64 channels, K] of its channels in registers (`_carry_gradient`). With
one gate per head the producer recomputes P, with one per channel it only copies.

Numerics: dS, du and dv are bf16x2 operands, for their errors would pass from chunk to chunk; others are rounded once.
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

from tilewright.ops.delta_rule.config import DeltaRuleSm90Backward
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    BETA,
    CHUNK,
    DECAY_ALL,
    DECAY_IN,
    DECAY_OUT,
    GATE_ROWS,
    HI,
    HI_LO,
    REGISTERS,
    SQUARE,
    TILE,
    Sizes,
    bfloat16_tile,
    decay,
    load_transposed,
    positions,
    query_head,
)
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel, smem_bytes
from tilewright.pallas.gpu.pipeline import Pipeline, pipeline_barriers
from tilewright.pallas.gpu.registers import (
    WGMMA,
    add_hi_lo,
    load_along_columns,
    load_along_rows,
    split_hi_lo,
    transposed,
)
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product

SplitTile = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class _Plan:
    """What is static about the reverse kernel."""

    per_channel: bool
    sizes: Sizes
    config: DeltaRuleSm90Backward

    @property
    def states(self) -> int:
        """Warpgroups of a thread block that carry a gradient of 64 value channels."""
        return self.config.block_v // TILE

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread, of a warpgroup with a state and of the producer."""
        state = self.config.state_registers or (232 if self.per_channel else 200)
        return state, REGISTERS - self.states * state

    @property
    def scratch(self) -> dict[str, Any]:
        return (_channel_gate_scratch if self.per_channel else _head_gate_scratch)(self)


class _Block:
    """What a thread block works on: some value channels of a head."""

    def __init__(self, plan: _Plan):
        self.plan = plan
        self.b, self.hv, self.block = (lax.axis_index(name) for name in ("batch", "head", "values"))
        self.warpgroup = lax.axis_index("warpgroup")

    def channels(self, state: Any) -> Any:
        return pl.ds((self.block * self.plan.states + state) * TILE, TILE)

    def chunk(self, step: Any) -> tuple[Any, Any]:
        """The chunk of a step, and its tokens."""
        n = self.plan.sizes.chunks - 1 - step
        return n, pl.ds(n * CHUNK, CHUNK)

    def set_registers(self, which: int, action: Any) -> None:
        if self.plan.states > 1:
            plgpu.set_max_registers(self.plan.registers[which], action=action)


def _carry_gradient(
    at: _Block,
    pipeline: Pipeline,
    split: Callable[[jax.Array], SplitTile],
    d_u: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]],
    to_state: Callable[[Any, jax.Array, jax.Array, Any, Any], tuple[jax.Array, jax.Array, SplitTile]],
    *,
    k_out_tiles, k_in_tiles, q_tiles, inverse_tiles, d_o_tiles, d_state_tiles,
    d_final_ref, d_v_ref, d_states_ref, d_initial_ref,
) -> None:  # fmt: skip
    """The warpgroups that carry dS, [V, K], from the last chunk to the first.

    `d_u(stage, k_out dS', d_o)` is du and whatever `to_state` needs of it; `to_state(stage, dS', dv, d_o, that)` is
    decay dS', and what is multiplied with q and with k: scale dO, and -dv, transposed.
    """

    @pl.when(at.warpgroup < at.plan.states)
    def _carry():
        at.set_registers(0, "increase")
        b, hv, warpgroup, mine = at.b, at.hv, at.warpgroup, at.channels(at.warpgroup)

        def one_chunk(step: Any, d_state: jax.Array) -> jax.Array:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            plgpu.barrier_wait(pipeline.full.at[stage])
            d_o = d_o_tiles.at[stage, warpgroup]
            after = split(d_state)  # [V, K]
            k_ds = product(SQUARE, lambda sum_: add_hi_lo(sum_, after, transposed(k_out_tiles.at[stage])))  # [V, C]
            for part in range(HI_LO):
                d_state_tiles[warpgroup, part] = after[part]
            plgpu.commit_smem()
            for part in range(HI_LO):
                plgpu.copy_smem_to_gmem(d_state_tiles.at[warpgroup, part], d_states_ref.at[b, hv, n, part, mine])
            du, more = d_u(stage, k_ds, d_o)
            du_hi_lo = split(du)
            d_v = product(SQUARE, lambda sum_: add_hi_lo(sum_, du_hi_lo, inverse_tiles.at[stage]))
            kept, read, erased = to_state(stage, d_state, d_v, d_o, more)

            def add(sum_: Accumulator) -> None:
                sum_.add(read, q_tiles.at[stage])
                add_hi_lo(sum_, erased, k_in_tiles.at[stage])

            (d_state,) = accumulate((kept,), add)
            # The tile of dO has been read: dv goes out through it.
            transposed(d_o)[...] = d_v.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(d_o, d_v_ref.at[b, tokens, hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pipeline.release(step, stage=stage)
            return d_state

        d_state = plgpu.load(d_final_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        d_state = lax.fori_loop(0, at.plan.sizes.chunks, one_chunk, d_state)
        plgpu.wait_smem_to_gmem(0)
        d_initial_ref[b, hv, mine, :] = d_state


def _head_gate_kernel(
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    d_o_ref,  # [B, T, HV, V]
    inverse_ref,  # [B, HV, T, 2 C]
    gates_ref,  # [B, HV, chunks, GATE_ROWS, C]
    d_final_ref,  # [B, HV, V, K]
    # outputs
    d_v_ref,  # [B, T, HV, V]
    d_states_ref,  # [B, HV, chunks, 2, V, K]
    d_initial_ref,  # [B, HV, V, K]
    # scratch
    q_tiles, k_tiles, d_o_tiles, inverse_tiles, gate_tiles,  # the pipeline's
    p_tile, d_state_tiles,
    full, empty, p_full, p_empty,
    # static
    plan: _Plan,
    scale: float,
):  # fmt: skip
    at = _Block(plan)
    b, hv, chunks, states = at.b, at.hv, plan.sizes.chunks, plan.states
    h = query_head(hv, plan.sizes.group)
    pipeline = Pipeline(plan.config.stages, full, empty)

    @pl.when(at.warpgroup == states)
    def _produce():
        at.set_registers(1, "decrease")

        def copy(step: Any) -> None:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            copies = (
                (k_ref.at[b, tokens, h], k_tiles.at[stage]),
                (gates_ref.at[b, hv, n], gate_tiles.at[stage]),
                (q_ref.at[b, tokens, h], q_tiles.at[stage]),
                (inverse_ref.at[b, hv, tokens, HI], inverse_tiles.at[stage]),
                *((d_o_ref.at[b, tokens, hv, at.channels(w)], d_o_tiles.at[stage, w]) for w in range(states)),
            )
            pipeline.copy(step, copies, stage=stage)

        ahead = pipeline.stages - 1
        for step in range(min(ahead, chunks)):
            copy(jnp.int32(step))

        def one_chunk(step: Any, carry: tuple[()]) -> tuple[()]:
            stage = pipeline.wait(step)
            i, j = positions()
            qk = product(SQUARE, lambda sum_: sum_.add(q_tiles.at[stage], transposed(k_tiles.at[stage])))
            gates = gate_tiles.at[stage]
            p = qk * decay(gates, i, j) * load_along_columns(gates.at[BETA], SQUARE) * scale
            pl.when(step > 0)(lambda: plgpu.barrier_wait(p_empty))
            p_tile[...] = p.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full)

            @pl.when(step + ahead < chunks)
            def _next():
                pl.when(step > 0)(lambda: plgpu.barrier_wait(empty.at[pipeline.stage(step + ahead)]))
                copy(step + ahead)

            return carry

        lax.fori_loop(0, chunks, one_chunk, ())

    # H200, H96 T8192: the kernel takes 0.63 ms, and 0.69 ms by bits, which are faster in every other kernel. Why is not
    # known.
    split = functools.partial(split_hi_lo, by_conversion=True)

    def d_u(stage: Any, k_ds: jax.Array, d_o: Any) -> tuple[jax.Array, Any]:
        k_ds = k_ds * load_along_columns(gate_tiles.at[stage].at[DECAY_OUT], SQUARE)  # [V, C]
        plgpu.barrier_wait(p_full)
        (du,) = accumulate((k_ds,), lambda sum_: sum_.add(transposed(d_o), p_tile))
        plgpu.barrier_arrive(p_empty)
        return du, None

    def to_state(stage: Any, d_state: jax.Array, d_v: jax.Array, d_o: Any, _: Any) -> Any:
        gates = gate_tiles.at[stage]
        decay_in = load_along_columns(gates.at[DECAY_IN], SQUARE)
        read = (load_transposed(d_o) * (decay_in * scale)).astype(jnp.bfloat16)
        erased = split(d_v * -decay_in)
        return d_state * load_along_rows(gates.at[DECAY_ALL], (TILE, plan.sizes.depth)), read, erased

    _carry_gradient(
        at, pipeline, split, d_u, to_state, k_out_tiles=k_tiles, k_in_tiles=k_tiles, q_tiles=q_tiles,
        inverse_tiles=inverse_tiles, d_o_tiles=d_o_tiles, d_state_tiles=d_state_tiles,
        d_final_ref=d_final_ref, d_v_ref=d_v_ref, d_states_ref=d_states_ref, d_initial_ref=d_initial_ref,
    )  # fmt: skip


def _head_gate_scratch(plan: _Plan) -> dict[str, Any]:
    stages, states, depth = plan.config.stages, plan.states, plan.sizes.depth
    return {
        "q_tiles": bfloat16_tile(stages, CHUNK, depth),
        "k_tiles": bfloat16_tile(stages, CHUNK, depth),
        "d_o_tiles": bfloat16_tile(stages, states, CHUNK, TILE),
        "inverse_tiles": bfloat16_tile(stages, *SQUARE),
        "gate_tiles": plgpu.SMEM((stages, GATE_ROWS, CHUNK), jnp.float32),
        "p_tile": bfloat16_tile(*SQUARE),
        "d_state_tiles": bfloat16_tile(states, HI_LO, TILE, depth),
        **pipeline_barriers(stages, copies=4 + states, consumers=states),
        "p_full": plgpu.Barrier(num_arrivals=1),
        "p_empty": plgpu.Barrier(num_arrivals=states),
    }


def _channel_gate_kernel(
    *,
    # inputs
    q_in_ref, k_in_ref,  # [B, T, HV, K]
    k_out_ref,  # [B, T, HV, 2 K]
    d_o_ref,  # [B, T, HV, V]
    inverse_ref, p_ref,  # [B, HV, T, 2 C]
    decay_ref,  # [B, HV, chunks, K]
    d_final_ref,  # [B, HV, V, K]
    # outputs
    d_v_ref,  # [B, T, HV, V]
    d_states_ref,  # [B, HV, chunks, 2, V, K]
    d_initial_ref,  # [B, HV, V, K]
    # scratch
    q_in_tiles, k_in_tiles, k_out_tiles, d_o_tiles, inverse_tiles, p_tiles, decay_tiles,  # the pipeline's
    d_state_tiles,
    full, empty,
    # static
    plan: _Plan,
    scale: float,
):  # fmt: skip
    at = _Block(plan)
    b, hv, states, depth = at.b, at.hv, plan.states, plan.sizes.depth
    pipeline = Pipeline(plan.config.stages, full, empty)

    @pl.when(at.warpgroup == states)
    def _produce():
        at.set_registers(1, "decrease")

        def copy(step: Any, carry: tuple[()]) -> tuple[()]:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            pl.when(step >= pipeline.stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
            copies = (
                (k_out_ref.at[b, tokens, hv, pl.ds(0, depth)], k_out_tiles.at[stage]),
                *((d_o_ref.at[b, tokens, hv, at.channels(w)], d_o_tiles.at[stage, w]) for w in range(states)),
                (p_ref.at[b, hv, tokens, HI], p_tiles.at[stage]),
                (inverse_ref.at[b, hv, tokens, HI], inverse_tiles.at[stage]),
                (q_in_ref.at[b, tokens, hv], q_in_tiles.at[stage]),
                (k_in_ref.at[b, tokens, hv], k_in_tiles.at[stage]),
                (decay_ref.at[b, hv, n], decay_tiles.at[stage]),
            )
            pipeline.copy(step, copies, stage=stage)
            return carry

        lax.fori_loop(0, plan.sizes.chunks, copy, ())

    def d_u(stage: Any, k_ds: jax.Array, d_o: Any) -> tuple[jax.Array, Any]:
        read = (load_transposed(d_o) * scale).astype(jnp.bfloat16)
        (du,) = accumulate((k_ds,), lambda sum_: sum_.add(read, p_tiles.at[stage]))
        return du, read

    def to_state(stage: Any, d_state: jax.Array, d_v: jax.Array, d_o: Any, read: Any) -> Any:
        erased = split_hi_lo(-d_v)
        return d_state * load_along_columns(decay_tiles.at[stage], (TILE, depth)), read, erased

    _carry_gradient(
        at, pipeline, split_hi_lo, d_u, to_state, k_out_tiles=k_out_tiles, k_in_tiles=k_in_tiles, q_tiles=q_in_tiles,
        inverse_tiles=inverse_tiles, d_o_tiles=d_o_tiles, d_state_tiles=d_state_tiles,
        d_final_ref=d_final_ref, d_v_ref=d_v_ref, d_states_ref=d_states_ref, d_initial_ref=d_initial_ref,
    )  # fmt: skip


def _channel_gate_scratch(plan: _Plan) -> dict[str, Any]:
    stages, states, depth = plan.config.stages, plan.states, plan.sizes.depth
    return {
        "q_in_tiles": bfloat16_tile(stages, CHUNK, depth),
        "k_in_tiles": bfloat16_tile(stages, CHUNK, depth),
        "k_out_tiles": bfloat16_tile(stages, CHUNK, depth),
        "d_o_tiles": bfloat16_tile(stages, states, CHUNK, TILE),
        "inverse_tiles": bfloat16_tile(stages, *SQUARE),
        "p_tiles": bfloat16_tile(stages, *SQUARE),
        "decay_tiles": plgpu.SMEM((stages, depth), jnp.float32),
        "d_state_tiles": bfloat16_tile(states, HI_LO, TILE, depth),
        **pipeline_barriers(stages, copies=6 + states, consumers=states),
    }


def pass_gradients(
    operands: dict[str, jax.Array], d_final: jax.Array, sizes: Sizes, config: DeltaRuleSm90Backward, *, scale: float
) -> dict[str, jax.Array]:
    """`d_v` [B, T, HV, V], `d_states` after each chunk, [B, HV, chunks, 2, V, K], and `d_initial` [B, HV, V, K].

    `operands` are the inputs of one of the two kernels; `d_final` is [B, HV, V, K].
    """
    b, hv, width, depth = sizes.b, sizes.hv, sizes.width, sizes.depth
    plan = _Plan("gates" not in operands, sizes, config)
    return run_kernel(
        functools.partial(_channel_gate_kernel if plan.per_channel else _head_gate_kernel, plan=plan, scale=scale),
        name="kda_reverse" if plan.per_channel else "delta_rule_reverse",
        inputs={**operands, "d_final": d_final},
        outputs={
            "d_v": jax.ShapeDtypeStruct((b, sizes.t, hv, width), jnp.bfloat16),
            "d_states": jax.ShapeDtypeStruct((b, hv, sizes.chunks, HI_LO, width, depth), jnp.bfloat16),
            "d_initial": jax.ShapeDtypeStruct((b, hv, width, depth), jnp.float32),
        },
        scratch=plan.scratch,
        grid={"head": hv, "values": width // config.block_v, "batch": b},
        warpgroups=1 + plan.states,
        params=compiler_params(automatic_barriers=True),
    )


def memory(sizes: Sizes, config: DeltaRuleSm90Backward, *, per_channel: bool) -> dict[str, int]:
    """Shared memory of the reverse kernel."""
    return {"reverse": smem_bytes(_Plan(per_channel, sizes, config).scratch)}
