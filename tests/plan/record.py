"""Record the programs that test_slices.py reads: `uv run python -m tests.plan.record`, where libtpu is set up.

Under emulation a program takes a quarter of an hour or more. Only what `read_collectives` reads is kept: the collectives,
what they are given, and the loops and calls around them.
"""

import json
import re
from pathlib import Path

from tests.plan.slices import SLICES, STEP
from tilewright import aot
from tilewright.core.chip import Chip
from tilewright.plan.place import Place

PROGRAMS = Path(__file__).parent / "programs"
_KEPT = re.compile(
    r" (?:all-gather|all-reduce|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|async|while|conditional|call)"
    r"(?:-start|-done)?\("
)
_NOT_READ = re.compile(r', (?:metadata|backend_config|frontend_attributes)=\{(?:[^{}"]|"[^"]*"|\{[^{}]*\})*\}')


def stripped(hlo: str) -> str:
    """The lines of a program that its collectives are read from."""
    kept: list[str] = []
    for computation in re.split(r"(?m)^(?=(?:ENTRY )?%[\w.\-]+ \()", hlo):
        lines = computation.splitlines()
        chosen = [line for line in lines if _KEPT.search(line) or "calls=%all-reduce-scatter" in line]
        given = {name for line in chosen for name in re.findall(r"%([\w.\-]+)", line.partition(" = ")[2])}
        counts = [line for line in lines if " = s32[]" in line and " constant(" in line]  # How often a loop runs.
        wanted = {*chosen, *counts, *(line for line in lines if _name(line) in given)}
        if chosen or "constant(" in computation:
            kept += [lines[0], *(_short(line) for line in lines[1:] if line in wanted), "}", ""]
    return "\n".join(kept)


def _name(line: str) -> str:
    found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)
    return found[1] if found else ""


def _short(line: str) -> str:
    trips = re.search(r'"known_trip_count":\{"n":"\d+"[^}]*\}', line)
    sync = re.search(r'"is_sync":true', line)
    notes = "".join(f", backend_config={{{found[0]}}}" for found in (trips, sync) if found)
    return _NOT_READ.sub("", line) + notes


def main() -> None:
    """Compile the step for each slice, and keep what is read of it."""
    PROGRAMS.mkdir(exist_ok=True)
    for chip, topology in SLICES:
        place = Place.of(Chip.named(chip), topology)
        with STEP.on_mesh():
            report = aot.compile(
                STEP.prepared.function,
                *STEP.prepared.arguments,
                chip=place.chip,
                topology=place.topology,
                limit_s=3600.0,
                schedule=False,
                hlo=True,
            )
        print(chip, topology, report.ok, report.cause, report.compiler, f"{report.seconds:.0f} s")
        if report.ok:
            about = json.dumps({"compiler": report.compiler})
            (PROGRAMS / f"{chip}-{topology}.hlo").write_text(f"// {about}\n{stripped(report.hlo)}")


if __name__ == "__main__":
    main()
