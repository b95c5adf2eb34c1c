"""Attention as Mosaic TPU kernels: the forward here, the backward in pallas_tpu_bwd.py, what they share in tpu_tiles.py.

For each head, an online softmax over the keys s that a query t attends to:

    a_ts = log2(e) (cap(scale q_t . k_s) + bias_ts)      m_t = max_s a_ts      l_t = sum_s 2^(a_ts - m_t)
    out_t = sum_s 2^(a_ts - m_t) v_s / l_t               logsumexp_t = (m_t + log2 l_t) / log2(e)

Floor: 2 (D + Dv) FLOPs for each pair that attends; q, k, v read and out written once. Here: whole tiles of blocks that are
not empty; q and out once, k and v once for each block of queries that visits them and each query head.

Blocking: grid (B, H, steps). A step is an entry of the work list (plan.py), prefetched scalars: a block of queries and a
block of keys. Empty blocks are not in the list, so nothing is fetched or computed for them, and no step is spent: causal
attention has half the steps. A block of queries stays while its keys stream past, double-buffered by the pipeline. Masks
are made from positions where they can be, else from the different partial blocks [block_k, block_q] of int8; only partial
blocks are masked, and of those only the tiles that are not empty are computed: the early end under a causal mask.

Within a step tiles are computed in a pipeline by hand: the products k q^T of the next tile are issued before the
exponentials of this one, and its products with v after those of the next. v6e, bf16, 1024 x 1024 blocks, D = 128,
bundles a step: in order 4,648; products one tile ahead 3,638; and values one behind 2,906.

Limits: D and Dv are padded to 128 lanes, T and S to blocks; both cost a copy where they are not whole. Segment ids of
keys are read as a column, 512 bytes a token. The work list must fit scalar memory (`unsupported_reason` says).

Numerics: logits, statistics and accumulators in float32. The scale and log2(e) are one factor of the float32 logits:
folded into q it would be rounded to bfloat16, which a logsumexp shows. Masked logits are a large negative number and the
maximum begins well above it, so a row without keys has a total of 0. Weights are rounded to the inputs' dtype for
the product with v.

Tried and dropped: tiles [queries, keys], which need the row's maximum across lanes (3,631 bundles where transposed
tiles in the same order took 3,789, but 2,048 cycles of the MXU instead of 1,536).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.attention.config import SMEM_BYTES, PallasTpuConfig
from tilewright.ops.attention.gradient import Operands, Settings, with_gradient
from tilewright.ops.attention.mask_algebra import EMPTY, FULL, PARTIAL, Grid, Mask
from tilewright.ops.attention.pallas_tpu_bwd import backward
from tilewright.ops.attention.plan import FIRST, LAST, MOST_BLOCKS, MOST_CONTENTS, block_table
from tilewright.ops.attention.tpu_tiles import (
    LOG2_E,
    LOWEST,
    Step,
    Tiling,
    Work,
    by_heads,
    by_lanes,
    dot_f32,
    for_tiles,
    logits_tile,
    pipelined,
    plan_work,
)

Config = PallasTpuConfig


# Bundles for 1,024 logits of a full block and of a masked tile, forward, by the side of a block (v6e, D = 128, bfloat16,
# libtpu 0.0.50.1). Smaller blocks cost more a logit, and have fewer logits that nobody attends to.
_BUNDLES = {1024: (3.00, 4.75), 512: (3.67, 6.12)}


def default_config(
    chip: Chip, q: Any, k: Any, v: Any, *arrays: Any, mask: Mask | None, q_offset: int, **options: Any
) -> PallasTpuConfig:
    del arrays, options
    t, s = q.shape[1], k.shape[1]
    config = PallasTpuConfig.for_shape(chip, t, s, q.shape[3], v.shape[3], jnp.dtype(q.dtype).itemsize)
    if mask is None or (config.block_q, config.block_k) != (1024, 1024):
        return config
    # A window of 1,024 tokens at T = 8,192: 64,000 bundles a head with blocks of 512, against 75,000.
    smaller = dataclasses.replace(config, block_q=512, block_k=512)
    return min(config, smaller, key=lambda one: _forward_bundles(one, mask, t, s, q_offset))


def _forward_bundles(config: PallasTpuConfig, mask: Mask, t: int, s: int, q_offset: int) -> float:
    """What a head's forward takes by `_BUNDLES`."""
    of_full, of_masked = _BUNDLES[config.block_q]
    table = block_table(mask, Grid(t, s, config.block_q, config.block_k, q_offset))
    first, end = table.tiles("k", config.tile_k)
    tiles = np.where(table.kinds == PARTIAL, end - first, 0).sum()
    full = (table.kinds == FULL).sum() * config.block_k
    return config.block_q / 1024 * (full * of_full + tiles * config.tile_k * of_masked) / table.kinds.shape[0]


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
    del bias, sinks, kv_segments, scale, soft_cap
    if q.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    config: PallasTpuConfig = launch.config
    misfit = config.misfit(launch.chip, q.shape[3], v.shape[3], jnp.dtype(q.dtype).itemsize)
    if misfit is not None:
        return misfit
    (b, t, h), s = q.shape[:3], k.shape[1]
    lists = b if q_segments is not None else 1
    if keep is not None:
        lists = max(lists, keep.shape[0]) * keep.shape[1]
    for suffix in ("", "_bwd"):
        grid = Grid(t, s, getattr(config, f"block_q{suffix}"), getattr(config, f"block_k{suffix}"), q_offset)
        table = block_table(mask, grid)
        per_head = h if mask is not None and mask.num_heads and (keep is None or keep.shape[1] == 1) else 1
        steps = int(np.maximum((table.kinds != EMPTY).sum(2), 1).sum(1).max())
        list_bytes = 8 * lists * per_head * steps
        if list_bytes > SMEM_BYTES or max(grid.num_q, grid.num_k) > MOST_BLOCKS or len(table.contents) > MOST_CONTENTS:
            return (
                f"its work list of {lists * per_head} x {steps:,} steps needs {list_bytes / 1024:,.0f} KiB of scalar "
                f"memory, and may have {SMEM_BYTES / 1024:.0f}; use a larger block_q{suffix} and block_k{suffix}, "
                f"or implementation='xla'"
            )
    return None


