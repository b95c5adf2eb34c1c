"""The reverse passage on Hopper: the gradient of the state from the last chunk to the first, for both kinds of gates.

With dS' the gradient of the state after a chunk, and operands scaled as in sm90_states.py,

    du = scale (P beta)^T dO + k_out dS'        dv = (I + A)^-T du        dS = decay dS' + scale q_in^T dO - k_in^T dv

It writes dv and each dS'; everything else is computed from these for all chunks at once. Blocking is that of the state
passage: a warpgroup carries the transposed dS [64 channels, K] of its channels in registers (`_carry_gradient`). With
one gate per head the producer recomputes P, with one per channel it only copies.

Few heads wait for the chain from chunk to chunk, du, dv, dS. What the chain does not need is done while its products run:
dS' and dv are stored, P dO is multiplied beside k_out dS', and dO and dS are scaled. That took 320 us to 306 us for 16
qk / 32 v heads, T8192 D128, and 338 us to 301 us for four sequences of T4096, where it moves 3.3 TB/s (H200, jax 0.11.2).
Without P dO, which had a wait of its own: 307 us and 331 us.

Numerics: dS, du and dv are bf16x2 operands, for their errors would pass from chunk to chunk; others are rounded once.
Without a gate, (I + A)^-1 is bf16x2 too: tokens with the same key, never forgotten, add up the errors of its rows (one
key 20 times with beta 1, heads of 16: d beta was off by 0.16 of 9.6, and is by 0.012).
"""

import functools
from collections.abc import Callable, Iterator
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
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI,
    HI_LO,
    LO,
    REGISTERS,
    SQUARE,
    TILE,
    Block,
    Plan,
    Row,
    SplitTile,
    bfloat16_array,
    bfloat16_tile,
    float32_array,
    float32_buffer,
    load_transposed,
    loop,
    query_head,
    with_decay,
)
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    add_hi_lo,
    load_along_columns,
    load_along_rows,
    opaque_zero,
    split_hi_lo,
    transposed,
)
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product, products


@dataclass(frozen=True)
class _Plan(Plan):
    """What is static about the reverse kernel."""

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
    def inverse_parts(self) -> tuple[Any, ...]:
        """What is read of (I + A)^-1, which has hi and lo side by side."""
        return (HI, LO) if self.call.gate == "none" else (HI,)

    @property
    def scratch(self) -> dict[str, Any]:
        stages, states, depth = self.config.stages, self.states, self.sizes.depth
        keys, square = bfloat16_tile(stages, CHUNK, depth), bfloat16_tile(stages, *SQUARE)
        inverse = bfloat16_tile(stages, len(self.inverse_parts) * CHUNK, CHUNK)  # One part below the other.
        values = {"d_o": bfloat16_tile(stages, states, CHUNK, TILE), "inverse": inverse}
        if self.per_channel:
            own = {
                "q": keys,
                "k_in": keys,
                "k_out": keys,
                **values,
                "p": square,
                "decay": float32_buffer(stages, depth),
            }
        else:
            own = {"q": keys, "k": keys, **values, "gates": float32_buffer(stages, Row.COUNT, CHUNK)}
        scores = {
            "p_tile": bfloat16_tile(*SQUARE),
            "p_full": plgpu.Barrier(num_arrivals=1),
            "p_empty": plgpu.Barrier(num_arrivals=states),
        }
        return {
            "pipeline": Pipeline.scratch(
                stages, copies=len(own) - 2 + states + len(self.inverse_parts), consumers=states, **own
            ),
            **({} if self.per_channel else scores),
            "d_state_tiles": bfloat16_tile(states, HI_LO, TILE, depth),
        }


