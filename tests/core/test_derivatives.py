"""Hand-written gradients that can be differentiated in forward mode and again (core/derivatives.py)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tilewright.core.derivatives import forward_only, with_derivatives

X = jnp.linspace(0.1, 0.9, 4)
Y = jnp.linspace(-0.5, 0.7, 4)


def plain(x: jax.Array, y: jax.Array, scale: float) -> jax.Array:
    return scale * jnp.sin(x) * y


def function_and_log() -> tuple[Any, list[str]]:
    """`plain` with rules of its own, and which of them ran."""
    ran: list[str] = []

    def forward(x: jax.Array, y: jax.Array, scale: float) -> tuple[Any, Any]:
        ran.append("forward")
        return function(x, y, scale), (x, y)

    def tangent(scale: float, saved: Any, tangents: Any) -> jax.Array:
        ran.append("tangent")
        return jax.jvp(lambda x, y: plain(x, y, scale), saved, tangents)[1]

    def backward(scale: float, saved: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
        ran.append("backward")
        x, y = saved
        return scale * jnp.cos(x) * y * d, scale * jnp.sin(x) * d

    rules = {"forward": forward, "tangent": tangent, "backward": backward}
    function = with_derivatives(plain, **rules, differentiable=2, static_argnums=(2,))
    return function, ran


def total(function: Any) -> Any:
    return lambda x, y: jnp.sum(jnp.square(function(x, y, 3.0)))


def test_reverse_mode_never_traces_the_tangent() -> None:
    function, ran = function_and_log()
    got, want = (jax.jit(jax.grad(total(one), (0, 1)))(X, Y) for one in (function, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert ran == ["forward", "backward"]


def test_forward_mode_does_not_run_the_backward() -> None:
    function, ran = function_and_log()
    got, want = (jax.jit(jax.jacfwd(total(one), (0, 1)))(X, Y) for one in (function, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert "tangent" in ran
    assert "backward" not in ran


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_in_any_order_of_modes(outer: Any, inner: Any) -> None:
    function, _ = function_and_log()
    got, want = (jax.jit(outer(inner(total(one), (0, 1)), (0, 1)))(X, Y) for one in (function, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_inside_loops_remat_and_shard_map() -> None:
    """The second derivative of what `jax.lax.scan`, `jax.checkpoint`, `jax.vmap` and `jax.shard_map` are around."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(one: Any) -> Any:
        def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry, jax.vmap(jax.checkpoint(lambda x: one(x, carry, 3.0)))(x)

        def shard(x: jax.Array, y: jax.Array) -> jax.Array:
            y = jax.lax.pcast(y, "i", to="varying")
            return jax.lax.psum(jnp.sum(jnp.square(jax.lax.scan(step, y, x)[1])), "i")

        return jax.shard_map(shard, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())

    x = jnp.stack([jnp.stack([X, Y]), jnp.stack([Y, X])])
    got, want = (
        jax.jit(jax.grad(lambda x, y, one=one: jnp.sum(jax.grad(loss(one), 1)(x, y) * Y), (0, 1)))(x, Y)
        for one in (function_and_log()[0], plain)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_a_forward_only_kernel_is_its_plain_version_where_it_is_differentiated() -> None:
    """The kernel here has an error of its own, which tells it apart."""
    function = forward_only(lambda given: plain(**given, scale=3.0) + 1.0, lambda given: plain(**given, scale=3.0))
    given = {"x": X, "y": Y}
    for transformed in (jax.jit(function), jax.vmap(function)):
        np.testing.assert_allclose(transformed(given), plain(X, Y, 3.0) + 1.0, rtol=1e-5)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(function({"x": x, "y": Y}))

    value, first, second = jax.jit(lambda x: (*jax.value_and_grad(total)(x), jax.jacfwd(jax.grad(total))(x)))(X)
    want = np.sum(plain(X, Y, 3.0)), 3 * np.cos(X) * Y, np.diag(-3 * np.sin(X) * Y)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (value, first, second), want)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_mapped_forward_only_kernel_has_the_gradient_of_its_plain_version(jitted: bool) -> None:
    """One that has a gradient and no forward mode, which cannot be mapped within a derivative."""

    @jax.custom_vjp
    def tripled(x: jax.Array) -> jax.Array:
        return 3.0 * x

    tripled.defvjp(lambda x: (3.0 * x, None), lambda _, dy: (3.0 * dy,))
    function = forward_only(lambda x: tripled(x) + 1.0, tripled)
    function = jax.jit(function) if jitted else function
    mapped = jax.vmap(function)
    np.testing.assert_allclose(mapped(X), 3.0 * X + 1.0, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(mapped(x)))(X), np.full(X.shape, 3.0), rtol=1e-6)


def test_a_forward_only_kernel_has_no_tangents_of_what_is_not_differentiated() -> None:
    """The product of a tangent that is zero would be computed: the compiler does not leave it out."""
    function = forward_only(jnp.dot, jnp.dot)
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(function(x, jnp.ones((4, 4))))))(X))
    assert text.count("dot_general") == 2
