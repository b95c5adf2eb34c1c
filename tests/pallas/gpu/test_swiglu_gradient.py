"""The kernel for the gradient of swiglu against the formula, in the interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core.activation import pull_back
from tilewright.core.target import finding_races
from tilewright.pallas.gpu.swiglu_gradient import _d_swiglu


@pytest.mark.parametrize("n", [256, 768, 4096])
def test_it_is_the_formula_in_float32_rounded_once(n: int) -> None:
    z = 4 * jax.random.normal(jax.random.key(0), (3, 2, n), jnp.bfloat16)
    dy = jax.random.normal(jax.random.key(1), (3, n), jnp.bfloat16)
    with tilewright.target("h100"), finding_races():
        found = _d_swiglu(z, dy)
    wide = z.astype(jnp.float32)
    expected = jnp.stack(pull_back("swiglu", (wide[:, 0], wide[:, 1]), dy.astype(jnp.float32)), axis=1)
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))
