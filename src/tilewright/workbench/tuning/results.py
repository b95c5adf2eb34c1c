"""What tuning leaves behind: a record per config that was tried, the same as CSV, and the entries of tables.

Records are appended one by one, and are on disk before the next config is tried. Tables are replaced in one step. Both are
written under a lock, so that two tuners may write to the same files, and a tuner that is killed leaves whole ones.
"""

import contextlib
import csv
import fcntl
import io
import itertools
import json
import os
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.core import tuned
from tilewright.core.config import Config
from tilewright.core.target import default_device
from tilewright.workbench.records import (
    Provenance,
    Record,
    append_records,
    checkout_commit,
    installed_versions,
    is_cut_off,
    now,
    read_records,
    write_durably,
)
from tilewright.workbench.tuning.search import Outcome
from tilewright.workbench.tuning.target import Target

CHOSEN = "chosen"
"""The outcome of the last record of a target: the config that its entry of the table has."""


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which other processes wait for. It is released if this one is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def record_of(target: Target, outcome: Outcome, status: str | None = None, **metrics: Any) -> Record:
    """A record of a config that was tried."""
    estimated = "estimate_s" in outcome.metrics
    return Record(
        kind="estimate" if estimated else "tune",
        op=target.op.name,
        implementation=target.implementation,
        case=target.case.name,
        dtype=target.dtype,
        mode=target.mode,
        provenance=_elsewhere(target) if estimated else Provenance.here(default_device()),
        configs={name: config.to_json() for name, config in target.configs(outcome.config).items()},
        config_sources=dict.fromkeys(target.configs(outcome.config), "argument"),
        samples_s=outcome.samples_s,
        metrics={
            "direction": target.direction,
            "outcome": status or outcome.status,
            "reason": outcome.reason,
            "better": outcome.better,
            "ratio": outcome.ratio,
            "bucket": json.dumps(dict(target.bucket)),
            "chip": tuned.chip_folder(target.chip),
            "source": target.source,
            **{name: value if _finite(value) else None for name, value in outcome.metrics.items()},
            **metrics,
        },
    )


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or abs(value) < float("inf")


def _elsewhere(target: Target) -> Provenance:
    """Of an estimate: the chip that it is for, which is not here."""
    return Provenance(target.chip.name, "none: estimated", 0, installed_versions(), checkout_commit(), now())


def append(path: Path, record: Record) -> None:
    """Appends a record. The end of one that a killed process left unfinished is removed first."""
    with locked(path):
        _mend(path)
        append_records(path, [record])


def read(path: Path) -> list[Record]:
    """Every whole record of a file; none where there is no file."""
    if not path.exists():
        return []
    with locked(path):
        _mend(path)
        return list(read_records(path))


def _mend(path: Path) -> None:
    if is_cut_off(path):
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def earlier(records: Iterable[Record], target: Target) -> dict[str, Record]:
    """The records of an earlier search of the same target, by config as JSON: same kernel, chip, versions, other config."""
    other = {
        name: config.to_json() for name, config in target.configs(target.heuristic).items() if name != target.direction
    }
    versions = _versions(installed_versions())
    found: dict[str, Record] = {}
    for record in records:
        same = (
            (record.op, record.case, record.dtype, record.implementation, record.mode)
            == (target.op.name, target.case.name, target.dtype, target.implementation, target.mode)
            and record.metrics.get("direction") == target.direction
            and record.metrics.get("source") == target.source
            and record.metrics.get("chip") == tuned.chip_folder(target.chip)
            and _versions(record.provenance.versions) == versions
            and {name: dict(each) for name, each in record.configs.items() if name != target.direction} == other
        )
        if same and record.metrics.get("outcome") != CHOSEN:
            found[json.dumps(record.configs[target.direction])] = record
    return found


def _versions(versions: Mapping[str, str]) -> tuple[str | None, ...]:
    return versions.get("jax"), versions.get("jaxlib")


def entry_of(record: Record) -> tuned.Entry:
    """The entry of a table that a `CHOSEN` record has all of."""
    metrics: Mapping[str, Any] = record.metrics
    estimated = record.kind == "estimate"
    where = record.provenance
    return tuned.Entry(
        implementation=record.implementation,
        direction=metrics["direction"],
        bucket={name: value for name, value in json.loads(metrics["bucket"]).items() if value not in (None, False)},
        config=dict(record.configs[metrics["direction"]]),
        kind="estimated" if estimated else "measured",
        mode=record.mode,
        seconds=metrics["estimate_s"] if estimated else record.median_s,
        samples_s=tuple(record.samples_s),
        heuristic_s=metrics.get("heuristic_s"),
        compile_s=metrics.get("compile_s"),
        temp_bytes=metrics.get("temp_bytes"),
        peak_bytes=metrics.get("peak_bytes"),
        on_chip_bytes=json.loads(metrics.get("on_chip_bytes") or "{}"),
        error={
            "share_of_bound": metrics.get("error"),
            "quantity": metrics.get("error_in"),
            "against": metrics.get("error_against"),
        },
        case=record.case,
        clock=metrics.get("clock"),
        heuristic=None if "heuristic" not in metrics else json.loads(metrics["heuristic"]),
        search={name: metrics.get(name) for name in ("reach", "tried", "of", "complete")},
        provenance={
            "chip": where.chip,
            "device_kind": where.device_kind,
            "versions": dict(where.versions),
            "source": metrics["source"],
            "commit": where.commit,
            "date": where.date,
        },
    )


