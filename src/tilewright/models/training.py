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
from jax.sharding import NamedSharding

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.attention import Attention
from tilewright.layers.kimi_delta_attention import KimiDeltaAttention
from tilewright.layers.layer import Leaf
from tilewright.layers.mla import LatentAttention
from tilewright.layers.moe import MoE
from tilewright.layers.qwen3_next_gated_delta_net import Qwen3NextGatedDeltaNet
from tilewright.models import lora
from tilewright.models.architecture import (
    Architecture,
    Block,
    BlockWeights,
    ModelWeights,
    embedded,
    head_of,
    hidden_states,
    normed,
    over_pipeline,
    pipeline_of,
    run_layers,
    stage_of,
)
from tilewright.models.config import Config
from tilewright.models.data import IGNORED_LABEL, Documents, batches
from tilewright.models.loading import init, load
from tilewright.models.model import Model
from tilewright.models.sharding import check_mesh, check_stages, staged_run
from tilewright.models.train_config import LoraTable, OptimizerTable, TrainConfig, TrainTable
from tilewright.ops.linear_cross_entropy.api import linear_cross_entropy
from tilewright.ops.moe.api import moe_load_balance_loss, moe_z_loss
from tilewright.parallel.mesh import MeshError, make_mesh
from tilewright.parallel.pipeline import PIPELINE, Pipeline, is_staged
from tilewright.parallel.processes import is_first, wait_for_all
from tilewright.parallel.rules import BATCH_AXES, batch_spec, not_divided, validate_sharding
from tilewright.parallel.stream import StagedLoss, merged, streamed_gradients

# What "ops" keeps: the outputs and statistics of the ops that are more than a pass over memory.
_KEPT_OPS = ("flash_attention", "delta_rule", "gated_delta_rule", "kda", "matmul", "grouped_matmul")
_CHECKPOINTS, _RUN = "checkpoints", "run.json"
# What a run writes into its folder; the command line adds the last three.
_WRITTEN = (_CHECKPOINTS, _RUN, "final", "records.jsonl", "loss.png")


_KNOWN = "every process knows what the folder has"


class TrainingError(ValueError):
    """A run that cannot begin or go on. The text is one line."""


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


def remat_policy(name: str) -> Any:
    """A policy for `hidden_states`: what the backward pass keeps of a layer; the rest is recomputed.

    "none" keeps everything, "full" the layer's input alone, "dots" the results of projections, and "ops" what Tilewright's
    attention, delta rules and matrix products save, so that their forward kernels do not run again.
    """
    return {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        "ops": jax.checkpoint_policies.save_only_these_names(*_KEPT_OPS),
    }[name]


def schedule_of(table: OptimizerTable, steps: int) -> Callable[[Any], Any]:
    """The learning rate of a step, counted from 0."""

    def rate(step: Any) -> Any:
        step = jnp.asarray(step, jnp.float32)
        warm = jnp.minimum(1.0, (step + 1.0) / max(table.warmup_steps, 1))
        passed = jnp.clip((step - table.warmup_steps) / max(steps - table.warmup_steps, 1), 0.0, 1.0)
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


def cast(architecture: Architecture, weights: ModelWeights, dtype: Any) -> ModelWeights:
    """The weights in a dtype; the rates of gates and the like stay float32."""

    def block(block: Block, own: BlockWeights) -> BlockWeights:
        return BlockWeights(
            mixer_norm=own.mixer_norm.astype(dtype),
            mixer=block.mixer.cast(own.mixer, dtype),
            mlp_norm=own.mlp_norm.astype(dtype),
            mlp=block.mlp.cast(own.mlp, dtype),
        )

    return ModelWeights(
        embedding=weights.embedding.astype(dtype),
        runs=tuple(
            tuple(block(each, own) for each, own in zip(run.pattern, stacks, strict=True))
            for run, stacks in zip(architecture.runs, weights.runs, strict=True)
        ),
        norm=weights.norm.astype(dtype),
        head=None if weights.head is None else weights.head.astype(dtype),
    )


