"""`decode_latent_attention`: one token per sequence against a cache of latents, which are keys and values at once."""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, check_number, is_integer, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.attention.decode_latent.call import DecodeLatentCall
from tilewright.ops.attention.decode_qkv.api import int32_lengths

OP = register(
    Op(
        name="decode_latent_attention",
        family="tilewright.ops.attention.decode_latent",
        implementations=("pallas_gpu", "xla", "reference"),
    )
)


def decode_latent_attention(
    q: Float[Array, "B H D"],
    latents: Float[Array, "B S D"],
    lengths: Int[Array, " B"],
    *,
    value_dim: int,
    scale: float | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "B H R"]:
    r"""Attention of one token per sequence over a cache of latents: the absorbed form of multi-head latent attention.

    All heads share the cache. The key of token s is its latent c_s, and its value is the first R = `value_dim` channels of
    the same latent, which a kernel reads once:

        out = sum_{s < lengths} softmax_s(scale q . c_s) c_s[:R]

    It is `decode_attention(q, k, k[..., :R], lengths)` for k = latents[:, :, None], one key head. What the cache holds past
    the length is never used, even NaN. A length of 0 gives zeros.

    Args:
      q: queries of one token per sequence [B, H, D], float32 or bfloat16. In multi-head latent attention they are the
        product of a head's query with its part of the keys' expansion, and the channels that RoPE rotates.
      latents: the cache [B, S, D], of q's dtype; S is its room.
      lengths: [B] integers, the tokens of each sequence, including the new one. A length outside of [0, S] makes the
        result of its sequence NaN.
      value_dim: R, the channels of a latent that are the value; from 1 to D.
      scale: the factor of the logits; defaults to D ** -0.5. The absorbed form needs that of the heads before it, (C + E)
        ** -0.5 for heads of C + E channels. A number, known when traced.
      implementation: "pallas_gpu" (Hopper, bfloat16), "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      out [B, H, R] of q's dtype. Gradients flow to q and latents.
    """
    call = _call(q, latents, lengths, value_dim, scale)
    if call.q.shape[0] == 0:  # There are no sequences.
        return jnp.zeros((*call.q.shape[:2], call.value_dim), call.q.dtype)
    return OP.run(call, implementation=implementation, config=config)


def has_kernel(q: Any, latents: Any, lengths: Any, *, value_dim: int, scale: float | None = None) -> bool:
    """Whether a call of `decode_latent_attention` with these arguments takes a kernel on this device."""
    return OP.takes_kernel(_call(q, latents, lengths, value_dim, scale))


def _call(q: Any, latents: Any, lengths: Any, value_dim: Any, scale: Any) -> DecodeLatentCall:
    q, latents, lengths = map(jnp.asarray, (q, latents, lengths))
    if q.ndim != 3 or q.dtype.name not in FLOATING or 0 in q.shape[1:]:
        remedy = ": pass q[:, 0]" if q.ndim == 4 else ""
        raise ValueError(
            f"q is {shown(q)}; it must be [B, H, D] of float32 or bfloat16, one token per sequence, with no axis of 0 but "
            f"B{remedy}"
        )
    b, _, d = q.shape
    if latents.ndim != 3 or latents.shape[::2] != (b, d) or latents.shape[1] == 0:
        remedy = ": pass latents[:, :, 0]" if latents.ndim == 4 else ""
        raise ValueError(
            f"latents is {shown(latents)} and q is {shown(q)}; it must be [B, S, D] = [{b}, S, {d}], the cache of each "
            f"sequence{remedy}"
        )
    if latents.dtype != q.dtype:
        raise ValueError(
            f"q has dtype {q.dtype.name} and latents {latents.dtype.name}; they must be equal: pass "
            f"q.astype(latents.dtype)"
        )
    if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths is {shown(lengths)}; it must be integers [B] = [{b}]")
    if not is_integer(value_dim) or not 1 <= value_dim <= d:
        raise ValueError(f"value_dim={value_dim!r} must be an integer from 1 to D={d}: the first channels of a latent")
    if scale is not None:
        check_number("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale={scale} must be finite; use None for D ** -0.5")
    return DecodeLatentCall(
        q=q,
        latents=latents,
        lengths=int32_lengths(lengths, latents.shape[1] + 1),  # A full cache is one of S tokens.
        value_dim=int(value_dim),
        scale=float(d**-0.5 if scale is None else scale),
    )
