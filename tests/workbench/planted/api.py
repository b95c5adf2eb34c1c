"""`twice`: 2 x."""

import jax
import jax.numpy as jnp

from tests.workbench.planted.call import TwiceCall
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op

OP = Op(name="twice", family="tests.workbench.planted", implementations=("xla", "reference"))


def twice(
    x: jax.Array,
    *,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> jax.Array:
    """2 x."""
    return OP.run(TwiceCall(x=jnp.asarray(x)), implementation=implementation, config=config)
