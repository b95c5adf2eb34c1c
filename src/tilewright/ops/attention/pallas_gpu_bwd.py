"""The backward kernel of attention on Hopper GPUs: dq, dk and dv at once. See pallas_gpu.py and gradient.py.

With p_ts = 2^(a_ts - logsumexp_t) and d_ts = p_ts (d_out_t . v_s - delta_t), times the slope of the soft cap,

    dv_s = sum_t p_ts d_out_t        dk_s = scale sum_t d_ts q_t        dq_t = scale sum_s d_ts k_s

Floor: 2 (3 D + 2 Dv) FLOPs for each pair that attends: five products, the logits made anew. Here each product once, over
whole blocks that are not empty. Two kernels, one for dq and one for dk and dv, would make seven. What a single one needs
is a sum over blocks of keys, which other multiprocessors compute, and an order of it that does not change from run to
run.

dq is summed as integers, whose sum has no order. Weights of a row add up to 1 at most, so no element of dq / scale, nor
any sum on the way to it, exceeds max_s |d_out_t . v_s - delta_t| max |k|. That bound, of each row, is what 2^31 stands
for: a tile of dq is cut to multiples of bound / 2^31 and added to int32 in memory by the copy engine. bfloat16
gradients have 8 bits; so many are left where a row's dq is 2^22 times below its bound. Cut, not rounded to the nearest:
that is an instruction more, on the unit that has the exponentials, too (T32768: 31.6 ms with it, 29.3 without).

Blocking: a thread block keeps 128 keys and values in shared memory, 64 for each of two warpgroups, and dk and dv of those
in registers. Blocks of queries stream past, 64 of them for heads of up to 128, 128 for heads of up to 64, with rows of
statistics each; all query heads of a group one after the other. Tiles are [keys, queries]: the weights and the gradients
of logits are then left operands of dv and dk. Those of the logits also go through shared memory, for dq needs both
warpgroups'; each makes half of the columns of dq (or of its rows), one step later: then the other's are there, and the
two need not meet. Four buffers let one warpgroup run ahead of the other; where they do not fit (heads of 64, sinks) there
are two, and it waits for what the other reads. A step's products with its queries for dk are still in flight when the next
step's begin, so its queries are given back one step later.

Registers are what is short: 240 a thread, of which dk and dv are 128 and the logits and the gradients of weights 64. So
these two sums begin with -logsumexp / scale and -delta, instead of having them subtracted, and what is behind the products
is little.

Limits: heads wider than 128 have another kernel (pallas_gpu_bwd_wide.py), or with sinks the plain backward (xla.py): dk and
dv of 64 keys do not fit the registers. One thread block for each 128 keys of a key head: fewer than 132 leave
multiprocessors idle. Beyond inputs and outputs: dq in int32, twice dq.

With sinks, weights times their gradients times the weight of the sink are summed over the queries of a tile, in float32,
and added to a row of shared memory for each worker and query head: 512 bytes a head of the group. That sum is of the
worker's own steps, in their order, so it is the same from run to run; XLA adds the rows up.

Numerics: logsumexp in float32 in units of log 2; at logits of 1,000 it is off by 1e-4, which bfloat16 does not show.
Weights are float32 until they are operands.

Tried and dropped (H200, causal, H16 D128, forward and backward, beside cuDNN in the same process). This kernel takes 0.94
of cuDNN's time at T32768, 0.86 at T8192 and 0.92 for B4 T4096 H32 KV8; without `hidden_zero`, with 124 bytes spilled, 0.97,
0.89 and 0.97. Beside the latter: logits that begin with zero, 0.99, 0.89, 1.03; that with three buffers, 1.07, 0.92, 1.04,
or two, 1.07, 0.89, 1.05; Pallas' own barriers around stores, 0.97 to 0.98. dq of a step in the same step, so that the
warpgroups meet in each, 1.09, 0.97 and 1.08. dq made an integer by `astype`, which clamps it first (64 instructions of 630
a step), adds one or two in a hundred. With dq not stored at all T32768 takes 0.84: the rest is its conversion, the barriers
around its tile, and the sums in memory (0.05).
Of the backward in which the warpgroups met, at T8192, beside 1.60 ms: weights kept as bfloat16 only, 1.81; and with dv
before the gradients of logits, 1.85; dk from registers instead of shared memory, 1.87 beside 1.67; 232 registers instead
of 240, 1.71.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import (
    Accumulator,
    accumulate,
    hidden_zero,
    loop_with_sums,
    padded,
    tile,
    with_accumulators,
)
from tilewright.core.manual_axes import output_like, vary_over, varying_axes
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.attention import pallas_gpu_bwd_wide
from tilewright.ops.attention.config import (
    FEWEST_BUFFERS_BWD,
    GPU_BLOCK,
    GPU_ROWS,
    GPU_WIDEST_BWD,
    GPU_WIDTH,
    GPU_WORKERS,
    PallasGpuConfig,
    XlaConfig,
    padded_width,
)
from tilewright.ops.attention.gpu_tiles import (
    COPIER_REGISTERS,
    LOG2_E,
    MASKED,
    WORKER_REGISTERS,
    Plan,
    add_to_sums,
    allowed,
    plain_factor,
    plan_visits,
    scaled_logits,
)
from tilewright.ops.attention.gradient import Gradients, Operands, Rows, Settings
from tilewright.ops.attention.xla import backward as xla_backward

# The range of the sums of dq, in units of their bound: an int32's, but for what is cut off, a unit for each block of keys.
_FIXED_ONE = 2.0**31 - 2.0**24
# Below it a bound is taken for this: its reciprocal must be a float32.
_LEAST_BOUND = 2.0**-90
# Thread blocks for each multiprocessor that follow each other before other heads come.
_ROUNDS = 3


def _heads_together(heads: int, rows: int, multiprocessors: int) -> int:
    """Of all key heads of all sequences, with so many thread blocks each: how many run side by side.

    As few as keep the GPU busy for a few rounds, so that their queries and sums of dq stay in the L2: H200, B1 H16 T32768
    D128, forward and backward, 16 heads 32.7 ms, 4 30.8, 2 30.7, 1 31.4 (one is not enough to even out what a mask leaves
    of the rows).
    """
    enough = (n for n in range(1, heads) if heads % n == 0 and n * rows >= _ROUNDS * multiprocessors)
    return next(enough, heads)


def _backward_kernel(
    *refs: Any,
    plan: Plan,
    stages: int,
    buffers: int,
    heads: tuple[int, int],
    together: int,
    has_sinks: bool,
    interpreted: bool,
):
    # inputs, [B, T, H, D] or [B, S, KV, D]; rows [B, H, T / block_q, 2 or 3, block_q]
    # and factors [B, H, T / block_q, block_q]
    q_ref, k_ref, v_ref, d_out_ref, rows_ref, factors_ref = refs[:6]
    tables = dict(zip(plan.names, refs[6:], strict=False))
    # dq is an input that is added to, [1, B, T, H, D] of int32.
    dq_ref, dk_ref, dv_ref = refs[6 + len(plan.names) :][:3]
    drawn_ref = refs[9 + len(plan.names)] if has_sinks else None  # [B, KV, S / block_k, GPU_WORKERS, group, GPU_ROWS]
    # scratch
    q_smem, d_out_smem, rows_smem, factors_smem, k_smem, v_smem, d_logits_smem, dq_smem, drawn_smem, *barriers = refs[
        9 + has_sinks + len(plan.names) :
    ]
    kv_barrier, q_barrier, d_out_barrier, q_free, d_out_free, ready = barriers
    kv_heads, group = heads
    block_q, width = plan.block_q, v_smem.shape[-1]
    columns, parts = width // GPU_WIDTH, block_q // GPU_ROWS
    # The tile of dq is cut between the workers: over its columns, or over its rows where those are 128.
    over_rows = block_q == GPU_WORKERS * GPU_ROWS
    worker = jax.lax.axis_index("worker")
    b, kv, row = plan.row_of_keys(tables, jax.lax.axis_index("work"), kv_heads, together)
    j = row.stays

    steps = row.total * group
    roomy = buffers > FEWEST_BUFFERS_BWD
    # The logits' own sum then begins with their logsumexp.
    folded = plain_factor(plan.settings) is not None

    def locate(number: Any) -> tuple[Any, Any]:
        return row.of_group(number, kv, group)

    def slot_of(number: Any) -> Any:
        return jax.lax.rem(number, jnp.int32(stages))

    def buffer_of(number: Any) -> Any:
        return jax.lax.rem(number, jnp.int32(buffers))

    def factors_of(number: Any) -> Any:
        """Where the factors of a step are: they are needed in the next one, when its slot may be another's."""
        return factors_smem.at[jax.lax.rem(number, jnp.int32(stages + 1))]

    def ready_of(whose: Any, buffer: Any) -> Any:
        """One for each buffer: a worker may be done with two steps before the other looks."""
        return ready.at[buffers * whose + buffer]

    @pl.when(worker < GPU_WORKERS)
    def _compute():
        plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
        settings = plan.settings
        shape = (GPU_ROWS, block_q)
        part = worker if over_rows else 0
        if has_sinks:
            for g in range(group):
                drawn_smem[worker, g] = plgpu.layout_cast(
                    jnp.zeros((GPU_ROWS,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)
                )
        # The first step adds dq of a step before it, of gradients of zeros.
        for c in range(parts):
            d_logits_smem[buffers - 1, worker, c] = plgpu.layout_cast(
                jnp.zeros((GPU_ROWS, GPU_ROWS), q_smem.dtype), plgpu.Layout.WGMMA
            )
        plgpu.commit_smem()
        plgpu.barrier_arrive(ready_of(worker, buffers - 1))
        plgpu.barrier_wait(kv_barrier)

        def of_query(slot: Any, which: int) -> jax.Array:
            values = plgpu.load(rows_smem.at[slot, which], layout=plgpu.Layout.WGMMA.reduce(0))  # [block_q]
            return jax.lax.broadcast_in_dim(values, shape, [1])

        def begins(slot: Any) -> tuple[jax.Array, jax.Array]:
            """What the sums of the logits' products and of the gradients of weights begin with."""
            first = of_query(slot, 0) if folded else jnp.zeros(shape, jnp.float32)
            return first, of_query(slot, 1)

        def multiply_keys(dq: Accumulator, last: Any, zero: Any) -> None:
            """Issue the products of a tile of dq: of the step whose gradients are in the buffer `last`."""
            for r in range(GPU_WORKERS):
                keys = k_smem.at[r + zero, 0 if over_rows else worker]
                dq.add(d_logits_smem.at[last, r, part].transpose((1, 0)), keys)  # [GPU_ROWS queries, GPU_WIDTH]

        def add_queries(number: Any, dq: jax.Array) -> None:
            """Add a tile of dq, of the step before this one, to the sums in memory, as integers."""
            before = jnp.maximum(number - 1, 0)
            h, place = locate(before)
            i = row.block(place)
            factors = factors_of(before)
            factors = factors.at[pl.ds(part * GPU_ROWS, GPU_ROWS)] if over_rows else factors
            at = pl.ds(0, GPU_WIDTH) if over_rows else pl.ds(worker * GPU_WIDTH, GPU_WIDTH)
            # The interpreter has no sums in memory: there each block of keys has an array of its own.
            target = dq_ref.at[j if interpreted else 0, b, pl.ds(i * block_q + part * GPU_ROWS, GPU_ROWS), h, at]
            add_to_sums(dq, factors, dq_smem.at[worker], target, number > 0, interpreted=interpreted)

        def step(number: Any, sums: tuple[Accumulator, ...], *, masked: bool) -> None:
            dk, dv = sums
            zero = hidden_zero(number)
            slot, buffer, last = slot_of(number), buffer_of(number), buffer_of(number + buffers - 1)
            h, place = locate(number)
            i = row.block(place)
            content = row.content(place) if masked and "content" in tables else None
            plgpu.barrier_wait(q_barrier.at[slot])

            def differentiate(products: Accumulator, d_weights: Accumulator) -> tuple[jax.Array, jax.Array]:
                for c in range(columns):
                    q_part = q_smem.at[slot, :, pl.ds(c * GPU_WIDTH, GPU_WIDTH)] if columns > 1 else q_smem.at[slot]
                    products.add(k_smem.at[worker + zero, c], q_part.transpose((1, 0)))  # [GPU_ROWS, block_q]
                plgpu.barrier_wait(d_out_barrier.at[slot])
                d_weights.add(v_smem.at[worker + zero], d_out_smem.at[slot].transpose((1, 0)))  # [GPU_ROWS, block_q]
                logits, factor, slope = scaled_logits(products.read(1), settings)

                # What was issued before these products is done, so dk of the step before: its queries are read.
                @pl.when(number > 0)
                def _free_queries():
                    plgpu.barrier_arrive(q_free.at[slot_of(number - 1)])

                if masked:
                    keep = allowed(
                        plan,
                        tables,
                        b,
                        content,
                        (i * block_q, block_q),
                        (j * plan.block_k + worker * GPU_ROWS, GPU_ROWS),
                        transposed=True,
                        part=(pl.ds(worker * GPU_ROWS, GPU_ROWS),),
                    )
                    logits = jnp.where(keep, logits, MASKED / max(factor, 1.0)) if keep is not None else logits
                weights = jnp.exp2(logits * factor if folded else logits * factor - of_query(slot, 0))
                d_products = d_weights.read(0)  # Less delta.
                if has_sinks:
                    drawn = jnp.sum(
                        weights * (d_products - of_query(slot, 1)) * of_query(slot, 2), axis=1
                    )  # [GPU_ROWS]
                    here = drawn_smem.at[worker, h - kv * group]
                    here[...] = plgpu.load(here, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False) + drawn
                d_logits = weights * d_products
                if slope is not None:
                    d_logits = d_logits * (1.0 - slope * slope)
                return weights.astype(q_smem.dtype), d_logits.astype(q_smem.dtype)

            *_, narrow, d_logits = accumulate(
                tuple(plgpu.layout_cast(value, plgpu.Layout.WGMMA) for value in begins(slot)),
                differentiate,
                more=(jax.ShapeDtypeStruct(shape, q_smem.dtype),) * 2,
                interpreted=interpreted,
            )
            dv.add(narrow, d_out_smem.at[slot])  # [GPU_ROWS, width]
            if not roomy:
                plgpu.barrier_wait(ready_of(1 - worker, last))
            for c in range(parts):
                half = slice(c * GPU_ROWS, (c + 1) * GPU_ROWS)
                d_logits_smem[buffer, worker, c] = d_logits if parts == 1 else d_logits[:, half]
            plgpu.commit_smem()
            if roomy:
                plgpu.barrier_arrive(ready_of(worker, buffer))
                plgpu.barrier_wait(ready_of(1 - worker, last))

            def add(dq: Accumulator) -> None:
                multiply_keys(dq, last, zero)
                for c in range(parts):
                    q_rows = q_smem.at[slot] if parts == 1 else q_smem.at[slot, pl.ds(c * GPU_ROWS, GPU_ROWS)]
                    dk.add(d_logits_smem.at[buffer, worker, c], q_rows)  # [GPU_ROWS, width]
                made = dq.read(parts)
                if not roomy:
                    plgpu.barrier_arrive(ready_of(worker, buffer))
                add_queries(number, made)

            with_accumulators(((GPU_ROWS, GPU_WIDTH),), add, interpreted=interpreted)
            plgpu.barrier_arrive(d_out_free.at[slot])

        def finish(number: Any, sums: tuple[Accumulator, ...]) -> None:
            """dq of the last step."""
            del sums
            last = buffer_of(number + buffers - 1)
            plgpu.barrier_wait(ready_of(1 - worker, last))

            def add(dq: Accumulator) -> None:
                multiply_keys(dq, last, 0)
                add_queries(number, dq.read())

            with_accumulators(((GPU_ROWS, GPU_WIDTH),), add, interpreted=interpreted)

        loops = [*plan.loops(row, group, step), (steps, steps + jnp.minimum(steps, 1), finish)]
        dk, dv = loop_with_sums(((GPU_ROWS, width), (GPU_ROWS, width)), loops, interpreted=interpreted)
        first_k = j * plan.block_k + worker * GPU_ROWS
        # The worker's own values are read by nobody else, and are not needed any more.
        stage = v_smem.at[worker]
        for gradient, out_ref in ((dv, dv_ref), (dk * settings.scale, dk_ref)):
            stage[...] = gradient.astype(out_ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out_ref.at[b, pl.ds(first_k, GPU_ROWS), kv])
            plgpu.wait_smem_to_gmem(0)
        if drawn_ref is not None:
            plgpu.copy_smem_to_gmem(drawn_smem.at[worker], drawn_ref.at[b, kv, j, worker])
            plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == GPU_WORKERS)
    def _copy():
        plgpu.set_max_registers(COPIER_REGISTERS, action="decrease")
        for r in range(GPU_WORKERS):
            keys = (b, pl.ds(j * plan.block_k + r * GPU_ROWS, GPU_ROWS), kv)
            for c in range(columns):
                plgpu.copy_gmem_to_smem(k_ref.at[(*keys, pl.ds(c * GPU_WIDTH, GPU_WIDTH))], k_smem.at[r, c], kv_barrier)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem.at[r], kv_barrier)

        def fetch(number: Any, _: None) -> None:
            slot = slot_of(number)
            h, place = locate(number)
            i = row.block(place)
            queries = (b, pl.ds(i * block_q, block_q), h)

            @pl.when(number >= stages)
            def _q_is_free():
                plgpu.barrier_wait(q_free.at[slot])

            plgpu.copy_gmem_to_smem(q_ref.at[queries], q_smem.at[slot], q_barrier.at[slot])
            plgpu.copy_gmem_to_smem(rows_ref.at[b, h, i], rows_smem.at[slot], q_barrier.at[slot])
            plgpu.copy_gmem_to_smem(factors_ref.at[b, h, i], factors_of(number), q_barrier.at[slot])

            @pl.when(number >= stages)
            def _d_out_is_free():
                plgpu.barrier_wait(d_out_free.at[slot])

            plgpu.copy_gmem_to_smem(d_out_ref.at[queries], d_out_smem.at[slot], d_out_barrier.at[slot])

        jax.lax.fori_loop(0, steps, fetch, None)


