"""Models on meshes: losses, gradients and tokens as on one device, and the collectives of a step."""

import functools
import json
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
from tilewright.models.training import Training
from tilewright.parallel import MeshError, make_mesh, validate_sharding
from tilewright.parallel.rules import batch_spec


@functools.cache
def model_of(family: str) -> Any:
    values = json.loads((GOLDEN / family / "config.json").read_text())
    return models.init({**values, "num_hidden_layers": 2}, jax.random.key(0), "float32")


@functools.cache
def on_one_device(family: str, table: Any) -> Any:
    model = model_of(family)
    batch = some_batch(model.architecture.vocab_size, (1, 4, 16))
    return jax.tree.map(np.asarray, gradients(model.architecture, table)(model.weights, batch))


# The collectives of a step's loss and gradients. FSDP gathers each of the 6 weights of a layer that have a model axis, once
# forward and once backward (the layers are a loop), and the embedding for the lookup and as the head. Tokens are exchanged
# for experts.
MESHES: dict[str, tuple[str, dict[str, Any], dict[str, int] | None]] = {
    "fsdp x tensor": ("qwen3", {"fsdp": 2, "tensor": 2}, {"all-gather": 14}),
    "fsdp x expert": ("qwen3_moe", {"fsdp": 2, "expert": 2}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MESHES)
def test_losses_and_gradients_are_those_of_one_device(case: str, tmp_path: Path) -> None:
    family, sizes, gathers = MESHES[case]
    table = config_of(tmp_path, train={"moe_z_loss": 1e-3}).train
    model = model_of(family)
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    placed = model.shard(mesh)
    validate_sharding(placed.weights, model.rules(), mesh)
    batch = some_batch(model.architecture.vocab_size, (1, 4, 16))
    batch = jax.device_put(batch, NamedSharding(mesh, batch_spec(mesh, 3, leading=1)))
    with jax.set_mesh(mesh):
        compiled = gradients(model.architecture, table).lower(placed.weights, batch).compile()
        got = compiled(placed.weights, batch)
    assert_close(got, on_one_device(family, table), 1e-5)
    validate_sharding(got[2], model.rules(), mesh)
    found = collectives(compiled)
    found.pop("all-reduce")
    assert found == gathers if gathers is not None else {"all-gather", "reduce-scatter"} == set(found)


@pytest.mark.slow
def test_generation_token_for_token() -> None:
    model = model_of("qwen3")
    prompts = [[1, 2, 3, 4], [6, 7, 8, 9]]
    mesh = make_mesh(fsdp=2, tensor=2)
    np.testing.assert_array_equal(model.shard(mesh).generate(prompts, 4), model.generate(prompts, 4))


def test_rows_that_the_mesh_does_not_cut(tmp_path: Path) -> None:
    told = r"^batch_size=6 rows cannot be cut into 4 parts, data=2 x fsdp=2; use batch_size=8$"
    with pytest.raises(MeshError, match=told):
        Training(config_of(tmp_path, train={"batch_size": 6}, mesh={"data": 2, "fsdp": 2}), tmp_path / "run")
