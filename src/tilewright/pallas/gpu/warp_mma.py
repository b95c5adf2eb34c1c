"""Products of 16 by 16 blocks, each warp by itself (mma), between values in registers.

A wgmma instruction has 64 rows, and every row the same right operand. Where a tile of 64 rows is four blocks of 16 that
have right operands of their own, most of it would be zeros. Here a tile [64, 16] in the layout of products is one block per
warp: rows 16 w to 16 w + 15 are those of warp w. A matrix of 64 by 64 in the registers of a single warp is 16 such tiles,
which are then one matrix per warp.

A wgmma product also has to be waited for. The compiler interleaves products of warps with what computes their operands,
which wins where that takes as long as the products, as with weights that are converted for a few rows.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from tilewright.pallas.gpu.kernel import interpreted, tile
from tilewright.pallas.gpu.registers import SCALAR, WGMMA, inline_mosaic

CHUNK = 32
"""Values of a row of x that lie together for `product_with_rows`: four threads read 16 bytes of them each."""
BLOCK = 16
WARPS = 4  # Of a warpgroup.
BLOCKS = (WARPS * BLOCK, BLOCK)
"""The shape of a tile of one block per warp."""
_HALVES = 2  # Of a block's rows, and of its columns: matrix instructions have tiles of 8 by 8.
_SQUARE = WARPS * BLOCK
_TRANSFORMS = tuple(tile(8, _SQUARE, dtype=jnp.bfloat16).transforms)  # Of a tile in shared memory: rows of 128 bytes.
_ROW_BYTES = 128  # Of such a tile.
_VECTOR_BYTES = 16  # Of the widest access, and what swizzling moves.
_VECTOR = 8  # bfloat16 values of that access.
# Of `DealtSquares`, which has blocks in float32.
_HALF_BYTES = BLOCK * BLOCK * 4 // _HALVES
_BLOCK_BYTES = _HALVES * _HALF_BYTES
_ROW_OF_BLOCKS = WARPS * _BLOCK_BYTES


def product_with_rows(a: jax.Array, ref: Any) -> jax.Array:
    """a x^T, float32 [64, 8], of bfloat16 a [64, K] in registers and eight rows of x in shared memory, [K / 32, 8, 32].

    Each warp multiplies its 16 rows of a, and waits for no other. A thread reads 16 bytes of a row at once, so what it
    needs for 32 columns of a lies together in x: [thread of four, block of 16 columns, half of the block, two values].
    """
    if interpreted():
        chunks, rows, _ = ref.shape
        x = ref[...].reshape(chunks, rows, 4, 2, _HALVES, 2).transpose(1, 0, 3, 4, 2, 5).reshape(rows, -1)
        plgpu.commit_smem()  # As in `Accumulator.add`: a fence between a plain read of a stage and the next copy to it.
        return jnp.dot(a.astype(jnp.float32), x.astype(jnp.float32).T, precision=jax.lax.Precision.HIGHEST)

    def body(a: Any, ref: Any) -> Any:
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)

        def number(value: int) -> Any:
            return arith.constant(index, value)

        lane = arith.remui(gpu.thread_id(gpu.Dimension.x), number(32))
        row, first = arith.divui(lane, number(4)), arith.muli(arith.remui(lane, number(4)), number(_VECTOR))
        vectors, words = ir.VectorType.get((_VECTOR,), ir.BF16Type.get()), ir.VectorType.get((_VECTOR // 2,), i32)
        # By block, then by its half, then by row half: as the instruction takes the left operand.
        left = [_word(pair) for pair in a.registers.flat]
        values = [arith.constant(ir.F32Type.get(), 0.0)] * 4
        for chunk in range(ir.MemRefType(ref.type).shape[0]):
            loaded = vector.load(vectors, ref, [number(chunk), row, first], alignment=2 * _VECTOR)
            right = [_element(vector.bitcast(words, loaded), at) for at in range(_VECTOR // 2)]
            for block in range(2):
                own = left[4 * (2 * chunk + block) :][:4]
                values = _multiply(own, right[_HALVES * block :][:_HALVES], values)
        return _fragmented([_floats(values[:2]), _floats(values[2:])], shape)

    shape = a.shape[0], ref.shape[1]
    return inline_mosaic(body, a, ref, out=jax.ShapeDtypeStruct(shape, jnp.float32))


def add_block_products(sums: jax.Array, a: jax.Array, b_transposed: jax.Array) -> jax.Array:
    """Adds a y to `sums` for each block, given y transposed: [64, 16] float32, and bfloat16 `a` and `b_transposed`.

    Threads hold the transpose of a block as the instruction takes its right operand.
    """
    if interpreted():
        x, y = (x.astype(jnp.float32).reshape(-1, BLOCK, BLOCK) for x in (a, b_transposed))
        return sums + jnp.matmul(x, y.mT, precision=jax.lax.Precision.HIGHEST).reshape(sums.shape)

    def body(sums: Any, a: Any, b_transposed: Any) -> Any:
        # By column half, then by row half: as the instruction takes the left operand.
        left, right = ([_word(pair) for pair in x.registers.flat] for x in (a, b_transposed))
        results = []
        for column in range(_HALVES):
            here = slice(_HALVES * column, _HALVES * (column + 1))
            before = [_element(pair, at) for pair in list(sums.registers.flat)[here] for at in range(2)]
            values = _multiply(left, right[column::_HALVES], before)
            results += [_floats(values[at : at + 2]) for at in (0, 2)]
        return _fragmented(results, sums.shape)

    return inline_mosaic(body, sums, a, b_transposed, out=jax.ShapeDtypeStruct(sums.shape, jnp.float32))


def transposed_blocks(x: jax.Array) -> jax.Array:
    """Transposes each block of a bfloat16 tile [64, 16]."""
    if interpreted():
        return x.reshape(-1, BLOCK, BLOCK).mT.reshape(x.shape)

    def body(x: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        words = [_assembly(i32, [_word(pair)], code, "=r,r") for pair in x.registers.flat]
        # The two tiles of 8 by 8 beside the diagonal change places.
        return _fragmented([_pair(words[at]) for at in (0, 2, 1, 3)], x.shape)

    return inline_mosaic(body, x, out=jax.ShapeDtypeStruct(x.shape, jnp.bfloat16))


def load_along_block_rows(ref: Any) -> jax.Array:
    """Loads [4, 16] float32 from shared memory, one element per row of each warp's block, repeated over its columns."""
    if interpreted():
        return jnp.broadcast_to(ref[...].reshape(-1, 1), BLOCKS)

    def load(ref: Any, warp: Any, lane: Any) -> list[Any]:
        row = arith.shrui(lane, _i32(2))
        rows = [_load(ref, 1, warp, arith.addi(row, _i32(8 * half))) for half in range(_HALVES)]
        return [vector.shuffle(each, each, [0, 0]) for each in rows] * _HALVES

    return _load_blocks(ref, load)


