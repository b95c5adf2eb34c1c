"""kda_gate: the contract, and what the Hopper kernel of its gradient has of its own."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import assert_the_kernel_refuses, kernels_in
from tests.ops.contract import OpContract, able_to_run, assert_close
from tilewright import kda_gate
from tilewright.configs import KdaGateSm90Backward
from tilewright.core.target import without_kernel_bodies
from tilewright.ops.delta_rule.gate.call import KdaGateCall
from tilewright.ops.delta_rule.gate.cases import _case


class TestKdaGate(OpContract):
    op_name = "kda_gate"
    call_type = KdaGateCall
    shared = ("A_log", "dt_bias")
    any_leading_axes = True
    plainly_differentiable = ("pallas_gpu",)
    cuts: ClassVar = {
        "batch": {"tokens0": "x"},
        "heads": {"HV": "y"},
        "channels": {"K": "y"},
        "both": {"tokens0": "x", "HV": "y"},
    }
    whole_letter = "none"
    test_an_axis_that_cannot_be_cut_is_refused = None  # There is no such axis.
    test_export_takes_each_platform_s_kernel_or_refuses = None  # The forward pass has no kernel.
    mesh_case = _case("mesh", (4, 8), 4, 128)
    not_taken = frozenset({("pallas_gpu", "narrow")})  # 120 channels.

    def extreme(self, arrays: dict) -> dict:
        """Gates of which a softplus is 0 in float32, or its argument."""
        return arrays | {"x": arrays["x"] * jnp.asarray(200.0, arrays["x"].dtype)}


def draw(tokens=(13,), h=2, k=128, dtype=jnp.bfloat16, scale=1.0) -> dict[str, Any]:
    shapes = {"x": (*tokens, h, k), "A_log": (h,), "dt_bias": (h, k)}
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    drawn["x"] = drawn["x"] * scale
    return {name: jnp.asarray(array).astype(dtype if name == "x" else jnp.float32) for name, array in drawn.items()}


def gradients(arrays: dict[str, Any], dg: Any, implementation: str, **options: Any) -> dict[str, Any]:
    def gate(given: dict[str, Any]) -> jax.Array:
        return kda_gate(**given, implementation=implementation, **options)

    return jax.jit(lambda given, dg: jax.vjp(gate, given)[1](dg)[0])(arrays, dg)


def in_float64(arrays: dict[str, Any], dg: Any, lower_bound: float | None) -> dict[str, np.ndarray]:
    """The gradients in NumPy, by the formulas of the kernel's docstring."""
    x, A_log, dt_bias, dg = (np.asarray(given, np.float64) for given in (*arrays.values(), dg))
    z, rate = x + dt_bias, np.exp(A_log)[:, None]
    if lower_bound is None:
        dx, d_rate = -rate * dg / (1 + np.exp(-z)), -rate * np.logaddexp(0.0, z) * dg
    else:
        s = 0.5 * (1 + np.tanh(0.5 * rate * z))
        dx = lower_bound * rate * s * (1 - s) * dg
        d_rate = dx * z
    tokens = tuple(range(x.ndim - 2))
    return {"x": dx, "A_log": d_rate.sum((*tokens, -1)), "dt_bias": dx.sum(tokens)}


