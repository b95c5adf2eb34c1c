"""The step that is planned: which model, what it does, how it is cut; and its arguments as shapes on a mesh.

Nothing here needs devices: the mesh is abstract, with the axes and their order that `parallel.make_mesh` has.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.chip import Chip
from tilewright.core.nearest import did_you_mean
from tilewright.core.target import target
from tilewright.models import generation, lora
from tilewright.models.architecture import Architecture
from tilewright.models.config import Config
from tilewright.models.loading import architecture_of, init
from tilewright.models.sharding import check_mesh, check_stages, rules_of
from tilewright.models.train_config import LoraTable
from tilewright.parallel.mesh import MESH_AXES, MeshError
from tilewright.parallel.pipeline import PIPELINE, Pipeline
from tilewright.parallel.rules import BATCH_AXES, Rules, batch_spec, not_divided, path_name
from tilewright.plan.program import Kind, Work, measure
from tilewright.workbench.model_bench import PRESETS

AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline")
"""The mesh axes that a model can be cut over."""
_PROMPT = 64
"""Tokens of the prompt that the states of a decoding step are traced after. Their shapes depend on the capacity alone."""


def read_model(name: str) -> tuple[str, dict[str, Any]]:
    """The name of a model, and the values of its config.json: a preset, a folder that has one, or the file."""
    if name in PRESETS:
        return name, PRESETS[name]
    path = Path(name)
    if path.is_file():
        try:
            return path.parent.resolve().name, json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"MODEL {path} is not JSON: {error}") from error
    if path.is_dir():
        return path.resolve().name, Config.read(path).values
    hint = did_you_mean(name, PRESETS)
    raise ValueError(f"MODEL {name} is no preset, folder or config.json; the presets are {', '.join(PRESETS)}{hint}")


@dataclass(frozen=True)
class Step:
    """A training or decoding step of one model on one mesh."""

    config: str
    """The values of config.json, as JSON."""
    batch: int
    """Rows of a step, of all devices and all microbatches."""
    tokens: int
    """Of a row; when decoding, those in its cache."""
    mesh: tuple[tuple[str, int], ...] = ()
    """The axes that are larger than 1, in the order of `AXES`."""
    remat: str = "none"
    accumulate: int = 1
    """Microbatches of a training step."""
    dtype: str = "bfloat16"
    decode: bool = False
    pipeline: Pipeline = Pipeline()  # noqa: RUF009, frozen
    """How a batch goes through the stages of a mesh with a pipeline."""
    lora: LoraTable | None = None
    """The factors that are trained instead of the weights."""

    @property
    def architecture(self) -> Architecture:
        return _architecture(self.config)

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def rows(self) -> int:
        """Rows of one device at a time. When decoding, they are cut over `data` where it divides them."""
        if self.decode:
            data = self.sizes.get(generation.DATA, 1)
            return self.batch // data if self.batch % data == 0 else self.batch
        return self.batch // (self._parts * self.accumulate)

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one device at a time that activations are kept of."""
        tokens = self.rows * (1 if self.decode else self.tokens // self.sizes.get("context", 1))
        if self.accumulate == 1 or (own := self.stages) is None:
            return tokens
        return tokens * own.kept(self.sizes[PIPELINE]) // (own.interleave * own.microbatches)

    @property
    def _parts(self) -> int:
        """Into how many parts the rows of a microbatch are cut."""
        return math.prod(self.sizes.get(axis, 1) for axis in BATCH_AXES)

    @property
    def stages(self) -> Pipeline | None:
        """The pipeline with its microbatches as a number; None without stages."""
        if PIPELINE not in self.sizes:
            return None
        return self.pipeline.of_rows(self.batch // self.accumulate, self._parts, self.sizes[PIPELINE])

    def on(self, mesh: Mapping[str, int]) -> "Step":
        """This step on another mesh."""
        return dataclasses.replace(self, mesh=ordered(mesh))

    @property
    def abstract_mesh(self) -> AbstractMesh | None:
        """None for one device."""
        if self.num_devices == 1:
            return None
        kept = {axis: self.sizes.get(axis, 1) for axis in MESH_AXES if self.sizes.get(axis, 1) > 1 or axis == "data"}
        return AbstractMesh(tuple(kept.values()), tuple(kept), axis_types=(AxisType.Explicit,) * len(kept))

    def check(self) -> None:
        """Raises a `MeshError` or `ValueError` with the numbers where this step cannot be."""
        if self.batch % self.accumulate:
            raise MeshError(
                f"batch={self.batch} rows cannot be cut into {self.accumulate} microbatches; the nearest that works is "
                f"{_nearest(self.accumulate, self.batch)}"
            )
        if self.lora is not None:
            _factors(self.config, self.lora)
        mesh = self.abstract_mesh
        if mesh is None:
            return
        if (why := _why_not(self.config, self.mesh)) is not None:
            raise MeshError(why)
        stages = mesh.shape.get(PIPELINE, 1)
        if self.decode:
            if stages > 1:
                raise MeshError(f"pipeline={stages}: the stages of a pipeline keep no states, so they cannot decode")
            return
        parts, context = self._parts, mesh.shape.get("context", 1)
        if self.tokens % context:
            raise MeshError(f"seq={self.tokens} tokens: {not_divided('context', context, self.tokens)}")
        if (self.batch // self.accumulate) % parts:
            spelled = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
            unit = parts * self.accumulate
            raise MeshError(
                f"batch={self.batch} rows cannot be cut into {parts} parts, {spelled}, of {self.accumulate} microbatches; "
                f"use batch={-(-self.batch // unit) * unit}"
            )
        if stages > 1:
            check_stages(self.architecture, self.pipeline, stages)
            assert self.stages is not None  # It has raised where the rows do not make microbatches.

    def named(self) -> str:
        """The mesh in words."""
        return named_mesh(self.mesh)

    def on_mesh(self) -> Any:
        """The context that the step is traced in."""
        mesh = self.abstract_mesh
        return contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh)

    @functools.cached_property
    def prepared(self) -> "Prepared":
        return _decoding(self) if self.decode else _training(self)

    def work(self, chip: Chip) -> Work:
        """What the step costs one device of a chip, from its trace."""
        prepared = self.prepared
        with target(chip), self.on_mesh():
            traced = prepared.function.trace(*prepared.arguments)
        kinds, names, donated = zip(*prepared.told, strict=True)
        return measure(traced, kinds, names, donated)

    def weight_bytes(self) -> float:
        """The weights of one device in the dtype of the computation."""
        return _weight_bytes(self.config, self.mesh, self.dtype)

    def state_bytes(self) -> float:
        """The weights that one device holds between steps, and when training their two moments, from shapes alone."""
        if self.decode:
            return self.weight_bytes()
        if self.lora is None:
            return 3.0 * _weight_bytes(self.config, self.mesh, "float32")
        factors = _on(_factors(self.config, self.lora), self.abstract_mesh, lora.rules_of(self.architecture))
        return self.weight_bytes() + 3.0 * _tree_bytes(factors)


@dataclass(frozen=True)
class Prepared:
    """A jitted step and its arguments."""

    function: Any
    arguments: tuple[Any, ...]
    told: tuple[tuple[Kind, str, bool], ...]
    """Of each leaf of the arguments that are not static: its kind, its name, and whether it is donated."""


def ordered(mesh: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((axis, mesh[axis]) for axis in AXES if mesh.get(axis, 1) > 1)


def named_mesh(mesh: tuple[tuple[str, int], ...]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh) or "data=1"


def _nearest(wanted: int, size: int) -> int:
    return min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: (abs(n - wanted), n))


@functools.cache
def _architecture(config: str) -> Architecture:
    return architecture_of(Config(json.loads(config)))


@functools.cache
def _why_not(config: str, mesh: tuple[tuple[str, int], ...]) -> str | None:
    """Why a model cannot be cut over a mesh."""
    step = Step(config, 1, 1, mesh)
    try:
        check_mesh(step.architecture, step.abstract_mesh)
    except MeshError as error:
        return str(error)
    return None


@functools.cache
def _weights(config: str, dtype: str) -> Any:
    """The shapes of a model's weights."""
    return jax.eval_shape(lambda key: init(json.loads(config), key, dtype=dtype), jax.random.key(0)).weights


@functools.cache
def _weight_bytes(config: str, mesh: tuple[tuple[str, int], ...], dtype: str) -> float:
    step = Step(config, 1, 1, mesh)
    return _tree_bytes(_on(_weights(config, dtype), step.abstract_mesh, rules_of(step.architecture)))


@functools.cache
def _factors(config: str, table: LoraTable) -> Any:
    """The shapes of LoRA's factors."""
    return jax.eval_shape(lambda key: lora.init(_architecture(config), table, key), jax.random.key(0))


def _tree_bytes(tree: Any) -> float:
    """What one device holds of a tree of shapes."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
        * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _on(tree: Any, mesh: Any, rules: Rules) -> Any:
    """Shapes with their places on a mesh."""
    if mesh is None:
        return tree
    shardings = rules.shardings(tree, mesh)
    return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), tree, shardings)


def _told(tree: Any, kind: Kind, *, donated: bool, prefix: str = "") -> list[tuple[Kind, str, bool]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(kind, ".".join(filter(None, (prefix, path_name(path)))), donated) for path, _ in leaves]


def _training(step: Step) -> Prepared:
    from tilewright.models.objective import cast
    from tilewright.models.train_config import OptimizerTable, TrainTable
    from tilewright.models.training import TrainState, optimizer_of, step_function

    architecture, mesh = step.architecture, step.abstract_mesh
    rows = step.batch // step.accumulate
    table = TrainTable(steps=10_000, batch_size=rows, accumulate=step.accumulate, dtype=step.dtype, remat=step.remat)
    optimizing = OptimizerTable()

    def begin(weights: Any) -> TrainState:
        return TrainState(jnp.int32(0), weights, optimizer_of(table, optimizing).init(weights))

    whole, frozen, rules = _weights(step.config, "float32"), None, rules_of(architecture)
    if step.lora is None:
        trained = jax.eval_shape(lambda weights: cast(architecture, weights, "float32"), whole)
    else:  # What is frozen needs no master weights.
        frozen = _on(_weights(step.config, step.dtype), mesh, rules)
        trained, rules = _factors(step.config, step.lora), lora.rules_of(architecture)
    state = _on(jax.eval_shape(begin, trained), mesh, rules)
    placed = None if mesh is None else NamedSharding(mesh, batch_spec(mesh, 3, leading=1))
    ids = jax.ShapeDtypeStruct((step.accumulate, rows, step.tokens), jnp.int32, sharding=placed)
    batch = {"ids": ids, "labels": ids, "segment_ids": None}
    told = [
        *_told(state.step, "optimizer", donated=True, prefix="step"),
        *_told(state.weights, "weights", donated=True),
        *_told(state.optimizer, "optimizer", donated=True, prefix="optimizer"),
        *_told(frozen, "weights", donated=False, prefix="frozen"),
        *_told(batch, "batch", donated=False),
    ]
    function = step_function(architecture, table, optimizing, step.lora, step.pipeline)
    return Prepared(function, (state, frozen, batch), tuple(told))


def _decoding(step: Step) -> Prepared:
    architecture, mesh = step.architecture, step.abstract_mesh
    weights = _on(_weights(step.config, step.dtype), mesh, rules_of(architecture))
    # As `Model.generate` has them.
    over = generation.DATA if step.rows < step.batch else None
    placed = None if mesh is None else NamedSharding(mesh, P(over))

    def ids(tokens: int) -> Any:
        return jax.ShapeDtypeStruct((step.batch, tokens), jnp.int32, sharding=placed)

    def begin(weights: Any, prompt: Any) -> Any:
        return generation.next_logits(architecture, weights, prompt, capacity=step.tokens + 1)[1]

    with step.on_mesh():
        states = jax.eval_shape(begin, weights, ids(min(_PROMPT, step.tokens)))
    told = [
        *_told(weights, "weights", donated=False),
        *_told(ids(1), "batch", donated=False, prefix="ids"),
        *_told(states, "states", donated=True, prefix="states"),
    ]
    return Prepared(_decode_step, (architecture, weights, ids(1), states), tuple(told))


_decode_step = functools.partial(jax.jit, static_argnums=0, donate_argnums=3)(generation.next_logits)
