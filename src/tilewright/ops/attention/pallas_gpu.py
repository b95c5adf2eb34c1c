"""Attention as Mosaic GPU kernels for Hopper: the forward here, the backward in pallas_gpu_bwd.py, more in gpu_tiles.py.

For each head, an online softmax over the keys s that a query t attends to:

    a_ts = log2(e) cap(scale q_t . k_s)      m_t = max_s a_ts      l_t = sum_s 2^(a_ts - m_t)
    out_t = sum_s 2^(a_ts - m_t) v_s / l_t   logsumexp_t = (m_t + log2 l_t) / log2(e)

Floor: 2 (D + Dv) FLOPs for each pair that attends; q, k, v read and out written once. Here: whole blocks that are not
empty; q and out once, k and v once for each block of queries that visits them, mostly from the L2.

Blocking: a thread block of the grid takes 128 queries of a head, 64 for each of two warpgroups; a third warpgroup copies
blocks of keys and values into a ring in shared memory. Which blocks is a row of a table (gpu_tiles.py): full ones first,
then those that need a mask. Blocks of queries with the most work start first.

The two computing warpgroups take turns with the matrix unit: one computes its softmax while the other's products run. A
turn is the product of the last block's weights with its values and of the queries with the next block's keys, issued
together: one after the other was 3 % slower at T = 8,192 and 6 % at 32,768 (H200, causal, H16 D128).

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. D and Dv are padded to 64, 128, 192 or 256, T to 128 and S to
block_k; each costs a copy where it is not whole. No bias, no mask arrays, no masks that differ from head to head. Mosaic
GPU's ptxas must not be one of CUDA 12.8 to 12.9.0, which JAX's own kernel refuses for causal masks.

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the logits, in the same
multiply-add as the maximum. Masked logits are a large negative number and the maximum begins well above it, so a row
without keys has a total of 0. Weights are rounded to bfloat16 for the product with v; exponentials are the hardware's, to
2 units in the last place.

Tried and dropped: three stages of 128 keys, which exceed the shared memory by 120 bytes; 232 registers instead of 240 for
the computing warpgroups, 1 % slower at T = 32,768.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, product, quotient, refusal, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.attention.config import GPU_BLOCK, GPU_ROWS, GPU_WIDEST, GPU_WORKERS, PallasGpuConfig
from tilewright.ops.attention.gpu_tiles import (
    COPIER_REGISTERS,
    LOG2_E,
    LOWEST,
    MASKED,
    WORKER_REGISTERS,
    Plan,
    allowed,
    padded_heads,
    plan_visits,
    scaled_logits,
)
from tilewright.ops.attention.gradient import Operands, Settings, with_gradient
from tilewright.ops.attention.mask_algebra import Mask
from tilewright.ops.attention.pallas_gpu_bwd import backward

Config = PallasGpuConfig
DTYPES = ("bfloat16",)


def default_config(chip: Chip, q: Any, k: Any, v: Any, *arrays: Any, **options: Any) -> PallasGpuConfig:
    del chip, k, arrays, options
    return PallasGpuConfig.for_shape(q.shape[3], v.shape[3])


def unsupported_reason(
    launch: Launch,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    sinks: Any,
    q_segments: Any,
    kv_segments: Any,
    keep: Any,
    *,
    mask: Mask | None,
    scale: float,
    soft_cap: float | None,
    q_offset: int,
) -> str | None:
    del q_segments, kv_segments, scale, soft_cap, q_offset
    chip, config = launch.chip, launch.config
    if (reason := refusal(chip, q)) is not None:
        return reason
    d, dv = q.shape[3], v.shape[3]
    if max(d, dv) > GPU_WIDEST:
        return f"D={d} and Dv={dv} must be {GPU_WIDEST} at most (registers of a warpgroup); use implementation='xla'"
    for name, array in (("bias", bias), ("a mask array", keep)):
        if array is not None:
            return (
                f"{name} is not among what it takes; give a mask that is known when traced, or use implementation='xla'"
            )
    if mask is not None and mask.num_heads is not None:
        return f"mask={mask} differs from head to head; use one mask for all heads, or implementation='xla'"
    return config.misfit(chip, d, dv, 0 if sinks is None else q.shape[2] // k.shape[2])


def _forward_kernel(
    *refs: Any, plan: Plan, stages: int, heads: tuple[int, int, int], has_sinks: bool, interpreted: bool
):
    # inputs
    q_ref, k_ref, v_ref = refs[:3]  # [B, T, H, D], [B, S, KV, D], [B, S, KV, Dv]
    tables = dict(zip(plan.names, refs[3:], strict=False))
    used = 3 + len(plan.names)
    sinks_ref = refs[used] if has_sinks else None  # [H]
    # outputs: out [B, T, H, Dv], and max and total of each row, [B, H, 2, T]
    out_ref, statistics_ref = refs[used + has_sinks :][:2]
    # scratch
    q_smem, k_smem, v_smem, out_smem, statistics_smem, *barriers = refs[used + has_sinks + 2 :]
    q_barrier, k_barrier, v_barrier, k_free, v_free, turn = barriers
    batches, num_heads, group = heads
    block_k, d_v = plan.block_k, v_smem.shape[-1]
    worker = jax.lax.axis_index("worker")
    rank, rest = quotient(jax.lax.axis_index("work"), batches * num_heads)
    b, h = quotient(rest, num_heads)
    row = plan.row(tables, b, rank)

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when(worker < GPU_WORKERS)
    def _compute():
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        first_q = row.stays * plan.block_q + worker * GPU_ROWS
        q_tile = q_smem.at[worker]  # [GPU_ROWS, D]
        plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(first_q, GPU_ROWS), h], q_tile, q_barrier.at[worker])
        rows = plgpu.Layout.WGMMA.reduce(1)
        highest, total = LOWEST, 0.0
        if sinks_ref is not None:
            # A sink is a key that was seen already, without a value.
            sink = sinks_ref[h] * LOG2_E
            highest, total = jnp.maximum(sink, LOWEST), jnp.where(sink > LOWEST, 1.0, 0.0)
        highest, total = (
            plgpu.layout_cast(jnp.full((GPU_ROWS,), value, jnp.float32), rows) for value in (highest, total)
        )
        acc = plgpu.layout_cast(jnp.zeros((GPU_ROWS, d_v), jnp.float32), plgpu.Layout.WGMMA)
        plgpu.barrier_wait(q_barrier.at[worker])

        # The workers take turns with the matrix unit: one's products run while the other computes its softmax.
        pl.when(worker == 1)(take_turn)

        def soften(n: Any, logits: jax.Array, statistics: Any, *, masked: bool) -> Any:
            """The statistics with block n taken in, the factor for what was summed before, and the weights of the block."""
            highest, total = statistics
            logits, factor, _ = scaled_logits(logits, plan.settings)
            if masked:
                keep = allowed(
                    plan,
                    tables,
                    b,
                    row.content(n) if "content" in tables else None,
                    (first_q, GPU_ROWS),
                    (row.block(n) * block_k, block_k),
                    transposed=False,
                    part=(pl.ds(worker * GPU_ROWS, GPU_ROWS),),
                )
                logits = jnp.where(keep, logits, MASKED / max(factor, 1.0)) if keep is not None else logits
            new_highest = jnp.maximum(highest, jnp.max(logits, axis=1) * factor)
            alpha = jnp.exp2(highest - new_highest)
            weights = jnp.exp2(logits * factor - jax.lax.broadcast_in_dim(new_highest, logits.shape, [0]))
            total = total * alpha + jnp.sum(weights, axis=1)
            return (new_highest, total), alpha, weights.astype(v_smem.dtype)

        def slot_of(n: Any) -> Any:
            return jax.lax.rem(n, jnp.int32(stages))

        def first_products(products: Accumulator) -> None:
            products.add(q_tile, k_smem.at[0].transpose((1, 0)))  # [GPU_ROWS, block_k]
            take_turn()

        plgpu.barrier_wait(k_barrier.at[0])
        logits = product((GPU_ROWS, block_k), first_products, interpreted=interpreted)
        plgpu.barrier_arrive(k_free.at[0])
        statistics, _, weights = soften(jnp.int32(0), logits, (highest, total), masked=plan.has_partial)
        no_logits = plgpu.layout_cast(jnp.zeros((GPU_ROWS, block_k), jnp.float32), plgpu.Layout.WGMMA)

        def step(n: Any, carry: Any, *, masked: bool) -> Any:
            """The values of block n - 1 and the products of block n at once: the matrix unit does not wait between."""
            acc, weights, statistics = carry
            slot, before = slot_of(n), slot_of(n - 1)
            acc, weights, statistics = jax.lax.optimization_barrier((acc, weights, statistics))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_barrier.at[before])
            plgpu.barrier_wait(k_barrier.at[slot])
            plgpu.barrier_wait(turn)

            def multiply(out: Accumulator, products: Accumulator) -> None:
                out.add(weights, v_smem.at[before])  # [GPU_ROWS, Dv]
                products.add(q_tile, k_smem.at[slot].transpose((1, 0)))  # [GPU_ROWS, block_k]
                take_turn()

            acc, logits = accumulate((acc, no_logits), multiply, interpreted=interpreted)
            plgpu.barrier_arrive(v_free.at[before])
            plgpu.barrier_arrive(k_free.at[slot])
            statistics, alpha, weights = soften(n, logits, statistics, masked=masked)
            acc = acc * jax.lax.broadcast_in_dim(alpha, acc.shape, [0])
            return acc, weights, statistics

        carry = (acc, weights, statistics)
        if plan.has_full:
            carry = jax.lax.fori_loop(1, row.full, functools.partial(step, masked=False), carry)
        if plan.has_partial:
            first = jnp.maximum(row.full, 1) if plan.has_full else 1
            carry = jax.lax.fori_loop(first, row.total, functools.partial(step, masked=True), carry)
        acc, weights, (highest, total) = carry
        last = slot_of(row.total - 1)
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(v_barrier.at[last])
        plgpu.barrier_wait(turn)
        (acc,) = accumulate((acc,), lambda out: out.add(weights, v_smem.at[last]), interpreted=interpreted)
        pl.when(worker == 0)(take_turn)

        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        out_tile = q_tile if out_smem is None else out_smem.at[worker]  # [GPU_ROWS, Dv]
        out_tile[...] = (acc * jax.lax.broadcast_in_dim(inverse, acc.shape, [0])).astype(out_ref.dtype)
        statistics_smem[worker, 0] = highest
        statistics_smem[worker, 1] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_tile, out_ref.at[b, pl.ds(first_q, GPU_ROWS), h])
        for n in range(2):
            plgpu.copy_smem_to_gmem(statistics_smem.at[worker, n], statistics_ref.at[b, h, n, pl.ds(first_q, GPU_ROWS)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == GPU_WORKERS)
    def _copy():
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
        kv, _ = quotient(h, group)

        def fetch(n: Any, _: None) -> None:
            slot = jax.lax.rem(n, jnp.int32(stages))
            keys = (b, pl.ds(row.block(n) * block_k, block_k), kv)

            @pl.when(n >= stages)
            def _k_is_free():
                plgpu.barrier_wait(k_free.at[slot])

            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[slot], k_barrier.at[slot])

            @pl.when(n >= stages)
            def _v_is_free():
                plgpu.barrier_wait(v_free.at[slot])

            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[slot], v_barrier.at[slot])

        jax.lax.fori_loop(0, row.total, fetch, None)


def _forward(operands: Operands, settings: Settings, launch: Launch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Out, and the max (in units of log 2) and total of each row."""
    config: PallasGpuConfig = launch.config
    (b, t, h, _), (_, _, kv, dv) = operands.q.shape, operands.v.shape
    block_q, block_k, stages = GPU_BLOCK, config.block_k, config.stages
    plan, tables = plan_visits(operands, settings, (block_q, block_k), "q")
    q = padded_heads(operands.q, block_q)
    k, v = padded_heads(operands.k, block_k), padded_heads(operands.v, block_k)
    padded_t, d, d_v, dtype = q.shape[1], q.shape[3], v.shape[3], q.dtype
    sinks = [] if operands.sinks is None else [operands.sinks.astype(jnp.float32)]
    arrived = plgpu.Barrier(num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=GPU_WORKERS, num_barriers=stages)
    out, statistics = plgpu.kernel(
        functools.partial(
            _forward_kernel,
            plan=plan,
            stages=stages,
            heads=(b, h, h // kv),
            has_sinks=operands.sinks is not None,
            interpreted=launch.interpret is not None,
        ),
        out_type=(
            output_like((b, padded_t, h, d_v), dtype, operands.q),
            output_like((b, h, 2, padded_t), jnp.float32, operands.q),
        ),
        grid=(b * h * plan.rows,),
        grid_names=("work",),
        num_threads=GPU_WORKERS + 1,
        thread_name="worker",
        scratch_types=(
            tile(GPU_WORKERS, GPU_ROWS, d, dtype=dtype),
            tile(stages, block_k, d, dtype=dtype),
            tile(stages, block_k, d_v, dtype=dtype),
            None if d == d_v else tile(GPU_WORKERS, GPU_ROWS, d_v, dtype=dtype),
            plgpu.SMEM((GPU_WORKERS, 2, GPU_ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=GPU_WORKERS),
            arrived,
            arrived,
            free,
            free,
            plgpu.Barrier(num_arrivals=GPU_WORKERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=gpu_interpret_params(launch.interpret),
        kernel_name="flash_attention_forward",
    )(q, k, v, *tables, *sinks)
    return out[:, :t, :, :dv], statistics[:, :, 0, :t], statistics[:, :, 1, :t]


_flash_attention = with_gradient(_forward, backward, per_nat=LOG2_E)


def flash_attention_pallas_gpu(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B S KV D"],
    v: Float[Array, "B S KV Dv"],
    bias: Float[Array, "_ _ _ S"] | None,
    sinks: Float[Array, " H"] | None,
    q_segments: Int[Array, "B T"] | None,
    kv_segments: Int[Array, "B S"] | None,
    keep: Bool[Array, "_ _ T S"] | None,
    *,
    mask: Mask | None,
    scale: float,
    soft_cap: float | None,
    q_offset: int,
    launch: Launch,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Out and logsumexp."""
    settings = Settings(mask, scale, soft_cap, q_offset)
    return _flash_attention(q, k, v, bias, sinks, q_segments, kv_segments, keep, settings, launch)
