"""Kernels under Auto mesh axes, cut in this process: the program that the compiler would make by asking about them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.composition import collectives
from tilewright.aot.auto_axes import partitioned_here


def attention(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
    out = tilewright.flash_attention(q, k, v, causal=True, sinks=sinks, implementation="pallas_tpu")
    assert isinstance(out, jax.Array)
    return out


def norm_in_a_loop(x: jax.Array, w: jax.Array) -> jax.Array:
    """A function that is jitted by itself and called twice, in a loop and before it."""
    norm = jax.jit(lambda x: tilewright.rms_norm(x, w, implementation="pallas_tpu"))
    return jax.lax.scan(lambda carry, _: (norm(carry), None), norm(x), length=2)[0]


def loss_of_a_vocabulary(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    """Rows and columns are sharded, and w is not asked to be elsewhere. Plain JAX that has a rule."""
    return tilewright.linear_cross_entropy(x, w, labels, implementation="xla")


HEADS = P("x", None, "y")
PROGRAMS: dict[str, Any] = {
    "attention": (attention, {(4, 16, 4, 16): HEADS, (4, 16, 2, 16): HEADS, (4, 16, 2, 32): HEADS, (4,): P("y")}),
    "norm in a loop": (norm_in_a_loop, {(4, 6, 32): P("x", "y"), (32,): P()}),
    "vocabulary": (loss_of_a_vocabulary, {(8, 16): P("x"), (16, 32): P(None, "y")}),
}


@pytest.mark.parametrize(
    "name", ["vocabulary", *(pytest.param(name, marks=pytest.mark.slow) for name in ("attention", "norm in a loop"))]
)
def test_the_program_is_the_one_that_the_compiler_makes_by_asking(name: str) -> None:
    """Values, gradients and collectives, on CPU devices, which can be asked too."""
    function, specs = PROGRAMS[name]
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    keys = jax.random.split(jax.random.key(0), len(specs))
    arrays = [
        jax.device_put(jax.random.normal(key, shape), NamedSharding(mesh, spec))
        for key, (shape, spec) in zip(keys, specs.items(), strict=True)
    ]
    rest = [jnp.arange(8)] if name == "vocabulary" else []

    def gradients(*given: Any) -> Any:
        def loss(*given: Any) -> tuple[jax.Array, jax.Array]:
            out = function(*given, *rest)
            return jnp.sum(jnp.square(out)), out

        return jax.grad(loss, tuple(range(len(given))), has_aux=True)(*given)

    jitted = jax.jit(gradients)
    with tilewright.interpret(plain=True):
        asked = jitted.lower(*arrays).compile()
        with partitioned_here(jitted, tuple(arrays), {}):
            lowered = jitted.lower(*arrays)
    here = lowered.compile()
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    assert collectives(here) == collectives(asked)
    assert "all-gather" not in collectives(here)
    for got, want in zip(jax.tree.leaves(here(*arrays)), jax.tree.leaves(asked(*arrays)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)
