"""The comparison as a person runs it, at its smallest: the records, the plots and the report belong together."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress

from delta_attention_comparison import benchmark_script
from delta_attention_comparison.benchmark_script import _numerics_jobs, compare
from delta_attention_comparison.contenders import LAYERS, OPS, PRESETS, TITLES
from delta_attention_comparison.report import Findings, write_report
from tilewright.cli.screen import Mistake
from tilewright.workbench.records import Provenance, Record, read_records

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*args: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "delta_attention_comparison" / "benchmark_script.py"
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_small_comparison_from_end_to_end(tmp_path: Path) -> None:
    out, trace = tmp_path / "out", tmp_path / "trace"
    done = run(
        *("--preset", "cpu", "--layers", "softmax,deltanet", "--seq-lens", "16", "--steps", "10"),
        *("--parts", "speed,recall", "--profile", str(trace), "--out", str(out)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {
        "records.jsonl",
        "report.md",
        "time.png",
        "memory.png",
        "recall.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))
    assert list(trace.rglob("perfetto_trace.json.gz"))

    records = list(read_records(out / "records.jsonl"))
    speed = [r for r in records if r.samples_s]
    assert {(r.op, r.case, r.mode) for r in speed} == {
        (op, "t16", mode) for op in ("Attention", "DeltaNet") for mode in ("forward", "forward+backward")
    }
    for record in speed:
        assert record.metrics["tokens_per_s"] == pytest.approx(16 / record.median_s)
        assert record.metrics["first_step_s"] > 0
        assert record.metrics["peak_bytes"] > record.metrics["temp_bytes"] > 0
        # The delta rule's xla backward has no config: it follows the blocks that the forward saved.
        both = record.mode == "forward+backward" and record.op == "Attention"
        assert list(record.configs) == (["forward", "backward"] if both else ["forward"])
    recall = [r for r in records if r.case.startswith("recall_")]
    assert {(r.op, r.metrics["pairs"]) for r in recall} == {
        (op, n) for op in ("Attention", "DeltaNet") for n in (2, 4, 8)
    }
    assert all(0 <= r.metrics["accuracy"] <= 1 for r in recall)

    report = (out / "report.md").read_text()
    where = records[0].provenance
    for fact in (where.device_kind, f"jax {where.versions['jax']}", where.date[:10], "preset `cpu`"):
        assert fact in report
    for line in ("no TPU here", "KimiDeltaAttention: left out by --layers", "numerics: left out by --parts"):
        assert line in report
    for plot in ("time.png", "memory.png", "recall.png"):
        assert f"({plot})" in report
    for record in recall:
        assert f"{record.metrics['accuracy']:.1%}" in report


def test_every_layer_has_the_numerics_of_its_op_checked() -> None:
    size = PRESETS["cpu"]
    found = Findings("cpu", size, LAYERS, Provenance("cpu", "cpu", 1, {"jax": "0.12"}, None, "2026-01-01"))
    jobs = _numerics_jobs(found, Progress())
    checked = [(op.name, dtype) for op, _, dtype in (job.args for job in jobs)]
    assert set(checked) == {(op, dtype) for op in OPS.values() for dtype in size.check_dtypes}


@pytest.mark.slow
def test_the_report_tells_how_each_layer_grows(tmp_path: Path) -> None:
    """Of records that grow with T and with its square, and of one that misses its bound."""
    size = dataclasses.replace(PRESETS["cpu"], seq_lens=(64, 256, 1024))
    found = Findings("cpu", size, ("gdn", "softmax"), Provenance("cpu", "cpu", 1, {"jax": "0.12"}, None, "2026-01-01"))
    for name, power in (("gdn", 1), ("softmax", 2)):
        for t in size.seq_lens:
            for mode in ("forward", "forward+backward"):
                metrics = {
                    "tokens": t,
                    "tokens_per_s": 1.0,
                    "first_step_s": 1.0,
                    "temp_bytes": t**power,
                    "peak_bytes": 2**20,
                }
                named = {"op": TITLES[name], "implementation": "xla", "case": f"t{t}", "dtype": "float32", "mode": mode}
                samples = (1e-6 * t**power,) * 5
                found.add(Record(kind="bench", **named, provenance=found.where, samples_s=samples, metrics=metrics))
    missed = {"interpreted": False, "ok": False, "o: relative error": 3e-6, "o: bound": 1e-6}
    named = {"op": OPS["gdn"], "implementation": "xla", "case": "odd", "dtype": "float32", "mode": "forward+backward"}
    found.add(Record(kind="check", **named, provenance=found.where, metrics=missed))
    report = write_report(found, tmp_path).read_text()
    assert "| Qwen3NextGatedDeltaNet | 1.00 | 1.00 | 1.00 | 1.00 |" in report
    assert "| Attention | 2.00 | 2.00 | 2.00 | 2.00 |" in report
    assert "| gated_delta_rule | xla | odd | float32 | o | 3.0e-06 | 1.0e-06 | **MISS** |" in report
    assert "unknown (not a checkout)" in report
    assert (tmp_path / "time.png").exists()
    assert not (tmp_path / "recall.png").exists()


def test_four_lengths_are_measured_however_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is too slow for any, the first four are; a fifth is left out, and the report says so."""
    size = dataclasses.replace(PRESETS["cpu"], speed_seconds=-1.0)
    where = Provenance("cpu", "cpu", 1, {"jax": "0.12"}, None, "2026-01-01")
    for workers in (1, 2):
        found = Findings("cpu", dataclasses.replace(size, compile_workers=workers), LAYERS, where)
        measured: list[int] = []
        monkeypatch.setattr(benchmark_script, "_measure_lengths", lambda found, lengths, *_: measured.extend(lengths))  # noqa: B023
        benchmark_script._measure_speed(found, Progress())
        assert tuple(measured) == size.seq_lens[:4]
        assert [line.split(":")[0] for line in found.missing] == [f"speed at T={t}" for t in size.seq_lens[4:]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": "kad"}, r"--layers kad is not known; use one of kda, gdn, deltanet, softmax"),
        ({"preset": "cup"}, r"--preset cup is not known; use one of cpu, gpu, tpu, full"),
        ({"parts": "sped"}, r"--parts sped is not known; use one of speed, numerics, recall"),
        ({"seq_lens": "1k"}, r"--seq-lens 1k must be whole numbers with commas between; use 256,1024,4096"),
        ({"seq_lens": "1"}, r"--seq-lens 1 must be at least 2 tokens each; use 256,1024,4096"),
        ({"steps": 3}, r"--steps 3 is too few to learn anything; use 10 or more"),
    ],
)
def test_a_mistyped_word_is_answered_with_the_known_ones(wrong: dict, message: str) -> None:
    with pytest.raises(Mistake, match=message):
        compare(**wrong)


@pytest.mark.slow
def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    done = run("--layers", "kad")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --layers kad is not known; use one of kda, gdn, deltanet, softmax; did you mean kda?"
    ]
