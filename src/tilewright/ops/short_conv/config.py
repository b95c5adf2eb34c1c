"""Block sizes of short convolution.

A block of the TPU kernels is block_t tokens of block_d channels; inside, loops take tile_t tokens of 128 channels at a
time. Blocks are taken in order of time, and the few rows that a block needs of its neighbour stay in VMEM.
"""

from tilewright.core.chip import LANES, ROW_TILE
from tilewright.core.config import Config, search_over


class _Blocks(Config):
    choices = search_over(
        block_t=(128, 256, 512, 1024, 2048),
        block_d=(128, 256, 512, 1024),
        tile_t=(32, 64, 128),
        unroll=(2, 4, 8, 16),
    )
    memory_fields = ("block_t", "block_d")

    block_t: int
    block_d: int
    tile_t: int = 64
    """Tokens that are computed at a time. Longer tiles spill registers: libtpu for a v6e, block_t=512, bfloat16, stores
    of the forward that are spills: 0 of 262 with 64 tokens, 296 of 558 with 256."""
    unroll: int = 8
    """Tiles per iteration of the loop, at most. With one, each tile waits for its own latencies."""

    def __post_init__(self) -> None:
        xla = "implementation='xla'"
        self.check_integers("block_t", "tile_t", multiple=ROW_TILE, why="sublanes of a bfloat16 tile", otherwise=xla)
        self.check_integers("block_d", multiple=LANES, why="TPU lanes", otherwise=xla)
        self.check_integers("unroll")
        if self.block_t > self.tile_t and self.block_t % self.tile_t:
            raise ValueError(
                f"block_t={self.block_t} must be a multiple of tile_t={self.tile_t}, or less than it; "
                f"use {-(-self.block_t // self.tile_t) * self.tile_t}"
            )


class ShortConvTpuForward(_Blocks):
    """Tokens and channels of a block of the forward kernel."""


class ShortConvTpuBackward(_Blocks):
    """Tokens and channels of a block of the backward kernel."""
