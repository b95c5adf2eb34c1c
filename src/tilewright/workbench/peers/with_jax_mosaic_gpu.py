"""JAX's own Mosaic GPU attention for Hopper (`jax.experimental.pallas.ops.gpu.attention_mgpu`).

It has no scale, and its buffers are float16: the queries are scaled, and all three arrays cast, outside of what is timed.
For values of about 1, as the cases have, float16 keeps every bit of a bfloat16. Block sizes are those of its own benchmark.
It has no backward pass for causal attention, and raises an error there.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.chip import Chip
from tilewright.core.target import current_chip

DISTRIBUTIONS = ("jax", "jaxlib")
OUTPUTS = {"flash_attention": ("out",)}

_BLOCK_Q = 64
# Two stages of keys and values, 64 KiB each, fit beside the queries.
_BLOCK_KV_ELEMENTS = 128 * 128
_BACKWARD_BLOCKS = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)


def unavailable() -> str | None:
    chip, hopper = current_chip(), Chip.named("h100")
    if chip.compute_capability == hopper.compute_capability:
        return None
    return f"it is made for Hopper GPUs, and this is a {chip.name}"


def _flash_attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, return_logsumexp: bool = False
) -> tuple[jax.Array]:
    del return_logsumexp
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    if v.shape[-1] != q.shape[-1]:
        raise NotImplementedError(f"it has no values of {v.shape[-1]} channels beside keys of {q.shape[-1]}")
    config = attention_mgpu.TuningConfig(
        block_q=_BLOCK_Q,
        block_kv=_BLOCK_KV_ELEMENTS // q.shape[-1] // 64 * 64,
        max_concurrent_steps=2,
        causal=causal,
        **({} if causal else _BACKWARD_BLOCKS),
    )
    return (attention_mgpu.attention(q, k, v, config),)


def _half(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float16)


def _scaled(array: jax.Array) -> jax.Array:
    return (array.astype(jnp.float32) * array.shape[-1] ** -0.5).astype(jnp.float16)


OPS = {"flash_attention": _flash_attention}
LAYOUTS = {
    "flash_attention": {
        "q": (_scaled, lambda gradient: gradient.astype(jnp.float32) * gradient.shape[-1] ** -0.5),
        "k": (_half, lambda gradient: gradient),
        "v": (_half, lambda gradient: gradient),
    }
}
