"""A call of `gated_rms_norm_of_product`."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class NormOfProductCall(Call):
    """y = ohat * norm * act(x w), with ohat = o / sqrt(mean(o^2) + eps) over each head."""

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",), ("H",))
    outputs = ("*tokens H D",)
    rows = True

    o: Float[Array, "*tokens H D"] = array(batch=True)
    x: Float[Array, "*tokens K"] = array(batch=True)
    w: Float[Array, "K H D"] = array()
    norm: Float[Array, " D"] = array()
    activation: str = option()
    eps: float = option()

    @property
    def sizes(self) -> tuple[Any, Any, Any]:
        """M, K and N: rows of x, channels that are contracted, channels of all heads."""
        *tokens, k = self.x.shape
        return math.prod(tokens), k, self.w.shape[1] * self.w.shape[2]

    def bucket(self) -> Mapping[str, Any]:
        m, k, _ = self.sizes
        _, h, d = self.w.shape
        return {"dtype": self.x.dtype.name, "M": power_of_two(m), "K": k, "H": h, "D": d}
