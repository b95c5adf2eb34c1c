"""Block sizes of grouped products."""

from tilewright.core.config import Config, search_over
from tilewright.pallas.gpu.tile_config import GemmTiles
from tilewright.pallas.tpu.tile_config import ProductBlocks, product_choices


class _RowBlocks(Config):
    choices = search_over(block_m=(16, 32, 64, 128, 256, 512))
    memory_fields = ("block_m",)

    block_m: int

    def __post_init__(self) -> None:
        self.check_integers("block_m", use=128)


class GroupedMatmulXlaForward(_RowBlocks):
    """Rows that are multiplied at a time; all of one group."""


class GroupedMatmulXlaBackward(_RowBlocks):
    """Rows that are multiplied at a time; all of one group."""


class GroupedMatmulSm90Forward(GemmTiles):
    """The tile of y, the order of the tiles, and the split of the registers. `cluster` is 1."""

    choices = search_over(**{name: values for name, values in GemmTiles.choices.items() if name != "cluster"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster != 1:
            raise ValueError(
                f"cluster={self.cluster} must be 1: adjacent tiles of rows may be of two groups, which share no columns of "
                f"w; use cluster=1"
            )


class GroupedMatmulSm90Backward(GemmTiles):
    """The same for dx and dw. `band` is dx's; `cluster` is dw's, and 1 where K has an odd number of tiles."""


class GroupedMatmulTpuForward(ProductBlocks):
    """Rows and columns of a block of y, and the channels that a step contracts."""

    choices = product_choices("block_m", "block_n", "block_k", "tile_m")
    memory_fields = tuple(choices)

    block_m: int
    block_n: int
    block_k: int
    tile_m: int
    """The rows of a block that are multiplied at a time where not all of them belong to one group."""


class GroupedMatmulTpuBackward(ProductBlocks):
    """The blocks of dx [M, K], which contracts N, and of dw [G, K, N], which contracts the rows of a group."""

    choices = product_choices(
        *("block_m_dx", "block_k_dx", "block_n_dx", "tile_m_dx"),
        *("block_m_dw", "block_k_dw", "block_n_dw", "tile_m_dw"),
    )
    memory_fields = tuple(choices)

    block_m_dx: int
    block_k_dx: int
    block_n_dx: int
    tile_m_dx: int
    block_m_dw: int
    block_k_dw: int
    block_n_dw: int
    tile_m_dw: int
    """The rows that dw's product takes at a time."""
