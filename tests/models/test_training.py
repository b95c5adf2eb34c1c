"""Training: packed rows, the step, schedules, LoRA, and runs that are killed and go on with the same bits."""

import dataclasses
import functools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")

from tilewright import models
from tilewright.models import lora, training
from tilewright.models.checkpoint import CheckpointError
from tilewright.models.data import Documents, Rows, batches
from tilewright.models.objective import Objective, gradients_of
from tilewright.models.train_config import LoraTable, TrainConfig, TrainConfigError
from tilewright.models.training import Training, TrainState

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "models"
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "kimi_linear")
TEXT = "The quick brown fox jumps over the lazy dog. " * 12

TINY = {
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def config_of(folder: Path, **changed: dict[str, Any]) -> TrainConfig:
    """A small run in `folder`; each keyword changes a table."""
    (folder / "text.txt").write_text(TEXT)
    values: dict[str, Any] = {
        "model": {"config": TINY},
        "data": {"text": ["text.txt"], "seq_len": 16},
        "train": {"steps": 6, "batch_size": 4, "dtype": "float32"},
        "optimizer": {"learning_rate": 0.01},
        "checkpoint": {"every": 2},
    }
    for name, table in changed.items():
        values[name] = {**values.get(name, {}), **table} if name != "model" else table
    return TrainConfig.of(values, folder / "run.toml")


def documents(*lengths: int) -> Documents:
    """Documents whose tokens count from 0."""
    starts = np.cumsum([0, *lengths[:-1]])
    return Documents(np.arange(sum(lengths)), starts, 0)


def test_rows_hold_every_token_once_and_labels_end_with_a_document() -> None:
    rows = Rows(documents(3, 6, 1, 4), 5)
    assert len(rows) == 3
    ids, labels, segments = (np.stack([rows[n][name] for n in range(3)]) for name in ("ids", "labels", "segment_ids"))
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 0]])
    # The document of 3..8 continues in the second row: token 4 has its label, token 8 is the last.
    np.testing.assert_array_equal(labels, [[1, 2, -100, 4, 5], [6, 7, 8, -100, -100], [11, 12, 13, -100, -100]])
    np.testing.assert_array_equal(segments, [[1, 1, 1, 2, 2], [1, 1, 1, 1, 2], [1, 1, 1, 1, 0]])


def test_documents_of_text_and_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab--c")
    text = config_of(tmp_path).data
    (tmp_path / "text.txt").write_text("ab--c")
    read = Documents.read(dataclasses.replace(text, separator="--", end_of_document=7), 256)
    np.testing.assert_array_equal(read.tokens, [97, 98, 7, 99, 7])
    np.testing.assert_array_equal(read.starts, [0, 3])
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 7, 3, 4, 7], np.uint16))
    table = dataclasses.replace(text, text=(), tokens=tmp_path / "tokens.npy", end_of_document=7)
    read = Documents.read(table, 8)
    np.testing.assert_array_equal(read.starts, [0, 3])
    np.testing.assert_array_equal(Rows(read, 4)[0]["labels"], [2, 7, -100, 4])
    with pytest.raises(TrainConfigError, match=r"tokens.npy has token 7, and the model's vocabulary has 7, 0 to 6"):
        Documents.read(table, 7)


def test_an_epoch_has_every_row_and_the_order_resumes() -> None:
    def read(count: int, state: Any = None) -> tuple[list[list[int]], Any]:
        rows = batches(documents(48), 4, 3, seed=5)
        if state is not None:
            rows.set_state(state)
        return [next(rows)["ids"][:, 0].tolist() for _ in range(count)], rows.get_state()

    straight, _ = read(8)
    first, second = np.ravel(straight[:4]), np.ravel(straight[4:])
    assert sorted(first) == sorted(second) == list(range(0, 48, 4))
    assert first.tolist() != second.tolist()
    begun, state = read(3)
    resumed, _ = read(5, json.loads(json.dumps(state)))
    assert begun + resumed == straight


