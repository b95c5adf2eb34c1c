"""The delta rule and its relatives as they are defined: a scan over tokens. The oracle of the family.

bfloat16 inputs are upcast, and everything inside is float32: a vector times the state, token by token, needs no matrix
unit. A chunked bfloat16 version is held to that.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tilewright.core.axes import State
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall


def step(
    state: State,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
    beta: Float[Array, "B HV"],
    reset: Bool[Array, " B"] | None,
    *,
    scale: float,
) -> tuple[State, Float[Array, "B HV V"]]:
    """One token: the state after it, and its output. Each query and key head serves a group of value heads."""
    b, hv, depth, width = state.shape
    h = q.shape[1]
    groups = hv // h

    def grouped(x: jax.Array) -> jax.Array:
        return x.astype(state.dtype).reshape(b, h, groups, *x.shape[2:])

    s = grouped(state)  # [B, H, G, K, V]
    if reset is not None:
        s = jnp.where(reset[:, None, None, None, None], jnp.zeros_like(s), s)
    if g is not None:
        decay = jnp.exp(grouped(g))
        s = s * (decay[..., None] if g.ndim == 3 else decay[..., None, None])
    wide_k = k.astype(state.dtype)
    seen = _dot("bhgkv,bhk->bhgv", s, wide_k)
    correction = grouped(beta)[..., None] * (grouped(v) - seen)  # [B, H, G, V]
    s = s + wide_k[:, :, None, :, None] * correction[..., None, :]
    o = scale * _dot("bhgkv,bhk->bhgv", s, q.astype(state.dtype))
    return s.reshape(b, hv, depth, width), o.reshape(b, hv, width).astype(v.dtype)


def _dot(spec: str, state: jax.Array, vector: jax.Array) -> jax.Array:
    return jnp.einsum(spec, state, vector, precision=jax.lax.Precision.HIGHEST, preferred_element_type=state.dtype)


def _forward(call: DeltaRuleCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (call.q, call.k, call.v, call.g, call.beta, call.resets))

    def one(state: jax.Array, token: Any) -> tuple[jax.Array, jax.Array]:
        return step(state, *token, scale=call.scale)

    final_state, o = jax.lax.scan(one, call.initial_state, tokens)
    return (jnp.moveaxis(o, 0, 1), final_state), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