# A thread block with several groups of channels beside it, runs that are not whole steps, a step that is longer than a
# run, more thread blocks than tokens, one token, three heads, six.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "h", "k", "scale", "bound", "config"),
    [
        ((29,), 6, 128, 1.0, None, KdaGateSm90Backward(256, unroll=4, blocks=1)),
        ((2, 7), 4, 256, 30.0, None, KdaGateSm90Backward(1024, unroll=2, blocks=2)),
        ((2, 7), 8, 64, 3.0, -5.0, KdaGateSm90Backward(512, unroll=8, blocks=1)),
        ((1,), 3, 256, 30.0, -0.5, KdaGateSm90Backward(256, unroll=1, blocks=5)),
        ((), 2, 128, 1.0, None, KdaGateSm90Backward(256, unroll=2, blocks=1)),
    ],
)
def test_runs_of_any_kind_meet_the_oracle(tokens, h, k, scale, bound, config) -> None:
    arrays = draw(tokens, h, k, scale=scale)
    dg = np.random.default_rng(1).standard_normal((*tokens, h, k), np.float32)
    with able_to_run("pallas_gpu"):
        got = gradients(arrays, dg, "pallas_gpu", lower_bound=bound, config=config)
        again = gradients(arrays, dg, "pallas_gpu", lower_bound=bound, config=config)
    plain, oracle = gradients(arrays, dg, "reference", lower_bound=bound), in_float64(arrays, dg, bound)
    for name, value in got.items():
        assert value.dtype == arrays[name].dtype
        assert_close(value, plain[name], oracle[name], f"{tokens} {h} {k} {name}")
        np.testing.assert_array_equal(np.asarray(value), np.asarray(again[name]), name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("bound", [None, -5.0])
def test_the_plain_gradient_is_the_closed_form(dtype, bound) -> None:
    arrays = draw((3, 5), 3, 40, dtype)
    dg = np.random.default_rng(1).standard_normal((3, 5, 3, 40), np.float32)
    want = in_float64(arrays, dg, bound)
    for name, value in gradients(arrays, dg, "reference", lower_bound=bound).items():
        atol = (2**-8 if value.dtype == jnp.bfloat16 else 1e-6) * np.max(np.abs(want[name]))
        np.testing.assert_allclose(np.asarray(value, np.float64), want[name], rtol=0, atol=atol)


# Forward mode, second derivatives and vmap, where the gradient is a kernel.


def test_a_kernel_has_forward_mode_and_second_derivatives() -> None:
    arrays = draw((5,))

    def scalar(given: dict[str, Any], implementation: str) -> jax.Array:
        return jnp.sum(jnp.sin(kda_gate(**given, implementation=implementation)))

    def derivatives(given: dict[str, Any], implementation: str) -> Any:
        def gradient_squared(given: dict[str, Any]) -> jax.Array:
            of = jax.grad(scalar)(given, implementation)
            return sum(jnp.sum(jnp.square(d.astype(jnp.float32))) for d in of.values())

        forward = jax.jvp(lambda given: kda_gate(**given, implementation=implementation), (given,), (given,))
        along = jax.jvp(jax.grad(lambda given: scalar(given, implementation)), (given,), (given,))[1]
        return forward, along, jax.grad(gradient_squared)(given)

    want = jax.jit(derivatives, static_argnums=1)(arrays, "reference")
    with tilewright.interpret():
        got = jax.jit(derivatives, static_argnums=1)(arrays, "pallas_gpu")

    def close(a: jax.Array, b: jax.Array) -> None:
        scale = float(jnp.max(jnp.abs(b.astype(jnp.float32))))
        atol = (2**-7 if b.dtype == jnp.bfloat16 else 1e-5) * scale
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=atol)

    jax.tree.map(close, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradients_of_mapped_calls(shared: bool) -> None:
    """With the weights of all calls, whose gradients the larger call sums, or with their own."""
    calls = [draw((3,), scale=scale) for scale in (1.0, 2.0)]
    calls[1] = calls[1] if not shared else calls[1] | {name: calls[0][name] for name in ("A_log", "dt_bias")}
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *calls)
    if shared:
        stacked |= {name: calls[0][name] for name in ("A_log", "dt_bias")}
    axes = {name: None if shared and name != "x" else 0 for name in stacked}

    def total(given: dict[str, Any], implementation: str) -> jax.Array:
        g = jax.vmap(lambda one: kda_gate(**one, implementation=implementation), (axes,))(given)
        return jnp.sum(jnp.sin(g))

    want = jax.grad(total)(stacked, "reference")
    with tilewright.interpret():
        got = jax.jit(jax.grad(total), static_argnums=1)(stacked, "pallas_gpu")
    for name, value in want.items():
        scale = float(jnp.max(jnp.abs(value.astype(jnp.float32))))
        np.testing.assert_allclose(
            np.asarray(got[name], np.float32), np.asarray(value, np.float32), rtol=0, atol=2**-7 * scale, err_msg=name
        )


# What takes the kernel.


def test_only_a_gradient_has_a_kernel_and_it_keeps_the_arguments_alone() -> None:
    arrays = draw((2, 6))
    with tilewright.target("h200"), without_kernel_bodies():
        assert kernels_in(jax.make_jaxpr(lambda given: kda_gate(**given))(arrays).jaxpr) == 0
        _, pull_back = jax.eval_shape(lambda given: jax.vjp(lambda given: kda_gate(**given), given), arrays)
        (decision,) = tilewright.explain(lambda given: kda_gate(**given), arrays).decisions
    kept = sorted((x.shape, x.dtype.name) for x in jax.tree.leaves(pull_back))
    assert kept == sorted((x.shape, x.dtype.name) for x in arrays.values())
    assert decision.implementation == "pallas_gpu"
    assert decision.backward.config == KdaGateSm90Backward(256, unroll=8)
    with tilewright.target("h200"):
        gradient = jax.make_jaxpr(lambda given, dg: jax.vjp(lambda given: kda_gate(**given), given)[1](dg))
        assert kernels_in(gradient(arrays, jnp.ones((2, 6, 2, 128))).jaxpr) == 1


