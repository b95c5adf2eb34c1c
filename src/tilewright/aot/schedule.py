"""Reads the schedule that libtpu dumps for a kernel: its loops, the units that each bundle uses, and its VMEM.

A TPU core runs one bundle per cycle, unless it waits for a copy. The dump of a kernel has one line per bundle, in order:

    0x135 LB: >> { %v823 = vld [vmem:[%s7]] ;; ... ;; %p693 = scmp.ge.s32.totalorder %s696, 4 /* loop exit test */ }

The number of `>` is that of the loops around it, `LB` begins a loop's body, and `/* Start region 47 */` and
`/* End region 47 */` delimit regions. `sbr.rel (%p) target = $region48` branches to the start of a region: back to the
beginning of a loop, or forward over a block that runs under a condition, such as the body of a `pl.when`. A second file
has, for each bundle, how many slots of each unit it uses.

From these follows the steady state of a kernel: one step of its grid, with each inner loop run as often as its exit test
says, and without the blocks that run only where an index has one particular value (the first or the last step of an axis).
What the schedule does not show is not guessed: `unknown` has the reasons.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A bundle begins with its address; it has several lines where a comment has.
_BUNDLE = re.compile(r"^[ \t]*(?:0x[0-9a-f]+|0)[ \t]+(?P<label>[A-Z]{2})?[ \t]*:[ \t]*(?P<depth>>*)", re.M)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_BRANCH = re.compile(r"sbr\.rel \((?P<negated>!?)(?P<predicate>%\w+)\) target = \$region(?P<region>\d+)")
_COMPARISON = re.compile(
    r"(?P<predicate>%\w+) = scmp\.(?P<how>\w+)\.s32\.totalorder (?:\(%?!?\w+\), )?(?P<left>%\w+), (?P<right>%?\w+)"
)
_EXIT_TEST = "/* loop exit test */"
# Delay slots: the bundles after a branch that run whether or not it is taken.
_DELAY_SLOTS = 4

# A bfloat16 product takes a register of 16 rows. Others are counted by the slots in the utilization file.
_BF16_PRODUCT = re.compile(r"vmatmul\.\S*bf16")
_BF16_ROWS = 16

# An estimate stands if the bundles under conditions known only at run time are a smaller share than this.
_FEW = 0.05

# The columns of the utilization file, and the unit of each.
UNITS = {
    "MATMUL": "MXU",  # libtpu 0.0.51; 0.0.50 calls it MXU.
    "MXU": "MXU",
    "XLU": "XLU",
    "VALU": "VPU",
    "EUP": "EUP",
    "VLOAD": "load",
    "VSTORE": "store",
    "SALU": "scalar",
}


class NotReadable(ValueError):
    """A dump is not in the form that this module reads."""


@dataclass(frozen=True)
class Allocation:
    """An allocation in VMEM: what it is for, and its size."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of one kernel. Counts are for one step of its grid in the steady state."""

    name: str
    bundles_total: int
    """Bundles of the whole kernel, each counted once."""
    bundles: int
    """Bundles of a step, inner loops counted as often as they run."""
    mxu_cycles: float
    """Cycles for which the matrix products of a step keep all MXUs busy."""
    occasional: int
    """Bundles in blocks that run only at the first or last step of an axis; they are not in `bundles`."""
    busy: dict[str, float]
    """The fraction of its slots that each unit uses in a step."""
    spill_stores: int
    stores: int
    spill_loads: int
    loads: int
    vmem: tuple[Allocation, ...] = ()
    unknown: tuple[str, ...] = field(default=())
    """Why `bundles` is not exact: loops or blocks that depend on data."""

    @property
    def cycles(self) -> float:
        """The cycles of a step if no copy is waited for. The MXU can take longer than the bundles that feed it."""
        return max(self.bundles, self.mxu_cycles)

    @property
    def vmem_bytes(self) -> int:
        return sum(allocation.bytes for allocation in self.vmem)

    @property
    def bottleneck(self) -> str:
        return max(self.busy, key=lambda unit: self.busy[unit])


@dataclass
class _Bundle:
    text: str
    label: str | None
    depth: int


def _bundles(text: str) -> list[_Bundle]:
    starts = list(_BUNDLE.finditer(text))
    if not starts:
        raise NotReadable("the dump has no bundles")
    found = []
    for match, following in zip(starts, [*starts[1:], None], strict=True):
        body = text[match.end() : following.start() if following else len(text)]
        found.append(_Bundle(body, match["label"], len(match["depth"])))
    # An empty bundle has no marks: it is in the same loops as the one before it.
    for before, bundle in itertools.pairwise(found):
        if bundle.text.lstrip().startswith("{}"):
            bundle.depth = before.depth
    return found


