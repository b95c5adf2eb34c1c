"""grouped_matmul: the contract, and what is its own: sizes of groups, rows outside of them, quantised weights, errors."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.contract import OpContract, able_to_run, implementations
from tilewright import QuantizedArray, dequantize, grouped_matmul, quantize
from tilewright.core.case import Case
from tilewright.core.dispatch import find_op
from tilewright.ops.grouped_matmul.call import MOST_MASKED, GroupedMatmulCall, group_starts, poison
from tilewright.ops.grouped_matmul.cases import _case

IMPLEMENTATIONS = find_op("grouped_matmul").implementations
every_implementation = implementations(*IMPLEMENTATIONS)


def with_parts(case: Case) -> Case:
    """A case of swiglu with w as [G, K, 2, N], which can be cut along N."""
    groups, k, columns = case.inputs["w"].shape
    w = dataclasses.replace(case.inputs["w"], shape=(groups, k, 2, columns // 2))
    return dataclasses.replace(case, inputs={**case.inputs, "w": w})


class TestContract(OpContract):
    op_name = "grouped_matmul"
    interpreted_slowly = frozenset({"pallas_gpu"})
    call_type = GroupedMatmulCall
    batched = False
    cuts: ClassVar = {"columns": {"N": "y"}}
    whole_letter = "K"
    mesh_case = with_parts(_case("mesh", 3, 40, 64, 128, rest=5, activation="swiglu"))


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


_JITTED = jax.jit(grouped_matmul)


def by_loop(x: Any, w: Any, sizes: Any) -> np.ndarray:
    """Group by group, in float64."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y, start = np.zeros((x.shape[0], w.shape[2])), 0
    for group, size in enumerate(np.asarray(sizes)):
        y[start : start + size] = x[start : start + size] @ w[group]
        start += size
    return y


@given(st.lists(st.integers(0, 9), min_size=5, max_size=5))
@settings(max_examples=40, deadline=None)
def test_sizes_of_groups(sizes: list[int]) -> None:
    """Empty and unequal groups, and rows past the last one, against a loop over groups."""
    x, w = draw(45, 8), draw(5, 8, 6, seed=1)
    got = _JITTED(x, w, jnp.array(sizes))
    np.testing.assert_allclose(got, by_loop(x, w, sizes), rtol=1e-5, atol=1e-5)
    assert not np.any(got[sum(sizes) :])


