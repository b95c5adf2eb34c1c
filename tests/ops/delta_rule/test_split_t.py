"""Sequence splits on Hopper: the contract holds for any number of them, and nothing leaks into earlier ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import able_to_run
from tilewright.configs import DeltaRuleSm90Backward, DeltaRuleSm90Forward
from tilewright.core.dispatch import find_op
from tilewright.ops.delta_rule.cases import _case
from tilewright.workbench.check import CaseCheck

GATED = pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])


def drawn(op, t, *, hv=1, k=64, v=64, **more):
    return _case(op, "drawn", 1, t, 1, k, v, hv=hv, state=True, **more)


@functools.cache
def on_gpu(op, splits):
    config = DeltaRuleSm90Forward(splits=splits)
    function = functools.partial(find_op(op).function, implementation="pallas_gpu", config=config)
    jitted = jax.jit(lambda arrays: function(**arrays))

    def run(arrays):
        with able_to_run("pallas_gpu"):
            return jitted(arrays)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "splits", "hv", "more"),
    [
        # Five chunks in splits of 2, 2 and 1: a transition between, a shorter last split, gates that let states through.
        ("gated_delta_rule", 3, 1, {"gate": 0.03}),
        # One split per chunk, segments that end inside splits, grouped heads, widths of three tiles of 64.
        ("kda", 5, 2, {"segments": 3, "v": 80}),
        ("kda", 4, 1, {"k": 128, "v": 128, "gate": 30.0}),
    ],
)
def test_values_and_gradients(op, splits, hv, more):
    held = CaseCheck(find_op(op), drawn(op, 300, hv=hv, **more), "bfloat16")
    with able_to_run("pallas_gpu"):
        configs = DeltaRuleSm90Forward(block_v=64, splits=splits), DeltaRuleSm90Backward(block_v=64)
        checked = held.check("pallas_gpu", configs)
    assert len(checked) >= 7
    for one in checked:
        assert one.verdict.ok, f"{one.quantity}: {one.verdict}"


@pytest.mark.slow
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_two_splits_are_two_calls_chained_to_the_bit(op):
    """The second split begins with what the first ends with: no transition is needed, so none rounds."""
    arrays = drawn(op, 4 * 64).draw("bfloat16", 0)
    half = 2 * 64
    o, final = on_gpu(op, 2)(arrays)
    state, outputs = arrays.pop("initial_state"), []
    for tokens in (slice(0, half), slice(half, None)):
        given = {name: array[:, tokens] for name, array in arrays.items()} | {"initial_state": state}
        o_half, state = on_gpu(op, 1)(given)
        outputs.append(o_half)
    np.testing.assert_array_equal(o, jnp.concatenate(outputs, axis=1))
    np.testing.assert_array_equal(final, state)


@pytest.mark.slow
def test_nothing_later_changes_what_was():
    """To the bit, inside a chunk and in the splits after it, where values are not even finite."""
    arrays, t = drawn("kda", 300, gate=0.01).draw("bfloat16", 0), 150
    later = arrays | {
        name: arrays[name].at[:, t:].set(value) for name, value in {"g": -0.1, "beta": 0.3, "k": 0.1, "v": 2.0}.items()
    }
    later["v"] = later["v"].at[:, 192:].set(jnp.inf)
    run = on_gpu("kda", 5)
    before, after = run(arrays)[0], run(later)[0]
    np.testing.assert_array_equal(after[:, :t], before[:, :t])
    assert np.all(np.isfinite(after[:, :192]))
    assert not np.any(np.isfinite(after[:, 193:]))


def test_splits_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"splits=0 must be a positive integer; use 1 for a sequence in one piece"):
        DeltaRuleSm90Forward(splits=0)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "splits"),
    [(1, 32768, 4, 16), (1, 8192, 4, 16), (1, 1024, 4, 1), (4, 32768, 4, 4), (1, 8192, 64, 1), (1, 8192, 96, 1)],
)
def test_an_h200_gets_splits_where_heads_are_few(batch, length, heads, splits):
    arrays = {
        name: jax.ShapeDtypeStruct((batch, length, heads, *rest), dtype)
        for name, rest, dtype in (
            *((name, (128,), jnp.bfloat16) for name in "qkv"),
            *((name, (), jnp.float32) for name in ("g", "beta")),
        )
    }
    with tilewright.target("h200"):
        (decision,) = tilewright.explain("gated_delta_rule", **arrays).decisions
    assert (decision.implementation, decision.forward.config.splits) == ("pallas_gpu", splits)


@pytest.mark.slow
@GATED
def test_it_lowers_for_a_gpu_that_is_not_there(op):
    """Gates and inverses, or scores; ends, starts, states."""
    inputs = drawn(op, 32768, k=128, v=128).inputs
    given = {name: jax.ShapeDtypeStruct(of.shape, of.dtype or jnp.bfloat16) for name, of in inputs.items()}
    with tilewright.target("h200"):
        lowered = jax.jit(lambda given: find_op(op).function(**given)).trace(given).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == (4 if op == "kda" else 5)
