"""decode_residual: the contract, and what the Hopper kernels have of their own."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import assert_the_kernel_refuses, kernels_in
from tests.ops.contract import OpContract, able_to_run
from tilewright import matmul, rms_norm
from tilewright.configs import DecodeQkvSm90Forward
from tilewright.ops.attention.decode_residual.api import decode_residual
from tilewright.ops.attention.decode_residual.call import DecodeResidualCall
from tilewright.ops.attention.decode_residual.cases import _case


class TestDecodeResidual(OpContract):
    op_name = "decode_residual"
    call_type = DecodeResidualCall
    shared = ("w", "norm")
    interpreted_slowly = frozenset({"pallas_gpu"})
    whole_letter = "D"
    cuts: ClassVar = {"batch": {"B": "x"}}
    mesh_case = _case("mesh", 4, 128, 128)


def draw(b=2, f=64, d=128, dtype=jnp.bfloat16):
    shapes = {"x": (b, f), "w": (f, d), "residual": (b, d), "norm": (d,)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def structs(**shape):
    return jax.eval_shape(lambda: draw(**shape))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_it_is_the_ops_that_it_takes_the_place_of(offset):
    arrays = draw(dtype=jnp.float32)
    y = matmul(arrays["x"], arrays["w"], residual=arrays["residual"])
    want = y, rms_norm(y, arrays["norm"], eps=1e-5, offset=offset)
    for one, other in zip(decode_residual(**arrays, eps=1e-5, norm_offset=offset), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_splits_are_added_in_order_whatever_their_number(splits):
    """With D 8192 a thread holds two splits at a time."""
    arrays = draw(b=1, f=1024, d=256) if splits != 3 else draw(b=1, f=384, d=8192)
    config = DecodeQkvSm90Forward(block_b=16, stages=2, splits=splits)
    with able_to_run("pallas_gpu"):
        got = jax.jit(lambda x: decode_residual(**x, implementation="pallas_gpu", config=config))(arrays)
    for one, other in zip(got, decode_residual(**arrays, implementation="reference"), strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        np.testing.assert_allclose(one, other, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("b", "padded"), [(1, False), (3, True), (64, False)])
def test_an_h200_gets_two_kernels(b, padded):
    """One row is read as eight, and 64 are whole eights: nothing is padded."""
    arrays = structs(b=b, f=6144, d=2048)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x: decode_residual(**x), arrays).decisions
        traced = jax.jit(lambda x: decode_residual(**x)).trace(arrays)
    assert decision.implementation == "pallas_gpu"
    assert "backward: the gradient of implementation='reference'" in str(decision)
    assert kernels_in(traced.jaxpr) == 2
    assert (" pad[" in str(traced.jaxpr)) == padded


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"b": 0}, r"B=0 and F=64 must be 1 or more"),
        ({"d": 192}, r"D=192 must be a multiple of 128 \(the threads that hold a row\), up to 8192"),
        ({"d": 8320}, r"D=8320 must be a multiple of 128 .*, up to 8192"),
        ({"dtype": jnp.float32}, r"x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text):
    assert_the_kernel_refuses(decode_residual, structs(**shape), text)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((2, 1, 64))}, r"x is float32\[2, 1, 64\]; it must be \[B, F\].*: pass x\[:, 0\]"),
        ({"w": jnp.zeros((128, 64))}, r"w is float32\[128, 64\] and x has F=64 channels; .*: pass w.T"),
        ({"residual": jnp.zeros((2, 64))}, r"residual is float32\[2, 64\]; it must be floating \[B, D\] = \[2, 128\]"),
        ({"norm": jnp.zeros((64,))}, r"norm is float32\[64\]; it must be floating \[D\] = \[128\]"),
        ({"residual": jnp.zeros((2, 128), jnp.bfloat16)}, r"residual has dtype bfloat16 and x float32; .*astype"),
        ({"eps": None}, r"eps=None is not a Python number; .* pass a number"),
        ({"eps": -1.0}, r"eps=-1.0 must be finite and not negative; use 1e-6"),
        ({"residual": None}, r"residual is None; decode_residual takes x \[B, F\]"),
        ({"x": jnp.zeros((2, 64), jnp.float16)}, r"x is float16\[2, 64\]; .*: pass x.astype\(jnp.bfloat16\)"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text):
    with pytest.raises(ValueError, match=text):
        decode_residual(**{**draw(dtype=jnp.float32), **changed})
