"""The logical axes of a model's weights, and the meshes that divide them."""

import math
from collections.abc import Iterator
from typing import Any

from tilewright.models.architecture import Architecture
from tilewright.parallel.mesh import MeshError
from tilewright.parallel.rules import TABLE, LogicalAxes, Rules, not_divided

PARTS = ("mixer", "mlp")


def rules_of(architecture: Architecture) -> Rules:
    """The rules of a model: those of `tilewright.parallel.TABLE` for the axes that its layers declare."""
    axes: dict[str, LogicalAxes] = {"embedding": ("vocab", "embed"), "head": ("embed", "vocab")}
    for number, run in enumerate(architecture.runs):
        for position, block in enumerate(run.pattern):
            for part in PARTS:
                for name, parameter in getattr(block, part).parameters().items():
                    if parameter.axes:
                        axes[f"runs.{number}.{position}.{part}.{name}"] = ("layers", *parameter.axes)
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
    yield "embed", f"the embedding has {architecture.d_model} channels", architecture.d_model
    yield "vocab", f"the vocabulary has {architecture.vocab_size} tokens", architecture.vocab_size


def check_mesh(architecture: Architecture, mesh: Any) -> None:
    """Raises a `MeshError` with the numbers where an axis of the mesh does not divide what it should cut."""
    sizes = list(_sizes(architecture))
    for mesh_axis in mesh.axis_names:
        parts = mesh.shape[mesh_axis]
        cut = [(words, size) for axis, words, size in sizes if TABLE.get(axis) == mesh_axis]
        if mesh_axis == "expert" and not cut and parts > 1:
            raise MeshError(f"expert={parts}: a {architecture.family} of this config has no experts; use expert=1")
        if mesh_axis == "pipeline":
            layers = len(architecture.blocks)
            cut = [(f"a {architecture.family} of this config has {layers} layers", layers)]
        together = math.gcd(*(size for _, size in cut)) if cut else 0
        for words, size in cut:
            if size % parts:
                raise MeshError(f"{words}; {not_divided(mesh_axis, parts, together)}")
    if mesh.shape.get("pipeline", 1) > 1:
        raise MeshError(
            f"pipeline={mesh.shape['pipeline']}: there is no schedule of stages yet; use fsdp or tensor instead"
        )
