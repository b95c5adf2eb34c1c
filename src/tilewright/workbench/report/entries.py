"""Reads what the workbench wrote, of any version, into entries: measurements, estimates, checks and trials of a tuner.

It is lenient: a line that is none of them is noted, with its place, and the rest is read.
"""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from tilewright.core.case import Case
from tilewright.core.chip import CHIPS, Chip
from tilewright.core.dispatch import registered
from tilewright.workbench.peers.registry import peers
from tilewright.workbench.records import Record
from tilewright.workbench.tables import flat_record

Kind = Literal["measured", "estimate"]
_BY_KIND = {kind: chip for chip in CHIPS for kind in chip.device_kinds}
NOT_SAID = "not said"
"""What a line of an earlier run does not have."""
_CHOSEN = "chosen"
_COMPUTED = ("median_s", "spread")  # What --json adds to the fields of a record.
# What a tuner may call a trial that counts.
_FINE = ("ok", "measured", "estimated", "timed", "better", "kept", "slow", "slower", "worse", _CHOSEN)


@dataclass(frozen=True)
class MachineCode:
    """What the compiler made of one kernel for a GPU."""

    kernel: str
    registers: int
    """Per thread."""
    smem_bytes: int
    blocks: int
    """That a multiprocessor holds at a time."""
    spilled_bytes: int
    spilled_in_loops_bytes: int
    steady_state: int | None
    """Instructions of the loop in which it spends its time; None without loops."""


