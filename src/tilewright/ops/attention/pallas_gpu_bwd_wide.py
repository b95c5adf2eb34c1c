"""The backward kernel of attention on Hopper for heads of 129 to 256. See pallas_gpu_bwd.py for what it sums, and how.

dk and dv of 64 keys are 256 registers a thread for a warpgroup that has all 256 columns of them. So a thread block has 64
keys, and its two warpgroups cut each step's work in two ways. Logits and gradients of weights over the queries: each makes
[64 keys, 32 queries], of all columns. dk, dv and dq over the columns: each makes 128 of them, of all 64 queries. Between
the two the weights and the gradients of logits pass through shared memory, and the warpgroups meet, once in a step.

dq of a step is made in the next one, 64 columns at a time: the first ones are turned into integers and leave while the
logits are made, the others while dk and dv are. So the tile they leave through is free again half a step later, and the
matrix unit has work in the meantime.

Floor and what is summed in which order as there; twice as many sums of dq in memory, as a block has half the keys.

Shared memory: queries in two stages (64 KB), their cotangents in one (32 KB), keys and values (64 KB), weights and
gradients of logits in two buffers (32 KB), dq of a warpgroup 64 columns at a time (32 KB).

Limits: sinks take the plain backward; there is no room for their sums. Heads of 192 are worked on as 256.

Tried and dropped (H200, causal, T8192 D256, forward and backward; H16, and H16 KV2): dq in the same step, 4.35 and 5.39 ms
beside 4.41 and 4.56, which is this kernel; that without `hidden_zero`, 5.59 and 7.00: 428 bytes were spilled. Two copies of
the code, one for each warpgroup, so that addresses are constants: 904 bytes spilled, not timed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.hopper import (
    Accumulator,
    accumulate,
    hidden_zero,
    loop_with_sums,
    tile,
    with_accumulators,
)
from tilewright.core.manual_axes import output_like
from tilewright.core.target import Interpret, gpu_interpret_params
from tilewright.ops.attention.config import GPU_ROWS, GPU_WIDTH, GPU_WORKERS
from tilewright.ops.attention.gpu_tiles import (
    COPIER_REGISTERS,
    MASKED,
    WORKER_REGISTERS,
    Plan,
    add_to_sums,
    allowed,
    plain_factor,
    scaled_logits,
)

WIDTH = 256
BLOCK = GPU_ROWS  # Of queries and of keys.
_COLUMNS = WIDTH // GPU_WORKERS
_QUERIES = BLOCK // GPU_WORKERS
_PARTS = _COLUMNS // GPU_WIDTH  # Of a worker's tile of dq.
_STAGES = 2
_LOGSUMEXP, _DELTA = range(2)
_WEIGHTS, _D_LOGITS = range(2)


def _kernel(*refs: Any, plan: Plan, heads: tuple[int, int], together: int, interpreted: bool):
    # inputs, [B, T, H, D] or [B, S, KV, D]; rows [B, H, T / BLOCK, 2, BLOCK] and factors [B, H, T / BLOCK, BLOCK]
    q_ref, k_ref, v_ref, d_out_ref, rows_ref, factors_ref = refs[:6]
    tables = dict(zip(plan.names, refs[6:], strict=False))
    dq_ref, dk_ref, dv_ref = refs[6 + len(plan.names) :][:3]  # dq is an input that is added to.
    # scratch
    q_smem, d_out_smem, rows_smem, factors_smem, k_smem, v_smem, between, dq_smem, *barriers = refs[
        9 + len(plan.names) :
    ]
    kv_barrier, q_barrier, d_out_barrier, q_free, d_out_free, both = barriers
    kv_heads, group = heads
    worker = jax.lax.axis_index("worker")
    b, kv, row = plan.row_of_keys(tables, jax.lax.axis_index("work"), kv_heads, together)
    j = row.stays
    steps = row.total * group
    folded = plain_factor(plan.settings) is not None

    def slot_of(number: Any) -> Any:
        return jax.lax.rem(number, jnp.int32(_STAGES))

    def factors_of(number: Any) -> Any:
        """Where the factors of a step are: they are needed in the next one, when its slot may be another's."""
        return factors_smem.at[jax.lax.rem(number, jnp.int32(_STAGES + 1))]

    @pl.when(worker < GPU_WORKERS)
    def _compute():
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        settings = plan.settings
        shape = (BLOCK, _QUERIES)
        plgpu.barrier_wait(kv_barrier)

        def multiply_keys(dq: Accumulator, number: Any, part: int) -> None:
            """Issue the products of 64 columns of the worker's tile of dq, of the step before this one."""
            d_logits = between.at[slot_of(number + 1), _D_LOGITS]
            keys = k_smem.at[worker + hidden_zero(number), :, pl.ds(part * GPU_WIDTH, GPU_WIDTH)]
            dq.add(d_logits, keys)  # [BLOCK queries, GPU_WIDTH]

        def add_queries(number: Any, part: int, dq: jax.Array) -> None:
            """Add 64 columns of the worker's tile of dq, of the step before this one, to the sums, as integers."""
            before = jnp.maximum(number - 1, 0)
            h, place = row.of_group(before, kv, group)
            at = pl.ds(worker * _COLUMNS + part * GPU_WIDTH, GPU_WIDTH)
            # The interpreter has no sums in memory: there each block of keys has an array of its own.
            target = dq_ref.at[j if interpreted else 0, b, pl.ds(row.block(place) * BLOCK, BLOCK), h, at]
            # Before the first step there is none: its tile is of whatever was in shared memory.
            add_to_sums(dq, factors_of(before), dq_smem.at[worker], target, number > 0, interpreted=interpreted)

        def step(number: Any, sums: tuple[Accumulator, ...], *, masked: bool) -> None:
            dk, dv = sums
            zero = hidden_zero(number)
            me = worker + zero
            mine = pl.ds(me * _QUERIES, _QUERIES)
            slot = slot_of(number)
            tiles = between.at[slot]  # In turns, as the slots are.
            _, place = row.of_group(number, kv, group)
            i = row.block(place)
            content = row.content(place) if masked and "content" in tables else None
            plgpu.barrier_wait(q_barrier.at[slot])

            def of_query(which: int) -> jax.Array:
                values = plgpu.load(
                    rows_smem.at[slot, which, mine], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False
                )
                return jax.lax.broadcast_in_dim(values, shape, [1])

            def differentiate(
                products: Accumulator, d_weights: Accumulator, *, dq: tuple[Accumulator, ...]
            ) -> tuple[jax.Array, jax.Array]:
                for c in range(GPU_WORKERS):
                    products.add(k_smem.at[c + zero], q_smem.at[slot, c, mine].transpose((1, 0)))  # [BLOCK, _QUERIES]
                made = dq[0].read(GPU_WORKERS)

                # What was issued before is done, so dk of the step before: its queries are read.
                @pl.when(number > 0)
                def _free_queries():
                    plgpu.barrier_arrive(q_free.at[slot_of(number - 1)])

                add_queries(number, 0, made)
                plgpu.barrier_wait(d_out_barrier)
                for c in range(GPU_WORKERS):
                    d_weights.add(v_smem.at[c + zero], d_out_smem.at[c + zero, mine].transpose((1, 0)))
                logits, factor, slope = scaled_logits(products.read(GPU_WORKERS), settings)
                multiply_keys(dq[1], number, 1)
                if masked:
                    keep = allowed(
                        plan,
                        tables,
                        b,
                        content,
                        (i * BLOCK + worker * _QUERIES, _QUERIES),
                        (j * BLOCK, BLOCK),
                        transposed=True,
                        part=(pl.ds(0, BLOCK), mine),
                    )
                    logits = jnp.where(keep, logits, MASKED / max(factor, 1.0)) if keep is not None else logits
                weights = jnp.exp2(logits * factor if folded else logits * factor - of_query(_LOGSUMEXP))
                d_logits = weights * d_weights.read(1)
                if slope is not None:
                    d_logits = d_logits * (1.0 - slope * slope)
                return weights.astype(q_smem.dtype), d_logits.astype(q_smem.dtype)

            def work(*dq: Accumulator) -> None:
                multiply_keys(dq[0], number, 0)
                first = of_query(_LOGSUMEXP) if folded else jnp.zeros(shape, jnp.float32)
                *_, weights, d_logits = accumulate(
                    tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in (first, of_query(_DELTA))),
                    functools.partial(differentiate, dq=dq),
                    more=(jax.ShapeDtypeStruct(shape, q_smem.dtype),) * 2,
                    interpreted=interpreted,
                )
                for n, value in enumerate((weights, d_logits)):
                    tiles.at[n, mine].transpose((1, 0))[...] = value  # [BLOCK keys, _QUERIES]
                plgpu.commit_smem()
                # Both workers' are there, and both are done with those of the step before.
                plgpu.barrier_arrive(both)
                plgpu.barrier_wait(both)
                dv.add(tiles.at[_WEIGHTS].transpose((1, 0)), d_out_smem.at[me])  # [BLOCK keys, _COLUMNS]
                dk.add(tiles.at[_D_LOGITS].transpose((1, 0)), q_smem.at[slot, me])
                add_queries(number, 1, dq[1].read(2))
                dv.wait(1)
                plgpu.barrier_arrive(d_out_free)

            with_accumulators(((BLOCK, GPU_WIDTH),) * _PARTS, work, interpreted=interpreted)

        def finish(number: Any, sums: tuple[Accumulator, ...]) -> None:
            """dq of the last step."""
            del sums

            def add(dq: Accumulator, part: int) -> None:
                multiply_keys(dq, number, part)
                add_queries(number, part, dq.read())

            for part in range(_PARTS):
                with_accumulators(((BLOCK, GPU_WIDTH),), functools.partial(add, part=part), interpreted=interpreted)

        loops = [*plan.loops(row, group, step), (steps, steps + jnp.minimum(steps, 1), finish)]
        dk, dv = loop_with_sums(((BLOCK, _COLUMNS),) * 2, loops, interpreted=interpreted)
        # Behind the last step of both, nobody reads the queries: the gradients leave through them.
        plgpu.barrier_arrive(both)
        plgpu.barrier_wait(both)
        stage = q_smem.at[0, worker]
        for gradient, out_ref in ((dv, dv_ref), (dk * settings.scale, dk_ref)):
            stage[...] = gradient.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(worker * _COLUMNS, _COLUMNS)
            plgpu.copy_smem_to_gmem(stage, out_ref.at[b, pl.ds(j * BLOCK, BLOCK), kv, columns])
            plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == GPU_WORKERS)
    def _copy():
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
        columns = tuple(pl.ds(c * _COLUMNS, _COLUMNS) for c in range(GPU_WORKERS))
        for c in range(GPU_WORKERS):
            keys = (b, pl.ds(j * BLOCK, BLOCK), kv, columns[c])
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem.at[c], kv_barrier)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[c], kv_barrier)

        def fetch(number: Any, _: None) -> None:
            slot = slot_of(number)
            h, place = row.of_group(number, kv, group)
            i = row.block(place)
            queries = (b, pl.ds(i * BLOCK, BLOCK), h)

            @pl.when(number >= _STAGES)
            def _q_is_free():
                plgpu.barrier_wait(q_free.at[slot])

            for c in range(GPU_WORKERS):
                plgpu.copy_gmem_to_smem(q_ref.at[(*queries, columns[c])], q_smem.at[slot, c], q_barrier.at[slot])
            plgpu.copy_gmem_to_smem(rows_ref.at[b, h, i], rows_smem.at[slot], q_barrier.at[slot])
            plgpu.copy_gmem_to_smem(factors_ref.at[b, h, i], factors_of(number), q_barrier.at[slot])

            @pl.when(number >= 1)
            def _d_out_is_free():
                plgpu.barrier_wait(d_out_free)

            for c in range(GPU_WORKERS):
                plgpu.copy_gmem_to_smem(d_out_ref.at[(*queries, columns[c])], d_out_smem.at[c], d_out_barrier)

        jax.lax.fori_loop(0, steps, fetch, None)


