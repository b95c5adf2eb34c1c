"""What a traced program costs one device: FLOPs, bytes of its memory, collectives, and the buffers at its peak.

A model is traced over a mesh of Explicit axes, so the type of every value says how it is cut, and what is gathered or
summed stands in the program. Nothing is compiled, and no device is needed.

FLOPs are those of matrix products, and of kernels what their cost estimates say, times the lengths of the loops around
them. Memory is a model of what XLA does: elementwise operations are fused into what uses their results, so that a value is
kept only where a product, a kernel, a loop or a collective reads it; values live from the operation that makes them to the
last one that reads them, in the order of the program; what is donated is updated in place. docs/plan.md compares it with
compilers.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax.numpy as jnp
from jax._src import source_info_util

Kind = Literal["weights", "optimizer", "gradients", "activations", "states", "batch", "temporaries"]
KINDS: tuple[Kind, ...] = ("weights", "optimizer", "states", "batch", "activations", "gradients", "temporaries")

# They give back what they are given, or a part of what every device has already.
_ALIASES = frozenset(
    "reshape squeeze expand_dims pvary copy name stop_gradient sharding_constraint optimization_barrier device_put "
    "without_axes copy_p".split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
# What reads and writes whole arrays: XLA fuses nothing into it that would save one.
_WHOLE = frozenset(
    "dot_general ragged_dot ragged_dot_general conv_general_dilated sort top_k gather dynamic_update_slice cumsum "
    "cumprod cummax cumlogsumexp fft ffi_call custom_call random_bits pallas_call mpmd_map core_map".split()
)
_COLLECTIVES = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "unreduced_psum": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}
_LOOPS = ("scan", "while", "cond")
_KERNELS = ("pallas_call", "mpmd_map", "core_map")


@dataclass(frozen=True)
class Collective:
    """One kind of exchange over some mesh axes, and what one device sends for it in a step."""

    kind: str
    axes: tuple[str, ...]
    count: float
    """How often, loops included."""
    bytes: float
    """What a device sends, and receives as much, where every algorithm is the best one for bandwidth (a ring)."""


@dataclass(frozen=True)
class Buffer:
    """An array of one device."""

    name: str
    shape: str
    bytes: float
    kind: Kind


@dataclass(frozen=True)
class Work:
    """What a step costs one device."""

    flops: float
    hbm_bytes: float
    """Bytes that products, kernels and the state read and write at least."""
    collectives: tuple[Collective, ...]
    buffers: tuple[Buffer, ...]
    """What is alive at the peak, the largest first."""
    notes: tuple[str, ...] = ()
    """What could not be counted."""

    @property
    def peak_bytes(self) -> float:
        return sum(buffer.bytes for buffer in self.buffers)

    def memory(self) -> dict[Kind, float]:
        """The peak by kind."""
        found: dict[Kind, float] = {
            kind: sum(each.bytes for each in self.buffers if each.kind == kind) for kind in KINDS
        }
        return {kind: size for kind, size in found.items() if size}


@dataclass
class _Value:
    """A value of the program, as one device has it."""

    bytes: float
    shape: str
    name: str = ""
    kind: Kind | None = None
    """Of arguments."""
    made_by: tuple[Any, ...] = ()
    """The equation, after those of the calls around it."""
    sources: frozenset[int] | None = None
    """For a value that is fused away, the values that it is made of."""


@dataclass
class _Node:
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    whole: bool
    backward: bool
    inside: tuple[Buffer, ...] = ()
    """What is alive at the peak inside of a loop's body."""


@dataclass
class _Flat:
    """A program without calls."""

    nodes: list[_Node] = field(default_factory=list)


@dataclass
class _Counted:
    flops: float = 0.0
    hbm_bytes: float = 0.0
    collectives: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)


