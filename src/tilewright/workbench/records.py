"""One schema for everything this project measures, with its provenance: chip, versions, commit and date.

A record is one line of JSON. Raw samples are kept, so that a later reader can compute another statistic than the median.
`kind` says what a record is; an estimate is never written under the kind of a measurement. A measurement that failed is a
record without samples, whose metric `failure` has the error in one line.
"""

import dataclasses
import datetime
import errno
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_origin

import jax

from tilewright.core.chip import Chip, Device
from tilewright.core.version import __version__

SCHEMA = 3
"""Schema 1 had one config per record, as text. Such records are read with that text among their metrics. Schema 2 had no
times on the device."""
Kind = Literal["bench", "check", "estimate", "tune"]
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy")


@dataclass(frozen=True)
class Provenance:
    """Where and when a record was made."""

    chip: str
    device_kind: str
    device_count: int
    versions: Mapping[str, str]
    commit: str | None
    """The commit of the checkout that ran, followed by "-dirty" if it had changes; None outside a checkout."""
    date: str
    """UTC, ISO 8601."""

    @staticmethod
    def here(device: Device) -> "Provenance":
        return Provenance(
            chip=Chip.of(device).name,
            device_kind=device.device_kind,
            device_count=jax.device_count(device.platform),
            versions=installed_versions(),
            commit=checkout_commit(),
            date=now(),
        )


def relative_spread(samples_s: tuple[float, ...]) -> float:
    """The interquartile range divided by the median; NaN of a single sample."""
    if len(samples_s) < 2:
        return float("nan")
    low, _, high = statistics.quantiles(samples_s, n=4)
    return (high - low) / statistics.median(samples_s)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measurement of one implementation on one case."""

    kind: Kind
    op: str
    implementation: str
    case: str
    dtype: str
    mode: Literal["forward", "forward+backward"]
    provenance: Provenance
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The config of each direction that ran ("forward", "backward") as JSON; `tilewright.configs.from_json` reads it back.
    Empty for a direction without block sizes, and for a peer."""
    config_sources: Mapping[str, str] = field(default_factory=dict)
    """Where each of them is from: "argument", "tuned", "tuned nearby" or "heuristic"."""
    samples_s: tuple[float, ...] = ()
    """Seconds per call, one figure per sample, as measured: wall time."""
    device_samples_s: tuple[float, ...] = ()
    """Seconds per call in which the device works, from the profiler's trace, with warm caches (device_time.py). Empty where
    there is no such time; the metric `no_device_time` has the reason."""
    device_cold_samples_s: tuple[float, ...] = ()
    """The same with cold caches, on a GPU."""
    kernels_s: Mapping[str, float] = field(default_factory=dict)
    """The device time of each kernel, in seconds per call, with warm caches."""
    metrics: Mapping[str, float | int | str | bool | None] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """The interquartile range divided by the median: 0.02 is two per cent."""
        return relative_spread(self.samples_s)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @staticmethod
    def from_json(line: str) -> "Record":
        """The record of a line. Raises `ValueError` that says what is wrong with it."""
        try:
            data: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError("it is not JSON, or was cut off") from error
        if not isinstance(data, dict):
            raise ValueError(f"it is a {type(data).__name__}, and not an object")
        schema = data.pop("schema", None)
        if schema == 1:
            if not isinstance(data.get("metrics"), dict) or not data.keys() >= {"config", "config_source"}:
                raise ValueError("one of schema 1 has metrics, config and config_source")
            data["metrics"] = {**data["metrics"], **{name: data.pop(name) for name in ("config", "config_source")}}
        elif schema not in (2, SCHEMA):
            raise ValueError(f"record schema={schema!r} is not {SCHEMA}; it was written by another version")
        _check_fields(Record, data, "")
        _check_fields(Provenance, data["provenance"], "provenance.")
        data["provenance"] = Provenance(**data["provenance"])
        for name in ("samples_s", "device_samples_s", "device_cold_samples_s"):
            data[name] = tuple(data.get(name, ()))
            if not all(isinstance(time, int | float) and 0 < time < float("inf") for time in data[name]):
                raise ValueError(f"{name} must be positive times in seconds")
        return Record(**data)


