"""What a thread block of `decode_layers` works with: refs, its parts of all phases, and the pipeline of stages."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.decode_layers.pallas_gpu.plan import COLUMNS, CONSUMERS, DEPTH, KEYS, WARPS, Plan
from tilewright.ops.attention.decode_layers.pallas_gpu.threads import consumers_meet, release
from tilewright.pallas.gpu.registers import opaque_zero
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

STAGES = 12
"""A multiple of the consumers: a stage always has the same reader."""
IN_FLIGHT = 4
"""Stages whose copies are under way at a time. What blocks wait for queues behind them: with all twelve a layer takes 6 %
longer."""


@dataclass(frozen=True)
class Refs:
    """The arguments of the kernel."""

    # inputs
    x_ref: Any  # [D] bfloat16
    length_ref: Any  # [1] int32, the capacity where the token does not fit
    cos_ref: Any  # [C / 2] float32, NaN where the token does not fit
    sin_ref: Any  # [C / 2] float32
    mixer_norm_ref: Any  # [L, D]
    mlp_norm_ref: Any  # [L, D]
    q_norm_ref: Any  # [L, C]
    k_norm_ref: Any  # [L, C]
    q_proj_ref: Any  # [L, D, H C]
    k_proj_ref: Any  # [L, D, KV C]
    v_proj_ref: Any  # [L, D, KV C]
    o_proj_ref: Any  # [L, H C, D]
    gate_up_ref: Any  # [L, D, 2 F]
    down_ref: Any  # [L, F, D]
    # updated in place
    keys_ref: Any  # [L, S, KV, C]
    values_ref: Any  # [L, S, KV, C]
    mail_ref: Any  # [words] float32, zeros
    # outputs
    new_x_ref: Any  # [D]
    # scratch
    ring: Any  # [STAGES, DEPTH, COLUMNS] bfloat16
    full: Any
    empty: Any
    inputs_smem: Any  # [inputs] float32, the left operand of a product
    warps_smem: Any  # [4, CONSUMERS * WARPS, COLUMNS] float32, sums of warps
    heads_smem: Any  # [4, C] bfloat16, the token's two queries, key and value for one KV head
    length_smem: Any  # [1] int32
    ready: Any  # Of the length.
    few_smem: Any  # [4, CONSUMERS * WARPS] float32, a number per warp
    meeting: Any  # A barrier for the interpreter, or None


@dataclass(frozen=True)
class Block:
    """A thread block in one layer, as one of its warpgroups sees it."""

    refs: Refs
    plan: Plan
    phases: tuple[str, ...]
    """Those that the launch computes."""
    layer: Any
    position: Any
    """Of the token; the capacity where the cache has no room for it."""
    number: Any
    warpgroup: Any
    kv_head: Any
    key_split: Any
    key_tiles: Any
    """Tiles of 32 keys that this block attends to: every `key_splits`-th one."""

    @classmethod
    def at(cls, refs: Refs, plan: Plan, phases: tuple[str, ...], layer: Any) -> "Block":
        """The calling block.

        What follows from its number is computed in each layer anew. The compiler would compute the addresses of all phases
        before the first layer otherwise, and there are not as many registers.
        """
        position = refs.length_smem[0]
        zero = opaque_zero(position)
        number, warpgroup = lax.axis_index("program") + zero, lax.axis_index("warpgroup") + zero
        key_split, kv_head = divmod_nonnegative(number, plan.kv)
        tiles = lax.div(position + (KEYS - 1), jnp.int32(KEYS))
        key_tiles = lax.div(jnp.maximum(tiles - key_split + (plan.key_splits - 1), 0), jnp.int32(plan.key_splits))
        return cls(refs, plan, phases, layer, position, number, warpgroup, kv_head, key_split, key_tiles)

    # Its parts.

    @property
    def fits(self) -> Any:
        """Whether the cache has room for the token."""
        return self.position < self.plan.capacity

    def first_key(self, tile: Any) -> Any:
        return (self.key_split + tile * self.plan.key_splits) * KEYS

    def part_of(self, phase: str) -> tuple[Any, Any]:
        """The part of a product by columns, and its split."""
        split, group = divmod_nonnegative(self.number, self.plan.product(phase).groups)
        return group, split

    def column_of(self, phase: str, piece: Any) -> Any:
        """The first column of a piece."""
        return (piece * self.plan.product(phase).groups + self.part_of(phase)[0]) * COLUMNS

    @property
    def x_place(self) -> Any:
        """Where the warpgroup's segment of x lies in the block's part of x."""
        holders = self.plan.holders
        own = self.warpgroup if holders == CONSUMERS else lax.rem(self.warpgroup, jnp.int32(holders))
        return own * self.plan.segment

    @property
    def x_start(self) -> Any:
        """Where it lies in x."""
        return self.part_of("gate_up")[1] * self.plan.gate_up.own_rows + self.x_place

    @property
    def own_warps(self) -> Any:
        return pl.ds(self.warpgroup * WARPS, WARPS)

    # What consumers exchange.

    def meet(self) -> None:
        """The consumers of the block wait for each other."""
        consumers_meet(self.refs.meeting)

    def mail(self, name: str, size: int, *place: Any) -> Any:
        """`size` words of a kind of mail, from a place on."""
        first, shape = self.plan.mail[name]
        for axis, each in enumerate(place):
            first = first + each * math.prod(shape[axis + 1 :])
        return self.refs.mail_ref.at[pl.ds(first, size)]

    def tag(self, *, before: bool = False) -> Any:
        """The tag of what is published in this layer, or in the one before. Zeros are from before the first one."""
        return (self.layer + (0 if before else 1)) & 1

    # The pipeline of stages, over all phases and layers.

    def first_stage(self, phase: str) -> Any:
        """The number of the first stage of a phase."""
        counts = [self.stages(name) for name in self.phases]
        before = counts[: self.phases.index(phase)]
        return functools.reduce(operator.add, before, self.layer * functools.reduce(operator.add, counts, 0))

    def stages(self, phase: str) -> Any:
        """How many stages a phase of a layer has."""
        return self.key_tiles if phase == "attend" else self.plan.product(phase).stages

    def acquire(self, n: Any) -> Any:
        """The producer waits until it may fill the n-th stage, and until few enough others are under way."""
        stage, earlier = lax.rem(n, jnp.int32(STAGES)), n - IN_FLIGHT
        pl.when(n >= STAGES)(lambda: plgpu.barrier_wait(self.refs.empty.at[stage]))
        pl.when(earlier >= 0)(lambda: plgpu.barrier_wait(self.refs.full.at[lax.rem(earlier, jnp.int32(STAGES))]))
        return stage

    def for_own_stages(self, start: Any, count: Any, step: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
        """Calls step(stage, number among `count`, carry) for each of this consumer's stages from `start` on, once full."""
        first = lax.rem(self.warpgroup - lax.rem(start, jnp.int32(CONSUMERS)) + CONSUMERS, jnp.int32(CONSUMERS))
        if isinstance(count, int) and count % CONSUMERS == 0:
            own: Any = count // CONSUMERS
        else:
            own = lax.div(jnp.maximum(count - first + (CONSUMERS - 1), 0), jnp.int32(CONSUMERS))

        def body(j: Any, carry: Any) -> Any:
            t = first + j * CONSUMERS
            stage = lax.rem(start + t, jnp.int32(STAGES))
            plgpu.barrier_wait(self.refs.full.at[stage])
            carry = step(stage, t, carry)
            release(self.refs.empty.at[stage])
            return carry

        return body(jnp.int32(0), carry) if isinstance(own, int) and own == 1 else lax.fori_loop(0, own, body, carry)


