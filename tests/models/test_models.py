"""Models against checkpoints, logits and tokens that transformers wrote; what is saved; prompts, rows and prefixes."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright import models
from tilewright.models import Batch, CheckpointError, Model, Prefix, Sampling, generation
from tilewright.models.architecture import hidden_states, initial_states, logits_of
from tilewright.models.block import runs_of
from tilewright.models.checkpoint import Checkpoint
from tilewright.models.config import Config
from tilewright.models.generation import pieces
from tilewright.ops.rope.api import Yarn

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "models"
FAMILIES = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "kimi_linear")
# In the default tier: the dense model.
every_family = pytest.mark.parametrize(
    "family", [name if name == "qwen3" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
# Those with every kind of layer, for what does not depend on the family.
HYBRIDS = ("qwen3_next", "kimi_linear")
# Logits are about 1. All layers sum in float32 in another order than torch.
TOLERANCE = 1e-4


@functools.cache
def held(family: str) -> tuple[Model, dict[str, np.ndarray]]:
    return models.load(GOLDEN / family, dtype="float32"), dict(np.load(GOLDEN / family / "golden.npz"))


@every_family
def test_logits(family: str) -> None:
    model, golden = held(family)
    np.testing.assert_allclose(model(golden["input_ids"]), golden["logits"], rtol=0, atol=TOLERANCE)


@every_family
def test_greedy_tokens(family: str) -> None:
    """The prompt is read in pieces, then the tokens one by one."""
    model, golden = held(family)
    got = model.generate(golden["input_ids"][:1, :16], max_new_tokens=24)
    np.testing.assert_array_equal(got, golden["generated"])


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_in_chunks_and_token_by_token(family: str) -> None:
    """`test_greedy_tokens` has the tokens of every family, in pieces and one by one; this has the numbers."""
    model, golden = held(family)
    states = initial_states(model.architecture, 2, 77, jnp.float32)
    step = jax.jit(lambda ids, states: hidden_states(model.architecture, model.weights, ids, states)[:2])
    got, at = [], 0
    for size in (1, 38, 38):
        x, states = step(jnp.asarray(golden["input_ids"][:, at : at + size]), states)
        got.append(logits_of(model.weights, x))
        at += size
    np.testing.assert_allclose(jnp.concatenate(got, axis=1), golden["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model, golden = held(family)
    ids = golden["input_ids"][:1, :75]
    segments = np.repeat([[0, 1, 0]], 25, axis=1)  # The third is not the first, although they share an id.
    alone = [model(part) for part in np.split(ids, 3, axis=1)]
    np.testing.assert_allclose(model(ids, segments), np.concatenate(alone, axis=1), rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_is_what_was_read(family: str, tmp_path: Path) -> None:
    """The same tensors under the same names, to the bit."""
    model, _ = held(family)
    model.save(tmp_path)
    read, written = Checkpoint(GOLDEN / family), Checkpoint(tmp_path)
    assert set(read) == set(written)
    for name in read:
        assert read.shape(name) == written.shape(name), name
        np.testing.assert_array_equal(read[name], written[name], name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "distance"),
    [("qwen3_next", "int8", 0.04), ("qwen3", "float8_e4m3fn", 0.06), ("kimi_linear", "int4", 0.25)],
)
def test_quantised_weights_are_near(family: str, dtype: str, distance: float) -> None:
    """Relative distance of the logits, of models with 64 channels and random weights."""
    _, golden = held(family)
    got = models.load(GOLDEN / family, dtype="float32", quantize=dtype)(golden["input_ids"])
    error = np.linalg.norm(np.asarray(got) - golden["logits"]) / np.linalg.norm(golden["logits"])
    assert 1e-4 < error < distance


@pytest.mark.slow
def test_bfloat16_is_near() -> None:
    _, golden = held("kimi_linear")
    model = models.load(GOLDEN / "kimi_linear")
    assert model.dtype == jnp.bfloat16
    got = np.asarray(model(golden["input_ids"]), np.float32)
    assert np.linalg.norm(got - golden["logits"]) / np.linalg.norm(golden["logits"]) < 0.03


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    """Two files and an index give the same model."""
    source = Checkpoint(GOLDEN / "qwen3")
    names = sorted(source)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        shapes = {name: (source[name].dtype, source.shape(name)) for name in part}
        models.checkpoint.write(tmp_path / file, shapes, ((name, source[name]) for name in part))
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(GOLDEN / "qwen3" / "config.json", tmp_path)
    again, (model, _) = models.load(tmp_path, dtype="float32"), held("qwen3")
    jax.tree.map(np.testing.assert_array_equal, again.weights, model.weights)
    # What is saved beside them is what is read from then on.
    changed = dataclasses.replace(model, weights=jax.tree.map(lambda leaf: 2 * leaf, model.weights))
    changed.save(tmp_path)
    again = models.load(tmp_path, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, again.weights, changed.weights)


@pytest.mark.slow
def test_weights_on_a_mesh() -> None:
    """Sharded over heads, hidden channels, experts and the vocabulary: the same logits."""
    _, golden = held("kimi_linear")
    mesh = jax.make_mesh((2, 2), ("tensor", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = models.load(GOLDEN / "kimi_linear", dtype="float32", mesh=mesh)
    assert model.weights.head.sharding.spec == jax.sharding.PartitionSpec(None, "tensor")
    leaves = jax.tree.leaves(model.weights.runs)
    assert any("tensor" in leaf.sharding.spec for leaf in leaves)
    assert any("expert" in leaf.sharding.spec for leaf in leaves)
    np.testing.assert_allclose(model(golden["input_ids"]), golden["logits"], rtol=0, atol=TOLERANCE)


def test_runs_of_hybrids() -> None:
    """Layers that repeat are scanned together, whatever their period."""

    def sizes(kinds: str) -> list[tuple[int, int]]:
        return [(len(run.pattern), run.count) for run in runs_of(tuple(kinds))]

    assert sizes("a" * 36) == [(1, 36)]
    assert sizes("gggf" * 12) == [(4, 12)]
    assert sizes("d" + "kkfk" * 6 + "kf") == [(1, 1), (4, 6), (1, 1), (1, 1)]
    assert sizes("ab") == [(1, 1), (1, 1)]


@pytest.mark.slow
def test_random_weights_of_a_config() -> None:
    config = json.loads((GOLDEN / "qwen3" / "config.json").read_text())
    model = models.init(config, jax.random.key(0), "float32")
    assert model.num_parameters == held("qwen3")[0].num_parameters
    logits = model(np.zeros((1, 3), np.int32))
    assert np.isfinite(logits).all()


# Generation.


@pytest.mark.slow
def test_prompts_of_different_lengths_give_what_each_gives_alone() -> None:
    model, golden = held("qwen3")
    prompts = [golden["input_ids"][0, :5].tolist(), golden["input_ids"][1, :16].tolist(), [7]]
    for row, prompt in zip(model.generate(prompts, 6), prompts, strict=True):
        np.testing.assert_array_equal(row, model.generate([prompt], 6)[0])


@pytest.mark.slow
def test_rows_join_and_leave_a_running_batch() -> None:
    """Each gives what it gives alone, and so does one that continues from a prefix that is saved and shared.

    Kimi Linear's state has what a row can have: delta states, tails of convolutions, and latents with lengths.
    """
    model, golden = held("kimi_linear")
    first, second = golden["input_ids"][0, :9].tolist(), golden["input_ids"][1, :20].tolist()
    batch = Batch(model, rows=2, capacity=40)
    one = batch.join(first)
    batch.step()
    two = batch.join(second)
    for _ in range(4):
        batch.step()
    np.testing.assert_array_equal(batch.leave(one), model.generate([first], 5)[0])
    prefix = model.read_prefix(second[:12], capacity=40)
    three = batch.join(second[12:], prefix=prefix)
    for _ in range(3):
        batch.step()
    alone = model.generate([second], 7)[0]
    np.testing.assert_array_equal(batch.leave(two), alone)
    np.testing.assert_array_equal(batch.leave(three), alone[:-4])


@pytest.mark.slow
def test_a_prefix_is_saved_and_restored(tmp_path: Path) -> None:
    model, golden = held("kimi_linear")
    ids = golden["input_ids"][0, :14].tolist()
    prefix = model.read_prefix(ids, capacity=32)
    prefix.save(tmp_path / "prefix.safetensors")
    again = Prefix.load(tmp_path / "prefix.safetensors", model)
    assert again.ids == prefix.ids
    jax.tree.map(np.testing.assert_array_equal, again.states, prefix.states)
    with pytest.raises(CheckpointError, match="another model's prefix"):
        Prefix.load(tmp_path / "prefix.safetensors", held("qwen3")[0])


def test_a_prefix_is_for_the_same_weights_only(tmp_path: Path) -> None:
    model, _ = held("qwen3")
    prefix = model.read_prefix([1, 2], capacity=4)
    prefix.save(tmp_path / "new" / "prefix.safetensors")
    tuned = jax.tree.map(lambda leaf: leaf.at[(0,) * leaf.ndim].multiply(1.5), model)
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model)
    for other, told in ((tuned, "a model with other weights"), (halved, "no states.* of bfloat16")):
        with pytest.raises(CheckpointError, match=told):
            Prefix.load(tmp_path / "new" / "prefix.safetensors", other)
        with pytest.raises(ValueError, match="prefix is of a model with other weights, or in another dtype"):
            other.read_prefix([3], capacity=4, prefix=prefix)
        with pytest.raises(ValueError, match="prefix is of a model with other weights, or in another dtype"):
            Batch(other, rows=1, capacity=4).join([3], prefix=prefix)
    with pytest.raises(CheckpointError, match="is a folder; give the name of a file in it"):
        prefix.save(tmp_path)
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("beside", [{}, {"rope_theta": 10_000.0, "rope_type": "default"}])
def test_rope_scaling_counts_beside_rope_parameters(beside: dict[str, Any]) -> None:
    """As in transformers, which writes one of them and reads both."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    read = Config({"rope_theta": 10_000.0, "rope_scaling": scaling, "rope_parameters": beside}).rope()
    assert read == {"rope_theta": 10_000.0, "rope_fraction": 1.0, "rope_scaling": Yarn(4.0, 32)}
    with pytest.raises(CheckpointError, match="rope_type='foo' is not known"):
        Config({"rope_scaling": {"rope_type": "foo"}, "rope_parameters": beside}).rope()


