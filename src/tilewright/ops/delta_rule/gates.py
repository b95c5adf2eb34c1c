"""What comes before the recurrence: gates from a layer's raw projections, and queries and keys of length one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator

_NORMALIZE_EPSILON = 1e-6


def normalize(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + 1e-6) along the last axis, summed in float32, rounded to x's dtype."""
    wide = x.astype(accumulator(x.dtype))
    squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + _NORMALIZE_EPSILON)).astype(x.dtype)


def gdn_gate(
    a: Float[Array, "*tokens HV"], A_log: Float[Array, " HV"], dt_bias: Float[Array, " HV"]
) -> Float[Array, "*tokens HV"]:
    """The log-decay of `gated_delta_rule` from a raw projection: g = -exp(A_log) softplus(a + dt_bias), in float32."""
    _check_per_head("a", a, A_log, dt_bias)
    statistics = accumulator(a.dtype)
    a, A_log, dt_bias = (x.astype(statistics) for x in (a, A_log, dt_bias))
    return -_along(jnp.exp(A_log), a) * jax.nn.softplus(a + _along(dt_bias, a))


def kda_gate(
    x: Float[Array, "*tokens HV K"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    lower_bound: float | None = None,
) -> Float[Array, "*tokens HV K"]:
    """The log-decays of `kda` from a raw projection, in float32.

    g = -exp(A_log) softplus(x + dt_bias); with a lower bound, g = lower_bound sigmoid(exp(A_log) (x + dt_bias)), which
    keeps g between lower_bound and 0. The bound is at least -5 and negative.
    """
    if x.ndim < 2 or dt_bias.shape != x.shape[-2:]:
        flat = dt_bias.ndim == 1 and x.ndim >= 2 and dt_bias.size == x.shape[-2] * x.shape[-1]
        remedy = f": pass dt_bias.reshape({x.shape[-2]}, {x.shape[-1]})" if flat else ""
        raise ValueError(
            f"dt_bias has shape {list(dt_bias.shape)} and x {list(x.shape)}; dt_bias must be x's last two axes "
            f"[HV, K]{remedy}"
        )
    if A_log.shape != x.shape[-2:-1]:
        raise ValueError(
            f"A_log has shape {list(A_log.shape)} and x {list(x.shape)}; A_log must be [HV] = [{x.shape[-2]}], one a head: "
            f"pass A_log.reshape(-1)"
        )
    if lower_bound is not None and not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound={lower_bound} must be at least -5 and negative; use -5.0, or None for no bound")
    statistics = accumulator(x.dtype)
    x, A_log, dt_bias = (array.astype(statistics) for array in (x, A_log, dt_bias))
    rate, shifted = _along(jnp.exp(A_log)[:, None], x), x + _along(dt_bias, x)
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def _along(weights: jax.Array, x: jax.Array) -> jax.Array:
    """`weights` with leading axes of 1, to go with x."""
    return weights.reshape((1,) * (x.ndim - weights.ndim) + weights.shape)


def _check_per_head(name: str, x: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> None:
    for what, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x.ndim < 1 or array.shape != x.shape[-1:]:
            raise ValueError(
                f"{what} has shape {list(array.shape)} and {name} {list(x.shape)}; {what} must be [HV], the last axis of "
                f"{name}"
            )
