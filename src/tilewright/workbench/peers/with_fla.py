"""flash-linear-attention's Triton kernels: chunked delta rules, short convolution and norms.

Layouts, scale and states of the delta rules are as ours. It is not run with segments.
"""

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


def _short_conv(x: Any, w: Any, bias: Any = None, *, activation: str | None = None) -> tuple[Any]:
    from fla.modules.causal_conv1d import causal_conv1d  # pyright: ignore[reportMissingImports]

    return (causal_conv1d(x, w, bias, activation=activation)[0],)


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    from fla.modules.norm.layernorm import rms_norm  # pyright: ignore[reportMissingImports]

    return (rms_norm(x, w, None, eps=eps),)


def _gated_rms_norm(x: Any, gate: Any, w: Any, *, activation: str = "silu", eps: float = 1e-6) -> tuple[Any]:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated  # pyright: ignore[reportMissingImports]

    return (rms_norm_gated(x, gate, w, None, activation=activation, eps=eps),)


def _transposed(w: Any) -> Any:
    return w.t().contiguous()


OPS = {
    "delta_rule": _delta_rule,
    **{op: _gated(op) for op in ("gated_delta_rule", "kda")},
    "short_conv": _short_conv,
    "rms_norm": _rms_norm,
    "gated_rms_norm": _gated_rms_norm,
}
OUTPUTS = {"short_conv": ("y",)}
LAYOUTS = {"short_conv": {"w": (_transposed, _transposed)}}  # Filters are [D, W] there.
