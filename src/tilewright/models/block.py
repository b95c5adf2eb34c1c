"""A block of a model, and the runs of equal blocks that are scanned.

A block is a token mixer (attention or a delta rule) and a feed-forward layer, each behind a norm and added to its input.
The blocks of a model repeat with some period: every layer of Qwen3 is equal, and Qwen3-Next repeats three Gated DeltaNet
blocks and one of attention. A run is a pattern of blocks and how often it comes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from tilewright.layers.layer import Layer, Leaf, Residual
from tilewright.layers.moe import Routing
from tilewright.ops.attention.decode_layers.api import has_kernel
from tilewright.ops.norm.api import rms_norm

_LONGEST_PERIOD = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockWeights:
    mixer_norm: Leaf  # [D]
    mixer: Any
    mlp_norm: Leaf  # [D]
    mlp: Any


@dataclass(frozen=True)
class Block:
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    mixer: Layer[Any]
    mlp: Layer[Any]
    eps: float
    norm_offset: float = 0.0
    """Added to the norms' weights; 1 in Qwen3-Next."""
    mixer_name: str = "self_attn"
    mlp_names: tuple[str, ...] = ("mlp",)
    """The layers' names in a checkpoint, after "model.layers.N."; the first that is there, and the first is written."""

    def init(self, key: PRNGKeyArray, dtype: Any) -> BlockWeights:
        for_mixer, for_mlp = jax.random.split(key)
        norm = jnp.full((self.mixer.d_model,), 1.0 - self.norm_offset, dtype)
        return BlockWeights(norm, self.mixer.init(for_mixer, dtype), norm, self.mlp.init(for_mlp, dtype))

    def apply(
        self, weights: BlockWeights, x: jax.Array, state: Any, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, Any, Routing | None]:
        """x after this block, the mixer's state, and the routing of a mixture of experts."""
        mixer: Any = self.mixer
        mlp: Any = self.mlp
        normed = rms_norm(x, weights.mixer_norm, eps=self.eps, offset=self.norm_offset)
        y, after = mixer.apply(weights.mixer, normed, state, segment_ids=segment_ids)
        x = x + y
        y, routing = mlp.apply(weights.mlp, rms_norm(x, weights.mlp_norm, eps=self.eps, offset=self.norm_offset))
        return x + y, after, routing

    def can_decode(self, weights: BlockWeights, x: jax.Array, state: Any) -> bool:
        """Whether `decode` takes these."""
        mixer, mlp = (self._residual(x, norm) for norm in (weights.mlp_norm, weights.mixer_norm))
        return self.mixer.can_decode(weights.mixer, x, state, mixer) and self.mlp.can_decode(weights.mlp, x, None, mlp)

    def decode(
        self, weights: BlockWeights, x: jax.Array, normed: jax.Array, state: Any, following: jax.Array
    ) -> tuple[jax.Array, jax.Array, Any]:
        """`apply` for one token per row, with the norms at other places: x is given with its norm, `normed`, and is
        returned with the norm whose weights are `following`.
        """
        x, normed, state = self.mixer.decode(weights.mixer, normed, state, self._residual(x, weights.mlp_norm))
        x, normed, _ = self.mlp.decode(weights.mlp, normed, None, self._residual(x, following))
        return x, normed, state

    def decode_layers_arguments(self, weights: BlockWeights, x: jax.Array, state: Any) -> dict[str, Any] | None:
        """The arguments of `decode_layers` for equal blocks, whose weights and states are stacks; None where there is no
        kernel that computes them.
        """
        mixer = self.mixer.decode_layers_arguments(weights.mixer, state)
        mlp = self.mlp.decode_layers_arguments(weights.mlp, None)
        if mixer is None or mlp is None or (mixer["eps"], mixer["norm_offset"]) != (self.eps, self.norm_offset):
            return None
        norms = {"mixer_norm": weights.mixer_norm, "mlp_norm": weights.mlp_norm}
        lengths = jnp.broadcast_to(state.length[0], x.shape[:1])  # All layers have read the same tokens.
        arguments = {"x": x[:, 0], "lengths": lengths, **norms, **mixer, **mlp}
        return arguments if has_kernel(**arguments) else None

    def _residual(self, x: jax.Array, norm: jax.Array) -> Residual:
        return Residual(x, norm, self.eps, self.norm_offset)


@dataclass(frozen=True)
class Run:
    """A pattern of blocks that comes `count` times in a row."""

    pattern: tuple[Any, ...]
    """`Block`s."""
    count: int
    first: int
    """The number of its first layer."""

    def layer(self, repeat: int, position: int) -> int:
        """The number of a layer."""
        return self.first + repeat * len(self.pattern) + position


def runs_of(blocks: tuple[Any, ...]) -> tuple[Run, ...]:
    """Blocks as runs: at each place the period that covers the most blocks, and the shortest of those."""
    runs, at = [], 0
    while at < len(blocks):
        best = (1, 1)
        for period in range(1, min(_LONGEST_PERIOD, len(blocks) - at) + 1):
            pattern, count = blocks[at : at + period], 1
            while blocks[at + count * period : at + (count + 1) * period] == pattern:
                count += 1
            if count > 1 and period * count > best[0] * best[1]:
                best = (period, count)
        period, count = best
        runs.append(Run(blocks[at : at + period], count, at))
        at += period * count
    return tuple(runs)


@functools.partial(jax.jit, static_argnums=0)
def applied(block: Block, weights: BlockWeights, x: jax.Array, state: Any, segment_ids: jax.Array | None) -> Any:
    """`Block.apply`, traced and lowered once for all blocks of a pattern that are equal."""
    return block.apply(weights, x, state, segment_ids)


@functools.partial(jax.jit, static_argnums=0)
def decoded(
    block: Block, weights: BlockWeights, x: jax.Array, normed: jax.Array, state: Any, following: jax.Array
) -> Any:
    """`Block.decode`, likewise."""
    return block.decode(weights, x, normed, state, following)
