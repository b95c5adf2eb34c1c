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

A part ends in sums that are not divided yet, their maximum and their total, of the true rows alone. XLA puts the parts
together behind the kernel, in a fixed order, adds sinks and drops rows that pad. So a call is not one launch: on an H200
(jax 0.11.2) it is this kernel and two small ones where the keys are in one part, which take 2.5 to 4 us, and five or six
where they are in more, 7 to 8.4 us.

Edges: what the cache holds past the length may be anything. Logits are masked there, and so are the values, since 0 times
NaN is NaN. The last block of a cache whose room is not whole blocks begins earlier, and masks what was seen already.

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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tilewright.core.batching import folded
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import accumulate, padded, product, quotient, refusal, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.attention.decode.config import GPU_ROWS, GPU_WIDEST, PallasGpuConfig, gpu_tile_rows
from tilewright.ops.attention.decode.gradient import with_plain_gradient
from tilewright.ops.attention.gpu_tiles import LOG2_E, LOWEST, MASKED, scaled_logits
from tilewright.ops.attention.gradient import Settings

Config = PallasGpuConfig
DTYPES = ("bfloat16",)
Parts = tuple[jax.Array, ...]

_WGMMA = plgpu.Layout.WGMMA
_LEAST_WIDTH = 16  # Of a head: the matrix unit's step.
_EIGHT = 8  # Rows of shared memory that a copy may begin at.
_HALVES = 2
_PIECE = 128  # Value channels that are cleaned at a time.


def _room(k: Any, page_table: Any) -> int:
    return k.shape[1] if page_table is None else k.shape[1] * page_table.shape[1]


