"""A token per row through blocks of latent attention on an H200: the kernels of a layer, and values of the plain path."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run, kernels_of
from tilewright.models import generation
from tilewright.models.architecture import initial_states
from tilewright.models.config import Config
from tilewright.models.loading import architecture_of, init

CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 2,
    "linear_attn_config": {"num_heads": 1, "head_dim": 64},
    "num_attention_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "intermediate_size": 192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
ARCHITECTURE = architecture_of(Config(CONFIG))


def drawn():
    """Weights, and states of two rows behind 62 and 3 tokens, whose caches are NaN past them."""
    weights = init(CONFIG, jax.random.key(0), dtype="bfloat16").weights
    lengths = jnp.array([62, 3], jnp.int32)

    def filled(leaf):
        if leaf.ndim == 2:
            return jnp.broadcast_to(lengths, leaf.shape)
        beyond = jnp.arange(leaf.shape[2])[None, :] >= lengths[:, None]  # [B, S]
        latents = jax.random.normal(jax.random.key(1), leaf.shape).astype(leaf.dtype)
        return jnp.where(beyond[None, ..., None], jnp.nan, latents)

    return weights, jax.tree.map(filled, initial_states(ARCHITECTURE, 2, 64, jnp.bfloat16))


def step(weights, ids, states):
    return generation.next_logits(ARCHITECTURE, weights, ids, states)


def test_a_layer_has_few_kernels():
    """Latent attention in the loop over layers that decodes into the residual stream; its two layers are one turn."""
    weights, states = jax.eval_shape(drawn)
    with tilewright.target("h200"):
        traced = jax.jit(step).trace(weights, jax.ShapeDtypeStruct((2, 1), jnp.int32), states)
    names = (
        "decode_latent_qkv_products",
        "decode_latent_qkv",
        "absorb_queries",
        "decode_latent_attention",
        "expand_values",
    )
    known = "|".join((*names, "decode_residual_products", "decode_residual"))
    named = [re.search(known, str(equation.params)) for equation in kernels_of(traced.jaxpr.jaxpr)]
    residual = ["decode_residual_products", "decode_residual"]
    assert [found[0] for found in named if found] == [*names, *residual, *residual] * 2


@pytest.mark.slow
def test_tokens_are_those_of_the_plain_path():
    """Three tokens one after the other, of which the last does not fit the first row's cache."""
    weights, states = drawn()
    ids = jnp.array([[5], [6]], jnp.int32)
    want_states, got_states = states, states
    for n in range(3):
        want, want_states = jax.jit(step)(weights, ids, want_states)
        with able_to_run("pallas_gpu"), tilewright.target("h200"):
            got, got_states = jax.jit(step)(weights, ids, got_states)
        assert jax.tree.structure(got_states) == jax.tree.structure(want_states)
        full = np.array([n == 2, False])
        np.testing.assert_array_equal(np.isnan(np.asarray(got)).all(axis=1), full)
        got, want = (np.asarray(each)[~full] for each in (got, want))
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-2 * np.abs(want).max())
        for one, other in zip(jax.tree.leaves(got_states), jax.tree.leaves(want_states), strict=True):
            one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
            np.testing.assert_allclose(one, other, rtol=0, atol=3e-2 * max(1.0, np.nanmax(np.abs(other))))
        ids = ids + 1
