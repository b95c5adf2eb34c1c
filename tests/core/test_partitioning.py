"""Arrays sharded over Explicit mesh axes: each device runs its own part, and results carry the sharding one expects."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright

B, T, H, D = 4, 16, 4, 16


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def heads() -> dict[str, tuple[jax.Array, P]]:
    spec = P("data", None, "model", None)
    return {name: (draw(B, T, H, D, seed=n), spec) for n, name in enumerate("qkv")}


CALLS = {
    "rms_norm": {"x": (draw(B, T, D), P("data", "model", None)), "w": (draw(D), P(None))},
    "short_conv": {"x": (draw(B, T, D), P("data", None, "model")), "w": (draw(4, D), P(None, "model"))},
    "apply_rope": {"x": (draw(B, T, H, D), P("data", None, "model", None))},
    "flash_attention": heads(),
    "gated_delta_rule": heads()
    | {
        "g": (-jax.nn.sigmoid(draw(B, T, H, seed=5)), P("data", None, "model")),
        "beta": (jax.nn.sigmoid(draw(B, T, H, seed=6)), P("data", None, "model")),
    },
}
EXPECTED = {
    "rms_norm": ["float32[4@data,16@model,16]"],
    "short_conv": ["float32[4@data,16,16@model]", "float32[4@data,3,16@model]"],
    "apply_rope": ["float32[4@data,16,4@model,16]"],
    "flash_attention": ["float32[4@data,16,4@model,16]"],
    "gated_delta_rule": ["float32[4@data,16,4@model,16]", "float32[4@data,4@model,16,16]"],
}


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.slow) if op == "gated_delta_rule" else op for op in CALLS]
)
def test_values_and_gradients_are_those_of_one_device(op: str, mesh) -> None:
    options = {"normalize_qk": True} if op == "gated_delta_rule" else {}

    def call(arrays: dict[str, jax.Array]):
        return getattr(tilewright, op)(**arrays, **options, implementation="xla")

    def loss(arrays: dict[str, jax.Array]) -> jax.Array:
        return sum((jnp.mean(jnp.square(out)) for out in jax.tree.leaves(call(arrays))), start=jnp.zeros(()))

    whole = {name: value for name, (value, _) in CALLS[op].items()}
    expected = jax.jit(call)(whole), jax.jit(jax.grad(loss))(whole)
    cut = {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in CALLS[op].items()}
    with jax.set_mesh(mesh):
        outputs, gradients = jax.jit(call)(cut), jax.jit(jax.grad(loss))(cut)
    assert [str(jax.typeof(out)) for out in jax.tree.leaves(outputs)] == EXPECTED[op]
    for got, want in zip(jax.tree.leaves((outputs, gradients)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [("data", "model"), ("data",)], ids=["and heads", "alone"])
@pytest.mark.parametrize("op", [pytest.param("gated_delta_rule", marks=pytest.mark.slow), "matmul"])
def test_elements_of_a_vmap_are_cut(op: str, axes: tuple[str, ...]) -> None:
    """Each device has its own elements, and for `matmul`, which cannot be one larger call then, their own d w."""
    mesh = jax.make_mesh((2, 2)[: len(axes)], axes, axis_types=(AxisType.Explicit,) * len(axes))
    if op == "matmul":
        arrays, specs, mapped = [draw(4, 6, 16), draw(16, 8, seed=1)], [P("data"), P()], (0, None)
    else:
        # Four different elements with decays below 1: with gates that grow, one rounding more or less is large at the end.
        arrays = [jnp.stack([jnp.roll(value, n, axis=0) for n in range(4)]) for value, _ in CALLS[op].values()]
        specs = [P("data", *(axis if axis in axes[1:] else None for axis in spec)) for _, spec in CALLS[op].values()]
        mapped = (0,) * len(arrays)

    def one(*arrays: jax.Array) -> Any:
        options = {"normalize_qk": True} if op == "gated_delta_rule" else {}
        return getattr(tilewright, op)(*arrays, **options, implementation="xla")

    def gradients(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            return sum((jnp.mean(jnp.square(out)) for out in jax.tree.leaves(one(*arrays))), start=jnp.zeros(()))

        return jax.grad(loss, tuple(range(len(arrays))))(*arrays)

    def both(*arrays: jax.Array) -> Any:
        return jax.vmap(one, mapped)(*arrays), jax.vmap(gradients, mapped)(*arrays)

    with jax.set_mesh(mesh):
        got = jax.jit(both)(
            *(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True))
        )
    heads = "@model" if len(axes) > 1 else ""
    expected = "float32[4@data,6,8]" if op == "matmul" else f"float32[4@data,4,16,4{heads},16]"
    assert str(jax.typeof(jax.tree.leaves(got)[0])) == expected
    for one_of, want in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(both)(*arrays)), strict=True):
        np.testing.assert_allclose(jax.device_get(one_of), want, rtol=1e-4, atol=1e-5)


def test_labels_and_weights_go_where_the_rows_are(mesh) -> None:
    """Sharded over another mesh axis than x, they are moved; the loss is sharded as x is."""
    arrays = draw(16, 8), draw(8, 32, seed=1), jnp.arange(16).at[3].set(-100), draw(16, seed=2)
    specs = P("data"), P(), P("model"), P(("data", "model"))

    @jax.jit
    def losses(x: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array) -> Any:
        def total(x: jax.Array, w: jax.Array, weights: jax.Array) -> Any:
            loss = tilewright.linear_cross_entropy(x, w, labels, weights=weights, implementation="xla")
            return jnp.sum(jnp.asarray(loss)), loss

        return jax.grad(total, (0, 1, 2), has_aux=True)(x, w, weights)

    with jax.set_mesh(mesh):
        cut = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip(arrays, specs, strict=True)]
        got = losses(*cut)
    assert str(jax.typeof(got[1])) == "float32[16@data]"
    for one, want in zip(jax.tree.leaves(got), jax.tree.leaves(losses(*arrays)), strict=True):
        np.testing.assert_allclose(jax.device_get(one), want, rtol=1e-4, atol=1e-5)


def test_an_axis_that_cannot_be_cut_is_refused_with_the_way_out(mesh) -> None:
    x = jax.device_put(draw(B, T, D), NamedSharding(mesh, P(None, None, "model")))
    told = (
        r"rms_norm: x is sharded over mesh axis 'model' along its axis D, of \[..., D\], .*leading axes only; pass jax"
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=told):
        tilewright.rms_norm(x, jnp.ones(D))
    gate = jax.device_put(draw(B, T, D), NamedSharding(mesh, P("model")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"gate is sharded over mesh axis 'model' along its axis 0, "),
    ):
        tilewright.gated_rms_norm(jax.device_put(gate, P(None, "model")), gate, jnp.ones(D))


def test_arguments_and_axes_have_the_names_of_the_public_function(mesh) -> None:
    """And not those that the call has inside."""

    def cut(x: Any, *spec: str | None) -> Any:
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    w, pool, ids = jnp.ones((D, 2 * D)), jnp.ones((3, 4, 2, D)), jnp.zeros((B, T), jnp.int32)
    q, sizes, int8 = jnp.ones((B, 2, D)), jnp.zeros(2, jnp.int32), tilewright.quantize(jnp.ones((D, 2 * D)), "int8")
    gates = r"which cuts gates from values; pass it as \["
    with jax.set_mesh(mesh):
        x = jnp.ones((4, D))
        for told, call in (
            (
                r"^matmul: w is .* along its axis K, of \[K, N\], and matmul can be cut along its leading axes, N only",
                lambda: tilewright.matmul(x, cut(w, "model")),
            ),
            (
                r"^matmul: w.scales is .* along its axis K, of \[K, N\], and",
                lambda: tilewright.matmul(x, dataclasses.replace(int8, scales=cut(jnp.ones((2, 2 * D)), "model"))),
            ),
            (
                rf"^w \[K, 2 N\] is .*{gates}K, 2, N\]$",
                lambda: tilewright.matmul(x, cut(w, None, "model"), activation="swiglu"),
            ),
            (
                rf"^w \[G, K, 2 N\] is .*{gates}G, K, 2, N\]$",
                lambda: tilewright.grouped_matmul(
                    x, cut(jnp.stack([w, w]), None, None, "model"), sizes, activation="swiglu"
                ),
            ),
            (
                r"^paged_attention: k_pages is .* along its axis D, of \[P, page, KV, D\], .*reshard\(k_pages, ...\)",
                lambda: tilewright.paged_attention(q, cut(pool, None, None, None, "model"), pool, ids, ids[:, 0]),
            ),
            (
                r"^flash_attention: segment_ids is .* along its axis T, of \[B, T\], .*axis_name='model'\) inside jax",
                lambda: tilewright.flash_attention(
                    *(jnp.ones((B, T, 2, D)),) * 3, segment_ids=cut(ids, None, "model"), implementation="xla"
                ),
            ),
        ):
            with pytest.raises(ValueError, match=told):
                call()


def test_heads_that_the_mesh_does_not_divide_are_refused(mesh) -> None:
    q = jax.device_put(draw(B, T, 6, D), NamedSharding(mesh, P(None, None, "model", None)))
    k = draw(B, T, 3, D)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"flash_attention: KV=3 cannot be cut into 2 parts"):
        tilewright.flash_attention(q, k, k)