def _forward_kernel(
    # prefetched
    place_ref,  # [steps]
    flags_ref,
    # inputs: q, k, v and those that the call has besides
    *refs,
    names: tuple[str, ...],
    tiling: Tiling,
    work: Work,
):
    inputs = dict(zip(names, refs, strict=False))
    q_ref, k_ref, v_ref = (inputs.pop(name) for name in ("q", "k", "v"))  # [block_q, D], [block_k, D], [block_k, Dv]
    # outputs
    out_ref, statistics_ref = refs[len(names) : len(names) + 2]  # [block_q, Dv], [2, block_q]
    # scratch
    highest_scratch, total_scratch, acc_scratch = refs[len(names) + 2 :]  # [1, block_q] twice, [Dv, block_q]
    b, h = pl.program_id(0), pl.program_id(1)
    step = Step.read(place_ref, flags_ref, work.first_step(b, h, 0) + pl.program_id(2))

    @pl.when(step.has(FIRST))
    def _start():
        if "sinks" in inputs:
            # A sink is a key that was seen already, without a value.
            sink = inputs["sinks"][h] * LOG2_E
            highest_scratch[...] = jnp.full_like(highest_scratch, jnp.maximum(sink, LOWEST))
            total_scratch[...] = jnp.full_like(total_scratch, jnp.where(sink > LOWEST, 1.0, 0.0))
        else:
            highest_scratch[...] = jnp.full_like(highest_scratch, LOWEST)
            total_scratch[...] = jnp.zeros_like(total_scratch)
        acc_scratch[...] = jnp.zeros_like(acc_scratch)

    def products(unit: Any) -> tuple[jax.Array]:
        keys, queries = unit
        return (dot_f32(k_ref[keys, :], q_ref[queries, :], (1, 1)),)  # [tile_k, tile_q]

    def soften(unit: Any, product: jax.Array, *, masked: bool) -> tuple[jax.Array, jax.Array]:
        """The factor for what was summed before [1, tile_q], and the weights of this tile [tile_k, tile_q]."""
        keys, queries = unit
        logits, _ = logits_tile(tiling, product, inputs, step, keys, queries, masked=masked)
        before = highest_scratch[:, queries]  # [1, tile_q]
        highest = jnp.maximum(before, jnp.max(logits, axis=0, keepdims=True))
        alpha = jnp.exp2(before - highest)
        weights = jnp.exp2(logits - highest)
        total_scratch[:, queries] = total_scratch[:, queries] * alpha + jnp.sum(weights, axis=0, keepdims=True)
        highest_scratch[:, queries] = highest
        return alpha, weights.astype(v_ref.dtype)

    def add_values(unit: Any, alpha: jax.Array, weights: jax.Array) -> None:
        keys, queries = unit
        added = dot_f32(v_ref[keys, :], weights, (0, 0))  # [Dv, tile_q]
        acc_scratch[:, queries] = acc_scratch[:, queries] * alpha + added

    def add_tiles(units: list[Any], masked: bool) -> None:
        pipelined(units, products, functools.partial(soften, masked=masked), add_values)

    for_tiles(tiling, step, add_tiles)

    @pl.when(step.has(LAST))
    def _finish():
        total = total_scratch[...]  # [1, block_q]
        out = acc_scratch[...] / jnp.where(total == 0, 1.0, total)  # [Dv, block_q]
        out_ref[...] = out.T.astype(out_ref.dtype)
        statistics_ref[0:1, :] = highest_scratch[...]
        statistics_ref[1:2, :] = total


