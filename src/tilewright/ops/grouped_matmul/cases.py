"""The named shapes of grouped products."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import parts_of
from tilewright.core.case import Case, Draw, Input, Work, normal


def _sizes(groups: int, m: int, rest: int, empty: int) -> Draw:
    """Sizes of groups that sum to m - rest: unequal, and every `empty`-th of them 0."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        share = jax.random.exponential(key, (groups,)) + 0.3
        if empty:
            share = jnp.where(jnp.arange(groups) % empty == 1, 0.0, share)
        ends = jnp.round(jnp.cumsum(share) / jnp.sum(share) * (m - rest)).astype(jnp.int32)
        return jnp.diff(ends, prepend=0)

    return draw


def _case(
    name: str,
    groups: int,
    m: int,
    k: int,
    n: int,
    *,
    rest: int = 0,
    empty: int = 0,
    w: tuple[str, Any] | None = None,
    x: tuple[str, Any] | None = None,
    small: bool = False,
    **options: Any,
) -> Case:
    """`rest` rows are past the last group. FLOPs are those of rows in groups; every matrix is read once."""
    columns = n * parts_of(options.get("activation"))
    sizes = Input((groups,), _sizes(groups, m, rest, empty), dtype="int32", differentiable=False)
    inputs = {
        "x": Input((m, k), quantized=x, differentiable=x is None),
        "w": Input((groups, k, columns), normal(k**-0.5), quantized=w, differentiable=w is None),
        "group_sizes": sizes,
    }
    x_size, w_size = (None if each is None else 0.5 if each[0] == "int4" else 1.0 for each in (x, w))

    def work(itemsize: int) -> Work:
        read = m * k * (x_size or itemsize) + groups * k * columns * (w_size or itemsize)
        return Work(flops=2.0 * (m - rest) * k * columns, bytes=read + m * n * itemsize)

    def work_grad(itemsize: int) -> Work:
        one, products = work(itemsize), 1 + (x is None) + (w is None)
        return Work(flops=products * one.flops, bytes=products * one.bytes)

    return Case(
        op="grouped_matmul",
        name=name,
        inputs=inputs,
        outputs=("y",),
        work=work,
        work_grad=work_grad,
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("unequal", 4, 150, 144, 136, rest=9, empty=3, small=True),
    _case("odd", 3, 5, 7, 11, small=True),
    _case("swiglu", 5, 111, 96, 72, activation="swiglu", small=True),
    _case("one_group", 1, 130, 64, 200, activation="silu", small=True),
    _case("many_groups", 40, 90, 64, 72, empty=2, small=True),
    _case("int8", 3, 60, 256, 160, w=("int8", None), rest=2, small=True),
    _case("int4_swiglu", 3, 60, 256, 128, w=("int4", (128, 1)), activation="swiglu", small=True),
    _case("float8", 3, 60, 256, 128, w=("float8_e4m3fn", (128, 128)), small=True),
    _case("float8_float8", 3, 90, 384, 256, w=("float8_e4m3fn", (128, 128)), x=("float8_e4m3fn", (1, 128)), small=True),
    _case("cpu_bench", 6, 512, 128, 256, small=True),
    _case("mixtral", 8, 8192, 4096, 14336),
    _case("qwen3_moe_up", 128, 65536, 2048, 768),
    _case("qwen3_moe_swiglu", 128, 65536, 2048, 768, activation="swiglu"),
    _case("qwen3_moe_down", 128, 65536, 768, 2048),
    _case("qwen3_moe_float8", 128, 65536, 2048, 768, w=("float8_e4m3fn", (128, 128)), x=("float8_e4m3fn", (1, 128))),
    _case("decode", 128, 512, 2048, 768),
    _case("decode_swiglu", 128, 512, 2048, 768, activation="swiglu"),
    _case("decode_int4", 128, 512, 2048, 768, w=("int4", (128, 1))),
    _case("decode_float8", 128, 512, 2048, 768, w=("float8_e4m3fn", (128, 128))),
)