def gradients(
    arrays: tuple[jax.Array, ...],
    tables: list[jax.Array],
    dq_sums: Any,
    plan: Plan,
    *,
    heads: tuple[int, int],
    together: int,
    interpret: Interpret | None,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv; dq is added to its sums. `arrays`: q, k, v, d_out, in whole blocks of WIDTH columns, rows and factors."""
    q, k = arrays[:2]
    out = output_like(k.shape, q.dtype, q)
    made = plgpu.kernel(
        functools.partial(_kernel, plan=plan, heads=heads, together=together, interpreted=interpret is not None),
        out_type=(out, out),
        grid=(k.shape[0] * heads[0] * plan.rows,),
        grid_names=("work",),
        num_threads=GPU_WORKERS + 1,
        thread_name="worker",
        scratch_types=(
            tile(_STAGES, GPU_WORKERS, BLOCK, _COLUMNS, dtype=q.dtype),
            tile(GPU_WORKERS, BLOCK, _COLUMNS, dtype=q.dtype),
            plgpu.SMEM((_STAGES, 2, BLOCK), jnp.float32),
            plgpu.SMEM((_STAGES + 1, BLOCK), jnp.float32),
            tile(GPU_WORKERS, BLOCK, _COLUMNS, dtype=q.dtype),
            tile(GPU_WORKERS, BLOCK, _COLUMNS, dtype=q.dtype),
            tile(_STAGES, 2, BLOCK, BLOCK, dtype=q.dtype),
            tile(GPU_WORKERS, BLOCK, GPU_WIDTH, dtype=jnp.int32),
            plgpu.Barrier(num_arrivals=2 * GPU_WORKERS),
            plgpu.Barrier(num_arrivals=GPU_WORKERS + 2, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=GPU_WORKERS),
            plgpu.Barrier(num_arrivals=GPU_WORKERS, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=GPU_WORKERS),
            plgpu.Barrier(num_arrivals=GPU_WORKERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=gpu_interpret_params(interpret),
        kernel_name="flash_attention_backward_wide",
    )(*arrays, *tables, dq_sums)
    return tuple(made)
