"""The contract of every layer: sequences, chunks and tokens agree, packed sequences are separate, errors teach."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.layers import equations
from tilewright.layers import Attention, DeltaNet, KimiDeltaAttention, LatentAttention, Qwen3NextGatedDeltaNet

D = 48
LAYERS: dict[str, Any] = {
    "kda": KimiDeltaAttention(d_model=D, num_heads=2, head_dim=16, gate_rank=8),
    "gdn": Qwen3NextGatedDeltaNet(d_model=D, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=32),
    "deltanet": DeltaNet(d_model=D, num_heads=2, key_dim=16, value_dim=32, negative_eigenvalues=True),
    "softmax": Attention(d_model=D, num_heads=4, num_kv_heads=2, head_dim=16, gated=True, rope_fraction=0.5),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
delta_layers = pytest.mark.parametrize("name", ["kda", "gdn", "deltanet"])
# Compiling the chunked form takes seconds per shape and is tested with the ops: most tests here run the recurrence.
QUICK = "reference"


@functools.cache
def weights(name: str, dtype: str = "float32") -> Any:
    return LAYERS[name].init(jax.random.key(0), dtype)


def tokens(b: int, t: int, dtype: str = "float32", seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (b, t, D)).astype(dtype)


@functools.cache
def jitted(name: str, implementation: str | None = QUICK) -> Any:
    return jax.jit(functools.partial(LAYERS[name].apply, implementation=implementation))


def close(got: Any, want: Any, dtype: str = "float32") -> None:
    """Outputs are about 1. In bfloat16 a sum in a different order may differ by two roundings."""
    tolerance = {"float32": 2e-5, "bfloat16": 3e-2}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=0, atol=tolerance)


@every_layer
def test_the_published_equations_in_numpy(name: str) -> None:
    x = tokens(2, 12)
    y, _ = jitted(name)(weights(name), x)
    want = equations.BY_LAYER[name](LAYERS[name], jax.tree.map(np.asarray, weights(name)), np.asarray(x, np.float64))
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-5)


def test_a_gate_of_full_rank_is_the_product_of_two_factors() -> None:
    """Kimi-K3's `use_full_rank_gate`; a checkpoint has g_proj in place of g_a_proj and g_b_proj."""
    layer, w, x = LAYERS["kda"], weights("kda"), tokens(1, 5)
    whole = dataclasses.replace(layer, full_rank_gate=True)
    product = dataclasses.replace(w, gate_proj=w.gate_down @ w.gate_up, gate_down=None, gate_up=None)
    y, _ = jax.jit(functools.partial(whole.apply, implementation=QUICK))(product, x)
    close(y, jitted("kda")(w, x)[0])
    names = set(whole.to_checkpoint(product))
    assert names ^ set(layer.to_checkpoint(w)) == {"g_proj.weight", "g_a_proj.weight", "g_b_proj.weight"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in LAYERS), ("kda", "bfloat16"), ("softmax", "bfloat16")]
)
def test_whole_sequences_chunks_and_tokens_agree(name: str, dtype: str) -> None:
    layer, w, x = LAYERS[name], weights(name, dtype), tokens(2, 12, dtype)
    whole, last = jitted(name)(w, x)
    assert whole.dtype == x.dtype

    first, state = jitted(name)(w, x[:, :6])
    second, state = jitted(name)(w, x[:, 6:], state)
    close(jnp.concatenate([first, second], axis=1), whole, dtype)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(last), strict=True):
        close(got, want, dtype)

    state = layer.initial_state(2, capacity=12, dtype=dtype)

    def one(state: Any, x_t: jax.Array) -> Any:
        y, state = layer.apply(w, x_t[:, None], state)
        return state, y[:, 0]

    _, ys = jax.jit(lambda state, x: jax.lax.scan(one, state, jnp.moveaxis(x, 1, 0)))(state, x)
    close(jnp.moveaxis(ys, 0, 1), whole, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kda", "softmax"])
def test_the_best_implementation_agrees_with_the_reference(name: str) -> None:
    """Values and every gradient, over several chunks: the default implementation against the recurrence."""
    x = tokens(1, 150)

    def loss(w: Any, x: jax.Array, implementation: str | None) -> jax.Array:
        y, _ = LAYERS[name].apply(w, x, implementation=implementation)
        return jnp.sum(jnp.square(y))

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    got, want = gradient(weights(name), x, None), gradient(weights(name), x, QUICK)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-5 * scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gdn", "softmax"])
def test_gradients_flow_through_the_state(name: str) -> None:
    x = tokens(1, 12)

    def loss(w: Any, x: jax.Array, pieces: int) -> jax.Array:
        state, total = None, jnp.zeros(())
        for part in jnp.split(x, pieces, axis=1):
            y, state = LAYERS[name].apply(w, part, state, implementation=QUICK)
            total = total + jnp.sum(jnp.square(y))
        return total

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    for one, other in zip(*(jax.tree.leaves(gradient(weights(name), x, pieces)) for pieces in (1, 2)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(other))))


