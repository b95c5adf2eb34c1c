"""The backward kernel of attention on TPU: dq, dk and dv at once. See pallas_tpu.py and gradient.py.

With p_ts = 2^(a_ts - m_t - log2 l_t) and d_ts = p_ts (d_out_t . v_s - delta_t), times the slope of the soft cap,

    dv_s = sum_t p_ts d_out_t        dk_s = scale sum_t d_ts q_t        dq_t = scale sum_s d_ts k_s

Floor: 2 (2 D + 2 Dv + D) FLOPs for each pair that attends, the logits made anew; here whole tiles of blocks that are not
empty, and each product once. Two kernels, one for dq and one for dk and dv, would make the logits and d_out v^T twice:
seven products instead of five. What a single one needs is room to sum both at once.

Blocking: grid (B, KV, chunks, group, steps), with the forward's work list. A block of queries stays, and its dq is summed
in a scratch, while blocks of keys stream past. dk and dv of a whole chunk of keys stay in VMEM in float32 until all query
heads of the group have added to them: 2 (D + Dv) floats a key with both buffers, 16 MiB for 8,192 keys of D = 128. Where
the keys do not fit, they are cut into chunks, and dq, written in float32 for each chunk, is summed by XLA.

Tiles are [keys, queries] as in the forward, and pipelined alike: both products of the next tile before the exponentials
of this one, the three sums of a tile after those of the next. max, log2 of the total and delta come as one array
[B, H, 3, T], a row of lanes each. The gradient of a bias is not made here: it is plain JAX (xla.py), and is dropped
by jit where nobody asks for it. With sinks the row sums of weights times their gradients are another output, float32.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.attention.config import PallasTpuConfig, XlaConfig
from tilewright.ops.attention.gradient import Gradients, Operands, Rows, Settings
from tilewright.ops.attention.plan import FIRST, LAST
from tilewright.ops.attention.tpu_tiles import (
    LOG2_E,
    Step,
    Tiling,
    Work,
    by_heads,
    by_lanes,
    dot_f32,
    for_tiles,
    logits_tile,
    pad_to,
    pipelined,
    plan_work,
)
from tilewright.ops.attention.xla import bias_gradient


def _backward_kernel(
    # prefetched
    place_ref,  # [steps]
    flags_ref,
    # inputs: q, k, v, d_out, rows and those that the call has besides
    *refs,
    names: tuple[str, ...],
    tiling: Tiling,
    work: Work,
    group: int,
    has_sinks: bool,
):
    inputs = dict(zip(names, refs, strict=False))
    q_ref, k_ref, v_ref, d_out_ref, rows_ref = (inputs.pop(name) for name in ("q", "k", "v", "d_out", "rows"))
    # outputs
    dq_ref, dk_ref, dv_ref = refs[len(names) : len(names) + 3]  # [block_q, D], [chunk, D], [chunk, Dv]
    drawn_ref = refs[len(names) + 3] if has_sinks else None  # [1, block_q]
    # scratch
    dq_scratch = refs[len(names) + 3 + has_sinks]  # [D, block_q]
    drawn_scratch = refs[-1]  # [1, block_q], with sinks
    b, kv, chunk, g, n = (pl.program_id(axis) for axis in range(5))
    local = Step.read(place_ref, flags_ref, work.first_step(b, kv * group + g, chunk) + n)
    blocks_in_chunk = dk_ref.shape[0] // tiling.block_k
    step = Step(local.i, chunk * blocks_in_chunk + local.j, local.flags)

    @pl.when((g == 0) & (n == 0))
    def _start_keys():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    @pl.when(step.has(FIRST))
    def _start_queries():
        dq_scratch[...] = jnp.zeros_like(dq_scratch)
        if has_sinks:
            drawn_scratch[...] = jnp.zeros_like(drawn_scratch)

    def products(unit: Any) -> tuple[jax.Array, jax.Array]:
        keys, queries = unit
        return (
            dot_f32(k_ref[keys, :], q_ref[queries, :], (1, 1)),  # [tile_k, tile_q]
            dot_f32(v_ref[keys, :], d_out_ref[queries, :], (1, 1)),  # [tile_k, tile_q]
        )

    def differentiate(
        unit: Any, product: jax.Array, d_weights: jax.Array, *, masked: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The weights and the gradients of the logits of a tile, both [tile_k, tile_q]."""
        keys, queries = unit
        logits, slope = logits_tile(tiling, product, inputs, step, keys, queries, masked=masked)
        highest, log_total, delta = (rows_ref[row : row + 1, queries] for row in range(3))  # each [1, tile_q]
        weights = jnp.exp2((logits - highest) - log_total)
        d_logits = weights * (d_weights - delta)
        if has_sinks:
            drawn_scratch[:, queries] += jnp.sum(weights * d_weights, axis=0, keepdims=True)  # [1, tile_q]
        if slope is not None:
            d_logits = d_logits * (1.0 - jnp.square(slope))
        return weights.astype(v_ref.dtype), d_logits.astype(k_ref.dtype)

    def add_gradients(unit: Any, weights: jax.Array, d_logits: jax.Array) -> None:
        keys, queries = unit
        at = pl.ds(pl.multiple_of(local.j * tiling.block_k + keys.start, tiling.tile_k), tiling.tile_k)
        dv_ref[at, :] += dot_f32(weights, d_out_ref[queries, :], (1, 0))  # [tile_k, Dv]
        dk_ref[at, :] += dot_f32(d_logits, q_ref[queries, :], (1, 0))  # [tile_k, D]
        dq_scratch[:, queries] += dot_f32(k_ref[keys, :], d_logits, (0, 0))  # [D, tile_q]

    def add_tiles(units: list[Any], masked: bool) -> None:
        pipelined(units, products, functools.partial(differentiate, masked=masked), add_gradients)

    for_tiles(tiling, step, add_tiles)

    @pl.when(step.has(LAST))
    def _finish_queries():
        dq_ref[...] = (dq_scratch[...] * tiling.settings.scale).T.astype(dq_ref.dtype)
        if drawn_ref is not None:
            drawn_ref[...] = drawn_scratch[...]