def _tiles(tokens: int, group: int) -> int:
    return -(-tokens * group // GPU_ROWS)


def default_config(
    chip: Chip, q: Any, k: Any, v: Any, page_table: Any, *arrays: Any, **options: Any
) -> PallasGpuConfig:
    del arrays
    (b, t, h, d), kv = q.shape, k.shape[2]
    room = _room(k, page_table)
    window = options["window"]
    reach = room if window is None else min(room, window + t)
    return PallasGpuConfig.for_shape(chip, reach, b * kv * _tiles(t, h // kv), d, v.shape[3], t * (h // kv))


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
        if page % _EIGHT or (block % page and page % block):
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


class _Rows:
    """Where the rows of each key head lie: its group's heads for one token, or tokens times heads, padded.

    Copies see rows in eights: what begins inside of one ends with it, and what lies past the last whole one is not seen. So
    the rows of one token stay in place only where no group crosses from one eight to the next. A tile begins at a head's
    own rows, or earlier where the array ends: then it begins with rows of other heads.
    """

    def __init__(self, tokens: int, heads: int, kv: int):
        self.tokens, self.heads, self.kv = tokens, heads, kv
        self.group = heads // kv
        count = tokens * self.group
        self.tiles = _tiles(tokens, self.group)
        self.tile_rows = gpu_tile_rows(count)
        self.in_place = tokens == 1 and (self.group % _EIGHT == 0 or _EIGHT % self.group == 0)
        self.stride = count if self.in_place else self.tiles * self.tile_rows
        self.total = max(-(-self.kv * self.stride // _EIGHT) * _EIGHT, self.tile_rows)

    def first(self, kv: Any, n: Any, minimum: Any = min) -> Any:
        return minimum(kv * self.stride + n * GPU_ROWS, self.total - self.tile_rows)

    def laid_out(self, q: jax.Array) -> jax.Array:
        """[B, T, H, D] as [B, total, D]."""
        b, t, _, d = q.shape
        if not self.in_place:
            q = q.reshape(b, t, self.kv, self.group, d).transpose(0, 2, 1, 3, 4).reshape(b, self.kv, -1, d)
            q = padded(q, 2, self.stride)
        q = q.reshape(b, -1, d)
        return padded(q, 1, self.total) if q.shape[1] < self.total else q

    def taken(self, array: jax.Array) -> jax.Array:
        """The rows of [B, KV, tiles, tile_rows, ...] as [B, T, H, ...]."""
        kv, row = np.meshgrid(np.arange(self.kv), np.arange(self.tokens * self.group), indexing="ij")
        n = row // GPU_ROWS
        within = kv * self.stride + row - self.first(kv, n, np.minimum)
        picked = array[:, kv, n, within]  # [B, KV, T * group, ...]
        b, rest = array.shape[0], array.shape[4:]
        picked = picked.reshape(b, self.kv, self.tokens, self.group, *rest)
        return jnp.moveaxis(picked, 1, 2).reshape(b, self.tokens, self.heads, *rest)


def _decode_kernel(
    *refs: Any,
    rows: _Rows,
    config: PallasGpuConfig,
    window: int | None,
    settings: Settings,
    paged: bool,
    interpreted: bool,
):
    # inputs
    q_ref, k_ref, v_ref, lengths_ref = refs[:4]  # [B, rows, D], [B, S, KV, D], [B, S, KV, Dv] (or pools of pages), [B]
    table_ref = refs[4] if paged else refs[0]  # [B, pages]; without: not used
    # outputs: the sums' halves [B, KV, tiles, splits, 2, tile_rows, Dv], their max and total [..., 2, tile_rows]
    sums_ref, statistics_ref = refs[4 + paged : 6 + paged]
    # scratch
    k_smem, v_smem, statistics_smem, q_arrived, k_arrived, v_arrived = refs[
        6 + paged :
    ]  # Keys, and queries behind them.
    block_k, stages = config.block_k, config.stages
    room, width = k_ref.shape[1], v_smem.shape[-1]
    shape, piece = (GPU_ROWS, block_k), math.gcd(width, _PIECE)

    rest, n_tile = quotient(lax.axis_index("work"), rows.tiles)
    rest, kv = quotient(rest, rows.kv)
    b, split = quotient(rest, config.splits)
    length = lengths_ref[b]
    # Positions of the queries: the last `tokens` of the sequence. The first one's window begins at a block's start.
    first_block = jnp.int32(0)
    if window is not None:
        first_block = lax.div(jnp.maximum(length - rows.tokens - window, 0), jnp.int32(block_k))
    blocks = jnp.maximum(lax.div(length + (block_k - 1), jnp.int32(block_k)) - first_block, 0)
    begin, end = (first_block + lax.div(blocks * part, jnp.int32(config.splits)) for part in (split, split + 1))
    mine = end - begin

    def start_of(block: Any) -> Any:
        """The first key of a block as it was copied."""
        return block * block_k if paged else jnp.minimum(block * block_k, room - block_k)

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
            count = min(room, block_k)  # `room` is a page's.
            for first in range(0, block_k, count):
                # Past the end of the table a block's last pages repeat the table's last one.
                page, offset = quotient(block * block_k + first, room)
                page = table_ref[b, jnp.minimum(page, table_ref.shape[1] - 1)]
                source = ref.at[page, pl.ds(offset, count), kv]
                plgpu.copy_gmem_to_smem(source, ring.at[place(slot, first, count)], arrived.at[slot])

    # The queries' tile is the last one of k_smem, and they are its last rows. They lie in shared memory, not in registers:
    # ptxas 13.0 fills the registers of a left operand that a loop does not change before the loop, and then uses them for
    # the weights inside of it (D=64 was wrong on an H200, D=128 was not).
    queries = k_smem.at[pl.ds(k_smem.shape[0] - GPU_ROWS, GPU_ROWS)]  # [GPU_ROWS, D]
    unused = GPU_ROWS - rows.tile_rows
    valid = pl.ds(unused, rows.tile_rows)
    own_rows = pl.ds(rows.first(kv, n_tile, jnp.minimum), rows.tile_rows)
    plgpu.copy_gmem_to_smem(q_ref.at[b, own_rows], queries.at[valid], q_arrived)
    for n in range(stages):
        pl.when(n < mine)(functools.partial(fetch, jnp.int32(n)))
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
        if not paged and room % block_k:
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
        plgpu.copy_smem_to_gmem(own_sums, sums_ref.at[*part, half])
        plgpu.copy_smem_to_gmem(statistics_smem.at[half, valid], statistics_ref.at[*part, half])
    plgpu.wait_smem_to_gmem(0)


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array | None = None,
    *,
    window: int | None,
    settings: Settings,
    launch: Launch,
) -> Parts:
    """Of each part of the keys: the sums [B, splits, T, H, Dv], their maximum and total [B, splits, T, H]."""
    config: PallasGpuConfig = launch.config
    (b, t, h, _), (kv, width) = q.shape, v.shape[2:]
    rows, paged = _Rows(t, h, kv), page_table is not None
    q, k, v = (padded(x, 3, _LEAST_WIDTH) for x in (q, k, v))
    if not paged:
        k, v = (padded(x, 1, config.block_k if x.shape[1] < config.block_k else _EIGHT) for x in (k, v))
    d, d_v, dtype = q.shape[3], v.shape[3], q.dtype
    part = (b, kv, rows.tiles, config.splits, 2, rows.tile_rows)
    interpreted = launch.interpret is not None
    ring = config.stages * config.block_k
    # The interpreter would take the rows that the ring's end and the queries' tile share for a race.
    k_rows = ring + (GPU_ROWS if interpreted else rows.tile_rows)
    arrived = plgpu.Barrier(num_arrivals=1, num_barriers=config.stages)
    if paged:
        # Each piece of a block is a copy of its own.
        pieces = max(1, config.block_k // k.shape[1])
        arrived = plgpu.Barrier(num_arrivals=pieces, num_barriers=config.stages)
    sums, statistics = plgpu.kernel(
        functools.partial(
            _decode_kernel,
            rows=rows,
            config=config,
            window=window,
            settings=settings,
            paged=paged,
            interpreted=interpreted,
        ),
        out_type=(output_like((*part, d_v), dtype, q), output_like(part, jnp.float32, q)),
        grid=(b * config.splits * kv * rows.tiles,),
        grid_names=("work",),
        scratch_types=(
            tile(k_rows, d, dtype=dtype),
            tile(ring, d_v, dtype=dtype),
            plgpu.SMEM((2, GPU_ROWS), jnp.float32),
            plgpu.Barrier(),
            arrived,
            arrived,
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpret_params(launch.interpret),
        kernel_name="decode_attention",
    )(rows.laid_out(q), k, v, lengths, *([page_table] if paged else []))
    sums = sums[..., :width].astype(jnp.float32)
    # [B, KV, tiles, splits, rows, ...] with the splits last of the leading axes' rest, for `taken`.
    sums = jnp.moveaxis(sums[:, :, :, :, 0] + sums[:, :, :, :, 1], 3, 4)  # [B, KV, tiles, rows, splits, Dv]
    highest, total = (jnp.moveaxis(statistics[:, :, :, :, n], 3, 4) for n in range(2))
    return rows.taken(sums), rows.taken(highest), rows.taken(total)


def _over_pools(run: Callable[..., Parts], *arrays: jax.Array) -> Parts:
    """`run` of q, the pools of k and v, lengths and a table, which `jax.vmap` turns into one of more sequences.

    By JAX's own rule the calls would follow each other. Where each call has a pool, those are one pool, and the tables
    count on from one to the next.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays: jax.Array) -> Parts:
        return run(*arrays)

    @call.def_vmap
    def _(axis_size: int, batched: Any, *arrays: jax.Array) -> tuple[Parts, Any]:
        def of_each(x: jax.Array, is_batched: bool) -> jax.Array:
            return x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))

        q, k, v, lengths, table = arrays
        q, lengths, table = (of_each(x, batched[n]) for n, x in ((0, q), (3, lengths), (4, table)))
        if batched[1] or batched[2]:
            k, v = of_each(k, batched[1]), of_each(v, batched[2])
            table = table + k.shape[1] * jnp.arange(axis_size, dtype=table.dtype)[:, None, None]
            k, v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
        q, lengths, table = (x.reshape(-1, *x.shape[2:]) for x in (q, lengths, table))
        parts = _over_pools(run, q, k, v, lengths, table)
        unfolded = tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in parts)
        return unfolded, (True,) * len(unfolded)

    return call(*arrays)


def _combined(sums: jax.Array, highest: jax.Array, total: jax.Array, sinks: jax.Array | None, dtype: Any) -> Any:
    """Out and logsumexp of the parts: [B, T, H, splits, Dv], and [B, T, H, splits] twice."""
    over_all = jnp.max(highest, axis=3)  # [B, T, H]
    sink = None
    if sinks is not None:
        sink = jnp.broadcast_to(sinks.astype(jnp.float32) * LOG2_E, over_all.shape)
        over_all = jnp.maximum(over_all, sink)
    weights = jnp.exp2(highest - over_all[..., None])
    total = jnp.sum(total * weights, axis=3)
    if sink is not None:
        total = total + jnp.where(sink > LOWEST, jnp.exp2(sink - over_all), 0.0)
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    out = jnp.sum(sums * weights[..., None], axis=3) / safe[..., None]
    logsumexp = jnp.where(nothing, -jnp.inf, (over_all + jnp.log2(safe)) * (1.0 / LOG2_E))
    return out.astype(dtype), logsumexp


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
    if page_table is None:
        sums, highest, total = folded(run, q, k, v, lengths)
    else:
        sums, highest, total = _over_pools(run, q, k, v, lengths, page_table)
    return _combined(sums, highest, total, sinks, q.dtype)


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
    """Out and logsumexp; lengths and pages are in range."""
    return _attend(q, k, v, page_table, lengths, sinks, window, scale, soft_cap, launch)


decode_attention_pallas_gpu = paged_attention_pallas_gpu
