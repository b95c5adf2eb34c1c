"""A tensor library for peers that are made up: numpy, with the one gradient that the tests need, of RMS norm.

It stands where `on_torch.py` stands, and runs in the peer's process.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

EPS = 1e-6


class Quantized(NamedTuple):
    stored: np.ndarray
    scales: np.ndarray
    dtype: str
    layout: str


quantized = Quantized


def check() -> None:
    pass


def load(array: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def store(array: np.ndarray) -> tuple[np.ndarray, str]:
    """bfloat16, rounded to the nearest: what came as bits goes as bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "bfloat16"


def wait(_: Any) -> None:
    pass


def step(
    function: Callable[[dict[str, Any]], tuple[Any, ...]],
    arrays: dict[str, Any],
    differentiable: list[str],
    cotangents: list[Any] | None,
) -> Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]]:
    def run() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = function(arrays)
        if cotangents is None:
            return outputs, ()
        x, w, (dy,) = arrays["x"], arrays["w"], cotangents
        w = w.reshape(-1)
        inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)
        dn = dy * w
        dx = inverse * (dn - x * inverse**2 * (dn * x).mean(-1, keepdims=True))
        dw = (dy * x * inverse).reshape(-1, x.shape[-1]).sum(0)
        gradients = {"x": dx, "w": dw.reshape(arrays["w"].shape)}
        return outputs, tuple(gradients[name] for name in differentiable)

    return run


def memory(run: Callable[[], Any], held: list[Any]) -> dict[str, int]:
    run()
    arrays = [each for array in held for each in (array[:2] if isinstance(array, tuple) else (array,))]
    return {"temp_bytes": 0, "peak_bytes": sum(array.nbytes for array in arrays)}


def kernels(run: Callable[[], Any], calls: int) -> list[tuple[str, float, float]]:
    """Two kernels per call, 2 and 3 ms long with 1 ms between them."""
    starts = [0.01 * call for call in range(calls)]
    return [each for start in starts for each in (("bead", start, 0.002), ("wire", start + 0.003, 0.003))]


def toolchain() -> dict[str, str]:
    return {"abacus": "1.0"}


def device() -> str:
    return "an abacus"