def _check_fields(kind: type[Any], data: Mapping[str, Any], within: str) -> None:
    """Raises where a field of a dataclass is missing in JSON, is of another type there, or is not known."""
    fields = {each.name: each for each in dataclasses.fields(kind)}
    for name, each in fields.items():
        optional = each.default is not dataclasses.MISSING or each.default_factory is not dataclasses.MISSING
        if name not in data and not optional:
            raise ValueError(f"it has no {within}{name}")
        kinds, what = _JSON_TYPES.get(each.type, _JSON_TYPES.get(get_origin(each.type), ((str,), "text")))
        if name in data and not isinstance(data[name], kinds):
            raise ValueError(f"{within}{name} is {json.dumps(data[name])}, and not {what}")
    for name in data.keys() - fields.keys():
        raise ValueError(f"{within}{name} is not a field of a record")


_JSON_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    Mapping: ((dict,), "an object"),
    Provenance: ((dict,), "an object"),
    tuple: ((list, tuple), "a list"),
    int: ((int,), "a number"),
    str | None: ((str, type(None)), "text"),
}
"""What JSON has for the types of a record's fields; the others are text."""

DECODE_SIZED_S = 200e-6
"""Below this wall time per call, what the host does to launch it is a large part of it, and varies."""


def comparable_samples(
    one: Record, other: Record
) -> tuple[tuple[float, ...], tuple[float, ...], Literal["device", "wall"]]:
    """The samples by which two records are compared, and which they are.

    Wall time, except that calls of the size of a decoding step are judged by the time on the device, if both have one.
    """
    small = min(one.median_s, other.median_s) < DECODE_SIZED_S
    if small and one.device_samples_s and other.device_samples_s:
        return one.device_samples_s, other.device_samples_s, "device"
    return one.samples_s, other.samples_s, "wall"


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Appends records to a JSONL file; they are on disk when this returns. Its folder is made if it does not exist.

    Where the last line was cut off, by a kill, it stays a line of its own.
    """
    _append(path, ("\n" if is_cut_off(path) else "") + "".join(record.to_json() + "\n" for record in records))


def is_cut_off(path: Path) -> bool:
    """Whether the last line of a file has no end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def write_durably(path: Path, text: str) -> None:
    """Replaces a file in one step, and waits until the disk has it: where it does not fit, the old one stays."""
    part = path.with_name(f".{path.name}.part")
    if path.exists() and not path.is_file():
        part = path  # A device or a pipe.
    elif part.exists():
        part.unlink()
    _append(part, text)
    if part != path:
        part.replace(path)


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data, before = text.encode(), path.stat().st_size if path.exists() else 0
    with path.open("ab", buffering=0) as file:
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if path.is_file():
                os.fsync(file.fileno())
        except OSError:
            _cut(path, before)  # A record is there as a whole, or not at all.
            raise


def try_destination(path: Path) -> None:
    """Raises `OSError` where a file cannot be written, as on a full or read-only disk. What it holds is not changed."""
    size = path.stat().st_size if path.exists() else None
    _append(path, "\n")
    if size is None:
        path.unlink()
    else:
        _cut(path, size)


def _cut(path: Path, size: int) -> None:
    if path.is_file():  # And not a device or a pipe.
        os.truncate(path, size)


def read_records(path: Path) -> Iterator[Record]:
    """The records of a JSONL file. Raises `ValueError` with the line where one cannot be read.

    A last line without an end that is no record was being written when its process was killed, and is left out.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield Record.from_json(line.decode())
                except UnicodeDecodeError as error:
                    raise ValueError(f"{path}: line {number} is not text; pass a file that --records wrote") from error
                except ValueError as error:
                    if number > 1 and not line.endswith(b"\n"):
                        return
                    raise ValueError(
                        f"{path}: line {number} is not a record ({error}); remove that line, or pass another file"
                    ) from error


def now() -> str:
    """The date and time, UTC, ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@functools.cache
def installed_versions() -> dict[str, str]:
    """The versions of the installed packages that a measurement depends on."""
    versions = {"tilewright": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def checkout_commit() -> str | None:
    """The commit of the checkout this package runs from, or None where it is installed rather than checked out."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", __file__)
    commit = git("rev-parse", "HEAD") if tracked else None
    if commit is None:
        return None
    return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
