"""What the Hopper kernels of attention share: how a call lies in memory, the tile scheduler, and masked logits.

A thread block keeps one block of queries (forward) or of keys (backward), the stationary block, and visits blocks of
the other. Which ones is a row of a table in device memory: full blocks first, then partial ones. So a kernel is two
loops, the first without a mask, and nothing is fetched or computed for an empty block. The producer warpgroup reads the
table some steps ahead of the products, so that its latency is hidden. Rows with the most work start first: what is left
at the end of a grid is then short.
"""

import functools
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.masks.algebra import Both, Either, Mask, Not
from tilewright.masks.block_list import EMPTY, FULL, PARTIAL, Grid, block_table, segment_kinds
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.softmax_rows import LOG2_E, MASKED
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.global_sums import add_to_sums
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, along_rows, to_int32
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

# A row of shared memory that the tensor cores read without bank conflicts is 128 bytes: 64 elements of bfloat16.
SWIZZLED_WIDTH = 64
_LEAST_FACTOR = 2.0**-20
# The ends of a tile take about as long as one of the blocks that it visits.
_TILE_COST = 1


def padded_width(width: int) -> int:
    """The width of a head in whole swizzled rows of shared memory: 64, 128, 192 or 256."""
    return -(-width // SWIZZLED_WIDTH) * SWIZZLED_WIDTH


def padded_heads(array: jax.Array, block: int, width: int = SWIZZLED_WIDTH) -> jax.Array:
    """[B, T, H, D] with T padded to whole blocks and D to a multiple of `width`."""
    return padded(padded(array, 3, width), 1, block)


@dataclass(frozen=True)
class Tables:
    """The refs of the arrays that `schedule_blocks` makes; None for those that a call does not need."""

    counts_ref: Any  # [lists * rows * 2] full blocks and all blocks of each row
    blocks_ref: Any  # [lists * rows * longest] the blocks that a row visits
    order_ref: Any = None  # [rows] the stationary blocks of keys, most work first
    content_ref: Any = None  # [lists * rows * longest] the index into `contents` of each
    contents_ref: Any = None  # [n, block_q, block_k], or transposed where keys are stationary; int8
    q_ids_ref: Any = None  # [B, T]
    kv_ids_ref: Any = None  # [B, S]
    tiles_ref: Any = None  # [thread blocks * most] see `assign_tiles`
    tile_counts_ref: Any = None  # [thread blocks]


@dataclass(frozen=True)
class TileScheduler:
    """Which stationary block a thread block keeps, and how many blocks it visits; static."""

    call: AttentionCall
    block_q: int
    block_k: int
    rows: int
    """Stationary blocks per batch and head."""
    longest: int
    """The most blocks that one of them visits."""
    per_batch: bool
    has_full: bool
    has_partial: bool
    visits: tuple[int, ...]
    """How many blocks each stationary block visits; where segments are packed, the most that it may visit."""

    @property
    def ragged_keys(self) -> bool:
        return self.call.k.shape[1] % self.block_k != 0

    @property
    def known(self) -> bool:
        """Whether `visits` are exact: segments are known on the device only."""
        return self.call.q_segments is None

    def row(self, tables: Tables, b: Any, stationary: Any, counts: tuple[Any, Any] | None = None) -> "Row":
        """What a stationary block of a batch visits. `counts`: its full blocks and all of them, for a caller that has
        them; otherwise they are loaded.
        """
        number = (b * self.rows + stationary) if self.per_batch else stationary
        if counts is None:
            counts = tables.counts_ref[2 * number], tables.counts_ref[2 * number + 1]
        return Row(self, tables, b, stationary, number * self.longest, *counts)

    def row_of_queries(
        self, tables: Tables, number: Any, counts: tuple[Any, Any] | None = None
    ) -> tuple[Any, Any, "Row"]:
        """The batch, query head and row of a tile, numbered as `assign_tiles` does."""
        head, stationary = divmod_nonnegative(number, self.rows)
        b, h = divmod_nonnegative(head, self.call.q.shape[2])
        return b, h, self.row(tables, b, stationary, counts)

    def row_of_keys(self, tables: Tables, number: Any, together: int) -> tuple[Any, Any, "Row"]:
        """The batch, key head and row of a thread block. `together` heads run side by side before others start."""
        which, rest = divmod_nonnegative(number, self.rows * together)
        rank, rest = divmod_nonnegative(rest, together)
        b, kv = divmod_nonnegative(which * together + rest, self.call.k.shape[2])
        return b, kv, self.row(tables, b, tables.order_ref[rank])


@dataclass(frozen=True)
class Row:
    """One stationary block, and the scalars that say what it visits."""

    scheduler: TileScheduler
    tables: Tables
    b: Any
    stationary: Any
    first: Any
    full: Any
    """Blocks that need no mask; they come first."""
    total: Any

    def block(self, n: Any) -> Any:
        return self.tables.blocks_ref[self.first + n]

    def content(self, n: Any) -> Any:
        return None if self.tables.content_ref is None else self.tables.content_ref[self.first + n]

    def of_group(self, number: Any, kv: Any) -> tuple[Any, Any]:
        """The query head of a step and its index in the row: full blocks of all heads of a group, then partial ones."""
        group = self.scheduler.call.group
        if group == 1:
            return kv, number
        full = number < self.full * group
        count = jnp.where(full, self.full, self.total - self.full)
        inside = jnp.where(full, number, number - self.full * group)
        g = jax.lax.div(inside, count)
        return kv * group + g, jnp.where(full, 0, self.full) + inside - g * count

    def loops(self, step: Callable[..., None]) -> list[tuple[Any, Any, Callable[..., None]]]:
        """The loops over a row and a group of heads, as (first, end, body): without a mask, then with one."""
        scheduler, loops = self.scheduler, []
        full_steps = self.full * scheduler.call.group
        if scheduler.has_full:
            loops.append((0, full_steps, functools.partial(step, masked=False)))
        if scheduler.has_partial:
            first = full_steps if scheduler.has_full else 0
            loops.append((first, self.total * scheduler.call.group, functools.partial(step, masked=True)))
        return loops

    def masked(
        self,
        logits: jax.Array,
        factor: float,
        content: Any,
        *,
        first_q: Any,
        first_k: Any,
        part: tuple[Any, ...],
        transposed: bool = False,
    ) -> jax.Array:
        """A tile of logits [queries, keys], or transposed, with a large negative number where a pair does not attend.

        `first_q` and `first_k` are the tile's first query and key. `part` is where the tile lies in the stationary block,
        and in the other, where it does not cover all of it; `content` indexes the contents of the block.
        """
        call, tables, b, shape = self.scheduler.call, self.tables, self.b, logits.shape
        q_axis, k_axis = (1, 0) if transposed else (0, 1)
        num_q, num_k = shape[q_axis], shape[k_axis]
        keys = first_k + plgpu.broadcasted_iota(jnp.int32, shape, k_axis, layout=WGMMA)
        conditions = []
        if call.mask is not None and call.mask.computable:
            queries = first_q + plgpu.broadcasted_iota(jnp.int32, shape, q_axis, layout=WGMMA)
            conditions.append(_keep(call.mask, queries, keys, call.q_offset))
        if self.scheduler.ragged_keys:
            conditions.append(keys < call.k.shape[1])
        if tables.contents_ref is not None:
            values = plgpu.load(tables.contents_ref.at[(content, *part)], layout=WGMMA, optimized=False)
            conditions.append(values.astype(jnp.int32) != 0)
        if tables.q_ids_ref is not None:
            # Ids along the rows of a tile and along its columns have layouts of their own.
            of_axis = (WGMMA.reduce(1), WGMMA.reduce(0))
            q_ids = plgpu.load(tables.q_ids_ref.at[b, pl.ds(first_q, num_q)], layout=of_axis[q_axis], optimized=False)
            kv_ids = plgpu.load(tables.kv_ids_ref.at[b, pl.ds(first_k, num_k)], layout=of_axis[k_axis], optimized=False)
            q_ids = jax.lax.broadcast_in_dim(q_ids, shape, [q_axis])
            kv_ids = jax.lax.broadcast_in_dim(kv_ids, shape, [k_axis])
            conditions.append(q_ids == kv_ids)
        if not conditions:
            return logits
        return jnp.where(functools.reduce(jnp.logical_and, conditions), logits, MASKED / max(factor, 1.0))


def schedule_blocks(
    call: AttentionCall, blocks: tuple[int, int], stationary: Literal["q", "k"]
) -> tuple[TileScheduler, dict[str, jax.Array]]:
    """What a kernel visits, and the arrays that tell it, by the names of `Tables`."""
    mask, dynamic = call.mask, call.q_segments is not None
    grid = Grid(call.q.shape[1], call.k.shape[1], *blocks, call.q_offset)
    table = block_table(mask, grid)
    kinds = table.kinds_to_the_end[0]  # [num_q, num_k]
    idle = bool((kinds == EMPTY).all(1 if stationary == "q" else 0).any())
    # Contents of partial blocks; also where there are none, if a row may have no work.
    dense = mask is not None and not mask.computable and (len(table.contents) > 0 or idle or dynamic)
    # A full block that something else cuts, the end of the keys or segments, has contents of ones.
    contents, content = table.every_content()
    found: Any = kinds[None]  # [1 or B, num_q, num_k]
    if call.q_segments is not None and call.kv_segments is not None:
        found = jnp.minimum(jnp.asarray(kinds, jnp.int32)[None], segment_kinds(call.q_segments, call.kv_segments, grid))
    xp: Any = jnp if dynamic else np
    content = np.broadcast_to(content, found.shape)
    if stationary == "k":
        kinds, found, content = kinds.T, found.swapaxes(1, 2), content.swapaxes(1, 2)
    kinds, found = _never_idle(kinds), _never_idle(found)
    visits = (kinds != EMPTY).sum(1)
    longest = max(1, int(visits.max()))
    # Full ones first, partial ones after them, empty ones at the end; each kind in order.
    by_kind = xp.where(found == FULL, 0, xp.where(found == PARTIAL, 1, 2))
    visited = xp.argsort(by_kind, axis=2, stable=True)[:, :, :longest]
    full, some = (xp.sum(a, axis=2) for a in (found == FULL, found != EMPTY))
    arrays = {"counts": xp.stack([full, some], axis=2), "blocks": visited}
    if stationary == "k":
        arrays["order"] = np.argsort(-visits, kind="stable")
    if dense:
        arrays["content"] = xp.take_along_axis(xp.asarray(content), visited, axis=2)
    flat = {name: jnp.asarray(array).astype(jnp.int32).reshape(-1) for name, array in arrays.items()}
    if dense:
        flat["contents"] = jnp.asarray((contents if stationary == "q" else contents.swapaxes(1, 2)).astype(np.int8))
    if call.q_segments is not None and call.kv_segments is not None:
        flat["q_ids"] = padded(call.q_segments, 1, grid.block_q)  # [B, T]
        flat["kv_ids"] = padded(call.kv_segments, 1, grid.block_k)  # [B, S]
    scheduler = TileScheduler(
        call,
        *blocks,
        rows=kinds.shape[0],
        longest=longest,
        per_batch=dynamic and call.q.shape[0] > 1,
        has_full=bool((kinds == FULL).any()),
        has_partial=dynamic or bool((kinds == PARTIAL).any()),
        visits=tuple(visits.tolist()),
    )
    return scheduler, flat


def assign_tiles(visits: tuple[int, ...], heads: int, together: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """The tiles of each thread block of a persistent kernel, [blocks, most], and how many they are, [blocks].

    A tile is a head and a row, numbered head * rows + row; `visits` is the work of each row. Groups of `together` heads
    follow one another, and the tiles of a group with the most work come first. In this order, each tile goes to the
    thread block that has had the least work.
    """
    ranked = sorted(range(len(visits)), key=lambda row: -visits[row])
    tiles: list[list[int]] = [[] for _ in range(blocks)]
    load = [(0, block) for block in range(blocks)]
    for first in range(0, heads, together):
        for row in ranked:
            for head in range(first, min(first + together, heads)):
                had, block = load[0]
                tiles[block].append(head * len(visits) + row)
                heapq.heapreplace(load, (had + visits[row] + _TILE_COST, block))
    most = max(map(len, tiles))
    filled = np.array([each + [0] * (most - len(each)) for each in tiles], np.int32)
    return filled, np.array([len(each) for each in tiles], np.int32)


def _never_idle(kinds: Any) -> Any:
    """The kinds [..., rows, blocks], where the first block of a row without work is taken for partial.

    The row then visits one block, which its mask leaves nothing of: the kernels have no special case for it.
    """
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    first = (xp.arange(kinds.shape[-1]) == 0).reshape((1,) * (kinds.ndim - 1) + (-1,))
    idle = xp.all(kinds == EMPTY, axis=-1, keepdims=True) & first
    return xp.where(idle, PARTIAL, kinds)


def plain_factor(call: Any) -> float | None:
    """The factor that turns products into logits in units of log 2, where a factor does; else None. Decoding's, too.

    The maximum is taken before it is applied, and so is the mask: both need a factor that is positive and not tiny.
    """
    factor = call.scale * LOG2_E
    return factor if call.soft_cap is None and factor >= _LEAST_FACTOR else None


def scaled_logits(products: jax.Array, call: Any) -> tuple[jax.Array, float, jax.Array | None]:
    """Logits, the factor that turns them into units of log 2, and tanh where there is a soft cap.

    The factor is applied in the multiply-add with the maximum.
    """
    if (plain := plain_factor(call)) is not None:
        return products, plain, None
    factor, soft_cap = call.scale * LOG2_E, call.soft_cap
    if soft_cap is None:
        return products * factor, 1.0, None
    # tanh from an exponential: the hardware's own is accurate to 11 bits only.
    grown = jnp.exp2(products * (2 * factor / soft_cap))
    slope = 1.0 - 2.0 / (1.0 + grown)
    return slope * (soft_cap * LOG2_E), 1.0, slope


def _keep(mask: Mask, queries: jax.Array, keys: jax.Array, q_offset: int) -> jax.Array:
    """The predicate of a mask. `~` of booleans in registers has no lowering in jax 0.12; `where` has."""
    if isinstance(mask, Both):
        return _keep(mask.left, queries, keys, q_offset) & _keep(mask.right, queries, keys, q_offset)
    if isinstance(mask, Either):
        return _keep(mask.left, queries, keys, q_offset) | _keep(mask.right, queries, keys, q_offset)
    if isinstance(mask, Not):
        return jnp.where(_keep(mask.mask, queries, keys, q_offset), False, True)
    return mask.keep(queries, keys, q_offset)


def factors_of(streamed: Pipeline, number: Any) -> Any:
    """Where the factors of a step are: the next step needs them, when the stage may hold another step's."""
    return streamed.factors.at[jax.lax.rem(number, jnp.int32(streamed.stages + 1))]


def add_to_dq(
    dq: jax.Array, factors: Any, through: Any, sums_ref: Any, contributor: Any, index: tuple[Any, ...], some: Any
) -> None:
    """Where `some`, adds a tile of dq to the sums in global memory, as integers: times a factor per row.

    The tile leaves through shared memory, `through`.
    """
    to_fixed = plgpu.load(factors, layout=WGMMA.reduce(1))
    fixed = to_int32(dq * along_rows(to_fixed, dq.shape))
    # The copy of the tile before has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    through[...] = fixed
    plgpu.commit_smem()

    @pl.when(some)
    def _add():
        add_to_sums(through, sums_ref, contributor, index)
