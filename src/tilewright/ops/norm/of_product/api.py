"""`gated_rms_norm_of_product`: the norm and gate behind a linear attention, with the product that the gate is."""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import check_eps, check_operands, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.norm.api import check_activation
from tilewright.ops.norm.of_product.call import NormOfProductCall

OP = register(
    Op(
        name="gated_rms_norm_of_product",
        family="tilewright.ops.norm.of_product",
        implementations=("pallas_gpu", "reference"),
    )
)


def gated_rms_norm_of_product(
    o: Float[Array, "*tokens H D"],
    x: Float[Array, "*tokens K"],
    w: Float[Array, "K H D"],
    norm: Float[Array, " D"],
    *,
    activation: Literal["silu", "sigmoid"] = "silu",
    eps: float = 1e-6,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens H D"]:
    r"""RMS norm of each head, times an activated gate that is a product: `gated_rms_norm(o, x w, norm)`.

        y = o / sqrt(mean(o^2) + eps) * norm * act(x w)

    It is for inference on a Hopper GPU with a gate of low rank (a small K), where one kernel computes both, and the gate is
    neither rounded nor written to memory. Elsewhere, and for training, use `jnp.dot` and `gated_rms_norm`: plain JAX
    multiplies float32 here, and the gradient computes the product again. `KimiDeltaAttention` chooses between them.

    Args:
      o: [..., H, D], float32 or bfloat16: the outputs of H heads.
      x: [..., K], of o's dtype.
      w: [K, H, D], of o's dtype.
      norm: [D], of o's dtype or float32: the weights of the norm.
      activation: "silu" or "sigmoid" (Kimi Linear).
      eps: a Python number, added to the mean of the squares.
      implementation: "pallas_gpu" (Hopper, bfloat16, D = 128) or "reference", plain JAX; None takes the best that this
        device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      y [..., H, D], of o's dtype. Gradients flow to every array.
    """
    call = _call(o, x, w, norm, activation=activation, eps=eps)
    return OP.run(call, implementation=implementation, config=config)


def has_kernel(o: Any, x: Any, w: Any, norm: Any, *, activation: str = "silu", eps: float = 1e-6) -> bool:
    """Whether a call of `gated_rms_norm_of_product` with these arguments takes a kernel on this device."""
    return OP.takes_kernel(_call(o, x, w, norm, activation=activation, eps=eps))


def _call(o: Any, x: Any, w: Any, norm: Any, *, activation: str, eps: float) -> NormOfProductCall:
    o, x, w, norm = map(jnp.asarray, (o, x, w, norm))
    check_operands(x, w)
    shape = (*x.shape[:-1], *w.shape[1:])
    if o.shape != shape or o.dtype != x.dtype:
        raise ValueError(
            f"o is {shown(o)}, x is {shown(x)} and w is {shown(w)}; o must have the shape and dtype of the gate x w, "
            f"{x.dtype.name}{list(shape)}"
        )
    if norm.shape != o.shape[-1:] or norm.dtype not in (o.dtype, jnp.float32):
        raise ValueError(f"norm is {shown(norm)}; it must be [D] = {list(o.shape[-1:])}, of o's dtype or float32")
    check_activation("gated_rms_norm_of_product", activation)
    check_eps(eps)
    return NormOfProductCall(o=o, x=x, w=w, norm=norm, activation=activation, eps=float(eps))