def loss_of(
    architecture: Architecture,
    weights: ModelWeights,
    batch: dict[str, jax.Array],
    table: TrainTable,
    count: Any,
    pipeline: Pipeline | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
    """The objective of a microbatch, and its parts.

    Args:
      architecture: of the model.
      weights: in the dtype of the computation.
      batch: `ids`, `labels` and `segment_ids`, each [B, T], as `data.Rows` makes them. `segment_ids` is None where each row
        is one document.
      table: the coefficients, the policy of remat, and whether gathers of weights run ahead.
      count: the labels of the whole step, which the sum of the losses is divided by.
      pipeline: how the batch goes through the stages of a mesh that has a pipeline.

    Returns:
      the objective, and `loss`, the cross entropy alone; with experts also `moe_load_balance`, `moe_z_loss` and `loads`,
      the tokens of each expert [repeats, E] for each block of a pattern that has experts.
    """
    x, _, routings = hidden_states(
        architecture,
        weights,
        batch["ids"],
        segment_ids=batch["segment_ids"],
        remat=remat_policy(table.remat),
        pipeline=pipeline,
        prefetch=table.prefetch,
    )
    return _loss_of_hidden(architecture, weights, x, routings, batch, table, count)


def _loss_of_hidden(
    architecture: Architecture,
    weights: ModelWeights,
    x: jax.Array,
    routings: list[Any],
    batch: dict[str, jax.Array],
    table: TrainTable,
    count: Any,
) -> tuple[jax.Array, dict[str, Any]]:
    """What `loss_of` returns, of the last hidden states and the routings."""
    if is_staged(weights.runs):
        batch = over_pipeline(weights, batch)  # As the rows of x are.
    labels = batch["labels"]
    head, x = head_of(weights, x)
    summed, logsumexp = linear_cross_entropy(
        x, head, labels, z_loss=table.z_loss, reduction="sum", return_logsumexp=True
    )
    objective = summed / count
    squares = jnp.where(labels == IGNORED_LABEL, 0.0, jnp.square(logsumexp))
    parts: dict[str, Any] = {"loss": jax.lax.stop_gradient(objective - table.z_loss * jnp.sum(squares) / count)}
    if routings:
        segment_ids = batch["segment_ids"]
        is_token = jnp.ones(labels.shape, bool) if segment_ids is None else segment_ids > 0  # [B, T]
        # As in transformers, layers count as more tokens.
        logits, experts = (
            jnp.concatenate([getattr(each, name) for each in routings]) for name in ("logits", "experts")
        )  # [layers, B, T, E], [layers, B, T, k]
        mask = jnp.broadcast_to(is_token, logits.shape[:-1])
        scoring: Any = next(block.mlp.scoring for block in architecture.blocks if isinstance(block.mlp, MoE))
        parts["moe_load_balance"] = moe_load_balance_loss(logits, experts, scoring=scoring, mask=mask)
        parts["moe_z_loss"] = moe_z_loss(logits, mask=mask)
        parts["loads"] = [_loads(each.experts, logits.shape[-1], is_token) for each in routings]
        # Each microbatch has its share.
        share = 1.0 / table.accumulate
        objective = objective + share * table.moe_load_balance * parts["moe_load_balance"]
        objective = objective + share * table.moe_z_loss * parts["moe_z_loss"]
        for name in ("moe_load_balance", "moe_z_loss"):
            parts[name] = share * jax.lax.stop_gradient(parts[name])
    return objective, parts


def _loads(experts: jax.Array, num_experts: int, is_token: jax.Array) -> jax.Array:
    """The tokens of each expert [repeats, E], of choices [repeats, B, T, k]."""
    repeats, k = experts.shape[0], experts.shape[-1]
    # As in the load-balance loss, every device counts the choices of all tokens.
    experts, is_token = (placed(x, [()] * x.ndim) for x in (experts, is_token))
    weights = jnp.broadcast_to(is_token[None, :, :, None], experts.shape).astype(jnp.float32).reshape(repeats, -1)
    chosen = experts.reshape(repeats, weights.shape[1])
    return jax.vmap(lambda e, w: jax.ops.segment_sum(w, e, num_experts))(chosen, weights) / k


@dataclass(frozen=True)
class Objective:
    """The objective of a microbatch by what is trained: (weights, batch, count) -> the objective, and its parts."""

    architecture: Architecture
    table: TrainTable
    pipeline: Pipeline | None = None
    adapters: LoraTable | None = None
    frozen: Any = None
    """With LoRA, the weights that are not trained."""

    def __call__(self, weights: Any, batch: dict[str, jax.Array], count: Any) -> tuple[jax.Array, dict[str, Any]]:
        whole = self.model_weights(weights, self.table.dtype)
        return loss_of(self.architecture, whole, batch, self.table, count, self.pipeline)

    def model_weights(self, weights: Any, dtype: Any) -> ModelWeights:
        """The model's weights in a dtype."""
        whole = weights if self.adapters is None else lora.merged(self.frozen, weights, self.adapters)
        return cast(self.architecture, whole, dtype)

    def is_trained(self, weights: Any) -> list[bool]:
        """Of each leaf of the model's weights, whether it depends on what is trained."""
        if self.adapters is None:
            return [True] * len(jax.tree.leaves(weights))
        whole = lora.merged(self.frozen, weights, self.adapters)  # Which leaves the others as they are.
        return jax.tree.leaves(jax.tree.map(lambda own, before: own is not before, whole, self.frozen))


def gradients_of(
    loss: Callable[[Any, Any, Any], Any], weights: Any, batch: dict[str, jax.Array]
) -> tuple[Any, Any, Any]:
    """The objective, its parts and its gradients, summed over the microbatches of batch's first axis.

    The losses of all microbatches are divided by the number of labels of all, so that the sum is the mean over the step.
    Microbatches run one after the other; those of an `Objective` whose layers are the stages of a pipeline follow each
    other through the stages (parallel/stream.py).
    """
    _check_batch(batch, loss.table.accumulate if isinstance(loss, Objective) else None)
    count = jnp.maximum(jnp.sum(batch["labels"] != IGNORED_LABEL), 1).astype(jnp.float32)
    graded = jax.value_and_grad(loss, has_aux=True)

    def one(microbatch: Any) -> Any:
        (objective, parts), gradients = graded(weights, microbatch, count)
        return objective, parts, gradients

    if batch["ids"].shape[0] == 1:
        return one(jax.tree.map(lambda x: x[0], batch))
    if isinstance(loss, Objective) and is_staged((weights, loss.frozen)):
        return _streamed(loss, weights, batch, count)
    first = jax.tree.map(lambda x: x[0], batch)
    zeros = jax.tree.map(lambda x: placed(jnp.zeros(x.shape, x.dtype), explicit_axes(x)), jax.eval_shape(one, first))

    def add(sums: Any, microbatch: Any) -> Any:
        return jax.tree.map(jnp.add, sums, one(microbatch)), None

    return jax.lax.scan(add, zeros, batch)[0]


def _check_batch(batch: dict[str, Any], accumulate: int | None) -> None:
    """Raises where these are not the arrays of A microbatches; `accumulate` is the A that there should be, if known."""
    names = ("ids", "labels", "segment_ids")
    if lacking := [name for name in names if name not in batch]:
        raise TrainingError(
            f"the batch has no {', '.join(lacking)}; it must have ids, labels and segment_ids, each [A, B, T], or "
            f"segment_ids as None where each row is one document"
        )
    shapes = {name: batch[name].shape for name in names if batch[name] is not None}
    told = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    if len(set(shapes.values())) > 1 or len(shapes["ids"]) != 3:
        raise TrainingError(
            f"the batch has {told}; all must be [A, B, T] for A microbatches: batch['ids'][None] of a single one"
        )
    if shapes["ids"][0] != (accumulate or shapes["ids"][0]) or not shapes["ids"][0]:
        raise TrainingError(f"the batch has {told}; the first axis must be accumulate={accumulate or 1} microbatches")


def _streamed(loss: Objective, weights: Any, batch: dict[str, jax.Array], count: Any) -> tuple[Any, Any, Any]:
    """`gradients_of` where the microbatches follow each other through the stages of a pipeline."""
    architecture, table = loss.architecture, loss.table
    number, runs, remat = staged_run(architecture), architecture.runs, remat_policy(table.remat)
    whole = loss.model_weights(weights, table.dtype)
    leaves, tree = jax.tree.flatten(whole)
    inside = jax.tree.leaves(
        dataclasses.replace(
            jax.tree.map(lambda _: False, whole),
            runs=tuple(jax.tree.map(lambda _, at=at: at == number, own) for at, own in enumerate(whole.runs)),
        )
    )
    trained = list(zip(loss.is_trained(weights), inside, strict=True))
    outside = [place for place, each in enumerate(trained) if each == (True, False)]
    staged = [place for place, each in enumerate(trained) if each == (True, True)]
    others = {"remat": remat, "prefetch": table.prefetch}

    def before(own: list[jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, Any, Any]:
        model = tree.unflatten(merged(outside, own, leaves))
        ids, segment_ids = over_pipeline(model, (batch["ids"], batch["segment_ids"]))
        x = embedded(model.embedding, ids)
        x, routings = run_layers(runs[:number], model.runs[:number], x, segment_ids, **others)
        return x, segment_ids, routings

    def after(own: list[jax.Array], x: jax.Array, routing: Any, earlier: Any, batch: Any) -> Any:
        model = tree.unflatten(merged(outside, own, leaves))
        segment_ids = over_pipeline(model, batch["segment_ids"])
        x, later = run_layers(runs[number + 1 :], model.runs[number + 1 :], x, segment_ids, **others)
        routings = [*earlier, *(each for each in routing if each is not None), *later]
        return _loss_of_hidden(architecture, model, normed(architecture, model, x), routings, batch, table, count)

    objective, parts, *gradients = streamed_gradients(
        StagedLoss(before, stage_of(runs[number], whole.runs[number], remat), after),
        [leaves[place] for place in outside],
        whole.runs[number],
        tuple(place - inside.index(True) for place in staged),
        batch,
        pipeline_of(whole, over_pipeline(whole, batch["ids"][0]), loss.pipeline),
    )
    # By way of float32 weights: a cast to the dtype of the computation would round the sums.
    frozen = None if loss.frozen is None else cast(architecture, loss.frozen, "float32")

    def chosen(weights: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        wide = jax.tree.leaves(dataclasses.replace(loss, frozen=frozen).model_weights(weights, "float32"))
        return [wide[place] for place in outside], [wide[place] for place in staged]

    return objective, parts, jax.vjp(chosen, weights)[1](tuple(gradients))[0]


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
        self.mesh = None if config.mesh is None else make_mesh(**vars(config.mesh))
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
            values = table.config if table.config is not None else Config.read(Path(str(table.path))).values
            model = _random_model(json.dumps(values), dtype, self.mesh)(for_model)
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
