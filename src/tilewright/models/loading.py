"""Models from checkpoints, and with random weights."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.nearest import did_you_mean
from tilewright.core.quantized import LARGEST
from tilewright.layers.layer import Layer
from tilewright.models import kimi_linear, qwen3, qwen3_5, qwen3_moe, qwen3_next
from tilewright.models.architecture import Architecture, ModelWeights
from tilewright.models.block import Block, BlockWeights, Run
from tilewright.models.checkpoint import Checkpoint, CheckpointError
from tilewright.models.config import Config
from tilewright.models.model import Model
from tilewright.models.sharding import check_mesh, rules_of
from tilewright.parallel.mesh import auto_axes
from tilewright.parallel.processes import global_array
from tilewright.parallel.rules import path_name

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
        raise ValueError(f"dtype={dtype!r} must be 'bfloat16' or 'float32'{did_you_mean(dtype, _DTYPES)}")


def _check_quantize(quantize: str | None) -> None:
    if quantize is not None and quantize not in LARGEST:
        hint = did_you_mean(quantize, LARGEST)
        raise ValueError(f"quantize={quantize!r} must be one of {', '.join(map(repr, LARGEST))}, or None{hint}")


def architecture_of(config: Config) -> Architecture:
    """The architecture that a config.json describes."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        known, hint = ", ".join(_FAMILIES), did_you_mean(config.model_type, _FAMILIES)
        raise CheckpointError(f"{config.path}: model_type={config.model_type!r} is not known; known are {known}{hint}")
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
      mesh: of `tilewright.parallel.make_mesh`: weights are sharded over its axes "tensor" (heads, hidden channels,
        vocabulary), "expert" and "fsdp". An axis that does not divide them is an error. Quantised weights are on every
        device.

    Returns:
      a `Model`.
    """
    _check_dtype(dtype)
    _check_quantize(quantize)
    folder = Path(path)
    config = Config.read(folder)
    architecture = architecture_of(config)
    if mesh is not None:
        check_mesh(architecture, mesh)
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


def init(
    config: dict[str, Any] | str | Path, key: jax.Array, dtype: str = "bfloat16", quantize: str | None = None
) -> Model:
    """A model with random weights, from the values of a config.json or the folder that has one.

    `dtype` and `quantize` are those of `load`.
    """
    _check_dtype(dtype)
    _check_quantize(quantize)
    read = Config(config) if isinstance(config, dict) else Config.read(Path(config))
    architecture = architecture_of(read)
    d, vocabulary = architecture.d_model, architecture.vocab_size
    for_embedding, for_head, for_blocks = jax.random.split(key, 3)
    keys = jax.random.split(for_blocks, len(architecture.blocks))

    def one(block: Block, key: jax.Array) -> BlockWeights:
        own = block.init(key, dtype)
        if quantize is None:
            return own
        mixer, mlp = block.mixer.quantized(own.mixer, quantize), block.mlp.quantized(own.mlp, quantize)
        return BlockWeights(own.mixer_norm, mixer, own.mlp_norm, mlp)

    def stacked(run: Run) -> tuple[BlockWeights, ...]:
        of_run = keys[run.first : run.layer(run.count, 0)].reshape(run.count, len(run.pattern))
        return tuple(
            jax.lax.map(functools.partial(one, block), of_run[:, position])
            for position, block in enumerate(run.pattern)
        )

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


def _beside(own: Any, stack: jax.Array) -> jax.Array:
    """The weights of one layer, cut as the stacked ones are."""
    mesh, spec = stack.sharding.mesh, stack.sharding.spec  # type: ignore[attr-defined]
    return global_array(own, NamedSharding(mesh, P(*spec[1:])))


class _Loader:
    def __init__(self, architecture: Architecture, checkpoint: Checkpoint, dtype: Any, quantize: str | None, mesh: Any):
        self._architecture, self._checkpoint = architecture, checkpoint
        self._dtype, self._quantize, self._mesh = dtype, quantize, mesh
        self._rules = rules_of(architecture)

    def weights(self) -> ModelWeights:
        architecture, prefix = self._architecture, self._architecture.prefix
        for number in range(len(architecture.blocks)):  # Before there is room for all of them.
            self._check_there(f"{prefix}layers.{number}.input_layernorm.weight")
        d, vocabulary = architecture.d_model, architecture.vocab_size
        head = None
        if not architecture.tied:
            head = self._placed(self._tensor(architecture.head_name, (vocabulary, d)).T, "head")
        return ModelWeights(
            embedding=self._placed(self._tensor(f"{prefix}embed_tokens.weight", (vocabulary, d)), "embedding"),
            runs=tuple(self._run(number, run) for number, run in enumerate(architecture.runs)),
            norm=self._placed(self._tensor(f"{prefix}norm.weight", (d,)), "norm"),
            head=head,
        )

    def _placed(self, x: jax.Array, path: str) -> jax.Array:
        if self._mesh is None:
            return x
        return global_array(x, NamedSharding(self._mesh, self._rules.spec(path, x.shape, self._mesh)))

    def _zeros(self, count: int, own: BlockWeights, prefix: str) -> BlockWeights:
        """Stacked weights to be filled, each where it belongs on the mesh."""

        def zeros(path: Any, leaf: Any) -> jax.Array:
            shape = (count, *leaf.shape)
            if self._mesh is None:
                return jnp.zeros(shape, leaf.dtype)
            spec = self._rules.spec(f"{prefix}.{path_name(path)}", shape, self._mesh)
            return jnp.zeros(shape, leaf.dtype, device=NamedSharding(auto_axes(self._mesh), spec))

        return jax.tree_util.tree_map_with_path(zeros, own)

    def _check_there(self, name: str) -> None:
        if name not in self._checkpoint:
            raise CheckpointError(f"{self._checkpoint.folder} has no tensor {name!r}")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        self._check_there(name)
        if self._checkpoint.shape(name) != shape:
            found = list(self._checkpoint.shape(name))
            raise CheckpointError(f"{name} has shape {found} and config.json says {list(shape)}")
        return jnp.asarray(self._checkpoint[name]).astype(self._dtype)

    def _run(self, number: int, run: Run) -> tuple[BlockWeights, ...]:
        stacks: list[Any] = [None] * len(run.pattern)
        for repeat in range(run.count):
            for position, block in enumerate(run.pattern):
                own = self._block(block, run.layer(repeat, position))
                if stacks[position] is None:
                    stacks[position] = self._zeros(run.count, own, f"runs.{number}.{position}")
                if self._mesh is not None:
                    own = jax.tree.map(_beside, own, stacks[position])
                stacks[position] = _put(stacks[position], own, jnp.int32(repeat))
        return tuple(stacks) if self._mesh is None else jax.tree.map(self._finished, tuple(stacks))

    def _finished(self, stack: jax.Array) -> jax.Array:
        """Filled weights, whose mesh has Auto axes, as weights on the given mesh: they stay where they are."""
        return jax.device_put(stack, NamedSharding(self._mesh, stack.sharding.spec))  # type: ignore[attr-defined]

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
            raise CheckpointError(f"{self._checkpoint.folder}: {error}") from error
        weights = layer.cast(weights, self._dtype)
        return weights if self._quantize is None else layer.quantized(weights, self._quantize)
