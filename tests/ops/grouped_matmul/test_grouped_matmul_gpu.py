"""What is the Hopper kernels' own: tiles that are not the default ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.configs import GroupedMatmulSm90Backward


@pytest.mark.slow
@pytest.mark.parametrize("block_n", [64, 192])
def test_gradients_in_tiles_whose_parts_two_consumers_do_not_share_evenly(block_n: int) -> None:
    """Rows of other groups are cleared in the tile, and nothing beside it: past its end is another one."""
    for_x, for_w, for_dy = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(for_x, (100, 128), jnp.bfloat16)
    w = jax.random.normal(for_w, (3, 128, 256), jnp.bfloat16)
    dy = jax.random.normal(for_dy, (100, 256), jnp.bfloat16)
    config = GroupedMatmulSm90Backward(block_n, 2, 4)

    def gradients(implementation: str) -> tuple[jax.Array, jax.Array]:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            own = config if implementation == "pallas_gpu" else None
            return tilewright.grouped_matmul(x, w, jnp.array([37, 0, 50]), implementation=implementation, config=own)

        return jax.vjp(product, x, w)[1](dy)

    with tilewright.interpret():
        got = gradients("pallas_gpu")
    for one, other in zip(got, gradients("xla"), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=1e-2)
