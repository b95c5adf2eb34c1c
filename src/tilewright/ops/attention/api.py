"""`flash_attention`: softmax attention over whole sequences, with masks as values."""

import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.core.sequence_shards import shard_count
from tilewright.masks.algebra import Mask, contains
from tilewright.masks.block_list import FULL, PARTIAL, Grid
from tilewright.masks.library import Causal, Dense, SlidingWindow
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.context import attend_in_ring, attend_over_heads

_MOST_BIAS_BYTES = 16 * 2**30
_FARTHEST = 2**30
# Queries and keys of a block that is searched for a pair that attends; and the pairs that are evaluated at a time where
# a mask has to be evaluated whole.
_SEARCHED_BLOCK, _SEARCHED_PAIRS = 256, 2**22

Exchange = Literal["ring", "heads"]

OP = register(
    Op(
        name="flash_attention",
        family="tilewright.ops.attention",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def flash_attention(
    q: Float[Array, "*B T H D"],
    k: Float[Array, "*B S KV D"],
    v: Float[Array, "*B S KV Dv"],
    *,
    mask: Mask | np.ndarray | Bool[Array, "..."] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    q_offset: int = 0,
    return_logsumexp: bool = False,
    axis_name: str | None = None,
    exchange: Exchange | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Array | tuple[Array, Array]:
    r"""Softmax attention, without ever holding the T x S weights.

    For each head h with its keys and values g = h // (H / KV), query t and key s,

        a_ts = cap(scale * q_t . k_s) + bias_ts          cap(x) = soft_cap tanh(x / soft_cap), or x without a cap
        logsumexp_t = log(sum_{s attended by t} exp(a_ts) + exp(sinks_h))
        out_t = sum_{s attended by t} exp(a_ts - logsumexp_t) v_s

    A query that attends to nothing gives zeros, gradients of zero, and a logsumexp of -inf (its sink, where there is
    one).

    Args:
      q: queries [B, T, H, D], or [T, H, D]; float32 or bfloat16.
      k: keys [B, S, KV, D], of q's dtype. H is a multiple of KV: each KV head serves H / KV query heads.
      v: values [B, S, KV, Dv]. Dv may differ from D.
      mask: which query attends to which key. A value of `tilewright.masks` (or a numpy array of bool) is known when
        traced: empty blocks cost nothing. A jax array of bool that broadcasts to [B, H, T, S] may change from call to
        call; [B, 1, 1, S], a mask of the keys alone, costs no more than segments.
      causal: whether a query attends to no key after its own position. Positions of queries begin at q_offset.
      window: (left, right): a query attends to `left` tokens before its own position, its own, and `right` after it;
        None is unlimited.
      segment_ids: integers [B, T]; a query attends to keys of its own segment only. A pair (q ids [B, T], kv ids
        [B, S]) where they differ.
      bias: added to the logits; it broadcasts to [B, H, T, S], and T may be 1. Gradients flow to it. A bias below -1e30
        masks.
      scale: the factor of the logits; defaults to D ** -0.5. A number, known when traced.
      soft_cap: bounds the logits to (-soft_cap, soft_cap), before bias and mask; a number, known when traced.
      sinks: [H], one logit per head that takes weight and has no value. Gradients flow to it.
      q_offset: the position of the first query; a number, known when traced. With S - T the queries are the last ones.
      return_logsumexp: also return logsumexp [B, T, H], float32. Gradients flow through it.
      axis_name: inside `jax.shard_map`, the mesh axis that T and S are cut over, contiguously: the results are those of
        the whole sequence. It takes causal, segment_ids, scale and soft_cap, and over heads also masks of
        `tilewright.masks` and windows.
      exchange: how, with axis_name: "ring" sends keys and values around, and "heads" exchanges the sequence for heads,
        which needs KV to be a multiple of the shards. Defaults to "heads" where that holds (docs/parallel.md).
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      out [B, T, H, Dv] of q's dtype; with return_logsumexp a pair (out, logsumexp).
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    _validate_operands(q, k, v)
    unbatched = q.ndim == 3
    if axis_name is not None:
        out, logsumexp = _on_shard(
            q,
            k,
            v,
            axis_name,
            exchange,
            segment_ids,
            causal,
            {"mask": mask, "window": window},
            {"bias": bias, "sinks": sinks, "q_offset": q_offset or None},
            {"scale": scale, "soft_cap": soft_cap, "implementation": implementation, "config": config},
        )
        return (out, logsumexp) if return_logsumexp else out
    if exchange is not None:
        raise ValueError(f"exchange={exchange!r} without axis_name; give the mesh axis that T is cut over, or neither")
    if unbatched:
        q, k, v = q[None], k[None], v[None]
    (b, t, h, d), s = q.shape, k.shape[1]
    scale = _number("scale", scale, d**-0.5)
    cap = None if soft_cap is None else _number("soft_cap", soft_cap, 0.0)
    if cap is not None and not 0 < cap < float("inf"):
        raise ValueError(f"soft_cap={soft_cap} must be positive and finite; use None for no cap")
    if not isinstance(q_offset, int | np.integer) or isinstance(q_offset, bool):
        raise ValueError(
            f"q_offset={q_offset!r} is not a Python integer; the blocks to visit are made from it, so it must be known "
            f"when traced: pass an int, or use decode_attention for positions that change"
        )
    if abs(q_offset) > _FARTHEST:
        raise ValueError(f"q_offset={q_offset} must be within {_FARTHEST} (positions are int32); use S - T or the like")
    if not isinstance(causal, bool | np.bool_):
        raise ValueError(
            f"causal={causal!r} is not True or False; the blocks to visit are made from it, so it must be known when "
            f"traced: pass a bool, or give what changes as a mask array"
        )
    static, dynamic = _settle_masks(mask, causal, window, b, t, h, s, int(q_offset))
    q_segments, kv_segments = _settle_segments(segment_ids, b, t, s, unbatched)
    dynamic, q_segments, kv_segments = _spread_mask(dynamic, q_segments, kv_segments, b, t, s)
    bias = _settle_bias(bias, b, t, h, s)
    sinks = _settle_sinks(sinks, h)
    if 0 in (b, t, h, s, v.shape[3]):
        # Nothing is attended to, or there is nothing to attend.
        out = jnp.zeros((b, t, h, v.shape[3]), q.dtype)
        logsumexp = jnp.full((b, t, h), -jnp.inf, accumulator(q.dtype))
        if sinks is not None:
            logsumexp = jnp.broadcast_to(sinks.astype(logsumexp.dtype)[None, None, :], logsumexp.shape)
    else:
        call = AttentionCall(
            q=q,
            k=k,
            v=v,
            bias=bias,
            sinks=sinks,
            q_segments=q_segments,
            kv_segments=kv_segments,
            keep=dynamic,
            mask=static,
            scale=scale,
            soft_cap=cap,
            q_offset=int(q_offset),
        )
        out, logsumexp = OP.run(call, implementation=implementation, config=config)
    if unbatched:
        out, logsumexp = out[0], logsumexp[0]
    return (out, logsumexp) if return_logsumexp else out


def _on_shard(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    axis_name: str,
    exchange: Exchange | None,
    segment_ids: Any,
    causal: bool,
    only_whole: dict[str, Any],
    refused: dict[str, Any],
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Attention of a shard of a sequence. `only_whole`: options that need the whole sequence on a device."""
    shards = shard_count("flash_attention", axis_name)
    if exchange not in (None, *typing.get_args(Exchange)):
        raise ValueError(f"exchange={exchange!r} is not known; use 'ring', 'heads', or None")
    heads = k.shape[-2]
    if exchange == "heads" and heads % shards:
        raise ValueError(
            f"exchange='heads' with KV={heads} heads over {shards} shards of {axis_name!r}; KV must be a multiple of the "
            f"shards: use exchange='ring'"
        )
    way = exchange or ("heads" if heads % shards == 0 else "ring")
    # All devices run one program, so heads cannot have masks of their own.
    mask = only_whole["mask"]
    kind = "a mask array" if isinstance(mask, jax.Array) else "a mask per head" if _is_per_head(mask) else None
    if kind is not None:
        refused, only_whole = {**refused, kind: True}, {**only_whole, "mask": None}
    given = [name for name, value in refused.items() if value is not None]
    given += [name for name, value in only_whole.items() if value is not None] if way == "ring" else []
    if given:
        heads_too = (
            "" if given[0] in refused else ", or use exchange='heads' on a mesh where KV is a multiple of the shards"
        )
        raise ValueError(
            f"{given[0]} with axis_name={axis_name!r} and exchange={way!r} (KV={heads}, {shards} shards) is not supported; "
            f"leave it out{heads_too}"
        )
    if causal and q.shape[-3] != k.shape[-3]:
        raise ValueError(f"q is {shown(q)} and k is {shown(k)}; causal with axis_name needs shards of T = S")
    unbatched = q.ndim == 3
    if unbatched:
        q, k, v = q[None], k[None], v[None]
    ids = _settle_segments(segment_ids, q.shape[0], q.shape[1], k.shape[1], unbatched)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, causal: bool) -> tuple[jax.Array, jax.Array]:
        given = {name: value for name, value in only_whole.items() if value is not None}
        results = flash_attention(q, k, v, segment_ids=ids, causal=causal, return_logsumexp=True, **given, **options)
        assert isinstance(results, tuple)
        return results

    run = attend_over_heads if way == "heads" else attend_in_ring
    out, logsumexp = run(attend, q, k, v, None if ids[0] is None else ids, causal, axis_name)
    return (out[0], logsumexp[0]) if unbatched else (out, logsumexp)


def _is_per_head(mask: Any) -> bool:
    return isinstance(mask, Mask) and mask.num_heads is not None


def _validate_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    if q.ndim not in (3, 4) or q.dtype.name not in FLOATING:
        raise ValueError(
            f"q is {shown(q)}; it must be [B, T, H, D] or [T, H, D] of float32 or bfloat16: q.astype(jnp.bfloat16)"
        )
    for name, array in (("k", k), ("v", v)):
        if array.ndim != q.ndim or array.shape[: q.ndim - 3] != q.shape[: q.ndim - 3]:
            raise ValueError(
                f"{name} is {shown(array)} and q is {shown(q)}; they must have as many axes and the same batch: "
                f"[B, S, KV, D]"
            )
        if array.dtype != q.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and q has {q.dtype.name}; they must be equal: "
                f"pass {name}.astype(q.dtype)"
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"v is {shown(v)} and k is {shown(k)}; they must have the same S and KV")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k is {shown(k)} and q is {shown(q)}; the last axes must be equal (D={q.shape[-1]})")
    if q.shape[-1] == 0:
        raise ValueError(f"q is {shown(q)}; D must be at least 1")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has H={heads} heads and k has KV={kv_heads}; H must be a multiple of KV, each KV head serving H / KV "
            f"query heads: drop or repeat heads until it is"
        )


