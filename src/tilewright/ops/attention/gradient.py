"""The hand-written gradient that the implementations of attention share.

With p_ts = exp(a_ts - logsumexp_t), the gradient of a logit is

    d a_ts = p_ts (d_out_t . v_s - delta_t)        delta_t = d_out_t . out_t - d_logsumexp_t

and that of a sink is the same with no value: -exp(sink - logsumexp_t) delta_t, summed over the queries. An implementation
keeps the max and the total of a row, not its logsumexp: at logits of 1,000 a float32 logsumexp is off by 6e-5, and so would
be every weight made from it.

The delta of a logit is made from `out` as it was returned. In bfloat16 that has two roundings in it, of the weights and of
`out` itself. A logit's gradient is rounded to bfloat16 anyway. A sink's is one float32 number a head, and its error was
seen at 12 times the plain version's (D = 128, T = 400, two heads), so a backward sums p_ts (d_out_t . v_s), which it has in
float32, for the sinks by itself.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.dispatch import Launch
from tilewright.core.numerics import accumulator
from tilewright.ops.attention.mask_algebra import Mask


@dataclass(frozen=True)
class Settings:
    """What a call is made of besides its arrays; static."""

    mask: Mask | None
    scale: float
    soft_cap: float | None
    q_offset: int


@dataclass(frozen=True)
class Operands:
    """The arrays of a call. Those that are not given are None."""

    q: jax.Array  # [B, T, H, D]
    k: jax.Array  # [B, S, KV, D]
    v: jax.Array  # [B, S, KV, Dv]
    bias: jax.Array | None  # [B or 1, H or 1, T or 1, S]
    sinks: jax.Array | None  # [H]
    q_segments: jax.Array | None  # [B, T]
    kv_segments: jax.Array | None  # [B, S]
    keep: jax.Array | None  # [B or 1, H or 1, T, S]


Forward = Callable[[Operands, Settings, Launch], tuple[jax.Array, jax.Array, jax.Array]]
"""-> out [B, T, H, Dv], and the max and total of each row, [B, H, T]. The total of a row without work is 0."""


@dataclass(frozen=True)
class Rows:
    """What a backward needs of each query, [B, H, T]."""

    highest: jax.Array
    """The max of the logits, in the implementation's unit."""
    total: jax.Array
    delta: jax.Array
    sink: jax.Array | None
    """The weight of the sink, where there is one."""


@dataclass(frozen=True)
class Gradients:
    """What a backward returns."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    drawn: jax.Array | None
    """With sinks: the sum over b, t and s of p_ts (d_out_t . v_s) times the weight of the sink, [H], float32."""


Backward = Callable[[Operands, jax.Array, Rows, Settings, Launch], Gradients]
"""Of the operands, d_out, the rows, the settings and the launch."""


def with_gradient(
    forward: Forward, backward: Backward, *, per_nat: float = 1.0
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(eight arrays, settings, launch) -> out, logsumexp; differentiable in q, k, v, bias and sinks through both.

    `per_nat` is the unit of the max: 1, or log2(e) for an implementation whose logits are made for exp2.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(8, 9))
    def function(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        out, highest, total = forward(Operands(*arguments[:8]), *arguments[8:])
        return out, _logsumexp(highest / per_nat, total)

    def keep(*arguments: Any) -> tuple[Any, Any]:
        out, highest, total = forward(Operands(*arguments[:8]), *arguments[8:])
        return (out, _logsumexp(highest / per_nat, total)), (arguments[:8], out, highest, total)

    def pull(settings: Settings, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, ...]:
        arrays, out, highest, total = saved
        operands = Operands(*arrays)
        d_out, d_logsumexp = cotangents
        accumulate = accumulator(out.dtype)
        d_logsumexp = d_logsumexp.transpose(0, 2, 1)  # [B, H, T]
        delta = jnp.sum(d_out.astype(accumulate) * out.astype(accumulate), axis=3)  # [B, T, H]
        delta = delta.transpose(0, 2, 1) - d_logsumexp
        weight = None
        if operands.sinks is not None:
            sink = operands.sinks.astype(accumulate)[None, :, None]
            weight = jnp.exp((sink * per_nat - highest) / per_nat) / jnp.where(total == 0, 1.0, total)  # [B, H, T]
        found = backward(operands, d_out, Rows(highest, total, delta, weight), settings, launch)
        dsinks = None
        if operands.sinks is not None and weight is not None and found.drawn is not None:
            dsinks = jnp.sum(weight * d_logsumexp, axis=(0, 2)) - found.drawn
            dsinks = dsinks.astype(operands.sinks.dtype)
        return found.q, found.k, found.v, found.bias, dsinks, None, None, None

    function.defvjp(keep, pull)
    return function


def _logsumexp(highest: jax.Array, total: jax.Array) -> jax.Array:
    """[B, T, H]; -inf where nothing was attended to."""
    nothing = total == 0
    value = jnp.where(nothing, -jnp.inf, highest + jnp.log(jnp.where(nothing, 1.0, total)))
    return value.transpose(0, 2, 1)
