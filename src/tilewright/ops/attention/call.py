"""A call of flash attention."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Bool, Float, Int

from tilewright.core.call import Call, array, option, power_of_two
from tilewright.masks.algebra import Mask, contains
from tilewright.masks.library import SlidingWindow


class AttentionCall(Call):
    """out = softmax(cap(scale q k^T) + bias) v over the pairs that `mask`, the segments and `keep` all allow.

    `bias` and `keep` have 1 on each axis that they are broadcast over: B or 1, H or 1, and for `bias` T or 1.
    """

    independent = (("B",), ("H", "KV"))
    outputs = ("B T H Dv", "B T H")
    arguments: ClassVar[Mapping[str, str]] = {
        "q_segments": "segment_ids B T",
        "kv_segments": "segment_ids B S",
        "keep": "mask B H T S",
    }
    exchanged = ("T", "S")

    q: Float[Array, "B T H D"] = array(batch=True)
    k: Float[Array, "B S KV D"] = array(batch=True)
    v: Float[Array, "B S KV Dv"] = array(batch=True)
    bias: Float[Array, "#B #H #T S"] | None = array(batch=True)
    sinks: Float[Array, " H"] | None = array()
    q_segments: Int[Array, "B T"] | None = array(batch=True, differentiable=False)
    kv_segments: Int[Array, "B S"] | None = array(batch=True, differentiable=False)
    keep: Bool[Array, "#B #H T S"] | None = array(batch=True, differentiable=False)
    mask: Mask | None = option()
    scale: float = option()
    soft_cap: float | None = option()
    q_offset: int = option()

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[2] // self.k.shape[2]

    def bucket(self) -> Mapping[str, Any]:
        (b, t, h, d), (_, s, kv, dv) = self.q.shape, self.v.shape
        window = None if self.mask is None else contains(self.mask, SlidingWindow)
        sides = [side for side in (window.left, window.right) if side] if isinstance(window, SlidingWindow) else []
        return {
            "dtype": self.q.dtype.name,
            "B": power_of_two(b),
            "T": power_of_two(t),
            "S": power_of_two(s),
            "H": h,
            "KV": kv,
            "D": d,
            "Dv": dv,
            "mask": None if self.mask is None else "+".join(sorted({type(one).__name__ for one in _leaves(self.mask)})),
            "window": power_of_two(sum(sides) + 1) if window is not None else None,
            "soft_cap": self.soft_cap is not None,
            "bias": self.bias is not None,
            "sinks": self.sinks is not None,
            "segments": self.q_segments is not None,
            "keep": self.keep is not None,
        }


def _leaves(mask: Mask) -> Iterator[Mask]:
    """The masks that a composition is made of."""
    children = mask.children()
    if not children:
        yield mask
    for child in children:
        yield from _leaves(child)
