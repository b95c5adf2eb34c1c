"""Values in the registers of a warpgroup: layouts, loads and stores, bf16x2 splits, and Mosaic's own operations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.wgmma import Accumulator

WGMMA = plgpu.Layout.WGMMA
LOG2_E = 1.4426950408889634
_WARPS = 4  # Of a warpgroup.

# bf16x2: a float32 number as its bfloat16 (hi) and the rest (lo). bf16x3: the hi*hi, hi*lo and lo*hi terms of a product
# of two such numbers; lo*lo is below float32 precision.
BF16X3 = (0, 0), (0, 1), (1, 0)


def transposed(ref: Any) -> Any:
    """A view of a tile in shared memory with its two axes exchanged."""
    return ref.transpose((1, 0))


def load_row_vector(ref: Any) -> jax.Array:
    """A vector with one element per row of a wgmma tile."""
    return plgpu.load(ref, layout=WGMMA.reduce(1), optimized=False)


def along_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A vector with one element per row, repeated over the columns of a tile."""
    return lax.broadcast_in_dim(vector, shape, [0])


def load_along_rows(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """Loads one element per row of a tile and repeats it over the columns."""
    return along_rows(load_row_vector(ref), shape)


def load_along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """Loads one element per column of a tile and repeats it over the rows."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False), shape, [1])


def tile_of_zeros(shape: tuple[int, int]) -> jax.Array:
    """float32 zeros in the layout of products."""
    zeros = jnp.zeros(shape, jnp.float32)
    return zeros if interpreted() else plgpu.layout_cast(zeros, WGMMA)


def side_by_side(tiles: tuple[jax.Array, ...]) -> jax.Array:
    """Tiles of equal rows in the layout of products as one. Each thread has the same columns of each, so nothing moves."""
    if len(tiles) == 1 or interpreted():
        return jnp.concatenate(tiles, axis=1)
    rows, columns = tiles[0].shape[0], sum(tile.shape[1] for tile in tiles)

    def join(*tiles: Any) -> Any:
        registers = np.concatenate([tile.registers for tile in tiles], axis=1)
        return mosaic.FragmentedArray(_registers=registers, _layout=tiles[0].layout, _is_signed=None)

    return inline_mosaic(join, *tiles, out=jax.ShapeDtypeStruct((rows, columns), tiles[0].dtype))


def load_tile(ref: Any) -> jax.Array:
    """A tile from global memory in the layout of products, two adjacent columns at a time."""
    return plgpu.load(ref, layout=WGMMA, optimized=False)


def column_indices(shape: tuple[int, int], first: Any) -> jax.Array:
    """The index of each element's column in a tile whose first column is `first`."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)


def row_indices(shape: tuple[int, int]) -> jax.Array:
    """The index of each element's row in a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)


def upcast(x: jax.Array) -> jax.Array:
    """bfloat16 as float32, by shifting its bits, for tiles in the layout of products: threads hold pairs of columns.

    `astype` gives the same values. But where x was rounded from float32, the compiler then repeats the rounding for
    `astype` alone, element by element on the special function unit, which has an eighth of the throughput. And shifted
    element by element (`upcast_elements`), a pair is taken apart and put together again: two instructions more for it.
    """
    if interpreted():
        return x.astype(jnp.float32)

    def shift(x: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        low, high = (arith.constant(i32, ir.IntegerAttr.get(i32, value)) for value in (16, -65536))

        def both(pair: Any) -> Any:
            word = vector.extract(
                vector.bitcast(ir.VectorType.get((1,), i32), pair),
                dynamic_position=[],
                static_position=ir.DenseI64ArrayAttr.get([0]),
            )
            wide = [arith.bitcast(f32, bits) for bits in (arith.shli(word, low), arith.andi(word, high))]
            return vector.from_elements(ir.VectorType.get((2,), f32), wide)

        registers = np.array([both(pair) for pair in x.registers.flat], dtype=object).reshape(x.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return inline_mosaic(shift, x, out=jax.ShapeDtypeStruct(x.shape, jnp.float32))


def upcast_elements(x: jax.Array) -> jax.Array:
    """`upcast` element by element: in a few kernels, which have no register to spare, it takes less time."""
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(lax.shift_left(bits, jnp.uint32(16)), jnp.float32)


def split_hi_lo(
    x: jax.Array, *, by_conversion: bool = False, widen: Callable[[jax.Array], jax.Array] = upcast
) -> tuple[jax.Array, jax.Array]:
    """The bf16x2 split of a float32 tile. `by_conversion` upcasts with `astype`, not `widen`: the same values."""
    hi = x.astype(jnp.bfloat16)
    wide = hi.astype(jnp.float32) if by_conversion else widen(hi)
    return hi, (x - wide).astype(jnp.bfloat16)


def add_hi_lo(accumulator: Accumulator, x: tuple[jax.Array, jax.Array], y: Any) -> None:
    """Adds x y, where x is split (bf16x2) and y is a tile."""
    for part in x:
        accumulator.add(part, y)


def opaque_zero(index: Any) -> Any:
    """Returns a zero that the compiler cannot fold, made from a loop index below 2^30.

    Adding it to an address or a mask keeps that inside the loop. Otherwise the compiler hoists the descriptors of all
    operands out of the loop, two registers each, spills them where registers are short, and each product waits until
    they are loaded back.
    """
    return lax.shift_right_logical(index, jnp.int32(30))


def few_rows(rows: int, lanes: int, channels: int) -> Any:
    """A layout for a tile of few rows, a multiple of 4: each warp holds a quarter of the rows, and `lanes` threads hold
    one row.

    A thread holds `channels` adjacent elements of a row; wider tiles repeat that.
    """
    columns = lanes * channels
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, columns), (rows // _WARPS, columns), (channels,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def store(ref: Any, value: jax.Array) -> None:
    """Stores to global memory in pieces of less than a cache line. jax 0.12 rejects that unless it is asked for."""
    unoptimized = getattr(plgpu, "store", None)
    if unoptimized is None:
        ref[...] = value
    else:
        unoptimized(ref, value, optimized=False)


def store_masked(ref: Any, value: jax.Array, mask: jax.Array) -> None:
    """Stores the elements of a tile for which a mask holds to global memory, two adjacent columns at a time.

    The mask is equal for columns 2 i and 2 i + 1. `ref` has the shape of the tile and may reach past the end of its array
    where the mask does not hold. Each thread stores by itself: half of the throughput of a copy of a whole tile.
    """

    def body(ref: Any, value: Any, mask: Any) -> None:
        places = value.layout.thread_idxs(value.shape)
        for place, register, keep in zip(places, value.registers.flat, mask.registers.flat, strict=True):
            first = vector.extract(keep, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
            with mosaic.when(first):
                vector.store(register, ref, place)

    inline_mosaic(body, ref, value, mask)


def inline_mosaic(body: Callable[..., Any], *arguments: Any, out: jax.ShapeDtypeStruct | None = None) -> Any:
    """Calls `body`, written in Mosaic GPU's own operations, with refs, tiles and values of rows. It returns a tile or
    nothing.
    """

    def layout(argument: Any) -> Any:
        if not isinstance(argument, jax.Array):
            return plgpu.RefType()
        return WGMMA if argument.ndim == 2 else WGMMA.reduce(1)

    types = tuple(layout(argument) for argument in arguments)
    returned = None if out is None else plgpu.ShapeDtypeStruct(out.shape, jnp.dtype(out.dtype), layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=returned)
    return inline(lambda _, *given: body(*given))(*arguments)


def to_int32(x: jax.Array) -> jax.Array:
    """A float32 tile truncated to int32. Elements must be in range: `astype` clamps, two instructions for each."""
    if interpreted():
        return x.astype(jnp.int32)

    def convert(x: Any) -> Any:
        return x.astype(ir.IntegerType.get_signless(32), is_signed=True)

    return inline_mosaic(convert, x, out=jax.ShapeDtypeStruct(x.shape, jnp.int32))


_SQUARE = 64
_WORD = 32
_BFLOAT16_ONE = 0x3F80


@dataclass(frozen=True)
class ColumnRanges:
    """For each row of a square of 64, the columns from `first` to the one before `end`."""

    first: jax.Array  # [64] int32
    end: jax.Array  # [64] int32

    def keep(self, x: jax.Array) -> jax.Array:
        """A square with zeros outside of the ranges, whatever is there in x."""
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=WGMMA)
        first, end = (lax.broadcast_in_dim(bound, x.shape, [0]) for bound in (self.first, self.end))
        return jnp.where((column >= first) & (column < end), x, 0.0)

    def ones(self) -> jax.Array:
        """A bfloat16 square of ones in the ranges, and zeros elsewhere.

        It is made from a bit per column: with two comparisons and two selections per element it would take more than
        twice as many instructions.
        """
        shape = _SQUARE, _SQUARE
        if interpreted():
            return self.keep(jnp.ones(shape, jnp.float32)).astype(jnp.bfloat16)
        words = [
            _bits_from(self.first - before) & lax.bitwise_xor(_bits_from(self.end - before), jnp.int32(-1))
            for before in (0, _WORD)
        ]
        return inline_mosaic(_square_of_bits, *words, out=jax.ShapeDtypeStruct(shape, jnp.bfloat16))


def _bits_from(column: jax.Array) -> jax.Array:
    """The bits of a word from a column on, for each row."""
    shifted = lax.shift_left(jnp.full_like(column, -1), jnp.clip(column, 0, _WORD - 1))
    return jnp.where(column >= _WORD, 0, shifted)


def _square_of_bits(*words: Any) -> Any:
    """A bfloat16 square in the layout of products from its bits: for each row, a word for each 32 columns.

    The registers of a thread are, for each 8 columns, those of its two rows: 2 of the 8 columns, by its lane.
    """
    i32 = ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())

    def constant(value: int) -> Any:
        return arith.constant(i32, ir.IntegerAttr.get(i32, value))

    def shifted(word: Any, count: int) -> Any:
        """To the right, or to the left by a negative count."""
        return arith.shrui(word, constant(count)) if count >= 0 else arith.shli(word, constant(-count))

    def pair_of_bits(word: Any, bit: int) -> Any:
        """The bit and the next one, in the two halves of a word, each times one."""
        first, second = arith.andi(shifted(word, bit), constant(1)), shifted(word, bit + 1 - 16)
        spread = arith.ori(first, arith.andi(second, constant(1 << 16)))
        ones = arith.muli(spread, constant(_BFLOAT16_ONE))
        return vector.bitcast(pair, vector.from_elements(ir.VectorType.get((1,), i32), [ones]))

    thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
    own_columns = arith.shli(arith.andi(thread, constant(3)), constant(1))
    zeroth = ir.DenseI64ArrayAttr.get([0])
    by_row = [
        [
            arith.shrui(vector.extract(row, dynamic_position=[], static_position=zeroth), own_columns)
            for row in word.registers.flat
        ]
        for word in words
    ]
    registers = []
    for column in range(0, _SQUARE, 8):
        number, bit = divmod(column, _WORD)
        registers += [pair_of_bits(row, bit) for row in by_row[number]]
    layout = mosaic.WGMMA_LAYOUT
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape((_SQUARE, _SQUARE)))
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
