"""Checks and conversions of the arguments that the ops of the family and their steps share."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, check_number, shown
from tilewright.core.numerics import accumulator, rounded
from tilewright.core.quantized import as_array
from tilewright.core.segments import checked_cu_seqlens
from tilewright.core.unit_length import unit_length

SMALLEST_WIDTH, LARGEST_WIDTH = 16, 256


def given_arrays(**given: Any) -> dict[str, jax.Array]:
    """The arguments that are not None, as arrays."""
    return {name: as_array(name, value) for name, value in given.items() if value is not None}


def check_options(scale: Any, normalize_qk: Any) -> None:
    """Checks what is no array."""
    if scale is not None:
        check_number("scale", scale)
    if not isinstance(normalize_qk, bool):
        raise ValueError(f"normalize_qk={normalize_qk!r} must be True or False")


def normalized(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
    """x / sqrt(sum x^2 + 1e-6) along the last axis, summed in float32, rounded to x's dtype.

    Every implementation sees the rounded values: XLA must not pass the others on to one that goes on in float32.
    """
    return rounded(unit_length(x.astype(accumulator(x.dtype))), x.dtype).astype(x.dtype)


def along(weights: jax.Array, x: jax.Array) -> jax.Array:
    """`weights` with leading axes of 1, to broadcast against x."""
    return weights.reshape((1,) * (x.ndim - weights.ndim) + weights.shape)


def check_arrays(op: str, arrays: dict[str, jax.Array], *, time_axis: bool) -> None:
    """Checks the rank, shape and dtype of every array. `time_axis` is False for a step, whose arrays have no T."""
    for name in ("q", "k", "v", "beta"):
        if name not in arrays:
            raise ValueError(f"{name} is None; {op} needs an array there")
    if "g" not in arrays and not op.startswith("delta_rule"):
        plain = "delta_rule" if time_axis else "delta_rule_step"
        raise ValueError(f"g is None; {op} needs a log-decay for each value head: use {plain}, which has no gate")
    q, k, v, beta = (arrays[name] for name in ("q", "k", "v", "beta"))
    g = arrays.get("g")
    token = "T, " if time_axis else ""
    rank = 3 if time_axis else 2
    if v.ndim not in (rank, rank + 1) or q.ndim != v.ndim:
        raise ValueError(
            f"q is {shown(q)} and v is {shown(v)}; q must be [B, {token}H, K] and v [B, {token}HV, V], "
            f"both with B or both without"
        )
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.dtype.name not in FLOATING:
            raise ValueError(f"{name} is {shown(array)}; it must be float32 or bfloat16: {name}.astype(jnp.bfloat16)")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v have dtypes {q.dtype.name}, {k.dtype.name} and {v.dtype.name}; they must be equal: "
            f"pass q.astype(v.dtype) and k.astype(v.dtype)"
        )
    if k.shape != q.shape:
        raise ValueError(f"k is {shown(k)} and q is {shown(q)}; they must have one shape [B, {token}H, K]")
    leading, (hv, width) = list(v.shape[:-2]), v.shape[-2:]
    h, depth = q.shape[-2:]
    if list(q.shape[:-2]) != leading:
        raise ValueError(
            f"q is {shown(q)} and v is {shown(v)}; their axes before the heads must be equal ([B, {token.rstrip(', ')}])"
        )
    if h == 0 or hv % h or hv == 0:
        raise ValueError(
            f"v has HV={hv} heads and q has H={h}; HV must be a multiple of H, since each query head serves HV / H value "
            f"heads; use HV={max(h, -(-hv // max(h, 1)) * h)}, or repeat the heads of q and k to a divisor of HV"
        )
    for letter, size, name in (("K", depth, "k"), ("V", width, "v")):
        if not SMALLEST_WIDTH <= size <= LARGEST_WIDTH:
            raise ValueError(
                f"{name} is {shown(k if name == 'k' else v)}: {letter}={size} must be from {SMALLEST_WIDTH} to "
                f"{LARGEST_WIDTH}; pad it with zeros, or split the heads"
            )
    _check_per_head("beta", beta, [*leading, hv], token)
    if g is not None:
        _check_gate(op, g, [*leading, hv], depth, token)
    for name in ("initial_state", "state"):
        if name in arrays:
            _check_state(name, arrays[name], [*(leading[:-1] if time_axis else leading), hv, depth, width])


def check_packed(cu_seqlens: jax.Array, arrays: dict[str, jax.Array], states: jax.Array | None) -> jax.Array:
    """Checks where packed sequences begin and end, and the shape of their states. Returns cu_seqlens as int32."""
    v, k = arrays["v"], arrays["k"]
    cu_seqlens = checked_cu_seqlens(cu_seqlens, "v", v, v.shape[-3], batched=v.ndim == 4)
    if states is not None:
        _check_state(
            "initial_state", states, [cu_seqlens.shape[0] - 1, v.shape[-2], k.shape[-1], v.shape[-1]], letters="N, HV"
        )
    return cu_seqlens


def _check_per_head(name: str, array: jax.Array, shape: list[Any], token: str) -> None:
    if list(array.shape) != shape:
        raise ValueError(f"{name} is {shown(array)}; it must be [B, {token}HV] = {shape}, a number for each value head")
    _check_floating(name, array)


def _check_gate(op: str, g: jax.Array, per_head: list[Any], depth: int, token: str) -> None:
    per_channel = [*per_head, depth]
    if op.startswith("kda"):
        if list(g.shape) == per_head:
            raise ValueError(
                f"g is {shown(g)}, one gate per head, which is the gate of gated_delta_rule; kda takes one per key "
                f"channel, [B, {token}HV, K] = {per_channel}: use gated_delta_rule, or "
                f"jnp.broadcast_to(g[..., None], {tuple(per_channel)})"
            )
        if list(g.shape) != per_channel:
            raise ValueError(
                f"g is {shown(g)}; it must be [B, {token}HV, K] = {per_channel}, a log-decay for each channel"
            )
    else:
        if list(g.shape) == per_channel:
            raise ValueError(
                f"g is {shown(g)}, one gate per key channel, which is the gate of kda; gated_delta_rule takes one per "
                f"head, [B, {token}HV] = {per_head}: use kda with this g"
            )
        if list(g.shape) != per_head:
            raise ValueError(
                f"g is {shown(g)}; it must be [B, {token}HV] = {per_head}, a log-decay for each value head"
            )
    _check_floating("g", g)


def _check_state(name: str, state: jax.Array, shape: list[Any], letters: str = "B, HV") -> None:
    if list(state.shape) != shape:
        transposed = list(state.shape) == [*shape[:-2], shape[-1], shape[-2]]
        remedy = "; it looks transposed: pass jnp.swapaxes(state, -1, -2)" if transposed else ""
        raise ValueError(f"{name} is {shown(state)}; it must be [{letters}, K, V] = {shape}{remedy}")
    if state.dtype.name not in ("float32", "float64"):
        raise ValueError(f"{name} has dtype {state.dtype.name}; states are float32: pass {name}.astype(jnp.float32)")


def _check_floating(name: str, array: jax.Array) -> None:
    if array.dtype.name not in FLOATING:
        raise ValueError(
            f"{name} has dtype {array.dtype.name}; it must be float32 or bfloat16: pass {name}.astype(jnp.float32)"
        )


def check_lower_bound(lower_bound: float | None) -> None:
    """The lower bound of KDA's bounded gate."""
    if lower_bound is None:
        return
    check_number("lower_bound", lower_bound)
    if not -5 <= lower_bound < 0:
        raise ValueError(f"lower_bound={lower_bound} must be at least -5 and negative; use -5.0, or None for no bound")


def check_decays(
    name: str, shape: Sequence[Any], A_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None
) -> None:
    """The arguments of KDA's gate of an array with this name and shape, [..., HV, K]."""
    if len(shape) < 2 or dt_bias.shape != shape[-2:]:
        flat = dt_bias.ndim == 1 and len(shape) >= 2 and dt_bias.size == shape[-2] * shape[-1]
        remedy = f": pass dt_bias.reshape({shape[-2]}, {shape[-1]})" if flat else ""
        raise ValueError(
            f"dt_bias has shape {list(dt_bias.shape)} and {name} {list(shape)}; dt_bias must be [HV, K], the "
            f"last two axes of {name}{remedy}"
        )
    if A_log.shape != shape[-2:-1]:
        remedy = ": pass A_log.reshape(-1)" if A_log.size == shape[-2] else ""
        raise ValueError(
            f"A_log has shape {list(A_log.shape)} and {name} {list(shape)}; A_log must be [HV] = [{shape[-2]}], one per "
            f"head{remedy}"
        )
    for own, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        if array.dtype.name not in FLOATING:
            raise ValueError(f"{own} is {shown(array)}; it must be float32 or bfloat16: pass {own}.astype(jnp.float32)")
    check_lower_bound(lower_bound)
