"""Block sizes of grouped products."""

from tilewright.core.config import Config


class _RowBlocks(Config):
    block_m: int

    def __post_init__(self) -> None:
        self.check_integers("block_m", use=128)


class GroupedMatmulXlaForward(_RowBlocks):
    """Rows that are multiplied at a time; all of one group."""


class GroupedMatmulXlaBackward(_RowBlocks):
    """Rows that are multiplied at a time; all of one group."""
