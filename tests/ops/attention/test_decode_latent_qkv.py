"""decode_latent_qkv: the contract, stacks of caches, tokens that do not fit, and what the Hopper kernels are and refuse."""

import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tilewright
from tests.ops.composition import assert_the_kernel_refuses, kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import decode_latent_qkv, matmul, rms_norm
from tilewright.ops.attention.decode_latent_qkv.call import DecodeLatentQkvCall
from tilewright.ops.attention.decode_latent_qkv.cases import _case

pytestmark = pytest.mark.slow


class TestDecodeLatentQkv(OpContract):
    op_name = "decode_latent_qkv"
    call_type = DecodeLatentQkvCall
    shared = ("q_proj", "kv_down", "norm")
    whole_letter = "D"
    cuts: ClassVar = {"batch": {"B": "x"}}
    mesh_case = _case("mesh", 4, 64, 4, (4, 64), 160, 128)
    not_taken = frozenset({("pallas_gpu", "odd")})
    values_are_slow = True

    @classmethod
    def output_specs(cls, outputs: tuple, cut: dict) -> tuple[PartitionSpec, ...]:
        """A cache of one layer comes back without the axis of layers that the call has."""
        letters = ("B", "H", "C"), ("B", "S", "K")
        return tuple(cls.spec(each, x.shape, cut) for each, x in zip(letters, outputs, strict=True))


def draw(b=2, d=64, s=4, h=2, c=64, k=160, n=128, layers=None, dtype=jnp.bfloat16, lengths=None):
    shapes = {
        "x": (b, d),
        "q_proj": (d, h, c),
        "kv_down": (d, k),
        "norm": (n,),
        "latents": (b, s, k) if layers is None else (layers, b, s, k),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    lengths = jnp.arange(b, dtype=jnp.int32) % s if lengths is None else jnp.asarray(lengths, jnp.int32)
    return {**arrays, "lengths": lengths}


def structs(**shape):
    return jax.eval_shape(lambda: draw(**shape))


def run(arrays, implementation="reference", **options):
    with able_to_run(implementation):
        return jax.jit(lambda given: decode_latent_qkv(**given, **options, implementation=implementation))(arrays)


@pytest.mark.slow
def test_it_is_the_ops_that_it_takes_the_place_of() -> None:
    arrays = draw(dtype=jnp.float32, lengths=[2, 0])
    x, q_proj = arrays["x"], arrays["q_proj"]
    down = matmul(x, arrays["kv_down"])
    latent = jnp.concatenate([rms_norm(down[:, :128], arrays["norm"], eps=1e-5), down[:, 128:]], axis=1)
    want = jax.vmap(lambda cache, new, at: cache.at[at].set(new))(arrays["latents"], latent, arrays["lengths"])
    q, latents = decode_latent_qkv(**arrays, eps=1e-5)
    np.testing.assert_allclose(q, matmul(x, q_proj.reshape(64, -1)).reshape(q.shape), rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(latents, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", pytest.param("pallas_gpu", marks=pytest.mark.slow)])
def test_a_stack_is_written_in_one_layer_and_nothing_past_a_cache_is(implementation: str) -> None:
    """Lengths of a full cache, past it and below zero write nothing, nor does a layer that is not there."""
    arrays = draw(b=4, layers=3, lengths=[1, 4, 5, -1])
    q, latents = run(arrays, implementation, layer=jnp.int32(1))
    want_q, want = run({**arrays, "latents": arrays["latents"][1]})
    changed = np.any(np.asarray(latents != arrays["latents"]), axis=3)  # [L, B, S]
    assert np.argwhere(changed).tolist() == [[1, 0, 1]]
    for one, other in ((latents[1], want), (q, want_q)):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=2e-2)
    for layer in (-1, 3):
        _, after = run(arrays, implementation, layer=jnp.int32(layer))
        assert np.array_equal(after, arrays["latents"])


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"k": 128}, {"h": 16, "c": 192, "k": 576, "n": 512}, {"b": 1, "d": 1024}], ids=str)
def test_widths_of_the_latents(shape: dict) -> None:
    """Nothing beside what is normalised, the sizes of Kimi Linear, and one row, which is not padded."""
    arrays = draw(**shape)
    for one, other in zip(run(arrays, "pallas_gpu"), run(arrays), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-2, atol=1e-2 * np.abs(other).max())


def test_an_h200_gets_two_kernels_that_work_in_place() -> None:
    arrays = structs(b=64, d=2048, s=1088, h=16, c=192, k=576, n=512, layers=6)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x, n: decode_latent_qkv(**x, layer=n), arrays, layer).decisions
        traced = jax.jit(lambda x, n: decode_latent_qkv(**x, layer=n)).trace(arrays, layer)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert decision.implementation == "pallas_gpu"
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert kernels_in(traced.jaxpr) == text.count("stablehlo.custom_call @mosaic_gpu") == 2
    aliased = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert [int(output) for output, _ in aliased] == [1]


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 65}, r"B=65 must be from 1 to 64 \(the weights are read once\)"),
        ({"d": 72}, r"D=72 must be a multiple of 64"),
        ({"c": 48}, r"H C=96 and N=128 must be multiples of 128 \(the threads that hold them\)"),
        ({"n": 64}, r"H C=128 and N=64 must be multiples of 128"),
        ({"k": 144}, r"K - N=16 must be a multiple of 32 \(the lanes of a warp\), up to 256"),
        ({"dtype": jnp.float32}, r"x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape: dict, text: str) -> None:
    assert_the_kernel_refuses(decode_latent_qkv, structs(**shape), text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((2, 1, 64))}, r"x is float32\[2, 1, 64\]; it must be \[B, D\].*: pass x\[:, 0\]"),
        ({"q_proj": jnp.zeros((64, 128))}, r"q_proj is float32\[64, 128\] and x has D=64; .*q_proj.reshape\(D, H, C\)"),
        ({"kv_down": jnp.zeros((160, 64))}, r"kv_down is float32\[160, 64\] and x has D=64; it must be \[D, K\]"),
        ({"norm": jnp.zeros((161,))}, r"norm is float32\[161\]; it must be floating \[N\], with N from 1 to K=160"),
        ({"latents": jnp.zeros((3, 4, 160))}, r"latents is .*; it must be \[B, S, K\] = \[2, S, 160\]"),
        ({"latents": jnp.zeros((2, 4, 160), jnp.bfloat16)}, r"latents has dtype bfloat16 and x float32; .*astype"),
        ({"lengths": jnp.zeros((3,), jnp.int32)}, r"lengths is int32\[3\]; it must be integers \[B\] = \[2\]"),
        ({"layer": 0}, r"layer=0 and latents is .*; a stack .* needs the number of a layer, and a single cache"),
        ({"latents": jnp.zeros((3, 2, 4, 160)), "layer": 3}, r"layer=3 is not a layer of latents .*; use 0 to 2"),
        ({"eps": None}, r"eps=None is not a Python number; .* pass a number"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        decode_latent_qkv(**{**draw(dtype=jnp.float32), **changed})


def test_no_sequences_give_empty_results() -> None:
    q, latents = decode_latent_qkv(**draw(b=0, lengths=[]))
    assert (q.shape, latents.shape) == ((0, 2, 64), (0, 4, 160))
