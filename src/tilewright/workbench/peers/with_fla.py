"""flash-linear-attention's chunked Triton kernels. Layouts, scale and states are as ours; it is not run with segments."""

import importlib
from collections.abc import Callable
from typing import Any

DISTRIBUTIONS = ("fla-core", "flash-linear-attention", "torch", "triton")


def _delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    normalize_qk: bool = False,
) -> tuple[Any, Any]:
    from fla.ops.delta_rule import chunk_delta_rule  # pyright: ignore[reportMissingImports]

    if q.shape[2] != v.shape[2]:
        # It would read past the last head of q.
        raise NotImplementedError(
            f"chunk_delta_rule has no grouped value heads: q has {q.shape[2]} heads and v has {v.shape[2]}"
        )
    return chunk_delta_rule(
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=normalize_qk,
    )


def _gated(op: str) -> Callable[..., tuple[Any, Any]]:
    """`fla.ops.OP.chunk_OP`, for the two ops that have a gate."""

    def run(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        *,
        scale: float | None = None,
        initial_state: Any = None,
        normalize_qk: bool = False,
    ) -> tuple[Any, Any]:
        return getattr(importlib.import_module(f"fla.ops.{op}"), f"chunk_{op}")(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=initial_state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=normalize_qk,
        )

    return run


OPS = {"delta_rule": _delta_rule, **{op: _gated(op) for op in ("gated_delta_rule", "kda")}}
