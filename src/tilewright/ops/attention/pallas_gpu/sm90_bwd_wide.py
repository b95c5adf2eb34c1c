"""The backward kernel of attention on Hopper for heads of 129 to 256. See sm90_bwd.py for what it sums, and how.

dk and dv of 64 keys are 256 registers per thread for a warpgroup that has all 256 columns of them. So a thread block
has 64 keys, and its two consumer warpgroups divide the work of a step in two ways. Logits and gradients of weights are
divided over the queries: each computes [64 keys, 32 queries], over all columns. dk, dv and dq are divided over the
columns: each computes 128 of them, for all 64 queries. In between, the weights and the gradients of logits pass through
shared memory, and the warpgroups meet, once per step.

dq of a step is computed in the next one, 64 columns at a time: the first ones are converted to integers and leave while
the logits are computed, the others while dk and dv are. So the tile they leave through is free again half a step later,
and the tensor cores have work in the meantime.

Floor and order of the sums as there; twice as many sums of dq in memory, as a block has half the keys.

Shared memory: queries in two stages (64 KB), their cotangents in one (32 KB), keys and values (64 KB), weights and
gradients of logits in two buffers (32 KB), dq of a warpgroup 64 columns at a time (32 KB).

Limits: no sinks, for whose sums there is no room; `unsupported_reason` in sm90_bwd.py refuses them. Heads of 192 are
padded to 256.

Tried and dropped (H200, causal, T8192 D256, forward and backward; H16, and H16 KV2; this kernel: 4.41 and 4.56 ms):
- dq in the same step: 4.35 and 5.39 ms;
- without `opaque_zero`: 5.59 and 7.00 ms, with 428 bytes spilled;
- two copies of the code, one per warpgroup, so that addresses are constants: 904 bytes spilled, not timed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import SM90_CONSUMERS, SM90_ROWS, AttentionSm90Backward
from tilewright.ops.attention.pallas_gpu.tiles import (
    SWIZZLED_WIDTH,
    Tables,
    TileScheduler,
    add_to_dq,
    factors_of,
    plain_factor,
    scaled_logits,
)
from tilewright.pallas.gpu.kernel import tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, load_along_columns, opaque_zero, transposed
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, accumulate_in_loops, with_accumulators

WIDTH = 256
BLOCK = SM90_ROWS  # Of queries and of keys.
STAGES = 2  # Of queries; and buffers of weights and gradients of logits, which alternate with them.
_COLUMNS = WIDTH // SM90_CONSUMERS
_QUERIES = BLOCK // SM90_CONSUMERS
_PARTS = _COLUMNS // SWIZZLED_WIDTH  # Of a consumer's tile of dq.
_LOGSUMEXP, _DELTA = range(2)
_WEIGHTS, _D_LOGITS = range(2)


def kernel(
    *,
    # inputs
    q_ref,  # [B, T, H, WIDTH]
    k_ref,  # [B, S, KV, WIDTH]
    v_ref,  # [B, S, KV, WIDTH]
    d_out_ref,  # [B, T, H, WIDTH]
    rows_ref,  # [B, H, T / BLOCK, 2, BLOCK]: logsumexp and -delta
    factors_ref,  # [B, H, T / BLOCK, BLOCK]
    dq_sums_ref,  # int32 sums, see global_sums; added to
    # outputs
    dk_ref,  # [B, S, KV, WIDTH]
    dv_ref,  # [B, S, KV, WIDTH]
    # scratch
    # q [STAGES, consumers, BLOCK, 128], d_out [consumers, BLOCK, 128], rows [STAGES, 2, BLOCK],
    # factors [STAGES + 1, BLOCK], d_out_full
    streamed: Pipeline,
    k_smem,  # [consumers, BLOCK, 128]
    v_smem,  # [consumers, BLOCK, 128]
    between,  # [STAGES, 2, BLOCK queries, BLOCK keys]: weights and gradients of logits
    dq_smem,  # [consumers, BLOCK, 64] int32
    kv_full,
    d_out_empty,
    both,
    # static
    scheduler: TileScheduler,
    config: AttentionSm90Backward,
    together: int,
    # inputs, see Tables
    **table_refs,
):
    call, tables = scheduler.call, Tables(**table_refs)
    me = jax.lax.axis_index("warpgroup")
    b, kv, row = scheduler.row_of_keys(tables, jax.lax.axis_index("tile"), together)
    j = row.stationary
    steps = row.total * call.group
    folded = plain_factor(call) is not None

    @pl.when(me < SM90_CONSUMERS)
    def _consume():
        plgpu.set_max_registers(config.consumer_registers, action="increase")
        shape = (BLOCK, _QUERIES)
        plgpu.barrier_wait(kv_full)

        def multiply_keys(dq: Accumulator, number: Any, part: int) -> None:
            """Issues the products of 64 columns of this consumer's tile of dq, of the step before this one."""
            d_logits = between.at[streamed.stage(number + 1), _D_LOGITS]
            keys = k_smem.at[me + opaque_zero(number), :, pl.ds(part * SWIZZLED_WIDTH, SWIZZLED_WIDTH)]
            dq.add(d_logits, keys)  # [BLOCK queries, SWIZZLED_WIDTH]

        def add_queries(number: Any, part: int, dq: jax.Array) -> None:
            """Adds 64 columns of this consumer's tile of dq, of the step before this one, to the sums, as integers."""
            before = jnp.maximum(number - 1, 0)
            h, n = row.of_group(before, kv)
            at = pl.ds(me * _COLUMNS + part * SWIZZLED_WIDTH, SWIZZLED_WIDTH)
            index = (b, pl.ds(row.block(n) * BLOCK, BLOCK), h, at)
            # Nothing comes before the first step: the tile is computed from whatever was in shared memory.
            add_to_dq(dq, factors_of(streamed, before), dq_smem.at[me], dq_sums_ref, j, index, number > 0)

        def step(number: Any, sums: tuple[Accumulator, ...], *, masked: bool) -> None:
            dk, dv = sums
            zero = opaque_zero(number)
            opaque_me = me + zero
            mine = pl.ds(opaque_me * _QUERIES, _QUERIES)
            stage = streamed.stage(number)
            tiles = between.at[stage]  # The two alternate, as the stages do.
            _, n = row.of_group(number, kv)
            i = row.block(n)
            content = row.content(n) if masked else None
            streamed.wait(number, stage=stage)

            def of_query(which: int) -> jax.Array:
                return load_along_columns(streamed.rows.at[stage, which, mine], shape)

            def differentiate(
                products: Accumulator, d_weights: Accumulator, *, dq: tuple[Accumulator, ...]
            ) -> tuple[jax.Array, jax.Array]:
                for c in range(SM90_CONSUMERS):
                    products.add(k_smem.at[c + zero], transposed(streamed.q.at[stage, c, mine]))  # [BLOCK, _QUERIES]
                finished = dq[0].read(SM90_CONSUMERS)

                # What was issued before is done, so is dk of the step before: its queries have been read.
                @pl.when(number > 0)
                def _release_queries():
                    streamed.release(number - 1)

                add_queries(number, 0, finished)
                plgpu.barrier_wait(streamed.d_out_full)
                for c in range(SM90_CONSUMERS):
                    d_weights.add(v_smem.at[c + zero], transposed(streamed.d_out.at[c + zero, mine]))
                logits, factor, slope = scaled_logits(products.read(SM90_CONSUMERS), call)
                multiply_keys(dq[1], number, 1)
                if masked:
                    logits = row.masked(
                        logits,
                        factor,
                        content,
                        first_q=i * BLOCK + me * _QUERIES,
                        first_k=j * BLOCK,
                        part=(pl.ds(0, BLOCK), mine),
                        transposed=True,
                    )
                weights = jnp.exp2(logits * factor if folded else logits * factor - of_query(_LOGSUMEXP))
                d_logits = weights * d_weights.read(1)
                if slope is not None:
                    d_logits = d_logits * (1.0 - slope * slope)
                return weights.astype(streamed.q.dtype), d_logits.astype(streamed.q.dtype)

            def work(*dq: Accumulator) -> None:
                multiply_keys(dq[0], number, 0)
                first = of_query(_LOGSUMEXP) if folded else jnp.zeros(shape, jnp.float32)
                *_, weights, d_logits = accumulate(
                    tuple(plgpu.layout_cast(x, WGMMA) for x in (first, of_query(_DELTA))),
                    functools.partial(differentiate, dq=dq),
                    more=(jax.ShapeDtypeStruct(shape, streamed.q.dtype),) * 2,
                )
                for which, value in enumerate((weights, d_logits)):
                    transposed(tiles.at[which, mine])[...] = value  # [BLOCK keys, _QUERIES]
                plgpu.commit_smem()
                # Those of both consumers are there, and both are done with those of the step before.
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)
                dv.add(transposed(tiles.at[_WEIGHTS]), streamed.d_out.at[opaque_me])  # [BLOCK keys, _COLUMNS]
                dk.add(transposed(tiles.at[_D_LOGITS]), streamed.q.at[stage, opaque_me])
                add_queries(number, 1, dq[1].read(2))
                dv.wait(1)
                plgpu.barrier_arrive(d_out_empty)

            with_accumulators(((BLOCK, SWIZZLED_WIDTH),) * _PARTS, work)

        def finish(number: Any, sums: tuple[Accumulator, ...]) -> None:
            """dq of the last step."""

            def add(dq: Accumulator, part: int) -> None:
                multiply_keys(dq, number, part)
                add_queries(number, part, dq.read())

            for part in range(_PARTS):
                with_accumulators(((BLOCK, SWIZZLED_WIDTH),), functools.partial(add, part=part))

        loops = [*row.loops(step), (steps, steps + jnp.minimum(steps, 1), finish)]
        dk, dv = accumulate_in_loops(((BLOCK, _COLUMNS),) * 2, loops)
        # After the last step of both, nobody reads the queries: the gradients leave through their memory.
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)
        out_tile = streamed.q.at[0, me]
        for gradient, out_ref in ((dv, dv_ref), (dk * call.scale, dk_ref)):
            out_tile[...] = gradient.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(me * _COLUMNS, _COLUMNS)
            plgpu.copy_smem_to_gmem(out_tile, out_ref.at[b, pl.ds(j * BLOCK, BLOCK), kv, columns])
            plgpu.wait_smem_to_gmem(0)

    @pl.when(me == SM90_CONSUMERS)
    def _produce():
        plgpu.set_max_registers(config.producer_registers, action="decrease")
        columns = tuple(pl.ds(c * _COLUMNS, _COLUMNS) for c in range(SM90_CONSUMERS))
        for c in range(SM90_CONSUMERS):
            keys = (b, pl.ds(j * BLOCK, BLOCK), kv, columns[c])
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[c], kv_full)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[c], kv_full)

        def fetch(number: Any, _: None) -> None:
            stage = streamed.stage(number)
            h, n = row.of_group(number, kv)
            i = row.block(n)
            queries = (b, pl.ds(i * BLOCK, BLOCK), h)
            streamed.acquire(number, stage=stage)
            copies = [(q_ref.at[(*queries, columns[c])], streamed.q.at[stage, c]) for c in range(SM90_CONSUMERS)]
            streamed.copy(number, [*copies, (rows_ref.at[b, h, i], streamed.rows.at[stage])], stage=stage)
            streamed.copy(number, [(factors_ref.at[b, h, i], factors_of(streamed, number))], stage=stage)

            @pl.when(number >= 1)
            def _wait_for_d_out():
                plgpu.barrier_wait(d_out_empty)

            for c in range(SM90_CONSUMERS):
                plgpu.copy_gmem_to_smem(d_out_ref.at[(*queries, columns[c])], streamed.d_out.at[c], streamed.d_out_full)

        jax.lax.fori_loop(0, steps, fetch, None)


