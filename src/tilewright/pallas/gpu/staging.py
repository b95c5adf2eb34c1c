"""Stores of tiles to global memory through buffers in shared memory, while the next part is computed.

staging = Staging(y=y_smem.at[consumer])
for part in range(parts):
    staging.store(tile, y_ref.at[rows, columns], "y")
staging.end()

And stores of parts of tiles: of rows, of a transposed tile, and of zeros over rows in shared memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from tilewright.pallas.gpu.kernel import interpreted, tile
from tilewright.pallas.gpu.registers import WGMMA, column_indices, few_rows, row_indices, store_masked

BUFFERS = 2
WIDTH = 64
"""Columns of a part of a tile that is stored at a time."""

# `clear_rows`: a swizzled tile has blocks of eight rows, and a thread stores eight bfloat16 numbers, 16 bytes.
_EIGHT = 8
_SWIZZLED = tuple(tile(_EIGHT, WIDTH, dtype=jnp.bfloat16).transforms)
_CLEARED = few_rows(2 * _EIGHT, WIDTH // _EIGHT, _EIGHT)


def stored_columns(width: int, columns: int) -> range:
    """The first columns of the parts of a tile of `width` columns that are stored to an array of `columns`.

    Parts past the end of the array are left out where it has one tile of columns. They must be: the copy to an array of one
    part has no index for it, and would write them over the first.
    """
    return range(0, min(width, -(-columns // WIDTH) * WIDTH), WIDTH)


def staging_scratch(consumers: int, rows: int, **dtypes: Any) -> dict[str, Any]:
    """Scratch for the stores of each consumer warpgroup: `<name>_smem` [consumers, BUFFERS, rows, WIDTH] for each dtype.

    It is None where there is no dtype, and where a name before it has the same: the stores of both take turns there.
    """
    scratch, have = {}, set()
    for name, dtype in dtypes.items():
        own = dtype is not None and jnp.dtype(dtype) not in have
        scratch[f"{name}_smem"] = tile(consumers, BUFFERS, rows, WIDTH, dtype=dtype) if own else None
        have |= {jnp.dtype(dtype)} if own else set()
    return scratch


class Staging:
    """The stores of one tile. Each copies from a buffer that the copy before the previous one has read.

    Tiles of different dtypes have buffers of their own, by name. Two names may have the same buffers.
    """

    def __init__(self, **buffers: Any):
        self._buffers, self._count = buffers, 0

    def store(self, value: jax.Array, destination: Any, name: str) -> None:
        """Stores a part [rows, WIDTH]. What lies past the end of the array is not written."""
        staged = self._buffers[name].at[self._count % BUFFERS]
        self._count += 1
        plgpu.wait_smem_to_gmem(BUFFERS - 1, wait_read_only=True)
        staged[...] = value.astype(staged.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, destination)

    def end(self) -> None:
        """After the last part of a tile: the next tile begins with the first buffer."""
        if self._count % BUFFERS:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def store_rows(value: jax.Array, ref: Any, row: Any, column: Any, first: Any, end: Any) -> None:
    """Stores the rows from `first` to before `end` of a tile at `row` and `column` of an array in global memory, no others.

    Rows that belong to another thread block stay as they are, which a copy of the whole tile could not promise. Columns
    past the end of the array are not written either; their number is even.
    """
    (rows, columns), value = value.shape, value.astype(ref.dtype)
    if not interpreted():
        own_row = row_indices((rows, columns))
        mask = (own_row >= first) & (own_row < end) & (column_indices((rows, columns), column) < ref.shape[-1])
        store_masked(ref.at[pl.ds(row, rows), pl.ds(column, columns)], value, mask)
        return
    done, power, count = first, 1 << (rows.bit_length() - 1), end - first
    while power:

        def store_part(done: Any = done, power: int = power) -> None:
            part = lax.dynamic_slice(value, (done, jnp.int32(0)), (power, columns))
            ref[pl.ds(row + done, power), pl.ds(column, columns)] = part

        pl.when((count & power) != 0)(store_part)
        done, power = done + (count & power), power // 2


def store_transposed(value: jax.Array, ref: Any, row: Any, column: Any, first: Any, end: Any) -> None:
    """Stores a tile [columns, rows] of y^T at `row` and `column` of y: its rows from `first` to before `end`, no others,
    and no columns past the end of y. Each thread stores by itself: y is small beside the weights.
    """
    value = value.astype(ref.dtype)
    if interpreted():
        store_rows(value.T, ref, row, column, first, end)
        return
    columns, rows = value.shape
    of_row = column_indices((columns, rows), 0)
    inside = (of_row >= first) & (of_row < end) & (row_indices((columns, rows)) + column < ref.shape[-1])

    def body(_: Any, ref: Any, value: Any, mask: Any) -> None:
        places = value.layout.thread_idxs(value.shape)
        for (place, of_row), register, keep in zip(places, value.registers.flat, mask.registers.flat, strict=True):
            for each in range(2):
                position = ir.DenseI64ArrayAttr.get([each])
                element, kept = (
                    vector.extract(x, dynamic_position=[], static_position=position) for x in (register, keep)
                )
                with mosaic.when(kept):
                    at = arith.addi(of_row, arith.constant(ir.IndexType.get(), each))
                    memref.store(element, ref, [at, place])

    types = (plgpu.RefType(), WGMMA, WGMMA)
    target = ref.at[pl.ds(row, rows), pl.ds(column, columns)]
    plgpu.inline_mgpu(arg_types=types, return_type=None)(body)(target, value, inside)


def clear_rows(tiles: list[Any], first: Any, end: Any) -> list[Any]:
    """bfloat16 tiles in shared memory, [rows, columns] each, with zeros for the rows before `first` and from `end` on, as
    operands of a product.

    The zeros are stored where there are such rows, 16 bytes of a row at a time. Swizzling moves these within the 128 bytes
    of a row, so whole rows of zeros need none of it. Warpgroups may do that to one tile without waiting for each other,
    since they store the same. The interpreter would call that a race, and takes values instead.
    """
    rows = tiles[0].shape[0]
    if interpreted():
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        return [jnp.where((row >= first) & (row < end), each[...], 0) for each in tiles]

    def body(_: Any, *arguments: Any) -> None:
        *refs, mask = arguments
        index, bf16 = ir.IndexType.get(), ir.BF16Type.get()
        several = ir.VectorType.get((_EIGHT,), bf16)
        zeros = arith.constant(several, ir.DenseElementsAttr.get_splat(several, ir.FloatAttr.get(bf16, 0.0)))
        eight, zeroth = arith.constant(index, _EIGHT), ir.DenseI64ArrayAttr.get([0])
        for (row, column), holds in zip(mask.layout.thread_idxs(mask.shape), mask.registers.flat, strict=True):
            with mosaic.when(vector.extract(holds, dynamic_position=[], static_position=zeroth)):
                for ref in refs:
                    for part in range(ir.MemRefType(ref.type).shape[1]):
                        place = [arith.divui(row, eight), arith.constant(index, part), arith.remui(row, eight), column]
                        vector.store(zeros, ref, place, alignment=2 * _EIGHT)

    def store() -> None:
        row = plgpu.broadcasted_iota(jnp.int32, (rows, WIDTH), 0, layout=_CLEARED)
        types = (*(plgpu.RefType(_SWIZZLED) for _ in tiles), _CLEARED)
        plgpu.inline_mgpu(arg_types=types, return_type=None)(body)(*tiles, (row < first) | (row >= end))
        plgpu.commit_smem()

    pl.when((first > 0) | (end < rows))(store)
    return tiles
