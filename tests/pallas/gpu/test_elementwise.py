"""Functions of float32 values in kernels: the formulas, in the interpreter's form, which shares their constants."""

import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core import activation as activations
from tilewright.pallas.gpu.elementwise import activate, exact_sigmoid, sigmoid, sigmoid_slope, softplus

_ROUNDING = 2.0**-24


@pytest.mark.parametrize(("low", "high"), [(-80, -20), (-20, -8), (-8, -4), (-4, 4), (4, 40)])
def test_softplus_is_exact_to_float32_where_it_is_small_too(low: float, high: float) -> None:
    x = np.linspace(low, high, 20_001, dtype=np.float32)
    exact = np.maximum(x.astype(np.float64), 0.0) + np.log1p(np.exp(-np.abs(x.astype(np.float64))))
    with tilewright.interpret():
        got = np.asarray(softplus(jnp.asarray(x), None), np.float64)
    assert np.max(np.abs(got - exact) / exact) < 4e-7


def test_softplus_of_what_is_not_finite() -> None:
    with tilewright.interpret():
        got = softplus(jnp.asarray([np.inf, -np.inf, np.nan, 1e30, -1e30], jnp.float32), None)
    np.testing.assert_array_equal(got, np.asarray([np.inf, 0.0, np.nan, 1e30, 0.0], np.float32))


def _wide_range() -> np.ndarray:
    return np.concatenate([np.linspace(-100, 100, 200_001), np.linspace(-1e-3, 1e-3, 2001)]).astype(np.float32)


def test_sigmoid_is_as_exact_as_its_argument() -> None:
    x = _wide_range()
    exact = 1.0 / (1.0 + np.exp(-x.astype(np.float64)))
    with tilewright.interpret():
        got = np.asarray(sigmoid(jnp.asarray(x), None), np.float64)
    # A rounding of x changes a small sigmoid by |x| roundings. What is below the normal numbers of float32 may be 0.
    assert np.all(np.abs(got - exact) <= (1.5 * np.abs(x) + 3) * _ROUNDING * exact + 2.0**-126)


def test_sigmoid_of_what_is_not_finite() -> None:
    with tilewright.interpret():
        got = sigmoid(jnp.asarray([np.inf, -np.inf, np.nan], jnp.float32), None)
    np.testing.assert_array_equal(got, np.asarray([1.0, 0.0, np.nan], np.float32))


@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_activations_of_kernels_are_the_others(activation: str) -> None:
    x = jnp.asarray(_wide_range())
    z = (x, x[::-1] + 0.5) if activation == "swiglu" else (x,)
    with tilewright.interpret():
        got = np.asarray(activate(activation, z, None))
    expected = np.asarray(activations.activate(activation, z))
    # The other gelu is exact to a rounding of 1 only: its 1 + tanh is the difference of almost equal numbers below 0.
    exact_to = 1e-6 if activation == "gelu" else 2.0**-126 * 1e4
    assert np.all(np.abs(got - expected) <= (1.5 * np.abs(x) + 8) * _ROUNDING * np.abs(expected) + exact_to)


@pytest.mark.parametrize("activation", activations.ACTIVATIONS)
def test_activations_of_kernels_of_what_is_not_finite(activation: str) -> None:
    z = (jnp.asarray([np.inf, -np.inf, np.nan], jnp.float32),) * (2 if activation == "swiglu" else 1)
    with tilewright.interpret():
        np.testing.assert_array_equal(activate(activation, z, None), activations.activate(activation, z))


def test_an_exact_sigmoid_and_its_slope_keep_their_digits_on_both_sides() -> None:
    x = _wide_range()
    u = np.exp(-np.abs(x.astype(np.float64)))
    exact = np.where(x < 0, u, 1.0) / (1.0 + u), u / (1.0 + u) ** 2
    with tilewright.interpret():
        got = [np.asarray(function(jnp.asarray(x), None), np.float64) for function in (exact_sigmoid, sigmoid_slope)]
    for value, expected in zip(got, exact, strict=True):
        assert np.all(np.abs(value - expected) <= 8 * _ROUNDING * expected + 2.0**-126)


def test_an_exact_sigmoid_and_its_slope_of_what_is_not_finite() -> None:
    x = jnp.asarray([np.inf, -np.inf, np.nan], jnp.float32)
    with tilewright.interpret():
        got = exact_sigmoid(x, None), sigmoid_slope(x, None)
    np.testing.assert_array_equal(got[0], np.asarray([1.0, 0.0, np.nan], np.float32))
    np.testing.assert_array_equal(got[1], np.asarray([0.0, 0.0, np.nan], np.float32))
