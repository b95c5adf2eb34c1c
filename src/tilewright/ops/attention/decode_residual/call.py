"""A call of `decode_residual`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class DecodeResidualCall(Call):
    """y = residual + x w, and the RMS norm of y, for one token of each sequence. Both are outputs."""

    independent = (("B",),)
    outputs = ("B D", "B D")

    x: Float[Array, "B F"] = array(batch=True)
    w: Float[Array, "F D"] = array()
    residual: Float[Array, "B D"] = array(batch=True)
    norm: Float[Array, " D"] = array()
    """Weights that are read next. They do not change the results."""
    eps: float = option()
    norm_offset: float = option()

    def bucket(self) -> Mapping[str, Any]:
        (b, f), d = self.x.shape, self.w.shape[1]
        return {"dtype": self.x.dtype.name, "B": power_of_two(b), "F": f, "D": d}
