"""A call of `double`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option


class DoubleCall(Call):
    """2 x. `fault` is the fault that a kernel has, or None."""

    x: Float[Array, "N D"] = array(batch=True)
    fault: str | None = option()

    def bucket(self) -> Mapping[str, Any]:
        return {"N": self.x.shape[0], "D": self.x.shape[1]}
