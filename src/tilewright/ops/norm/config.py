"""Block sizes of the norms.

A block of the TPU kernels is block_n whole rows. Nothing is reused between blocks, so the only gain of a larger one is
fewer grid steps. Inside, a loop takes tile_n rows at a time: enough of them to hide the latency of a row's sum. A block of
the Hopper kernels is block_n rows in the registers of 128 threads.
"""

from tilewright.core.chip import ROW_TILE
from tilewright.core.config import Config, search_over


class _RowBlocks(Config):
    choices = search_over(block_n=(16, 32, 64, 128, 256, 512, 1024), tile_n=(16, 32, 64, 128))
    memory_fields = ("block_n", "tile_n")

    block_n: int
    tile_n: int = ROW_TILE

    def __post_init__(self) -> None:
        self.check_integers("block_n", "tile_n", multiple=ROW_TILE, why="sublanes of a bfloat16 tile")
        if self.block_n > self.tile_n and self.block_n % self.tile_n:
            raise ValueError(
                f"block_n={self.block_n} must be a multiple of tile_n={self.tile_n}, or less than it; "
                f"use {-(-self.block_n // self.tile_n) * self.tile_n}"
            )


class NormTpuForward(_RowBlocks):
    """Rows of a block and of a tile of the forward kernel."""


class NormTpuBackward(_RowBlocks):
    """Rows of a block and of a tile of the backward kernel."""


class NormSm90Forward(Config):
    """Rows of a tile of `gated_rms_norm` on Hopper, which one thread block holds in registers."""

    choices = search_over(block_n=(1, 2, 4, 8, 16, 32, 64, 128))

    block_n: int

    def __post_init__(self) -> None:
        self.check_integers("block_n")


class NormSm90Backward(Config):
    """Rows of a tile of `gated_rms_norm`'s backward on Hopper, and thread blocks per multiprocessor.

    Each thread block has sums of its own for dw, so more of them than run at a time only cost bytes.
    """

    choices = search_over(block_n=(1, 2, 4, 8, 16, 32, 64), blocks=(2, 3, 4, 5, 6, 8))

    block_n: int
    blocks: int = 4

    def __post_init__(self) -> None:
        self.check_integers("block_n", "blocks")
