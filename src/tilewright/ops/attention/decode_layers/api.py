"""`decode_layers`: all layers of a decoder of attention and MLPs for one token per sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.attention.decode_layers.call import DecodeLayersCall
from tilewright.ops.attention.decode_qkv.api import int32_lengths, validate_options
from tilewright.ops.rope.api import Scaling

OP = register(
    Op(
        name="decode_layers",
        family="tilewright.ops.attention.decode_layers",
        implementations=("pallas_gpu", "reference"),
    )
)
_AXES = {
    "x": "B D",
    "mixer_norm": "L D",
    "q_proj": "L D H C",
    "k_proj": "L D KV C",
    "v_proj": "L D KV C",
    "o_proj": "L H C D",
    "mlp_norm": "L D",
    "gate_up": "L D 2 F",
    "down": "L F D",
    "keys": "L B S KV C",
    "values": "L B S KV C",
    "lengths": "B",
    "q_norm": "L C",
    "k_norm": "L C",
}
_OF_ANY_DTYPE = ("mixer_norm", "mlp_norm", "q_norm", "k_norm", "lengths")


def decode_layers(
    x: Float[Array, "B D"],
    mixer_norm: Float[Array, "L D"],
    q_proj: Float[Array, "L D H C"],
    k_proj: Float[Array, "L D KV C"],
    v_proj: Float[Array, "L D KV C"],
    o_proj: Float[Array, "L H C D"],
    mlp_norm: Float[Array, "L D"],
    gate_up: Float[Array, "L D 2 F"],
    down: Float[Array, "L F D"],
    keys: Float[Array, "L B S KV C"],
    values: Float[Array, "L B S KV C"],
    lengths: Int[Array, " B"],
    *,
    q_norm: Float[Array, "L C"] | None = None,
    k_norm: Float[Array, "L C"] | None = None,
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    theta: float | None = 10_000.0,
    scaling: Scaling | None = None,
    rotary_dim: int | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "L B S KV C"], Float[Array, "L B S KV C"]]:
    r"""One token per sequence behind all layers of a decoder, and the caches with the token's keys and values in them.

    For each layer, with the token x at position p = lengths, with p in [0, S),

        n = norm(x);  q, k, v = rope(norm(n Wq), p), rope(norm(n Wk), p), n Wv;  keys[p] <- k;  values[p] <- v
        x = x + softmax(q keys[:p + 1]^T / sqrt(C)) values[:p + 1] Wo
        n = norm(x);  x = x + (silu(n Wgate) * (n Wup)) Wdown

    A token whose position is outside of its cache is not written, and its result is NaN. What a cache holds from p on is
    never used, even NaN.

    Args:
      x: one token per sequence [B, D], float32 or bfloat16.
      mixer_norm: [L, D], the weights of the RMS norms before attention, as in `rms_norm`.
      q_proj: [L, D, H, C], of x's dtype. H is a multiple of KV.
      k_proj: [L, D, KV, C].
      v_proj: [L, D, KV, C].
      o_proj: [L, H, C, D].
      mlp_norm: [L, D], the weights of the norms before the MLPs.
      gate_up: [L, D, 2, F], gates and values.
      down: [L, F, D].
      keys: the caches of rotated keys [L, B, S, KV, C], of x's dtype.
      values: the caches of values [L, B, S, KV, C].
      lengths: [B] integers, the tokens that each cache holds before this one; the same in all layers.
      q_norm: [L, C], the weights of an RMS norm of each query head; None for no norm.
      k_norm: [L, C], of each key head.
      eps: added to the mean of the squares of every norm; a number.
      norm_offset: added to the weights of every norm; a number.
      theta: the base of the rotation's frequencies, as in `apply_rope`; None for no rotation.
      scaling: `Linear`, `Llama3` or `Yarn` of tilewright.ops.rope.api, or None.
      rotary_dim: how many channels of a head are rotated, the first ones; defaults to C.
      implementation: "pallas_gpu" (Hopper, bfloat16, one sequence), which is one kernel and updates the caches in place, or
        "reference", plain JAX; None takes the best that this device can run.
      config: None; no implementation has block sizes to choose.

    Returns:
      x [B, D] behind the last layer, and keys and values after the token, all of x's dtype. Gradients flow to every
      floating array. The kernel has all of its thread blocks resident at once. Where something else holds
      multiprocessors for as long as it runs (another persistent kernel, through MPS), x is NaN.
    """
    given = dict(zip(_AXES, (x, mixer_norm, q_proj, k_proj, v_proj, o_proj, mlp_norm, gate_up, down), strict=False))
    given |= {"keys": keys, "values": values, "lengths": lengths, "q_norm": q_norm, "k_norm": k_norm}
    options = {"eps": eps, "norm_offset": norm_offset, "theta": theta, "scaling": scaling, "rotary_dim": rotary_dim}
    call = _call(given, options)
    if any(0 in array.shape for array in call.given().values()):
        implementation, config = "reference", None
    return OP.run(call, implementation=implementation, config=config)


def has_kernel(**given: Any) -> bool:
    """Whether `decode_layers` of these arguments is a kernel on this device. For models, which do without it otherwise.

    It takes every argument by name. Where an array has another dtype than x, there is none.
    """
    if any(given[name].dtype != given["x"].dtype for name in _AXES if name not in _OF_ANY_DTYPE):
        return False
    return OP.takes_kernel(_call({name: given.pop(name) for name in _AXES}, given))


def _call(given: dict[str, Any], options: dict[str, Any]) -> DecodeLayersCall:
    arrays = {name: jnp.asarray(array) for name, array in given.items() if array is not None}
    _validate_arrays(arrays)
    channels = arrays["q_proj"].shape[3]
    rotary_dim = channels if options["rotary_dim"] is None else options["rotary_dim"]
    validate_options(options, rotary_dim, channels)
    arrays["lengths"] = int32_lengths(arrays["lengths"], arrays["keys"].shape[2])
    return DecodeLayersCall(
        **{name: arrays.get(name) for name in _AXES},  # type: ignore[arg-type]
        eps=float(options["eps"]),
        norm_offset=float(options["norm_offset"]),
        theta=None if options["theta"] is None else float(options["theta"]),
        scaling=options["scaling"],
        rotary_dim=int(rotary_dim),
    )


def _validate_arrays(arrays: dict[str, jax.Array]) -> None:
    x, sizes = arrays["x"], {"2": 2}
    if x.ndim != 2 or x.dtype.name not in FLOATING:
        raise ValueError(
            f"x is {shown(x)}; it must be [B, D] of float32 or bfloat16, one token per sequence: pass x[:, 0]"
        )
    for name, array in arrays.items():
        letters = _AXES[name].split()
        if array.ndim == len(letters):
            sizes = {**dict(zip(letters, array.shape, strict=True)), **sizes}
        wanted = [sizes.get(letter, letter) for letter in letters]
        if list(array.shape) != wanted:
            spelled = ", ".join(map(str, wanted))
            raise ValueError(f"{name} is {shown(array)}; it must be [{', '.join(letters)}] = [{spelled}]")
        kind = jnp.integer if name == "lengths" else jnp.floating
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} is {shown(array)}; it must be {kind.__name__}")
        if name not in _OF_ANY_DTYPE and array.dtype != x.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and x {x.dtype.name}; they must be equal: pass {name}.astype(x.dtype)"
            )
    if sizes["KV"] == 0 or sizes["H"] % sizes["KV"]:
        raise ValueError(f"H={sizes['H']} query heads must be a multiple of KV={sizes['KV']} key and value heads")
