"""Block sizes of the delta-rule family, an implementation each; validated when built."""

from dataclasses import dataclass

_SMALLEST_CHUNK, _CHUNK = 8, 64
_XLA_BLOCK_CHUNKS = 16


@dataclass(frozen=True)
class XlaConfig:
    """Tokens in a chunk, and chunks that are worked on at a time.

    The chunks of a block go through their products together; the state goes through them in order. The forward keeps a state
    for each block, and the backward makes the rest anew, a block at a time.
    """

    chunk: int = _CHUNK
    block_chunks: int = _XLA_BLOCK_CHUNKS

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 2 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk={self.chunk!r} must be a power of two, at least 2; use {_CHUNK}")
        if not isinstance(self.block_chunks, int) or self.block_chunks < 1:
            raise ValueError(f"block_chunks={self.block_chunks!r} must be a positive integer; use {_XLA_BLOCK_CHUNKS}")

    @staticmethod
    def for_length(t: int) -> "XlaConfig":
        chunk = _SMALLEST_CHUNK
        while chunk < min(t, _CHUNK):
            chunk *= 2
        return XlaConfig(chunk, min(_XLA_BLOCK_CHUNKS, -(-t // chunk)))
