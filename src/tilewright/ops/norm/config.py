"""Block sizes of the norms, validated when built.

A block of the TPU kernels is block_n whole rows. Nothing is reused between blocks, so the only gain of a larger one is
fewer steps of the grid. Inside, a loop takes tile_n rows at a time: enough of them to hide how long a row's sum takes.
"""

import dataclasses
from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, SUBLANES, Chip

_FLOAT32_BYTES = 4

# Largest first. At 1 MiB a block's copy outweighs the fixed cost of a step; it is a guess until it is timed on a chip.
_ROWS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
_BLOCK_BYTES = 1 * MIB
_TILE_ELEMENTS = 32768  # 32 registers of float32, of the 64 there are.
# The compiler takes VMEM of its own, for spills and for what it keeps between passes.
_VMEM_SHARE = 0.75


@dataclass(frozen=True)
class PallasTpuConfig:
    """Rows in a block and in a tile, in the forward and the backward kernel."""

    block_n: int
    tile_n: int = ROW_TILE

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1 or value % ROW_TILE:
                nearest = max(ROW_TILE, round(value / ROW_TILE) * ROW_TILE) if isinstance(value, int) else ROW_TILE
                raise ValueError(
                    f"{field.name}={value!r} must be a positive multiple of {ROW_TILE} (sublanes of a bfloat16 tile); "
                    f"use {nearest}, or implementation='xla'"
                )
        if self.block_n > self.tile_n and self.block_n % self.tile_n:
            raise ValueError(
                f"block_n={self.block_n} must be a multiple of tile_n={self.tile_n}, or less than it; "
                f"use {-(-self.block_n // self.tile_n) * self.tile_n}"
            )

    def vmem_bytes(self, columns: int, itemsize: int, gate_itemsize: int) -> dict[str, int]:
        """An estimate of the VMEM that each kernel needs: blocks twice for the pipeline, float32 tiles once.

        `gate_itemsize` is 0 where there is no gate.
        """
        columns = -(-columns // LANES) * LANES
        elements = 2 * self.block_n * columns
        tile = min(self.tile_n, self.block_n) * columns * _FLOAT32_BYTES
        weights = 2 * 2 * SUBLANES * columns * _FLOAT32_BYTES  # w and bias, [1, D] each, are padded to a tile.
        sums = 2 * 2 * SUBLANES * columns * _FLOAT32_BYTES
        return {
            "forward": elements * (2 * itemsize + gate_itemsize) + weights + tile,
            "backward": elements * (3 * itemsize + 2 * gate_itemsize) + weights + sums + 2 * tile,
        }

    def misfit(self, chip: Chip, columns: int, itemsize: int, gate_itemsize: int) -> str | None:
        """Why a kernel of this config does not fit the chip's VMEM, or None."""
        if chip.vmem_bytes is None:
            return None
        remedy = "use a smaller block_n, or" if self.block_n > ROW_TILE else "no block_n is smaller; use"
        for kernel, needed in self.vmem_bytes(columns, itemsize, gate_itemsize).items():
            if needed > chip.vmem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed / MIB:.0f} MiB of VMEM for rows of {columns} with {self}, "
                    f"and a {chip.name} has {chip.vmem_bytes / MIB:.0f}; {remedy} implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(chip: Chip, n: int, columns: int, itemsize: int, gate_itemsize: int = 0) -> "PallasTpuConfig":
        """The largest block that is worth its size and fits the chip's VMEM; the smallest if none does."""
        budget = _VMEM_SHARE * chip.vmem_bytes if chip.vmem_bytes else 0
        padded = -(-columns // LANES) * LANES
        tile_n = next((size for size in _ROWS if size * padded <= _TILE_ELEMENTS), ROW_TILE)
        for block_n in _ROWS:
            config = PallasTpuConfig(block_n, min(tile_n, block_n))
            needed = max(config.vmem_bytes(columns, itemsize, gate_itemsize).values())
            if block_n < n + ROW_TILE and block_n * padded * itemsize <= _BLOCK_BYTES and needed <= budget:
                return config
        return PallasTpuConfig(_ROWS[-1])
