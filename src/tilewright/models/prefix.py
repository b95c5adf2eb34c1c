"""What a model knows after some tokens, as a value: to keep, save, and continue from any number of times."""

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from tilewright.models import checkpoint
from tilewright.models.architecture import initial_states

CACHES = (".keys", ".values", ".latents")
"""How the names of leaves end that have an axis of tokens."""
_MODEL = "model"  # What a file's metadata have of the model.


@functools.partial(jax.tree_util.register_dataclass, data_fields=("logits", "states"), meta_fields=("ids", "model"))
@dataclass(frozen=True)
class Prefix:
    """A model's states after some tokens, and the logits of the token that follows: for one row."""

    ids: tuple[int, ...]
    logits: Any  # [1, V]
    states: Any
    model: str | None = None
    """The fingerprint of the model; None where its weights were traced, which have none."""

    @property
    def capacity(self) -> int | None:
        """The tokens that its caches have room for; None where no layer has a cache that ends."""
        sizes = {leaf.shape[2] for path, leaf in state_leaves(self.states) if path.endswith(CACHES)}
        return min(sizes, default=None)

    def save(self, path: str | Path) -> None:
        """Writes it as one safetensors file."""
        tensors = {"ids": np.asarray(self.ids, np.int32), "logits": self.logits} | dict(state_leaves(self.states))
        shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        metadata = {} if self.model is None else {_MODEL: self.model}
        checkpoint.write(Path(path), shapes, tensors.items(), metadata)

    @staticmethod
    def load(path: str | Path, model: Any) -> "Prefix":
        """The prefix that `save` wrote, for the same model: one with other weights, or in another dtype, is refused."""
        if not Path(path).is_file():
            raise checkpoint.CheckpointError(f"{path} is not a file; pass one that Prefix.save wrote")
        file = checkpoint.SafetensorsFile(Path(path))
        if not {"ids", "logits"} <= set(file.tensors):
            raise checkpoint.CheckpointError(f"{path} is not a prefix that Prefix.save wrote")
        logits, made_by = jnp.asarray(file.read("logits")), file.metadata.get(_MODEL)
        sizes = {shape[2] for name, (_, shape, _) in file.tensors.items() if name.endswith(CACHES)}
        states = jax.eval_shape(lambda: initial_states(model.architecture, 1, min(sizes, default=1), model.dtype))
        wanted = dict(state_leaves(states))
        for name, leaf in wanted.items():
            if name not in file.tensors or file.tensors[name][:2] != (leaf.dtype, leaf.shape):
                raise checkpoint.CheckpointError(
                    f"{path} has no {name} of {leaf.dtype.name}{list(leaf.shape)}: it is another model's prefix"
                )
        if None not in (made_by, own := fingerprint(model)) and made_by != own:
            raise checkpoint.CheckpointError(
                f"{path} is the prefix of a model with other weights; read it again with this"
            )
        read = [jnp.asarray(file.read(name)) for name in wanted]
        ids = tuple(int(token) for token in file.read("ids"))
        return Prefix(ids, logits, jax.tree.unflatten(jax.tree.structure(states), read), made_by)


def state_leaves(states: Any) -> list[tuple[str, Any]]:
    """The leaves of states by their names."""
    return [(f"states{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(states)]


def fingerprint(model: Any) -> str | None:
    """What models with other layers, weights or dtypes differ in, wherever their weights are; None where they are traced.

    All weights are read once, on their devices: sums of their bits are the same in any order.
    """
    named = jax.tree_util.tree_leaves_with_path(model.weights)
    if any(isinstance(leaf, Tracer) for _, leaf in named):
        return None
    sums = np.asarray(_sums_of_bits([leaf for _, leaf in named]))
    digest = hashlib.sha256(repr(model.architecture).encode())
    for (path, leaf), total in zip(named, sums, strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {total}\n".encode())
    return digest.hexdigest()[:32]


@jax.jit
def _sums_of_bits(leaves: list[jax.Array]) -> jax.Array:
    def bits(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{jnp.finfo(leaf.dtype).bits}"))
        return leaf.astype(jnp.uint32)

    return jnp.stack([jnp.sum(bits(leaf), dtype=jnp.uint32) for leaf in leaves])
