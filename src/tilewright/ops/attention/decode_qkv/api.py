"""`decode_qkv`: the queries of one token per sequence, and the caches with its keys and values in them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, check_eps, check_number, shown
from tilewright.core.axes import Size
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.stacked_call import check_layer
from tilewright.ops.attention.decode_qkv.call import DecodeQkvCall
from tilewright.ops.rope.api import Linear, Llama3, Scaling, Yarn

OP = register(
    Op(
        name="decode_qkv",
        family="tilewright.ops.attention.decode_qkv",
        implementations=("pallas_gpu", "reference"),
    )
)


def decode_qkv(
    x: Float[Array, "B D"],
    q_proj: Float[Array, "D H C"],
    k_proj: Float[Array, "D KV C"],
    v_proj: Float[Array, "D KV C"],
    keys: Float[Array, "B S KV C"] | Float[Array, "L B S KV C"],
    values: Float[Array, "B S KV C"] | Float[Array, "L B S KV C"],
    lengths: Int[Array, " B"],
    *,
    layer: Int[Array, ""] | int | None = None,
    q_norm: Float[Array, " C"] | None = None,
    k_norm: Float[Array, " C"] | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    theta: float | None = 10_000.0,
    scaling: Scaling | None = None,
    rotary_dim: int | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "B H C"], Array, Array]:
    r"""The queries of one token per sequence, and the caches with the token's keys and values in them.

    For the token x at position p = lengths, with p in [0, S),

        q, k = rope(norm(x Wq), p), rope(norm(x Wk), p);  v = x Wv
        keys[p] <- k;  values[p] <- v

    `decode_attention(q, keys, values, lengths + 1)` continues from there. A token whose position is outside of its cache is
    not written; `decode_attention` then returns NaN for it. Neither is one of a traced `layer` outside of the stack.

    Args:
      x: one token per sequence [B, D], float32 or bfloat16.
      q_proj: [D, H, C], of x's dtype.
      k_proj: [D, KV, C].
      v_proj: [D, KV, C].
      keys: the cache of rotated keys [B, S, KV, C], of x's dtype; or a stack of several layers' caches [L, B, S, KV, C].
      values: the cache of values, of the shape of keys.
      lengths: [B] integers, the tokens that each cache holds before this one.
      layer: the layer of a stack, an integer; a stack needs it.
      q_norm: [C], the weights of an RMS norm of each query head, as in `rms_norm`; None for no norm.
      k_norm: [C], of each key head.
      eps: added to the mean of the squares; a number.
      norm_offset: added to the norms' weights; a number.
      theta: the base of the rotation's frequencies, as in `apply_rope`; None for no rotation.
      scaling: `Linear`, `Llama3` or `Yarn` of tilewright.ops.rope.api, or None.
      rotary_dim: how many channels of a head are rotated, the first ones; defaults to C.
      implementation: "pallas_gpu" (Hopper, bfloat16), which updates the caches in place, or "reference", plain JAX; None
        takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      q [B, H, C], and keys and values after the token, all of x's dtype. Gradients flow to every floating array.
    """
    call = _call(
        {"x": x, "q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj, "keys": keys, "values": values},
        lengths,
        layer,
        {"q_norm": q_norm, "k_norm": k_norm},
        {"eps": eps, "norm_offset": norm_offset, "theta": theta, "scaling": scaling, "rotary_dim": rotary_dim},
    )
    if 0 in (*call.x.shape, *call.keys.shape, *call.q_proj.shape):
        implementation, config = "reference", None
    q, new_keys, new_values = OP.run(call, implementation=implementation, config=config)
    if jnp.ndim(keys) == 5:
        return q, new_keys, new_values
    return q, jnp.squeeze(new_keys, 0), jnp.squeeze(new_values, 0)


def has_kernel(*arrays: Any, **options: Any) -> bool:
    """Whether `decode_qkv` of these arguments is a kernel on this device. For layers, which do without it otherwise."""
    x, q_proj, k_proj, v_proj, keys, values, lengths = arrays
    norms = {name: options.pop(name, None) for name in ("q_norm", "k_norm")}
    given = {"x": x, "q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj, "keys": keys, "values": values}
    call = _call(given, lengths, options.pop("layer", None), norms, options)
    return OP.takes_kernel(call)


def _call(
    arrays: dict[str, Any], lengths: Any, layer: Any, norms: dict[str, Any], options: dict[str, Any]
) -> DecodeQkvCall:
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    norms = {name: None if w is None else jnp.asarray(w) for name, w in norms.items()}
    lengths = jnp.asarray(lengths)
    _validate_arrays(arrays, lengths, layer, norms)
    stacked = arrays["keys"].ndim == 5
    if not stacked:
        arrays |= {name: jnp.expand_dims(arrays[name], 0) for name in ("keys", "values")}
    channels = arrays["q_proj"].shape[2]
    rotary_dim = channels if options["rotary_dim"] is None else options["rotary_dim"]
    validate_options(options, rotary_dim, channels)
    return DecodeQkvCall(
        **arrays,
        **norms,
        lengths=int32_lengths(lengths, arrays["keys"].shape[2]),
        layer=jnp.asarray(layer, jnp.int32) if stacked else None,
        eps=float(options["eps"]),
        norm_offset=float(options["norm_offset"]),
        theta=None if options["theta"] is None else float(options["theta"]),
        scaling=options["scaling"],
        rotary_dim=int(rotary_dim),
    )


def _validate_arrays(arrays: dict[str, jax.Array], lengths: jax.Array, layer: Any, norms: dict[str, Any]) -> None:
    x, q_proj, keys = arrays["x"], arrays["q_proj"], arrays["keys"]
    if x.ndim != 2 or x.dtype.name not in FLOATING:
        raise ValueError(
            f"x is {shown(x)}; it must be [B, D] of float32 or bfloat16, one token per sequence: pass x[:, 0]"
        )
    if q_proj.ndim != 3 or q_proj.shape[0] != x.shape[1]:
        raise ValueError(
            f"q_proj is {shown(q_proj)} and x has D={x.shape[1]}; it must be [D, H, C]: pass q_proj.reshape(D, H, C)"
        )
    d, heads, channels = q_proj.shape
    k_proj = arrays["k_proj"]
    kv = k_proj.shape[1] if k_proj.ndim == 3 else 0
    if kv == 0 or heads % kv:
        raise ValueError(
            f"k_proj is {shown(k_proj)} and q_proj has H={heads} heads; it must be [D, KV, C], and H a multiple of KV"
        )
    for name in ("k_proj", "v_proj"):
        if arrays[name].shape != (d, kv, channels):
            raise ValueError(f"{name} is {shown(arrays[name])}; it must be [D, KV, C] = {[d, kv, channels]}")
    if keys.ndim not in (4, 5) or (*keys.shape[-4:-3], *keys.shape[-2:]) != (x.shape[0], kv, channels):
        raise ValueError(
            f"keys is {shown(keys)}; it must be [B, S, KV, C] = [{x.shape[0]}, S, {kv}, {channels}], or a stack of layers "
            f"[L, B, S, KV, C]"
        )
    if arrays["values"].shape != keys.shape:
        raise ValueError(
            f"values is {shown(arrays['values'])} and keys is {shown(keys)}; they must have the same shape"
        )
    for name, array in arrays.items():
        if array.dtype != x.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and x {x.dtype.name}; they must be equal: pass {name}.astype(x.dtype)"
            )
    if lengths.shape != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths is {shown(lengths)}; it must be integers [B] = [{x.shape[0]}]")
    check_layer(layer, "keys", keys, "[L, B, S, KV, C]", "single cache takes None")
    for name, w in norms.items():
        if w is not None and (w.shape != (channels,) or w.dtype.name not in FLOATING):
            raise ValueError(f"{name} is {shown(w)}; it must be floating [C] = [{channels}]")


def int32_lengths(lengths: jax.Array, capacity: Size) -> jax.Array:
    """Lengths as int32. One that does not fit into 32 bits is outside of the cache, and stays so."""
    if not np.can_cast(lengths.dtype, np.int32):
        lengths = jnp.where((lengths >= 0) & (lengths < capacity), lengths.astype(jnp.int32), -1)
    return lengths.astype(jnp.int32)


def validate_options(options: dict[str, Any], rotary_dim: Any, channels: int) -> None:
    """Raises where the options of norms and of the rotation are not valid."""
    check_eps(options["eps"])
    for name in ("norm_offset", *(() if options["theta"] is None else ("theta",))):
        check_number(name, options[name])
    if options["theta"] is not None and not 1 < options["theta"] < float("inf"):
        raise ValueError(f"theta={options['theta']} must be more than 1 and finite; use 10000, or None for no rotation")
    if options["scaling"] is not None and not isinstance(options["scaling"], Linear | Llama3 | Yarn):
        raise ValueError(
            f"scaling={options['scaling']!r} is not a scaling; use Linear, Llama3 or Yarn of tilewright.ops.rope.api"
        )
    if options["theta"] is not None and (
        not isinstance(rotary_dim, int | np.integer) or rotary_dim % 2 or not 2 <= rotary_dim <= channels
    ):
        raise ValueError(
            f"rotary_dim={rotary_dim!r} must be an even number from 2 to C={channels}: channels are rotated in pairs"
        )