_METRIC_OF = {"times_the_best": "ratio"}
"""The columns of the CSV file that have another name than their metric."""


def write_csv(records: Path) -> Path:
    """Writes the records of tuning in a JSONL file as a CSV file beside it, one row each, and returns its path."""
    columns = ("op", "implementation", "case", "dtype", "mode", "direction", "outcome", "config", "median_s", "samples")
    more = (
        "clock",
        "times_the_best",
        "compile_s",
        "temp_bytes",
        "peak_bytes",
        "error",
        "error_in",
        "error_against",
        "estimate_s",
        "reason",
    )
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow((*columns, *more, "chip", "date", "commit"))
    for record in read(records):
        metrics = record.metrics
        if "direction" not in metrics:
            continue  # Of another verb.
        config = record.configs.get(str(metrics["direction"]), {})
        fields = " ".join(f"{name}={value}" for name, value in config.items() if name != "config")
        median = statistics.median(record.samples_s) if record.samples_s else ""
        named = (record.op, record.implementation, record.case, record.dtype, record.mode)
        figures = (metrics["direction"], metrics["outcome"], fields, median, len(record.samples_s))
        where = (record.provenance.chip, record.provenance.date, record.provenance.commit)
        rows.writerow((*named, *figures, *(metrics.get(_METRIC_OF.get(name, name), "") for name in more), *where))
    path = records.with_suffix(".csv")
    with locked(path):
        write_durably(path, text.getvalue())
    return path


TAKEN = "taken"


def put(folder: Path, chip: str, op: str, entries: Iterable[tuned.Entry]) -> Counter[str]:
    """Puts entries into a table. Returns how many were `TAKEN`, and how many were not, by the reason.

    A table that cannot be read is kept under another name, with a warning, and a new one is begun. Without an entry
    nothing is written, and no folder is made.
    """
    entries = list(entries)
    if not entries:
        return Counter()
    path = tuned.table_path(folder, chip, op)
    with locked(path):
        try:
            _, _, there, wrong = tuned.parse_table(path.read_text(), op, chip)
        except FileNotFoundError:
            there, wrong = [], []
        except (tuned.DamagedTable, UnicodeDecodeError) as error:
            there, wrong = [], [str(error)]
        every = {entry.key: entry for entry in there}
        became: Counter[str] = Counter()
        for entry in entries:
            reason = entry.kept_out_by(every.get(entry.key))
            became[reason or TAKEN] += 1
            if reason is None:
                every[entry.key] = entry
        if became[TAKEN]:
            if wrong:
                kept = _keep_damaged(path)
                whole = f"its {len(there)} whole entries were kept" if there else "a new one was begun"
                told = f"the tuned table {path} was damaged ({wrong[0]}); a copy is now {kept}, and {whole}"
                warnings.warn(told, tuned.DamagedTableWarning, stacklevel=2)
            write_durably(path, tuned.table_text(op, chip, every.values()))
    tuned.forget()
    return became


def _keep_damaged(path: Path) -> Path:
    """Copies a damaged table to a file beside it that was not there, and returns that file's path."""
    names = (f"{path.name}.damaged{'' if number == 1 else f'-{number}'}" for number in itertools.count(1))
    kept = next(each for each in map(path.with_name, names) if not each.exists())
    kept.write_bytes(path.read_bytes())
    return kept


def best_of(records: Iterable[Record]) -> list[Record]:
    """The records of the fastest configs that were timed to the end, or estimated: one per clock, which do not compare."""
    best: dict[Any, Record] = {}
    for record in records:
        clock = record.metrics.get("clock")
        done = record.metrics.get("outcome") in ("timed", "estimated")
        if done and (clock not in best or _seconds(record) < _seconds(best[clock])):
            best[clock] = record
    return list(best.values())


def _seconds(record: Record) -> float:
    estimate = record.metrics.get("estimate_s")
    return float(estimate) if isinstance(estimate, int | float) else record.median_s


def shown(config: Config) -> str:
    """The fields of a config that are searched, as a person reads them."""
    return " ".join(f"{name}={getattr(config, name)}" for name in type(config).choices)
