"""The gradient of an x that a layer multiplies by several weights: when it is one product, and that it is the same."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.composition import collectives, mesh_of
from tilewright.core.quantized import quantize
from tilewright.layers import (
    Attention,
    DeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    Qwen3NextGatedDeltaNet,
    layer,
)
from tilewright.layers.layer import project, project_each

D = 2048
KDA = KimiDeltaAttention(d_model=D, num_heads=2, head_dim=64)
WIDE = {
    "kda": KDA,
    "kda, full rank": dataclasses.replace(KDA, full_rank_gate=True),
    "gated delta net": Qwen3NextGatedDeltaNet(d_model=D, num_key_heads=1, num_value_heads=2, key_dim=64, value_dim=64),
    "delta net": DeltaNet(d_model=D, num_heads=2, key_dim=64, value_dim=64),
    "attention": Attention(d_model=D, num_heads=2, num_kv_heads=1, head_dim=64),
    "gated attention": Attention(d_model=D, num_heads=2, num_kv_heads=1, head_dim=64, gated=True),
    "latent attention": LatentAttention(
        d_model=D, num_heads=2, latent_dim=64, key_dim=32, shared_key_dim=32, value_dim=64
    ),
}


def sums(
    one: Any, *, t: int = 2048, x: Any = jnp.bfloat16, w: Any = jnp.bfloat16, grad: bool = True, **options: Any
) -> int:
    """How often a layer takes the kernel, traced for an H200."""

    def weights() -> Any:
        drawn = one.init(jax.random.key(0), w)
        return dataclasses.replace(drawn, q_proj=quantize(drawn.q_proj, "int8")) if options.get("quantized") else drawn

    def run(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(one.apply(weights, x)[0].astype(jnp.float32))

    given = jax.eval_shape(weights), jax.ShapeDtypeStruct((1, t, D), x)
    with tilewright.target(options.get("chip", "h200")):
        gradient = jax.grad(run, 1 if options.get("quantized") else (0, 1))
        decisions = tilewright.explain(gradient if grad else run, *given).decisions
    taken = [one.implementation for one in decisions if one.op == "matmul_sum"]
    assert set(taken) <= {"pallas_gpu"}
    return len(taken)


@pytest.mark.parametrize(
    "name", [name if name == "kda" else pytest.param(name, marks=pytest.mark.slow) for name in WIDE]
)
def test_layers_take_the_kernel(name: str) -> None:
    assert sums(WIDE[name]) == 1


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"w": jnp.float32}, 1),
        ({"grad": False}, 0),
        ({"t": 1}, 0),
        ({"t": 1024}, 0),
        ({"t": 2049}, 0),
        ({"x": jnp.float32}, 0),
        ({"quantized": True}, 0),
        ({"chip": "v6e"}, 0),
        ({"chip": "a100"}, 0),
    ],
)
def test_when_the_kernel_is_taken(options: dict[str, Any], count: int) -> None:
    assert sums(WIDE["attention"], **options) == count


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Has `project_each` do on this machine what it does where there is a kernel, with the op in plain JAX."""
    monkeypatch.setattr(layer, "_sums_gradients", lambda x, weights: True)
    return monkeypatch


def drawn(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


def assert_same(got: Any, want: Any, error: float = 1e-5) -> None:
    def one(a: jax.Array, b: jax.Array) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=error * np.max(np.abs(b), initial=1e-6))

    jax.tree.map(one, got, want)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gated attention", "float32"),
        ("gated attention", "bfloat16"),
        pytest.param("kda", "float32", marks=pytest.mark.slow),
    ],
)
def test_layers_have_the_same_gradients(summed: pytest.MonkeyPatch, name: str, dtype: str) -> None:
    """Of float32 weights with activations of either dtype; outputs keep their bits."""
    one = dataclasses.replace(WIDE[name], d_model=32)
    weights = one.init(jax.random.key(0))
    x, dy = drawn((2, 5, 32), (2, 5, 32), dtype=dtype)

    def run(weights: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda weights, x: one.apply(weights, x)[0], weights, x)
        return y, pullback(dy)

    y, got = jax.jit(lambda *given: run(*given))(weights, x, dy)
    summed.undo()
    plain, want = jax.jit(lambda *given: run(*given))(weights, x, dy)
    np.testing.assert_array_equal(y, plain)
    assert_same(got, want, 1e-5 if dtype == "float32" else 2**-6)


def each(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in project_each(x, weights))  # type: ignore[return-value]


