"""Block sizes of short convolution.

A block of the TPU kernels is block_t tokens of block_d channels; inside, loops take tile_t tokens of 128 channels at a
time. Blocks are taken in order of time, and the few rows that a block needs of its neighbour stay in VMEM. A thread block
of the Hopper kernels takes block_t tokens of block_d channels, `unroll` tokens at a time.
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
        self.check_integers("block_t", "tile_t", multiple=ROW_TILE, why="sublanes of a bfloat16 tile")
        self.check_integers("block_d", multiple=LANES, why="TPU lanes")
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


SM90_BLOCKS_D = (256, 512, 1024)
"""Channels that a thread block of the Hopper kernels may have: 2, 4 or 8 for each of its 128 threads."""


class _Runs(Config):
    choices = search_over(block_t=(16, 32, 64, 128, 256), block_d=SM90_BLOCKS_D, unroll=(2, 4, 8))

    block_t: int = 64
    block_d: int = 512
    unroll: int = 4
    """Tokens whose loads are issued together."""

    def __post_init__(self) -> None:
        self.check_integers("block_t", "unroll")
        if self.block_d not in SM90_BLOCKS_D:
            raise ValueError(
                f"block_d={self.block_d!r} must be one of {', '.join(map(str, SM90_BLOCKS_D))} (threads take 2, 4 or 8 "
                f"channels each); use 512"
            )
        if self.block_t % self.unroll:
            raise ValueError(
                f"block_t={self.block_t} must be a multiple of unroll={self.unroll}; "
                f"use {-(-self.block_t // self.unroll) * self.unroll}"
            )


class ShortConvSm90Forward(_Runs):
    """Tokens and channels of a thread block of the forward kernel."""


class ShortConvSm90Backward(_Runs):
    """Tokens and channels of a thread block of the backward kernel."""
