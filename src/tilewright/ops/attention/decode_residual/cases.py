"""The named shapes of `decode_residual`."""

from typing import Any

from tilewright.core.case import Case, Input, Work, normal


def _case(name: str, b: int, f: int, d: int, *, small: bool = False, **options: Any) -> Case:
    """Bytes are those of the weights, and of what a token reads and writes."""
    flops = 2.0 * b * f * d
    return Case(
        op="decode_residual",
        name=name,
        inputs={
            "x": Input((b, f)),
            "w": Input((f, d), normal(f**-0.5)),
            "residual": Input((b, d)),
            "norm": Input((d,), dtype="float32"),
        },
        outputs=("y", "normed"),
        work=lambda itemsize: Work(flops, float(itemsize * (f * d + b * (f + 3 * d)))),
        work_grad=lambda itemsize: Work(3 * flops, float(3 * itemsize * (f * d + b * (f + 3 * d)))),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("few", 3, 192, 256, small=True),
    _case("one", 1, 1024, 128, small=True, norm_offset=1.0),
    _case("odd", 2, 72, 384, small=True, eps=1e-3),
    _case("qwen3_1.7b_o", 1, 2048, 2048),
    _case("qwen3_1.7b_down", 1, 6144, 2048),
    _case("qwen3_1.7b_o_batch_64", 64, 2048, 2048),
    _case("qwen3_1.7b_down_batch_64", 64, 6144, 2048),
)
