"""A call of `kda_gate_of_product`."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class GateOfProductCall(Call):
    """g = -exp(A_log) softplus(z) for z = x w + dt_bias; with a lower bound, lower_bound sigmoid(exp(A_log) z)."""

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",), ("HV",))
    outputs = ("*tokens HV K",)
    rows = True

    x: Float[Array, "*tokens R"] = array(batch=True)
    w: Float[Array, "R HV K"] = array()
    A_log: Float[Array, " HV"] = array()
    dt_bias: Float[Array, "HV K"] = array()
    lower_bound: float | None = option()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """M, R and N: rows of x, channels that are contracted, channels of all heads."""
        *tokens, r = self.x.shape
        return math.prod(tokens), r, self.w.shape[1] * self.w.shape[2]

    def bucket(self) -> Mapping[str, Any]:
        m, r, _ = self.sizes
        _, hv, k = self.w.shape
        sizes = {"M": power_of_two(m), "R": r, "HV": hv, "K": k}
        return {"dtype": self.x.dtype.name, **sizes, "bounded": self.lower_bound is not None}
