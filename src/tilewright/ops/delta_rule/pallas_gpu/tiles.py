"""What the delta rule's Hopper kernels share: sizes, the rows of a chunk's gates, and tiles in registers.

Tiles of values are often transposed, [V, C] for a chunk of C tokens. The state of a warpgroup is [V, K], one value
channel per row: so it can be the left operand of a product from registers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import SM90_TILE as TILE
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.elementwise import element
from tilewright.pallas.gpu.kernel import interpreted, tile
from tilewright.pallas.gpu.registers import (
    BF16X3,
    SCALAR,
    WGMMA,
    ColumnRanges,
    inline_mosaic,
    load_along_columns,
    load_along_rows,
    transposed,
    upcast,
)
from tilewright.pallas.gpu.wgmma import Accumulator, product

CHUNK = 64
SQUARE = (CHUNK, CHUNK)
HI_LO = 2
"""The parts of a bf16x2 split, where an array has an axis for them."""
HI, LO = pl.ds(0, CHUNK), pl.ds(CHUNK, CHUNK)
"""The rows of the parts in a tile [2 C, n] that has one below the other."""


class Row:
    """One gate per head, the rows of a chunk's gates: the two parts of G, beta, the decays exp(G) from the chunk's start
    and beta exp(G_C - G) to its end, and exp(G_C).
    """

    COARSE, FINE, BETA, DECAY_IN, DECAY_OUT, DECAY_ALL = range(6)
    COUNT = 6


WARPS = 4
"""Of a warpgroup. Each has 16 neighbouring rows of a square."""

REGISTERS = 504
"""Registers per thread that three warpgroups have together."""

MASKED = -1e30
"""Its exponential is 0."""
_THREADS = 128  # Of a warpgroup.
_VECTOR = 4  # Elements of the widest store.
_LANES_OF_A_COLUMN = (4, 8, 16)  # Distances of the lanes that have a column of a square.

bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)


def float32_buffer(*shape: int) -> Any:
    """Shared memory for what is not multiplied."""
    return plgpu.SMEM(shape, jnp.float32)


def float32_array(*shape: int) -> jax.ShapeDtypeStruct:
    """An output in global memory."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bfloat16_array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def loop(count: Any) -> Callable[[Callable[[Any], None]], None]:
    """Decorates the body of a loop, which takes 0 to count - 1."""
    return lambda body: lax.fori_loop(0, count, lambda n, _: body(n), None)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call as the kernels see it: T in whole chunks, K in whole tiles, V in whole tiles and blocks."""

    b: int
    chunks: int
    h: int
    hv: int
    depth: int
    """K."""
    width: int
    """V."""

    @staticmethod
    def of(call: DeltaRuleCall, block_v: int) -> "Sizes":
        (b, t, h, k), (hv, v) = call.q.shape, call.v.shape[2:]
        block_v = max(block_v, TILE)  # The backward reads whole tiles.
        return Sizes(b, pl.cdiv(t, CHUNK), h, hv, pl.cdiv(k, TILE) * TILE, pl.cdiv(v, block_v) * block_v)

    @property
    def t(self) -> int:
        return self.chunks * CHUNK

    @property
    def group(self) -> int:
        """Value heads per query head."""
        return self.hv // self.h

    @property
    def depth_tiles(self) -> int:
        return self.depth // TILE


@dataclass(frozen=True)
class Plan:
    """What is static about a passage through the chunks."""

    call: DeltaRuleCall
    config: Any

    @property
    def per_channel(self) -> bool:
        return self.call.gate == "channel"

    @functools.cached_property
    def sizes(self) -> Sizes:
        return Sizes.of(self.call, self.config.block_v)


class Block:
    """What a thread block of a passage works on: some value channels of a head."""

    def __init__(self, plan: Any):
        self.plan = plan
        self.b, self.hv, self.block = (lax.axis_index(name) for name in ("batch", "head", "values"))


def in_chunks(x: jax.Array) -> jax.Array:
    """Pads [B, T, ...] with zeros to whole chunks: tokens of zeros leave the state as it is."""
    return padded(x, 1, CHUNK)


def padded_keys(x: jax.Array) -> jax.Array:
    """Pads queries or keys [B, T, H, K] to whole chunks and tiles: channels of zeros add nothing."""
    return padded(in_chunks(x), 3, TILE)


def per_chunk(x: jax.Array) -> jax.Array:
    """Reshapes a per-token, per-head scalar [B, T, HV] to float32 [B, HV, chunks, C]. T is whole chunks."""
    return jnp.moveaxis(x.astype(jnp.float32), 1, 2).reshape(x.shape[0], x.shape[2], -1, CHUNK)


def per_token(x: jax.Array, t: int) -> jax.Array:
    """The inverse of `per_chunk`, for the first t tokens."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1), 1, 2)[:, :t]


