"""`double`: 2 x, with kernels that race or read what nobody wrote when they are told to."""

import jax
import jax.numpy as jnp

from tilewright.core.dispatch import Op

OP = Op(name="double", family="tests.workbench.faulty", implementations=("pallas_tpu", "pallas_gpu", "reference"))


def double(
    x: jax.Array, *, fault: str | None = None, implementation: str | None = None, config: object = None
) -> jax.Array:
    """2 x."""
    return OP.run((jnp.asarray(x),), {"fault": fault}, implementation=implementation, config=config)