def _number(name: str, value: Any, default: float) -> float:
    if value is None:
        return float(default)
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise ValueError(
            f"{name}={value!r} is not a Python number; it is built into the kernel, so it must be known when traced: "
            f"pass a float, or multiply q by it"
        )
    if not np.isfinite(value) and name == "scale":
        raise ValueError(f"{name}={value} must be finite; use None for D ** -0.5")
    return float(value)


def _settle_masks(
    mask: Any, causal: bool, window: Any, b: int, t: int, h: int, s: int, q_offset: int
) -> tuple[Mask | None, jax.Array | None]:
    """A mask that is known when traced, and a mask array that is not; either may be None."""
    static: Mask | None = None
    dynamic: jax.Array | None = None
    if isinstance(mask, np.ndarray):
        mask = _dense(mask, t, s)
    if isinstance(mask, Mask):
        if (misfit := mask.misfit(h, t, s)) is not None:
            raise ValueError(f"mask={misfit}")
        static = mask
    elif isinstance(mask, jax.Array):
        if mask.dtype != jnp.bool_:
            raise ValueError(
                f"mask is {shown(mask)}; it must be bool: pass mask != 0, or give an additive one as bias="
            )
        dynamic = _four_axes("mask", mask, (b, h, t, s), may_be_one=(0, 1, 2, 3))
    elif mask is not None:
        raise ValueError(
            f"mask={mask!r} is not a mask; use a value of tilewright.masks, such as Causal(), or an array of bool"
        )
    if window is not None:
        alone = _with_window(None, window)
        joined = _with_window(static, window)
        if (
            static is not None
            and alone is not None
            and joined is not None
            and isinstance(t * s, int)  # Not symbolic (`jax.export`).
            and t * s
            and not _attends(joined, t, s, q_offset)
            # A window alone may leave nothing: the keys of a call may be a split of a sequence, far from its queries.
            and (_attends(alone, t, s, q_offset) or not _attends(static, t, s, q_offset))
        ):
            raise ValueError(
                f"window={tuple(window)} together with mask={mask} leaves no query anything to attend to; they "
                f"contradict each other: leave one out, or mend q_offset={q_offset}"
            )
        static = joined
    if causal:
        static = Causal() if static is None else static & Causal()
    return static, dynamic


