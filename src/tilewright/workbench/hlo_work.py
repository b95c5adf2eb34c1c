"""The work of each operation of a compiled program, read from its HLO: FLOPs of products, bytes of operands and results.

An operand that is only sliced or gathered from counts as what is taken of it, and a result that is updated in place as
what is written. FLOPs are those of matrix products alone, as in `core.case.Work`. What a custom call computes is not known.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"\bcalls=%([\w.\-]+)")
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_TAKING = ("slice", "dynamic-slice", "gather")
_UPDATE = "dynamic-update-slice"
# They contain operations with times of their own.
_AROUND = ("while", "conditional", "call")


@dataclass(frozen=True)
class OperationWork:
    """What one execution of an operation computes and moves at least; None where it is not known, or nothing."""

    flops: float | None
    bytes: float | None


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    @property
    def bytes(self) -> float:
        return sum(_bits(dtype) * _product(sizes) / 8 for dtype, sizes in _ARRAY.findall(self.type))

    @property
    def sizes(self) -> list[int]:
        """Of its first array."""
        found = _ARRAY.search(self.type)
        return [] if found is None else _numbers(found[2])


def live_work(client: Any, programs: Collection[str]) -> dict[tuple[str, str], OperationWork]:
    """The work of each operation of the programs of these names that a client holds, by the names of both.

    Where two programs of one name differ in the work of an operation, it is left out.
    """
    found: dict[tuple[str, str], OperationWork] = {}
    differing: set[tuple[str, str]] = set()
    for executable in client.live_executables():
        for module in executable.hlo_modules():
            if module.name not in programs:
                continue
            for name, work in operation_work(module.to_string()).items():
                key = (module.name, name)
                if found.setdefault(key, work) != work:
                    differing.add(key)
    return {key: work for key, work in found.items() if key not in differing}


def operation_work(text: str) -> dict[str, OperationWork]:
    """The work of each operation of a module, by its name."""
    by_name = dict(computations(text))
    found: dict[str, OperationWork] = {}
    for instructions in by_name.values():
        for each in instructions.values():
            if each.opcode not in _AROUND:
                called = _CALLED.search(each.rest)
                inside = by_name.get(called[1]) if called and each.opcode == "fusion" else None
                flops = sum(map(_flops_in(inside), inside.values())) if inside else _flops_in(instructions)(each)
                found[each.name] = OperationWork(flops or None, _moved(each, instructions, inside) or None)
    return found


def computations(text: str) -> Iterator[tuple[str, dict[str, _Instruction]]]:
    """The instructions of each computation of a module, by their names."""
    name, inside = "", None
    for line in text.splitlines():
        if inside is None:
            if line.endswith("{") and " -> " in line and (head := _NAME.search(line)):
                name, inside = head[1], {}
        elif line.startswith("}"):
            yield name, inside
            inside = None
        elif instruction := _instruction(line.strip()):
            inside[instruction.name] = instruction


def _instruction(line: str) -> _Instruction | None:
    """%name = type opcode(%operand, ...), attributes."""
    head, equals, rest = line.partition(" = ")
    name = _NAME.search(head)
    if not equals or name is None:
        return None
    end = _closed(rest) if rest.startswith("(") else rest.find(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    rest = rest[len(opcode) :]
    end = _closed(rest)
    return _Instruction(name[1], kind, opcode, tuple(_NAME.findall(rest[:end])), rest[end:], head.startswith("ROOT"))


def _closed(text: str) -> int:
    """Where the parenthesis that begins a text is closed."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place + 1
    return len(text)


def _flops_in(instructions: Mapping[str, _Instruction]) -> Callable[[_Instruction], float]:
    """A function that returns the FLOPs of one of these instructions; 0 where it is no product."""

    def flops(each: _Instruction) -> float:
        is_product = each.opcode == "dot" or (each.opcode == "custom-call" and "gemm" in each.rest)
        left = instructions.get(each.operands[0]) if each.operands else None
        contracted = _CONTRACTED.search(each.rest)
        if not is_product or left is None or contracted is None:
            return 0.0
        sizes = left.sizes
        depth = math.prod(sizes[axis] for axis in _numbers(contracted[1].replace('"', "")) if axis < len(sizes))
        return 2.0 * math.prod(each.sizes) * depth

    return flops


def _moved(each: _Instruction, beside: Mapping[str, _Instruction], inside: Mapping[str, _Instruction] | None) -> float:
    """The bytes of operands and of the result."""
    operands = [beside[name] for name in each.operands if name in beside]
    if inside is None:
        if each.opcode in _TAKING:
            return 2 * each.bytes
        if each.opcode == _UPDATE and len(operands) > 1:
            return 2 * operands[1].bytes
        return each.bytes + sum(operand.bytes for operand in operands)
    parameters = [one for one in inside.values() if one.opcode == "parameter"]
    read = sum(_read(parameter, inside.values()) for parameter in parameters)
    root = next((one for one in inside.values() if one.root), None)
    in_place = root is not None and root.opcode == _UPDATE and root.operands[1] in inside
    return read + (inside[root.operands[1]].bytes if root is not None and in_place else each.bytes)


def _read(parameter: _Instruction, inside: Iterable[_Instruction]) -> float:
    """How much of a fusion's operand is read."""
    users = [one for one in inside if parameter.name in one.operands]
    taken = 0.0
    for user in users:
        if user.opcode in _TAKING and user.operands[0] == parameter.name:
            taken += user.bytes
        elif not (user.opcode == _UPDATE and user.operands[0] == parameter.name):
            return parameter.bytes
    return min(taken, parameter.bytes)


def _bits(dtype: str) -> int:
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 8 * (dtype == "pred")


def _product(sizes: str) -> int:
    return math.prod(_numbers(sizes))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",") if each]
