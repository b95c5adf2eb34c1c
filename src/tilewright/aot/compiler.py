"""Compiles a JAX function for a TPU or GPU that is not attached, and reports the result.

The function is traced and lowered in this process. The compiler runs in a process of its own for each program: if it
crashes, hangs or is killed, that becomes a line of the report. Results are cached on disk, keyed by a hash of the program,
the chip, the compiler's version and the flags.

Estimates are labelled as such: the time of a TPU kernel's schedule if no copy is waited for, or the time of its copies at
the chip's bandwidth, whichever is longer. That is a lower bound, not a measurement. For a GPU kernel there is the machine
code, and no time: how often a loop runs and what it waits for is not in it.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tilewright.aot import worker
from tilewright.aot.diagnosis import diagnose
from tilewright.aot.program import UNNAMED, Kernel, NotTraceable, Program, lower
from tilewright.aot.sass import Binary, Occupancy, occupancy, read_binaries
from tilewright.aot.schedule import (
    Allocation,
    NotReadable,
    Schedule,
    custom_calls,
    dumped_kernels,
    read_schedule,
    read_vmem,
)
from tilewright.aot.toolchain import Toolchain, home
from tilewright.core.chip import SM_REGISTERS, Chip

TPUS = ("v4", "v5e", "v5p", "v6e", "v7x")
GPUS = ("h100", "h200", "b200")
"""The GPUs that Mosaic compiles for."""
# The smallest slice of each chip: programs for one device are compiled for it.
_TOPOLOGY = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "tpu7x:2x2x1"}
_DUMPS = "final_bundles|final_hlo-static-per-bundle-utilization"
# What Mosaic prints about each GPU kernel.
_PRINTED = ("PTXAS", "SASS", "HOST_LLVM")
_POLL_S = 0.2
_stop = threading.Event()
"""Set while `compile_each` stops its compiles."""
# A limit that the programs of whole steps exceed: the compiler then stops at memory assignment, and says what it needs.
_PROBE_MIB = 64
_NEEDED = re.compile(r"total memory required for HLO temporaries \(([\d.]+)([KMGT]?)\)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Part of the cache key: increase it when the contents of a cached result change.
_KEPT = 6
_COLLECTIVE = re.compile(
    r"[ )](all-gather|all-reduce|(?:ragged-)?all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


@dataclass(frozen=True)
class KernelReport:
    """The schedule of one Pallas kernel of a program, or on a GPU its machine code. Times are estimates."""

    name: str
    grid: tuple[int, ...]
    schedule: Schedule | None = None
    hbm_bytes: int | None = None
    compute_us: float | None = None
    """Estimate: the cycles of all its steps, without waiting, divided by the clock rate."""
    copy_us: float | None = None
    """Estimate: its HBM bytes divided by the device's bandwidth."""
    note: str = ""
    """Why an estimate is missing or incomplete."""
    binary: Binary | None = None
    """On a GPU: registers, spills, shared memory, loops and their instructions."""
    occupancy: Occupancy | None = None

    @property
    def floor_us(self) -> float | None:
        """Estimate: the longer of the two, or None where one is not known."""
        if self.compute_us is None or self.copy_us is None:
            return None
        return max(self.compute_us, self.copy_us)

    @property
    def bottleneck(self) -> tuple[str, float] | None:
        """The unit that bounds the kernel, and its utilization: the DMA where copies take longer than computing."""
        if self.schedule is None:
            return None
        if self.copy_us and self.compute_us and self.copy_us >= self.compute_us:
            return "DMA", 1.0
        unit = self.schedule.bottleneck
        return unit, self.schedule.busy[unit]

    @property
    def roofline_fraction(self) -> float | None:
        """Estimate: the time of the MXU's work alone or of the copies alone, whichever is longer, divided by the floor."""
        floor = self.floor_us
        if not floor or self.schedule is None or self.compute_us is None or self.copy_us is None:
            return None
        return max(self.compute_us * self.schedule.busy.get("MXU", 0.0), self.copy_us) / floor


