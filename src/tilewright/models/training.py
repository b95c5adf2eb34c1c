"""Training: a step, and a run that can be killed at any time and goes on with the same bits.

run = Training(TrainConfig.read("examples/tiny_hybrid.toml"), "runs/tiny_hybrid")
for metrics in run.steps():
    print(metrics.step, metrics.loss)
run.model().save("runs/tiny_hybrid/final")

A step computes in `dtype` and keeps float32 master weights. Everything that the next step depends on is in `TrainState` and
in the position of the data, and both are in a checkpoint: a step has no other randomness. Orbax writes a checkpoint beside
its place and renames it when it is whole, so that a killed run finds the last whole one.
"""

import contextlib
import dataclasses
import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from tilewright.layers.attention import Attention
from tilewright.layers.kimi_delta_attention import KimiDeltaAttention
from tilewright.layers.layer import Leaf
from tilewright.layers.mla import LatentAttention
from tilewright.layers.moe import MoE
from tilewright.layers.qwen3_next_gated_delta_net import Qwen3NextGatedDeltaNet
from tilewright.models import lora
from tilewright.models.architecture import Architecture, ModelWeights
from tilewright.models.config import Config
from tilewright.models.data import Documents, batches
from tilewright.models.loading import architecture_of, init, load
from tilewright.models.model import Model
from tilewright.models.objective import Objective, cast, gradients_of
from tilewright.models.sharding import check_mesh, check_stages
from tilewright.models.train_config import LoraTable, MeshTable, OptimizerTable, TrainConfig, TrainingError, TrainTable
from tilewright.parallel.mesh import MeshError, make_mesh
from tilewright.parallel.pipeline import PIPELINE, Pipeline
from tilewright.parallel.processes import is_first, wait_for_all
from tilewright.parallel.rules import BATCH_AXES, batch_spec, not_divided, validate_sharding

_CHECKPOINTS, _RUN = "checkpoints", "run.json"
# What a run writes into its folder; the command line adds the last three.
_WRITTEN = (_CHECKPOINTS, _RUN, "final", "records.jsonl", "loss.png")


