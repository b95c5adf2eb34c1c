"""What is the Hopper kernels' own: tiles that are not the default ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run, kernels_in
from tilewright import matmul
from tilewright.configs import MatmulSm90Forward


@pytest.mark.slow
@pytest.mark.parametrize("block_n", [64, 256])
def test_scales_of_tiles_that_are_no_block_of_them(block_n: int) -> None:
    """Half a block of scales, or two of them, of which the last tile has one."""
    for_x, for_w = jax.random.split(jax.random.key(0))
    x = tilewright.quantize(jax.random.normal(for_x, (72, 256)), "float8_e4m3fn", block=(1, 128))
    w = tilewright.quantize(jax.random.normal(for_w, (256, 384)), "float8_e4m3fn", block=(128, 128))
    exact = tilewright.dequantize(x).astype(jnp.float32), tilewright.dequantize(w).astype(jnp.float32)
    with tilewright.interpret():
        config = MatmulSm90Forward(block_n, 2, 4)
        y = tilewright.matmul(x, w, implementation="pallas_gpu", config=config, out_dtype=jnp.float32)
    want = jnp.dot(*exact, precision="highest")
    assert jnp.max(jnp.abs(y - want)) < 1e-5 * jnp.max(jnp.abs(want))


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
