"""Writes the tables of Markdown pages from the records of measurements, so that a table is never older than its run.

A table stands between two comments. The first one says which records it is made of:

    <!-- table
    records: ../measurements/2026-11-15-h200-linear_cross_entropy.jsonl
    where: dtype=bfloat16, implementation=xla|reference
    rows: case=gpt2|qwen3, mode
    case: {case}
    `xla`: {median_s implementation=xla}
    `xla` / `reference`: {median_s implementation=xla / implementation=reference}
    label qwen3: Qwen3
    -->

    | case | `xla` | `xla` / `reference` |
    ...

    <!-- end of table -->

- `records`: JSONL files, or tables of tuned configs (`*.json`), relative to the page, separated by commas; `*` stands for
  any name. `where`: keeps the records with these values.
- `rows`: the fields whose values distinguish the rows. The values that a field names give the order of the rows; without
  them it is the order of the records.
- Every other line is a column: its heading, and a template with fields in braces. Conditions behind a field select one of
  the row's records; with two sets of conditions, separated by "/", it is the quotient of the two. A field that no record
  has is left empty, with the text around it. `{median_s:4}` has four significant digits instead of three, and
  `{median_ms:.2f}` is the number alone with two decimals.
- `label VALUE`: what a value is called in the table.

The name of a field says how it is shown: `_s` is a time and `_bytes` a size, with the unit that suits its value; `_per_s`
is a rate in tera-units; `_fraction` and `spread` are percentages. `_ms`, `_us` and `_mib` are the number alone, in that
unit. The fields are those of a record (workbench/records.py) and of its metrics and provenance, with `median_s`, `min_s`,
`max_s` and `spread` computed from the samples. Lines that are not records, of runs without samples, have fields such as
`median_ms`.
Those of a tuned config are the fields of its entry (core/tuned.py), with `median_s`, `gain`, `date`, `tried` and `of`;
`config` has the fields of the config.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.core.tuned import Entry, parse_table
from tilewright.workbench.figures import memory, seconds, significant
from tilewright.workbench.records import Record

_BEGIN, _END = "<!-- table\n", "<!-- end of table -->"
_TABLE = re.compile(rf"(?P<head>{re.escape(_BEGIN)}(?P<body>.*?)-->\n)(?P<rows>.*?)(?P<end>{re.escape(_END)})", re.S)
_FIELD = re.compile(r"\{(?P<name>\w+)(?::(?P<format>\d+|\.\d+f))?(?P<conditions>[^}]*)\}")
# The suffixes of fields in other units than a record's, with the record's suffix and the factor.
_OTHER_UNITS = {"_ms": ("_s", 1e-3), "_us": ("_s", 1e-6), "_mib": ("_bytes", 2.0**20)}
# Fields of lines that are not records, under a record's name.
_OTHER_NAMES = {"first_s": "first_step_s", "what": "implementation"}

Fields = Mapping[str, Any]


class BadTable(ValueError):
    """A table whose comment cannot be followed. The text says which, and why."""


@dataclass(frozen=True)
class _Table:
    records: tuple[str, ...]
    where: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, str]
    labels: Mapping[str, str]


def written(page: Path) -> str:
    """The text of a page with every table written from its records. Raises `BadTable` where that cannot be done."""

    def table(match: re.Match[str]) -> str:
        line = text.count("\n", 0, match.start()) + 1
        try:
            rows = _rows(_parse(match["body"]), page.parent)
        except (ValueError, KeyError, OSError) as error:
            raise BadTable(f"{page}:{line}: {error}") from error
        return f"{match['head']}\n{rows}\n{match['end']}"

    text = page.read_text()
    if (found := len(_TABLE.findall(text))) != (begun := text.count(_BEGIN)):
        raise BadTable(f"{page}: {begun} tables begin and {found} end; each needs a line {_END!r} after it")
    return _TABLE.sub(table, text)


def _conditions(text: str) -> dict[str, tuple[str, ...]]:
    """{"case": ("a", "b"), "mode": ()} of "case=a|b, mode"."""
    parts = [part.partition("=") for part in re.split(r",\s*", text.strip()) if part.strip()]
    return {name.strip(): tuple(value.strip() for value in values.split("|") if values) for name, _, values in parts}


def _parse(body: str) -> _Table:
    settings: dict[str, str] = {}
    columns: dict[str, str] = {}
    labels: dict[str, str] = {}
    for line in filter(None, map(str.strip, body.splitlines())):
        name, colon, value = line.partition(": ")
        if not colon:
            raise ValueError(f"{line!r} is not a line of a table; write `heading: {{field}}`")
        if name in ("records", "where", "rows"):
            settings[name] = value
        elif name.startswith("label "):
            labels[name.removeprefix("label ")] = value.strip()
        else:
            columns[name] = value.strip()
    for name in ("records", "rows"):
        if name not in settings:
            raise ValueError(f"the table has no line `{name}: ...`")
    return _Table(
        tuple(part.strip() for part in settings["records"].split(",")),
        _conditions(settings.get("where", "")),
        _conditions(settings["rows"]),
        columns,
        labels,
    )


def _read(path: Path) -> Iterator[Fields]:
    """The records of a file, or the entries of a table of tuned configs, as flat mappings from field to value."""
    if path.suffix == ".json":
        op, chip, entries, wrong = parse_table(path.read_text())
        if wrong:
            raise ValueError(f"{path}: {wrong[0]}")
        yield from ({"op": op, "chip": chip, **_flat_entry(entry)} for entry in entries)
        return
    for line in filter(str.strip, path.read_text().splitlines()):
        data = json.loads(line)
        if "samples_s" in data:
            record = Record.from_json(line)
            flat = {**record.provenance.versions, **vars(record.provenance), **record.metrics, **vars(record)}
            taken = record.samples_s
            if taken:
                flat |= {"median_s": statistics.median(taken), "min_s": min(taken), "max_s": max(taken)}
                flat["spread"] = record.spread
            yield flat
            continue
        yield flat_record(data)


def _flat_entry(entry: Entry) -> dict[str, Any]:
    """An entry of a tuned table; of its config, without the name of its class and without fields that are None."""
    fields = {name: value for name, value in entry.config.items() if name != "config" and value is not None}
    config = ", ".join(f"{name}={value}" for name, value in fields.items())
    more = {"median_s": entry.seconds, "gain": entry.gain, "config": config, "date": entry.provenance["date"][:10]}
    return vars(entry) | dict(entry.search) | more


def flat_record(data: Fields) -> dict[str, Any]:
    """A line that is not a record, with the names and units that a record has for its fields."""
    flat = {}
    for name, value in data.items():
        own, factor = _in_units_of_records(_OTHER_NAMES.get(name) or name)
        flat[own] = value if factor == 1 else value * factor
    return flat


def _in_units_of_records(name: str) -> tuple[str, float]:
    """The name that a record has for a field, and the factor to its unit: ("median_s", 1e-3) of "median_ms"."""
    for suffix, (unit, factor) in _OTHER_UNITS.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + unit, factor
    return name, 1


def _matches(record: Fields, conditions: Mapping[str, tuple[str, ...]]) -> bool:
    return all(str(record.get(name)) in values for name, values in conditions.items() if values)


def _files(folder: Path, name: str) -> list[Path]:
    """The files of a name relative to a folder, whose last part may have a `*`."""
    path = folder / name
    return sorted(path.parent.glob(path.name)) if "*" in path.name else [path]


def _rows(table: _Table, folder: Path) -> str:
    paths = [path for name in table.records for path in _files(folder, name)]
    records = [record for path in paths for record in _read(path) if _matches(record, table.where)]
    keys = dict.fromkeys(
        tuple(str(record.get(name)) for name in table.rows) for record in records if _matches(record, table.rows)
    )
    if not keys:
        raise ValueError("no record matches `where` and `rows`")

    def place(key: tuple[str, ...]) -> list[int]:
        return [
            values.index(value) if values else list(dict.fromkeys(other[n] for other in keys)).index(value)
            for n, (value, values) in enumerate(zip(key, table.rows.values(), strict=True))
        ]

    lines = [list(table.columns)]
    for key in sorted(keys, key=place):
        chosen = dict(zip(table.rows, ((value,) for value in key), strict=True))
        matching = [record for record in records if _matches(record, chosen)]
        lines.append([_cell(template, matching, table.labels) for template in table.columns.values()])
    heading, *rows = ["|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n" for cells in lines]
    return "".join([heading, f"{'|---' * len(table.columns)}|\n", *rows])


def _cell(template: str, records: list[Fields], labels: Mapping[str, str]) -> str:
    """A template with its fields filled in; empty where one of them is not known."""
    unknown = False

    def filled(match: re.Match[str]) -> str:
        nonlocal unknown
        name, how = match["name"], match["format"] or "3"
        values = [_value(name, records, _conditions(part)) for part in match["conditions"].split(" / ")]
        if any(value is None for value in values):
            unknown = True
            return ""
        value = values[0] / values[1] if len(values) == 2 else values[0]
        if how.startswith("."):
            return format(value, how)
        if len(values) == 2:
            return significant(value, int(how))
        return labels.get(str(value), _shown(name, value, int(how)))

    text = _FIELD.sub(filled, template)
    return "" if unknown else text


def _value(name: str, records: list[Fields], conditions: Mapping[str, tuple[str, ...]]) -> Any:
    """The field of the records that match; they must agree on it."""
    name, factor = _in_units_of_records(name)
    matching = [record for record in records if _matches(record, conditions)]
    values = list(dict.fromkeys(record[name] for record in matching if record.get(name) is not None))
    if len(values) > 1:
        raise ValueError(
            f"{name} is not the same in {len(matching)} records of one row; select one: {{{name} field=value}}"
        )
    if not values:
        return None
    return values[0] if factor == 1 else values[0] / factor


def _shown(name: str, value: Any, digits: int) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return str(value)
    if name.endswith("_per_s"):
        return significant(value / 1e12, digits)
    if name.endswith("_s"):
        return seconds(value, digits)
    if name.endswith("_bytes"):
        return memory(value)
    if name.endswith("_fraction") or name == "spread":
        return f"{100 * value:.1f} %" if name == "spread" else f"{100 * value:.0f} %"
    return significant(value, digits) if isinstance(value, float) else str(value)
