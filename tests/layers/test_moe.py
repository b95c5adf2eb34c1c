"""The MoE layer: against loops over tokens and experts, from checkpoints, quantised, on meshes, and its errors."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.layers.equations import sigmoid, softmax
from tests.ops.composition import mesh_of
from tilewright.layers import MLP, MoE
from tilewright.layers.moe import MoEWeights
from tilewright.models.checkpoint import Checkpoint

D, E, F = 24, 6, 16
LAYERS: dict[str, MoE] = {
    "qwen3_moe": MoE(d_model=D, num_experts=E, experts_per_token=2, expert_dim=F, normalize=False),
    "qwen3_next": MoE(d_model=D, num_experts=E, experts_per_token=3, expert_dim=F, shared_dim=8, shared_gate=True),
    "kimi_linear": MoE(
        d_model=D,
        num_experts=E,
        experts_per_token=2,
        expert_dim=F,
        scoring="sigmoid",
        scale=2.446,
        selection_bias=True,
        groups=(3, 2),
        shared_dim=2 * F,
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def weights(name: str, dtype: str = "float32") -> MoEWeights:
    drawn = LAYERS[name].init(jax.random.key(0), dtype)
    return drawn if drawn.bias is None else dataclasses.replace(drawn, bias=jnp.linspace(-0.3, 0.3, E))


@functools.cache
def jitted(name: str) -> Any:
    return jax.jit(LAYERS[name].apply)


def tokens(b: int = 2, t: int = 7, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(1), (b, t, D)).astype(dtype)


def expert(x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (gate * sigmoid(gate) * up) @ down


def one_token(layer: MoE, w: MoEWeights, x: np.ndarray) -> np.ndarray:
    """y of one token, by a loop over its experts, in NumPy and float64."""
    logits = x @ w.router
    scores = softmax(logits) if layer.scoring == "softmax" else sigmoid(logits)
    wanted = scores if w.bias is None else scores + w.bias
    if layer.groups is not None:
        each = wanted.reshape(layer.groups[0], -1)
        worst = np.argsort(-np.sort(each, axis=1)[:, -2:].sum(1), kind="stable")[layer.groups[1] :]
        each[worst] = -np.inf
        wanted = each.reshape(-1)
    chosen = np.argsort(-wanted, kind="stable")[: layer.experts_per_token]
    share = scores[chosen] / (scores[chosen].sum() if layer.normalize else 1.0) * layer.scale
    y = sum(part * expert(x, w.gate_up[e], w.down[e]) for part, e in zip(share, chosen, strict=True))
    if layer.shared_dim:
        gate = sigmoid(x @ w.shared_gate) if layer.shared_gate else 1.0
        y = y + gate * expert(x, w.shared_gate_up, w.shared_down)
    return y


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "qwen3_next")), "kimi_linear"]
)
def test_a_loop_over_tokens_and_experts(name: str) -> None:
    x, layer = tokens(), LAYERS[name]
    y, routing = jitted(name)(weights(name), x)
    held = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights(name))
    want = [[one_token(layer, held, token) for token in row] for row in np.asarray(x, np.float64)]
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)
    assert routing.logits.shape == (2, 7, E)
    assert routing.logits.dtype == routing.weights.dtype == jnp.float32
    assert routing.experts.shape == routing.weights.shape == (2, 7, layer.experts_per_token)
    np.testing.assert_allclose(routing.logits, np.asarray(x, np.float64) @ held.router, atol=1e-5)


def every_expert(layer: MoE, w: MoEWeights, x: jax.Array) -> jax.Array:
    """All experts of all tokens, weighted by zeros where they are not chosen."""
    logits = jnp.einsum("btd,de->bte", x, w.router)
    share, experts = tilewright.moe_route(logits, layer.experts_per_token, normalize=layer.normalize)
    of_each = jnp.sum(share[..., None] * jax.nn.one_hot(experts, E), axis=2)  # [B, T, E]
    z = jnp.einsum("btd,edpf->btepf", x, w.gate_up)
    y = jnp.einsum("btef,efd->bted", jax.nn.silu(z[..., 0, :]) * z[..., 1, :], w.down)
    return jnp.einsum("bte,bted->btd", of_each, y)


@pytest.mark.slow
def test_gradients_are_those_of_all_experts_with_zeros() -> None:
    layer, x, w = LAYERS["qwen3_moe"], tokens(), weights("qwen3_moe")

    def gradient(apply: Any) -> Any:
        return jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(apply(w, x))), (0, 1)))(w, x)

    got = gradient(lambda w, x: layer.apply(w, x)[0])
    want = gradient(functools.partial(every_expert, layer))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


# Checkpoints.


@functools.cache
def checkpoint(name: str) -> tuple[dict[str, Any], Checkpoint]:
    """config.json and the tensors of a golden model."""
    folder = Path(__file__).resolve().parent.parent / "golden" / "models" / name
    return json.loads((folder / "config.json").read_text()), Checkpoint(folder)


def moe_of(config: dict[str, Any], **changes: Any) -> MoE:
    return MoE(
        d_model=config["hidden_size"],
        num_experts=config.get("num_experts") or config["num_local_experts"],
        experts_per_token=config.get("num_experts_per_tok") or config["num_experts_per_token"],
        expert_dim=config["moe_intermediate_size"],
        **changes,
    )


def test_all_experts_in_one_tensor_are_the_same_weights() -> None:
    """As newer versions of transformers write them: gate above up, [E, 2 F, D], and [E, D, F]."""
    config, tensors = checkpoint("qwen3_moe")
    layer, prefix = moe_of(config), "model.layers.0.mlp."
    each = layer.from_checkpoint(tensors, prefix)

    def of_all(name: str) -> np.ndarray:
        return np.stack([tensors[f"{prefix}experts.{e}.{name}.weight"] for e in range(layer.num_experts)])

    fused = {
        f"{prefix}gate.weight": tensors[f"{prefix}gate.weight"],
        f"{prefix}experts.gate_up_proj": np.concatenate([of_all("gate_proj"), of_all("up_proj")], axis=1),
        f"{prefix}experts.down_proj": of_all("down_proj"),
    }
    again = layer.from_checkpoint(fused, prefix)
    for one, other in zip(jax.tree.leaves(each), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_of_other_sizes_is_told() -> None:
    config, tensors = checkpoint("qwen3_moe")
    layer = moe_of(config, shared_dim=64)
    with pytest.raises(ValueError, match=r"tensors has no 'model.layers.0.mlp.shared_expert.gate_proj.weight'"):
        layer.from_checkpoint(tensors, "model.layers.0.mlp")
    wide = dataclasses.replace(moe_of(config), expert_dim=32)
    with pytest.raises(
        ValueError, match=r"experts.0.gate_proj.weight has shape \[64, 64\] and this layer needs \[32, 64\]"
    ):
        wide.from_checkpoint(tensors, "model.layers.0.mlp")


def test_a_missing_tensor_of_many_experts_names_a_few() -> None:
    layer = dataclasses.replace(LAYERS["qwen3_moe"], num_experts=16)
    shapes = jax.eval_shape(lambda: layer.to_checkpoint(layer.init(jax.random.key(0), "float32")))
    tensors = {name: np.zeros(each.shape, "float32") for name, each in shapes.items()}
    del tensors["experts.15.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"no 'experts.15.up_proj.weight'; .* it has 48 others, such as experts"
    ) as told:
        jax.eval_shape(lambda: layer.from_checkpoint(tensors))
    assert len(str(told.value)) < 250


# Dtypes.


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        pytest.param("int8", None, marks=pytest.mark.slow),
        pytest.param("int4", (8, 1), marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", (8, 8), marks=pytest.mark.slow),
    ],
)
def test_quantised_experts_are_their_dequantised_values(dtype: str, block: Any) -> None:
    layer, x, w = LAYERS["qwen3_next"], tokens(), weights("qwen3_next")
    quantized = layer.quantize(w, dtype, block=block)
    assert quantized.router is w.router
    plain = {
        name: tilewright.dequantize(getattr(quantized, name)).reshape(getattr(w, name).shape)
        for name in ("gate_up", "down", "shared_gate_up", "shared_down")
    }
    got, _ = jitted("qwen3_next")(quantized, x)
    want, _ = jitted("qwen3_next")(dataclasses.replace(w, **plain), x)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"weights.router is quantised; only gate_up, down, .* can be"):
        layer.apply(dataclasses.replace(w, router=tilewright.quantize(w.router, "int8")), x)
    with pytest.raises(ValueError, match=r"weights.gate_up is int8\[6, 24, 2, 8\] and this MoE takes \[6, 24, 2, 16\]"):
        layer.apply(dataclasses.replace(w, gate_up=tilewright.quantize(jnp.ones((E, D, F)), "int8")), x)


def test_weights_that_cannot_be_quantised_are_named() -> None:
    layer = LAYERS["qwen3_moe"]

    def quantized(*blocks: Any) -> MoEWeights:
        drawn = layer.init(jax.random.key(0), "float32")
        return functools.reduce(lambda w, block: layer.quantize(w, "int8", block=block), blocks, drawn)

    for blocks, told in (
        (((24, 1),), r"weights.down, as x \[..., 16, 24\]: block=\(24, 1\) does not divide the 16 rows"),
        ((None, None), r"weights.gate_up is quantised already, QuantizedArray\(int8\[6, 24, 32\]"),
    ):
        with pytest.raises(ValueError, match=told):
            jax.eval_shape(functools.partial(quantized, *blocks))


@pytest.mark.parametrize(
    "layer", [LAYERS["qwen3_moe"], MLP(d_model=D, hidden_dim=F)], ids=lambda layer: type(layer).__name__
)
def test_gates_that_a_mesh_axis_cuts_get_the_remedy_that_quantises_them(layer: Any) -> None:
    mesh = mesh_of(AxisType.Explicit)

    def struct(shape: tuple[int, ...], *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))

    shapes = {name: parameter.shape for name, parameter in layer.parameters().items()}
    cut = {"gate_up": ("x",) + (None,) * (len(shapes["gate_up"]) - 2) + ("y",)}
    cut["down"] = (None,) * (len(shapes["down"]) - 2) + ("y",)
    weights = layer.weights(**{name: struct(shape, *cut.get(name, ())) for name, shape in shapes.items()})
    told = r"weights.gate_up .* over mesh axis 'y' .*pass jax.sharding.reshard\(weights.gate_up, P\('x'\)\) as gate_up$"

    def quantized(w: Any) -> Any:
        with pytest.raises(ValueError, match=told):
            layer.quantized(w, "int8")
        whole = jax.sharding.reshard(w.gate_up, P("x"))
        return layer.quantized(dataclasses.replace(w, gate_up=whole), "int8")

    with jax.set_mesh(mesh):
        assert jax.eval_shape(quantized, weights).gate_up.stored.shape == (*shapes["gate_up"][:-2], 2 * F)


@pytest.mark.slow
@every_layer
def test_float32_weights_take_bfloat16_activations(name: str) -> None:
    x = tokens()
    exact, _ = jitted(name)(weights(name), x.astype(jnp.bfloat16).astype(jnp.float32))
    y, routing = jitted(name)(weights(name), x.astype(jnp.bfloat16))
    assert (y.dtype, routing.logits.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=0, atol=0.05 * float(jnp.max(jnp.abs(exact))))
    gradient = jax.grad(lambda w: jnp.sum(LAYERS[name].apply(w, x.astype(jnp.bfloat16))[0].astype(jnp.float32)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(gradient, weights(name)))} == {"float32"}
    half = weights(name, "bfloat16")
    assert {leaf.dtype.name for leaf in (half.router, half.gate_up, half.down)} == {"bfloat16"}
    y, _ = jitted(name)(half, x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


def test_no_tokens_at_all() -> None:
    y, routing = jitted("qwen3_moe")(weights("qwen3_moe"), tokens()[:, :0])
    assert y.shape == (2, 0, D)
    assert routing.experts.shape == (2, 0, 2)


def test_explain_shows_the_products() -> None:
    told = tilewright.explain(LAYERS["qwen3_next"].apply, weights("qwen3_next"), tokens())
    assert [one.op for one in told.decisions] == ["grouped_matmul", "grouped_matmul", "matmul", "matmul"]


# Meshes.


def with_losses(layer: MoE, w: MoEWeights, x: jax.Array) -> Any:
    y, routing = layer.apply(w, x)
    balance = tilewright.moe_load_balance_loss(routing.logits, routing.experts)
    return jnp.sum(jnp.sin(y)) + balance + 0.1 * tilewright.moe_z_loss(routing.logits), y


def assert_same(got: Any, want: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(theirs)))))


SHARDINGS: dict[str, dict[str, P]] = {
    "replicated": {},
    "tensor parallel": {
        "gate_up": P(None, None, None, "y"),
        "down": P(None, "y"),
        "shared_gate_up": P(None, None, "y"),
        "shared_down": P("y"),
    },
    "expert parallel": {"gate_up": P("y"), "down": P("y"), "router": P(None, "y")},
    "expert parallel, tokens exchanged": {"gate_up": P("x", None, None, "y"), "down": P("x", "y")},
    "FSDP": {"gate_up": P(None, "x"), "down": P(None, None, "x"), "router": P("x"), "shared_down": P(None, "x")},
}


@functools.cache
def on_one_device() -> Any:
    """A jitted function of weights and x, and its results."""
    run = jax.jit(jax.value_and_grad(functools.partial(with_losses, LAYERS["qwen3_next"]), (0, 1), has_aux=True))
    return run, run(weights("qwen3_next"), tokens(4, 6))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "kind"),
    [*((sharding, AxisType.Explicit) for sharding in SHARDINGS), ("tensor parallel", AxisType.Auto)],
)
def test_sharded_weights_and_tokens(sharding: str, kind: AxisType) -> None:
    """Values, gradients and losses are those of one device; on Explicit axes everything stays where it was."""
    w, x = weights("qwen3_next"), tokens(4, 6)
    run, want = on_one_device()
    mesh, specs = mesh_of(kind), SHARDINGS[sharding]
    with jax.set_mesh(mesh):
        named = {
            name: None if leaf is None else jax.device_put(leaf, NamedSharding(mesh, specs.get(name, P())))
            for name, leaf in vars(w).items()
        }
        placed = MoEWeights(**named), jax.device_put(x, NamedSharding(mesh, P("x")))
        got = run(*placed)
    assert_same(got, want)
    if kind == AxisType.Explicit:
        assert got[0][1].sharding.spec == P("x", None, None)
        for gradient, given in zip(jax.tree.leaves(got[1]), jax.tree.leaves(placed), strict=True):
            assert gradient.sharding.is_equivalent_to(given.sharding, given.ndim)


@pytest.mark.slow
def test_data_parallel_in_shard_map() -> None:
    layer, w, x = LAYERS["kimi_linear"], weights("kimi_linear"), tokens(4, 6)
    mesh = mesh_of(AxisType.Auto)

    def total(w: MoEWeights, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sum(jnp.sin(layer.apply(w, x)[0])), ("x", "y"))

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(P(), P(("x", "y"))), out_specs=P())
    got = jax.jit(jax.grad(sharded, (0, 1)))(w, x)
    assert_same(got, jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(layer.apply(w, x)[0])), (0, 1)))(w, x))


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 7}, r"experts_per_token=7 cannot be chosen from num_experts=6; use 1 to 6"),
        ({"expert_dim": 0}, r"expert_dim=0 must be a positive integer"),
        ({"groups": (4, 2)}, r"groups=\(4, 2\): 4 groups do not divide E=6 experts; use a divisor of 6"),
        ({"shared_dim": -1}, r"shared_dim=-1 must be the channels of the shared expert, or 0 for none"),
        (
            {"shared_gate": True},
            r"shared_gate=True and shared_dim=0: there is no shared expert to gate; give shared_dim",
        ),
    ],
)
def test_a_layer_that_makes_no_sense_is_refused_when_built(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LAYERS["qwen3_moe"], **change)


def test_wrong_arguments_are_named_with_their_remedy() -> None:
    layer, w, x = LAYERS["qwen3_moe"], weights("qwen3_moe"), tokens()
    for change, message in (
        ({"x": x[0]}, r"x is float32\[7, 24\]; it must be \[B, T, D\] with D=24; pass x\[None\]"),
        ({"x": x[..., 1:]}, r"its last axis must be d_model=24: make the layer with d_model=23"),
        ({"state": 1}, r"state is a int, and MoE has no state; pass None"),
        ({"weights": weights("qwen3_next")}, r"weights.shared_gate_up is float32\[24, 2, 8\] and this MoE takes None"),
        (
            {"weights": dataclasses.replace(w, down=w.down[:, 1:])},
            r"weights.down is .* and this MoE takes \[6, 16, 24\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            layer.apply(**{"weights": w, "x": x} | change)
