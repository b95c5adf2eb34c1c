"""What the compiled program of a step says, from its HLO: its collectives by mesh axis, and its largest results."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewright import aot
from tilewright.parallel.mesh import MESH_AXES
from tilewright.plan.place import Place
from tilewright.plan.program import sent
from tilewright.plan.step import Step
from tilewright.workbench.hlo_work import computations

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
# Their results are no memory of their own.
_NO_BUFFER = ("parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "constant")


@dataclass(frozen=True)
class CompiledCollective:
    """One kind of exchange of a compiled step."""

    kind: str
    axes: tuple[str, ...]
    count: float
    bytes: float
    """What a device sends, as in `program.Collective`."""
    asynchronous: float
    """How many of them run beside other work."""


@dataclass(frozen=True)
class CompiledStep:
    """A step as the compiler has it, per device."""

    compiler: str
    seconds: float
    ok: bool
    cause: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    peak_bytes: int = 0
    collectives: tuple[CompiledCollective, ...] = ()
    largest: tuple[tuple[str, str, float], ...] = ()
    """Results of the compiled program: what made them, their shape, and their bytes."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compile_step(step: Step, place: Place, *, limit_s: float, use_cache: bool = True) -> CompiledStep:
    """Compiles a step for a place that is not there."""
    prepared = step.prepared
    with step.on_mesh():
        report = aot.compile(
            prepared.function,
            *prepared.arguments,
            chip=place.chip,
            topology=place.topology,
            limit_s=limit_s,
            use_cache=use_cache,
            schedule=False,
            hlo=True,
        )
    if not report.ok:
        return CompiledStep(report.compiler, report.seconds, ok=False, cause=report.cause)
    held = (report.argument_bytes or 0) + (report.output_bytes or 0) - (report.alias_bytes or 0)
    return CompiledStep(
        report.compiler,
        report.seconds,
        ok=True,
        argument_bytes=report.argument_bytes or 0,
        output_bytes=report.output_bytes or 0,
        alias_bytes=report.alias_bytes or 0,
        temp_bytes=report.temp_bytes or 0,
        peak_bytes=report.peak_bytes or held + (report.temp_bytes or 0),
        collectives=read_collectives(report.hlo, step.sizes),
        largest=read_largest(report.hlo),
    )


def probe_step(step: Step, place: Place, *, limit_s: float, use_cache: bool = True) -> aot.MemoryProbe:
    """The memory that the compiler assigns to a step."""
    prepared = step.prepared
    with step.on_mesh():
        return aot.probe_memory(
            prepared.function,
            *prepared.arguments,
            chip=place.chip,
            topology=place.topology,
            limit_s=limit_s,
            use_cache=use_cache,
        )


def read_collectives(hlo: str, mesh: Mapping[str, int]) -> tuple[CompiledCollective, ...]:
    """The collectives of a program, as often as its loops run them."""
    found: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
    for each, beside, times, around in _executed(hlo, fused_collectives=True):
        kind = next((kind for kind in _KINDS if each.opcode in (kind, f"{kind}-start")), None)
        if kind is None:
            continue
        sizes = [beside[name].bytes for name in each.operands if name in beside]
        operands, result = sum(sizes), each.bytes
        if each.opcode.endswith("-start") and result > operands:  # A start's result has its operands, too.
            result -= operands
        if kind == "ragged-all-to-all":  # At most: what is really sent is data.
            result = min(sizes[:2])
        group = _group(each.rest, mesh)
        axes, parts = axes_of(group, mesh), len(group)
        if parts < 2:
            continue
        size = times * sent(kind, parts, operands if kind == "reduce-scatter" else result)
        beside_work = (each.opcode.endswith("-start") or around) and '"is_sync":true' not in each.rest
        count, total, free = found.get((kind, axes), (0.0, 0.0, 0.0))
        found[kind, axes] = count + times, total + size, free + times * beside_work
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return tuple(CompiledCollective(kind, axes, *figures) for (kind, axes), figures in ordered)


