"""Calls whose arrays are sharded over a mesh: each device runs the op on its own part.

A call says which of its axes are independent of each other (`Call.independent`): batch, heads, rows. An array that is
sharded along such an axis stays where it is. Where other arrays are sharded over a mesh axis and this one is not, it is
replicated along that mesh axis, and its gradient is summed over it.

Explicit mesh axes are part of an array's type: there the call runs inside `jax.shard_map` (`run_explicit`). Auto axes
are known to the compiler alone: there each pass is a `custom_partitioning` (`partitioned`), which says how the axes of
its operands and results belong together, and what a device runs on its part.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.call import Call

Letters = tuple[str, ...]
Placement = Mapping[str, tuple[str, ...]]
"""The mesh axes that each independent axis of a call is sharded over, by the first letter of its group."""


class Axes:
    """The letters of a call's axes, and which of them may be sharded together."""

    def __init__(self, call: Call):
        self.call = call
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

    def of(self, spelled: str, ndim: int) -> Letters:
        """The letters of a result or a saved array that is spelled "B HV ...": axes behind the dots are no call's."""
        letters = [letter for letter in spelled.split() if letter != "..."]
        leading = [letter for letter in self.sizes if letter.startswith("tokens")]
        expanded = [each for letter in letters for each in (leading if letter == "*tokens" else [letter])]
        return (*expanded, *([""] * (ndim - len(expanded))))

    def spec(self, letters: Letters, placement: Placement) -> P:
        entries = [placement.get(self.group.get(letter, ""), ()) for letter in letters]
        return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def _entries(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each array axis."""
    given = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return given + [()] * (ndim - len(given))


def placement_of(
    op: str, axes: Axes, specs: Mapping[str, Any], mesh_shape: Mapping[str, int], *, refuse: bool
) -> dict[str, tuple[str, ...]]:
    """Where the independent axes of a call lie, from the shardings of its arrays; the first array that says so decides.

    With `refuse`, a sharding along any other axis is an error. Without, it is left out: the array is gathered there.
    """
    placement: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        for letter, mesh_axes in zip(axes.arrays[name], _entries(spec, len(axes.arrays[name])), strict=True):
            if not mesh_axes:
                continue
            shown = mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes
            group = axes.group.get(letter)
            if group is None:
                if refuse:
                    allowed = ", ".join(sorted(set(axes.group))) or "none"
                    raise ValueError(
                        f"{op}: {name} is sharded over mesh axis {shown!r} along its axis {letter or 'of size 1'}, and "
                        f"{op} can be cut along {allowed} only; pass jax.sharding.reshard({name}, ...) without it, or "
                        f"use jax.shard_map and exchange what the shards need"
                    )
                continue
            used = {axis for other, each in placement.items() if other != group for axis in each}
            if used & set(mesh_axes):
                if refuse:
                    raise ValueError(
                        f"{op}: {name} is sharded over mesh axis {shown!r} along its axis {letter}, and another axis "
                        f"of this call is sharded over it too; pass jax.sharding.reshard({name}, ...) without it"
                    )
                continue
            placement.setdefault(group, mesh_axes)
    for group, mesh_axes in list(placement.items()):
        parts = math.prod(mesh_shape[axis] for axis in mesh_axes)
        letters = [letter for letter, of in axes.group.items() if of == group and letter in axes.sizes]
        for letter in letters:
            if axes.sizes[letter] % parts == 0:
                continue
            if refuse:
                raise ValueError(
                    f"{op}: {letter}={axes.sizes[letter]} cannot be cut into {parts} parts, over mesh axes {mesh_axes}; "
                    f"use a mesh whose axes divide it, or reshard the arrays without them"
                )
            placement.pop(group, None)
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
    placement = placement_of(op, axes, specs, dict(mesh.shape), refuse=True)
    specs = {name: axes.spec(letters, placement) for name, letters in axes.arrays.items()}
    placed = {name: jax.sharding.reshard(value, NamedSharding(mesh, specs[name])) for name, value in given.items()}
    outputs = tuple(axes.spec(axes.of(spelled, len(spelled.split())), placement) for spelled in call.outputs)
    free = [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual]
    run = jax.shard_map(
        function,
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=(call.with_arrays(specs),),
        out_specs=outputs if len(outputs) != 1 else outputs[0],
        axis_names=set(free),
    )
    return run(call.with_arrays(placed))


def partitioned(
    op: str,
    call: Call,
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    spelled: tuple[Any, ...],
    *,
    sums: bool,
) -> Any:
    """`function(call, *operands)`, which the partitioner runs on each device's part of a call.

    `spelled` has the letters of each array in `operands`, as pytrees of strings; results are spelled by `function`, which
    returns them beside their letters. With `sums`, a result without an axis that the call is cut along is summed over it:
    the gradient of a shared array.
    """
    axes = Axes(call)
    arrays, tree = jax.tree.flatten((call, operands))
    given = [axes.arrays[name] for name in call.arrays if getattr(call, name) is not None]
    texts = jax.tree.leaves(spelled)
    letters = [*given, *(axes.of(text, x.ndim) for text, x in zip(texts, arrays[len(given) :], strict=True))]
    seen: dict[str, Any] = {}

    def run(arrays: tuple[Any, ...]) -> list[Any]:
        call, operands = tree.unflatten(arrays)
        results, texts = function(call, *operands)
        leaves, seen["tree"] = jax.tree.flatten(results)
        seen["letters"] = [axes.of(text, x.ndim) for text, x in zip(jax.tree.leaves(texts), leaves, strict=True)]
        return leaves

    def partition(mesh: Any, shapes: Any, _: Any) -> Any:
        specs = [shape.sharding.spec for shape in shapes]
        names = [name for name in call.arrays if getattr(call, name) is not None]
        placement = placement_of(op, axes, dict(zip(names, specs, strict=False)), dict(mesh.shape), refuse=False)

        def place(each: list[Letters]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, axes.spec(one, placement)) for one in each)

        def on_part(*arrays: Any) -> tuple[Any, ...]:
            results = run(arrays)
            if sums:
                for n, each in enumerate(seen["letters"]):
                    missing = [
                        a for group, every in placement.items() if group not in map(axes.group.get, each) for a in every
                    ]
                    results[n] = jax.lax.psum(results[n], tuple(missing)) if missing else results[n]
            return tuple(results)

        wanted = seen["letters"]
        return mesh, on_part, place(wanted), place(letters)

    def rule(*_: Any) -> tuple[str, dict[str, Any]]:
        return _sharding_rule(axes, letters, [x.shape for x in arrays], seen["letters"], seen["shapes"])

    @custom_partitioning
    def flat(*arrays: Any) -> tuple[Any, ...]:
        leaves = run(arrays)
        seen["shapes"] = [x.shape for x in leaves]
        return tuple(leaves)

    flat.def_partition(partition=partition, sharding_rule=rule)
    results = flat(*arrays)
    return seen["tree"].unflatten(results)


def _sharding_rule(
    axes: Axes, operands: list[Letters], operand_shapes: list[Any], results: list[Letters], result_shapes: list[Any]
) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: a factor per independent axis, and one per other axis, which has to be whole on each device."""
    base = {
        group: min(axes.sizes[letter] for letter, of in axes.group.items() if of == group and letter in axes.sizes)
        for group in set(axes.group.values())
        if group in axes.sizes
    }
    names = {group: f"i{n}" for n, group in enumerate(sorted(base))}
    sizes: dict[str, int] = {}
    whole: list[str] = []

    def fresh(size: int) -> str:
        whole.append(f"w{len(whole)}")
        sizes[whole[-1]] = size
        return whole[-1]

    def spell(letters: Letters, shape: tuple[int, ...]) -> str:
        parts = []
        for letter, size in zip(letters, shape, strict=True):
            group = axes.group.get(letter)
            if group is None:
                parts.append(fresh(size))
            elif size == base[group]:
                parts.append(names[group])
            else:
                parts.append(f"({names[group]} {fresh(size // base[group])})")
        return " ".join(parts)

    left = ", ".join(spell(letters, shape) for letters, shape in zip(operands, operand_shapes, strict=True))
    right = ", ".join(spell(letters, shape) for letters, shape in zip(results, result_shapes, strict=True))
    compound = {name: base[group] for group, name in names.items()}
    used = {
        name: size
        for name, size in (sizes | compound).items()
        if f"({name} " in left + right or f" {name})" in left + right
    }
    return f"{left} -> {right}", {"need_replication_factors": tuple(whole), **used}
