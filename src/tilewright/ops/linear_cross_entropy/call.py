"""A call of linear cross entropy."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tilewright.core.axes import Hidden, Labels, Unembedding
from tilewright.core.call import Call, array, option, power_of_two
from tilewright.ops.linear_cross_entropy.vocabulary import VocabularyShard


class LinearCrossEntropyCall(Call):
    """nll_n = logsumexp_n - a_n[label_n] and logsumexp_n = log sum_v exp(a_nv) of each row, for the logits a = x w.

    Labels are in [0, V). Under a `soft_cap` the logits are a = soft_cap * tanh(x w / soft_cap).
    """

    vmapped: ClassVar[Literal["merged", "stacked"]] = "stacked"
    independent = (("*tokens",),)
    reduced = ("V",)
    outputs = ("*tokens", "*tokens")
    rows = True

    x: Hidden = array(batch=True)
    w: Unembedding = array()
    labels: Labels = array(batch=True, differentiable=False)
    soft_cap: float | None = option()
    whole_v: int | None = option()
    """For one device's part of a call that the compiler cuts along V: the columns of the whole vocabulary. Otherwise
    None."""

    def bucket(self) -> Mapping[str, Any]:
        (*tokens, h), v = self.x.shape, self.w.shape[1]
        return {
            "dtype": self.x.dtype.name,
            "N": power_of_two(math.prod(tokens)),
            "H": h,
            "V": v,
            "soft_cap": self.soft_cap is not None,
        }

    def on_shard(self, axes: tuple[str, ...]) -> VocabularyShard:
        return VocabularyShard.of(self, axes)