def _utilization(text: str) -> tuple[list[str], list[int], list[list[int]]]:
    """The names of the columns, the slots of each, and how many of them each bundle uses."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    try:
        capacity = next(i for i, line in enumerate(lines) if line.startswith("== CAPA"))
        use = next(i for i, line in enumerate(lines) if line.startswith("== UTIL"))
        names = [name.strip() for name in lines[capacity + 1].split(",")]
        slots = [int(word) for word in lines[capacity + 2].split()]
        rows = [[int(word) for word in line.split()] for line in lines[use + 1 :]]
    except (StopIteration, ValueError, IndexError) as error:
        raise NotReadable(f"the utilization file is not in the known form ({error})") from error
    if any(len(row) != len(names) for row in rows) or len(slots) != len(names):
        raise NotReadable("the utilization file's rows do not fit its columns")
    return names, slots, rows


@dataclass(frozen=True)
class _Span:
    """A loop (with its number of iterations, where the schedule has it) or a conditional block: bundles [start, end)."""

    start: int
    end: int
    times: int | None = None


def _region_starts(bundles: Sequence[_Bundle]) -> dict[int, int]:
    starts: dict[int, int] = {}
    for index, bundle in enumerate(bundles):
        for kind, number in _REGION.findall(bundle.text):
            if kind != "End":
                starts[int(number)] = index
    return starts


def _branches(bundles: Sequence[_Bundle]) -> Iterator[tuple[int, str, int]]:
    """(bundle, predicate, target) of each branch."""
    starts = _region_starts(bundles)
    for index, bundle in enumerate(bundles):
        for match in _BRANCH.finditer(bundle.text):
            if int(match["region"]) not in starts:
                raise NotReadable(f"a branch leads to region {match['region']}, which does not start anywhere")
            yield index, match["predicate"], starts[int(match["region"])]


def _comparisons(bundles: Sequence[_Bundle]) -> dict[str, tuple[str, bool]]:
    """What each predicate is compared with, and whether it is a loop's exit test."""
    found = {}
    for bundle in bundles:
        for part in bundle.text.split(";;"):
            if match := _COMPARISON.search(part):
                found[match["predicate"]] = (match["right"], _EXIT_TEST in part)
    return found


def _structure(bundles: Sequence[_Bundle]) -> tuple[list[_Span], list[_Span], list[_Span]]:
    """Loops, blocks that run only at some steps, and blocks under a condition that is known only at run time."""
    compared = _comparisons(bundles)
    loops, occasional, conditional = [], [], []
    for index, predicate, to in _branches(bundles):
        right, exit_test = compared.get(predicate, ("", False))
        end = min(index + 1 + _DELAY_SLOTS, len(bundles))
        if to <= index:
            loops.append(_Span(to, end, int(right) if exit_test and right.isdigit() else None))
            continue
        block = _Span(end, to)
        waits = any("pipeline-emitter-dma-wait" in bundle.text for bundle in bundles[block.start : block.end])
        if waits:
            continue  # The body of the pipeline: it is skipped only while the pipeline fills.
        if right.isdigit():
            occasional.append(block)
        elif block.end > block.start:
            conditional.append(block)
    return loops, occasional, conditional


