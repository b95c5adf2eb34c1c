"""Where arrays lie on a mesh: a table from what their axes are (logical axes) to the mesh's axes.

A model declares the logical axes of each of its weights once (`layers.layer.Parameter.axes`). `Rules` has them by path, and
finds an array by the end of its path, so that what has the structure of the weights (gradients, the moments of an
optimizer, a training state) follows the same rules without being declared again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.parallel.mesh import MeshError, check_axes
from tilewright.parallel.processes import global_array

LogicalAxes = tuple[str | None, ...]

BATCH_AXES = ("pipeline", "data", "fsdp", "expert")
"""The mesh axes that the rows of a batch are cut over. In the stages of a pipeline its devices work on the same rows, one
after the other."""

TABLE: Mapping[str, str] = {
    "layers": "pipeline",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": "expert",
}
"""The mesh axis that each logical axis is cut over. "layers" is the axis that equal layers are stacked along, of those that
make the stages of a pipeline."""


@dataclass(frozen=True)
class Rules:
    """The rules of one model."""

    axes: Mapping[str, LogicalAxes]
    """The logical axes of an array, by the end of its path ("runs.0.1.mixer.q_proj"). Arrays that are not named are on
    every device."""
    table: Mapping[str, str] = field(default_factory=lambda: TABLE)

    def axes_of(self, path: str) -> LogicalAxes:
        """The logical axes of the array at a path; () for none."""
        parts = path.split(".")
        return next((self.axes[end] for n in range(len(parts)) if (end := ".".join(parts[n:])) in self.axes), ())

    def spec(self, path: str, shape: tuple[int, ...], mesh: Any) -> P:
        """Where the array at a path belongs. A size that the mesh does not divide is an error."""
        return spec_of(self.axes_of(path), shape, mesh, self.table, path)

    def shardings(self, tree: Any, mesh: Any) -> Any:
        """The sharding of each array of a tree of arrays or shapes."""
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: NamedSharding(mesh, self.spec(path_name(path), leaf.shape, mesh)), tree
        )

    def placed(self, tree: Any, mesh: Any) -> Any:
        """The arrays of a tree, each where it belongs."""
        return jax.tree.map(global_array, tree, self.shardings(tree, mesh))


def spec_of(
    axes: LogicalAxes, shape: tuple[int, ...], mesh: Any, table: Mapping[str, str] = TABLE, name: str = "an array"
) -> P:
    """The placement of an array with these logical axes. An axis that the mesh lacks stays whole."""
    spec: list[str | None] = []
    for axis, size in zip((*axes, *(None,) * (len(shape) - len(axes))), shape, strict=True):
        over = table.get(axis or "")
        if over is None or over not in mesh.axis_names or over in spec:
            spec.append(None)
            continue
        parts = mesh.shape[over]
        if size % parts:
            raise MeshError(f"{name} has {size} along its axis {axis!r}; {not_divided(over, parts, size)}")
        spec.append(over)
    return P(*spec)


def not_divided(mesh_axis: str, parts: int, size: int) -> str:
    """The part of an error about a mesh axis that does not divide a size: the numbers, and the nearest that would.

    It is not larger, since there may be no more devices.
    """
    nearest = max(n for n in range(1, parts + 1) if n == 1 or (size and size % n == 0))
    return f"{mesh_axis}={parts} does not divide it, and the nearest that works is {mesh_axis}={nearest}"


def batch_spec(mesh: Any, ndim: int, *, leading: int = 0) -> P:
    """The placement of an array whose axis `leading` is the rows of a batch, and the next one, if any, their tokens."""
    # Without axes of one device: JAX forgets them along an axis of one row, and then refuses to mix both kinds.
    over = tuple(axis for axis in BATCH_AXES if mesh.shape.get(axis, 1) > 1)
    tokens = "context" if mesh.shape.get("context", 1) > 1 else None
    return P(*(None,) * leading, over or None, *(tokens, *(None,) * ndim)[: ndim - leading - 1])


def validate_sharding(tree: Any, rules: Rules, mesh: Any) -> None:
    """Raises a `MeshError` that names the first array that is not where the rules say.

    Args:
      tree: arrays with the structure of a model's weights anywhere in it: weights, gradients, a `TrainState`.
      rules: those of the model (`model.rules()`).
      mesh: where the arrays should be. The types of its axes do not matter.
    """
    if not isinstance(rules, Rules):
        raise MeshError(f"rules is of type {type(rules).__name__}; use model.rules()")
    check_axes(mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        if not isinstance(leaf, jax.Array):
            raise MeshError(f"{name} is a {type(leaf).__name__} and not an array on the mesh; use model.shard(mesh)")
        wanted = NamedSharding(mesh, rules.spec(name, leaf.shape, mesh))
        if leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
            continue
        there = leaf.sharding.device_set
        if there != wanted.device_set:
            raise MeshError(
                f"{name} is on {len(there)} of {wanted.num_devices} devices of the mesh; use model.shard(mesh)"
            )
        mesh_axes = [axis for axis in wanted.spec if axis is not None]
        parts = math.prod(mesh.shape[axis] for axis in mesh_axes)
        if leaf.sharding.is_fully_replicated:
            raise MeshError(
                f"{name} {list(leaf.shape)} is replicated on all {len(there)} devices, and must be cut into {parts} parts, "
                f"{wanted.spec}; use model.shard(mesh)"
            )
        found = getattr(leaf.sharding, "spec", leaf.sharding)
        raise MeshError(
            f"{name} {list(leaf.shape)} is cut as {found}, and must be {wanted.spec}; use model.shard(mesh)"
        )


def path_name(path: Any) -> str:
    """The name of a leaf of a tree, from its path."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
