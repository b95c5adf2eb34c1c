"""What the threads of a block of `decode_layers` do together: meetings of warpgroups, sums over lanes, and an upcast.

Each function has a second form in plain JAX, which the interpreter runs: it knows no inline code.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from tilewright.ops.attention.decode_layers.pallas_gpu.plan import COLUMNS, CONSUMERS, WARPS
from tilewright.pallas.gpu.elementwise import LANES, THREADS, element, inline_float32, of_registers
from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.registers import few_rows

ROWS = 16
"""Rows of a step of a product: a thread has 8 adjacent columns of one row, a warp has 4 rows."""
TILE = few_rows(ROWS, 8, 8)
"""The layout of [ROWS, COLUMNS]."""
PER_ROW, PER_COLUMN = TILE.reduce(1), TILE.reduce(0)
_OVER_ROWS = (8, 16)  # Distances of the lanes that have the same columns of a warp's other rows.
_ROW_LANES = 8  # Lanes of a row.
_CONSUMERS_ID = 9  # A named barrier; Mosaic takes 0 for the block, and 1 to 5 for five warpgroups.


def strided(size: int) -> Any:
    """The layout of a vector over a warpgroup: each thread has up to four adjacent elements."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=min(4, size // THREADS))


def along(vector: jax.Array, axis: int = 0) -> jax.Array:
    """A vector along one axis of [ROWS, COLUMNS]."""
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, (ROWS, COLUMNS), [axis]), TILE)


# Mosaic's operations, for the bodies of inline code.


def i32() -> Any:
    return ir.IntegerType.get_signless(32)


def constant(value: int) -> Any:
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), value))


def _thread() -> Any:
    return arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))


def own_thread() -> Any:
    """The number of a thread within its warpgroup."""
    return arith.andi(_thread(), constant(THREADS - 1))


def lane_and_warp() -> tuple[Any, Any]:
    """The lane, and the warp within its warpgroup."""
    thread = _thread()
    lane = arith.andi(thread, constant(LANES - 1))
    return lane, arith.andi(arith.shrui(thread, constant(5)), constant(WARPS - 1))


def index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def is_equal(value: Any, number: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.eq, value, constant(number))


def below(value: Any, number: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ult, value, constant(number))


def elements(array: Any) -> list[Any]:
    """Everything that a thread has of an array."""
    return [element(one, n) for one in array.registers.flat for n in range(ir.VectorType(one.type).shape[0])]


def inline_code(text: str, constraints: str = "", operands: tuple[Any, ...] = ()) -> Any:
    """Inline code with a result that loads and stores do not pass."""
    constraints = ",".join(filter(None, ["=r", constraints, "~{memory}"]))
    return llvm.inline_asm(i32(), list(operands), text, constraints, has_side_effects=True)


def load_four_by_four(ref: Any) -> list[Any]:
    """All of a vector in shared memory, for each thread."""
    four = ir.VectorType.get((4,), ir.F32Type.get())
    out = []
    for n in range(0, ir.MemRefType(ref.type).shape[0], 4):
        part = vector.load(four, ref, [arith.constant(ir.IndexType.get(), n)], alignment=16)
        out += [element(part, k) for k in range(4)]
    return out


def _from_lane(value: Any, distance: int) -> Any:
    exchange = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
    return llvm.inline_asm(ir.F32Type.get(), [value], exchange, "=f,f", has_side_effects=True)


def _over_lanes(value: Any, distances: tuple[int, ...], combine: Callable[..., Any]) -> Any:
    """The sum or maximum over lanes; every lane has the same bits."""
    return functools.reduce(lambda total, distance: combine(total, _from_lane(total, distance)), distances, value)


def _store_eight(sums: list[Any], ref: Any, *place: Any) -> None:
    """Stores 8 adjacent numbers, by vectors of four."""
    four = ir.VectorType.get((4,), ir.F32Type.get())
    *outer, first = place
    for n in range(0, 8, 4):
        at = [*map(index, outer), index(arith.addi(first, constant(n)))]
        vector.store(vector.from_elements(four, sums[n : n + 4]), ref, at, alignment=16)


# What kernel bodies call.


def consumers_meet(barrier: Any) -> None:
    """All consumer warpgroups of a thread block wait for each other. `barrier` is for the interpreter."""
    if interpreted():
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    def body(_: Any) -> None:
        inline_code(f"bar.sync {_CONSUMERS_ID}, {CONSUMERS * THREADS}; mov.u32 $0, 0;")

    inline: Any = plgpu.inline_mgpu(arg_types=(), return_type=None)
    inline(body)()


def release(empty: Any) -> None:
    """Tells the producer that the calling warpgroup has read a stage.

    The interpreter asks for a fence between plain reads and a copy to the same place. On the GPU there is none, as in
    CUTLASS's pipelines: a thread arrives when it has the values in registers, and the copy is issued behind that.
    """
    if interpreted():
        plgpu.commit_smem()
    plgpu.barrier_arrive(empty)


