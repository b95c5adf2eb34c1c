"""Layers whose weights and tokens are sharded over Explicit mesh axes: values, gradients, shardings and states."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.layers.test_layers import LAYERS, QUICK, every_layer, jitted, tokens, weights
from tests.ops.composition import collectives
from tilewright.layers.mla import LatentAttention
from tilewright.parallel import make_mesh
from tilewright.parallel.rules import spec_of

# The mesh axis of the batch, and of each projection's d_model and heads.
PLACEMENTS = {
    "batch": ("x", None, None),
    "heads": (None, None, "y"),
    "batch and heads": ("x", None, "y"),
    "fsdp and heads": ("x", "x", "y"),
    "d_model": (None, "x", None),
}
every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def mesh_of(**axes: int) -> Any:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def spec(field: str, d_model: str | None, heads: str | None) -> P:
    """The placement of one field of the weights."""
    if field in ("norm", "q_norm", "k_norm"):
        return P()
    if field in ("A_log", "dt_bias"):
        return P(heads)
    if field == "o_proj":
        return P(heads, d_model)
    if field.endswith("_down"):
        return P(d_model)
    return P(d_model if field.endswith("_proj") else None, heads)


def placed(name: str, mesh: Any, batch: str | None, d_model: str | None, heads: str | None, t: int = 6) -> Any:
    """A layer's weights, and tokens [2, t, D]."""

    def put(x: Any, spec: P) -> Any:
        return jax.device_put(x, NamedSharding(mesh, spec))

    given = {field: value for field, value in vars(weights(name)).items() if value is not None}
    cut = {field: put(value, spec(field, d_model, heads)) for field, value in given.items()}
    return dataclasses.replace(weights(name), **cut), put(tokens(2, t), P(batch))


@functools.cache
def with_gradients(name: str) -> Any:
    """The gradients of the weights and the tokens; y and the state after it."""

    def loss(w: Any, x: jax.Array, state: Any) -> Any:
        y, after = LAYERS[name].apply(w, x, state, implementation=QUICK)
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves((y, after)) if leaf.dtype == jnp.float32]
        return sum(squares, start=jnp.zeros(())), (y, after)

    return jax.jit(jax.grad(loss, (0, 1), has_aux=True))


@functools.cache
def unsharded(name: str) -> Any:
    return jax.tree.map(np.asarray, with_gradients(name)(weights(name), tokens(2, 6), None))


def assert_close(got: Any, want: Any) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5 * max(1.0, float(np.max(np.abs(other)))))


@pytest.mark.slow
@every_placement
@every_layer
def test_values_and_gradients(name: str, placement: str) -> None:
    """Results are where the arguments are: y as x, and each gradient as its weights."""
    mesh = mesh_of(x=2, y=2)
    w, x = placed(name, mesh, *PLACEMENTS[placement])
    with jax.set_mesh(mesh):
        got = with_gradients(name)(w, x, None)
    assert_close(got, unsharded(name))
    (d_w, d_x), (y, _) = got
    assert jax.typeof(y).sharding == jax.typeof(d_x).sharding == jax.typeof(x).sharding
    for gradient, given in zip(jax.tree.leaves(d_w), jax.tree.leaves(w), strict=True):
        assert jax.typeof(gradient).sharding == jax.typeof(given).sharding


@pytest.mark.slow
@every_layer
def test_an_initial_state_needs_no_placing(name: str) -> None:
    """Chunks from a state that is on every device; tensor parallelism sums once, in o_proj."""
    mesh = mesh_of(x=2, y=2)
    w, x = placed(name, mesh, *PLACEMENTS["batch and heads"])
    want, _ = jitted(name)(weights(name), tokens(2, 6))
    with jax.set_mesh(mesh):
        state = LAYERS[name].initial_state(2, capacity=8)
        compiled = jax.jit(functools.partial(LAYERS[name].apply, implementation=QUICK)).lower(w, x, state).compile()
        y, after = compiled(w, x, state)
    np.testing.assert_allclose(y, want, rtol=0, atol=2e-5)
    assert jax.typeof(y).sharding == jax.typeof(x).sharding
    held = after.keys if name == "softmax" else after.memory
    assert tuple(axis for axis in jax.typeof(held).sharding.spec if axis) == ("x", "y")
    # A single key head, whose channels are cut, is gathered for queries and for keys, and so are the filters of both.
    assert collectives(compiled) == {"all-reduce": 1} | ({"all-gather": 4} if name == "gdn" else {})


