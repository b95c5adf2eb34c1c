"""gated_rms_norm_of_product: the contract, and what the Hopper kernel has of its own."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import OpContract, able_to_run, assert_close
from tilewright import gated_rms_norm_of_product
from tilewright.configs import NormOfProductSm90Forward
from tilewright.ops.norm.of_product.api import has_kernel
from tilewright.ops.norm.of_product.call import NormOfProductCall
from tilewright.ops.norm.of_product.cases import _case


class TestGatedRmsNormOfProduct(OpContract):
    op_name = "gated_rms_norm_of_product"
    interpreted_slowly = frozenset({"pallas_gpu"})
    call_type = NormOfProductCall
    shared = ("w", "norm")
    any_leading_axes = True
    whole_letter = "D"
    cuts: ClassVar = {"batch": {"tokens0": "x"}, "heads": {"H": "y"}, "both": {"tokens0": "x", "H": "y"}}
    mesh_case = _case("mesh", (4, 8), 64, 2, 128)
    not_taken = frozenset({("pallas_gpu", "narrow")})  # Heads of 32.

    def extreme(self, arrays: dict) -> dict:
        """Gates whose sigmoid is 0 or 1 in float32, or whose exponential overflows."""
        return arrays | {"w": arrays["w"] * jnp.asarray(200.0, arrays["w"].dtype)}


def draw(m=(40,), k=64, h=2, d=128, dtype=jnp.bfloat16, gate=2.0) -> dict[str, Any]:
    shapes = {"o": (*m, h, d), "x": (*m, k), "w": (k, h, d), "norm": (d,)}
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    drawn["w"] = drawn["w"] * (gate * k**-0.5)
    return {name: jnp.asarray(array).astype(dtype) for name, array in drawn.items()}


# An odd number of heads with two per tile, rows that fill no tile and no eight, one consumer, buffers for two tiles, and
# more tiles than thread blocks (two in the interpreter), so that every buffer is used again.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "k", "h", "gate", "config"),
    [
        (300, 64, 3, 0.1, NormOfProductSm90Forward(256, 2, 8, heads=4)),
        (200, 320, 1, 100.0, NormOfProductSm90Forward(256, 2, 8, heads=3)),
        (75, 192, 3, 100.0, NormOfProductSm90Forward(128, 2, 8, block_m=64, heads=1)),
    ],
)
def test_tiles_of_any_kind_meet_the_oracle(m, k, h, gate, config) -> None:
    arrays = draw(m=(m,), k=k, h=h, gate=gate)
    options: Any = {"activation": "sigmoid" if k == 64 else "silu", "eps": 1e-5}
    with able_to_run("pallas_gpu"):
        got = jax.jit(
            lambda given: gated_rms_norm_of_product(**given, **options, implementation="pallas_gpu", config=config)
        )(arrays)
    plain = gated_rms_norm_of_product(**arrays, **options, implementation="reference")
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        oracle = gated_rms_norm_of_product(**exact, **options, implementation="reference")
    assert_close(got, plain, oracle, f"{m} {k} {h}")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"d": 64}, "D=64 must be 128 (the columns of a tile are whole heads)"),
        ({"m": (0,)}, "M, K, N = (0, 64, 256) must be 1 or more"),
        ({"dtype": jnp.float32}, "x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text) -> None:
    def run(given: Any) -> jax.Array:
        return gated_rms_norm_of_product(**given, implementation="pallas_gpu")

    with tilewright.target("h200"):
        told = tilewright.explain(run, draw(**shape))
        assert not has_kernel(**draw(**shape))
        assert has_kernel(**draw())
    assert told.refusal is not None
    assert text in told.refusal


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"o": jnp.zeros((128,))}, r"o is float32\[128\], .* the gate x w, float32\[40, 2, 128\]"),
        ({"x": jnp.zeros((3, 64))}, r"o is float32\[40, 2, 128\], .* float32\[3, 2, 128\]"),
        ({"w": jnp.zeros((64, 256))}, r"w is float32\[64, 256\] and x is .*: pass w.reshape\(64, heads, -1\)"),
        ({"norm": jnp.zeros((64,))}, r"norm is float32\[64\]; it must be \[D\] = \[128\]"),
        ({"activation": "gelu"}, r"activation='gelu' is not an activation of gated_rms_norm_of_product; use 'silu'"),
        ({"eps": -1.0}, r"eps=-1.0 must be finite and not negative; use 1e-6"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text) -> None:
    with pytest.raises(ValueError, match=text):
        gated_rms_norm_of_product(**{**draw(dtype=jnp.float32), **changed})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"block_n": 192}, r"block_n=192 must be 128 or 256 \(whole heads\); use 256"),
        ({"heads": 1}, r"heads=1 must be 2 or more \(those of a tile\); use 2"),
        ({"block_m": 32}, r"block_m=32 must be 64 or 128 \(rows of wgmma\); use 128"),
    ],
)
def test_a_config_that_cannot_be_is_refused_when_built(fields, text) -> None:
    with pytest.raises(ValueError, match=text):
        NormOfProductSm90Forward(**{"block_n": 256, "stages": 2, "band": 8, **fields})
