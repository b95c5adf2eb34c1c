"""A peer whose answer has another shape."""

from typing import Any

DISTRIBUTIONS = ("numpy",)


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    del w, eps
    return (x[..., None],)


OPS = {"rms_norm": _rms_norm}
