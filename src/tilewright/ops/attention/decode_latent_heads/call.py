"""Calls of `absorb_queries` and `expand_values`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option, power_of_two


class LatentHeadsCall(Call):
    """One token of each sequence, multiplied with a part of `kv_up` per head."""

    independent = (("B",), ("H",))
    outputs = ("B H M",)
    side: ClassVar[Literal["keys", "values"]]

    x: Float[Array, "B H J"] = array(batch=True)
    kv_up: Float[Array, "R H X"] = array()
    key_dim: int = option()

    @property
    def width(self) -> int:
        """M, the channels of a head of the output."""
        r, _, x = self.kv_up.shape
        return r + self.x.shape[2] - self.key_dim if self.side == "keys" else x - self.key_dim

    def bucket(self) -> Mapping[str, Any]:
        (b, h, _), (r, _, x) = self.x.shape, self.kv_up.shape
        sizes = {"H": h, "R": r, "X": x, "C": self.key_dim, "side": self.side}
        return {"dtype": self.x.dtype.name, "B": power_of_two(b), **sizes}


class AbsorbCall(LatentHeadsCall):
    """With the columns of the keys, the first `key_dim` of a head, transposed. Channels of x past `key_dim` follow."""

    side = "keys"
    arguments: ClassVar[Mapping[str, str]] = {"x": "q B H J"}


class ExpandCall(LatentHeadsCall):
    """With the columns of the values, which are behind those of the keys."""

    side = "values"
    arguments: ClassVar[Mapping[str, str]] = {"x": "o B H R"}
