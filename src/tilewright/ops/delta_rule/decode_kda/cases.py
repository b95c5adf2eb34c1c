"""The named shapes of `decode_kda`."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Input, Work, normal

_FLOAT32_BYTES = 4
_WIDTH = 4


def _rate_log(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logs of rates from 1 to 16, as layers begin with."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _case(
    name: str,
    b: int,
    d: int,
    h: int,
    k: int = 128,
    *,
    r: int = 128,
    w: int = _WIDTH,
    bias: float = -4.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """`bias` is the mean of dt_bias. Bytes are those of the weights and states, and of what a token reads and writes."""
    channels = h * k
    inputs = {
        "x": Input((b, d)),
        **{f"{of}_proj": Input((d, h, k), normal(d**-0.5)) for of in "qkv"},
        **{f"{of}_conv": Input((w, h, k), normal(w**-0.5)) for of in "qkv"},
        "decay_down": Input((d, r), normal(d**-0.5)),
        "decay_up": Input((r, h, k), normal(r**-0.5)),
        "A_log": Input((h,), _rate_log, dtype="float32"),
        "dt_bias": Input((h, k), lambda key, shape: bias + jax.random.normal(key, shape), dtype="float32"),
        "beta_proj": Input((d, h), normal(d**-0.5)),
        "gate_down": Input((d, r), normal(d**-0.5)),
        "gate_up": Input((r, h, k), normal(r**-0.5)),
        "norm": Input((k,), dtype="float32"),
        **{f"{of}_state": Input((b, w - 1, h, k)) for of in "qkv"},
        "memory": Input((b, h, k, k), normal(0.3), dtype="float32"),
    }
    weights = d * (3 * channels + 2 * r + h) + (2 * r + 3 * w) * channels
    inputs_before, squares = 3 * b * (w - 1) * channels, b * h * k * k
    flops = 2.0 * b * weights + 6.0 * squares

    def work(itemsize: int) -> Work:
        token = b * (d + channels)
        return Work(flops, float(itemsize * (weights + token + 2 * inputs_before) + 2 * _FLOAT32_BYTES * squares))

    def work_grad(itemsize: int) -> Work:
        backward = itemsize * (2 * weights + 3 * inputs_before) + 3 * _FLOAT32_BYTES * squares
        return Work(3 * flops, work(itemsize).bytes + float(backward))

    return Case(
        op="decode_kda",
        name=name,
        inputs=inputs,
        outputs=("y", "q_state", "k_state", "v_state", "memory"),
        work=work,
        work_grad=work_grad,
        options=options,
        # Its products are of bfloat16 operands.
        rounded=("memory", *(f"d {of}" for of in ("A_log", "dt_bias", "norm", "memory"))),
        small=small,
        in_place=("q_state", "k_state", "v_state", "memory"),
    )


CASES: tuple[Case, ...] = (
    _case("two", 2, 128, 1, small=True),
    _case("bounded", 3, 256, 2, small=True, bias=0.0, lower_bound=-5.0),
    _case("narrow", 2, 24, 2, 16, r=8, w=3, small=True, eps=1e-3),
    _case("hybrid_1.5b", 1, 2048, 16),
    _case("hybrid_1.5b_batch_64", 64, 2048, 16),
    _case("kimi_linear_batch_16", 16, 2304, 32),
)
