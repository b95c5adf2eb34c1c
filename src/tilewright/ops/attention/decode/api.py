"""`decode_attention` and `paged_attention`: the last tokens of each sequence against a cache of all its tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.ops.attention.decode.call import DecodeCall, PagedCall

_MOST_QUERIES = 64
_IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "xla", "reference")
_FAMILY = "tilewright.ops.attention.decode"

DECODE = register(Op(name="decode_attention", family=_FAMILY, implementations=_IMPLEMENTATIONS))
PAGED = register(Op(name="paged_attention", family=_FAMILY, implementations=_IMPLEMENTATIONS))


def decode_attention(
    q: Float[Array, "B *T H D"],
    k: Float[Array, "B S KV D"],
    v: Float[Array, "B S KV Dv"],
    lengths: Int[Array, " B"],
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_logsumexp: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Array | tuple[Array, Array]:
    r"""Attention of one or a few tokens at the end of each sequence over its cache.

    The cache of sequence b holds `lengths[b]` tokens, of which the queries' own are the last: query t of T is at position
    p = lengths[b] - T + t, and attends to the keys s with p - window <= s <= p. With a_s = cap(scale q . k_s),

        out = sum_s exp(a_s - logsumexp) v_s        logsumexp = log(sum_s exp(a_s) + exp(sinks_h))

    What the cache holds past the length is never used, even NaN. A query without a key gives zeros.

    Args:
      q: queries [B, T, H, D], or [B, H, D] for one token each; float32 or bfloat16.
      k: keys [B, S, KV, D], of q's dtype; S is the room of the cache. H is a multiple of KV.
      v: values [B, S, KV, Dv].
      lengths: [B] integers, the tokens of each sequence, including the new ones. A length outside of [0, S] makes the
        result of its sequence NaN.
      window: how many tokens before its own position a query attends to; None for all.
      scale: the factor of the logits; defaults to D ** -0.5. A number, known when traced.
      soft_cap: bounds the logits to (-soft_cap, soft_cap); a number, known when traced.
      sinks: [H], one logit per head that takes weight and has no value.
      return_logsumexp: also returns logsumexp [B, T, H], float32.
      implementation: "pallas_tpu", "pallas_gpu" (Hopper, bfloat16), "xla" or "reference"; None takes the best that this
        device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      out [B, T, H, Dv] (or [B, H, Dv]) of q's dtype; with return_logsumexp a pair.
    """
    q, k, v = _queries(q), jnp.asarray(k), jnp.asarray(v)
    for name, array in (("k", k), ("v", v)):
        if array.ndim != 4 or 0 in array.shape[1:]:
            raise ValueError(
                f"{name} is {shown(array)}; it must be [B, S, KV, D], a cache for each sequence, with no axis of 0"
            )
        if array.shape[0] != q.shape[0]:
            raise ValueError(f"{name} is {shown(array)} and q has B={q.shape[0]}; there must be a cache for each q")
    arrays = {"q": q, "k": k, "v": v, "page_table": None, "lengths": jnp.asarray(lengths), "sinks": sinks}
    options = {"window": window, "scale": scale, "soft_cap": soft_cap}
    results = _attend(DECODE, DecodeCall, arrays, options, k.shape[1], implementation, config)
    return results if return_logsumexp else results[0]


def paged_attention(
    q: Float[Array, "B *T H D"],
    k_pages: Float[Array, "P page KV D"],
    v_pages: Float[Array, "P page KV Dv"],
    page_table: Int[Array, "B pages"],
    lengths: Int[Array, " B"],
    *,
    window: int | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    return_logsumexp: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Array | tuple[Array, Array]:
    r"""`decode_attention` over a cache in pages of a pool that the sequences share.

    Key s of sequence b is row s % page of page `page_table[b, s // page]`. Entries of the table past the length of a
    sequence are never used; they may be anything.

    Args:
      q: queries [B, T, H, D], or [B, H, D] for one token each; float32 or bfloat16.
      k_pages: the pool of keys [P, page, KV, D], of q's dtype.
      v_pages: the pool of values [P, page, KV, Dv].
      page_table: [B, pages] integers, the pages of each sequence in order.
      lengths: [B] integers, the tokens of each sequence, including the new ones.
      window: as for `decode_attention`, like all arguments that follow.
      scale: the factor of the logits.
      soft_cap: bounds the logits.
      sinks: [H], one logit per head.
      return_logsumexp: also returns logsumexp [B, T, H], float32.
      implementation: "pallas_tpu", "pallas_gpu" (Hopper, bfloat16), "xla" or "reference"; None takes the best that this
        device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      out [B, T, H, Dv] (or [B, H, Dv]) of q's dtype; with return_logsumexp a pair.
    """
    q, k, v, table = _queries(q), jnp.asarray(k_pages), jnp.asarray(v_pages), jnp.asarray(page_table)
    for name, array in (("k_pages", k), ("v_pages", v)):
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"{name} is {shown(array)}; it must be [P, page, KV, D], a pool of pages")
    if not jnp.issubdtype(table.dtype, jnp.integer) or table.ndim != 2 or table.shape[0] != q.shape[0]:
        raise ValueError(
            f"page_table is {shown(table)} and q has B={q.shape[0]}; it must be integers [B, pages], "
            f"a row of pages for each sequence"
        )
    if table.shape[1] == 0:
        raise ValueError(f"page_table is {shown(table)}; it must have a page or more for each sequence: [B, pages]")
    if not np.can_cast(table.dtype, np.int32):
        table = jnp.clip(table, 0, k.shape[0] - 1)  # The cast would turn some pages outside of the pool into others.
    table = table.astype(jnp.int32)
    arrays = {"q": q, "k": k, "v": v, "page_table": table, "lengths": jnp.asarray(lengths), "sinks": sinks}
    options = {"window": window, "scale": scale, "soft_cap": soft_cap}
    results = _attend(PAGED, PagedCall, arrays, options, table.shape[1] * k.shape[1], implementation, config)
    return results if return_logsumexp else results[0]


def _attend(
    op: Op,
    kind: type[DecodeCall],
    arrays: dict[str, Any],
    options: dict[str, Any],
    room: int,
    implementation: ImplementationName | None,
    config: Config | tuple[Config, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    """out and logsumexp. Arrays and options are those of the call, not validated yet."""
    q, lengths, sinks = arrays["q"], arrays["lengths"], arrays["sinks"]
    window, scale, soft_cap = options["window"], options["scale"], options["soft_cap"]
    _validate(q, arrays["k"], arrays["v"], lengths, window, scale, soft_cap)
    one_token = q.ndim == 3
    q = q[:, None] if one_token else q
    h, d = q.shape[2:]
    if sinks is not None:
        sinks = jnp.asarray(sinks)
        if sinks.shape != (h,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
            raise ValueError(f"sinks is {shown(sinks)}; it must be floating [H] = [{h}], a logit for each query head")
        sinks = sinks.reshape(1, h)
    if not np.can_cast(lengths.dtype, np.int32):
        # A length that does not fit into 32 bits is out of range, and has to stay so.
        lengths = jnp.where((lengths >= 0) & (lengths <= room), lengths.astype(jnp.int32), -1)
    if q.shape[0] == 0:  # There are no sequences.
        out = jnp.zeros((*q.shape[:3], arrays["v"].shape[3]), q.dtype)
        logsumexp = jnp.zeros(q.shape[:3], accumulator(q.dtype))
    else:
        call = kind(
            **arrays | {"q": q, "lengths": lengths.astype(jnp.int32), "sinks": sinks},
            window=None if window is None else int(window),
            scale=float(d**-0.5 if scale is None else scale),
            soft_cap=None if soft_cap is None else float(soft_cap),
        )
        out, logsumexp = op.run(call, implementation=implementation, config=config)
    return (out[:, 0], logsumexp[:, 0]) if one_token else (out, logsumexp)


def _queries(q: Any) -> jax.Array:
    q = jnp.asarray(q)
    if q.ndim not in (3, 4) or q.dtype.name not in FLOATING or 0 in q.shape[1:]:
        raise ValueError(
            f"q is {shown(q)}; it must be [B, T, H, D] or [B, H, D] of float32 or bfloat16, with no axis of 0 but B"
        )
    return q


def _validate(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, window: Any, scale: Any, soft_cap: Any
) -> None:
    if q.ndim == 4 and isinstance(q.shape[1], int) and q.shape[1] > _MOST_QUERIES:  # It may be symbolic (`jax.export`).
        raise ValueError(
            f"q has T={q.shape[1]} queries per sequence; decoding takes {_MOST_QUERIES} at most: use flash_attention for "
            f"whole sequences"
        )
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q has dtype {q.dtype.name}, k {k.dtype.name} and v {v.dtype.name}; they must be equal: pass q.astype(k.dtype)"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"v is {shown(v)} and k is {shown(k)}; only their last axes may differ")
    if k.shape[3] != q.shape[-1]:
        raise ValueError(f"k is {shown(k)} and q is {shown(q)}; the last axes must be equal (D={q.shape[-1]})")
    heads, kv_heads = q.shape[-2], k.shape[2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has H={heads} heads and k has KV={kv_heads}; H must be a multiple of KV, each KV head serving H / KV "
            f"query heads"
        )
    if lengths.shape != q.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths is {shown(lengths)}; it must be integers [B] = [{q.shape[0]}]")
    numbers = (int, float, np.integer, np.floating)
    for name, value in (("window", window), ("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and (not isinstance(value, numbers) or isinstance(value, bool)):
            raise ValueError(
                f"{name}={value!r} is not a Python number; it is built into the kernel, so it must be known when "
                f"traced: pass a number, or None"
            )
    if scale is not None and not np.isfinite(scale):
        raise ValueError(f"scale={scale} must be finite; use None for D ** -0.5")
    if window is not None and (not 0 <= window < float("inf") or window != int(window)):
        raise ValueError(f"window={window} must be a number of tokens, 0 or more; use None for all of them")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"soft_cap={soft_cap} must be positive and finite; use None for no cap")
