"""Block sizes of products in Mosaic TPU kernels, for the configs of several families."""

import dataclasses
from collections.abc import Mapping

from tilewright.core.chip import LANES, ROW_TILE
from tilewright.core.config import Config, search_over


def product_choices(*names: str) -> Mapping[str, tuple[int, ...]]:
    """The block and tile sizes to search, for fields of these names."""
    tiles, blocks = (128, 256, 512), (128, 256, 512, 1024, 2048)
    return search_over(**{name: tiles if name.startswith("tile") else blocks for name in names})


class ProductBlocks(Config):
    """Base of block sizes. Rows of x are named `block_m*` and `tile_m*`; everything else lies along lanes."""

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        rows = [name for name in names if name.startswith(("block_m", "tile_m"))]
        self.check_integers(*rows, multiple=ROW_TILE, why="sublanes of a bfloat16 tile")
        lanes = [name for name in names if name not in rows]
        self.check_integers(*lanes, multiple=LANES, why="TPU lanes")
        for name in names:
            if name.startswith("tile"):
                self._check_tile(name, name.replace("tile", "block"))

    def _check_tile(self, name: str, block: str) -> None:
        tile, size = getattr(self, name), getattr(self, block)
        if size > tile and size % tile:
            raise ValueError(
                f"{block}={size} must be a multiple of {name}={tile}, or at most that; use {-(-size // tile) * tile}"
            )
