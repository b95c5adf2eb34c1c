"""The TPU kernels of `matmul` beyond the op's contract: several blocks of every axis, choice of blocks, refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilewright
from tests.ops.contract import assert_close
from tilewright.configs import MatmulTpuBackward, MatmulTpuForward
from tilewright.core.chip import CHIPS, Chip
from tilewright.core.dispatch import ImplementationName, find_op
from tilewright.pallas.tpu.gemm import Work, epilogue_rows, multiplied_dtype, ranked_blocks

TPUS = tuple(chip for chip in CHIPS if chip.platform == "tpu")
SMALL_BLOCKS = (MatmulTpuForward(32, 128, 128, 16), MatmulTpuBackward(32, 128, 128, 16, 256, 128, 32, 128))


def _normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def _run(
    implementation: ImplementationName, config: Any, cotangent: jax.Array, options: dict[str, Any], *arrays: Any
) -> Any:
    def product(x: Any, w: Any) -> jax.Array:
        return tilewright.matmul(x, w, implementation=implementation, config=config, **options)

    y, pull_back = jax.vjp(product, *arrays)
    return (y, *pull_back(cotangent))


@pytest.mark.slow
@pytest.mark.parametrize("n", [200, 256])  # 256: the parts of swiglu are blocks of one w; 200: each is an array.
def test_several_blocks_of_every_axis(n: int) -> None:
    """M, K and N have several blocks and ragged last ones; the rows of a block are several tiles."""
    x, w, bias = _normal(0, 80, 300), _normal(1, 300, 2 * n) / 17, _normal(2, 2 * n)
    options: dict[str, Any] = {"activation": "swiglu", "bias": bias, "residual": _normal(3, 80, n)}
    with tilewright.interpret():
        got = jax.jit(functools.partial(_run, "pallas_tpu", SMALL_BLOCKS, _normal(4, 80, n), options))(x, w)
    plain = _run("xla", None, _normal(4, 80, n), options, x, w)
    for name, values, expected in zip(("y", "dx", "dw"), got, plain, strict=True):
        assert jnp.max(jnp.abs(values - expected)) < 2e-5 * jnp.max(jnp.abs(expected)), name


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "block_k"), [("float8_e4m3fn", 256), ("float8_e4m3fn", 128), ("int8", 256)])
def test_scales_along_k_and_blocks_of_k(dtype: str, block_k: int) -> None:
    """A block of K has two blocks of scales, or half of one."""
    scale_k = 128 if block_k == 256 else 256
    x = tilewright.quantize(_normal(0, 40, 512), dtype, block=(1, scale_k))
    w = tilewright.quantize(_normal(1, 512, 256), dtype, block=(scale_k, 128))
    product = functools.partial(tilewright.matmul, x, w, out_dtype=jnp.float32)
    with tilewright.interpret():
        got = product(implementation="pallas_tpu", config=MatmulTpuForward(16, 128, block_k, 16))
    plain, exact = product(implementation="xla"), product(implementation="reference")
    assert_close(got, plain, exact, "y")


@pytest.mark.slow
def test_packed_rows_have_a_ragged_last_block() -> None:
    x, w = _normal(0, 16, 192), tilewright.quantize(_normal(1, 192, 128), "int4")
    with tilewright.interpret():
        got = tilewright.matmul(x, w, implementation="pallas_tpu", config=MatmulTpuForward(16, 128, 128, 16))
    exact = tilewright.matmul(x, w, implementation="reference")
    assert jnp.max(jnp.abs(got - exact)) < 1e-5 * jnp.max(jnp.abs(exact))


@pytest.mark.slow
def test_scales_of_other_blocks_are_dequantised_before_the_kernel() -> None:
    x, w = _normal(0, 24, 192), tilewright.quantize(_normal(1, 192, 128), "int8", block=(96, 1))
    explanation = tilewright.explain(tilewright.matmul, x, w, implementation="xla")
    assert explanation.refusal is None
    with tilewright.interpret():
        got = tilewright.matmul(x, w, implementation="pallas_tpu")
        assert "dequantised before the kernel" in str(
            tilewright.explain(tilewright.matmul, x, w, implementation="pallas_tpu")
        )
    exact = tilewright.matmul(x, w, implementation="reference")
    assert jnp.max(jnp.abs(got - exact)) < 1e-4 * jnp.max(jnp.abs(exact))


def _explain(chip: str, x: Any, w: Any, **options: Any) -> str:
    with tilewright.target(chip):
        return str(tilewright.explain(tilewright.matmul, x, w, implementation="pallas_tpu", **options))


def test_int8_products_name_the_chips_that_have_them() -> None:
    x = tilewright.quantize(_normal(0, 16, 128), "int8", block=(1, None))
    w = tilewright.quantize(_normal(1, 128, 128), "int8")
    assert "int8 products run on v4, v5e, v5p, v6e" in _explain("v7x", x, w)
    assert "and this is v7x" in _explain("v7x", x, w)
    assert "cannot run" not in _explain("v6e", x, w)


def test_scales_of_two_sides_are_per_whole_lanes() -> None:
    x = tilewright.quantize(_normal(0, 16, 192), "int8", block=(1, 96))
    w = tilewright.quantize(_normal(1, 192, 128), "int8", block=(96, 1))
    assert "a scale per 96 of K, which must be a multiple of 128" in _explain("v6e", x, w)


def test_blocks_of_k_divide_scales() -> None:
    x = jax.ShapeDtypeStruct((64, 768), jnp.bfloat16)
    w = tilewright.quantize(_normal(1, 768, 128), "int8", block=(384, 1))
    config = MatmulTpuForward(64, 128, 256, 64)
    assert "block_k=256 must be 384, or a multiple or divisor of it, and divide K=768" in _explain(
        "v6e", x, w, config=config
    )


def test_units_of_8_bits_are_used_where_they_are_faster() -> None:
    def multiplied(dtype: str, chip: str) -> str:
        return multiplied_dtype(jnp.dtype(dtype), dtype, x_quantized=True, chip=Chip.named(chip)).name

    assert [multiplied("int8", chip) for chip in ("v4", "v5e", "v6e")] == ["bfloat16", "int8", "int8"]
    assert [multiplied("float8_e4m3fn", chip) for chip in ("v6e", "v7x")] == ["bfloat16", "float8_e4m3fn"]


@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_large_cases_have_blocks_that_fit(chip: Chip) -> None:
    op = find_op("matmul")
    for name in ("square", "wide_swiglu", "decode_int4"):
        case = op.case(name)
        with tilewright.target(chip):
            explanation = tilewright.explain("matmul", **case.structs("bfloat16"), **case.options)
        (decision,) = explanation.decisions
        assert decision.implementation == "pallas_tpu", name
        assert decision.backward.refusal is None, name


def test_blocks_are_ranked_by_traffic() -> None:
    chip, work = Chip.named("v6e"), Work(m=8192, n=8192, k=8192)
    best, *_ = ranked_blocks(chip, work)
    floor = 3 * 2 * 8192**2
    assert work.bytes(best) * 1e-9 < 0.7 * work.bytes((512, 512, 512)) * 1e-9
    assert work.bytes((8192, 8192, 8192)) == floor
    assert work.seconds(chip, best) <= min(work.seconds(chip, blocks) for blocks in ranked_blocks(chip, work))


def test_epilogues_take_a_divisor_of_the_rows() -> None:
    assert [epilogue_rows(rows, 1024) for rows in (16, 48, 512, 1024)] == [16, 16, 64, 64]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((24, 128, 128, 16), "block_m=24 must be a positive multiple of 16"),
        ((32, 100, 128, 16), "block_n=100 must be a positive multiple of 128"),
        ((96, 128, 128, 64), "block_m=96 must be a multiple of tile_m=64, or at most that; use 128"),
    ],
)
def test_blocks_are_validated(blocks: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatmulTpuForward(*blocks)