@pytest.mark.slow
def test_agrees_with_ragged_dot() -> None:
    """An oracle that is not ours, values and gradients."""
    x, w, sizes, dy = draw(40, 16), draw(4, 16, 12, seed=1), jnp.array([7, 0, 20, 9]), draw(40, 12, seed=2)
    ours, theirs = (
        jax.vjp(lambda x, w, product=product: product(x, w, sizes), x, w)
        for product in (grouped_matmul, jax.lax.ragged_dot)
    )
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(ours[1](dy), theirs[1](dy), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@every_implementation
def test_a_group_never_sees_another_s_rows(implementation: str) -> None:
    """NaN in every other group, and past the last one: values and gradients of the first group keep their bits."""
    dtype = "bfloat16" if implementation == "pallas_gpu" else "float32"
    x, w, dy = draw(90, 64, dtype=dtype), draw(3, 64, 64, dtype=dtype, seed=1), draw(90, 64, dtype=dtype, seed=2)
    sizes = jnp.array([37, 29, 11])

    @jax.jit
    def both(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w)
        return y, *pullback(dy)

    def first(results: Any) -> list[np.ndarray]:
        y, dx, dw = results
        return [np.asarray(each, np.float32) for each in (y[:37], dx[:37], dw[0])]

    with able_to_run(implementation, plain=True):
        clean = first(both(x, w, dy))
        spoiled = both(x.at[37:].set(jnp.nan), w.at[1:].set(jnp.nan), dy.at[37:].set(jnp.nan))
    for got, want in zip(first(spoiled), clean, strict=True):
        np.testing.assert_array_equal(got, want)
    assert not np.any(np.asarray(spoiled[1][77:], np.float32)), "rows past the last group take no gradient"


@every_implementation
def test_sizes_that_sum_past_the_rows_give_nan(implementation: str) -> None:
    """y, and the gradients of a loss that does not carry y: also for rows and groups without any product."""
    dtype = "bfloat16" if implementation == "pallas_gpu" else "float32"
    x, w = draw(40, 64, dtype=dtype), draw(3, 64, 64, dtype=dtype, seed=1)

    @jax.jit
    def run(sizes: jax.Array) -> Any:
        product = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
        y, pull_back = jax.vjp(product, x, w)
        return y, *pull_back(jnp.ones_like(y))

    with able_to_run(implementation, plain=True):
        for sizes, right in (([30, 0, 11], False), ([50, -20, 0], False), ([30, 0, 8], True)):
            for result in run(jnp.array(sizes)):
                assert (np.isfinite if right else np.isnan)(np.asarray(result, np.float32)).all()


LARGEST = 2**31 - 1


@pytest.mark.parametrize(
    ("sizes", "m", "right"),
    [
        ([2**24 + 3, 2], 2**24 + 5, True),  # What float32 rounds up, and down.
        ([2**24, 1], 2**24, False),
        ([LARGEST - 1, 1], LARGEST, True),
        ([LARGEST - 1, 1], LARGEST - 1, False),
        ([LARGEST, LARGEST], 100, False),  # -2 in 32 bits
        ([LARGEST, LARGEST, 5], 100, False),  # 3 in 32 bits
        ([LARGEST, 3, -1], LARGEST, False),
    ],
)
def test_sums_of_sizes_are_exact(sizes: list[int], m: int, right: bool) -> None:
    """From the sizes alone: nothing has m rows. Starts are in order and inside of the rows, whatever the sizes are."""
    sizes += [0] * (4 - len(sizes))
    given = jnp.array(sizes, jnp.int32)
    assert np.isnan(poison(given, m)) == (not right)
    want = np.minimum(np.cumsum([0, *np.maximum(sizes, 0)]), m)
    np.testing.assert_array_equal(group_starts(given, m), want)
    many = jnp.concatenate([jnp.zeros(MOST_MASKED, jnp.int32), given])
    np.testing.assert_array_equal(group_starts(many, m)[MOST_MASKED:], want)


def test_sizes_of_64_bits_are_not_cut_to_32() -> None:
    with jax.enable_x64(True):
        x, w = jnp.ones((6, 4), jnp.float32), jnp.ones((2, 4, 3), jnp.float32)
        run = jax.jit(grouped_matmul)
        for sizes, right in (([2**32 + 2, 3], False), ([3, 2 - 2**32], False), ([2, 3], True)):
            assert (np.isfinite if right else np.isnan)(run(x, w, jnp.array(sizes))).all()
        with pytest.raises(ValueError, match="group_sizes sum to 18446744073709551614 and x has 6 rows"):
            grouped_matmul(x, w, jnp.array([2**63 - 1, 2**63 - 1]))


@implementations("xla", "reference")
def test_gradients_stop_at_quantised_weights(implementation: str) -> None:
    w, sizes = quantize(draw(2, 8, 4), "float8_e4m3fn"), jnp.array([1, 2])
    product = functools.partial(grouped_matmul, group_sizes=sizes, implementation=implementation)
    gradients = jax.grad(lambda w: jnp.sum(product(draw(3, 8, seed=1), w)))(w)
    assert not any(np.any(np.asarray(leaf, np.float32)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        pytest.param("int4", (16, 8), marks=pytest.mark.slow),
        pytest.param("int8", None, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", (16, 8), marks=pytest.mark.slow),
    ],
)
def test_weight_only(dtype: str, block: Any) -> None:
    x, w, sizes = draw(30, 32), draw(3, 32, 24, seed=1), jnp.array([10, 3, 15])
    q = quantize(w, dtype, block=block)
    got, dx = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(grouped_matmul(x, q, sizes))))(x)
    want, d_plain = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(grouped_matmul(x, dequantize(q), sizes))))(x)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(dx, d_plain, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_swiglu_takes_gates_and_values_as_an_axis() -> None:
    x, w, sizes = draw(20, 16), draw(2, 16, 24, seed=1), jnp.array([5, 12])
    both = grouped_matmul(x, w.reshape(2, 16, 2, 12), sizes, activation="swiglu")
    np.testing.assert_array_equal(both, grouped_matmul(x, w, sizes, activation="swiglu"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (lambda: (draw(4, 8), draw(2, 8, 3), jnp.array([3, 2])), "group_sizes sum to 5 and x has 4 rows"),
        (lambda: (draw(4, 8), draw(2, 8, 3), jnp.array([3, -1])), r"group_sizes\[1\] is negative"),
        (lambda: (draw(4, 8), draw(2, 8, 3), jnp.array([4])), "has 1 groups and w has 2 matrices"),
        (lambda: (draw(4, 8), draw(2, 8, 3), jnp.array([2.0, 2.0])), r"jnp.bincount\(group_of_row, length=G\)"),
        (lambda: (draw(4, 8), draw(2, 3, 8), jnp.array([2, 2])), r"pass w.swapaxes\(1, 2\)"),
        (
            lambda: (draw(4, 8), quantize(draw(2, 4, 8), "int4"), jnp.array([2, 2])),
            r"it looks transposed: quantise the float matrix as quantize\(w.swapaxes\(1, 2\), 'int4'\)",
        ),
        (lambda: (draw(1, 4, 8), draw(2, 8, 3), jnp.array([2, 2])), r"x.reshape\(-1, K\)"),
        (lambda: (jnp.ones((4, 8), int), draw(2, 8, 3), jnp.array([2, 2])), r"x.astype\(jnp.bfloat16\)"),
        (lambda: (draw(4, 8), draw(0, 8, 3), []), r"group_sizes is float32\[0\]; .*jnp.zeros\(0, jnp.int32\)"),
        (lambda: (draw(4, 8), draw(2, 8, 3, dtype="bfloat16"), jnp.array([2, 2])), r"pass w.astype\(x.dtype\)"),
    ],
)
def test_bad_input_gets_the_remedy(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        grouped_matmul(*arguments())


def test_quantised_gates_and_values_as_an_axis_get_the_remedy() -> None:
    w = QuantizedArray(np.ones((2, 8, 2, 3), "int8"), np.ones((2, 8, 1, 3), "float32"), "int8")
    with pytest.raises(
        ValueError, match=r"are \[G, K, 2 N\] = \[2, 8, 6\]: pass quantize\(w.reshape\(2, 8, 6\), 'int8'\)"
    ):
        grouped_matmul(np.ones((4, 8), "float32"), w, np.array([2, 2]), activation="swiglu")


@pytest.mark.parametrize("shape", [(0, 8)])
def test_no_rows(shape: tuple[int, int]) -> None:
    w = draw(2, 8, 3)
    assert grouped_matmul(jnp.zeros(shape), w, jnp.zeros(2, jnp.int32)).shape == (0, 3)
    assert not np.any(jax.grad(lambda w: jnp.sum(grouped_matmul(jnp.zeros(shape), w, jnp.zeros(2, jnp.int32))))(w))
