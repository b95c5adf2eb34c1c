"""Attention in plain JAX, a block of queries against a block of keys at a time: the logits never exist whole.

Forward: for each block of queries, a loop over the blocks of keys that its mask has work in, with an online softmax.
Backward: for each block of keys, a loop over the blocks of queries. The logits are recomputed; their gradient is summed
into dk and dv, which are complete after the loop, and added to dq.

Floor: 2 (D + Dv) FLOPs for each pair that attends, and 2 (3 D + 2 Dv) in the backward. Here whole blocks are computed.
Blocks that a static mask leaves empty are skipped: the loops run over lists that are made when traced. Segments and
mask arrays are applied, and skip nothing. With a symbolic T or S (`jax.export`) nothing is skipped either: the lists would
depend on sizes that are not known.
Memory beyond inputs and gradients: a few tiles [B, H, block_q, block_k], q, k, v and their gradients with the heads in
front, and dq in float32. A mask that is not computed from positions adds its distinct partial blocks.

Any T and S: both are padded to whole blocks, which costs a copy where they are not; keys past S are masked.

Numerics: float32 inputs are multiplied in float32 (Precision.HIGHEST), on TPUs and GPUs too. Weights and gradients of
logits are rounded to the inputs' dtype for the products that use them.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.boundary import Unsupported
from tilewright.core.chip import MIB, Chip
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.masks.block_list import EMPTY, Grid, block_table
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionXlaBackward, AttentionXlaForward
from tilewright.ops.attention.softmax_rows import (
    MASKED_BELOW,
    SAVED_AXES,
    BackwardRows,
    SavedRows,
    backward_rows,
    outputs_of,
)
from tilewright.pallas.arrays import padded

_FLOAT32_BYTES = 4
# A tile of logits in float32, over batch and heads. It bounds the temporary memory.
_TILE_BYTES = 64 * MIB


def _choose(kind: Any, chip: Chip, call: AttentionCall) -> Any:
    """Square tiles, 512 at most: smaller ones skip more of a causal mask, larger ones have fewer steps."""
    (b, t, h, _), s = call.q.shape, call.k.shape[1]
    side = 512
    while side > 32 and b * h * side * side * _FLOAT32_BYTES > _TILE_BYTES:
        side //= 2
    # As many blocks as that needs, all of one size: the last is not left nearly empty.
    return kind(*(-(-length // -(-length // side)) for length in (t, s)))


class _Blocks:
    """A call divided into blocks, with the heads in front: [B, KV, group, length, width]."""

    def __init__(self, call: AttentionCall, config: AttentionXlaForward | AttentionXlaBackward):
        self.call, self.group = call, call.group
        (self.b, self.t, self.h, self.d), (_, self.s, self.kv, self.dv) = call.q.shape, call.v.shape
        known = isinstance(self.t, int) and isinstance(self.s, int)
        self.block_q, self.block_k = (
            min(block, size) if isinstance(size, int) else block
            for block, size in ((config.block_q, self.t), (config.block_k, self.s))
        )
        self.grid = Grid(self.t, self.s, self.block_q, self.block_k, call.q_offset)
        self.table = block_table(call.mask, self.grid) if known else None
        self.accumulate = accumulator(call.q.dtype)
        self.q = self.heads_first(call.q)  # [B, KV, group, T, D]
        self.k = padded(call.k.transpose(0, 2, 1, 3), 2, self.block_k)  # [B, KV, S, D]
        self.v = padded(call.v.transpose(0, 2, 1, 3), 2, self.block_k)
        bias, q_ids, kv_ids, keep = call.bias, call.q_segments, call.kv_segments, call.keep
        if bias is not None:
            bias = padded(padded(bias, 3, self.block_k), 2, 1 if bias.shape[2] == 1 else self.block_q)
        self.bias = bias
        self.q_ids = None if q_ids is None else padded(q_ids, 1, self.block_q)
        self.kv_ids = None if kv_ids is None else padded(kv_ids, 1, self.block_k)
        self.keep = None if keep is None else padded(padded(keep, 3, self.block_k), 2, self.block_q)
        self.contents, self.content = None, None
        if call.mask is not None and not call.mask.computable:
            if self.table is None:
                raise Unsupported(
                    f"flash_attention: implementation='xla' with a symbolic T or S takes masks that are computed from "
                    f"positions, such as causal and window, and mask={call.mask} is evaluated when traced; give it as an "
                    f"array of bool [B, H, T, S], or export it for fixed sizes"
                )
            contents, which = self.table.every_content()
            self.contents, self.content = jnp.asarray(contents), jnp.asarray(which.astype(np.int32))

    def heads_first(self, array: jax.Array) -> jax.Array:
        """[B, T, H, ...] as [B, KV, group, T, ...], T padded to whole blocks."""
        split = array.reshape(self.b, self.t, self.kv, self.group, *array.shape[3:])
        return padded(jnp.moveaxis(split, 1, 3), 3, self.block_q)

    def rows_first(self, array: jax.Array) -> jax.Array:
        """[B, H, T] as [B, KV, group, T, 1], T padded to whole blocks."""
        return padded(array.reshape(self.b, self.kv, self.group, self.t), 3, self.block_q)[..., None]

    def block(self, array: jax.Array, axis: int, index: jax.Array, size: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array, index * size, size, axis)

    def dot(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=self.accumulate)

    def logits(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A tile of logits, -inf where a pair does not attend; and without bias: [B, KV, group, block_q, block_k]."""
        block_q, block_k = self.block_q, self.block_k
        q, k = self.block(self.q, 3, i, block_q), self.block(self.k, 2, j, block_k)
        raw = self.dot("bkgqd,bksd->bkgqs", q, k) * self.call.scale
        cap = self.call.soft_cap
        capped = raw if cap is None else cap * jnp.tanh(raw / cap)
        logits = capped
        if self.bias is not None:
            logits = logits + jnp.broadcast_to(
                self.spread(self.bias_block(self.bias, i, j)).astype(logits.dtype), logits.shape
            )
        rows = i * block_q + jnp.arange(block_q, dtype=jnp.int32)[:, None]
        columns = j * block_k + jnp.arange(block_k, dtype=jnp.int32)[None, :]
        allowed = jnp.broadcast_to(columns < self.s, (block_q, block_k))
        if self.call.mask is not None and self.contents is None:
            allowed = allowed & self.call.mask.keep(rows, columns, self.call.q_offset)
        allowed = allowed[None, None]
        if self.contents is not None and self.content is not None:
            here = jax.lax.dynamic_index_in_dim(self.content, i, 1, keepdims=False)
            here = jax.lax.dynamic_index_in_dim(here, j, 1, keepdims=False)  # [1 or heads]
            allowed = allowed & self.contents[here][None]
        if self.q_ids is not None and self.kv_ids is not None:
            q_ids, kv_ids = self.block(self.q_ids, 1, i, block_q), self.block(self.kv_ids, 1, j, block_k)
            allowed = allowed & (q_ids[:, None, :, None] == kv_ids[:, None, None, :])
        if self.keep is not None:
            allowed = allowed & self.block(self.block(self.keep, 2, i, block_q), 3, j, block_k)
        return jnp.where(self.spread(allowed), logits, -jnp.inf), capped

    def bias_block(self, bias: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        bias = self.block(bias, 3, j, self.block_k)
        return bias if bias.shape[2] == 1 else self.block(bias, 2, i, self.block_q)

    def spread(self, array: jax.Array) -> jax.Array:
        """[B or 1, H or 1, ...] as [B or 1, KV or 1, group or 1, ...]."""
        heads = (self.kv, self.group) if array.shape[1] == self.h else (1, 1)
        return array.reshape(array.shape[0], *heads, *array.shape[2:])


@dataclass(frozen=True)
class _Visits:
    """For each stationary block, the blocks that any head visits [num, longest], and their number [num].

    `order` is None where the sizes are symbolic: then all `counts` blocks are visited.
    """

    order: jax.Array | None
    counts: Any

    def count(self, i: jax.Array) -> Any:
        return self.counts if self.order is None else self.counts[i]

    def at(self, i: jax.Array, n: jax.Array) -> jax.Array:
        return n if self.order is None else self.order[i, n]


def _visits(blocks: _Blocks, stationary: str) -> _Visits:
    table = blocks.table
    if table is None:
        return _Visits(None, jnp.asarray(blocks.grid.num_k if stationary == "q" else blocks.grid.num_q, jnp.int32))
    visited = (table.kinds != EMPTY).any(0)
    visited = visited if stationary == "q" else visited.T
    counts = visited.sum(1)
    longest = max(1, int(counts.max()))
    order = np.argsort(~visited, axis=1, stable=True)[:, :longest]
    return _Visits(jnp.asarray(order.astype(np.int32)), jnp.asarray(counts.astype(np.int32)))


def _forward(call: AttentionCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], SavedRows]:
    blocks = _Blocks(call, launch.config)
    visits = _visits(blocks, "q")
    rows = (blocks.b, blocks.kv, blocks.group, blocks.block_q, 1)
    lowest = jnp.full(rows, MASKED_BELOW, blocks.accumulate)
    total_at_start = jnp.zeros(rows, blocks.accumulate)
    if call.sinks is not None:
        # A sink counts as a key that was visited first and has no value.
        sinks = call.sinks.astype(blocks.accumulate).reshape(1, blocks.kv, blocks.group, 1, 1)
        lowest = jnp.maximum(lowest, jnp.broadcast_to(sinks, rows))
        total_at_start = jnp.broadcast_to(jnp.exp(sinks - lowest[:1, :, :, :1]), rows)

    def rows_of(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def step(n: jax.Array, carry: Any) -> Any:
            row_max, total, acc = carry
            j = visits.at(i, n)
            logits, _ = blocks.logits(i, j)  # [B, KV, group, block_q, block_k]
            new_max = jnp.maximum(row_max, jnp.max(logits, axis=4, keepdims=True))
            weights = jnp.exp(logits - new_max)
            alpha = jnp.exp(row_max - new_max)
            total = total * alpha + jnp.sum(weights, axis=4, keepdims=True)
            v = blocks.block(blocks.v, 2, j, blocks.block_k)
            acc = acc * alpha + blocks.dot("bkgqs,bksd->bkgqd", weights.astype(v.dtype), v)
            return new_max, total, acc

        start = (lowest, total_at_start, jnp.zeros((*rows[:4], blocks.dv), blocks.accumulate))
        row_max, total, acc = jax.lax.fori_loop(0, visits.count(i), step, start)
        out = acc / jnp.where(total == 0, 1.0, total)
        return out.astype(call.q.dtype), row_max[..., 0], total[..., 0]

    out, row_max, total = jax.lax.map(rows_of, jnp.arange(blocks.grid.num_q, dtype=jnp.int32))
    out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, num_q, block_q, KV, group, Dv]
    out = out.reshape(blocks.b, -1, blocks.h, blocks.dv)[:, : blocks.t]

    def statistic(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 3).reshape(blocks.b, blocks.h, -1)[:, :, : blocks.t]

    saved = SavedRows(out, statistic(row_max), statistic(total))
    return outputs_of(saved), saved


