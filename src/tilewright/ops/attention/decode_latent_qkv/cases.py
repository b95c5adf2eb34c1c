"""The named shapes of `decode_latent_qkv`."""

from typing import Any

from tilewright.core.case import Case, Input, Work, normal
from tilewright.ops.attention.decode_qkv.cases import lengths_below


def _case(
    name: str, b: int, d: int, s: int, heads: tuple[int, int], k: int, n: int, *, small: bool = False, **options: Any
) -> Case:
    """H heads of C channels, and latents of k channels, the first n normalised, in caches with room for `s`.

    Bytes are those of the weights, and of what a token reads and writes.
    """
    h, c = heads
    weights, caches = d * (h * c + k), b * s * k
    flops = 2.0 * b * weights
    return Case(
        op="decode_latent_qkv",
        name=name,
        inputs={
            "x": Input((b, d)),
            "q_proj": Input((d, h, c), normal(d**-0.5)),
            "kv_down": Input((d, k), normal(d**-0.5)),
            "norm": Input((n,), dtype="float32"),
            "latents": Input((b, s, k)),
            "lengths": Input((b,), lengths_below(s), dtype="int32", differentiable=False),
        },
        outputs=("q", "latents"),
        work=lambda itemsize: Work(flops, float(itemsize * (weights + b * (d + h * c + k)))),
        # The gradient of a cache is that of the returned one, but for the token.
        work_grad=lambda itemsize: Work(3 * flops, float(itemsize * (3 * weights + 2 * caches))),
        options=options,
        small=small,
        in_place=("latents",),
    )


CASES: tuple[Case, ...] = (
    _case("few", 2, 192, 5, (4, 64), 192, 128, small=True),
    _case("one", 1, 1024, 3, (2, 64), 160, 128, small=True, eps=1e-3),
    _case("odd", 3, 24, 4, (2, 12), 20, 16, small=True),
    _case("hybrid_1.5b", 1, 2048, 1088, (16, 192), 576, 512),
    _case("hybrid_1.5b_batch_64", 64, 2048, 1088, (16, 192), 576, 512),
)
