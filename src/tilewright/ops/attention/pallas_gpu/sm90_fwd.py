"""The forward kernel of attention on Hopper GPUs.

For each head, an online softmax over the keys s that a query t attends to:

    a_ts = log2(e) cap(scale q_t . k_s)      m_t = max_s a_ts      l_t = sum_s 2^(a_ts - m_t)
    out_t = sum_s 2^(a_ts - m_t) v_s / l_t   logsumexp_t = (m_t + log2 l_t) / log2(e)

Floor: 2 (D + Dv) FLOPs for each pair that attends; q, k, v read and out written once. Here: whole blocks that are not
empty; q and out once, k and v once for each block of queries that visits them, mostly from the L2.

Blocking: a thread block takes 128 queries of a head, 64 for each of two consumer warpgroups; a producer warpgroup
copies blocks of keys and values into a pipeline of stages in shared memory. Which blocks is a row of a table
(tiles.py): full ones first, then those that need a mask. Blocks of queries with the most work start first.

The two consumers take turns with the tensor cores: one computes its softmax while the other's products run. A turn is
the product of the last block's weights with its values and of the queries with the next block's keys, issued together:
one after the other was 3 % slower at T = 8,192 and 6 % at 32,768 (H200, causal, H16 D128).

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. D and Dv are padded to 64, 128, 192 or 256, T to 128 and S to
block_k; each costs a copy where it is not whole. No bias, no mask arrays, no masks that differ from head to head.
Mosaic GPU's ptxas must not be one of CUDA 12.8 to 12.9.0, which JAX's own kernel refuses for causal masks.

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the logits, in the
same multiply-add as the maximum. Masked logits are a large negative number and the maximum starts well above it, so a
row without keys has a total of 0. Weights are rounded to bfloat16 for the product with v; exponentials are the
hardware's, accurate to 2 units in the last place.

Tried and dropped:
- three stages of 128 keys, which exceed the shared memory by 120 bytes;
- 232 registers instead of 240 for the consumers, 1 % slower at T = 32,768.
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
from tilewright.ops.attention.config import SM90_BLOCK, SM90_CONSUMERS, SM90_ROWS, AttentionSm90Forward
from tilewright.ops.attention.pallas_gpu.tiles import (
    Tables,
    TileScheduler,
    padded_heads,
    padded_width,
    scaled_logits,
    schedule_blocks,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST, SAVED_AXES, SavedRows, outputs_of
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel, smem_bytes, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, along_rows, transposed
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, not_bfloat16, product

_WIDEST = 256
_WIDEST_LARGE_BLOCK = 128


def _choose(chip: Chip, call: AttentionCall) -> AttentionSm90Forward:
    """128 keys per block where they fit the shared memory and the registers, else 64."""
    width = max(padded_width(call.q.shape[3]), padded_width(call.v.shape[3]))
    return AttentionSm90Forward(block_k=SM90_BLOCK if width <= _WIDEST_LARGE_BLOCK else SM90_BLOCK // 2, stages=2)


def _unsupported_reason(call: AttentionCall, launch: Launch) -> str | None:
    if (reason := not_bfloat16(call.q)) is not None:
        return reason
    d, dv = call.q.shape[3], call.v.shape[3]
    if max(d, dv) > _WIDEST:
        return f"D={d} and Dv={dv} must be {_WIDEST} at most (registers of a warpgroup); use implementation='xla'"
    for name, array in (("bias", call.bias), ("a mask array", call.keep)):
        if array is not None:
            return (
                f"{name} is not among what it takes; give a mask that is known when traced, or use implementation='xla'"
            )
    if call.mask is not None and call.mask.num_heads is not None:
        return f"mask={call.mask} differs from head to head; use one mask for all heads, or implementation='xla'"
    return None


def _forward_kernel(
    *,
    # inputs
    q_ref,  # [B, T, H, D]
    k_ref,  # [B, S, KV, D]
    v_ref,  # [B, S, KV, Dv]
    sinks_ref,  # [H], or None
    # outputs
    out_ref,  # [B, T, H, Dv]
    statistics_ref,  # [B, H, 2, T]: maximum and total
    # scratch
    q_smem,  # [consumers, 64, D]
    kv: Pipeline,  # k [stages, block_k, D], v [stages, block_k, Dv]
    out_smem,  # [consumers, 64, Dv], or None where D = Dv and the output takes the place of the queries
    statistics_smem,  # [consumers, 2, 64]
    q_full,
    turn,
    # static
    scheduler: TileScheduler,
    config: AttentionSm90Forward,
    # inputs, see Tables
    **table_refs,
):
    call, tables = scheduler.call, Tables(**table_refs)
    batches, num_heads = call.q.shape[0], call.q.shape[2]
    block_k, d_v = config.block_k, kv.v.shape[-1]
    keys, values = kv.group("k"), kv.group("v")
    warpgroup = jax.lax.axis_index("warpgroup")
    rank, rest = divmod_nonnegative(jax.lax.axis_index("tile"), batches * num_heads)
    b, h = divmod_nonnegative(rest, num_heads)
    row = scheduler.row(tables, b, rank)

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(warpgroup < SM90_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(config.consumer_registers, action="increase")
        first_q = row.stationary * scheduler.block_q + warpgroup * SM90_ROWS
        q_tile = q_smem.at[warpgroup]  # [64, D]
        plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(first_q, SM90_ROWS), h], q_tile, q_full.at[warpgroup])
        row_max, total = LOWEST, 0.0
        if sinks_ref is not None:
            # A sink counts as a key that was visited first and has no value.
            sink = sinks_ref[h] * LOG2_E
            row_max, total = jnp.maximum(sink, LOWEST), jnp.where(sink > LOWEST, 1.0, 0.0)
        row_max, total = (
            plgpu.layout_cast(jnp.full((SM90_ROWS,), value, jnp.float32), WGMMA.reduce(1)) for value in (row_max, total)
        )
        acc = plgpu.layout_cast(jnp.zeros((SM90_ROWS, d_v), jnp.float32), WGMMA)
        plgpu.barrier_wait(q_full.at[warpgroup])

        # The consumers take turns with the tensor cores: one's products run while the other computes its softmax.
        pl.when(warpgroup == 1)(take_turn)

        def soften(n: Any, logits: jax.Array, statistics: Any, *, masked: bool) -> Any:
            """The statistics with block n included, the factor for what was accumulated before, and n's weights."""
            row_max, total = statistics
            logits, factor, _ = scaled_logits(logits, call)
            if masked:
                logits = row.masked(
                    logits,
                    factor,
                    row.content(n),
                    first_q=first_q,
                    first_k=row.block(n) * block_k,
                    part=(pl.ds(warpgroup * SM90_ROWS, SM90_ROWS),),
                )
            new_max = jnp.maximum(row_max, jnp.max(logits, axis=1) * factor)
            alpha = jnp.exp2(row_max - new_max)
            weights = jnp.exp2(logits * factor - along_rows(new_max, logits.shape))
            total = total * alpha + jnp.sum(weights, axis=1)
            return (new_max, total), alpha, weights.astype(kv.v.dtype)

        def first_products(products: Accumulator) -> None:
            products.add(q_tile, transposed(kv.k.at[0]))  # [64, block_k]
            take_turn()

        keys.wait(0, stage=0)
        logits = product((SM90_ROWS, block_k), first_products)
        keys.release(0, stage=0)
        statistics, _, weights = soften(jnp.int32(0), logits, (row_max, total), masked=scheduler.has_partial)
        no_logits = plgpu.layout_cast(jnp.zeros((SM90_ROWS, block_k), jnp.float32), WGMMA)

        def step(n: Any, carry: Any, *, masked: bool) -> Any:
            """The values of block n - 1 and the products of block n at once: the tensor cores do not wait between."""
            acc, weights, statistics = carry
            stage, before = keys.stage(n), values.stage(n - 1)
            acc, weights, statistics = jax.lax.optimization_barrier((acc, weights, statistics))
            plgpu.barrier_arrive(turn)
            values.wait(n - 1, stage=before)
            keys.wait(n, stage=stage)
            plgpu.barrier_wait(turn)

            def multiply(out: Accumulator, products: Accumulator) -> None:
                out.add(weights, kv.v.at[before])  # [64, Dv]
                products.add(q_tile, transposed(kv.k.at[stage]))  # [64, block_k]
                take_turn()

            acc, logits = accumulate((acc, no_logits), multiply)
            values.release(n - 1, stage=before)
            keys.release(n, stage=stage)
            statistics, alpha, weights = soften(n, logits, statistics, masked=masked)
            acc = acc * along_rows(alpha, acc.shape)
            return acc, weights, statistics

        carry = (acc, weights, statistics)
        if scheduler.has_full:
            carry = jax.lax.fori_loop(1, row.full, functools.partial(step, masked=False), carry)
        if scheduler.has_partial:
            first = jnp.maximum(row.full, 1) if scheduler.has_full else 1
            carry = jax.lax.fori_loop(first, row.total, functools.partial(step, masked=True), carry)
        acc, weights, (row_max, total) = carry
        last = values.stage(row.total - 1)
        plgpu.barrier_arrive(turn)
        values.wait(row.total - 1, stage=last)
        plgpu.barrier_wait(turn)
        (acc,) = accumulate((acc,), lambda out: out.add(weights, kv.v.at[last]))
        pl.when(warpgroup == 0)(take_turn)

        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out_tile = q_tile if out_smem is None else out_smem.at[warpgroup]  # [64, Dv]
        out_tile[...] = (acc * along_rows(inverse, acc.shape)).astype(out_ref.dtype)
        statistics_smem[warpgroup, 0] = row_max
        statistics_smem[warpgroup, 1] = total
        plgpu.commit_smem()
        rows = pl.ds(first_q, SM90_ROWS)
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[b, rows, h])
        for n in range(2):
            plgpu.copy_smem_to_gmem(statistics_smem.at[warpgroup, n], statistics_ref.at[b, h, n, rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == SM90_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(config.producer_registers, action="decrease")
        key_head, _ = divmod_nonnegative(h, call.group)

        def fetch(n: Any, _: None) -> None:
            stage = keys.stage(n)
            block = (b, pl.ds(row.block(n) * block_k, block_k), key_head)
            keys.fetch(n, stage=stage, k=k_ref.at[block])
            values.fetch(n, stage=stage, v=v_ref.at[block])

        jax.lax.fori_loop(0, row.total, fetch, None)


def _scratch(call: AttentionCall, config: AttentionSm90Forward) -> dict[str, Any]:
    d, d_v, dtype = padded_width(call.q.shape[3]), padded_width(call.v.shape[3]), call.q.dtype
    return {
        "q_smem": tile(SM90_CONSUMERS, SM90_ROWS, d, dtype=dtype),
        "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=SM90_CONSUMERS),
        "kv": Pipeline.scratch(
            config.stages,
            consumers=SM90_CONSUMERS,
            copies={"k": 1, "v": 1},
            k=tile(config.stages, config.block_k, d, dtype=dtype),
            v=tile(config.stages, config.block_k, d_v, dtype=dtype),
        ),
        "out_smem": None if d == d_v else tile(SM90_CONSUMERS, SM90_ROWS, d_v, dtype=dtype),
        "statistics_smem": plgpu.SMEM((SM90_CONSUMERS, 2, SM90_ROWS), jnp.float32),
        "turn": plgpu.Barrier(num_arrivals=SM90_CONSUMERS),
    }


def _memory(call: AttentionCall, launch: Launch) -> dict[str, int]:
    return {"forward": smem_bytes(_scratch(call, launch.config), reductions=True)}


def _forward(call: AttentionCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], SavedRows]:
    config: AttentionSm90Forward = launch.config
    (b, t, h, _), dv = call.q.shape, call.v.shape[3]
    scheduler, tables = schedule_blocks(call, (SM90_BLOCK, config.block_k), "q")
    q = padded_heads(call.q, SM90_BLOCK)
    k, v = padded_heads(call.k, config.block_k), padded_heads(call.v, config.block_k)
    outputs = run_kernel(
        functools.partial(_forward_kernel, scheduler=scheduler, config=config),
        name="flash_attention_forward",
        inputs={
            "q": q,
            "k": k,
            "v": v,
            **tables,
            "sinks": None if call.sinks is None else call.sinks.astype(jnp.float32),
        },
        outputs={
            "out": jax.ShapeDtypeStruct((b, q.shape[1], h, v.shape[3]), q.dtype),
            "statistics": jax.ShapeDtypeStruct((b, h, 2, q.shape[1]), jnp.float32),
        },
        scratch=_scratch(call, config),
        grid={"tile": b * h * scheduler.rows},
        warpgroups=SM90_CONSUMERS + 1,
        params=compiler_params(automatic_barriers=True, inferred_layouts=True),
    )
    statistics = outputs["statistics"][..., :t]
    rows = SavedRows(outputs["out"][:, :t, :, :dv], statistics[:, :, 0], statistics[:, :, 1])
    return outputs_of(rows, per_nat=LOG2_E), rows


FORWARD = Pass(
    run=_forward,
    saved=SAVED_AXES,
    config=AttentionSm90Forward,
    heuristic=_choose,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="a smaller block_k or stages",
)
