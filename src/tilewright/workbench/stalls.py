"""Where the warps of a GPU kernel wait: what Nsight Compute sampled, per machine instruction (SASS).

It reads what this exports of a report, whose rows are the instructions of one kernel after another, each kernel below its
name and the names of the columns:

    ncu --import REPORT.ncu-rep --page source --csv

A sample is of one warp, at the instruction that it is about to issue, with the reason why it did not (`REASONS`). So an
instruction with many samples waits for what an earlier one began: a load, a barrier, a product.
"""

import collections
import csv
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

_NAME, _CODE, _SAMPLES, _EXECUTED = "Kernel Name", "Source", "# Samples", "Instructions Executed"
_FIRST_COLUMN, _STALL, _NOT_ISSUED = "Address", "stall_", "(Not Issued)"
_EXPORT_AGAIN = "export a report with `ncu --import REPORT.ncu-rep --page source --csv`"
_SUFFIX = "_mosaic_gpu_kernel"
# Where a region of the code ends: what warps wait at, and branches.
_ENDS = ("BAR", "SYNCS.PHASECHK", "WARPGROUP.DEPBAR", "DEPBAR", "BRA", "EXIT", "RET")
_OPCODE = re.compile(r"(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_WORDS = {"64": 2, "128": 4}

REASONS = {
    "selected": "issued",
    "not_selected": "another warp was issued",
    "long_sb": "global or local memory, or a barrier of copies",
    "short_sb": "shared memory, or a special function",
    "barrier": "other warps at a barrier, or a product",
    "wait": "a fixed latency",
    "math": "a busy arithmetic unit",
    "dispatch": "the dispatcher",
    "lg": "the queue of global memory",
    "mio": "the queue of shared memory",
    "no_inst": "the next instruction",
    "branch_resolving": "a branch",
    "membar": "a memory fence",
    "drain": "stores at the end",
    "imc": "a constant",
    "sleeping": "sleep",
    "sleep": "sleep",
    "tex": "textures",
    "misc": "another reason",
}
"""What a warp waits for, by Nsight Compute's names."""


class NotStalls(ValueError):
    """A file is not what Nsight Compute exports. The text says what is wrong."""


@dataclass(frozen=True)
class Instruction:
    """One machine instruction."""

    place: int
    """Its number in the code."""
    code: str
    executed: int
    """By how many warps."""
    samples: int
    reasons: dict[str, int]
    """Samples by reason, without those that have none."""

    @property
    def opcode(self) -> str:
        """With its modifiers, without its predicate."""
        match = _OPCODE.match(self.code)
        return match[1] if match else self.code.partition(" ")[0]


@dataclass(frozen=True)
class Stalls:
    """The samples of one kernel, or of a part of its code."""

    kernel: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def samples(self) -> int:
        return sum(each.samples for each in self.instructions)

    @cached_property
    def warps(self) -> int:
        """The warps of the launch, of a whole kernel: all of them execute its first instruction."""
        return max(self.instructions[0].executed, 1)

    @cached_property
    def reasons(self) -> dict[str, int]:
        """Samples by reason, the most frequent first."""
        return _by_count((reason, count) for each in self.instructions for reason, count in each.reasons.items())

    @cached_property
    def opcodes(self) -> dict[str, int]:
        """How many instructions were executed, by opcode without modifiers, the most frequent first."""
        return _by_count((each.opcode.partition(".")[0], each.executed) for each in self.instructions)

    @property
    def executed(self) -> int:
        """How many instructions were executed, by all warps."""
        return sum(self.opcodes.values())

    @property
    def local_words_per_thread(self) -> tuple[float, float]:
        """Words of 32 bits loaded from local memory, and stored there: what the compiler spilled, per thread."""
        loaded, stored = (
            sum(each.executed * _words(each.opcode) for each in self.instructions if each.opcode.startswith(opcode))
            for opcode in ("LDL", "STL")
        )
        return loaded / self.warps, stored / self.warps

    def regions(self) -> Iterator["Stalls"]:
        """The code, cut behind each instruction that warps may wait at."""
        part: list[Instruction] = []
        for each in self.instructions:
            part.append(each)
            if each.opcode.startswith(_ENDS):
                yield Stalls(self.kernel, tuple(part))
                part = []
        if part:
            yield Stalls(self.kernel, tuple(part))


def read(lines: Iterable[str]) -> list[Stalls]:
    """The kernels in an export. Raises `NotStalls` where it is something else, or was cut."""
    kernels: list[tuple[str, list[Instruction]]] = []
    columns: list[str] | None = None
    rows = csv.reader(lines)
    for row in rows:
        if not row:
            continue
        where = f"line {rows.line_num}"
        if row[0] == _NAME and len(row) > 1:
            kernels.append((row[1].removesuffix(_SUFFIX), []))
            columns = None
        elif not kernels and row[0] == _FIRST_COLUMN:
            raise NotStalls(
                f"{where} has the columns of a kernel, and no line before it the kernel's name; {_EXPORT_AGAIN}"
            )
        elif kernels and columns is None:
            columns = row
            wanted = (_CODE, _SAMPLES, _EXECUTED)
            missing = [name for name in wanted if name not in columns]
            if not missing and not any(map(_is_reason, columns)):
                missing = [f"{_STALL}..."]
            if missing:
                raise NotStalls(
                    f"the source page of {kernels[-1][0]} ({where}) has no column {missing[0]!r}; record it with "
                    f"`ncu --set full`, which samples warps, and export it with `--page source --csv`"
                )
        elif columns is not None:
            if len(row) < len(columns):
                raise NotStalls(
                    f"{where} has {len(row)} of {len(columns)} columns: the export was cut; {_EXPORT_AGAIN}"
                )
            kernels[-1][1].append(_instruction(len(kernels[-1][1]), columns, row, where))
    for name, instructions in kernels:
        if not instructions:
            raise NotStalls(f"kernel {name} has no instructions: the export was cut, or has no commas; {_EXPORT_AGAIN}")
    if not kernels:
        raise NotStalls(f"no line begins with {_NAME!r}, so no kernel was profiled or exported; {_EXPORT_AGAIN}")
    return [Stalls(name, tuple(instructions)) for name, instructions in kernels]


def _is_reason(column: str) -> bool:
    return column.startswith(_STALL) and not column.endswith(_NOT_ISSUED)


def _instruction(place: int, columns: list[str], row: list[str], where: str) -> Instruction:
    values = dict(zip(columns, row, strict=False))

    def count(column: str) -> int:
        text = values[column]
        if not text.isdecimal():
            raise NotStalls(f"{where}: {column!r} is {text!r}, which is no count; {_EXPORT_AGAIN}")
        return int(text)

    reasons = {name.removeprefix(_STALL): count(name) for name in columns if _is_reason(name)}
    return Instruction(
        place,
        values[_CODE].strip(),
        count(_EXECUTED),
        count(_SAMPLES),
        {reason: number for reason, number in reasons.items() if number},
    )


def _by_count(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: collections.Counter[str] = collections.Counter()
    for name, count in counts:
        sums[name] += count
    return {name: count for name, count in sums.most_common() if count}


def _words(opcode: str) -> int:
    return max((words for width, words in _WORDS.items() if f".{width}" in opcode), default=1)