@every_layer
def test_packed_sequences_are_separate_sequences(name: str) -> None:
    x = tokens(1, 12)
    ids = jnp.array([[3, 3, 3, 3, 7, 7, 7, 7, 3, 3, 3, 3]])
    packed, state = jitted(name)(weights(name), x, segment_ids=ids)
    parts = [jitted(name)(weights(name), part) for part in jnp.split(x, 3, axis=1)]
    close(packed, jnp.concatenate([y for y, _ in parts], axis=1))
    # Tokens of a later call belong to the last segment.
    more = tokens(1, 4, seed=2)
    got, _ = jitted(name)(weights(name), more, state)
    want, _ = jitted(name)(weights(name), more, parts[-1][1])
    close(got, want)


def test_packed_chunks_through_a_fixed_cache() -> None:
    layer, w, x = LAYERS["softmax"], weights("softmax"), tokens(2, 12)
    apply = jitted("softmax")
    ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]])
    whole, _ = apply(w, x, segment_ids=ids)
    state, parts = layer.initial_state(2, capacity=16), []
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        y, state = apply(w, x[:, part], state, segment_ids=ids[:, part])
        parts.append(y)
    close(jnp.concatenate(parts, axis=1)[0], whole[0])
    # The second segment of row 1 starts with the third call, which cannot know that: it continues the first.
    close(jnp.concatenate(parts[:2], axis=1)[1], whole[1, :8])


@every_layer
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    x = tokens(2, 12)
    together, _ = jitted(name)(weights(name), x)
    alone, _ = jitted(name)(weights(name), x[1:2])
    np.testing.assert_allclose(together[1:2], alone, rtol=0, atol=2e-6)


@every_layer
def test_later_tokens_do_not_change_earlier_outputs(name: str) -> None:
    x = tokens(1, 12)
    y, _ = jitted(name)(weights(name), x)
    changed, _ = jitted(name)(weights(name), x.at[:, 6:].set(3.0))
    np.testing.assert_array_equal(y[:, :6], changed[:, :6])
    assert np.all(np.any(np.asarray(y != changed)[:, 6:], axis=-1))


@pytest.mark.slow
@every_layer
def test_float32_weights_take_bfloat16_activations(name: str) -> None:
    x = tokens(1, 12)
    exact, _ = jitted(name)(weights(name), x)
    y, _ = jitted(name)(weights(name), x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=0, atol=0.1)
    gradient = jax.grad(lambda w: jnp.sum(LAYERS[name].apply(w, x.astype(jnp.bfloat16))[0].astype(jnp.float32)))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(jax.eval_shape(gradient, weights(name)))} == {"float32"}


@every_layer
def test_bfloat16_weights_take_float32_activations(name: str) -> None:
    layer = LAYERS[name]
    weights = jax.eval_shape(lambda: layer.init(jax.random.key(0), jnp.bfloat16))
    y, _ = jax.eval_shape(layer.apply, weights, jax.ShapeDtypeStruct((1, 5, layer.d_model), jnp.float32))
    assert y.dtype == jnp.float32


@delta_layers
def test_the_state_does_not_grow(name: str) -> None:
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(jitted(name), weights(name), tokens(1, t))[1]))
        for t in (4, 40)
    ]
    assert sizes[0] == sizes[1]
    initial = LAYERS[name].initial_state(1)
    assert sizes[0] == sum(leaf.size for leaf in jax.tree.leaves(initial))


@every_layer
def test_no_tokens_at_all(name: str) -> None:
    x = tokens(2, 12)
    _, state = jitted(name)(weights(name), x)
    y, after = jitted(name)(weights(name), x[:, :0], state)
    assert y.shape == (2, 0, D)
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)


@every_layer
def test_explain_shows_the_ops_of_a_layer(name: str) -> None:
    told = tilewright.explain(LAYERS[name].apply, weights(name), tokens(1, 8))
    ops = {"kda": "kda", "gdn": "gated_delta_rule", "deltanet": "delta_rule", "softmax": "flash_attention"}
    assert ops[name] in {decision.op for decision in told.decisions}


@every_layer
def test_weights_and_states_are_pytrees(name: str) -> None:
    """They work with eval_shape, tree.map to any leaf, vmap, and a scan over stacked layers."""
    layer = LAYERS[name]
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(weights(name))
    jax.tree.map(lambda leaf: leaf.shape, shapes)
    stacked = jax.eval_shape(jax.vmap(layer.init), jax.random.split(jax.random.key(1), 2))

    def blocks(x: jax.Array, stacked: Any) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x + layer.apply(w, x)[0], None), x, stacked)[0]

    assert jax.eval_shape(blocks, tokens(1, 4), stacked).shape == (1, 4, D)