@dataclass(frozen=True)
class CompileReport:
    """The result of compiling one program for one chip."""

    chip: str
    topology: str
    ok: bool
    stage: Literal["lower", "compile", "done"]
    """The stage that it reached."""
    seconds: float
    compiler: str = ""
    """Its name and version, such as "libtpu 0.0.50.1"."""
    cached: bool = False
    cause: str = ""
    remedy: str = ""
    error: str = ""
    """The compiler's full message, or the end of the worker's log."""
    code_bytes: int | None = None
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    """What results share with donated arguments."""
    peak_bytes: int | None = None
    """The most memory that is in use at a time, arguments included; None where the compiler does not say."""
    hlo: str = ""
    """The optimised program as text, where it was asked for. It is not part of `to_dict`."""
    kernels: tuple[KernelReport, ...] = ()
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    """The number of each kind of collective in a program for several devices, such as {"all-reduce": 1}. Like the
    schedules, it is read from what libtpu writes to disk; it is empty for GPUs."""

    @property
    def floor_us(self) -> float | None:
        """Estimate: the sum of the kernels' floors, or None where one is unknown or there are no kernels."""
        floors = [kernel.floor_us for kernel in self.kernels]
        return sum(floor for floor in floors if floor is not None) if floors and None not in floors else None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON. Every time of a kernel is under "estimate"."""
        data = dataclasses.asdict(self)
        del data["hlo"]
        for kernel, source in zip(data["kernels"], self.kernels, strict=True):
            if source.binary is not None:
                kernel["binary"] = source.binary.to_dict()
            unit, busy = source.bottleneck or (None, None)
            kernel["estimate"] = {
                "compute_us": kernel.pop("compute_us"),
                "copy_us": kernel.pop("copy_us"),
                "floor_us": source.floor_us,
                "roofline_fraction": source.roofline_fraction,
                "bottleneck": unit,
                "busy": busy,
            }
        data["estimate"] = {"floor_us": self.floor_us}
        return data


@dataclass(frozen=True)
class _Answer:
    """A worker's answer, with the schedules or the machine code of its kernels: what is cached on disk."""

    ok: bool
    error: str = ""
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    schedules: dict[str, Schedule] = dataclasses.field(default_factory=dict)
    unread: dict[str, str] = dataclasses.field(default_factory=dict)
    collectives: dict[str, int] = dataclasses.field(default_factory=dict)
    binaries: tuple[Binary, ...] = ()
    hlo: str = ""


@dataclass(frozen=True)
class _How:
    """What is asked of a compile beside its sizes."""

    read: bool = False
    """Whether to read what the compiler wrote or printed about the kernels."""
    hlo: bool = False
    """Whether to keep the optimised program."""
    probe: bool = False
    """Whether to stop at memory assignment (TPUs)."""

    @property
    def key(self) -> str:
        return " ".join(
            [_DUMPS if self.read else "", *["hlo"] * self.hlo, *[f"probe {_PROBE_MIB}"] * self.probe]
        ).strip()


@dataclass(frozen=True)
class MemoryProbe:
    """What a program needs of a device's memory, as the compiler assigns it."""

    bytes: int | None
    """Arguments, results and temporaries together; None where it does not compile."""
    seconds: float
    cause: str = ""
    """Why it does not compile."""


def compile(
    function: Callable[..., Any],
    *args: Any,
    chip: str | Chip = "v6e",
    topology: str | None = None,
    limit_s: float = 900.0,
    use_cache: bool = True,
    schedule: bool = True,
    hlo: bool = False,
    **kwargs: Any,
) -> CompileReport:
    """Compiles `function(*args, **kwargs)` for a TPU or GPU that is not attached.

    Args:
      function: any JAX function. For shardings over several devices, a jitted one that has them (its mesh may be a
        `jax.sharding.AbstractMesh`), or one under `jax.shard_map`.
      *args: arrays or `jax.ShapeDtypeStruct`s.
      chip: "v4", "v5e", "v5p", "v6e" or "v7x"; "h100", "h200" or "b200".
      topology: the slice, such as "2x4"; defaults to the chip's smallest. It must have as many devices as the program. For
        GPUs: slices, hosts of a slice and GPUs of a host, such as "1x1x8"; defaults to one host with as many as needed.
      limit_s: the compiler is stopped after this many seconds, and the report says so.
      use_cache: whether to take a cached result for the same program, chip, compiler and flags.
      schedule: whether to read the kernels' schedules, or on GPUs their machine code. Without schedules the report has no
        VMEM and no estimates, and long kernels compile in half the time: writing a schedule to disk takes as long as
        computing it.
      hlo: whether to keep the optimised program, as text (`report.hlo`).
      **kwargs: as `args`, by name.

    Returns:
      A report, with a cause and a remedy where the program does not compile. Exceptions are raised only where the machine
      lacks the compiler (`NotSetUp`) and for invalid arguments.
    """
    how = _How(read=schedule, hlo=hlo)
    return _compile(function, args, kwargs, _compilable(chip), topology, limit_s, how, use_cache=use_cache)


