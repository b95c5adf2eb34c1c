"""`matmul_sum`, plainly: one product after the other, added up. The oracle of the family."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.matmul.sum.call import MatmulSumCall


def _forward(call: MatmulSumCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    exact = accumulator(call.x0.dtype)
    y: Any = 0
    for x, w in call.pairs:
        y = y + jnp.einsum("...k,nk->...n", x.astype(exact), w.astype(exact), precision=jax.lax.Precision.HIGHEST)
    return round_gradient(y, call.x0.dtype).astype(call.x0.dtype), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
