"""`apply_rope`: rotary position embedding; `rope_tables`: its cosines and sines, made once for all layers."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.ops.rope.call import RopeCall
from tilewright.ops.rope.frequencies import (
    Linear,
    Llama3,
    Scaling,
    Yarn,
    attention_factor,
    digits,
    frequencies,
    turns_by_digit,
)

_LAYOUTS = ("half", "interleaved")
_THETA = 10_000.0

OP = register(Op(name="apply_rope", family="tilewright.ops.rope", implementations=("xla", "reference")))

__all__ = ["Linear", "Llama3", "Yarn", "apply_rope", "rope_tables"]


def rope_tables(
    positions: Int[Array, "*B T"],
    rotary_dim: int,
    *,
    theta: float = _THETA,
    scaling: Scaling | None = None,
    dtype: Any = jnp.float32,
) -> tuple[Float[Array, "*B T R"], Float[Array, "*B T R"]]:
    """Cosines and sines of every pair at every position, for `apply_rope(x, tables=...)`.

    The angle of pair i at position p is p f_i, with f_i = theta ** (-2 i / rotary_dim), stretched by `scaling`. Angles are
    accurate to float32 at any int32 position: whole turns are dropped before anything is rounded. A plain float32 product
    is off by 0.03 radians at a position of 1,000,000.

    Args:
      positions: [..., T] integers. Negative ones rotate the other way.
      rotary_dim: how many features are rotated; even.
      theta: the base of the frequencies.
      scaling: `Linear`, `Llama3` or `Yarn`, or None. YaRN's attention factor is in the tables.
      dtype: float32, or float64 where JAX has it enabled.

    Returns:
      (cos, sin), each [..., T, rotary_dim / 2].
    """
    positions = jnp.asarray(positions)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise ValueError(
            f"positions has dtype {positions.dtype.name}; positions must be integers: pass positions.astype(jnp.int32)"
        )
    _check_rotary_dim("rotary_dim", rotary_dim)
    rotary_dim = int(rotary_dim)
    if jnp.dtype(dtype).name not in ("float32", "float64"):
        raise ValueError(
            f"dtype={dtype!r} must be float32, or float64; apply_rope rotates bfloat16 with float32 tables"
        )
    if not isinstance(theta, int | float | np.integer | np.floating) or not 1 < theta < math.inf:
        raise ValueError(
            f"theta={theta!r} must be a number more than 1, known when traced; use 10000, or a model's own rope_theta"
        )
    if scaling is not None and not isinstance(scaling, Linear | Llama3 | Yarn):
        raise ValueError(f"scaling={scaling!r} is not a scaling; use Linear, Llama3 or Yarn of tilewright.ops.rope.api")
    theta = float(theta)
    if jnp.dtype(dtype) == jnp.float64 and jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        angle = positions.astype(dtype)[..., None] * _lift(frequencies(rotary_dim, theta, scaling), positions, dtype)
    else:
        coarse, rest = turns_by_digit(rotary_dim, theta, scaling)
        turns = jnp.zeros((*positions.shape, rotary_dim // 2), jnp.float32)
        signed = jnp.issubdtype(positions.dtype, jnp.signedinteger)
        positions = positions.astype(jnp.int32 if signed else jnp.uint32)
        for place, digit in enumerate(digits(jnp.abs(positions).astype(jnp.uint32))):
            value = digit.astype(jnp.float32)[..., None]
            whole = value * _lift(coarse[place], positions, jnp.float32)  # Exact.
            turns = turns + (whole - jnp.round(whole)) + value * _lift(rest[place], positions, jnp.float32)
        angle = (turns - jnp.round(turns)) * (2 * math.pi)
        angle = jnp.where((positions < 0)[..., None], -angle, angle) if signed else angle
    factor = attention_factor(scaling)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def apply_rope(
    x: Float[Array, "*B T H D"],
    positions: Int[Array, "*B T"] | None = None,
    *,
    tables: tuple[Array, Array] | None = None,
    theta: float = _THETA,
    scaling: Scaling | None = None,
    rotary_dim: int | None = None,
    layout: Literal["half", "interleaved"] = "half",
    inverse: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*B T H D"]:
    r"""Rotates pairs of each head's features by angles that grow with the position.

    For pair i of the token at position p, with the angle a = p f_i (see `rope_tables`),

        (y_1, y_2) = (x_1 cos a - x_2 sin a, x_2 cos a + x_1 sin a)

    The pairs are features (i, i + rotary_dim / 2) in the "half" layout, (2 i, 2 i + 1) in the "interleaved" one.

    Args:
      x: queries or keys [B, T, H, D], or [T, H, D]; float32 or bfloat16.
      positions: [B, T] or [T] integers; defaults to 0, 1, 2, ...
      tables: (cos, sin) of `rope_tables`, made once and used by every layer, in place of positions, theta and scaling.
      theta: the base of the frequencies.
      scaling: `Linear`, `Llama3` or `Yarn`, or None.
      rotary_dim: how many features of a head are rotated, the first ones; defaults to D. The others stay as they are.
      layout: which features make a pair.
      inverse: undoes the rotation, and YaRN's factor with it.
      implementation: "xla" or "reference"; None takes the best that this device can run.
      config: None; no implementation has block sizes to choose.

    Returns:
      [B, T, H, D] of x's dtype. Gradients flow to x.
    """
    x = jnp.asarray(x)
    if x.ndim not in (3, 4) or x.dtype.name not in FLOATING:
        raise ValueError(
            f"x is {shown(x)}; it must be [B, T, H, D] or [T, H, D] of float32 or bfloat16: x.astype(jnp.bfloat16)"
        )
    if not isinstance(inverse, bool | np.bool_):
        raise ValueError(f"inverse={inverse!r} is not True or False; pass a bool that is known when traced")
    if tables is not None:
        tables = _check_tables(tables, positions, theta, scaling)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout={layout!r} is not a layout; use 'half' (Llama, Qwen) or 'interleaved' (GPT-J)")
    if rotary_dim is None:
        rotary_dim = x.shape[-1] if tables is None else 2 * tables[0].shape[-1]
    _check_rotary_dim("rotary_dim", rotary_dim)
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"rotary_dim={rotary_dim} is more than D={x.shape[-1]} of x; use {x.shape[-1]} or less")
    unbatched = x.ndim == 3
    x = x[None] if unbatched else x
    cos, sin = _settle_tables(x, positions, tables, theta, scaling, rotary_dim)
    if inverse:
        square = cos * cos + sin * sin  # 1, or the square of YaRN's factor.
        cos, sin = cos / square, -sin / square
    if x.size == 0:
        return x[0] if unbatched else x
    call = RopeCall(x=x, cos=cos, sin=sin, layout=layout)
    out = OP.run(call, implementation=implementation, config=config)
    return out[0] if unbatched else out


def _settle_tables(
    x: jax.Array, positions: Any, tables: Any, theta: float, scaling: Scaling | None, rotary_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Cos and sin as [B or 1, T, rotary_dim / 2], of the dtype that x is rotated in."""
    b, t = x.shape[:2]
    accumulate = accumulator(x.dtype)
    if tables is not None:
        cos, sin = tables
    else:
        positions = jnp.arange(t, dtype=jnp.int32) if positions is None else jnp.asarray(positions)
        if positions.shape not in ((t,), (1, t), (b, t)):
            raise ValueError(
                f"positions is {shown(positions)} and x is {shown(x)}; positions must be [B, T] = [{b}, {t}] or [{t}]"
            )
        cos, sin = rope_tables(positions, rotary_dim, theta=theta, scaling=scaling, dtype=accumulate)
    shape = cos.shape if cos.ndim == 3 else (1, *cos.shape)
    if shape not in ((1, t, rotary_dim // 2), (b, t, rotary_dim // 2)) or sin.shape != cos.shape:
        raise ValueError(
            f"tables are {shown(cos)} and {shown(sin)}; they must be [B, T, rotary_dim / 2] = "
            f"[{b}, {t}, {rotary_dim // 2}], or without B: make them with rope_tables(positions, {rotary_dim})"
        )
    return tuple(jax.lax.stop_gradient(table.reshape(shape).astype(accumulate)) for table in (cos, sin))  # type: ignore[return-value]


def _check_tables(tables: Any, positions: Any, theta: Any, scaling: Any) -> tuple[jax.Array, jax.Array]:
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        raise ValueError(f"tables is a {type(tables).__name__}; it must be a pair (cos, sin): make it with rope_tables")
    given = {"positions": positions is not None, "theta": theta != _THETA, "scaling": scaling is not None}
    for name in (name for name, is_given in given.items() if is_given):
        raise ValueError(f"tables and {name} are both given; tables are of {name} already: leave one out")
    return jnp.asarray(tables[0]), jnp.asarray(tables[1])


def _check_rotary_dim(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or value < 2 or value % 2:
        raise ValueError(f"{name}={value!r} must be an even number, 2 or more: features are rotated in pairs")


def _lift(row: Any, positions: jax.Array, dtype: Any) -> jax.Array:
    """A row [pairs], with one leading axis of size 1 per axis of the positions."""
    return jnp.asarray(row, dtype).reshape((1,) * positions.ndim + (-1,))