class _Block(Block):
    def __init__(self, plan: _Plan):
        super().__init__(plan)
        self.warpgroup = lax.axis_index("warpgroup")

    def channels(self, state: Any) -> Any:
        return pl.ds((self.block * self.plan.states + state) * TILE, TILE)

    def chunk(self, step: Any) -> tuple[Any, Any]:
        """The chunk of a step, and its tokens."""
        n = self.plan.sizes.chunks - 1 - step
        return n, pl.ds(n * CHUNK, CHUNK)

    def values(self, ref: Any, tiles: Any, tokens: Any, stage: Any) -> Iterator[tuple[Any, Any]]:
        """The copies of the value channels of each warpgroup."""
        return (
            (ref.at[self.b, tokens, self.hv, self.channels(w)], tiles.at[stage, w]) for w in range(self.plan.states)
        )

    def set_registers(self, which: int, action: Any) -> None:
        if self.plan.states > 1:
            plgpu.set_max_registers(self.plan.registers[which], action=action)


@dataclass(frozen=True)
class _Gate:
    """What depends on the kind of gate, for a warpgroup that carries dS."""

    d_u: Callable[[Any, Any, Callable[[Accumulator], None], Callable[[], None]], tuple[jax.Array, Any]]
    """(stage, d_o, what adds k_out dS' to a sum, what to do meanwhile): du, and whatever `read` needs of it."""
    read: Callable[[Any, Any, Any], jax.Array]
    """(stage, d_o, that): scale dO, transposed, which is multiplied with q."""
    kept: Callable[[Any, jax.Array], jax.Array]
    """(stage, dS'): decay dS'."""
    erased: Callable[[Any, jax.Array], SplitTile]
    """(stage, dv): -dv, transposed, which is multiplied with k."""


