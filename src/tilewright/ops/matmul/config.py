"""Block sizes of matrix products."""

from tilewright.core.config import search_over
from tilewright.pallas.gpu.tile_config import TALL, GemmTiles
from tilewright.pallas.tpu.tile_config import ProductBlocks, product_choices


class MatmulSm90Forward(GemmTiles):
    """The tile of y, the order of the tiles, and the split of the registers.

    A `block_m` of 16, 32 or 64 is for few rows (sm90_few_rows.py, or weight_only.py for quantised weights, which takes 8,
    too): a tile has 128 columns then, whatever `block_n` says. One of 192 has three consumer warpgroups, for two quantised
    operands; `block_n` is at most 128 then.
    """

    tile_rows = (*GemmTiles.tile_rows, TALL)
    choices = search_over(**{**GemmTiles.choices, "block_m": tile_rows, "splits": (1, 2, 4, 8, 16)})
    one_size_fields = ("splits",)

    splits: int = 1
    """Thread blocks that divide the contracted axis of a tile between them, with few rows and weights that are not
    quantised."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("splits", use=1)


class MatmulSm90Backward(GemmTiles):
    """The same for dx and dw."""


class MatmulTpuForward(ProductBlocks):
    """Rows and columns of a block of y, and the channels that a step contracts."""

    choices = product_choices("block_m", "block_n", "block_k", "tile_m")
    memory_fields = tuple(choices)

    block_m: int
    block_n: int
    block_k: int
    tile_m: int
    """The rows of a block whose product is unrolled; a loop takes the others. It bounds the code, not the memory."""


class MatmulTpuBackward(ProductBlocks):
    """The blocks of dx [M, K], which contracts N, and of dw [K, N], which contracts M."""

    choices = product_choices(
        *("block_m_dx", "block_k_dx", "block_n_dx", "tile_m_dx"),
        *("block_k_dw", "block_n_dw", "block_m_dw", "tile_k_dw"),
    )
    memory_fields = tuple(choices)

    block_m_dx: int
    block_k_dx: int
    block_n_dx: int
    tile_m_dx: int
    block_k_dw: int
    block_n_dw: int
    block_m_dw: int
    tile_k_dw: int