def read_schedule(
    name: str, bundle_text: str, utilization_text: str, *, grid_steps: int, mxu_rows_per_cycle: int
) -> Schedule:
    """The schedule of a kernel whose grid has `grid_steps` steps. `mxu_rows_per_cycle` is for all MXUs of a core."""
    bundles = _bundles(bundle_text)
    names, slots, rows = _utilization(utilization_text)
    if len(rows) != len(bundles):
        raise NotReadable(f"{len(bundles)} bundles have {len(rows)} rows of utilization")
    loops, occasional, conditional = _structure(bundles)
    unknown: list[str] = []

    # The pipeline over the grid is the outermost loop; without a loop the whole kernel is a single step.
    weights = [0 if grid_steps > 1 else 1] * len(bundles)
    outer = [loop for loop in loops if bundles[loop.start].depth == 1]
    grid_loop = max(outer, key=lambda loop: loop.end - loop.start, default=None) if grid_steps > 1 else None
    if grid_steps > 1:
        if grid_loop is None:
            raise NotReadable(f"the grid has {grid_steps} steps and the schedule has no loop")
        for index in range(grid_loop.start, grid_loop.end):
            weights[index] = 1
    for loop in loops:
        if loop is grid_loop:
            continue
        times = loop.times
        if times is None:
            unknown.append(f"a loop of {loop.end - loop.start} bundles runs as often as data says")
            times = 1
        for index in range(loop.start, loop.end):
            weights[index] *= times
    rare = set()
    for block in occasional:
        rare.update(index for index in range(block.start, block.end) if weights[index])
    for index in rare:
        weights[index] = 0

    bundle_count = sum(weights)
    # They are counted as if they always ran. A few belong to the pipeline, for the last block of a ragged axis.
    at_run_time = sum(sum(weights[block.start : block.end]) for block in conditional)
    if at_run_time > _FEW * bundle_count:
        unknown.append(f"{at_run_time} of {bundle_count} bundles run under a condition that is known only at run time")
    products = sum(
        weight * len(_BF16_PRODUCT.findall(bundle.text))
        for weight, bundle in zip(weights, bundles, strict=True)
        if weight
    )
    column = {label: position for position, label in enumerate(names)}
    used = [
        sum(weight * row[position] for weight, row in zip(weights, rows, strict=True)) for position in range(len(names))
    ]
    busy_cycles = {unit: used[column[label]] / slots[column[label]] for label, unit in UNITS.items() if label in column}
    mxu_cycles = max(busy_cycles.get("MXU", 0.0), products * _BF16_ROWS / mxu_rows_per_cycle)
    busy_cycles["MXU"] = mxu_cycles
    step_cycles = max(bundle_count, mxu_cycles, 1)

    def total(label: str) -> int:
        return used[column[label]] if label in column else 0

    return Schedule(
        name=name,
        bundles_total=len(bundles),
        bundles=bundle_count,
        mxu_cycles=mxu_cycles,
        occasional=len(rare),
        busy={unit: value / step_cycles for unit, value in busy_cycles.items()},
        spill_stores=total("VSTORE:SPILL"),
        stores=total("VSTORE"),
        spill_loads=total("VLOAD:FILL"),
        loads=total("VLOAD"),
        unknown=tuple(dict.fromkeys(unknown)),
    )


_DUMPED = re.compile(r"^\d+-(?P<name>.+)-\d+-final_bundles\.txt$")


def dumped_kernels(folder: Path) -> dict[str, tuple[Path, Path]]:
    """The kernels in a dump folder by the compiler's name for each: its bundles and its utilization."""
    found = {}
    for bundles in sorted(folder.glob("*-final_bundles.txt")):
        match = _DUMPED.match(bundles.name)
        if match is None or "schedule-analysis" in bundles.name:
            continue
        prefix = bundles.name.split("-", 1)[0] + f"-{match['name']}-"
        utilization = [
            path
            for path in folder.glob("*-final_hlo-static-per-bundle-utilization.txt")
            if path.name.startswith(prefix)
        ]
        if utilization:
            found[match["name"]] = (bundles, utilization[0])
    return found


_CUSTOM_CALL = re.compile(r"%(?P<name>\S+) = .*custom_call_target=\"tpu_custom_call\"")


def custom_calls(folder: Path) -> list[str]:
    """The compiler's names for the program's kernels, in its order."""
    return [
        match["name"]
        for program in sorted(folder.glob("*-hlo.txt"))
        for line in program.read_text(errors="replace").splitlines()
        if (match := _CUSTOM_CALL.search(line))
    ]


def read_vmem(folder: Path) -> dict[str, tuple[Allocation, ...]]:
    """The VMEM allocations of each kernel, by the compiler's name for the kernel."""
    found: dict[str, tuple[Allocation, ...]] = {}
    for report in folder.glob("*-vmem_report.html"):
        text = report.read_text(errors="replace")
        begin = text.find("const DATA =")
        if begin < 0:
            continue
        data, _ = json.JSONDecoder().raw_decode(text[begin + len("const DATA =") :].lstrip())
        for name, breakdown in data.get("hlo_breakdowns", {}).items():
            found[name] = tuple(
                Allocation(short_tag(piece.get("tag", "?"), piece.get("shape", "")), int(piece["size"]))
                for block in breakdown.get("blocks", [])
                for piece in block.get("allocations", [])
            )
    return found


def short_tag(tag: str, shape: str) -> str:
    """The compiler's description of an allocation, shortened: "input 0, window bf16[512,512], 2 buffers"."""
    window = re.search(
        r"(input|output) window allocation for operator (?:input|output) (\d+).*?shape is ([^,]+\[[\d,]*\])", tag
    )
    if window:
        buffers = re.search(r"has (\d+) buffering levels", tag)
        return f"{window[1]} {window[2]}, window {window[3]}" + (f", {buffers[1]} buffers" if buffers else "")
    if tag == "SPILL":
        return "spills"
    return f"{tag} {shape}".strip()
