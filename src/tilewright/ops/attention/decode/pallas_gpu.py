"""Attention over a cache as a Mosaic GPU kernel for Hopper, for a cache in one piece and one in pages.

For each sequence and key head, an online softmax of its few queries over the keys up to the length:

    a_s = log2(e) cap(scale q . k_s)      out = sum_s 2^(a_s - m) v_s / l      logsumexp = (m + log2 l) / log2(e)

Floor: the keys and values that are attended to, read once; the rest is small. 2 S (D + Dv) bytes a sequence and key head in
bfloat16: at the 4.2 TB/s that an H200 copies with, 128 us for B16 KV8 S8192 D128. Here they are read once, in whole blocks.

Blocking: a thread block of one warpgroup for a sequence, a key head and one of `splits` parts of its keys. The queries of
the group, and the few tokens, are the last rows of a tile of 64, the least that the matrix unit takes. The rows before them
are the end of the keys' ring, whatever it holds: what comes of them is dropped. Blocks of 64 keys and values are copied
into that ring in shared memory by the warpgroup itself; it needs no second one, since the products and the softmax of a
block take half the time of its copy. Thread blocks beside each other take the key heads of the same tokens, which lie
beside each other in memory.

Where the keys are in one part, the kernel divides, adds the sink and writes out and logsumexp: one launch. Where they are
in more, each part leaves sums that are not divided yet, their maximum and their total, and a second kernel puts the parts
together in order: two launches. It has a thread block for eight rows (or a group of fewer) and 32 value channels, and loads
32 parts before it uses the first, since what it waits for is the L2. With queries that stay in place and widths of whole
sixteens XLA has nothing to do around them; several tokens and groups that do not fit into eights are laid out and back.
A last block that puts the parts together, told by a counter, was dropped: to clear the counter is a launch too, and Pallas'
interpreter does not have such counters.

Edges: what the cache holds past the length may be anything. Logits are masked there, and so are the values, since 0 times
NaN is NaN. The last block of a cache whose room is not whole blocks begins earlier, and masks what was seen already.
A length out of range is taken for 0, and its total for NaN, here and not around the kernel: that would be two launches.

Numerics: logits, statistics and accumulators in float32. Weights are rounded to bfloat16 for the product with v, as in
flash_attention. A part's sums leave as their bfloat16 and the rest, 16 bits. The gradient is that of the xla version:
decoding is not trained through. Results are the same from run to run.

Limits: Hopper only. bfloat16 only. D and Dv up to 256; what is not a multiple of 16 is padded, which copies the cache, as
is a cache with room for less than a block. Pages of 8 keys or more that divide 64, or are a multiple of it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tilewright.core.batching import folded
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import accumulate, padded, product, quotient, refusal, store, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.attention.decode.bounds import room_of
from tilewright.ops.attention.decode.config import GPU_EIGHT, GPU_ROWS, GPU_WIDEST, PallasGpuConfig
from tilewright.ops.attention.decode.gpu_rows import (
    LINE_BYTES,
    Rows,
    eight_rows,
    finished,
    read_eight,
    spread,
    tile_count,
    write_logsumexp,
)
from tilewright.ops.attention.decode.gradient import with_plain_gradient
from tilewright.ops.attention.gpu_tiles import LOWEST, MASKED, scaled_logits
from tilewright.ops.attention.gradient import Settings

Config = PallasGpuConfig
DTYPES = ("bfloat16",)
Results = tuple[jax.Array, ...]

_WGMMA = plgpu.Layout.WGMMA
_LEAST_WIDTH = 16  # Of a head: the matrix unit's step.
_HALVES = 2
_PIECE = 128  # Value channels that are cleaned at a time.
_PARTS_AT_A_TIME = 32  # Loads in flight, four registers of a thread for each.
_CHANNELS_A_BLOCK = 32  # Of the second kernel: B1 KV8 D128 has 32 blocks.


def default_config(
    chip: Chip, q: Any, k: Any, v: Any, page_table: Any, *arrays: Any, **options: Any
) -> PallasGpuConfig:
    del arrays
    (b, t, h, d), kv = q.shape, k.shape[2]
    room = room_of(k, page_table)
    window = options["window"]
    reach = room if window is None else min(room, window + t)
    return PallasGpuConfig.for_shape(chip, reach, b * kv * tile_count(t, h // kv), d, v.shape[3], t * (h // kv))


def unsupported_reason(
    launch: Launch, q: Any, k: Any, v: Any, page_table: Any, *arrays: Any, **options: Any
) -> str | None:
    del arrays, options
    chip, config = launch.chip, launch.config
    if (reason := refusal(chip, q)) is not None:
        return reason
    d, dv = q.shape[3], v.shape[3]
    rows = q.shape[1] * (q.shape[2] // k.shape[2])
    if max(d, dv) > GPU_WIDEST:
        return f"D={d} and Dv={dv} must be {GPU_WIDEST} at most (registers of a warpgroup); use implementation='xla'"
    if page_table is not None:
        page, block = k.shape[1], config.block_k
        if page % GPU_EIGHT or (block % page and page % block):
            return (
                f"pages of {page} keys are not whole parts of a block of {block} keys, nor blocks of them; use pages of "
                f"8, 16, 32 or a multiple of {block} keys, or implementation='xla'"
            )
    if chip.smem_bytes is not None and (needed := config.smem_bytes(d, dv, rows)) > chip.smem_bytes:
        return (
            f"it needs about {needed // 1024} KiB of shared memory for D={d} and Dv={dv} with {config}, and a block of a "
            f"{chip.name} has {chip.smem_bytes // 1024}; use fewer stages or a smaller block_k, or implementation='xla'"
        )
    return None


def _decode_kernel(
    *refs: Any,
    rows: Rows,
    config: PallasGpuConfig,
    room: int,
    window: int | None,
    settings: Settings,
    paged: bool,
    sinks: bool,
    interpreted: bool,
):
    # inputs
    q_ref, k_ref, v_ref, lengths_ref = refs[:4]  # [B, rows, D], [B, S, KV, D], [B, S, KV, Dv] (or pools of pages), [B]
    table_ref = refs[4] if paged else refs[0]  # [B, pages]; without: not used
    sinks_ref = refs[4 + paged] if sinks else None  # [sets, rows]
    # outputs: with one part, out [B, written, Dv] and logsumexp [B, written]. With more, the sums' halves
    # [B, KV, tiles, splits, 2, tile_rows, Dv], and their max and total [..., 2, tile_rows].
    out_ref, statistics_ref = refs[4 + paged + sinks : 6 + paged + sinks]
    # scratch: keys and queries behind them, values, two rows of statistics, an eight of the output.
    k_smem, v_smem, statistics_smem, out_smem, q_arrived, k_arrived, v_arrived = refs[6 + paged + sinks :]
    block_k, stages = config.block_k, config.stages
    stored, width = k_ref.shape[1], v_smem.shape[-1]  # Keys of a sequence as they lie, padded, or of a page.
    shape, piece = (GPU_ROWS, block_k), math.gcd(width, _PIECE)

    rest, n_tile = quotient(lax.axis_index("work"), rows.tiles)
    rest, kv = quotient(rest, rows.kv)
    b, split = quotient(rest, config.splits)
    length = lengths_ref[b]
    in_range = (length >= 0) & (length <= room)
    length = jnp.where(in_range, length, 0)
    # Positions of the queries: the last `tokens` of the sequence. The first one's window begins at a block's start.
    first_block = jnp.int32(0)
    if window is not None:
        first_block = lax.div(jnp.maximum(length - rows.tokens - window, 0), jnp.int32(block_k))
    blocks = jnp.maximum(lax.div(length + (block_k - 1), jnp.int32(block_k)) - first_block, 0)
    begin, end = (first_block + lax.div(blocks * part, jnp.int32(config.splits)) for part in (split, split + 1))
    mine = end - begin

    def start_of(block: Any) -> Any:
        """The first key of a block as it was copied."""
        return block * block_k if paged else jnp.minimum(block * block_k, stored - block_k)

    def slot_of(n: Any) -> Any:
        return lax.rem(n, jnp.int32(stages))

    def place(slot: Any, first: int, count: int) -> Any:
        return pl.ds(slot * block_k + first, count)

    def fetch(n: Any) -> None:
        slot, block = slot_of(n), begin + n
        for ref, ring, arrived in ((k_ref, k_smem, k_arrived), (v_ref, v_smem, v_arrived)):
            if not paged:
                source = ref.at[b, pl.ds(start_of(block), block_k), kv]
                plgpu.copy_gmem_to_smem(source, ring.at[place(slot, 0, block_k)], arrived.at[slot])
                continue
            count = min(stored, block_k)
            for first in range(0, block_k, count):
                # Past the end of the table a block's last pages repeat the table's last one.
                page, offset = quotient(block * block_k + first, stored)
                page = table_ref[b, jnp.minimum(page, table_ref.shape[1] - 1)]
                page = jnp.clip(page, 0, ref.shape[0] - 1)
                source = ref.at[page, pl.ds(offset, count), kv]
                plgpu.copy_gmem_to_smem(source, ring.at[place(slot, first, count)], arrived.at[slot])

    # The queries' tile is the last one of k_smem, and they are its last rows. They lie in shared memory, not in registers:
    # ptxas 13.0 fills the registers of a left operand that a loop does not change before the loop, and then uses them for
    # the weights inside of it (D=64 was wrong on an H200, D=128 was not).
    queries = k_smem.at[pl.ds(k_smem.shape[0] - GPU_ROWS, GPU_ROWS)]  # [GPU_ROWS, D]
    unused = GPU_ROWS - rows.tile_rows
    valid = pl.ds(unused, rows.tile_rows)
    first_row = rows.first(kv, n_tile)
    tile_rows = pl.ds(first_row, rows.tile_rows)
    plgpu.copy_gmem_to_smem(q_ref.at[b, tile_rows], queries.at[valid], q_arrived)
    for n in range(stages):
        pl.when(n < mine)(functools.partial(fetch, jnp.int32(n)))
    if sinks_ref is not None:
        a_set = lax.div(b, jnp.int32(lengths_ref.shape[0] // sinks_ref.shape[0]))
        for n in range(0, rows.tile_rows, GPU_EIGHT):
            logits = read_eight(sinks_ref.at[a_set, pl.ds(first_row + n, GPU_EIGHT)])
            store(statistics_smem.at[0, pl.ds(unused + n, GPU_EIGHT)], logits)
    plgpu.barrier_wait(q_arrived)

    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_WGMMA) for axis in (0, 1))
    position = length - 1
    if rows.tokens > 1:
        token = lax.div(row + (n_tile * GPU_ROWS - unused), jnp.full_like(row, rows.group))
        position = length - rows.tokens + token  # [GPU_ROWS, block_k]

    def step(n: Any, carry: Any) -> Any:
        acc, highest, total = carry
        slot, block = slot_of(n), begin + n
        start = start_of(block)
        keys, values = (ring.at[place(slot, 0, block_k)] for ring in (k_smem, v_smem))
        plgpu.barrier_wait(k_arrived.at[slot])
        logits = product(shape, lambda sum_: sum_.add(queries, keys.transpose((1, 0))), interpreted=interpreted)
        logits, factor, _ = scaled_logits(logits, settings)
        key = column + start
        keep = key <= position
        if window is not None:
            keep = keep & (key >= position - window)
        if not paged and stored % block_k:
            keep = keep & (key >= block * block_k)
        logits = jnp.where(keep, logits, MASKED / max(factor, 1.0))
        new_highest = jnp.maximum(highest, jnp.max(logits, axis=1) * factor)
        alpha = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(logits * factor - lax.broadcast_in_dim(new_highest, shape, [0]))
        total = total * alpha + jnp.sum(weights, axis=1)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        plgpu.barrier_wait(v_arrived.at[slot])

        @pl.when(start + block_k > length)
        def _drop_what_is_past_the_length():
            # In pieces: registers are scarce here, and all of it at once would have D=256 spill.
            for first in range(0, width, piece):
                part = values.at[:, pl.ds(first, piece)]
                key = plgpu.broadcasted_iota(jnp.int32, (block_k, piece), 0, layout=_WGMMA)
                held = plgpu.load(part, layout=_WGMMA, optimized=False)
                part[...] = jnp.where(key + start < length, held.astype(jnp.float32), 0.0).astype(held.dtype)
            plgpu.commit_smem()

        weights = weights.astype(v_smem.dtype)
        (acc,) = accumulate((acc,), lambda sum_: sum_.add(weights, values), interpreted=interpreted)
        pl.when(n + stages < mine)(lambda: fetch(n + stages))
        return acc, new_highest, total

    per_row = _WGMMA.reduce(1)
    highest, total = (plgpu.layout_cast(jnp.full((GPU_ROWS,), value, jnp.float32), per_row) for value in (LOWEST, 0.0))
    acc = plgpu.layout_cast(jnp.zeros((GPU_ROWS, width), jnp.float32), _WGMMA)
    acc, highest, total = lax.fori_loop(0, mine, step, (acc, highest, total))
    total = total + jnp.where(in_range, 0.0, jnp.nan)

    if config.splits > 1:
        # Every copy has been used: the sums leave through the first two tiles of the ring.
        rounded = acc.astype(v_smem.dtype)
        rest_of_it = (acc - rounded.astype(jnp.float32)).astype(v_smem.dtype)
        part = (b, kv, n_tile, split)
        for half, value in enumerate((rounded, rest_of_it)):
            v_smem.at[pl.ds(half * GPU_ROWS, GPU_ROWS)][...] = value
        for n, value in enumerate((highest, total)):
            statistics_smem[n] = value
        plgpu.commit_smem()
        for half in range(_HALVES):
            own_sums = v_smem.at[pl.ds(half * GPU_ROWS + unused, rows.tile_rows)]
            plgpu.copy_smem_to_gmem(own_sums, out_ref.at[*part, half])
            plgpu.copy_smem_to_gmem(statistics_smem.at[half, valid], statistics_ref.at[*part, half])
        plgpu.wait_smem_to_gmem(0)
        return

    sink = None if sinks_ref is None else plgpu.load(statistics_smem.at[0], layout=per_row, optimized=False)
    out, logsumexp = finished(acc, highest, total, sink, _WGMMA)
    whole = v_smem.at[pl.ds(0, GPU_ROWS)]
    whole[...] = out.astype(v_smem.dtype)
    statistics_smem[1] = logsumexp
    if rows.piece < GPU_EIGHT:
        store(out_smem, plgpu.load(whole.at[valid], layout=eight_rows(width), optimized=False))  # [8, Dv]
    plgpu.commit_smem()
    for n in range(0, rows.tile_rows, GPU_EIGHT):
        own = n_tile * GPU_ROWS + n  # Of the key head's rows.

        def write(own: Any = own) -> None:
            row = kv * rows.stride + own
            target, within = pl.ds(row, rows.piece), row - first_row  # `within` the rows that were copied.
            source = (
                out_smem.at[pl.ds(within, rows.piece)]
                if rows.piece < GPU_EIGHT
                else whole.at[pl.ds(unused + within, rows.piece)]
            )
            plgpu.copy_smem_to_gmem(source, out_ref.at[b, target])
            held = statistics_smem.at[1, pl.ds(unused + within, rows.piece)]
            write_logsumexp(statistics_ref.at[b, target], held, rows.piece)

        if rows.piece < GPU_EIGHT or rows.stride % rows.tile_rows == 0:
            write()
        else:
            pl.when(own < rows.stride)(write)  # A tile ends in the next head's rows.
    plgpu.wait_smem_to_gmem(0)


def _combine_kernel(*refs: Any, rows: Rows, splits: int, sinks: bool):
    # inputs
    sums_ref, statistics_ref = refs[:2]  # [B, KV, tiles, splits, 2, tile_rows, Dv], and without Dv
    sinks_ref = refs[2] if sinks else None  # [sets, rows]
    # outputs
    out_ref, logsumexp_ref = refs[2 + sinks : 4 + sinks]  # [B, written, Dv], [B, written]
    # scratch
    out_smem, logsumexp_smem = refs[4 + sinks :]  # [8, channels], [8]
    width = out_smem.shape[1]
    shape, layout = (GPU_EIGHT, width), eight_rows(width)
    b, columns = lax.axis_index("batch"), pl.ds(lax.axis_index("values") * width, width)
    # One eight of a key head's rows, or its whole group. `within` is where it lies in its tile.
    kv, n = quotient(lax.axis_index("rows"), rows.stride // rows.piece)
    n_tile = lax.div(n, jnp.int32(GPU_ROWS // GPU_EIGHT))
    row = kv * rows.stride + n * rows.piece
    first_row = rows.first(kv, n_tile)
    within = row - first_row
    # Of a group of fewer than eight, all rows of the tile are computed: its own, and what came with them.
    begin = within if rows.piece == GPU_EIGHT else 0
    valid = pl.ds(begin, GPU_EIGHT)

    def load(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)  # [8, channels]

    def add(first: Any, count: int, carry: Any) -> Any:
        """`count` parts onto sums, maximum and total. All loads stand before the first use."""
        acc, highest, total = carry
        parts = [(b, kv, n_tile, first + n) for n in range(count)]
        each_highest, each_total = (
            [read_eight(statistics_ref.at[*part, which, valid], width) for part in parts] for which in range(2)
        )
        halves = [[load(sums_ref.at[*part, half, valid, columns]) for half in range(_HALVES)] for part in parts]
        new_highest = functools.reduce(jnp.maximum, each_highest, highest)
        alpha = jnp.exp2(highest - new_highest)
        acc, total = acc * spread(alpha, width, layout), total * alpha
        for part_highest, part_total, (rounded, rest_of_it) in zip(each_highest, each_total, halves, strict=True):
            weight = jnp.exp2(part_highest - new_highest)
            total = total + part_total * weight
            acc = acc + (rounded + rest_of_it) * spread(weight, width, layout)
        return acc, new_highest, total

    sink = None
    if sinks_ref is not None:
        a_set = lax.div(b, jnp.int32(out_ref.shape[0] // sinks_ref.shape[0]))
        sink = read_eight(sinks_ref.at[a_set, pl.ds(first_row + begin, GPU_EIGHT)], width)
    highest, total = (
        plgpu.layout_cast(jnp.full((GPU_EIGHT,), value, jnp.float32), layout.reduce(1)) for value in (LOWEST, 0.0)
    )
    carry = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout), highest, total
    rounds, rest = divmod(splits, _PARTS_AT_A_TIME)
    if rounds:
        carry = lax.fori_loop(0, rounds, lambda n, carry: add(n * _PARTS_AT_A_TIME, _PARTS_AT_A_TIME, carry), carry)
    if rest:
        carry = add(rounds * _PARTS_AT_A_TIME, rest, carry)
    acc, highest, total = carry
    out, logsumexp = finished(acc, highest, total, sink, layout)
    store(out_smem, out.astype(out_smem.dtype))
    store(logsumexp_smem, logsumexp)
    plgpu.commit_smem()
    own, target = pl.ds(within - begin, rows.piece), pl.ds(row, rows.piece)
    plgpu.copy_smem_to_gmem(out_smem.at[own], out_ref.at[b, target, columns])

    @pl.when(lax.axis_index("values") == 0)
    def _():
        write_logsumexp(logsumexp_ref.at[b, target], logsumexp_smem.at[own], rows.piece)

    plgpu.wait_smem_to_gmem(0)


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    sinks: jax.Array | None,
    page_table: jax.Array | None = None,
    *,
    window: int | None,
    settings: Settings,
    launch: Launch,
) -> Results:
    """Out [B, T, H, Dv] and logsumexp [B, T, H]. Sinks are [sets, H], each for as many sequences."""
    config: PallasGpuConfig = launch.config
    (b, t, h, _), (kv, width) = q.shape, v.shape[2:]
    paged, room = page_table is not None, room_of(k, page_table)
    q, k, v = (padded(x, 3, _LEAST_WIDTH) for x in (q, k, v))
    if not paged:
        k, v = (padded(x, 1, config.block_k if x.shape[1] < config.block_k else GPU_EIGHT) for x in (k, v))
    d, d_v, dtype = q.shape[3], v.shape[3], q.dtype
    rows = Rows(t, h, kv, d_v * dtype.itemsize)
    interpreted = launch.interpret is not None
    ring = config.stages * config.block_k
    # The interpreter would take the rows that the ring's end and the queries' tile share for a race.
    k_rows = ring + (GPU_ROWS if interpreted else rows.tile_rows)
    # Each piece of a block is a copy of its own.
    pieces = max(1, config.block_k // k.shape[1]) if paged else 1
    arrived = plgpu.Barrier(num_arrivals=pieces, num_barriers=config.stages)
    of_rows = []
    if sinks is not None:
        sets = sinks.astype(jnp.float32).reshape(-1, 1, h)
        of_rows = [rows.laid_out(jnp.broadcast_to(sets, (sets.shape[0], t, h)))]
    in_parts = config.splits > 1
    sinks_here = bool(of_rows) and not in_parts
    out_type = results = (
        output_like((b, rows.written, d_v), dtype, q),
        output_like((b, rows.written), jnp.float32, q),
    )
    if in_parts:
        part = (b, kv, rows.tiles, config.splits, 2, rows.tile_rows)
        out_type = (output_like((*part, d_v), dtype, q), output_like(part, jnp.float32, q))
    common: dict[str, Any] = {
        "compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        "interpret": gpu_interpret_params(launch.interpret, alone=True),
    }
    out, statistics = plgpu.kernel(
        functools.partial(
            _decode_kernel,
            rows=rows,
            config=config,
            room=room,
            window=window,
            settings=settings,
            paged=paged,
            sinks=sinks_here,
            interpreted=interpreted,
        ),
        out_type=out_type,
        grid=(b * config.splits * kv * rows.tiles,),
        grid_names=("work",),
        scratch_types=(
            tile(k_rows, d, dtype=dtype),
            tile(ring, d_v, dtype=dtype),
            plgpu.SMEM((2, GPU_ROWS), jnp.float32),
            plgpu.SMEM((GPU_EIGHT, d_v), dtype),
            plgpu.Barrier(),
            arrived,
            arrived,
        ),
        kernel_name="decode_attention",
        **common,
    )(rows.laid_out(q), k, v, lengths, *([page_table] if paged else []), *(of_rows if sinks_here else []))
    if in_parts:
        # Of one row alone a line is 64 channels.
        channels = math.gcd(d_v, max(_CHANNELS_A_BLOCK, LINE_BYTES // dtype.itemsize // rows.piece))
        out, statistics = plgpu.kernel(
            functools.partial(_combine_kernel, rows=rows, splits=config.splits, sinks=bool(of_rows)),
            out_type=results,
            grid=(b, rows.written // rows.piece, d_v // channels),
            grid_names=("batch", "rows", "values"),
            scratch_types=(plgpu.SMEM((GPU_EIGHT, channels), dtype), plgpu.SMEM((GPU_EIGHT,), jnp.float32)),
            kernel_name="decode_attention_combine",
            **common,
        )(out, statistics, *of_rows)
    return rows.taken(out[..., :width]), rows.taken(statistics)


def _over_pools(run: Callable[..., Results], *arrays: Any) -> Results:
    """`run` of q, the pools of k and v, lengths, sinks and a table, which `jax.vmap` turns into one of more sequences.

    By JAX's own rule the calls would follow each other. Where each call has a pool, those are one pool, and the tables
    count on from one to the next.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays: Any) -> Results:
        return run(*arrays)

    @call.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Results, Any]:
        def of_each(n: int) -> Any:
            x = arrays[n]
            return x if x is None or batched[n] else jnp.broadcast_to(x, (axis_size, *x.shape))

        k, v = arrays[1:3]
        q, lengths, sinks, table = (of_each(n) for n in (0, 3, 4, 5))
        if batched[1] or batched[2]:
            k, v = of_each(1), of_each(2)
            pool = k.shape[1]
            table = jnp.clip(table, 0, pool - 1) + pool * jnp.arange(axis_size, dtype=table.dtype)[:, None, None]
            k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        q, lengths, sinks, table = (
            None if x is None else x.reshape(-1, *x.shape[2:]) for x in (q, lengths, sinks, table)
        )
        results = _over_pools(run, q, k, v, lengths, sinks, table)
        unfolded = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results)
        return unfolded, (True,) * len(unfolded)

    return call(*arrays)


