"""The log-decays of a chunk on Hopper: a kernel for one gate per head, and what KDA's kernels do with one per channel.

A start of a segment is the lowest gate, a decay to 0. Sums of gates are products of the tensor cores with zeros and
ones.

One gate per head: a kernel computes G, exp(G) and the like, 64 chunks at a time. Tried and dropped, on an H200 (driver
580.159.04, jax 0.11.2, H96 T8192): gates by XLA, which has no sums of 64 in one kernel. These were 31 us of small
kernels where this kernel and two transposes take 16 us, and a product whose tuning took 2 s of the first call.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.gates import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    SQUARE,
    TILE,
    Row,
    bfloat16_tile,
    float32_array,
    in_chunks,
    per_chunk,
    positions,
)
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import WGMMA, split_hi_lo, store, upcast
from tilewright.pallas.gpu.wgmma import Accumulator, product

# One gate per channel: a product has what gates sum to, as an exponent of 2, on one side, and its negative on the other.
# bfloat16 has exponents to 127, and the lo part of a number is 2^-9 of it: so either side may have 115 below one. Both
# sides times a power of 2, SHIFT and -SHIFT, which changes no bit of the product, have so much more.
BELOW_ONE = 115.0
SHIFT = 80.0
LARGEST_EXPONENT = BELOW_ONE + SHIFT
"""Where gates sum to more than this in a chunk, its pairs of tokens are taken in levels (`PairLevel`)."""
_BLOCK = 16
_INSIDE, _LEVELS = 4, 9  # The first level of halves of blocks, and the number of all.


def _gates_kernel(
    *,
    # inputs
    beta_ref,  # [chunks, C]
    g_ref,  # [chunks, C], or None
    # outputs
    gates_ref,  # [chunks, Row.COUNT, C]
    # scratch
    ones,  # [C, C]
):
    """The gates of 64 chunks: a chunk is a row of a tile, a token a column."""
    rows = pl.ds(lax.axis_index("block") * CHUNK, CHUNK)

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[rows], layout=WGMMA, optimized=False)

    def constant(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(SQUARE, value, jnp.float32), WGMMA)

    def write(row: int, value: jax.Array) -> None:
        store(gates_ref.at[rows, row], value)

    beta = read(beta_ref)
    write(Row.BETA, beta)
    if g_ref is None:
        for row, value in ((Row.COARSE, constant(0.0)), (Row.FINE, constant(0.0)), (Row.DECAY_IN, constant(1.0))):
            write(row, value)
        write(Row.DECAY_OUT, beta)
        write(Row.DECAY_ALL, constant(1.0))
        return
    i, j = positions()
    ones[...] = jnp.where(i <= j, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()

    sums = functools.partial(sums_over_tokens, ones=ones)
    g = jnp.maximum(read(g_ref), LOWEST_GATE)
    (coarse, fine), (all_coarse, all_fine) = (coarse_and_fine(g, function) for function in (sums, total_over_tokens))
    write(Row.COARSE, coarse)
    write(Row.FINE, fine)
    write(Row.DECAY_IN, jnp.exp(coarse + fine))
    write(Row.DECAY_OUT, beta * jnp.exp((all_coarse - coarse) + (all_fine - fine)))
    write(Row.DECAY_ALL, jnp.exp(all_coarse + all_fine))


def sums_over_tokens(x: jax.Array, ones: Any) -> jax.Array:
    """For each token j, the sum of x [chunks, C] over those tokens i for which `ones` [C, C] has a one in row i, column j.

    Three bfloat16 numbers have all the bits of a float32 one.
    """
    first = x.astype(jnp.bfloat16)

    def add(sum_: Accumulator) -> None:
        for piece in (first, *split_hi_lo(x - upcast(first))):
            sum_.add(piece, ones)

    return product(SQUARE, add)


def total_over_tokens(x: jax.Array) -> jax.Array:
    """The sum of x [chunks, C] over tokens, at each of them."""
    return lax.broadcast_in_dim(jnp.sum(x, axis=1), SQUARE, [0])


def head_gates(call: DeltaRuleCall) -> jax.Array:
    """The gates of each chunk, [B, HV, chunks, Row.COUNT, C] float32."""
    g, beta = call.g, call.beta
    if call.resets is not None:
        g = jnp.where(call.resets[:, :, None], LOWEST_GATE, jnp.zeros_like(beta) if g is None else g)

    def rows(x: jax.Array) -> jax.Array:
        return padded(per_chunk(in_chunks(x)).reshape(-1, CHUNK), 0, CHUNK)

    beta_rows, g_rows = rows(beta), None if g is None else rows(g)
    leading, count = (beta.shape[0], beta.shape[2], pl.cdiv(beta.shape[1], CHUNK)), beta_rows.shape[0]
    gates = run_kernel(
        _gates_kernel,
        name="delta_rule_gates",
        inputs={"beta": beta_rows, "g": g_rows},
        outputs={"gates": float32_array(count, Row.COUNT, CHUNK)},
        scratch={"ones": bfloat16_tile(*SQUARE)},
        grid={"block": count // CHUNK},
    )["gates"]
    return gates[: math.prod(leading)].reshape(*leading, Row.COUNT, CHUNK)


def channel_gates(call: DeltaRuleCall) -> jax.Array:
    """One gate per channel as float32, padded to whole chunks and tiles."""
    g = call.g
    assert g is not None
    if call.resets is not None:
        g = jnp.where(call.resets[:, :, None, None].astype(bool), LOWEST_GATE, g)
    return padded(in_chunks(g.astype(jnp.float32)), 3, TILE)


def sums_of_gates(g_hi_lo: Any, ones: jax.Array) -> jax.Array:
    """The sums [C, 64] of the gates, a bf16x2 tile, of those tokens j for which `ones` [C, C] has a one in row i."""
    return product(SQUARE, lambda sum_: sum_.add(jnp.concatenate([ones, ones], axis=1), g_hi_lo))


Range = tuple[jax.Array, jax.Array]
"""For each token i, the first token j and the one after the last."""


@dataclass(frozen=True)
class PairLevel:
    """With one gate per channel: pairs of tokens whose scores are one product, by the exponents that it may have.

    A row takes part in a level for as long as it has not decayed too far in any channel, from the reference point that
    the level scales to:

    - level 0: all pairs, scaled to the chunk's start;
    - of rows that decayed too far from there, level 1: pairs in the same block of 16, scaled to its start; levels 2 and 3:
      the second half of a block of 64 and 32 with its first, both scaled to the middle, so that exponents are at most 0;
    - of rows that decayed too far from their block's start, level 4 and on: the same with blocks of 16, 8, 4 and 2; the
      token itself.

    Which levels a row takes part in depends on tokens up to it alone.
    """

    BETWEEN: ClassVar[int] = 2
    """The first level that takes the second half of a block with its first."""

    level: Any
    from_start: Any
    """Whether it scales to the start of a block; else to the middle."""
    size: Any
    """Of a block, or of half of one."""

    @staticmethod
    def of(level: Any) -> "PairLevel":
        half = lax.shift_right_logical(CHUNK // 2, jnp.maximum(level - PairLevel.BETWEEN, 0))
        from_start = level < PairLevel.BETWEEN
        return PairLevel(
            level, from_start, jnp.where(level == 0, CHUNK, jnp.where(level < PairLevel.BETWEEN, _BLOCK, half))
        )

    @staticmethod
    def count(in_chunk: Any, in_block: Any) -> jax.Array:
        """The levels of a chunk: whether rows of it decayed too far from the chunk's start, and from their block's."""
        return jnp.where(in_chunk, jnp.where(in_block, _LEVELS, _INSIDE), 1)

    # Either range has the shape of i: [C], or [C, C].

    def exponents(self, i: jax.Array) -> Range:
        """The tokens j whose gates lie between i and the point that it is scaled to."""
        start = i & -self.size
        upward = self.from_start | ((i & self.size) != 0)
        return jnp.where(upward, start, i + 1), jnp.where(upward, i + 1, start + self.size)

    @staticmethod
    def rank(in_chunk: jax.Array, in_block: jax.Array) -> jax.Array:
        """Which levels each row takes, [C], by its lowest exponents from its chunk's and its block's start: 0 for level 0
        alone, 1 for level 1 and those between blocks, 2 for all that take the second half of a block with its first.

        A row that decayed too far in its block has done so in the chunk, but for positive gates before it.
        """
        return jnp.where(in_chunk < -LARGEST_EXPONENT, jnp.where(in_block < -LARGEST_EXPONENT, 2, 1), 0)

    def pairs(self, i: jax.Array, rank: jax.Array) -> Range:
        """The tokens j that i is paired with, by the rank [C] of each i."""
        least = jnp.where(self.level == 0, 0, jnp.where(self.level >= _INSIDE, 2, 1))
        most = jnp.where(self.level < self.BETWEEN, self.level, 2)
        taken = (rank >= least) & (rank <= most)
        taken = taken if i.ndim == 1 else lax.broadcast_in_dim(jnp.where(taken, 1, 0), SQUARE, [0]) > 0
        start, itself = i & -self.size, self.size == 0
        first = jnp.where(self.from_start, start, jnp.where(itself, i, start - self.size))
        end = jnp.where(self.from_start | itself, i + 1, jnp.where((i & self.size) != 0, start, 0))
        return first, jnp.where(taken, end, 0)
