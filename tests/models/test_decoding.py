"""A token per row on an H200: the kernels of a layer, and values that are those of the plain path."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run, kernels_of
from tilewright.models import generation
from tilewright.models.architecture import hidden_states, initial_states
from tilewright.models.config import Config
from tilewright.models.loading import architecture_of, init

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
ARCHITECTURE = architecture_of(Config(CONFIG))
IN_ONE_KERNEL = CONFIG | {
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 256,
}
"""Sizes that `decode_layers` divides between four thread blocks in the interpreter."""
QWEN3 = IN_ONE_KERNEL | {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 3072,
}
"""Layers of Qwen3-0.6B."""
HYBRID = {
    "model_type": "kimi_linear",
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_attn_config": {"num_heads": 1, "head_dim": 128, "short_conv_kernel_size": 4},
    "num_attention_heads": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 192,
    "mlp_layer_types": ["dense"] * 6,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def drawn(dtype="bfloat16", batch=2, quantize=None, config=CONFIG):
    """Weights whose norms are not ones, and states behind two and zero tokens."""
    weights = init(config, jax.random.key(0), dtype=dtype, quantize=quantize).weights

    def perturbed(path, leaf):
        is_norm = "norm" in jax.tree_util.keystr(path)
        return (
            leaf * (1 + 0.3 * jnp.sin(jnp.arange(leaf.size).reshape(leaf.shape))).astype(leaf.dtype)
            if is_norm
            else leaf
        )

    weights = jax.tree_util.tree_map_with_path(perturbed, weights)
    states = initial_states(architecture_of(Config(config)), batch, 3, jnp.dtype(dtype))
    states = jax.tree.map(
        lambda leaf: (
            jax.random.normal(jax.random.key(1), leaf.shape).astype(leaf.dtype)
            if leaf.ndim > 2
            else jnp.broadcast_to(jnp.arange(batch, dtype=leaf.dtype) * 2 % 3, leaf.shape)
        ),
        states,
    )
    return weights, states


def step(weights, ids, states, config=CONFIG):
    return generation.next_logits(architecture_of(Config(config)), weights, ids, states)


def kernels(weights, ids, states, config=CONFIG):
    with tilewright.target("h200"):
        traced = jax.jit(functools.partial(step, config=config)).trace(weights, ids, states)
    named = [str(equation.params) for equation in kernels_of(traced.jaxpr.jaxpr)]
    known = r"decode_(layers|(qkv|kda|residual)(_products)?|attention)|matmul_\w+"
    return [found[0] for each in named if (found := re.search(known, each))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "batch", "unrolled"),
    [(CONFIG, 1, 2), (CONFIG, 3, 1), (IN_ONE_KERNEL, 1, 1), (HYBRID, 3, 4)],
    ids=["row", "loop", "one", "hybrid"],
)
def test_tokens_are_those_of_the_plain_path(config, batch, unrolled, monkeypatch):
    """Two tokens one after the other: logits, caches and lengths. In a row, in a loop, in one kernel, in a hybrid."""
    monkeypatch.setattr("tilewright.models.in_place._MOST_UNROLLED", unrolled)
    run = jax.jit(functools.partial(step, config=config))
    weights, states = drawn(batch=batch, config=config)
    ids = jnp.arange(batch, dtype=jnp.int32)[:, None] + 5
    want_states, got_states = states, states
    for _ in range(2):
        want, want_states = run(weights, ids, want_states)
        with able_to_run("pallas_gpu"), tilewright.target("h200"):
            got, got_states = run(weights, ids, got_states)
        assert jax.tree.structure(got_states) == jax.tree.structure(want_states)
        scale = np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-2 * scale)
        for one, other in zip(jax.tree.leaves(got_states), jax.tree.leaves(want_states), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, rtol=0, atol=3e-2 * max(1.0, np.abs(other).max()))
        ids = ids + 1


@pytest.mark.parametrize(("batch", "unrolled"), [(1, 2), (64, 1)])
def test_a_layer_has_few_kernels(batch, unrolled, monkeypatch):
    """The products, what follows them, and attention; a loop's body is traced once."""
    monkeypatch.setattr("tilewright.models.in_place._MOST_UNROLLED", unrolled)
    shapes = jax.eval_shape(lambda: drawn(batch=batch))
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    assert (
        kernels(shapes[0], ids, shapes[1])
        == [
            "decode_qkv_products",
            "decode_qkv",
            "decode_attention",
            "decode_residual_products",
            "decode_residual",
            "matmul_whole_depth",
            "decode_residual_products",
            "decode_residual",
        ]
        * unrolled
    )


def in_one_kernel(batch=1, **changed):
    weights, states = jax.eval_shape(lambda: drawn(batch=batch, config=QWEN3, **changed))
    ids = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    return kernels(weights, ids, states, QWEN3) == ["decode_layers"]


def test_the_layers_of_a_small_model_are_one_kernel():
    assert in_one_kernel()


@pytest.mark.slow
def test_several_rows_and_other_dtypes_have_a_kernel_per_part():
    for changed in ({"batch": 2}, {"dtype": "float32"}, {"quantize": "int8"}):
        assert not in_one_kernel(**changed), changed


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 64])
def test_a_layer_of_kda_has_few_kernels(batch):
    """Its products, what follows them, and the MLP; a block of latent attention is applied."""
    shapes = jax.eval_shape(lambda: drawn(batch=batch, config=HYBRID))
    found = kernels(shapes[0], jax.ShapeDtypeStruct((batch, 1), jnp.int32), shapes[1], HYBRID)
    block = [
        "decode_kda_products",
        "decode_kda",
        "decode_residual_products",
        "decode_residual",
        "matmul_whole_depth",
        "decode_residual_products",
        "decode_residual",
    ]
    assert found[: 2 * len(block)] == 2 * block
    assert not any(name.startswith("decode_kda") for name in found[2 * len(block) :])


@pytest.mark.slow
def test_what_has_no_kernels_goes_on_as_before():
    ids = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    for changed in ({"dtype": "float32"}, {"quantize": "int8"}, {"batch": 65}):
        weights, states = jax.eval_shape(lambda changed=changed: drawn(**changed))
        rows = jax.ShapeDtypeStruct((changed.get("batch", 2), 1), jnp.int32)
        assert "decode_residual" not in kernels(weights, rows, states), changed
    weights, states = jax.eval_shape(drawn)
    assert "decode_residual" not in kernels(weights, jax.ShapeDtypeStruct((2, 2), jnp.int32), states)
    with tilewright.target("a100"):
        told = tilewright.explain(step, weights, ids, states)
    assert "decode_residual" not in [decision.op for decision in told.decisions]


def test_norms_of_another_eps_go_on_as_before():
    """The last layer's kernel computes the model's last norm, with the eps of the blocks."""
    other = dataclasses.replace(ARCHITECTURE, eps=1e-3)
    weights, states = jax.eval_shape(drawn)
    ids = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    with tilewright.target("h200"):
        told = tilewright.explain(lambda *given: hidden_states(other, *given)[0], weights, ids, states)
    assert "decode_residual" not in [decision.op for decision in told.decisions]
