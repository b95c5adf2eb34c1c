"""Attention over a cache in plain JAX: all the logits of the few queries at once, [B, KV, T * group, S] in float32.

Floor: the cache read once, 2 (D + Dv) FLOPs per query and key. This version reads the whole room of the cache, whatever the
lengths; pages are gathered first, which writes and reads the cache once more. The query heads that share a key head are one
operand of the products, so keys and values are not repeated. Gradients are autodiff's, and linear in S.
"""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.attention.decode.bounds import Outputs, within_bounds
from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.decode.reference import attended, cache_of


def _attend(call: DecodeCall, launch: Launch) -> Outputs:
    q, group, soft_cap = call.q, call.group, call.soft_cap
    k, v = cache_of(call)
    (b, t, h, d), (kv, dv) = q.shape, v.shape[2:]
    wide = accumulator(q.dtype)

    def dot(equation: str, one: jax.Array, other: jax.Array) -> jax.Array:
        return jnp.einsum(equation, one, other, precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)

    logits = dot("btkgd,bskd->bkgts", q.reshape(b, t, kv, group, d), k) * call.scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = jnp.where(attended(call)[:, None, None], logits, -jnp.inf)  # [B, KV, group, T, S]
    row_max = jnp.max(logits, axis=4, keepdims=True)  # [B, KV, group, T, 1]
    sink = None
    if call.sinks is not None:
        sink = call.sinks.astype(wide).reshape(-1, kv, group, 1, 1)
        row_max = jnp.maximum(row_max, jnp.broadcast_to(sink, row_max.shape))
    row_max = jax.lax.stop_gradient(jnp.where(jnp.isfinite(row_max), row_max, 0.0))
    weights = jnp.exp(logits - row_max)
    total = jnp.sum(weights, axis=4, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - row_max)
    nothing = total == 0
    safe_total = jnp.where(nothing, 1.0, total)
    weights = (weights / safe_total).astype(q.dtype)
    out = dot("bkgts,bskd->btkgd", weights, v).astype(q.dtype)
    logsumexp = jnp.where(nothing, -jnp.inf, row_max + jnp.log(safe_total))[..., 0]
    return out.reshape(b, t, h, dv), jnp.moveaxis(logsumexp, 3, 1).reshape(b, t, h)


IMPLEMENTATION = Implementation(forward=Pass(within_bounds(_attend)))
