"""The forward kernel of attention on TPU.

For each head, an online softmax over the keys s that a query t attends to:

    a_ts = log2(e) (cap(scale q_t . k_s) + bias_ts)      m_t = max_s a_ts      l_t = sum_s 2^(a_ts - m_t)
    out_t = sum_s 2^(a_ts - m_t) v_s / l_t               logsumexp_t = (m_t + log2 l_t) / log2(e)

Floor: 2 (D + Dv) FLOPs for each pair that attends; q, k, v read and out written once. Here: whole tiles of blocks that
are not empty; q and out once, k and v once for each block of queries that visits them and each query head.

Blocking: grid (B, H, steps). A step is an entry of the block list (masks/block_list.py), prefetched scalars: a block of
queries and a block of keys. Empty blocks are not in the list, so nothing is fetched or computed for them, and no step
is spent: causal attention has half the steps. A block of queries stays while its keys stream past, double-buffered by
the pipeline. Masks are computed from positions where they can be, else read from the distinct partial blocks [block_k,
block_q] of int8. Only partial blocks are masked, and only their tiles that are not empty are computed: the early end
under a causal mask.

Within a step, tiles are software-pipelined: the products k q^T of the next tile are issued before the exponentials of
this one, and the products of this tile with v after those of the next. v6e, bf16, 1024 x 1024 blocks, D = 128, bundles
per step: in order 4,648; products one tile ahead 3,638; and values one behind 2,906.

Limits: D and Dv are padded to 128 lanes, T and S to blocks; both cost a copy where they are not whole. Segment ids of
keys are read as a column, 512 bytes per token. The block list must fit scalar memory (`Plan.misfit` says).

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the float32 logits:
folded into q it would be rounded to bfloat16, which shows in the logsumexp. Masked logits are a large negative number
and the maximum starts well above it, so a row without keys has a total of 0. Weights are rounded to the inputs' dtype
for the product with v.

Tried and dropped:
- tiles [queries, keys], which need the row's maximum across lanes: 3,631 bundles where transposed tiles in the same
  order took 3,789, but 2,048 cycles of the MXU instead of 1,536.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.masks.block_list import FIRST, FULL, LAST, PARTIAL
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionTpuForward
from tilewright.ops.attention.pallas_tpu.tiles import (
    LogitRefs,
    Plan,
    by_heads,
    for_tiles,
    largest_blocks,
    logits_tile,
    pipelined,
    whole_lanes,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST, SAVED_AXES, SavedRows, outputs_of
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, not_float64

_FLOAT32_BYTES = 4
# Bundles per 1,024 logits of a full block and of a masked tile, by the side of a block (v6e, D = 128, bfloat16,
# libtpu 0.0.50.1). Smaller blocks cost more per logit, and have fewer logits that nobody attends to.
_BUNDLES = {1024: (3.00, 4.75), 512: (3.67, 6.12)}


def _choose(chip: Chip, call: AttentionCall) -> AttentionTpuForward:
    """The largest blocks that waste little of T and S and fit VMEM; smaller ones where a mask leaves little of them."""
    config = largest_blocks(chip, call, AttentionTpuForward, lambda config: _vmem_bytes(Plan(call, config)))
    if call.mask is None or (config.block_q, config.block_k) != (1024, 1024):
        return config
    # A window of 1,024 tokens at T = 8,192: 64,000 bundles per head with blocks of 512, against 75,000.
    smaller = AttentionTpuForward(512, 512, config.tile_q, config.tile_k)
    return min(config, smaller, key=lambda one: _bundles(Plan(call, one)))


def _bundles(plan: Plan) -> float:
    """The bundles that the forward of a head takes, by `_BUNDLES`."""
    table, config = plan.table, plan.config
    of_full, of_masked = _BUNDLES[config.block_q]
    first, end = table.tiles("k", config.tile_k)
    tiles = np.where(table.kinds == PARTIAL, end - first, 0).sum()
    full = (table.kinds == FULL).sum() * config.block_k
    return config.block_q / 1024 * (full * of_full + tiles * config.tile_k * of_masked) / table.kinds.shape[0]


def _forward_kernel(
    *,
    # prefetched
    coordinates_ref,  # [lists * steps]
    flags_ref,  # [lists * steps]
    # inputs
    q_ref,  # [block_q, D]
    k_ref,  # [block_k, D]
    v_ref,  # [block_k, Dv]
    sinks_ref,  # [H] in scalar memory, or None
    # outputs
    out_ref,  # [block_q, Dv]
    statistics_ref,  # [2, block_q]: maximum and total
    # scratch
    max_scratch,  # [1, block_q]
    total_scratch,  # [1, block_q]
    acc_scratch,  # [Dv, block_q]
    # static
    plan: Plan,
    # inputs, see LogitRefs
    **logit_refs,
):
    refs = LogitRefs(**logit_refs)
    b, h = pl.program_id(0), pl.program_id(1)
    step = plan.read(b, h, 0, pl.program_id(2), coordinates_ref, flags_ref)

    @pl.when(step.has(FIRST))
    def _start():
        if sinks_ref is not None:
            # A sink counts as a key that was visited first and has no value.
            sink = sinks_ref[h] * LOG2_E
            max_scratch[...] = jnp.full_like(max_scratch, jnp.maximum(sink, LOWEST))
            total_scratch[...] = jnp.full_like(total_scratch, jnp.where(sink > LOWEST, 1.0, 0.0))
        else:
            max_scratch[...] = jnp.full_like(max_scratch, LOWEST)
            total_scratch[...] = jnp.zeros_like(total_scratch)
        acc_scratch[...] = jnp.zeros_like(acc_scratch)

    def products(unit: Any) -> tuple[jax.Array]:
        keys, queries = unit
        return (dot_f32(k_ref[keys, :], q_ref[queries, :], (1, 1)),)  # [tile_k, tile_q]

    def soften(unit: Any, product: jax.Array, *, masked: bool) -> tuple[jax.Array, jax.Array]:
        """The factor for what was accumulated before [1, tile_q], and the weights of this tile [tile_k, tile_q]."""
        keys, queries = unit
        logits, _ = logits_tile(plan, product, refs, step, keys, queries, masked=masked)
        before = max_scratch[:, queries]  # [1, tile_q]
        row_max = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        alpha = jnp.exp2(before - row_max)
        weights = jnp.exp2(logits - row_max)
        total_scratch[:, queries] = total_scratch[:, queries] * alpha + jnp.sum(weights, axis=0, keepdims=True)
        max_scratch[:, queries] = row_max
        return alpha, weights.astype(v_ref.dtype)

    def add_values(unit: Any, alpha: jax.Array, weights: jax.Array) -> None:
        keys, queries = unit
        added = dot_f32(v_ref[keys, :], weights, (0, 0))  # [Dv, tile_q]
        acc_scratch[:, queries] = acc_scratch[:, queries] * alpha + added

    def add_tiles(units: list[Any], masked: bool) -> None:
        pipelined(units, products, functools.partial(soften, masked=masked), add_values)

    for_tiles(plan, step, add_tiles)

    @pl.when(step.has(LAST))
    def _finish():
        total = total_scratch[...]  # [1, block_q]
        out = acc_scratch[...] / jnp.where(total == 0, 1.0, total)  # [Dv, block_q]
        out_ref[...] = out.T.astype(out_ref.dtype)
        statistics_ref[0:1, :] = max_scratch[...]
        statistics_ref[1:2, :] = total


def _declaration(plan: Plan) -> Kernel:
    call, config = plan.call, plan.config
    (b, t, h, d), (_, _, _, dv) = call.q.shape, call.v.shape
    block_q, block_k, dtype = config.block_q, config.block_k, call.q.dtype
    d_lanes, dv_lanes, padded_t = whole_lanes(d), whole_lanes(dv), pl.cdiv(t, block_q) * block_q

    def at(choose: Any) -> Any:
        """An index map from a function of batch, head, block of q, block of k and number of contents."""

        def index(b: Any, h: Any, n: Any, *refs: Any) -> tuple[Any, ...]:
            step = plan.read(b, h, 0, n, *refs)
            return choose(b, h, step.i, step.j, step.content)

        return index

    def of_queries(width: int) -> Block:
        return Block((None, block_q, width), dtype, at(lambda b, h, i, j, c: (b, i, h)))

    def of_keys(width: int) -> Block:
        # Not //, which also lowers to the sign of its operands, and that only where a TPU is attached.
        index = at(lambda b, h, i, j, c: (b, j, jax.lax.div(h, jnp.int32(call.group))))
        return Block((None, block_k, width), dtype, index)

    statistics = Block((None, None, 2, block_q), jnp.float32, at(lambda b, h, i, j, c: (b, h, 0, i)))
    row = pltpu.VMEM((1, block_q), jnp.float32)
    return Kernel(
        name="flash_attention_forward",
        grid={"batch": Axis(b, "parallel"), "head": Axis(h, "parallel"), "step": Axis(plan.steps)},
        prefetched=("coordinates", "flags"),
        inputs={
            "q": of_queries(d_lanes),
            "k": of_keys(d_lanes),
            "v": of_keys(dv_lanes),
            **plan.logit_blocks(at),
            "sinks": None if call.sinks is None else Block((h,), jnp.float32, memory=pltpu.SMEM),
        },
        outputs={
            "out": Output((b, padded_t, h * dv_lanes), of_queries(dv_lanes)),
            "statistics": Output((b, h, 2, padded_t), statistics),
        },
        scratch={"max_scratch": row, "total_scratch": row, "acc_scratch": pltpu.VMEM((dv_lanes, block_q), jnp.float32)},
    )


def _vmem_bytes(plan: Plan) -> int:
    call, config = plan.call, plan.config
    tile = config.tile_q * config.tile_k * (3 * _FLOAT32_BYTES + 2 * call.q.dtype.itemsize)
    transposed_out = config.block_q * whole_lanes(call.v.shape[3]) * _FLOAT32_BYTES
    return _declaration(plan).vmem_bytes(temporaries=tile + transposed_out)


def _forward(call: AttentionCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], SavedRows]:
    config: AttentionTpuForward = launch.config
    (b, t, h, d), dv, itemsize = call.q.shape, call.v.shape[3], call.q.dtype.itemsize
    plan = Plan(call, config)
    sinks = {} if call.sinks is None else {"sinks": call.sinks.astype(jnp.float32)}
    pairs = b * h * plan.steps * config.block_q * config.block_k
    outputs = _declaration(plan).run(
        functools.partial(_forward_kernel, plan=plan),
        plan.arrays() | sinks,
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=(b * t * h + b * h * plan.steps * config.block_k) * (d + dv) * itemsize,
        ),
    )
    statistics = outputs["statistics"][..., :t]
    rows = SavedRows(by_heads(outputs["out"], t, h, dv), statistics[:, :, 0], statistics[:, :, 1])
    return outputs_of(rows, per_nat=LOG2_E), rows


FORWARD = Pass(
    run=_forward,
    saved=SAVED_AXES,
    config=AttentionTpuForward,
    heuristic=_choose,
    unsupported_reason=lambda call, launch: not_float64(call.q) or Plan(call, launch.config).misfit(),
    memory=lambda call, launch: {"forward": _vmem_bytes(Plan(call, launch.config))},
    memory_fields="a smaller block_q or block_k",
)
