"""The named shapes of `kda_gate_of_product`."""

import math
from typing import Any

import jax

from tilewright.core.case import Case, Input, Work, normal
from tilewright.ops.delta_rule.gate.cases import rate_log

_FLOAT32_BYTES = 4


def _case(
    name: str,
    tokens: tuple[int, ...],
    r: int,
    hv: int,
    k: int,
    *,
    scale: float = 1.0,
    bias: float = -4.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """`scale` is the standard deviation of the product, and `bias` the mean of dt_bias.

    FLOPs are those of the product. Backward reads both operands and the cotangent, and writes the operands' gradients.
    """
    m = math.prod(tokens)
    flops, operands, gates = 2.0 * m * r * hv * k, m * r + r * hv * k, float(_FLOAT32_BYTES * m * hv * k)
    return Case(
        op="kda_gate_of_product",
        name=name,
        inputs={
            "x": Input((*tokens, r)),
            "w": Input((r, hv, k), normal(scale * r**-0.5)),
            "A_log": Input((hv,), rate_log, dtype="float32"),
            "dt_bias": Input((hv, k), lambda key, shape: bias + jax.random.normal(key, shape), dtype="float32"),
        },
        outputs=("g",),
        work=lambda itemsize: Work(flops, itemsize * operands + gates),
        work_grad=lambda itemsize: Work(3 * flops, 3 * itemsize * operands + 2 * gates),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("mild", (2, 75), 128, 1, 64, small=True),
    _case("strong", (40,), 64, 2, 64, scale=30.0, bias=0.0, small=True),
    _case("bounded", (136,), 192, 3, 64, small=True, lower_bound=-5.0),
    _case("narrow", (3, 5), 7, 2, 32, small=True),
    _case("kimi_linear_16k", (4, 4096), 128, 32, 128),
    _case("kimi_linear_16k_bounded", (4, 4096), 128, 32, 128, lower_bound=-5.0),
)
