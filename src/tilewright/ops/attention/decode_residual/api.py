"""`decode_residual`: a layer's last product added to the residual stream of decoding, and the norm that follows."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, check_eps, check_number, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.attention.decode_residual.call import DecodeResidualCall

OP = register(
    Op(
        name="decode_residual",
        family="tilewright.ops.attention.decode_residual",
        implementations=("pallas_gpu", "reference"),
    )
)


def decode_residual(
    x: Float[Array, "B F"],
    w: Float[Array, "F D"],
    residual: Float[Array, "B D"],
    norm: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "B D"]]:
    r"""The residual stream after a layer's last product, and its RMS norm, which the next layer begins with.

        y = residual + x w;  normed = y / sqrt(mean(y^2) + eps) (norm + norm_offset)

    It takes the place of `matmul(x, w, residual=residual)` and `rms_norm` for one token per sequence, where the number of
    launches counts: the output projections of attention and of an MLP while decoding.

    Args:
      x: [B, F], float32 or bfloat16.
      w: [F, D], of x's dtype.
      residual: [B, D], of x's dtype.
      norm: [D], the weights of the RMS norm, as in `rms_norm`.
      eps: added to the mean of the squares; a number.
      norm_offset: added to the norm's weights; a number.
      implementation: "pallas_gpu" (Hopper, bfloat16) or "reference", plain JAX; None takes the best that this device can
        run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      y and normed, both [B, D] of x's dtype. normed is of y before y is rounded. Gradients flow to every array.
    """
    call = _call(x, w, residual, norm, eps=eps, norm_offset=norm_offset)
    return OP.run(call, implementation=implementation, config=config)


def has_kernel(x: Any, w: Any, residual: Any, norm: Any, **options: Any) -> bool:
    """Whether a call of `decode_residual` with these arguments takes a kernel on this device."""
    return OP.takes_kernel(_call(x, w, residual, norm, **options))


def _call(x: Any, w: Any, residual: Any, norm: Any, *, eps: Any, norm_offset: Any) -> DecodeResidualCall:
    for name, array in {"x": x, "w": w, "residual": residual, "norm": norm}.items():
        if array is None:
            raise ValueError(f"{name} is None; decode_residual takes x [B, F], w [F, D], residual [B, D] and norm [D]")
    x, w, residual, norm = map(jnp.asarray, (x, w, residual, norm))
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: pass x.astype(jnp.bfloat16)")
    if x.ndim != 2:
        remedy = "x[:, 0]" if x.ndim == 3 else "jnp.atleast_2d(x)"
        raise ValueError(f"x is {shown(x)}; it must be [B, F], one token per sequence: pass {remedy}")
    if w.ndim != 2 or w.shape[0] != x.shape[1]:
        raise ValueError(
            f"w is {shown(w)} and x has F={x.shape[1]} channels; it must be [F, D]: pass w.T if it is [D, F]"
        )
    wanted = {"residual": (residual, (x.shape[0], w.shape[1]), "[B, D]"), "norm": (norm, (w.shape[1],), "[D]")}
    for name, (array, shape, letters) in wanted.items():
        if array.shape != shape or array.dtype.name not in FLOATING:
            raise ValueError(f"{name} is {shown(array)}; it must be floating {letters} = {list(shape)}")
    for name, array in (("w", w), ("residual", residual)):
        if array.dtype != x.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and x {x.dtype.name}; they must be equal: pass {name}.astype(x.dtype)"
            )
    check_eps(eps)
    check_number("norm_offset", norm_offset)
    return DecodeResidualCall(
        x=x,
        w=w,
        residual=residual,
        norm=norm,
        eps=float(eps),
        norm_offset=float(norm_offset),
    )
