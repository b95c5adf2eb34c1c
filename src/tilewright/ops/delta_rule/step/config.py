"""Block sizes of the delta rule's steps."""

from tilewright.core.config import Config, search_over

_BLOCKS_V = (16, 32, 64, 128)


class DeltaRuleStepSm90Forward(Config):
    """Value channels of a thread block, which holds all key channels of them.

    A row of 32 float32 is one line of 128 bytes, and 32 heads of 128 channels make a block for nearly every multiprocessor
    of an H200.
    """

    choices = search_over(block_v=_BLOCKS_V)

    block_v: int = 32

    def __post_init__(self) -> None:
        if self.block_v not in _BLOCKS_V:
            raise ValueError(
                f"block_v={self.block_v!r} must be one of {', '.join(map(str, _BLOCKS_V))} (threads take 2 or 4 "
                f"channels each); use 32"
            )
