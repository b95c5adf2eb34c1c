"""`tilewright train`: what it prints and writes, how it ends, and that it goes on."""

import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")

from tests.cli.test_cli import assert_refused, ran, tilewright
from tests.models.test_training import TEXT, TINY
from tilewright import models
from tilewright.cli import train as cli_train
from tilewright.models.training import Training
from tilewright.plan import advice

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny_hybrid.toml"


def written(folder: Path, name: str = "run.toml", **changed: dict[str, Any]) -> None:
    """A TOML file of a small run. The values of a table of JSON are those of TOML, but for nested tables."""
    tables: dict[str, dict[str, Any]] = {
        "data": {"text": ["text.txt"], "seq_len": 16},
        "train": {"steps": 6, "batch_size": 4, "dtype": "float32"},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"every": 2},
        "model.config": TINY,
    }
    for table, values in changed.items():
        tables[table] = {**tables.get(table, {}), **values}
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "text.txt").write_text(TEXT)


def steps_of(path: Path) -> list[dict[str, Any]]:
    return [record for line in path.read_text().splitlines() if "loss" in (record := json.loads(line))]


@pytest.mark.slow
def test_a_device_without_memory_ends_a_run_with_what_would_fit(tmp_path: Path, monkeypatch: Any) -> None:
    def full(self: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 16.00GiB.")

    asked = []
    monkeypatch.setattr(Training, "_advance", full)
    monkeypatch.setattr(advice, "advise", lambda step: asked.append(step) or "out of memory: use remat=full")
    written(tmp_path, train={"steps": 6, "batch_size": 8, "accumulate": 2, "remat": "dots"})
    done = ran("train", "run.toml", cwd=tmp_path)
    assert (done.code, done.stderr) == (1, "error: out of memory: use remat=full\n")
    (step,) = asked
    assert (step.batch, step.tokens, step.accumulate, step.remat, step.mesh) == (16, 16, 2, "dots", ())
    assert json.loads(step.config) == TINY


@pytest.mark.slow
def test_a_run_writes_records_a_plot_and_a_model_and_goes_on_after_ctrl_c(tmp_path: Path, monkeypatch: Any) -> None:
    written(tmp_path)
    done = ran("train", "run.toml", "--out", "straight", cwd=tmp_path)
    assert done.code == 0, done
    assert "qwen3, 2 layers" in done.stdout
    assert "step 6/6  loss " in done.stdout
    assert "tokens/s" in done.stdout
    made = steps_of(tmp_path / "straight" / "records.jsonl")
    assert [record["step"] for record in made] == [1, 2, 3, 4, 5, 6]
    assert made[-1]["tokens"] == 6 * 4 * 16
    assert (tmp_path / "straight" / "loss.png").read_bytes().startswith(b"\x89PNG")
    model = models.load(tmp_path / "straight" / "final", dtype="float32")
    assert np.isfinite(model(np.zeros((1, 4), np.int32))).all()

    real = cli_train._append

    def interrupted(path: Path, record: dict[str, Any]) -> None:
        real(path, record)
        if record.get("step") == 3 and "loss" in record:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(cli_train, "_append", interrupted)
    done = ran("train", "run.toml", cwd=tmp_path)
    assert done.code == 130, done
    # A step is reported while the next one runs.
    assert "interrupted at step 4; the last checkpoint is of step 4" in done.flat
    monkeypatch.setattr(cli_train, "_append", real)
    done = ran("train", "run.toml", cwd=tmp_path)
    assert done.code == 0, done
    assert "resumed from step 4 of runs/run" in done.stdout
    again = steps_of(tmp_path / "runs" / "run" / "records.jsonl")
    assert [(r["step"], r["loss"]) for r in again] == [(r["step"], r["loss"]) for r in made]
    weights = [(tmp_path / at / "final" / "model.safetensors").read_bytes() for at in ("straight", "runs/run")]
    assert weights[0] == weights[1]
    done = ran("train", "run.toml", cwd=tmp_path)
    assert done.code == 0
    assert "nothing is left to do" in done.stdout


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    written(tmp_path, "key.toml", train={"stepz": 3})
    written(tmp_path, "length.toml", data={"seq_len": -4})
    written(tmp_path, "file.toml", data={"text": ["none.txt"]})
    written(tmp_path, "type.toml", optimizer={"learning_rate": "fast"})
    written(tmp_path, "vocabulary.toml", **{"model.config": {"vocab_size": 100}})
    written(tmp_path, "family.toml", **{"model.config": {"model_type": "gpt"}})
    (tmp_path / "broken.toml").write_text("[train\n")
    assert_refused(
        (("train", "none.toml"), "none.toml does not exist; pass a TOML file"),
        (("train", "broken.toml"), "broken.toml cannot be read as TOML"),
        (("train", "key.toml"), "[train] has no key 'stepz'; its keys are steps"),
        (("train", "length.toml"), "[data] seq_len=-4 must be positive"),
        (("train", "file.toml"), "/none.txt does not exist"),
        (("train", "type.toml"), "[optimizer] learning_rate='fast' must be a number"),
        (("train", "vocabulary.toml"), "text.txt has token 122, and the model's vocabulary has 100"),
        (("train", "family.toml"), "model_type='gpt' is not known"),
        (("train", "length.toml", "--track", "paper"), "--track paper is not known; use wandb or wandb-offline"),
        cwd=tmp_path,
    )


@pytest.mark.slow
def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    written(tmp_path, optimizer={"learning_rate": 1e30}, train={"clip_norm": 0.0})
    done = ran("train", "run.toml", cwd=tmp_path)
    assert done.code == 2
    assert "is nan at step 2; there is no checkpoint. Lower learning_rate, which was" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_example_is_read_and_its_first_steps_learn(tmp_path: Path) -> None:
    done = ran("train", str(EXAMPLE), "--out", str(tmp_path / "run"), "--steps", "8")
    assert done.code == 0, done
    losses = [record["loss"] for record in steps_of(tmp_path / "run" / "records.jsonl")]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    written(tmp_path)
    # In a process of its own: wandb's service outlives the run, and tests after it would join it.
    done = tilewright("train", "run.toml", "--track", "wandb-offline", cwd=tmp_path)
    assert done.returncode == 0, done
    assert list((tmp_path / "runs" / "run").glob("wandb/offline-run-*/*.wandb"))
