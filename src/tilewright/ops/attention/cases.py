"""The named shapes of attention. Work is counted over the pairs that attend, so that a mask lowers it."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright import masks
from tilewright.core.case import Case, Draw, Input, Work, normal


def _packed(segments: int) -> Draw:
    """Ids of `segments` sequences of unequal lengths, packed one after the other."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        starts = jax.random.bernoulli(key, (segments - 1) / shape[-1], shape)
        return jnp.cumsum(starts.astype(jnp.int32), axis=-1)

    return draw


def _case(
    name: str,
    b: int,
    t: int,
    s: int,
    heads: tuple[int, int],
    d: int,
    dv: int | None = None,
    *,
    bias: tuple[int, int, int] | None = None,
    sinks: bool = False,
    segments: int = 0,
    density: float | None = None,
    logit_scale: float = 1.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case. `bias` has its B, H and T; `density` is given where counting that of the mask would take long."""
    (h, kv), dv = heads, dv or d
    scale = logit_scale**0.5
    inputs = {
        "q": Input((b, t, h, d), normal(scale)),
        "k": Input((b, s, kv, d), normal(scale)),
        "v": Input((b, s, kv, dv)),
    }
    if bias is not None:
        inputs["bias"] = Input((*bias, s), dtype="float32")
    if sinks:
        inputs["sinks"] = Input((h,), dtype="float32")
    if segments:
        inputs["segment_ids"] = Input((b, t), _packed(segments), dtype="int32", differentiable=False)
    options = {"return_logsumexp": True, **options}

    def pairs() -> float:
        if density is not None:
            return b * h * t * s * density
        static = [options["mask"]] if "mask" in options else []
        static += [masks.Causal()] if options.get("causal") else []
        static += [masks.SlidingWindow(*options["window"])] if "window" in options else []
        if not static:
            return b * h * t * s
        joined = functools.reduce(operator.and_, static)
        return b * h * t * s * joined.density(t, s, q_offset=options.get("q_offset", 0))

    operands = b * (t * h * (d + dv) + s * kv * (d + dv))
    biases = 4 * int(np.prod(bias)) * s if bias else 0
    return Case(
        op="flash_attention",
        name=name,
        inputs=inputs,
        outputs=("out", "logsumexp"),
        work=lambda itemsize: Work(
            flops=2.0 * pairs() * (d + dv), bytes=float(operands * itemsize + 4 * b * t * h + biases)
        ),
        work_grad=lambda itemsize: Work(
            flops=2.0 * pairs() * (4 * d + 3 * dv),
            bytes=float(3 * operands * itemsize + 8 * b * t * h + 2 * biases),
        ),
        options=options,
        small=small,
    )


# A prefix, or every fiftieth key of the past but its own; not computed from positions alone.
_PREFIX_OR_SPARSE = (masks.Causal() & masks.Dilated(50) & ~masks.SlidingWindow(0, 0)) | masks.Prefix(20)

CASES: tuple[Case, ...] = (
    _case("odd", 1, 5, 7, (2, 1), 8, small=True),
    _case("window_cross", 1, 70, 200, (4, 1), 80, causal=True, window=(50, 0), q_offset=130, sinks=True, small=True),
    _case("packed", 2, 140, 140, (8, 1), 64, segments=4, causal=True, small=True),
    _case("bias_sinks_cap", 2, 60, 140, (4, 2), 32, 48, bias=(2, 1, 60), sinks=True, soft_cap=4.0, small=True),
    _case("large_logits", 1, 96, 96, (2, 1), 128, causal=True, logit_scale=1000.0, small=True),
    _case("wide", 1, 100, 150, (4, 2), 256, causal=True, window=(90, 0), q_offset=50, soft_cap=20.0, small=True),
    _case("prefix_or_sparse", 1, 160, 160, (2, 1), 64, mask=_PREFIX_OR_SPARSE, small=True),
    _case("causal_8k", 1, 8192, 8192, (8, 8), 128, causal=True),
    _case("window_8k", 1, 8192, 8192, (8, 8), 128, causal=True, window=(1023, 0)),
    _case("full_8k", 1, 8192, 8192, (8, 8), 128),
    _case("gqa_8k", 1, 8192, 8192, (32, 8), 128, causal=True),
    _case("mla_4k", 1, 4096, 4096, (16, 16), 192, 128, causal=True),
    _case("packed_8k", 1, 8192, 8192, (8, 8), 128, causal=True, segments=8, density=0.5 / 8),
    _case("d64_4k", 4, 4096, 4096, (16, 16), 64, causal=True),
    _case("gemma_4k", 1, 4096, 4096, (8, 4), 256, causal=True, window=(1023, 0), soft_cap=50.0),
)
