"""LoRA: a projection W is W + (alpha / rank) A B, and only A and B are trained.

Projections are named by the fields of the layers' weights, such as "q_proj". The product is added to the frozen weights
before they are used, so that every layer takes it, at the cost of one more copy of the adapted weights in a step.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from tilewright.core.nearest import did_you_mean
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.layer import Layer
from tilewright.layers.mlp import MLP
from tilewright.models.architecture import Architecture, ModelWeights
from tilewright.models.sharding import PARTS, staged_run
from tilewright.models.train_config import LoraTable, TrainConfigError
from tilewright.parallel.rules import LogicalAxes, Rules


def _projections(layer: Layer[Any]) -> Iterator[tuple[str, int, int]]:
    """The names of a layer's projections, and their inputs and outputs."""
    for name, parameter in layer.parameters().items():
        if parameter.transposed and len(parameter.shape) == 2:
            yield name, *parameter.shape
        elif isinstance(layer, MLP) and name == "gate_up":
            yield name, parameter.shape[0], math.prod(parameter.shape[1:])


def init(architecture: Architecture, lora: LoraTable, key: PRNGKeyArray) -> Any:
    """The factors A [repeats, inputs, rank] and B [repeats, rank, outputs] in float32, by run, block, part and name.

    A is normal with a deviation of inputs ** -0.5, and B is 0, so that training begins with the frozen weights.
    """
    known: set[str] = set()
    runs = []
    for run in architecture.runs:
        blocks = []
        for block in run.pattern:
            own: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
            for part in PARTS:
                for name, inputs, outputs in _projections(getattr(block, part)):
                    known.add(name)
                    if name in lora.targets:
                        key, drawn = jax.random.split(key)
                        a = inputs**-0.5 * jax.random.normal(drawn, (run.count, inputs, lora.rank), jnp.float32)
                        own[part][name] = {"a": a, "b": jnp.zeros((run.count, lora.rank, outputs), jnp.float32)}
            blocks.append(own)
        runs.append(tuple(blocks))
    if unknown := [name for name in lora.targets if name not in known]:
        raise TrainConfigError(
            f"[lora] targets has {unknown[0]!r}, and this model has the projections {', '.join(sorted(known))}"
            f"{did_you_mean(unknown[0], known)}"
        )
    return tuple(runs)


def rules_of(architecture: Architecture) -> Rules:
    """Where the factors belong on a mesh: A's inputs and B's outputs as those of the projection, and ranks whole."""
    axes: dict[str, LogicalAxes] = {}
    for number, run in enumerate(architecture.runs):
        layers = "layers" if number == staged_run(architecture) else None
        for position, block in enumerate(run.pattern):
            for part in PARTS:
                layer = getattr(block, part)
                for name, _, _ in _projections(layer):
                    parameter = layer.parameters()[name]
                    path = f"{number}.{position}.{part}.{name}"
                    axes[f"{path}.a"] = (layers, parameter.axes[0], None)
                    # Gates and values that lie side by side cannot be cut as the weights are, each for itself.
                    axes[f"{path}.b"] = (layers, None, parameter.axes[1] if len(parameter.shape) == 2 else None)
    return Rules(axes)


def merged(weights: ModelWeights, factors: Any, lora: LoraTable) -> ModelWeights:
    """The weights with the factors' products added, in their own dtype; the sum is made in float32."""
    scale = lora.alpha / lora.rank

    def added(own: Any, adapted: dict[str, Any]) -> Any:
        changed = {}
        for name, factor in adapted.items():
            w = getattr(own, name)
            product = jnp.matmul(factor["a"], factor["b"], precision=jax.lax.Precision.HIGHEST)  # [repeats, in, out]
            product = placed(product.reshape(w.shape), explicit_axes(w))
            changed[name] = (w.astype(jnp.float32) + scale * product).astype(w.dtype)
        return dataclasses.replace(own, **changed)

    runs = tuple(
        tuple(
            dataclasses.replace(own, **{part: added(getattr(own, part), adapted[part]) for part in PARTS})
            for own, adapted in zip(blocks, of_run, strict=True)
        )
        for blocks, of_run in zip(weights.runs, factors, strict=True)
    )
    return dataclasses.replace(weights, runs=runs)
