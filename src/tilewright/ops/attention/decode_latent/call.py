"""A call of `decode_latent_attention`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, Int

from tilewright.core.call import Call, array, option, power_of_two
from tilewright.ops.attention.decode.call import DecodeCall


class DecodeLatentCall(Call):
    """Attention of one token of each sequence over S latents, of which `lengths` are in use.

    A latent is the key of all heads, and its first `value_dim` channels are the value of all heads.
    """

    independent = (("B",), ("H",))
    outputs = ("B H R",)
    soft_cap: ClassVar[None] = None
    """Logits have none."""

    q: Float[Array, "B H D"] = array(batch=True)
    latents: Float[Array, "B S D"] = array(batch=True)
    lengths: Int[Array, " B"] = array(batch=True, differentiable=False)
    value_dim: int = option()
    scale: float = option()

    def bucket(self) -> Mapping[str, Any]:
        (b, h, d), s = self.q.shape, self.latents.shape[1]
        return {
            "dtype": self.q.dtype.name,
            "B": power_of_two(b),
            "S": power_of_two(s),
            "H": h,
            "D": d,
            "R": self.value_dim,
        }

    def with_values(self) -> DecodeCall:
        """The same as a call of `decode_attention`, whose values are an array of their own."""
        keys: jax.Array = self.latents[:, :, None]
        return DecodeCall(
            q=self.q[:, None],
            k=keys,
            v=keys[..., : self.value_dim],
            page_table=None,
            lengths=self.lengths,
            sinks=None,
            window=None,
            scale=self.scale,
            soft_cap=None,
        )
