"""The gradient of decoding kernels: that of the plain version. Decoding seldom asks for it."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tilewright.core.dispatch import Launch
from tilewright.ops.attention.decode.xla import paged_attention_xla

_BUILT_IN = (6, 7, 8, 9)


def with_plain_gradient(forward: Callable[..., tuple[jax.Array, jax.Array]]) -> Callable[..., Any]:
    """`forward` of (q, k, v, page table, lengths, sinks, window, scale, soft cap, launch), differentiable."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=_BUILT_IN)
    def attend(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        return forward(*arguments)

    def keep(*arguments: Any) -> tuple[Any, Any]:
        return forward(*arguments), arguments[: _BUILT_IN[0]]

    def pull(window: int | None, scale: float, soft_cap: float | None, launch: Launch, saved: Any, given: Any) -> Any:
        del launch
        q, k, v, page_table, lengths, sinks = saved

        def plain(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
            return paged_attention_xla(
                q, k, v, page_table, lengths, sinks, window=window, scale=scale, soft_cap=soft_cap
            )

        _, pullback = jax.vjp(plain, q, k, v, sinks)
        dq, dk, dv, dsinks = pullback(given)
        return dq, dk, dv, None, None, dsinks

    attend.defvjp(keep, pull)
    return attend
