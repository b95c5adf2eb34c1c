"""kda_gate_of_product: the contract, and what the Hopper kernel has of its own."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.contract import OpContract, able_to_run, assert_close
from tilewright import kda_gate_of_product
from tilewright.configs import GateOfProductSm90Forward
from tilewright.ops.delta_rule.gate_of_product.api import has_kernel
from tilewright.ops.delta_rule.gate_of_product.call import GateOfProductCall
from tilewright.ops.delta_rule.gate_of_product.cases import _case


class TestKdaGateOfProduct(OpContract):
    op_name = "kda_gate_of_product"
    call_type = GateOfProductCall
    shared = ("w", "A_log", "dt_bias")
    any_leading_axes = True
    interpreted_slowly = frozenset({"pallas_gpu"})
    whole_letter = "K"
    cuts: ClassVar = {"batch": {"tokens0": "x"}, "heads": {"HV": "y"}, "both": {"tokens0": "x", "HV": "y"}}
    mesh_case = _case("mesh", (4, 8), 64, 2, 128)
    not_taken = frozenset({("pallas_gpu", "narrow")})  # Heads of 32.

    def extreme(self, arrays: dict) -> dict:
        """Gates of which a softplus is 0 in float32, or its argument."""
        return arrays | {"w": arrays["w"] * jnp.asarray(200.0, arrays["w"].dtype)}


def draw(m=(40,), r=64, h=2, k=128, dtype=jnp.bfloat16, scale=1.0) -> dict[str, Any]:
    shapes = {"x": (*m, r), "w": (r, h, k), "A_log": (h,), "dt_bias": (h, k)}
    rng = np.random.default_rng(0)
    drawn = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    drawn["w"] = drawn["w"] * (scale * r**-0.5)
    return {name: jnp.asarray(array).astype(dtype if name in "xw" else jnp.float32) for name, array in drawn.items()}


# An odd number of parts in a tile, rows that fill no tile and no eight, one consumer, and more tiles than thread blocks.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "r", "h", "k", "scale", "bound", "config"),
    [
        (300, 64, 5, 64, 1.0, None, GateOfProductSm90Forward(256, 2, 8)),
        (75, 192, 1, 192, 100.0, None, GateOfProductSm90Forward(64, 3, 8, block_m=64)),
        (200, 320, 2, 64, 100.0, -0.5, GateOfProductSm90Forward(128, 2, 8)),
    ],
)
def test_tiles_of_any_kind_meet_the_oracle(m, r, h, k, scale, bound, config) -> None:
    arrays = draw(m=(m,), r=r, h=h, k=k, scale=scale)
    with able_to_run("pallas_gpu"):
        got = jax.jit(
            lambda given: kda_gate_of_product(**given, lower_bound=bound, implementation="pallas_gpu", config=config)
        )(arrays)
    plain = kda_gate_of_product(**arrays, lower_bound=bound, implementation="reference")
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        oracle = kda_gate_of_product(**exact, lower_bound=bound, implementation="reference")
    assert got.dtype == jnp.float32
    assert_close(got, plain, oracle, f"{m} {r} {h} {k}")


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ({"k": 96}, "K=96 must be a multiple of 64 (columns that are stored at a time)"),
        ({"m": (0,)}, "M, R, N = (0, 64, 256) must be 1 or more"),
        ({"dtype": jnp.float32}, "x is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text) -> None:
    with tilewright.target("h200"):
        told = tilewright.explain(
            lambda given: kda_gate_of_product(**given, implementation="pallas_gpu"), draw(**shape)
        )
        assert not has_kernel(**draw(**shape))
        assert has_kernel(**draw())
    assert told.refusal is not None
    assert text in told.refusal


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x": jnp.zeros((40, 64), jnp.int32)}, r"x is int32\[40, 64\]; it must be float32 or bfloat16"),
        (
            {"w": jnp.zeros((32, 2, 128))},
            r"w is float32\[32, 2, 128\] .* must be \[64, heads, channels\], with the K that x has",
        ),
        ({"A_log": jnp.zeros((2,), jnp.int32)}, r"A_log is int32\[2\]; it must be float32 or bfloat16"),
        ({"w": jnp.zeros((64, 256))}, r"w is float32\[64, 256\] and x is .*: pass w.reshape\(64, heads, -1\)"),
        ({"w": jnp.zeros((64, 2, 128), jnp.bfloat16)}, r"w is bfloat16\[64, 2, 128\] and .*\.astype\(x.dtype\)"),
        ({"A_log": jnp.zeros((3,))}, r"A_log has shape \[3\] and x w \[40, 2, 128\]; A_log must be \[HV\] = \[2\]"),
        ({"dt_bias": jnp.zeros((256,))}, r"dt_bias has shape \[256\] and x w .*: pass dt_bias.reshape\(2, 128\)"),
        ({"lower_bound": -6.0}, r"lower_bound=-6.0 must be"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text) -> None:
    with pytest.raises(ValueError, match=text):
        kda_gate_of_product(**{**draw(dtype=jnp.float32), **changed})


def test_a_config_that_cannot_be_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"block_m=32 must be 64 or 128 \(rows of wgmma\); use 128"):
        GateOfProductSm90Forward(256, 2, 8, block_m=32)
