"""Sequence splits on Hopper (split-T), for few heads and many tokens, where one chain of chunks leaves most of a GPU
idle.

The state at the end of a split is linear in the state at its start, S_end = M S_start + L. So the state kernel runs
twice:

1. over all splits but the last at once, for their ends: L is the recurrence from a zero state, M the recurrence of the
   identity with v = 0. A warpgroup carries 64 columns of a state, and the K columns of the identity are more of them.
   The first split needs no M: it starts from the initial state;
2. over all splits at once, each from its own start, for the outputs.

In between, `_starts` goes from split to split with one product each. States are transposed, [V, K], as the kernels hold
them, and so is M: S_end^T = S_start^T M^T + L^T.

The second pass has the work of the whole forward, and the first up to 1.3 times as much for V = K: it pays where it
fills multiprocessors that had nothing to do.

Numerics: L is float32, M is bf16x2, and a start is float32 between bf16x3 products: what passes from split to split is
as exact as what passes from chunk to chunk. A start depends on the splits before it alone.
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

from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import SM90_STATES
from tilewright.ops.delta_rule.pallas_gpu.tiles import CHUNK, HI_LO, TILE, bfloat16_tile, float32_array
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import WGMMA, split_hi_lo
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate

_STAGES = 2


@dataclass(frozen=True)
class Splits:
    """A sequence of `chunks` in splits of `each`; the last one may have fewer."""

    chunks: int
    each: int

    @staticmethod
    def of(call: DeltaRuleCall, splits: int) -> "Splits":
        """At most `splits` splits."""
        chunks = pl.cdiv(call.q.shape[1], CHUNK)
        return Splits(chunks, pl.cdiv(chunks, splits))

    @property
    def count(self) -> int:
        return pl.cdiv(self.chunks, self.each)

    def without_last(self) -> "Splits":
        return Splits((self.count - 1) * self.each, self.each)

    def range_of(self, split: Any) -> tuple[Any, Any]:
        """The first chunk of a split and its number of chunks, which is static where all splits have as many."""
        if self.count == 1:
            return 0, self.chunks
        begin = split * self.each
        return begin, self.each if self.chunks % self.each == 0 else jnp.minimum(self.each, self.chunks - begin)


@dataclass(frozen=True)
class Columns:
    """The 64 columns of a state that a warpgroup carries: of values or, numbered after those, of the identity."""

    number: Any
    values: int
    """The number of tiles of values."""

    def needed(self, split: Any) -> Any:
        """The first split needs no transition matrix: it starts from the initial state."""
        return (split > 0) | (self.number < self.values)

    def of_values(self, v: jax.Array) -> jax.Array:
        """A tile of v, or zeros for columns of the identity."""
        return jnp.where(self.number < self.values, v, 0.0)

    @property
    def channels(self) -> Any:
        """The channels of v; columns of the identity have some that are not used."""
        return pl.ds(jnp.minimum(self.number, self.values - 1) * TILE, TILE)

    def first_state(self, initial: Any, split: Any, depth: int) -> jax.Array:
        """The state [64, K] before a split: of values the initial one or, later, zeros; rows of the identity."""
        i, j = (plgpu.broadcasted_iota(jnp.int32, (TILE, depth), axis, layout=WGMMA) for axis in (0, 1))
        # For values this is negative, and no column's number.
        state = jnp.where(i + (self.number - self.values) * TILE == j, 1.0, 0.0)
        given = plgpu.load(initial.at[self.channels], layout=WGMMA, optimized=False)
        return jnp.where((split == 0) & (self.number < self.values), given, state)

    def store_end(self, state: jax.Array, end: Any, transition: Any, staging: Any) -> None:
        """Stores to `end` [V, K] or, as bf16x2, to `transition` [2, K, K]; `staging` is a tile [64, K]."""

        @pl.when(self.number < self.values)
        def _end():
            end[self.channels, :] = state

        @pl.when(self.number >= self.values)
        def _transition():
            rows = pl.ds((self.number - self.values) * TILE, TILE)
            for part, value in enumerate(split_hi_lo(state)):
                staging[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(staging, transition.at[part, rows])
                plgpu.wait_smem_to_gmem(0)


def states_for_ends(width: int, depth: int) -> int:
    """Warpgroups with a state in a thread block of the first pass; they share its keys."""
    return SM90_STATES if (width + depth) // TILE % SM90_STATES == 0 else 1


def _starts_kernel(
    *,
    # inputs
    initial_ref,  # [B, HV, 1, V, K]
    ends_ref,  # [B, HV, splits, V, K]
    transitions_ref,  # [B, HV, splits, 2, K, K]
    # outputs
    starts_ref,  # [B, HV, splits + 1, V, K]
    # scratch
    transition_tiles,  # [stages, 2, K, K]
    full,
    # static
    splits: int,
):
    b, hv = lax.axis_index("batch"), lax.axis_index("head")
    mine = pl.ds(lax.axis_index("values") * TILE, TILE)

    def copy(split: Any) -> None:
        stage = lax.rem(split, jnp.int32(_STAGES))
        for part in range(HI_LO):
            source = transitions_ref.at[b, hv, split, part]
            plgpu.copy_gmem_to_smem(source, transition_tiles.at[stage, part], full.at[stage])

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[mine], layout=WGMMA, optimized=False)  # [V, K]

    for split in range(1, min(1 + _STAGES, splits)):
        copy(jnp.int32(split))
    starts_ref[b, hv, 0, mine, :] = read(initial_ref.at[b, hv, 0])
    state = read(ends_ref.at[b, hv, 0])
    starts_ref[b, hv, 1, mine, :] = state

    def one_split(split: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, end = carry
        stage = lax.rem(split, jnp.int32(_STAGES))
        transition = transition_tiles.at[stage]
        hi, lo = split_hi_lo(state)
        # On its way while the products of this split are computed.
        next_end = read(ends_ref.at[b, hv, jnp.minimum(split + 1, splits - 1)])
        plgpu.barrier_wait(full.at[stage])

        def add(sum_: Accumulator) -> None:
            sum_.add(hi, transition.at[0])
            sum_.add(lo, transition.at[0])
            sum_.add(hi, transition.at[1])

        (state,) = accumulate((end,), add)
        starts_ref[b, hv, split + 1, mine, :] = state
        plgpu.commit_smem()  # Other warps may still be multiplying: the stage is written again only after this.
        pl.when(split + _STAGES < splits)(lambda: copy(split + _STAGES))
        return state, next_end

    lax.fori_loop(1, splits, one_split, (state, read(ends_ref.at[b, hv, min(1, splits - 1)])))


def scratch(depth: int) -> dict[str, Any]:
    return {
        "transition_tiles": bfloat16_tile(_STAGES, HI_LO, depth, depth),
        "full": plgpu.Barrier(num_arrivals=HI_LO, num_barriers=_STAGES),
    }


def _starts(initial: jax.Array, ends: jax.Array, transitions: jax.Array) -> jax.Array:
    """The state before each split, [B, HV, splits, V, K], from the initial one [B, HV, 1, V, K] and the first pass."""
    b, hv, splits, width, depth = ends.shape
    return run_kernel(
        functools.partial(_starts_kernel, splits=splits),
        name="delta_rule_starts",
        inputs={"initial": initial, "ends": ends, "transitions": transitions},
        outputs={"starts": float32_array(b, hv, splits + 1, width, depth)},
        scratch=scratch(depth),
        grid={"head": hv, "values": width // TILE, "batch": b},
    )["starts"]


def run_in_splits(passage: Callable[..., dict[str, Any]], initial: jax.Array, splits: Splits, states: int) -> Any:
    """Runs a state kernel in one pass, or in two over splits of the sequence; returns the outputs of the last pass.

    `passage(splits, starts, states=, ends=)` starts from [B, HV, splits or 1, V, K], with `states` warpgroups that
    carry a state in a thread block. For `ends` its outputs are `end`, the L of each split, and `transition`, the M.
    """
    starts = initial[:, :, None]
    if splits.count > 1:
        width, depth = initial.shape[2:]
        ended = passage(splits.without_last(), starts, states=states_for_ends(width, depth), ends=True)
        starts = _starts(starts, ended["end"], ended["transition"])
    return passage(splits, starts, states=states, ends=False)