def probe_memory(
    function: Callable[..., Any],
    *args: Any,
    chip: str | Chip = "v6e",
    topology: str | None = None,
    limit_s: float = 900.0,
    use_cache: bool = True,
    **kwargs: Any,
) -> MemoryProbe:
    """Asks the compiler how much of a device's memory `function(*args, **kwargs)` needs. The arguments are `compile`'s.

    For a TPU the compiler stops at memory assignment, a small part of a compile: it is told that the device has next to
    nothing, and its error has the total. For a GPU there is no such stop, and it is a whole compile.
    """
    found = _compilable(chip)
    report = _compile(
        function, args, kwargs, found, topology, limit_s, _How(probe=found.platform == "tpu"), use_cache=use_cache
    )
    if report.ok:
        sizes = report.argument_bytes, report.output_bytes, report.temp_bytes
        whole = sum(size or 0 for size in sizes) - (report.alias_bytes or 0)
        return MemoryProbe(report.peak_bytes or whole, report.seconds)
    needed = _NEEDED.search(report.error)
    if needed is None:
        return MemoryProbe(None, report.seconds, report.cause)
    return MemoryProbe(int(float(needed[1]) * _UNITS[needed[2]]), report.seconds)


def _compile(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Chip,
    topology: str | None,
    limit_s: float,
    how: _How,
    *,
    use_cache: bool,
) -> CompileReport:
    toolchain = Toolchain.here(found.platform)
    where = _slice(found, topology, num_devices=1)
    began = time.perf_counter()

    def report(**fields: Any) -> CompileReport:
        return CompileReport(
            chip=found.name,
            topology=where.name,
            seconds=time.perf_counter() - began,
            compiler=toolchain.compiler,
            **fields,
        )

    try:
        program = lower(function, args, kwargs, found)
    except NotTraceable as error:
        cause, _, use = str(error).partition("; use ")  # Refusals by dispatch contain the remedy.
        supported = f"what Pallas supports on {found.platform.upper()}"
        remedy = f"use {use}" if use else f"write it with {supported}, or take the op's 'xla', which needs no kernel"
        return report(ok=False, stage="lower", cause=cause, remedy=remedy, error=str(error.__cause__))
    where = _slice(found, topology, program.num_devices)
    options = _compile_options(program.num_devices)
    key = _key(program, options, where, toolchain, how)
    kept = home() / "results" / f"{key}.json"
    answer = _read(kept) if use_cache else None
    cached = answer is not None
    if answer is None:
        answer = _run(program, options, where, found, toolchain, limit_s, how)
        if answer.ok or (how.probe and _NEEDED.search(answer.error)):
            with contextlib.suppress(OSError):  # A full disk loses the next run's time, not this one's report.
                _write(kept, answer)
    if not answer.ok:
        said = diagnose(answer.error, found, toolchain.version)
        return report(ok=False, stage="compile", cause=said.cause, remedy=said.remedy, error=answer.error)
    if found.platform == "gpu":
        kernels = tuple(
            KernelReport(each.name, each.grid, binary=each, occupancy=occupancy(each, found))
            for each in sorted(answer.binaries, key=lambda binary: _position(program, binary))
        )
    else:
        kernels = _kernel_reports(program.kernels, answer, found)
    found_there = {"kernels": kernels, "collectives": answer.collectives, "hlo": answer.hlo}
    return report(ok=True, stage="done", cached=cached, **found_there, **answer.sizes)