@pytest.mark.slow
@every_layer
@pytest.mark.filterwarnings("error")
def test_decoding_in_a_scan_and_with_a_donated_state(name: str) -> None:
    layer, mesh = LAYERS[name], mesh_of(x=2, y=2)

    def one(state: Any, w: Any, x: jax.Array) -> Any:
        y, state = layer.apply(w, x[:, None], state)
        return state, y

    def every(state: Any, w: Any, x: jax.Array) -> Any:
        return jax.lax.scan(lambda state, x: one(state, w, x), state, jnp.moveaxis(x, 1, 0))[1][:, :, 0]

    want, _ = layer.apply(weights(name), tokens(2, 6), implementation=QUICK)
    with jax.set_mesh(mesh):
        w, x = placed(name, mesh, *PLACEMENTS["fsdp and heads"])
        state = layer.initial_state(2, capacity=8, like=(w, x))
        np.testing.assert_allclose(jnp.moveaxis(jax.jit(every)(state, w, x), 0, 1), want, rtol=0, atol=2e-5)
        donating = jax.jit(one, donate_argnums=0)
        for t in range(6):
            before = state
            state, y = donating(state, w, x[:, t])
            np.testing.assert_allclose(y[:, 0], want[:, t], rtol=0, atol=2e-5)
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))


@pytest.mark.slow
@every_layer
def test_packed_chunks(name: str) -> None:
    """Segment ids and states that are on every device, with tokens that are sharded."""
    layer, mesh = LAYERS[name], mesh_of(x=2, y=2)
    ids = jnp.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    apply = jax.jit(functools.partial(layer.apply, implementation=QUICK))

    def chunks(w: Any, x: jax.Array, ids: jax.Array, state: Any) -> Any:
        ys = []
        for part in (slice(0, 4), slice(4, 6)):
            y, state = apply(w, x[:, part], state, segment_ids=ids[:, part])
            ys.append(np.asarray(y))
        return np.concatenate(ys, axis=1)

    for capacity in (None, 8) if name == "softmax" else (None,):
        state = None if capacity is None else layer.initial_state(2, capacity=capacity)
        want = chunks(weights(name), tokens(2, 6), ids, state)
        with jax.set_mesh(mesh):
            w, x = placed(name, mesh, *PLACEMENTS["batch and heads"])
            state = None if capacity is None else layer.initial_state(2, capacity=capacity)
            np.testing.assert_allclose(chunks(w, x, ids, state), want, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_latent_attention() -> None:
    """Heads over one axis, and the model's width over the axis of the batch, as the rules of a model place them."""
    layer = LatentAttention(d_model=32, num_heads=2, latent_dim=16, key_dim=16, shared_key_dim=8, value_dim=16)
    w, x = layer.init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 6, 32))

    @jax.jit
    def run(w: Any, x: jax.Array) -> Any:
        return jax.grad(lambda w, x: jnp.sum(jnp.sin(layer.apply(w, x)[0])), (0, 1))(w, x)

    mesh = make_mesh(fsdp=2, tensor=2)
    cut = {
        name: jax.device_put(getattr(w, name), NamedSharding(mesh, spec_of(parameter.axes, parameter.shape, mesh)))
        for name, parameter in layer.parameters().items()
    }
    step = jax.jit(layer.apply, donate_argnums=2)
    one, _ = step(w, x[:, :1], layer.initial_state(2, capacity=4))
    with jax.set_mesh(mesh):
        placed_w, placed_x = dataclasses.replace(w, **cut), jax.device_put(x, NamedSharding(mesh, P("fsdp")))
        got = run(placed_w, placed_x)
        state = layer.initial_state(2, capacity=4, like=(placed_w, placed_x[:, :1]))
        y, after = step(placed_w, placed_x[:, :1], state)
    assert state.latents.is_deleted()
    assert y.sharding.spec == after.latents.sharding.spec == P("fsdp", None, None)
    assert_close(y, one)
    assert_close(got, run(w, x))
    assert got[0].q_proj.sharding.spec == P("fsdp", "tensor")


@every_layer
def test_what_cannot_be_cut_is_an_error_with_its_remedy(name: str) -> None:
    own = type(LAYERS[name]).__name__
    mesh = mesh_of(y=4)
    cut = "gate_proj" if name == "gdn" else "q_proj"
    told = (
        rf"^{own}: weights.\w+ is sharded over mesh axis 'y' along its heads, into 4 parts, and weights.\w+ has 2 heads; "
        rf"use a mesh whose axis divides them, or pass jax.sharding.reshard\(weights.\w+, ...\) without it$"
    )
    w, x = placed(name, mesh, None, None, None, t=8)
    value = jax.device_put(getattr(w, cut), NamedSharding(mesh, P(None, "y")))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=told):
        LAYERS[name].apply(dataclasses.replace(w, **{cut: value}), x)
    x = jax.device_put(x, NamedSharding(mesh, P(None, "y")))
    told = (
        rf"^{own}: x is sharded over mesh axis 'y' along its axis T, and a state continues whole sequences only; pass "
        rf"jax.sharding.reshard\(x, ...\)"
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=told):
        LAYERS[name].apply(w, x, LAYERS[name].initial_state(x.shape[0], capacity=8))
