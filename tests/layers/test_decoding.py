"""Single tokens on a GPU: attention takes the ops of decoding where they have kernels, and is the same as without."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run
from tilewright.layers import Attention, LatentAttention
from tilewright.layers.attention import StackedCache, held
from tilewright.layers.layer import Residual
from tilewright.ops.norm.api import rms_norm

LAYER = Attention(d_model=64, num_heads=4, num_kv_heads=4, head_dim=64, rope_theta=1e6)
LATENT = LatentAttention(d_model=128, num_heads=8, latent_dim=128, key_dim=64, shared_key_dim=64, value_dim=64)


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


def drawn_latents(layer=LATENT, lengths=(70, 0), capacity=72, dtype=jnp.bfloat16, stacked=True):
    """As `drawn`. What the caches hold past the lengths is NaN."""
    weights = layer.init(jax.random.key(0), dtype)
    x = jax.random.normal(jax.random.key(1), (len(lengths), 1, layer.d_model)).astype(dtype)
    state, lengths = layer.initial_state(len(lengths), capacity=capacity, dtype=dtype), jnp.asarray(lengths, jnp.int32)
    latents = jax.random.normal(jax.random.key(2), (2, *state.latents.shape)).astype(dtype)
    beyond = jnp.arange(capacity)[None, :] >= lengths[:, None]
    latents = jnp.where(beyond[None, ..., None], jnp.nan, latents)
    cache = StackedCache(latents, jnp.int32(1)) if stacked else latents[1]
    return weights, x, dataclasses.replace(state, latents=cache, length=lengths)


def assert_same_latents(after, want):
    """The new latents of the first two rows are of other products; their other latents are those that were there."""
    assert jax.tree.structure(after) == jax.tree.structure(want)
    np.testing.assert_array_equal(after.length, want.length)
    one, other = (np.asarray(held(state.latents)[:2], np.float32) for state in (after, want))
    np.testing.assert_allclose(one, other, rtol=2e-2, atol=3e-2)


def test_a_token_over_latents_takes_their_kernel():
    ops = ops_of(LATENT, jax.eval_shape(drawn_latents))
    wanted = ("decode_latent_qkv", "absorb_queries", "decode_latent_attention", "expand_values", "matmul")
    assert ops == [(op, "pallas_gpu") for op in wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "given", "chip"),
    [
        ({}, {"dtype": jnp.float32}, "h200"),
        ({"num_heads": 4}, {}, "h200"),
        ({"latent_dim": 48}, {}, "h200"),
        ({}, {}, "a100"),
        ({}, {}, "v6e"),
    ],
)
def test_latents_without_a_kernel_go_on_as_before(changed, given, chip):
    layer = dataclasses.replace(LATENT, **changed)
    ops = ops_of(layer, jax.eval_shape(lambda: drawn_latents(layer, **given)), chip=chip)
    assert [op for op, _ in ops if "attention" in op] == ["decode_attention"]


@pytest.mark.slow
def test_a_token_over_latents_is_the_same_as_without_the_kernel():
    """The last row's cache is full: its output is NaN, and nothing of a stack is written."""
    weights, x, state = drawn_latents(lengths=(70, 0, 72))
    want_y, want = jax.jit(LATENT.apply)(weights, x, state)
    with able_to_run("pallas_gpu"), tilewright.target("h200"):
        y, after = jax.jit(LATENT.apply)(weights, x, state)
    assert_same_latents(after, want)
    assert np.isnan(y[2]).all()
    assert np.isnan(want_y[2]).all()
    y, want_y = (np.asarray(each[:2], np.float32) for each in (y, want_y))
    np.testing.assert_allclose(y, want_y, rtol=0, atol=2e-2 * np.abs(want_y).max())


@pytest.mark.slow
def test_a_token_over_latents_is_decoded_into_the_residual_stream():
    """`decode` is `apply`, a sum and a norm; the length after it is the one that the loop over layers has."""
    weights, x, state = drawn_latents()
    norm = jnp.linspace(0.5, 1.5, LATENT.d_model, dtype=jnp.bfloat16)
    stream = jax.random.normal(jax.random.key(3), x.shape).astype(x.dtype)
    residual = Residual(stream, norm, 1e-6, 0.0)
    given = dataclasses.replace(state, next_length=state.length + 1)
    assert not LATENT.can_decode(weights, x, state, residual)
    with able_to_run("pallas_gpu"), tilewright.target("h200"):
        assert LATENT.can_decode(weights, x, state, residual)
        assert not LATENT.can_decode(weights, jnp.concatenate([x, x], axis=1), state, residual)
        assert not LATENT.can_decode(LATENT.quantized(weights, "int8"), x, state, residual)
        got, normed, after = jax.jit(lambda *given: LATENT.decode(*given, residual))(weights, x, given)
    y, want = jax.jit(LATENT.apply)(weights, x, state)
    assert_same_latents(after, want)
    expected = stream + y
    for one, other in ((got, expected), (normed, rms_norm(expected, norm, eps=1e-6))):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-2 * np.abs(other).max())
