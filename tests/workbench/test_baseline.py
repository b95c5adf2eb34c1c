"""The regression gate: what is beyond the noise, by which times, and what is not compared."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import assert_refused, ran
from tests.workbench.test_records import record as made
from tilewright.cli.bench import _passes
from tilewright.workbench.baseline import compare, read_baseline
from tilewright.workbench.records import Record, append_records, read_records

STEADY = (1.00, 1.01, 0.99, 1.00, 1.01)


def record(scale: float = 1e-3, samples: tuple[float, ...] = STEADY, **changes: Any) -> Record:
    return made(samples_s=tuple(scale * each for each in samples), **changes)


def elsewhere(record: Record, **changes: Any) -> Record:
    return dataclasses.replace(record, provenance=dataclasses.replace(record.provenance, **changes))


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        (record(1.0e-3), record(1.1e-3), "slower"),
        (record(1.1e-3), record(1.0e-3), "faster"),
        (record(1.00e-3), record(1.04e-3), "same"),  # Below the floor.
        # The same medians as in the first row, and more noise in either of the two.
        (record(1.0e-3, (0.8, 1.0, 1.2, 1.0, 0.9)), record(1.1e-3), "same"),
        (record(1.0e-3), record(1.1e-3, (0.8, 1.0, 1.2, 1.0, 0.9)), "same"),
    ],
)
def test_a_change_beyond_the_noise_of_both_runs_has_a_verdict(before: Record, now: Record, verdict: str) -> None:
    (change,) = compare([now], [before]).changes
    assert change.verdict == verdict
    assert change.basis == "wall"


def test_small_calls_are_judged_by_device_time() -> None:
    """Of 20 us on the host, of which the kernel takes 4 us: its growth to 5 us is lost in the noise of the host."""
    before = record(20e-6, device_samples_s=(4.0e-6, 4.01e-6, 4.02e-6))
    now = record(20e-6, device_samples_s=(5.0e-6, 5.01e-6, 5.02e-6))
    (change,) = compare([now], [before]).changes
    assert (change.basis, change.verdict) == ("device", "slower")
    assert (change.now_s, change.before_s) == (5.01e-6, 4.01e-6)
    # Wall time where one of them has no device time, and where a call is large.
    assert compare([now], [record(20e-6)]).changes[0].basis == "wall"
    large = [dataclasses.replace(each, samples_s=(1e-3, 1e-3)) for each in (now, before)]
    assert compare(large[:1], large[1:]).changes[0].basis == "wall"


def test_what_cannot_be_compared_is_listed() -> None:
    here = record()
    other = elsewhere(record(case="packed"), chip="h200")
    earlier = elsewhere(record(2e-3), versions={"jax": "0.1.0"})
    found = compare(
        [here, record(case="packed"), record(case="new"), made(case="failed", samples_s=())],
        [record(3e-3), earlier, other, record(case="gone"), record(case="gone", mode="forward+backward"), here],
    )
    (change,) = found.changes
    assert change.before == earlier  # The last one; the record itself is not its own baseline.
    assert found.other_versions == [f"jax {here.provenance.versions['jax']} (then 0.1.0)"]
    assert [each.case for each in found.without_baseline] == ["new"]
    assert [(now.case, then.provenance.chip) for now, then in found.other_chip] == [("packed", "h200")]
    assert [(each.case, each.mode) for each in found.not_measured] == [("gone", "forward")]
    assert found.slower == ()


def test_the_gate_names_what_is_slower_and_exits_with_1(tmp_path: Path) -> None:
    words = ("bench", "rms_norm", "--case", "odd", "--implementation", "xla,reference", "--seconds", "0")
    assert ran(*words, cwd=tmp_path).code == 0
    xla, reference = read_records(tmp_path / "results" / "bench.jsonl")
    planted = dataclasses.replace(xla, samples_s=(1e-9,) * 5)
    append_records(tmp_path / "fast.jsonl", [planted, elsewhere(reference, chip="h200"), record(op="rms_norm")])
    done = ran(*words, "--baseline", "fast.jsonl", cwd=tmp_path)
    assert done.code == 1, done
    assert "slower: xla odd bfloat16: " in done.stdout
    assert ", was 0.00100 us on " in done.flat
    assert "baseline: 1 compared, 1 slower, 0 within the noise" in done.stdout
    assert "not compared, since this is cpu and the baseline is of h200: reference odd bfloat16" in done.flat
    slow = dataclasses.replace(xla, samples_s=(100.0,) * 5)
    append_records(tmp_path / "slow.jsonl", [slow])
    done = ran(*words, "--baseline", "slow.jsonl", cwd=tmp_path)
    assert done.code == 0, done
    assert "faster: xla odd bfloat16: " in done.stdout
    assert "no baseline, forward: reference odd bfloat16" in done.flat


def test_a_slowdown_within_the_noise_is_listed_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = (0.2, 2.5, 9.0, 2.5, 0.3)
    assert _passes([record(samples=noisy), record(case="quick")], [record(), record(2e-3, case="quick")])
    told = capsys.readouterr().out
    assert "slower, within the noise: xla odd float32: 2.50 ms, was 1.00 ms on " in told
    assert "(+150.0 %, wall time, noise 220.0 %)" in told
    assert "faster: xla quick float32: 1.00 ms, was 2.00 ms" in told
    assert "too noisy: xla odd float32: twice the time would be within the noise; measure both runs longer" in told
    assert "baseline: 2 compared, 0 slower, 1 within the noise" in told
    assert _passes([record(0.99e-3)], [record()])
    told = capsys.readouterr().out
    assert "within the noise:" not in told  # It was not slower.
    assert "too noisy" not in told


def test_a_gate_that_could_compare_nothing_does_not_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert not _passes([record()], [elsewhere(record(mode="forward+backward"), chip="h200")])
    assert (
        "nothing could be compared: no record of the baseline is of the same op, case, dtype, mode, implementation and "
        "chip; the baseline has op forward+backward float32 on h200" in capsys.readouterr().out
    )
    failed = made(samples_s=())
    assert not _passes([failed], [record()])
    assert "nothing could be compared: nothing was timed" in capsys.readouterr().out


def test_a_record_that_a_kill_cut_off_is_left_out_of_a_baseline(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    append_records(path, [record(), record(2e-3, case="next")])
    path.write_text(path.read_text()[:-40])
    assert [each.case for each in read_baseline(path)] == ["odd"]


def test_a_baseline_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text(record().to_json() + "\n" + json.dumps({"median_ms": 3}) + "\n")
    for name, line in {"list": [1, 2], "zero": json.loads(record().to_json()) | {"samples_s": [0.0, 0.0]}}.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(line))
    whole = json.loads(record().to_json())
    for name, value in {
        "samples": whole | {"samples_s": 3},
        "op": whole | {"op": None},
        "where": whole | {"provenance": {"chip": "cpu"}},
        "more": whole | {"median_ms": 3},
        "less": {key: value for key, value in whole.items() if key != "case"},
    }.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(value))
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x02")
    (tmp_path / "torn.jsonl").write_text(record().to_json()[:50])
    append_records(tmp_path / "checks.jsonl", [made(kind="check", samples_s=())])
    words = ("bench", "rms_norm", "--baseline")
    assert_refused(
        ((*words, "none.jsonl"), "--baseline none.jsonl is not a file; pass a file that --records wrote"),
        ((*words, "text.jsonl"), "--baseline text.jsonl: line 2 is not a record (record schema=None is not 3"),
        ((*words, "list.jsonl"), "line 1 is not a record (it is a list, and not an object); remove that line"),
        ((*words, "zero.jsonl"), "line 1 is not a record (samples_s must be positive times in seconds)"),
        ((*words, "binary.jsonl"), "--baseline binary.jsonl: line 1 is not text; pass a file that --records wrote"),
        ((*words, "torn.jsonl"), "line 1 is not a record (it is not JSON, or was cut off); remove that line"),
        ((*words, "samples.jsonl"), "line 1 is not a record (samples_s is 3, and not a list); remove that line"),
        ((*words, "op.jsonl"), "line 1 is not a record (op is null, and not text)"),
        ((*words, "where.jsonl"), "line 1 is not a record (it has no provenance.device_kind)"),
        ((*words, "more.jsonl"), "line 1 is not a record (median_ms is not a field of a record)"),
        ((*words, "less.jsonl"), "line 1 is not a record (it has no case)"),
        ((*words, "checks.jsonl"), "--baseline checks.jsonl has no measurement"),
        ((*words, "checks.jsonl", "--compile-only"), "--baseline compares times and --compile-only takes none"),
        cwd=tmp_path,
    )
    append_records(tmp_path / "one.jsonl", [record(), made(kind="check", samples_s=())])
    assert read_baseline(tmp_path / "one.jsonl")[0].kind == "bench"
