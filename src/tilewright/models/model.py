"""A language model: weights, and what it is made of."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding

from tilewright.core.quantized import QuantizedArray
from tilewright.models import checkpoint, generation
from tilewright.models.architecture import Architecture, ModelWeights, hidden_states, logits_of
from tilewright.models.block import Block
from tilewright.models.prefix import Prefix
from tilewright.models.sharding import check_mesh, rules_of
from tilewright.parallel.mesh import auto_axes
from tilewright.parallel.rules import Rules


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weights",), meta_fields=("architecture", "config"))
@dataclass(frozen=True)
class Model:
    """A model is a pytree: its weights are the leaves."""

    weights: ModelWeights
    architecture: Architecture
    config: str
    """The text of its config.json."""

    @property
    def dtype(self) -> Any:
        """Of the activations."""
        return self.weights.embedding.dtype

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.weights))

    def __call__(self, input_ids: Any, segment_ids: Any = None) -> jax.Array:
        """Logits [B, T, V], float32, of input_ids [B, T].

        `segment_ids` [B, T] separates packed documents, which do not see each other. An id outside of the vocabulary is an
        error where the ids are known, and gives NaN where they are traced.
        """
        ids = generation.checked_ids(input_ids, self.architecture.vocab_size)
        segments = generation.checked_segments(segment_ids, ids)
        return _logits(self.architecture, self.weights, ids, segments)

    def generate(
        self,
        input_ids: Any,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] | None = None,
        seed: int = 0,
        capacity: int | None = None,
    ) -> Any:
        """The prompts with the tokens that follow them.

        Prompts of different lengths give what each gives alone. A row that has produced a stop token ends there.

        Args:
          input_ids: [B, T], or a list of prompts, each a list of ids. One prompt may be [T].
          max_new_tokens: at most so many tokens follow each prompt.
          temperature: 0 takes the most probable token; otherwise tokens are drawn from softmax(logits / temperature).
          top_k: draws from the k most probable tokens only.
          top_p: draws from the most probable tokens only whose probabilities sum to at least this. With top_k it is of the
            tokens that top_k leaves, whose probabilities are normalised first.
          stop_tokens: ids after which a row ends. The stop token is part of the result.
          seed: of the random numbers, from 0 to 2**32 - 1; row i draws with seed + i, whatever its neighbours are.
          capacity: the tokens that the cache has room for; by default as many as this call needs.

        Returns:
          ids [B, T + max_new_tokens] where prompts are one array and there are no stop tokens; otherwise a list of arrays.
        """
        with self.on_mesh():
            return generation.generate(
                self,
                input_ids,
                max_new_tokens,
                generation.Sampling(temperature, top_k, top_p),
                stop_tokens=() if stop_tokens is None else stop_tokens,
                seed=seed,
                capacity=capacity,
            )

    def on_mesh(self) -> Any:
        """A context with the mesh that the weights are sharded over, where its axes are Explicit; generation needs it."""
        mesh = generation.explicit_mesh(self)
        return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)

    def rules(self) -> Rules:
        """Where each weight belongs on a mesh, for `tilewright.parallel.validate_sharding`."""
        return rules_of(self.architecture)

    def shard(self, mesh: Any) -> "Model":
        """This model with its weights sharded over a mesh of `tilewright.parallel.make_mesh`.

        A mesh whose axes do not divide heads, channels, experts, layers or the vocabulary is a `MeshError` with the
        numbers.
        """
        check_mesh(self.architecture, mesh)
        return dataclasses.replace(self, weights=self.rules().placed(self.weights, mesh))

    def read_prefix(self, ids: Sequence[int], *, capacity: int, prefix: Prefix | None = None) -> Prefix:
        """What the model knows after `ids`, or after a prefix and `ids`: a value to keep, save and continue from.

        `capacity` is the number of tokens that the caches have room for. `Batch.join(..., prefix=...)` continues from it.
        """
        with self.on_mesh():
            return generation.read_prefix(self, ids, capacity, prefix)

    def save(self, path: str | Path) -> None:
        """Writes config.json and model.safetensors as transformers reads them, in the model's dtype.

        Quantised weights are refused: transformers has no name for them.
        """
        leaves = jax.tree.leaves(self.weights, is_leaf=lambda leaf: isinstance(leaf, QuantizedArray))
        if any(isinstance(leaf, QuantizedArray) for leaf in leaves):
            raise ValueError(
                "a quantised model cannot be saved; save the one it was made from, and quantise on loading"
            )
        folder = Path(path)
        config = json.loads(self.config)
        inner = config.get("text_config", config) if "text_config" in config else config
        inner["dtype"] = jnp.dtype(self.dtype).name
        names: list[str] = []

        def tensors(weights: ModelWeights) -> list[jax.Array]:
            named = list(_tensors(self.architecture, weights))
            names.extend(name for name, _ in named)
            return [tensor for _, tensor in named]

        whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self.weights)
        leaves = jax.eval_shape(tensors, whole)
        shapes = {name: (leaf.dtype, leaf.shape) for name, leaf in zip(names, leaves, strict=True)}
        if jax.process_index():
            for _ in _tensors(self.architecture, self.weights):  # Every process has parts; the first one writes.
                pass
            return
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint.write(folder / checkpoint.SINGLE, shapes, _tensors(self.architecture, self.weights))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


@functools.partial(jax.jit, static_argnums=0)
def _logits(architecture: Architecture, weights: ModelWeights, ids: jax.Array, segment_ids: Any) -> jax.Array:
    x, _, _ = hidden_states(architecture, weights, ids, segment_ids=segment_ids)
    return logits_of(weights, x)


def _whole(x: Any) -> Any:
    """An array that may be sharded, as one that is not: on the host where it was."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or len(x.sharding.device_set) == 1:
        return x
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(process_allgather(x, tiled=True))


def _indexable(x: Any) -> Any:
    """An array that may be cut along its first axis, as one that JAX indexes there."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not isinstance(x.sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(auto_axes(x.sharding.mesh), x.sharding.spec))


def _tensors(architecture: Architecture, weights: ModelWeights) -> Iterator[tuple[str, Any]]:
    """The tensors of a checkpoint by name, one at a time."""
    prefix = architecture.prefix
    yield f"{prefix}embed_tokens.weight", _whole(weights.embedding)
    for run, stacks in zip(architecture.runs, weights.runs, strict=True):
        for repeat in range(run.count):
            for position, block in enumerate(run.pattern):
                own = jax.tree.map(lambda leaf, repeat=repeat: _whole(_indexable(leaf)[repeat]), stacks[position])
                yield from _block_tensors(block, own, f"{prefix}layers.{run.layer(repeat, position)}")
    yield f"{prefix}norm.weight", _whole(weights.norm)
    if weights.head is not None:
        yield architecture.head_name, _whole(weights.head).T


def _block_tensors(block: Block, weights: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    yield f"{prefix}.input_layernorm.weight", weights.mixer_norm
    yield from block.mixer.to_checkpoint(weights.mixer, f"{prefix}.{block.mixer_name}").items()
    yield f"{prefix}.post_attention_layernorm.weight", weights.mlp_norm
    yield from block.mlp.to_checkpoint(weights.mlp, f"{prefix}.{block.mlp_names[0]}").items()
