"""A call of `matmul`."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float, Num

from tilewright.core.activation import parts_of
from tilewright.core.call import Call, array, option, power_of_two


class MatmulCall(Call):
    """y = activation(z) + residual for z = x w + bias, accumulated in float32.

    z [..., P, N] has P = 2 parts for swiglu and one otherwise. Quantised operands are values and scales: x is
    x[..., k] * x_scales[..., k // (K / KX)], and w likewise in both of its axes; x may be quantised only where w is.
    """

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",), ("N", "NS"))
    outputs = ("*tokens N",)
    arguments: ClassVar[Mapping[str, str]] = {
        "w": "w K 2 N",
        "bias": "bias 2 N",
        "x_scales": "x.scales *tokens K",
        "w_scales": "w.scales K 2 N",
    }
    rows = True

    x: Num[Array, "*tokens K"] = array(batch=True)
    w: Num[Array, "KW P N"] = array()
    bias: Float[Array, "P N"] | None = array()
    residual: Float[Array, "*tokens N"] | None = array(batch=True)
    x_scales: Float[Array, "*tokens KX"] | None = array(batch=True, differentiable=False)
    w_scales: Float[Array, "KS P NS"] | None = array(differentiable=False)
    activation: str | None = option()
    out_dtype: str = option()
    w_dtype: str = option()
    """Of the values of w: "int4" is stored as int8 of half the rows (core/quantized.py)."""

    @property
    def parts(self) -> int:
        return parts_of(self.activation)

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """M, K and N: rows of x, channels that are contracted, columns of y."""
        *tokens, k = self.x.shape
        return math.prod(tokens), k, self.w.shape[-1]

    def bucket(self) -> Mapping[str, Any]:
        m, k, n = self.sizes
        return {
            "dtype": self.x.dtype.name,
            "w": None if self.w_dtype == self.x.dtype.name else self.w_dtype,
            "M": power_of_two(m),
            "K": k,
            "N": n,
            "activation": self.activation,
        }
