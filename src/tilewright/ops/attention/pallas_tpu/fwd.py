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
this one, and the products of this tile with v after those of the next. A block is unrolled, or (`unroll`) taken in a loop
over passes of some tiles, and what is ahead and behind stays in scratch from one pass to the next. Long blocks that are
all full are taken in passes: the pipeline is filled and drained once per block. Bundles per 1024 x 1024 logits (v6e, bf16,
D = 128; with the MXU always busy there would be 1,536):

    1024 x 1024 blocks, tiles of 512 keys x 256 queries (no block list): in order 4,648; products one tile ahead 3,638;
      and values one behind 2,906
    the same under a causal mask, a full block: 3,069; and the maximum found with the products, statistics in registers of
      eight rows: 2,728
    2048 x 8192 blocks without a mask, tiles of 256 keys x 512 queries, passes of eight tiles: 2,361, 65 % for the MXU

A tile has 512 queries there: an MXU has the weights of 256 at a time, so that both have work. Each MXU gives a register of
results every other cycle, so its results alone take as many cycles as its products. The VPU is busy for 76 % of the
bundles, with 5.5 operations per register of logits (scale, maximum, difference, exponential, sum, half a conversion) and 2
per register of the accumulator and tile.

Limits: D and Dv are padded to 128 lanes, T and S to blocks; both cost a copy where they are not whole. Segment ids of
keys are read as a column, 512 bytes per token. The block list must fit scalar memory (`Plan.misfit` says).

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the float32 logits:
folded into q it would be rounded to bfloat16, which shows in the logsumexp. Masked logits are a large negative number
and the maximum starts well above it, so a row without keys has a total of 0. Weights are rounded to the inputs' dtype
for the product with v.

Tried and dropped, v6e, in bundles per 1024 x 1024 logits (passes: prototypes with blocks of 4,096 keys):
- tiles [queries, keys], which need the row's maximum across lanes: 3,631 bundles where transposed tiles in the same
  order took 3,789, but 2,048 cycles of the MXU instead of 1,536.
- passes of four tiles of 512 keys x 256 queries: 2,787, since the products of a tile are on one MXU. Of two tiles of 512 x
  512: 3,005; of eight of 256 x 256: 3,284; of four of 256 keys x 512 queries: 2,589 (of eight: 2,386).
- the scratch of both slots as one array [2, ...]: 2,453, with 68 % of the stores spills instead of 52 %.
- v transposed once per block: 2,907. The steps of the exponentials interleaved by hand with those of the maxima: 2,822 to
  2,870. The order of products is what counts; the compiler orders the rest by itself.
- no maximum for heads whose norms of q and k bound the logits by 64 (in units of log 2): 2,086, and 1,846 with tiles of 512
  x 512. A weight of the maximum is 1 and is not rounded; without it the error of out was 5 to 15 % larger, and 5 to 8 %
  with the total taken from the rounded weights.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, SUBLANES, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.masks.block_list import FIRST, FULL, LAST, PARTIAL
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionTpuForward
from tilewright.ops.attention.pallas_tpu.tiles import (
    LogitRefs,
    Plan,
    by_heads,
    for_tiles,
    key_tile,
    largest_blocks,
    logits_tile,
    pipelined,
    query_tiles,
    vmem_budget,
    whole_lanes,
)
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST, SAVED_AXES, SavedRows, outputs_of
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, not_float64

_FLOAT32_BYTES = 4
# Bundles per 1,024 logits of a full block and of a masked tile, by the side of a block (v6e, D = 128, bfloat16,
# libtpu 0.0.50.1). Smaller blocks cost more per logit, and have fewer logits that nobody attends to. They are of a kernel
# that took a tenth more; the masked tiles of a window have not been compiled since.
_BUNDLES = {1024: (3.00, 4.75), 512: (3.67, 6.12)}


