"""A peer on JAX, in the bench's process: right, and with weights of twice the size, which is its users' affair."""

from typing import Any

import jax
import jax.numpy as jnp

DISTRIBUTIONS = ("jax",)


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[jax.Array]:
    wide = x.astype(jnp.float32)
    y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return ((y * jnp.broadcast_to(w.astype(jnp.float32), y.shape) / 2).astype(x.dtype),)


OPS = {"rms_norm": _rms_norm}
LAYOUTS = {"rms_norm": {"w": (lambda w: w * 2, lambda gradient: gradient * 2)}}
