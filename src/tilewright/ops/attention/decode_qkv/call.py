"""A call of `decode_qkv`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from tilewright.core.call import array, option, power_of_two
from tilewright.core.stacked_call import StackedCall
from tilewright.ops.rope.api import Scaling


class DecodeQkvCall(StackedCall):
    """One token of each sequence, projected to queries, keys and values, and the caches that these are written into.

    The outputs are the queries and both caches.
    """

    independent = (("B", "N"), ("H", "KV"))
    outputs = ("B H C", "L N S KV C", "L N S KV C")
    stacks = ("keys", "values")
    arguments: ClassVar[Mapping[str, str]] = {"keys": "keys L B S KV C", "values": "values L B S KV C"}

    x: Float[Array, "B D"] = array(batch=True)
    q_proj: Float[Array, "D H C"] = array()
    k_proj: Float[Array, "D KV C"] = array()
    v_proj: Float[Array, "D KV C"] = array()
    keys: Float[Array, "L N S KV C"] = array()
    values: Float[Array, "L N S KV C"] = array()
    lengths: Int[Array, " B"] = array(batch=True, differentiable=False)
    q_norm: Float[Array, " C"] | None = array()
    k_norm: Float[Array, " C"] | None = array()
    layer: Int[Array, ""] | None = array(differentiable=False)
    eps: float = option()
    norm_offset: float = option()
    theta: float | None = option()
    scaling: Scaling | None = option()
    rotary_dim: int = option()

    def bucket(self) -> Mapping[str, Any]:
        (b, d), (_, h, c), kv = self.x.shape, self.q_proj.shape, self.k_proj.shape[1]
        return {"dtype": self.x.dtype.name, "B": power_of_two(b), "D": d, "H": h, "KV": kv, "C": c}