def measure(traced: Any, kinds: Iterable[Kind], names: Iterable[str], donated: Iterable[bool]) -> Work:
    """The work of a traced function (`jax.jit(f).trace(...)`).

    Args:
      traced: over `jax.ShapeDtypeStruct`s with shardings on an abstract mesh, or without any.
      kinds: of each argument, in the order of its leaves.
      names: of each argument.
      donated: whether its memory may be reused for results.
    """
    reader = _Reader()
    jaxpr = traced.jaxpr.jaxpr
    told = list(zip(kinds, names, donated, strict=True))
    environment: dict[Any, int] = {}
    for variable, (kind, name, _) in zip(jaxpr.invars, told, strict=True):
        environment[variable] = reader.new(variable.aval, name=name, kind=kind)
    arguments = [environment[variable] for variable in jaxpr.invars]
    flat = _Flat()
    results = reader.walk(jaxpr, environment, 1.0, flat, backward=False)
    given_back = {each for each, (*_, is_donated) in zip(arguments, told, strict=True) if is_donated}
    room = sum(reader.values[each].bytes for each in given_back)
    held = tuple(reader.buffer(each) for each in arguments)
    alive = reader.peak(flat.nodes, results, room)
    counted = reader.counted
    counted.hbm_bytes += 2 * sum(
        reader.values[each].bytes for each in given_back if reader.values[each].kind in ("weights", "optimizer")
    )
    collectives = tuple(
        Collective(kind, axes, count, size) for (kind, axes), (count, size) in counted.collectives.items() if count > 0
    )
    return Work(
        flops=counted.flops,
        hbm_bytes=counted.hbm_bytes,
        collectives=tuple(sorted(collectives, key=lambda each: -each.bytes)),
        buffers=tuple(sorted((*held, *alive), key=lambda each: -each.bytes)),
        notes=tuple(counted.notes),
    )


