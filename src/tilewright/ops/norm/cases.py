"""The named shapes of the norms."""

import math
from typing import Any

from tilewright.core.case import Case, Input, Work, normal


def _case(
    op: str,
    name: str,
    shape: tuple[int, ...],
    *,
    scale: float = 1.0,
    bias: bool = False,
    weights_dtype: str | None = None,
    gate_dtype: str | None = None,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case with x of about `scale`.

    FLOPs are one for each product and sum of an element, without the sigmoid: 4 forward and 10 more with gradients. Bytes:
    x and gate read and y written; with gradients these and dy read, and dx and dgate written.
    """
    gated, size = op == "gated_rms_norm", math.prod(shape)
    inputs = {"x": Input(shape, normal(scale)), "w": Input(shape[-1:], dtype=weights_dtype)}
    if gated:
        inputs["gate"] = Input(shape, normal(2.0), dtype=gate_dtype)
    if bias:
        inputs["bias"] = Input(shape[-1:], dtype=weights_dtype)
    return Case(
        op=op,
        name=name,
        inputs=inputs,
        outputs=("y",),
        work=lambda itemsize: Work(flops=4.0 * size, bytes=float((2 + gated) * size * itemsize)),
        work_grad=lambda itemsize: Work(flops=14.0 * size, bytes=float((5 + 3 * gated) * size * itemsize)),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("rms_norm", "odd", (5, 7), scale=1e-3, small=True),
    _case("rms_norm", "heads_of_64", (2, 9, 4, 64), offset=1.0, weights_dtype="float32", small=True),
    _case("rms_norm", "many_blocks", (700, 600), scale=1e4, small=True),
    _case("rms_norm", "train_8k", (8192, 4096)),
    _case("rms_norm", "wide_8k", (8192, 16384)),
    _case("layer_norm", "odd", (5, 7), small=True),
    _case("layer_norm", "many_blocks", (700, 600), bias=True, weights_dtype="float32", small=True),
    _case("layer_norm", "train_8k", (8192, 4096), bias=True),
    _case("gated_rms_norm", "odd", (5, 7), activation="sigmoid", small=True),
    _case("gated_rms_norm", "heads_of_64", (2, 8, 6, 64), weights_dtype="float32", gate_dtype="float32", small=True),
    _case("gated_rms_norm", "many_blocks", (1, 1200, 8, 32), small=True),
    _case("gated_rms_norm", "heads_of_128", (5, 8, 128), small=True),
    _case("gated_rms_norm", "rows_of_512", (3, 512), small=True),
    _case("gated_rms_norm", "rows_of_768", (8, 768), activation="sigmoid", small=True),
    _case("gated_rms_norm", "train_8k", (1, 8192, 32, 128)),
    _case("gated_rms_norm", "train_8k_heads_of_64", (1, 8192, 32, 64)),
)