def load_along_block_columns(ref: Any) -> jax.Array:
    """Loads [4, 16] float32 from shared memory, one element per column of each warp's block, repeated over its rows."""
    if interpreted():
        return jnp.repeat(ref[...], BLOCK, axis=0)

    def load(ref: Any, warp: Any, lane: Any) -> list[Any]:
        column = arith.shli(arith.andi(lane, _i32(3)), _i32(1))
        return [_load(ref, 2, warp, arith.addi(column, _i32(8 * half))) for half in range(_HALVES) for _ in range(2)]

    return _load_blocks(ref, load)


def load_per_block(ref: Any) -> jax.Array:
    """Loads [4, 1] float32 from shared memory, one element per warp, repeated over its block."""
    if interpreted():
        return jnp.broadcast_to(jnp.repeat(ref[...], BLOCK, axis=0), BLOCKS)

    def load(ref: Any, warp: Any, _: Any) -> list[Any]:
        each = _load(ref, 1, warp, _i32(0))
        return [vector.shuffle(each, each, [0, 0])] * _HALVES**2

    return _load_blocks(ref, load)


@dataclass(frozen=True)
class OfWarp:
    """A row or column of blocks that differs by warp: its number less `behind`, modulo 4, and `first` more."""

    behind: int = 0
    first: int = 0

    def of(self, warp: int) -> int:
        return self.first + (warp - self.behind) % WARPS


def _of_warp(place: int | OfWarp, warp: int) -> int:
    return place.of(warp) if isinstance(place, OfWarp) else place


