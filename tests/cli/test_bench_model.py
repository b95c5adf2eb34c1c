"""`tilewright bench model`: its table and records, what it counts, and what it refuses."""

import dataclasses
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from tilewright.cli.main import app
from tilewright.cli.screen import Mistake
from tilewright.models.loading import init
from tilewright.workbench import model_bench
from tilewright.workbench.bench import Timing
from tilewright.workbench.model_bench import PRESETS, Subject, Workload, decode_bytes, work_flops
from tilewright.workbench.peers.registry import Refused
from tilewright.workbench.records import read_records


def bench(*words: str) -> str:
    done = CliRunner().invoke(app, ["bench", "model", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_decoding_of_a_tiny_model(tmp_path: Path) -> None:
    """And a peer that is absent is named, and nothing else ends."""
    path = tmp_path / "records.jsonl"
    words = ("tiny", "--layers", "1", "--run", "decode:2x8", "--seconds", "0.05", "--records", str(path))
    shown = bench(*words, "--against", "transformers")
    assert "tiny 1 layers decode:2x8" in shown
    (record,) = read_records(path)
    assert (record.op, record.implementation, record.mode) == ("model", "tilewright", "forward")
    assert record.metrics["tokens_per_s"] == pytest.approx(2 / record.median_s)
    assert f"transformers: transformers is not installed for {sys.executable}" in shown.replace("\n", " ")


@pytest.mark.slow
def test_training_and_prefill_of_a_tiny_model(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    bench("tiny", "--layers", "4", "--run", "train:1x16,prefill:1x16", "--seconds", "0.05", "--records", str(path))
    train, prefill = read_records(path)
    assert (train.mode, prefill.mode) == ("forward+backward", "forward")
    loss = train.metrics["loss"]
    assert isinstance(loss, float)
    assert 5 < loss < 8  # The logarithm of 320 is 5.8.
    assert train.metrics["parameters"] == prefill.metrics["parameters"]


def test_presets_have_the_sizes_that_their_names_say() -> None:
    sizes = {
        "qwen3-0.6b": 0.6,
        "qwen3-1.7b": 1.72,
        "qwen3-4b": 4.02,
        "qwen3-8b": 8.19,
        "qwen3-30b-a3b": 30.5,
        "kimi-linear-48b": 49.1,
        "hybrid-1.5b": 1.53,
    }
    for preset, billions in sizes.items():
        weights = jax.eval_shape(lambda preset=preset: init(PRESETS[preset], jax.random.key(0))).weights
        count = sum(leaf.size for leaf in jax.tree.leaves(weights))
        assert count / 1e9 == pytest.approx(billions, rel=0.01), preset


def test_what_is_counted() -> None:
    """By hand, for Qwen3-1.7B: 28 layers of 50.3M weights, and a head of 311M that is the embedding, too."""
    subject, matrices, head = Subject("qwen3-1.7b"), 28 * 50_331_648, 151_936 * 2048
    attention = 28 * 2.0 * 2048 * 4096  # Two products over half of 4,096 tokens.
    want = 3 * (2.0 * (matrices + head) + attention) * 4 * 4096
    assert work_flops(subject, Workload("train", 4, 4096)) == pytest.approx(want, rel=1e-3)
    cache = 28 * 2 * 8 * 128 * 2 * (1024 + 16)
    assert decode_bytes(subject, Workload("decode", 64, 1024)) == pytest.approx(
        2 * (matrices + head) + 64 * cache, rel=1e-3
    )
    # Of 128 experts, 8 of one row are read.
    experts = 3 * 2048 * 768 * 2 * 48
    one = decode_bytes(Subject("qwen3-30b-a3b"), Workload("decode", 1, 1024))
    assert one == pytest.approx(8 * experts + 2 * (151_936 * 2048 + 48 * (2048 * 4096 * 2 + 2048 * 512 * 2)), rel=0.03)


PEER = """
def run(job, samples, versions):
    if job["remat"]:
        raise NotImplementedError("it keeps everything")
    assert job["config"]["hidden_size"] == 64 and job["workload"] == {"what": "train", "batch": 2, "tokens": 8}
    taken = samples(lambda: None, lambda _: None, 0.001)
    return {"samples_s": taken, "metrics": {"parameters": 7}, "versions": {"fake": "1"}, "device": "cpu"}
"""


def test_a_peer_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bench, "_FOLDER", tmp_path)
    (tmp_path / "model_of_fake.py").write_text(PEER)
    peer = dataclasses.replace(model_bench.TRANSFORMERS, name="fake")
    workload, timing = Workload("train", 2, 8), Timing(seconds=0.01)
    record = model_bench.bench_peer_model(peer, Subject("tiny"), workload, timing)
    assert (record.implementation, record.case, record.metrics["peer"]) == ("fake", "tiny train:2x8", True)
    assert record.metrics["parameters"] == 7
    assert record.metrics["flops_per_s"] == pytest.approx(work_flops(Subject("tiny"), workload) / record.median_s)
    assert record.provenance.versions["fake"] == "1"
    with pytest.raises(Refused, match="it keeps everything"):
        model_bench.bench_peer_model(peer, Subject("tiny", remat="full"), workload, timing)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["gpt-2"], "PRESET gpt-2 is not known; use one of tiny, qwen3-0.6b"),
        (["tiny", "--layers", "5"], "--layers 5 must be from 1 to 4, the layers of tiny"),
        (["tiny", "--run", "train:4"], "--run 'train:4' must be train, prefill or decode with rows and tokens"),
        (["tiny", "--run", "decode:0x4"], "--run 'decode:0x4' must be"),
        (["tiny", "--remat", "all"], "--remat all is not known; use one of none, full, dots, ops"),
        (["tiny", "--quantize", "int8"], "--quantize int8 is for prefill and decode"),
        (["tiny", "--against", "jax"], "--against jax is not known; use one of transformers"),
        (["tiny", "--peer-python", "python"], "--peer-python is where peers are installed"),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    with pytest.raises(Mistake) as raised:
        CliRunner().invoke(app, ["bench", "model", *words], catch_exceptions=False)
    assert text in str(raised.value)
