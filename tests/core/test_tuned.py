"""Tuned tables: which config dispatch takes, what a damaged table does, and what a lookup costs."""

import dataclasses
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tilewright.core import tuned
from tilewright.core.chip import Chip
from tilewright.core.dispatch import explain, find_op
from tilewright.core.tuned import Entry
from tilewright.ops.linear_cross_entropy.config import (
    LinearCrossEntropyTpuForward,
    LinearCrossEntropyXlaBackward,
    LinearCrossEntropyXlaForward,
)

OP = "linear_cross_entropy"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's tables."""
    monkeypatch.setenv("TILEWRIGHT_TUNED", str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def entry(n: int, config: tilewright.configs.Config, *, kind: Any = "measured", h: int = 64, **fields: Any) -> Entry:
    name = type(config).__name__
    given = {
        "implementation": "xla" if "Xla" in name else "pallas_tpu",
        "direction": "forward" if name.endswith("Forward") else "backward",
        "bucket": {"dtype": "float32", "N": n, "H": h, "V": 1024, "soft_cap": False},
        "config": config.to_json(),
        "kind": kind,
        "mode": "forward",
        "seconds": 1e-3,
        "samples_s": (1e-3, 1.1e-3),
        "provenance": {"chip": "cpu", "date": "2026-01-02T00:00:00+00:00"},
    }
    return Entry(**given | fields)


def write(folder: Path, *entries: Entry, chip: str = "cpu") -> Path:
    path = tuned.table_path(folder, chip, OP)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tuned.table_text(OP, chip, entries))
    tuned.forget()
    return path


def explained(n: int, implementation: str = "xla", **options: Any) -> Any:
    x, w = jax.ShapeDtypeStruct((n, 64), jnp.float32), jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    labels = jax.ShapeDtypeStruct((n,), jnp.int32)
    (decision,) = explain(OP, x, w, labels, implementation=implementation, **options).decisions
    return decision


def test_argument_then_bucket_then_nearest_bucket_then_heuristic(folder: Path) -> None:
    own, near = LinearCrossEntropyXlaForward(32, 128), LinearCrossEntropyXlaForward(64, 256)
    write(folder, entry(256, own), entry(2048, near), entry(256, LinearCrossEntropyXlaBackward(16, 64)))
    given = LinearCrossEntropyXlaForward(8, 8)
    assert (explained(256, config=given).forward.config_source, explained(256).forward.config) == ("argument", own)
    decision = explained(200)  # Its bucket is N=256.
    assert decision.forward.config_source == "tuned"
    assert decision.backward.config == LinearCrossEntropyXlaBackward(16, 64)
    assert f"forward: {own!r} (tuned: measured on cpu, 2026-01-02)" in str(decision)
    nearby = explained(1024)
    assert (nearby.forward.config, nearby.forward.config_source) == (near, "tuned nearby")
    assert "(tuned nearby: for dtype=float32 N=2048 H=64 V=1024, measured on cpu" in str(nearby)
    # A factor of four away at most, and nothing else but sizes may differ.
    assert explained(16).forward.config_source == "heuristic"
    assert explained(256, soft_cap=5.0).forward.config_source == "heuristic"


def test_a_nearby_config_that_does_not_fit_is_passed_over(folder: Path) -> None:
    too_large = LinearCrossEntropyTpuForward(block_n=2**17, block_v=1024)
    fits = LinearCrossEntropyTpuForward(block_n=64, block_v=128)
    write(folder, entry(512, too_large), entry(1024, fits), chip="v6e")
    with tilewright.target("v6e"):
        decision = explained(256, "pallas_tpu")
        assert (decision.forward.config, decision.forward.config_source) == (fits, "tuned nearby")
        write(folder, entry(256, too_large), chip="v6e")
        decision = explained(256, "pallas_tpu")
        assert (decision.forward.config_source, decision.forward.refusal) == ("heuristic", None)