def backward(operands: Operands, d_out: jax.Array, statistics: Rows, settings: Settings, launch: Launch) -> Gradients:
    """The gradients. The max of a row is in units of log 2."""
    config: PallasTpuConfig = launch.config
    (b, t, h, d), (_, s, kv, dv) = operands.q.shape, operands.v.shape
    tiling, work, extras = plan_work(
        operands,
        settings,
        (config.block_q_bwd, config.block_k_bwd),
        (config.tile_q_bwd, config.tile_k_bwd),
        config.chunk_k_bwd,
    )
    block_q, block_k, group, chunk_k = tiling.block_q, tiling.block_k, h // kv, config.chunk_k_bwd
    q, k, v = by_lanes(operands.q, block_q), by_lanes(operands.k, block_k), by_lanes(operands.v, block_k)
    d_lanes, dv_lanes, padded_t = q.shape[2] // h, v.shape[2] // kv, q.shape[1]
    log_total = jnp.log2(jnp.where(statistics.total == 0, 1.0, statistics.total))
    rows = jnp.stack([statistics.highest, log_total, statistics.delta], axis=2)
    rows = pad_to(rows, 3, block_q)  # [B, H, 3, T]
    blocks_in_chunk = chunk_k // block_k

    def at(choose: Any) -> Any:
        """An index map from batch, head, block of q, block of k and contents."""

        def index(b: Any, kv: Any, c: Any, g: Any, n: Any, place_ref: Any, flags_ref: Any) -> tuple[Any, ...]:
            step = Step.read(place_ref, flags_ref, work.first_step(b, kv * group + g, c) + n)
            return choose(b, kv * group + g, step.i, c * blocks_in_chunk + step.j, step.content)

        return index

    def of_head(width: int) -> Any:
        return pl.BlockSpec((None, block_q, width), at(lambda b, h, i, j, c: (b, i, h)))

    def of_keys(width: int) -> Any:
        def index(b: Any, kv: Any, c: Any, g: Any, n: Any, place_ref: Any, flags_ref: Any) -> tuple[Any, ...]:
            step = Step.read(place_ref, flags_ref, work.first_step(b, kv * group + g, c) + n)
            return b, c * blocks_in_chunk + step.j, kv

        return pl.BlockSpec((None, block_k, width), index)

    inputs = [
        ("q", q, of_head(d_lanes)),
        ("k", k, of_keys(d_lanes)),
        ("v", v, of_keys(dv_lanes)),
        ("d_out", by_lanes(d_out, block_q), of_head(dv_lanes)),
        ("rows", rows, pl.BlockSpec((None, None, 3, block_q), at(lambda b, h, i, j, c: (b, h, 0, i)))),
    ]
    inputs += [(extra.name, extra.array, pl.BlockSpec(extra.block, at(extra.index))) for extra in extras]
    names, arrays, specs = zip(*inputs, strict=True)
    steps, chunks = work.steps.steps, work.chunks
    pairs = b * h * chunks * steps * block_q * block_k

    def dq_index(b: Any, kv: Any, c: Any, g: Any, n: Any, place_ref: Any, flags_ref: Any) -> tuple[Any, ...]:
        step = Step.read(place_ref, flags_ref, work.first_step(b, kv * group + g, c) + n)
        return c, b, step.i, kv * group + g

    def of_chunk(b: Any, kv: Any, c: Any, g: Any, n: Any, place_ref: Any, flags_ref: Any) -> tuple[Any, ...]:
        del g, n, place_ref, flags_ref
        return b, c, kv

    def drawn_index(*at: Any) -> tuple[Any, ...]:
        c, b, i, h = dq_index(*at)
        return c, b, h, 0, i

    has_sinks = statistics.sink is not None
    dq, dk, dv_, *drawn = pl.pallas_call(
        functools.partial(_backward_kernel, names=names, tiling=tiling, work=work, group=group, has_sinks=has_sinks),
        out_shape=(
            output_like(
                (chunks, b, padded_t, h * d_lanes), q.dtype if chunks == 1 else jnp.dtype(jnp.float32), operands.q
            ),
            output_like((b, chunks * chunk_k, kv * d_lanes), jnp.float32, operands.q),
            output_like((b, chunks * chunk_k, kv * dv_lanes), jnp.float32, operands.q),
            *[output_like((chunks, b, h, 1, padded_t), jnp.float32, operands.q)] * has_sinks,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b, kv, chunks, group, steps),
            in_specs=list(specs),
            out_specs=(
                pl.BlockSpec((None, None, block_q, d_lanes), dq_index),
                pl.BlockSpec((None, chunk_k, d_lanes), of_chunk),
                pl.BlockSpec((None, chunk_k, dv_lanes), of_chunk),
                *[pl.BlockSpec((None, None, None, 1, block_q), drawn_index)] * has_sinks,
            ),
            scratch_shapes=[
                pltpu.VMEM((d_lanes, block_q), jnp.float32),
                *[pltpu.VMEM((1, block_q), jnp.float32)] * has_sinks,
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=launch.chip.vmem_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * (3 * d + 2 * dv),
            transcendentals=pairs,
            bytes_accessed=(b * h * chunks * (2 * t + steps * block_k)) * (d + dv) * q.dtype.itemsize,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="flash_attention_backward",
    )(jnp.asarray(work.steps.place), jnp.asarray(work.steps.flags), *arrays)
    summed = dq[0] if chunks == 1 else jnp.sum(dq, axis=0).astype(q.dtype)
    dk = by_heads((dk * settings.scale).astype(k.dtype), s, kv, d)
    dbias = None
    if operands.bias is not None:
        xla_config = XlaConfig.for_shape(b, h, t, s)
        in_nats = dataclasses.replace(statistics, highest=statistics.highest / LOG2_E)
        dbias = bias_gradient(operands, d_out, in_nats, settings, xla_config)
    of_sinks = None
    if statistics.sink is not None:
        of_sinks = jnp.sum(statistics.sink * drawn[0].sum(0)[:, :, 0, :t], axis=(0, 2))
    dv_ = by_heads(dv_.astype(v.dtype), s, kv, dv)
    return Gradients(by_heads(summed, t, h, d), dk, dv_, dbias, of_sinks)
