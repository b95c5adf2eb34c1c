"""tokamax's `ragged_dot` in Triton."""

import functools
import importlib.util
from typing import Any

from tilewright.workbench.peers.with_cudnn import unavailable as _without_gpu
from tilewright.workbench.peers.with_jax_dot import grouped_by

DISTRIBUTIONS = ("tokamax", "jax", "jaxlib")


def unavailable() -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed; pip install tokamax"
    return _without_gpu()


def ragged_dot(x: Any, w: Any, group_sizes: Any, *, implementation: str) -> Any:
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax.ragged_dot(x, w, group_sizes, preferred_element_type=x.dtype, implementation=implementation)


OPS = {"grouped_matmul": grouped_by(functools.partial(ragged_dot, implementation="triton"))}
