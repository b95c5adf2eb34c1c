"""The forward kernel of attention on Hopper GPUs.

For each head, an online softmax over the keys s that a query t attends to:

    a_ts = log2(e) cap(scale q_t . k_s)      m_t = max_s a_ts      l_t = sum_s 2^(a_ts - m_t)
    out_t = sum_s 2^(a_ts - m_t) v_s / l_t   logsumexp_t = (m_t + log2 l_t) / log2(e)

Floor: 2 (D + Dv) FLOPs for each pair that attends; q, k, v read and out written once. Here: whole blocks that are not
empty; q and out once, k and v once for each block of queries that visits them, mostly from the L2.

Blocking: a tile is 64 queries of a head for each of two or three consumer warpgroups (sm90_fwd_consumer.py). A producer
warpgroup copies blocks of keys and values into a pipeline of stages in shared memory. Which blocks is a row of a table
(tiles.py), visited from its end: those that need a mask come first.

Thread blocks are persistent, one per multiprocessor. Their tiles are assigned when the call is traced, by the number of
blocks that each visits. The producer goes on into the next tile while the consumers finish theirs, the next queries are
copied behind the last product with the keys, and an output is stored while the next tile is computed. Where it does not
fit next to the queries (D = Dv = 256), it takes their place, and the next queries are copied once it is stored. With
packed segments the work is known on the device only: then each tile has a thread block of its own.

There are two ways to keep the tensor cores busy during a softmax (`overlap` of the config). Heads of more than 64: the
softmax of block n runs while the same warpgroup's product of block n - 1's weights with its values does. Heads of 64,
whose products are short against their softmax: three consumers take turns with the tensor cores, and the softmaxes of
two run while the products of the third do.

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. D and Dv are padded to 64, 128, 192 or 256, T and S to 8; each
costs a copy where it is not whole. No bias, no mask arrays, no masks that differ from head to head.
Mosaic GPU's ptxas must not be one of CUDA 12.8 to 12.9.0, which JAX's own kernel refuses for causal masks.

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the logits, in the
same multiply-add as the maximum. Masked logits are a large negative number and the maximum starts well above it, so a
row without keys has a total of 0. Weights are rounded to bfloat16 for the product with v; exponentials are the
hardware's, accurate to 2 units in the last place.

Tried and dropped (H200, bfloat16; times as ratios to cuDNN's, for B4 T4096 H16 D64 causal, B4 T4096 H32 KV8 D128
causal, B2 T8192 H16 D128 without a mask, and B1 T32768 H16 D128 causal; what is chosen took 0.90, 0.88, 1.03 and 0.89
beside them, and 0.93, 0.87, 0.97 and 0.90 in a last run. The same kernel differs by up to 5 % from run to run, so that
less than that tells little):
- consumers that meet before each softmax, so that no two softmaxes run at once: 1.09, 0.96, 1.04 and 0.89;
- turns for heads of 128: without overlap 0.91, 1.06 and 0.93, with it 0.87, 1.06 and 0.92;
- heads of 64 with two consumers: with overlap 0.96, with turns 0.97; with three and overlap: 0.96, and 0.99 with turns;
- one thread block per tile: with overlap 1.06 for heads of 64 and 0.94 for those of 128 with 4,096 tokens;
- 160 keys per block for heads of 128: 1.09 without a mask (a product takes 64 values at a time, or 32 in a layout with
  half the swizzle); 192 keys for heads of 64: 1.31;
- 2 to 8 of 32 heads side by side with 8,192 tokens: no faster than all;
- weights rounded before the wait for the product with the values: ptxas then runs all products one after the other;
- three stages of 128 keys for heads of 128, which exceed the shared memory;
- 232 registers instead of 240 for two consumers: 1 % slower at T = 32,768.
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
from tilewright.ops.attention.config import SM90_BLOCK, SM90_ROWS, AttentionSm90Forward
from tilewright.ops.attention.pallas_gpu.sm90_fwd_consumer import Consumer, Tiles, Turns
from tilewright.ops.attention.pallas_gpu.tiles import (
    Tables,
    TileScheduler,
    assign_tiles,
    padded_width,
    schedule_blocks,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, SAVED_AXES, SavedRows, outputs_of
from tilewright.pallas.gpu.kernel import (
    aligned,
    compiler_params,
    processors,
    run_kernel,
    smem_bytes,
    tile,
    whole,
)
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.wgmma import not_bfloat16

_WIDEST, _WIDEST_LARGE_BLOCK, _WIDEST_OF_THREE = 256, 128, 64
# Registers per thread: what a multiprocessor has for two or three consumers.
_CONSUMER_REGISTERS = {2: 240, 3: 160}
_PRODUCER_REGISTERS = 24
_BLOCKS_PER_HEAD = 4


def _choose(chip: Chip, call: AttentionCall) -> AttentionSm90Forward:
    """128 keys per block where they fit the shared memory and the registers, else 64; three consumers for narrow heads."""
    (b, t, h, d), dv = call.q.shape, call.v.shape[3]
    width = max(padded_width(d), padded_width(dv))
    if width > _WIDEST_LARGE_BLOCK:
        return AttentionSm90Forward(block_k=SM90_BLOCK // 2, stages=2)
    # A tile of three consumers takes longer than one of two: there have to be enough of them.
    rows = -(-t // (3 * SM90_ROWS))
    if width <= _WIDEST_OF_THREE and b * h * rows >= (chip.multiprocessors or 1):
        return AttentionSm90Forward(block_k=SM90_BLOCK, stages=2, consumers=3, overlap=False)
    return AttentionSm90Forward(block_k=SM90_BLOCK, stages=2)


def _heads_together(heads: int, multiprocessors: int) -> int:
    """How many of all heads of all sequences run side by side: as many as leave 4 thread blocks to each.

    Those 4 read the same keys and values at about the same time, so that most reads hit the L2. Groups of heads have the
    same size, as nearly as possible. H200, causal, T4096, one run with a thread block per tile: 32 heads at a time were
    2 % faster than all of 64 heads of 64, and than all of 128 heads of 128.
    """
    groups = -(-heads // max(1, multiprocessors // _BLOCKS_PER_HEAD))
    return -(-heads // groups)


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
    out_smem,  # [consumers, 64, Dv], or None
    statistics_smem,  # [consumers, 2, 64]
    q_full,
    turns,  # one barrier per consumer, or None
    # static
    scheduler: TileScheduler,
    config: AttentionSm90Forward,
    # inputs, see Tables
    **table_refs,
):
    call, consumers = scheduler.call, config.consumers
    tiles = Tiles(scheduler, Tables(**table_refs), jax.lax.axis_index("block"))
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup < consumers)
    def _consume():
        plgpu.set_max_registers(_CONSUMER_REGISTERS[consumers], action="increase")
        Consumer(
            call,
            config,
            tiles,
            warpgroup,
            Turns(turns, warpgroup, consumers),
            kv,
            q_ref,
            sinks_ref,
            out_ref,
            statistics_ref,
            q_tile=q_smem.at[warpgroup],
            q_full=q_full.at[warpgroup],
            out_tile=None if out_smem is None else out_smem.at[warpgroup],
            statistics_tile=statistics_smem.at[warpgroup],
        ).run()

    @pl.when(warpgroup == consumers)
    def _produce():
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        keys, values = kv.group("k"), kv.group("v")

        def produce(m: Any, base: Any) -> Any:
            b, h, row = tiles.place(tiles.load(m))
            key_head, _ = divmod_nonnegative(h, call.group)

            def fetch(n: Any, _: None) -> None:
                stage = keys.stage(base + n)
                block = (b, pl.ds(row.block(row.total - 1 - n) * config.block_k, config.block_k), key_head)
                keys.fetch(base + n, stage=stage, k=k_ref.at[block])
                values.fetch(base + n, stage=stage, v=v_ref.at[block])

            jax.lax.fori_loop(0, row.total, fetch, None)
            return base + row.total

        jax.lax.fori_loop(0, tiles.count, produce, jnp.int32(0))


def _scratch(call: AttentionCall, config: AttentionSm90Forward, chip: Chip) -> dict[str, Any]:
    d, d_v, dtype = padded_width(call.q.shape[3]), padded_width(call.v.shape[3]), call.q.dtype
    consumers = config.consumers
    shared = {
        "q_smem": tile(consumers, SM90_ROWS, d, dtype=dtype),
        "q_full": plgpu.Barrier(num_arrivals=1, num_barriers=consumers),
        "kv": Pipeline.scratch(
            config.stages,
            consumers=consumers,
            copies={"k": 1, "v": 1},
            k=tile(config.stages, config.block_k, d, dtype=dtype),
            v=tile(config.stages, config.block_k, d_v, dtype=dtype),
        ),
        "statistics_smem": plgpu.SMEM((consumers, 2, SM90_ROWS), jnp.float32),
        "turns": None if config.overlap else plgpu.Barrier(num_arrivals=1, num_barriers=consumers),
    }
    roomy = shared | {"out_smem": tile(consumers, SM90_ROWS, d_v, dtype=dtype)}
    # With a place of its own, the output is stored while the next tile is computed. Otherwise it takes the queries'.
    if d != d_v or smem_bytes(roomy, reductions=True) <= (chip.smem_bytes or 0):
        return roomy
    return shared | {"out_smem": None}


def _memory(call: AttentionCall, launch: Launch) -> dict[str, int]:
    return {"forward": smem_bytes(_scratch(call, launch.config, launch.chip), reductions=True)}


def _forward(call: AttentionCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], SavedRows]:
    config: AttentionSm90Forward = launch.config
    (b, t, h, _), dv = call.q.shape, call.v.shape[3]
    block_q = config.consumers * SM90_ROWS
    scheduler, tables = schedule_blocks(call, (block_q, config.block_k), "q")
    # Where work is not known in advance, the hardware hands tiles out: a thread block for each.
    tiles = b * h * scheduler.rows
    blocks = min(tiles, processors(launch.chip)) if scheduler.known else tiles
    assigned, counts = assign_tiles(
        scheduler.visits, b * h, _heads_together(b * h, launch.chip.multiprocessors or 1), blocks
    )
    # Copies past the end of T or S read zeros and write nothing.
    q = whole(aligned(call.q, rows=1), block_q, 1, 1)
    k, v = (whole(aligned(array, rows=1), config.block_k, 1, 1) for array in (call.k, call.v))
    outputs = run_kernel(
        functools.partial(_forward_kernel, scheduler=scheduler, config=config),
        name="flash_attention_forward",
        inputs={
            "q": q,
            "k": k,
            "v": v,
            **tables,
            "tiles": jnp.asarray(assigned.reshape(-1)),
            "tile_counts": jnp.asarray(counts),
            "sinks": None if call.sinks is None else call.sinks.astype(jnp.float32),
        },
        outputs={
            "out": jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            "statistics": jax.ShapeDtypeStruct((b, h, 2, scheduler.rows * block_q), jnp.float32),
        },
        scratch=_scratch(call, config, launch.chip),
        grid={"block": blocks},
        warpgroups=config.consumers + 1,
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
