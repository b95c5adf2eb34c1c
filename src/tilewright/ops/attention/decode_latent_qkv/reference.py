"""`decode_latent_qkv` in plain JAX: two products, a norm and a write. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.attention.decode_latent_qkv.call import DecodeLatentQkvCall
from tilewright.ops.attention.decode_qkv.reference import written


def _forward(call: DecodeLatentQkvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    dtype, exact, n = call.x.dtype, accumulator(call.x.dtype), call.norm.shape[0]
    x = call.x.astype(exact)

    def project(equation: str, w: jax.Array) -> jax.Array:
        return round_gradient(jnp.einsum(equation, x, w.astype(exact), precision=jax.lax.Precision.HIGHEST), dtype)

    q, down = project("bd,dhc->bhc", call.q_proj), project("bd,dk->bk", call.kv_down)
    latent, others = down[:, :n], down[:, n:]
    latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), axis=-1, keepdims=True) + call.eps)
    latent = latent * jnp.broadcast_to(call.norm.astype(exact), latent.shape)
    return (q.astype(dtype), written(call, call.latents, jnp.concatenate([latent, others], axis=-1))), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
