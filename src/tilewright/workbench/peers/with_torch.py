"""The functions of torch: attention, products, the norms, a depthwise convolution, and cross entropy with all logits.

Products: `torch.matmul` (cuBLAS), `_scaled_mm` for float8 operands with a scale per row and column, or per 128 channels and
per 128 x 128 weights, and `_grouped_mm`. Their scales and offsets are brought to torch's layouts outside of what is timed.
"""

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


def _activated(z: Any, activation: str | None) -> Any:
    from torch.nn import functional  # pyright: ignore[reportMissingImports]

    if activation == "swiglu":
        gate, value = z.chunk(2, dim=-1)
        return functional.silu(gate) * value
    if activation == "gelu":
        return functional.gelu(z, approximate="tanh")
    return z if activation is None else getattr(functional, activation)(z)


def _matmul(x: Any, w: Any, *, bias: Any = None, activation: str | None = None, residual: Any = None) -> tuple[Any]:
    if _is_quantized(x) or _is_quantized(w):
        z = _scaled_mm(x, w)
    else:
        import torch  # pyright: ignore[reportMissingImports]

        _same_dtype(x, w)
        z = torch.matmul(x, w)
    z = _activated(z if bias is None else z + bias, activation)
    return (z if residual is None else z + residual,)


def _scaled_mm(x: Any, w: Any) -> Any:
    """A float8 product; without the accumulation that is fast and has fewer bits."""
    if not (_is_quantized(x) and _is_quantized(w)):
        raise NotImplementedError("torch has no product of float activations with quantised weights")
    for operand in (x, w):
        if not operand.dtype.startswith("float8"):
            raise NotImplementedError(f"torch._scaled_mm takes float8, and this is {operand.dtype}")
    import torch  # pyright: ignore[reportMissingImports]

    return torch._scaled_mm(
        x.stored, w.stored, scale_a=x.scales, scale_b=w.scales, out_dtype=torch.bfloat16, use_fast_accum=False
    )


def _grouped_matmul(x: Any, w: Any, group_sizes: Any, *, activation: str | None = None) -> tuple[Any]:
    """`group_sizes` are the ends of the groups here: see `LAYOUTS`."""
    if _is_quantized(x) or _is_quantized(w):
        raise NotImplementedError("torch has no grouped product with a scale per block on Hopper")
    if str(x.dtype) != "torch.bfloat16":
        raise NotImplementedError(f"torch._grouped_mm takes bfloat16, and x is {x.dtype}")
    if x.shape[1] % 8 or w.shape[2] % 8:
        raise NotImplementedError(f"torch._grouped_mm takes rows of 16 bytes, and w is {list(w.shape)}")
    if group_sizes.rows != x.shape[0]:
        raise NotImplementedError("torch._grouped_mm leaves rows past the last group undefined")
    import torch  # pyright: ignore[reportMissingImports]

    return (_activated(torch._grouped_mm(x, w, offs=group_sizes), activation),)


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


def _is_quantized(x: Any) -> bool:
    return hasattr(x, "scales")


def _activations_of_scaled_mm(x: Any) -> Any:
    """Quantised rows [M, K]: scales [M, K / 128] by columns, which is how `_scaled_mm` wants them; [M, 1] as they are."""
    if not _is_quantized(x):
        return x
    stored = x.stored if x.layout == "row_major" else x.stored.t().contiguous()
    scales = x.scales if x.scales.shape[1] == 1 else x.scales.t().contiguous().t()
    return x._replace(stored=stored, scales=scales, layout="row_major")


def _weights_of_scaled_mm(w: Any) -> Any:
    """Quantised weights [K, N] by columns. Scales [K / 128, N / 128] are by columns, too, each padded to 4 of them."""
    if not _is_quantized(w):
        return w
    by_column = w.stored if w.layout == "column_major" else w.stored.t().contiguous()  # [N, K]
    scales = w.scales
    if 1 not in scales.shape:
        rows, columns = scales.shape
        padded = scales.new_zeros((columns, -(-rows // 4) * 4))
        padded[:, :rows] = scales.t()
        scales = padded[:, :rows].t()
    return w._replace(stored=by_column.t(), scales=scales, layout="row_major")


def _ends(group_sizes: Any) -> Any:
    """The end of each group, int32; its attribute `rows` is the end of the last one, known on the host."""
    ends = group_sizes.cumsum(0).to(group_sizes.dtype)
    ends.rows = int(ends[-1])
    return ends


OPS = {
    "flash_attention": _flash_attention,
    "matmul": _matmul,
    "grouped_matmul": _grouped_matmul,
    "linear_cross_entropy": _linear_cross_entropy,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "short_conv": _short_conv,
}
LAYOUTS = {
    "matmul": {"x": (_activations_of_scaled_mm, None), "w": (_weights_of_scaled_mm, None)},
    "grouped_matmul": {"group_sizes": (_ends, None)},
    "linear_cross_entropy": {
        "w": (_transposed, _transposed),  # An unembedding is [V, H] there.
        "labels": (lambda labels: labels.long(), None),
    },
}
