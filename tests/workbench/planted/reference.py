"""The oracle."""

import jax

from tests.workbench.planted.call import TwiceCall
from tilewright.core.implementation import Implementation, Launch, Pass


def _forward(call: TwiceCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    return 2 * call.x, None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