class _BlockRows:
    """What the backward needs per query, with the heads in front."""

    def __init__(self, blocks: _Blocks, rows: BackwardRows):
        self.blocks = blocks
        self.d_out = blocks.heads_first(rows.d_out)  # [B, KV, group, T, Dv]
        self.row_max, self.delta = blocks.rows_first(rows.row_max), blocks.rows_first(rows.delta)
        total = blocks.rows_first(rows.total)
        self.factor = jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))

    def of(self, array: jax.Array, i: jax.Array) -> jax.Array:
        return self.blocks.block(array, 3, i, self.blocks.block_q)

    def gradients(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Weights, their gradients, and the soft-capped part of the logits: each [B, KV, group, block_q, block_k]."""
        blocks = self.blocks
        logits, capped = blocks.logits(i, j)
        weights = jnp.exp(logits - self.of(self.row_max, i)) * self.of(self.factor, i)
        v = blocks.block(blocks.v, 2, j, blocks.block_k)
        d_weights = blocks.dot("bkgqd,bksd->bkgqs", self.of(self.d_out, i), v)
        return weights, d_weights, capped

    def of_logits(self, i: jax.Array, weights: jax.Array, d_weights: jax.Array) -> jax.Array:
        """The gradients of the logits."""
        return weights * (d_weights - self.of(self.delta, i))


def _backward(call: AttentionCall, saved: SavedRows, cotangents: Any, launch: Launch) -> AttentionCall:
    statistics = backward_rows(call, saved, cotangents)
    blocks = _Blocks(call, launch.config)
    rows = _BlockRows(blocks, statistics)
    visits = _visits(blocks, "k")
    dtype, accumulate, cap = call.q.dtype, blocks.accumulate, call.soft_cap
    sink = None if statistics.sink_weight is None else blocks.rows_first(statistics.sink_weight)

    def keys_of(carried: Any, j: jax.Array) -> tuple[Any, Any]:
        k = blocks.block(blocks.k, 2, j, blocks.block_k)

        def step(n: jax.Array, carry: Any) -> Any:
            dq, pull, dk, dv = carry
            i = visits.at(j, n)
            weights, d_weights, capped = rows.gradients(i, j)
            if sink is not None:
                pull = pull + jnp.sum(rows.of(sink, i) * weights * d_weights, axis=(3, 4))
            d_logits = rows.of_logits(i, weights, d_weights)
            dv = dv + blocks.dot("bkgqs,bkgqd->bksd", weights.astype(dtype), rows.of(rows.d_out, i))
            if cap is not None:
                d_logits = d_logits * (1.0 - jnp.square(capped / cap))
            d_logits = (d_logits * call.scale).astype(dtype)
            dk = dk + blocks.dot("bkgqs,bkgqd->bksd", d_logits, rows.of(blocks.q, i))
            added = rows.of(dq, i) + blocks.dot("bkgqs,bksd->bkgqd", d_logits, k)
            return jax.lax.dynamic_update_slice_in_dim(dq, added, i * blocks.block_q, 3), pull, dk, dv

        start = (*carried, jnp.zeros(k.shape, accumulate), jnp.zeros((*k.shape[:3], blocks.dv), accumulate))
        *carried, dk, dv = jax.lax.fori_loop(0, visits.count(j), step, start)
        return tuple(carried), (dk.astype(dtype), dv.astype(dtype))

    no_pull = jnp.zeros((blocks.b, blocks.kv, blocks.group), accumulate)
    start = (jnp.zeros(blocks.q.shape, accumulate), None if sink is None else no_pull)
    (dq, pull), (dk, dv) = jax.lax.scan(keys_of, start, jnp.arange(blocks.grid.num_k, dtype=jnp.int32))
    dq = jnp.moveaxis(dq[:, :, :, : blocks.t], 3, 1).reshape(call.q.shape)

    def of_keys(array: jax.Array) -> jax.Array:
        """[num_k, B, KV, block_k, ...] as [B, S, KV, ...]."""
        joined = jnp.moveaxis(array, (0, 3), (1, 2))
        return joined.reshape(blocks.b, -1, blocks.kv, array.shape[-1])[:, : blocks.s]

    d_bias = None if call.bias is None else bias_gradient(call, statistics, launch.config)
    pull = None if pull is None else jnp.sum(pull, axis=0).reshape(blocks.h)
    return call.gradients(q=dq, k=of_keys(dk), v=of_keys(dv), bias=d_bias, sinks=statistics.d_sinks(pull))


def default_backward_config(chip: Chip, call: AttentionCall) -> AttentionXlaBackward:
    """The config for `bias_gradient` where another implementation calls it."""
    return _choose(AttentionXlaBackward, chip, call)


def bias_gradient(call: AttentionCall, statistics: BackwardRows, config: AttentionXlaBackward) -> jax.Array:
    """The gradient of the bias, summed over the axes that it was broadcast over.

    It has loops of its own, so that jit drops them where the gradient is not used.
    """
    blocks = _Blocks(call, config)
    rows = _BlockRows(blocks, statistics)
    visits = _visits(blocks, "k")
    assert call.bias is not None
    assert blocks.bias is not None
    summed_over = [axis for axis in range(3) if blocks.bias.shape[axis] == 1]

    def keys_of(dbias: jax.Array, j: jax.Array) -> tuple[jax.Array, None]:
        def step(n: jax.Array, dbias: jax.Array) -> jax.Array:
            i = visits.at(j, n)
            weights, d_weights, _ = rows.gradients(i, j)
            whole = rows.of_logits(i, weights, d_weights).reshape(blocks.b, blocks.h, blocks.block_q, blocks.block_k)
            added = blocks.bias_block(dbias, i, j) + jnp.sum(whole, axis=summed_over, keepdims=True)
            zero = jnp.int32(0)  # As `i` and `j` are: a Python number is int64 in 64-bit mode.
            at = (zero, zero, zero if dbias.shape[2] == 1 else i * blocks.block_q, j * blocks.block_k)
            return jax.lax.dynamic_update_slice(dbias, added, at)

        return jax.lax.fori_loop(0, visits.count(j), step, dbias), None

    start = jnp.zeros(blocks.bias.shape, blocks.accumulate)
    dbias, _ = jax.lax.scan(keys_of, start, jnp.arange(blocks.grid.num_k, dtype=jnp.int32))
    return dbias[:, :, : call.bias.shape[2], : blocks.s]


IMPLEMENTATION = Implementation(
    forward=Pass(_forward, AttentionXlaForward, functools.partial(_choose, AttentionXlaForward), saved=SAVED_AXES),
    backward=Pass(_backward, AttentionXlaBackward, functools.partial(_choose, AttentionXlaBackward)),
)
