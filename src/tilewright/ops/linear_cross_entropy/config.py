"""Block sizes of linear cross entropy, an implementation each; validated when built.

`PallasTpuConfig` has a pair for each of its three kernels. In each kernel one axis stays in VMEM while the other streams
past it: rows in the forward and the dx kernel, vocabulary in the dw kernel. What stays is as large as fits, since what
streams is read from HBM once for each block that stays. `PallasGpuConfig` has one tile of logits for both of its kernels.
"""

import dataclasses
import itertools
from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip

_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2

# Hopper: a product of a warpgroup has 64 rows and up to 256 columns; a row of shared memory is 64 of bfloat16.
GPU_ROWS = 64
GPU_WIDTH = 64
GPU_WORKERS = 2
GPU_BLOCK_N = GPU_WORKERS * GPU_ROWS
GPU_BLOCK_H = 64
_GPU_WIDEST = 256
# The backward's two stages for a part of a tile, a warpgroup each; the forward needs less.
_GPU_STAGED_BYTES = 2 * GPU_WORKERS * GPU_ROWS * GPU_WIDTH * _BFLOAT16_BYTES
_GPU_SMEM_SLACK = 1024  # Barriers, and what aligning takes.
# The gradients of a chunk of logits. It bounds the temporary memory: all of it is under 1 GiB for N8192 H4096.
_GPU_CHUNK_BYTES = 320 * MIB
# Blocks of columns that fill 132 multiprocessors whole, in the kernel (64 blocks of rows) and in dw (16 of H, at 2,048).
_GPU_FULL_WAVE = 33

# A tile of logits in the xla version, float32. It bounds the temporary memory. H200, N8192 H2048 V151936 bf16, forward
# and backward: 64 MiB 41.4 ms, 128 MiB 41.1, 256 MiB 40.6, 512 MiB 41.6; half the rows at the same size 46.4.
_XLA_TILE_BYTES = 128 * MIB
_XLA_MAX_ROWS = 8192

# Largest first. At these a step moves at most a byte for 1,024 FLOPs, which every TPU's memory keeps up with; wider ones
# double the code, and the time to compile it (3.7 MB for a v5p with 1,024 columns and H=2048).
_ROWS = (1024, 512, 256, 128, 64, 32, 16)
_COLUMNS = (512, 256, 128)
_WIDE = 256
# The compiler takes VMEM of its own for spills and for what it keeps of a tile between passes.
_VMEM_SHARE = 0.75