def _choose(chip: Chip, call: AttentionCall) -> AttentionTpuForward:
    """The largest blocks that waste little of T and S and fit VMEM; smaller ones where a mask leaves little of them."""
    config = largest_blocks(chip, call, AttentionTpuForward, lambda config: _vmem_bytes(Plan(call, config)))
    if (config.block_q, config.block_k) == (1024, 1024) and max(call.q.shape[3], call.v.shape[3]) <= LANES:
        config = _in_passes(chip, call) or config
    if call.mask is None or (config.block_q, config.block_k) != (1024, 1024):
        return config
    # A window of 1,024 tokens at T = 8,192: 64,000 bundles per head with blocks of 512, against 75,000.
    smaller = AttentionTpuForward(512, 512, config.tile_q, config.tile_k)
    return min(config, smaller, key=lambda one: _bundles(Plan(call, one)))


def _in_passes(chip: Chip, call: AttentionCall) -> AttentionTpuForward | None:
    """Blocks that are taken in passes of eight tiles, where all blocks are full; or None."""
    t, s = call.q.shape[1], call.k.shape[1]
    if call.mask is not None or call.q_segments is not None or call.keep is not None:
        return None
    for block_k in (8192, 4096, 2048):
        config = AttentionTpuForward(2048, block_k, 512, 256, unroll=2)
        if t % config.block_q == s % block_k == 0 and _vmem_bytes(Plan(call, config)) <= vmem_budget(chip):
            return config
    return None


def _bundles(plan: Plan) -> float:
    """The bundles that the forward of a head takes, by `_BUNDLES`."""
    table, config = plan.table, plan.config
    of_full, of_masked = _BUNDLES[config.block_q]
    first, end = table.tiles("k", config.tile_k)
    tiles = np.where(table.kinds == PARTIAL, end - first, 0).sum()
    full = (table.kinds == FULL).sum() * config.block_k
    return config.block_q / 1024 * (full * of_full + tiles * config.tile_k * of_masked) / table.kinds.shape[0]


