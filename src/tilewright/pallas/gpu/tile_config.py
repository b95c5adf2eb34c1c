"""The fields of a config that describe the tiles of a product on Hopper (pallas/gpu/gemm.py), and what they may be."""

import dataclasses

from tilewright.core.config import Config, search_over

# A wgmma instruction has 64 rows and up to 256 columns; a row of a swizzled tile is 64 of bfloat16.
WIDTH = 64
WIDEST = 256
REGISTERS = 504  # Per thread, of the three warpgroups of a thread block together.
LEAST_REGISTERS, MOST_REGISTERS = 24, 240


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

    block_n: int
    """Columns of a tile; with "swiglu" half of them are gates."""
    stages: int
    """Steps of the contracted axis in shared memory."""
    band: int
    """Blocks of rows that share the columns of the right operand which are in the L2 cache."""
    _: dataclasses.KW_ONLY
    block_m: int = 128
    """Rows of a tile: 64 or 128, for one or two consumer warpgroups. For weights that are quantised and rows that are not,
    16, 32 or 64 of them are multiplied with weights that the kernel converts (a tile has 128 columns then, whatever
    `block_n` says); with 128 the weights are converted before, for many rows."""
    cluster: int = 1
    """2: two thread blocks with adjacent rows share one read of their columns of the right operand. 1: each has its
    own."""
    consumer_registers: int = 232
    producer_registers: int = 40
    """Registers per thread of a consumer and of the producer."""

    def __post_init__(self) -> None:
        check_tile(self, "block_n")
        if self.block_m not in (16, 32, 64, 128):
            raise ValueError(f"block_m={self.block_m!r} must be 64 or 128, or 16 or 32 for quantised weights; use 128")


def check_tile(config: Config, columns: str) -> None:
    """Raises where the fields of a tile are not possible. `columns` is the name of the field that has its columns."""
    block = getattr(config, columns)
    if not isinstance(block, int) or block % WIDTH or not 0 < block <= WIDEST:
        raise ValueError(
            f"{columns}={block!r} must be a multiple of {WIDTH}, at most {WIDEST} (the columns of a wgmma instruction); "
            f"use {WIDEST}, or implementation='xla'"
        )
    config.check_integers("stages", least=2, why="a copy runs while the previous step is used", use=4)
    config.check_integers("band", use=16)
    fields = ("cluster", "band", "consumer_registers", "producer_registers")
    cluster, band, consumer, producer = (getattr(config, name) for name in fields)
    if cluster not in (1, 2):
        raise ValueError(f"cluster={cluster!r} must be 1 or 2 (thread blocks that share columns of w); use 2")
    if band % cluster:
        raise ValueError(f"band={band} must be a multiple of cluster={cluster}; use {band + 1}, or cluster=1")
    config.check_integers(*fields[2:], least=LEAST_REGISTERS, multiple=8, why="setmaxnreg")
    total = 2 * consumer + producer
    if max(consumer, producer) > MOST_REGISTERS or total > REGISTERS:
        raise ValueError(
            f"consumer_registers={consumer} and producer_registers={producer} must be at most {MOST_REGISTERS} each, and "
            f"two consumers and a producer {REGISTERS} together ({total} here); use 232 and 40"
        )
