"""Models on meshes: losses, gradients and tokens as on one device, and the collectives of a step."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

pytest.importorskip("optax")
pytest.importorskip("grain")
pytest.importorskip("orbax.checkpoint")

from tests.models.test_training import GOLDEN, assert_close, config_of, gradients, some_batch
from tests.ops.composition import collectives
from tilewright import models
from tilewright.models import generation
from tilewright.models.training import Training
from tilewright.parallel import MeshError, Pipeline, make_mesh, validate_sharding
from tilewright.parallel.rules import batch_spec

ROOT = Path(__file__).resolve().parent.parent.parent
LINEAR, FULL = "linear_attention", "full_attention"


@functools.cache
def model_of(family: str, layers: tuple[str, ...] = (FULL, FULL)) -> Any:
    """A family's model with these layers; Qwen3-Next without experts, and Kimi Linear with experts behind attention."""
    of_layers = {"num_hidden_layers": len(layers), "layer_types": list(layers)}
    values = json.loads((GOLDEN / family / "config.json").read_text()) | of_layers
    if family == "qwen3_next":
        values["mlp_only_layers"] = list(range(len(layers)))
    if family == "kimi_linear":
        values["mlp_layer_types"] = ["sparse" if layer == FULL else "dense" for layer in layers]
    return models.init(values, jax.random.key(0), "float32")


@functools.cache
def on_one_device(family: str, layers: tuple[str, ...], rows: int, table: Any) -> Any:
    model = model_of(family, layers)
    batch = some_batch(model.architecture.vocab_size, (table.accumulate, rows, 16))
    return jax.tree.map(np.asarray, gradients(model.architecture, table)(model.weights, batch))


@dataclass(frozen=True)
class Case:
    family: str
    mesh: dict[str, Any]
    layers: tuple[str, ...] = (FULL, FULL)
    rows: int = 4
    pipeline: Pipeline = field(default_factory=Pipeline)
    found: dict[str, int] | None = None
    """The collectives of a step's loss and gradients, but for all-reduces; None for any."""
    remat: str = "none"
    prefetch: bool = False
    accumulate: int = 1


# Each axis alone and together, over the five families. FSDP gathers each of the 6 weights of a layer that have a model
# axis, once forward and once backward (the layers are a loop), and the embedding for the lookup and as the head. With data
# or tensor alone there are sums only. Two of eight experts on four devices: rows are sent to those that need them, and what
# is gathered are choices and logits, for the losses of the router.
CASES = {
    "fsdp": Case("qwen3", {"fsdp": 4}, found={"all-gather": 14}),
    "tensor": Case("qwen3", {"tensor": 2}, found={}),
    "expert": Case("qwen3_moe", {"expert": 4}, (FULL,), found={"all-gather": 3, "all-to-all": 6}),
    "context": Case("kimi_linear", {"context": 4}, (FULL,)),
    # Batches that follow each other through the stages.
    "pipeline": Case(
        "qwen3_5_text", {"pipeline": 2}, (LINEAR, FULL) * 4, pipeline=Pipeline(interleave=2), accumulate=3
    ),
    "pipeline x tensor": Case("qwen3_moe", {"pipeline": 2, "tensor": 2}, accumulate=2),
    "fsdp x expert": Case("qwen3_moe", {"fsdp": 2, "expert": 2}, (FULL,)),
    "context x tensor": Case("qwen3_next", {"context": 2, "tensor": 2}, (LINEAR, FULL)),
    # The backward pass begins with the two weights of the last layer's MLP, and gathers them before its loop, too.
    "fsdp, prefetched": Case("qwen3", {"fsdp": 4}, found={"all-gather": 16}, prefetch=True),
    "fsdp x expert, prefetched": Case("qwen3_moe", {"fsdp": 2, "expert": 2}, remat="ops", prefetch=True),
}
# On eight devices, in a process of its own: this one has four.
OF_EIGHT = Case("qwen3", {"data": 2, "fsdp": 2, "tensor": 2}, found={"all-gather": 14})


def check(case: Case, folder: Path) -> None:
    own = {"remat": case.remat, "prefetch": case.prefetch, "accumulate": case.accumulate}
    table = config_of(folder, train={"moe_z_loss": 1e-3, **own}).train
    model = model_of(case.family, case.layers)
    mesh = make_mesh(**case.mesh, devices=jax.devices()[: int(np.prod(list(case.mesh.values())))])
    placed = model.shard(mesh)
    validate_sharding(placed.weights, model.rules(), mesh)
    batch = some_batch(model.architecture.vocab_size, (case.accumulate, case.rows, 16))
    batch = jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh, 3, leading=1)))
    with jax.set_mesh(mesh):
        graded = gradients(model.architecture, table, case.pipeline)
        compiled = graded.lower(placed.weights, batch).compile()
        got = compiled(placed.weights, batch)
    assert_close(got, on_one_device(case.family, case.layers, case.rows, table), 1e-5)
    validate_sharding(got[2], model.rules(), mesh)
    found = collectives(compiled)
    found.pop("all-reduce", None)
    assert case.found is None or found == case.found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    check(CASES[name], tmp_path)


