"""decode_latent_attention: the contract, what it takes the place of, lengths, errors, and what the Hopper kernel has of its
own.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import kernels_in
from tests.ops.contract import OpContract, able_to_run, assert_close
from tilewright import decode_attention, decode_latent_attention
from tilewright.configs import DecodeLatentSm90Forward
from tilewright.ops.attention.decode_latent.call import DecodeLatentCall
from tilewright.ops.attention.decode_latent.cases import _case


class TestDecodeLatent(OpContract):
    """What lies beyond the lengths is what comes later."""

    op_name = "decode_latent_attention"
    call_type = DecodeLatentCall
    plainly_differentiable = ("xla",)
    whole_letter = "D"
    mesh_case = _case("mesh", 4, 70, 16, 128, 64)
    cuts: ClassVar = {"batch": {"B": "x"}, "heads": {"H": "y"}}
    not_taken = frozenset({("pallas_gpu", "odd")})
    interpreted_slowly = frozenset({"pallas_gpu"})

    def extreme(self, arrays: dict) -> dict:
        return arrays | {"q": arrays["q"] * 1e4}

    def replace_later(self, arrays: dict, other: dict, t: int) -> dict:
        beyond = jnp.arange(arrays["latents"].shape[1])[None, :] >= arrays["lengths"][:, None]
        return {**arrays, "latents": jnp.where(beyond[..., None], 100 * other["latents"], arrays["latents"])}

    def earlier(self, name: str, values: Any, t: int) -> Any:
        return values


def draw(lengths=(40, 17, 2), s=40, h=8, d=24, dtype=jnp.float32):
    """Queries, a cache that is NaN past the lengths, and the lengths."""
    keys = jax.random.split(jax.random.key(0), 2)
    b = len(lengths)
    q, latents = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, ((b, h, d), (b, s, d)), strict=True))
    lengths = jnp.asarray(lengths)
    beyond = jnp.arange(s)[None, :] >= lengths[:, None]
    return q, jnp.where(beyond[..., None], jnp.nan, latents), lengths


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_it_is_decode_attention_whose_values_are_channels_of_the_keys(implementation: str) -> None:
    q, latents, lengths = draw()
    keys = latents[:, :, None]
    want = decode_attention(q, keys, keys[..., :16], lengths, scale=0.3)
    got = decode_latent_attention(q, latents, lengths, value_dim=16, scale=0.3, implementation=implementation)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def assert_right(lengths, config=None, value_dim=64, **shape) -> None:
    """By the 2x rule. A length of 0 gives zeros, and one out of range NaN."""
    q, latents, lengths = draw(lengths, dtype=jnp.bfloat16, **shape)

    def run(q, latents, implementation, config=None):
        options = {"value_dim": value_dim, "implementation": implementation, "config": config}
        return np.asarray(decode_latent_attention(q, latents, lengths, **options), np.float32)

    with able_to_run("pallas_gpu"):
        got = run(q, latents, "pallas_gpu", config)
    plain, oracle = run(q, latents, "xla"), run(*(x.astype(jnp.float32) for x in (q, latents)), "reference")
    taken = np.asarray((lengths >= 0) & (lengths <= latents.shape[1]))
    assert np.isnan(got[~taken]).all()
    assert not got[np.asarray(lengths) == 0].any()
    assert_close(got[taken], plain[taken], oracle[taken], "out")


@pytest.mark.slow
def test_unequal_lengths_in_splits() -> None:
    """No tokens, one, a block, a full cache, and one token more than it has room for. Some splits are empty."""
    assert_right([0, 1, 64, 72, 73], DecodeLatentSm90Forward(2, 2), s=72, d=128)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "splits"),
    [
        # Five blocks: two stages are used again.
        pytest.param({"lengths": [300, 3, 301, -1], "s": 300, "d": 128}, 1, id="one_split"),
        pytest.param({"lengths": [300, 130], "s": 300, "d": 128}, 3, id="three_splits"),
        # The second tile of heads begins with heads of the first.
        pytest.param({"lengths": [70, 5], "s": 70, "h": 40, "d": 128}, 2, id="heads_40_splits"),
        # Keys have no channels of their own.
        pytest.param({"lengths": [66, 40], "s": 66, "h": 16, "d": 128, "value_dim": 128}, 2, id="values_are_keys"),
        pytest.param({"lengths": [100, 7], "s": 104, "h": 16, "d": 576, "value_dim": 512}, 2, id="widths_of_mla"),
        # The room is neither whole blocks nor whole eights.
        pytest.param({"lengths": [13, 0], "s": 13, "d": 192, "value_dim": 128}, 1, id="odd_room"),
    ],
)
def test_lengths_heads_and_widths(arguments: dict, splits: int) -> None:
    assert_right(**arguments, config=DecodeLatentSm90Forward(2, splits))


def structs(b=64, s=1088, h=16, d=576, dtype="bfloat16"):
    struct = jax.ShapeDtypeStruct
    return struct((b, h, d), dtype), struct((b, s, d), dtype), struct((b,), "int32")


@pytest.mark.parametrize(
    ("shape", "splits", "kernels"),
    [({}, 2, 2), ({"b": 1}, 17, 2), ({"h": 64}, 1, 1), ({"b": 132}, 1, 1)],
)
def test_an_h200_is_filled_with_splits(shape: dict, splits: int, kernels: int) -> None:
    """One launch, and a second where there are splits; nothing around them."""
    with tilewright.target("h200"):
        traced = jax.jit(lambda *arrays: decode_latent_attention(*arrays, value_dim=512)).trace(*structs(**shape))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        told = tilewright.explain(lambda *a: decode_latent_attention(*a, value_dim=512), *structs(**shape))
    (decision,) = told.decisions
    assert decision.implementation == "pallas_gpu"
    assert decision.configs["forward"].splits == splits
    assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == kernels
    assert not any(f"stablehlo.{name}" in text for name in ("pad", "concatenate", "select", "transpose"))


@pytest.mark.parametrize(
    ("shape", "value_dim", "text"),
    [
        ({"h": 12}, 512, r"H=12 must be a multiple of 8 \(columns of a product\)"),
        ({"d": 560}, 512, r"D=560 and value_dim=512 must be multiples of 64 \(rows of a product\)"),
        ({"d": 640}, 576, r"value_dim=576 must be 512 at most \(registers of a warpgroup\)"),
        ({"d": 1024}, 512, r"its decode kernel needs about \d+ KiB of shared memory"),
        ({"dtype": "float32"}, 512, r"q is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape: dict, value_dim: int, text: str) -> None:
    def refused(implementation):
        def call(*arrays):
            return decode_latent_attention(*arrays, value_dim=value_dim, implementation=implementation)

        with tilewright.target("h200"):
            return tilewright.explain(call, *structs(**shape))

    refusal = refused("pallas_gpu").refusal
    assert refusal is not None
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(refusal)
    assert "implementation='xla'" in refusal
    assert refused(None).decisions[0].implementation == "xla"


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"q": jnp.zeros((3, 1, 8, 24))}, r"q is float32\[3, 1, 8, 24\]; .* one token per sequence.*: pass q\[:, 0\]"),
        (
            {"latents": jnp.zeros((3, 40, 1, 24))},
            r"latents is .* \[B, S, D\] = \[3, S, 24\].*: pass latents\[:, :, 0\]",
        ),
        ({"latents": jnp.zeros((3, 0, 24))}, r"latents is float32\[3, 0, 24\] and q is"),
        ({"latents": jnp.zeros((3, 40, 24), jnp.bfloat16)}, r"q has dtype float32 and latents bfloat16; .*astype"),
        ({"lengths": jnp.zeros((2,), jnp.int32)}, r"lengths is int32\[2\]; it must be integers \[B\] = \[3\]"),
        ({"lengths": jnp.zeros((3,))}, r"lengths is float32\[3\]; it must be integers"),
        ({"value_dim": 25}, r"value_dim=25 must be an integer from 1 to D=24"),
        ({"scale": jnp.ones(())}, r"scale=.* is not a Python number"),
        ({"scale": float("inf")}, r"scale=inf must be finite; use None for D \*\* -0.5"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed: dict, text: str) -> None:
    arguments = dict(zip(("q", "latents", "lengths"), draw(), strict=True)) | {"value_dim": 16}
    with pytest.raises(ValueError, match=text):
        decode_latent_attention(**arguments | changed)


def test_lengths_at_their_ends_and_no_sequences() -> None:
    """No tokens give zeros, and a length out of range NaN, also one that 32 bits cannot hold."""
    q, latents, _ = draw((40, 40, 40, 40))
    out = decode_latent_attention(q, latents, jnp.array([0, 40, 41, -1]), value_dim=16)
    assert not np.any(out[0])
    assert np.isfinite(out[1]).all()
    assert np.isnan(out[2:]).all()
    assert np.isnan(decode_latent_attention(q, latents, jnp.full(4, 2**32 - 1, "uint32"), value_dim=16)).all()
    assert decode_latent_attention(q[:0], latents[:0], jnp.zeros(0, jnp.int32), value_dim=16).shape == (0, 8, 16)


def test_a_config_without_a_second_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"stages=1 must be .*a copy runs while a block is used"):
        DecodeLatentSm90Forward(1, 1)
    with pytest.raises(ValueError, match=r"splits=0 must be from 1 to 128; use 1"):
        DecodeLatentSm90Forward(2, 0)
