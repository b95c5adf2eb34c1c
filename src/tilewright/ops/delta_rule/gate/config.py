"""Block sizes of `kda_gate`'s gradient."""

from tilewright.core.config import Config, search_over

SM90_BLOCKS_D = (256, 512, 1024)
"""Channels that a thread block may have: 2, 4 or 8 for each of its 128 threads."""


class KdaGateSm90Backward(Config):
    """Channels and tokens of a thread block on Hopper, and thread blocks per multiprocessor.

    Each thread block has sums of its own, so more of them than run at a time only cost bytes.
    """

    choices = search_over(block_d=SM90_BLOCKS_D, unroll=(1, 2, 4, 8), blocks=(2, 3, 4, 5, 6, 8, 12))

    block_d: int = 1024
    unroll: int = 2
    """Tokens whose loads are issued together."""
    blocks: int = 3
    """Thread blocks per multiprocessor."""

    def __post_init__(self) -> None:
        self.check_integers("unroll", "blocks")
        if self.block_d not in SM90_BLOCKS_D:
            raise ValueError(
                f"block_d={self.block_d!r} must be one of {', '.join(map(str, SM90_BLOCKS_D))} (threads take 2, 4 or 8 "
                f"channels each); use 1024"
            )