def transposed_states(states: jax.Array, block_v: int) -> jax.Array:
    """Transposes states [B, HV, K, V] to [B, HV, V, K], as the kernels hold them, padded to whole blocks and tiles."""
    return padded(padded(jnp.swapaxes(states, 2, 3), 2, block_v), 3, TILE)


def from_transposed(states: jax.Array, call: DeltaRuleCall) -> jax.Array:
    """The inverse of `transposed_states`."""
    return jnp.swapaxes(states, 2, 3)[..., : call.q.shape[3], : call.v.shape[3]]


def add_bf16x3(accumulator: Accumulator, x: tuple[jax.Array, jax.Array], hi_lo: Any, hi: Any) -> None:
    """Adds x y, both split: `hi_lo` is a tile of y's parts, one below the other, `hi` of its first part alone."""
    accumulator.add(jnp.concatenate([x[0], x[0]], axis=1), hi_lo)  # [64, 2 C] [2 C, n]
    accumulator.add(x[1], hi)  # [64, C] [C, n]


def add_bf16x3_of_tiles(
    sum_: Accumulator, x: Any, y: Any, *, left: Callable[[Any], Any] | None = None, right: Any = None
) -> None:
    """Adds x y of two tiles [2 C, n] that have hi above lo. `left` and `right` may transpose each part."""
    for one, another in BF16X3:
        a, b = x.at[(HI, LO)[one]], y.at[(HI, LO)[another]]
        sum_.add(left(a) if left else a, right(b) if right else b)


def bf16x3_product(x: Any, y: Any, **sides: Any) -> jax.Array:
    """x y, as `add_bf16x3_of_tiles` has them."""
    return product(SQUARE, lambda sum_: add_bf16x3_of_tiles(sum_, x, y, **sides))


SplitTile = tuple[jax.Array, jax.Array]
"""A float32 tile in registers as bf16x2."""


def load(ref: Any) -> jax.Array:
    """A tile as float32, in registers."""
    tile = plgpu.load(ref, layout=WGMMA, optimized=False)
    return tile if tile.dtype == jnp.float32 else upcast(tile)


def load_transposed(ref: Any) -> jax.Array:
    return load(transposed(ref))


def store_hi_lo(ref: Any, split: tuple[jax.Array, jax.Array]) -> None:
    """Stores both parts into a tile, one below the other: its first 2 C rows."""
    for rows, value in zip((HI, LO), split, strict=True):
        ref[rows] = value


def positions() -> tuple[jax.Array, jax.Array]:
    """The row i and the column j of each element of a square of tokens."""
    i, j = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in (0, 1))
    return i, j  # [C, C] each


def tokens_of_chunk() -> jax.Array:
    """The number of each row's token, [C]."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=WGMMA.reduce(1))


def decay(gates: Any, inside: jax.Array | None = None) -> jax.Array:
    """exp(G_i - G_j) of a chunk's gates, where `inside` holds, else 0. Above the diagonal it means nothing, and may
    overflow.
    """
    coarse, fine = (
        load_along_rows(gates.at[row], SQUARE) - load_along_columns(gates.at[row], SQUARE)
        for row in (Row.COARSE, Row.FINE)
    )
    exponent = coarse + fine
    return jnp.exp(exponent if inside is None else jnp.where(inside, exponent, MASKED))  # [C, C]


def with_decay(x: jax.Array, gates: Any, zero: Any) -> jax.Array:
    """x_ij exp(G_i - G_j) where i >= j, else 0, of a chunk's gates. `zero` is one that the compiler cannot fold."""
    return ColumnRanges(None, tokens_of_chunk() + 1 + zero).keep(x * decay(gates))  # [C, C]


def zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)


def keep_order() -> None:
    """Keeps the compiler from starting what follows too early: with all tiles in registers at once, it would spill."""
    plgpu.commit_smem()