@pytest.mark.slow
def test_stop_tokens_end_a_row() -> None:
    model, golden = held("qwen3")
    whole = model.generate(golden["input_ids"][:1, :16], 24)[0]
    stop = int(whole[20])
    (row,) = model.generate(golden["input_ids"][:1, :16], 24, stop_tokens=[stop])
    first = 16 + whole[16:].tolist().index(stop)
    np.testing.assert_array_equal(row, whole[: first + 1])


def test_sampling() -> None:
    """Only tokens that top-k and top-p leave are drawn, as often as their probabilities say."""
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    rows = jnp.broadcast_to(logits, (4000, 4))
    keys = jax.random.split(jax.random.key(0), 4000)

    def shares(**options: Any) -> np.ndarray:
        return np.bincount(Sampling(**options).choose(rows, keys), minlength=4) / 4000

    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.4), [1, 0, 0, 0])
    # The two most probable have 0.625 and 0.375 of what top_k leaves.
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2, top_p=0.6), [1, 0, 0, 0])
    np.testing.assert_allclose(shares(), [1, 0, 0, 0])


@pytest.mark.slow
def test_a_seed_gives_the_same_tokens() -> None:
    model, golden = held("qwen3")
    prompt = golden["input_ids"][:2, :16]
    drawn = [model.generate(prompt, 6, temperature=1.0, top_p=0.9, seed=seed) for seed in (0, 0, 1)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    alone = model.generate(prompt[1:], 6, temperature=1.0, top_p=0.9, seed=1)
    np.testing.assert_array_equal(drawn[0][1:], alone)
    batch = Batch(model, rows=2, capacity=32, sampling=Sampling(temperature=1.0, top_p=0.9))
    row = batch.join(prompt[1].tolist(), seed=1)
    for _ in range(6):
        batch.step()
    np.testing.assert_array_equal(batch.leave(row), alone[0])


def test_pieces_of_prompts() -> None:
    assert list(pieces(77)) == [64, 8, 4, 1]
    assert list(pieces(1024 + 513)) == [512, 512, 512, 1]
    assert list(pieces(1024 + 513, 8192)) == [1024, 512, 1]


# What is refused.


def copy(tmp_path: Path, **changed: Any) -> Path:
    shutil.copytree(GOLDEN / "qwen3", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not known; known are qwen3, qwen3_moe"),
        ({"num_hidden_layers": 4, "layer_types": None}, r"'model.layers.3.input_layernorm.weight'"),
        ({"num_hidden_layers": 10**6, "layer_types": None}, r"'model.layers.3.input_layernorm.weight'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 layers, and num_hidden_layers=3"),
        (
            {"num_hidden_layers": 2, "layer_types": None},
            "11 tensors that a qwen3 of this config does not use, such as 'model.layers.2",
        ),
        ({"intermediate_size": 96}, r"gate_proj.weight has shape \[128, 64\] and this layer needs \[96, 64\]"),
        ({"vocab_size": 300}, r"has shape \[320, 64\] and config.json says \[300, 64\]"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not known"),
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu' is"),
        (
            {"layer_types": ["sliding_attention"] * 3},
            "layer_types has 'sliding_attention'; only 'full_attention' is supported",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
    ],
)
def test_a_config_that_does_not_fit(changed: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=told):
        models.load(copy(tmp_path, **changed))


def test_broken_files(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"is cut off: '.*' ends at byte"):
        models.load(folder)
    file.write_bytes(whole[:5])
    with pytest.raises(CheckpointError, match="is not a safetensors file, or is cut off"):
        models.load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        models.load(folder)
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        models.load(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        models.load(folder)


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Although it has as many elements."""
    folder = copy(tmp_path)
    file = folder / "model.safetensors"
    named, place = b'q_proj.weight":{"dtype":"F32","shape":[128,64]', file.read_bytes()
    assert named in place
    file.write_bytes(place.replace(named, named.replace(b"[128,64]", b"[64,128]")))
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \[64, 128\] and this layer needs \[128, 64\]"):
        models.load(folder)


def test_integers_are_no_weights(tmp_path: Path) -> None:
    folder = copy(tmp_path)
    file = folder / "model.safetensors"
    named = b'q_proj.weight":{"dtype":"F32"'
    file.write_bytes(file.read_bytes().replace(named, named.replace(b"F32", b"I32")))
    with pytest.raises(CheckpointError, match=r"safetensors: '.*q_proj.weight' is of int32, and weights are floating"):
        models.load(folder)


@pytest.mark.slow
def test_a_quantised_model_is_not_saved(tmp_path: Path) -> None:
    model = models.load(GOLDEN / "qwen3", quantize="int8")
    with pytest.raises(ValueError, match=r"^a quantised model cannot be saved; save the one it was made from"):
        model.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_bad_ids_and_options() -> None:
    model, _ = held("qwen3")
    assert np.isnan(jax.jit(lambda ids: model(ids))(jnp.array([[-1, 2]]))).all()
    prefix = model.read_prefix([1, 2], capacity=4)
    with pytest.raises(ValueError, match="prefix has room for 64 tokens and capacity=80"):
        Batch(model, rows=1, capacity=80).join([], prefix=prefix)
    with pytest.raises(ValueError, match="input_ids has 320, and the vocabulary has 320 tokens, 0 to 319"):
        model(np.full((1, 3), 320))
    with pytest.raises(ValueError, match=r"pass input_ids\[None\] for one sequence"):
        model(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="a prompt is empty"):
        model.generate([[1, 2], []], 3)
    with pytest.raises(ValueError, match="capacity=10 is too small for a prompt of 8 tokens and max_new_tokens=3"):
        model.generate(np.zeros((1, 8), np.int32), 3, capacity=10)
    with pytest.raises(ValueError, match="temperature=-1 must be 0"):
        model.generate([[1]], 2, temperature=-1)
    with pytest.raises(ValueError, match=r"stop_tokens=\['a'\] must be a list of ids"):
        generation.generate(model, [[1]], 2, Sampling(), stop_tokens=["a"])
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"seed=.* must be an integer from 0 to 4294967295"):
            model.generate([[1]], 2, seed=seed)
        with pytest.raises(ValueError, match=r"seed=.* must be an integer from 0 to 4294967295"):
            Batch(model, rows=1, capacity=4).join([1], seed=seed)
    for segments in (np.zeros((1, 3), int), np.zeros(4, int), np.zeros((2, 4))):
        with pytest.raises(
            ValueError, match=r"segment_ids is .*; it must be integers \[B, T\] = \[2, 4\], as input_ids"
        ):
            model(np.zeros((2, 4), int), segment_ids=segments)
    with pytest.raises(ValueError, match="capacity=0 must be a positive integer"):
        Batch(model, rows=1, capacity=0)
    with pytest.raises(ValueError, match="the prompt has 3 tokens, and capacity=3 has no room for one more"):
        Batch(model, rows=1, capacity=3).join([1, 2, 3])
    with pytest.raises(CheckpointError, match=r"none is not a file; pass one that Prefix.save wrote"):
        Prefix.load("none", model)
    with pytest.raises(ValueError, match="quantize='int16' must be one of"):
        models.load(GOLDEN / "qwen3", quantize="int16")