@pytest.mark.slow
def test_eight_devices(tmp_path: Path) -> None:
    code = (
        "import tests.conftest, jax, pathlib\njax.config.update('jax_num_cpu_devices', 8)\n"
        f"from tests.models.test_meshes import OF_EIGHT, check\ncheck(OF_EIGHT, pathlib.Path({str(tmp_path)!r}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layers", "mesh"),
    [
        ("qwen3", (FULL, FULL), {"context": 2, "tensor": 2}),  # The cache is whole along its tokens.
        ("qwen3_moe", (FULL,), {"fsdp": 2, "expert": 2}),
    ],
)
def test_generation_token_for_token(family: str, layers: tuple[str, ...], mesh: dict[str, Any]) -> None:
    model = model_of(family, layers)
    prompts = [[1, 2, 3, 4], [6, 7, 8, 9]]
    np.testing.assert_array_equal(model.shard(make_mesh(**mesh)).generate(prompts, 4), model.generate(prompts, 4))


@pytest.mark.slow
def test_logits_of_weights_that_are_cut_where_the_ids_are_not() -> None:
    """FSDP without tensor: the vocabulary is whole, and so are ids that nobody has placed."""
    model = model_of("qwen3", (FULL,))
    ids = np.arange(12).reshape(4, 3)
    placed = model.shard(make_mesh(fsdp=4))
    np.testing.assert_allclose(placed(ids), model(ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_over_data_are_decoded_token_for_token() -> None:
    model = model_of("qwen3", (FULL,))
    placed = model.shard(make_mesh(data=2, tensor=2))
    prompts = [[1, 2], [6, 7], [8], [5]]
    drawn = [each.generate(prompts, 4, temperature=0.8, top_k=9) for each in (placed, model)]
    for one, other in zip(*drawn, strict=True):
        np.testing.assert_array_equal(one, other)
    batch = generation.Batch(placed, rows=2, capacity=8)
    rows = [batch.join(prompts[0])]
    batch.step()
    rows.append(batch.join(prompts[1]))
    batch.step()
    for row, prompt, tokens in zip(rows, prompts, (2, 1), strict=False):
        np.testing.assert_array_equal(batch.leave(row), model.generate([prompt], tokens)[0])
    # A prefix that was read on one device.
    row = batch.join([3], prefix=model.read_prefix(prompts[1], capacity=8))
    batch.step()
    np.testing.assert_array_equal(batch.leave(row), model.generate([[*prompts[1], 3]], 1)[0])
    with placed.on_mesh():
        logits, states = generation._read_prompts(placed, [np.asarray(each) for each in prompts], 8)
    assert jax.typeof(logits).sharding.spec[0] == "data"
    assert {jax.typeof(leaf).sharding.spec[1] for leaf in jax.tree.leaves(states)} == {"data"}  # Repeats, then rows.
    assert generation.rows_over(placed, 3) == ()  # Rows that it does not divide stay whole.


@pytest.mark.slow
def test_training_over_layers_and_tokens_goes_on_without_a_mesh(tmp_path: Path) -> None:
    def losses(folder: str, steps: int, **tables: Any) -> list[float]:
        config = config_of(tmp_path, train={"steps": steps}, optimizer={"schedule": "constant"}, **tables)
        run = Training(config, tmp_path / folder)
        found = [metrics.loss for metrics in run.steps()]
        run.close()
        return found

    first = losses("cut", 2, mesh={"pipeline": 2, "context": 2}, pipeline={"microbatches": 2})
    np.testing.assert_allclose(first + losses("cut", 3), losses("whole", 3), rtol=1e-5)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            {"train": {"batch_size": 6}, "mesh": {"data": 2, "fsdp": 2}},
            r"^batch_size=6 rows cannot be cut into 4 parts, data=2 x fsdp=2; use batch_size=8$",
        ),
        (
            {"data": {"seq_len": 18}, "mesh": {"context": 4}},
            r"^seq_len=18 tokens: context=4 does not divide it, and the nearest that works is context=3; or use seq_len=20",
        ),
        (
            {"mesh": {"pipeline": 2, "tensor": 1, "data": 2}, "pipeline": {"microbatches": 4}},
            r"^microbatches=4 with pipeline=2 and a batch of 2 rows on each pipeline: .* use microbatches=2$",
        ),
        (
            {"mesh": {"pipeline": 2, "data": 2}, "pipeline": {"interleave": 2}},
            r"^a qwen3 of this config repeats its layer 2 times in a row; pipeline=2 with interleave=2 needs a multiple of "
            r"4, and the nearest that works is interleave=1$",
        ),
    ],
)
def test_what_the_mesh_does_not_cut(tables: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(MeshError, match=told):
        Training(config_of(tmp_path, **tables), tmp_path / "run")


@pytest.mark.slow
def test_stages_do_not_generate() -> None:
    model = model_of("qwen3").shard(make_mesh(pipeline=2, tensor=2))
    with pytest.raises(
        MeshError, match=r"^the stages of a pipeline keep no states, so they cannot generate; use a mesh w"
    ):
        model.generate([[1, 2]], 1)
    with pytest.raises(MeshError, match=r"^a batch of 3 rows cannot be cut into 2 parts, pipeline=2; use 4 rows"):
        model(np.ones((3, 4), np.int32))
