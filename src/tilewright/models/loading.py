"""Models from checkpoints, and with random weights."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.quantized import LARGEST, QuantizedArray
from tilewright.layers.layer import Layer
from tilewright.models import kimi_linear, qwen3, qwen3_5, qwen3_moe, qwen3_next
from tilewright.models.architecture import Architecture, Block, BlockWeights, ModelWeights, Run
from tilewright.models.checkpoint import Checkpoint, CheckpointError
from tilewright.models.config import Config
from tilewright.models.model import Model
from tilewright.models.sharding import sharding

_FAMILIES = {
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "kimi_linear": kimi_linear,
}
_DTYPES = ("float32", "bfloat16")


def _check_dtype(dtype: Any) -> None:
    if getattr(dtype, "__name__", str(dtype)) not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} must be 'bfloat16' or 'float32'")


def architecture_of(config: Config) -> Architecture:
    """The architecture that a config.json describes."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(_FAMILIES)
        raise CheckpointError(f"{config.path}: model_type={config.model_type!r} is not known; known are {known}")
    try:
        return family.architecture(config)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{config.path} describes no {config.model_type}: {error}") from error


def load(path: str | Path, dtype: str = "bfloat16", quantize: str | None = None, mesh: Any = None) -> Model:
    """The model of a folder with config.json and safetensors, as transformers writes them.

    Tensors are read one at a time, converted, and put into their place on the device; the host holds one of them at a time.
    Nothing of a checkpoint is executed, and nothing half-loaded is returned.

    Args:
      path: the folder. Weights are in model.safetensors, or in files that model.safetensors.index.json names.
      dtype: of the weights and the activations, "bfloat16" or "float32". Rates of gates stay float32.
      quantize: "int8", "int4" or "float8_e4m3fn": quantises the weights of projections and experts on the way in, with one
        scale per output column (int4: per 128 rows of a column, where they divide); activations stay `dtype`.
      mesh: a `jax.sharding.Mesh`: weights are sharded over its axes "tensor" (heads, hidden channels, vocabulary),
        "expert" and "fsdp" where it has them and they divide, and are otherwise on every device.

    Returns:
      a `Model`.
    """
    _check_dtype(dtype)
    if quantize is not None and quantize not in LARGEST:
        raise ValueError(f"quantize={quantize!r} must be one of {', '.join(map(repr, LARGEST))}, or None")
    folder = Path(path)
    config = Config.read(folder)
    architecture = architecture_of(config)
    checkpoint = Checkpoint(folder)
    loader = _Loader(architecture, checkpoint, jnp.dtype(dtype), quantize, mesh)
    weights = loader.weights()
    extra = [name for name in checkpoint.unread() if not name.startswith(architecture.skipped or ("\0",))]
    extra = [name for name in extra if not (architecture.tied and name == architecture.head_name)]
    if extra:
        raise CheckpointError(
            f"{folder} has {len(extra)} tensors that a {architecture.family} of this config does not use, such as "
            f"{extra[0]!r}; is config.json that of these weights?"
        )
    return Model(weights, architecture, json.dumps(config.values))


def init(config: dict[str, Any] | str | Path, key: jax.Array, dtype: str = "bfloat16") -> Model:
    """A model with random weights, from the values of a config.json or the folder that has one."""
    _check_dtype(dtype)
    read = Config(config) if isinstance(config, dict) else Config.read(Path(config))
    architecture = architecture_of(read)
    d, vocabulary = architecture.d_model, architecture.vocab_size
    for_embedding, for_head, for_blocks = jax.random.split(key, 3)
    keys = iter(jax.random.split(for_blocks, len(architecture.blocks)))

    def stacked(run: Run) -> tuple[BlockWeights, ...]:
        each = [[block.init(next(keys), dtype) for block in run.pattern] for _ in range(run.count)]
        return tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *repeats) for repeats in zip(*each, strict=True))

    def drawn(key: jax.Array, *shape: int, scale: float) -> jax.Array:
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    weights = ModelWeights(
        embedding=drawn(for_embedding, vocabulary, d, scale=0.02 if architecture.tied else 1.0),
        runs=tuple(stacked(run) for run in architecture.runs),
        norm=jnp.full((d,), 1.0 - architecture.norm_offset, dtype),
        head=None if architecture.tied else drawn(for_head, d, vocabulary, scale=d**-0.5),
    )
    return Model(weights, architecture, json.dumps(read.values))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: Any, weights: Any, at: jax.Array) -> Any:
    """Writes one layer's weights into the stacked ones, in place."""
    return jax.tree.map(lambda whole, own: jax.lax.dynamic_update_index_in_dim(whole, own, at, 0), stack, weights)


