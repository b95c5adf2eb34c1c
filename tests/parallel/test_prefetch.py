"""Weights that are gathered one repeat ahead: values, gradients, what is saved, and which gradients are computed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.parallel import make_mesh
from tilewright.parallel.prefetch import can_prefetch, run_prefetched

REPEATS, ROWS, WIDTH, HIDDEN = 3, 8, 4, 6
POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "none": jax.checkpoint_policies.everything_saveable,
}


def arrays() -> tuple[Any, Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"up": (REPEATS, WIDTH, HIDDEN), "down": (REPEATS, HIDDEN, WIDTH), "scale": (REPEATS, WIDTH)}
    stacks = {name: jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    return stacks, jax.random.normal(next(keys), (ROWS, WIDTH)), jnp.arange(ROWS, dtype=jnp.int32) % 2


def repeat(weights: Any, x: jax.Array, kept: jax.Array) -> tuple[jax.Array, Any]:
    hidden = jnp.tanh((x * weights["scale"][None]) @ weights["up"])
    hidden = jnp.where(kept[:, None] > 0, hidden, 0.0)
    return x + hidden @ weights["down"], {"logits": hidden, "chosen": jnp.argmax(hidden, axis=1)}


def objective(x: jax.Array, more: Any) -> jax.Array:
    return jnp.sum(jnp.square(x)) + jnp.sum(jnp.sin(more["logits"]))


def plain(stacks: Any, x: jax.Array, kept: jax.Array) -> Any:
    x, more = jax.lax.scan(lambda x, own: repeat(own, x, kept), x, stacks)
    return objective(x, more), more["chosen"]


def on_mesh() -> tuple[Any, Any, Any, Any]:
    mesh = make_mesh(fsdp=2, data=2)
    stacks, x, kept = arrays()
    specs = {"up": P(None, "fsdp"), "down": P(None, None, "fsdp"), "scale": P()}
    stacks = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in stacks.items()}
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    return mesh, stacks, jax.device_put(x, rows), jax.device_put(kept, rows)


def prefetched(policy: Any, stacks: Any, x: jax.Array, kept: jax.Array) -> Any:
    assert can_prefetch(stacks, x)
    first = {"up": False, "down": True, "scale": False}
    x, more = run_prefetched(repeat, stacks, x, kept, first=first, policy=policy)
    return objective(x, more), more["chosen"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_are_those_of_a_plain_loop(policy: str) -> None:
    graded = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)
    (loss, chosen), wanted = graded(*arrays())
    mesh, *given = on_mesh()
    with jax.set_mesh(mesh):
        own = jax.value_and_grad(lambda *of: prefetched(POLICIES[policy], *of), argnums=(0, 1), has_aux=True)
        (got, got_chosen), gradients = jax.jit(own)(*given)
        alone, _ = jax.jit(lambda *of: prefetched(POLICIES[policy], *of))(*given)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    np.testing.assert_allclose(alone, loss, rtol=1e-6)
    np.testing.assert_array_equal(got_chosen, chosen)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), gradients, wanted)
    for name, gradient in gradients[0].items():
        assert gradient.sharding.is_equivalent_to(given[0][name].sharding, gradient.ndim), name


def scans_of(jaxpr: Any) -> list[Any]:
    return [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_gathered_weight_is_saved(policy: str) -> None:
    mesh, *given = on_mesh()
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(jax.grad(lambda *of: prefetched(POLICIES[policy], *of)[0]))(*given)
    forward, backward = scans_of(traced.jaxpr)
    assert forward.params["length"] == backward.params["length"] == REPEATS
    stacked = [variable.aval for variable in forward.outvars if variable.aval.shape[:1] == (REPEATS,)]
    whole = [aval for aval in stacked if aval.shape in ((REPEATS, WIDTH, HIDDEN), (REPEATS, HIDDEN, WIDTH))]
    assert not whole
    carried = [variable.aval.shape for variable in backward.outvars if variable.aval.ndim == 2]
    assert carried.count((HIDDEN, WIDTH)) == 1  # Of the weights, those that are read first.


def test_weights_without_a_gradient_have_none_computed() -> None:
    mesh, stacks, x, kept = on_mesh()

    def loss(down: jax.Array) -> jax.Array:
        return prefetched(POLICIES["full"], {**stacks, "down": down}, x, kept)[0]

    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(jax.grad(loss))(stacks["down"])
    _, backward = scans_of(traced.jaxpr)
    shapes = [variable.aval.shape for variable in backward.outvars]
    assert (REPEATS, HIDDEN, WIDTH) in shapes
    assert (REPEATS, WIDTH, HIDDEN) not in shapes


def test_where_nothing_is_gathered() -> None:
    mesh, stacks, x, _ = on_mesh()
    with jax.set_mesh(mesh):
        assert not can_prefetch(
            stacks, placed(x, [("data",), ()])
        )  # Rows that are not cut over it need no whole weights.
        assert not can_prefetch({"scale": stacks["scale"]}, x)
        assert not can_prefetch(jax.tree.map(lambda leaf: leaf[:1], stacks), x)  # One repeat has no next one.
    assert explicit_axes(x)[0] == ("data", "fsdp")
