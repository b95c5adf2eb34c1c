"""Block sizes of `matmul_sum`."""

from tilewright.pallas.gpu.tile_config import GemmTiles


class MatmulSumSm90Forward(GemmTiles):
    """The tile of y and the order of the tiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_m < 64:
            raise ValueError(f"block_m={self.block_m} must be 64 or 128 (rows of wgmma); use 128")