def _forward(operands: Operands, settings: Settings, launch: Launch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Out, and the max (in units of log 2) and total of each row."""
    config: PallasTpuConfig = launch.config
    (b, t, h, d), (_, _, kv, dv) = operands.q.shape, operands.v.shape
    tiling, work, extras = plan_work(
        operands, settings, (config.block_q, config.block_k), (config.tile_q, config.tile_k)
    )
    block_q, block_k, group = tiling.block_q, tiling.block_k, h // kv
    q, k, v = by_lanes(operands.q, block_q), by_lanes(operands.k, block_k), by_lanes(operands.v, block_k)
    d_lanes, dv_lanes = q.shape[2] // h, v.shape[2] // kv
    padded_t = q.shape[1]

    def at(choose: Any) -> Any:
        """An index map from batch, head, block of q, block of k and contents."""

        def index(b: Any, h: Any, n: Any, place_ref: Any, flags_ref: Any) -> tuple[Any, ...]:
            step = Step.read(place_ref, flags_ref, work.first_step(b, h, 0) + n)
            return choose(b, h, step.i, step.j, step.content)

        return index

    def kv_head(h: Any) -> Any:
        # Not //, which lowers to the sign of its operands too, and that only with a TPU at hand.
        return jax.lax.div(h, jnp.int32(group))

    inputs = [
        ("q", q, pl.BlockSpec((None, block_q, d_lanes), at(lambda b, h, i, j, c: (b, i, h)))),
        ("k", k, pl.BlockSpec((None, block_k, d_lanes), at(lambda b, h, i, j, c: (b, j, kv_head(h))))),
        ("v", v, pl.BlockSpec((None, block_k, dv_lanes), at(lambda b, h, i, j, c: (b, j, kv_head(h))))),
    ]
    inputs += [(extra.name, extra.array, pl.BlockSpec(extra.block, at(extra.index))) for extra in extras]
    if operands.sinks is not None:
        inputs.append(("sinks", operands.sinks.astype(jnp.float32), pl.BlockSpec(memory_space=pltpu.SMEM)))
    names, arrays, specs = zip(*inputs, strict=True)
    steps = work.steps.steps
    row = pltpu.VMEM((1, block_q), jnp.float32)
    pairs = b * h * steps * block_q * block_k
    out, statistics = pl.pallas_call(
        functools.partial(_forward_kernel, names=names, tiling=tiling, work=work),
        out_shape=(
            output_like((b, padded_t, h * dv_lanes), operands.q.dtype, operands.q),
            output_like((b, h, 2, padded_t), jnp.float32, operands.q),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, h, steps),
            in_specs=list(specs),
            out_specs=(
                pl.BlockSpec((None, block_q, dv_lanes), at(lambda b, h, i, j, c: (b, i, h))),
                pl.BlockSpec((None, None, 2, block_q), at(lambda b, h, i, j, c: (b, h, 0, i))),
            ),
            scratch_shapes=[row, row, pltpu.VMEM((dv_lanes, block_q), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (d + dv),
            transcendentals=pairs,
            bytes_accessed=(b * t * h + b * h * steps * block_k) * (d + dv) * q.dtype.itemsize,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="flash_attention_forward",
    )(jnp.asarray(work.steps.place), jnp.asarray(work.steps.flags), *arrays)
    statistics = statistics[..., :t]
    return by_heads(out, t, h, dv), statistics[:, :, 0], statistics[:, :, 1]


_flash_attention = with_gradient(_forward, backward, per_nat=LOG2_E)


def flash_attention_pallas_tpu(
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
