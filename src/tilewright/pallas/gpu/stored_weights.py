"""Weights of 8 or 4 bits that a thread reads from shared memory and converts to bfloat16 operands of the tensor cores.

Order of the contracted axis: a thread reads four adjacent bytes of a column, and the tensor cores expect two pairs of
adjacent values at places 8 apart. The order does not matter as long as both operands have the same, so x is rearranged
instead (`arranged`): the pairs are the bytes 0 and 2, and 1 and 3, which need one shift for both. For 4 bits, whose bytes
hold two values, the even places of 128 come before the odd ones.

Instructions per weight and thread: 1.1 for 4 bits, 1.25 for int8 and 2.25 for float8.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.registers import WGMMA
from tilewright.pallas.gpu.warp_mma import CHUNK

DEPTH = 128
"""Values of the contracted axis that are converted together."""

_INTEGER_UNIT = 64  # Integers are converted to so many times less.
_POWER_127, _POWER_123, _MINUS_2, _MINUS_EIGHTH = 0x7F00, 0x7D00, 0xC000, 0xBE00  # As bfloat16.


def unit(stored: str) -> float:
    """What the sums of converted weights are multiplied with."""
    return float(_INTEGER_UNIT) if stored.startswith("int") else 1.0


def arranged(x: jax.Array, per_byte: int, in_chunks: bool) -> jax.Array:
    """x [M, K] in the order in which the products contract it. With `in_chunks` it is [K / 32, M, 32], for warp_mma.py."""
    m, k = x.shape
    groups = DEPTH // (32 * per_byte)  # Of 32 bytes, per 128 values.
    # [M, 128 values, 32 bytes, 16 bytes, four bytes, value of pair, pair, value of byte]
    x = x.reshape(m, k // DEPTH, groups, 2, 4, 2, 2, per_byte)
    if in_chunks:  # One transposition: XLA would take ten times as long for two.
        return x.transpose(1, 7, 2, 0, 4, 3, 6, 5).reshape(k // CHUNK, m, CHUNK)
    return x.transpose(0, 1, 7, 2, 3, 6, 4, 5).reshape(m, k)


# Four adjacent bytes of a column in a thread, in 16 bytes of 8 columns. Products have two values where this has four.
_STORED = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)


def loaded_bytes(ref: Any) -> jax.Array:
    """The bytes of the weights of 64 columns in shared memory, [64, bytes] int8."""
    return ref[...] if interpreted() else plgpu.load(ref, layout=_STORED, optimized=False)


def converted(loaded: jax.Array, stored: str, part: int) -> jax.Array:
    """The `part`-th 128 values of each of 64 columns, bfloat16 [64, 128] in the products' layout, from all bytes of a step.

    Integers are divided by _INTEGER_UNIT. For 4 bits: the low halves of the bytes, then the high ones. The order of the
    bytes is that of `arranged`.
    """
    conversions = _CONVERSIONS[stored]
    size = DEPTH // len(conversions)
    if interpreted():
        own = loaded[:, part * size : (part + 1) * size]
        return jnp.concatenate([_reordered(values) for values in _plain_values(own, stored)], axis=1)
    shape = plgpu.ShapeDtypeStruct((loaded.shape[0], DEPTH), jnp.dtype(jnp.bfloat16), layout=WGMMA)

    def body(_: Any, given: Any) -> Any:
        registers = np.empty(mosaic.WGMMA_LAYOUT.registers_shape(shape.shape), dtype=object)
        groups = size // 16  # Of 16 bytes.
        own = given.registers[:, part * groups : (part + 1) * groups]
        for (row, group, *place), register in np.ndenumerate(own):
            word = _as_int32(register)
            for number, pairs in enumerate(conversions):
                for pair, bits in enumerate(pairs(word)):
                    registers[(row, 2 * (number * groups + group) + pair, *place)] = _as_bfloat16(bits)
        return mosaic.FragmentedArray(_registers=registers, _layout=mosaic.WGMMA_LAYOUT, _is_signed=None)

    return plgpu.inline_mgpu(arg_types=(_STORED,), return_type=shape)(body)(loaded)


def _plain_values(stored_bytes: jax.Array, stored: str) -> list[jax.Array]:
    if stored == "int4":
        values = [(stored_bytes << 4) >> 4, stored_bytes >> 4]
    elif stored == "int8":
        values = [stored_bytes]
    else:
        return [lax.bitcast_convert_type(stored_bytes, jnp.dtype(stored)).astype(jnp.bfloat16)]
    return [each.astype(jnp.bfloat16) / _INTEGER_UNIT for each in values]


def _reordered(values: jax.Array) -> jax.Array:
    rows, columns = values.shape
    return values.reshape(rows, columns // 16, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(rows, columns)


# Each of these takes four bytes in 32 bits, and returns two pairs of bfloat16 in 32 bits each: of the bytes 0 and 2, and of
# the bytes 1 and 3. So a pair is where bfloat16 has it already, or 8 bits beside that.


def _integer_pairs(word: Any, mask: int, flipped: int, power: int, offset: int) -> list[Any]:
    """Integers of up to 8 bits in the last places of bfloat16 are subnormal numbers, or the first normal ones: i 2^-133.

    With the sign bit flipped they are v + 2^(bits - 1) without a sign, and one multiply-add makes v / 64 of that, exactly.
    """
    text = f"""{{
        .reg .b32 moved, placed, power, offset;
        shr.b32 moved, $1, SHIFT;
        lop3.b32 placed, moved, {_twice(mask)}, {_twice(flipped)}, 0x6a;
        mov.b32 power, {_twice(power)};
        mov.b32 offset, {_twice(offset)};
        fma.rn.bf16x2 $0, placed, power, offset;
    }}"""
    return [_assembly(text.replace("SHIFT", str(shift)), word) for shift in (0, 8)]


def _float8_pairs(word: Any, stored: str) -> list[Any]:
    """The byte's exponent in bfloat16's place has another bias: a power of two sets it right, for subnormals, too."""
    shift, mask, power = (4, 0x07F0, 0x7B80) if stored == "float8_e4m3fn" else (3, 0x0FE0, 0x7780)
    text = f"""{{
        .reg .b32 moved, magnitude, sign, signed, power;
        MOVE
        and.b32 magnitude, moved, {_twice(mask)};
        lop3.b32 signed, sign, 0x80008000, magnitude, 0xea;
        mov.b32 power, {_twice(power)};
        mul.rn.bf16x2 $0, signed, power;
    }}"""
    moves = (
        f"shl.b32 moved, $1, {8 - shift}; shl.b32 sign, $1, 8;",
        f"shr.b32 moved, $1, {shift}; mov.b32 sign, $1;",
    )
    return [_assembly(text.replace("MOVE", move), word) for move in moves]


def _twice(half: int) -> str:
    """16 bits in both halves of a word."""
    return f"0x{half << 16 | half:08x}"


_integers = functools.partial(functools.partial, _integer_pairs)
_CONVERSIONS = {
    "int8": (_integers(mask=0xFF, flipped=0x80, power=_POWER_127, offset=_MINUS_2),),
    "int4": (
        _integers(mask=0x0F, flipped=0x08, power=_POWER_127, offset=_MINUS_EIGHTH),
        _integers(mask=0xF0, flipped=0x80, power=_POWER_123, offset=_MINUS_EIGHTH),
    ),
    **{stored: (functools.partial(_float8_pairs, stored=stored),) for stored in ("float8_e4m3fn", "float8_e5m2")},
}
"""For each part of a byte, in turn: from four bytes to pairs of bfloat16."""


def _assembly(text: str, word: Any) -> Any:
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], text, "=r,r")


def _as_int32(register: Any) -> Any:
    words = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), register)
    return vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def _as_bfloat16(bits: Any) -> Any:
    words = vector.broadcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), bits)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), words)
