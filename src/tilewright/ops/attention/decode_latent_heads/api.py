"""`absorb_queries` and `expand_values`: the per-head products around attention over latents."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, is_integer, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.attention.decode_latent_heads.call import AbsorbCall, ExpandCall, LatentHeadsCall

_IMPLEMENTATIONS = ("pallas_gpu", "reference")
_FAMILY = "tilewright.ops.attention.decode_latent_heads"

ABSORB = register(Op(name="absorb_queries", family=_FAMILY, implementations=_IMPLEMENTATIONS))
EXPAND = register(Op(name="expand_values", family=_FAMILY, implementations=_IMPLEMENTATIONS))


def absorb_queries(
    q: Float[Array, "B H J"],
    kv_up: Float[Array, "R H X"],
    *,
    key_dim: int,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "B H M"]:
    r"""Queries of one token per sequence in the absorbed form, as `decode_latent_attention` takes them.

    With C = `key_dim`, the channels of a head's keys that are expanded from the latents,

        y[b, h] = [sum_c q[b, h, c] kv_up[:, h, c], q[b, h, C:]]

    so that a product with a latent and the channels that all heads share is the product of the query with the head's key.

    Args:
      q: [B, H, J], float32 or bfloat16; J is at least C.
      kv_up: [R, H, X], of q's dtype: for each head the columns of its keys, and then those of its values.
      key_dim: C, from 1 to X.
      implementation: "pallas_gpu" (Hopper, bfloat16) or "reference", plain JAX; None takes the best that this device can
        run.
      config: there are none; None.

    Returns:
      y [B, H, R + J - C] of q's dtype. Gradients flow to both arrays.
    """
    call = _call("q", q, kv_up, key_dim)
    return ABSORB.run(call, implementation=_runnable(call, implementation), config=config)


def expand_values(
    o: Float[Array, "B H R"],
    kv_up: Float[Array, "R H X"],
    *,
    key_dim: int,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "B H M"]:
    r"""The values of each head from what `decode_latent_attention` returns: y[b, h] = sum_r o[b, h, r] kv_up[r, h, C:].

    Args:
      o: [B, H, R], float32 or bfloat16.
      kv_up: [R, H, X], of o's dtype: for each head the columns of its keys, and then those of its values.
      key_dim: C, the columns of a head's keys, from 1 to X - 1.
      implementation: "pallas_gpu" (Hopper, bfloat16) or "reference", plain JAX; None takes the best that this device can
        run.
      config: there are none; None.

    Returns:
      y [B, H, X - C] of o's dtype. Gradients flow to both arrays.
    """
    call = _call("o", o, kv_up, key_dim)
    return EXPAND.run(call, implementation=_runnable(call, implementation), config=config)


def has_kernels(q: Any, o: Any, kv_up: Any, *, key_dim: int) -> bool:
    """Whether both ops are kernels on this device for these arguments."""
    return ABSORB.takes_kernel(_call("q", q, kv_up, key_dim)) and EXPAND.takes_kernel(_call("o", o, kv_up, key_dim))


def _runnable(call: LatentHeadsCall, implementation: ImplementationName | None) -> ImplementationName | None:
    return "reference" if call.x.shape[0] == 0 else implementation


def _call(name: str, x: Any, kv_up: Any, key_dim: Any) -> LatentHeadsCall:
    x, kv_up = jnp.asarray(x), jnp.asarray(kv_up)
    if x.ndim != 3 or x.dtype.name not in FLOATING or 0 in x.shape[1:]:
        remedy = f": pass {name}[:, 0]" if x.ndim == 4 else ""
        raise ValueError(f"{name} is {shown(x)}; it must be floating [B, H, channels], one token per sequence{remedy}")
    if kv_up.ndim != 3 or kv_up.shape[1] != x.shape[1] or kv_up.dtype != x.dtype:
        raise ValueError(
            f"kv_up is {shown(kv_up)} and {name} is {shown(x)}; it must be [R, H, X] of {name}'s dtype: pass "
            f"kv_up.reshape(R, H, X)"
        )
    least = 1 if name == "q" else 0
    if not is_integer(key_dim) or not 1 <= key_dim < kv_up.shape[2] + least:
        raise ValueError(f"key_dim={key_dim!r} must be from 1 to the columns of a head, X={kv_up.shape[2]}")
    if (name == "q" and x.shape[2] < key_dim) or (name == "o" and x.shape[2] != kv_up.shape[0]):
        wanted = f"{key_dim} channels or more" if name == "q" else f"R={kv_up.shape[0]} channels"
        raise ValueError(f"{name} is {shown(x)}; its heads must have {wanted}")
    return (AbsorbCall if name == "q" else ExpandCall)(x=x, kv_up=kv_up, key_dim=int(key_dim))
