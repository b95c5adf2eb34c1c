"""Block sizes of short convolution, validated when built.

A block of the TPU kernels is block_t tokens of block_d channels; inside, loops take tile_t tokens of 128 channels at a
time. Blocks are taken in order of time, and the few rows that a block needs of its neighbour stay in VMEM.
"""

import dataclasses
from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, SUBLANES, Chip

_FLOAT32_BYTES = 4

# Largest first. At 1 MiB a block's copy outweighs the fixed cost of a step; it is a guess until it is timed on a chip.
_TOKENS = (1024, 512, 256, 128, 64, 32, 16)
_CHANNELS = 1024
_BLOCK_BYTES = 1 * MIB
# The compiler takes VMEM of its own, for spills and for what it keeps between passes.
_VMEM_SHARE = 0.75


@dataclass(frozen=True)
class PallasTpuConfig:
    """Tokens and channels of a block, in the forward and the backward kernel."""

    block_t: int
    block_d: int
    tile_t: int = 64
    """Tokens that are computed at a time. Longer tiles spill registers: libtpu for a v6e, block_t=512, bfloat16, stores of
    the forward that are spills: 0 of 262 with 64 tokens, 296 of 558 with 256."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            tile, what = (LANES, "TPU lanes") if field.name == "block_d" else (ROW_TILE, "sublanes of a bfloat16 tile")
            if not isinstance(value, int) or value < 1 or value % tile:
                nearest = max(tile, round(value / tile) * tile) if isinstance(value, int) else tile
                raise ValueError(
                    f"{field.name}={value!r} must be a positive multiple of {tile} ({what}); "
                    f"use {nearest}, or implementation='xla'"
                )
        if self.block_t > self.tile_t and self.block_t % self.tile_t:
            raise ValueError(
                f"block_t={self.block_t} must be a multiple of tile_t={self.tile_t}, or less than it; "
                f"use {-(-self.block_t // self.tile_t) * self.tile_t}"
            )

    def vmem_bytes(self, width: int, itemsize: int, *, segments: bool) -> dict[str, int]:
        """An estimate of the VMEM that each kernel needs: blocks twice for the pipeline, carried rows once."""
        block = 2 * self.block_t * self.block_d * itemsize
        row = self.block_d * _FLOAT32_BYTES
        edges = 2 * 4 * ROW_TILE * row  # State, neighbour rows, filter and bias, each padded to a tile.
        reach = 2 * (self.block_t + ROW_TILE) * LANES * _FLOAT32_BYTES if segments else 0
        sums = 2 * (width + 2) * SUBLANES * row
        column = (self.block_t + SUBLANES) * LANES * _FLOAT32_BYTES  # 128 channels of x, and of d, in float32.
        return {
            "forward": 2 * block + edges + reach + column,
            "backward": 3 * block + edges + reach + sums + 2 * column,
        }

    def misfit(self, chip: Chip, width: int, itemsize: int, *, segments: bool) -> str | None:
        """Why a kernel of this config does not fit the chip's VMEM, or None."""
        if chip.vmem_bytes is None:
            return None
        for kernel, needed in self.vmem_bytes(width, itemsize, segments=segments).items():
            if needed > chip.vmem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed / MIB:.0f} MiB of VMEM with {self}, and a {chip.name} has "
                    f"{chip.vmem_bytes / MIB:.0f}; use a smaller block_t or block_d, or implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(
        chip: Chip, length: int, d: int, width: int, itemsize: int, *, segments: bool = False
    ) -> "PallasTpuConfig":
        """The largest block that is worth its size and fits the chip's VMEM, and a row of blocks for each TensorCore."""
        per_core = -(-d // (LANES * chip.cores_per_device)) * LANES
        block_d = min(_CHANNELS, per_core)
        budget = _VMEM_SHARE * chip.vmem_bytes if chip.vmem_bytes else 0
        for block_t in _TOKENS:
            config = PallasTpuConfig(block_t, block_d)
            needed = max(config.vmem_bytes(width, itemsize, segments=segments).values())
            worth = block_t * block_d * itemsize <= _BLOCK_BYTES and block_t < length + ROW_TILE
            if worth and needed <= budget:
                return config
        return PallasTpuConfig(_TOKENS[-1], block_d)
