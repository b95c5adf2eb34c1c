"""The fields of a config that describe the tiles of a product on Hopper (pallas/gpu/gemm.py), and what they may be."""

import dataclasses
from typing import Any, ClassVar

from tilewright.core.config import Config, search_over

# A wgmma instruction has 64 rows and up to 256 columns; a row of a swizzled tile is 64 of bfloat16.
WIDTH = 64
WIDEST = 256
REGISTERS = 504  # Per thread, of all warpgroups of a thread block together.
LEAST_REGISTERS, MOST_REGISTERS = 24, 240
TALL = 3 * WIDTH
"""Rows of a tile of three consumer warpgroups. Their registers hold the sums of at most TALL_COLUMNS columns."""
TALL_COLUMNS = 128
_TWO_CONSUMERS, _THREE_CONSUMERS = (232, 40), (160, 24)  # The registers of a consumer, and of the producer.


class GemmTiles(Config):
    """A tile has `block_m` rows and `block_n` columns, and is summed in steps of 128 bytes of the contracted axis."""

    choices = search_over(
        block_n=(64, 128, 192, 256),
        stages=(2, 3, 4, 5, 6, 8),
        band=(4, 8, 16, 32),
        block_m=(WIDTH, 2 * WIDTH),
        cluster=(1, 2),
    )
    memory_fields = ("block_n", "stages", "block_m")
    tile_rows: ClassVar[tuple[int, ...]] = (8, 16, 32, WIDTH, 2 * WIDTH)
    """What `block_m` may be."""

    block_n: int
    """Columns of a tile; with "swiglu" half of them are gates."""
    stages: int
    """Steps of the contracted axis in shared memory."""
    band: int
    """Blocks of rows that share the columns of the right operand which are in the L2 cache."""
    _: dataclasses.KW_ONLY
    block_m: int = 128
    """Rows of a tile: 64 or 128, for one or two consumer warpgroups. For weights that are quantised and rows that are not,
    8, 16, 32 or 64 of them are multiplied with weights that the kernel converts (a tile has 128 columns then, whatever
    `block_n` says); with 128 the weights are converted before, for many rows."""
    cluster: int = 1
    """2: two thread blocks with adjacent rows share one read of their columns of the right operand. 1: each has its
    own."""
    consumer_registers: int | None = None
    producer_registers: int | None = None
    """Registers per thread of a consumer and of the producer. None: 232 and 40, or 160 and 24 with three consumers."""

    def __post_init__(self) -> None:
        check_tile(self, "block_n")
        if self.block_m not in self.tile_rows:
            rows = ", ".join(map(str, self.tile_rows))
            raise ValueError(f"block_m={self.block_m!r} must be one of {rows}; use 128")
        if self.block_m == TALL and self.block_n > TALL_COLUMNS:
            raise ValueError(
                f"block_n={self.block_n} must be at most {TALL_COLUMNS} with block_m={TALL}: three consumers have fewer "
                f"registers each; use block_n={TALL_COLUMNS}, or block_m=128"
            )


def check_tile(config: Config, columns: str) -> None:
    """Raises where the fields of a tile are not possible. `columns` is the name of the field that has its columns."""
    block = getattr(config, columns)
    if not isinstance(block, int) or block % WIDTH or not 0 < block <= WIDEST:
        raise ValueError(
            f"{columns}={block!r} must be a multiple of {WIDTH}, at most {WIDEST} (the columns of a wgmma instruction); "
            f"use {WIDEST}"
        )
    config.check_integers("stages", least=2, why="a copy runs while the previous step is used", use=4)
    config.check_integers("band", use=16)
    cluster, band = (getattr(config, name) for name in ("cluster", "band"))
    if cluster not in (1, 2):
        raise ValueError(f"cluster={cluster!r} must be 1 or 2 (thread blocks that share columns of w); use 2")
    if band % cluster:
        raise ValueError(f"band={band} must be a multiple of cluster={cluster}; use {band + 1}, or cluster=1")
    _check_registers(config)


def registers_of(config: Any) -> tuple[int, int]:
    """Registers per thread of a consumer and of the producer: a config's own, or the usual ones where they are None."""
    consumer, producer = _usual_registers(config)
    return config.consumer_registers or consumer, config.producer_registers or producer


def _usual_registers(config: Any) -> tuple[int, int]:
    return _THREE_CONSUMERS if _is_tall(config) else _TWO_CONSUMERS


def _is_tall(config: Any) -> bool:
    return getattr(config, "block_m", 0) == TALL


def _check_registers(config: Any) -> None:
    names = ("consumer_registers", "producer_registers")
    given = [name for name in names if getattr(config, name) is not None]
    config.check_integers(*given, least=LEAST_REGISTERS, multiple=8, why="setmaxnreg")
    consumer, producer = registers_of(config)
    consumers = 3 if _is_tall(config) else 2
    total = consumers * consumer + producer
    if max(consumer, producer) > MOST_REGISTERS or total > REGISTERS:
        use = _usual_registers(config)
        raise ValueError(
            f"consumer_registers={consumer} and producer_registers={producer} must be at most {MOST_REGISTERS} each, and "
            f"{consumers} consumers and a producer {REGISTERS} together ({total} here); use {use[0]} and {use[1]}"
        )