def test_a_full_cache_is_an_error_and_nan_under_jit() -> None:
    layer, w = LAYERS["softmax"], weights("softmax")
    apply = jitted("softmax")
    _, state = apply(w, tokens(1, 3), layer.initial_state(1, capacity=4))
    with pytest.raises(ValueError, match=r"state has room for 4 tokens, holds 3, and x has T=2 more; .*capacity=5\)"):
        layer.apply(w, tokens(1, 2), state)
    y, _ = apply(w, tokens(1, 2), state)
    assert np.all(np.isnan(y))
    y, _ = apply(w, tokens(1, 1), state)
    assert np.all(np.isfinite(y))


def test_a_grown_cache_becomes_a_fixed_one() -> None:
    apply, w, x = jitted("softmax"), weights("softmax"), tokens(1, 7)
    whole, _ = apply(w, x)
    _, grown = apply(w, x[:, :5])
    assert grown.keys.shape[1] == 5
    fixed = grown.with_capacity(9)
    y, fixed = apply(w, x[:, 5:], fixed)
    close(y, whole[:, 5:])
    assert (fixed.keys.shape[1], int(fixed.length)) == (9, 7)
    with pytest.raises(ValueError, match=r"capacity=3 is less than the 5 tokens in the cache; use at least 5"):
        grown.with_capacity(3)
    with pytest.raises(ValueError, match=r"this cache is already a fixed one, with room for 9 tokens"):
        fixed.with_capacity(20)


def sizes(name: str, **changes: Any) -> Any:
    """A function that makes the layer of that name with other sizes."""
    return lambda: dataclasses.replace(LAYERS[name], **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (sizes("kda", d_model=0), r"d_model=0 must be a positive integer"),
        (sizes("kda", num_heads=-2), r"num_heads=-2 must be a positive integer"),
        (
            sizes("kda", head_dim=8),
            r"head_dim=8 must be from 16 to 256, the widths .*use more heads of fewer channels, or",
        ),
        (sizes("kda", conv_width=1), r"conv_width=1 must be an integer from 2 to 8; models use 4"),
        (sizes("kda", lower_bound=-9.0), r"lower_bound=-9.0 must be at least -5 and negative; use -5.0, or None"),
        (
            sizes("gdn", num_key_heads=2, num_value_heads=3),
            r"num_value_heads=3 must be a multiple of num_key_heads=2.*; use 4",
        ),
        (sizes("gdn", value_dim=512), r"value_dim=512 must be from 16 to 256"),
        (
            sizes("softmax", num_kv_heads=3),
            r"num_heads=4 must be a multiple of num_kv_heads=3.*use num_kv_heads=1, 4, or",
        ),
        (sizes("softmax", rope_fraction=0.2), r"rope_fraction=0.2 of head_dim=16 is 3 channels; .*rotate in pairs"),
        (sizes("softmax", rope_theta=-1.0), r"rope_theta=-1.0 must be positive; use 10_000.0, or None for no rope"),
        (
            lambda: LAYERS["softmax"].initial_state(1),
            r"capacity=None: a fixed cache .* pass capacity=..., or begin with state=None",
        ),
    ],
)
def test_invalid_sizes_are_errors_with_their_remedy(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@every_layer
def test_invalid_input_is_an_error_with_its_remedy(name: str) -> None:
    layer, w = LAYERS[name], weights(name)
    state = layer.initial_state(2, capacity=8)
    with pytest.raises(ValueError, match=r"x is float32\[5, 48\]; it must be \[B, T, D\] with D=48; pass x\[None\]"):
        layer.apply(w, jnp.zeros((5, D)))
    with pytest.raises(ValueError, match=r"x is float32\[1, 5, 32\]; its last axis must be d_model=48"):
        layer.apply(w, jnp.zeros((1, 5, 32)))
    with pytest.raises(ValueError, match=r"x is float16\[1, 5, 48\]; it must be float32 or bfloat16: x.astype"):
        layer.apply(w, jnp.zeros((1, 5, D), jnp.float16))
    with pytest.raises(ValueError, match=r"state\.\w+ has batch 2 and x has batch 1; .*initial_state\(batch=1\)"):
        layer.apply(w, tokens(1, 5), state)
    with pytest.raises(
        ValueError, match=r"tensors has no 'layer.q_proj.weight'|tensors has no 'layer.in_proj_qkvz.weight'"
    ):
        layer.from_checkpoint({"model.q_proj.weight": np.zeros((2, 2))}, "layer")


@every_layer
def test_weights_and_states_of_another_layer_are_errors(name: str) -> None:
    layer, own, x = LAYERS[name], type(LAYERS[name]).__name__, tokens(2, 5)
    for other in (one for one in LAYERS if one != name):
        kind = type(weights(other)).__name__
        with pytest.raises(ValueError, match=rf"^weights is a {kind} and {own} takes {own}Weights; pass what init or"):
            layer.apply(weights(other), x)
        state = LAYERS[other].initial_state(2, capacity=8)
        takes = rf"{own} takes {type(layer.initial_state(2, capacity=8)).__name__}; pass the state that this layer"
        if "softmax" not in (name, other):
            takes = rf"this {own} takes \[B, \d+, .*\]; pass the state that this layer returned, or None to begin"
        with pytest.raises(ValueError, match=rf"^state.* is .* and {takes}"):
            layer.apply(weights(name), x, state)


@every_layer
def test_weights_of_other_sizes_are_errors(name: str) -> None:
    layer = LAYERS[name]
    other = dataclasses.replace(layer, d_model=32).init(jax.random.key(0))
    with pytest.raises(
        ValueError, match=rf"^weights.q_proj is float32\[32, .* and this {type(layer).__name__} takes \[48"
    ):
        layer.apply(other, tokens(1, 5))
    without = dataclasses.replace(weights(name), o_proj=None)
    with pytest.raises(ValueError, match=r"^weights.o_proj is None and this \w+ takes \[\d+, 48\]; pass what init"):
        layer.apply(without, tokens(1, 5))


def test_weights_that_a_layer_does_not_have_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"^weights.gate_proj is float32\[48, 64\] and this Attention takes None"):
        dataclasses.replace(LAYERS["softmax"], gated=False).apply(weights("softmax"), tokens(1, 5))