@with_plain_gradient
def _attend(
    q: Any,
    k: Any,
    v: Any,
    page_table: Any,
    lengths: Any,
    sinks: Any,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    settings = Settings(None, scale, soft_cap, 0)
    run = functools.partial(_forward, window=window, settings=settings, launch=launch)
    sets = (
        None if sinks is None else sinks.reshape(1, -1)
    )  # One for all sequences; under `jax.vmap` one for those of each call.
    if page_table is None:
        out, logsumexp = folded(run, q, k, v, lengths, sets)
    else:
        out, logsumexp = _over_pools(run, q, k, v, lengths, sets, page_table)
    return out, logsumexp


def paged_attention_pallas_gpu(
    q: Float[Array, "B T H D"],
    k: Float[Array, "_ _ KV D"],
    v: Float[Array, "_ _ KV Dv"],
    page_table: Int[Array, "B pages"] | None,
    lengths: Int[Array, " B"],
    sinks: Float[Array, " H"] | None,
    *,
    window: int | None,
    scale: float,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[Float[Array, "B T H Dv"], Float[Array, "B T H"]]:
    """Out and logsumexp; lengths and pages may be out of range."""
    return _attend(q, k, v, page_table, lengths, sinks, window, scale, soft_cap, launch)


decode_attention_pallas_gpu = paged_attention_pallas_gpu
