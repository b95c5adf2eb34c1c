"""Functions of float32 values in kernels: the formulas, in the interpreter's form, which shares their constants."""

import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.pallas.gpu.elementwise import softplus


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