def plainly(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    return sum(jnp.sum(jnp.sin(project(x, w).astype(jnp.float32))) for w in weights)  # type: ignore[return-value]


@pytest.mark.usefixtures("summed")
def test_derivatives_of_derivatives() -> None:
    """In forward mode, of gradients, and mapped over x and over everything."""
    x, *weights = drawn((2, 3, 8), (8, 4), (8, 1), (8, 6))
    dx, *d_weights = drawn((2, 3, 8), (8, 4), (8, 1), (8, 6))
    many = [jnp.stack([w, 2 * w]) for w in weights]

    def forward(function: Any) -> Any:
        return jax.jvp(function, (x, weights), (dx, d_weights))

    def second(function: Any) -> Any:
        return jax.grad(
            lambda *given: sum(
                map(jnp.vdot, *map(jax.tree.leaves, (jax.grad(function, (0, 1))(*given), (dx, d_weights))))
            ),
            (0, 1),
        )(x, weights)

    def over_gradient(function: Any) -> Any:
        return jax.jvp(jax.grad(function, (0, 1)), (x, weights), (dx, d_weights))

    def mapped(function: Any) -> Any:
        return jax.vmap(jax.grad(function, (0, 1)), (0, None))(x, weights), jax.vmap(jax.grad(function, (0, 1)))(
            x, many
        )

    for derivative in (forward, second, over_gradient, mapped):
        assert_same(jax.jit(derivative, static_argnums=0)(each), jax.jit(derivative, static_argnums=0)(plainly))


@pytest.mark.usefixtures("summed")
def test_policies_of_remat_see_the_products() -> None:
    x, *weights = drawn((3, 8), (8, 4), (8, 6))

    def products(policy: Any, function: Any) -> int:
        gradient = jax.grad(jax.checkpoint(function, policy=policy), (0, 1))
        return str(jax.make_jaxpr(gradient)(x, weights)).count("dot_general[")

    policies = jax.checkpoint_policies
    for function in (each, plainly):
        again = products(policies.nothing_saveable, function)
        kept = products(policies.dots_with_no_batch_dims_saveable, function)
        assert again - kept == len(weights)


def gradients(function: Any = each) -> Any:
    return jax.jit(jax.grad(lambda x, weights: function(x, weights), (0, 1)))


MESH_SHAPES = (4, 6, 8), (8, 4), (8, 2), (8, 6)
CUTS = {"rows": (P("x"), P()), "rows and columns": (P("x"), P(None, "y")), "rows, weights whole": (P("x"), P("x"))}


@pytest.mark.usefixtures("summed")
@pytest.mark.parametrize("cut", CUTS)
def test_the_compiler_cuts_it(cut: str) -> None:
    """Rows stay where they are, and so do columns, over which the gradient of x is summed."""
    x, *weights = drawn(*MESH_SHAPES)
    mesh, (of_x, of_w) = mesh_of(AxisType.Auto), CUTS[cut]
    placed = jax.device_put(x, NamedSharding(mesh, of_x)), jax.device_put(weights, NamedSharding(mesh, of_w))
    compiled = gradients().lower(*placed).compile()
    assert_same(compiled(*placed), gradients(plainly)(x, weights))
    if cut != "rows, weights whole":  # There the weights are gathered.
        assert set(collectives(compiled)) == {"all-reduce"}


@pytest.mark.usefixtures("summed")
def test_inside_shard_map() -> None:
    """A weight that is the same on every device has the sum of their gradients."""
    x, *weights = drawn(*MESH_SHAPES)
    specs = P("x"), P()
    run = jax.shard_map(
        jax.grad(lambda *given: each(*given), 0), mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P("x")
    )
    want_x, want_w = gradients(plainly)(x, weights)
    assert_same(jax.jit(run)(x, weights), want_x)
    run = jax.shard_map(
        jax.grad(lambda *given: each(*given), 1), mesh=mesh_of(AxisType.Auto), in_specs=specs, out_specs=P()
    )
    assert_same(jax.jit(run)(x, weights), want_w)


def taken(*given: Any) -> set[str]:
    return {one.op for one in tilewright.explain(jax.grad(each), *given).decisions}


@pytest.mark.parametrize(("columns", "ops"), [((32, 8), {"matmul_sum"}), ((64, 1000), set()), ((64,), set())])
def test_thin_weights_are_copied_and_wide_ones_are_not(columns: tuple[int, ...], ops: set[str]) -> None:
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2048, D), *((D, each) for each in columns)))
    with tilewright.target("h200"):
        assert taken(x, weights) == ops


def test_on_explicit_axes_it_is_a_product_per_weight() -> None:
    x, *weights = drawn((2048, D), (D, 64), (D, 64), dtype=jnp.bfloat16)
    mesh = mesh_of(AxisType.Explicit)
    with tilewright.target("h200"), jax.set_mesh(mesh):
        assert taken(jax.device_put(x, NamedSharding(mesh, P())), weights) == {"matmul_sum"}
        assert taken(jax.device_put(x, NamedSharding(mesh, P("x"))), weights) == set()
