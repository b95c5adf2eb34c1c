"""`kda_gate` in plain JAX. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.delta_rule.arguments import along
from tilewright.ops.delta_rule.gate.call import KdaGateCall


def log_decays(x: jax.Array, A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """The log-decays of x [..., HV, K], in float32. See `kda_gate`."""

    def gate(x: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
        statistics = accumulator(x.dtype)
        x, A_log, dt_bias = (array.astype(statistics) for array in (x, A_log, dt_bias))
        # Rates per channel, as the bias: both gradients are the same sum over the tokens then, in one pass.
        rates = jnp.broadcast_to(jnp.exp(A_log)[:, None], dt_bias.shape)
        rate, shifted = along(rates, x), x + along(dt_bias, x)
        if lower_bound is None:
            return -rate * _softplus(shifted)
        return lower_bound * jax.nn.sigmoid(rate * shifted)

    # Computed again from x in the backward pass: float32 intermediates of g's size would be written and read otherwise.
    return jax.checkpoint(gate)(x, A_log, dt_bias)


@jax.custom_jvp
def _softplus(x: jax.Array) -> jax.Array:
    return jax.nn.softplus(x)


@_softplus.defjvp
def _softplus_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """A sigmoid. The derivative of `jax.nn.softplus` reads its result, too, and has selections for equal infinities."""
    (x,), (dx,) = primals, tangents
    return _softplus(x), jax.nn.sigmoid(x) * dx


def _forward(call: KdaGateCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    return log_decays(call.x, call.A_log, call.dt_bias, call.lower_bound), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
