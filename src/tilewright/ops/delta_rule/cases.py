"""The named shapes of the delta-rule family, the same for its three ops; and how the cases of its ops are made."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Draw, Input, Work, normal

OPS = ("delta_rule", "gated_delta_rule", "kda")
_FLOAT32_BYTES = 4


def _unit(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = jax.random.normal(key, shape, jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def _betas(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Between 0 and 1, some of them exactly 0 or 1."""
    drawn = jax.nn.sigmoid(2 * jax.random.normal(key, shape, jnp.float32))
    return jnp.where(drawn < 0.05, 0.0, jnp.where(drawn > 0.95, 1.0, drawn))


def _log_decay(strength: float) -> Draw:
    """About -strength; a tenth of them exactly 0, and with a strength over 10 a tenth of them -1e4."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        size, pick = jax.random.split(key)
        g = -strength * jax.nn.softplus(jax.random.normal(size, shape, jnp.float32))
        chance = jax.random.uniform(pick, shape)
        g = jnp.where(chance < 0.1, 0.0, g)
        return jnp.where((chance > 0.9) & (strength > 10), -1e4, g)

    return draw


def _segments(count: int) -> Draw:
    """About `count` segments with boundaries anywhere."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        starts = jax.random.bernoulli(key, count / shape[-1], shape)
        return jnp.cumsum(starts, axis=-1, dtype=jnp.int32)

    return draw


def token_inputs(
    op: str, tokens: tuple[int, ...], h: int, k: int, v: int, hv: int, gate: float
) -> tuple[dict[str, Input], int, int]:
    """q, k, v, g and beta of an op or of its step, with keys of length 1; the elements of q, k and v; and of the gates.

    `tokens` is (B, T), or (B,) for a step. The gates are about -gate.
    """
    inputs = {
        "q": Input((*tokens, h, k), normal(k**-0.25)),
        "k": Input((*tokens, h, k), _unit),
        "v": Input((*tokens, hv, v)),
    }
    per_head = {"delta_rule": 0, "gated_delta_rule": 1, "kda": k}[op.removesuffix("_step")]
    if per_head:
        inputs["g"] = Input((*tokens, hv, *(() if per_head == 1 else (k,))), _log_decay(gate), dtype="float32")
    inputs["beta"] = Input((*tokens, hv), _betas, dtype="float32")
    count = math.prod(tokens)
    return inputs, count * (2 * h * k + hv * v), count * hv * (1 + per_head)


def _case(
    op: str,
    name: str,
    b: int,
    t: int,
    h: int,
    k: int,
    v: int,
    *,
    hv: int | None = None,
    gate: float = 0.1,
    state: bool = False,
    segments: int = 0,
    small: bool = False,
    **options: Any,
) -> Case:
    """The FLOPs are those of the recurrence: 6 K V per token and head, and three times that with gradients."""
    hv = hv or h
    inputs, elements, gates = token_inputs(op, (b, t), h, k, v, hv, gate)
    if state:
        inputs["initial_state"] = Input((b, hv, k, v), dtype="float32")
    if segments:
        inputs["segment_ids"] = Input((b, t), _segments(segments), dtype="int32", differentiable=False)
    states = b * hv * k * v * (1 + state)
    flops = 6.0 * b * t * hv * k * v

    def work(itemsize: int) -> Work:
        return Work(flops, itemsize * (elements + b * t * hv * v) + _FLOAT32_BYTES * (gates + states))

    def work_grad(itemsize: int) -> Work:
        # Forward as above; backward reads the inputs and do once more, and writes the gradients.
        backward = itemsize * (2 * elements + b * t * hv * v) + _FLOAT32_BYTES * 2 * (gates + states)
        return Work(3 * flops, work(itemsize).bytes + backward)

    return Case(
        op=op,
        name=name,
        inputs=inputs,
        outputs=("o", "final_state"),
        work=work,
        work_grad=work_grad,
        options=options,
        rounded=("final_state", "d g", "d beta", "d initial_state"),
        small=small,
    )


def _cases(op: str) -> tuple[Case, ...]:
    return (
        _case(op, "short", 1, 5, 1, 16, 16, small=True),
        _case(op, "packed", 2, 30, 2, 32, 48, hv=4, state=True, segments=5, small=True, normalize_qk=True),
        _case(op, "strong_gate", 1, 40, 1, 64, 32, gate=30.0, state=True, small=True),
        _case(op, "cpu_bench", 1, 4096, 4, 128, 128),
        _case(op, "d64", 1, 8192, 16, 64, 64),
        _case(op, "d128", 1, 8192, 16, 128, 128),
        _case(op, "gva", 1, 8192, 16, 128, 128, hv=32),
        _case(op, "gva64", 1, 8192, 16, 128, 128, hv=64),
        _case(op, "gva64_b4", 4, 8192, 16, 128, 128, hv=64),
        _case(op, "h96", 1, 8192, 96, 128, 128),
        _case(op, "few_heads", 1, 32768, 4, 128, 128),
        _case(op, "long", 1, 131072, 4, 128, 128),
    )


CASES: tuple[Case, ...] = tuple(case for op in OPS for case in _cases(op))
