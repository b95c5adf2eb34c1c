"""The named shapes of `decode_layers`."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Draw, Input, Work, normal


def _lengths(length: int) -> Draw:
    """The first sequence has this length, and each other one token less than the one before it."""
    return lambda key, shape: jnp.maximum(length - jnp.arange(shape[0], dtype=jnp.int32), 0)


def _around_one(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return 1.0 + 0.3 * jax.random.normal(key, shape, jnp.float32)


def _case(
    name: str,
    layers: int,
    d: int,
    heads: tuple[int, int],
    f: int,
    s: int,
    *,
    b: int = 1,
    c: int = 128,
    length: int | None = None,
    norms: bool = True,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case over caches with room for `s` tokens, of which `length` are there; by default all but the last."""
    (h, kv), length = heads, s - 1 if length is None else length
    inputs = {
        "x": Input((b, d)),
        "mixer_norm": Input((layers, d), _around_one),
        "q_proj": Input((layers, d, h, c), normal(d**-0.5)),
        "k_proj": Input((layers, d, kv, c), normal(d**-0.5)),
        "v_proj": Input((layers, d, kv, c), normal(d**-0.5)),
        "o_proj": Input((layers, h, c, d), normal((h * c) ** -0.5)),
        "mlp_norm": Input((layers, d), _around_one),
        "gate_up": Input((layers, d, 2, f), normal(d**-0.5)),
        "down": Input((layers, f, d), normal(f**-0.5)),
        "keys": Input((layers, b, s, kv, c)),
        "values": Input((layers, b, s, kv, c)),
        "lengths": Input((b,), _lengths(length), dtype="int32", differentiable=False),
    }
    if norms:
        inputs |= {"q_norm": Input((layers, c), _around_one), "k_norm": Input((layers, c), _around_one)}
    weights, cache = layers * d * (2 * (h + kv) * c + 3 * f), 2 * layers * b * length * kv * c
    flops = 2.0 * b * weights + 2.0 * cache * (h // kv)
    return Case(
        op="decode_layers",
        name=name,
        inputs=inputs,
        outputs=("x", "keys", "values"),
        work=lambda itemsize: Work(flops, float(itemsize * (weights + cache))),
        # The gradient of a cache is that of the returned one, but for the token.
        work_grad=lambda itemsize: Work(3 * flops, float(3 * itemsize * (weights + cache))),
        options=options,
        small=small,
        in_place=("keys", "values"),
    )


CASES: tuple[Case, ...] = (
    _case("two_layers", 2, 256, (2, 1), 256, 160, small=True, length=75, theta=1e6),
    _case("grouped", 2, 64, (4, 2), 96, 5, small=True, b=2, c=32, rotary_dim=16, norm_offset=1.0),
    _case("plain", 1, 64, (4, 4), 32, 3, small=True, b=2, c=16, norms=False, theta=None),
    _case("qwen3_0.6b", 28, 1024, (16, 8), 3072, 1088, length=1024, theta=1e6),
    _case("qwen3_1.7b", 28, 2048, (16, 8), 6144, 1088, length=1024, theta=1e6),
)