def store_in_register_order(ref: Any, x: jax.Array) -> None:
    """Stores a float32 square to global memory in the order in which threads hold it, for `load_in_register_order`.

    A thread's 16 bytes lie beside its neighbours'. By rows it would store 8 bytes at a time, a warp into 8 rows.
    """
    if interpreted():
        ref[...] = x
        return

    def store(ref: Any, x: Any) -> None:
        pairs = list(x.registers.flat)  # Of two neighbours each.
        vectors = [vector.shuffle(a, b, list(range(_VECTOR))) for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        layout = mgpu.WGStridedFragLayout(SQUARE, _VECTOR)
        registers = np.array(vectors, dtype=object)
        mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None).store_untiled(ref)

    inline_mosaic(store, ref, x)


def load_in_register_order(ref: Any) -> jax.Array:
    """Loads what `store_in_register_order` stored."""
    if interpreted():
        return plgpu.load(ref, layout=WGMMA, optimized=False)

    def load(ref: Any) -> Any:
        vectors = mgpu.FragmentedArray.load_strided(ref, vec_size=_VECTOR).registers.flat
        pairs = [vector.shuffle(one, one, [at, at + 1]) for one in vectors for at in (0, 2)]
        registers = np.array(pairs, dtype=object).reshape(mgpu.WGMMA_LAYOUT.registers_shape(SQUARE))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return inline_mosaic(load, ref, out=jax.ShapeDtypeStruct(SQUARE, jnp.float32))


def store_column_sums(ref: Any, x: jax.Array) -> None:
    """Stores the sums over each warp's rows of a float32 square to [WARPS, C] in global memory.

    The warps of a warpgroup meet for sums over all rows, in memory that warpgroups share, so those would wait for each
    other as well.
    """
    if interpreted():
        ref[...] = jnp.sum(x.reshape(WARPS, -1, CHUNK), axis=1)
        return

    def body(ref: Any, x: Any) -> None:
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))

        def bits(first: int, count: int) -> Any:
            """Those of the thread's number."""
            shifted = arith.shrui(thread, arith.constant(i32, first))
            return arith.index_cast(index, arith.andi(shifted, arith.constant(i32, 2**count - 1)))

        # A thread has columns 8 n + 2 l and the next one, for l the last two bits of its lane, of two rows.
        sums = []
        for top, bottom in zip(x.registers.flat[::2], x.registers.flat[1::2], strict=True):
            pair = arith.addf(top, bottom)
            elements = [element(pair, n) for n in (0, 1)]
            for distance in _LANES_OF_A_COLUMN:
                exchange = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
                others = [llvm.inline_asm(one.type, [one], exchange, "=f,f") for one in elements]
                elements = [arith.addf(one, other) for one, other in zip(elements, others, strict=True)]
            sums.append(vector.from_elements(pair.type, elements))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, bits(2, 3), arith.constant(index, 0))):
            for n, pair in enumerate(sums):
                column = arith.addi(arith.shli(bits(0, 2), arith.constant(index, 1)), arith.constant(index, 8 * n))
                vector.store(pair, ref, [bits(5, 2), column], alignment=8)

    inline_mosaic(body, ref, x)


def store_last_row(ref: Any, x: jax.Array, zero: Any) -> None:
    """Stores the last row of a float32 square to [C] in global memory. `zero` is one that the compiler cannot fold."""
    if interpreted():
        ref[...] = x[-1]
        return

    def body(_: Any, ref: Any, x: Any, zero: Any) -> None:
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        thread = arith.addi(arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x)), zero.registers.item())

        def constant(value: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        # A thread has columns 8 n + 2 l and the next one, for l the last two bits of its lane. The row is the second of the
        # last four lanes of the last warp.
        within = arith.andi(thread, constant(_THREADS - 1))
        first = arith.shli(arith.andi(thread, constant(3)), constant(1))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.uge, within, constant(_THREADS - 4))):
            for n, pair in enumerate(x.registers.flat[1::2]):
                column = arith.index_cast(index, arith.addi(first, constant(8 * n)))
                vector.store(pair, ref, [column], alignment=8)

    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, SCALAR), return_type=None)
    inline(body)(ref, x, zero)


def query_head(hv: Any, group: int) -> Any:
    """The query head of a value head."""
    return lax.div(hv, jnp.int32(group))


def fence_interpreted_load() -> None:
    """A fence between a plain load of a tile and copies into it, for the interpreter: see `Accumulator.add`."""
    if interpreted():
        plgpu.commit_smem()
