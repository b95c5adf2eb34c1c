"""The state passage on Hopper, with the outputs: S through the chunks of a sequence, for both kinds of gates.

A chunk, with operands scaled as S meets them, is

    u = (I + A)^-1 (v - k_in S)        o = scale (q_in S + P beta u)        S <- decay S + k_out^T u

A thread block has a head and up to 128 value channels, through one sequence split (split_t.py). A warpgroup carries the
transposed state [64 channels, K] of its channels in registers, where it is the accumulator of one product and, split
into bf16x2, the left operand of the next: nothing of the chain k S, u, S passes through shared memory. `_carry_state`
is that chain. The two kinds of gates differ in what surrounds it:

- one gate per head: decays are factors of rows and columns, so the operands are q and k themselves, once per query
  head. P and the outputs are computed by warpgroups of their own, which get S and u through shared memory: one beside
  two states, or, beside one, two that take chunks in turns. They also copy the chunks;
- one gate per channel (KDA): scaled operands and P are precomputed (sm90_scores.py), and there is no register or shared
  memory to spare. The warpgroups with a state compute the outputs, too, and a producer copies. P and k_out are copied
  last and have one stage; their hi and lo parts alternate in place.

For a backward, S before each chunk and u are saved.

Few heads with one gate each, for which these thread blocks are too few, have a kernel of their own: sm90_narrow_states.py.

With one gate per head the time of this kernel is that of its instructions, more than that of its products. With two
fewer for each pair of numbers that is split into bf16x2 (`upcast`), it takes 0.48 ms for H96 T8192 D128, before 0.53 ms;
for 16 qk / 64 v heads 0.30 ms, before 0.34 ms (H200, driver 580.159.04, jax 0.11.2). KDA's takes 0.49 ms, before 0.50 ms.

Tried and dropped, on an H200 (driver 580.159.04, jax 0.11.2, H96 T8192 D128 unless said):
- one gate per head, q S and P u by the warpgroup that carries the state: the state kernel takes 1.49 ms for T32768 H4,
  now 1.40 ms. Without any outputs it would be 1.12 ms, of which 0.33 ms are for the lo parts of S and of u, 0.29 ms for
  k S, 0.23 ms for k^T u, and 0.39 ms for what is left with no product at all;
- one warpgroup for the outputs beside one state: 1.49 ms, as the state then waits for it. So it does beside two, for 8
  % of the state's time; there are no registers for a second;
- one gate per head, u stored for the outputs while k^T u runs instead of before: 287 us instead of 291 us for 16 qk / 64 v
  heads, but 481 us instead of 474 us for 96 heads, and 345 us instead of 323 us where 16 / 64 save for a backward;
- an automatic barrier before and after each store, more products in flight, outputs one chunk later: no difference;
- KDA, saving for a backward with stores of 4 bytes from registers: 1.1 ms; with copies, 0.64 ms. These take the room of
  a second stage of P and k_out.
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
from tilewright.ops.delta_rule.config import SM90_NARROW, DeltaRuleSm90Forward
from tilewright.ops.delta_rule.pallas_gpu.sm90_narrow_states import NarrowPlan
from tilewright.ops.delta_rule.pallas_gpu.split_t import Columns, Splits, run_in_splits, states_for_ends
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI,
    HI_LO,
    REGISTERS,
    SQUARE,
    TILE,
    Block,
    Plan,
    Row,
    Sizes,
    SplitTile,
    add_bf16x3,
    bfloat16_array,
    bfloat16_tile,
    float32_array,
    float32_buffer,
    load_transposed,
    loop,
    query_head,
    transposed_states,
    with_decay,
)
from tilewright.pallas.gpu.kernel import run_kernel, smem_bytes
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    BF16X3,
    WGMMA,
    add_hi_lo,
    load_along_columns,
    load_along_rows,
    opaque_zero,
    split_hi_lo,
    transposed,
)
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product, products

_WARPGROUPS = 3  # Of a thread block that computes outputs, with one gate per head.
_PRODUCER_REGISTERS = 24
_MOST_REGISTERS = 240


@dataclass(frozen=True)
class _Plan(Plan):
    """What is static about a launch of the state kernel."""

    config: DeltaRuleSm90Forward
    splits: Splits
    states: int
    """Warpgroups of a thread block that carry a state of 64 value channels."""
    ends: bool
    """For the ends of splits: the states of values and of the identity, and no outputs."""
    save: bool

    @property
    def others(self) -> int:
        """Warpgroups without a state: a producer, or those that copy and write outputs."""
        return 1 if self.per_channel or self.ends else _WARPGROUPS - self.states

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread, with a state and without. The state and its hi and lo parts are 128."""
        chosen = self.config.state_registers
        if self.per_channel or self.ends:
            return (chosen if chosen and self.per_channel else _MOST_REGISTERS), _PRODUCER_REGISTERS
        state = chosen or (192 if self.states > 1 else 216)
        return state, (REGISTERS - self.states * state) // self.others // 8 * 8

    @property
    def outputs(self) -> dict[str, Any]:
        b, hv, width, depth = self.sizes.b, self.sizes.hv, self.sizes.width, self.sizes.depth
        count, chunks = self.splits.count, self.sizes.chunks
        written = {
            "o": bfloat16_array(b, self.sizes.t, hv, width),
            "final": float32_array(b, hv, width, depth),
            "states": bfloat16_array(b, hv, chunks, width, depth) if self.save else None,
            "u": bfloat16_array(b, hv, chunks, HI_LO, width, CHUNK) if self.save else None,
        }
        ended = {
            "end": float32_array(b, hv, count, width, depth),
            "transition": bfloat16_array(b, hv, count, HI_LO, depth, depth),
        }
        return dict.fromkeys(written) | ended if self.ends else written | dict.fromkeys(ended)

    @property
    def scratch(self) -> dict[str, Any]:
        stages, states, depth, ends = self.config.stages, self.states, self.sizes.depth, self.ends
        keys, values = bfloat16_tile(stages, CHUNK, depth), bfloat16_tile(stages, states, CHUNK, TILE)
        inverse = bfloat16_tile(stages, CHUNK, 2 * CHUNK)
        pipeline = functools.partial(Pipeline.scratch, stages, copies=(3 if ends else 4) + states, consumers=states)
        if not self.per_channel:
            names = ("state_full", "state_empty", "u_full", "u_empty")
            gates = float32_buffer(stages, Row.COUNT, CHUNK)
            return {
                "pipeline": pipeline(q=keys, k=keys, v=values, inverse=inverse, gates=gates),
                "state_tiles": bfloat16_tile(states, TILE, depth),
                "u_tiles": bfloat16_tile(states, HI_LO, TILE, CHUNK),
                "out_tiles": bfloat16_tile(self.others * states, CHUNK, TILE),
                **{name: plgpu.Barrier(num_arrivals=1, num_barriers=states * self.others) for name in names},
            }
        return {
            "pipeline": pipeline(
                k_in=keys,
                k_out=bfloat16_tile(HI_LO, CHUNK, depth),  # one stage
                v=values,
                inverse=inverse,
                decay=float32_buffer(stages, depth),
                q_in=None if ends else keys,
                p=None if ends else bfloat16_tile(HI_LO, CHUNK, CHUNK),  # one stage
                late_full=plgpu.Barrier(num_arrivals=HI_LO if ends else 2 * HI_LO),
            ),
            "state_tiles": bfloat16_tile(states, TILE, depth) if ends else None,
            "saved_tiles": bfloat16_tile(states, depth // CHUNK + 1, TILE, CHUNK) if self.save else None,
        }

    def run(self, operands: dict[str, jax.Array], starts: jax.Array) -> dict[str, Any]:
        sizes, name = self.sizes, "kda" if self.per_channel else "delta_rule"
        columns = sizes.width + (sizes.depth if self.ends else 0)
        return run_kernel(
            functools.partial(_states_kernel, plan=self),
            name=f"{name}_ends" if self.ends else f"{name}_states",
            inputs={**operands, "starts": starts},
            outputs=self.outputs,
            scratch=self.scratch,
            grid={
                "head": sizes.hv,
                "values": columns // (self.states * TILE),
                "split": self.splits.count,
                "batch": sizes.b,
            },
            warpgroups=self.states + self.others,
        )


class _Block(Block):
    """Through the chunks of a split."""

    def __init__(self, plan: _Plan):
        super().__init__(plan)
        self.split, self.warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
        self.h = None if plan.per_channel else query_head(self.hv, plan.sizes.group)
        self.begin, self.count = plan.splits.range_of(self.split)
        self.busy = self.columns(0).needed(self.split) if plan.ends else True

    def columns(self, state: Any) -> Columns:
        return Columns(self.block * self.plan.states + state, self.plan.sizes.width // TILE)

    def tokens(self, n: Any) -> Any:
        return pl.ds((self.begin + n) * CHUNK, CHUNK)

    def values(self, ref: Any, tiles: Any, n: Any, stage: Any) -> Iterator[tuple[Any, Any]]:
        """The copies of the value channels of each warpgroup with a state."""
        for w in range(self.plan.states):
            yield ref.at[self.b, self.tokens(n), self.hv, self.columns(w).channels], tiles.at[stage, w]


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the loop, for a warpgroup that carries a state."""

    n: Any
    stage: Any
    columns: Columns
    channels: Any
    ends: bool

    def values(self, tile: Any) -> jax.Array:
        """v transposed, [V, C]."""
        v = load_transposed(tile)
        return self.columns.of_values(v) if self.ends else v


@dataclass(frozen=True)
class _Gate:
    """What depends on the kind of gate, for a warpgroup that carries a state."""

    residual: Callable[[_Chunk, jax.Array], tuple[SplitTile, Any]]
    """(chunk, state): v - k_in S, split, and whatever `update` needs of it."""
    update: Callable[[_Chunk, jax.Array, jax.Array, Any], jax.Array]
    """(chunk, state, u, that): the new state."""
    finish: Callable[[Callable[[], None]], None]
    """Waits for what is outstanding, and calls its argument, which writes the final state."""


def _states_kernel(
    *,
    # inputs
    starts_ref,  # [B, HV, splits, V, K]
    # outputs: the final state, or end and transition
    final_ref, end_ref, transition_ref,
    # scratch
    pipeline: Pipeline,
    state_tiles,
    # static
    plan: _Plan,
    # inputs, outputs and scratch of the kind of gate
    **refs: Any,
):  # fmt: skip
    at = _Block(plan)
    gate = (_channel_gate if plan.per_channel else _head_gate)(at, pipeline, state_tiles=state_tiles, **refs)

    @pl.when((at.warpgroup < plan.states) & at.busy)
    def _carry_state():
        """Carries a state, [V, K], through the chunks."""
        plgpu.set_max_registers(plan.registers[0], action="increase")
        columns = at.columns(at.warpgroup)
        channels = columns.channels

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            chunk = _Chunk(n, pipeline.wait(n), columns, channels, plan.ends)
            wanted, more = gate.residual(chunk, state)
            inverse = pipeline.inverse.at[chunk.stage]

            def add(sum_: Accumulator) -> None:
                add_bf16x3(sum_, wanted, transposed(inverse), transposed(inverse.at[:, HI]))

            u = product(SQUARE, add)  # [V, C]
            state = gate.update(chunk, state, u, more)
            pipeline.release(n, stage=chunk.stage)
            return state

        def through(state: jax.Array) -> jax.Array:
            return lax.fori_loop(0, at.count, one_chunk, state)

        if plan.ends:
            state = through(columns.first_state(starts_ref.at[at.b, at.hv, 0], at.split, plan.sizes.depth))
            refs = (end_ref.at[at.b, at.hv, at.split], transition_ref.at[at.b, at.hv, at.split])
            columns.store_end(state, *refs, state_tiles.at[at.warpgroup])
            return
        state = through(plgpu.load(starts_ref.at[at.b, at.hv, at.split, channels], layout=WGMMA, optimized=False))

        def write_final() -> None:
            @pl.when(at.split == plan.splits.count - 1)
            def _last():
                final_ref[at.b, at.hv, channels, :] = state

        gate.finish(write_final)


def _head_gate(
    at: _Block,
    pipeline: Pipeline,
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    v_ref,  # [B, T, HV, V]
    inverse_ref,  # [B, HV, T, 2 C]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    # outputs, or None for ends
    o_ref, states_ref, u_ref,
    # scratch
    state_tiles, u_tiles, out_tiles,
    state_full, state_empty, u_full, u_empty,
) -> _Gate:  # fmt: skip
    plan, b, hv, warpgroup, count = at.plan, at.b, at.hv, at.warpgroup, at.count
    states, outputs, ends, save = plan.states, plan.others, plan.ends, plan.save

    def between(state: Any, n: Any) -> Any:
        """Which barrier is between a warpgroup with a state and the one that writes the outputs of chunk n."""
        return state * outputs + lax.rem(n, jnp.int32(outputs))

    @pl.when((warpgroup >= states) & at.busy)
    def _copy_and_write_outputs():
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        mine = warpgroup - states

        def copy(n: Any) -> None:
            stage = pipeline.stage(n)
            copies = (
                (k_ref.at[b, at.tokens(n), at.h], pipeline.k.at[stage]),
                (gates_ref.at[b, hv, at.begin + n], pipeline.gates.at[stage]),
                *at.values(v_ref, pipeline.v, n, stage),
                (inverse_ref.at[b, hv, at.tokens(n)], pipeline.inverse.at[stage]),
                *(() if ends else ((q_ref.at[b, at.tokens(n), at.h], pipeline.q.at[stage]),)),
            )
            pipeline.copy(n, copies, stage=stage)

        for number in range(pipeline.stages // outputs):
            first = mine + number * outputs
            pl.when(first < count)(functools.partial(copy, first))

        def write_outputs(n: Any) -> None:
            stage = pipeline.wait(n)
            queries, gates = pipeline.q.at[stage], pipeline.gates.at[stage]
            qk = product(SQUARE, lambda sum_: sum_.add(queries, transposed(pipeline.k.at[stage])))
            p = split_hi_lo(with_decay(qk, gates, opaque_zero(n)) * load_along_columns(gates.at[Row.BETA], SQUARE))
            decay_in = load_along_rows(gates.at[Row.DECAY_IN], SQUARE)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @loop(states)
            def _one_tile(w: Any) -> None:
                out, barrier = out_tiles.at[mine * states + w], between(w, n)
                plgpu.barrier_wait(state_full.at[barrier])
                # S rounded: this adds to o alone.
                q_s = product(SQUARE, lambda sum_: sum_.add(queries, transposed(state_tiles.at[w])))
                plgpu.barrier_arrive(state_empty.at[barrier])
                plgpu.barrier_wait(u_full.at[barrier])

                def add_p(sum_: Accumulator) -> None:
                    add_hi_lo(sum_, p, transposed(u_tiles.at[w, 0]))
                    sum_.add(p[0], transposed(u_tiles.at[w, 1]))

                (o,) = accumulate((q_s * decay_in,), add_p)
                plgpu.barrier_arrive(u_empty.at[barrier])
                out[...] = (o * plan.call.scale).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, o_ref.at[b, at.tokens(n), hv, at.columns(w).channels])

        @loop(lax.div(count - mine + (outputs - 1), jnp.int32(outputs)))
        def _one_chunk(number: Any) -> None:
            n = number * outputs + mine
            if not ends:
                write_outputs(n)
            plgpu.barrier_wait(pipeline.empty.at[pipeline.stage(n)])
            pl.when(n + pipeline.stages < count)(lambda: copy(n + pipeline.stages))

        plgpu.wait_smem_to_gmem(0)

    def wait_for_outputs(empty: Any, n: Any) -> None:
        pl.when(n >= 0)(lambda: plgpu.barrier_wait(empty.at[between(warpgroup, jnp.maximum(n, 0))]))

    def residual(chunk: _Chunk, state: jax.Array) -> tuple[SplitTile, Any]:
        n, stage = chunk.n, chunk.stage
        state_tile, u_tile = (tiles.at[warpgroup + opaque_zero(n)] for tiles in (state_tiles, u_tiles))
        if save:
            pl.when(n > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        before = split_hi_lo(state)  # [V, K]

        def add_k_s(sum_: Accumulator) -> None:
            add_hi_lo(sum_, before, transposed(pipeline.k.at[stage]))
            if ends:
                return
            wait_for_outputs(state_empty, n - 1)
            state_tile[...] = before[0]
            plgpu.commit_smem()
            plgpu.barrier_arrive(state_full.at[between(warpgroup, n)])

        k_s = product(SQUARE, add_k_s)  # [V, C]
        v = chunk.values(pipeline.v.at[stage, warpgroup])
        decay_in = load_along_columns(pipeline.gates.at[stage].at[Row.DECAY_IN], SQUARE)
        return split_hi_lo(v - k_s * decay_in), (state_tile, u_tile)

    def update(chunk: _Chunk, state: jax.Array, u: jax.Array, tiles: Any) -> jax.Array:
        n, gates, (state_tile, u_tile) = chunk.n, pipeline.gates.at[chunk.stage], tiles
        if not ends:
            wait_for_outputs(u_empty, n - 1)
            for part, value in enumerate(split_hi_lo(u)):
                u_tile[part] = value
            plgpu.commit_smem()
            plgpu.barrier_arrive(u_full.at[between(warpgroup, n)])
        if save:
            plgpu.copy_smem_to_gmem(state_tile, states_ref.at[b, hv, at.begin + n, chunk.channels])
            for part in range(HI_LO):
                plgpu.copy_smem_to_gmem(u_tile.at[part], u_ref.at[b, hv, at.begin + n, part, chunk.channels])
        written = split_hi_lo(u * load_along_columns(gates.at[Row.DECAY_OUT], SQUARE))
        kept = state * load_along_rows(gates.at[Row.DECAY_ALL], (TILE, plan.sizes.depth))
        return accumulate((kept,), lambda sum_: add_hi_lo(sum_, written, pipeline.k.at[chunk.stage]))[0]

    def finish(write_final: Callable[[], None]) -> None:
        for barriers in (state_empty, u_empty):
            wait_for_outputs(barriers, jnp.asarray(count - 1, jnp.int32))
        write_final()
        if save:
            plgpu.wait_smem_to_gmem(0)

    return _Gate(residual, update, finish)


def _channel_gate(
    at: _Block,
    pipeline: Pipeline,
    *,
    # inputs
    q_in_ref, k_in_ref,  # [B, T, HV, K]
    k_out_ref,  # [B, T, HV, 2 K]
    v_ref,  # [B, T, HV, V]
    inverse_ref, p_ref,  # [B, HV, T, 2 C]
    decay_ref,  # [B, HV, chunks, K]
    # outputs, or None for ends
    o_ref, states_ref, u_ref,
    # scratch
    state_tiles,  # not used
    saved_tiles,
) -> _Gate:  # fmt: skip
    plan, b, hv, warpgroup, count = at.plan, at.b, at.hv, at.warpgroup, at.count
    states, ends, save, depth = plan.states, plan.ends, plan.save, plan.sizes.depth

    def place(n: Any, part: int) -> jax.Array:
        """Where hi or lo lies of what has one stage. They alternate, or the compiler keeps addresses and spills."""
        return lax.rem(n + part, jnp.int32(HI_LO))

    @pl.when((warpgroup == states) & at.busy)
    def _produce():
        plgpu.set_max_registers(plan.registers[1], action="decrease")

        def copy_early(n: Any) -> None:
            stage = pipeline.stage(n)
            copies = (
                (k_in_ref.at[b, at.tokens(n), hv], pipeline.k_in.at[stage]),
                (inverse_ref.at[b, hv, at.tokens(n)], pipeline.inverse.at[stage]),
                (decay_ref.at[b, hv, at.begin + n], pipeline.decay.at[stage]),
                *(() if ends else ((q_in_ref.at[b, at.tokens(n), hv], pipeline.q_in.at[stage]),)),
            )
            pipeline.copy(n, copies, stage=stage)
            pipeline.copy(n, at.values(v_ref, pipeline.v, n, stage), stage=stage)

        def copy_late(n: Any) -> None:
            for part in range(HI_LO):
                to = place(n, part)
                keys = k_out_ref.at[b, at.tokens(n), hv, pl.ds(part * depth, depth)]
                plgpu.copy_gmem_to_smem(keys, pipeline.k_out.at[to], pipeline.late_full)
                if not ends:
                    scores = p_ref.at[b, hv, at.tokens(n), pl.ds(part * CHUNK, CHUNK)]
                    plgpu.copy_gmem_to_smem(scores, pipeline.p.at[to], pipeline.late_full)

        ahead = pipeline.stages - 1

        copy_early(jnp.int32(0))
        for n in range(1, ahead):
            pl.when(n < count)(lambda n=n: copy_early(jnp.int32(n)))

        @loop(count)
        def _one_chunk(n: Any) -> None:
            # What is copied last has one stage: the chunk before must be done with it.
            pl.when(n > 0)(lambda: plgpu.barrier_wait(pipeline.empty.at[pipeline.stage(n + ahead)]))
            copy_late(n)
            pl.when(n + ahead < count)(lambda: copy_early(n + ahead))

    def residual(chunk: _Chunk, state: jax.Array) -> tuple[SplitTile, Any]:
        before = split_hi_lo(state)  # [V, K]
        if save:
            tiles = saved_tiles.at[warpgroup]
            for c in range(depth // CHUNK):
                tiles[c] = before[0][:, c * CHUNK : (c + 1) * CHUNK]
            plgpu.commit_smem()
            for c in range(depth // CHUNK):
                to = states_ref.at[b, hv, at.begin + chunk.n, chunk.channels, pl.ds(c * CHUNK, CHUNK)]
                plgpu.copy_smem_to_gmem(tiles.at[c], to)

        def read(k_s: Accumulator, *q_s: Accumulator) -> SplitTile:
            """v - k_in S, split, while the queries' products are in flight."""
            add_hi_lo(k_s, before, transposed(pipeline.k_in.at[chunk.stage]))
            for sum_ in q_s:
                add_hi_lo(sum_, before, transposed(pipeline.q_in.at[chunk.stage]))
            v = chunk.values(pipeline.v.at[chunk.stage, warpgroup])
            return split_hi_lo(v - k_s.read(in_flight=HI_LO * len(q_s)))

        _, *q_s, hi, lo = products((SQUARE,) * (1 if ends else 2), read)  # [V, C] each
        return (hi, lo), q_s

    def update(chunk: _Chunk, state: jax.Array, u: jax.Array, q_s: Any) -> jax.Array:
        n, values = chunk.n, pipeline.v.at[chunk.stage, warpgroup]
        u_hi_lo = split_hi_lo(u)
        if save:
            # u leaves through the state's tile, and the one behind it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tiles = [saved_tiles.at[warpgroup, c] for c in (0, depth // CHUNK)]
            for tile, value in zip(tiles, u_hi_lo, strict=True):
                tile[...] = value
            plgpu.commit_smem()
            for part, tile in enumerate(tiles):
                plgpu.copy_smem_to_gmem(tile, u_ref.at[b, hv, at.begin + n, part, chunk.channels])
        plgpu.barrier_wait(pipeline.late_full)

        def add_to(sum_: Accumulator, operand: Callable[[Any], Any]) -> None:
            for one, another in BF16X3:
                sum_.add(u_hi_lo[one], operand(place(n, another)))

        if q_s:
            (o,) = accumulate((q_s[0],), lambda sum_: add_to(sum_, lambda part: transposed(pipeline.p.at[part])))
            # v's tile has been read: o goes out through it.
            transposed(values)[...] = (o * plan.call.scale).astype(jnp.bfloat16)
        kept = state * load_along_columns(pipeline.decay.at[chunk.stage], (TILE, depth))
        (state,) = accumulate((kept,), lambda sum_: add_to(sum_, lambda part: pipeline.k_out.at[part]))
        if not ends:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(values, o_ref.at[b, at.tokens(n), hv, chunk.channels])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return state

    def finish(write_final: Callable[[], None]) -> None:
        plgpu.wait_smem_to_gmem(0)
        write_final()

    return _Gate(residual, update, finish)


def pass_states(call: DeltaRuleCall, launch: Launch, operands: dict[str, jax.Array], *, save: bool) -> dict[str, Any]:
    """`o` [B, T, HV, V], `final` [B, HV, V, K], and to save, `states` before each chunk and the corrected values `u`.

    `operands` are the inputs of one of the two kinds of gates.
    """
    config: DeltaRuleSm90Forward = launch.config

    def passage(splits: Splits, starts: jax.Array, *, states: int, ends: bool) -> dict[str, Any]:
        if config.block_v == SM90_NARROW and not ends:
            return NarrowPlan(call, config, splits, save).run(operands, starts)
        return _Plan(call, config, splits, states, ends, save and not ends).run(operands, starts)

    initial = transposed_states(call.initial_state, max(config.block_v, TILE))
    return run_in_splits(passage, initial, Splits.of(call, config.splits), config.block_v // TILE)


def memory(call: DeltaRuleCall, config: DeltaRuleSm90Forward) -> dict[str, int]:
    """Shared memory of the state kernel, by pass, where it saves for a backward."""
    sizes, splits = Sizes.of(call, config.block_v), Splits.of(call, config.splits)
    if config.block_v == SM90_NARROW:
        plans: dict[str, Any] = {"state": NarrowPlan(call, config, splits, save=True)}
    else:
        plans = {"state": _Plan(call, config, splits, config.block_v // TILE, ends=False, save=True)}
    if splits.count > 1:
        states = states_for_ends(sizes.width, sizes.depth)
        plans["split end"] = _Plan(call, config, splits, states, ends=True, save=False)
    return {name: smem_bytes(plan.scratch) for name, plan in plans.items()}