@dataclass(frozen=True)
class Entry:
    """One measurement or estimate of one implementation on one case."""

    kind: Kind
    op: str
    case: str
    dtype: str
    mode: str
    implementation: str
    chip: str
    source: str
    """The file that it was read from."""
    device_kind: str = ""
    date: str = ""
    commit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    wall_s: float | None = None
    """Median; of an estimate, a lower bound."""
    spread: float | None = None
    device_s: float | None = None
    cold_s: float | None = None
    kernels_s: Mapping[str, float] = field(default_factory=dict)
    flops: float | None = None
    bytes: float | None = None
    """The least work of a call."""
    temp_bytes: float | None = None
    peer: bool = False
    agrees: bool | None = None
    error: float | None = None
    error_bound: float | None = None
    error_in: str = ""
    failure: str = ""
    not_judged: str = ""
    no_device_time: str = ""
    tokens: float | None = None
    config: str = ""
    config_source: str = ""
    machine_codes: tuple[MachineCode, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """What it is a measurement of; a later one replaces an earlier one with the same key."""
        return (self.kind, self.chip, self.op, self.case, self.dtype, self.mode, self.implementation)

    @property
    def group(self) -> tuple[str, ...]:
        """What it is compared within."""
        return (self.kind, self.chip, self.op, self.case, self.dtype, self.mode)

    @property
    def judged_s(self) -> float | None:
        """The time that it is judged by on a roofline: on the device where that is known, with cold caches if measured.

        A roofline counts the bytes of the memory that is behind the caches.
        """
        return next((each for each in (self.cold_s, self.device_s) if each is not None), self.wall_s)

    @property
    def floor_s(self) -> float | None:
        """The least time that the chip needs for the work, by its peaks; None where one of them is not known."""
        peaks = chip_peaks(self.chip, self.dtype)
        if self.flops is None or self.bytes is None or peaks is None:
            return None
        return max(self.flops / peaks[0], self.bytes / peaks[1])

    @property
    def of_ceiling(self) -> float | None:
        """The floor divided by the time: 1 is the roofline."""
        return None if not self.floor_s or not self.judged_s else self.floor_s / self.judged_s


@dataclass(frozen=True)
class Check:
    """The verdict on one implementation on one case, from a run against the oracle."""

    op: str
    case: str
    dtype: str
    implementation: str
    chip: str
    ok: bool
    worst: str
    """The quantity that came closest to its bound, or went furthest beyond it."""
    error: float | None
    bound: float | None
    interpreted: bool


@dataclass(frozen=True)
class Trial:
    """One config that a tuner tried."""

    op: str
    case: str
    dtype: str
    implementation: str
    direction: str
    chip: str
    kind: Kind
    config: str
    verdict: str
    reason: str
    seconds: float | None
    heuristic_s: float | None
    """Of the config that was chosen: the time of the heuristic's, beside it."""
    date: str
    versions: tuple[str, ...]
    """Of the kernel's source and of jax: a search goes on from the trials of its own, and from no others."""

    @property
    def search(self) -> tuple[str, ...]:
        """The search that it was part of."""
        return (self.op, self.case, self.dtype, self.implementation, self.direction, self.chip, self.kind)

    @property
    def counts(self) -> bool:
        """Whether its time may be compared: a wrong or failed candidate has none that counts."""
        return self.seconds is not None and self.verdict in _FINE


@dataclass
class Found:
    """What was read from some files."""

    entries: list[Entry] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    """How many things each file had."""
    unread: list[str] = field(default_factory=list)
    """Places of lines that are none of these, and why."""
    repeated: int = 0
    """How many were read before, as from a copy of a file: they count once."""

    @property
    def latest(self) -> list[Entry]:
        """The last entry of each key, in the order of the files."""
        return list({entry.key: entry for entry in sorted(self.entries, key=lambda entry: entry.date)}.values())


def chip_peaks(chip: str, dtype: str) -> tuple[float, float] | None:
    """FLOP/s and bytes/s of one device of a chip, where both are known."""
    known = next((each for each in CHIPS if each.name == chip), None)
    flops, moved = (known.flops_per_s(dtype), known.bytes_per_s) if known else (None, None)
    return (flops, moved) if flops and moved else None


def read_files(paths: Iterable[Path]) -> Found:
    """Reads JSONL files of records and JSON files of `compile --out` and of `--json`, and those in folders."""
    found, read, known = Found(), set[Path](), set[str]()
    for path in paths:
        inside = (
            sorted(each for each in path.rglob("*") if each.suffix in (".jsonl", ".json")) if path.is_dir() else [path]
        )
        for file in inside:
            if file.resolve() in read:
                continue
            read.add(file.resolve())
            before, notes = _count(found), len(found.unread)
            for place, data in _objects(file, found.unread):
                try:
                    _add(found, data, str(file), known)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    found.unread.append(f"{place}: {type(error).__name__}: {error}")
            if (count := _count(found) - before) or not path.is_dir():
                found.files[str(file)] = count
            elif file.suffix == ".json":
                del found.unread[notes:]  # Some other tool's: what the caller named is the folder.
            elif len(found.unread) > notes + 1:
                found.unread[notes:] = [f"{file}: none of its lines is a record"]
    return found


def _count(found: Found) -> int:
    return len(found.entries) + len(found.checks) + len(found.trials)


def _objects(path: Path, unread: list[str]) -> Iterator[tuple[str, Any]]:
    """Each object of a file, and its place."""
    text = path.read_text(errors="replace")
    if path.suffix == ".json":
        try:
            data = json.loads(text)
        except ValueError as error:
            unread.append(f"{path}: {error}")
            return
        if isinstance(data, dict):  # The document of a verb's --json has a list of them.
            data = data.get("records", data.get("reports", [data]))
        if not isinstance(data, list):
            unread.append(f"{path}: it has no records")
            return
        for number, each in enumerate(data, 1):
            yield f"{path}: {number}", each
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except ValueError as error:  # As of a line that a killed process left unfinished.
                unread.append(f"{path}:{number}: {error}")


def _add(found: Found, data: Any, source: str, known: set[str]) -> None:
    """Adds an object of a file, unless it is `known`: the text of each that was added."""
    if not isinstance(data, dict) or "op" not in data:
        raise ValueError("it is not a record: it has no op")
    is_record = "samples_s" in data and "schema" in data
    if is_record:
        data = {name: value for name, value in data.items() if name not in _COMPUTED}
    text = json.dumps(data, sort_keys=True)
    if text in known:
        found.repeated += 1
        return
    known.add(text)
    if is_record:
        record = Record.from_json(json.dumps(data))
        if "outcome" in record.metrics:
            found.trials.append(_trial(record))
        elif record.kind == "check":
            found.checks.append(_check(record))
        else:
            found.entries.append(_entry(record, source))
    elif "estimate" in data and "kernels" in data:
        found.entries.append(_compiled(data, source))
    else:
        found.entries.append(_loose(data, source))


def _number(value: Any) -> float | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _configs(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """Block sizes as a person reads them: "forward: block_q=128"; the name of the config's class is left out."""

    def one(config: Mapping[str, Any]) -> str:
        return ", ".join(f"{name}={value}" for name, value in config.items() if name != "config" and value is not None)

    return "; ".join(f"{direction}: {one(config)}" for direction, config in configs.items() if one(config))


def _entry(record: Record, source: str) -> Entry:
    metrics, where = record.metrics, record.provenance
    wall = statistics.median(record.samples_s) if record.samples_s else None
    spread = _number(record.spread) if len(record.samples_s) > 1 else None
    flops_per_s, bytes_per_s = (_number(metrics.get(name)) for name in ("flops_per_s", "bytes_per_s"))
    work = _work(record.op, record.case, record.dtype, record.mode)
    agrees = metrics.get("agrees")
    estimate = _number(metrics.get("estimate_s"))
    return Entry(
        kind="estimate" if record.kind == "estimate" else "measured",
        op=record.op,
        case=record.case,
        dtype=record.dtype,
        mode=record.mode,
        implementation=record.implementation,
        chip=where.chip,
        source=source,
        device_kind=where.device_kind,
        date=where.date,
        commit=_text(where.commit),
        versions=where.versions,
        wall_s=wall if wall is not None else estimate,
        spread=spread,
        device_s=_number(metrics.get("device_s")),
        cold_s=_number(metrics.get("device_cold_s")),
        kernels_s=record.kernels_s,
        flops=flops_per_s * wall if flops_per_s and wall else work[0],
        bytes=bytes_per_s * wall if bytes_per_s and wall else work[1],
        temp_bytes=_number(metrics.get("temp_bytes")),
        peer=bool(metrics.get("peer")),
        agrees=agrees if isinstance(agrees, bool) else None,
        error=_number(metrics.get("error")),
        error_bound=_number(metrics.get("error_tolerance")),
        error_in=_text(metrics.get("error_in")),
        failure=_text(metrics.get("failure")),
        not_judged=_text(metrics.get("not_judged")),
        no_device_time=_text(metrics.get("no_device_time")),
        tokens=_number(metrics.get("tokens")),
        config=_configs(record.configs),
        config_source=", ".join(dict.fromkeys(record.config_sources.values())),
    )


def _check(record: Record) -> Check:
    """Its metrics have two figures of each quantity: "<quantity>: relative error" and "<quantity>: bound"."""
    metrics, end = record.metrics, ": relative error"
    pairs = {
        name.removesuffix(end): (_number(value), _number(metrics.get(f"{name.removesuffix(end)}: bound")))
        for name, value in metrics.items()
        if name.endswith(end)
    }

    def share(quantity: str) -> float:
        error, bound = pairs[quantity]
        return math.inf if error is None else error / bound if bound else 0.0

    worst = max(pairs, key=share, default="")
    error, bound = pairs.get(worst, (None, None))
    return Check(
        record.op,
        record.case,
        record.dtype,
        record.implementation,
        record.provenance.chip,
        bool(metrics.get("ok")),
        worst,
        error,
        bound,
        bool(metrics.get("interpreted")),
    )


def _trial(record: Record) -> Trial:
    metrics = record.metrics
    direction = _text(metrics.get("direction"))
    chosen = {direction: record.configs[direction]} if direction in record.configs else record.configs
    config = _configs(chosen)
    estimate = _number(metrics.get("estimate_s"))
    return Trial(
        op=record.op,
        case=record.case,
        dtype=record.dtype,
        implementation=record.implementation,
        direction=direction,
        chip=record.provenance.chip,
        kind="estimate" if record.kind == "estimate" else "measured",
        config=config.removeprefix(f"{direction}: "),
        verdict=_text(metrics["outcome"]),
        reason=_text(metrics.get("reason")),
        seconds=statistics.median(record.samples_s) if record.samples_s else estimate,
        heuristic_s=_number(metrics.get("heuristic_s")),
        date=record.provenance.date,
        versions=(
            _text(metrics.get("source")),
            *(record.provenance.versions.get(name, "") for name in ("jax", "jaxlib")),
        ),
    )


def _compiled(data: Mapping[str, Any], source: str) -> Entry:
    """A report of `tilewright compile --out`."""
    floor = _number((data["estimate"] or {}).get("floor_us"))
    chip = Chip.named(data["chip"])
    work = _work(data["op"], data["case"], data["dtype"], data["mode"])
    kernels = {
        each["name"]: floor_us / 1e6
        for each in data["kernels"]
        if (floor_us := _number((each.get("estimate") or {}).get("floor_us"))) is not None
    }
    return Entry(
        kind="estimate",
        op=data["op"],
        case=data["case"],
        dtype=data["dtype"],
        mode=data["mode"],
        implementation=f"pallas_{chip.platform}",
        chip=chip.name,
        source=source,
        device_kind="none: compiled only",
        date=_text(data.get("date")),
        commit=_text(data.get("commit")),
        versions=data.get("versions") or {},
        wall_s=None if floor is None else floor / 1e6,
        kernels_s=kernels,
        flops=work[0],
        bytes=work[1],
        temp_bytes=_number(data.get("temp_bytes")),
        failure="" if data.get("ok") else _text(data.get("cause")),
        machine_codes=tuple(
            MachineCode(
                each["name"],
                each["binary"]["registers"],
                each["binary"]["smem_bytes"],
                each["occupancy"]["blocks"],
                each["binary"]["spill_store_bytes"] + each["binary"]["spill_load_bytes"],
                each["binary"]["spill_bytes_in_loops"],
                None
                if each["binary"]["steady_state"] is None
                else sum(each["binary"]["steady_state"]["kinds"].values()),
            )
            for each in data["kernels"]
            if each.get("binary") is not None
        ),
    )


def _loose(data: Mapping[str, Any], source: str) -> Entry:
    """A line of a run whose samples were not kept, such as {"op": ..., "case": ..., "median_ms": ...}."""
    flat = flat_record(data)
    wall = _number(flat.get("median_s"))
    if wall is None:
        raise ValueError("it has an op, and neither samples nor a median")
    device = _text(flat.get("device"))
    chip = _BY_KIND[device].name if device in _BY_KIND else _text(flat.get("chip")) or NOT_SAID
    dtype, mode = _text(flat.get("dtype")) or NOT_SAID, _text(flat.get("mode")) or "forward"
    work = _work(data["op"], _text(flat.get("case")), dtype, mode)
    implementation = _text(flat.get("implementation")) or NOT_SAID
    return Entry(
        kind="measured",
        op=data["op"],
        case=_text(flat.get("case")),
        dtype=dtype,
        mode=mode,
        implementation=implementation,
        peer=implementation.split()[0] in peers(),
        chip=chip,
        source=source,
        device_kind=device,
        date=_text(flat.get("date")),
        versions={"jax": str(flat["jax"])} if "jax" in flat else {},
        wall_s=wall,
        flops=work[0],
        bytes=work[1],
        temp_bytes=_number(flat.get("temp_bytes")),
        tokens=_number(flat.get("tokens")),
    )


def find_case(op: str, case: str) -> Case | None:
    """A case of the registry; None where this version has no such op or case."""
    found = registered().get(op)
    return None if found is None else next((each for each in found.cases if each.name == case), None)


def _work(op: str, case: str, dtype: str, mode: str) -> tuple[float | None, float | None]:
    """The least FLOPs and bytes of a call, where the registry has its case."""
    found = find_case(op, case)
    if found is None or dtype not in ("float32", "bfloat16"):
        return None, None
    work = (found.work_grad if mode == "forward+backward" else found.work)(jnp.dtype(dtype).itemsize)
    return work.flops, work.bytes
