"""Block sizes of attention over a cache of latents."""

from tilewright.core.config import Config, search_over
from tilewright.ops.attention.decode.config import SM90_MOST_SPLITS


class DecodeLatentSm90Forward(Config):
    """How a thread block goes through its share of a sequence, and how many thread blocks share one."""

    choices = search_over(stages=(2, 3, 4), splits=(1, 2, 4, 8, 16, 32), combine_block_v=(32, 64, 128))
    memory_fields = ("stages",)
    one_size_fields = ("splits",)

    stages: int
    """Blocks of 64 latents in shared memory: the copies of all but one are in flight while that one is used."""
    splits: int
    """Thread blocks that share the latents of a sequence and a tile of heads, in equal parts of its length."""
    combine_splits: int = 32
    """Splits that the combine kernel loads at a time."""
    combine_block_v: int = 32
    """Value channels of a thread block of the combine kernel."""

    def __post_init__(self) -> None:
        self.check_integers("stages", least=2, why="a copy runs while a block is used")
        if not isinstance(self.splits, int) or not 1 <= self.splits <= SM90_MOST_SPLITS:
            raise ValueError(f"splits={self.splits!r} must be from 1 to {SM90_MOST_SPLITS}; use 1")
        self.check_integers("combine_splits")
        self.check_integers("combine_block_v", multiple=16, why="lanes that share a row")
