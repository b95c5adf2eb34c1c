"""JAX's own attention in plain XLA: `jax.nn.dot_product_attention`, with the T x S weights in memory."""

from collections.abc import Callable
from typing import Any

import jax

DISTRIBUTIONS = ("jax", "jaxlib")
OUTPUTS = {"flash_attention": ("out",)}


def unavailable() -> str | None:
    return None


def attention(implementation: Any) -> Callable[..., tuple[jax.Array]]:
    """`jax.nn.dot_product_attention` by one of its implementations, as an adapter's function."""

    def attend(
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

    return attend


OPS = {"flash_attention": attention("xla")}
