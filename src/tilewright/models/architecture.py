"""What a model is made of: blocks, and the runs of equal blocks that are scanned.

A block is a token mixer (attention or a delta rule) and a feed-forward layer, each behind a norm and added to its input.
The blocks of a model repeat with some period: every layer of Qwen3 is equal, and Qwen3-Next repeats three Gated DeltaNet
blocks and one of attention. A run is a pattern of blocks and how often it comes; its weights are stacked, and
`jax.lax.scan` goes over them, so that the program that is compiled does not grow with the depth.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from tilewright.layers.layer import Layer, Leaf
from tilewright.layers.moe import Routing
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


@dataclass(frozen=True)
class Architecture:
    """A language model."""

    family: str
    vocab_size: int
    blocks: tuple[Block, ...]
    eps: float
    norm_offset: float = 0.0
    tied: bool = False
    """Whether the head is the embedding, transposed."""
    prefix: str = "model."
    """What the names of its tensors begin with, but for the head's."""
    head_name: str = "lm_head.weight"
    skipped: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may have, and that this model does not use."""

    @property
    def d_model(self) -> int:
        return self.blocks[0].mixer.d_model

    @property
    def runs(self) -> tuple[Run, ...]:
        return runs_of(self.blocks)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelWeights:
    embedding: Leaf  # [V, D]
    runs: Any
    """A tuple per run of a `BlockWeights` per block of its pattern, each leaf stacked over the repeats."""
    norm: Leaf  # [D]
    head: Leaf = None  # [D, V]; None where it is tied


def hidden_states(
    architecture: Architecture,
    weights: ModelWeights,
    ids: jax.Array,
    states: Any = None,
    segment_ids: jax.Array | None = None,
    *,
    remat: Any = None,
) -> tuple[jax.Array, Any, list[Any]]:
    """The last hidden states [B, T, D], normalised; the states after; and the routings, stacked per block of a pattern.

    `states` continue earlier calls, or are None, and then none are returned. `remat` is a policy of `jax.checkpoint` for
    each repeat of a pattern, or None to keep everything.
    """
    # An id outside of the vocabulary gives NaN, never another token's embedding.
    outside = jnp.where(ids < 0, architecture.vocab_size, ids)  # JAX would count negative ones from the end.
    x = jnp.take(weights.embedding, outside, axis=0, mode="fill", fill_value=jnp.nan)  # [B, T, D]
    after, routings = [], []
    for number, run in enumerate(architecture.runs):

        def body(x: jax.Array, layer: Any, run: Run = run) -> Any:
            own, before = layer
            results = []
            for position, block in enumerate(run.pattern):
                state = None if before is None else before[position]
                x, state, routing = block.apply(own[position], x, state, segment_ids)
                results.append((None if before is None else state, routing))
            return x, tuple(zip(*results, strict=True))

        step = body if remat is None else jax.checkpoint(body, policy=remat, prevent_cse=False)
        before = None if states is None else states[number]
        x, (state, routing) = jax.lax.scan(step, x, (weights.runs[number], before))
        after.append(state)
        routings += [each for each in routing if each is not None]
    x = rms_norm(x, weights.norm, eps=architecture.eps, offset=architecture.norm_offset)
    return x, None if states is None else tuple(after), routings


def logits_of(weights: ModelWeights, x: jax.Array) -> jax.Array:
    """Logits [..., V] in float32."""
    head = weights.embedding.T if weights.head is None else weights.head
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.dot(x, head.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def initial_states(architecture: Architecture, batch: int, capacity: int, dtype: Any) -> Any:
    """The states of every layer before the first token, with a length per row."""

    def stacked(block: Block, count: int) -> Any:
        state = block.mixer.initial_state(batch, capacity=capacity, dtype=dtype)  # type: ignore[attr-defined]
        if getattr(state, "length", None) is not None:
            state = dataclasses.replace(state, length=jnp.zeros((batch,), jnp.int32))
        return jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape), leaf.dtype), state)

    return tuple(tuple(stacked(block, run.count) for block in run.pattern) for run in architecture.runs)
