"""`absorb_queries` and `expand_values` in plain JAX. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.attention.decode_latent_heads.call import LatentHeadsCall


def _forward(call: LatentHeadsCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    x, up, c = call.x, call.kv_up, call.key_dim
    # With bfloat16 in and out, the matrix unit accumulates in float32.
    precision = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    options = {"precision": precision, "preferred_element_type": accumulator(x.dtype)}
    if call.side == "values":
        return jnp.einsum("bhr,rhv->bhv", x, up[..., c:], **options).astype(x.dtype), None
    own = jnp.einsum("bhc,rhc->bhr", x[..., :c], up[..., :c], **options).astype(x.dtype)
    return jnp.concatenate([own, x[..., c:]], axis=-1), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