def _reverse_kernel(
    *,
    # inputs
    d_final_ref,  # [B, HV, V, K]
    # outputs
    d_v_ref,  # [B, T, HV, V]
    d_states_ref,  # [B, HV, chunks, 2, V, K]
    d_initial_ref,  # [B, HV, V, K]
    # scratch
    pipeline: Pipeline,
    d_state_tiles,
    # static
    plan: _Plan,
    # inputs and scratch of the kind of gate
    **refs: Any,
):
    at = _Block(plan)
    gate = (_channel_gate if plan.per_channel else _head_gate)(at, pipeline, **refs)
    k_in, k_out = (pipeline.k_in, pipeline.k_out) if plan.per_channel else (pipeline.k, pipeline.k)

    @pl.when(at.warpgroup < plan.states)
    def _carry_gradient():
        """Carries dS, [V, K], from the last chunk to the first."""
        at.set_registers(0, "increase")
        b, hv, warpgroup, mine = at.b, at.hv, at.warpgroup, at.channels(at.warpgroup)

        def one_chunk(step: Any, d_state: jax.Array) -> jax.Array:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            pipeline.wait(step, stage=stage)
            d_o = pipeline.d_o.at[stage, warpgroup]
            after = split_hi_lo(d_state)  # [V, K]

            def add_k_ds(sum_: Accumulator) -> None:
                add_hi_lo(sum_, after, transposed(k_out.at[stage]))

            def write() -> None:
                for part in range(HI_LO):
                    d_state_tiles[warpgroup, part] = after[part]
                plgpu.commit_smem()
                for part in range(HI_LO):
                    plgpu.copy_smem_to_gmem(d_state_tiles.at[warpgroup, part], d_states_ref.at[b, hv, n, part, mine])

            du, more = gate.d_u(stage, d_o, add_k_ds, write)  # [V, C]
            du_hi_lo = split_hi_lo(du)
            inverse = [pipeline.inverse.at[stage, part] for part in plan.inverse_parts]

            def add_d_v(sum_: Accumulator) -> tuple[jax.Array, ...]:
                add_hi_lo(sum_, du_hi_lo, inverse[0])
                for lo in inverse[1:]:
                    sum_.add(du_hi_lo[0], lo)
                return gate.read(stage, d_o, more), gate.kept(stage, d_state)

            d_v, read, kept = products((SQUARE,), add_d_v)
            erased = gate.erased(stage, d_v)

            def add(sum_: Accumulator) -> None:
                sum_.add(read, pipeline.q.at[stage])
                add_hi_lo(sum_, erased, k_in.at[stage])
                # The tile of dO has been read: dv goes out through it.
                transposed(d_o)[...] = d_v.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(d_o, d_v_ref.at[b, tokens, hv, mine])

            (d_state,) = accumulate((kept,), add)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pipeline.release(step, stage=stage)
            return d_state

        d_state = plgpu.load(d_final_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        d_state = lax.fori_loop(0, plan.sizes.chunks, one_chunk, d_state)
        plgpu.wait_smem_to_gmem(0)
        d_initial_ref[b, hv, mine, :] = d_state


def _head_gate(
    at: _Block,
    pipeline: Pipeline,
    *,
    q_ref, k_ref,  # [B, T, H, K]
    d_o_ref,  # [B, T, HV, V]
    inverse_ref,  # [B, HV, T, 2 C]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    p_tile, p_full, p_empty,
) -> _Gate:  # fmt: skip
    b, hv, chunks, states, scale = at.b, at.hv, at.plan.sizes.chunks, at.plan.states, at.plan.call.scale
    h = query_head(hv, at.plan.sizes.group)

    @pl.when(at.warpgroup == states)
    def _produce():
        at.set_registers(1, "decrease")

        def copy(step: Any) -> None:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            copies = (
                (k_ref.at[b, tokens, h], pipeline.k.at[stage]),
                (gates_ref.at[b, hv, n], pipeline.gates.at[stage]),
                (q_ref.at[b, tokens, h], pipeline.q.at[stage]),
                *(
                    (inverse_ref.at[b, hv, tokens, part], pipeline.inverse.at[stage, part])
                    for part in at.plan.inverse_parts
                ),
                *at.values(d_o_ref, pipeline.d_o, tokens, stage),
            )
            pipeline.copy(step, copies, stage=stage)

        ahead = pipeline.stages - 1
        for step in range(min(ahead, chunks)):
            copy(jnp.int32(step))

        @loop(chunks)
        def _one_chunk(step: Any) -> None:
            stage = pipeline.wait(step)
            qk = product(SQUARE, lambda sum_: sum_.add(pipeline.q.at[stage], transposed(pipeline.k.at[stage])))
            gates = pipeline.gates.at[stage]
            p = with_decay(qk, gates, opaque_zero(step)) * load_along_columns(gates.at[Row.BETA], SQUARE) * scale
            pl.when(step > 0)(lambda: plgpu.barrier_wait(p_empty))
            p_tile[...] = p.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_full)

            @pl.when(step + ahead < chunks)
            def _next():
                pl.when(step > 0)(lambda: plgpu.barrier_wait(pipeline.empty.at[pipeline.stage(step + ahead)]))
                copy(step + ahead)

    def d_u(stage: Any, d_o: Any, add_k_ds: Any, meanwhile: Any) -> tuple[jax.Array, Any]:
        def add(k_ds: Accumulator, own: Accumulator) -> tuple[jax.Array]:
            add_k_ds(k_ds)
            plgpu.barrier_wait(p_full)
            own.add(transposed(d_o), p_tile)
            meanwhile()
            return (load_along_columns(pipeline.gates.at[stage].at[Row.DECAY_OUT], SQUARE),)

        k_ds, own, decay_out = products((SQUARE, SQUARE), add)  # [V, C]
        plgpu.barrier_arrive(p_empty)
        return own + k_ds * decay_out, None

    def decay_in(stage: Any) -> jax.Array:
        return load_along_columns(pipeline.gates.at[stage].at[Row.DECAY_IN], SQUARE)

    def read(stage: Any, d_o: Any, _: Any) -> jax.Array:
        return (load_transposed(d_o) * (decay_in(stage) * scale)).astype(jnp.bfloat16)

    def kept(stage: Any, d_state: jax.Array) -> jax.Array:
        return d_state * load_along_rows(pipeline.gates.at[stage].at[Row.DECAY_ALL], (TILE, at.plan.sizes.depth))

    def erased(stage: Any, d_v: jax.Array) -> SplitTile:
        return split_hi_lo(d_v * -decay_in(stage))

    return _Gate(d_u, read, kept, erased)


