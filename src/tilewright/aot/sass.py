"""Reads what ptxas and nvdisasm print about a GPU kernel: its resources, its loops, and the instructions of each.

ptxas reports registers and spills of a whole kernel:

    ptxas info    : Compiling entry function 'matmul_forward_mosaic_gpu_kernel' for 'sm_90a'
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 232 registers, used 16 barriers, 1 bytes smem

nvdisasm prints the machine code (SASS), one instruction per line, with labels between them:

    .L_x_1:
            /*0a20*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
            /*0a30*/               @P0 BRA `(.L_x_1) ;

From the branches follow the loops. A branch back is not enough for one: ptxas moves rarely taken paths, such as the
repeated tests of a barrier, to the end of the code, and they branch back into the middle of a loop. So a loop is what it is
in any compiler: a block that dominates a block that branches to it, and all blocks on the way between them. An instruction
belongs to the innermost loop around it.
"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewright.aot.schedule import NotReadable
from tilewright.core.chip import BLOCK_RESERVED_SMEM, SM_REGISTERS, WARP_THREADS, Chip

# What Mosaic adds to the name of a kernel: the first to its host function, both to its entry on the device.
_HOST_SUFFIX = "_mosaic_gpu"
_ENTRY_SUFFIX = f"{_HOST_SUFFIX}_kernel"

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_REMARK = re.compile(r"^ptxas (?:info|warning)\s*: \((C\d+)\) (.*)$", re.M)
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers[^\n]*")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_CODE = re.compile(r"^\.text\.(\S+):$", re.M)
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?\w+)\s+)?([A-Z][A-Z0-9_]*)((?:\.\w+)*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_MAX_REGISTERS = re.compile(r"USETMAXREG\S* .*?\b(0x[0-9a-f]+) ;")
# The host function of a kernel launches it (jax 0.11) or builds what is launched: grid, cluster, block and bytes
# of dynamic shared memory.
_HOST = re.compile(rf"^define \w+ @(?!_mlir_ciface_)(\S+?){_HOST_SUFFIX}\(", re.M)
_LAUNCH = re.compile(r"call \w+ @mosaic_gpu_(?:build_kernel_spec|launch_kernel)\(ptr %\w+((?:, i32 \d+){10})")

# The kinds of instructions that a report counts, by opcode; a name that ends with "*" is a prefix.
KINDS: dict[str, tuple[str, ...]] = {
    "wgmma": ("HGMMA", "QGMMA", "IGMMA", "BGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA"),
    "mma": ("HMMA", "IMMA", "DMMA", "QMMA", "OMMA"),
    "async copy": ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED", "LDGSTS"),
    "spill": ("LDL", "STL"),
    "MUFU": ("MUFU",),
    "FP32": ("FFMA*", "FMUL*", "FADD*", "FMNMX*", "FSETP", "FSEL", "FSET", "FCHK"),
    "FP16": ("HFMA2*", "HMUL2*", "HADD2*", "HMNMX2", "HSETP2", "HSET2"),
    "convert": ("F2F*", "F2I*", "I2F*", "F2FP", "I2FP", "I2I*", "FRND"),
    "shared": ("LDS*", "STS*", "ATOMS*", "LDT*", "STT*"),
    "global": ("LDG", "STG", "LD", "ST", "RED*", "ATOM", "ATOMG", "CCTL"),
    "shuffle": ("SHFL", "VOTE*", "REDUX"),
    "barrier": ("BAR", "SYNCS", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "FENCE", "MEMBAR", "UTMACMDFLUSH"),
    "control": ("BRA", "EXIT", "BSSY", "BSYNC", "BREAK", "CALL", "RET", "NANOSLEEP", "ELECT", "NOP", "BRX", "BPT"),
    "uniform": ("U*", "R2UR", "S2UR"),
    "integer and moves": (),  # All others.
}
_MATRIX = ("wgmma", "mma")
# A loop of a few instructions with one of these only waits.
_POLLED = ("SYNCS", "NANOSLEEP", "USETMAXREG")
_LONGEST_POLL = 8
_SPILL_BYTES = {"32": 4, "64": 8, "128": 16}


@dataclass(frozen=True)
class Loop:
    """A loop of a kernel's code. Its counts do not include the loops inside of it. Loops that only wait are left out."""

    start: int
    """The address of its first instruction, as in the SASS."""
    around: tuple[int, ...]
    """The addresses of the loops around it, the outermost first."""
    opcodes: dict[str, int]
    spill_bytes: int = 0
    """Bytes per thread that one pass through all of its instructions stores to and loads from local memory."""

    @property
    def depth(self) -> int:
        """1 for an outermost loop."""
        return len(self.around) + 1

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def kinds(self) -> dict[str, int]:
        return count_kinds(self.opcodes)