def test_symbolic_sizes_take_plain_jax_on_a_gpu_too() -> None:
    (t,) = jax.export.symbolic_shape("t")
    arrays = draw((3,))
    shapes = arrays | {"x": jax.ShapeDtypeStruct((t, 2, 128), jnp.bfloat16)}
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in shapes.items()}
    with tilewright.target("h200"):
        exported = jax.export.export(jax.jit(lambda given: kda_gate(**given)), platforms=("cpu", "cuda"))(shapes)
    np.testing.assert_allclose(exported.call(arrays), kda_gate(**arrays), rtol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 128), (2, 0, 2, 128), (3, 0, 128)])
def test_empty_arrays_have_empty_gradients(shape) -> None:
    arrays = draw(shape[:-2], *shape[-2:])
    g = kda_gate(**arrays)
    assert g.shape == shape
    got = gradients(arrays, g, "reference")
    assert {name: x.shape for name, x in got.items()} == {name: x.shape for name, x in arrays.items()}


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"k": 96}, r"HV K = 192 must be a multiple of 256 \(two channels for each of 128 threads\)"),
        ({"tokens": (0,)}, r"x is \[0, 2, 128\], and it takes no empty arrays"),
        ({"dtype": jnp.float32}, r"x is float32, and the kernel takes bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text) -> None:
    assert_the_kernel_refuses(kda_gate, draw(**shape), text)


def test_a_config_that_does_not_fit_is_refused_where_the_gradient_is_taken() -> None:
    config = KdaGateSm90Backward(1024)
    with (
        tilewright.target("h200"),
        pytest.raises(tilewright.Unsupported, match=r"HV K = 256 must be a multiple of block_d=1024; use block_d=256"),
    ):
        jax.eval_shape(lambda given: gradients(given, jnp.ones((13, 2, 128)), "pallas_gpu", config=config), draw())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"block_d": 384},
            r"block_d=384 must be one of 256, 512, 1024 \(threads take 2, 4 or 8 channels each\); use 1024",
        ),
        ({"unroll": 0}, r"unroll=0 must be a positive integer"),
        ({"blocks": 0}, r"blocks=0 must be a positive integer"),
    ],
)
def test_a_config_that_cannot_be_is_refused_when_built(options, text) -> None:
    with pytest.raises(ValueError, match=text):
        KdaGateSm90Backward(**options)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"A_log": jnp.zeros((2,), jnp.int32)}, r"A_log is int32\[2\]; it must be float32 or bfloat16"),
        ({"A_log": jnp.zeros((3,))}, r"A_log has shape \[3\] and x \[13, 2, 128\]; A_log must be \[HV\] = \[2\]"),
        ({"dt_bias": jnp.zeros((256,))}, r"dt_bias has shape \[256\] and x .*: pass dt_bias.reshape\(2, 128\)"),
        ({"lower_bound": -6.0}, r"lower_bound=-6.0 must be"),
        ({"lower_bound": True}, r"lower_bound=True must be a number, not True or False"),
        ({"dt_bias": None}, r"dt_bias is of type NoneType; it must be an array of numbers"),
        (
            {"x": jnp.ones((13, 2, 128), jnp.complex64)},
            r"x is complex64\[13, 2, 128\]; it must be float32 or bfloat16: pass",
        ),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text) -> None:
    with pytest.raises(ValueError, match=text):
        kda_gate(**{**draw(dtype=jnp.float32), **changed})


def test_its_linear_map_takes_numpy_arrays() -> None:
    """As `jax.test_util.check_grads` passes them."""
    arrays = draw(dtype=jnp.float32)
    tangents = {name: np.ones(array.shape, array.dtype) for name, array in arrays.items()}
    _, linear = jax.linearize(lambda given: kda_gate(**given), arrays)
    _, expected = jax.jvp(lambda given: kda_gate(**given), (arrays,), (jax.tree.map(jnp.asarray, tangents),))
    np.testing.assert_allclose(linear(tangents), expected, rtol=1e-6)