class _Slot(NamedTuple):
    """Scratch for a tile that is ahead or behind when a pass ends. Two of them take turns; None without passes."""

    logits: Any  # [tile_k, tile_q]
    row_max: Any  # [8, tile_q]
    alpha: Any  # [8, tile_q]
    weights: Any  # [tile_k, tile_q]
    weights_alpha: Any  # [8, tile_q]


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
    max_scratch,  # [8, block_q], rows that are alike
    total_scratch,  # [8, block_q], whose rows add up to the total
    acc_scratch,  # [Dv, block_q]
    # static
    plan: Plan,
    # inputs, see LogitRefs; and scratch, see _Slot
    **others,
):
    slots = [_Slot(*(others.pop(f"{name}_{n}") for name in _Slot._fields)) for n in range(2)]
    refs, config = LogitRefs(**others), plan.config
    assert isinstance(config, AttentionTpuForward)
    b, h = pl.program_id(0), pl.program_id(1)
    step = plan.read(b, h, 0, pl.program_id(2), coordinates_ref, flags_ref)

    @pl.when(step.has(FIRST))
    def _start():
        if sinks_ref is not None:
            # A sink counts as a key that was visited first and has no value.
            sink = sinks_ref[h] * LOG2_E
            max_scratch[...] = jnp.full_like(max_scratch, jnp.maximum(sink, LOWEST))
            total_scratch[...] = jnp.full_like(total_scratch, jnp.where(sink > LOWEST, 1.0 / SUBLANES, 0.0))
        else:
            max_scratch[...] = jnp.full_like(max_scratch, LOWEST)
            total_scratch[...] = jnp.zeros_like(total_scratch)
        acc_scratch[...] = jnp.zeros_like(acc_scratch)

    def begin(unit: Any, *, masked: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The logits of a tile [tile_k, tile_q], and both [8, tile_q]: the maximum so far, and the factor for what was
        accumulated before.
        """
        keys, queries = unit
        product = dot_f32(k_ref[keys, :], q_ref[queries, :], (1, 1))  # [tile_k, tile_q]
        logits, _ = logits_tile(plan, product, refs, step, keys, queries, masked=masked)
        before = max_scratch[:, queries]  # [8, tile_q]
        row_max = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        max_scratch[:, queries] = row_max
        return logits, row_max, jnp.exp2(before - row_max)

    def soften(unit: Any, logits: jax.Array, row_max: jax.Array, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The factor, and the weights of the tile [tile_k, tile_q]."""
        _, queries = unit
        weights = jnp.exp2(_by_sublanes(logits) - row_max[None])  # [tile_k / 8, 8, tile_q]
        total_scratch[:, queries] = total_scratch[:, queries] * alpha + jnp.sum(weights, axis=0)
        return alpha, weights.reshape(logits.shape).astype(v_ref.dtype)

    def add_values(unit: Any, alpha: jax.Array, weights: jax.Array) -> None:
        keys, queries = unit
        added = dot_f32(v_ref[keys, :], weights, (0, 0))  # [Dv, tile_q]
        before = _by_sublanes(acc_scratch[:, queries]) * alpha[None]  # [Dv / 8, 8, tile_q]
        acc_scratch[:, queries] = before.reshape(added.shape) + added

    def add_tiles(units: list[Any], masked: bool) -> None:
        pipelined(units, functools.partial(begin, masked=masked), soften, add_values)

    def add_in_passes() -> None:
        """Adds a full block in a loop, and keeps what is ahead and behind in scratch from one pass to the next."""
        tile_k, queries, keys_of_pass = config.tile_k, query_tiles(config), config.unroll * config.tile_k

        def look_ahead(unit: Any, slot: _Slot) -> None:
            slot.logits[...], slot.row_max[...], slot.alpha[...] = begin(unit, masked=False)

        def one_pass(index: Any, _: None) -> None:
            first = index * keys_of_pass
            starts = [first + n * tile_k for n in range(config.unroll)]
            units = [(key_tile(start, tile_k), c) for start in starts for c in queries]
            # The last pass looks ahead to a tile that was taken already, and nothing comes of it.
            following = key_tile(jnp.minimum(first + keys_of_pass, config.block_k - tile_k), tile_k)
            # The first pass adds weights of 0.
            behind = key_tile(jnp.maximum(first - tile_k, 0), tile_k)
            ahead = [*units[1:], (following, queries[0])]
            before = [(behind, queries[-1]), *units[:-1]]
            for n, unit in enumerate(units):
                slot, other = slots[n % 2], slots[(n + 1) % 2]
                look_ahead(ahead[n], other)
                add_values(before[n], other.weights_alpha[...], other.weights[...])
                softened = soften(unit, slot.logits[...], slot.row_max[...], slot.alpha[...])
                slot.weights_alpha[...], slot.weights[...] = softened

        slots[1].weights[...] = jnp.zeros_like(slots[1].weights)
        slots[1].weights_alpha[...] = jnp.ones_like(slots[1].weights_alpha)
        look_ahead((key_tile(0, tile_k), queries[0]), slots[0])
        jax.lax.fori_loop(0, config.block_k // keys_of_pass, one_pass, None)
        last = (key_tile(config.block_k - tile_k, tile_k), queries[-1])
        add_values(last, slots[1].weights_alpha[...], slots[1].weights[...])

    for_tiles(plan, step, add_tiles, add_in_passes if config.unroll else None)

    @pl.when(step.has(LAST))
    def _finish():
        total = jnp.sum(total_scratch[...], axis=0, keepdims=True)  # [1, block_q]
        out = acc_scratch[...] / jnp.where(total == 0, 1.0, total)  # [Dv, block_q]
        out_ref[...] = out.T.astype(out_ref.dtype)
        statistics_ref[0:1, :] = max_scratch[0:1, :]
        statistics_ref[1:2, :] = total


def _by_sublanes(tile: jax.Array) -> jax.Array:
    """[rows, queries] as [rows / 8, 8, queries]: a statistic of eight like rows then meets it without a broadcast."""
    return tile.reshape(-1, SUBLANES, tile.shape[1])


def _declaration(plan: Plan) -> Kernel:
    call, config = plan.call, plan.config
    assert isinstance(config, AttentionTpuForward)
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

    def of_tile(rows: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM((rows, config.tile_q), dtype) if config.unroll else None

    row = of_tile(SUBLANES)
    slot = _Slot(of_tile(config.tile_k), row, row, of_tile(config.tile_k, dtype), row)

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
        scratch={
            "max_scratch": pltpu.VMEM((SUBLANES, block_q), jnp.float32),
            "total_scratch": pltpu.VMEM((SUBLANES, block_q), jnp.float32),
            "acc_scratch": pltpu.VMEM((dv_lanes, block_q), jnp.float32),
            **{f"{name}_{n}": buffer for n in range(2) for name, buffer in slot._asdict().items()},
        },
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
