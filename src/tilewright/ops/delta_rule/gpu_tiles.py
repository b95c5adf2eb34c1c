"""What the Hopper kernels of the delta rule share: the rows of a chunk's gates, tiles in registers, the inverse of a chunk.

Tiles of values are often transposed, [V, C] for a chunk of C tokens: the state of a warpgroup is [V, K], a value channel a
row, and takes its place as the left operand of a product from registers.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from tilewright.core.hopper import Accumulator, accumulate, inlined, padded, product
from tilewright.ops.delta_rule.chunk import LOWEST_GATE
from tilewright.ops.delta_rule.config import GPU_TILE

CHUNK = 64
HALVES = 2  # What is kept for a backward in float32's place: rounded to bfloat16, and the rest.
LARGE = (0, 0), (0, 1), (1, 0)  # Of the products of two numbers' halves, those that are large.

WGMMA = plgpu.Layout.WGMMA
SQUARE = (CHUNK, CHUNK)
_PIECE = 4  # Numbers of the widest store.
_NOTHING = -1e30  # Its exponential is 0.

# The rows of a chunk's gates: the two parts of G, beta, exp(G), beta exp(G_C - G), exp(G_C).
COARSE, FINE, BETA, INTO, ONWARD, ACROSS = range(6)
GATE_ROWS = 6

# Of gates a channel (KDA): channels of a part of the keys, of which a tile in float32 is 32 registers a thread; and, where
# gates sum to more than that exponent of 2 in a chunk, the tokens of its blocks (`Round`).
CHANNELS = 64
BLOCK = 32
LARGEST_EXPONENT = 115.0  # bfloat16 has 127, and the rest of a rounded number is 2^-9 of it.
LOG2_E = 1.4426950408889634
# The first round (`Round`) that takes the second half of something with its first, and how many there are.
_BETWEEN, _ROUNDS = 2, 9


def compiler_params(*, barriers: bool = False) -> plgpu.CompilerParams:
    """Layouts follow from the operands: to infer them takes minutes for kernels such as these.

    With `barriers` Pallas puts one before and behind every store to shared memory. Without, tiles are stored by the warps
    that read them, or `commit_smem` is between.
    """
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=not barriers
    )


def in_chunks(x: jax.Array) -> jax.Array:
    """[B, T, ...] with zeros to whole chunks: tokens of zeros leave the state as it is."""
    return padded(x, 1, CHUNK)


def per_chunk(x: jax.Array) -> jax.Array:
    """A number a token and head, [B, T, HV], as float32 [B, HV, chunks, C]. T is whole chunks."""
    return jnp.moveaxis(x.astype(jnp.float32), 1, 2).reshape(x.shape[0], x.shape[2], -1, CHUNK)


def turned_states(states: jax.Array, block_v: int) -> jax.Array:
    """[B, HV, K, V] as a kernel holds them, [B, HV, V, K], with zeros to whole tiles."""
    return padded(padded(jnp.swapaxes(states, 2, 3), 2, block_v), 3, GPU_TILE)


def channel_gates(g: jax.Array, resets: jax.Array | None) -> jax.Array:
    """Gates a channel as float32, in whole chunks and tiles; a start of a segment is the lowest gate."""
    if resets is not None:
        g = jnp.where(resets[:, :, None, None].astype(bool), LOWEST_GATE, g)
    return padded(in_chunks(g.astype(jnp.float32)), 3, GPU_TILE)


def halves(x: jax.Array, *, by_conversion: bool = False) -> tuple[jax.Array, jax.Array]:
    """x rounded to bfloat16, and the rest of it. `by_conversion`: not as in `widened`; the values are the same."""
    rounded = x.astype(jnp.bfloat16)
    wide = rounded.astype(jnp.float32) if by_conversion else widened(rounded)
    return rounded, (x - wide).astype(jnp.bfloat16)


def widened(x: jax.Array) -> jax.Array:
    """bfloat16 as float32, by its bits.

    `astype` has the same values. But where x was rounded from float32 the compiler then rounds it once more, for `astype`
    alone: number by number, on the unit of the exponentials, which is an eighth as wide as others.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(lax.shift_left(bits, jnp.uint32(16)), jnp.float32)


def turned(ref: Any) -> Any:
    return ref.transpose((1, 0))


def add_split(accumulator: Accumulator, x: tuple[jax.Array, jax.Array], both: Any, rounded: Any) -> None:
    """Add x y, both split: `both` is a tile of y's halves, one below the other, `rounded` of the first alone."""
    accumulator.add(jnp.concatenate([x[0], x[0]], axis=1), both)  # [64, 2 C] [2 C, n]
    accumulator.add(x[1], rounded)  # [64, C] [C, n]


