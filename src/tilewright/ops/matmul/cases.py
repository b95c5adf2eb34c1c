"""The named shapes of matrix products."""

import math
from typing import Any

from tilewright.core.activation import parts_of
from tilewright.core.case import Case, Input, Work, normal


def _case(
    name: str,
    tokens: int | tuple[int, ...],
    k: int,
    n: int,
    *,
    bias: bool = False,
    residual: bool = False,
    w: tuple[str, Any] | None = None,
    x: tuple[str, Any] | None = None,
    small: bool = False,
    **options: Any,
) -> Case:
    """`w` and `x`: the dtype and block that they are quantised to. FLOPs are of the products: 2 M K N per part."""
    leading = (tokens,) if isinstance(tokens, int) else tokens
    m, columns = math.prod(leading), n * parts_of(options.get("activation"))
    inputs = {
        "x": Input((*leading, k), quantized=x, differentiable=x is None),
        "w": Input((k, columns), normal(k**-0.5), quantized=w, differentiable=w is None),
    }
    if bias:
        inputs["bias"] = Input((columns,))
    if residual:
        inputs["residual"] = Input((*leading, n))
    bytes_of = {None: None, "int4": 0.5}
    x_size, w_size = (None if each is None else bytes_of.get(each[0], 1.0) for each in (x, w))

    def work(itemsize: int) -> Work:
        read = m * k * (x_size or itemsize) + k * columns * (w_size or itemsize)
        return Work(flops=2.0 * m * k * columns, bytes=read + m * n * itemsize * (1 + residual))

    def work_grad(itemsize: int) -> Work:
        one = work(itemsize)
        products = 1 + (x is None) + (w is None)
        return Work(flops=products * one.flops, bytes=products * one.bytes)

    return Case(
        op="matmul",
        name=name,
        inputs=inputs,
        outputs=("y",),
        work=work,
        work_grad=work_grad,
        options=options,
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("epilogue", (2, 75), 144, 136, bias=True, residual=True, activation="silu", small=True),
    _case("odd", 5, 7, 11, small=True),
    _case("swiglu", (3, 37), 96, 72, bias=True, activation="swiglu", small=True),
    _case("gelu", 130, 64, 520, activation="gelu", small=True),
    _case("relu", 40, 300, 128, activation="relu", residual=True, small=True),
    _case("int8", 24, 256, 160, w=("int8", None), small=True),
    _case("int4_swiglu", 24, 256, 128, w=("int4", (128, 1)), activation="swiglu", small=True),
    _case("float8", 24, 256, 128, w=("float8_e4m3fn", (128, 128)), small=True),
    _case("int8_int8", 72, 256, 160, w=("int8", None), x=("int8", (1, None)), small=True),
    _case("float8_float8", 72, 384, 256, w=("float8_e4m3fn", (128, 128)), x=("float8_e4m3fn", (1, 128)), small=True),
    _case("cpu_bench", 256, 256, 1024, small=True),
    _case("square", 8192, 8192, 8192),
    _case("wide", 4096, 7168, 16384),
    _case("wide_swiglu", 4096, 7168, 8192, activation="swiglu"),
    _case("wide_float8", 4096, 7168, 16384, w=("float8_e4m3fn", (128, 128)), x=("float8_e4m3fn", (1, 128))),
    _case("wide_int8", 4096, 7168, 16384, w=("int8", None), x=("int8", (1, None))),
    _case("decode", 64, 7168, 16384),
    _case("decode_swiglu", 64, 2048, 6144, activation="swiglu"),
    _case("decode_one_swiglu", 1, 2048, 6144, activation="swiglu"),
    _case("decode_int8", 64, 7168, 16384, w=("int8", None)),
    _case("decode_int4", 64, 7168, 16384, w=("int4", (128, 1))),
    _case("decode_float8", 64, 7168, 16384, w=("float8_e4m3fn", (128, 128))),
)
