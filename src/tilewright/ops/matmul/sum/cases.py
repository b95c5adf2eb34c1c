"""The named shapes of sums of products."""

import math

from tilewright.core.case import Case, Input, Work, normal


def _case(name: str, tokens: tuple[int, ...], n: int, depths: tuple[int, ...], *, small: bool = False) -> Case:
    """FLOPs are of the products. Backward computes the gradients of both operands of each."""
    m, k = math.prod(tokens), sum(depths)
    inputs = {}
    for number, depth in enumerate(depths):
        inputs[f"x{number}"] = Input((*tokens, depth))
        inputs[f"w{number}"] = Input((n, depth), normal(k**-0.5))
    flops, operands, output = 2.0 * m * n * k, m * k + n * k, m * n
    return Case(
        op="matmul_sum",
        name=name,
        inputs=inputs,
        outputs=("y",),
        work=lambda itemsize: Work(flops, float(itemsize * (operands + output))),
        work_grad=lambda itemsize: Work(3 * flops, float(itemsize * (3 * operands + 2 * output))),
        small=small,
    )


CASES: tuple[Case, ...] = (
    # Steps of 64: two, then one for both thin ones together.
    _case("thin", (2, 70), 136, (128, 32, 16), small=True),
    _case("odd", (5,), 11, (7, 3), small=True),
    _case("one", (40,), 64, (192,), small=True),
    _case("qwen3_next_16k", (4, 4096), 2048, (2048, 2048, 4096, 4096, 32, 32)),
    _case("kimi_linear_16k", (4, 4096), 2304, (4096, 4096, 4096, 128, 128, 32)),
    _case("qwen3_8b_16k", (4, 4096), 4096, (4096, 1024, 1024)),
)
