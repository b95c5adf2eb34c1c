"""Tuned configs: the tables, and how dispatch looks one up.

A table is a JSON file per chip and op, `<chip>/<op>.json`. The package has some under `tilewright/tuned`, and
`tilewright tune` writes to a folder of the user's (`user_tables`). Each entry is the config of one pass (implementation and
direction) for one shape bucket (`Call.bucket`), with what was measured or estimated of it and where.

Where the caller names no config, a pass takes the entry of the call's own bucket. Without one it takes what tuning changed
in the nearest bucket, up to a factor of four away over all sizes together: the heuristic's config of this call, with the
fields in which that entry's config differs from the heuristic's of its own bucket. `Config.one_size_fields`, such as
`splits`, are left out: they divide the work of one size. The other fields are the heuristic's for good reason: a block for
32 heads can be a third slower for 64. Where that does not fit the call, it takes the heuristic's.
A process reads a table once, when an op is first traced for the chip.

A table that cannot be read, or an entry that was changed by hand, is a warning, and is treated as not there.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tilewright.core.call import bucket_text
from tilewright.core.chip import Chip
from tilewright.core.config import Config

SCHEMA = 1
Direction = Literal["forward", "backward"]
Kind = Literal["measured", "estimated"]
_PACKAGE = str(Path(__file__).parent.parent)
PACKAGE_TABLES = Path(__file__).resolve().parent.parent / "tuned"
# Doublings between a call's bucket and a nearby one that still lends its config, summed over all sizes.
_NEARBY = 2.0


def user_tables() -> Path:
    """The folder of the user's tables: $TILEWRIGHT_TUNED, or one in the user's cache."""
    if given := os.environ.get("TILEWRIGHT_TUNED"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilewright" / "tuned"


def chip_folder(chip: Chip) -> str:
    """The name of a chip's folder: the chip's own, and for a chip that is not in the table, that of its device kind."""
    if chip.name != "unknown":
        return chip.name
    return re.sub(r"[^a-z0-9]+", "-", (chip.device_kinds or ("unknown",))[0].lower()).strip("-")


def table_path(folder: Path, chip: str, op: str) -> Path:
    return folder / chip / f"{op}.json"


class DamagedTable(ValueError):
    """A table, or an entry of one, is not what this version writes. The text says how."""


class DamagedTableWarning(RuntimeWarning):
    """A table, or entries of one, are not used."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The config of one pass for one shape bucket, and what is known of it."""

    implementation: str
    direction: Direction
    bucket: Mapping[str, Any]
    """Sizes and properties of the calls that it is for, as `Call.bucket` has them, without those that are None or
    False."""
    config: Mapping[str, Any]
    """As JSON, with the name of its class."""
    kind: Kind
    mode: str
    """What was timed: "forward", or "forward+backward", with the config of the other direction fixed."""
    seconds: float
    """The median of the samples, or the estimate."""
    samples_s: tuple[float, ...] = ()
    heuristic_s: float | None = None
    """The heuristic's config, timed in turns with this one; or its estimate."""
    compile_s: float | None = None
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    on_chip_bytes: Mapping[str, int] = field(default_factory=dict)
    """VMEM or shared memory of each kernel, by the memory model."""
    error: Mapping[str, Any] = field(default_factory=dict)
    """The largest error of any output or gradient as a fraction of its bound, in which quantity, and against what."""
    case: str = ""
    clock: str | None = None
    """What the times are of: "wall", calls as the host sees them; "device", what runs on the device; None for estimates."""
    heuristic: Mapping[str, Any] | None = None
    """The heuristic's config for these calls, as JSON; None in an entry that lends its whole config to nearby calls."""
    search: Mapping[str, Any] = field(default_factory=dict)
    """What was searched: `reach` (all, or neighbours), how many configs were `tried`, `of` how many, and whether the search
    was `complete`, and not ended by its budget."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """chip, device_kind, versions, source (a hash of the kernel's modules), commit and date."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.implementation, self.direction, bucket_text(self.bucket)

    @property
    def gain(self) -> float | None:
        """How many times as fast as the heuristic's config."""
        return None if not self.heuristic_s else self.heuristic_s / self.seconds

    @property
    def is_gain(self) -> bool:
        """Whether it is better than the heuristic's config. If not it is that config, since nothing better was found."""
        return self.heuristic_s is None or self.seconds < self.heuristic_s

    @property
    def origin(self) -> str:
        return f"{self.kind} on {self.provenance.get('chip', '?')}, {str(self.provenance.get('date', '?'))[:10]}"

    def kept_out_by(self, other: "Entry | None") -> str | None:
        """Why another entry for the same calls stays; None where this one takes its place.

        It takes that of an older one, but not a measured one's where this is an estimate.
        """
        if other is None or self.kind != other.kind:
            return None if other is None or self.kind == "measured" else "estimated where a measurement is there"
        if self == other:
            return "there already"
        is_older = str(self.provenance.get("date", "")) < str(other.provenance.get("date", ""))
        return "older than what is there" if is_older else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object, with a checksum of the rest: what is edited by hand was not measured."""
        data = dataclasses.asdict(self) | {"samples_s": [_rounded(sample) for sample in self.samples_s]}
        data |= {"bucket": _given(self.bucket), "seconds": _rounded(self.seconds)}
        data |= {"heuristic_s": None if self.heuristic_s is None else _rounded(self.heuristic_s)}
        return data | {"checksum": _checksum(data)}

    @staticmethod
    def from_json(data: Any) -> "Entry":
        """The entry of a JSON object. Raises `DamagedTable` where it is none, or was changed."""
        if not isinstance(data, Mapping):
            raise DamagedTable(f"{data!r} is not an entry")
        fields = {name: value for name, value in data.items() if name != "checksum"}
        if data.get("checksum") != _checksum(fields):
            raise DamagedTable("its checksum does not match, so it was changed after it was written")
        sound = (
            isinstance(fields.get("bucket"), Mapping)
            and isinstance(fields.get("config"), Mapping)
            and isinstance(fields.get("seconds"), float)
            and fields.get("direction") in ("forward", "backward")
            and fields.get("kind") in ("measured", "estimated")
        )
        if not sound:
            raise DamagedTable("it has values that this version does not write")
        try:
            values: Any = fields | {"samples_s": tuple(fields.get("samples_s", ()))}
            return Entry(**values)
        except TypeError as error:  # A field that is not known, or is missing.
            raise DamagedTable(str(error)) from error


def _given(bucket: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in bucket.items() if value is not None and value is not False}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.5g}")


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def table_text(op: str, chip: str, entries: Iterable[Entry]) -> str:
    """The text of a table."""
    lines = (json.dumps(entry.to_json()) for entry in sorted(entries, key=lambda entry: entry.key))
    head = json.dumps({"schema": SCHEMA, "op": op, "chip": chip})[:-1]
    return f'{head}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def parse_table(text: str, op: str | None = None, chip: str | None = None) -> tuple[str, str, list[Entry], list[str]]:
    """The op, the chip and the entries of a table, and what is wrong with each entry that was left out.

    Raises `DamagedTable` where the whole table is not what this version writes, or is not that of `op` and `chip`.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise DamagedTable(f"it is not JSON, or was cut off ({error})") from error
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise DamagedTable("it is not a table of tuned configs")
    if data.get("schema") != SCHEMA:
        raise DamagedTable(f"its schema is {data.get('schema')!r} and this version reads {SCHEMA}")
    for name, wanted in (("op", op), ("chip", chip)):
        if not isinstance(data.get(name), str) or wanted not in (None, data[name]):
            if data.get(name) is None:
                raise DamagedTable(f"it does not say which {name} it is for")
            raise DamagedTable(f"it is for {name} {data[name]!r}" + ("" if wanted is None else f", not {wanted!r}"))
    entries: list[Entry] = []
    wrong: list[str] = []
    for place, each in enumerate(data["entries"]):
        try:
            entries.append(Entry.from_json(each))
        except DamagedTable as error:
            wrong.append(f"entry {place + 1}: {error}")
    return data["op"], data["chip"], entries, wrong


def read_table(folder: Path, chip: str, op: str) -> list[Entry]:
    """The entries of a table; none where there is no file. What cannot be read is one warning, and is left out."""
    path = table_path(folder, chip, op)
    try:
        _, _, entries, wrong = parse_table(path.read_text(), op, chip)
    except FileNotFoundError:
        return []
    except (DamagedTable, OSError, UnicodeDecodeError) as error:
        _warn(f"the tuned table {path} is ignored: {error}; the heuristic chooses configs instead", op)
        return []
    if wrong:
        _warn(
            f"{len(wrong)} of {len(wrong) + len(entries)} entries of the tuned table {path} are ignored ({wrong[0]}); the "
            f"heuristic chooses configs instead",
            op,
        )
    return entries


def _warn(what: str, op: str) -> None:
    remedy = f"Restore the file, or remove it and run `tilewright tune {op}`."
    warnings.warn(f"{what}. {remedy}", DamagedTableWarning, skip_file_prefixes=(_PACKAGE,))  # At the caller's line.


@dataclass(frozen=True)
class Found:
    """A config from a table, and how it was found."""

    config: Config
    entry: Entry
    exact: bool

    def config_with(self, heuristic: Callable[[], Config]) -> Config | None:
        """The config for a call whose heuristic's config `heuristic` computes.

        Where the search of the call's bucket kept the heuristic's, it is that of this call: a bucket has other lengths than
        the one that was timed. None where what tuning changed nearby is of one size only, or is not valid here.
        """
        tuned_from = self.entry.heuristic
        if self.exact and not self.entry.is_gain:
            return heuristic()
        if self.exact or tuned_from is None:
            return self.config
        own = heuristic()
        changed = {
            name: value
            for name, value in self.entry.config.items()
            if value != tuned_from.get(name) and name not in own.one_size_fields
        }
        if not changed:
            return None
        try:
            return read_config(own.to_json() | changed, type(own))
        except ValueError:
            return None

    @property
    def as_timed(self) -> str:
        """What the entry is of: its bucket, and where and when it was timed or estimated."""
        return f"{bucket_text(self.entry.bucket)}, {self.entry.origin}"

    def __str__(self) -> str:
        return self.entry.origin if self.exact else f"for {self.as_timed}"


def read_config(fields: Mapping[str, Any], kind: type[Config]) -> Config:
    """The config of JSON fields. Raises ValueError where they are not those of a config of this kind."""
    if fields.get("config") != kind.__name__:
        raise ValueError(f"{fields.get('config')!r} is not {kind.__name__}")
    try:
        return kind(**{name: value for name, value in fields.items() if name != "config"})
    except TypeError as error:
        raise ValueError(str(error)) from error


class _PassTable:
    """The entries of one pass: by their bucket, and by what a bucket has beside sizes."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.exact: dict[str, Entry] = {}
        alike: dict[Any, list[tuple[tuple[float, ...], Entry]]] = {}
        # Of equally near entries the first is taken, and measured ones come first.
        for entry in sorted(entries, key=lambda entry: (entry.kind == "estimated", entry.key)):
            self.exact[entry.key[2]] = entry
            if entry.is_gain:  # Where nothing beats the heuristic, other sizes are better off with their own heuristic.
                rest, sizes = _split(_given(entry.bucket))
                alike.setdefault(rest, []).append((sizes, entry))
        self.alike = {
            rest: (np.array([sizes for sizes, _ in each]), [entry for _, entry in each]) for rest, each in alike.items()
        }

        self._found: dict[str, list[Found]] = {}

    def candidates(self, bucket: Mapping[str, Any], kind: type[Config]) -> list[Found]:
        """The config of this bucket, and those of nearby ones, the nearest first. One that is not valid is left out."""
        key = bucket_text(bucket)
        if (known := self._found.get(key)) is not None:
            return known
        found = self._found[key] = []
        for entry, exact in self._search(key, _given(bucket)):
            # `tilewright tuned` calls an entry stale that another version of the kernel has left.
            with contextlib.suppress(ValueError):
                found.append(Found(read_config(entry.config, kind), entry, exact))
        return found

    def _search(self, key: str, bucket: Mapping[str, Any]) -> list[tuple[Entry, bool]]:
        own = self.exact.get(key)
        found = [] if own is None else [(own, True)]
        rest, sizes = _split(bucket)
        if rest in self.alike:
            others, entries = self.alike[rest]
            distances = np.abs(others - np.array(sizes)).sum(axis=1)
            (nearby,) = np.nonzero(distances <= _NEARBY)
            order = nearby[np.argsort(distances[nearby], kind="stable")]
            found += [(entries[place], False) for place in order if entries[place] is not own]
        return found


def _split(bucket: Mapping[str, Any]) -> tuple[Any, tuple[float, ...]]:
    """What must be equal in two buckets for one to lend its config (dtypes, flags, names of sizes); and log2 of sizes."""
    sizes = {name: value for name, value in bucket.items() if isinstance(value, int) and not isinstance(value, bool)}
    rest = tuple((name, value) for name, value in bucket.items() if name not in sizes)
    return (rest, tuple(sizes)), tuple(math.log2(max(1, size)) for size in sizes.values())


def merged(tables: Iterable[Iterable[Entry]]) -> dict[tuple[str, str, str], Entry]:
    """The entries of several tables by key: a later table replaces an earlier one's, but no measured one by an estimate."""
    every: dict[tuple[str, str, str], Entry] = {}
    for table in tables:
        for entry in table:
            before = every.get(entry.key)
            if before is None or entry.kind == "measured" or before.kind == "estimated":
                every[entry.key] = entry
    return every


@functools.cache
def _tables(op: str, chip: str, user: str) -> dict[tuple[str, str], _PassTable]:
    passes: dict[tuple[str, str], list[Entry]] = {}
    for entry in merged(read_table(folder, chip, op) for folder in (PACKAGE_TABLES, Path(user))).values():
        passes.setdefault((entry.implementation, entry.direction), []).append(entry)
    return {key: _PassTable(entries) for key, entries in passes.items()}


@functools.cache
def _user_folder(given: str | None, cache: str | None) -> str:
    return str(user_tables())


_generation = 0


def state() -> tuple[int, str]:
    """What lookups depend on beside their arguments: how often the tables were forgotten, and the user's folder."""
    return _generation, _user_folder(os.environ.get("TILEWRIGHT_TUNED"), os.environ.get("XDG_CACHE_HOME"))


def candidates(
    op: str, implementation: str, direction: Direction, chip: Chip, bucket: Mapping[str, Any], kind: type[Config]
) -> list[Found]:
    """The configs that the tables have for a call, the best match first."""
    table = _tables(op, chip_folder(chip), state()[1]).get((implementation, direction))
    return [] if table is None else table.candidates(bucket, kind)


def forget() -> None:
    """Makes this process read the tables again. What is traced already keeps its configs."""
    global _generation
    _generation += 1
    _tables.cache_clear()
