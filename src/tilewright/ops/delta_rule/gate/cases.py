"""The named shapes of `kda_gate`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Input, Work, normal

_FLOAT32_BYTES = 4


def rate_log(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The logs of rates from 1 to 16, as layers begin with."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _case(
    name: str,
    tokens: tuple[int, ...],
    hv: int,
    k: int,
    *,
    scale: float = 1.0,
    bias: float = -4.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """`scale` is the standard deviation of x, and `bias` the mean of dt_bias.

    Backward reads x and the cotangent and writes dx; with no products there are no FLOPs to count.
    """
    elements = float(math.prod(tokens) * hv * k)
    return Case(
        op="kda_gate",
        name=name,
        inputs={
            "x": Input((*tokens, hv, k), normal(scale)),
            "A_log": Input((hv,), rate_log, dtype="float32"),
            "dt_bias": Input((hv, k), lambda key, shape: bias + jax.random.normal(key, shape), dtype="float32"),
        },
        outputs=("g",),
        work=lambda itemsize: Work(0.0, (itemsize + _FLOAT32_BYTES) * elements),
        work_grad=lambda itemsize: Work(0.0, (3 * itemsize + 2 * _FLOAT32_BYTES) * elements),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("mild", (2, 13), 2, 128, small=True),
    _case("strong", (11,), 3, 256, scale=30.0, bias=0.0, small=True),
    _case("bounded", (3, 7), 8, 64, small=True, lower_bound=-5.0),
    _case("narrow", (3, 5), 3, 40, small=True),
    _case("kimi_linear_16k", (4, 4096), 32, 128),
    _case("kimi_linear_16k_bounded", (4, 4096), 32, 128, lower_bound=-5.0),
)
