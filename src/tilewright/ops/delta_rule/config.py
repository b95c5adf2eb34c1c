"""Block sizes of the delta-rule family, an implementation each; validated when built."""

from dataclasses import dataclass

from tilewright.core.chip import Chip

_SMALLEST_CHUNK = 8
# The work inside a chunk grows with its length, the work of passing the state on falls. CPUs like the former small.
_CHUNK, _CPU_CHUNK = 64, 32
_XLA_BLOCK_TOKENS = 1024


@dataclass(frozen=True)
class XlaConfig:
    """Tokens in a chunk, and chunks that are worked on at a time.

    The chunks of a block go through their products together; the state goes through them in order. The forward keeps a state
    for each block, and the backward makes the rest anew, a block at a time.
    """

    chunk: int = _CHUNK
    block_chunks: int = _XLA_BLOCK_TOKENS // _CHUNK

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 2 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk={self.chunk!r} must be a power of two, at least 2; use {_CHUNK}")
        if not isinstance(self.block_chunks, int) or self.block_chunks < 1:
            raise ValueError(f"block_chunks={self.block_chunks!r} must be a positive integer; use {_XLA_BLOCK_TOKENS // _CHUNK}")

    @staticmethod
    def for_length(t: int, chip: Chip) -> "XlaConfig":
        largest = _CPU_CHUNK if chip.platform == "cpu" else _CHUNK
        chunk = _SMALLEST_CHUNK
        while chunk < min(t, largest):
            chunk *= 2
        return XlaConfig(chunk, min(_XLA_BLOCK_TOKENS // chunk, -(-t // chunk)))