def test_a_run_is_the_same_from_every_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_of(tmp_path)  # Writes the text.
    values = {"model": {"config": TINY}, "data": {"text": ["text.txt"], "seq_len": 16}, "train": {"steps": 1}}
    monkeypatch.chdir(tmp_path)
    here = TrainConfig.of(values, "run.toml").identity()
    monkeypatch.chdir("/")
    assert TrainConfig.of(values, tmp_path / "run.toml").identity() == here
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    assert TrainConfig.of(values, moved / "run.toml").identity() == here


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": {"stepz": 3}}, r"run.toml: \[train\] has no key 'stepz'; its keys are steps, batch_size"),
        ({"train": {"steps": "many"}}, r"\[train\] steps='many' must be an integer"),
        ({"train": {"steps": True}}, r"\[train\] steps=True must be an integer"),
        ({"train": {"dtype": "float8"}}, r"\[train\] dtype='float8' is not known; use bfloat16, float32"),
        ({"data": {"seq_len": 0}}, r"\[data\] seq_len=0 must be positive"),
        ({"data": {"text": ["none.txt"]}}, r"\[data\] text: .*none.txt does not exist"),
        ({"data": {"text": []}}, r"\[data\] needs one of text \(a list of files\) and tokens"),
        ({"model": {}}, r"\[model\] needs one of config \(a table\) and path"),
        ({"model": {"config": TINY, "pretrained": True}}, r"\[model\] pretrained=true needs a path"),
        ({"mesh": {"data": 0}}, r"\[mesh\] data=0 must be positive, or -1 for the devices that are left"),
        ({"train": {"seed": 2**32}}, r"\[train\] seed=4294967296 must be from 0 to 4294967295"),
        ({"optimizer": {"learning_rate": -1}}, r"\[optimizer\] learning_rate=-1.0 must be 0 or more"),
        ({"optimizer": {"b1": 1.0}}, r"\[optimizer\] b1=1.0 must be less than 1"),
        ({"lora": {"rank": 2}}, r"\[lora\] has no alpha, which it needs"),
        ({"speed": {"high": 1}}, r"\[speed\] is not known; the tables are model, data"),
    ],
)
def test_mistakes_in_a_file_are_one_line(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainConfigError, match=message) as error:
        config_of(tmp_path, **changed)
    assert "\n" not in str(error.value)


def test_mistakes_in_the_config_of_a_model_name_its_table(tmp_path: Path) -> None:
    misspelt = {"num_hiden_layers" if key == "num_hidden_layers" else key: TINY[key] for key in TINY}
    told = r"^\[model.config\] has no 'num_hidden_layers'; .*; is 'num_hiden_layers' a misspelling of it\?$"
    with pytest.raises(CheckpointError, match=told):
        Training(config_of(tmp_path, model={"config": misspelt}), tmp_path / "run")


def test_schedules(tmp_path: Path) -> None:
    def rates(**table: Any) -> list[float]:
        config = config_of(tmp_path, optimizer={"learning_rate": 1.0, "final_fraction": 0.2, **table})
        rate = training.schedule_of(config.optimizer, 9)
        return [float(rate(step)) for step in range(9)]

    assert rates(schedule="constant", warmup_steps=2) == [0.5] + [1.0] * 8
    np.testing.assert_allclose(rates(schedule="linear")[::4], [1.0, 0.6, 0.2], rtol=1e-6)
    np.testing.assert_allclose(rates(schedule="cosine", warmup_steps=4)[3::5], [1.0, 0.2], rtol=1e-6)
    assert rates(schedule="cosine", warmup_steps=8)[7:] == pytest.approx([1.0, 0.2])


def made(family: str = "") -> tuple[Any, Any]:
    """The architecture and float32 weights of a golden model, or of a tiny one."""
    model = models.load(GOLDEN / family, dtype="float32") if family else models.init(TINY, jax.random.key(0), "float32")
    return model.architecture, model.weights


