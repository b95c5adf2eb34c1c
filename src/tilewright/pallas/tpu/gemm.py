"""Products in Mosaic TPU kernels: operands as they lie in memory, scales along K, edges, and blocks by counted traffic.

`Factors` says how a block of x [rows, block_k] is multiplied with a block of w, for float and for quantised operands:

    int8, float8 weights    converted in the kernel to the dtype that is multiplied: exact in bfloat16.
    int4 weights            two rows per int8 row; a bitcast along sublanes makes them int4 [block_k, block_n].
    scales along K          multiply the partial sum of each scale's block of K; all others multiply the accumulator.
    w_transposed            blocks of w are [block_n, block_k]: contracted over the last axes, without a transposed copy.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, ROW_TILE, SUBLANES, Chip
from tilewright.core.products import dequantized_weights
from tilewright.core.quantized import chips_with, expanded_scales, unit_of
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.kernel import not_float64, padded_bytes

Blocks = tuple[int, int, int]
"""block_m, block_n, block_k: rows and columns of the result, and what is contracted."""

# Cycles of a step in which the MXU has nothing to do: it fills and drains, and the pipeline starts copies (libtpu's
# schedule for v6e, blocks of 1024 x 1024 x 512: 2,361 bundles for 2,048 cycles of the MXU).
_STEP_CYCLES = 300
# The most multiplications of one product whose code is unrolled: 330 KB of code on v6e, and about as much on v5p.
_UNROLLED_WIDE, _UNROLLED = 2**30, 2**28
# A TPU that is not in the table of chips is taken for one with these figures.
_MXU_SIZE, _MXUS, _CLOCK_HZ, _BYTES_PER_S = 128, 4, 1e9, 1e12
_FLOAT32_PASSES = 6
# Blocks with fewer columns copy short rows, and have fewer products per row that is loaded.
_NARROW = 512


def quotient(a: Any, b: int) -> Any:
    """a // b for a traced a that is not negative: rounding down would ask for its sign, at run time."""
    return jax.lax.div(a, jnp.asarray(b, a.dtype))


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def up_to(end: Any, values: jax.Array, axis: int, first: Any = 0) -> jax.Array:
    """The part of an array that begins at `first` along `axis`, with zeros from `end` on."""
    inside = first + jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) < end
    return jnp.where(inside, values, jnp.zeros_like(values))


