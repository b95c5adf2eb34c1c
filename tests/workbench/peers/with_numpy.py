"""A peer that does RMS norm right, and a product with int8 weights. It holds its weights in a column, and says so."""

from typing import Any

import numpy as np

DISTRIBUTIONS = ("numpy", "not-installed-anywhere")


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    assert w.shape == (x.shape[-1], 1)
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w.reshape(-1),)


def _matmul(x: Any, w: Any) -> tuple[Any]:
    assert (w.dtype, w.layout, w.stored.dtype.name) == ("int8", "row_major", "int8")
    return (x @ (w.stored * w.scales),)


OPS = {"rms_norm": _rms_norm, "matmul": _matmul}
LAYOUTS = {"rms_norm": {"w": (lambda w: w.reshape(-1, 1), lambda gradient: gradient.reshape(-1))}}