def scratch(call: AttentionCall) -> dict[str, Any]:
    """The shared memory and barriers of `kernel`."""
    dtype, consumers = call.q.dtype, plgpu.Barrier(num_arrivals=SM90_CONSUMERS)
    return {
        "kv_full": plgpu.Barrier(num_arrivals=2 * SM90_CONSUMERS),
        "streamed": Pipeline.scratch(
            STAGES,
            consumers=SM90_CONSUMERS,
            copies=SM90_CONSUMERS + 2,
            q=tile(STAGES, SM90_CONSUMERS, BLOCK, _COLUMNS, dtype=dtype),
            d_out=tile(SM90_CONSUMERS, BLOCK, _COLUMNS, dtype=dtype),
            rows=plgpu.SMEM((STAGES, 2, BLOCK), jnp.float32),
            factors=plgpu.SMEM((STAGES + 1, BLOCK), jnp.float32),
            d_out_full=consumers,
        ),
        "k_smem": tile(SM90_CONSUMERS, BLOCK, _COLUMNS, dtype=dtype),
        "v_smem": tile(SM90_CONSUMERS, BLOCK, _COLUMNS, dtype=dtype),
        "between": tile(STAGES, 2, BLOCK, BLOCK, dtype=dtype),
        "dq_smem": tile(SM90_CONSUMERS, BLOCK, SWIZZLED_WIDTH, dtype=jnp.int32),
        "d_out_empty": consumers,
        "both": consumers,
    }
