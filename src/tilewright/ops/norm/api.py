"""`rms_norm`, `layer_norm` and `gated_rms_norm`: norms over the last axis, each with its weights."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, check_eps, check_number, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.norm.call import NormCall

_ACTIVATIONS = ("silu", "sigmoid")
_IMPLEMENTATIONS = ("pallas_tpu", "xla", "reference")

RMS_NORM = register(Op(name="rms_norm", family="tilewright.ops.norm", implementations=_IMPLEMENTATIONS))
LAYER_NORM = register(Op(name="layer_norm", family="tilewright.ops.norm", implementations=_IMPLEMENTATIONS))
GATED_RMS_NORM = register(
    Op(
        name="gated_rms_norm",
        family="tilewright.ops.norm",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def rms_norm(
    x: Float[Array, "*tokens D"],
    w: Float[Array, " D"],
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens D"]:
    r"""RMS norm over the last axis.

        y = x / sqrt(mean(x^2) + eps) * (offset + w)

    Args:
      x: [..., D], float32 or bfloat16. All arithmetic is in float32.
      w: [D], of x's dtype or float32. Its gradient has its dtype.
      eps: a Python number, added to the mean of the squares.
      offset: added to w: 1.0 for models whose weights are kept around zero (Qwen3-Next, Gemma).
      implementation: "pallas_tpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [..., D], of x's dtype.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    _validate(x, {"w": w}, eps, offset)
    return _run(RMS_NORM, implementation, config, x=x, w=w, eps=eps, offset=offset)


def layer_norm(
    x: Float[Array, "*tokens D"],
    w: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens D"]:
    r"""Layer norm over the last axis.

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * w + bias

    Args:
      x: [..., D], float32 or bfloat16. All arithmetic is in float32.
      w: [D], of x's dtype or float32. Its gradient has its dtype.
      bias: [D], of x's dtype or float32, or None.
      eps: a Python number, added to the variance.
      implementation: "pallas_tpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [..., D], of x's dtype.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    bias = None if bias is None else jnp.asarray(bias)
    _validate(x, {"w": w, "bias": bias}, eps)
    return _run(LAYER_NORM, implementation, config, x=x, w=w, bias=bias, eps=eps, centered=True)


def gated_rms_norm(
    x: Float[Array, "*tokens D"],
    gate: Float[Array, "*tokens D"],
    w: Float[Array, " D"],
    *,
    activation: Literal["silu", "sigmoid"] = "silu",
    eps: float = 1e-6,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens D"]:
    r"""RMS norm over the last axis, times an activated gate: what comes after a linear attention head.

        y = x / sqrt(mean(x^2) + eps) * w * act(gate)

    Args:
      x: [..., D], float32 or bfloat16; D is the width of a head. All arithmetic is in float32.
      gate: of x's shape, and of its dtype or float32. It is not normalised.
      w: [D], of x's dtype or float32. Its gradient has its dtype.
      activation: "silu" (Qwen3-Next) or "sigmoid" (Kimi Linear).
      eps: a Python number, added to the mean of the squares.
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [..., D], of x's dtype.
    """
    x, gate, w = jnp.asarray(x), jnp.asarray(gate), jnp.asarray(w)
    _validate(x, {"w": w}, eps)
    if gate.shape != x.shape:
        raise ValueError(
            f"gate is {shown(gate)} and x is {shown(x)}; gate must have the shape of x: "
            f"use jnp.broadcast_to(gate, x.shape), or gate.reshape(x.shape) where it has the heads in one axis"
        )
    _validate_dtype("gate", gate, x)
    check_activation("gated_rms_norm", activation)
    return _run(GATED_RMS_NORM, implementation, config, x=x, gate=gate, w=w, eps=eps, activation=activation)


def check_activation(op: str, activation: Any) -> None:
    """Raises unless it is an activation of gates."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not an activation of {op}; use 'silu' or 'sigmoid'")


def _run(
    op: Op,
    implementation: ImplementationName | None,
    config: Config | tuple[Config, ...] | None,
    *,
    x: jax.Array,
    w: jax.Array,
    eps: float,
    gate: jax.Array | None = None,
    bias: jax.Array | None = None,
    offset: float = 0.0,
    centered: bool = False,
    activation: str | None = None,
) -> jax.Array:
    if x.size == 0:
        return x
    call = NormCall(
        x=x, gate=gate, w=w, bias=bias, eps=float(eps), offset=float(offset), centered=centered, activation=activation
    )
    return op.run(call, implementation=implementation, config=config)


def _validate(x: jax.Array, weights: dict[str, jax.Array | None], eps: Any, offset: Any = 0.0) -> None:
    if x.ndim < 1 or x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be [..., D] of float32 or bfloat16: x.astype(jnp.bfloat16)")
    d = x.shape[-1]
    if d < 1:
        raise ValueError(f"x is {shown(x)}; D must be at least 1: pass an x with columns")
    for name, array in weights.items():
        if array is None:
            continue
        if array.shape != (d,):
            remedy = f"jnp.ones({d}) for no scale" if name == "w" else "None for no bias"
            raise ValueError(
                f"{name} is {shown(array)} and x is {shown(x)}; {name} must be [D], one number for each column of x "
                f"(D={d}): use {remedy}"
            )
        _validate_dtype(name, array, x)
    check_eps(eps)
    check_number("offset", offset)


def _validate_dtype(name: str, array: jax.Array, x: jax.Array) -> None:
    if array.dtype not in (x.dtype, jnp.float32):
        raise ValueError(
            f"{name} has dtype {array.dtype.name} and x has {x.dtype.name}; {name} must have x's dtype or float32: "
            f"pass {name}.astype(x.dtype)"
        )
