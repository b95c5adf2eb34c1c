"""Block sizes of attention over a cache; validated when built."""

from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip

_VMEM_SHARE = 0.6


@dataclass(frozen=True)
class PallasTpuConfig:
    """What a step fetches: keys of a cache in one piece, or pages of a paged one, for some of the key heads."""

    block_k: int
    """Keys of a step, where the cache is in one piece."""
    pages: int
    """Pages of a step, where it is in pages."""
    block_heads: int
    """Key heads of a step. It must divide KV, and fill whole lanes or be all of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.block_k, int) or self.block_k < 1 or self.block_k % ROW_TILE:
            raise ValueError(
                f"block_k={self.block_k!r} must be a positive multiple of {ROW_TILE} (sublanes of a bfloat16 tile); "
                f"use 512, or implementation='xla'"
            )
        for name in ("pages", "block_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer; use 1")

    def vmem_bytes(self, keys: int, d: int, dv: int, itemsize: int) -> int:
        """An estimate: a step's keys and values twice for the pipeline, and once more while they are computed with."""
        widths = sum(-(-self.block_heads * width // LANES) * LANES for width in (d, dv))
        return 3 * keys * widths * itemsize

    @staticmethod
    def for_shape(
        chip: Chip, room: int, page: int | None, heads: int, d: int, dv: int, itemsize: int
    ) -> "PallasTpuConfig":
        """About 512 keys a step, of up to four heads at a time, as far as they fit."""
        fitting = [
            n for n in range(1, heads + 1) if heads % n == 0 and (n == heads or n * d % LANES == n * dv % LANES == 0)
        ]
        block_heads = max((n for n in fitting if n <= 4), default=fitting[0])
        keys = min(512, -(-room // ROW_TILE) * ROW_TILE)
        budget = _VMEM_SHARE * (chip.vmem_bytes or 16 * MIB)
        while keys > ROW_TILE:
            config = PallasTpuConfig(keys, 1, block_heads)
            if config.vmem_bytes(keys, d, dv, itemsize) <= budget:
                break
            keys = max(ROW_TILE, keys // 2 // ROW_TILE * ROW_TILE)
        # More pages than these are more copies and code a step than they save.
        pages = 1 if page is None else min(max(1, keys // page), 8, -(-room // page))
        return PallasTpuConfig(keys, pages, block_heads)


# On Hopper a product of the matrix unit has 64 rows, and two blocks share a multiprocessor.
GPU_ROWS = 64
GPU_WIDEST = 256
_GPU_BLOCKS = (64, 128)
GPU_EIGHT = 8  # Rows that a tile in shared memory is made of.
_GPU_SIDE_BY_SIDE = 2
_GPU_MOST_STAGES = 8
_GPU_MOST_SPLITS = 128
_BFLOAT16_BYTES = 2
_GPU_SMEM_SLACK = 4096  # Statistics, barriers, room for sums across warps, and what the compiler aligns.
_GPU_SMEM_A_BLOCK = 1024  # What a multiprocessor keeps for itself, for each of its blocks.


def gpu_tile_rows(rows: int) -> int:
    """Rows that the queries of a sequence and key head have in shared memory, for so many of them."""
    return min(GPU_ROWS, -(-rows // GPU_EIGHT) * GPU_EIGHT)


@dataclass(frozen=True)
class PallasGpuConfig:
    """How a thread block goes through its share of a sequence, and how many share one."""

    block_k: int
    """Keys that are fetched at a time."""
    stages: int
    """Blocks of keys in shared memory: all but one are on their way while that one is used."""
    splits: int
    """Thread blocks that share the keys of a sequence and key head, in equal parts of its length."""

    def __post_init__(self) -> None:
        if self.block_k not in _GPU_BLOCKS:
            raise ValueError(
                f"block_k={self.block_k!r} must be one of {', '.join(map(str, _GPU_BLOCKS))} (a product's columns, in "
                f"whole tiles); use 64"
            )
        if not isinstance(self.stages, int) or self.stages < 2:
            raise ValueError(f"stages={self.stages!r} must be 2 or more: a copy runs while a block is used; use 2")
        if not isinstance(self.splits, int) or not 1 <= self.splits <= _GPU_MOST_SPLITS:
            raise ValueError(f"splits={self.splits!r} must be from 1 to {_GPU_MOST_SPLITS}; use 1")

    def smem_bytes(self, d: int, dv: int, rows: int) -> int:
        """An estimate of the shared memory of a thread block, for so many queries of a sequence and key head."""
        elements = gpu_tile_rows(rows) * d + self.stages * self.block_k * (d + dv) + GPU_EIGHT * dv
        return elements * _BFLOAT16_BYTES + _GPU_SMEM_SLACK

    @staticmethod
    def for_shape(chip: Chip, room: int, items: int, d: int, dv: int, rows: int) -> "PallasGpuConfig":
        """For `items` pairs of a sequence and a key head: as many stages as let two blocks share a multiprocessor.

        Splits are the fewest that keep nine tenths of the GPU busy to the end, or come closest to it. A block alone on a
        multiprocessor, with twice the stages and half the splits, was up to 3 % faster with equal lengths (H200, D128, B1
        and B16). It is not the default, since unequal lengths are the rule: a long sequence would be in fewer parts.
        """
        block_k = _GPU_BLOCKS[0]
        smem, multiprocessors = chip.smem_bytes or 227 * 1024, chip.multiprocessors or 132
        two_stages, stage = PallasGpuConfig(block_k, 2, 1).smem_bytes(d, dv, rows), block_k * (d + dv) * _BFLOAT16_BYTES
        shared = (smem + _GPU_SMEM_A_BLOCK) // _GPU_SIDE_BY_SIDE - _GPU_SMEM_A_BLOCK
        alone = two_stages > shared
        stages = 2 + max(0, (smem if alone else shared) - two_stages) // stage
        slots = multiprocessors * (1 if alone else _GPU_SIDE_BY_SIDE)
        blocks = -(-room // block_k)

        def busy(splits: int) -> float:
            waves = -(-items * splits // slots)
            # Of a share of few blocks the last is as good as lost.
            share = -(-blocks // splits)
            return items * splits / (waves * slots) * blocks / (splits * share)

        most = min(_GPU_MOST_SPLITS, max(1, blocks // 2), max(1, 4 * slots // items))
        splits = next((n for n in range(1, most + 1) if busy(n) >= 0.9), 0) or max(range(1, most + 1), key=busy)
        return PallasGpuConfig(block_k, min(stages, _GPU_MOST_STAGES), splits)
