"""Block sizes of the delta-rule family."""

from tilewright.core.arguments import is_integer
from tilewright.core.config import Config, search_over


class DeltaRuleXlaForward(Config):
    """Tokens per chunk, and chunks per block. The backward has no config: it follows the blocks that the forward saved.

    The chunks of a block are multiplied together, and the state goes through them in order. The forward saves one state
    per block, and the backward recomputes the rest, one block at a time.
    """

    choices = search_over(chunk=(16, 32, 64, 128), block_chunks=(2, 4, 8, 16, 32, 64))
    memory_fields = ("chunk", "block_chunks")

    chunk: int = 64
    block_chunks: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 2 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk={self.chunk!r} must be a power of two, at least 2; use 64")
        self.check_integers("block_chunks", use=16)


class DeltaRuleTpuForward(Config):
    """Chunks of 64 tokens per block, value heads per block, and the chunks whose work is interleaved.

    Before the state passes through the chunks of a block, all that does not depend on it is computed, for `interleave`
    chunks at a time (or for the largest common divisor with `block_chunks`): they hide the latency of each other's
    products. More heads per block do the same for the state passage. Both make the code longer. Heads go in fours:
    blocks of fewer heads compute with zeros. Without a config a block has up to 8 heads (`kda`: 4), and `interleave` is 2
    with more than 4.
    """

    choices = search_over(block_chunks=(4, 8, 16), heads=(1, 2, 4, 8), interleave=(2, 4, 8))
    memory_fields = ("block_chunks", "heads", "interleave")

    block_chunks: int = 8
    heads: int = 4
    interleave: int = 4

    def __post_init__(self) -> None:
        self.check_integers("block_chunks", use=8)
        self.check_integers("heads", "interleave", use=4)


class DeltaRuleTpuBackward(Config):
    """Value heads per block, and the chunks whose work is interleaved.

    Blocks of tokens are the forward's, which saved one state per block. `interleave` is what it is in
    `DeltaRuleTpuForward`, for what the backward recomputes. Gradients have no long chains of products: those of at most
    two chunks are interleaved, and of one with more than 6 heads. Without a config a block has up to 8 heads (`kda`: 4).
    """

    choices = search_over(heads=(1, 2, 4, 8), interleave=(1, 2, 4))
    memory_fields = ("heads", "interleave")

    heads: int = 4
    interleave: int = 2

    def __post_init__(self) -> None:
        self.check_integers("heads", use=4)
        self.check_integers("interleave", use=2)


SM90_TILE = 64
"""Rows of a wgmma instruction: the value channels of a warpgroup that carries a state, on Hopper."""
SM90_STATES = 2
"""The most warpgroups of a thread block that carry a state."""
SM90_NARROW = 32
"""Value channels of a thread block where those are few, with one gate per head (pallas_gpu/sm90_narrow_states.py)."""
_REGISTERS = range(24, 241, 8)  # Per thread: what setmaxnreg takes, and three warpgroups have 504 together.


class _Sm90(Config):
    block_v: int = SM90_STATES * SM90_TILE

    def _check(self, *registers: str, narrower: tuple[int, ...] = ()) -> None:
        allowed = [*narrower, *(count * SM90_TILE for count in range(1, SM90_STATES + 1))]
        if not is_integer(self.block_v) or self.block_v not in allowed:
            raise ValueError(
                f"block_v={self.block_v!r} must be one of {', '.join(map(str, allowed))} (a warpgroup carries {SM90_TILE} "
                f"channels); use {allowed[-1]}"
            )
        for name in registers:
            value = getattr(self, name)
            if value is not None and (not is_integer(value) or value not in _REGISTERS):
                raise ValueError(
                    f"{name}={value!r} must be a multiple of 8 from {_REGISTERS[0]} to {_REGISTERS[-1]}; leave it out for "
                    f"the kernel's own"
                )


class DeltaRuleSm90Forward(_Sm90):
    """Block sizes of the forward kernels on Hopper. Results are the same for a block_v of 64 and of 128, to the bit.

    They differ in rounding with `splits`, and with a block_v of 32. The heuristic takes those from shapes alone, the batch
    size and the length among them: the bits of a batch element do not depend on what else is in the batch, but may depend
    on its size. Pass splits=1 and block_v=64 where they must not.
    """

    choices = search_over(
        block_v=(32, 64, 128),
        splits=(1, 2, 4, 8, 16),
        stages=(2, 4),
        state_registers=(None, 192, 216, 232, 240),
        score_chunks=(1, 2, 3, 4),
    )
    memory_fields = ("block_v", "stages", "score_chunks")
    one_size_fields = ("splits",)

    block_v: int = SM90_STATES * SM90_TILE
    """Value channels of a thread block of the state kernel, 64 per warpgroup that carries a state. 128 read queries and
    keys once for all of them; 64 make twice as many thread blocks, for when those are fewer than the
    multiprocessors. With one gate per head 32 make twice as many again, in a kernel of their own."""
    splits: int = 1
    """Sequence splits that are worked on at the same time, in two passes (split_t.py); 1 for one pass."""
    stages: int = 2
    """Chunks in the state kernel's pipeline."""
    state_registers: int | None = None
    """Registers per thread of a warpgroup that carries a state. With one gate per head, the warpgroups that write
    outputs share the rest of 504. None: 192 with one gate per head, 216 there for block_v=64 and 208 for 32, 240 with
    one per channel."""
    score_chunks: int = 3
    """KDA: warpgroups of a thread block of the score kernel. Each works on chunks of its own, and they hide each other's
    latency."""
    parts: int = 1
    """Parts of the sequence that are worked on one after the other, for less memory: the forward then saves one state per
    part, and the backward computes a part's forward again. T must be so many parts of whole chunks of 64."""

    def __post_init__(self) -> None:
        self._check("state_registers", narrower=(SM90_NARROW,))
        self.check_integers("splits", use="1 for a sequence in one piece")
        self.check_integers("stages", multiple=2, why="two warpgroups write outputs in turns")
        self.check_integers("score_chunks", "parts")


class DeltaRuleSm90Backward(_Sm90):
    """Block sizes of the backward kernels on Hopper. Any of them goes with any config of the forward."""

    choices = search_over(
        block_v=(64, 128),
        stages=(2, 3, 4),
        state_registers=(None, 184, 200, 216, 232),
        gradient_stages=(2, 3, 4),
        gradient_registers=(216, 224, 232, 240),
    )
    memory_fields = ("block_v", "stages", "gradient_stages")

    block_v: int = SM90_STATES * SM90_TILE
    """Value channels of a thread block of the reverse kernel, as in the forward."""
    stages: int = 2
    """Chunks in the reverse kernel's pipeline."""
    state_registers: int | None = None
    """Registers per thread of a warpgroup that carries a gradient of the state, for block_v=128; the producer has the
    rest of 504. None: 200 with one gate per head, where the producer computes scores, and 232 with one per channel."""
    gradient_stages: int = 2
    """Tiles of 64 value channels in the pipeline of the kernel that computes the other gradients."""
    gradient_registers: int = 232
    """Registers per thread of its two warpgroups that compute; the producer has the rest of 504."""

    def __post_init__(self) -> None:
        self._check("state_registers", "gradient_registers")
        self.check_integers("stages", "gradient_stages", least=2)
