"""The backward kernel of attention on TPU: dq, dk and dv at once. See fwd.py and softmax_rows.py.

With p_ts = 2^(a_ts - m_t - log2 l_t) and d_ts = p_ts (d_out_t . v_s - delta_t), times the slope of the soft cap,

    dv_s = sum_t p_ts d_out_t        dk_s = scale sum_t d_ts q_t        dq_t = scale sum_s d_ts k_s

Floor: 2 (2 D + 2 Dv + D) FLOPs for each pair that attends, with the logits recomputed; here whole tiles of blocks that
are not empty, and each product once. Two kernels, one for dq and one for dk and dv, would compute the logits and d_out
v^T twice: seven products instead of five. What a single one needs is room to accumulate both at once.

Blocking: grid (B, KV, chunks, group, steps), with the forward's block list. A block of queries stays, and its dq is
accumulated in a scratch, while blocks of keys stream past. dk and dv of a whole chunk of keys stay in VMEM in float32
until all query heads of the group have added to them: 2 (D + Dv) floats per key with both buffers, 16 MiB for 8,192
keys of D = 128. Where the keys do not fit, they are divided into chunks, and dq, written in float32 for each chunk, is
summed by XLA.

Tiles are [keys, queries] as in the forward, and pipelined alike: both products of the next tile before the exponentials
of this one, the three sums of a tile after those of the next. max, log2 of the total and delta come as one array [B, H,
3, T], a row of lanes each. The gradient of a bias is not computed here: it is plain JAX (xla.py), which jit drops where
the gradient is not used. With sinks, the row sums of weights times their gradients are another output, float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.masks.block_list import FIRST, LAST
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionTpuBackward
from tilewright.ops.attention.pallas_tpu.tiles import (
    LogitRefs,
    Plan,
    Step,
    by_heads,
    by_lanes,
    for_tiles,
    largest_blocks,
    logits_tile,
    pipelined,
    vmem_budget,
    whole_lanes,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, SavedRows, backward_rows
from tilewright.ops.attention.xla import bias_gradient, default_backward_config
from tilewright.pallas.arrays import dot_f32, padded
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output

_FLOAT32_BYTES = 4


def _choose(chip: Chip, call: AttentionCall) -> AttentionTpuBackward:
    """The largest blocks that waste little of T and S, and the gradients of as many keys in VMEM as fit."""

    def needed(config: AttentionTpuBackward) -> int:
        return _vmem_bytes(Plan(call, config))

    def one_block(*sizes: int) -> AttentionTpuBackward:
        return AttentionTpuBackward(*sizes, chunk_k=sizes[1])

    smallest = largest_blocks(chip, call, one_block, needed)
    blocks = pl.cdiv(call.k.shape[1], smallest.block_k)
    chunks = (pl.cdiv(blocks, count) * smallest.block_k for count in range(1, blocks))
    configs = (dataclasses.replace(smallest, chunk_k=chunk_k) for chunk_k in chunks)
    return next((config for config in configs if needed(config) <= vmem_budget(chip)), smallest)


def _backward_kernel(
    *,
    # prefetched
    coordinates_ref,  # [lists * steps]
    flags_ref,  # [lists * steps]
    # inputs
    q_ref,  # [block_q, D]
    k_ref,  # [block_k, D]
    v_ref,  # [block_k, Dv]
    d_out_ref,  # [block_q, Dv]
    rows_ref,  # [3, block_q]: maximum, log2 of the total, delta
    # outputs
    dq_ref,  # [block_q, D]
    dk_ref,  # [chunk_k, D]
    dv_ref,  # [chunk_k, Dv]
    pull_ref,  # [1, block_q], or None without sinks
    # scratch
    dq_scratch,  # [D, block_q]
    pull_scratch,  # [1, block_q], or None without sinks
    # static
    plan: Plan,
    # inputs, see LogitRefs
    **logit_refs,
):
    refs, call, config = LogitRefs(**logit_refs), plan.call, plan.config
    b, kv, chunk, g, n = (pl.program_id(axis) for axis in range(5))
    local = plan.read(b, kv * call.group + g, chunk, n, coordinates_ref, flags_ref)
    step = Step(local.i, chunk * plan.blocks_in_chunk + local.j, local.flags)

    @pl.when((g == 0) & (n == 0))
    def _start_keys():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    @pl.when(step.has(FIRST))
    def _start_queries():
        dq_scratch[...] = jnp.zeros_like(dq_scratch)
        if pull_scratch is not None:
            pull_scratch[...] = jnp.zeros_like(pull_scratch)

    def products(unit: Any) -> tuple[jax.Array, jax.Array]:
        keys, queries = unit
        return (
            dot_f32(k_ref[keys, :], q_ref[queries, :], (1, 1)),  # [tile_k, tile_q]
            dot_f32(v_ref[keys, :], d_out_ref[queries, :], (1, 1)),  # [tile_k, tile_q]
        )

    def differentiate(
        unit: Any, product: jax.Array, d_weights: jax.Array, *, masked: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The weights and the gradients of the logits of a tile, both [tile_k, tile_q]."""
        keys, queries = unit
        logits, slope = logits_tile(plan, product, refs, step, keys, queries, masked=masked)
        row_max, log_total, delta = (rows_ref[row : row + 1, queries] for row in range(3))  # each [1, tile_q]
        weights = jnp.exp2((logits - row_max) - log_total)
        d_logits = weights * (d_weights - delta)
        if pull_scratch is not None:
            pull_scratch[:, queries] += jnp.sum(weights * d_weights, axis=0, keepdims=True)  # [1, tile_q]
        if slope is not None:
            d_logits = d_logits * (1.0 - jnp.square(slope))
        return weights.astype(v_ref.dtype), d_logits.astype(k_ref.dtype)

    def add_gradients(unit: Any, weights: jax.Array, d_logits: jax.Array) -> None:
        keys, queries = unit
        at = pl.ds(pl.multiple_of(local.j * config.block_k + keys.start, config.tile_k), config.tile_k)
        dv_ref[at, :] += dot_f32(weights, d_out_ref[queries, :], (1, 0))  # [tile_k, Dv]
        dk_ref[at, :] += dot_f32(d_logits, q_ref[queries, :], (1, 0))  # [tile_k, D]
        dq_scratch[:, queries] += dot_f32(k_ref[keys, :], d_logits, (0, 0))  # [D, tile_q]

    def add_tiles(units: list[Any], masked: bool) -> None:
        pipelined(units, products, functools.partial(differentiate, masked=masked), add_gradients)

    for_tiles(plan, step, add_tiles)

    @pl.when(step.has(LAST))
    def _finish_queries():
        dq_ref[...] = (dq_scratch[...] * call.scale).T.astype(dq_ref.dtype)
        if pull_ref is not None:
            pull_ref[...] = pull_scratch[...]


