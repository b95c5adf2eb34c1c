"""Block sizes of the delta rule's steps; validated when built."""

from dataclasses import dataclass

GPU_BLOCKS_V = (16, 32, 64, 128)
GPU_ROWS = 16
"""Key channels that the 128 threads of a block hold side by side."""
_GPU_BLOCK_V = 32


@dataclass(frozen=True)
class PallasGpuConfig:
    """Value channels of a thread block, which holds all key channels of them.

    Of 32 float32 a row is one line of 128 bytes, and 32 heads of 128 channels make a block for nearly each of an H200's
    multiprocessors.
    """

    block_v: int = _GPU_BLOCK_V

    def __post_init__(self) -> None:
        if self.block_v not in GPU_BLOCKS_V:
            raise ValueError(
                f"block_v={self.block_v!r} must be one of {', '.join(map(str, GPU_BLOCKS_V))} (threads take 2 or 4 "
                f"channels each); use {_GPU_BLOCK_V}"
            )

    @staticmethod
    def for_shape(v: int) -> "PallasGpuConfig":
        """Of what needs the least padding."""
        narrow = GPU_BLOCKS_V[0]
        return PallasGpuConfig(narrow if -(-v // narrow) % 2 else _GPU_BLOCK_V)
