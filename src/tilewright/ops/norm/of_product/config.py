"""Block sizes of `gated_rms_norm_of_product`."""

import dataclasses

from tilewright.core.config import search_over
from tilewright.pallas.gpu.tile_config import GemmTiles

HEAD = 128
"""Channels of a head: a tile has one or two of them."""


class NormOfProductSm90Forward(GemmTiles):
    """The tile of the gate, the order of the tiles, and the heads of o in shared memory."""

    choices = search_over(**{**GemmTiles.choices, "block_n": (HEAD, 2 * HEAD), "heads": (1, 2, 3, 4)})
    memory_fields = (*GemmTiles.memory_fields, "heads")

    _: dataclasses.KW_ONLY
    heads: int = 2
    """Heads of o per consumer warpgroup that are in shared memory: those that arrive, and those that the results replace
    and leave."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_n % HEAD:
            raise ValueError(f"block_n={self.block_n} must be {HEAD} or {2 * HEAD} (whole heads); use {2 * HEAD}")
        self.check_integers("heads", least=self.block_n // HEAD, why="those of a tile", use=self.block_n // HEAD)
        if self.block_m < 64:
            raise ValueError(f"block_m={self.block_m} must be 64 or 128 (rows of wgmma); use 128")
