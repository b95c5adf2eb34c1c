"""The error metrics and the 2x rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tilewright.core import numerics
from tilewright.core.numerics import FLOOR, discrepancy, judge, round_gradient, rounded, signed_sums


def test_metrics_by_hand() -> None:
    found = discrepancy(np.array([[1.0, 2.0], [3.0, 4.5]]), np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert (found.max_abs, found.mean_abs, found.scale) == (0.5, 0.125, 4.0)
    assert found.relative == pytest.approx(0.5 / np.sqrt(30.0))
    assert found.worst == (1, 1)
    assert (found.got_at_worst, found.want_at_worst) == (4.5, 4.0)


def test_twice_the_plain_error_passes_and_more_does_not() -> None:
    oracle = np.linspace(1.0, 2.0, 100)
    plain = oracle + 1e-3
    assert judge(oracle + 1.99e-3, plain, oracle).ok
    assert not judge(oracle + 2.1e-3, plain, oracle).ok


def test_a_single_bad_element_fails_on_the_max() -> None:
    oracle = np.ones(10_000)
    got = oracle.copy()
    got[1234] += 3e-3
    verdict = judge(got, oracle + 1e-3, oracle)
    assert verdict.error.relative < verdict.relative_bound
    assert not verdict.ok
    assert "worst at [1234]" in str(verdict)


def test_a_small_shift_of_everything_fails_on_the_relative_error() -> None:
    oracle = np.ones(10_000)
    plain = oracle.copy()
    plain[0] += 1e-3
    assert not judge(oracle + 1e-3, plain, oracle).ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    oracle = np.ones(5)
    got = oracle.copy()
    got[2] = bad
    verdict = judge(got, np.full(5, 100.0), oracle)
    assert not verdict.ok
    assert verdict.error.worst == (2,)
    assert "1 elements are not finite where the oracle is" in str(verdict)


def test_a_number_where_the_oracle_is_nan_does_not_pass() -> None:
    oracle = np.array([1.0, np.nan])
    assert judge(oracle, oracle, oracle).ok
    assert not judge(np.array([1.0, 1.0]), oracle, oracle).ok


def test_the_floor_is_a_few_roundings() -> None:
    oracle = np.ones(10)
    assert judge(oracle + 0.9 * FLOOR, oracle, oracle).ok
    assert not judge(oracle + 1.1 * FLOOR, oracle, oracle).ok


def test_large_arrays_are_compared_by_signed_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell a wrong element, a block of zeros and a NaN from roundings, and are as strict for other roundings."""
    monkeypatch.setattr(numerics, "SUMMED_ABOVE", 256)
    random = np.random.default_rng(0)
    exact = random.standard_normal((101, 127))
    with jax.enable_x64(True):
        oracle = np.asarray(signed_sums(jnp.asarray(exact)))

    def sums(x: np.ndarray) -> np.ndarray:
        return np.asarray(signed_sums(jnp.asarray(x, jnp.bfloat16)))

    assert oracle.size <= 256
    plain = sums(exact)
    assert judge(sums(exact * (1 + 2.0**-10 * random.standard_normal(exact.shape))), plain, oracle).ok
    for place, value in (((5, 6), 9.0), (np.s_[64:68, :64], 0.0), ((100, 126), np.nan)):
        wrong = exact.copy()
        wrong[place] = value
        assert not judge(sums(wrong), plain, oracle).ok, place


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"got has shape \(2,\) and want has \(3,\)"):
        discrepancy(np.zeros(2), np.zeros(3))


def test_round_gradient_rounds_only_the_gradient() -> None:
    x = jnp.float32(1.0 + 2**-12)
    value, gradient = jax.value_and_grad(lambda x: round_gradient(x, jnp.bfloat16) * x)(x)
    assert value == x * x
    assert gradient == x + jnp.float32(1.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rounded_equals_a_cast_and_back(dtype) -> None:
    x = jax.random.normal(jax.random.key(0), (1000,))
    np.testing.assert_array_equal(rounded(x, dtype), np.asarray(x).astype(dtype).astype(np.float32))
