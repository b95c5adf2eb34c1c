"""A call of `decode_latent_qkv`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from tilewright.core.call import array, option, power_of_two
from tilewright.core.stacked_call import StackedCall


class DecodeLatentQkvCall(StackedCall):
    """One token of each sequence, projected to queries and a latent, and the cache that the latent is written into.

    The outputs are the queries and the cache.
    """

    independent = (("B", "N"),)
    outputs = ("B H C", "L N S K")
    arguments: ClassVar[Mapping[str, str]] = {"latents": "latents L B S K"}
    stacks = ("latents",)

    x: Float[Array, "B D"] = array(batch=True)
    q_proj: Float[Array, "D H C"] = array()
    kv_down: Float[Array, "D K"] = array()
    norm: Float[Array, " R"] = array()
    latents: Float[Array, "L N S K"] = array()
    lengths: Int[Array, " B"] = array(batch=True, differentiable=False)
    layer: Int[Array, ""] | None = array(differentiable=False)
    eps: float = option()

    def bucket(self) -> Mapping[str, Any]:
        (b, d), (_, h, c), k = self.x.shape, self.q_proj.shape, self.kv_down.shape[1]
        return {"dtype": self.x.dtype.name, "B": power_of_two(b), "D": d, "H": h, "C": c, "K": k}
