"""The oracle."""

import jax

from tests.workbench.faulty.call import DoubleCall
from tilewright.core.implementation import Implementation, Launch, Pass


def _forward(call: DoubleCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    return 2 * call.x, None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