def compile_each(
    jobs: Sequence[Callable[[], CompileReport]], *, side_by_side: int
) -> Generator[tuple[int, concurrent.futures.Future[CompileReport]]]:
    """Runs compiles in parallel, and yields each when it has ended: its position in `jobs`, and its future.

    Each has a worker process, so threads suffice here. Closing the iterator, as Ctrl-C does, stops the others.
    """
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(1, side_by_side))
    places = {pool.submit(job): place for place, job in enumerate(jobs)}
    try:
        for done in concurrent.futures.as_completed(places):
            yield places[done], done
    finally:
        _stop.set()
        pool.shutdown(cancel_futures=True)
        _stop.clear()


def _compilable(chip: str | Chip) -> Chip:
    name = chip if isinstance(chip, str) else chip.name
    if name not in (*TPUS, *GPUS):
        raise ValueError(f"chip={name!r} cannot be compiled for; use one of {', '.join((*TPUS, *GPUS))}")
    return Chip.named(name)


@dataclass(frozen=True)
class _Slice:
    """The devices to compile for: a name, and for GPUs what the name does not say."""

    name: str
    description: dict[str, str] = dataclasses.field(default_factory=dict)


def _slice(chip: Chip, topology: str | None, num_devices: int) -> _Slice:
    if chip.platform == "tpu":
        smallest = _TOPOLOGY[chip.name]
        return _Slice(f"{smallest.partition(':')[0]}:{topology}" if topology else smallest)
    counts = topology or f"1x1x{num_devices}"
    return _Slice(f"{chip.name}:{counts}", {"topology": counts, "target_config": _target_config(chip)})


def _target_config(chip: Chip) -> str:
    """A GPU as XLA describes one that is not there: the text form of a GpuTargetConfigProto."""
    assert chip.compute_capability is not None
    assert chip.memory_bytes_per_s is not None
    assert chip.clock_hz is not None
    major, minor = chip.compute_capability
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": chip.smem_bytes,
        "shared_memory_per_core": chip.sm_smem_bytes,
        "threads_per_core_limit": chip.sm_threads,
        "core_count": chip.multiprocessors,
        # Without clock and cache, XLA takes computing for slow and leaves what it would fuse in kernels of its own.
        "fpus_per_core": chip.float32_units,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "l2_cache_size": chip.l2_bytes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.memory_bytes_per_s),
        "device_memory_size": chip.memory_bytes,
        "registers_per_core_limit": SM_REGISTERS,
        "registers_per_block_limit": SM_REGISTERS,
    }
    told = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return f"""gpu_device_info {{ {told} {capability} }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.device_kinds[0]}"
"""


def _compile_options(num_devices: int) -> bytes:
    from jax._src.lib import xla_client  # type: ignore[reportPrivateImportUsage]

    options = xla_client.CompileOptions()
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, num_devices
    build.use_spmd_partitioning = num_devices > 1
    build.use_shardy_partitioner = num_devices > 1
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(num_devices, dtype=np.int32)[None, :])
    return options.SerializeAsString()


