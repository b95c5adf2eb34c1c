"""A peer that forgets the weights."""

from typing import Any

import numpy as np

DISTRIBUTIONS = ("numpy",)


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    del w
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps),)


OPS = {"rms_norm": _rms_norm}
