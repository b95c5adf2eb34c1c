"""The named shapes of attention over a cache of latents."""

from typing import Any

from tilewright.core.case import Case, Input, Work
from tilewright.ops.attention.decode.cases import lengths_up_to


def _case(
    name: str, b: int, s: int, h: int, d: int, r: int, *, length: int | None = None, small: bool = False, **options: Any
) -> Case:
    """A case over caches with room for `s` tokens. Large ones hold `length` tokens each, by default all, and work is of
    those.
    """
    length = s if length is None else length
    held = b * length * d
    flops = 2.0 * b * h * length * (d + r)
    return Case(
        op="decode_latent_attention",
        name=name,
        inputs={
            "q": Input((b, h, d)),
            "latents": Input((b, s, d)),
            "lengths": Input((b,), lengths_up_to(length, 1 if small else length), dtype="int32", differentiable=False),
        },
        outputs=("out",),
        work=lambda itemsize: Work(flops=flops, bytes=float(itemsize * (held + b * h * (d + r)))),
        work_grad=lambda itemsize: Work(flops=3.5 * flops, bytes=float(3 * itemsize * (held + b * h * (d + r)))),
        options={"value_dim": r, **options},
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("ragged", 2, 200, 8, 128, 64, small=True),
    _case("heads", 2, 70, 40, 192, 128, small=True, scale=0.05),
    _case("odd", 2, 7, 2, 24, 16, small=True),
    _case("hybrid_1.5b", 1, 1088, 16, 576, 512, length=1040),
    _case("hybrid_1.5b_batch_64", 64, 1088, 16, 576, 512, length=1040),
    _case("kimi_linear_48b_batch_64", 64, 4096, 32, 576, 512),
)
