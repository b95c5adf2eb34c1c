"""`decode_latent_qkv`: the queries of one token per sequence, and the cache with its latent in it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, check_eps, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.stacked_call import check_layer
from tilewright.ops.attention.decode_latent_qkv.call import DecodeLatentQkvCall
from tilewright.ops.attention.decode_qkv.api import int32_lengths

OP = register(
    Op(
        name="decode_latent_qkv",
        family="tilewright.ops.attention.decode_latent_qkv",
        implementations=("pallas_gpu", "reference"),
    )
)


def decode_latent_qkv(
    x: Float[Array, "B D"],
    q_proj: Float[Array, "D H C"],
    kv_down: Float[Array, "D K"],
    norm: Float[Array, " N"],
    latents: Float[Array, "B S K"] | Float[Array, "L B S K"],
    lengths: Int[Array, " B"],
    *,
    layer: Int[Array, ""] | int | None = None,
    eps: float = 1e-6,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "B H C"], Array]:
    r"""The queries of one token per sequence, and the cache with the token's latent in it: multi-head latent attention.

    For the token x at position p = lengths, with p in [0, S),

        q = x Wq;  c, e = x Wdown;  latents[p] <- [c / sqrt(mean(c^2) + eps) norm, e]

    where c has the N channels of `norm`, and e the rest. `decode_latent_attention` continues from there, with queries in
    the absorbed form and lengths + 1. A token whose position is outside of its cache is not written;
    `decode_latent_attention` then returns NaN for it. Neither is one of a traced `layer` outside of the stack.

    Args:
      x: one token per sequence [B, D], float32 or bfloat16.
      q_proj: [D, H, C], of x's dtype.
      kv_down: [D, K], of x's dtype.
      norm: [N], the weights of the RMS norm, as in `rms_norm`; N is at most K.
      latents: the cache [B, S, K], of x's dtype; or a stack of several layers' caches [L, B, S, K].
      lengths: [B] integers, the tokens that each cache holds before this one.
      layer: the layer of a stack, an integer; a stack needs it.
      eps: added to the mean of the squares; a number.
      implementation: "pallas_gpu" (Hopper, bfloat16), which updates the cache in place, or "reference", plain JAX; None
        takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      q [B, H, C], and the latents after the token, both of x's dtype. Gradients flow to every floating array.
    """
    call = _call(x, q_proj, kv_down, norm, latents, lengths, layer=layer, eps=eps)
    if 0 in (*call.x.shape, *call.latents.shape, *call.q_proj.shape):
        implementation, config = "reference", None
    q, after = OP.run(call, implementation=implementation, config=config)
    return q, after if jnp.ndim(latents) == 4 else jnp.squeeze(after, 0)


def has_kernel(*arrays: Any, **options: Any) -> bool:
    """Whether `decode_latent_qkv` of these arguments is a kernel on this device. For layers, which do without it
    otherwise.
    """
    return OP.takes_kernel(_call(*arrays, **options))


def _call(
    x: Any, q_proj: Any, kv_down: Any, norm: Any, latents: Any, lengths: Any, *, layer: Any = None, eps: Any = 1e-6
) -> DecodeLatentQkvCall:
    x, q_proj, kv_down, norm, latents, lengths = map(jnp.asarray, (x, q_proj, kv_down, norm, latents, lengths))
    if x.ndim != 2 or x.dtype.name not in FLOATING:
        raise ValueError(
            f"x is {shown(x)}; it must be [B, D] of float32 or bfloat16, one token per sequence: pass x[:, 0]"
        )
    b, d = x.shape
    if q_proj.ndim != 3 or q_proj.shape[0] != d:
        raise ValueError(
            f"q_proj is {shown(q_proj)} and x has D={d}; it must be [D, H, C]: pass q_proj.reshape(D, H, C)"
        )
    if kv_down.ndim != 2 or kv_down.shape[0] != d:
        raise ValueError(f"kv_down is {shown(kv_down)} and x has D={d}; it must be [D, K]")
    k = kv_down.shape[1]
    if norm.ndim != 1 or not 1 <= norm.shape[0] <= k or norm.dtype.name not in FLOATING:
        raise ValueError(f"norm is {shown(norm)}; it must be floating [N], with N from 1 to K={k}")
    if latents.ndim not in (3, 4) or (latents.shape[-3], latents.shape[-1]) != (b, k):
        raise ValueError(
            f"latents is {shown(latents)}; it must be [B, S, K] = [{b}, S, {k}], or a stack of layers [L, B, S, K]"
        )
    for name, array in (("q_proj", q_proj), ("kv_down", kv_down), ("latents", latents)):
        if array.dtype != x.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and x {x.dtype.name}; they must be equal: pass {name}.astype(x.dtype)"
            )
    if lengths.shape != (b,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths is {shown(lengths)}; it must be integers [B] = [{b}]")
    check_layer(layer, "latents", latents, "[L, B, S, K]", "single cache takes None")
    check_eps(eps)
    stacked = latents.ndim == 4
    return DecodeLatentQkvCall(
        x=x,
        q_proj=q_proj,
        kv_down=kv_down,
        norm=norm,
        latents=latents if stacked else jnp.expand_dims(latents, 0),
        lengths=int32_lengths(lengths, latents.shape[-2]),
        layer=jnp.asarray(layer, jnp.int32) if stacked else None,
        eps=float(eps),
    )
