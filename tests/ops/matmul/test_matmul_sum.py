"""matmul_sum: the contract, and what the Hopper kernel has of its own."""

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright
from tests.ops.composition import mesh_of
from tests.ops.contract import OpContract, able_to_run, assert_close
from tilewright import matmul_sum
from tilewright.configs import MatmulSumSm90Forward
from tilewright.core.quantized import quantize
from tilewright.ops.matmul.sum.api import has_kernel, named
from tilewright.ops.matmul.sum.call import MatmulSumCall
from tilewright.ops.matmul.sum.cases import _case


class TestMatmulSum(OpContract):
    op_name = "matmul_sum"
    call_type = MatmulSumCall
    shared = ("w0", "w1", "w2")
    any_leading_axes = True
    plainly_differentiable = ("xla",)
    cuts: ClassVar = {
        "rows": {"tokens0": "x"},
        "columns": {"N": "y"},
        "sums": {"tokens0": "x", "K0": "y", "K1": "y", "K2": "y"},
    }
    only_compiler = ("sums",)
    whole_letter = "none"
    test_an_axis_that_cannot_be_cut_is_refused = None  # There is no such axis.
    mesh_case = _case("mesh", (4, 8), 64, (64, 32, 2))


def draw(m: tuple[int, ...], n: int, depths: tuple[int, ...], dtype: Any = jnp.bfloat16) -> dict[str, jax.Array]:
    rng, scale = np.random.default_rng(0), sum(depths) ** -0.5
    xs = [jnp.asarray(rng.standard_normal((*m, k), np.float32)).astype(dtype) for k in depths]
    ws = [jnp.asarray(scale * rng.standard_normal((n, k), np.float32)).astype(dtype) for k in depths]
    return named(xs, ws)


# More tiles than thread blocks (two in the interpreter), edges that are no whole tiles, pairs of one step and of several,
# fewer and more steps than stages, one consumer.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "depths", "config"),
    [
        (300, 200, (64, 192, 32, 32), MatmulSumSm90Forward(64, 2, 8)),
        (260, 136, (100, 64), MatmulSumSm90Forward(128, 3, 8, cluster=2)),
        (75, 72, (8, 8, 8, 8, 8, 8, 8, 128), MatmulSumSm90Forward(64, 4, 8, block_m=64)),
    ],
)
def test_tiles_of_any_kind_meet_the_oracle(m, n, depths, config) -> None:
    arrays = draw((m,), n, depths)
    with able_to_run("pallas_gpu"):
        got = jax.jit(lambda given: matmul_sum(**given, implementation="pallas_gpu", config=config))(arrays)
    plain = matmul_sum(**arrays, implementation="reference")
    with jax.enable_x64(True):
        exact = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        oracle = matmul_sum(**exact, implementation="reference")
    assert_close(got, plain, oracle, f"{m} {n} {depths}")


def test_an_axis_of_one_is_a_term_of_the_sum() -> None:
    """Where other axes of sums are cut over devices, it is not a number that each of them adds."""
    arrays, mesh = draw((4,), 8, (16, 1), jnp.float32), mesh_of(AxisType.Auto)
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, P(None, "y" if name[1] == "0" else None)))
        for name, x in arrays.items()
    }
    want = matmul_sum(**arrays, implementation="reference")
    np.testing.assert_allclose(jax.jit(lambda given: matmul_sum(**given))(placed), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (((0,), 8, (64, 8)), r"must be 1 or more; use implementation='reference'"),
        (((8,), 8, (64, 8), jnp.float32), "x0 is float32, and it multiplies bfloat16 only"),
    ],
)
def test_what_the_kernel_refuses(shape, text) -> None:
    arrays = draw(*shape)
    with tilewright.target("h200"):
        told = tilewright.explain(lambda given: matmul_sum(**given, implementation="pallas_gpu"), arrays)
        assert not has_kernel(*shape[:3], arrays["x0"].dtype)
        assert has_kernel((8,), 8, (64, 8), jnp.bfloat16)
    assert not has_kernel((8,), 8, (64, 8), jnp.bfloat16)
    if told.refusal is None:
        assert told.decisions[0].implementation == "reference"
    else:
        assert text in told.refusal


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"w1": None}, "x1 is given and w1 is not; pass both, or neither"),
        ({"x1": None, "w1": None}, "x2 is given and x1 is not; pass the pairs in order, from x0 and w0 on"),
        (
            {"x1": jnp.zeros((4, 16), jnp.bfloat16)},
            r"x1 is bfloat16\[4, 16\] and x0 is float32\[4, 32\]; they must be of",
        ),
        (
            {"x1": jnp.zeros((5, 16))},
            r"x1 is float32\[5, 16\] and x0 is float32\[4, 32\]; all but their last axes must",
        ),
        (
            {"w1": jnp.zeros((16, 8))},
            r"w1 is float32\[16, 8\] and .*; w1 must be \[8, 16\], the columns of y .*: pass w1.T",
        ),
        ({"x0": None}, "x0 is of type NoneType; it must be an array"),
        ({"x0": jnp.zeros(())}, r"x0 is float32\[\]; it must be \[..., K0\]"),
        ({"x0": jnp.zeros((4, 32), int)}, r"x0 is int32\[4, 32\]; it must be float32 or bfloat16: pass x0.astype"),
        ({"w0": quantize(jnp.zeros((8, 32)), "int8")}, r"w0 is quantised, .*pass tilewright.dequantize\(w0\)"),
        ({"w2": jnp.zeros((9, 8))}, r"w2 must be \[8, 8\], the columns of y and those of x2$"),
    ],
)
def test_bad_arguments_are_told_with_the_way_out(changed, text) -> None:
    with pytest.raises(ValueError, match=text):
        matmul_sum(**{**draw((4,), 8, (32, 16, 8), jnp.float32), **changed})


def test_a_config_that_cannot_be_is_refused_when_built() -> None:
    with pytest.raises(ValueError, match=r"block_m=32 must be 64 or 128 \(rows of wgmma\); use 128"):
        MatmulSumSm90Forward(256, 4, 8, block_m=32)


def test_the_interpreter_of_gpu_kernels_refuses_several_devices() -> None:
    """Its callbacks on several devices would wait for each other; on a mesh of one device there are no others."""
    arrays = draw((8,), 16, (8,))
    x, w = arrays["x0"], arrays["w0"]

    def run(devices: int) -> jax.Array:
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
        product = functools.partial(matmul_sum, implementation="pallas_gpu")
        return jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))(x, w)

    with tilewright.interpret():
        np.testing.assert_array_equal(run(1), matmul_sum(x, w, implementation="reference"))
        with pytest.raises(
            tilewright.Unsupported, match=r"inside jax\.shard_map over 2; use implementation='xla', or a"
        ):
            run(2)
        placed = jax.device_put(x, NamedSharding(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), P("x")))
        with pytest.raises(
            tilewright.Unsupported, match=r"program for several devices; use implementation='xla', since"
        ):
            jax.jit(lambda x, w: matmul_sum(x, w, implementation="pallas_gpu"))(placed, w)
