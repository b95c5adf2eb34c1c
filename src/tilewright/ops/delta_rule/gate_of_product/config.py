"""Block sizes of `kda_gate_of_product`."""

from tilewright.pallas.gpu.tile_config import GemmTiles


class GateOfProductSm90Forward(GemmTiles):
    """The tile of the gates and the order of the tiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_m < 64:
            raise ValueError(f"block_m={self.block_m} must be 64 or 128 (rows of wgmma); use 128")
