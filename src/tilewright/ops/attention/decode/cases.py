"""The named shapes of attention over a cache."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Draw, Input, Work


def lengths_up_to(room: int, least: int) -> Draw:
    """Unequal lengths from `least` on, the first the whole room."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        drawn = jax.random.randint(key, shape, least, room + 1, jnp.int32)
        return jnp.where(jnp.arange(shape[0]) == 0, room, drawn)

    return draw


def _pages(pool: int) -> Draw:
    """Pages of a pool in no order, no page twice."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.permutation(key, pool)[: shape[0] * shape[1]].reshape(shape).astype(jnp.int32)

    return draw


def _case(
    name: str,
    b: int,
    t: int,
    s: int,
    heads: tuple[int, int],
    d: int,
    dv: int | None = None,
    *,
    page: int | None = None,
    sinks: bool = False,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case over caches with room for `s` tokens, in pages if `page` is given. Work is of full caches, as large ones
    are.
    """
    (h, kv), dv = heads, dv or d
    inputs = {"q": Input((b, t, h, d))}
    if page is None:
        inputs |= {"k": Input((b, s, kv, d)), "v": Input((b, s, kv, dv))}
    else:
        per_sequence = -(-s // page)
        pool = b * per_sequence + 3
        inputs |= {
            "k_pages": Input((pool, page, kv, d)),
            "v_pages": Input((pool, page, kv, dv)),
            "page_table": Input((b, per_sequence), _pages(pool), dtype="int32", differentiable=False),
        }
    inputs["lengths"] = Input((b,), lengths_up_to(s, 1 if small else s), dtype="int32", differentiable=False)
    if sinks:
        inputs["sinks"] = Input((h,), dtype="float32")
    cache = b * s * kv * (d + dv)
    flops = 2.0 * b * t * h * s * (d + dv)
    return Case(
        op="decode_attention" if page is None else "paged_attention",
        name=name,
        inputs=inputs,
        outputs=("out", "logsumexp"),
        work=lambda itemsize: Work(flops=flops, bytes=float(itemsize * (cache + b * t * h * (d + dv)))),
        work_grad=lambda itemsize: Work(flops=3.5 * flops, bytes=float(3 * itemsize * (cache + b * t * h * (d + dv)))),
        options={"return_logsumexp": True, **options},
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("odd", 2, 1, 7, (2, 1), 8, small=True),
    _case("grouped", 3, 1, 300, (8, 2), 64, small=True),
    _case("few_tokens", 2, 3, 200, (4, 2), 64, 32, window=90, sinks=True, soft_cap=5.0, small=True),
    _case("llama_8k", 16, 1, 8192, (32, 8), 128),
    _case("qwen3_1k", 64, 1, 1088, (16, 8), 128),
    _case("odd", 2, 1, 40, (2, 1), 8, page=16, small=True),
    _case("grouped", 3, 2, 300, (8, 2), 64, page=16, small=True),
    _case("window", 2, 1, 200, (4, 4), 128, page=32, window=50, sinks=True, small=True),
    _case("llama_8k", 16, 1, 8192, (32, 8), 128, page=64),
)
