"""The compiler's words, as one line that says the cause, and one that says what to do about it."""

import re
from dataclasses import dataclass

from tilewright.aot.toolchain import too_old
from tilewright.core.chip import MIB, Chip


@dataclass(frozen=True)
class Diagnosis:
    """Why a program did not compile, and the way out."""

    cause: str
    remedy: str


def diagnose(error: str, chip: Chip, libtpu_version: str) -> Diagnosis:
    """Read a compiler's error. An old libtpu is named before anything else, since it explains most of what follows."""
    old = too_old(libtpu_version)
    if old is not None:
        return Diagnosis(old, f"then again; the compiler's own words: {_first(error)}")
    for read in (_vmem_overflow, _unsupported, _misaligned):
        if (found := read(error, chip)) is not None:
            return found
    return Diagnosis(_first(error), "the compiler's whole message is in the report's `error`")


def _first(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:400]


_SIZE = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def _bytes(number: str, unit: str) -> float:
    return float(number) * _SIZE[unit.upper().rstrip("IB")[:1]]


def _vmem_overflow(error: str, chip: Chip) -> Diagnosis | None:
    if "vmem" not in error.lower() or not re.search(r"exhausted|exceed|Ran out of memory|larger than", error, re.I):
        return None
    # "Largest program allocations in vmem: ... 1. Size: 64.00M ... Shape: ... Allocation type/XLA label: ..."
    pieces = re.findall(r"Size:\s*([\d.]+)([KMG]?)i?B?(.*?)(?=\n\s*\d+\.\s*Size:|\n\s*\n|={5,}|\Z)", error, re.S)
    named = []
    for number, unit, rest in pieces[:3]:
        shape = re.search(r"Shape:\s*([^\s{]+)", rest)
        tag = re.search(r"Allocation type:\s*([^\n]+)", rest)
        window = re.search(r"(input|output) window allocation for operator (?:input|output) (\d+)", rest)
        label = f"{window[1]} {window[2]}" if window else (tag[1].strip() if tag else "")
        named.append(f"{_bytes(number, unit) / MIB:.1f} MiB {label} {shape[1] if shape else ''}".strip())
    asked = re.search(r"Used ([\d.]+)([KMG]?)i?B? of ([\d.]+)([KMG]?)i?B? vmem", error) or re.search(
        r"size ([\d.]+)([KMG]?)i?B? and limit ([\d.]+)([KMG]?)i?B?", error
    )
    has = f"a {chip.name} has {chip.vmem_bytes / MIB:.0f} MiB" if chip.vmem_bytes else "the chip has less"
    needs = f"it needs {_bytes(asked[1], asked[2]) / MIB:.1f} MiB" if asked else "it needs more VMEM than it may take"
    largest = f"; the largest: {'; '.join(named)}" if named else ""
    return Diagnosis(
        f"VMEM overflow: {needs}, {has}{largest}",
        "shrink the block that the largest allocation is of (a window holds it twice), or raise vmem_limit_bytes "
        "if it is below the chip's",
    )


def _unsupported(error: str, chip: Chip) -> Diagnosis | None:
    match = re.search(r"(Not implemented|Unimplemented|unsupported|not supported)[^\n]*", error, re.I)
    if match is None:
        return None
    operation = re.search(r"'(\w+\.\w+)' op|\"(\w+\.\w+)\"", error)
    what = f"{operation[1] or operation[2]}: " if operation else ""
    return Diagnosis(
        f"{chip.name} cannot do this: {what}{match[0].strip()[:300]}",
        "write it with another operation, or in another layout or dtype; `tilewright check` shows whether it stays right",
    )


def _misaligned(error: str, chip: Chip) -> Diagnosis | None:
    match = re.search(r"[^\n]*(not aligned|misaligned|divisible by|multiple of|must be aligned)[^\n]*", error, re.I)
    if match is None:
        return None
    return Diagnosis(
        f"misaligned: {match[0].strip()[:300]}",
        f"make slices and blocks multiples of {chip.sublanes} along the second-last axis, of {chip.lanes} along the last",
    )
