"""Where the weights of a model lie on a mesh: from what their axes are to the mesh's axes."""

import math
from typing import Any

from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

RULES = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", "experts": "expert", "embed": "fsdp"}
"""What an axis of a weight is, and the mesh axis that it is sharded over."""


def sharding(
    mesh: Any, axes: tuple[str | None, ...], shape: tuple[int, ...], *, stacked: bool = False
) -> NamedSharding:
    """The sharding of a weight whose axes are `axes`. An axis that the mesh lacks, or does not divide, stays whole.

    `stacked`: the weight has one more axis in front, the layers of a run, which is never sharded.
    """
    used: set[str] = set()
    spec: list[str | None] = []
    for name, size in zip((*axes, *(None,) * (len(shape) - len(axes))), shape, strict=True):
        over = RULES.get(name or "")
        fits = over in mesh.axis_names and over not in used and size % math.prod([mesh.shape[over]]) == 0
        spec.append(over if fits else None)
        used |= {over} if fits and over is not None else set()
    return NamedSharding(mesh, P(*((None,) if stacked else ()), *spec))