def backward(operands: Operands, d_out: jax.Array, statistics: Rows, settings: Settings, launch: Launch) -> Gradients:
    """The gradients. The max of a row is in units of log 2."""
    config: PallasGpuConfig = launch.config
    (b, t, h, d), (_, s, kv, dv) = operands.q.shape, operands.v.shape
    width = padded_width(max(d, dv))
    wide = width > GPU_WIDEST_BWD
    if wide and statistics.sink is not None:
        plain = dataclasses.replace(launch, config=XlaConfig.for_shape(b, h, t, s))
        in_nats = dataclasses.replace(statistics, highest=statistics.highest / LOG2_E)
        return xla_backward(operands, d_out, in_nats, settings, plain)
    width = pallas_gpu_bwd_wide.WIDTH if wide else width
    block_q, block_k = (pallas_gpu_bwd_wide.BLOCK,) * 2 if wide else (config.block_q_bwd(width), GPU_BLOCK)
    stages, group = config.stages_bwd, h // kv
    plan, tables = plan_visits(operands, settings, (block_q, block_k), "k")
    q, d_outs = (padded(padded(array, 3, width), 1, block_q) for array in (operands.q, d_out))
    k, v = (padded(padded(array, 3, width), 1, block_k) for array in (operands.k, operands.v))
    padded_t, padded_s, dtype = q.shape[1], k.shape[1], q.dtype
    bound = _bound(operands, d_out, statistics.delta)  # [B, H, T]
    log_total = jnp.log2(jnp.where(statistics.total == 0, 1.0, statistics.total))
    has_sinks = statistics.sink is not None
    logsumexp, factor = statistics.highest + log_total, plain_factor(settings)
    each = [logsumexp if factor is None else -logsumexp / factor, -statistics.delta]
    each += [statistics.sink] if statistics.sink is not None else []
    rows = padded(jnp.stack(each, axis=2), 3, block_q)  # [B, H, 2 or 3, T]
    rows = rows.reshape(b, h, len(each), -1, block_q).swapaxes(2, 3)  # [B, H, T / block_q, 2 or 3, block_q]
    factors = padded(_FIXED_ONE / bound, 2, block_q).reshape(b, h, -1, block_q)
    interpreted = launch.interpret is not None
    summed = jnp.zeros((plan.rows if interpreted else 1, b, padded_t, h, width), jnp.int32)
    dq_sums = jax.new_ref(vary_over(summed, varying_axes(operands.q)))
    together = _heads_together(b * kv, plan.rows, launch.chip.multiprocessors or 1)
    from_fixed = (bound * (settings.scale / _FIXED_ONE)).transpose(0, 2, 1)[..., None]  # [B, T, H, 1]

    def dq() -> jax.Array:
        return (jnp.sum(dq_sums[...], axis=0)[:, :t, :, :d].astype(jnp.float32) * from_fixed).astype(dtype)

    if wide:
        dk, dv_ = pallas_gpu_bwd_wide.gradients(
            (q, k, v, d_outs, rows, factors),
            tables,
            dq_sums,
            plan,
            heads=(kv, group),
            together=together,
            interpret=launch.interpret,
        )
        return Gradients(dq(), dk[:, :s, :, :d], dv_[:, :s, :, :dv], None, None)
    columns, parts = width // GPU_WIDTH, block_q // GPU_ROWS
    buffers = config.buffers_bwd(launch.chip, width, group if has_sinks else 0)
    free = plgpu.Barrier(num_arrivals=GPU_WORKERS, num_barriers=stages)
    dk, dv_, *drawn = plgpu.kernel(
        functools.partial(
            _backward_kernel,
            plan=plan,
            stages=stages,
            buffers=buffers,
            heads=(kv, group),
            together=together,
            has_sinks=has_sinks,
            interpreted=interpreted,
        ),
        out_type=(
            output_like((b, padded_s, kv, width), dtype, operands.q),
            output_like((b, padded_s, kv, width), dtype, operands.q),
            *[output_like((b, kv, plan.rows, GPU_WORKERS, group, GPU_ROWS), jnp.float32, operands.q)] * has_sinks,
        ),
        grid=(b * kv * plan.rows,),
        grid_names=("work",),
        num_threads=GPU_WORKERS + 1,
        thread_name="worker",
        scratch_types=(
            tile(stages, block_q, width, dtype=dtype),
            tile(stages, block_q, width, dtype=dtype),
            plgpu.SMEM((stages, len(each), block_q), jnp.float32),
            plgpu.SMEM((stages + 1, block_q), jnp.float32),
            tile(GPU_WORKERS, columns, GPU_ROWS, GPU_WIDTH, dtype=dtype),
            tile(GPU_WORKERS, GPU_ROWS, width, dtype=dtype),
            tile(buffers, GPU_WORKERS, parts, GPU_ROWS, GPU_ROWS, dtype=dtype),
            tile(GPU_WORKERS, GPU_ROWS, GPU_WIDTH, dtype=jnp.int32),
            plgpu.SMEM((GPU_WORKERS, group, GPU_ROWS), jnp.float32) if has_sinks else None,
            plgpu.Barrier(num_arrivals=GPU_WORKERS * (columns + 1)),
            plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            free,
            free,
            plgpu.Barrier(num_barriers=buffers * GPU_WORKERS),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=gpu_interpret_params(launch.interpret),
        kernel_name="flash_attention_backward",
    )(q, k, v, d_outs, rows, factors, *tables, dq_sums)
    of_sinks = jnp.sum(drawn[0], axis=(0, 2, 3, 5)).reshape(h) if has_sinks else None
    return Gradients(dq(), dk[:, :s, :, :d], dv_[:, :s, :, :dv], None, of_sinks)


def _bound(operands: Operands, d_out: jax.Array, delta: jax.Array) -> jax.Array:
    """What no element of a row of dq / scale can exceed, nor any sum on the way to it; [B, H, T].

    The weights of a row add up to 1 at most, so |dq / scale| <= max_s |d_out . v_s - delta| max |k|.
    """
    group = operands.q.shape[2] // operands.k.shape[2]
    f32 = jnp.float32
    largest_v = jnp.sqrt(jnp.max(jnp.sum(jnp.square(operands.v.astype(f32)), axis=3), axis=1))  # [B, KV]
    largest_k = jnp.max(jnp.abs(operands.k), axis=(1, 3)).astype(f32)
    largest_v, largest_k = (jnp.repeat(a, group, axis=1)[:, :, None] for a in (largest_v, largest_k))  # [B, H, 1]
    norm = jnp.sqrt(jnp.sum(jnp.square(d_out.astype(f32)), axis=3)).transpose(0, 2, 1)  # [B, H, T]
    # One part in 16 for what rounding to bfloat16 adds.
    bound = (norm * largest_v + jnp.abs(delta)) * largest_k * 1.0625
    return jnp.maximum(bound, _LEAST_BOUND)
