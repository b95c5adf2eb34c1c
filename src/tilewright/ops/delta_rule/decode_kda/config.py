"""Block sizes of `decode_kda`."""

from tilewright.core.config import Config, search_over

_BLOCKS_B = (16, 32, 64)


class DecodeKdaSm90Forward(Config):
    """The tiles of the product with the five large weights, and the sequences of a thread block behind it."""

    choices = search_over(block_b=_BLOCKS_B, stages=(3, 4, 5), splits=(1, 2, 4, 8, 16), rows=(1, 2, 4, 8))
    one_size_fields = ("splits",)

    block_b: int
    """Sequences of a tile of the product: 16, 32 or 64."""
    stages: int
    """Steps of 128 channels of x in shared memory."""
    splits: int
    """Thread blocks that divide the channels of x between them."""
    rows: int
    """Sequences of a thread block of the second kernel, which has one head of them."""

    def __post_init__(self) -> None:
        if self.block_b not in _BLOCKS_B:
            raise ValueError(f"block_b={self.block_b!r} must be 16, 32 or 64 (columns of a product); use 16")
        self.check_integers("stages", least=2, why="a copy runs while the previous step is used", use=4)
        self.check_integers("splits", "rows", use=1)
