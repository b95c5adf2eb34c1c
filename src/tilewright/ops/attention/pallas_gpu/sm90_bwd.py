"""The backward kernel of attention on Hopper GPUs: dq, dk and dv at once. See sm90_fwd.py and softmax_rows.py.

With p_ts = 2^(a_ts - logsumexp_t) and d_ts = p_ts (d_out_t . v_s - delta_t), times the slope of the soft cap,

    dv_s = sum_t p_ts d_out_t        dk_s = scale sum_t d_ts q_t        dq_t = scale sum_s d_ts k_s

Floor: 2 (3 D + 2 Dv) FLOPs for each pair that attends: five products, with the logits recomputed. Here each product
once, over whole blocks that are not empty. Two kernels, one for dq and one for dk and dv, would need seven. What a
single one needs is a sum over blocks of keys, which other multiprocessors compute, whose order does not change from run
to run.

dq is summed as integers, whose sum does not depend on the order. Weights of a row add up to 1 at most, so no element of
dq / scale, nor any partial sum of it, exceeds max_s |d_out_t . v_s - delta_t| max |k|. That bound, one per row, is what
2^31 stands for: a tile of dq is truncated to multiples of bound / 2^31 and added to int32 in memory by the copy engine.
bfloat16 gradients have 8 bits, and that many are left where the dq of a row is 2^22 times below its bound. Truncated,
not rounded to nearest: that is one more instruction, on the unit that also computes the exponentials (T32768: 31.6 ms
with rounding, 29.3 ms without).

Blocking: a thread block keeps 128 keys and values in shared memory, 64 for each of two consumer warpgroups, and dk and
dv of those in registers. Blocks of queries stream past, 64 of them for heads of up to 128, 128 for heads of up to 64,
with their rows of statistics; all query heads of a group one after the other. Tiles are [keys, queries]: the weights
and the gradients of logits are then left operands of dv and dk. The gradients of logits also go through shared memory,
because dq needs those of both warpgroups; each computes half of the columns of dq (or of its rows), one step later: by
then the other's are there, and the two need not meet. Four buffers let one warpgroup run ahead of the other; where they
do not fit (heads of 64, sinks) there are two, and it waits for what the other reads. The products of a step with its
queries for dk are still in flight when the next step's start, so its queries are released one step later.

Registers are what is short: 240 per thread, of which dk and dv take 128 and the logits and the gradients of weights 64.
So these two sums start from -logsumexp / scale and -delta, instead of having them subtracted, and little follows the
products.

Limits: heads wider than 128 have another kernel (sm90_bwd_wide.py), since dk and dv of 64 keys do not fit the
registers; it takes no sinks. There is one thread block per 128 keys of a key head: fewer than 132 leave multiprocessors
idle. Memory beyond inputs and outputs: dq in int32, twice dq.

With sinks, weights times their gradients times the weight of the sink are summed over the queries of a tile, in
float32, and added to a row of shared memory per consumer and query head: 512 bytes per head of the group. Each consumer
adds its own steps in order, so the sum is the same from run to run; XLA adds the rows up.

Numerics: logsumexp in float32 in units of log 2; at logits of 1,000 it is off by 1e-4, which bfloat16 does not show.
Weights are float32 until they are operands.

Tried and dropped (H200, causal, H16 D128, forward and backward, relative to cuDNN in the same process, at T32768, at
T8192 and for B4 T4096 H32 KV8). This kernel takes 0.94, 0.86 and 0.92 of cuDNN's time; without `opaque_zero`, with 124
bytes spilled, 0.97, 0.89 and 0.97. Compared with the latter:
- logits that start from zero: 0.99, 0.89, 1.03; that with three buffers: 1.07, 0.92, 1.04, or two: 1.07, 0.89, 1.05;
- Pallas' own barriers around stores: 0.97 to 0.98;
- dq of a step in the same step, so that the warpgroups meet in each: 1.09, 0.97 and 1.08;
- dq converted to integers by `astype`, which clamps first (64 instructions of 630 per step): 1 to 2 % slower.
With dq not stored at all T32768 takes 0.84: the rest is its conversion, the barriers around its tile, and the sums in
memory (0.05).
The earlier backward in which the warpgroups met in each step took 1.60 ms at T8192; with weights kept as bfloat16 only,
1.81 ms; that with dv before the gradients of logits, 1.85 ms; dk from registers instead of shared memory, 1.87 ms
against 1.67 ms; 232 registers instead of 240, 1.71 ms.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import (
    SM90_BLOCK,
    SM90_CONSUMERS,
    SM90_FEWEST_BUFFERS,
    SM90_ROWS,
    AttentionSm90Backward,
)
from tilewright.ops.attention.pallas_gpu import sm90_bwd_wide
from tilewright.ops.attention.pallas_gpu.tiles import (
    SWIZZLED_WIDTH,
    Tables,
    TileScheduler,
    add_to_dq,
    factors_of,
    padded_heads,
    padded_width,
    plain_factor,
    scaled_logits,
    schedule_blocks,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, BackwardRows, SavedRows, backward_rows
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.global_sums import new_sums, total
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel, smem_bytes, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, load_row_vector, opaque_zero, transposed
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, accumulate_in_loops, with_accumulators

# The widest heads that this kernel takes.
_WIDEST = 128
_MOST_BUFFERS = 4
# The range of the sums of dq, in units of their bound: that of int32, less what truncation adds, one unit per block.
_FIXED_ONE = 2.0**31 - 2.0**24
# Smaller bounds are taken for this one: the reciprocal must be a float32.
_LEAST_BOUND = 2.0**-90
# Thread blocks per multiprocessor that run one after the other before other heads start.
_ROUNDS = 3


def _is_wide(call: AttentionCall) -> bool:
    return max(call.q.shape[3], call.v.shape[3]) > _WIDEST


def _choose(chip: Chip, call: AttentionCall) -> AttentionSm90Backward:
    """Two stages, and the most buffers if they fit."""
    roomy = AttentionSm90Backward(stages=2, buffers=_MOST_BUFFERS)
    fits = not _is_wide(call) and smem_bytes(_scratch(call, roomy)) <= (chip.smem_bytes or 0)
    return roomy if fits else AttentionSm90Backward(stages=2, buffers=SM90_FEWEST_BUFFERS)


def _unsupported_reason(call: AttentionCall, launch: Launch) -> str | None:
    if not _is_wide(call):
        return None
    d, dv, config = call.q.shape[3], call.v.shape[3], launch.config
    if call.sinks is not None:
        return (
            f"heads wider than {_WIDEST} (D={d}, Dv={dv}) with sinks have no backward kernel: its shared memory has no "
            f"room for the sums of sinks; use implementation='xla', or None, which takes xla forward and backward"
        )
    if (config.stages, config.buffers) != (sm90_bwd_wide.STAGES, sm90_bwd_wide.STAGES):
        return (
            f"its backward kernel for heads wider than {_WIDEST} (D={d}, Dv={dv}) is written for {sm90_bwd_wide.STAGES} "
            f"stages and buffers, and config has stages={config.stages} and buffers={config.buffers}; use "
            f"AttentionSm90Backward({sm90_bwd_wide.STAGES}, {sm90_bwd_wide.STAGES}), or implementation='xla'"
        )
    return None


def _block_q(width: int) -> int:
    """Queries of a block, for heads of this padded width."""
    return SM90_CONSUMERS * SM90_ROWS * SWIZZLED_WIDTH // width


def _heads_together(heads: int, rows: int, multiprocessors: int) -> int:
    """How many of all key heads of all sequences, with `rows` thread blocks each, run side by side.

    As few as keep the GPU busy for a few rounds, so that their queries and sums of dq stay in the L2: H200, B1 H16
    T32768 D128, forward and backward, 16 heads 32.7 ms, 4 30.8 ms, 2 30.7 ms, 1 31.4 ms (one is not enough to even out
    what a mask leaves of the rows).
    """
    enough = (n for n in range(1, heads) if heads % n == 0 and n * rows >= _ROUNDS * multiprocessors)
    return next(enough, heads)


def _backward_kernel(
    *,
    # inputs
    q_ref,  # [B, T, H, width]
    k_ref,  # [B, S, KV, width]
    v_ref,  # [B, S, KV, width]
    d_out_ref,  # [B, T, H, width]
    rows_ref,  # [B, H, T / block_q, 2 or 3, block_q]: logsumexp, -delta, and the weight of the sink
    factors_ref,  # [B, H, T / block_q, block_q]
    dq_sums_ref,  # int32 sums, see global_sums; added to
    # outputs
    dk_ref,  # [B, S, KV, width]
    dv_ref,  # [B, S, KV, width]
    pull_ref,  # [B, KV, S / block_k, consumers, group, 64], or None without sinks
    # scratch
    # q and d_out [stages, block_q, width], rows [stages, 2 or 3, block_q], factors [stages + 1, block_q]
    streamed: Pipeline,
    k_smem,  # [consumers, columns, 64, 64]
    v_smem,  # [consumers, 64, width]
    d_logits_smem,  # [buffers, consumers, parts, 64, 64]
    dq_smem,  # [consumers, 64, 64] int32
    pull_smem,  # [consumers, group, 64], or None without sinks
    kv_full,
    ready,
    # static
    scheduler: TileScheduler,
    config: AttentionSm90Backward,
    together: int,
    # inputs, see Tables
    **table_refs,
):
    call, tables = scheduler.call, Tables(**table_refs)
    group, buffers, block_q, width = call.group, config.buffers, scheduler.block_q, v_smem.shape[-1]
    columns, parts = width // SWIZZLED_WIDTH, block_q // SM90_ROWS
    # The tile of dq is divided between the consumers: over its columns, or over its rows where those are 128.
    over_rows = block_q == SM90_CONSUMERS * SM90_ROWS
    q_pipeline, d_out_pipeline = streamed.group("q"), streamed.group("d_out")
    me = jax.lax.axis_index("warpgroup")
    b, kv, row = scheduler.row_of_keys(tables, jax.lax.axis_index("tile"), together)
    j = row.stationary

    steps = row.total * group
    roomy = buffers > SM90_FEWEST_BUFFERS
    # The sum of the logits then starts from their logsumexp.
    folded = plain_factor(call) is not None

    def buffer_of(number: Any) -> Any:
        return jax.lax.rem(number, jnp.int32(buffers))

    def ready_of(whose: Any, buffer: Any) -> Any:
        """One per buffer: a consumer may have finished two steps before the other looks."""
        return ready.at[buffers * whose + buffer]

    @pl.when(me < SM90_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(config.consumer_registers, action="increase")
        shape = (SM90_ROWS, block_q)
        part = me if over_rows else 0
        if pull_smem is not None:
            for g in range(group):
                pull_smem[me, g] = plgpu.layout_cast(jnp.zeros((SM90_ROWS,), jnp.float32), WGMMA.reduce(1))
        # The first step adds the dq of a step before it, whose gradients are zeros.
        for c in range(parts):
            d_logits_smem[buffers - 1, me, c] = plgpu.layout_cast(
                jnp.zeros((SM90_ROWS, SM90_ROWS), streamed.q.dtype), WGMMA
            )
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready_of(me, buffers - 1))
        plgpu.barrier_wait(kv_full)

        def of_query(stage: Any, which: int) -> jax.Array:
            values = plgpu.load(streamed.rows.at[stage, which], layout=WGMMA.reduce(0))  # [block_q]
            return jax.lax.broadcast_in_dim(values, shape, [1])

        def multiply_keys(dq: Accumulator, last: Any, zero: Any) -> None:
            """Issues the products of a tile of dq, for the step whose gradients are in the buffer `last`."""
            for r in range(SM90_CONSUMERS):
                keys = k_smem.at[r + zero, 0 if over_rows else me]
                dq.add(transposed(d_logits_smem.at[last, r, part]), keys)  # [64 queries, 64]

        def add_queries(number: Any, dq: jax.Array) -> None:
            """Adds a tile of dq, of the step before this one, to the sums in memory, as integers."""
            before = jnp.maximum(number - 1, 0)
            h, n = row.of_group(before, kv)
            i = row.block(n)
            factors = factors_of(streamed, before)
            factors = factors.at[pl.ds(part * SM90_ROWS, SM90_ROWS)] if over_rows else factors
            at = pl.ds(0, SWIZZLED_WIDTH) if over_rows else pl.ds(me * SWIZZLED_WIDTH, SWIZZLED_WIDTH)
            index = (b, pl.ds(i * block_q + part * SM90_ROWS, SM90_ROWS), h, at)
            add_to_dq(dq, factors, dq_smem.at[me], dq_sums_ref, j, index, number > 0)

        def step(number: Any, sums: tuple[Accumulator, ...], *, masked: bool) -> None:
            dk, dv = sums
            zero = opaque_zero(number)
            stage, buffer, last = q_pipeline.stage(number), buffer_of(number), buffer_of(number + buffers - 1)
            h, n = row.of_group(number, kv)
            i = row.block(n)
            content = row.content(n) if masked else None
            q_pipeline.wait(number, stage=stage)

            def differentiate(products: Accumulator, d_weights: Accumulator) -> tuple[jax.Array, jax.Array]:
                for c in range(columns):
                    of_part = pl.ds(c * SWIZZLED_WIDTH, SWIZZLED_WIDTH)
                    q_part = streamed.q.at[stage, :, of_part] if columns > 1 else streamed.q.at[stage]
                    products.add(k_smem.at[me + zero, c], transposed(q_part))  # [64, block_q]
                d_out_pipeline.wait(number, stage=stage)
                d_weights.add(v_smem.at[me + zero], transposed(streamed.d_out.at[stage]))  # [64, block_q]
                logits, factor, slope = scaled_logits(products.read(1), call)

                # What was issued before is done, so is dk of the step before: its queries have been read.
                @pl.when(number > 0)
                def _release_queries():
                    q_pipeline.release(number - 1)

                if masked:
                    logits = row.masked(
                        logits,
                        factor,
                        content,
                        first_q=i * block_q,
                        first_k=j * scheduler.block_k + me * SM90_ROWS,
                        part=(pl.ds(me * SM90_ROWS, SM90_ROWS),),
                        transposed=True,
                    )
                weights = jnp.exp2(logits * factor if folded else logits * factor - of_query(stage, 0))
                d_products = d_weights.read(0)  # Less delta.
                if pull_smem is not None:
                    pull = jnp.sum(weights * (d_products - of_query(stage, 1)) * of_query(stage, 2), axis=1)  # [64]
                    here = pull_smem.at[me, h - kv * group]
                    here[...] = load_row_vector(here) + pull
                d_logits = weights * d_products
                if slope is not None:
                    d_logits = d_logits * (1.0 - slope * slope)
                return weights.astype(streamed.q.dtype), d_logits.astype(streamed.q.dtype)

            first = of_query(stage, 0) if folded else jnp.zeros(shape, jnp.float32)
            *_, weights, d_logits = accumulate(
                tuple(plgpu.layout_cast(value, WGMMA) for value in (first, of_query(stage, 1))),
                differentiate,
                more=(jax.ShapeDtypeStruct(shape, streamed.q.dtype),) * 2,
            )
            dv.add(weights, streamed.d_out.at[stage])  # [64, width]
            if not roomy:
                plgpu.barrier_wait(ready_of(1 - me, last))
            for c in range(parts):
                half = slice(c * SM90_ROWS, (c + 1) * SM90_ROWS)
                d_logits_smem[buffer, me, c] = d_logits if parts == 1 else d_logits[:, half]
            plgpu.commit_smem()
            if roomy:
                plgpu.barrier_arrive(ready_of(me, buffer))
                plgpu.barrier_wait(ready_of(1 - me, last))

            def add(dq: Accumulator) -> None:
                multiply_keys(dq, last, zero)
                for c in range(parts):
                    q_rows = (
                        streamed.q.at[stage] if parts == 1 else streamed.q.at[stage, pl.ds(c * SM90_ROWS, SM90_ROWS)]
                    )
                    dk.add(d_logits_smem.at[buffer, me, c], q_rows)  # [64, width]
                made = dq.read(parts)
                if not roomy:
                    plgpu.barrier_arrive(ready_of(me, buffer))
                add_queries(number, made)

            with_accumulators(((SM90_ROWS, SWIZZLED_WIDTH),), add)
            d_out_pipeline.release(number, stage=stage)

        def finish(number: Any, sums: tuple[Accumulator, ...]) -> None:
            """dq of the last step."""
            last = buffer_of(number + buffers - 1)
            plgpu.barrier_wait(ready_of(1 - me, last))

            def add(dq: Accumulator) -> None:
                multiply_keys(dq, last, 0)
                add_queries(number, dq.read())

            with_accumulators(((SM90_ROWS, SWIZZLED_WIDTH),), add)

        loops = [*row.loops(step), (steps, steps + jnp.minimum(steps, 1), finish)]
        dk, dv = accumulate_in_loops(((SM90_ROWS, width), (SM90_ROWS, width)), loops)
        first_k = j * scheduler.block_k + me * SM90_ROWS
        # No other warpgroup reads this consumer's values, and it needs them no more.
        out_tile = v_smem.at[me]
        for gradient, out_ref in ((dv, dv_ref), (dk * call.scale, dk_ref)):
            out_tile[...] = gradient.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_tile, out_ref.at[b, pl.ds(first_k, SM90_ROWS), kv])
            plgpu.wait_smem_to_gmem(0)
        if pull_ref is not None and pull_smem is not None:
            plgpu.copy_smem_to_gmem(pull_smem.at[me], pull_ref.at[b, kv, j, me])
            plgpu.wait_smem_to_gmem(0)

    @pl.when(me == SM90_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(config.producer_registers, action="decrease")
        for r in range(SM90_CONSUMERS):
            keys = (b, pl.ds(j * scheduler.block_k + r * SM90_ROWS, SM90_ROWS), kv)
            for c in range(columns):
                of_part = pl.ds(c * SWIZZLED_WIDTH, SWIZZLED_WIDTH)
                plgpu.copy_gmem_to_smem(k_ref.at[(*keys, of_part)], k_smem.at[r, c], kv_full)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[r], kv_full)

        def fetch(number: Any, _: None) -> None:
            stage = q_pipeline.stage(number)
            h, n = row.of_group(number, kv)
            i = row.block(n)
            queries = (b, pl.ds(i * block_q, block_q), h)
            q_pipeline.fetch(number, stage=stage, q=q_ref.at[queries], rows=rows_ref.at[b, h, i])
            q_pipeline.copy(number, [(factors_ref.at[b, h, i], factors_of(streamed, number))], stage=stage)
            d_out_pipeline.fetch(number, stage=stage, d_out=d_out_ref.at[queries])

        jax.lax.fori_loop(0, steps, fetch, None)


def _scratch(call: AttentionCall, config: AttentionSm90Backward) -> dict[str, Any]:
    width, dtype, sinks = padded_width(max(call.q.shape[3], call.v.shape[3])), call.q.dtype, call.sinks is not None
    block_q, stages, buffers = _block_q(width), config.stages, config.buffers
    columns, parts = width // SWIZZLED_WIDTH, block_q // SM90_ROWS
    return {
        "kv_full": plgpu.Barrier(num_arrivals=SM90_CONSUMERS * (columns + 1)),
        "streamed": Pipeline.scratch(
            stages,
            consumers=SM90_CONSUMERS,
            copies={"q": 3, "d_out": 1},
            q=tile(stages, block_q, width, dtype=dtype),
            d_out=tile(stages, block_q, width, dtype=dtype),
            rows=plgpu.SMEM((stages, 3 if sinks else 2, block_q), jnp.float32),
            factors=plgpu.SMEM((stages + 1, block_q), jnp.float32),
        ),
        "k_smem": tile(SM90_CONSUMERS, columns, SM90_ROWS, SWIZZLED_WIDTH, dtype=dtype),
        "v_smem": tile(SM90_CONSUMERS, SM90_ROWS, width, dtype=dtype),
        "d_logits_smem": tile(buffers, SM90_CONSUMERS, parts, SM90_ROWS, SM90_ROWS, dtype=dtype),
        "dq_smem": tile(SM90_CONSUMERS, SM90_ROWS, SWIZZLED_WIDTH, dtype=jnp.int32),
        "pull_smem": plgpu.SMEM((SM90_CONSUMERS, call.group, SM90_ROWS), jnp.float32) if sinks else None,
        "ready": plgpu.Barrier(num_arrivals=1, num_barriers=buffers * SM90_CONSUMERS),
    }


def _memory(call: AttentionCall, launch: Launch) -> dict[str, int]:
    if _is_wide(call):
        return {"backward": smem_bytes(sm90_bwd_wide.scratch(call))}
    return {"backward": smem_bytes(_scratch(call, launch.config), reductions=call.sinks is not None)}


def _bound(call: AttentionCall, rows: BackwardRows) -> jax.Array:
    """What no element of a row of dq / scale can exceed, nor any partial sum of it; [B, H, T].

    The weights of a row add up to 1 at most, so |dq / scale| <= max_s |d_out . v_s - delta| max |k|.
    """
    f32 = jnp.float32
    largest_v = jnp.sqrt(jnp.max(jnp.sum(jnp.square(call.v.astype(f32)), axis=3), axis=1))  # [B, KV]
    largest_k = jnp.max(jnp.abs(call.k), axis=(1, 3)).astype(f32)
    largest_v, largest_k = (jnp.repeat(a, call.group, axis=1)[:, :, None] for a in (largest_v, largest_k))  # [B, H, 1]
    norm = jnp.sqrt(jnp.sum(jnp.square(rows.d_out.astype(f32)), axis=3)).transpose(0, 2, 1)  # [B, H, T]
    # One part in 16 for what rounding to bfloat16 adds.
    bound = (norm * largest_v + jnp.abs(rows.delta)) * largest_k * 1.0625
    return jnp.maximum(bound, _LEAST_BOUND)


def _backward(call: AttentionCall, saved: SavedRows, cotangents: Any, launch: Launch) -> AttentionCall:
    config: AttentionSm90Backward = launch.config
    (b, t, h, d), (_, s, kv, dv), wide = call.q.shape, call.v.shape, _is_wide(call)
    rows = backward_rows(call, saved, cotangents, per_nat=LOG2_E)
    width = sm90_bwd_wide.WIDTH if wide else padded_width(max(d, dv))
    block_q, block_k = (sm90_bwd_wide.BLOCK,) * 2 if wide else (_block_q(width), SM90_BLOCK)
    scheduler, tables = schedule_blocks(call, (block_q, block_k), "k")
    q, d_out = (padded_heads(array, block_q, width) for array in (call.q, rows.d_out))
    k, v = (padded_heads(array, block_k, width) for array in (call.k, call.v))
    bound = _bound(call, rows)  # [B, H, T]
    logsumexp, factor = rows.row_max + rows.log2_total, plain_factor(call)
    each = [logsumexp if factor is None else -logsumexp / factor, -rows.delta]
    each += [] if rows.sink_weight is None else [rows.sink_weight]
    stacked = padded(jnp.stack(each, axis=2), 3, block_q).reshape(b, h, len(each), -1, block_q)
    dq_sums = new_sums((b, q.shape[1], h, width), contributors=scheduler.rows)
    of_keys = jax.ShapeDtypeStruct(k.shape, q.dtype)
    pull = jax.ShapeDtypeStruct((b, kv, scheduler.rows, SM90_CONSUMERS, call.group, SM90_ROWS), jnp.float32)
    outputs = run_kernel(
        functools.partial(
            sm90_bwd_wide.kernel if wide else _backward_kernel,
            scheduler=scheduler,
            config=config,
            together=_heads_together(b * kv, scheduler.rows, launch.chip.multiprocessors or 1),
        ),
        name="flash_attention_backward_wide" if wide else "flash_attention_backward",
        inputs={
            "q": q,
            "k": k,
            "v": v,
            "d_out": d_out,
            "rows": stacked.swapaxes(2, 3),
            "factors": padded(_FIXED_ONE / bound, 2, block_q).reshape(b, h, -1, block_q),
            **tables,
            "dq_sums": dq_sums,
        },
        outputs={"dk": of_keys, "dv": of_keys} | ({} if wide else {"pull": None if call.sinks is None else pull}),
        scratch=sm90_bwd_wide.scratch(call) if wide else _scratch(call, config),
        grid={"tile": b * kv * scheduler.rows},
        warpgroups=SM90_CONSUMERS + 1,
        params=compiler_params(inferred_layouts=True),
    )
    from_fixed = (bound * (call.scale / _FIXED_ONE)).transpose(0, 2, 1)[..., None]  # [B, T, H, 1]
    sink_pull = None if call.sinks is None else jnp.sum(outputs["pull"], axis=(0, 2, 3, 5)).reshape(h)
    return call.gradients(
        q=total(dq_sums)[:, :t, :, :d].astype(jnp.float32) * from_fixed,
        k=outputs["dk"][:, :s, :, :d],
        v=outputs["dv"][:, :s, :, :dv],
        sinks=rows.d_sinks(sink_pull),
    )


BACKWARD = Pass(
    run=_backward,
    config=AttentionSm90Backward,
    heuristic=_choose,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="fewer stages or buffers",
)
