"""A peer that raises, one that dies, and one that does not answer: by op."""

import os
import sys
import time
from typing import Any

DISTRIBUTIONS = ("numpy",)


def _raises(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    raise RuntimeError("this compiler makes wrong gradients; take a newer one")


def _dies(x: Any, w: Any, bias: Any = None) -> tuple[Any]:
    print("illegal memory access", file=sys.stderr, flush=True)
    os._exit(7)


def _sleeps(x: Any, gate: Any, w: Any, *, activation: str = "silu") -> tuple[Any]:
    time.sleep(60)
    raise AssertionError


OPS = {"rms_norm": _raises, "layer_norm": _dies, "gated_rms_norm": _sleeps}
