"""The logical axes of a model's weights, and the meshes that divide them."""

import math
from collections.abc import Iterator
from typing import Any

from jax.sharding import AxisType

from tilewright.models.architecture import Architecture
from tilewright.parallel.mesh import MeshError, check_axes
from tilewright.parallel.pipeline import PIPELINE, Pipeline
from tilewright.parallel.rules import TABLE, LogicalAxes, Rules, not_divided

PARTS = ("mixer", "mlp")


def staged_run(architecture: Architecture) -> int:
    """The number of the run whose repeats are the stages of a pipeline: the one with the most layers."""
    runs = architecture.runs
    return max(range(len(runs)), key=lambda number: (runs[number].count * len(runs[number].pattern), -number))


def rules_of(architecture: Architecture) -> Rules:
    """The rules of a model: those of `tilewright.parallel.TABLE` for the axes that its layers declare."""
    axes: dict[str, LogicalAxes] = {"embedding": ("vocab", "embed"), "head": ("embed", "vocab")}
    for number, run in enumerate(architecture.runs):
        layers = "layers" if number == staged_run(architecture) else None
        for position, block in enumerate(run.pattern):
            of = f"runs.{number}.{position}"
            axes |= {f"{of}.{part}_norm": (layers,) for part in PARTS}
            for part in PARTS:
                for name, parameter in getattr(block, part).parameters().items():
                    axes[f"{of}.{part}.{name}"] = (layers, *parameter.axes)
    return Rules(axes)


def _sizes(architecture: Architecture) -> Iterator[tuple[str, str, int]]:
    """What a mesh axis has to divide: the logical axis, the number in words, and the number."""
    for number, block in enumerate(architecture.blocks):
        for part in PARTS:
            layer = getattr(block, part)
            for name, parameter in layer.parameters().items():
                of = f"{type(layer).__name__}.{name} of layer {number}"
                for axis, size in zip(parameter.axes, parameter.shape, strict=bool(parameter.axes)):
                    if axis == "heads" and parameter.heads > 1:
                        yield "heads", f"{of} has {parameter.heads} heads", parameter.heads
                    elif axis == "experts":
                        yield "experts", f"{of} has {size} experts", size
                    elif axis is not None:
                        yield axis, f"{of} has {size} channels", size
    staged = architecture.runs[staged_run(architecture)]
    yield "layers", f"a {architecture.family} of this config {_repeats(architecture)}", staged.count
    yield "embed", f"the embedding has {architecture.d_model} channels", architecture.d_model
    yield "vocab", f"the vocabulary has {architecture.vocab_size} tokens", architecture.vocab_size


def check_mesh(architecture: Architecture, mesh: Any) -> None:
    """Raises a `MeshError` with the numbers where an axis of the mesh does not divide what it should cut."""
    check_axes(mesh)
    sizes = list(_sizes(architecture))
    for mesh_axis in mesh.axis_names:
        parts = mesh.shape[mesh_axis]
        cut = [(words, size) for axis, words, size in sizes if TABLE.get(axis) == mesh_axis]
        if mesh_axis == "expert" and not cut and parts > 1:
            raise MeshError(f"expert={parts}: a {architecture.family} of this config has no experts; use expert=1")
        together = math.gcd(*(size for _, size in cut)) if cut else 0
        for words, size in cut:
            if size % parts:
                raise MeshError(f"{words}; {not_divided(mesh_axis, parts, together)}")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if PIPELINE in kinds and kinds[PIPELINE] != AxisType.Explicit:
        raise MeshError(
            f"pipeline={mesh.shape[PIPELINE]} needs Explicit axes, and these are {kinds[PIPELINE].name}; make the mesh "
            f"with axis_type=AxisType.Explicit"
        )


def _repeats(architecture: Architecture) -> str:
    run = architecture.runs[staged_run(architecture)]
    period = f"its period of {len(run.pattern)} layers" if len(run.pattern) > 1 else "its layer"
    return f"repeats {period} {run.count} times in a row"


def check_stages(architecture: Architecture, pipeline: Pipeline, stages: int) -> None:
    """Raises a `MeshError` with the numbers where the repeating layers do not make equal groups for all stages."""
    words = f"a {architecture.family} of this config {_repeats(architecture)}"
    pipeline.check_layers(architecture.runs[staged_run(architecture)].count, stages, words)
