"""Attention over a cache as a Mosaic TPU kernel, for a cache in one piece and one in pages.

For each sequence and key head, an online softmax of its few queries over the keys up to the length:

    a_s = log2(e) cap(scale q . k_s)      out = sum_s 2^(a_s - m) v_s / l      logsumexp = (m + log2 l) / log2(e)

Floor: the keys and values that are attended to, read once; the rest is small. The kernel reads them once, in whole blocks.

Blocking: grid (B, KV / block_heads, steps), the steps in order. A step fetches block_k keys of block_heads heads, or
several pages: each page is an input with an index of its own, from the prefetched table. Steps past a sequence's length,
and before its window, repeat the index of a neighbouring step: nothing is fetched for them, and nothing computed.

The query heads of a group, and the few tokens, are the sublanes of one operand [T * group, D], so a key head is multiplied
with all its query heads at once; rows are padded to 16.

Edges: what a block holds past the length is not defined, and a cache may hold anything there. Logits are masked there, and
so are the values, since 0 times NaN is NaN.

Numerics as in flash_attention. The gradient is that of the xla version: decoding is not trained through.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, MIB, ROW_TILE, SUBLANES, Chip
from tilewright.core.implementation import Implementation, Launch, Pass, gradient_of
from tilewright.ops.attention.decode import xla
from tilewright.ops.attention.decode.bounds import Outputs, within_bounds
from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.decode.config import DecodeTpuForward
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST, MASKED
from tilewright.pallas.arrays import dot_f32, padded
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, not_float64, padded_bytes

_KEYS = 512  # Per step, as far as they fit.
_MOST_HEADS = 4
_MOST_PAGES = 8  # More pages are more copies and code per step than they save.
_VMEM_SHARE = 0.6
_WORD_BYTES = 4


def _heuristic(chip: Chip, call: DecodeCall) -> DecodeTpuForward:
    """About 512 keys per step, of up to four heads at a time, as far as they fit."""
    heads, page, room = call.k.shape[2], call.page, call.room
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (n == heads or _fills_lanes(call, n))]
    block_heads = max((n for n in fitting if n <= _MOST_HEADS), default=fitting[0])
    budget = _VMEM_SHARE * (chip.vmem_bytes or 16 * MIB)
    keys = min(_KEYS, -(-room // ROW_TILE) * ROW_TILE)
    while True:
        pages = 1 if page is None else min(max(1, keys // page), _MOST_PAGES, -(-room // page))
        config = DecodeTpuForward(keys, pages, block_heads)
        if keys <= ROW_TILE or max(_memory(call, Launch(chip, config, None)).values()) <= budget:
            return config
        keys = max(ROW_TILE, keys // 2 // ROW_TILE * ROW_TILE)


def _fills_lanes(call: DecodeCall, block_heads: int) -> bool:
    return all(block_heads * width % LANES == 0 for width in (call.q.shape[3], call.v.shape[3]))


def _unsupported_reason(call: DecodeCall, launch: Launch) -> str | None:
    config: DecodeTpuForward = launch.config
    if (reason := not_float64(call.q)) is not None:
        return reason
    heads = call.k.shape[2]
    if heads % config.block_heads or (config.block_heads != heads and not _fills_lanes(call, config.block_heads)):
        return (
            f"block_heads={config.block_heads} must divide KV={heads}, and fill whole lanes ({LANES}) with "
            f"D={call.q.shape[3]} and Dv={call.v.shape[3]} or be all of them; use {heads}, or implementation='xla'"
        )
    tile = SUBLANES * _WORD_BYTES // call.q.dtype.itemsize
    if call.page is not None and call.page % tile:
        return (
            f"pages of {call.page} keys are not whole tiles of {tile}; use pages of {tile} or more, or "
            f"implementation='xla'"
        )
    return None


def _first_step(length: Any, tokens: int, window: int | None, keys: int) -> Any:
    """The step in which the window of the first query begins."""
    if window is None:
        return 0
    # Not //, which also looks at the signs of its operands, and lowers only where there is a TPU.
    return jax.lax.div(jnp.maximum(length - tokens - window, 0), jnp.int32(keys))


def _last_step(length: Any, keys: int) -> Any:
    return jax.lax.div(jnp.maximum(length - 1, 0), jnp.int32(keys))


def _decode_kernel(
    *,
    # prefetched
    lengths_ref,  # [B]
    table_ref,  # [B * pages]
    # inputs
    q_ref,  # [block_heads, rows, D]
    token_ref,  # [rows, 1], the token of each row
    sinks_ref,  # [block_heads, rows, 1], in units of log 2; LOWEST for none
    # outputs
    out_ref,  # [block_heads, rows, Dv]
    logsumexp_ref,  # [block_heads, rows, LANES]
    # scratch
    max_scratch,  # [block_heads, rows, LANES] float32, the maximum of each row, the same in each lane
    total_scratch,  # [block_heads, rows, LANES] float32
    acc_scratch,  # [block_heads, rows, Dv] float32
    # static
    call: DecodeCall,
    pages: int,
    # inputs k0_ref, k1_ref, ..., v0_ref, ...: one per page, [keys, block_heads * D]
    **cache_refs,
):
    k_refs, v_refs = ([cache_refs[f"{name}{page}_ref"] for page in range(pages)] for name in "kv")
    tokens, window, scale, soft_cap = call.q.shape[1], call.window, call.scale, call.soft_cap
    heads, rows, d = q_ref.shape
    dv = out_ref.shape[2]
    keys = pages * k_refs[0].shape[0]
    length = lengths_ref[pl.program_id(0)]
    step = _first_step(length, tokens, window, keys) + pl.program_id(2)

    @pl.when(pl.program_id(2) == 0)
    def _start():
        sinks = jnp.broadcast_to(sinks_ref[...], max_scratch.shape)
        max_scratch[...] = jnp.maximum(sinks, LOWEST)
        total_scratch[...] = jnp.where(sinks > LOWEST, 1.0, 0.0)
        acc_scratch[...] = jnp.zeros_like(acc_scratch)

    @pl.when(step * keys < length)
    def _add_keys():
        column = step * keys + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        position = (length - tokens) + token_ref[...]  # [rows, 1]
        allowed = column <= position
        if window is not None:
            allowed = allowed & (column >= position - window)
        in_use = step * keys + jax.lax.broadcasted_iota(jnp.int32, (keys, dv), 0) < length
        for head in range(heads):
            k = jnp.concatenate([ref[:, head * d : (head + 1) * d] for ref in k_refs], axis=0)  # [keys, D]
            v = jnp.concatenate([ref[:, head * dv : (head + 1) * dv] for ref in v_refs], axis=0)  # [keys, Dv]
            logits = dot_f32(q_ref[head], k, (1, 1))  # [rows, keys]
            if soft_cap is None:
                logits = logits * (scale * LOG2_E)
            else:
                logits = jnp.tanh(logits * (scale / soft_cap)) * (soft_cap * LOG2_E)
            logits = jnp.where(allowed, logits, MASKED)
            before = max_scratch[head]  # [rows, LANES]
            row_max = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
            alpha = jnp.exp2(before - row_max)
            weights = jnp.exp2(logits - row_max[:, :1])
            total_scratch[head] = total_scratch[head] * alpha + jnp.sum(weights, axis=1, keepdims=True)
            max_scratch[head] = row_max
            added = dot_f32(weights.astype(v.dtype), jnp.where(in_use, v, jnp.zeros_like(v)), (1, 0))  # [rows, Dv]
            acc_scratch[head] = acc_scratch[head] * alpha[:, :1] + added

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _finish():
        total = total_scratch[...]  # [block_heads, rows, LANES]
        nothing = total == 0
        safe = jnp.where(nothing, 1.0, total)
        out_ref[...] = (acc_scratch[...] / safe[:, :, :1]).astype(out_ref.dtype)
        logsumexp = (max_scratch[...] + jnp.log2(safe)) * (1.0 / LOG2_E)
        logsumexp_ref[...] = jnp.where(nothing, -jnp.inf, logsumexp)


def _rows(call: DecodeCall) -> int:
    """Query rows per key head: its group's heads for each token, padded."""
    return -(-call.q.shape[1] * call.group // ROW_TILE) * ROW_TILE


def _steps(call: DecodeCall, config: DecodeTpuForward) -> tuple[int, int, int]:
    """Inputs per step for the keys, keys of each, and steps."""
    pages, block = (1, config.block_k) if call.page is None else (config.pages, call.page)
    steps = pl.cdiv(call.room, pages * block)
    if call.window is not None:
        steps = min(steps, pl.cdiv(call.window + call.q.shape[1], pages * block) + 1)
    return pages, block, steps


def _declaration(call: DecodeCall, config: DecodeTpuForward) -> Kernel:
    (b, t, _, d), (kv, dv), dtype = call.q.shape, call.v.shape[2:], call.q.dtype
    rows, heads, window = _rows(call), config.block_heads, call.window
    pages, block, steps = _steps(call, config)
    keys, per_sequence = pages * block, 0 if call.page_table is None else call.page_table.shape[1]

    def cache(width: int, page: int) -> Block:
        def index(i: Any, j: Any, n: Any, lengths_ref: Any, table_ref: Any) -> tuple[Any, ...]:
            length = lengths_ref[i]
            step = jnp.minimum(_first_step(length, t, window, keys) + n, _last_step(length, keys))
            if not per_sequence:
                return i, step, j
            # Past the end of the table, the later pages of a step repeat its last one.
            return table_ref[i * per_sequence + jnp.minimum(step * pages + page, per_sequence - 1)], 0, j

        return Block((None, block, heads * width), dtype, index)

    def of_heads(width: int, dtype: Any) -> Block:
        return Block((None, heads, rows, width), dtype, lambda i, j, n, *_: (i, j, 0, 0))

    sinks = Block((heads, rows, 1), jnp.float32, lambda i, j, n, *_: (j, 0, 0))
    if call.sinks is not None and call.sinks.shape[0] > 1:
        sinks = of_heads(1, jnp.float32)
    statistics = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    return Kernel(
        name="decode_attention_forward",
        grid={"batch": Axis(b, "parallel"), "heads": Axis(kv // heads, "parallel"), "step": Axis(steps)},
        prefetched=("lengths", "table"),
        inputs={
            "q": of_heads(d, dtype),
            "token": Block((rows, 1), jnp.int32, lambda i, j, n, *_: (0, 0)),
            "sinks": sinks,
            **{f"k{page}": cache(d, page) for page in range(pages)},
            **{f"v{page}": cache(dv, page) for page in range(pages)},
        },
        outputs={
            "out": Output((b, kv, rows, dv), of_heads(dv, dtype)),
            "logsumexp": Output((b, kv, rows, LANES), of_heads(LANES, jnp.float32)),
        },
        scratch={
            "max_scratch": statistics,
            "total_scratch": statistics,
            "acc_scratch": pltpu.VMEM((heads, rows, dv), jnp.float32),
        },
    )


def _memory(call: DecodeCall, launch: Launch) -> dict[str, int]:
    pages, block, _ = _steps(call, launch.config)
    # Beside the blocks of the pipeline, the keys and values of a step once more while they are computed with.
    widths = (launch.config.block_heads * width for width in (call.q.shape[3], call.v.shape[3]))
    step = sum(padded_bytes((pages * block, width), call.q.dtype) for width in widths)
    return {"decode": _declaration(call, launch.config).vmem_bytes(temporaries=step)}


def _sink_rows(call: DecodeCall) -> jax.Array:
    """The sink of each query row in units of log 2: [KV, rows, 1], or [B, KV, rows, 1] where sequences have their own."""
    (_, t, _, _), kv, group, rows = call.q.shape, call.k.shape[2], call.group, _rows(call)
    if call.sinks is None:
        return jnp.full((kv, rows, 1), LOWEST, jnp.float32)
    per_head = call.sinks.astype(jnp.float32).reshape(-1, kv, 1, group) * LOG2_E
    tiled = jnp.broadcast_to(per_head, (per_head.shape[0], kv, t, group)).reshape(-1, kv, t * group, 1)
    whole = jnp.pad(tiled, ((0, 0), (0, 0), (0, rows - t * group), (0, 0)), constant_values=LOWEST)
    return whole[0] if whole.shape[0] == 1 else whole


def _attend(call: DecodeCall, launch: Launch) -> Outputs:
    (b, t, h, d), (kv, dv) = call.q.shape, call.v.shape[2:]
    group = call.group
    pages, block, steps = _steps(call, launch.config)
    grouped = call.q.reshape(b, t, kv, group, d).transpose(0, 2, 1, 3, 4).reshape(b, kv, t * group, d)
    grouped = padded(grouped, 2, ROW_TILE)  # [B, KV, rows, D]: the heads of a token are adjacent rows
    token = jnp.minimum(jnp.arange(grouped.shape[2], dtype=jnp.int32) // group, t - 1)[:, None]
    table = jnp.zeros((1,), jnp.int32) if call.page_table is None else call.page_table.reshape(-1)
    k, v = (cache.reshape(*cache.shape[:2], -1) for cache in (call.k, call.v))
    pairs = b * h * t * steps * pages * block
    outputs = _declaration(call, launch.config).run(
        functools.partial(_decode_kernel, call=call, pages=pages),
        {
            "lengths": call.lengths,
            "table": table,
            "q": grouped,
            "token": token,
            "sinks": _sink_rows(call),
            **{f"k{page}": k for page in range(pages)},
            **{f"v{page}": v for page in range(pages)},
        },
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=b * kv * steps * pages * block * (d + dv) * call.q.dtype.itemsize,
        ),
    )

    def ungrouped(array: jax.Array) -> jax.Array:
        """[B, KV, rows, ...] as [B, T, H, ...]."""
        split = array[:, :, : t * group].reshape(b, kv, t, group, *array.shape[3:])
        return jnp.moveaxis(split, 1, 2).reshape(b, t, h, *array.shape[3:])

    return ungrouped(outputs["out"]), ungrouped(outputs["logsumexp"][..., 0])


IMPLEMENTATION = Implementation(
    forward=Pass(
        within_bounds(_attend),
        config=DecodeTpuForward,
        heuristic=_heuristic,
        unsupported_reason=_unsupported_reason,
        memory=_memory,
        memory_fields="a smaller block_k, pages or block_heads",
    ),
    backward=gradient_of("xla", xla.IMPLEMENTATION.forward),
)