def add_halves(accumulator: Accumulator, x: tuple[jax.Array, jax.Array], y: Any) -> None:
    """Add x y, of which x is split."""
    for half in x:
        accumulator.add(half, y)


def load_rows(ref: Any) -> jax.Array:
    """A vector in registers: its elements belong to the rows of a tile."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def load_tile(ref: Any) -> jax.Array:
    """A tile of shared memory as float32 in registers."""
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def store_as_held(ref: Any, x: jax.Array, *, interpreted: bool) -> None:
    """A square of float32 into device memory for `load_as_held`: in the order in which threads hold it.

    A thread's pieces of 16 bytes lie beside its neighbours'. By rows they would be 8 bytes, of 8 rows to a warp.
    """
    if interpreted:
        ref[...] = x
        return

    def store(ref: Any, x: Any) -> None:
        pairs = list(x.registers.flat)  # Of two neighbours each.
        pieces = [vector.shuffle(a, b, list(range(_PIECE))) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        held = mgpu.WGStridedFragLayout(SQUARE, _PIECE)
        mgpu.FragmentedArray(_registers=np.array(pieces, dtype=object), _layout=held, _is_signed=None).store_untiled(
            ref
        )

    inlined(store, ref, x)


def load_as_held(ref: Any, *, interpreted: bool) -> jax.Array:
    """What `store_as_held` wrote."""
    if interpreted:
        return plgpu.load(ref, layout=WGMMA, optimized=False)

    def load(ref: Any) -> Any:
        pieces = mgpu.FragmentedArray.load_strided(ref, vec_size=_PIECE).registers.flat
        pairs = [vector.shuffle(piece, piece, [at, at + 1]) for piece in pieces for at in (0, 2)]
        registers = np.array(pairs, dtype=object).reshape(mgpu.WGMMA_LAYOUT.registers_shape(SQUARE))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return inlined(load, ref, out=jax.ShapeDtypeStruct(SQUARE, jnp.float32))


def load_turned(ref: Any) -> jax.Array:
    return plgpu.load(turned(ref), layout=WGMMA, optimized=False).astype(jnp.float32)


def along_rows(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """A vector of the shape's first axis, repeated along the second."""
    return lax.broadcast_in_dim(load_rows(ref), shape, [0])


def along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False), shape, [1])


def positions() -> tuple[jax.Array, jax.Array]:
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in (0, 1))
    return i, j  # [C, C] each


def decay(gates: Any, i: jax.Array, j: jax.Array) -> jax.Array:
    """exp(G_i - G_j) where i >= j, else 0."""
    coarse, fine = (
        along_rows(gates.at[part], SQUARE) - along_columns(gates.at[part], SQUARE) for part in (COARSE, FINE)
    )
    return jnp.exp(jnp.where(i >= j, coarse + fine, _NOTHING))  # [C, C]


def keep_halves(both: Any, split: tuple[jax.Array, jax.Array]) -> None:
    """Both halves into a tile, one below the other: its first 2 C rows."""
    for half, value in enumerate(split):
        both[pl.ds(half * CHUNK, CHUNK)] = value


def sums_of_gates(both: Any, mask: jax.Array, *, interpreted: bool) -> jax.Array:
    """Of the gates of the tokens j that the mask [C, C] has for i, [C, 64]; `both` is a tile of their halves."""
    ones = jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)
    return product(SQUARE, lambda sum_: sum_.add(jnp.concatenate([ones, ones], axis=1), both), interpreted=interpreted)


