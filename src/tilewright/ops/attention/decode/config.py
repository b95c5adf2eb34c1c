"""Block sizes of attention over a cache."""

from tilewright.core.chip import ROW_TILE
from tilewright.core.config import Config, search_over

_SM90_BLOCKS = (64, 128)
SM90_MOST_SPLITS = 128


class DecodeTpuForward(Config):
    """What a grid step fetches, for some of the key heads: keys of a cache in one piece, or pages of a paged one."""

    choices = search_over(block_k=(128, 256, 512, 1024), pages=(1, 2, 4, 8, 16), block_heads=(1, 2, 4, 8))
    memory_fields = ("block_k", "pages", "block_heads")

    block_k: int
    """Keys per step, where the cache is in one piece."""
    pages: int
    """Pages per step, where it is in pages."""
    block_heads: int
    """Key heads per step. It must divide KV, and fill whole lanes or be all of them."""

    def __post_init__(self) -> None:
        why = "sublanes of a bfloat16 tile"
        self.check_integers("block_k", multiple=ROW_TILE, why=why, use=512)
        self.check_integers("pages", "block_heads", use=1)


class DecodeSm90Forward(Config):
    """How a thread block goes through its share of a sequence, and how many thread blocks share one."""

    choices = search_over(
        block_k=(64, 128),
        stages=(2, 3, 4, 5, 6),
        splits=(1, 2, 4, 8, 16, 32, 64),
        combine_splits=(16, 32),
        combine_block_v=(16, 32, 64),
    )
    memory_fields = ("block_k", "stages")
    one_size_fields = ("splits",)

    block_k: int
    """Keys that are fetched at a time."""
    stages: int
    """Blocks of keys in shared memory: the copies of all but one are in flight while that one is used."""
    splits: int
    """Thread blocks that share the keys of a sequence and key head, in equal parts of its length."""
    combine_splits: int = 32
    """Splits that the combine kernel loads at a time: loads in flight, at four registers of a thread each."""
    combine_block_v: int = 32
    """Value channels of a thread block of the combine kernel: B1 KV8 D128 has 32 blocks."""
    longest_first: bool = False
    """Whether thread blocks take sequences from the longest to the shortest, for at most 128, or as they come. With it, a
    quarter, a half or all of a last block of keys without pages is copied."""

    def __post_init__(self) -> None:
        if self.block_k not in _SM90_BLOCKS:
            raise ValueError(
                f"block_k={self.block_k!r} must be one of {', '.join(map(str, _SM90_BLOCKS))} (a product's columns, in "
                f"whole tiles); use 64"
            )
        self.check_integers("stages", least=2, why="a copy runs while a block is used")
        if not isinstance(self.splits, int) or not 1 <= self.splits <= SM90_MOST_SPLITS:
            raise ValueError(f"splits={self.splits!r} must be from 1 to {SM90_MOST_SPLITS}; use 1")
        self.check_integers("combine_splits")
        self.check_integers("combine_block_v", multiple=16, why="lanes that share a row")
