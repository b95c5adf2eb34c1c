"""Block sizes of attention over a cache on TPU; validated when built."""

from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip

_VMEM_SHARE = 0.6


@dataclass(frozen=True)
class PallasTpuConfig:
    """What a step fetches: keys of a cache in one piece, or pages of a paged one, for some of the key heads."""

    block_k: int
    """Keys of a step, where the cache is in one piece."""
    pages: int
    """Pages of a step, where it is in pages."""
    block_heads: int
    """Key heads of a step. It must divide KV, and fill whole lanes or be all of them."""

    def __post_init__(self) -> None:
        if not isinstance(self.block_k, int) or self.block_k < 1 or self.block_k % ROW_TILE:
            raise ValueError(
                f"block_k={self.block_k!r} must be a positive multiple of {ROW_TILE} (sublanes of a bfloat16 tile); "
                f"use 512, or implementation='xla'"
            )
        for name in ("pages", "block_heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer; use 1")

    def vmem_bytes(self, keys: int, d: int, dv: int, itemsize: int) -> int:
        """An estimate: a step's keys and values twice for the pipeline, and once more while they are computed with."""
        widths = sum(-(-self.block_heads * width // LANES) * LANES for width in (d, dv))
        return 3 * keys * widths * itemsize

    @staticmethod
    def for_shape(
        chip: Chip, room: int, page: int | None, heads: int, d: int, dv: int, itemsize: int
    ) -> "PallasTpuConfig":
        """About 512 keys a step, of up to four heads at a time, as far as they fit."""
        fitting = [
            n for n in range(1, heads + 1) if heads % n == 0 and (n == heads or n * d % LANES == n * dv % LANES == 0)
        ]
        block_heads = max((n for n in fitting if n <= 4), default=fitting[0])
        keys = min(512, -(-room // ROW_TILE) * ROW_TILE)
        budget = _VMEM_SHARE * (chip.vmem_bytes or 16 * MIB)
        while keys > ROW_TILE:
            config = PallasTpuConfig(keys, 1, block_heads)
            if config.vmem_bytes(keys, d, dv, itemsize) <= budget:
                break
            keys = max(ROW_TILE, keys // 2 // ROW_TILE * ROW_TILE)
        # More pages than these are more copies and code a step than they save.
        pages = 1 if page is None else min(max(1, keys // page), 8, -(-room // page))
        return PallasTpuConfig(keys, pages, block_heads)