def _over_warp_rows(value: jax.Array) -> jax.Array:
    return jnp.sum(value.reshape(WARPS, ROWS // WARPS, COLUMNS), axis=1)


def store_warp_sums(ref: Any, value: jax.Array) -> None:
    """Stores the sums of [ROWS, COLUMNS] over the rows of each warp to [WARPS, COLUMNS] in shared memory."""
    if interpreted():
        ref[...] = _over_warp_rows(value)
        return

    def body(_: Any, ref: Any, value: Any) -> None:
        lane, warp = lane_and_warp()
        sums = [_over_lanes(each, _OVER_ROWS, arith.addf) for each in elements(value)]
        with mosaic.when(below(lane, _ROW_LANES)):
            _store_eight(sums, ref, warp, arith.shli(lane, constant(3)))

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE), return_type=None)
    inline(body)(ref, value)


def store_four_warp_sums(ref: Any, values: list[jax.Array]) -> None:
    """`store_warp_sums` of four arrays, to [4, WARPS, COLUMNS].

    A lane sends half of its arrays and adds what it receives to the other half, twice: it ends with the sums of one array,
    after a quarter of the shuffles that four separate sums take.
    """
    if interpreted():
        for n, value in enumerate(values):
            ref[n] = _over_warp_rows(value)
        return

    def body(_: Any, ref: Any, *values: Any) -> None:
        lane, warp = lane_and_warp()
        parts, number = [elements(value) for value in values], constant(0)
        for distance in reversed(_OVER_ROWS):
            upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, constant(distance)), constant(0))

            def exchanged(a: Any, b: Any, upper: Any = upper, distance: int = distance) -> Any:
                send, keep = arith.select(upper, a, b), arith.select(upper, b, a)
                return arith.addf(keep, _from_lane(send, distance))

            half = len(parts) // 2
            parts = [
                [exchanged(a, b) for a, b in zip(low, high, strict=True)]
                for low, high in zip(parts[:half], parts[half:], strict=True)
            ]
            number = arith.addi(arith.shli(number, constant(1)), arith.select(upper, constant(1), constant(0)))
        (sums,) = parts
        first = arith.shli(arith.andi(lane, constant(_ROW_LANES - 1)), constant(3))
        _store_eight(sums, ref, number, warp, first)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[TILE] * 4), return_type=None)
    inline(body)(ref, *values)


def store_warp_reduced(ref: Any, value: jax.Array, *, over: Literal["sum", "max"] = "sum", layout: Any = None) -> None:
    """Stores the sum or the maximum of what each warp has to [WARPS] in shared memory.

    `value` has an element per row, or it is a vector in this layout.
    """
    if interpreted():
        parts = value.reshape(WARPS, -1)
        ref[...] = jnp.sum(parts, axis=1) if over == "sum" else jnp.max(parts, axis=1)
        return
    distances = _OVER_ROWS if layout is None else (1, 2, 4, *_OVER_ROWS)
    combine = arith.addf if over == "sum" else arith.maximumf

    def body(_: Any, ref: Any, value: Any) -> None:
        lane, warp = lane_and_warp()
        own = _over_lanes(functools.reduce(combine, elements(value)), distances, combine)
        with mosaic.when(is_equal(lane, 0)):
            memref.store(own, ref, [index(warp)])

    types = (plgpu.RefType(), PER_ROW if layout is None else layout)
    inline: Any = plgpu.inline_mgpu(arg_types=types, return_type=None)
    inline(body)(ref, value)


def largest_of(ref: Any) -> jax.Array:
    """The maximum of a vector in shared memory, for each row."""
    if interpreted():
        return jnp.full((ROWS,), jnp.max(ref[...]), jnp.float32)
    returned = plgpu.ShapeDtypeStruct((ROWS,), jnp.dtype(jnp.float32), layout=PER_ROW)

    def body(_: Any, ref: Any) -> Any:
        largest = functools.reduce(arith.maximumf, load_four_by_four(ref))
        return mosaic.FragmentedArray.splat(largest, (ROWS,), PER_ROW.to_mgpu())

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=returned)
    return inline(body)(ref)


def upcast(x: jax.Array) -> jax.Array:
    """bfloat16 [ROWS, COLUMNS] as float32: one operation for each element, where `astype` has three for two of them."""
    if interpreted():
        return x.astype(jnp.float32)

    def each(register: Any) -> Any:
        words, wide = vector.bitcast(ir.VectorType.get((4,), i32()), register), []
        for n in range(4):
            word = element(words, n)
            for bits in (arith.shli(word, constant(16)), arith.andi(word, constant(-65536))):
                wide.append(arith.bitcast(ir.F32Type.get(), bits))
        return vector.from_elements(ir.VectorType.get((8,), ir.F32Type.get()), wide)

    return inline_float32(lambda _, x: of_registers(each, x), x, TILE)