def test_a_heuristic_that_nothing_beats_is_not_lent_to_other_sizes(folder: Path) -> None:
    config, own = LinearCrossEntropyXlaForward(32, 128), explained(200).forward.config
    write(folder, entry(256, config, seconds=1.000004e-3, heuristic_s=1.000004e-3))
    # Its bucket has other lengths, too, and each keeps its own heuristic's, which was not what was measured.
    decision = explained(200)
    assert (decision.forward.config, decision.forward.config_source) == (own, "heuristic")
    bucket = "dtype=float32 N=256 H=64 V=1024"
    assert f"(heuristic: a search found none faster for {bucket}, measured on cpu, 2026-01-02)" in str(decision)
    write(folder, entry(256, own, seconds=1e-3, heuristic_s=1e-3))
    assert explained(200).forward.config_source == "tuned"
    assert explained(512).forward.config_source == "heuristic"
    write(folder, entry(256, config, seconds=1e-3, heuristic_s=1.1e-3))
    assert explained(512).forward.config_source == "tuned nearby"


def test_a_nearby_call_takes_what_tuning_changed_and_the_rest_from_its_own_heuristic(folder: Path) -> None:
    own = explained(512).forward.config
    elsewhere = LinearCrossEntropyXlaForward(block_n=8, block_v=own.block_v)
    assert own.block_n != elsewhere.block_n
    found = dataclasses.replace(elsewhere, block_v=256)
    write(folder, dataclasses.replace(entry(256, found), heuristic=elsewhere.to_json()))
    assert explained(256).forward.config == found
    nearby = explained(512).forward
    assert (nearby.config, nearby.config_source) == (dataclasses.replace(own, block_v=256), "tuned nearby")
    # What is not valid with this call's heuristic is not taken.
    changed = dict(found.to_json(), block_v=-1)
    write(folder, dataclasses.replace(entry(256, found), config=changed, heuristic=elsewhere.to_json()))
    assert explained(512).forward.config_source == "heuristic"