def _key(program: Program, options: bytes, where: _Slice, toolchain: Toolchain, how: _How) -> str:
    digest = hashlib.sha256()
    for part in (
        program.code,
        options,
        where.name.encode(),
        *(f"{name}={value}".encode() for name, value in where.description.items()),
        toolchain.version.encode(),
        f"{how.key} {_KEPT}".encode(),
    ):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def _run(
    program: Program,
    options: bytes,
    where: _Slice,
    chip: Chip,
    toolchain: Toolchain,
    limit_s: float,
    how: _How,
) -> _Answer:
    """Compiles in a worker process, and returns an answer however that ends."""
    with tempfile.TemporaryDirectory(prefix="tilewright-aot-") as scratch:
        folder = Path(scratch)
        dumps = folder / "dumps"
        dumps.mkdir()
        (folder / "program").write_bytes(program.code)
        (folder / "options").write_bytes(options)
        (folder / "description").write_text(json.dumps(where.description))
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV") and not name.startswith("MOSAIC_GPU_")
        }
        environment |= {**dict(toolchain.environment), **_flags(chip, dumps, how)}
        names = ("description", "program", "options", "answer", *["optimized"] * how.hlo)
        files = [str(folder / name) for name in names]
        command = [*toolchain.command, worker.__file__, str(toolchain.library), where.name, *files]
        with (folder / "printed").open("w+b") as printed, (folder / "log").open("w+b") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=log, start_new_session=True
            )
            try:
                code, began = None, time.monotonic()
                while code is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(timeout=min(_POLL_S, limit_s))
                    if code is None and (_stop.is_set() or time.monotonic() - began >= limit_s):
                        return _Answer(ok=False, error=f"the compiler was stopped after {limit_s:g} s")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output = (folder / "printed").read_text(errors="replace")
        tail = (output + (folder / "log").read_text(errors="replace"))[-3000:]
        try:
            told = json.loads((folder / "answer").read_text())
            if not told["ok"]:
                return _Answer(ok=False, error=str(told["error"]))
            sizes = _sizes(told)
            hlo = _hlo_text((folder / "optimized").read_bytes()) if how.hlo else ""
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            ended = _ended(code)
            return _Answer(ok=False, error=f"the compile worker {ended} without an answer; the end of its log:\n{tail}")
        if not how.read:
            return _Answer(ok=True, sizes=sizes, hlo=hlo)
        if chip.platform == "gpu":
            try:
                binaries = read_binaries(output)
            except NotReadable as error:
                return _Answer(ok=False, error=f"it compiled, and what the compiler printed could not be read: {error}")
            return _Answer(ok=True, sizes=sizes, binaries=tuple(binaries), hlo=hlo)
        schedules, unread = _schedules(program.kernels, dumps, chip)
        return _Answer(
            ok=True, sizes=sizes, schedules=schedules, unread=unread, collectives=_collectives(dumps), hlo=hlo
        )


def _flags(chip: Chip, dumps: Path, how: _How) -> dict[str, str]:
    """Environment variables that tell the compiler what to write or print about kernels, and where to stop."""
    if chip.platform == "gpu":
        return {f"MOSAIC_GPU_DUMP_{what}": "1" for what in _PRINTED if how.read}
    flags = (
        f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true --xla_jf_dump_use_subdirectories=false "
        f"--xla_jf_dump_llo_pass_label_regex={_DUMPS}"
    )
    return {
        "LIBTPU_INIT_ARGS": flags if how.read else f"--xla_tpu_max_hbm_size_mib={_PROBE_MIB}" if how.probe else "",
        "TPU_SKIP_MDS_QUERY": "1",  # Without this it waits for a metadata server.
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # Clients that only compile do not share a device.
    }


def _position(program: Program, binary: Binary) -> int:
    """The place of a kernel in the program. XLA compiles kernels in an order of its own."""
    places = (place for place, name in enumerate(program.gpu_names) if name.endswith(binary.host_function))
    return next(places, len(program.gpu_names))


def _collectives(dumps: Path) -> dict[str, int]:
    programs = (program.read_text(errors="replace") for program in dumps.glob("*-hlo.txt"))
    return dict(collections.Counter(kind for text in programs for kind in _COLLECTIVE.findall(text)))


def _ended(code: int) -> str:
    if code < 0:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def _sizes(told: dict[str, Any]) -> dict[str, int]:
    sizes = {name: int(told[name]) for name in ("code_bytes", "argument_bytes", "output_bytes", "temp_bytes")}
    sizes |= {name: int(told.get(name, 0)) for name in ("alias_bytes", "peak_bytes")}
    # Not every compiler knows these.
    return {name: size for name, size in sizes.items() if size or name not in ("code_bytes", "peak_bytes")}