_KNOWN = "every process knows what the folder has"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step changes, and all that it depends on besides its batch."""

    step: Leaf  # int32, the steps that were made
    weights: Any
    """What is trained, in float32: `ModelWeights`, or the factors of `lora.init`."""
    optimizer: Any


@dataclass(frozen=True)
class Metrics:
    """One step."""

    step: int
    """Counted from 1."""
    loss: float
    """The cross entropy, in nats per token."""
    objective: float
    """The loss with all that is added to it."""
    grad_norm: float
    """Of all gradients, before they are clipped."""
    learning_rate: float
    tokens: int
    """Of the rows of this step."""
    seconds: float | None
    """Since the last step was complete, without checkpoints; None for the first one, which is compiled."""
    others: dict[str, float]
    """`moe_load_balance` and `moe_z_loss` of a model with experts."""


def schedule_of(table: OptimizerTable, steps: int) -> Callable[[Any], Any]:
    """The learning rate of a step, counted from 0."""

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1.0) / max(table.warmup_steps, 1))
        # From the last step of the warm-up, or the first of all, to the last.
        begun = max(table.warmup_steps, 1) - 1
        passed = jnp.clip((step - begun) / max(steps - 1 - begun, 1), 0.0, 1.0)
        left = {
            "constant": jnp.ones(()),
            "linear": 1.0 - passed,
            "cosine": 0.5 * (1.0 + jnp.cos(math.pi * passed)),
        }[table.schedule]
        return table.learning_rate * warm * (table.final_fraction + (1.0 - table.final_fraction) * left)

    return rate


@functools.cache
def optimizer_of(train: TrainTable, table: OptimizerTable) -> optax.GradientTransformation:
    """AdamW with clipped gradients."""
    adamw = optax.adamw(
        schedule_of(table, train.steps),
        b1=table.b1,
        b2=table.b2,
        eps=table.eps,
        weight_decay=table.weight_decay,
        mask=_matrices,
    )
    return optax.chain(optax.clip_by_global_norm(train.clip_norm), adamw) if train.clip_norm else adamw


def _matrices(weights: Any) -> Any:
    """True for matrices. The leaves of runs are stacked over repeats, so that a vector of theirs has two axes."""
    if not isinstance(weights, ModelWeights):
        return jax.tree.map(lambda leaf: True, weights)  # The factors of LoRA.
    outside = {
        name: None if value is None else value.ndim >= 2 for name, value in vars(weights).items() if name != "runs"
    }
    return ModelWeights(runs=jax.tree.map(lambda leaf: leaf.ndim >= 3, weights.runs), **outside)


def _balanced(architecture: Architecture, weights: ModelWeights, loads: list[jax.Array], rate: float) -> ModelWeights:
    """The selection biases, each moved by `rate` towards an even load."""
    remaining, runs = iter(loads), []
    for run, stacks in zip(architecture.runs, weights.runs, strict=True):
        blocks = []
        for block, own in zip(run.pattern, stacks, strict=True):
            if isinstance(block.mlp, MoE):
                load = next(remaining)  # [repeats, E]
                if own.mlp.bias is not None:
                    wanting = jnp.sign(jnp.mean(load, axis=1, keepdims=True) - load)
                    own = dataclasses.replace(own, mlp=dataclasses.replace(own.mlp, bias=own.mlp.bias + rate * wanting))
            blocks.append(own)
        runs.append(tuple(blocks))
    return dataclasses.replace(weights, runs=tuple(runs))


@functools.cache
def step_function(
    architecture: Architecture,
    table: TrainTable,
    optimizing: OptimizerTable,
    adapters: LoraTable | None = None,
    pipeline: Pipeline | None = None,
) -> Callable[[TrainState, Any, Any], Any]:
    """The step (state, frozen, batch) -> (state, metrics), jitted; the state is donated.

    `frozen` is None, or with LoRA the weights that are not trained. Each array of the batch is [accumulate, B, T].
    `pipeline` says how a batch goes through the stages of a mesh that has a pipeline.
    """
    optimizer, rate = optimizer_of(table, optimizing), schedule_of(optimizing, table.steps)

    def step(state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        loss = Objective(architecture, table, pipeline, adapters, frozen)
        objective, parts, gradients = gradients_of(loss, state.weights, batch)
        with jax.numpy_dtype_promotion("standard"):  # Optax multiplies counts with floats.
            updates, after = optimizer.update(gradients, state.optimizer, state.weights)
            weights = optax.apply_updates(state.weights, updates)
        loads = parts.pop("loads", None)
        if loads is not None and table.moe_bias_rate and adapters is None:
            weights = _balanced(architecture, weights, loads, table.moe_bias_rate)  # type: ignore[arg-type]
        metrics = {
            "objective": objective,
            "grad_norm": jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients))),
            "learning_rate": rate(state.step),
            **parts,
        }
        return TrainState(state.step + 1, weights, after), metrics

    return jax.jit(step, donate_argnums=0)


def flops_per_token(architecture: Architecture, seq_len: int) -> float:
    """The FLOPs of a training step per token, without recomputation: what model FLOPs utilisation (MFU) counts.

    Each weight of a matrix that a token meets is 2 FLOPs forward and 4 backward; of experts, those that are chosen count.
    Causal attention adds both products over half of the sequence, and a delta rule the three products with its state.
    """
    forward = 2.0 * architecture.d_model * architecture.vocab_size
    for block in architecture.blocks:
        for layer in (block.mixer, block.mlp):
            for name, parameter in layer.parameters().items():
                if len(parameter.shape) >= 2:
                    active = 1.0
                    if isinstance(layer, MoE) and name in ("gate_up", "down"):
                        active = layer.experts_per_token / layer.num_experts
                    forward += 2.0 * active * math.prod(parameter.shape)
        mixer = block.mixer
        if isinstance(mixer, Attention):
            forward += 2.0 * mixer.num_heads * mixer.head_dim * seq_len
        elif isinstance(mixer, LatentAttention):
            forward += mixer.num_heads * (mixer.key_dim + mixer.shared_key_dim + mixer.value_dim) * seq_len
        elif isinstance(mixer, Qwen3NextGatedDeltaNet):
            forward += 6.0 * mixer.num_value_heads * mixer.key_dim * mixer.value_dim
        elif isinstance(mixer, KimiDeltaAttention):
            forward += 6.0 * mixer.num_heads * mixer.head_dim**2
    return 3.0 * forward


@functools.cache
def _random_model(config: str, dtype: str, mesh: Any) -> Callable[[Any], Model]:
    """Draws all weights in one program, instead of dozens of small ones; on a mesh, each device its own parts."""

    def drawn(key: Any) -> Model:
        return init(json.loads(config), key, dtype=dtype)

    if mesh is None:
        return jax.jit(drawn)
    shapes = jax.eval_shape(drawn, jax.random.key(0))
    check_mesh(shapes.architecture, mesh)
    return jax.jit(drawn, out_shardings=shapes.rules().shardings(shapes, mesh))


def _mesh_of(table: MeshTable) -> Mesh:
    try:
        return make_mesh(**vars(table))
    except MeshError as error:
        raise MeshError(f"[mesh] {error}") from error


@dataclass(frozen=True)
class _Done:
    """A step that is complete, and where the data goes on after it."""

    state: TrainState
    data: dict[str, Any]
    metrics: dict[str, jax.Array] | None


class Training:
    """A run in a folder. It resumes from the folder's last checkpoint, or begins."""

    def __init__(self, config: TrainConfig, folder: str | Path, *, fresh: bool = False):
        """Reads the data and the model, and the last checkpoint; `fresh` deletes what an earlier run wrote there."""
        import orbax.checkpoint as ocp

        self.config, self.folder = config, Path(folder).resolve()
        self.mesh = None if config.mesh is None else _mesh_of(config.mesh)
        if self.mesh is not None:
            check_rows(config, self.mesh)
        elif self.num_processes > 1:
            raise MeshError(f"{self.num_processes} processes need a [mesh]; data = -1 takes the devices of all of them")
        if fresh:
            self._forget()
            wait_for_all("the earlier run is deleted")
        model, self._frozen, weights = self._first_weights()
        self.architecture, self._config_text = model.architecture, model.config
        if self.mesh is not None and PIPELINE in self.mesh.shape:
            check_stages(self.architecture, Pipeline(**vars(config.pipeline)), self.mesh.shape[PIPELINE])
        self.rules = model.rules() if config.lora is None else lora.rules_of(model.architecture)
        documents = Documents.read(config.data, self.architecture.vocab_size)
        self._identify(documents)
        table = config.train
        self._data = batches(documents, config.data.seq_len, table.batch_size * table.accumulate, table.seed)
        self.tokens_per_step = table.batch_size * table.accumulate * config.data.seq_len
        self.flops_per_token = flops_per_token(self.architecture, config.data.seq_len)
        self.num_parameters = model.num_parameters
        self.num_trained = sum(leaf.size for leaf in jax.tree.leaves(weights))
        options = ocp.CheckpointManagerOptions(max_to_keep=config.checkpoint.keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder / _CHECKPOINTS, options=options)
        state = self._first_state(weights)
        self.step, self._done = 0, _Done(state, self._data.get_state(), None)
        self._unread: list[tuple[int, dict[str, jax.Array]]] = []
        """Steps whose metrics `steps` has not yielded."""
        self._restore(ocp)
        pipeline = Pipeline(**vars(config.pipeline))
        self._train_step = step_function(self.architecture, table, config.optimizer, config.lora, pipeline)

    @property
    def num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def num_processes(self) -> int:
        return jax.process_count()

    @property
    def writes(self) -> bool:
        """Whether this process writes what is for people: of several, the first."""
        return is_first()

    @property
    def last_checkpoint(self) -> int | None:
        """The step of the last checkpoint."""
        return self._manager.latest_step()

    def steps(self) -> Iterator[Metrics]:
        """Makes the steps that are left, one after the other, and checkpoints. A step is yielded when the next one runs."""
        steps, every = self.config.train.steps, self.config.checkpoint.every
        last: float | None = None
        while self.step < steps:
            self._advance()
            is_kept = self.step % every == 0 or self.step == steps
            while len(self._unread) > (0 if is_kept else 1):
                read, now = self._read(*self._unread[0]), time.perf_counter()
                yield dataclasses.replace(read, seconds=None if last is None else now - last)
                last = now
                del self._unread[0]  # Not before the caller has it: an interrupt may come at any moment.
            if is_kept:
                self.save()
                last = time.perf_counter()

    def _advance(self) -> None:
        accumulate = self.config.train.accumulate
        batch = {name: x.reshape(accumulate, -1, x.shape[1]) for name, x in next(self._data).items()}
        with self._on_mesh():
            state, metrics = self._train_step(self._done.state, self._frozen, self._placed(batch))
        self._done = _Done(state, self._data.get_state(), metrics)
        self.step += 1
        self._unread.append((self.step, metrics))

    def _on_mesh(self) -> Any:
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def _placed(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch [accumulate, B, T] on the device, or with its rows over the mesh. Every process has read all of it."""
        if self.mesh is None:
            return jax.device_put(batch)
        sharding = NamedSharding(self.mesh, batch_spec(self.mesh, 3, leading=1))
        return {
            name: jax.make_array_from_callback(x.shape, sharding, lambda part, x=x: x[part])
            for name, x in batch.items()
        }

    def _first_state(self, weights: Any) -> TrainState:
        """The state before the first step; on a mesh, the optimizer's moments are where their weights are."""

        def begun(weights: Any) -> TrainState:
            return TrainState(
                jnp.int32(0), weights, optimizer_of(self.config.train, self.config.optimizer).init(weights)
            )

        if self.mesh is None:
            return jax.jit(begun)(weights)
        shardings = self.rules.shardings(jax.eval_shape(begun, weights), self.mesh)
        with self._on_mesh():
            state = jax.jit(begun, out_shardings=shardings)(weights)
        validate_sharding(state, self.rules, self.mesh)
        return state

    def _read(self, number: int, metrics: dict[str, jax.Array]) -> Metrics:
        """The metrics on the host. Raises where the step gave no number."""
        values = {name: float(np.asarray(value)) for name, value in metrics.items()}
        for name, what in (("objective", "loss"), ("grad_norm", "norm of the gradients")):
            if not math.isfinite(values[name]):
                kept = (
                    f"the last checkpoint is of step {self.last_checkpoint}"
                    if self.last_checkpoint
                    else "there is no checkpoint"
                )
                raise TrainingError(
                    f"the {what} is {values[name]} at step {number}; {kept}. Lower learning_rate, which was "
                    f"{values['learning_rate']:.3g}, or warm up for longer"
                )
        named = {name: values.pop(name) for name in ("loss", "objective", "grad_norm", "learning_rate")}
        return Metrics(step=number, tokens=self.tokens_per_step, seconds=None, others=values, **named)

    def save(self) -> list[Metrics]:
        """Writes a checkpoint of the last complete step, if there is none yet.

        Returns the steps up to it that `steps` may not have yielded: after an interrupt, those that no record has yet. A
        step whose loss is not a number is not written, and raises.
        """
        import orbax.checkpoint as ocp

        done = self._done
        lost = any(leaf.is_deleted() for leaf in jax.tree.leaves(done.state))  # Donated to a step that was interrupted.
        if lost or done.metrics is None:
            return []
        step = int(done.state.step)
        self._read(step, done.metrics)
        if step != self.last_checkpoint:
            items = ocp.args.Composite(state=ocp.args.StandardSave(done.state), data=ocp.args.JsonSave(done.data))
            self._manager.save(step, args=items)
        return [self._read(*each) for each in self._unread]

    def _restore(self, ocp: Any) -> None:
        step = self._manager.latest_step()
        if step is None:
            return
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), self._done.state
        )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), data=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        self._data.set_state(restored["data"])
        self.step, self._done = step, _Done(restored["state"], restored["data"], None)

    def model(self) -> Model:
        """The model with the weights of the last step, merged, in the dtype of the computation."""
        weights = self._done.state.weights
        if self.config.lora is not None:
            weights = lora.merged(self._frozen, weights, self.config.lora)
        return Model(cast(self.architecture, weights, self.config.train.dtype), self.architecture, self._config_text)

    def close(self) -> None:
        """Ends Orbax's threads."""
        self._manager.close()

    def _first_weights(self) -> tuple[Model, Any, Any]:
        """The model, what of it is frozen, and what is trained in float32."""
        table, config = self.config.model, self.config
        for_model, for_factors = jax.random.split(jax.random.key(config.train.seed))
        # What is frozen needs no master weights.
        dtype = "float32" if config.lora is None else config.train.dtype
        if table.pretrained:
            model = load(str(table.path), dtype=dtype, mesh=self.mesh)
        else:
            in_file = table.config
            read = Config.read(Path(str(table.path))) if in_file is None else Config(in_file, "[model.config]")
            architecture_of(read)  # Its errors name the table.
            model = _random_model(json.dumps(read.values), dtype, self.mesh)(for_model)
        if config.lora is None:
            return model, None, cast(model.architecture, model.weights, "float32")
        factors = lora.init(model.architecture, config.lora, for_factors)
        if self.mesh is not None:
            factors = lora.rules_of(model.architecture).placed(factors, self.mesh)
        return model, model.weights, factors

    def _identify(self, documents: Documents) -> None:
        """Writes what this run is, or raises where the folder has another run."""
        own = {**self.config.identity(), "tokens": int(documents.tokens.size), "checksum": documents.checksum}
        path = self.folder / _RUN
        if path.exists():
            other = json.loads(path.read_text())
            if changed := _difference(other, own):
                raise TrainingError(
                    f"{self.folder} has a run with {changed}; use another folder, or begin anew with --fresh"
                )
            wait_for_all(_KNOWN)
            return
        if (self.folder / _CHECKPOINTS).exists():
            raise TrainingError(f"{self.folder} has checkpoints and no {_RUN}; use another folder")
        wait_for_all(_KNOWN)
        if is_first():
            self._write_identity(own)
        wait_for_all("the run is written")
        if not path.exists():
            raise TrainingError(f"{path} is not there, and process 0 wrote it; give all processes one shared folder")

    def _write_identity(self, own: dict[str, Any]) -> None:
        path = self.folder / _RUN
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(own, indent=1) + "\n")
        unfinished.replace(path)

    def _forget(self) -> None:
        """Deletes what an earlier run wrote, if this is the folder of a run."""
        if not is_first() or not (self.folder / _RUN).exists():
            return
        for name in _WRITTEN:
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


def check_rows(config: TrainConfig, mesh: Any) -> None:
    """Raises where the mesh does not divide the rows and the tokens of a batch."""
    table, seq_len, context = config.train, config.data.seq_len, mesh.shape.get("context", 1)
    if seq_len % context:
        raise MeshError(
            f"seq_len={seq_len} tokens: {not_divided('context', context, seq_len)}; or use "
            f"seq_len={-(-seq_len // context) * context}"
        )
    parts = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    if table.batch_size % parts:
        spelled = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
        rows = -(-table.batch_size // parts) * parts
        raise MeshError(
            f"batch_size={table.batch_size} rows cannot be cut into {parts} parts, {spelled}; use batch_size={rows}"
        )
    if PIPELINE in mesh.shape:
        Pipeline(**vars(config.pipeline)).of_rows(table.batch_size, parts, mesh.shape[PIPELINE])


def _difference(other: Any, own: Any, name: str = "") -> str | None:
    """The first value that two runs differ in, in words."""
    if isinstance(other, dict) and isinstance(own, dict):
        for key in {**other, **own}:
            where = f"{name}.{key}" if name else key
            if found := _difference(other.get(key), own.get(key), where):
                return found
        return None
    return None if other == own else f"{name}={other!r}, and this one has {own!r}"