@dataclass(frozen=True)
class Round:
    """With a gate a channel, pairs of tokens whose scores are made by one product, for the exponents that it can have.

    Rows are taken for as long as they have not fallen too far in any channel, from the start that they are scaled to:

    - level 0: all pairs, scaled to the chunk's start;
    - of rows that have fallen from it, level 1: pairs in the same block of 32, scaled to its start; level 2: the second
      block with the first, both scaled to the middle, so that exponents are at most 0;
    - of rows that have fallen from their block's start, level 3 and on: the second half of a block of 32, 16, 8, 4 and 2
      with its first, scaled to its middle; the token itself.

    Which levels a row takes part in depends on tokens up to it alone.
    """

    level: Any
    from_start: Any
    """Else to the middle."""
    size: Any
    """Of a block, or of half of one."""

    @staticmethod
    def of(level: Any) -> "Round":
        half = lax.shift_right_logical(BLOCK, jnp.maximum(level - _BETWEEN, 0))
        return Round(level, level < _BETWEEN, jnp.where(level == 0, CHUNK, jnp.where(level < _BETWEEN, BLOCK, half)))

    @staticmethod
    def until(some_fall: jax.Array, more_fall: jax.Array) -> jax.Array:
        """How many rounds there are, where rows fall from the chunk's start, or from their blocks' (0 or 1)."""
        return jnp.where(more_fall > 0, _ROUNDS, jnp.where(some_fall > 0, _BETWEEN + 1, 1))

    # Both are ranges of j for an i: two comparisons for a pair, and the rest once for a row.

    def exponents(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Of the tokens j, those whose gates are between i and where it is scaled to."""
        start = i & -self.size
        upward = self.from_start | ((i & self.size) != 0)
        return (j >= jnp.where(upward, start, i + 1)) & (j < jnp.where(upward, i + 1, start + self.size))

    def pairs(self, i: jax.Array, j: jax.Array, in_chunk: jax.Array, in_block: jax.Array) -> jax.Array:
        """The pairs [C, C] that this round has; how low each row has fallen in the chunk and in its block, [C]."""
        in_chunk, in_block = (jnp.where(lowest < -LARGEST_EXPONENT, 1, 0) for lowest in (in_chunk, in_block))
        # Who has fallen in a block has fallen in the chunk, but for positive gates before it.
        of_fallen = jnp.where(self.level == 1, 1 - in_block, jnp.where(self.level > _BETWEEN, in_block, 1))
        rows = jnp.where(self.level == 0, 1 - in_chunk, in_chunk * of_fallen)
        start, itself = i & -self.size, self.size == 0
        first = jnp.where(self.from_start, start, jnp.where(itself, i, start - self.size))
        end = jnp.where(self.from_start | itself, i + 1, jnp.where((i & self.size) != 0, start, 0))
        return (j >= first) & (j < jnp.where(lax.broadcast_in_dim(rows, SQUARE, [0]) > 0, end, 0))


def some_fall(lowest: jax.Array, everywhere: Any) -> jax.Array:
    """Whether a row falls too far (0 or 1), a number that all warps have. `everywhere` [C] is for it to work in."""
    everywhere[...] = lowest
    plgpu.commit_smem()
    of_all = jnp.min(along_columns(everywhere, SQUARE), axis=1)
    plgpu.commit_smem()
    everywhere[...] = of_all
    plgpu.commit_smem()
    return jnp.where(everywhere[0] < -LARGEST_EXPONENT, 1, 0)


def invert(lower: jax.Array, i: jax.Array, j: jax.Array, l_both: Any, x_pair: Any, *, interpreted: bool) -> jax.Array:
    """(I + L)^-1 of a strictly lower triangular L [C, C]; the two tiles [2 C, C] are for it to work in.

    Of blocks of 2, by hand; then X <- X + (I - X (I + L)) X, Newton's step, six times, with X and the bracket rounded. The
    bracket is taken inside of blocks twice as large each time: what is there of X L alone merges two blocks, and the rest
    makes up for the roundings of the rounds before. Blocks of tokens are merged, never powers of L summed: those overflow
    for like keys.
    """
    # i xor j is less than 2^level where i and j are in the same block of 2^level.
    apart = lax.bitwise_xor(i, j)
    one = jnp.where(apart == 0, 1.0, 0.0)
    keep_halves(l_both, halves(-one - lower))
    # Chosen, not subtracted: so `_inverse_kernel` has 127 registers a thread, and a multiprocessor four of its blocks.
    x = jnp.where(apart == 0, 1.0, jnp.where(apart == 1, -lower, 0.0))
    # On the diagonal X (I + L) is 1 to the bit, so that nothing is missing.
    apart = jnp.where(apart == 0, CHUNK * CHUNK, apart)

    def step(level: Any, x: jax.Array) -> jax.Array:
        rounded = x.astype(jnp.bfloat16)
        # In turns: a warp may still be multiplying by the other tile when the next warp writes this one.
        x_tile = x_pair.at[pl.ds(lax.rem(level, jnp.int32(2)) * CHUNK, CHUNK)]
        x_tile[...] = rounded
        plgpu.commit_smem()
        twice = jnp.concatenate([rounded, rounded], axis=1)
        missing = product(SQUARE, lambda sum_: sum_.add(twice, l_both), interpreted=interpreted)
        # The compiler would choose behind the rounding, and then round numbers one by one (`widened`).
        missing = lax.optimization_barrier(jnp.where(apart < lax.shift_left(1, level), missing, 0.0))
        missing = missing.astype(jnp.bfloat16)
        x = widened(rounded)
        (x,) = accumulate((x,), lambda sum_: sum_.add(missing, x_tile), interpreted=interpreted)
        return x

    # A loop, not its rounds one by one: their code would not stay in the instruction cache.
    x = lax.fori_loop(2, CHUNK.bit_length() + 1, step, x)
    plgpu.commit_smem()  # Other warps may still be multiplying: only behind them are tiles written again.
    return x
