"""Calls whose arrays are sharded over a mesh: each device runs the op on its own part.

A call says which of its axes are independent of each other (`Call.independent`): batch, heads, rows. An array that is
sharded along such an axis stays where it is. Where other arrays are sharded over a mesh axis and this one is not, it is
replicated along that mesh axis, and its gradient is summed over it.

Explicit mesh axes are part of an array's type: there the call runs inside `jax.shard_map`, whose own rules sum the
gradients of replicated arrays. Auto axes are known to the compiler alone, and kernels have no rule for them yet.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.call import Call

Letters = tuple[str, ...]
Placement = Mapping[str, tuple[str, ...]]
"""The mesh axes that each independent axis of a call is sharded over, by the first letter of its group."""


class Axes:
    """The letters of a call's axes, and which of them may be sharded together."""

    def __init__(self, call: Call):
        named = {name: call.letters(name, len(value.shape)) for name, value in call.given().items()}
        self.sizes: dict[str, int] = {}
        for name, value in call.given().items():
            for letter, size in zip(named[name], value.shape, strict=True):
                self.sizes[letter] = max(size, self.sizes.get(letter, 0))
        self.group = {letter: group[0] for group in call.independent_groups(self.sizes) for letter in group}
        self.arrays = {name: self._settled(named[name], value.shape) for name, value in call.given().items()}

    def _settled(self, letters: Letters, shape: tuple[int, ...]) -> Letters:
        """Letters, with "" for an axis of 1 that is broadcast."""
        return tuple(
            "" if size == 1 < self.sizes[letter] else letter for letter, size in zip(letters, shape, strict=True)
        )

    def of(self, spelled: str) -> Letters:
        """The letters of an output, spelled such as "B T HV V"."""
        leading = [letter for letter in self.sizes if letter.startswith("tokens")]
        return tuple(each for letter in spelled.split() for each in (leading if letter == "*tokens" else [letter]))

    def spec(self, letters: Letters, placement: Placement) -> P:
        entries = [placement.get(self.group.get(letter, ""), ()) for letter in letters]
        return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def _entries(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each array axis."""
    given = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return given + [()] * (ndim - len(given))


def _placement(
    op: str, axes: Axes, specs: Mapping[str, Any], mesh_shape: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """Where the independent axes of a call lie, from the shardings of its arrays; the first array that says so decides.

    A sharding along any other axis is an error.
    """
    placement: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        for letter, mesh_axes in zip(axes.arrays[name], _entries(spec, len(axes.arrays[name])), strict=True):
            if not mesh_axes:
                continue
            where = (
                f"{name} is sharded over mesh axis {mesh_axes[0]!r}"
                if len(mesh_axes) == 1
                else f"{name} is sharded over mesh axes {mesh_axes}"
            )
            group = axes.group.get(letter)
            if group is None:
                allowed = ", ".join(sorted(set(axes.group))) or "none"
                raise ValueError(
                    f"{op}: {where} along its axis {letter or 'of size 1'}, and {op} can be cut along {allowed} only; "
                    f"pass jax.sharding.reshard({name}, ...) without it, or use jax.shard_map and exchange what the "
                    f"shards need"
                )
            used = {axis for other, each in placement.items() if other != group for axis in each}
            if used & set(mesh_axes):
                raise ValueError(
                    f"{op}: {where} along its axis {letter}, and another axis of this call is sharded over it too; pass "
                    f"jax.sharding.reshard({name}, ...) without it"
                )
            placement.setdefault(group, mesh_axes)
    for letter, group in axes.group.items():
        parts = math.prod(mesh_shape[axis] for axis in placement.get(group, ()))
        if letter in axes.sizes and axes.sizes[letter] % parts:
            raise ValueError(
                f"{op}: {letter}={axes.sizes[letter]} cannot be cut into {parts} parts, over mesh axes "
                f"{placement[group]}; use a mesh whose axes divide it, or reshard the arrays without them"
            )
    return placement


def run_explicit(op: str, call: Call, function: Callable[[Call], Any]) -> Any:
    """Runs a call whose arrays are sharded over Explicit mesh axes on each device's part; `function` runs one part.

    A call that is not sharded so goes to `function` as it is. Results are sharded along the axes that they share with
    the arguments.
    """
    given = call.given()
    shardings = {name: jax.typeof(value).sharding for name, value in given.items()}
    meshes = [each.mesh for each in shardings.values() if AxisType.Explicit in each.mesh.axis_types]
    if not meshes:
        return function(call)
    mesh, axes = meshes[0], Axes(call)
    specs = {name: sharding.spec for name, sharding in shardings.items()}
    placement = _placement(op, axes, specs, dict(mesh.shape))
    specs = {name: axes.spec(letters, placement) for name, letters in axes.arrays.items()}
    placed = {name: jax.sharding.reshard(value, NamedSharding(mesh, specs[name])) for name, value in given.items()}
    outputs = tuple(axes.spec(axes.of(spelled), placement) for spelled in call.outputs)
    free = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    run = jax.shard_map(
        function,
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=(call.with_arrays(specs),),
        out_specs=outputs if len(outputs) != 1 else outputs[0],
        axis_names=set(free),
    )
    return run(call.with_arrays(placed))
