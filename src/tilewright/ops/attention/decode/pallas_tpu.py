"""Attention over a cache as a Mosaic TPU kernel, for a cache in one piece and one in pages.

For each sequence and key head, an online softmax of its few queries over the keys up to the length:

    a_s = log2(e) cap(scale q . k_s)      out = sum_s 2^(a_s - m) v_s / l      logsumexp = (m + log2 l) / log2(e)

Floor: the keys and values that are attended to, read once; the rest is small. Here they are read once, in whole blocks.

Blocking: grid (B, KV / block_heads, steps), the steps in order. A step fetches block_k keys of block_heads heads, or
as many pages: a page is an input of its own with an index of its own, from the prefetched table, so a step can have
several. Steps past a sequence's length, and before its window, keep the index of the step beside them: nothing is
fetched for them, and nothing computed.

The queries of a group, and the few tokens, are the sublanes of one operand [T * group, D], so a key head is multiplied
with all its query heads at once; rows are padded to 16.

Edges: what a block holds past the length is not defined, and in a cache it may be anything. Logits are masked there, and
so are the values, since 0 times NaN is NaN.

Numerics as in flash_attention. The gradient is that of the xla version: decoding is not trained through.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from tilewright.core.chip import LANES, MIB, ROW_TILE, Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.attention.decode.bounds import room_of, within_bounds
from tilewright.ops.attention.decode.config import PallasTpuConfig
from tilewright.ops.attention.decode.gradient import with_plain_gradient
from tilewright.ops.attention.tpu_tiles import LOG2_E, LOWEST, MASKED, dot_f32, pad_to

Config = PallasTpuConfig


def _page(k: Any, page_table: Any) -> int | None:
    return None if page_table is None else k.shape[1]


def default_config(
    chip: Chip, q: Any, k: Any, v: Any, page_table: Any, *arrays: Any, **options: Any
) -> PallasTpuConfig:
    del arrays, options
    return PallasTpuConfig.for_shape(
        chip,
        room_of(k, page_table),
        _page(k, page_table),
        k.shape[2],
        q.shape[3],
        v.shape[3],
        jnp.dtype(q.dtype).itemsize,
    )


def unsupported_reason(
    launch: Launch, q: Any, k: Any, v: Any, page_table: Any, *arrays: Any, **options: Any
) -> str | None:
    del arrays, options
    config: PallasTpuConfig = launch.config
    itemsize = jnp.dtype(q.dtype).itemsize
    if q.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    heads, widths = k.shape[2], (q.shape[3], v.shape[3])
    whole_lanes = all(config.block_heads * width % LANES == 0 for width in widths)
    if heads % config.block_heads or (config.block_heads != heads and not whole_lanes):
        return (
            f"block_heads={config.block_heads} must divide KV={heads}, and fill whole lanes ({LANES}) with D={widths[0]} "
            f"and Dv={widths[1]} or be all of them; use {heads}, or implementation='xla'"
        )
    page = _page(k, page_table)
    tile = 8 * 4 // itemsize
    if page is not None and page % tile:
        return (
            f"pages of {page} keys are not whole tiles of {tile}; use pages of {tile} or more, or implementation='xla'"
        )
    keys = config.block_k if page is None else config.pages * page
    needed = config.vmem_bytes(keys, *widths, itemsize)
    if launch.chip.vmem_bytes is not None and needed > launch.chip.vmem_bytes:
        return (
            f"a step of {keys} keys needs about {needed / MIB:.0f} MiB of VMEM, and a {launch.chip.name} has "
            f"{launch.chip.vmem_bytes / MIB:.0f}; use a smaller block_k, pages or block_heads, or implementation='xla'"
        )
    return None


def _first_step(length: Any, tokens: int, window: int | None, keys: int) -> Any:
    """The step that the window of the first query begins in."""
    if window is None:
        return 0
    # Not //, which lowers to the sign of its operands too, and that only with a TPU at hand.
    return jax.lax.div(jnp.maximum(length - tokens - window, 0), jnp.int32(keys))


def _last_step(length: Any, keys: int) -> Any:
    return jax.lax.div(jnp.maximum(length - 1, 0), jnp.int32(keys))


def _decode_kernel(
    # prefetched
    lengths_ref,  # [B]
    table_ref,  # [B * pages]
    # inputs
    q_ref,  # [block_heads, rows, D]
    token_ref,  # [rows, 1], the token that a row is of
    sinks_ref,  # [block_heads, rows, 1], in units of log 2; LOWEST for none
    *refs,
    # k and v, an input a page; then outputs [block_heads, rows, Dv], [block_heads, rows, LANES]; then scratch
    pages: int,
    tokens: int,
    window: int | None,
    scale: float,
    soft_cap: float | None,
):
    k_refs, v_refs = refs[:pages], refs[pages : 2 * pages]  # each [keys, block_heads * D]
    out_ref, logsumexp_ref, highest_scratch, total_scratch, acc_scratch = refs[2 * pages :]
    heads, rows, d = q_ref.shape
    dv = out_ref.shape[2]
    keys = pages * k_refs[0].shape[0]
    length = lengths_ref[pl.program_id(0)]
    step = _first_step(length, tokens, window, keys) + pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _start():
        sinks = jnp.broadcast_to(sinks_ref[...], highest_scratch.shape)
        highest_scratch[...] = jnp.maximum(sinks, LOWEST)
        total_scratch[...] = jnp.where(sinks > LOWEST, 1.0, 0.0)
        acc_scratch[...] = jnp.zeros_like(acc_scratch)

    @pl.when(step * keys < length)
    def _add_keys():
        column = step * keys + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        position = (length - tokens) + token_ref[...]  # [rows, 1]
        allowed = column <= position
        if window is not None:
            allowed = allowed & (column >= position - window)
        held = step * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, dv), 0) < length
        for head in range(heads):
            k = jnp.concatenate([ref[:, head * d : (head + 1) * d] for ref in k_refs], axis=0)  # [keys, D]
            v = jnp.concatenate([ref[:, head * dv : (head + 1) * dv] for ref in v_refs], axis=0)  # [keys, Dv]
            logits = dot_f32(q_ref[head], k, (1, 1))  # [rows, keys]
            if soft_cap is None:
                logits = logits * (scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2_E)
            logits = jnp.where(allowed, logits, MASKED)
            before = highest_scratch[head]  # [rows, LANES], each lane the same
            highest = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            alpha = jnp.exp2(before - highest)
            weights = jnp.exp2(logits - highest[:, :1])
            total_scratch[head] = total_scratch[head] * alpha + jnp.sum(weights, axis=1, keepdims=True)
            highest_scratch[head] = highest
            added = dot_f32(weights.astype(v.dtype), jnp.where(held, v, jnp.zeros_like(v)), (1, 0))  # [rows, Dv]
            acc_scratch[head] = acc_scratch[head] * alpha[:, :1] + added

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _finish():
        total = total_scratch[...]  # [block_heads, rows, LANES]
        nothing = total == 0
        safe = jnp.where(nothing, 1.0, total)
        out_ref[...] = (acc_scratch[...] / safe[:, :, :1]).astype(out_ref.dtype)
        logsumexp = (highest_scratch[...] + jnp.log2(safe)) * (1.0 / LOG2_E)
        logsumexp_ref[...] = jnp.where(nothing, -jnp.inf, logsumexp)


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array | None,
    lengths: jax.Array,
    sinks: jax.Array | None,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    config: PallasTpuConfig = launch.config
    (b, t, h, d), (kv, dv) = q.shape, v.shape[2:]
    group, heads = h // kv, config.block_heads
    paged = page_table is not None
    pages = config.pages if paged else 1
    block = k.shape[1] if paged else config.block_k
    keys, room = pages * block, room_of(k, page_table)
    steps = pl.cdiv(room, keys)
    if window is not None:
        steps = min(steps, pl.cdiv(window + t, keys) + 1)

    grouped = q.reshape(b, t, kv, group, d).transpose(0, 2, 1, 3, 4).reshape(b, kv, t * group, d)
    grouped = pad_to(grouped, 2, ROW_TILE)  # [B, KV, rows, D], rows a token's heads at a time
    rows = grouped.shape[2]
    token = jnp.minimum(jnp.arange(rows, dtype=jnp.int32) // group, t - 1)[:, None]
    sink_rows = jnp.full((kv, rows, 1), LOWEST, jnp.float32)
    if sinks is not None:
        per_head = sinks.astype(jnp.float32).reshape(kv, 1, group) * LOG2_E
        tiled = jnp.broadcast_to(per_head, (kv, t, group)).reshape(kv, t * group, 1)
        sink_rows = jnp.pad(tiled, ((0, 0), (0, rows - t * group), (0, 0)), constant_values=LOWEST)
    table = page_table.reshape(-1) if page_table is not None else jnp.zeros((1,), jnp.int32)
    per_sequence = page_table.shape[1] if page_table is not None else 0

    def cache_index(page: int) -> Any:
        def index(i: Any, j: Any, n: Any, lengths_ref: Any, table_ref: Any) -> tuple[Any, ...]:
            length = lengths_ref[i]
            step = jnp.minimum(_first_step(length, t, window, keys) + n, _last_step(length, keys))
            if not paged:
                return i, step, j
            # Past the end of the table a step's later pages repeat its last one.
            return table_ref[i * per_sequence + jnp.minimum(step * pages + page, per_sequence - 1)], 0, j

        return index

    def of_heads(shape: tuple[int, ...]) -> Any:
        return pl.BlockSpec((None, heads, *shape), lambda i, j, n, *_: (i, j, 0, 0))

    k_lanes, v_lanes = (cache.reshape(*cache.shape[:2], -1) for cache in (k, v))
    cache_specs = [
        pl.BlockSpec((None, block, heads * width), cache_index(page)) for width in (d, dv) for page in range(pages)
    ]
    scratch = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    out, logsumexp = pl.pallas_call(
        functools.partial(_decode_kernel, pages=pages, tokens=t, window=window, scale=scale, soft_cap=soft_cap),
        out_shape=(
            output_like((b, kv, rows, dv), q.dtype, q),
            output_like((b, kv, rows, LANES), jnp.float32, q),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, kv // heads, steps),
            in_specs=[
                of_heads((rows, d)),
                pl.BlockSpec((rows, 1), lambda i, j, n, *_: (0, 0)),
                pl.BlockSpec((heads, rows, 1), lambda i, j, n, *_: (j, 0, 0)),
                *cache_specs,
            ],
            out_specs=(of_heads((rows, dv)), of_heads((rows, LANES))),
            scratch_shapes=[scratch, scratch, pltpu.VMEM((heads, rows, dv), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * b * h * t * steps * keys * (d + dv),
            transcendentals=b * h * t * steps * keys,
            bytes_accessed=b * kv * steps * keys * (d + dv) * q.dtype.itemsize,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="decode_attention_forward",
    )(lengths, table, grouped, token, sink_rows, *[k_lanes] * pages, *[v_lanes] * pages)

    def ungrouped(array: jax.Array) -> jax.Array:
        """[B, KV, rows, ...] as [B, T, H, ...]."""
        split = array[:, :, : t * group].reshape(b, kv, t, group, *array.shape[3:])
        return jnp.moveaxis(split, 1, 2).reshape(b, t, h, *array.shape[3:])

    return ungrouped(out), ungrouped(logsumexp[..., 0])


_attend = with_plain_gradient(_forward)


@within_bounds
def paged_attention_pallas_tpu(
    q: Float[Array, "B T H D"],
    k: Float[Array, "_ _ KV D"],
    v: Float[Array, "_ _ KV Dv"],
    page_table: Int[Array, "B pages"] | None,
    lengths: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Out and logsumexp."""
    return _attend(q, k, v, page_table, lengths, sinks, window, scale, soft_cap, launch)


decode_attention_pallas_tpu = paged_attention_pallas_tpu