def for_row_tiles(rows: int, tile: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with a slice for each tile of rows: in a loop, so that its code is generated once."""
    if rows % tile or rows == tile:
        body(slice(0, rows))
        return

    def step(index: jax.Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * tile, tile), tile))

    jax.lax.fori_loop(0, rows // tile, step, None)


def epilogue_rows(block_m: int, columns: int) -> int:
    """The rows of a block that an epilogue takes at a time: about 64 registers of float32, so that its code stays small."""
    rows = max(ROW_TILE, 64 * SUBLANES * LANES // columns)
    return math.gcd(1 << (rows.bit_length() - 1), block_m)


def scales_in_kernel(call: Any) -> bool:
    """Whether the kernel takes quantised weights as they are; else XLA dequantises them first."""
    blocks = call.w_scales.shape[-3]
    return call.x_scales is not None or blocks == 1 or (call.x.shape[1] // blocks) % LANES == 0


def dequantized_note(call: Any) -> str:
    """What `explain` says of weights that XLA dequantises before the kernel."""
    if call.w_scales is None or scales_in_kernel(call):
        return ""
    return f"w is dequantised before the kernel: its scales along K are not per a multiple of {LANES}"


@dataclass(frozen=True)
class Factors:
    """How x [M, K] and w [K, N] are multiplied. Static."""

    k: int
    x_dtype: Any
    w_dtype: str
    """Of the values of w; "int4" is stored as int8 of half the rows (core/quantized.py)."""
    multiplied: Any
    """The dtype of both operands of the MXU's products."""
    w_transposed: bool = False
    x_scales: int = 0
    """Scales along K, per row of x; 0 where x is not quantised."""
    w_scales: int = 0
    """Scales along K, per column of w; 0 where w is not quantised."""

    @staticmethod
    def of(call: Any, chip: Chip) -> "Factors":
        """The factors of a call of products (core/products.py) on a chip."""
        w_scales = call.w_scales if call.w_scales is not None and scales_in_kernel(call) else None
        w_dtype = call.x.dtype.name if w_scales is None else call.w_dtype
        return Factors(
            k=call.x.shape[1],
            x_dtype=call.x.dtype,
            w_dtype=w_dtype,
            multiplied=multiplied_dtype(call.x.dtype, w_dtype, x_quantized=call.x_scales is not None, chip=chip),
            w_transposed=w_dtype.startswith("float8"),
            x_scales=0 if call.x_scales is None else call.x_scales.shape[1],
            w_scales=0 if w_scales is None else w_scales.shape[-3],
        )

    def operands(self, call: Any) -> tuple[jax.Array, jax.Array | None]:
        """w as the kernel reads it, [..., K, P N] or transposed, and its scales [..., P, KS, N]."""
        w = call.w.reshape(*call.w.shape[:-2], -1)  # int4: half of the rows
        if self.w_scales:
            scales = jnp.moveaxis(call.w_scales, -2, -3).astype(jnp.float32)  # [..., P, KS, NS]
            scales = expanded_scales(scales, (self.w_scales, call.w.shape[-1]))
            return jnp.swapaxes(w, -1, -2) if self.w_transposed else w, scales
        return w if call.w_scales is None else dequantized_weights(call, call.x.dtype), None

    @property
    def scale_k(self) -> int | None:
        """The elements of K that share a scale; None where no scales differ along K."""
        blocks = max(self.x_scales, self.w_scales)
        return None if blocks <= 1 else self.k // blocks

    @property
    def accumulator(self) -> Any:
        return jnp.int32 if self.multiplied == jnp.int8 and self.scale_k is None else jnp.float32

    @property
    def w_stored(self) -> Any:
        return jnp.dtype(jnp.int8 if self.w_dtype == "int4" else self.w_dtype)

    @property
    def w_itemsize(self) -> float:
        return 0.5 if self.w_dtype == "int4" else jnp.dtype(self.w_dtype).itemsize

    def w_block(self, block_k: int, block_n: int) -> tuple[int, int]:
        rows = block_k // 2 if self.w_dtype == "int4" else block_k
        return (block_n, rows) if self.w_transposed else (rows, block_n)

    def w_index(self, k: Any, n: Any) -> tuple[Any, Any]:
        return (n, k) if self.w_transposed else (k, n)

    def takes(self, block_k: int) -> bool:
        """Whether K can be cut into blocks of this size: with scales along K there is no ragged last block."""
        if self.scale_k is None:
            return True
        return self.k % block_k == 0 and (block_k % self.scale_k == 0 or self.scale_k % block_k == 0)

    def temporaries(self, block_m: int, block_n: int, block_k: int) -> int:
        """Bytes of converted or masked operands that a step keeps in VMEM."""
        masked = bool(self.k % block_k)
        x_changes = masked or self.x_dtype != self.multiplied
        w_changes = masked or jnp.dtype(self.multiplied) != jnp.dtype(self.w_stored) or self.w_dtype == "int4"
        depth = min(block_k, self.scale_k or block_k)
        x_bytes = padded_bytes((block_m, block_k), self.multiplied) if x_changes else 0
        w_bytes = padded_bytes((depth, block_n), self.multiplied) if w_changes else 0
        partial = padded_bytes((block_m, block_n), jnp.float32) if self.scale_k else 0
        return x_bytes + w_bytes + partial

    def product(self, x: jax.Array, w_ref: Any, block_k: int, step: Any, x_scales: Any, w_scales_ref: Any) -> jax.Array:
        """Block `step` of K's share of x w: [rows, block_n] in the accumulator's dtype.

        x is [rows, block_k], its scales are [rows, KX], and those of w are a ref [KS, block_n].
        """
        depth = min(block_k, self.scale_k or block_k)
        total = None
        for start in range(0, block_k, depth):
            w = self._weights(w_ref, start, depth)  # [depth, block_n], or transposed
            x_part = x if depth == block_k else x[:, start : start + depth]  # [rows, depth]
            x_part = x_part.astype(self.multiplied)
            if self.k % block_k:
                left = self.k - step * block_k
                x_part, w = up_to(left, x_part, 1), up_to(left, w, 1 if self.w_transposed else 0)
            partial = self._dot(x_part, w)  # [rows, block_n]
            if self.scale_k is not None:
                number = quotient(step * block_k + start, self.scale_k)
                partial = partial.astype(jnp.float32)
                if self.w_scales > 1:
                    partial = partial * w_scales_ref[pl.ds(number, 1), :]  # [1, block_n]
                if self.x_scales > 1:
                    partial = partial * _column(x_scales, number)  # [rows, 1]
            total = partial if total is None else total + partial
        assert total is not None
        return total

    def scaled(self, z: jax.Array, x_scales: Any, w_scales_ref: Any) -> jax.Array:
        """The accumulator in float32, times the scales that do not differ along K."""
        z = z.astype(jnp.float32)
        if self.w_scales == 1:
            z = z * w_scales_ref[...]  # [1, block_n]
        return z * x_scales if self.x_scales == 1 else z  # [rows, 1]

    def _weights(self, w_ref: Any, start: int, depth: int) -> jax.Array:
        if self.w_dtype == "int4":
            packed = w_ref[start // 2 : (start + depth) // 2, :]  # [depth / 2, block_n]
            return _converted(pltpu.bitcast(packed, jnp.int4), self.multiplied)  # [depth, block_n]
        part = slice(start, start + depth)
        return _converted(w_ref[:, part] if self.w_transposed else w_ref[part, :], self.multiplied)

    def _dot(self, x: jax.Array, w: jax.Array) -> jax.Array:
        axes = (1, 1 if self.w_transposed else 0)
        if self.multiplied == jnp.int8:
            dimensions = (((axes[0],), (axes[1],)), ((), ()))
            return jax.lax.dot_general(x, w, dimensions, preferred_element_type=jnp.int32)
        return dot_f32(x, w, axes)


def _converted(values: jax.Array, dtype: Any) -> jax.Array:
    return values if values.dtype == dtype else values.astype(dtype)


def _column(values: jax.Array, number: Any) -> jax.Array:
    """Column `number` of [rows, columns], as [rows, 1]. Lanes have no dynamic index: a masked sum takes it."""
    lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.sum(jnp.where(lane == number, values, 0.0), axis=1, keepdims=True)


def multiplied_dtype(x_dtype: Any, w_dtype: str, *, x_quantized: bool, chip: Chip) -> Any:
    """The dtype that the MXU multiplies: x's where x is floating; int8, float8 or bfloat16 where both are quantised.

    Every value of 8 bits is exact in bfloat16, and so is a product of two of them in float32: where the unit of 8 bits is
    no faster than that of bfloat16 (int8 on v4, float8 on v6e), or there is none for float8, they are converted.
    """
    if not x_quantized:
        return jnp.dtype(x_dtype)
    integers = x_dtype == jnp.int8 and w_dtype in ("int8", "int4")
    peaks = dict(chip.peak_flops)
    faster = peaks.get(unit_of(jnp.dtype(x_dtype).name), 0.0) > peaks.get("bfloat16", 0.0)
    same = integers or jnp.dtype(x_dtype).name == w_dtype
    return jnp.dtype(x_dtype if same and faster else jnp.bfloat16)


def quantized_reason(factors: Factors, chip: Chip) -> str | None:
    """Why a product cannot run on a chip, or None."""
    integers = factors.x_dtype == jnp.int8 and factors.w_dtype in ("int8", "int4")
    if factors.x_scales and integers and "int8" not in dict(chip.peak_flops):
        return (
            f"int8 products run on {chips_with('int8')}, and this is {chip.name}, which has no unit for them; quantise "
            f"x and w to 'float8_e4m3fn', or use implementation='xla'"
        )
    scale_k = factors.scale_k
    if scale_k is not None and scale_k % LANES:
        return (
            f"x and w have a scale per {scale_k} of K, which must be a multiple of {LANES} (TPU lanes); quantise them "
            f"with blocks of {LANES} along K, or use implementation='xla'"
        )
    return None


def block_reason(x: Any, factors: Factors, block_k: int, chip: Chip) -> str | None:
    """Why a product cannot run on a chip with blocks of K of this size, or None."""
    reason = not_float64(x) or quantized_reason(factors, chip)
    if reason is None and not factors.takes(block_k):
        reason = (
            f"block_k={block_k} must be {factors.scale_k}, or a multiple or divisor of it, and divide K={factors.k} (a "
            f"scale is shared by {factors.scale_k} of K)"
        )
    return reason


def column_parts(w: Any, axis: int, parts: int, block_n: int) -> tuple[list[Any], list[int]]:
    """The parts of the columns of w, each as an array and the number of its first block along `axis`.

    They are one array where a part begins with a block. Otherwise XLA copies each part.
    """
    n = w.shape[axis] // parts
    if parts == 1 or n % block_n == 0:
        return [w] * parts, [part * (n // block_n) for part in range(parts)]
    return [jax.lax.slice_in_dim(w, part * n, (part + 1) * n, axis=axis) for part in range(parts)], [0] * parts


@dataclass(frozen=True)
class Work:
    """What a product does, for `ranked_blocks`: its sizes, and the bytes of an element of each operand."""

    m: int
    n: int
    k: int
    parts: int = 1
    x_itemsize: float = 2
    w_itemsize: float = 2
    y_itemsize: float = 2
    passes: int = 1
    """Passes of the MXU per product: six for float32."""

    def bytes(self, blocks: Blocks) -> float:
        """HBM traffic of a grid (rows, columns, K): an operand is fetched again whenever its block changes."""
        block_m, block_n, block_k = blocks
        num_m, num_n, num_k = pl.cdiv(self.m, block_m), pl.cdiv(self.n, block_n), pl.cdiv(self.k, block_k)
        x_reads = 1 if num_k == 1 else num_n
        w_reads = 1 if num_k == num_n == 1 else num_m
        x = self.m * self.k * self.x_itemsize * x_reads
        w = self.k * self.n * self.parts * self.w_itemsize * w_reads
        return x + w + self.m * self.n * self.y_itemsize

    def cycles(self, chip: Chip, blocks: Blocks) -> float:
        """Cycles of one step."""
        block_m, block_n, block_k = blocks
        width, mxus = chip.mxu_size or _MXU_SIZE, (chip.mxus or _MXUS) * (chip.mxu_rows_per_cycle or 1)
        tiles = pl.cdiv(block_n, width) * pl.cdiv(block_k, width) * self.parts
        # Weights are loaded into the MXU while rows stream through it: a few rows do not hide that.
        mxu = max(block_m, LANES) * tiles * self.passes / mxus
        mxu *= 1.05 if block_n < min(_NARROW, self.n) else 1.0
        stores = 0 if block_k >= self.k else self.parts * block_m * block_n / (SUBLANES * LANES)
        return max(mxu, stores) + 0.1 * stores + _STEP_CYCLES

    def seconds(self, chip: Chip, blocks: Blocks) -> float:
        """An estimate to choose blocks by, not to report."""
        block_m, block_n, block_k = blocks
        num_m, num_n, num_k = pl.cdiv(self.m, block_m), pl.cdiv(self.n, block_n), pl.cdiv(self.k, block_k)
        cores = min(chip.cores_per_device, num_m * num_n)
        compute = num_m * num_n * num_k * self.cycles(chip, blocks) / (chip.clock_hz or _CLOCK_HZ) / cores
        bandwidth = chip.bytes_per_s or _BYTES_PER_S
        copies = self.bytes(blocks) / bandwidth
        first = (block_m * block_k * self.x_itemsize + block_k * block_n * self.parts * self.w_itemsize) / bandwidth
        return max(compute, copies) + 0.1 * min(compute, copies) + first


@dataclass(frozen=True)
class GroupedWork(Work):
    """A product of rows in groups with their matrices; the same for dw, whose blocks are (rows, columns, K) too."""

    groups: int = 1
    contracts_rows: bool = False
    """Whether the result is dw [G, K, N]; else it is y [M, N]."""

    def tile(self, block_m: int) -> int:
        """Rows that are multiplied at a time: at most a quarter of a group's, since half a tile is wasted at each of its
        ends; half of them where they are contracted, which the depth of the MXU is wasted on otherwise.
        """
        share = max(1, self.m // ((2 if self.contracts_rows else 4) * self.groups))
        return min(block_m, max(ROW_TILE, min(256, 1 << (share.bit_length() - 1))))

    def bytes(self, blocks: Blocks) -> float:
        """HBM traffic of the grids (columns, visits, K) and, of dw, (K, columns, visits)."""
        block_m, block_n, block_k = blocks
        num_n, num_k, visits = pl.cdiv(self.n, block_n), pl.cdiv(self.k, block_k), self._visits(block_m)
        x, w = self.m * self.k * self.x_itemsize, self.k * self.n * self.parts * self.w_itemsize
        y = self.m * self.n * self.y_itemsize
        if self.contracts_rows:
            return x * num_n + y * num_k + self.groups * w
        if num_k == 1:
            return x * num_n + min(self.groups, self.m) * w + y
        return x * num_n * visits * block_m / self.m + visits * w + y

    def seconds(self, chip: Chip, blocks: Blocks) -> float:
        block_m, block_n, block_k = blocks
        num_n, num_k, visits = pl.cdiv(self.n, block_n), pl.cdiv(self.k, block_k), self._visits(block_m)
        tile = self.tile(block_m)
        tiles = self.m / tile + min(self.groups, self.m)
        step = (tile, block_n, block_k) if not self.contracts_rows else (block_k, block_n, tile)
        cycles = tiles * self.cycles(chip, step) + visits * _STEP_CYCLES
        cores = min(chip.cores_per_device, num_n * (num_k if self.contracts_rows else 1))
        compute = num_n * num_k * cycles / (chip.clock_hz or _CLOCK_HZ) / cores
        copies = self.bytes(blocks) / (chip.bytes_per_s or _BYTES_PER_S)
        return max(compute, copies) + 0.1 * min(compute, copies)

    def _visits(self, block_m: int) -> int:
        return pl.cdiv(self.m, block_m) + min(self.groups, self.m) - 1


@functools.lru_cache(maxsize=1024)
def ranked_grouped_blocks(chip: Chip, work: GroupedWork, factors: Factors | None = None) -> Sequence[Blocks]:
    """Every choice of blocks, the fastest by the estimate first, and the smallest last.

    Blocks of rows are at most half of a group's: a larger one has more rows of others than of its own.
    """
    half = max(LANES, work.m // (2 * work.groups))
    rows = [size for size in sizes_for(work.m, _ROWS, ROW_TILE) if size <= half and size % work.tile(size) == 0]
    rows = rows or [ROW_TILE]
    columns = sizes_for(work.n, _COLUMNS, LANES)
    depths = sizes_for(work.k, _DEPTHS, LANES)
    if factors is not None:
        depths = [depth for depth in depths if factors.takes(depth)] or [round_up(factors.k, LANES)]
    every = [
        (block_m, block_n, block_k)
        for block_m, block_n, block_k in itertools.product(rows, columns, depths)
        if work.tile(block_m) * block_n * block_k * work.parts * work.passes <= _most_unrolled(chip)
    ]
    every.sort(key=lambda blocks: work.seconds(chip, blocks))
    return (*every, (min(rows), min(columns), min(depths)))


def _most_unrolled(chip: Chip) -> int:
    return _UNROLLED_WIDE if (chip.mxu_size or _MXU_SIZE) > LANES else _UNROLLED


def tile_rows(chip: Chip, block_m: int) -> int:
    """The rows whose product is unrolled: all of a block, or 256 on chips with 128-wide MXUs.

    A loop over tiles drains the MXU. That is 190 bundles per tile of 256 x 1,024 x 512 on v6e; on v5p, whose MXUs take
    four times as long, the step stays as long as they need.
    """
    return block_m if (chip.mxu_size or _MXU_SIZE) > LANES else math.gcd(block_m, 256)


def unrolled(chip: Chip, work: Work, blocks: Blocks) -> bool:
    """Whether the code of a product of these blocks is small enough."""
    _, block_n, block_k = blocks
    return tile_rows(chip, blocks[0]) * block_n * block_k * work.parts * work.passes <= _most_unrolled(chip)


def sizes_for(size: int, sizes: Iterable[int], multiple: int) -> list[int]:
    """Those of `sizes` that an axis is not much smaller than; its own size, rounded up; and large parts that divide it."""
    sizes = [each for each in sizes if each % multiple == 0]
    own, largest = round_up(size, multiple), max(sizes)
    found = {each for each in sizes if each < own}
    found |= {own} if own <= largest else set()
    found |= {own // n for n in range(2, 17) if own % (n * multiple) == 0 and min(sizes) <= own // n <= largest}
    return sorted(found, reverse=True)


_ROWS = (2048, 1024, 512, 256, 128, 64, 32, 16)
_COLUMNS = (2048, 1024, 512, 256, 128)
_DEPTHS = (16384, 8192, 4096, 2048, 1024, 512, 256, 128)


@functools.lru_cache(maxsize=1024)
def ranked_blocks(
    chip: Chip, work: Work, factors: Factors | None = None, *, multiples: Blocks = (ROW_TILE, LANES, LANES)
) -> Sequence[Blocks]:
    """Every choice of blocks, the fastest by the estimate first, and the smallest last."""
    rows = sizes_for(work.m, _ROWS, multiples[0])
    columns = sizes_for(work.n, _COLUMNS, multiples[1])
    depths = sizes_for(work.k, _DEPTHS, multiples[2])
    if factors is not None:
        depths = [depth for depth in depths if factors.takes(depth)] or [round_up(factors.k, LANES)]
    every = [blocks for blocks in itertools.product(rows, columns, depths) if unrolled(chip, work, blocks)]
    every.sort(key=lambda blocks: work.seconds(chip, blocks))
    return (*every, (min(rows), min(columns), min(depths)))


def float_passes(dtype: Any) -> int:
    return _FLOAT32_PASSES if dtype == jnp.float32 else 1