def _attends(mask: Mask, t: int, s: int, q_offset: int) -> bool:
    """Whether any query attends to any key. The search ends at the first that does."""
    if mask.computable:
        grid = Grid(t, s, _SEARCHED_BLOCK, _SEARCHED_BLOCK, q_offset)
        kinds = mask.kinds(grid)[0]  # [num_q, num_k]
        if np.any(kinds == FULL):
            return True
        blocks = [(i * _SEARCHED_BLOCK, j * _SEARCHED_BLOCK) for i, j in np.argwhere(kinds == PARTIAL).tolist()]
        size = (_SEARCHED_BLOCK, _SEARCHED_BLOCK)
    else:
        # The kinds of blocks would take evaluating the mask whole.
        size = (max(1, _SEARCHED_PAIRS // s), s)
        blocks = [(start, 0) for start in range(0, t, size[0])]
    for first_q, first_k in blocks:
        rows = np.arange(first_q, min(first_q + size[0], t))[:, None]
        columns = np.arange(first_k, min(first_k + size[1], s))[None, :]
        if any(np.any(mask.keep(rows, columns, q_offset, head)) for head in range(mask.num_heads or 1)):
            return True
    return False


def _dense(mask: np.ndarray, t: int, s: int) -> Mask:
    if mask.dtype != np.bool_ or mask.shape[-2:] != (t, s) or mask.ndim not in (2, 3):
        raise ValueError(
            f"mask is {mask.dtype.name}{list(mask.shape)}; a numpy mask must be bool, [T, S] = [{t}, {s}] or [H, T, S]; "
            f"pass jnp.asarray(mask) if it differs over the batch"
        )
    return Dense(mask)


def _with_window(static: Mask | None, window: Any) -> Mask | None:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            f"window={window!r} must be a pair (left, right) of tokens beside the query's own; "
            f"use ({window!r}, 0) for tokens before it"
        )
    if static is not None and (found := contains(static, SlidingWindow)) is not None:
        raise ValueError(
            f"window={tuple(window)} together with a mask that has {found} in it; which one should hold? Pass the "
            f"window, or the mask: mask & SlidingWindow{tuple(window)}"
        )
    inside = SlidingWindow(*window)
    if window[0] is None and window[1] is None:
        return static
    return inside if static is None else static & inside


def _four_axes(name: str, array: jax.Array, full: tuple[int, ...], may_be_one: tuple[int, ...]) -> jax.Array:
    """The array with axes of size 1 in front, [B or 1, H or 1, ...], or an error."""
    shape = (1,) * (4 - array.ndim) + array.shape
    fits = len(shape) == 4 and all(
        size == want or (size == 1 and axis in may_be_one)
        for axis, (size, want) in enumerate(zip(shape, full, strict=True))
    )
    if not fits:
        ones = ", ".join("BHTS"[axis] for axis in may_be_one)
        raise ValueError(
            f"{name} is {shown(array)}; it must broadcast to [B, H, T, S] = {list(full)}, where {ones} may be 1: "
            f"add axes in front with {name}[None]"
        )
    return array.reshape(shape)


def _settle_segments(ids: Any, b: int, t: int, s: int, unbatched: bool) -> tuple[jax.Array | None, jax.Array | None]:
    if ids is None:
        return None, None
    pair = ids if isinstance(ids, tuple | list) else (ids, ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids has {len(pair)} arrays; pass one array [B, T], or a pair (q ids, kv ids)")
    settled = []
    for which, length, array in zip(("q", "kv"), (t, s), pair, strict=True):
        array = jnp.asarray(array)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"segment_ids has dtype {array.dtype.name}; they must be integers: ids.astype(jnp.int32)")
        array = array[None] if unbatched and array.ndim == 1 else array
        if array.shape != (b, length):
            remedy = "pass one array [B, T], or a pair (q ids [B, T], kv ids [B, S])"
            raise ValueError(
                f"segment_ids of {which} is {shown(array)}; it must be [{b}, {length}], an id for each token: {remedy}"
            )
        settled.append(array.astype(jnp.int32))
    return settled[0], settled[1]


def _spread_mask(
    keep: jax.Array | None, q_ids: jax.Array | None, kv_ids: jax.Array | None, b: int, t: int, s: int
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """A mask array as [B or 1, H or 1, T, S]. A mask of the keys alone becomes segments, which are T times smaller."""
    if keep is None:
        return None, q_ids, kv_ids
    if keep.shape[1:3] == (1, 1) and q_ids is None:
        valid = jnp.broadcast_to(keep[:, 0, 0], (b, s))
        return None, jnp.zeros((b, t), jnp.int32), jnp.where(valid, 0, 1).astype(jnp.int32)
    return jnp.broadcast_to(keep, (*keep.shape[:2], t, s)), q_ids, kv_ids


def _settle_bias(bias: Any, b: int, t: int, h: int, s: int) -> jax.Array | None:
    if bias is None:
        return None
    bias = jnp.asarray(bias)
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(
            f"bias is {shown(bias)}; it must be floating: pass bias.astype(jnp.float32), or give bools as mask="
        )
    bias = _four_axes("bias", bias, (b, h, t, s), may_be_one=(0, 1, 2))
    size_bytes = bias.size * bias.dtype.itemsize
    if isinstance(size_bytes, int) and size_bytes > _MOST_BIAS_BYTES:  # A size may be symbolic (`jax.export`).
        raise ValueError(
            f"bias is {shown(bias)}, {size_bytes / 2**30:,.0f} GiB to hold and to read for each pass, and its gradient as "
            f"much again; give what it depends on instead: a mask of tilewright.masks, a window, soft_cap, or a bias "
            f"[B, H, 1, S] of the keys alone"
        )
    return bias


def _settle_sinks(sinks: Any, h: int) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if sinks.shape != (h,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"sinks is {shown(sinks)}; it must be floating [H] = [{h}], a logit for each query head")
    return sinks
