"""`kda_gate_of_product` in plain JAX: a product in float32, and the gate. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.delta_rule.gate.reference import log_decays
from tilewright.ops.delta_rule.gate_of_product.call import GateOfProductCall


def _forward(call: GateOfProductCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    x, w = (array.astype(accumulator(call.x.dtype)) for array in (call.x, call.w))
    product = jnp.einsum("...r,rhk->...hk", x, w, precision=jax.lax.Precision.HIGHEST)
    return log_decays(round_gradient(product, call.x.dtype), call.A_log, call.dt_bias, call.lower_bound), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