def read_largest(hlo: str, most: int = 12) -> tuple[tuple[str, str, float], ...]:
    """The largest results of a program, each shape that an operation makes once."""
    found: dict[tuple[str, str], float] = {}
    for each, _, _, _ in _executed(hlo):
        if each.opcode in _NO_BUFFER or each.opcode.endswith("-done"):
            continue
        named = _OP_NAME.search(each.rest)
        name = "/".join(named[1].split("/")[-2:]) if named else each.opcode
        for dtype, bits, sizes in _ARRAY.findall(each.type):
            numbers = [int(size) for size in sizes.split(",") if size]
            found[name, f"{dtype}[{sizes}]"] = math.prod(numbers) * (int(bits) if bits else 8) / 8
    ordered = sorted(found.items(), key=lambda item: -item[1])[:most]
    return tuple((name, shape, size) for (name, shape), size in ordered)


def _executed(hlo: str, *, fused_collectives: bool = False) -> Iterable[tuple[Any, Mapping[str, Any], float, bool]]:
    """Every instruction that runs by itself, with those beside it, how often, and whether it is inside an async start.

    `fused_collectives`: also the collectives inside of fusions. libtpu has no reduce-scatter but a fusion of an all-reduce
    with slices, which sends as little.
    """
    modules = dict(computations(hlo))
    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    waiting = [(entry[1], 1.0, False)] if entry and entry[1] in modules else []
    while waiting:
        name, times, around = waiting.pop()
        inside = modules[name]
        for each in inside.values():
            yield each, inside, times, around
            if each.opcode.startswith(_KINDS):
                continue
            called = [one for names in _CALLED.findall(each.rest) for one in re.findall(r"%([\w.\-]+)", names)]
            if each.opcode == "fusion":
                for one in (one for one in called if fused_collectives and one in modules):
                    scattered = {"opcode": "reduce-scatter"} if one.startswith("all-reduce-scatter") else {}
                    own = [inner for inner in modules[one].values() if inner.opcode.startswith(_KINDS)]
                    yield from ((dataclasses.replace(inner, **scattered), modules[one], times, around) for inner in own)
                continue
            often = times * (_trips(each, hlo) if each.opcode == "while" else 1.0)
            is_async = around or each.opcode == "async-start"
            waiting += [(one, often, is_async) for one in called if one in modules]


def _trips(loop: Any, hlo: str) -> float:
    """How often a loop runs: as the compiler notes it, or the constant of its condition."""
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return float(noted[1])
    condition = re.search(r"condition=%([\w.\-]+)", loop.rest)
    body = re.search(rf"^%{re.escape(condition[1])} .*?^}}", hlo, re.M | re.S) if condition else None
    constants = re.findall(r"= s32\[\]\S* constant\((\d+)\)", body[0]) if body else []
    return float(max(map(int, constants), default=1))


def _group(text: str, mesh: Mapping[str, int]) -> list[int]:
    """The devices of a collective's first group."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([\w.\-]+)'=(\d+)", named[1])}
        over = set(re.findall(r"'([\w.\-]+)'", named[2]))
        devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return devices[tuple(slice(None) if axis in over else 0 for axis in sizes)].reshape(-1).tolist()
    if counted := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        groups, shape, order = (tuple(map(int, each.split(","))) if each else () for each in counted.groups())
        devices = np.arange(math.prod(shape)).reshape(shape)
        devices = devices.transpose(order) if order else devices
        return devices.reshape(groups)[0].reshape(-1).tolist()
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", text):
        return [int(device) for device in listed[1].split(",")]
    return list(range(math.prod(mesh.values())))


def axes_of(group: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    sizes = {axis: mesh[axis] for axis in MESH_AXES if mesh.get(axis, 1) > 1}
    if not sizes or max(group) >= math.prod(sizes.values()):
        return ()
    places = np.array(np.unravel_index(group, tuple(sizes.values())))
    return tuple(axis for axis, own in zip(sizes, places, strict=True) if len(set(own.tolist())) > 1)
