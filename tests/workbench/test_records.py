"""Records keep what was measured and where it is from."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

import tilewright
from tilewright.workbench import records as records_module
from tilewright.workbench.records import Provenance, Record, append_records, read_records, try_destination

FORWARD = tilewright.configs.NormTpuForward(block_n=256, tile_n=64)
BACKWARD = tilewright.configs.NormTpuBackward(block_n=128)


def record(**changes: object) -> Record:
    made = Record(
        kind="bench",
        op="op",
        implementation="xla",
        case="odd",
        dtype="float32",
        mode="forward",
        provenance=Provenance.here(jax.devices("cpu")[0]),
        configs={"forward": FORWARD.to_json(), "backward": BACKWARD.to_json()},
        config_sources={"forward": "heuristic", "backward": "argument"},
        samples_s=(0.1, 0.3, 0.2, 0.4, 0.2),
        metrics={"temp_bytes": 12, "flops_fraction": None},
    )
    return dataclasses.replace(made, **changes)


def test_a_round_trip_keeps_everything(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    append_records(path, [record()])
    append_records(path, [record(case="batched")])
    first, second = read_records(path)
    assert first == record(provenance=first.provenance)
    assert second.case == "batched"
    assert first.samples_s == (0.1, 0.3, 0.2, 0.4, 0.2)
    read = [tilewright.configs.from_json(json.dumps(first.configs[direction])) for direction in ("forward", "backward")]
    assert read == [FORWARD, BACKWARD]


def test_a_line_that_was_cut_off_stays_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(record().to_json()[:40])
    append_records(path, [record(case="after")])
    cut_off, whole = path.read_text().splitlines()
    assert (len(cut_off), Record.from_json(whole).case) == (40, "after")


def test_what_does_not_fit_leaves_the_records_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    append_records(path, [record()])
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        append_records(path, [record()])
    assert path.read_bytes() == before


def test_trying_a_destination_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    try_destination(path)
    assert not path.exists()
    append_records(path, [record()])
    before = path.read_bytes()
    try_destination(path)
    assert path.read_bytes() == before
    for bad in (Path("/dev/full"), tmp_path):
        with pytest.raises(OSError, match=r"No space left|Is a directory"):
            try_destination(bad)


def test_provenance_names_chip_versions_commit_and_date() -> None:
    found = record().provenance
    assert found.chip == "cpu"
    assert found.versions["jax"] == jax.__version__
    assert set(found.versions) >= {"tilewright", "python", "jax", "jaxlib", "numpy"}
    assert found.date.endswith("+00:00")
    assert found.commit is None or len(found.commit.removesuffix("-dirty")) == 40


def test_median_and_spread() -> None:
    assert record().median_s == 0.2
    assert record(samples_s=(1.0, 1.0, 1.0, 1.0)).spread == 0.0


def test_a_record_of_another_schema_is_refused() -> None:
    data = json.loads(record().to_json()) | {"schema": 99}
    with pytest.raises(ValueError, match=r"record schema=99 is not 3"):
        Record.from_json(json.dumps(data))


def test_a_record_of_schema_1_keeps_its_config_as_text() -> None:
    data = json.loads(record().to_json()) | {"schema": 1, "config": "XlaConfig(chunk=64)", "config_source": "heuristic"}
    del data["configs"], data["config_sources"]
    read = Record.from_json(json.dumps(data))
    assert read.metrics["config"] == "XlaConfig(chunk=64)"
    assert read.configs == {}
    assert read.schema == 3