def _hlo_text(serialized: bytes) -> str:
    """An optimised program as text. It is a HloModuleProtoWithConfig, whose first field is the module."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    position, length = 1, 0
    for place in range(10):  # A varint.
        byte = serialized[position]
        length |= (byte & 0x7F) << (7 * place)
        position += 1
        if byte < 0x80:
            break
    return _hlo.HloModule.from_serialized_hlo_module_proto(serialized[position : position + length]).to_string()


def _dumped_names(kernels: tuple[Kernel, ...], dumped: list[str], calls: list[str]) -> dict[int, str]:
    """The compiler's name for each kernel, by the kernel's position in the program, where it can be found.

    It contains the kernel's name, between the names of transformations and a number. A kernel without a name is called
    after a function around it: such kernels are the remaining calls, if there are as many of them.
    """
    names: dict[int, str] = {}
    for place, kernel in enumerate(kernels):
        matching = [name for name in dumped if kernel.name in name and name not in names.values()]
        if matching:
            names[place] = min(matching, key=len)
    without = [place for place, kernel in enumerate(kernels) if place not in names and kernel.name == UNNAMED]
    left = [name for name in calls if name in dumped and name not in names.values()]
    if len(without) == len(left):
        names.update(zip(without, left, strict=True))
    return names


def _schedules(kernels: tuple[Kernel, ...], dumps: Path, chip: Chip) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Each kernel's schedule by its position in the program, and for the others why they could not be read."""
    found, vmem = dumped_kernels(dumps), read_vmem(dumps)
    schedules: dict[str, Schedule] = {}
    unread: dict[str, str] = {}
    names = _dumped_names(kernels, list(found), custom_calls(dumps))
    assert chip.mxus is not None
    assert chip.mxu_rows_per_cycle is not None
    for place, kernel in enumerate(kernels):
        name = names.get(place)
        if name is None:
            unread[str(place)] = "the compiler wrote no schedule for it (it may be the same as another kernel's)"
            continue
        bundles, utilization = found[name]
        try:
            schedule = read_schedule(
                kernel.name,
                bundles.read_text(),
                utilization.read_text(),
                grid_steps=kernel.steps,
                mxu_rows_per_cycle=chip.mxus * chip.mxu_rows_per_cycle,
            )
        except NotReadable as error:
            unread[str(place)] = f"its schedule could not be read: {error}"
            continue
        schedules[str(place)] = dataclasses.replace(schedule, vmem=vmem.get(name, ()))
    return schedules, unread


def _kernel_reports(kernels: tuple[Kernel, ...], answer: _Answer, chip: Chip) -> tuple[KernelReport, ...]:
    reports = []
    for place, kernel in enumerate(kernels):
        schedule = answer.schedules.get(str(place))
        notes = [note for note in (kernel.why_unknown, answer.unread.get(str(place))) if note]
        compute_us = None
        if schedule is not None and schedule.unknown:
            notes += [f"cannot estimate: {reason}" for reason in schedule.unknown]
        elif schedule is not None and (kernel.grid or not kernel.why_unknown):
            assert chip.clock_hz is not None
            cores = chip.cores_per_device if kernel.parallel else 1
            compute_us = schedule.cycles * -(-kernel.steps // cores) / chip.clock_hz * 1e6
        assert chip.bytes_per_s is not None
        copy_us = None if kernel.hbm_bytes is None else kernel.hbm_bytes / chip.bytes_per_s * 1e6
        reports.append(
            KernelReport(kernel.name, kernel.grid, schedule, kernel.hbm_bytes, compute_us, copy_us, "; ".join(notes))
        )
    return tuple(reports)


def _write(path: Path, answer: _Answer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written to another file and then renamed: another process may read it at any time.
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps(dataclasses.asdict(answer)))
    partial.replace(path)


def _read(path: Path) -> _Answer | None:
    try:
        data = json.loads(path.read_text())
        schedules = {
            place: Schedule(
                **schedule
                | {
                    "vmem": tuple(Allocation(**piece) for piece in schedule["vmem"]),
                    "unknown": tuple(schedule["unknown"]),
                }
            )
            for place, schedule in data.pop("schedules").items()
        }
        binaries = tuple(Binary.from_dict(binary) for binary in data.pop("binaries", ()))
        return _Answer(**data, schedules=schedules, binaries=binaries)
    except (OSError, ValueError, KeyError, TypeError):
        return None