def _declaration(plan: Plan) -> Kernel:
    call, config = plan.call, plan.config
    (b, t, h, d), (_, _, kv, dv) = call.q.shape, call.v.shape
    block_q, block_k, chunks = config.block_q, config.block_k, plan.chunks
    d_lanes, dv_lanes, padded_t = whole_lanes(d), whole_lanes(dv), pl.cdiv(t, block_q) * block_q
    chunk_k = plan.blocks_in_chunk * block_k
    group, dtype = call.group, call.q.dtype

    def index(choose: Any) -> Any:
        """An index map from a function of batch, key head, chunk, head of the group, and step."""
        return lambda b, kv, c, g, n, *refs: choose(b, kv, c, g, plan.read(b, kv * group + g, c, n, *refs))

    def at(choose: Any) -> Any:
        """An index map from a function of batch, head, block of q, block of k and number of contents."""
        return index(
            lambda b, kv, c, g, step: choose(b, kv * group + g, step.i, c * plan.blocks_in_chunk + step.j, step.content)
        )

    def of_queries(width: int) -> Block:
        return Block((None, block_q, width), dtype, at(lambda b, h, i, j, c: (b, i, h)))

    def of_keys(width: int) -> Block:
        keys = index(lambda b, kv, c, g, step: (b, c * plan.blocks_in_chunk + step.j, kv))
        return Block((None, block_k, width), dtype, keys)

    def of_chunk(width: int) -> Output:
        block = Block((None, chunk_k, width), jnp.float32, lambda b, kv, c, g, n, *refs: (b, c, kv))
        return Output((b, chunks * chunk_k, kv * width), block)

    dq_dtype = dtype if chunks == 1 else jnp.dtype(jnp.float32)
    dq = Block(
        (None, None, block_q, d_lanes), dq_dtype, index(lambda b, kv, c, g, step: (c, b, step.i, kv * group + g))
    )
    of_pull = index(lambda b, kv, c, g, step: (c, b, kv * group + g, 0, step.i))
    pull = Output((chunks, b, h, 1, padded_t), Block((None, None, None, 1, block_q), jnp.float32, of_pull))
    return Kernel(
        name="flash_attention_backward",
        grid={
            "batch": Axis(b, "parallel"),
            "kv_head": Axis(kv, "parallel"),
            "chunk": Axis(chunks, "parallel"),
            "group": Axis(group),
            "step": Axis(plan.steps),
        },
        prefetched=("coordinates", "flags"),
        inputs={
            "q": of_queries(d_lanes),
            "k": of_keys(d_lanes),
            "v": of_keys(dv_lanes),
            "d_out": of_queries(dv_lanes),
            "rows": Block((None, None, 3, block_q), jnp.float32, at(lambda b, h, i, j, c: (b, h, 0, i))),
            **plan.logit_blocks(at),
        },
        outputs={
            "dq": Output((chunks, b, padded_t, h * d_lanes), dq),
            "dk": of_chunk(d_lanes),
            "dv": of_chunk(dv_lanes),
            "pull": None if call.sinks is None else pull,
        },
        scratch={
            "dq_scratch": pltpu.VMEM((d_lanes, block_q), jnp.float32),
            "pull_scratch": None if call.sinks is None else pltpu.VMEM((1, block_q), jnp.float32),
        },
    )