def some_batch(vocabulary: int, shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Random rows of two documents each, the second half as long, and padding."""
    rng = np.random.default_rng(0)
    t = shape[-1]
    ids = rng.integers(0, vocabulary, shape, np.int32)
    segments = np.broadcast_to(np.where(np.arange(t) < t // 2, 1, np.where(np.arange(t) < 3 * t // 4, 2, 0)), shape)
    labels = np.where((np.roll(segments, -1, -1) == segments) & (segments > 0), np.roll(ids, -1, -1), -100)
    return {
        name: jnp.asarray(x, jnp.int32) for name, x in (("ids", ids), ("labels", labels), ("segment_ids", segments))
    }


@functools.cache
def gradients(architecture: Any, table: Any, pipeline: Any = None) -> Any:
    """The objective, its parts and its gradients, as a step computes them of (weights, batch)."""
    objective = Objective(architecture, table, pipeline)
    return jax.jit(lambda weights, batch: gradients_of(objective, weights, batch))


def assert_close(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"labels": (1, 4, 8)}, r"ids \[2, 4, 8\], labels \[1, 4, 8\], .*all must be \[A, B, T\]"),
        ({"ids": (4, 8), "labels": (4, 8), "segment_ids": (4, 8)}, r"batch\['ids'\]\[None\] of a single one"),
        ({"ids": (3, 4, 8), "labels": (3, 4, 8), "segment_ids": (3, 4, 8)}, "the first axis must be accumulate=2"),
        ({"segment_ids": None}, "the batch has no segment_ids; .* as None where each row is one document"),
    ],
)
def test_batches_that_are_not_those_of_a_step_are_refused(tmp_path: Path, change: Any, told: str) -> None:
    architecture, weights = made()
    table = dataclasses.replace(config_of(tmp_path).train, accumulate=2)
    shapes = dict.fromkeys(("ids", "labels", "segment_ids"), (2, 4, 8)) | change
    batch = {name: jnp.ones(shape, jnp.int32) for name, shape in shapes.items() if shape is not None}
    with pytest.raises(training.TrainingError, match=told):
        gradients_of(Objective(architecture, table), weights, batch)


@pytest.mark.slow
def test_accumulation_is_one_large_batch_and_documents_do_not_see_each_other(tmp_path: Path) -> None:
    architecture, weights = made()
    table = config_of(tmp_path, train={"z_loss": 0.1}).train
    batch = some_batch(256, (2, 2, 16))
    # Microbatches with different numbers of labels.
    batch["labels"] = batch["labels"].at[0, :, :5].set(-100)
    large = jax.tree.map(lambda x: x.reshape(1, 4, 16), batch)
    accumulated = gradients(architecture, dataclasses.replace(table, accumulate=2))(weights, batch)
    whole = gradients(architecture, table)
    assert_close(accumulated, whole(weights, large))
    # Other tokens of the first document change nothing for the second.
    large["labels"] = jnp.where(large["segment_ids"] == 2, large["labels"], -100)
    other = {**large, "ids": jnp.where(large["segment_ids"] == 1, 255 - large["ids"], large["ids"])}
    assert float(whole(weights, large)[0]) == float(whole(weights, other)[0]) > 0


def test_decay_is_of_matrices() -> None:
    _, weights = made()
    mask = training._matrices(weights)
    decayed = {jax.tree_util.keystr(path): value for path, value in jax.tree_util.tree_leaves_with_path(mask)}
    for path, value in decayed.items():
        assert value == ("norm" not in path), path


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits_in_one_process(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run = Training(config, tmp_path / "straight")
    straight = [metrics.loss for metrics in run.steps()]
    assert len(straight) == 6
    assert straight[-1] < straight[0]
    begun = Training(config, tmp_path / "resumed")
    losses = []
    for metrics in begun.steps():  # Steps 1 to 3; the checkpoint is of step 2.
        losses.append(metrics.loss)
        if metrics.step == 3:
            break
    assert begun.last_checkpoint == 2
    resumed = Training(config, tmp_path / "resumed")
    assert resumed.step == 2
    assert losses[:2] + [metrics.loss for metrics in resumed.steps()] == straight
    for one, other in zip(jax.tree.leaves(run._done.state), jax.tree.leaves(resumed._done.state), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(training.TrainingError, match=r"has a run with optimizer.b1=0.9, and this one has 0.8"):
        Training(config_of(tmp_path, optimizer={"b1": 0.8}), tmp_path / "resumed")
    (tmp_path / "text.txt").write_text(TEXT.upper())
    with pytest.raises(training.TrainingError, match="has a run with checksum="):
        Training(dataclasses.replace(config), tmp_path / "resumed")


def test_lora_begins_with_the_frozen_weights() -> None:
    architecture, weights = made()
    table = LoraTable(rank=2, alpha=4.0, targets=("q_proj", "gate_up"))
    factors = lora.init(architecture, table, jax.random.key(0))
    assert_close(lora.merged(weights, factors, table), weights, 0)
    with pytest.raises(TrainConfigError, match=r"\[lora\] targets has 'x_proj', and this model has .*q_proj"):
        lora.init(architecture, dataclasses.replace(table, targets=("x_proj",)), jax.random.key(0))


@pytest.mark.slow
def test_lora_trains_its_factors_only(tmp_path: Path) -> None:
    table = {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "gate_up"]}
    model = {"path": str(GOLDEN / "qwen3"), "pretrained": True}
    config = config_of(tmp_path, model=model, lora=table, train={"steps": 2})
    run = Training(config, tmp_path / "run")
    before = models.load(GOLDEN / "qwen3", dtype="float32")
    assert_close(run.model().weights, before.weights, 0)
    assert run.num_trained < run.num_parameters / 4
    losses = [metrics.loss for metrics in run.steps()]
    assert losses[1] < losses[0]
    after = run.model()
    changed = {
        jax.tree_util.keystr(path).split(".")[-1]
        for (path, one), other in zip(
            jax.tree_util.tree_leaves_with_path(after.weights), jax.tree.leaves(before.weights), strict=True
        )
        if not np.array_equal(one, other)
    }
    assert changed == {"q_proj", "gate_up"}


# Qwen3-Next's layers are those of Qwen3.5, and its experts those of Qwen3-MoE.
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_next"])
def test_every_family_learns_a_batch(family: str, tmp_path: Path) -> None:
    """And with experts, the losses of the router are there, and biases move."""
    model = {"path": str(GOLDEN / family), "pretrained": True}
    config = config_of(
        tmp_path, model=model, train={"steps": 12, "dtype": "bfloat16", "moe_bias_rate": 0.01, "moe_z_loss": 1e-3}
    )
    architecture, weights = made(family)
    step = training.step_function(architecture, config.train, config.optimizer)
    optimizer = training.optimizer_of(config.train, config.optimizer)
    biases = [np.asarray(leaf) for leaf in _biases(weights)]
    state = TrainState(jnp.int32(0), weights, jax.jit(optimizer.init)(weights))
    batch, losses = some_batch(architecture.vocab_size, (1, 2, 32)), []
    for _ in range(12):
        state, metrics = step(state, None, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0], losses
    sparse = family not in ("qwen3", "qwen3_5_text")
    assert ("moe_load_balance" in metrics) == sparse
    assert sparse == (float(metrics["objective"]) > losses[-1])
    for before, after in zip(biases, _biases(state.weights), strict=True):
        assert not np.array_equal(before, after)


def _biases(weights: Any) -> list[Any]:
    blocks = [own.mlp for run in weights.runs for own in run]
    return [mlp.bias for mlp in blocks if getattr(mlp, "bias", None) is not None]


@pytest.mark.slow
def test_remat_changes_nothing_but_memory(tmp_path: Path) -> None:
    architecture, weights = made("qwen3_5_text")
    batch = some_batch(architecture.vocab_size, (1, 1, 32))
    table = config_of(tmp_path).train
    expected = gradients(architecture, table)(weights, batch)
    for name in ("full", "dots", "ops"):
        got = gradients(architecture, dataclasses.replace(table, remat=name))(weights, batch)
        assert_close(got, expected, 1e-4)


CHILD = """
import os, signal, sys, threading
import orbax.checkpoint as ocp
from tilewright.models.train_config import TrainConfig
from tilewright.models.training import Training
path, folder, when = sys.argv[1:]
def kill(): os.kill(os.getpid(), signal.SIGKILL)
real = ocp.CheckpointManager.save
def save(*args, **kwargs):
    if when == "saving":
        threading.Timer(0.005, kill).start()
    return real(*args, **kwargs)
ocp.CheckpointManager.save = save
run = Training(TrainConfig.read(path), folder)
with open(folder + "/losses.txt", "a") as file:
    for metrics in run.steps():
        print(metrics.step, metrics.loss.hex(), file=file, flush=True)
        if when == str(metrics.step):
            kill()
run.model().save(folder + "/final")
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    """SIGKILL between steps, and while a checkpoint is written."""
    (tmp_path / "text.txt").write_text(TEXT)
    config = "".join(f"{key} = {json.dumps(value)}\n" for key, value in TINY.items())
    (tmp_path / "run.toml").write_text(
        f'[data]\ntext = ["text.txt"]\nseq_len = 16\n[train]\nsteps = 6\nbatch_size = 4\n'
        f"[optimizer]\nlearning_rate = 0.01\n[checkpoint]\nevery = 2\n[model.config]\n{config}"
    )

    def ran(folder: str, when: str) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        words = [sys.executable, "-c", CHILD, str(tmp_path / "run.toml"), str(tmp_path / folder), when]
        return subprocess.run(words, timeout=300, capture_output=True).returncode

    assert ran("straight", "never") == 0
    assert [ran("killed", when) for when in ("3", "saving", "never")] == [-signal.SIGKILL, -signal.SIGKILL, 0]

    def losses(folder: str) -> dict[str, set[str]]:
        """The losses that each step had, in every process that made it."""
        found: dict[str, set[str]] = {}
        for line in (tmp_path / folder / "losses.txt").read_text().splitlines():
            step, loss = line.split()
            found.setdefault(step, set()).add(loss)
        return found

    straight = losses("straight")
    assert len(straight) == 6
    weights = (tmp_path / "straight" / "final" / "model.safetensors").read_bytes()
    assert losses("killed") == straight
    assert (tmp_path / "killed" / "final" / "model.safetensors").read_bytes() == weights
