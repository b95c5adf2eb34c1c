"""Values in the registers of a warpgroup: layouts, loads and stores, bf16x2 splits, and Mosaic's own operations."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, vector

from tilewright.pallas.gpu.elementwise import element
from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.wgmma import Accumulator

WGMMA = plgpu.Layout.WGMMA
SCALAR = plgpu.Layout.WG_SPLAT
"""The layout of a number that all threads have, where Mosaic's own operations take it."""
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


def load_at_rows(ref: Any, rows: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Loads the elements of float32 shared memory whose places are `rows`, one per row of a tile, as `load_along_rows`.

    Addresses follow from `rows`, so that they are computed inside of a loop where these are.
    """
    if interpreted():
        return along_rows(ref[...][rows], shape)

    def body(ref: Any, rows: Any) -> Any:
        kind, index = ir.VectorType.get((1,), ir.F32Type.get()), ir.IndexType.get()
        loaded = [vector.load(kind, ref, [arith.index_cast(index, element(row, 0))]) for row in rows.registers.flat]
        registers = np.array(loaded, dtype=object).reshape(rows.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=rows.layout, _is_signed=None)

    returned = plgpu.ShapeDtypeStruct(rows.shape, jnp.dtype(jnp.float32), layout=WGMMA.reduce(1))
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA.reduce(1)), return_type=returned)
    return along_rows(inline(lambda _, *given: body(*given))(ref, rows), shape)


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


def load_float32_square(ref: Any, zero: Any) -> jax.Array:
    """A float32 tile [64, 64] of shared memory in the layout of products.

    A `zero` that the compiler cannot fold keeps what a thread computes for its addresses inside of a loop: each of them
    would take a register, or be spilled.
    """
    if interpreted():
        return ref[...]

    def body(_: Any, ref: Any, zero: Any) -> Any:
        i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F32Type.get())
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))
        thread = arith.addi(thread, zero.registers.item())
        lane, warp = arith.andi(thread, _i32(31)), arith.andi(arith.shrui(thread, _i32(5)), _i32(_WARPS - 1))
        row, within = arith.shrui(lane, _i32(2)), arith.shli(arith.andi(lane, _i32(3)), _i32(3))
        # Tiles of 8 rows of 128 bytes, two of them side by side, whose 16 bytes are exchanged by the row's number.
        swizzled = arith.xori(within, arith.shli(row, _i32(4)))
        base = llvm.ptrtoint(i32, mosaic_utils.memref_ptr(ref))
        base = arith.addi(base, arith.addi(arith.shli(warp, _i32(12)), arith.shli(row, _i32(7))))
        registers = []
        for column in range(0, _SQUARE, 8):
            tile, first = divmod(4 * column, 128)
            place = arith.addi(base, arith.xori(swizzled, _i32(first)))
            for half in (0, 1):
                pointer = llvm.inttoptr(llvm.PointerType.get(3), arith.addi(place, _i32(1024 * tile + 2048 * half)))
                registers.append(llvm.load(pair, pointer, alignment=8))
        registers = np.array(registers, dtype=object).reshape(mosaic.WGMMA_LAYOUT.registers_shape((_SQUARE, _SQUARE)))
        return mosaic.FragmentedArray(_registers=registers, _layout=mosaic.WGMMA_LAYOUT, _is_signed=None)

    transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
    returned = plgpu.ShapeDtypeStruct((_SQUARE, _SQUARE), jnp.dtype(jnp.float32), layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), SCALAR), return_type=returned)
    return inline(body)(ref, zero)


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
    element by element, a pair is taken apart and put together again: two instructions more for it.
    """
    if interpreted():
        return x.astype(jnp.float32)

    def shift(x: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        low, high = _i32(16), _i32(-65536)

        def both(pair: Any) -> Any:
            word = element(vector.bitcast(ir.VectorType.get((1,), i32), pair), 0)
            wide = [arith.bitcast(f32, bits) for bits in (arith.shli(word, low), arith.andi(word, high))]
            return vector.from_elements(ir.VectorType.get((2,), f32), wide)

        registers = np.array([both(pair) for pair in x.registers.flat], dtype=object).reshape(x.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return inline_mosaic(shift, x, out=jax.ShapeDtypeStruct(x.shape, jnp.float32))


def split_hi_lo(x: jax.Array, *, by_conversion: bool = False) -> tuple[jax.Array, jax.Array]:
    """The bf16x2 split of a float32 tile in the layout of products; in another layout `by_conversion`: the same values."""
    hi = x.astype(jnp.bfloat16)
    if by_conversion or interpreted():
        return hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)

    def rest(x: Any, hi: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        registers = []
        for numbers, pair in zip(x.registers.flat, hi.registers.flat, strict=True):
            low, high = (element(numbers, n) for n in (0, 1))
            word = element(vector.bitcast(ir.VectorType.get((1,), i32), pair), 0)
            after = llvm.inline_asm(i32, [low, high, word], _REST, "=r,f,f,r", has_side_effects=False)
            one = vector.from_elements(ir.VectorType.get((1,), i32), [after])
            registers.append(vector.bitcast(pair.type, one))
        registers = np.array(registers, dtype=object).reshape(x.registers.shape)
        return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return hi, inline_mosaic(rest, x, hi, out=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16))


# What a pair of float32 numbers is more than the same pair as bfloat16, in a word, as bfloat16.
_REST = """{
.reg .f32 low, high;
.reg .b32 bits;
shl.b32 bits, $3, 16;
mov.b32 low, bits;
sub.f32 low, $1, low;
and.b32 bits, $3, 0xffff0000;
mov.b32 high, bits;
sub.f32 high, $2, high;
cvt.rn.bf16x2.f32 $0, high, low;
}"""


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
_ONES = 0x3F803F80  # Two bfloat16 ones, in a word.


@dataclass(frozen=True)
class ColumnRanges:
    """For each row of a square of 64, the columns from `first` to the one before `end`.

    What is made of them holds no register per column: a bound less the first column of a thread is compared with constants,
    or shifts them.
    """

    first: jax.Array | None  # [64] int32; None: from the first column
    end: jax.Array | None  # [64] int32; None: to the last column

    def keep(self, x: jax.Array, otherwise: float = 0.0) -> jax.Array:
        """A float32 square with zeros, or another number, outside of the ranges, whatever is there in x."""
        if interpreted():
            column = jnp.arange(_SQUARE)[None]
            after, before = (None if bound is None else bound[:, None] for bound in (self.first, self.end))
            inside = jnp.ones(x.shape, bool) if after is None else column >= after
            return jnp.where(inside if before is None else inside & (column < before), x, otherwise)

        def body(x: Any, *bounds: Any) -> Any:
            nothing = arith.constant(ir.F32Type.get(), otherwise)
            at_most, above = arith.CmpIPredicate.sle, arith.CmpIPredicate.sgt
            registers = []
            for column, pair, distances in self._places(x.registers.flat, bounds):
                elements = []
                for n in (0, 1):
                    kinds = [at_most] * (self.first is not None) + [above] * (self.end is not None)
                    inside = (
                        arith.cmpi(kind, distance, _i32(column + n))
                        for kind, distance in zip(kinds, distances, strict=True)
                    )
                    kept = functools.reduce(arith.andi, inside)
                    elements.append(arith.select(kept, element(pair, n), nothing))
                registers.append(vector.from_elements(pair.type, elements))
            registers = np.array(registers, dtype=object).reshape(x.registers.shape)
            return mosaic.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

        return inline_mosaic(body, x, *self._bounds, out=jax.ShapeDtypeStruct(x.shape, jnp.float32))

    def ones(self) -> jax.Array:
        """A bfloat16 square of ones in the ranges, and zeros elsewhere.

        A pair of columns is a shift of two ones, in two instructions; with two comparisons and two selections per element
        it would take several times as many.
        """
        shape = _SQUARE, _SQUARE
        if interpreted():
            return self.keep(jnp.ones(shape, jnp.float32)).astype(jnp.bfloat16)

        def body(*bounds: Any) -> Any:
            i32, layout = ir.IntegerType.get_signless(32), mosaic.WGMMA_LAYOUT
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            registers = []
            for column, _, distances in self._places([None] * (_SQUARE // 4), bounds):
                words = [_ones_before(arith.subi(distance, _i32(column))) for distance in distances]
                if self.first is None:
                    word = words[0]
                else:
                    outside = arith.xori(words[0], _i32(_ONES))
                    word = outside if self.end is None else arith.andi(words[1], outside)
                registers.append(vector.bitcast(pair, vector.from_elements(ir.VectorType.get((1,), i32), [word])))
            registers = np.array(registers, dtype=object).reshape(layout.registers_shape(shape))
            return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

        return inline_mosaic(body, *self._bounds, out=jax.ShapeDtypeStruct(shape, jnp.bfloat16))

    @property
    def _bounds(self) -> list[jax.Array]:
        return [bound for bound in (self.first, self.end) if bound is not None]

    def _places(self, registers: Iterable[Any], bounds: tuple[Any, ...]) -> Iterator[tuple[int, Any, list[Any]]]:
        """For each register of a thread: its first column, the register, and the distance of its row's bounds, both from
        the thread's first column.

        The registers of a thread are, for each 8 columns, those of its two rows: 2 of the 8 columns, by its lane.
        """
        thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
        own = arith.shli(arith.andi(thread, _i32(3)), _i32(1))
        rows = [[arith.subi(element(row, 0), own) for row in bound.registers.flat] for bound in bounds]
        for number, register in enumerate(registers):
            yield number // 2 * 8, register, [row[number % 2] for row in rows]


def _ones_before(distance: Any) -> Any:
    """A word of two bfloat16 ones, those whose number, 0 or 1, is less than a distance."""
    # A shift by less than 0 would be one by 32 and more, which are all alike.
    count = arith.maxsi(arith.shli(distance, _i32(4)), _i32(0))
    shift = f"shf.l.clamp.b32 $0, {_ONES}, 0, $1;"
    return llvm.inline_asm(count.type, [count], shift, "=r,r", has_side_effects=False)


def _i32(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def any_row(holds: jax.Array) -> jax.Array:
    """Whether something holds for any row of a warpgroup's tile, as 0 or 1: given a boolean for each of its 64 rows.

    The warps of the warpgroup meet here, as in `plgpu.commit_smem`: what they stored before, copies and products may read
    after.
    """
    if interpreted():
        plgpu.commit_smem()
        return jnp.any(holds).astype(jnp.int32)

    def body(_: Any, rows: Any) -> Any:
        own = functools.reduce(arith.ori, (element(row, 0) for row in rows.registers.flat))
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)
        barrier = mosaic_utils.warpgroup_barrier_idx(sync=False)
        meet = f"""{{
.reg .pred own, any;
setp.ne.s32 own, $1, 0;
bar.red.or.pred any, $2, {_WARPS * 32}, own;
selp.s32 $0, 1, 0, any;
shfl.sync.idx.b32 $0, $0, 0, 31, -1;
}}"""
        found = llvm.inline_asm(own.type, [own, barrier], meet, "=r,r,r,~{memory}", has_side_effects=True)
        return mosaic.FragmentedArray.splat(found, (), is_signed=True)

    scalar = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=SCALAR)
    inline: Any = plgpu.inline_mgpu(arg_types=(WGMMA.reduce(1),), return_type=scalar)
    return inline(body)(jnp.where(holds, 1, 0))
