"""`double`: 2 x, by kernels that have a data race or read uninitialised memory on request."""

import jax
import jax.numpy as jnp

from tests.workbench.faulty.call import DoubleCall
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op

OP = Op(name="double", family="tests.workbench.faulty", implementations=("pallas_tpu", "pallas_gpu", "reference"))


def double(
    x: jax.Array,
    *,
    fault: str | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> jax.Array:
    """2 x."""
    return OP.run(DoubleCall(x=jnp.asarray(x), fault=fault), implementation=implementation, config=config)
