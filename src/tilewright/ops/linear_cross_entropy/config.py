"""Block sizes of linear cross entropy.

In the TPU's forward, dx and dw kernels one axis stays in VMEM while the other streams past it: rows in the forward and
the dx kernel, vocabulary in the dw kernel. What stays is as large as fits, since what streams is read from HBM once for
each block that stays. A fourth kernel makes dx and dw from exponentials that the forward stored. The two Hopper kernels
compute tiles of logits with the same main loop.
"""

import dataclasses

from tilewright.core.chip import LANES, ROW_TILE
from tilewright.core.config import Config, search_over
from tilewright.pallas.gpu.tile_config import check_tile

STORED_COLUMNS = 4 * LANES
"""Blocks of stored exponentials on TPU have a multiple of this many columns: two halves, of pairs of lanes."""


class _LogitsTile(Config):
    choices = search_over(block_n=(64, 128, 256, 512, 1024, 2048), block_v=(512, 1024, 2048, 4096, 8192))
    memory_fields = ("block_n", "block_v")

    block_n: int
    block_v: int

    def __post_init__(self) -> None:
        self.check_integers("block_n", "block_v", use=1024)


class LinearCrossEntropyXlaForward(_LogitsTile):
    """Rows and columns of the tile of logits that exists at a time."""


class LinearCrossEntropyXlaBackward(_LogitsTile):
    """Rows and columns of the tile of logits that exists at a time."""


class _TpuBlocks(Config):
    """Subclasses name rows `block_n*` and columns `block_v*`."""

    _: dataclasses.KW_ONLY
    block_h: int = 2048
    """The part of H in one product of a kernel. It bounds the code that is generated, not the memory."""
    tile_n: int = 256
    """The rows of a block that are computed at a time, in a loop. It bounds the code and the tiles in VMEM."""

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        blocks = [name for name in names if name.startswith("block_n")]
        columns = [name for name in names if name.startswith(("block_v", "block_h"))]
        self.check_integers(*blocks, "tile_n", multiple=ROW_TILE, why="sublanes of a bfloat16 tile")
        self.check_integers(*columns, multiple=LANES, why="TPU lanes")
        for name in blocks:
            value = getattr(self, name)
            if value > self.tile_n and value % self.tile_n:
                raise ValueError(
                    f"{name}={value} must be a multiple of tile_n={self.tile_n}, or less than it; "
                    f"use {-(-value // self.tile_n) * self.tile_n}"
                )


class LinearCrossEntropyTpuForward(_TpuBlocks):
    """Block sizes of the forward kernel, and whether it stores for the backward."""

    choices = search_over(
        block_n=(128, 256, 512, 1024, 2048, 4096),
        block_v=(128, 256, 512, 1024, 2048),
        block_h=(1024, 2048, 4096),
        tile_n=(128, 256, 512),
        slots=(1, 2),
    )
    memory_fields = ("block_n", "block_v", "tile_n", "slots")

    block_n: int
    block_v: int
    _: dataclasses.KW_ONLY
    slots: int = 2
    """2: the products of the next tile of rows run beside the exponentials of this one, where a block has an even number of
    tiles. 1: one after the other, with a third of the code; enough where the MXU is the bottleneck anyway."""
    stored: bool = False
    """Whether exponentials are stored where a gradient is asked for, 2 bytes for each row and column. The backward then
    computes no logits. For bfloat16; block_v must be a multiple of 512."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots not in (1, 2):
            raise ValueError(f"slots={self.slots} must be 1 or 2; use 2")
        if self.stored and self.block_v % STORED_COLUMNS:
            raise ValueError(
                f"block_v={self.block_v} must be a multiple of {STORED_COLUMNS} where exponentials are stored; use "
                f"{-(-self.block_v // STORED_COLUMNS) * STORED_COLUMNS}, or stored=False"
            )


class LinearCrossEntropyTpuBackward(_TpuBlocks):
    """Block sizes of the dx and the dw kernel, which recompute the logits, and of the kernel that takes stored ones."""

    choices = search_over(
        block_n_dx=(128, 256, 512, 1024, 2048),
        block_v_dx=(128, 256, 512, 1024, 2048),
        block_n_dw=(128, 256, 512, 1024, 2048),
        block_v_dw=(128, 256, 512, 1024, 2048),
        block_n_stored=(256, 512, 1024, 2048, 4096),
        block_v_stored=(512, 1024, 2048),
        block_h_stored=(128, 256, 384, 512, 768, 1024, 2048),
        block_h=(1024, 2048, 4096),
        tile_n=(128, 256, 512),
    )
    memory_fields = (
        *("block_n_dx", "block_v_dx", "block_n_dw", "block_v_dw"),
        *("block_n_stored", "block_v_stored", "block_h_stored", "tile_n"),
    )

    block_n_dx: int
    block_v_dx: int
    block_n_dw: int
    block_v_dw: int
    _: dataclasses.KW_ONLY
    block_n_stored: int = 1024
    block_v_stored: int = 512
    block_h_stored: int = 256
    """The part of H whose dx is accumulated for all rows at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("block_v_stored", multiple=STORED_COLUMNS, why="two halves of pairs of lanes")


class _Sm90Tiles(Config):
    """A tile of logits has 128 rows and `block_v` columns, and is summed over H in steps of 64."""

    choices = search_over(
        block_v=(64, 128, 192, 256),
        stages=(2, 3, 4, 5, 6),
        band=(4, 8, 16, 32),
        cluster=(1, 2),
    )
    memory_fields = ("block_v", "stages")

    block_v: int
    stages: int
    """Steps of 64 of H in shared memory."""
    band: int
    """Blocks of 128 rows that share the columns of w which are in the L2 cache."""
    _: dataclasses.KW_ONLY
    cluster: int = 2
    """2: two thread blocks with adjacent rows share one read of their columns of w. 1: each reads its own."""
    consumer_registers: int = 232
    producer_registers: int = 40
    """Registers per thread of a consumer and of the producer. With 24 the producer spills where loops have odd sizes."""

    def __post_init__(self) -> None:
        check_tile(self, "block_v")


class LinearCrossEntropySm90Forward(_Sm90Tiles):
    """The tile of logits of the forward kernel, the order of the tiles, and what is stored for the backward."""

    stored_v: int = 0
    """Columns of the vocabulary whose exponentials are stored where a gradient is asked for, 2 bytes for each row and
    column. The backward recomputes the logits of all others. 0 takes the least memory, V the least time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("stored_v", least=0, why="columns", use="0")
        if self.stored_v % self.block_v:
            whole = -(-self.stored_v // self.block_v) * self.block_v
            raise ValueError(
                f"stored_v={self.stored_v} must be a multiple of block_v={self.block_v}; use {whole}, which may be more "
                f"than the vocabulary has"
            )


class LinearCrossEntropySm90Backward(_Sm90Tiles):
    """The same for the backward kernel, and how many gradients of logits exist at a time."""

    choices = search_over(**_Sm90Tiles.choices, chunk_v=(4096, 8192, 16384, 32768))
    memory_fields = (*_Sm90Tiles.memory_fields, "chunk_v")

    chunk_v: int
    """Columns of the gradients of logits that are stored at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("chunk_v", multiple=self.block_v, why="block_v", use=64 * self.block_v)
