"""A call of `short_conv`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from tilewright.core.call import Call, array, option, power_of_two


class ShortConvCall(Call):
    """y and the final state of a depthwise causal convolution over time.

    `state` holds the W-1 inputs before the first token; None for zeros. `reach` says how many tokens each token may
    look back, at most W-1; None for W-1 everywhere. `heads` has one element per head where heads are normalised, and is
    None otherwise. Its size alone counts: how many heads there are, and so into how many parts channels can be cut.
    """

    independent = (("B",), ("D", "H"))
    outputs = ("B T D", "B W-1 D")
    arguments: ClassVar[Mapping[str, str]] = {
        "state": "initial_state B W-1 D",
        "reach": "segment_ids B T",
        "heads": "normalize heads",
    }
    exchanged = ("T",)

    x: Float[Array, "B T D"] = array(batch=True)
    w: Float[Array, "W D"] = array()
    bias: Float[Array, " D"] | None = array()
    state: Float[Array, "B W-1 D"] | None = array(batch=True)
    reach: Int[Array, "B T"] | None = array(batch=True, differentiable=False)
    heads: Int[Array, " H"] | None = array(differentiable=False)
    activation: str | None = option()

    @property
    def normalize(self) -> int | None:
        """The channels of a head; None where heads are not normalised."""
        return None if self.heads is None else self.x.shape[2] // self.heads.shape[0]

    @classmethod
    def independent_groups(cls, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
        """The channels of a single head cannot be cut. An axis of 1 in a group would be replicated instead."""
        return (("B",),) if sizes.get("H") == 1 else super().independent_groups(sizes)

    def bucket(self) -> Mapping[str, Any]:
        (b, t, d), width = self.x.shape, self.w.shape[0]
        return {
            "dtype": self.x.dtype.name,
            "B": power_of_two(b),
            "T": power_of_two(t),
            "D": d,
            "W": width,
            "bias": self.bias is not None,
            "segments": self.reach is not None,
            "activation": self.activation,
            "normalize": self.normalize,
        }
