"""The named shapes of `decode_qkv`."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Draw, Input, Work, normal


def lengths_below(room: int) -> Draw:
    """Unequal lengths of caches that have room for one more token, the first with room for just that."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        drawn = jax.random.randint(key, shape, 0, room, jnp.int32)
        return jnp.where(jnp.arange(shape[0]) == 0, room - 1, drawn)

    return draw


def _case(
    name: str,
    b: int,
    d: int,
    s: int,
    heads: tuple[int, int],
    c: int,
    *,
    norms: bool = True,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case over caches with room for `s` tokens. Bytes are those of the weights, and of what a token reads and writes."""
    h, kv = heads
    inputs = {
        "x": Input((b, d)),
        "q_proj": Input((d, h, c), normal(d**-0.5)),
        "k_proj": Input((d, kv, c), normal(d**-0.5)),
        "v_proj": Input((d, kv, c), normal(d**-0.5)),
        "keys": Input((b, s, kv, c)),
        "values": Input((b, s, kv, c)),
        "lengths": Input((b,), lengths_below(s), dtype="int32", differentiable=False),
    }
    if norms:
        inputs |= {"q_norm": Input((c,), dtype="float32"), "k_norm": Input((c,), dtype="float32")}
    weights, caches = d * (h + 2 * kv) * c, 2 * b * s * kv * c
    flops = 2.0 * b * weights
    return Case(
        op="decode_qkv",
        name=name,
        inputs=inputs,
        outputs=("q", "keys", "values"),
        work=lambda itemsize: Work(flops, float(itemsize * (weights + b * (d + (h + 2 * kv) * c)))),
        # The gradient of a cache is that of the returned one, but for the token.
        work_grad=lambda itemsize: Work(3 * flops, float(itemsize * (3 * weights + 2 * caches))),
        options=options,
        small=small,
        in_place=("keys", "values"),
    )


CASES: tuple[Case, ...] = (
    _case("grouped", 2, 192, 5, (8, 4), 64, small=True),
    _case("part_rotated", 3, 64, 4, (4, 4), 96, small=True, rotary_dim=64, norm_offset=1.0),
    _case("plain", 2, 64, 3, (4, 4), 32, norms=False, small=True, theta=None),
    _case("qwen3_1.7b", 1, 2048, 1088, (16, 8), 128, theta=1e6),
    _case("qwen3_1.7b_batch_64", 64, 2048, 1088, (16, 8), 128, theta=1e6),
)
