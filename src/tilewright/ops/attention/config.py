"""Block sizes of flash attention, per implementation and direction.

TPU: a block of queries stays in VMEM while blocks of keys and values stream past, in the forward and in the backward
kernel. A block is what is fetched; within a step it is computed in tiles, whose size decides how the products of one
tile and the exponentials of another overlap.
Hopper: a block of queries stays in shared memory while blocks of keys and values stream past in the forward kernel, and
the other way round in the backward kernel. Two consumer warpgroups, or three, compute; a producer warpgroup copies.
"""

from tilewright.core.chip import LANES
from tilewright.core.config import Config, search_over
from tilewright.masks.block_list import MOST_TILES

# A consumer warpgroup computes 64 rows (the rows of a wgmma product).
SM90_ROWS, SM90_CONSUMERS = 64, 2
SM90_BLOCK = SM90_ROWS * SM90_CONSUMERS
# Registers of a multiprocessor, in units of one register for each thread of a warpgroup.
_SM90_REGISTERS = 512
SM90_FEWEST_BUFFERS = 2


class _XlaTiles(Config):
    choices = search_over(block_q=(64, 128, 256, 512, 1024), block_k=(64, 128, 256, 512, 1024))
    memory_fields = ("block_q", "block_k")

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        self.check_integers("block_q", "block_k", use=512)


class AttentionXlaForward(_XlaTiles):
    """Queries and keys of the tile of logits that exists at a time, for all heads together."""


class AttentionXlaBackward(_XlaTiles):
    """Queries and keys of the tile of logits that exists at a time, for all heads together."""


class _TpuTiles(Config):
    choices = search_over(
        block_q=(128, 256, 512, 1024, 2048),
        block_k=(128, 256, 512, 1024, 2048),
        tile_q=(128, 256, 512),
        tile_k=(128, 256, 512, 1024),
    )
    memory_fields = ("block_q", "block_k", "tile_q", "tile_k")

    block_q: int
    block_k: int
    tile_q: int
    tile_k: int

    def __post_init__(self) -> None:
        self.check_integers(*self.memory_fields, multiple=LANES, why="TPU lanes")
        self._check_division("block_q", "tile_q")
        self._check_division("block_k", "tile_k")
        for block, tile in (("block_q", "tile_q"), ("block_k", "tile_k")):
            size, divisor = getattr(self, block), getattr(self, tile)
            if size // divisor > MOST_TILES:
                raise ValueError(
                    f"{block}={size} has {size // divisor} tiles of {tile}={divisor}, and a step takes {MOST_TILES} at "
                    f"most; use a larger {tile}"
                )

    def _check_division(self, whole: str, part: str) -> None:
        size, divisor = getattr(self, whole), getattr(self, part)
        if size % divisor:
            raise ValueError(
                f"{whole}={size} must be a multiple of {part}={divisor}; use {-(-size // divisor) * divisor}"
            )


class AttentionTpuForward(_TpuTiles):
    """Blocks and tiles of the forward kernel."""

    choices = search_over(**_TpuTiles.choices, unroll=(0, 1, 2, 4))

    unroll: int = 0
    """Tiles of keys per pass of the loop over a full block; 0 unrolls the whole block. Longer passes overlap more, and take
    longer to compile."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_integers("unroll", least=0)
        if not self.unroll:
            return
        if self.block_k % (self.tile_k * self.unroll):
            raise ValueError(
                f"block_k={self.block_k} must be a multiple of tile_k={self.tile_k} times unroll={self.unroll}; "
                "use unroll=1, or unroll=0 to unroll the whole block"
            )
        if self.block_q // self.tile_q * self.unroll % 2:
            raise ValueError(
                f"block_q={self.block_q} and tile_q={self.tile_q} with unroll={self.unroll} are an odd number of tiles per "
                "pass, and two buffers take turns; use an even unroll, or unroll=0"
            )


class AttentionTpuBackward(_TpuTiles):
    """Blocks and tiles of the backward kernel."""

    choices = search_over(**_TpuTiles.choices, chunk_k=(1024, 2048, 4096, 8192))
    memory_fields = (*_TpuTiles.memory_fields, "chunk_k")

    chunk_k: int
    """The keys whose gradients are accumulated in VMEM at a time. dq is summed over the chunks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_division("chunk_k", "block_k")


_FEWEST_STAGES = {"least": 2, "why": "a copy runs while the block before is used"}


class AttentionSm90Forward(Config):
    """The forward kernel for Hopper. A block is 64 queries per consumer warpgroup."""

    choices = search_over(block_k=(64, 128, 192), stages=(2, 3, 4), consumers=(2, 3), overlap=(False, True))
    memory_fields = ("block_k", "stages", "consumers")

    block_k: int
    stages: int
    """Blocks of keys and values in shared memory at a time."""
    consumers: int = SM90_CONSUMERS
    """Consumer warpgroups: 2 with 240 registers per thread, or 3 with 160, which suits narrow heads."""
    overlap: bool = True
    """Whether a consumer computes a softmax while its own product with the values runs. Otherwise the consumers take
    turns: one computes its softmax while another's products run."""

    def __post_init__(self) -> None:
        most = 2 * SM90_BLOCK
        if not isinstance(self.block_k, int) or self.block_k % SM90_ROWS or not 0 < self.block_k <= most:
            raise ValueError(
                f"block_k={self.block_k!r} must be a multiple of {SM90_ROWS}, {most} at most (a product's "
                f"columns); use {SM90_BLOCK}"
            )
        self.check_integers("stages", **_FEWEST_STAGES)
        if self.consumers not in (SM90_CONSUMERS, SM90_CONSUMERS + 1):
            raise ValueError(
                f"consumers={self.consumers!r} must be {SM90_CONSUMERS} or {SM90_CONSUMERS + 1} (registers of a "
                f"multiprocessor); use {SM90_CONSUMERS}"
            )


class AttentionSm90Backward(Config):
    """The backward kernels for Hopper: one for heads of up to 128, one for wider heads.

    Their blocks follow from the hardware: 128 keys, and as many queries as make a tile of dq two products of 64 x 64;
    64 keys and 64 queries for wider heads, whose kernel takes 2 stages and 2 buffers only.
    """

    choices = search_over(stages=(2, 3), buffers=(2, 3, 4), consumer_registers=(224, 232, 240))
    memory_fields = ("stages", "buffers")

    stages: int
    """Blocks of queries in shared memory at a time."""
    buffers: int
    """Buffers for the gradients of logits. With 2, a consumer waits until the other has read what it overwrites."""
    consumer_registers: int = 240
    producer_registers: int = 24

    def __post_init__(self) -> None:
        self.check_integers("stages", **_FEWEST_STAGES)
        self.check_integers("buffers", least=SM90_FEWEST_BUFFERS)
        names = ("consumer_registers", "producer_registers")
        self.check_integers(*names, least=24, multiple=8, why="registers of a thread are allocated in eights")
        consumers, producer = self.consumer_registers, self.producer_registers
        if SM90_CONSUMERS * consumers + producer > _SM90_REGISTERS:
            raise ValueError(
                f"consumer_registers={consumers} and producer_registers={producer} exceed the registers of a "
                f"multiprocessor: {SM90_CONSUMERS} consumer_registers + producer_registers must be {_SM90_REGISTERS} at "
                "most; use 240 and 24"
            )
