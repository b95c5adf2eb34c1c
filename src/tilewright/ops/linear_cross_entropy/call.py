"""A call of linear cross entropy."""

from collections.abc import Mapping
from typing import Any

from tilewright.core.axes import RowLabels, Rows, Unembedding
from tilewright.core.call import Call, array, option, power_of_two


class LinearCrossEntropyCall(Call):
    """nll_n = logsumexp_n - a_n[label_n] and logsumexp_n = log sum_v exp(a_nv) of each row, for the logits a = x w.

    Labels are in [0, V). Under a `soft_cap` the logits are a = soft_cap * tanh(x w / soft_cap).
    """

    independent = (("N",),)
    outputs = ("N", "N")

    x: Rows = array(batch=True)
    w: Unembedding = array()
    labels: RowLabels = array(batch=True, differentiable=False)
    soft_cap: float | None = option()

    def bucket(self) -> Mapping[str, Any]:
        (n, h), v = self.x.shape, self.w.shape[1]
        return {
            "dtype": self.x.dtype.name,
            "N": power_of_two(n),
            "H": h,
            "V": v,
            "soft_cap": self.soft_cap is not None,
        }