def _vmem_bytes(plan: Plan) -> int:
    call, config = plan.call, plan.config
    tile = config.tile_q * config.tile_k * (6 * _FLOAT32_BYTES + 4 * call.q.dtype.itemsize)
    transposed_dq = config.block_q * whole_lanes(call.q.shape[3]) * _FLOAT32_BYTES
    return _declaration(plan).vmem_bytes(temporaries=tile + transposed_dq)


def _backward(call: AttentionCall, saved: SavedRows, cotangents: Any, launch: Launch) -> AttentionCall:
    config: AttentionTpuBackward = launch.config
    (b, t, h, d), (_, s, kv, dv), itemsize = call.q.shape, call.v.shape, call.q.dtype.itemsize
    rows = backward_rows(call, saved, cotangents, per_nat=LOG2_E)
    plan = Plan(call, config)
    pairs = b * h * plan.chunks * plan.steps * config.block_q * config.block_k
    stacked = jnp.stack([rows.row_max, rows.log2_total, rows.delta], axis=2)  # [B, H, 3, T]
    outputs = _declaration(plan).run(
        functools.partial(_backward_kernel, plan=plan),
        {**plan.arrays(), "d_out": by_lanes(rows.d_out, config.block_q), "rows": padded(stacked, 3, config.block_q)},
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=2 * pairs * (3 * d + 2 * dv),
            transcendentals=pairs,
            bytes_accessed=(b * h * plan.chunks * (2 * t + plan.steps * config.block_k)) * (d + dv) * itemsize,
        ),
    )
    dq = outputs["dq"][0] if plan.chunks == 1 else jnp.sum(outputs["dq"], axis=0).astype(call.q.dtype)
    d_bias = pull = None
    if call.bias is not None:
        d_bias = bias_gradient(call, rows.in_nats(), default_backward_config(launch.chip, call))
    if rows.sink_weight is not None:
        pull = jnp.sum(rows.sink_weight * outputs["pull"].sum(0)[:, :, 0, :t], axis=(0, 2))
    return call.gradients(
        q=by_heads(dq, t, h, d),
        k=by_heads((outputs["dk"] * call.scale).astype(call.k.dtype), s, kv, d),
        v=by_heads(outputs["dv"].astype(call.v.dtype), s, kv, dv),
        bias=d_bias,
        sinks=rows.d_sinks(pull),
    )


BACKWARD = Pass(
    run=_backward,
    config=AttentionTpuBackward,
    heuristic=_choose,
    unsupported_reason=lambda call, launch: Plan(call, launch.config).misfit(),
    memory=lambda call, launch: {"backward": _vmem_bytes(Plan(call, launch.config))},
    memory_fields="a smaller chunk_k, block_q or block_k",
    note=lambda call: "" if call.bias is None else "the gradient of the bias is computed in plain JAX, as by xla",
)
