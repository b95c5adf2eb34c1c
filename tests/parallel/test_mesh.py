"""Meshes and rules: what is refused, with its numbers, and arrays that are not where they belong."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.models.config import Config
from tilewright.models.loading import architecture_of
from tilewright.models.sharding import check_mesh, rules_of
from tilewright.parallel import MeshError, Rules, make_mesh, validate_sharding

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "models"


@functools.cache
def architecture(family: str) -> Any:
    return architecture_of(Config(json.loads((GOLDEN / family / "config.json").read_text())))


def test_a_mesh_has_the_axes_that_are_used() -> None:
    mesh = make_mesh(tensor=2, data=-1)
    assert dict(mesh.shape) == {"data": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert dict(make_mesh(devices=jax.devices()[:1], axis_type=AxisType.Auto).shape) == {"data": 1}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor": 0}, r"^tensor=0 must be a positive integer, or -1 for the devices that are left$"),
        ({"data": -1, "fsdp": -1}, r"^data and fsdp are -1; only one axis can take the devices that are left$"),
        (
            {"data": -1, "tensor": 3},
            r"^data=-1: the other axes have 3 devices, which do not divide 4; their product must be one of 1, 2, 4, and "
            r"the nearest is 2$",
        ),
        (
            {"data": 2, "tensor": 4},
            r"^a mesh of data=2 x tensor=4 has 8 devices, and there are 4; use a smaller mesh, or set JAX_NUM_CPU_DEVICES=",
        ),
        (
            {"tensor": 2},
            r"^a mesh of tensor=2 has 2 devices, and there are 4; use data=-1 for all of them, or pass dev",
        ),
        ({"devices": []}, r"^devices=\[\] must be a list of devices, such as jax.devices\(\)\[:4\]$"),
        ({"devices": jax.devices()[:1] * 2}, r"^devices has 2 devices, and 1 of them differ; pass each one once$"),
    ],
)
def test_a_mesh_that_the_devices_do_not_make(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make_mesh(**sizes)


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        (
            "qwen3_next",
            {"tensor": 4},
            r"^Qwen3NextGatedDeltaNet.q_proj of layer 0 has 2 heads; tensor=4 does not divide it, and the nearest that "
            r"works is tensor=2$",
        ),
        ("qwen3_moe", {"expert": 3}, r"has 8 experts; expert=3 does not divide it, .* nearest that works is expert=2$"),
        (
            "qwen3",
            {"fsdp": 2, "model": 2},
            r"^the mesh has an axis 'model', over which nothing is cut; use .*, tensor$",
        ),
        ("qwen3", {"expert": 2}, r"^expert=2: a qwen3 of this config has no experts; use expert=1$"),
        ("qwen3", {"fsdp": 3}, r" channels; fsdp=3 does not divide it, and the nearest that works is fsdp=2$"),
        (
            "kimi_linear",
            {"pipeline": 4},
            r"^a kimi_linear of this config repeats its layer 3 times in a row; pipeline=4 does not divide it, and the "
            r"nearest that works is pipeline=3$",
        ),
        (
            "qwen3",
            {"pipeline": 3},
            r"^pipeline=3 needs Explicit axes, and these are Auto; make the mesh with axis_type=",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_a_model(family: str, sizes: dict[str, int], message: str) -> None:
    kinds = (AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)
    with pytest.raises(MeshError, match=message):
        check_mesh(architecture(family), mesh)


def test_an_array_that_is_not_where_it_belongs_is_named() -> None:
    mesh = make_mesh(fsdp=2, tensor=2)
    rules = Rules({"mixer.q_proj": ("embed", "heads")})
    tree = {"mu": {"mixer": {"q_proj": jnp.zeros((8, 8)), "norm": jnp.zeros(8)}}, "count": jnp.int32(0)}
    placed = rules.placed(tree, mesh)
    validate_sharding(placed, rules, mesh)
    with pytest.raises(MeshError, match=r"^mesh is of type NoneType; use tilewright.parallel.make_mesh"):
        validate_sharding(placed, rules, None)
    assert placed["mu"]["mixer"]["q_proj"].sharding.spec == P("fsdp", "tensor")

    def with_q_proj(x: Any) -> Any:
        return {**placed, "mu": {"mixer": {**placed["mu"]["mixer"], "q_proj": x}}}

    told = {
        r"^mu.mixer.q_proj is on 1 of 4 devices of the mesh": jnp.zeros((8, 8)),
        r"^mu.mixer.q_proj \[8, 8\] is replicated on all 4 devices, and must be cut into 4 parts, .*'fsdp', 'tensor'": P(),
        r"^mu.mixer.q_proj \[8, 8\] is cut as .*'tensor'.*, and must be .*'fsdp', 'tensor'": P("tensor"),
    }
    for message, given in told.items():
        x = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, given)) if isinstance(given, P) else given
        with pytest.raises(MeshError, match=message):
            validate_sharding(with_q_proj(x), rules, mesh)
    with pytest.raises(MeshError, match=r"^mixer.q_proj has 6 along its axis 'heads'; tensor=4 .* is tensor=3$"):
        rules.spec("mixer.q_proj", (8, 6), jax.sharding.AbstractMesh((4,), ("tensor",)))


def test_every_projection_of_every_family_is_cut() -> None:
    """No weight of two axes or more is on every device, but for the filters of one head, and what has no heads to cut."""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("fsdp", "expert", "tensor"))
    for family in ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "kimi_linear"):
        rules = rules_of(architecture(family))
        for run_number, run in enumerate(architecture(family).runs):
            for position, block in enumerate(run.pattern):
                for part in ("mixer", "mlp"):
                    for name, parameter in getattr(block, part).parameters().items():
                        path = f"runs.{run_number}.{position}.{part}.{name}"
                        spec = rules.spec(path, (run.count, *parameter.shape), mesh)
                        assert spec[0] is None if len(spec) else True
                        assert any(spec) or name in ("A_log", "dt_bias", "bias") or "norm" in name, (family, path)
