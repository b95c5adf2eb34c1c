"""What is the Hopper kernels' own: tiles that are not the default ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run, kernels_in
from tilewright import matmul
from tilewright.configs import MatmulSm90Backward, MatmulSm90Forward


def assert_scaled_product(m: int, k: int, n: int, config: MatmulSm90Forward) -> None:
    for_x, for_w = jax.random.split(jax.random.key(0))
    x = tilewright.quantize(jax.random.normal(for_x, (m, k)), "float8_e4m3fn", block=(1, 128))
    w = tilewright.quantize(jax.random.normal(for_w, (k, n)), "float8_e4m3fn", block=(128, 128))
    exact = tilewright.dequantize(x).astype(jnp.float32), tilewright.dequantize(w).astype(jnp.float32)
    with tilewright.interpret():
        y = tilewright.matmul(x, w, implementation="pallas_gpu", config=config, out_dtype=jnp.float32)
    want = jnp.dot(*exact, precision="highest")
    assert jnp.max(jnp.abs(y - want)) < 1e-5 * jnp.max(jnp.abs(want))


@pytest.mark.slow
@pytest.mark.parametrize("block_n", [64, 256])
def test_scales_of_tiles_that_are_no_block_of_them(block_n: int) -> None:
    """Half a block of scales, or two of them, of which the last tile has one."""
    assert_scaled_product(72, 256, 384, MatmulSm90Forward(block_n, 2, 4))


@pytest.mark.slow
def test_three_consumers_scale_rows_that_are_no_whole_tiles() -> None:
    """Two tiles of 192 rows, of which the second has 8; three steps for two stages."""
    assert_scaled_product(200, 384, 256, MatmulSm90Forward(128, 2, 4, block_m=192))


@pytest.mark.parametrize(
    ("m", "options", "block_m"),
    [
        (4096, {}, 192),  # 22 tiles of 192 rows on each multiprocessor, or 32 of 128.
        (4096, {"activation": "gelu"}, 192),  # z, where it is saved, goes through the buffers of y.
        (4096, {"residual": True}, 128),  # No whole tiles of 192 rows, and the kernel adds a residual to such only.
        (3840, {"residual": True}, 192),
        (128, {}, 128),
    ],
)
def test_scaled_products_have_three_consumers_where_their_tiles_fit(m, options, block_m) -> None:
    x, w = (
        jax.eval_shape(
            lambda shape=shape, block=block: tilewright.quantize(jnp.zeros(shape), "float8_e4m3fn", block=block)
        )
        for shape, block in (((m, 7168), (1, 128)), ((7168, 16_384), (128, 128)))
    )
    y = jax.ShapeDtypeStruct((m, 16_384), jnp.bfloat16) if options.get("residual") else None

    def call(x, w, y):
        return matmul(x, w, residual=y, activation=options.get("activation"), out_dtype=jnp.bfloat16)

    with tilewright.target("h200"):
        (decision,) = tilewright.explain(call, x, w, y).decisions
    assert decision.forward.config.block_m == block_m


def test_bfloat16_has_two_consumers_for_many_rows() -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4096, 7168), (7168, 16_384)))
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(matmul, x, w).decisions
    assert decision.forward.config.block_m == 128


def test_tiles_that_are_not_possible_are_refused() -> None:
    with pytest.raises(ValueError, match=r"block_n=256 must be at most 128 with block_m=192: .*; use block_n=128"):
        MatmulSm90Forward(256, 4, 8, block_m=192)
    with pytest.raises(ValueError, match=r"3 consumers and a producer 504 together \(720 here\); use 160 and 24"):
        MatmulSm90Forward(128, 4, 8, block_m=192, consumer_registers=232)
    with pytest.raises(ValueError, match=r"block_m=192 must be one of 8, 16, 32, 64, 128; use 128"):
        MatmulSm90Backward(128, 4, 8, block_m=192)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "k", "n", "rows", "options"),
    [
        (1, 1024, 128, 16, {"activation": "swiglu"}),  # One row as eight.
        (
            1,
            2048,
            72,
            16,
            {"activation": "swiglu", "bias": True, "residual": True},
        ),  # Two steps for each, and half a tile.
        (1, 200, 192, 16, {"activation": "relu"}),  # A depth that is no eighths, and a tile of one block.
        (3, 300, 200, 16, {"activation": "swiglu", "bias": True}),
        (5, 256, 200, 16, {"activation": "silu", "bias": True}),
        (20, 128, 64, 32, {"residual": True}),
        (40, 256, 128, 64, {"activation": "swiglu"}),
        (40, 256, 128, 16, {"activation": "swiglu"}),  # Three tiles of rows.
    ],
)
def test_few_rows_in_one_split_are_finished_by_the_kernel(m, k, n, rows, options) -> None:
    parts = 2 if options.get("activation") == "swiglu" else 1
    keys = iter(jax.random.split(jax.random.key(0), 4))

    def draw(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    given = {"x": draw(m, k), "w": draw(k, parts * n) * k**-0.5}
    given |= {"bias": draw(parts * n)} if options.get("bias") else {}
    given |= {"residual": draw(m, n)} if options.get("residual") else {}
    activation, config = options.get("activation"), MatmulSm90Forward(256, 2, 8, block_m=rows, splits=1)
    with able_to_run("pallas_gpu"):
        y = jax.jit(lambda x: matmul(**x, activation=activation, implementation="pallas_gpu", config=config))(given)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), given)
    want = matmul(**exact, activation=activation, implementation="reference")
    np.testing.assert_allclose(np.asarray(y, np.float32), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    ("m", "k", "n", "splits"),
    [
        (1, 2048, 6144, 1),  # 96 tiles of gates and values on 132 multiprocessors.
        (64, 4096, 12_288, 1),  # 192: 60 in the second round.
        (1, 2560, 9728, 5),  # 152: 20 in the second round.
    ],
)
def test_wide_swiglus_of_few_rows_are_one_kernel(m, k, n, splits) -> None:
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, 2, n)))
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(lambda x, w: matmul(x, w, activation="swiglu"), x, w).decisions
        jaxpr = jax.make_jaxpr(lambda x, w: matmul(x, w, activation="swiglu"))(x, w)
    assert decision.forward.config.splits == splits
    assert kernels_in(jaxpr) == 1
    assert ("matmul_whole_depth" in str(jaxpr)) == (splits == 1)
    assert (" pad[" in str(jaxpr)) == (splits > 1)


@pytest.mark.parametrize(
    ("dtype", "block", "k", "rows"),
    [
        # One step for two slices of the contracted axis.
        pytest.param("int4", (128, 1), 256, 16, marks=pytest.mark.slow),
        pytest.param("int8", (128, 1), 384, 16, marks=pytest.mark.slow),  # Three: two, and one.
        pytest.param("float8_e4m3fn", (128, 128), 384, 32, marks=pytest.mark.slow),
        pytest.param("int8", None, 640, 64, marks=pytest.mark.slow),  # One slice.
    ],
)
def test_converted_weights_whose_steps_the_slices_do_not_share_evenly(dtype, block, k, rows) -> None:
    """Two tiles of rows and of columns, so that every slice hands its sums over more than once."""
    for_x, for_w = jax.random.split(jax.random.key(0))
    x = jax.random.normal(for_x, (rows + 3, k), jnp.bfloat16)
    w = tilewright.quantize(jax.random.normal(for_w, (k, 256)) * k**-0.5, dtype, block=block)
    with tilewright.interpret():
        config = MatmulSm90Forward(256, 3, 8, block_m=rows)
        y = matmul(x, w, implementation="pallas_gpu", config=config, out_dtype=jnp.float32)
    want = jnp.dot(x.astype(jnp.float32), tilewright.dequantize(w), precision="highest")
    assert jnp.max(jnp.abs(y - want)) < 1e-5 * jnp.max(jnp.abs(want))
