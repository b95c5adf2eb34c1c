"""JAX's own attention in plain XLA: `jax.nn.dot_product_attention`, with the T x S weights in memory."""

from typing import Any

import jax

DISTRIBUTIONS = ("jax", "jaxlib")
OUTPUTS = {"flash_attention": ("out",)}


def unavailable() -> str | None:
    return None


def attend(
    implementation: Any, q: Any, k: Any, v: Any, causal: bool, window: Any, scale: float | None
) -> tuple[jax.Array]:
    if window is not None and None in window:
        raise NotImplementedError(
            f"jax.nn.dot_product_attention has no window={tuple(window)} that ends on one side only"
        )
    out = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        local_window_size=None if window is None else tuple(window),
        scale=scale,
        implementation=implementation,
    )
    return (out,)


def _flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: Any = None,
    scale: float | None = None,
    return_logsumexp: bool = False,
) -> tuple[jax.Array]:
    del return_logsumexp
    return attend("xla", q, k, v, causal, window, scale)


OPS = {"flash_attention": _flash_attention}
