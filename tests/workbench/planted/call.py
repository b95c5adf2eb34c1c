"""A call of `twice`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from tilewright.core.call import Call, array


class TwiceCall(Call):
    """2 x."""

    x: Float[Array, "N D"] = array(batch=True)

    def bucket(self) -> Mapping[str, Any]:
        return {"dtype": self.x.dtype.name, "N": self.x.shape[0], "D": self.x.shape[1]}