def buffers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.slow
@every_layer
def test_every_leaf_is_a_buffer_of_its_own(name: str) -> None:
    """Weights and states, as they are made and under `jit`: donating a tree must not donate a buffer twice."""
    layer, key = LAYERS[name], jax.random.key(0)
    for make in (lambda: layer.init(key), lambda: layer.initial_state(2, capacity=8)):
        for tree in (make(), jax.jit(make)()):
            assert len(set(buffers(tree))) == len(buffers(tree))


@pytest.mark.slow
@every_layer
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.filterwarnings("error")
def test_a_donated_state_is_updated_in_place(name: str, t: int) -> None:
    layer, w, x = LAYERS[name], weights(name), tokens(2, t)

    def step(state: Any, x: jax.Array) -> Any:
        y, state = layer.apply(w, x, state, implementation=QUICK)
        return state, y

    given = layer.initial_state(2, capacity=8)
    want = step(layer.initial_state(2, capacity=8), x)
    donating = jax.jit(step, donate_argnums=0)
    state, y = donating(given, x)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    close(y, want[1])
    y_next = donating(state, x)[1]
    close(y_next, step(want[0], x)[1])


def test_a_checkpoint_of_other_sizes_is_an_error() -> None:
    held = {"q_proj.weight": np.zeros((16, 48), np.float32)}
    with pytest.raises(
        ValueError, match=r"q_proj.weight has shape \[16, 48\] and this layer needs \[32, 48\].*config.json"
    ):
        LAYERS["deltanet"].from_checkpoint(held)


def test_segments_of_other_tokens_are_refused() -> None:
    latent = LatentAttention(d_model=D, num_heads=2, latent_dim=16, key_dim=16, shared_key_dim=8, value_dim=16)
    for layer in (LAYERS["softmax"], latent):
        with pytest.raises(ValueError, match=r"segment_ids is int32\[2, 4\]; it must be \[B, T\] = \[1, 4\], one id"):
            layer.apply(layer.init(jax.random.key(0)), jnp.ones((1, 4, D)), segment_ids=jnp.ones((2, 4), int))


def test_a_state_that_latent_attention_cannot_take_is_named() -> None:
    layer = LatentAttention(d_model=32, num_heads=2, latent_dim=16, key_dim=16, shared_key_dim=8, value_dim=16)
    w, x = layer.init(jax.random.key(0)), jnp.ones((2, 5, 32))
    other = LAYERS["kda"].initial_state(2)
    for state, message in (
        (layer.initial_state(2, capacity=3), r"state has room for 3 tokens, holds 0, and x has T=5 more; .*capacity=5"),
        (layer.initial_state(1, capacity=8), r"state\.latents has batch 1 and x has batch 2; they must be equal"),
        (layer.apply(w, x, segment_ids=jnp.ones((2, 5), int))[1], r"this state is that after packed sequences"),
        (other, r"state is of type \w+ and LatentAttention takes LatentState; pass the state that this layer returned"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.apply(w, x, state)