@dataclass(frozen=True)
class Binary:
    """The machine code of one GPU kernel, and how it is launched."""

    name: str
    arch: str
    registers: int
    """Registers per thread at the launch, by which blocks are placed."""
    setmaxnreg: tuple[int, ...]
    """What warpgroups change it to, in the order of the code; empty where none does."""
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    grid: tuple[int, ...]
    cluster: tuple[int, ...]
    block: tuple[int, ...]
    opcodes: dict[str, int]
    loops: tuple[Loop, ...]
    remarks: tuple[str, ...] = ()
    """What ptxas says about performance, such as serialised wgmma instructions."""

    @property
    def host_function(self) -> str:
        """What Mosaic calls the kernel in the program."""
        return f"{self.name}{_HOST_SUFFIX}"

    @property
    def threads(self) -> int:
        x, y, z = self.block
        return x * y * z

    @property
    def smem_bytes(self) -> int:
        return self.static_smem_bytes + self.dynamic_smem_bytes

    @property
    def spill_bytes_in_loops(self) -> int:
        return sum(loop.spill_bytes for loop in self.loops)

    @property
    def serialised(self) -> tuple[str, ...]:
        return tuple(remark for remark in self.remarks if "serialized" in remark)

    @property
    def steady_state(self) -> Loop | None:
        """The loop with the most matrix instructions, or the longest where none has any; None without loops.

        A loop around one that has matrix instructions has only the first and last steps, and does not count. Of two with
        as many the shorter one is taken: the other one is for blocks that a mask cuts.
        """
        products = [loop for loop in self.loops if _matrix(loop.opcodes)]
        outer = {start for loop in products for start in loop.around}
        inner = [loop for loop in products if loop.start not in outer]
        if inner:
            return max(inner, key=lambda loop: (_matrix(loop.opcodes), -loop.instructions))
        return max(self.loops, key=lambda loop: loop.instructions, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON, with what follows from them."""
        steady = self.steady_state
        return {
            **dataclasses.asdict(self),
            "threads": self.threads,
            "smem_bytes": self.smem_bytes,
            "spill_bytes_in_loops": self.spill_bytes_in_loops,
            "loops": [{**dataclasses.asdict(loop), "depth": loop.depth, "kinds": loop.kinds} for loop in self.loops],
            "steady_state": None if steady is None else {"start": steady.start, "kinds": steady.kinds},
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Binary":
        """The inverse of `dataclasses.asdict`, after JSON has made lists of the tuples."""
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data.items()}
        fields["loops"] = tuple(Loop(**loop | {"around": tuple(loop["around"])}) for loop in data["loops"])
        return Binary(**fields)


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel are resident on a multiprocessor, and what allows no more."""

    blocks: int
    limits: tuple[str, ...]
    warps: int


def count_kinds(opcodes: dict[str, int]) -> dict[str, int]:
    """The instructions of each kind, in the order of `KINDS`, without kinds that do not occur."""
    counts = dict.fromkeys(KINDS, 0)
    for opcode, count in opcodes.items():
        counts[_kind(opcode)] += count
    return {kind: count for kind, count in counts.items() if count}


def read_binaries(text: str) -> list[Binary]:
    """The kernels in what Mosaic printed: of each ptxas's report, then its SASS, then its host function."""
    resources, codes, launches = _resources(text), _codes(text), _launches(text)
    found = []
    # A name may occur several times: kernels are printed one after the other, so the n-th report has the n-th code.
    seen: collections.Counter[str] = collections.Counter()
    for entry, fields in resources:
        place, name = seen[entry], entry.removesuffix(_ENTRY_SUFFIX)
        seen[entry] += 1
        try:
            code, launch = codes[entry][place], launches[name][place]
        except (KeyError, IndexError):
            raise NotReadable(f"no machine code or no launch was printed for {entry}") from None
        found.append(Binary(name=name, **fields, **launch, **read_code(code)))
    return found


def occupancy(binary: Binary, chip: Chip) -> Occupancy:
    """From registers, shared memory and threads; clusters may leave multiprocessors without a block, which is not in it."""
    assert chip.sm_smem_bytes is not None
    assert chip.sm_threads is not None
    assert chip.sm_blocks is not None
    warps = -(-binary.threads // WARP_THREADS)
    # Registers are given to a block's warps in fours, one per partition, and to a warp in units of 256.
    warp_registers = -(-binary.registers * WARP_THREADS // 256) * 256
    smem = -(-binary.smem_bytes // 128) * 128 + BLOCK_RESERVED_SMEM
    most = {
        "registers": SM_REGISTERS // 4 // warp_registers // -(-warps // 4),
        "SMEM": chip.sm_smem_bytes // smem,
        "threads": chip.sm_threads // (warps * WARP_THREADS),
        "blocks": chip.sm_blocks,
    }
    blocks = min(most.values())
    return Occupancy(blocks, tuple(name for name, count in most.items() if count == blocks), blocks * warps)


def read_code(sass: str) -> dict[str, Any]:
    """`opcodes`, `setmaxnreg` and `loops` of the SASS of one kernel."""
    labels: dict[str, int] = {}
    lines: list[re.Match[str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.match(line):
            lines.append(instruction)
    if not lines:
        raise NotReadable("the machine code has no instructions")
    return {
        "opcodes": _count(lines),
        "setmaxnreg": tuple(int(value, 16) for value in _MAX_REGISTERS.findall(sass)),
        "loops": _loops(lines, labels),
    }


def _resources(text: str) -> list[tuple[str, dict[str, Any]]]:
    """ptxas's report of each kernel: its entry's name, and fields of `Binary`."""
    found, before = [], 0
    entries = list(_ENTRY.finditer(text))
    for place, entry in enumerate(entries):
        body = text[entry.end() : entries[place + 1].start() if place + 1 < len(entries) else len(text)]
        spills, registers = _SPILLS.search(body), _REGISTERS.search(body)
        if spills is None or registers is None:
            raise NotReadable(f"ptxas reported no registers for {entry[1]}")
        smem = _STATIC_SMEM.search(registers[0])
        fields = {
            "arch": entry[2],
            "registers": int(registers[1]),
            "stack_bytes": int(spills[1]),
            "spill_store_bytes": int(spills[2]),
            "spill_load_bytes": int(spills[3]),
            "static_smem_bytes": int(smem[1]) if smem else 0,
            # Remarks come before the entry that they are about.
            "remarks": tuple(f"{remark[2]} ({remark[1]})" for remark in _REMARK.finditer(text, before, entry.start())),
        }
        found.append((entry[1], fields))
        before = entry.end()
    return found


def _codes(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for match in _CODE.finditer(text):
        end = re.compile(r"^(?://-----|; ModuleID|ptxas )", re.M).search(text, match.end())
        found.setdefault(match[1], []).append(text[match.end() : end.start() if end else len(text)])
    return found


def _launches(text: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for host in _HOST.finditer(text):
        launch = _LAUNCH.search(text, host.end())
        if launch is None:
            raise NotReadable(f"no launch was printed for {host[1]}")
        numbers = [int(number) for number in re.findall(r"i32 (\d+)", launch[1])]
        grid, cluster, block = (tuple(numbers[place : place + 3]) for place in (0, 3, 6))
        sizes = {"grid": grid, "cluster": tuple(max(1, size) for size in cluster), "block": block}
        found.setdefault(host[1], []).append({**sizes, "dynamic_smem_bytes": numbers[9]})
    return found


def _kind(opcode: str) -> str:
    for kind, names in KINDS.items():
        for name in names:
            if opcode == name or (name.endswith("*") and opcode.startswith(name[:-1])):
                return kind
    return list(KINDS)[-1]


def _matrix(opcodes: dict[str, int]) -> int:
    counts = count_kinds(opcodes)
    return sum(counts.get(kind, 0) for kind in _MATRIX)


def _count(lines: Sequence[re.Match[str]]) -> dict[str, int]:
    return dict(collections.Counter(line[3] for line in lines).most_common())


def _spill_bytes(lines: Sequence[re.Match[str]]) -> int:
    """LDL and STL move 4 bytes, or what their suffix says in bits."""
    total = 0
    for line in lines:
        if line[3] in KINDS["spill"]:
            total += next((size for bits, size in _SPILL_BYTES.items() if bits in line[4].split(".")), 4)
    return total


def _successors(lines: Sequence[re.Match[str]], labels: dict[str, int]) -> list[list[int]]:
    """For each instruction, those that may follow it."""
    joins: dict[str, int] = {}  # Where threads that have diverged meet again, by the barrier register.
    result: list[list[int]] = []
    for place, line in enumerate(lines):
        guard, opcode, operands = line[2], line[3], line[5]
        target = _TARGET.search(operands)
        there = [labels[target[1]]] if target and labels.get(target[1], len(lines)) < len(lines) else []
        after = [place + 1] if place + 1 < len(lines) else []
        if opcode == "BSSY":
            joins[operands.split(",")[0]] = there[0] if there else place + 1
            result.append(after)
        elif opcode == "BSYNC":
            join = joins.get(operands)
            result.append([join, *(after if guard else [])] if join is not None and join < len(lines) else after)
        elif opcode == "BRA":
            conditional = guard is not None or "," in operands
            result.append([*there, *(after if conditional else [])])
        elif opcode in ("EXIT", "RET", "BRX", "KILL"):
            result.append(after if guard else [])
        elif opcode == "CALL":
            result.append([*after, *there])
        else:
            result.append(after)
    return result


def _loops(lines: Sequence[re.Match[str]], labels: dict[str, int]) -> tuple[Loop, ...]:
    following = _successors(lines, labels)
    leaders = {0} | {to for place, to_all in enumerate(following) for to in to_all if to_all != [place + 1]}
    leaders |= {place + 1 for place, to_all in enumerate(following) if to_all != [place + 1]}
    starts = sorted(place for place in leaders if place < len(lines))
    ends = [*starts[1:], len(lines)]
    block_of = {start: block for block, start in enumerate(starts)}
    edges = [[block_of[to] for to in following[end - 1]] for end in ends]
    bodies = _natural_loops(edges)

    def address(block: int) -> int:
        return int(lines[starts[block]][1], 16)

    innermost: dict[int, int] = {}
    for header, body in sorted(bodies.items(), key=lambda item: len(item[1]), reverse=True):
        innermost |= dict.fromkeys(body, header)
    found = []
    for header, body in bodies.items():
        own = [block for block in sorted(body) if innermost[block] == header]
        inside = [line for block in own for line in lines[starts[block] : ends[block]]]
        # The branch to itself behind the last EXIT, which pads the code, and tests that are repeated until they succeed.
        if len(inside) == 1 or (len(inside) <= _LONGEST_POLL and any(line[3] in _POLLED for line in inside)):
            continue
        others = [(len(other), each) for each, other in bodies.items() if header in other and each != header]
        around = tuple(address(each) for _, each in sorted(others, reverse=True))
        found.append(Loop(address(header), around, _count(inside), _spill_bytes(inside)))
    return tuple(sorted(found, key=lambda loop: loop.start))


def _natural_loops(edges: list[list[int]]) -> dict[int, set[int]]:
    """The blocks of each loop, by the block that it begins with."""
    order = _reverse_postorder(edges)
    position = {block: place for place, block in enumerate(order)}
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for to in edges[block]:
            before[to].append(block)
    dominator = _dominators(order, position, before)

    def dominates(one: int, other: int) -> bool:
        while other != one and other != order[0]:
            other = dominator[other]
        return other == one

    bodies: dict[int, set[int]] = {}
    for block in order:
        for header in edges[block]:
            if dominates(header, block):
                body = bodies.setdefault(header, {header})
                waiting = [block]
                while waiting:
                    one = waiting.pop()
                    if one not in body:
                        body.add(one)
                        waiting.extend(before[one])
    return bodies


def _reverse_postorder(edges: list[list[int]]) -> list[int]:
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(edges[0]))]
    while stack:
        block, rest = stack[-1]
        step = next((to for to in rest if to not in seen), None)
        if step is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(edges[step])))
    return order[::-1]


def _dominators(order: list[int], position: dict[int, int], before: dict[int, list[int]]) -> dict[int, int]:
    """The immediate dominator of each block that can be reached."""
    dominator = {order[0]: order[0]}

    def meet(one: int, other: int) -> int:
        while one != other:
            while position[one] > position[other]:
                one = dominator[one]
            while position[other] > position[one]:
                other = dominator[other]
        return one

    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            known = [each for each in before[block] if each in dominator]
            chosen = known[0]
            for each in known[1:]:
                chosen = meet(chosen, each)
            if dominator.get(block) != chosen:
                dominator[block], changed = chosen, True
    return dominator