class DealtSquares:
    """Float32 squares that a warpgroup has in registers, dealt to its warps through shared memory.

    Of n squares [64, 64] the first goes to the first 4 / n warps, and so on. `ref` is scratch, bfloat16 [4, 64, 128]: no
    warp may write to it before all of them have loaded their blocks. Threads hold a block as they held it in the square,
    in whichever warp. So a thread stores and loads 16 bytes beside its neighbours'.
    """

    def __init__(self, squares: list[jax.Array], ref: Any):
        self.squares, self.ref = squares, ref
        if not interpreted():
            self._store()

    @property
    def _sharing(self) -> int:
        return WARPS // len(self.squares)

    def _store(self) -> None:
        def body(_: Any, ref: Any, *squares: Any) -> None:
            warp, lane = _warp_and_lane()
            own = arith.addi(_address(ref), _dealt(warp, lane))
            for number, square in enumerate(squares):
                pairs = list(square.registers.flat)
                for column in range(WARPS):
                    for half in range(_HALVES):
                        at = 2 * (column * _HALVES + half)
                        values = vector.shuffle(pairs[at], pairs[at + 1], [0, 1, 2, 3])
                        to = _pointer(own, number * WARPS * _ROW_OF_BLOCKS + column * _BLOCK_BYTES + half * _HALF_BYTES)
                        llvm.store(values, to, alignment=_VECTOR_BYTES)
            mosaic_utils.warpgroup_barrier()

        types = (plgpu.RefType(_TRANSFORMS), *[WGMMA for _ in self.squares])
        inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=None)
        inline(body)(self.ref, *self.squares)

    def block(self, row: int, column: int) -> jax.Array:
        """A block of each warp's square, [64, 16] float32."""
        if interpreted():
            rows, columns = (slice(first * BLOCK, (first + 1) * BLOCK) for first in (row, column))
            return jnp.concatenate([self.squares[warp // self._sharing][rows, columns] for warp in range(WARPS)])

        def body(_: Any, ref: Any) -> Any:
            warp, lane = _warp_and_lane()
            number = arith.divui(warp, _i32(self._sharing))
            own = arith.addi(_address(ref), _dealt(arith.muli(number, _i32(WARPS)), lane))
            four = ir.VectorType.get((4,), ir.F32Type.get())
            loaded = [
                llvm.load(
                    four,
                    _pointer(own, row * _ROW_OF_BLOCKS + column * _BLOCK_BYTES + half * _HALF_BYTES),
                    alignment=_VECTOR_BYTES,
                )
                for half in range(_HALVES)
            ]
            return _fragmented([vector.shuffle(x, x, [at, at + 1]) for x in loaded for at in (0, 2)], BLOCKS)

        returned = plgpu.ShapeDtypeStruct(BLOCKS, jnp.dtype(jnp.float32), layout=WGMMA)
        inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TRANSFORMS),), return_type=returned)
        return inline(body)(self.ref)


def _dealt(row: Any, lane: Any) -> Any:
    """The bytes before a thread's part of a row of blocks."""
    return arith.addi(arith.muli(row, _i32(_ROW_OF_BLOCKS)), arith.muli(lane, _i32(_VECTOR_BYTES)))


def load_transposed_block(ref: Any, row: int | OfWarp, column: int | OfWarp, zero: Any = 0) -> jax.Array:
    """Loads the block in this place, by blocks, of bfloat16 tiles, transposed: [64, 16].

    Of n tiles, `ref` [n, rows, columns], the first is that of the first 4 / n warps, and so on. A `zero` that the compiler
    cannot fold keeps what a thread computes for its address inside of a loop.
    """
    if interpreted():
        sharing = WARPS // ref.shape[0]
        blocks = [ref[warp // sharing, *_block_of_warp(row, column, warp)].T for warp in range(WARPS)]
        return jnp.concatenate(blocks)

    def body(_: Any, ref: Any, zero: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        loaded = llvm.inline_asm(
            llvm.StructType.get_literal([i32] * 4),
            [_row_address(ref, row, column, zero)],
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            has_side_effects=True,
        )
        # The two tiles of 8 by 8 beside the diagonal change places.
        return _fragmented([_pair(llvm.extractvalue(i32, loaded, [at])) for at in (0, 2, 1, 3)], BLOCKS)

    returned = plgpu.ShapeDtypeStruct(BLOCKS, jnp.dtype(jnp.bfloat16), layout=WGMMA)
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TRANSFORMS), SCALAR), return_type=returned)
    return inline(body)(ref, jnp.int32(zero))


def store_block(ref: Any, row: int | OfWarp, column: int | OfWarp, x: jax.Array, zero: Any = 0) -> None:
    """Stores each warp's block to this place, by blocks, of its bfloat16 tile, as `load_transposed_block` has them.

    Warps that share a tile and a place store the same.
    """
    if interpreted():
        sharing = WARPS // ref.shape[0]
        for warp in range(WARPS):
            ref[warp // sharing, *_block_of_warp(row, column, warp)] = x[warp * BLOCK : (warp + 1) * BLOCK]
        return

    def body(_: Any, ref: Any, x: Any, zero: Any) -> None:
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [_row_address(ref, row, column, zero), *(_word(pair) for pair in x.registers.flat)],
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};",
            "r,r,r,r,r,~{memory}",
            has_side_effects=True,
        )

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(_TRANSFORMS), WGMMA, SCALAR), return_type=None)
    inline(body)(ref, x, jnp.int32(zero))


def _block_of_warp(row: int | OfWarp, column: int | OfWarp, warp: int) -> tuple[Any, Any]:
    rows, columns = (pl.ds(_of_warp(place, warp) * BLOCK, BLOCK) for place in (row, column))
    return rows, columns


