"""What is the Hopper kernels' own: tiles that are not the default ones."""

import jax
import jax.numpy as jnp
import pytest

import tilewright
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