@dataclass(frozen=True)
class XlaConfig:
    """Rows and columns of the tile of logits that exists at a time."""

    block_n: int
    block_v: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name}={value!r} must be a positive integer; use 1024")

    @staticmethod
    def for_shape(n: int, v: int) -> "XlaConfig":
        num_n = -(-n // _XLA_MAX_ROWS)
        block_n = -(-n // num_n)
        columns = _XLA_TILE_BYTES // (_FLOAT32_BYTES * block_n)
        return XlaConfig(block_n, min(v, max(columns // LANES * LANES, LANES)))


@dataclass(frozen=True)
class PallasTpuConfig:
    """Block sizes of the forward kernel (`block_n`, `block_v`), the dx kernel (`_dx`) and the dw kernel (`_dw`)."""

    block_n: int
    block_v: int
    block_n_dx: int
    block_v_dx: int
    block_n_dw: int
    block_v_dw: int
    block_h: int = 2048
    """The part of H in one product of a kernel. It bounds the code that is generated, not the memory."""
    tile_n: int = 256
    """The rows of a block that are computed at a time, in a loop. It bounds the code and the tiles in VMEM."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            rows = field.name.startswith(("block_n", "tile_n"))
            tile, what = (ROW_TILE, "sublanes of a bfloat16 tile") if rows else (LANES, "TPU lanes")
            if not isinstance(value, int) or value < 1 or value % tile:
                nearest = max(tile, round(value / tile) * tile) if isinstance(value, int) else tile
                raise ValueError(
                    f"{field.name}={value!r} must be a positive multiple of {tile} ({what}); "
                    f"use {nearest}, or implementation='xla'"
                )
            if field.name.startswith("block_n") and value > self.tile_n and value % self.tile_n:
                raise ValueError(
                    f"{field.name}={value} must be a multiple of tile_n={self.tile_n}, or less than it; "
                    f"use {-(-value // self.tile_n) * self.tile_n}"
                )

    def vmem_bytes(self, h: int, itemsize: int) -> dict[str, int]:
        """An estimate of the VMEM that each kernel needs: blocks twice for the pipeline, accumulators and tiles once."""
        h = -(-h // LANES) * LANES
        tile = 3 * _FLOAT32_BYTES + itemsize  # Logits, exponentials, mask; and d_logits in the inputs' dtype.
        row = 4 * LANES * _FLOAT32_BYTES  # Statistics, labels and results are padded to a row of lanes.

        def kernel(stays: int, streams: int, rows: int, columns: int, per_element_that_stays: int) -> int:
            blocks = h * (stays * per_element_that_stays + 2 * streams * itemsize)
            return blocks + min(rows, self.tile_n) * columns * tile + 2 * rows * row

        with_gradient = 2 * itemsize + _FLOAT32_BYTES + 2 * itemsize
        return {
            "forward": kernel(self.block_n, self.block_v, self.block_n, self.block_v, 2 * itemsize),
            "dx": kernel(self.block_n_dx, self.block_v_dx, self.block_n_dx, self.block_v_dx, with_gradient),
            "dw": kernel(self.block_v_dw, self.block_n_dw, self.block_n_dw, self.block_v_dw, with_gradient),
        }

    def misfit(self, chip: Chip, h: int, itemsize: int) -> str | None:
        """Why a kernel of this config does not fit the chip's VMEM, or None."""
        if chip.vmem_bytes is None:
            return None
        fields = {
            "forward": "block_n or block_v",
            "dx": "block_n_dx or block_v_dx",
            "dw": "block_v_dw or block_n_dw",
        }
        for kernel, needed in self.vmem_bytes(h, itemsize).items():
            if needed > chip.vmem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed / MIB:.0f} MiB of VMEM for H={h} with {self}, and a "
                    f"{chip.name} has {chip.vmem_bytes / MIB:.0f}; use a smaller {fields[kernel]}, "
                    f"or implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(chip: Chip, n: int, h: int, v: int, itemsize: int) -> "PallasTpuConfig":
        """The largest blocks that fit the chip's VMEM, what stays before what streams; the smallest if none does."""
        rows = [size for size in _ROWS if size < n + ROW_TILE] or [ROW_TILE]
        columns = [size for size in _COLUMNS if size < v + LANES] or [LANES]
        budget = _VMEM_SHARE * chip.vmem_bytes if chip.vmem_bytes else 0
        smallest = PallasTpuConfig(*(ROW_TILE, LANES) * 3)

        def fit(kernel: str, pairs: list[tuple[int, int]], suffix: str) -> dict[str, int]:
            for block_n, block_v in pairs:
                sizes = {f"block_n{suffix}": block_n, f"block_v{suffix}": block_v}
                if dataclasses.replace(smallest, **sizes).vmem_bytes(h, itemsize)[kernel] <= budget:
                    return sizes
            return {f"block_n{suffix}": ROW_TILE, f"block_v{suffix}": LANES}

        # A narrow stream starves the MXU, which is 256 wide on v6e and later: it comes after every wide one.
        rows_stay = sorted(itertools.product(rows, columns), key=lambda pair: pair[1] < _WIDE)
        columns_stay = sorted(
            ((block_n, block_v) for block_v, block_n in itertools.product(columns, rows)),
            key=lambda pair: pair[0] < _WIDE,
        )
        return PallasTpuConfig(
            **fit("forward", rows_stay, ""),
            **fit("dx", rows_stay, "_dx"),
            **fit("dw", columns_stay, "_dw"),
        )


@dataclass(frozen=True)
class PallasGpuConfig:
    """The tile of logits, in what order tiles are made, and how many gradients of logits exist at a time.

    A tile has 128 rows and `block_v` columns and is summed over H in steps of 64.
    """

    block_v: int
    stages: int
    """Steps of 64 of H in shared memory."""
    band: int
    """Blocks of 128 rows that share the columns of w which are in the L2."""
    chunk_v: int
    """Columns of the gradients of logits that the backward stores at a time."""
    pair: int = 2
    """2: two thread blocks with neighbouring rows read their columns of w once for both. 1: each for itself."""

    def __post_init__(self) -> None:
        if not isinstance(self.block_v, int) or self.block_v % GPU_WIDTH or not 0 < self.block_v <= _GPU_WIDEST:
            raise ValueError(
                f"block_v={self.block_v!r} must be a multiple of {GPU_WIDTH}, {_GPU_WIDEST} at most (a product's columns); "
                f"use {_GPU_WIDEST}, or implementation='xla'"
            )
        if not isinstance(self.stages, int) or self.stages < 2:
            raise ValueError(
                f"stages={self.stages!r} must be 2 or more: a copy runs while the step before is used; use 4"
            )
        if not isinstance(self.band, int) or self.band < 1:
            raise ValueError(f"band={self.band!r} must be a positive integer; use 16")
        if self.pair not in (1, 2):
            raise ValueError(f"pair={self.pair!r} must be 1 or 2 (thread blocks that share columns of w); use 2")
        if self.band % self.pair:
            raise ValueError(f"band={self.band} must be a multiple of pair={self.pair}; use {self.band + 1}, or pair=1")
        if not isinstance(self.chunk_v, int) or self.chunk_v < 1 or self.chunk_v % self.block_v:
            raise ValueError(
                f"chunk_v={self.chunk_v!r} must be a positive multiple of block_v={self.block_v}; use {64 * self.block_v}"
            )

    def smem_bytes(self) -> int:
        """An estimate of the shared memory that the backward's kernel needs, the larger of the two."""
        step = GPU_BLOCK_H * (GPU_BLOCK_N + self.block_v) * _BFLOAT16_BYTES
        return self.stages * step + _GPU_STAGED_BYTES + _GPU_SMEM_SLACK

    def misfit(self, chip: Chip) -> str | None:
        """Why a kernel of this config does not fit the chip's shared memory, or None."""
        if chip.smem_bytes is None or self.smem_bytes() <= chip.smem_bytes:
            return None
        return (
            f"its backward kernel needs about {self.smem_bytes() // 1024} KiB of shared memory with {self}, and a block of "
            f"a {chip.name} has {chip.smem_bytes // 1024}; use a smaller block_v or stages, or implementation='xla'"
        )

    @staticmethod
    def for_shape(n: int, v: int) -> "PallasGpuConfig":
        """The widest tile and as many stages as fit; chunks that fill the GPU, 320 MiB of gradients at most."""
        block_v = _GPU_WIDEST
        whole_n, blocks = -(-n // GPU_BLOCK_N) * GPU_BLOCK_N, -(-v // block_v)
        most = max(1, _GPU_CHUNK_BYTES // (whole_n * block_v * _BFLOAT16_BYTES))
        if most < blocks and most > _GPU_FULL_WAVE:
            most -= most % _GPU_FULL_WAVE
        return PallasGpuConfig(block_v=block_v, stages=4, band=16, chunk_v=min(most, blocks) * block_v)
