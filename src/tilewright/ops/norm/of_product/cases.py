"""The named shapes of `gated_rms_norm_of_product`."""

import math
from typing import Any

from tilewright.core.case import Case, Input, Work, normal


def _case(
    name: str,
    tokens: tuple[int, ...],
    k: int,
    h: int,
    d: int,
    *,
    gate: float = 2.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """`gate` is the standard deviation of the gate.

    FLOPs are those of the product. Backward reads o, dy and both operands, and writes the gradients of o and the operands.
    """
    m = math.prod(tokens)
    flops, operands, outputs = 2.0 * m * k * h * d, m * k + k * h * d, m * h * d
    return Case(
        op="gated_rms_norm_of_product",
        name=name,
        inputs={
            "o": Input((*tokens, h, d)),
            "x": Input((*tokens, k)),
            "w": Input((k, h, d), normal(gate * k**-0.5)),
            "norm": Input((d,), dtype="float32"),
        },
        outputs=("y",),
        work=lambda itemsize: Work(flops, float(itemsize * (operands + 2 * outputs))),
        work_grad=lambda itemsize: Work(3 * flops, float(itemsize * (3 * operands + 5 * outputs))),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("one_head", (2, 75), 128, 1, 128, activation="sigmoid", small=True),
    _case("two_heads", (136,), 192, 2, 128, small=True),
    _case("strong_gate", (40,), 64, 1, 128, gate=100.0, small=True, eps=1e-3),
    _case("narrow", (3, 5), 7, 2, 32, small=True),
    _case("kimi_linear_16k", (4, 4096), 128, 32, 128, activation="sigmoid"),
    _case("qwen3_next_16k", (4, 4096), 2048, 32, 128),
)
