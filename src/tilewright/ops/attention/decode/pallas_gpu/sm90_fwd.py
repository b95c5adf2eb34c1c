"""Attention over a cache as a Mosaic GPU kernel for Hopper, for a cache in one piece and one in pages.

For each sequence and key head, an online softmax of its few queries over the keys up to the length:

    a_s = log2(e) cap(scale q . k_s)      out = sum_s 2^(a_s - m) v_s / l      logsumexp = (m + log2 l) / log2(e)

Floor: the keys and values that are attended to, read once; the rest is small. 2 S (D + Dv) bytes per sequence and key head
in bfloat16: at the 4.2 TB/s that an H200 copies with, 128 us for B16 KV8 S8192 D128. The kernel reads them once, in whole
blocks.

Blocking: a thread block of one warpgroup for a sequence, a key head and one of `splits` parts of its keys. The query heads
of the group, and the few tokens, are the last rows of a tile of 64, the fewest that wgmma takes. The rows before them are
the end of the keys' last stage, whatever it holds: their results are dropped. The warpgroup itself copies blocks of keys
and values into the stages in shared memory. It needs no producer warpgroup, since the products and the softmax of a block
take half the time of its copy; so there are full barriers and no empty ones. Neighbouring thread blocks take the key heads
of the same tokens, which are neighbours in memory. Where there are more of them than run at a time, they take long
sequences first (`order`, up to 128 sequences), and the copy of a last block of keys that are in one piece is of a quarter
of it, of a half or of all. H200, B64, 16/8 heads D128, room for 1,088 keys, caches cold: 69.5 us instead of 70.1 us with
1,040 keys in each sequence, and 38.0 us instead of 39.2 us with lengths from 1 to 1,088.

With one split, the kernel divides, adds the sink and writes out and logsumexp: one launch. With more, each split writes
sums that are not divided yet, their maximum and their total, and a second kernel combines the splits in order: two
launches (combine.py). Where queries stay in place and widths are multiples of 16, XLA adds nothing to these; several
tokens, and groups that do not fit into eights, are laid out before and restored after.

Edges: the cache may hold anything past the length. Logits are masked there, and so are the values, since 0 times NaN is
NaN. Where the room of a cache is not whole blocks, the last block begins earlier and masks the keys that were already seen.
A length out of range is taken for 0, and its total for NaN, in the kernel: around it that would be two launches.

Numerics: logits, statistics and accumulators in float32. Weights are rounded to bfloat16 for the product with v, as in
flash_attention. The sums of a split are written as a bf16x2 split, 16 bits of mantissa. Results are the same in every run.

Limits: Hopper only. bfloat16 only. D and Dv up to 256; widths that are not a multiple of 16 are padded, which copies the
cache, as is a cache with room for less than a block. Pages of 8 keys or more that divide 64, or are a multiple of it.

Tried and dropped:
- a last block, told by a counter, that combines the splits: clearing the counter is a launch too, and Pallas' interpreter
  has no such counters.
- as many thread blocks as run at a time, each with several sequences in turns, the copies of the next ones in flight while
  one is finished (H200, B64 S1088 16/8 heads D128, and B64 S8192 32/8 heads). In the order of the batch: 66.7 us instead of
  69.0 us with 1,040 keys in each sequence, but 45.8 us instead of 44.5 us with lengths from 1 to 1,088, and 308 us instead
  of 285 us from 1 to 8,192. With the longest first, and every other turn backwards: 69.2 us instead of 69.9 us, but
  41.3 us instead of 39.4 us, and 289.4 us instead of 283.1 us. With short copies of last blocks, too: 67.5, 40.0 and
  287.6 us, where these copies alone give 69.5 and 38.5 us (the last shape was not timed with them alone). Equal lengths
  gain up to 3 %, and unequal ones, which are the rule, lose 2 to 5 %: without turns the GPU gives the next sequence to
  whichever thread block is free.
- a copy for each quarter of a last block that is in use: 67.97 us instead of 68.05 us, and 8.6 us instead of 7.8 us for one
  sequence (16/8 heads, 1,040 keys).
- one thread block per multiprocessor, with twice the stages and half the splits: up to 3 % faster with equal lengths (H200,
  D128, B1 and B16). Unequal lengths are the rule, and then a long sequence would be in fewer splits.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode.bounds import Outputs
from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.decode.config import SM90_MOST_SPLITS, DecodeSm90Forward
from tilewright.ops.attention.decode.pallas_gpu.combine import choose_splits, combine_scratch, combine_splits
from tilewright.ops.attention.decode.pallas_gpu.order import MOST_KEYS, MOST_RANKED, sequence_of_rank
from tilewright.ops.attention.decode.pallas_gpu.rows import (
    EIGHT,
    LEAST_WIDTH,
    ROWS,
    Rows,
    eight_rows,
    finished,
    load_eight,
    store_logsumexp,
)
from tilewright.ops.attention.pallas_gpu.tiles import scaled_logits
from tilewright.ops.attention.softmax_rows import LOWEST, MASKED
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import compiler_params, interpreted, run_kernel, smem_bytes, tile
from tilewright.pallas.gpu.registers import WGMMA, split_hi_lo, store, transposed
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.wgmma import accumulate, not_bfloat16, product

_WIDEST = 256
_CLEANED_CHANNELS = 128  # Value channels that are masked at a time.
_BLOCK_K = 64
_PARTS = (4, 2, 1)  # The copy of a last block is of the first quarter of it, of the first half, or of all.
_MOST_STAGES = 8
_BLOCKS_PER_MULTIPROCESSOR = 2
_SMEM_BESIDE_SCRATCH = 3072  # Room for sums across warps, and what the compiler aligns.
_SMEM_PER_BLOCK = 1024  # Reserved by a multiprocessor for each of its blocks.


def _heuristic(chip: Chip, call: DecodeCall) -> DecodeSm90Forward:
    """As many stages as let two thread blocks share a multiprocessor, and the fewest splits that keep nine tenths of the
    GPU busy to the end, or come closest to it. If not all of them run at a time, long sequences come first.
    """
    room = call.room if call.window is None else min(call.room, call.window + call.q.shape[1])
    items = call.q.shape[0] * call.k.shape[2] * Rows.of(call).tiles
    smem, multiprocessors = chip.smem_bytes or 227 * 1024, chip.multiprocessors or 132

    def needed(stages: int) -> int:
        return _memory(call, Launch(chip, DecodeSm90Forward(_BLOCK_K, stages, 1), None))["decode"]

    shared = (smem + _SMEM_PER_BLOCK) // _BLOCKS_PER_MULTIPROCESSOR - _SMEM_PER_BLOCK
    alone = needed(2) > shared
    limit = smem if alone else shared
    stages = max((n for n in range(3, _MOST_STAGES + 1) if needed(n) <= limit), default=2)
    slots = multiprocessors * (1 if alone else _BLOCKS_PER_MULTIPROCESSOR)
    blocks = -(-room // _BLOCK_K)

    most = min(SM90_MOST_SPLITS, max(1, blocks // 2), max(1, 4 * slots // items))
    splits = choose_splits(items, blocks, slots, most)
    # What all run at the same time needs no order.
    longest_first = items * splits > slots and _not_ranked_reason(call) is None
    return DecodeSm90Forward(_BLOCK_K, stages, splits, longest_first=longest_first)


def _not_ranked_reason(call: DecodeCall) -> str | None:
    if call.q.shape[0] <= MOST_RANKED and call.room <= MOST_KEYS:
        return None
    return (
        f"longest_first with B={call.q.shape[0]} and room for {call.room} keys: at most {MOST_RANKED} sequences of "
        f"{MOST_KEYS} keys are put into order; use longest_first=False"
    )


def _unsupported_reason(call: DecodeCall, launch: Launch) -> str | None:
    if (reason := not_bfloat16(call.q)) is not None:
        return reason
    if launch.config.longest_first and (reason := _not_ranked_reason(call)) is not None:
        return reason
    d, dv, page, block = call.q.shape[3], call.v.shape[3], call.page, launch.config.block_k
    if max(d, dv) > _WIDEST:
        return f"D={d} and Dv={dv} must be {_WIDEST} at most (registers of a warpgroup); use implementation='xla'"
    if page is not None and (page % EIGHT or (block % page and page % block)):
        return (
            f"pages of {page} keys are not whole parts of a block of {block} keys, nor blocks of them; use pages of "
            f"8, 16, 32 or a multiple of {block} keys, or implementation='xla'"
        )
    return None


def _widths(call: DecodeCall) -> tuple[int, int]:
    """D and Dv as the kernel has them."""
    d, dv = (-(-array.shape[3] // LEAST_WIDTH) * LEAST_WIDTH for array in (call.q, call.v))
    return d, dv


def _decode_scratch(call: DecodeCall, config: DecodeSm90Forward) -> dict[str, Any]:
    (d, dv), dtype, rows = _widths(call), call.q.dtype, Rows.of(call)
    staged = config.stages * config.block_k
    # In the interpreter, the rows that the last stage and the queries' tile share would count as a race.
    query_rows = ROWS if interpreted() else rows.tile_rows
    # Each page of a block is a copy of its own.
    copies = 1 if call.page is None else max(1, config.block_k // call.page)
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
    return {
        "k_smem": tile(staged + query_rows, d, dtype=dtype),
        "v_smem": tile(staged, dv, dtype=dtype),
        "statistics_smem": plgpu.SMEM((2, ROWS), jnp.float32),
        "out_smem": plgpu.SMEM((EIGHT, dv), dtype),
        "q_full": plgpu.Barrier(),
        "k_full": full,
        "v_full": full,
    }


def _memory(call: DecodeCall, launch: Launch) -> dict[str, int]:
    config = launch.config
    combine = combine_scratch(Rows.of(call), _widths(call)[1], config.combine_block_v, call.q.dtype)
    kernels = {"decode": _decode_scratch(call, config), "combine": combine}
    return {name: smem_bytes(scratch) + _SMEM_BESIDE_SCRATCH for name, scratch in kernels.items()}


def _decode_kernel(
    *,
    # inputs
    q_ref,  # [B, rows, D]
    k_ref,  # [B, S, KV, D], or the pool of pages [P, page, KV, D]
    v_ref,  # [B, S, KV, Dv], or the pool of pages
    lengths_ref,  # [B]
    table_ref,  # [B, pages], or None
    sinks_ref,  # [sets, rows], or None
    # outputs
    out_ref,  # [B, written, Dv]; with several splits, their sums [B, KV, tiles, splits, hi and lo, tile_rows, Dv]
    statistics_ref,  # logsumexp [B, written]; with several splits, max and total [B, KV, tiles, splits, 2, tile_rows]
    # scratch
    k_smem,  # [stages * block_k + query rows, D], the keys and then the queries
    v_smem,  # [stages * block_k, Dv]
    statistics_smem,  # [2, ROWS]
    out_smem,  # [EIGHT, Dv]
    q_full,
    k_full,
    v_full,
    # static
    call: DecodeCall,
    rows: Rows,
    config: DecodeSm90Forward,
):
    block_k, stages, paged, window = config.block_k, config.stages, table_ref is not None, call.window
    stored, width = k_ref.shape[1], v_smem.shape[-1]  # Keys of a sequence in memory, padded, or of a page.
    shape, piece = (ROWS, block_k), math.gcd(width, _CLEANED_CHANNELS)
    # Keys of a copy. All blocks are whole where all thread blocks run at a time: short copies were not measured there, and
    # a copy for each quarter made one sequence slower.
    sizes = tuple(block_k // part for part in _PARTS) if config.longest_first else (block_k,)

    rest, n_tile = divmod_nonnegative(lax.axis_index("work"), rows.tiles)
    rest, kv = divmod_nonnegative(rest, rows.kv)
    b, split = divmod_nonnegative(rest, config.splits)
    if config.longest_first:
        b, length = sequence_of_rank(lengths_ref, b, call.room)
    else:
        length = lengths_ref[b]
    in_range = (length >= 0) & (length <= call.room)
    length = jnp.where(in_range, length, 0)
    # The queries are the last `tokens` of the sequence. The first query's window begins in the first block.
    first_block = jnp.int32(0)
    if window is not None:
        first_block = lax.div(jnp.maximum(length - rows.tokens - window, 0), jnp.int32(block_k))
    blocks = jnp.maximum(lax.div(length + (block_k - 1), jnp.int32(block_k)) - first_block, 0)
    begin, end = (first_block + lax.div(blocks * part, jnp.int32(config.splits)) for part in (split, split + 1))
    count = end - begin

    def start_of(block: Any) -> Any:
        """The first key of a block as it was copied."""
        return block * block_k if paged else jnp.minimum(block * block_k, stored - block_k)

    def stage_of(n: Any) -> Any:
        return lax.rem(n, jnp.int32(stages))

    def rows_of(stage: Any, first: int, count: int) -> Any:
        return pl.ds(stage * block_k + first, count)

    def fetch(n: Any) -> None:
        stage, block = stage_of(n), begin + n
        for ref, smem, full in ((k_ref, k_smem, k_full), (v_ref, v_smem, v_full)):
            if not paged:
                start = start_of(block)
                for below, size in itertools.pairwise((0, *sizes)):
                    source, target = ref.at[b, pl.ds(start, size), kv], smem.at[rows_of(stage, 0, size)]
                    copy = functools.partial(plgpu.copy_gmem_to_smem, source, target, full.at[stage])
                    if len(sizes) == 1:
                        copy()
                    else:  # What a stage holds past the length is masked like what the cache holds there.
                        rest = length - start
                        pl.when((rest > below) & ((rest <= size) | (size == block_k)))(copy)
                continue
            keys = min(stored, block_k)
            for first in range(0, block_k, keys):
                # Past the end of the table, the last pages of a block repeat the table's last one.
                page, offset = divmod_nonnegative(block * block_k + first, stored)
                page = table_ref[b, jnp.minimum(page, table_ref.shape[1] - 1)]
                page = jnp.clip(page, 0, ref.shape[0] - 1)
                source = ref.at[page, pl.ds(offset, keys), kv]
                plgpu.copy_gmem_to_smem(source, smem.at[rows_of(stage, first, keys)], full.at[stage])

    # The queries are the last rows of the last tile of k_smem. They are in shared memory, not in registers: ptxas 13.0
    # fills the registers of a left operand that does not change in a loop before the loop, and then uses them for the
    # weights inside the loop (D=64 was wrong on an H200, D=128 was not).
    queries = k_smem.at[pl.ds(k_smem.shape[0] - ROWS, ROWS)]  # [ROWS, D]
    unused = ROWS - rows.tile_rows
    valid = pl.ds(unused, rows.tile_rows)
    first_row = rows.first(kv, n_tile)
    tile_rows = pl.ds(first_row, rows.tile_rows)
    plgpu.copy_gmem_to_smem(q_ref.at[b, tile_rows], queries.at[valid], q_full)
    for n in range(stages):
        pl.when(n < count)(functools.partial(fetch, jnp.int32(n)))
    if sinks_ref is not None:
        sink_set = lax.div(b, jnp.int32(lengths_ref.shape[0] // sinks_ref.shape[0]))
        for n in range(0, rows.tile_rows, EIGHT):
            logits = load_eight(sinks_ref.at[sink_set, pl.ds(first_row + n, EIGHT)])
            store(statistics_smem.at[0, pl.ds(unused + n, EIGHT)], logits)
    plgpu.barrier_wait(q_full)

    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA) for axis in (0, 1))
    position = length - 1
    if rows.tokens > 1:
        token = lax.div(row + (n_tile * ROWS - unused), jnp.full_like(row, rows.group))
        position = length - rows.tokens + token  # [ROWS, block_k]

    def step(n: Any, carry: Any) -> Any:
        acc, row_max, total = carry
        stage, block = stage_of(n), begin + n
        start = start_of(block)
        keys, values = (smem.at[rows_of(stage, 0, block_k)] for smem in (k_smem, v_smem))
        plgpu.barrier_wait(k_full.at[stage])
        logits = product(shape, lambda sum_: sum_.add(queries, transposed(keys)))
        logits, factor, _ = scaled_logits(logits, call)
        key = column + start
        keep = key <= position
        if window is not None:
            keep = keep & (key >= position - window)
        if not paged and stored % block_k:
            keep = keep & (key >= block * block_k)
        logits = jnp.where(keep, logits, MASKED / max(factor, 1.0))
        new_max = jnp.maximum(row_max, jnp.max(logits, axis=1) * factor)
        alpha = jnp.exp2(row_max - new_max)
        weights = jnp.exp2(logits * factor - lax.broadcast_in_dim(new_max, shape, [0]))
        total = total * alpha + jnp.sum(weights, axis=1)
        acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
        plgpu.barrier_wait(v_full.at[stage])

        @pl.when(start + block_k > length)
        def _mask_values_past_the_length():
            # In pieces: registers are scarce here, and D=256 would spill with all channels at once.
            for first in range(0, width, piece):
                part = values.at[:, pl.ds(first, piece)]
                key = plgpu.broadcasted_iota(jnp.int32, (block_k, piece), 0, layout=WGMMA)
                loaded = plgpu.load(part, layout=WGMMA, optimized=False)
                part[...] = jnp.where(key + start < length, loaded.astype(jnp.float32), 0.0).astype(loaded.dtype)
            plgpu.commit_smem()

        weights = weights.astype(v_smem.dtype)
        (acc,) = accumulate((acc,), lambda sum_: sum_.add(weights, values))
        pl.when(n + stages < count)(lambda: fetch(n + stages))
        return acc, new_max, total

    per_row = WGMMA.reduce(1)
    row_max, total = (plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), per_row) for value in (LOWEST, 0.0))
    acc = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA)
    acc, row_max, total = lax.fori_loop(0, count, step, (acc, row_max, total))
    total = total + jnp.where(in_range, 0.0, jnp.nan)

    if config.splits > 1:
        # All copies have been used: the sums are written through the first two tiles of the stages.
        sums = split_hi_lo(acc, by_conversion=True)
        part = (b, kv, n_tile, split)
        for n, value in enumerate(sums):
            v_smem.at[pl.ds(n * ROWS, ROWS)][...] = value
        for n, value in enumerate((row_max, total)):
            statistics_smem[n] = value
        plgpu.commit_smem()
        for n in range(len(sums)):
            own_sums = v_smem.at[pl.ds(n * ROWS + unused, rows.tile_rows)]
            plgpu.copy_smem_to_gmem(own_sums, out_ref.at[*part, n])
            plgpu.copy_smem_to_gmem(statistics_smem.at[n, valid], statistics_ref.at[*part, n])
        plgpu.wait_smem_to_gmem(0)
        return

    sink = None if sinks_ref is None else plgpu.load(statistics_smem.at[0], layout=per_row, optimized=False)
    out, logsumexp = finished(acc, row_max, total, sink, WGMMA)
    whole = v_smem.at[pl.ds(0, ROWS)]
    whole[...] = out.astype(v_smem.dtype)
    statistics_smem[1] = logsumexp
    if rows.piece < EIGHT:
        store(out_smem, plgpu.load(whole.at[valid], layout=eight_rows(width), optimized=False))  # [8, Dv]
    plgpu.commit_smem()
    for n in range(0, rows.tile_rows, EIGHT):
        own = n_tile * ROWS + n  # Among the key head's rows.

        def write(own: Any = own) -> None:
            row = kv * rows.stride + own
            target, within = pl.ds(row, rows.piece), row - first_row  # `within` the rows that were copied.
            source = (
                out_smem.at[pl.ds(within, rows.piece)]
                if rows.piece < EIGHT
                else whole.at[pl.ds(unused + within, rows.piece)]
            )
            plgpu.copy_smem_to_gmem(source, out_ref.at[b, target])
            logsumexp_smem = statistics_smem.at[1, pl.ds(unused + within, rows.piece)]
            store_logsumexp(statistics_ref.at[b, target], logsumexp_smem, rows.piece)

        if rows.piece < EIGHT or rows.stride % rows.tile_rows == 0:
            write()
        else:
            pl.when(own < rows.stride)(write)  # A tile ends in the next head's rows.
    plgpu.wait_smem_to_gmem(0)


def _forward(call: DecodeCall, launch: Launch, *, save: bool) -> tuple[Outputs, None]:
    """out [B, T, H, Dv] and logsumexp [B, T, H]; lengths and pages may be out of range."""
    config: DecodeSm90Forward = launch.config
    (b, t, h, _), dtype, rows = call.q.shape, call.q.dtype, Rows.of(call)
    q, k, v = (padded(x, 3, LEAST_WIDTH) for x in (call.q, call.k, call.v))
    if call.page is None:
        k, v = (padded(x, 1, config.block_k if x.shape[1] < config.block_k else EIGHT) for x in (k, v))
    dv, split = v.shape[3], config.splits > 1
    sinks = None
    if call.sinks is not None:
        sets = call.sinks.astype(jnp.float32).reshape(-1, 1, h)
        sinks = rows.laid_out(jnp.broadcast_to(sets, (sets.shape[0], t, h)))
    part = (b, rows.kv, rows.tiles, config.splits, 2, rows.tile_rows)
    struct, params = jax.ShapeDtypeStruct, compiler_params(automatic_barriers=True)
    results = struct((b, rows.written, dv), dtype), struct((b, rows.written), jnp.float32)
    partial_results = struct((*part, dv), dtype), struct(part, jnp.float32)
    outputs = run_kernel(
        functools.partial(_decode_kernel, call=call, rows=rows, config=config),
        name="decode_attention",
        inputs={
            "q": rows.laid_out(q),
            "k": k,
            "v": v,
            "lengths": call.lengths,
            "table": call.page_table,
            "sinks": None if split else sinks,
        },
        outputs=dict(zip(("out", "statistics"), partial_results if split else results, strict=True)),
        scratch=_decode_scratch(call, config),
        grid={"work": b * config.splits * rows.kv * rows.tiles},
        params=params,
    )
    out, logsumexp = outputs["out"], outputs["statistics"]
    if split:
        sizes = {"at_a_time": config.combine_splits, "block_v": config.combine_block_v}
        out, logsumexp = combine_splits(out, logsumexp, sinks, rows, **sizes)
    return (rows.restored(out[..., : call.v.shape[3]]), rows.restored(logsumexp)), None


FORWARD = Pass(
    _forward,
    config=DecodeSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="fewer stages or a smaller block_k",
)
