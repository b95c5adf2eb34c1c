"""Liger's fused linear cross entropy.

It computes the gradients in the forward pass, for a loss whose cotangent is a single number. So it is run, and judged, with
the sum of the losses and a cotangent of 1, as in training; there its backward pass has nothing to do.
"""

from typing import Any

DISTRIBUTIONS = ("liger-kernel", "torch", "triton")
OUTPUTS = {"linear_cross_entropy": ("loss",)}
INSTEAD = {"linear_cross_entropy": {"reduction": "sum", "return_logsumexp": False}}


def _linear_cross_entropy(
    x: Any,
    w: Any,
    labels: Any,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "none",
    return_logsumexp: bool = False,
) -> tuple[Any]:
    del return_logsumexp
    from liger_kernel.transformers.functional import (  # pyright: ignore[reportMissingImports]
        liger_fused_linear_cross_entropy,
    )

    rows = x.reshape(-1, x.shape[-1])
    loss = liger_fused_linear_cross_entropy(
        rows, w, labels.reshape(-1), lse_square_scale=z_loss, softcap=soft_cap, reduction=reduction
    )
    return (loss,)


def _transposed(array: Any) -> Any:
    return array.t().contiguous()


OPS = {"linear_cross_entropy": _linear_cross_entropy}
LAYOUTS = {
    "linear_cross_entropy": {
        "w": (_transposed, _transposed),  # [V, H] there.
        "labels": (lambda labels: labels.long(), None),
    }
}