def _row_address(ref: Any, row: int | OfWarp, column: int | OfWarp, zero: Any) -> Any:
    """Where the row of 8 elements is that a thread names for the four tiles of 8 by 8 of a block, in a block's order."""
    count, row_tiles, column_tiles, rows, columns = ir.MemRefType(ref.type).shape
    warp, lane = _warp_and_lane(zero.registers.item())
    bytes_of_tile = rows * _ROW_BYTES
    own_row, row_half, column_half = (
        arith.andi(arith.shrui(lane, _i32(shift)), _i32(mask)) for shift, mask in ((0, 7), (3, 1), (4, 1))
    )
    row_tile = arith.addi(arith.muli(arith.divui(warp, _i32(WARPS // count)), _i32(row_tiles)), row_half)
    if isinstance(row, OfWarp):
        row_tile = arith.addi(row_tile, arith.muli(_less(warp, row.behind), _i32(_HALVES)))
        row = row.first
    vector_number = column_half
    if isinstance(column, OfWarp):  # A row of four blocks lies within a tile.
        vector_number = arith.addi(vector_number, arith.muli(_less(warp, column.behind), _i32(_HALVES)))
        column = column.first
    column_tile, first = divmod(column * BLOCK, columns)
    vector_number = arith.xori(arith.addi(vector_number, _i32(first // 8)), own_row)
    offsets = (
        arith.muli(arith.muli(row_tile, _i32(column_tiles)), _i32(bytes_of_tile)),
        arith.muli(own_row, _i32(_ROW_BYTES)),
        arith.muli(vector_number, _i32(_VECTOR_BYTES)),
        _i32((row * _HALVES * column_tiles + column_tile) * bytes_of_tile),
    )
    return functools.reduce(arith.addi, offsets, _address(ref))


def _less(warp: Any, behind: int) -> Any:
    """The number of a warp less `behind`, modulo 4."""
    return arith.andi(arith.addi(warp, _i32(-behind % WARPS)), _i32(WARPS - 1))


def _i32(value: int) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _warp_and_lane(zero: Any = None) -> tuple[Any, Any]:
    """A thread's warp in its warpgroup, and its lane."""
    thread = arith.index_cast(ir.IntegerType.get_signless(32), gpu.thread_id(gpu.Dimension.x))
    thread = thread if zero is None else arith.addi(thread, zero)
    return arith.andi(arith.shrui(thread, _i32(5)), _i32(WARPS - 1)), arith.andi(thread, _i32(31))


def _address(ref: Any) -> Any:
    """Of shared memory, as the 32 bits that its instructions take."""
    pointer = mosaic_utils.memref_ptr(ref)
    return llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer)


def _pointer(address: Any, offset: int) -> Any:
    return llvm.inttoptr(llvm.PointerType.get(3), arith.addi(address, _i32(offset)))


def _load(ref: Any, count: int, *place: Any) -> Any:
    index = ir.IndexType.get()
    return vector.load(
        ir.VectorType.get((count,), ir.F32Type.get()), ref, [arith.index_cast(index, at) for at in place]
    )


def _load_blocks(ref: Any, load: Callable[[Any, Any, Any], list[Any]]) -> jax.Array:
    """A tile of blocks from `load(ref, warp, lane)`: its registers by column half, then by row half."""

    def body(ref: Any) -> Any:
        return _fragmented(load(ref, *_warp_and_lane()), BLOCKS)

    return inline_mosaic(body, ref, out=jax.ShapeDtypeStruct(BLOCKS, jnp.float32))


def _multiply(left: list[Any], right: list[Any], sums: list[Any]) -> list[Any]:
    """A thread's four sums of a product of 16 x 16 with 16 x 8, added to others, from its pairs of both operands."""
    f32 = ir.F32Type.get()
    after = _assembly(
        llvm.StructType.get_literal([f32] * 4),
        [*left, *right, *sums],
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
        ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
    )
    return [llvm.extractvalue(f32, after, [at]) for at in range(4)]


def _assembly(out: Any, operands: list[Any], text: str, constraints: str) -> Any:
    return llvm.inline_asm(out, operands, text, constraints, has_side_effects=False)


def _element(x: Any, at: int) -> Any:
    return vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([at]))


def _word(pair: Any) -> Any:
    """Two bfloat16 numbers as 32 bits."""
    return _element(vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), pair), 0)


def _floats(values: list[Any]) -> Any:
    """Two float32 numbers of a register of a layout."""
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), values)


def _pair(word: Any) -> Any:
    one = vector.from_elements(ir.VectorType.get((1,), word.type), [word])
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), one)


def _fragmented(pairs: list[Any], shape: tuple[int, ...]) -> Any:
    layout = mosaic.WGMMA_LAYOUT
    registers = np.array(pairs, dtype=object).reshape(layout.registers_shape(shape))
    return mosaic.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
