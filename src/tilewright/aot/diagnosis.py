"""Turns the compiler's error into one line with the cause and one with the remedy."""

import re
from dataclasses import dataclass

from tilewright.aot.schedule import short_tag
from tilewright.aot.toolchain import too_old
from tilewright.core.chip import MIB, Chip


@dataclass(frozen=True)
class Diagnosis:
    """Why a program did not compile, and the remedy."""

    cause: str
    remedy: str


def diagnose(error: str, chip: Chip, version: str) -> Diagnosis:
    """Reads a compiler's error. An outdated compiler is reported first, since it explains most errors."""
    old = too_old(version, chip.platform)
    if old is not None:
        return Diagnosis(old, f"then compile again; the compiler's message: {_first(error)}")
    for read in (_vmem_overflow, _unsupported, _misaligned) if chip.platform == "tpu" else (_ptxas_registers,):
        if (found := read(error, chip)) is not None:
            return found
    if error.startswith("the compiler was stopped"):
        return Diagnosis(_first(error), "give it longer: --limit, or limit_s= of aot.compile")
    return Diagnosis(_first(error), "read the compiler's full message in the report's `error`")


def _first(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:400]


_SIZE = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def _mib(number: str, unit: str = "") -> float:
    return float(number) * _SIZE[unit] / MIB


def _vmem_overflow(error: str, chip: Chip) -> Diagnosis | None:
    """Three forms: more than the chip's VMEM, with a list; one allocation larger than that; more than a kernel's limit."""
    total = re.search(r"Used ([\d.]+)([KMG]?) of [\d.]+[KMG]? vmem", error)
    single = re.search(r"Allocation \(size=(\d+)\) would exceed memory \(size=\d+\).*?space=vmem", error)
    scoped = re.search(r"Scoped\s+allocation with size ([\d.]+)([KMG]?) and limit ([\d.]+)([KMG]?)", error)
    has = f"a {chip.name} has {chip.vmem_bytes / MIB:.0f} MiB" if chip.vmem_bytes else "the chip has less"
    shrink = "make the block of the largest allocation smaller; a window with 2 buffers holds its block twice"
    if total:
        listed = re.findall(r"Size: ([\d.]+)([KMG]?)\n.*?Shape: ([^\s{]+).*?Tag: ([^\n]+)", error, re.S)
        largest = "; ".join(
            f"{_mib(size, unit):.1f} MiB {short_tag(tag, shape)}" for size, unit, shape, tag in listed[:3]
        )
        named = f"; the largest: {largest}" if largest else ""
        return Diagnosis(f"VMEM overflow: it needs {_mib(*total.groups()):.1f} MiB and {has}{named}", shrink)
    if single:
        shape = re.search(r"shape = '([^'{]+)", error)
        tag = re.search(r"tag = '([^']+)'", error)
        name = short_tag(tag[1] if tag else "an allocation", shape[1] if shape else "")
        return Diagnosis(f"VMEM overflow: {name} alone is {_mib(single[1]):.1f} MiB and {has}", shrink)
    if scoped:
        needs, limit = _mib(scoped[1], scoped[2]), _mib(scoped[3], scoped[4])
        return Diagnosis(
            f"VMEM overflow: it needs {needs:.1f} MiB and its limit is {limit:.1f}; {has}",
            "raise CompilerParams(vmem_limit_bytes=...) up to the chip's VMEM, or use smaller blocks",
        )
    return None


def _ptxas_registers(error: str, chip: Chip) -> Diagnosis | None:
    match = re.search(r"Insufficient registers \((\d+)\) to compile [^\n]*? in function (\S+?)\.", error)
    if match is None:
        return None
    return Diagnosis(
        f"out of registers: an instruction of {match[2]} needs more than the {match[1]} per thread that it may have",
        "use fewer warpgroups per block, or a smaller accumulator tile per warpgroup",
    )


def _unsupported(error: str, chip: Chip) -> Diagnosis | None:
    match = re.search(r"(Not implemented|Unimplemented|unsupported|not supported)[^\n]*", error, re.I)
    if match is None:
        return None
    operation = re.search(r"'(\w+\.\w+)' op|\"(\w+\.\w+)\"", error)
    what = f"{operation[1] or operation[2]}: " if operation else ""
    return Diagnosis(
        f"{chip.name} cannot do this: {what}{match[0].strip()[:300]}",
        "use another operation, layout or dtype; `tilewright check` shows whether the results stay right",
    )


def _misaligned(error: str, chip: Chip) -> Diagnosis | None:
    match = re.search(r"[^\n]*(not aligned|misaligned|divisible by|multiple of|must be aligned)[^\n]*", error, re.I)
    if match is None:
        return None
    return Diagnosis(
        f"misaligned: {match[0].strip()[:300]}",
        f"make slices and blocks multiples of {chip.sublanes} along the second-last axis, of {chip.lanes} along the last",
    )
