"""The named shapes of the rotary embedding."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.case import Case, Input, Work
from tilewright.ops.rope.frequencies import Llama3, Yarn


def _positions(most: int):
    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.randint(key, shape, 0, most, jnp.int32)

    return draw


def _case(
    name: str, b: int, t: int, h: int, d: int, *, most: int | None = None, small: bool = False, **options: Any
) -> Case:
    """A case with positions drawn below `most`, or 0, 1, 2, ... A rotation is 3 FLOPs per feature."""
    inputs = {"x": Input((b, t, h, d))}
    if most is not None:
        inputs["positions"] = Input((b, t), _positions(most), dtype="int32", differentiable=False)
    size = b * t * h * d
    tables = 4 * b * t * options.get("rotary_dim", d)
    return Case(
        op="apply_rope",
        name=name,
        inputs=inputs,
        outputs=("out",),
        work=lambda itemsize: Work(flops=3.0 * size, bytes=float(2 * size * itemsize + tables)),
        work_grad=lambda itemsize: Work(flops=6.0 * size, bytes=float(4 * size * itemsize + 2 * tables)),
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("odd", 1, 5, 3, 6, small=True),
    _case("positions", 2, 37, 4, 64, most=1_000_000, small=True),
    _case("interleaved_partial", 2, 20, 2, 40, most=5000, layout="interleaved", rotary_dim=24, small=True),
    _case("llama3", 1, 33, 2, 64, most=100_000, theta=5e5, scaling=Llama3(), small=True),
    _case("yarn_inverse", 1, 33, 2, 64, most=100_000, scaling=Yarn(16.0, 4096), inverse=True, small=True),
    _case("train_8k", 4, 8192, 32, 128),
)
