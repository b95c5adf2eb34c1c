"""A call of `kda_gate`."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class KdaGateCall(Call):
    """g = -exp(A_log) softplus(z) for z = x + dt_bias; with a lower bound, lower_bound sigmoid(exp(A_log) z)."""

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",), ("HV",), ("K",))
    outputs = ("*tokens HV K",)
    rows = True

    x: Float[Array, "*tokens HV K"] = array(batch=True)
    A_log: Float[Array, " HV"] = array()
    dt_bias: Float[Array, "HV K"] = array()
    lower_bound: float | None = option()

    @property
    def sizes(self) -> tuple[Any, Any]:
        """N and D: tokens, and channels of all heads."""
        *tokens, hv, k = self.x.shape
        return math.prod(tokens), hv * k

    def bucket(self) -> Mapping[str, Any]:
        *_, hv, k = self.x.shape
        sizes = {"N": power_of_two(self.sizes[0]), "HV": hv, "K": k}
        return {"dtype": self.x.dtype.name, **sizes, "bounded": self.lower_bound is not None}