def local_shape(aval: Any) -> tuple[int, ...]:
    """The shape that one device has of a value."""
    shape = tuple(getattr(aval, "shape", ()))
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not getattr(sharding, "mesh", None):
        return shape
    sizes = dict(sharding.mesh.shape)
    parts = [math.prod(sizes[axis] for axis in _axes(entry)) for entry in sharding.spec]
    return tuple(-(-size // part) for size, part in zip(shape, (*parts, *(1,) * len(shape)), strict=False))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(aval: Any) -> list[tuple[str, ...]]:
    sharding = getattr(aval, "sharding", None)
    spec = () if sharding is None else sharding.spec
    return [*map(_axes, spec), *[()] * (len(getattr(aval, "shape", ())) - len(spec))]


def _itemsize(aval: Any) -> float:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0.0
    try:
        name = jnp.dtype(dtype).name
    except TypeError:  # A key of random numbers.
        return float(getattr(dtype, "itemsize", 0))
    return 0.5 if name in ("int4", "uint4") else float(jnp.dtype(dtype).itemsize)


def _bytes(aval: Any) -> float:
    return math.prod(local_shape(aval)) * _itemsize(aval)


def _sizes(aval: Any) -> dict[str, int]:
    sharding = getattr(aval, "sharding", None)
    return {} if sharding is None else dict(sharding.mesh.shape)


def _inner(equation: Any) -> Any:
    """The jaxpr that an equation calls with its own operands, if it does."""
    for parameter in equation.params.values():
        jaxpr = getattr(parameter, "jaxpr", parameter)
        if hasattr(jaxpr, "eqns"):
            fits = len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)
            if fits and not jaxpr.constvars:
                return jaxpr
            if fits and hasattr(parameter, "consts"):
                return jaxpr
    return None


class _Reader:
    """Reads a program: counts its work, and lists its values for `peak`."""

    def __init__(self) -> None:
        self.values: list[_Value] = []
        self.counted = _Counted()
        self._transposed: dict[int, int] = {}
        self._sums: dict[int, tuple[tuple[str, ...], float, int]] = {}
        """Values that are sums over mesh axes: the axes, the bytes, and the devices."""

    def new(self, aval: Any, *, name: str = "", kind: Kind | None = None, made_by: tuple[Any, ...] = ()) -> int:
        dtype = getattr(aval, "dtype", "")
        shape = f"{getattr(dtype, 'name', dtype)}[{','.join(map(str, local_shape(aval)))}]"
        self.values.append(_Value(_bytes(aval), shape, name, kind, made_by))
        return len(self.values) - 1

    def buffer(self, each: int, kind: Kind = "temporaries") -> Buffer:
        value = self.values[each]
        return Buffer(value.name or _called(value.made_by), value.shape, value.bytes, value.kind or kind)

    def walk(
        self,
        jaxpr: Any,
        environment: dict[Any, int],
        times: float,
        flat: _Flat,
        *,
        backward: bool,
        around: tuple[Any, ...] = (),
    ) -> list[int]:
        """Adds the operations of a jaxpr, which the equations `around` call; returns its results."""
        for variable in jaxpr.constvars:
            environment[variable] = self.new(variable.aval, name="constant")
        for equation in jaxpr.eqns:
            is_backward = backward or "transpose(" in _stack(equation)
            self._equation(equation, environment, times, flat, is_backward, (*around, equation))
        return [environment.get(v, -1) for v in map(_hashable, jaxpr.outvars)]

    def _equation(
        self,
        equation: Any,
        environment: dict[Any, int],
        times: float,
        flat: _Flat,
        backward: bool,
        around: tuple[Any, ...],
    ) -> None:
        name = equation.primitive.name
        inputs = tuple(environment[v] for v in map(_hashable, equation.invars) if v in environment)
        if name in _LOOPS:
            self._loop(equation, environment, inputs, times, flat, backward, around)
            return
        if name not in _KERNELS and (inner := _inner(equation)) is not None:
            own = {
                variable: environment[given]
                for variable, given in zip(inner.invars, map(_hashable, equation.invars), strict=True)
                if given in environment
            }
            results = self.walk(inner, own, times, flat, backward=backward, around=around)
            for variable, result in zip(equation.outvars, results, strict=True):
                environment[variable] = result if result >= 0 else self.new(variable.aval, name="constant")
            return
        self._count(equation, times)
        if name == "reshard" and inputs:
            self._scatter(equation, inputs[0], times)
        aliased = _aliased(equation)
        outputs = []
        for place, variable in enumerate(equation.outvars):
            source = aliased.get(place)
            given = None if source is None else environment.get(_hashable(equation.invars[source]))
            if given is not None and self.values[given].bytes == _bytes(variable.aval):
                environment[variable] = given
            else:
                environment[variable] = self.new(variable.aval, made_by=around)
                outputs.append(environment[variable])
        for place, (kind, axes, _) in enumerate(_exchanges(equation)):
            if kind == "all-reduce" and not place and len(outputs) == 1:
                self._sums[outputs[0]] = axes, self.values[outputs[0]].bytes, _parts(equation, axes)
        if name in ("add", "add_any") and len(inputs) == 2 and outputs:
            self._merge(inputs, outputs[0], times)
        if name == "transpose" and inputs:
            self._transposed.update(dict.fromkeys(outputs, inputs[0]))
        if name == "dot_general":  # It reads a transposed operand as it is.
            inputs = tuple(self._transposed.get(each, each) for each in inputs)
        is_whole = name in _WHOLE or name in _COLLECTIVES or name.startswith("scatter") or _implied(equation) != ()
        if name in _ALIASES and not outputs:
            return
        if not is_whole and name not in _REDUCTIONS:
            sources = frozenset().union(*(self._sources(each) for each in inputs)) if inputs else frozenset()
            for each in outputs:
                self.values[each].sources = sources
        flat.nodes.append(_Node(inputs, tuple(outputs), is_whole, backward))

    def _scatter(self, equation: Any, given: int, times: float) -> None:
        """A sum that every device then keeps a part of is a reduce-scatter, and so XLA makes it."""
        before, after = equation.invars[0].aval, equation.outvars[0].aval
        kept = {axis for entry in _spec(after) for axis in entry} - {axis for entry in _spec(before) for axis in entry}
        of = self._sum_of(given)
        axes, size, parts = self._sums.get(of, ((), 0.0, 1))
        over = tuple(axis for axis in axes if axis in kept)
        if not over:
            return
        del self._sums[of]
        pieces = math.prod(_sizes(before)[axis] for axis in over)
        rest = tuple(axis for axis in axes if axis not in over)
        self._exchange("all-reduce", axes, -times, -times * sent("all-reduce", parts, size))
        self._exchange("reduce-scatter", over, times, times * sent("reduce-scatter", pieces, size))
        if rest:
            self._exchange("all-reduce", rest, times, times * sent("all-reduce", parts // pieces, size / pieces))

    def _merge(self, inputs: tuple[int, ...], output: int, times: float) -> None:
        """Of two sums over the same devices that are added, XLA makes one: it adds first."""
        one, other = (self._sum_of(each) for each in inputs)
        if one == other or one < 0 or other < 0 or self._sums[one] != self._sums[other]:
            return
        axes, size, parts = self._sums[output] = self._sums.pop(one)
        del self._sums[other]
        self._exchange("all-reduce", axes, -times, -times * sent("all-reduce", parts, size))

    def _sum_of(self, each: int) -> int:
        """The sum over mesh axes that a value is, as itself or converted; -1 for none."""
        if each in self._sums:
            return each
        sources = self._sources(each)
        return next(iter(sources)) if len(sources) == 1 and next(iter(sources)) in self._sums else -1

    def _exchange(self, kind: str, axes: tuple[str, ...], count: float, size: float) -> None:
        before = self.counted.collectives.get((kind, axes), (0.0, 0.0))
        self.counted.collectives[kind, axes] = before[0] + count, before[1] + size

    def _sources(self, each: int) -> frozenset[int]:
        own = self.values[each].sources
        return frozenset((each,)) if own is None else own

    def _loop(
        self,
        equation: Any,
        environment: dict[Any, int],
        inputs: tuple[int, ...],
        times: float,
        flat: _Flat,
        backward: bool,
        around: tuple[Any, ...],
    ) -> None:
        name, params = equation.primitive.name, equation.params
        if name == "scan":
            bodies, length = [(params["jaxpr"].jaxpr, equation.invars)], float(params["length"])
        elif name == "while":
            skipped = params["cond_nconsts"]
            bodies, length = [(params["body_jaxpr"].jaxpr, equation.invars[skipped:])], self._trips(equation)
        else:
            bodies, length = [(branch.jaxpr, equation.invars[1:]) for branch in params["branches"]], 1.0
        inside: tuple[Buffer, ...] = ()
        produced: list[int] = []
        before = self.counted
        for body, operands in bodies:
            own: dict[Any, int] = {}
            for variable, given in zip(body.invars, map(_hashable, operands), strict=True):
                outer = self.values[environment[given]] if given in environment else None
                kind = None if outer is None else self._kind_of(environment[given])
                named = outer.name if outer and kind else "what a loop carries"
                own[variable] = self.new(variable.aval, name=named, kind=kind)
            inner = _Flat()
            self.counted = _Counted()
            results = self.walk(body, own, times * length, inner, backward=backward, around=around)
            alive = self.peak(inner.nodes, results, 0.0, carried=_carried(equation, body))
            if sum(each.bytes for each in alive) >= sum(each.bytes for each in inside):
                inside, produced = alive, results
            before = _added(before, self.counted)  # Of branches, too: as if each of them ran.
        self.counted = before
        outputs = []
        carried = _carried_operands(equation)
        for place, variable in enumerate(equation.outvars):
            begun = environment.get(_hashable(equation.invars[carried[place]]), -1) if place in carried else -1
            if begun >= 0 and self.values[begun].sources is None:  # The loop updates it in place.
                environment[variable] = begun
                continue
            if begun >= 0:  # It is made in the memory of the result.
                inputs = tuple(own for each in inputs for own in (self._sources(each) if each == begun else (each,)))
            made = produced[place] if place < len(produced) else -1
            name, made_by = (self.values[made].name, self.values[made].made_by) if made >= 0 else ("", around)
            environment[variable] = self.new(variable.aval, name=name, made_by=made_by)
            outputs.append(environment[variable])
        flat.nodes.append(_Node(inputs, tuple(outputs), True, backward, inside))

    def _kind_of(self, each: int) -> Kind | None:
        """Of a value that is made of arguments of one kind alone, that kind."""
        value = self.values[each]
        if value.kind is not None or value.sources is None:
            return value.kind
        kinds: set[Kind | None] = {self.values[source].kind for source in value.sources}
        return next(iter(kinds)) if len(kinds) == 1 else None

    def _trips(self, equation: Any) -> float:
        """How often a while loop runs, where its condition compares with a constant."""
        condition = equation.params["cond_jaxpr"].jaxpr
        for inner in condition.eqns:
            if inner.primitive.name == "lt" and hasattr(inner.invars[1], "val"):
                return float(inner.invars[1].val)
        self.counted.notes["a loop whose length is data counts once"] = None
        return 1.0

    def _count(self, equation: Any, times: float) -> None:
        name = equation.primitive.name
        counted, results = self.counted, [variable.aval for variable in equation.outvars]
        operands = [variable.aval for variable in equation.invars]
        moved = sum(map(_bytes, operands)) + sum(map(_bytes, results))
        if name in _KERNELS:
            estimate = equation.params.get("cost_estimate")
            if estimate is None:
                counted.notes[f"{_called((equation,))} has no cost estimate: its FLOPs are not counted"] = None
            counted.flops += times * (0 if estimate is None else estimate.flops)
            counted.hbm_bytes += times * ((estimate.bytes_accessed if estimate else 0) or moved)
        elif name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"):
            counted.flops += times * _product_flops(equation)
            counted.hbm_bytes += times * moved
        elif name.startswith("scatter"):
            counted.hbm_bytes += times * 2 * _bytes(operands[-1])
        elif name in ("gather", "sort"):
            counted.hbm_bytes += times * 2 * sum(map(_bytes, results))
        for kind, axes, size in _exchanges(equation):
            self._exchange(kind, axes, times, times * size)

    # Memory.

    def peak(
        self, nodes: list[_Node], results: list[int], room: float, carried: frozenset[int] = frozenset()
    ) -> tuple[Buffer, ...]:
        """What is alive when the most is: values that are made here, and what is inside of the loops.

        `room` is the memory of donated arguments, which results may take. `carried` are the places of results that take
        the place of the last iteration's.
        """
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        made_backward: dict[int, bool] = {}
        read_forward: set[int] = set()
        read_backward: set[int] = set()

        def used(each: int, at: int, backward: bool) -> None:
            for source in self._sources(each):
                if source in first:
                    last[source] = max(last[source], at)
                    (read_backward if backward else read_forward).add(source)

        end = len(nodes)
        for at, node in enumerate(nodes):
            for each in node.inputs:
                used(each, at, node.backward)
                if (
                    node.whole and self.values[each].sources is not None
                ):  # It is made for this one, and kept for others.
                    if each not in first:
                        first[each], made_backward[each] = at, node.backward
                        last[each] = at
                    last[each] = at
                    (read_backward if node.backward else read_forward).add(each)
            for each in node.outputs:
                if self.values[each].sources is None:
                    first[each] = last[each] = at
                    made_backward[each] = node.backward
        for place, each in enumerate(results):
            if each < 0:
                continue
            used(each, end, backward=False)
            is_new = each in first or self.values[each].sources is not None
            if is_new and place not in carried:
                size = self.values[each].bytes
                if room >= size > 0:
                    room -= size
                    if self.values[each].sources is None:
                        last[each] = min(last[each], end - 1)
                        self.values[each].bytes = 0.0
                    continue
                if each not in first:
                    first[each], made_backward[each] = end - 1, False
                last[each] = end
        return self._at_peak(nodes, first, last, made_backward, read_forward, read_backward)

    def _at_peak(
        self,
        nodes: list[_Node],
        first: Mapping[int, int],
        last: Mapping[int, int],
        made_backward: Mapping[int, bool],
        read_forward: set[int],
        read_backward: set[int],
    ) -> tuple[Buffer, ...]:
        change = [0.0] * (len(nodes) + 2)
        for each, at in first.items():
            change[at] += self.values[each].bytes
            change[last[each] + 1] -= self.values[each].bytes
        total, most, where = 0.0, -1.0, 0
        for at in range(len(nodes) + 1):
            total += change[at]
            inside = sum(each.bytes for each in nodes[at].inside) if at < len(nodes) else 0.0
            if total + inside > most:
                most, where = total + inside, at
        alive = [each for each, at in first.items() if at <= where <= last[each]]

        def kind(each: int) -> Kind:
            if (own := self._kind_of(each)) is not None:
                return own
            if not made_backward[each] and each in read_backward:
                return "activations"
            if made_backward[each] and each in read_forward:
                return "gradients"
            return "temporaries"

        made = (self.buffer(each, kind(each)) for each in alive)
        return (*made, *(nodes[where].inside if where < len(nodes) else ()))


def _hashable(atom: Any) -> Any:
    """A variable; a literal, which is in no environment, as a word."""
    return "literal" if hasattr(atom, "val") else atom


def _stack(equation: Any) -> str:
    return str(equation.source_info.name_stack)


def _called(made_by: tuple[Any, ...]) -> str:
    """What made a value: the op or the operation, and the line of the layer or model that it is for.

    Inside of `shard_map` and the like an equation does not know that line, and the call around it does.
    """
    if not made_by:
        return ""
    operation = made_by[-1].primitive.name
    made = str(made_by[-1].params.get("name") or operation) if operation in _KERNELS else operation
    for equation in reversed(made_by):
        frames = list(source_info_util.user_frames(equation.source_info.traceback))
        ops = [frame.function_name for frame in frames if re.search(r"/tilewright/ops/.*/api\.py$", frame.file_name)]
        made = ops[-1] if ops else made
        for frame in frames:
            if not re.search(r"/tilewright/(core|pallas|ops)/|/layers/layer\.py$", frame.file_name):
                where = frame.function_name.replace(".<locals>", "")
                return f"{made} in {where} ({frame.file_name.rpartition('/')[2]}:{frame.start_line})"
    return made


def _aliased(equation: Any) -> dict[int, int]:
    """The operand whose memory each result is, by their places."""
    name = equation.primitive.name
    if name in _KERNELS:
        pairs = equation.params.get("input_output_aliases", ())
        return {result: operand for operand, result in (pairs.items() if hasattr(pairs, "items") else pairs)}
    if name == "optimization_barrier":
        return {place: place for place in range(len(equation.outvars))}
    if name in _ALIASES or name.startswith("tilewright_") or (name == "reshard" and not _reshard(equation)):
        return {0: 0}
    if name == "convert_element_type" and equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype:
        return {0: 0}
    return {0: 0} if name == "dynamic_update_slice" or name.startswith("scatter") else {}  # In place.


def _carried(equation: Any, body: Any) -> frozenset[int]:
    """The results of a body that are the next iteration's carry, whose memory there is already."""
    if equation.primitive.name == "scan":
        pairs = zip(equation.outvars, body.outvars, strict=True)  # What is stacked has one more axis.
        return frozenset(n for n, (outer, inner) in enumerate(pairs) if outer.aval.ndim == inner.aval.ndim)
    return frozenset(range(len(body.outvars))) if equation.primitive.name == "while" else frozenset()


def _carried_operands(equation: Any) -> dict[int, int]:
    """The operand that each carried result of a loop begins as, by their places."""
    name, params = equation.primitive.name, equation.params
    if name == "while":
        before = params["cond_nconsts"] + params["body_nconsts"]
        return {place: before + place for place in range(len(equation.outvars))}
    if name != "scan":
        return {}
    body = params["jaxpr"].jaxpr
    places = sorted(_carried(equation, body))
    stacked = sum(outer.aval.ndim > inner.aval.ndim for outer, inner in zip(equation.invars, body.invars, strict=True))
    before = len(equation.invars) - stacked - len(places)
    return {place: before + place for place in places}


def _added(one: _Counted, other: _Counted) -> _Counted:
    collectives = dict(one.collectives)
    for key, (count, size) in other.collectives.items():
        before = collectives.get(key, (0.0, 0.0))
        collectives[key] = before[0] + count, before[1] + size
    return _Counted(one.flops + other.flops, one.hbm_bytes + other.hbm_bytes, collectives, {**one.notes, **other.notes})


def _product_flops(equation: Any) -> float:
    results = [math.prod(local_shape(variable.aval)) for variable in equation.outvars]
    left, right = (local_shape(variable.aval) for variable in equation.invars[:2])
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * results[0] * math.prod(left[axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        out_channels = right[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * results[0] * math.prod(right) / out_channels
    return 2.0 * math.prod(left) * right[-1]  # Each row of the left meets one group of the right.


# Collectives.


def sent(kind: str, parts: int, size: float) -> float:
    """The bytes that a device sends for a collective over `parts` devices. `size`: of the whole array that is gathered or
    scattered, or of what a device has where the shapes stay.
    """
    if kind == "collective-permute":
        return size
    return (2.0 if kind == "all-reduce" else 1.0) * size * (parts - 1) / parts


def _exchanges(equation: Any) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The collectives of an equation: kind, mesh axes, and the bytes that a device sends."""
    name = equation.primitive.name
    if name in _COLLECTIVES:
        kind = _COLLECTIVES[name]
        given = equation.params.get("axes", equation.params.get("axis_name", ()))
        mesh = _sizes(equation.outvars[0].aval) or _sizes(equation.invars[0].aval)
        axes = tuple(axis for axis in _axes(given) if mesh.get(axis, 1) > 1)
        if not axes:
            return
        parts = math.prod(mesh[axis] for axis in axes)
        of = equation.outvars if kind == "all-gather" else equation.invars
        sizes = [_bytes(variable.aval) for variable in of]
        if (
            kind == "ragged-all-to-all"
        ):  # How much is data: at most all rows of the smaller one of what is sent and received.
            sizes = [min(sizes[:2])]
        yield kind, axes, sum(sent(kind, parts, size) for size in sizes)
    elif name == "reshard":
        yield from _reshard(equation)
    elif axes := _implied(equation):
        parts = math.prod(_sizes(equation.invars[0].aval)[axis] for axis in axes)
        yield "all-reduce", axes, sum(sent("all-reduce", parts, _bytes(v.aval)) for v in equation.outvars)


def _parts(equation: Any, axes: tuple[str, ...]) -> int:
    sizes = _sizes(equation.invars[0].aval) or _sizes(equation.outvars[0].aval)
    return math.prod(sizes[axis] for axis in axes)


def _reshard(equation: Any) -> list[tuple[str, tuple[str, ...], float]]:
    """What a change of placement exchanges: axes that are dropped are gathered, axes that move are exchanged."""
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    mesh = _sizes(before)
    had, has = ({axis for entry in _spec(aval) for axis in entry if mesh.get(axis, 1) > 1} for aval in (before, after))
    found = []
    dropped = tuple(axis for axis in mesh if axis in had - has)
    if dropped:
        parts = math.prod(mesh[axis] for axis in dropped)
        found.append(("all-gather", dropped, sent("all-gather", parts, _bytes(before) * parts)))
    moved = tuple(
        axis
        for axis in mesh
        if axis in had & has and [axis in e for e in _spec(before)] != [axis in e for e in _spec(after)]
    )
    if moved:
        found.append(("all-to-all", moved, sent("all-to-all", math.prod(mesh[a] for a in moved), _bytes(before))))
    return found


def _implied(equation: Any) -> tuple[str, ...]:
    """The mesh axes that a product or a reduction sums over: its operands are cut along what it sums."""
    name = equation.primitive.name
    if name == "dot_general":
        (axes, _), _ = equation.params["dimension_numbers"]
    elif name in _REDUCTIONS:
        axes = equation.params.get("axes", ())
    else:
        return ()
    aval = equation.invars[0].aval
    sizes, spec = _sizes(aval), _spec(aval)
    summed = {axis for place in axes for axis in spec[place]}
    return tuple(axis for axis, size in sizes.items() if axis in summed and size > 1)
