"""The functions of torch: attention, the norms, a depthwise convolution, and cross entropy with all logits in memory."""

from typing import Any

DISTRIBUTIONS = ("torch", "triton")
OUTPUTS = {"flash_attention": ("out",), "linear_cross_entropy": ("loss",), "short_conv": ("y",)}


def _flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    return_logsumexp: bool = False,
) -> tuple[Any]:
    del return_logsumexp
    from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return (out.transpose(1, 2),)


def _linear_cross_entropy(
    x: Any,
    w: Any,
    labels: Any,
    *,
    weights: Any = None,
    soft_cap: float | None = None,
    return_logsumexp: bool = False,
) -> tuple[Any]:
    del return_logsumexp
    import torch  # pyright: ignore[reportMissingImports]

    # float32 logits, as training scripts have them: with bfloat16 logits the loss would be bfloat16 too.
    logits = torch.nn.functional.linear(x, w).float()
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    loss = loss.reshape(labels.shape)
    return (loss if weights is None else loss * weights,)


def _rms_norm(x: Any, w: Any, *, eps: float = 1e-6) -> tuple[Any]:
    from torch.nn.functional import rms_norm  # pyright: ignore[reportMissingImports]

    _same_dtype(x, w)
    return (rms_norm(x, w.shape, w, eps),)


def _layer_norm(x: Any, w: Any, bias: Any = None, *, eps: float = 1e-5) -> tuple[Any]:
    from torch.nn.functional import layer_norm  # pyright: ignore[reportMissingImports]

    _same_dtype(x, w)
    return (layer_norm(x, w.shape, w, bias, eps),)


def _short_conv(x: Any, w: Any, *, bias: Any = None, activation: str | None = None) -> tuple[Any]:
    from torch.nn.functional import conv1d, silu  # pyright: ignore[reportMissingImports]

    _same_dtype(x, w)
    channels_first = (x if x.ndim == 3 else x[None]).transpose(1, 2)  # [B, D, T]
    filters = w.t()[:, None, :]  # [D, 1, W]
    y = conv1d(channels_first, filters, bias, padding=w.shape[0] - 1, groups=x.shape[-1])
    y = y[..., : x.shape[-2]].transpose(1, 2).reshape(x.shape)
    return (silu(y) if activation == "silu" else y,)


def _same_dtype(x: Any, w: Any) -> None:
    if w.dtype != x.dtype:
        raise NotImplementedError(f"torch has no such function for x of {x.dtype} with w of {w.dtype}")


def _transposed(array: Any) -> Any:
    return array.t().contiguous()


OPS = {
    "flash_attention": _flash_attention,
    "linear_cross_entropy": _linear_cross_entropy,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "short_conv": _short_conv,
}
LAYOUTS = {
    "linear_cross_entropy": {
        "w": (_transposed, _transposed),  # An unembedding is [V, H] there.
        "labels": (lambda labels: labels.long(), None),
    }
}
