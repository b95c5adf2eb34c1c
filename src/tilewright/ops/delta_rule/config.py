"""Block sizes of the delta-rule family, an implementation each; validated when built."""

from dataclasses import dataclass

from tilewright.core.chip import MIB, Chip

LANES = 128
ROW_TILE = 16  # Sublanes of a bfloat16 tile, the larger of the two dtypes' tiles.
_FLOAT32_BYTES = 4

_SMALLEST_CHUNK = 8
# The work inside a chunk grows with its length, the work of passing the state on falls. CPUs like the former small.
_CHUNK, _CPU_CHUNK = 64, 32
_XLA_BLOCK_TOKENS = 1024

# Eight chunks are the rows of a float32 tile, which the gates of a block come in.
_TPU_BLOCK_CHUNKS = 8
_TPU_HEADS = 4


@dataclass(frozen=True)
class XlaConfig:
    """Tokens in a chunk, and chunks that are worked on at a time.

    The chunks of a block go through their products together; the state goes through them in order. The forward keeps a
    state for each block, and the backward makes the rest anew, a block at a time.
    """

    chunk: int = _CHUNK
    block_chunks: int = _XLA_BLOCK_TOKENS // _CHUNK

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 2 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk={self.chunk!r} must be a power of two, at least 2; use {_CHUNK}")
        if not isinstance(self.block_chunks, int) or self.block_chunks < 1:
            raise ValueError(
                f"block_chunks={self.block_chunks!r} must be a positive integer; use {_XLA_BLOCK_TOKENS // _CHUNK}"
            )

    @staticmethod
    def for_length(t: int, chip: Chip) -> "XlaConfig":
        largest = _CPU_CHUNK if chip.platform == "cpu" else _CHUNK
        chunk = _SMALLEST_CHUNK
        while chunk < min(t, largest):
            chunk *= 2
        return XlaConfig(chunk, min(_XLA_BLOCK_TOKENS // chunk, -(-t // chunk)))


@dataclass(frozen=True)
class PallasTpuConfig:
    """Tokens in a chunk, chunks in a block, and value heads in a block.

    Heads of a block are worked on two and two, side by side in the lanes, and their schedules overlap: more heads hide
    more of the latency of each other's products, and make the code longer.
    """

    chunk: int = _CHUNK
    block_chunks: int = _TPU_BLOCK_CHUNKS
    heads: int = _TPU_HEADS

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < ROW_TILE or self.chunk & (self.chunk - 1):
            raise ValueError(
                f"chunk={self.chunk!r} must be a power of two, at least {ROW_TILE} (the rows of a bfloat16 tile); "
                f"use {_CHUNK}, or implementation='xla'"
            )
        if not isinstance(self.block_chunks, int) or self.block_chunks < 1:
            raise ValueError(f"block_chunks={self.block_chunks!r} must be a positive integer; use {_TPU_BLOCK_CHUNKS}")
        if not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads={self.heads!r} must be a positive integer; use {_TPU_HEADS}")

    def vmem_bytes(self, k: int, v: int, itemsize: int, *, channel_gate: bool) -> dict[str, int]:
        """An estimate of the VMEM that each kernel needs: blocks twice for the pipeline, states once."""
        k, v = lanes(k), lanes(v)
        tokens, state = self.chunk * self.block_chunks, self.heads * k * v * _FLOAT32_BYTES
        gate = self.heads * k * _FLOAT32_BYTES if channel_gate else 0
        per_token = self.heads * (2 * k + v) * itemsize + gate + 2 * LANES * _FLOAT32_BYTES
        forward = 2 * tokens * (per_token + self.heads * v * itemsize) + 5 * state
        inverses = self.block_chunks * self.chunk * max(self.heads * self.chunk, LANES) * _FLOAT32_BYTES
        backward = 2 * tokens * (2 * per_token + self.heads * v * itemsize) + (8 + self.block_chunks) * state + inverses
        # What a chunk's algebra keeps beside all this, for each pair of heads.
        work = 32 * self.chunk * 2 * max(k, v) * _FLOAT32_BYTES
        return {"forward": forward + work, "backward": backward + work}

    def misfit(self, chip: Chip, k: int, v: int, itemsize: int, *, channel_gate: bool) -> str | None:
        """Why a kernel of this config does not fit the chip's VMEM, or None."""
        if chip.vmem_bytes is None:
            return None
        for kernel, needed in self.vmem_bytes(k, v, itemsize, channel_gate=channel_gate).items():
            if needed > chip.vmem_bytes:
                return (
                    f"its {kernel} kernel needs about {needed / MIB:.0f} MiB of VMEM for K={k} and V={v} with {self}, and "
                    f"a {chip.name} has {chip.vmem_bytes / MIB:.0f}; use fewer heads or block_chunks, "
                    f"or implementation='xla'"
                )
        return None

    @staticmethod
    def for_shape(
        chip: Chip, t: int, h: int, hv: int, k: int, v: int, itemsize: int, *, channel_gate: bool
    ) -> "PallasTpuConfig":
        """The most heads, and then the most chunks, that fit the chip's VMEM; the least if none does."""
        chunk = ROW_TILE
        while chunk < min(t, _CHUNK):
            chunk *= 2
        needed = -(-t // chunk)
        group = hv // h
        # A block's heads share query heads evenly: they are whole groups, or a group is whole blocks.
        fitting = [n for n in range(_TPU_HEADS, 0, -1) if hv % n == 0 and (n % group == 0 or group % n == 0)]
        for heads in fitting:
            for block_chunks in (needed,) if needed <= _TPU_BLOCK_CHUNKS else (_TPU_BLOCK_CHUNKS,):
                config = PallasTpuConfig(chunk, block_chunks, heads)
                if config.misfit(chip, k, v, itemsize, channel_gate=channel_gate) is None:
                    return config
        return PallasTpuConfig(chunk, min(needed, _TPU_BLOCK_CHUNKS), 1)


def lanes(width: int) -> int:
    """A width in whole lanes."""
    return -(-width // LANES) * LANES
