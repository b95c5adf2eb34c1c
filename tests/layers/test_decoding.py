"""Single tokens on a GPU: attention takes `decode_qkv` where it has a kernel, and is the same as without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run
from tilewright.layers import Attention
from tilewright.layers.attention import StackedCache

LAYER = Attention(d_model=64, num_heads=4, num_kv_heads=4, head_dim=64, rope_theta=1e6)


def drawn(layer=LAYER, lengths=(2, 0), capacity=4, dtype=jnp.bfloat16, stacked=True):
    """Weights, a token per row, and a cache with tokens: the second of a stack of two layers' caches, or a single one."""
    weights = layer.init(jax.random.key(0), dtype)
    x = jax.random.normal(jax.random.key(1), (len(lengths), 1, layer.d_model)).astype(dtype)
    state = layer.initial_state(len(lengths), capacity=capacity, dtype=dtype)
    shape = (2, *state.keys.shape) if stacked else state.keys.shape
    caches = [jax.random.normal(jax.random.key(n), shape).astype(dtype) for n in (2, 3)]
    if stacked:
        caches = [StackedCache(cache, jnp.int32(1)) for cache in caches]
    lengths = jnp.asarray(lengths, jnp.int32)
    return weights, x, dataclasses.replace(state, keys=caches[0], values=caches[1], length=lengths)


def ops_of(layer, arguments, segments=None, chip="h200"):
    """The ops of a step on a chip, with their implementations."""
    with tilewright.target(chip):
        told = tilewright.explain(lambda given, ids: layer.apply(*given, segment_ids=ids), arguments, segments)
    return [(decision.op, decision.implementation) for decision in told.decisions]


def test_a_token_on_an_h200_is_projected_and_written_by_one_op():
    ops = ops_of(LAYER, jax.eval_shape(drawn))
    assert ops == [("decode_qkv", "pallas_gpu"), ("decode_attention", "pallas_gpu"), ("matmul", "pallas_gpu")]


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ({}, {"dtype": jnp.float32}),
        ({"num_kv_heads": 2}, {}),
        ({"head_dim": 48}, {}),
    ],
)
def test_what_the_kernel_does_not_take_goes_on_as_before(changed, given):
    layer = dataclasses.replace(LAYER, **changed)
    assert "decode_qkv" not in [op for op, _ in ops_of(layer, jax.eval_shape(lambda: drawn(layer, **given)))]


def test_everything_but_a_token_of_a_plain_fixed_cache_goes_on_as_before():
    weights, x, state = jax.eval_shape(drawn)
    segments = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    two_tokens = jax.ShapeDtypeStruct((2, 2, 64), x.dtype)
    quantized = jax.eval_shape(lambda w: LAYER.quantized(w, "int8"), weights)
    wide = jax.eval_shape(lambda w: LAYER.cast(w, jnp.float32), weights)
    others = [
        (ops_of(LAYER, (weights, x, state), segments), "segments"),
        (ops_of(LAYER, (weights, two_tokens, state)), "two tokens"),
        (ops_of(LAYER, (weights, x)), "no state"),
        (ops_of(LAYER, (quantized, x, state)), "quantised"),
        (ops_of(LAYER, (wide, x, state)), "float32 weights"),
        (ops_of(LAYER, (weights, x, state), chip="a100"), "another GPU"),
        (ops_of(LAYER, (weights, x, state), chip="v6e"), "a TPU"),
    ]
    for ops, what in others:
        assert "decode_qkv" not in [op for op, _ in ops], what


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_a_token_is_the_same_as_without_the_kernel(stacked):
    """The last row's cache is full: its output is NaN, and nothing is written."""
    weights, x, state = drawn(lengths=(2, 0, 4), stacked=stacked)
    # A scalar length is that of every row.
    states = [state] if stacked else [state, dataclasses.replace(state, length=jnp.int32(1))]
    for before in states:
        want_y, want = jax.jit(LAYER.apply)(weights, x, before)
        with able_to_run("pallas_gpu"), tilewright.target("h200"):
            y, after = jax.jit(LAYER.apply)(weights, x, before)
        assert jax.tree.structure(after) == jax.tree.structure(want)
        np.testing.assert_array_equal(after.length, want.length)
        full = np.broadcast_to(np.asarray(before.length) >= 4, (3,))
        np.testing.assert_array_equal(np.isnan(y).all(axis=(1, 2)), full)
        for one, other in ((y, want_y), (after.keys, want.keys), (after.values, want.values)):
            one, other = (each.stack[1] if isinstance(each, StackedCache) else each for each in (one, other))
            np.testing.assert_allclose(
                one[~full].astype(jnp.float32), other[~full].astype(jnp.float32), rtol=2e-2, atol=3e-2
            )
