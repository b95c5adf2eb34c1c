"""absorb_queries and expand_values: the contract of each, what they compute, and what the Hopper kernel refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import absorb_queries, decode_latent_attention, expand_values, flash_attention
from tilewright.ops.attention.decode_latent_heads.call import LatentHeadsCall
from tilewright.ops.attention.decode_latent_heads.cases import _case

pytestmark = pytest.mark.slow


class HeadsContract(OpContract):
    call_type = LatentHeadsCall
    shared = ("kv_up",)
    whole_letter = "R"
    not_taken = frozenset({("pallas_gpu", "odd")})
    values_are_slow = True


class TestAbsorbQueries(HeadsContract):
    op_name = "absorb_queries"
    mesh_case = _case("absorb_queries", "mesh", 4, 4, 128, 64, 64, 64)


class TestExpandValues(HeadsContract):
    op_name = "expand_values"
    shares_code_with = "absorb_queries"
    mesh_case = _case("expand_values", "mesh", 4, 4, 128, 64, 64)


def draw(b=2, h=2, r=128, c=64, v=64, e=64, dtype=jnp.bfloat16):
    """q, o and kv_up."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (b, h, c + e), (b, h, r), (r, h, c + v)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def test_around_attention_over_latents_they_are_attention_over_keys_and_values() -> None:
    """A head's key is its expansion of the latent, and the channels that all heads share."""
    q, _, up = draw(r=16, c=8, v=4, e=6, dtype=jnp.float32)
    latents = jax.random.normal(jax.random.key(3), (2, 5, 16 + 6))
    expanded = jnp.einsum("bsr,rhx->bshx", latents[..., :16], up, precision="highest")
    shared = jnp.broadcast_to(latents[:, :, None, 16:], (2, 5, 2, 6))
    keys = jnp.concatenate([expanded[..., :8], shared], axis=-1)
    want = flash_attention(q[:, None], keys, expanded[..., 8:], scale=0.3)[:, 0]
    queries = absorb_queries(q, up, key_dim=8)
    o = decode_latent_attention(queries, latents, jnp.array([5, 5]), value_dim=16, scale=0.3)
    np.testing.assert_allclose(expand_values(o, up, key_dim=8), want, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("b", [1, 8, 11])
def test_one_row_eights_and_other_numbers_of_rows(b: int) -> None:
    """One row and whole eights are not padded; nor do channels have to follow those of the keys."""
    for e in (0, 64):
        q, o, up = draw(b=b, r=192, v=128, e=e)
        for op, x in ((absorb_queries, q), (expand_values, o)):
            with able_to_run("pallas_gpu"):
                got = jax.jit(lambda x, up, op=op: op(x, up, key_dim=64, implementation="pallas_gpu"))(x, up)
            want = op(*(each.astype(jnp.float32) for each in (x, up)), key_dim=64)
            got, want = (np.asarray(each, np.float32) for each in (got, want))
            np.testing.assert_allclose(got, want, rtol=0, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("b", [1, 64])
def test_an_h200_gets_one_kernel_and_nothing_around_it(b: int) -> None:
    q, o, up = jax.eval_shape(lambda: draw(b=b, h=16, r=512, c=128, v=128))
    for op, x in ((absorb_queries, q), (expand_values, o)):
        with tilewright.target("h200"):
            traced = jax.jit(lambda x, up, op=op: op(x, up, key_dim=128)).trace(x, up)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == 1
        assert not any(f"stablehlo.{name}" in text for name in ("pad", "slice", "concatenate", "transpose"))


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 65}, r"B=65 must be from 1 to 64 \(columns of a product\)"),
        ({"r": 96}, r"R=96 must be a multiple of 64 \(rows of tiles\)"),
        ({"v": 32}, r"X=96 must be a multiple of 64"),
        ({"e": 32}, r"channels past key_dim=32 must be a multiple of 64"),
        ({"dtype": jnp.float32}, r"x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape: dict, text: str) -> None:
    q, _, up = jax.eval_shape(lambda: draw(**shape))
    with tilewright.target("h200"):
        told = tilewright.explain(lambda q, up: absorb_queries(q, up, key_dim=64, implementation="pallas_gpu"), q, up)
        (decision,) = tilewright.explain(lambda q, up: absorb_queries(q, up, key_dim=64), q, up).decisions
    assert told.refusal is not None
    assert "use implementation='reference'" in told.refusal
    assert decision.implementation == "reference"
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(told.refusal)


def test_bad_arguments_are_told_with_the_way_out() -> None:
    q, o, up = draw(dtype=jnp.float32)
    for op, arguments, key_dim, text in (
        (
            absorb_queries,
            (q[:, None], up),
            64,
            r"q is float32\[2, 1, 2, 128\]; .*one token per sequence: pass q\[:, 0\]",
        ),
        (
            absorb_queries,
            (q, up.reshape(128, -1)),
            64,
            r"kv_up is .*; it must be \[R, H, X\].*kv_up.reshape\(R, H, X\)",
        ),
        (absorb_queries, (q, up.astype(jnp.bfloat16)), 64, r"kv_up is bfloat16.* of q's dtype"),
        (absorb_queries, (q, up), 129, r"key_dim=129 must be from 1 to the columns of a head, X=128"),
        (absorb_queries, (q[..., :32], up), 64, r"q is .*; its heads must have 64 channels or more"),
        (expand_values, (o, up), 128, r"key_dim=128 must be from 1"),
        (expand_values, (o[..., :64], up), 64, r"o is .*; its heads must have R=128 channels"),
    ):
        with pytest.raises(ValueError, match=text):
            op(*arguments, key_dim=key_dim)


def test_no_sequences_give_empty_results() -> None:
    q, o, up = draw(b=0)
    assert absorb_queries(q, up, key_dim=64).shape == (0, 2, 192)
    assert expand_values(o, up, key_dim=64).shape == (0, 2, 64)
