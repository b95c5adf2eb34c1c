"""The second kernel of decoding on Hopper: it combines the splits of the keys of each sequence, in order.

A split's sums are not divided yet, and come with their maximum and their total (`sm90_fwd`). The kernel has one thread
block per eight rows (or a group of fewer) and `block_v` value channels, and loads several splits before it uses the first,
since it waits for the L2.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.decode.pallas_gpu.rows import (
    EIGHT,
    LINE_BYTES,
    Rows,
    eight_rows,
    finished,
    load_eight,
    spread,
    store_logsumexp,
)
from tilewright.ops.attention.softmax_rows import LOWEST
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel
from tilewright.pallas.gpu.registers import store
from tilewright.pallas.gpu.scheduler import divmod_nonnegative


def choose_splits(items: int, blocks: int, slots: int, most: int) -> int:
    """The fewest splits that keep nine tenths of the GPU busy to the end, or the number that comes closest to it.

    There are `items` sequences and key heads of `blocks` blocks of keys each, and `slots` thread blocks run at a time.
    """

    def busy(splits: int) -> float:
        waves = -(-items * splits // slots)
        # Where a share is few blocks, its last one is mostly lost.
        share = -(-blocks // splits)
        return items * splits / (waves * slots) * blocks / (splits * share)

    return next((n for n in range(1, most + 1) if busy(n) >= 0.9), 0) or max(range(1, most + 1), key=busy)


def combine_scratch(rows: Rows, dv: int, block_v: int, dtype: Any) -> dict[str, Any]:
    # A line of a single row is 64 channels.
    channels = math.gcd(dv, max(block_v, LINE_BYTES // dtype.itemsize // rows.piece))
    return {
        "out_smem": plgpu.SMEM((EIGHT, channels), dtype),
        "logsumexp_smem": plgpu.SMEM((EIGHT,), jnp.float32),
    }


def _combine_kernel(
    *,
    # inputs
    sums_ref,  # [B, KV, tiles, splits, hi and lo, tile_rows, Dv]
    statistics_ref,  # [B, KV, tiles, splits, 2, tile_rows]
    sinks_ref,  # [sets, rows], or None
    # outputs
    out_ref,  # [B, written, Dv]
    logsumexp_ref,  # [B, written]
    # scratch
    out_smem,  # [EIGHT, channels]
    logsumexp_smem,  # [EIGHT]
    # static
    rows: Rows,
    at_a_time: int,
):
    width, splits = out_smem.shape[1], sums_ref.shape[3]
    shape, layout = (EIGHT, width), eight_rows(width)
    b, columns = lax.axis_index("batch"), pl.ds(lax.axis_index("values") * width, width)
    # Eight rows of a key head, or its whole group. `within` is where they lie in their tile.
    kv, n = divmod_nonnegative(lax.axis_index("rows"), rows.stride // rows.piece)
    n_tile = lax.div(n, jnp.int32(rows.most // EIGHT))
    row = kv * rows.stride + n * rows.piece
    first_row = rows.first(kv, n_tile)
    within = row - first_row
    # For a group of fewer than eight, all rows of the tile are computed: its own, and those that came with them.
    begin = within if rows.piece == EIGHT else 0
    valid = pl.ds(begin, EIGHT)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)  # [8, channels]

    def add(first: Any, count: int, carry: Any) -> Any:
        """Adds `count` splits to sums, maximum and total. All loads come before the first use."""
        acc, row_max, total = carry
        parts = [(b, kv, n_tile, first + n) for n in range(count)]
        each_max, each_total = (
            [load_eight(statistics_ref.at[*part, which, valid], width) for part in parts] for which in range(2)
        )
        sums = [[load(sums_ref.at[*part, which, valid, columns]) for which in range(2)] for part in parts]
        new_max = functools.reduce(jnp.maximum, each_max, row_max)
        alpha = jnp.exp2(row_max - new_max)
        acc, total = acc * spread(alpha, width, layout), total * alpha
        for part_max, part_total, (hi, lo) in zip(each_max, each_total, sums, strict=True):
            weight = jnp.exp2(part_max - new_max)
            total = total + part_total * weight
            acc = acc + (hi + lo) * spread(weight, width, layout)
        return acc, new_max, total

    sink = None
    if sinks_ref is not None:
        sink_set = lax.div(b, jnp.int32(out_ref.shape[0] // sinks_ref.shape[0]))
        sink = load_eight(sinks_ref.at[sink_set, pl.ds(first_row + begin, EIGHT)], width)
    row_max, total = (
        plgpu.layout_cast(jnp.full((EIGHT,), value, jnp.float32), layout.reduce(1)) for value in (LOWEST, 0.0)
    )
    carry = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout), row_max, total
    rounds, rest = divmod(splits, at_a_time)
    if rounds:
        carry = lax.fori_loop(0, rounds, lambda n, carry: add(n * at_a_time, at_a_time, carry), carry)
    if rest:
        carry = add(rounds * at_a_time, rest, carry)
    acc, row_max, total = carry
    out, logsumexp = finished(acc, row_max, total, sink, layout)
    store(out_smem, out.astype(out_smem.dtype))
    store(logsumexp_smem, logsumexp)
    plgpu.commit_smem()
    own, target = pl.ds(within - begin, rows.piece), pl.ds(row, rows.piece)
    plgpu.copy_smem_to_gmem(out_smem.at[own], out_ref.at[b, target, columns])

    @pl.when(lax.axis_index("values") == 0)
    def _():
        store_logsumexp(logsumexp_ref.at[b, target], logsumexp_smem.at[own], rows.piece)

    plgpu.wait_smem_to_gmem(0)


def combine_splits(
    sums: jax.Array, statistics: jax.Array, sinks: jax.Array | None, rows: Rows, *, at_a_time: int, block_v: int
) -> tuple[jax.Array, jax.Array]:
    """out [B, written, Dv] and logsumexp [B, written] from the sums and the statistics of the splits."""
    b, dv, dtype = sums.shape[0], sums.shape[-1], sums.dtype
    scratch = combine_scratch(rows, dv, block_v, dtype)
    channels = scratch["out_smem"].inner_aval.shape[1]
    combined = run_kernel(
        functools.partial(_combine_kernel, rows=rows, at_a_time=at_a_time),
        name="decode_attention_combine",
        inputs={"sums": sums, "statistics": statistics, "sinks": sinks},
        outputs={
            "out": jax.ShapeDtypeStruct((b, rows.written, dv), dtype),
            "logsumexp": jax.ShapeDtypeStruct((b, rows.written), jnp.float32),
        },
        scratch=scratch,
        grid={"batch": b, "rows": rows.written // rows.piece, "values": dv // channels},
        params=compiler_params(automatic_barriers=True),
    )
    return combined["out"], combined["logsumexp"]
