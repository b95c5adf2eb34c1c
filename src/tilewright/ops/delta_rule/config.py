"""Block sizes of the delta-rule family, an implementation each; validated when built."""

from dataclasses import dataclass

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip

_FLOAT32_BYTES = 4

_SMALLEST_CHUNK = 8
# The work inside a chunk grows with its length, the work of passing the state on falls. CPUs like the former smaller:
# 64 tokens take 1.06 times as long as 32, and 16 take 1.13 (delta_rule, T4096, 4 heads of 128, float32, forward+backward,
# 2 cores of an aarch64).
_CHUNK, _CPU_CHUNK = 64, 32
# On a CPU a program has each chunk of a block: fewer of them compile sooner, and fewer states are made anew. Blocks of 128
# tokens take 1.04 times as long as 64, and 32 as long with half as much memory again (the same run).
_XLA_BLOCK_TOKENS, _CPU_BLOCK_TOKENS = 1024, 64

# By the schedules for a v6e: more heads take fewer bundles each, and twice as long to compile (pallas_tpu.py).
_TPU_BLOCK_CHUNKS = 8
_TPU_HEADS = 4

# Hopper: rows of an instruction of the matrix unit, warpgroups of a block that carry a state, and the widest key.
GPU_TILE = 64
GPU_WARPGROUPS = 2
GPU_WIDEST_KEY = 128
# Tokens of a part, and parts of a sequence, below which the second pass over it costs more than it saves.
_GPU_LEAST_PART, _GPU_LEAST_PARTS = 512, 3


def _chunk_for(t: int, smallest: int, largest: int) -> int:
    """The least power of two that holds t tokens, between two others."""
    chunk = smallest
    while chunk < min(t, largest):
        chunk *= 2
    return chunk


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
        largest, tokens = _CHUNK, _XLA_BLOCK_TOKENS
        if chip.platform == "cpu":
            largest, tokens = _CPU_CHUNK, _CPU_BLOCK_TOKENS
        chunk = _chunk_for(t, _SMALLEST_CHUNK, largest)
        return XlaConfig(chunk, min(tokens // chunk, -(-t // chunk)))


@dataclass(frozen=True)
class PallasTpuConfig:
    """Tokens in a chunk, chunks in a block, and value heads in a block.

    Heads of a block go side by side in the lanes: more of them hide more of the latency of each other's products, and make
    the code longer.
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
        """The most heads that fit the chip's VMEM; one if none does."""
        chunk = _chunk_for(t, ROW_TILE, _CHUNK)
        block_chunks = min(-(-t // chunk), _TPU_BLOCK_CHUNKS)
        group = hv // h
        # A block's heads share query heads evenly: they are whole groups, or a group is whole blocks.
        fitting = [n for n in range(_TPU_HEADS, 0, -1) if hv % n == 0 and (n % group == 0 or group % n == 0)]
        for heads in fitting:
            config = PallasTpuConfig(chunk, block_chunks, heads)
            if config.misfit(chip, k, v, itemsize, channel_gate=channel_gate) is None:
                return config
        return PallasTpuConfig(chunk, block_chunks, 1)


@dataclass(frozen=True)
class PallasGpuConfig:
    """Value channels of a thread block, 64 for each of its warpgroups that carry a state; and parts of the sequence.

    128 channels read queries and keys once for all of them; 64 make twice as many blocks, for when there are fewer than the
    GPU has multiprocessors. Where these are still few the sequence is cut into `parts`, which are worked on at the same
    time, twice (gpu_parts.py).

    Results are the same to the bit for any block_v, and differ in rounding with the parts. `for_shape` takes those from
    shapes alone, the batch's and the length among them: a row's bits do not depend on what else is in a batch, but may on
    how large it is. Who needs them not to passes parts=1.
    """

    block_v: int = GPU_WARPGROUPS * GPU_TILE
    parts: int = 1

    def __post_init__(self) -> None:
        allowed = [count * GPU_TILE for count in range(1, GPU_WARPGROUPS + 1)]
        if self.block_v not in allowed:
            raise ValueError(
                f"block_v={self.block_v!r} must be one of {', '.join(map(str, allowed))} (a warpgroup carries {GPU_TILE} "
                f"channels); use {allowed[-1]}"
            )
        if not isinstance(self.parts, int) or self.parts < 1:
            raise ValueError(f"parts={self.parts!r} must be a positive integer; use 1 for a sequence that is not cut")

    @property
    def warpgroups(self) -> int:
        """Those that carry a state."""
        return self.block_v // GPU_TILE

    @staticmethod
    def for_shape(chip: Chip, b: int, t: int, hv: int, v: int) -> "PallasGpuConfig":
        """Blocks that fill the chip about once: narrow ones where wide ones are few, parts where narrow ones are few."""
        tiles = -(-v // GPU_TILE)
        widest = min(tiles, GPU_WARPGROUPS)
        blocks = b * hv * -(-tiles // widest)
        if chip.multiprocessors is None or 2 * blocks > chip.multiprocessors:
            return PallasGpuConfig(GPU_TILE * widest)
        parts = min(chip.multiprocessors // (b * hv * tiles), t // _GPU_LEAST_PART)
        return PallasGpuConfig(GPU_TILE, parts if parts >= _GPU_LEAST_PARTS else 1)


def lanes(width: int) -> int:
    """A width in whole lanes."""
    return -(-width // LANES) * LANES