def _channel_gate(
    at: _Block,
    pipeline: Pipeline,
    *,
    q_in_ref, k_in_ref,  # [B, T, HV, K]
    k_out_ref,  # [B, T, HV, 2 K]
    d_o_ref,  # [B, T, HV, V]
    inverse_ref, p_ref,  # [B, HV, T, 2 C]
    decay_ref,  # [B, HV, chunks, K]
) -> _Gate:  # fmt: skip
    b, hv, depth, scale = at.b, at.hv, at.plan.sizes.depth, at.plan.call.scale

    @pl.when(at.warpgroup == at.plan.states)
    def _produce():
        at.set_registers(1, "decrease")

        @loop(at.plan.sizes.chunks)
        def _copy(step: Any) -> None:
            stage = pipeline.stage(step)
            n, tokens = at.chunk(step)
            pipeline.acquire(step, stage=stage)
            copies = (
                (k_out_ref.at[b, tokens, hv, pl.ds(0, depth)], pipeline.k_out.at[stage]),
                *at.values(d_o_ref, pipeline.d_o, tokens, stage),
                (p_ref.at[b, hv, tokens, HI], pipeline.p.at[stage]),
                (inverse_ref.at[b, hv, tokens, HI], pipeline.inverse.at[stage]),
                (q_in_ref.at[b, tokens, hv], pipeline.q.at[stage]),
                (k_in_ref.at[b, tokens, hv], pipeline.k_in.at[stage]),
                (decay_ref.at[b, hv, n], pipeline.decay.at[stage]),
            )
            pipeline.copy(step, copies, stage=stage)

    def d_u(stage: Any, d_o: Any, add_k_ds: Any, meanwhile: Any) -> tuple[jax.Array, Any]:
        read = (load_transposed(d_o) * scale).astype(jnp.bfloat16)

        def add(sum_: Accumulator) -> None:
            add_k_ds(sum_)
            sum_.add(read, pipeline.p.at[stage])
            meanwhile()

        return product(SQUARE, add), read

    def kept(stage: Any, d_state: jax.Array) -> jax.Array:
        return d_state * load_along_columns(pipeline.decay.at[stage], (TILE, depth))

    return _Gate(d_u, lambda stage, d_o, read: read, kept, lambda stage, d_v: split_hi_lo(-d_v))


def pass_gradients(
    call: DeltaRuleCall, launch: Launch, operands: dict[str, jax.Array], d_final: jax.Array
) -> dict[str, jax.Array]:
    """`d_v` [B, T, HV, V], `d_states` after each chunk, [B, HV, chunks, 2, V, K], and `d_initial` [B, HV, V, K].

    `operands` are the inputs of one of the two kinds of gates; `d_final` is [B, HV, V, K].
    """
    plan = _Plan(call, launch.config)
    sizes = plan.sizes
    b, hv, width, depth = sizes.b, sizes.hv, sizes.width, sizes.depth
    return run_kernel(
        functools.partial(_reverse_kernel, plan=plan),
        name="kda_reverse" if plan.per_channel else "delta_rule_reverse",
        inputs={**operands, "d_final": d_final},
        outputs={
            "d_v": bfloat16_array(b, sizes.t, hv, width),
            "d_states": bfloat16_array(b, hv, sizes.chunks, HI_LO, width, depth),
            "d_initial": float32_array(b, hv, width, depth),
        },
        scratch=plan.scratch,
        grid={"head": hv, "values": width // plan.config.block_v, "batch": b},
        warpgroups=1 + plan.states,
        params=compiler_params(automatic_barriers=True),
    )


def scratch(call: DeltaRuleCall, config: DeltaRuleSm90Backward) -> dict[str, Any]:
    return _Plan(call, config).scratch
