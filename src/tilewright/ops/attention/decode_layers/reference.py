"""`decode_layers` in plain JAX: a scan over layers. The oracle of the family."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.attention.decode_layers.call import DecodeLayersCall
from tilewright.ops.rope.api import rope_tables

_CACHES = ("keys", "values")


def _forward(
    call: DecodeLayersCall, launch: Launch, *, save: bool
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    dtype, exact = call.x.dtype, accumulator(call.x.dtype)
    group, capacity = call.q_proj.shape[2] // call.k_proj.shape[2], call.keys.shape[2]
    fits = (call.lengths >= 0) & (call.lengths < capacity)  # [B]
    half, tables = call.rotary_dim // 2, ()
    if call.theta is not None:
        options = {"theta": call.theta, "scaling": call.scaling, "dtype": exact}
        tables = rope_tables(call.lengths, call.rotary_dim, **options)  # [B, half] each
    in_use = jnp.arange(capacity, dtype=jnp.int32)[None, :] <= call.lengths[:, None]  # [B, S], with the token

    def product(axes: str, x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.einsum(axes, x.astype(exact), w.astype(exact), precision=jax.lax.Precision.HIGHEST)
        return round_gradient(y, dtype)

    def normed(y: jax.Array, w: jax.Array | None) -> jax.Array:
        if w is None:
            return y
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + call.eps)
        return y * jnp.broadcast_to(call.norm_offset + w.astype(exact), y.shape)

    def rotated(y: jax.Array) -> jax.Array:  # [B, heads, C]
        if not tables:
            return y
        one, other, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        cos, sin = (jnp.broadcast_to(table[:, None], one.shape) for table in tables)
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin, rest], axis=-1)

    def written(cache: jax.Array, new: jax.Array) -> jax.Array:
        """The cache with a token per sequence behind its length; one that does not fit is not written."""
        position = jnp.where(fits, call.lengths, capacity)
        write = jax.vmap(lambda own, token, at: own.at[at].set(token, mode="drop"))
        return write(cache, new.astype(dtype), position)

    def attended(q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:  # [B, H, C]
        keep = in_use[:, :, None, None]
        keys, values = (
            jnp.repeat(jnp.where(keep, cache, jnp.zeros_like(cache)), group, axis=2) for cache in (keys, values)
        )
        logits = product("bhc,bshc->bhs", q, keys) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(logits, axis=-1, where=jnp.broadcast_to(in_use[:, None], logits.shape))
        out = product("bhs,bshc->bhc", weights, values)
        return jnp.where(jnp.broadcast_to(fits[:, None, None], out.shape), out, jnp.nan).astype(dtype)

    def layer(carry: Any, own: dict[str, Any]) -> Any:
        x, y = carry  # The token, and what it was rounded from.
        n = normed(y, own["mixer_norm"]).astype(dtype)
        q, k = (
            rotated(normed(product("bd,dhc->bhc", n, own[f"{name}_proj"]), own.get(f"{name}_norm"))) for name in "qk"
        )
        new = k, product("bd,dhc->bhc", n, own["v_proj"])
        keys, values = (written(own[name], each) for name, each in zip(_CACHES, new, strict=True))
        y = x.astype(exact) + product("bhc,hcd->bd", attended(q.astype(dtype), keys, values), own["o_proj"])
        n = normed(y, own["mlp_norm"]).astype(dtype)
        gate, up = (product("bd,df->bf", n, own["gate_up"][:, which]) for which in range(2))
        h = (jax.nn.silu(gate) * up).astype(dtype)
        y = y.astype(dtype).astype(exact) + product("bf,fd->bd", h, own["down"])
        return (y.astype(dtype), y), (keys, values)

    layers = {name: x for name, x in call.given().items() if name not in ("x", "lengths")}
    (x, _), (keys, values) = jax.lax.scan(layer, (call.x, call.x.astype(exact)), layers)
    return (x, keys, values), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