def produce(block: Block) -> None:
    """The producer warpgroup: copies all tiles of a layer in the order in which they are used."""
    for phase in block.phases:
        _produce_keys(block) if phase == "attend" else _produce_product(block, phase)


def _produce_product(block: Block, phase: str) -> None:
    refs, product, start = block.refs, block.plan.product(phase), block.first_stage(phase)

    def matrices(column: Any) -> list[tuple[Any, Any, Any]]:
        """The matrices of a column: each with whether it is the one, and with the column in it."""
        if phase != "qkv":
            return [(True, {"o": refs.o_proj_ref, "gate_up": refs.gate_up_ref, "down": refs.down_ref}[phase], column)]
        first_k = refs.q_proj_ref.shape[2]
        first_v = first_k + refs.k_proj_ref.shape[2]
        return [
            (column < first_k, refs.q_proj_ref, column),
            ((column >= first_k) & (column < first_v), refs.k_proj_ref, column - first_k),
            (column >= first_v, refs.v_proj_ref, column - first_v),
        ]

    def tile(t: Any, _: Any) -> None:
        piece, place = divmod_nonnegative(t, product.tiles)
        _, split = block.part_of(phase)
        row, each = (split * product.tiles + place) * DEPTH, matrices(block.column_of(phase, piece))
        stage = block.acquire(start + t)
        for is_it, ref, column in each:

            def copy(ref: Any = ref, column: Any = column) -> None:
                for first in range(0, DEPTH, KEYS):
                    source = ref.at[block.layer, pl.ds(row + first, KEYS), pl.ds(column, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, refs.ring.at[stage, pl.ds(first, KEYS)], refs.full.at[stage])

            copy() if is_it is True else pl.when(is_it)(copy)

    lax.fori_loop(0, product.stages, tile, None)


def _produce_keys(block: Block) -> None:
    """A stage has both halves of 32 keys, and then of their values."""
    refs, start = block.refs, block.first_stage("attend")

    def tile(t: Any, _: Any) -> None:
        stage = block.acquire(start + t)
        rows = pl.ds(block.first_key(t), KEYS)
        for n, (ref, half) in enumerate(
            (ref, half) for ref in (refs.keys_ref, refs.values_ref) for half in (0, COLUMNS)
        ):
            source = ref.at[block.layer, rows, block.kv_head, pl.ds(half, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, refs.ring.at[stage, pl.ds(n * KEYS, KEYS)], refs.full.at[stage])

    lax.fori_loop(0, block.key_tiles, tile, None)
