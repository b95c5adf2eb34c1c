"""The named shapes of short convolution."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Input, Work, normal


def _segments(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Segments of about six tokens; some have a single one, and ids come back after others."""
    return jnp.cumsum(jax.random.bernoulli(key, 1 / 6, shape).astype(jnp.int32), axis=-1) % 3


def _case(
    name: str,
    b: int | None,
    t: int,
    d: int,
    *,
    width: int = 4,
    bias: bool = True,
    state: bool = False,
    segments: bool = False,
    weights_dtype: str | None = None,
    scale: float = 1.0,
    small: bool = False,
    **options: Any,
) -> Case:
    """A case with x of about `scale`.

    FLOPs are those of the taps, 2 W per element, and 6 W with gradients; bytes are x read and y written, and with
    gradients x and dy read and dx written once more.
    """
    leading = () if b is None else (b,)
    inputs = {"x": Input((*leading, t, d), normal(scale)), "w": Input((width, d), normal(0.5), dtype=weights_dtype)}
    if bias:
        inputs["bias"] = Input((d,), dtype=weights_dtype)
    if state:
        inputs["initial_state"] = Input((*leading, width - 1, d), normal(scale))
    if segments:
        inputs["segment_ids"] = Input((*leading, t), _segments, dtype="int32", differentiable=False)
    size = (b or 1) * t * d
    return Case(
        op="short_conv",
        name=name,
        inputs=inputs,
        outputs=("y", "final_state"),
        work=lambda itemsize: Work(flops=2.0 * width * size, bytes=2.0 * size * itemsize),
        work_grad=lambda itemsize: Work(flops=6.0 * width * size, bytes=5.0 * size * itemsize),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("odd", None, 5, 7, state=True, activation="silu", small=True),
    _case(
        "shorter_than_the_filter", 2, 2, 130, width=8, state=True, bias=False, scale=1e2, activation="silu", small=True
    ),
    _case("packed", 2, 77, 40, width=5, state=True, segments=True, weights_dtype="float32", small=True),
    _case("many_blocks", 2, 300, 150, state=True, activation="silu", small=True),
    _case("runs", 2, 37, 256, state=True, segments=True, activation="silu", small=True),
    _case("heads", 2, 37, 512, state=True, segments=True, activation="silu", normalize=128, small=True),
    _case("train_8k", 1, 8192, 4096, bias=False, activation="silu"),
    _case("train_8k_packed", 1, 8192, 4096, bias=False, segments=True, activation="silu"),
    _case("kimi_linear", 4, 4096, 4096, bias=False, activation="silu"),
    _case("kimi_linear_heads", 4, 4096, 4096, bias=False, activation="silu", normalize=128),
)