def test_how_one_size_is_divided_is_not_lent_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the splits of a cache that few heads need, and many do not."""
    monkeypatch.setattr(LinearCrossEntropyXlaForward, "one_size_fields", ("block_n",))
    own = explained(512).forward.config
    elsewhere = LinearCrossEntropyXlaForward(block_n=8, block_v=128)
    found = LinearCrossEntropyXlaForward(block_n=16, block_v=256)
    write(folder, dataclasses.replace(entry(256, found), heuristic=elsewhere.to_json()))
    assert explained(256).forward.config == found
    assert explained(512).forward.config == dataclasses.replace(own, block_v=256)
    found = dataclasses.replace(found, block_v=128)
    write(folder, dataclasses.replace(entry(256, found), heuristic=elsewhere.to_json()))
    assert (explained(256).forward.config, explained(512).forward.config_source) == (found, "heuristic")


def test_a_config_that_is_no_longer_one_is_passed_over(folder: Path) -> None:
    fields = {"config": "LinearCrossEntropyXlaForward", "block_n": 64, "block_v": 128, "unknown": 1}
    write(folder, dataclasses.replace(entry(256, LinearCrossEntropyXlaForward(64, 128)), config=fields))
    assert explained(256).forward.config_source == "heuristic"


def test_a_call_runs_with_a_tuned_config(folder: Path) -> None:
    config = LinearCrossEntropyXlaForward(32, 128)
    write(folder, entry(256, config))
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (256, 64)), jax.random.normal(keys[1], (64, 1024))
    labels = jnp.zeros(256, jnp.int32)
    got = tilewright.linear_cross_entropy(x, w, labels)
    want = tilewright.linear_cross_entropy(x, w, labels, implementation="reference")
    assert jnp.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[: len(text) // 2], "it is not JSON, or was cut off"),
        (lambda text: text.replace('"schema": 1', '"schema": 99'), "its schema is 99 and this version reads 1"),
        (lambda text: text.replace('"block_n": 32', '"block_n": 33'), "it was changed after it was written"),
        (lambda text: text.replace(OP, "matmul"), "it is for op 'matmul', not 'linear_cross_entropy'"),
        (lambda text: "[]", "it is not a table of tuned configs"),
    ],
)
def test_a_damaged_table_is_one_warning_and_the_heuristic_goes_on(folder: Path, damage: Any, told: str) -> None:
    path = write(folder, entry(256, LinearCrossEntropyXlaForward(32, 128)))
    path.write_text(damage(path.read_text()))
    with pytest.warns(RuntimeWarning, match=told) as noted:
        sources = [explained(n).forward.config_source for n in (256, 512)]
    assert sources == ["heuristic", "heuristic"]
    assert len(noted) == 1
    assert f"tilewright tune {OP}" in str(noted[0].message)


def test_an_edited_entry_does_not_take_the_others_with_it(folder: Path) -> None:
    write(folder, entry(256, LinearCrossEntropyXlaForward(32, 128)), entry(4096, LinearCrossEntropyXlaForward(64, 128)))
    path = tuned.table_path(folder, "cpu", OP)
    path.write_text(path.read_text().replace('"block_n": 32', '"block_n": 33'))
    with pytest.warns(RuntimeWarning, match="1 of 2 entries"):
        assert explained(4096).forward.config_source == "tuned"


def test_measured_replaces_estimated_and_never_the_other_way_round() -> None:
    config = LinearCrossEntropyXlaForward(32, 128)
    old, new = ({"chip": "cpu", "date": f"2026-01-0{day}"} for day in (1, 2))
    measured, later = entry(256, config, provenance=old), entry(256, config, provenance=new)
    estimate = entry(256, config, kind="estimated", provenance=new)
    assert measured.kept_out_by(estimate) is None
    assert estimate.kept_out_by(measured) == "estimated where a measurement is there"
    assert later.kept_out_by(measured) is None
    assert measured.kept_out_by(later) == "older than what is there"
    assert measured.kept_out_by(measured) == "there already"
    assert estimate.kept_out_by(None) is None
    for order in ((measured, estimate), (estimate, measured)):
        (kept,) = tuned.merged([[one] for one in order]).values()
        assert kept is measured


def test_a_table_goes_through_text(folder: Path) -> None:
    one = entry(256, LinearCrossEntropyXlaForward(32, 128), heuristic_s=2e-3, error={"share_of_bound": 0.25})
    op, chip, (read,), wrong = tuned.parse_table(tuned.table_text(OP, "cpu", [one]))
    assert (op, chip, wrong) == (OP, "cpu", [])
    assert (read.key, read.gain, dict(read.error)) == (one.key, 2.0, {"share_of_bound": 0.25})
    assert json.loads(tuned.table_text(OP, "cpu", [one]))["entries"][0]["checksum"]


def test_a_chip_that_is_not_known_has_a_folder_of_its_own() -> None:
    unknown = Chip(name="unknown", platform="gpu", device_kinds=("NVIDIA H100 PCIe",))
    assert tuned.chip_folder(unknown) == "nvidia-h100-pcie"
    assert tuned.chip_folder(Chip.named("h200")) == "h200"


def test_a_lookup_takes_less_than_50_us(folder: Path) -> None:
    """Of a table with 400 entries: of the call's own bucket, of a nearby one, and of none."""
    config = LinearCrossEntropyXlaForward(32, 128)
    write(folder, *(entry(2**n, config, h=8 * h) for n in range(20) for h in range(1, 21)))
    # A copy of the module whose types are not checked, as it is outside of tests.
    spec = importlib.util.spec_from_file_location("unchecked_tuned", tuned.__file__)
    assert spec is not None
    assert spec.loader is not None
    unchecked = sys.modules["unchecked_tuned"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchecked)
    one = find_op(OP).architectures("xla")[0].forward
    found = {}
    for name, n, h in (("own", 256, 64), ("nearby", 256, 68), ("none", 256, 10**6)):
        bucket = {"dtype": "float32", "N": n, "H": h, "V": 1024, "soft_cap": False}
        taken = []
        for _ in range(200):
            began = time.perf_counter()
            got = unchecked.candidates(OP, "xla", "forward", Chip.named("cpu"), bucket, one.config)
            taken.append(time.perf_counter() - began)
        found[name] = (got[0].exact if got else None, min(taken))
    assert {name: exact for name, (exact, _) in found.items()} == {"own": True, "nearby": False, "none": None}
    assert all(seconds < 50e-6 for _, seconds in found.values()), found


def test_without_tables_nothing_is_said(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explained(256).forward.config_source == "heuristic"
