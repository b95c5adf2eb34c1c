"""A mesh of devices whose axes have the names that the rules of the models know."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from tilewright.core.arguments import is_integer

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The axes of a mesh, from the one whose devices exchange the least to the one whose devices exchange the most: the last
axis gets the devices that are the nearest to each other."""


class MeshError(ValueError):
    """A mesh that these devices, or this model, cannot have. The text is one line."""


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    pipeline: int = 1,
    context: int = 1,
    devices: Sequence[Any] | None = None,
    axis_type: AxisType = AxisType.Explicit,
) -> Mesh:
    """A mesh of all devices, with the axes that are larger than 1, and "data" always.

    Args:
      data: copies of the model, each with a part of the batch.
      fsdp: parts of every weight, which are gathered where they are used; they have parts of the batch, too.
      tensor: parts of heads, hidden channels and the vocabulary.
      expert: parts of the experts.
      pipeline: parts of the layers, the stages of a pipeline.
      context: parts of every sequence.
      devices: those of the mesh; by default `jax.devices()`, those of all processes. One of the sizes may be -1, which
        takes the devices that the others leave.
      axis_type: Explicit puts shardings into the types of arrays, so that nothing is moved that the program does not
        say. Auto leaves them to the compiler.

    Returns:
      a `jax.sharding.Mesh`.
    """
    sizes = {
        "pipeline": pipeline, "data": data, "fsdp": fsdp, "expert": expert, "context": context, "tensor": tensor,
    }  # fmt: skip
    sizes = {name: _checked(name, size) for name, size in sizes.items()}
    if not isinstance(axis_type, AxisType):
        raise MeshError(f"axis_type={axis_type!r} must be AxisType.Explicit or AxisType.Auto, of jax.sharding")
    found = _devices(devices)
    sizes = _filled(sizes, len(found))
    spelled = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "data=1"
    wanted = math.prod(sizes.values())
    if wanted != len(found):
        if wanted > len(found):
            virtual = f", or set JAX_NUM_CPU_DEVICES={wanted} for virtual ones" if found[0].platform == "cpu" else ""
            remedy = f"use a smaller mesh{virtual}"
        else:
            remedy = f"use data=-1 for all of them, or pass devices=jax.devices()[:{wanted}]"
        raise MeshError(f"a mesh of {spelled} has {wanted} devices, and there are {len(found)}; {remedy}")
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "data"}
    return jax.make_mesh(tuple(kept.values()), tuple(kept), axis_types=(axis_type,) * len(kept), devices=found)


def check_axes(mesh: Any) -> None:
    """Raises a `MeshError` for what is no mesh, and for an axis that no rule knows, over which nothing would be cut."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f"mesh is of type {type(mesh).__name__}; use tilewright.parallel.make_mesh(data=...)")
    unknown = [axis for axis in mesh.axis_names if axis not in MESH_AXES and mesh.shape[axis] > 1]
    if unknown:
        raise MeshError(
            f"the mesh has an axis {unknown[0]!r}, over which nothing is cut; use tilewright.parallel.make_mesh, whose "
            f"axes are {', '.join(MESH_AXES)}"
        )


def auto_axes(mesh: Any) -> Mesh:
    """The same mesh with Auto axes, on which arrays can be indexed along axes that are cut."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def products_that_divide(devices: int, wanted: int) -> str:
    """The part of an error about axes of `wanted` devices that do not divide `devices`: what their product may be."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - wanted), n))
    return f"their product must be one of {', '.join(map(str, divisors))}, and the nearest is {nearest}"


def _checked(name: str, size: Any) -> int:
    if not is_integer(size) or (size < 1 and size != -1):
        raise MeshError(f"{name}={size!r} must be a positive integer, or -1 for the devices that are left")
    return int(size)


def _devices(devices: Any) -> list[Any]:
    given = jax.devices() if devices is None else devices
    found = list(given) if np.iterable(given) else []
    if not found or not all(hasattr(device, "device_kind") for device in found):
        raise MeshError(f"devices={devices!r} must be a list of devices, such as jax.devices()[:4]")
    if len(set(found)) < len(found):
        raise MeshError(f"devices has {len(found)} devices, and {len(set(found))} of them differ; pass each one once")
    return found


def _filled(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """The sizes with -1 replaced by what the others leave."""
    open_axes = [name for name, size in sizes.items() if size == -1]
    if not open_axes:
        return sizes
    if len(open_axes) > 1:
        raise MeshError(f"{' and '.join(open_axes)} are -1; only one axis can take the devices that are left")
    others = math.prod(size for size in sizes.values() if size != -1)
    if devices % others:
        raise MeshError(
            f"{open_axes[0]}=-1: the other axes have {others} devices, which do not divide {devices}; "
            f"{products_that_divide(devices, others)}"
        )
    return sizes | {open_axes[0]: devices // others}
