"""Packed sequences with an initial and a final state each, against each sequence alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import able_to_run, assert_close
from tilewright.ops.delta_rule import packed

LENGTHS = (3, 0, 1, 9, 8)
N, T, LONGEST = len(LENGTHS), sum(LENGTHS), max(LENGTHS)
ENDS = np.cumsum((0, *LENGTHS)).astype(np.int32)
H, HV, K, V = 1, 2, 16, 16


def draw(op: str, t: int = T, n: int = N, dtype: str = "float32") -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8))
    k = jax.random.normal(next(keys), (t, H, K))
    gate = {"delta_rule": None, "gated_delta_rule": (t, HV), "kda": (t, HV, K)}[op]
    arrays = {
        "q": jax.random.normal(next(keys), (t, H, K)).astype(dtype),
        "k": (k / jnp.linalg.norm(k, axis=-1, keepdims=True)).astype(dtype),
        "v": jax.random.normal(next(keys), (t, HV, V)).astype(dtype),
        "beta": jax.nn.sigmoid(jax.random.normal(next(keys), (t, HV))),
        "initial_state": jax.random.normal(next(keys), (n, HV, K, V)),
    }
    return arrays if gate is None else arrays | {"g": -jax.nn.softplus(jax.random.normal(next(keys), gate))}


def alone(op: str, arrays: dict[str, Any]) -> tuple[Any, Any]:
    """The reference on each sequence as a row of its own, padded with tokens that change nothing."""
    tokens = np.minimum(ENDS[:-1, None] + np.arange(LONGEST), T - 1)
    is_token = np.arange(LONGEST) < np.asarray(LENGTHS)[:, None]

    def rows(x: jax.Array) -> jax.Array:
        mask = is_token.reshape(N, LONGEST, *(1,) * (x.ndim - 1))
        return jnp.where(mask, x[tokens], jnp.zeros((), x.dtype))

    padded = {name: x if name == "initial_state" else rows(x) for name, x in arrays.items()}
    o, final_state = getattr(tilewright, op)(**padded, implementation="reference")
    return jnp.concatenate([o[n, :length] for n, length in enumerate(LENGTHS)]), final_state


def with_gradients(function: Any) -> Any:
    def both(arrays: Any, cotangents: Any) -> dict[str, Any]:
        (o, final_state), pullback = jax.vjp(function, arrays)
        gradients = pullback(tuple(x.astype(y.dtype) for x, y in zip(cotangents, (o, final_state), strict=True)))[0]
        return {"o": o, "final_state": final_state, **{f"d {name}": value for name, value in gradients.items()}}

    return jax.jit(both)


@functools.cache
def expected(op: str, dtype: str) -> tuple[Any, Any, Any, Any]:
    """Arrays, cotangents, and the results in `dtype` and in float64."""
    arrays = draw(op, dtype=dtype)
    keys = jax.random.split(jax.random.key(1))
    cotangents = jax.random.normal(keys[0], (T, HV, V)), jax.random.normal(keys[1], (N, HV, K, V))
    reference = with_gradients(functools.partial(alone, op))
    plain = {name: np.asarray(x.astype(dtype), np.float32) for name, x in reference(arrays, cotangents).items()}
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(np.float64)), (arrays, cotangents))
        oracle = jax.tree.map(np.asarray, reference(*wide))
    return arrays, cotangents, plain, oracle


# The way into rows and back does not know the op, so that each implementation has one. Rows of 8 take three passes.
CASES = [
    pytest.param("kda", "reference", 8, marks=pytest.mark.slow),
    pytest.param("delta_rule", "xla", 8, marks=pytest.mark.slow),
    pytest.param("kda", "pallas_tpu", 8, marks=pytest.mark.slow),
    pytest.param("gated_delta_rule", "pallas_gpu", None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("op", "implementation", "rows"), CASES)
def test_each_sequence_is_as_it_is_alone(
    op: str, implementation: str, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, final states and every gradient; sequences of 0, 1 and odd lengths. Rows of 8 cut one of 9 in two."""
    if rows is not None:
        monkeypatch.setattr(packed, "row_tokens", lambda t, n: rows)
    dtype = "bfloat16" if implementation == "pallas_gpu" else "float32"
    arrays, cotangents, plain, oracle = expected(op, dtype)

    def run(arrays: Any, ends: Any) -> Any:
        return getattr(tilewright, op)(**arrays, cu_seqlens=ends, implementation=implementation)

    with able_to_run(implementation, plain=True):
        # The ends are traced: they are known on the device only.
        got = jax.jit(lambda *given: with_gradients(lambda arrays: run(arrays, given[2]))(*given[:2]))(
            arrays, cotangents, jnp.asarray(ENDS)
        )
    for name, want in oracle.items():
        assert_close(got[name], plain[name], want, f"{op} {implementation} {name}")


def test_decoding_one_token_per_sequence() -> None:
    """Is the step. With B = 1."""
    arrays = draw("gated_delta_rule", t=5, n=5)
    rows = {name: x if name == "initial_state" else x[None] for name, x in arrays.items()}
    ends = {"cu_seqlens": jnp.arange(6), "implementation": "reference"}
    o, final_state = jax.jit(lambda rows: tilewright.gated_delta_rule(**rows, **ends))(rows)
    state = arrays.pop("initial_state")
    want, after = jax.jit(lambda state, token: tilewright.gated_delta_rule_step(state, **token))(state, arrays)
    np.testing.assert_allclose(o[0], want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(final_state, after, rtol=0, atol=1e-6)


def test_rows_that_sequences_are_cut_into() -> None:
    """One row per sequence where that is less work than three passes over shorter ones."""
    assert packed.row_tokens(64, 64) == 64
    assert packed.row_tokens(4096, 2) == 4096
    assert packed.row_tokens(8192, 16) == 128
    assert packed.row_tokens(65_536, 16) == 512


def test_what_is_refused() -> None:
    arrays = draw("kda")

    def run(**changed: Any) -> Any:
        return tilewright.kda(**{**arrays, "implementation": "reference", **changed})

    with pytest.raises(ValueError, match=r"cu_seqlens=\[0, 3, 2, 21\] must ascend from 0 to T=21"):
        run(cu_seqlens=np.array([0, 3, 2, 21]), initial_state=None)
    with pytest.raises(ValueError, match=r"initial_state is .*; it must be \[N, HV, K, V\] = \[2, 2, 16, 16\]"):
        run(cu_seqlens=np.array([0, 3, 21]))
    with pytest.raises(ValueError, match=r"cu_seqlens is .*; it must be \[N \+ 1\] integers"):
        run(cu_seqlens=np.array([0.0, 21.0]), initial_state=None)
    with pytest.raises(ValueError, match="cu_seqlens and segment_ids are both given"):
        run(cu_seqlens=ENDS, segment_ids=np.zeros(T, np.int32))
    two_rows = {name: jnp.stack([x, x]) for name, x in arrays.items() if name != "initial_state"}
    with pytest.raises(ValueError, match="packed sequences lie in one row, B=1"):
        run(**two_rows, cu_seqlens=ENDS, initial_state=None)
    # Where they are traced, wrong ends are NaN.
    o, final_state = jax.jit(lambda ends: run(cu_seqlens=ends))(jnp.asarray([0, 5, 3, 4, 13, 21]))
    assert np.isnan(o).all()
    assert np.isnan(final_state).all()
