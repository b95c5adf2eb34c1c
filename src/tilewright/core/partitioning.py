"""Calls whose arrays are sharded over a mesh: each device runs the op on its own part.

A call says along which axes it is several smaller ones (`Call.independent`: batch, heads, rows), and which axis its
outputs are sums over (`Call.reduced`: a vocabulary). An array that is sharded along such an axis stays where it is. Where
other arrays are sharded over a mesh axis and this one is not, it is replicated along that mesh axis, and its gradient is
summed over it.

Explicit mesh axes are part of an array's type: there the call runs inside `jax.shard_map`, whose own rules sum the
gradients of replicated arrays (`run_explicit`). Auto axes are known to the compiler alone: there each pass of a call is
a function with a partitioning rule of its own, which the compiler asks (`run_partitioned`).
"""

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.boundary import on_one_device
from tilewright.core.call import Call, CallShapes, Shard, Static
from tilewright.core.implementation import KERNEL_PLATFORM

Letters = tuple[str, ...]
Placement = Mapping[str, tuple[str, ...]]
"""The mesh axes that each axis of a call is sharded over, by the first letter of its group."""


class Axes:
    """The letters of a call's axes, and which of them may be sharded together."""

    def __init__(self, call: Call):
        self.call = call
        named = {name: call.letters(name, len(value.shape)) for name, value in call.given().items()}
        self.sizes: dict[str, int] = {}
        for name, value in call.given().items():
            for letter, size in zip(named[name], value.shape, strict=True):
                self.sizes[letter] = max(size, self.sizes.get(letter, 0))
        groups = (*call.independent_groups(self.sizes), *((call.reduced,) if call.reduced else ()))
        self.group = {letter: group[0] for group in groups for letter in group}
        self.largest = {
            group: max(self.sizes.get(letter, 0) for letter, of in self.group.items() if of == group)
            for group in self.group.values()
        }
        # None of these is broadcast: a sum over an axis of 1 is a term of its own.
        self.largest |= dict.fromkeys(call.reduced[:1], 1)
        self.arrays = {name: self._unbroadcast(named[name], value.shape) for name, value in call.given().items()}

    def _unbroadcast(self, letters: Letters, shape: tuple[int, ...]) -> Letters:
        """Letters, with "" for an axis of 1 that is broadcast, such as one key head for all query heads."""

        def largest(letter: str) -> int:
            return self.largest.get(self.group.get(letter, ""), self.sizes.get(letter, 1))

        return tuple("" if size == 1 < largest(letter) else letter for letter, size in zip(letters, shape, strict=True))

    def of(self, spelled: str, shape: tuple[int, ...]) -> Letters:
        """The letters of a result of this shape, spelled such as "B T HV V". Axes that are not spelled are "."."""
        letters = self.spelled(spelled)
        return self._unbroadcast((*letters, *"." * (len(shape) - len(letters))), shape)

    def spelled(self, text: str) -> Letters:
        leading = [letter for letter in self.sizes if letter.startswith("tokens")]
        return tuple(each for letter in text.split() for each in (leading if letter == "*tokens" else [letter]))

    def of_outputs(self, outputs: Any) -> list[Letters]:
        """The letters of the outputs of the call, or of their cotangents."""
        return self.of_leaves(tuple(jax.tree.leaves(outputs)), self.call.outputs)

    def of_leaves(self, tree: Any, spelled: Any) -> list[Letters]:
        """The letters of every array in a pytree. `spelled` has its structure, or a text for a whole branch of it."""
        if tree is None or isinstance(tree, Static):
            return []
        if isinstance(tree, Mapping | tuple):
            keys = sorted(tree) if isinstance(tree, Mapping) else range(len(tree))
            below = [(tree[key], spelled if isinstance(spelled, str) else spelled[key]) for key in keys]
            return [letters for one, text in below for letters in self.of_leaves(one, text)]
        return [self.of(spelled, tree.shape)]

    def spec(self, letters: Letters, placement: Placement) -> P:
        entries = [placement.get(self.group.get(letter, ""), ()) for letter in letters]
        return P(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in entries))

    def parts(self, letters: Letters, placement: Placement, mesh_shape: Mapping[str, int]) -> list[int]:
        """Into how many parts each axis is cut."""
        return [
            math.prod(mesh_shape[axis] for axis in placement.get(self.group.get(letter, ""), ())) for letter in letters
        ]


