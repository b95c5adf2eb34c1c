"""Block sizes of attention, an implementation each; validated when built.

`PallasTpuConfig`: a block of queries stays in VMEM while blocks of keys and values stream past, in the forward and in the
backward. A block is what is fetched; inside of a step it is computed in tiles, whose size decides how the products of one
tile and the exponentials of another overlap.
`PallasGpuConfig`: a block of queries stays in shared memory while blocks of keys and values stream past in the forward, and
the other way round in the backward.
"""

import dataclasses
from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, Chip
from tilewright.ops.attention.plan import MOST_TILES

_FLOAT32_BYTES = 4
# A tile of logits in the xla version, float32, over batch and heads. It bounds the temporary memory.
_XLA_TILE_BYTES = 64 * MIB
# The compiler takes VMEM of its own for spills and for what it keeps of a tile between passes.
_VMEM_SHARE = 0.8
_WIDE_MXU = 256
# Of the scalar memory, which also holds the kernel's own scalars.
SMEM_BYTES = 768 * 1024


@dataclass(frozen=True)
class XlaConfig:
    """Queries and keys of the tile of logits that exists at a time, for all heads together."""

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be a positive integer; use 512")

    @staticmethod
    def for_shape(b: int, h: int, t: int, s: int) -> "XlaConfig":
        """Square tiles, 512 at most: smaller ones skip more of a causal mask, larger ones have fewer steps."""
        side = 512
        while side > 32 and b * h * side * side * _FLOAT32_BYTES > _XLA_TILE_BYTES:
            side //= 2
        # As many blocks as that needs, all of one size: the last is not left nearly empty.
        return XlaConfig(*(-(-length // -(-length // side)) for length in (t, s)))


@dataclass(frozen=True)
class PallasTpuConfig:
    """Blocks and tiles of the forward kernel, and of the backward kernel (`_bwd`)."""

    block_q: int
    block_k: int
    tile_q: int
    tile_k: int
    block_q_bwd: int
    block_k_bwd: int
    tile_q_bwd: int
    tile_k_bwd: int
    chunk_k_bwd: int
    """The keys whose gradients are kept in VMEM at a time. dq is summed over the chunks."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1 or value % LANES:
                nearest = max(LANES, round(value / LANES) * LANES) if isinstance(value, int) else LANES
                raise ValueError(
                    f"{field.name}={value!r} must be a positive multiple of {LANES} (TPU lanes); "
                    f"use {nearest}, or implementation='xla'"
                )
        for whole, part in (
            ("block_q", "tile_q"),
            ("block_k", "tile_k"),
            ("block_q_bwd", "tile_q_bwd"),
            ("block_k_bwd", "tile_k_bwd"),
            ("chunk_k_bwd", "block_k_bwd"),
        ):
            size, divisor = getattr(self, whole), getattr(self, part)
            if size % divisor:
                raise ValueError(
                    f"{whole}={size} must be a multiple of {part}={divisor}; use {-(-size // divisor) * divisor}"
                )
            if whole.startswith("block") and size // divisor > MOST_TILES:
                raise ValueError(
                    f"{whole}={size} has {size // divisor} tiles of {part}={divisor}, and a step takes {MOST_TILES} at "
                    f"most; use a larger {part}"
                )

    def vmem_bytes(self, d: int, dv: int, itemsize: int) -> dict[str, int]:
        """An estimate of the VMEM that each kernel needs: blocks twice for the pipeline, accumulators and tiles once."""
        d, dv = (-(-width // LANES) * LANES for width in (d, dv))
        forward_tile = self.tile_q * self.tile_k * (3 * _FLOAT32_BYTES + 2 * itemsize)
        backward_tile = self.tile_q_bwd * self.tile_k_bwd * (6 * _FLOAT32_BYTES + 4 * itemsize)
        return {
            "forward": 2 * itemsize * (self.block_q + self.block_k) * (d + dv)
            + self.block_q * (2 * dv + 32) * _FLOAT32_BYTES
            + forward_tile,
            "backward": 2 * itemsize * (self.block_q_bwd + self.block_k_bwd) * (d + dv)
            + self.block_q_bwd * (4 * d + 32) * _FLOAT32_BYTES
            + 2 * self.chunk_k_bwd * (d + dv) * _FLOAT32_BYTES
            + backward_tile,
        }

    def misfit(self, chip: Chip, d: int, dv: int, itemsize: int) -> str | None:
        """Why a kernel of this config does not fit the chip's VMEM, or None."""
        if chip.vmem_bytes is None:
            return None
        fields = {"forward": "block_q or block_k", "backward": "chunk_k_bwd, block_q_bwd or block_k_bwd"}
        for kernel, needed in self.vmem_bytes(d, dv, itemsize).items():
            if needed > chip.vmem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed / MIB:.0f} MiB of VMEM for D={d} with {self}, and a "
                    f"{chip.name} has {chip.vmem_bytes / MIB:.0f}; use a smaller {fields[kernel]}, "
                    f"or implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(chip: Chip, t: int, s: int, d: int, dv: int, itemsize: int) -> "PallasTpuConfig":
        """Blocks of up to 1,024 that waste little of T and S, and as many keys' gradients in VMEM as fit.

        A wide MXU waits for the exponentials, so it gets many tiles a step to overlap; a narrow one is busy with fewer, and
        its code for a tile is twice as long.
        """
        wide = chip.mxu_size == _WIDE_MXU
        largest = 1024 if wide and max(d, dv) <= 256 and itemsize == 2 else 512
        while True:
            block_q, block_k = _even_blocks(t, largest), _even_blocks(s, largest)
            smallest = PallasTpuConfig(
                block_q,
                block_k,
                _tile(block_q, 256),
                _tile(block_k, 512),
                block_q,
                block_k,
                _tile(block_q, 256),
                _tile(block_k, 512),
                block_k,
            )
            budget = _VMEM_SHARE * (chip.vmem_bytes or 0)
            needed = smallest.vmem_bytes(d, dv, itemsize)
            if max(needed.values()) <= budget or largest == LANES:
                break
            largest //= 2
        one = needed["backward"]
        widths = sum(-(-width // LANES) * LANES for width in (d, dv))
        more = max(0, int((budget - one) // (2 * block_k * widths * _FLOAT32_BYTES)))
        blocks = -(-s // block_k)
        chunks = -(-blocks // min(blocks, 1 + more))
        return dataclasses.replace(smallest, chunk_k_bwd=-(-blocks // chunks) * block_k)


def _even_blocks(length: int, largest: int) -> int:
    """Blocks of one size, a multiple of the lanes and `largest` at most, that cut a length with little left over."""
    count = -(-length // largest)
    return -(-length // (count * LANES)) * LANES


def _tile(block: int, largest: int) -> int:
    """The largest multiple of the lanes that divides the block, `largest` at most."""
    return next(size for size in range(min(block, largest), 0, -LANES) if block % size == 0)


# On Hopper two warpgroups compute, with 64 rows each (a warpgroup's product), and a third copies.
GPU_ROWS, GPU_WORKERS = 64, 2
# A row of shared memory that the matrix unit reads without bank conflicts is 128 bytes: 64 elements of bfloat16.
GPU_WIDTH = 64
GPU_BLOCK = GPU_ROWS * GPU_WORKERS
# The widest heads that the backward kernel takes: wider ones' dk and dv do not fit the registers.
GPU_WIDEST_BWD = 128
GPU_WIDEST = 256
_BFLOAT16_BYTES = 2
# Barriers, and what the compiler aligns.
_GPU_SMEM_SLACK = 2304
_GPU_SMEM_ALIGNMENT = 1024
_BARRIER_BYTES = 8
# Of the gradients of logits: with the fewest a worker waits until the other has read what it writes over.
FEWEST_BUFFERS_BWD, MOST_BUFFERS_BWD = 2, 4


@dataclass(frozen=True)
class PallasGpuConfig:
    """Keys of a block and blocks in flight of the forward kernel; blocks of queries in flight of the backward (`_bwd`).

    The other sizes follow from the hardware: 128 queries a block in the forward; 128 keys in the backward, and as many
    queries as make its tile of dq two products of 64 x 64.
    """

    block_k: int
    stages: int
    stages_bwd: int

    def __post_init__(self) -> None:
        if not isinstance(self.block_k, int) or self.block_k % GPU_ROWS or not 0 < self.block_k <= 2 * GPU_BLOCK:
            raise ValueError(
                f"block_k={self.block_k!r} must be a multiple of {GPU_ROWS}, {2 * GPU_BLOCK} at most (a product's "
                f"columns); use {GPU_BLOCK}, or implementation='xla'"
            )
        for name in ("stages", "stages_bwd"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 2:
                raise ValueError(
                    f"{name}={value!r} must be 2 or more: a copy runs while the block before is used; use 2"
                )

    @staticmethod
    def block_q_bwd(width: int) -> int:
        """Queries of a block in the backward, for heads of this padded width."""
        return GPU_WORKERS * GPU_ROWS * GPU_WIDTH // width

    def smem_bytes(self, d: int, dv: int, sink_heads: int = 0) -> dict[str, int]:
        """An estimate of the shared memory that each kernel needs. `sink_heads`: query heads of a group, if with sinks."""
        d, dv = (padded_width(width) for width in (d, dv))
        forward = GPU_BLOCK * d + self.stages * self.block_k * (d + dv) + (GPU_BLOCK * dv if d != dv else 0)
        needed = {"forward": forward * _BFLOAT16_BYTES + 2 * GPU_BLOCK * _FLOAT32_BYTES + _GPU_SMEM_SLACK}
        width = max(d, dv)
        if width <= GPU_WIDEST_BWD:
            needed["backward"] = self._backward_smem_bytes(width, sink_heads, FEWEST_BUFFERS_BWD)
        return needed

    def _backward_smem_bytes(self, width: int, sink_heads: int, buffers: int) -> int:
        block_q = self.block_q_bwd(width)
        halves = 2 * self.stages_bwd * block_q * width + 2 * GPU_BLOCK * width + buffers * GPU_BLOCK * block_q
        words = (
            GPU_BLOCK * GPU_WIDTH,
            (2 + (sink_heads > 0)) * self.stages_bwd * block_q,
            (self.stages_bwd + 1) * block_q,
            GPU_BLOCK * sink_heads,
        )
        barriers = 1 + 4 * self.stages_bwd + GPU_WORKERS * buffers
        aligned = sum(-(-count * _FLOAT32_BYTES // _GPU_SMEM_ALIGNMENT) * _GPU_SMEM_ALIGNMENT for count in words)
        return halves * _BFLOAT16_BYTES + aligned + barriers * _BARRIER_BYTES

    def buffers_bwd(self, chip: Chip, width: int, sink_heads: int) -> int:
        """Of the gradients of logits in the backward, for heads of this padded width: the most, if they fit."""
        fits = self._backward_smem_bytes(width, sink_heads, MOST_BUFFERS_BWD) <= (chip.smem_bytes or 0)
        return MOST_BUFFERS_BWD if fits else FEWEST_BUFFERS_BWD

    def misfit(self, chip: Chip, d: int, dv: int, sink_heads: int = 0) -> str | None:
        """Why a kernel of this config does not fit the chip's shared memory, or None."""
        if chip.smem_bytes is None:
            return None
        fields = {"forward": "block_k or stages", "backward": "stages_bwd"}
        sinks = f" and sinks of {sink_heads} query heads a key head" if sink_heads else ""
        for kernel, needed in self.smem_bytes(d, dv, sink_heads).items():
            if needed > chip.smem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed // 1024} KiB of shared memory for D={d} and Dv={dv}{sinks} "
                    f"with {self}, and a block of a {chip.name} has {chip.smem_bytes // 1024}; use a smaller "
                    f"{fields[kernel]}, or implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(d: int, dv: int) -> "PallasGpuConfig":
        """128 keys a block where they fit the shared memory and the registers, else 64.

        H200, causal, D = 128, T = 8,192 and 32,768: three stages of 128 keys do not fit, by 120 bytes.
        """
        d, dv = (padded_width(width) for width in (d, dv))
        return PallasGpuConfig(
            block_k=GPU_BLOCK if max(d, dv) <= GPU_WIDEST_BWD else GPU_BLOCK // 2, stages=2, stages_bwd=2
        )


def padded_width(width: int) -> int:
    """A head's width in whole rows of shared memory; in the GPU kernels 64, 128, 192 or 256."""
    return -(-width // GPU_WIDTH) * GPU_WIDTH
