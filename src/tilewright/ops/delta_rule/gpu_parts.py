"""Sequences in parts, for Hopper kernels whose chain of chunks would leave most of a GPU idle: few heads, many tokens.

The state at the end of a part is linear in the state at its start, S_end = M S_start + L. So a state kernel runs twice:

1. over all parts but the last at once, for where they end: L is the recurrence from a zero state, M the recurrence of the
   identity with v = 0. A warpgroup carries 64 columns of a state, and the K columns of the identity are more of them. The
   first part begins with the initial state and needs no M;
2. over all parts at once, each from its own start, for the outputs.

Between the two `_starts` goes from part to part with a product each. States are as the kernels hold them, transposed
[V, K], and so is M: S_end^T = S_start^T M^T + L^T.

The second pass has the work of the whole forward, the first up to 1.3 times it for V = K: it pays where it fills
multiprocessors that had nothing to do.

Numerics: L is float32, M two halves, and a start is float32 between products of two halves: what passes from part to part
is as exact as what passes from chunk to chunk. A start depends on the parts before it alone.
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

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule.config import GPU_TILE, GPU_WARPGROUPS, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_tiles import CHUNK, HALVES, WGMMA, compiler_params, halves

_STAGES = 2


@dataclass(frozen=True)
class Parts:
    """A sequence of `chunks` in parts of `each`; the last may have fewer."""

    chunks: int
    each: int

    @staticmethod
    def of(chunks: int, parts: int) -> "Parts":
        """At most so many parts."""
        return Parts(chunks, -(-chunks // parts))

    @property
    def count(self) -> int:
        return -(-self.chunks // self.each)

    def without_last(self) -> "Parts":
        return Parts((self.count - 1) * self.each, self.each)

    def range_of(self, part: Any) -> tuple[Any, Any]:
        """The first chunk of a part, and how many it has: static where that is all, or where all have as many."""
        if self.count == 1:
            return 0, self.chunks
        begin = part * self.each
        return begin, self.each if self.chunks % self.each == 0 else jnp.minimum(self.each, self.chunks - begin)


@dataclass(frozen=True)
class Columns:
    """The 64 columns of a state that a warpgroup carries: of values, or, of the identity, behind those."""

    number: Any
    values: int
    """How many tiles of values there are."""

    def needed(self, part: Any) -> Any:
        """Of the first part the transition is not: it begins with the initial state."""
        return (part > 0) | (self.number < self.values)

    def of_values(self, v: jax.Array) -> jax.Array:
        """A tile of v; of the identity, zeros."""
        return jnp.where(self.number < self.values, v, 0.0)

    @property
    def channels(self) -> Any:
        """Of v; of the identity, some."""
        return pl.ds(jnp.minimum(self.number, self.values - 1) * GPU_TILE, GPU_TILE)

    def first_state(self, initial: Any, part: Any, depth: int) -> jax.Array:
        """[64, K]: the initial state for values of the first part, zeros for those of others; rows of the identity."""
        i, j = (plgpu.broadcasted_iota(jnp.int32, (GPU_TILE, depth), axis, layout=WGMMA) for axis in (0, 1))
        # Rows of values are negative here, and no column's.
        state = jnp.where(i + (self.number - self.values) * GPU_TILE == j, 1.0, 0.0)
        given = plgpu.load(initial.at[self.channels], layout=WGMMA, optimized=False)
        return jnp.where((part == 0) & (self.number < self.values), given, state)

    def keep_end(self, state: jax.Array, end: Any, transition: Any, through: Any) -> None:
        """Into `end` [V, K] or `transition` [2, K, K], `through` a tile [64, K]."""

        @pl.when(self.number < self.values)
        def _end():
            end[self.channels, :] = state

        @pl.when(self.number >= self.values)
        def _transition():
            rows = pl.ds((self.number - self.values) * GPU_TILE, GPU_TILE)
            for half, value in enumerate(halves(state)):
                through[...] = value
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(through, transition.at[half, rows])
                plgpu.wait_smem_to_gmem(0)


def _warpgroups_for_ends(width: int, depth: int) -> int:
    """Warpgroups to a block of the first pass, that share its keys."""
    tiles = (width + depth) // GPU_TILE
    return GPU_WARPGROUPS if tiles % GPU_WARPGROUPS == 0 else 1


def _starts_kernel(*refs: Any, parts: int, interpreted: bool):
    # inputs
    initial_ref, ends_ref, transitions_ref = refs[:3]
    # outputs
    starts_ref = refs[3]
    # scratch
    ring, arrived = refs[4:]

    b, hv = lax.axis_index("batch"), lax.axis_index("head")
    mine = pl.ds(lax.axis_index("values") * GPU_TILE, GPU_TILE)

    def fetch(part: Any) -> None:
        slot = lax.rem(part, jnp.int32(_STAGES))
        for half in range(HALVES):
            plgpu.copy_gmem_to_smem(transitions_ref.at[b, hv, part, half], ring.at[slot, half], arrived.at[slot])

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[mine], layout=WGMMA, optimized=False)  # [V, K]

    for part in range(1, min(1 + _STAGES, parts)):
        fetch(jnp.int32(part))
    starts_ref[b, hv, 0, mine, :] = read(initial_ref.at[b, hv, 0])
    state = read(ends_ref.at[b, hv, 0])
    starts_ref[b, hv, 1, mine, :] = state

    def one_part(part: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, end = carry
        slot = lax.rem(part, jnp.int32(_STAGES))
        transition = ring.at[slot]
        split = halves(state)
        # On its way while the products of this part are made.
        next_end = read(ends_ref.at[b, hv, jnp.minimum(part + 1, parts - 1)])
        plgpu.barrier_wait(arrived.at[slot])

        def add(sum_: Accumulator) -> None:
            sum_.add(split[0], transition.at[0])
            sum_.add(split[1], transition.at[0])
            sum_.add(split[0], transition.at[1])

        (state,) = accumulate((end,), add, interpreted=interpreted)
        starts_ref[b, hv, part + 1, mine, :] = state
        plgpu.commit_smem()  # Other warps may still be multiplying: only behind them is the slot written again.
        pl.when(part + _STAGES < parts)(lambda: fetch(part + _STAGES))
        return state, next_end

    lax.fori_loop(1, parts, one_part, (state, read(ends_ref.at[b, hv, min(1, parts - 1)])))


def _starts(initial: jax.Array, ends: jax.Array, transitions: jax.Array, launch: Launch) -> jax.Array:
    """The state before each part, [B, HV, parts, V, K], from the initial one [B, HV, 1, V, K] and the first pass."""
    b, hv, parts, width, depth = ends.shape
    return plgpu.kernel(
        functools.partial(_starts_kernel, parts=parts, interpreted=launch.interpret is not None),
        out_type=output_like((b, hv, parts + 1, width, depth), jnp.float32, ends),
        scratch_types=[
            tile(_STAGES, HALVES, depth, depth, dtype=jnp.bfloat16),
            plgpu.Barrier(num_arrivals=HALVES, num_barriers=_STAGES),
        ],
        grid=(hv, width // GPU_TILE, b),
        grid_names=("head", "values", "batch"),
        kernel_name="delta_rule_starts",
        compiler_params=compiler_params(),
        interpret=gpu_interpret_params(launch.interpret),
    )(initial, ends, transitions)


def carry_in_parts(
    carry: Callable[..., Any], states: jax.Array, v: jax.Array, chunks: int, launch: Launch, *, keep: bool
) -> tuple[jax.Array, ...]:
    """o, the final state and, to keep for a backward, the state before each chunk and the errors of its tokens.

    `carry(parts, states, out_type, warpgroups=, ends=)` runs a state kernel from `states` [B, HV, parts, V, K], the initial
    one or one a part. For `ends` what it writes of each part is L, [B, HV, parts, V, K], and the halves of M.
    """
    config: PallasGpuConfig = launch.config
    whole, (b, _, hv, width), depth = Parts.of(chunks, config.parts), v.shape, states.shape[-1]
    if whole.count > 1:
        to_end = whole.without_last()
        types = [
            output_like((b, hv, to_end.count, width, depth), jnp.float32, v),
            output_like((b, hv, to_end.count, HALVES, depth, depth), jnp.bfloat16, v),
        ]
        ends, transitions = carry(to_end, states, types, warpgroups=_warpgroups_for_ends(width, depth), ends=True)
        states = _starts(states, ends, transitions, launch)
    types = [output_like(v.shape, jnp.bfloat16, v), output_like((b, hv, width, depth), jnp.float32, v)]
    if keep:
        types.append(output_like((b, hv, chunks, width, depth), jnp.bfloat16, v))
        types.append(output_like((b, hv, chunks, HALVES, width, CHUNK), jnp.bfloat16, v))
    return tuple(carry(whole, states, types, warpgroups=config.warpgroups, ends=False))
