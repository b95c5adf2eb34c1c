"""The objective of a training step, and its gradients: of one batch, of several that are accumulated, and of several that
follow each other through the stages of a pipeline.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.moe import MoE
from tilewright.models import lora
from tilewright.models.architecture import (
    Architecture,
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
from tilewright.models.block import Block, BlockWeights
from tilewright.models.data import IGNORED_LABEL
from tilewright.models.sharding import staged_run
from tilewright.models.train_config import LoraTable, TrainingError, TrainTable
from tilewright.ops.linear_cross_entropy.api import linear_cross_entropy
from tilewright.ops.moe.api import moe_load_balance_loss, moe_z_loss
from tilewright.parallel.pipeline import Pipeline, is_staged
from tilewright.parallel.stream import StagedLoss, merged, streamed_gradients

# What "ops" keeps: the outputs and statistics of the ops that are more than a pass over memory.
_KEPT_OPS = ("flash_attention", "delta_rule", "gated_delta_rule", "kda", "matmul", "grouped_matmul")


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
    if is_staged(weights.runs):
        batch = over_pipeline(weights, batch)
    x, _, routings = hidden_states(
        architecture,
        weights,
        batch["ids"],
        segment_ids=batch["segment_ids"],
        remat=remat_policy(table.remat),
        pipeline=pipeline,
        prefetch=table.prefetch,
    )
    return _head_loss(architecture, weights, x, routings, batch, table, count)


def _head_loss(
    architecture: Architecture,
    weights: ModelWeights,
    x: jax.Array,
    routings: list[Any],
    batch: dict[str, jax.Array],
    table: TrainTable,
    count: Any,
) -> tuple[jax.Array, dict[str, Any]]:
    """What `loss_of` returns, of the last hidden states and the routings."""
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
    count = shapes["ids"][0]
    if count != (accumulate or max(count, 1)):
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
        model, batch = tree.unflatten(merged(outside, own, leaves)), over_pipeline(whole, batch)
        x = embedded(model.embedding, batch["ids"])
        x, routings = run_layers(runs[:number], model.runs[:number], x, batch["segment_ids"], **others)
        return x, batch["segment_ids"], routings

    def after(own: list[jax.Array], x: jax.Array, routing: Any, earlier: Any, batch: Any) -> Any:
        model, batch = tree.unflatten(merged(outside, own, leaves)), over_pipeline(whole, batch)
        x, later = run_layers(runs[number + 1 :], model.runs[number + 1 :], x, batch["segment_ids"], **others)
        routings = [*earlier, *(each for each in routing if each is not None), *later]
        return _head_loss(architecture, model, normed(architecture, model, x), routings, batch, table, count)

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
