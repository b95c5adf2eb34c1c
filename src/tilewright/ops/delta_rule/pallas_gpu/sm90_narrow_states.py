"""The state passage on Hopper for few heads, with one gate per head: 32 value channels per thread block.

The same recurrence as sm90_states.py, which carries 64 value channels in a warpgroup: fewer would leave rows of its wgmma
instructions empty. With 32 heads of 128 channels, its 64 thread blocks leave half of an H200 idle. Here tokens and key
channels are the rows, and values the columns, so a warpgroup can have 32 of those, and there are twice as many thread
blocks.

S [K, 32] is the accumulator of one product and the right operand of the next: so S, v - k_in S and u pass through shared
memory on their way from chunk to chunk. Each lies there as bf16x2, hi and lo side by side: a product of 64 columns has
both terms in the time that one of 32 columns takes, and they are added in registers. The left operands are k, q and
(I + A)^-1, as they were copied.

One warpgroup carries the state. Two others copy the chunks, compute P and write the outputs, in turns.

Measured on an H200 (driver 580.159.04, jax 0.11.2), 16 qk / 32 v heads, T8192 D128: 226 us, where sm90_states.py takes
294 us. In a later run 230 us with k S issued before the outputs begin with q S, and 234 us without. Tried and dropped,
there:
- outputs that begin only when k S is done: 234 us;
- left operands in registers, hi and lo as products of 32 columns: 249 us, with the bits of sm90_states.py. With hi and lo
  side by side, too: 258 us, since the registers of a left operand are moved after its load;
- two such states in a thread block, for 16 / 64 heads: 368 us with two warpgroups for the outputs, 386 us with one, where
  sm90_states.py takes 297 us. Products of 32 and of 64 columns seem to take the same time; a product of its transposed
  form has 64 rows of values.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.delta_rule.config import SM90_NARROW as NARROW
from tilewright.ops.delta_rule.config import DeltaRuleSm90Forward
from tilewright.ops.delta_rule.pallas_gpu.split_t import Splits
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
    bfloat16_array,
    bfloat16_tile,
    float32_array,
    float32_buffer,
    load,
    loop,
    query_head,
    with_decay,
)
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    add_hi_lo,
    load_along_columns,
    load_along_rows,
    load_tile,
    opaque_zero,
    side_by_side,
    split_hi_lo,
    tile_of_zeros,
    transposed,
)
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product, products

_OUTPUTS = 2  # Warpgroups that copy the chunks and write outputs, in turns.
_STATE_REGISTERS = 208
_VALUES = (CHUNK, NARROW)
_PAIR = (CHUNK, HI_LO * NARROW)
"""hi and lo side by side."""


@dataclass(frozen=True)
class NarrowPlan(Plan):
    """What is static about a launch."""

    config: DeltaRuleSm90Forward
    splits: Splits
    save: bool

    @property
    def registers(self) -> tuple[int, int]:
        """Per thread, with a state and without."""
        state = self.config.state_registers or _STATE_REGISTERS
        return state, (REGISTERS - state) // _OUTPUTS // 8 * 8

    @property
    def scratch(self) -> dict[str, Any]:
        stages, depth = self.config.stages, self.sizes.depth
        keys, values = bfloat16_tile(stages, CHUNK, depth), bfloat16_tile(*_PAIR)
        names = ("state_full", "state_empty", "u_full", "u_empty")
        return {
            "pipeline": Pipeline.scratch(
                stages,
                copies=5,
                consumers=1,
                q=keys,
                k=keys,
                v=bfloat16_tile(stages, *_VALUES),
                inverse=bfloat16_tile(stages, CHUNK, 2 * CHUNK),
                gates=float32_buffer(stages, Row.COUNT, CHUNK),
            ),
            "state_tile": bfloat16_tile(depth, HI_LO * NARROW),
            "residual_tile": values,
            "written_tile": values,
            "u_tile": values,
            "out_tiles": bfloat16_tile(_OUTPUTS, *_VALUES),
            # For what is saved of S, [32, K], and then for u, [2, 32, C].
            "saved_tiles": bfloat16_tile(_OUTPUTS, HI_LO, NARROW, TILE) if self.save else None,
            **{name: plgpu.Barrier(num_arrivals=1, num_barriers=_OUTPUTS) for name in names},
        }

    def run(self, operands: dict[str, jax.Array], starts: jax.Array) -> dict[str, Any]:
        """As the plan of sm90_states.py has it: states come and go transposed, [V, K]."""
        sizes, chunks = self.sizes, self.sizes.chunks
        b, hv, width, depth = sizes.b, sizes.hv, sizes.width, sizes.depth
        outputs = run_kernel(
            functools.partial(_narrow_states_kernel, plan=self),
            name="delta_rule_narrow_states",
            inputs={**operands, "starts": jnp.swapaxes(starts, 3, 4)},
            outputs={
                "o": bfloat16_array(b, sizes.t, hv, width),
                "final": float32_array(b, hv, depth, width),
                "states": bfloat16_array(b, hv, chunks, width, depth) if self.save else None,
                "u": bfloat16_array(b, hv, chunks, HI_LO, width, CHUNK) if self.save else None,
            },
            scratch=self.scratch,
            grid={"values": width // NARROW, "head": hv, "split": self.splits.count, "batch": b},
            warpgroups=1 + _OUTPUTS,
        )
        return outputs | {"final": jnp.swapaxes(outputs["final"], 2, 3)}


def _registers(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA, optimized=False)


def _part(pair: jax.Array, part: int) -> jax.Array:
    return pair[:, part * NARROW : (part + 1) * NARROW]


def _sum_of_parts(pair: jax.Array) -> jax.Array:
    return _part(pair, 0) + _part(pair, 1)


def _narrow_states_kernel(
    *,
    # inputs
    q_ref, k_ref,  # [B, T, H, K]
    v_ref,  # [B, T, HV, V]
    inverse_ref,  # [B, HV, T, 2 C]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    starts_ref,  # [B, HV, splits, K, V]
    # outputs
    o_ref,  # [B, T, HV, V]
    final_ref,  # [B, HV, K, V]
    states_ref,  # [B, HV, chunks, V, K], or None
    u_ref,  # [B, HV, chunks, 2, V, C], or None
    # scratch
    pipeline: Pipeline,
    state_tile,  # [K, 2 * 32]
    residual_tile, written_tile, u_tile,  # [C, 2 * 32]
    out_tiles, saved_tiles,
    state_full, state_empty, u_full, u_empty,
    # static
    plan: NarrowPlan,
):  # fmt: skip
    at = Block(plan)
    b, hv, h = at.b, at.hv, query_head(at.hv, plan.sizes.group)
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    begin, count = plan.splits.range_of(split)
    save, depth_tiles = plan.save, plan.sizes.depth_tiles
    channels = pl.ds(at.block * NARROW, NARROW)

    def tokens(n: Any) -> Any:
        return pl.ds((begin + n) * CHUNK, CHUNK)

    def rows(d: int) -> Any:
        """The key channels of a tile of S."""
        return pl.ds(d * TILE, TILE)

    def between(n: Any) -> Any:
        """Which barrier is between the state and the warpgroup that writes the outputs of chunk n."""
        return lax.rem(n, jnp.int32(_OUTPUTS))

    @pl.when(warpgroup > 0)
    def _copy_and_write_outputs():
        plgpu.set_max_registers(plan.registers[1], action="decrease")
        mine = warpgroup - 1

        def copy(n: Any) -> None:
            stage = pipeline.stage(n)
            copies = (
                (k_ref.at[b, tokens(n), h], pipeline.k.at[stage]),
                (v_ref.at[b, tokens(n), hv, channels], pipeline.v.at[stage]),
                (gates_ref.at[b, hv, begin + n], pipeline.gates.at[stage]),
                (inverse_ref.at[b, hv, tokens(n)], pipeline.inverse.at[stage]),
                (q_ref.at[b, tokens(n), h], pipeline.q.at[stage]),
            )
            pipeline.copy(n, copies, stage=stage)

        for number in range(pipeline.stages // _OUTPUTS):
            first = mine + number * _OUTPUTS
            pl.when(first < count)(functools.partial(copy, first))

        @loop(lax.div(count - mine + (_OUTPUTS - 1), jnp.int32(_OUTPUTS)))
        def _one_chunk(number: Any) -> None:
            n = number * _OUTPUTS + mine
            stage, barrier = pipeline.wait(n), between(n)
            gates, queries = pipeline.gates.at[stage], pipeline.q.at[stage]
            qk = product(SQUARE, lambda sum_: sum_.add(queries, transposed(pipeline.k.at[stage])))
            p = split_hi_lo(with_decay(qk, gates, opaque_zero(n)) * load_along_columns(gates.at[Row.BETA], SQUARE))
            decay_in = load_along_rows(gates.at[Row.DECAY_IN], _PAIR)

            plgpu.barrier_wait(state_full.at[barrier])
            q_s = product(_PAIR, lambda sum_: sum_.add(queries, state_tile))
            # What the copies of the chunk before read is written again.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if save:
                for d in range(depth_tiles):
                    transposed(saved_tiles.at[mine, d])[...] = _part(_registers(state_tile.at[rows(d)]), 0)
                plgpu.commit_smem()
                for d in range(depth_tiles):
                    to = states_ref.at[b, hv, begin + n, channels, rows(d)]
                    plgpu.copy_smem_to_gmem(saved_tiles.at[mine, d], to)
            plgpu.barrier_arrive(state_empty.at[barrier])
            plgpu.barrier_wait(u_full.at[barrier])
            (o,) = accumulate((q_s * decay_in,), lambda sum_: add_hi_lo(sum_, p, u_tile))
            # The state has read the chunk by now.
            plgpu.barrier_wait(pipeline.empty.at[stage])
            pl.when(n + pipeline.stages < count)(lambda: copy(n + pipeline.stages))
            if save:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for part in range(HI_LO):
                    transposed(saved_tiles.at[mine, part])[...] = _part(_registers(u_tile), part)
            plgpu.barrier_arrive(u_empty.at[barrier])
            out_tiles[mine] = (_sum_of_parts(o) * plan.call.scale).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tiles.at[mine], o_ref.at[b, tokens(n), hv, channels])
            if save:
                for part in range(HI_LO):
                    plgpu.copy_smem_to_gmem(saved_tiles.at[mine, part], u_ref.at[b, hv, begin + n, part, channels])

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 0)
    def _carry_state():
        plgpu.set_max_registers(plan.registers[0], action="increase")

        def wait_for_outputs(empty: Any, n: Any) -> None:
            pl.when(n >= 0)(lambda: plgpu.barrier_wait(empty.at[between(jnp.maximum(n, 0))]))

        def store_pair(tile: Any, x: jax.Array) -> None:
            tile[...] = side_by_side(split_hi_lo(x))

        def one_chunk(n: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            stage = pipeline.wait(n)
            keys, inverse, gates = (buffer.at[stage] for buffer in (pipeline.k, pipeline.inverse, pipeline.gates))
            wait_for_outputs(state_empty, n - 1)
            for d, tile in enumerate(state):
                store_pair(state_tile.at[rows(d)], tile)
            plgpu.commit_smem()

            def add_k_s(sum_: Accumulator) -> tuple[jax.Array, ...]:
                sum_.add(keys, state_tile)
                # Only now: k S, which the next chunk waits for, goes to the tensor cores before q S.
                plgpu.barrier_arrive(state_full.at[between(n)])
                # Negated here: where the sums of products are negated, ptxas 12.9 takes them for zeros.
                return load(pipeline.v.at[stage]), -load_along_rows(gates.at[Row.DECAY_IN], _VALUES)

            k_s, v, minus_decay_in = products((_PAIR,), add_k_s)
            store_pair(residual_tile, v + _sum_of_parts(k_s) * minus_decay_in)
            plgpu.commit_smem()

            def add_u(sum_: Accumulator) -> tuple[jax.Array, ...]:
                for part in (HI, LO):
                    sum_.add(inverse.at[:, part], residual_tile)
                decay_all = load_along_rows(gates.at[Row.DECAY_ALL], (TILE, NARROW))
                decay_out = load_along_rows(gates.at[Row.DECAY_OUT], _VALUES)
                return decay_out, *(tile * decay_all for tile in state)

            u, decay_out, *kept = products((_PAIR,), add_u)
            u = _sum_of_parts(u)
            store_pair(written_tile, u * decay_out)
            plgpu.commit_smem()

            def add_written(*sums: Accumulator) -> None:
                for d, sum_ in enumerate(sums):
                    sum_.add(transposed(keys.at[:, rows(d)]), written_tile)
                wait_for_outputs(u_empty, n - 1)
                store_pair(u_tile, u)
                plgpu.commit_smem()
                plgpu.barrier_arrive(u_full.at[between(n)])

            nothing = tile_of_zeros((TILE, NARROW))
            sums = accumulate(tuple(side_by_side((tile, nothing)) for tile in kept), add_written)
            pipeline.release(n, stage=stage)
            return tuple(_sum_of_parts(tile) for tile in sums)

        state = tuple(load_tile(starts_ref.at[b, hv, split, rows(d), channels]) for d in range(depth_tiles))
        state = lax.fori_loop(0, count, one_chunk, state)
        for barriers in (state_empty, u_empty):
            wait_for_outputs(barriers, jnp.asarray(count - 1, jnp.int32))

        @pl.when(split == plan.splits.count - 1)
        def _last():
            for d, tile in enumerate(state):
                final_ref[b, hv, rows(d), channels] = tile