def _entries(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes of each array axis."""
    given = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return given + [()] * (ndim - len(given))


def explicit_axes(x: Any) -> list[tuple[str, ...]]:
    """The Explicit mesh axes that each axis of an array is sharded over."""
    return _entries(jax.typeof(x).sharding.spec, x.ndim)


def placed(x: Any, axes: Sequence[tuple[str, ...]]) -> jax.Array:
    """The array, sharded over these Explicit mesh axes along each of its axes."""
    if explicit_axes(x) == list(axes):
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*axes)) if mesh.axis_names else P(*axes))


def axes_named(mesh_axes: tuple[str, ...]) -> str:
    """Mesh axes, as an error names them."""
    return f"mesh {'axes' if len(mesh_axes) > 1 else 'axis'} {', '.join(map(repr, mesh_axes))}"


def _reduced_over(call: Call, placement: Placement) -> tuple[str, ...]:
    """The mesh axes that the `reduced` axes of a call are cut over."""
    return tuple(axis for letter in call.reduced for axis in placement.get(letter, ()))


def _first_indivisible(axes: Axes, group: str, parts: int) -> str | None:
    """The first letter of a group whose size cannot be cut into this many parts."""
    sizes = {letter: axes.sizes.get(letter, parts) for letter, of in axes.group.items() if of == group}
    return next(
        (letter for letter, size in sizes.items() if size % parts and not size == 1 < axes.largest[group]), None
    )


def _possible_placement(axes: Axes, specs: list[tuple[Letters, Any]], mesh_shape: Mapping[str, int]) -> Placement:
    """Where the axes of a call lie, from the shardings of its arrays: what cannot be cut is left out."""
    placement: dict[str, tuple[str, ...]] = {}
    for letters, spec in specs:
        for letter, mesh_axes in zip(letters, _entries(spec, len(letters)), strict=True):
            group = axes.group.get(letter)
            used = {axis for each in placement.values() for axis in each}
            if group is None or group in placement or not mesh_axes or used & set(mesh_axes):
                continue
            if _first_indivisible(axes, group, math.prod(mesh_shape[axis] for axis in mesh_axes)) is None:
                placement[group] = mesh_axes
    return placement


def _required_placement(
    op: str, axes: Axes, specs: Mapping[str, Any], mesh_shape: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """As `_possible_placement`; a sharding along an axis that cannot be cut is an error."""
    placement: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        letters, shape = axes.arrays[name], getattr(axes.call, name).shape
        for at, (letter, mesh_axes) in enumerate(zip(letters, _entries(spec, len(letters)), strict=True)):
            if not mesh_axes:
                continue
            group = axes.group.get(letter)
            if group is None:
                raise _cannot_be_cut(op, type(axes.call), name, shape, at, mesh_axes)
            used = {axis for other, each in placement.items() if other != group for axis in each}
            if used & set(mesh_axes):
                where, argument = _where(type(axes.call), name, shape, at, mesh_axes)
                raise ValueError(
                    f"{op}: {where}, and another axis of this call is sharded over it too; pass "
                    f"jax.sharding.reshard({argument}, ...) without it"
                )
            placement.setdefault(group, mesh_axes)
    for group, mesh_axes in placement.items():
        parts = math.prod(mesh_shape[axis] for axis in mesh_axes)
        if (letter := _first_indivisible(axes, group, parts)) is not None:
            raise ValueError(
                f"{op}: {_size_told(axes, letter)} cannot be cut into {parts} parts, as the other arrays of this call are "
                f"over {axes_named(mesh_axes)}; use a mesh whose axes divide it, or reshard the arrays without them"
            )
    return placement


_SEGMENT_IDS = ("B", "T")  # An argument of many ops, and a field of no call: api.py makes resets of them.


def _letters(call_type: type[Call], name: str, rank: int) -> tuple[str, ...]:
    return _SEGMENT_IDS if name == "segment_ids" else call_type.letters(name, rank)


def _where(
    call_type: type[Call], name: str, shape: tuple[int, ...], at: int, mesh_axes: tuple[str, ...]
) -> tuple[str, str]:
    """Which axis of which argument is sharded over which mesh axes, as an error tells it; and the argument's name."""
    argument, letters = (name, _SEGMENT_IDS) if name == "segment_ids" else call_type.argument(name, shape)
    named = [letter for letter, size in zip(letters, shape, strict=True) if not letter.isdigit() or int(letter) == size]
    spelled = [
        "..." if letter == "tokens0" else letter for letter in named if letter[:6] != "tokens" or letter[6:] == "0"
    ]
    where = f"along its {_axis_named(letters[at], at)}, of [{', '.join(spelled)}]"
    return f"{argument} is sharded over {axes_named(mesh_axes)} {where}", argument


def _axis_named(letter: str, at: int) -> str:
    """An axis as an error names it. Leading axes have no letter of their own: "axis 0" for "tokens0"."""
    return f"axis {at if letter.startswith('tokens') else letter}"


def _size_told(axes: Axes, letter: str) -> str:
    """An axis of a call with its size, as an error tells it, such as "KV=3"."""
    for name, letters in axes.arrays.items():
        if letter in letters:
            at = letters.index(letter)
            argument, public = axes.call.argument(name, getattr(axes.call, name).shape)
            named = _axis_named(letter, at) if letter.startswith("tokens") else public[at]
            return f"{named}={axes.sizes[letter]}" + ("" if named in (letter, f"axis {at}") else f" of {argument}")
    raise AssertionError(letter)


def _cannot_be_cut(
    op: str, call_type: type[Call], name: str, shape: tuple[int, ...], at: int, mesh_axes: tuple[str, ...]
) -> ValueError:
    where, argument = _where(call_type, name, shape, at, mesh_axes)
    instead = "use jax.shard_map and exchange what the shards need"
    letters = _letters(call_type, name, len(shape))
    if letters[at] in call_type.exchanged and len(mesh_axes) == 1:
        instead = (
            f"call {op}(..., axis_name={mesh_axes[0]!r}) inside jax.shard_map, which exchanges what the shards need"
        )
    return ValueError(
        f"{op}: {where}, and {op} can be cut along {call_type.cut_along()} only; pass "
        f"jax.sharding.reshard({argument}, ...) without it, or {instead}"
    )


# Explicit axes.


def refuse_explicit(op: str, call_type: type[Call], **arrays: Any) -> None:
    """Refuses arguments that are sharded along an axis that a call cannot be cut along.

    For an api that computes something from its arguments before there is a call. `segment_ids` are [B, T] everywhere.
    """
    for name, x in arrays.items():
        if x is None or AxisType.Explicit not in (sharding := jax.typeof(x).sharding).mesh.axis_types:
            continue
        letters = _letters(call_type, name, x.ndim)
        allowed = {letter for group in call_type.independent for letter in group} | set(call_type.reduced)
        for at, (letter, mesh_axes) in enumerate(zip(letters, _entries(sharding.spec, x.ndim), strict=True)):
            if mesh_axes and letter not in allowed:
                raise _cannot_be_cut(op, call_type, name, x.shape, at, mesh_axes)


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
    explicit = _explicit_names(mesh)
    vmapped = vmapped_axes()
    if explicit <= vmapped:
        return function(call)
    specs = {name: sharding.spec for name, sharding in shardings.items()}
    placement = _required_placement(op, axes, specs, dict(mesh.shape))
    specs = {name: axes.spec(letters, placement) for name, letters in axes.arrays.items()}
    held = {
        name: value
        if shardings[name].spec == specs[name]
        else jax.sharding.reshard(value, NamedSharding(mesh, specs[name]))
        for name, value in given.items()
    }
    outputs = tuple(axes.spec(axes.spelled(text), placement) for text in call.outputs)

    def run_part(part: Call) -> Any:
        over = _reduced_over(call, placement)
        if not over:
            return function(part)
        shard = part.on_shard(over)
        return shard.combine(function(shard.call), None)[0]

    run = jax.shard_map(
        run_part,
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=(call.with_arrays(specs),),
        out_specs=outputs if len(outputs) != 1 else outputs[0],
        axis_names=explicit - vmapped,
    )
    # Jitted, since JAX runs a `shard_map` inside another (`run_elements`) in compiled programs only.
    return (jax.jit(run) if vmapped else run)(call.with_arrays(held))


def _explicit_names(mesh: Any) -> set[str]:
    return {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def vmapped_axes() -> frozenset[str]:
    """The Explicit mesh axes that `jax.vmap` maps over here. JAX has no public name for them."""
    from jax._src.core import get_axis_env

    return frozenset(get_axis_env().explicit_mesh_axis_names)


def axes_of_elements(batched: Any, arguments: Any) -> tuple[str, ...]:
    """The Explicit mesh axes that the elements of a vmapped function are cut over; for a rule of `custom_vmap`."""
    pairs = zip(jax.tree.leaves(batched), jax.tree.leaves(arguments), strict=True)
    return next((axes for is_batched, x in pairs if is_batched and (axes := explicit_axes(x)[0])), ())


def run_elements(function: Callable[..., Any], batched: Any, arguments: Any, over: tuple[str, ...]) -> Any:
    """A vmapped function whose elements are cut over Explicit mesh axes: each device runs its own."""
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)

    def run_part(*part: Any) -> Any:
        own = jax.vmap(lambda *leaves: function(*tree.unflatten(leaves)), [0 if flag else None for flag in flags])
        return own(*part)

    leaves = [placed(x, [over, *explicit_axes(x)[1:]]) if flag else x for x, flag in zip(leaves, flags, strict=True)]
    specs = tuple(P(over) if flag else P() for flag in flags)
    return jax.shard_map(run_part, in_specs=specs, out_specs=P(over), axis_names=set(over))(*leaves)


def run_on_parts(function: Callable[..., Any], arrays: Sequence[Any], outputs: Any) -> Any:
    """`function(*arrays)` inside `jax.shard_map`: on each device's part of arrays that are sharded over Explicit mesh axes.

    `outputs` has a `PartitionSpec` for each result. Arrays may be None.
    """
    mesh = next(
        mesh for x in arrays if x is not None and AxisType.Explicit in (mesh := jax.typeof(x).sharding.mesh).axis_types
    )
    return jax.shard_map(
        function,
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=tuple(None if x is None else P(*explicit_axes(x)) for x in arrays),
        out_specs=outputs,
        axis_names=_explicit_names(mesh),
    )(*arrays)


# Auto axes.


def axes_of_compiler() -> frozenset[str] | None:
    """The mesh axes that are left to the compiler inside a `jax.shard_map`, or None outside of one."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = frozenset(axis for axis, kind in types.items() if kind == AxisType.Auto)
    return auto if AxisType.Manual in types.values() else None


class _Arguments:
    """The arrays of a call and of what is beside it. A call may have shapes where a pass does not read the array."""

    def __init__(self, call: Call, operands: Any):
        self.leaves, self._tree = jax.tree.flatten((call, operands))
        self.arrays = self.chosen(self.leaves)

    def chosen(self, values: Sequence[Any]) -> list[Any]:
        """Of one value per leaf, those of the arrays."""
        pairs = zip(values, self.leaves, strict=True)
        return [value for value, leaf in pairs if not isinstance(leaf, jax.ShapeDtypeStruct)]

    def filled(self, arrays: Sequence[Any], shapes: Sequence[Any]) -> tuple[Call, Any]:
        """The call and what is beside it, of other arrays and, for the leaves that are shapes, of `shapes`."""
        given = iter(arrays)
        pairs = zip(self.leaves, shapes, strict=True)
        return self._tree.unflatten(
            [shape if isinstance(leaf, jax.ShapeDtypeStruct) else next(given) for leaf, shape in pairs]
        )


def run_replicated(one: "CallPass", call: Call, operands: Any, settled: Any, axes: frozenset[str]) -> Any:
    """Runs a pass on each device along mesh axes that are left to the compiler, which cannot ask for a rule there."""
    arguments = _Arguments(call, operands)

    def run(*arrays: Any) -> Any:
        return one.run(*arguments.filled(arrays, arguments.leaves), settled=settled)

    return jax.shard_map(run, in_specs=P(), out_specs=P(), axis_names=set(axes))(*arguments.arrays)


@runtime_checkable
class CallPass(Protocol):
    """One pass over a call, as it is cut (core/differentiable.py has the forward and the backward pass)."""

    sums: ClassVar[bool]
    """Whether results are gradients: that of an array is summed over the mesh axes that the array is replicated along."""

    def settle(self, call: Call) -> Any:
        """What runs a call, or one part of it: an implementation and its decision."""
        ...

    def run(self, call: Call, operands: Any, settled: Any, shard: Shard | None = None) -> Any:
        """The results for a call and the arrays beside it; `shard` where the call is a part along its `reduced` axis."""
        ...

    def operand_letters(self, axes: Axes, operands: Any, settled: Any) -> list[Letters]:
        """The letters of every array in `operands`."""
        ...

    def result_letters(self, axes: Axes, results: Any, settled: Any) -> list[Letters]:
        """The letters of every array in `results`."""
        ...


@dataclass(frozen=True)
class Partitioned:
    """A pass that the compiler may cut."""

    key: Hashable
    """Equal for passes that are the same apart from the values of their arrays."""
    operands: list[Any]
    results: list[Any]
    """The shapes of its results."""
    rule: Callable[..., tuple[str, dict[str, Any]]]
    """Shardy's rule for it."""
    partition: Callable[..., tuple[Any, Callable[..., Any], Any, Any]]
    """From a mesh and the operands as the compiler has sharded them: the mesh, one device's function, and the shardings
    of results and operands that it wants."""


_partitioner = jax.make_user_context(None)


@contextlib.contextmanager
def partitioned_by(partitioner: Callable[[Partitioned], Sequence[Any]]) -> Iterator[None]:
    """Has `partitioner` run every pass that the compiler would ask about, for compilers that cannot."""
    with _partitioner(partitioner):
        yield


def compiler_cuts() -> bool:
    """Whether the compiler is asked how to cut a pass, and not a partitioner in its place (`partitioned_by`)."""
    return _partitioner.value is None


_INTERPRETED_ON_SEVERAL = {
    "tpu": "tilewright.interpret(plain=True), or jax.shard_map",
    "gpu": "implementation='xla', since the interpreter of GPU kernels has one device (an op that has no 'xla' has "
    "'reference')",
}


def run_partitioned(one: CallPass, call: Call, operands: Any, settled: Any) -> Any:
    """Runs a pass of a call (`one`, core/differentiable.py) so that the compiler can cut it along the axes of the call.

    The rule is asked for only where a program is compiled for several devices: a program for one device, and the inside
    of `shard_map`, have the pass itself. A device's part is decided for its own shape, as long as it saves arrays of the
    shapes that the whole call saves.
    """
    arguments = _Arguments(call, operands)
    arrays = arguments.arrays
    result_tree: Any = None

    def run_whole(*arrays: Any) -> list[Any]:
        nonlocal result_tree
        flat, result_tree = jax.tree.flatten(one.run(*arguments.filled(arrays, arguments.leaves), settled=settled))
        return flat

    traced = _without_refs(jax.make_jaxpr(run_whole)(*arrays))
    if traced.effects:  # An interpreter's callbacks, which run in the order of one program.
        decision = settled.decision
        arrays = on_one_device(
            arrays,
            f"{decision.op}: the interpreter that simulates a chip's memories does not run {decision.implementation!r} "
            f"in a program for several devices; use {_INTERPRETED_ON_SEVERAL[KERNEL_PLATFORM[decision.implementation]]}",
        )
        return result_tree.unflatten(jaxpr_as_fun(traced)(*arrays))
    shapes: list[Any] = list(traced.out_avals)

    def letters_of_all() -> tuple[Axes, list[Letters], list[Letters]]:
        axes = Axes(call)
        of_operands = [*axes.arrays.values(), *one.operand_letters(axes, operands, settled)]
        return axes, of_operands, one.result_letters(axes, result_tree.unflatten(shapes), settled)

    def partition(mesh: Any, given: Any, _: Any) -> Any:
        axes, of_operands, of_results = letters_of_all()
        of_arrays = arguments.chosen(of_operands)
        mesh_shape = dict(mesh.shape)
        specs = [(letters, shape.sharding.spec) for letters, shape in zip(of_arrays, given, strict=False)]
        placement = _possible_placement(axes, specs, mesh_shape)

        def cut(shape: tuple[int, ...], letters: Letters) -> tuple[int, ...]:
            return tuple(n // parts for n, parts in zip(shape, axes.parts(letters, placement, mesh_shape), strict=True))

        expected = [(cut(x.shape, each), x.dtype) for x, each in zip(shapes, of_results, strict=True)]

        def run_part(*arrays: Any) -> tuple[Any, ...]:
            pairs = zip(arguments.leaves, of_operands, strict=True)
            cut_leaves = [jax.ShapeDtypeStruct(cut(x.shape, letters), x.dtype) for x, letters in pairs]
            part, beside = arguments.filled(arrays, cut_leaves)
            over = _reduced_over(call, placement)
            shard = part.on_shard(over) if over else None

            def run(decided: Any) -> Any:
                return one.run(part, beside, decided, shard)

            decided = one.settle(part if shard is None else shard.call)
            if decided.decision != settled.decision:
                told, told_tree = jax.tree.flatten(jax.eval_shape(lambda: run(decided)))
                if told_tree != result_tree or [(x.shape, x.dtype) for x in told] != expected:
                    decided = settled
            results = jax.tree.leaves(run(decided))
            if one.sums:
                for n, each in enumerate(of_results):
                    has = {axes.group.get(letter) for letter in each}
                    missing = tuple(axis for group, every in placement.items() if group not in has for axis in every)
                    results[n] = jax.lax.psum(results[n], missing) if missing else results[n]
            return tuple(results)

        def place(every: list[Letters]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, axes.spec(each, placement)) for each in every)

        constants = (NamedSharding(mesh, P()),) * len(traced.consts)

        def run(*given: Any) -> tuple[Any, ...]:
            part = given[: len(arrays)]
            return tuple(jaxpr_as_fun(_without_refs(jax.make_jaxpr(run_part)(*part)))(*part))

        return mesh, run, place(of_results), (*place(of_arrays), *constants)

    def rule(*_: Any) -> tuple[str, dict[str, Any]]:
        axes, of_operands, of_results = letters_of_all()
        constants = [("",) * len(x.shape) for x in traced.consts]
        operand_shapes = [x.shape for x in (*arrays, *traced.consts)]
        return _sharding_rule(
            axes, [*arguments.chosen(of_operands), *constants], operand_shapes, of_results, [x.shape for x in shapes]
        )

    # JAX takes no constants here (a mask's block list is one): they are operands, the same on every device.
    given_operands = [*arrays, *traced.consts]
    if _partitioner.value is not None:
        key = one, CallShapes(call), tuple((x.shape, x.dtype) for x in given_operands)
        return result_tree.unflatten(_partitioner.value(Partitioned(key, given_operands, shapes, rule, partition)))

    @custom_partitioning
    def flat(*given: Any) -> tuple[Any, ...]:
        closed = traced.replace(consts=list(given[len(arrays) :]))
        return tuple(jaxpr_as_fun(closed)(*given[: len(arrays)]))

    flat.def_partition(partition=partition, sharding_rule=rule)
    return result_tree.unflatten(flat(*given_operands))


def _without_refs(traced: Any) -> Any:
    """A traced function whose refs, which kernels update in place, are values: custom_partitioning takes no refs.

    JAX does the same to every program that it lowers, and has no public name for it.
    """
    from jax._src.state.discharge import discharge_state

    return discharge_state(traced) if traced.effects else traced


def _sharding_rule(
    axes: Axes, operands: list[Letters], operand_shapes: list[Any], results: list[Letters], result_shapes: list[Any]
) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: a factor per group of axes and size, and one per axis that every device has whole.

    Sizes in a group may differ (query and key heads). One compound factor for both would let Shardy cut a mesh axis into
    parts, which JAX cannot spell. So each size has a factor of its own, and `partition` makes them agree.
    """
    names: dict[tuple[str, int], str] = {}
    whole: list[str] = []

    def spell(letters: Letters, shape: tuple[int, ...]) -> str:
        parts = []
        for letter, size in zip(letters, shape, strict=True):
            group = axes.group.get(letter)
            if group is None:
                whole.append(f"w{len(whole)}")
                parts.append(whole[-1])
            else:
                parts.append(names.setdefault((group, size), f"i{len(names)}"))
        return " ".join(parts)

    left = ", ".join(spell(letters, shape) for letters, shape in zip(operands, operand_shapes, strict=True))
    right = ", ".join(spell(letters, shape) for letters, shape in zip(results, result_shapes, strict=True))
    return f"{left} -> {right}", {"need_replication_factors": tuple(whole)}
