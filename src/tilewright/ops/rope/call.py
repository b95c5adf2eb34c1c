"""A call of `apply_rope`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class RopeCall(Call):
    """The first 2 R features of each head rotated in pairs, the others unchanged. Tables may have a batch of 1."""

    independent = (("B",), ("T",), ("H",))
    outputs = ("B T H D",)
    arguments: ClassVar[Mapping[str, str]] = {"cos": "tables[0] B T R", "sin": "tables[1] B T R"}

    x: Float[Array, "B T H D"] = array(batch=True)
    cos: Float[Array, "#B T R"] = array(batch=True, differentiable=False)
    sin: Float[Array, "#B T R"] = array(batch=True, differentiable=False)
    layout: str = option()
    """Which features make a pair: "half" or "interleaved"."""

    def bucket(self) -> Mapping[str, Any]:
        b, t, h, d = self.x.shape
        sizes = {"B": power_of_two(b), "T": power_of_two(t), "H": h, "D": d, "R": self.cos.shape[2]}
        return {"dtype": self.x.dtype.name, **sizes, "layout": self.layout}
