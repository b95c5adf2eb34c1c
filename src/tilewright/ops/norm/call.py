"""A call of one of the norms."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class NormCall(Call):
    """y = xhat * (offset + w) [+ bias] [* act(gate)], with xhat = x / sqrt(mean(x^2) + eps) over the last axis.

    `centered` takes the mean out of x first: layer norm. `activation` is the gate's, None where there is no gate.
    """

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",),)
    outputs = ("*tokens D",)

    x: Float[Array, "*tokens D"] = array(batch=True)
    gate: Float[Array, "*tokens D"] | None = array(batch=True)
    w: Float[Array, " D"] = array()
    bias: Float[Array, " D"] | None = array()
    eps: float = option()
    offset: float = option()
    centered: bool = option()
    activation: str | None = option()

    def bucket(self) -> Mapping[str, Any]:
        *leading, d = self.x.shape
        return {
            "dtype": self.x.dtype.name,
            "N": power_of_two(math.prod(leading)),
            "H": leading[-1] if len(leading) > 1 else None,
            "D": d,
            "gate": None if self.gate is None else self.gate.dtype.name,
            "bias": self.bias is not None,
            "centered": self.centered,
        }