def _axes(layer: Layer[Any], weights: Any) -> Any:
    """The axes of each leaf of a layer's weights, in their structure. Quantised ones are on every device."""
    parameters = layer.parameters()
    named = {
        name: jax.tree.map(
            lambda _, name=name, value=value: () if isinstance(value, QuantizedArray) else parameters[name].axes, value
        )
        for name, value in vars(weights).items()
    }
    return type(weights)(**named)


class _Loader:
    def __init__(self, architecture: Architecture, checkpoint: Checkpoint, dtype: Any, quantize: str | None, mesh: Any):
        self._architecture, self._checkpoint = architecture, checkpoint
        self._dtype, self._quantize, self._mesh = dtype, quantize, mesh

    def weights(self) -> ModelWeights:
        architecture, prefix = self._architecture, self._architecture.prefix
        d, vocabulary = architecture.d_model, architecture.vocab_size
        head = None
        if not architecture.tied:
            head = self._placed(self._tensor(architecture.head_name, (vocabulary, d)).T, ("embed", "vocab"))
        return ModelWeights(
            embedding=self._placed(self._tensor(f"{prefix}embed_tokens.weight", (vocabulary, d)), ("vocab", "embed")),
            runs=tuple(self._run(run) for run in architecture.runs),
            norm=self._placed(self._tensor(f"{prefix}norm.weight", (d,)), ()),
            head=head,
        )

    def _placed(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        return x if self._mesh is None else jax.device_put(x, sharding(self._mesh, axes, x.shape))

    def _zeros(self, count: int, block: Block, own: BlockWeights) -> BlockWeights:
        """Stacked weights to be filled, each where it belongs on the mesh."""
        axes = BlockWeights((), _axes(block.mixer, own.mixer), (), _axes(block.mlp, own.mlp))

        def zeros(leaf: Any, axes: Any) -> jax.Array:
            made = jnp.zeros((count, *leaf.shape), leaf.dtype)
            if self._mesh is None:
                return made
            return jax.device_put(made, sharding(self._mesh, axes, leaf.shape, stacked=True))

        leaves, structure = jax.tree.flatten(own)
        of_leaves = jax.tree.leaves(axes, is_leaf=lambda axes: isinstance(axes, tuple))
        return jax.tree.unflatten(structure, map(zeros, leaves, of_leaves))

    def _tensor(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        if name not in self._checkpoint:
            raise CheckpointError(f"{self._checkpoint.folder} has no tensor {name!r}")
        if self._checkpoint.shape(name) != shape:
            found = list(self._checkpoint.shape(name))
            raise CheckpointError(f"{name} has shape {found} and config.json says {list(shape)}")
        return jnp.asarray(self._checkpoint[name]).astype(self._dtype)

    def _run(self, run: Run) -> tuple[BlockWeights, ...]:
        stacks: list[Any] = [None] * len(run.pattern)
        for repeat in range(run.count):
            for position, block in enumerate(run.pattern):
                own = self._block(block, run.layer(repeat, position))
                if stacks[position] is None:
                    stacks[position] = self._zeros(run.count, block, own)
                stacks[position] = _put(stacks[position], own, jnp.int32(repeat))
        return tuple(stacks)

    def _block(self, block: Block, number: int) -> BlockWeights:
        prefix = f"{self._architecture.prefix}layers.{number}"
        names = [
            name
            for name in block.mlp_names
            if any(True for each in self._checkpoint if each.startswith(f"{prefix}.{name}."))
        ]
        d = block.mixer.d_model
        return BlockWeights(
            mixer_norm=self._tensor(f"{prefix}.input_layernorm.weight", (d,)),
            mixer=self._layer(block.mixer, f"{prefix}.{block.mixer_name}"),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight", (d,)),
            mlp=self._layer(block.mlp, f"{prefix}.{(names or block.mlp_names)[0]}"),
        )

    def _layer(self, layer: Layer[Any], prefix: str) -> Any:
        try:
            weights = layer.from_checkpoint(self._checkpoint, prefix)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        weights = layer.cast(weights, self._dtype)
        return weights if self._quantize is None else layer.quantized(weights, self._quantize)
