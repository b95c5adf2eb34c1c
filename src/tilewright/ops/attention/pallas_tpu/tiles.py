"""What the TPU kernels of attention share: how a call lies in memory, its block list, and tiles of logits.

Layout: [B, T, H, D] is taken as [B, T, H * D], whose blocks of D lanes are heads; a projection writes just that, so no
transpose is needed. D is padded to whole lanes, T and S to whole blocks.

Tiles are transposed, [keys, queries]. So the statistics of a query are a row of lanes: they are reduced over sublanes,
which takes no cross-lane unit, and stored without padding. Logits are in units of log 2, for exp2.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.core.chip import LANES
from tilewright.masks.block_list import (
    CONTENT_SHIFT,
    EMPTY,
    FULL,
    KIND_SHIFT,
    MOST_BLOCKS,
    MOST_CONTENTS,
    PARTIAL,
    TILE_END_SHIFT,
    TILE_FIRST_SHIFT,
    BlockList,
    BlockTable,
    Grid,
    block_list,
    block_table,
    segment_kinds,
)
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionTpuBackward, AttentionTpuForward
from tilewright.ops.attention.softmax_rows import LOG2_E, MASKED
from tilewright.pallas.tpu.kernel import Block

TpuConfig = AttentionTpuForward | AttentionTpuBackward

# The part of scalar memory that a block list may take; it also holds the kernel's own scalars.
_LIST_BYTES = 768 * 1024
# The compiler takes VMEM of its own, for spills and for tiles that live between passes.
VMEM_SHARE = 0.8
_WIDE_MXU = 256


def dot_f32(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a and b contracted over one axis each; accumulated in float32, and multiplied in float32 where they are."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def pad_to(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    """The array with zeros behind it along an axis, to a multiple."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return jnp.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])


def whole_lanes(width: int) -> int:
    """A width padded to whole lanes."""
    return -(-width // LANES) * LANES


def by_lanes(array: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] as [B, T, H * D], with D padded to whole lanes and T to whole blocks."""
    padded = pad_to(pad_to(array, 3, LANES), 1, block)
    return padded.reshape(*padded.shape[:2], -1)


def by_heads(array: jax.Array, t: int, h: int, d: int) -> jax.Array:
    """The inverse of `by_lanes`: [B, T, H * D] as [B, T, H, D], without the padding."""
    split = array.reshape(*array.shape[:2], h, -1)
    return split[:, :t, :, :d]


def largest_block(chip: Any, call: AttentionCall) -> int:
    """Blocks of up to 1,024 where the MXU is wide: it waits for the exponentials, so it gets many tiles per step to
    overlap. A narrow one is busy with fewer, and its code for a tile is twice as long.
    """
    wide = chip.mxu_size == _WIDE_MXU
    return 1024 if wide and max(call.q.shape[3], call.v.shape[3]) <= 256 and call.q.dtype.itemsize == 2 else 512


def even_block(length: int, largest: int) -> int:
    """The size of equal blocks, a multiple of the lanes and `largest` at most, that leave little of a length over."""
    count = -(-length // largest)
    return -(-length // (count * LANES)) * LANES


def tile_of(block: int, largest: int) -> int:
    """The largest multiple of the lanes that divides the block, `largest` at most."""
    return next(size for size in range(min(block, largest), 0, -LANES) if block % size == 0)


@dataclass(frozen=True)
class Tiling:
    """Blocks and tiles of one kernel; static."""

    call: AttentionCall
    config: TpuConfig
    has_full: bool
    """Whether any block may be full, so that it needs no mask."""
    has_partial: bool
    only_full: bool
    """Whether every step is a full block: then nothing is under a condition."""

    @property
    def ragged_keys(self) -> bool:
        return self.call.k.shape[1] % self.config.block_k != 0


@dataclass(frozen=True)
class Schedule:
    """How the steps of a kernel are divided into lists: one per batch, head and chunk, or shared by them. Static."""

    steps: int
    """The steps of each list."""
    per_batch: bool
    per_head: bool
    batch: int
    heads: int
    chunks: int
    """The chunks that the keys are divided into."""

    def first_step(self, b: Any, h: Any, chunk: Any) -> Any:
        """Where the list of a batch, a head and a chunk begins."""
        number = (b if self.per_batch else 0) * (self.heads if self.per_head else 1) + (h if self.per_head else 0)
        return (number * self.chunks + chunk) * self.steps

    @property
    def lists(self) -> int:
        return (self.batch if self.per_batch else 1) * (self.heads if self.per_head else 1) * self.chunks


def _table(call: AttentionCall, config: TpuConfig) -> BlockTable:
    grid = Grid(call.q.shape[1], call.k.shape[1], config.block_q, config.block_k, call.q_offset)
    return block_table(call.mask, grid)


def _static_kinds(table: BlockTable) -> np.ndarray:
    """The kinds of blocks by the mask, where the last block of keys is partial if the keys end inside it."""
    kinds = table.kinds
    if table.grid.s % table.grid.block_k:
        last = kinds[:, :, -1:]
        kinds = np.concatenate([kinds[:, :, :-1], np.where(last == FULL, PARTIAL, last)], axis=2)
    return kinds


def _contents(call: AttentionCall, table: BlockTable) -> np.ndarray | None:
    """The distinct partial blocks and one of ones, for a mask that is not computed from positions; else None.

    A full block that something else cuts, the end of the keys or segments, has contents of ones.
    """
    if call.mask is None or call.mask.computable or not len(table.contents):
        return None
    return np.concatenate([table.contents, np.ones((1, *table.contents.shape[1:]), bool)])


def schedule(call: AttentionCall, config: TpuConfig) -> Schedule:
    """The schedule of a kernel in which a block of queries is stationary."""
    table = _table(call, config)
    kinds, blocks = _static_kinds(table), _blocks_per_chunk(config, table)
    pieces = [kinds[:, :, start : start + blocks] for start in range(0, kinds.shape[2], blocks)]
    # The longest list that the static kinds allow, with a step for each block of queries without work.
    steps = max(int(np.maximum((piece != EMPTY).sum(2), 1).sum(1).max()) for piece in pieces)
    keep_shape = (1, 1) if call.keep is None else call.keep.shape[:2]
    batch = call.q.shape[0] if call.q_segments is not None else keep_shape[0]
    per_head = max(kinds.shape[0], keep_shape[1]) > 1
    return Schedule(steps, batch > 1, per_head, call.q.shape[0], call.q.shape[2], len(pieces))


def _blocks_per_chunk(config: TpuConfig, table: BlockTable) -> int:
    chunk_k = getattr(config, "chunk_k", None)
    return table.grid.num_k if chunk_k is None else chunk_k // config.block_k


def list_misfit(call: AttentionCall, config: TpuConfig) -> str | None:
    """Why the block list of a kernel does not fit scalar memory, with the way out; or None."""
    plan, table = schedule(call, config), _table(call, config)
    size, grid = 8 * plan.lists * plan.steps, table.grid
    if size <= _LIST_BYTES and max(grid.num_q, grid.num_k) <= MOST_BLOCKS and len(table.contents) <= MOST_CONTENTS:
        return None
    return (
        f"its block list of {plan.lists} x {plan.steps:,} steps needs {size / 1024:,.0f} KiB of scalar memory, and may "
        f"have {_LIST_BYTES / 1024:.0f}; use a larger block_q and block_k, or implementation='xla'"
    )


def plan_blocks(call: AttentionCall, config: TpuConfig) -> tuple[Tiling, Schedule, BlockList]:
    """The blocks that a kernel visits. A block of queries is stationary."""
    table, plan = _table(call, config), schedule(call, config)
    kinds = _static_kinds(table)
    dense = _contents(call, table) is not None
    content = (
        np.where(table.kinds == FULL, len(table.contents), table.content) if dense else np.zeros_like(table.content)
    )
    tables: list[Any] = [kinds, content, *table.tiles("k", config.tile_k)]  # each [1 or heads, num_q, num_k]
    dynamic = call.q_segments is not None or call.keep is not None
    if dynamic:
        found = _kinds_at_run_time(call, jnp.asarray(kinds, jnp.int32), table.grid)  # [B or 1, H or 1, num_q, num_k]
        shape = found.shape
        tables = [jnp.broadcast_to(jnp.asarray(a, jnp.int32)[None], shape).reshape(-1, *shape[2:]) for a in tables[1:]]
        tables = [found.reshape(-1, *shape[2:]), *tables]
    tables = [_by_chunks(one, _blocks_per_chunk(config, table)) for one in tables]
    steps = block_list(*tables, stationary="q", most=plan.steps)
    tiling = Tiling(
        call,
        config,
        has_full=bool((table.kinds == FULL).any()),
        has_partial=dynamic or bool((tables[0] == PARTIAL).any()),
        only_full=not dynamic and bool(((steps.flags >> KIND_SHIFT) & 3 == FULL).all()),
    )
    return tiling, plan, steps


def _by_chunks(array: Any, blocks: int) -> Any:
    """[lists, num_q, num_k] as [lists * chunks, num_q, blocks]: the last chunk is filled up with empty blocks."""
    chunks = -(-array.shape[2] // blocks)
    if chunks == 1 and blocks == array.shape[2]:
        return array
    xp = np if isinstance(array, np.ndarray) else jnp
    padded = xp.pad(array, ((0, 0), (0, 0), (0, chunks * blocks - array.shape[2])))
    split = padded.reshape(*array.shape[:2], chunks, blocks).swapaxes(1, 2)
    return split.reshape(-1, array.shape[1], blocks)


def _kinds_at_run_time(call: AttentionCall, kinds: jax.Array, grid: Grid) -> jax.Array:
    """Kinds of blocks with segments and a mask array taken into account: [B or 1, H or 1, num_q, num_k]."""
    found = kinds[None]
    if call.q_segments is not None and call.kv_segments is not None:
        found = jnp.minimum(found, segment_kinds(call.q_segments, call.kv_segments, grid)[:, None])
    if call.keep is not None:
        keep = pad_to(pad_to(call.keep, 2, grid.block_q), 3, grid.block_k)
        shape = (*keep.shape[:2], grid.num_q, grid.block_q, grid.num_k, grid.block_k)
        some, every = (f(keep.reshape(shape), axis=(3, 5)) for f in (jnp.any, jnp.all))
        found = jnp.minimum(found, jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)))
    return found


def logit_blocks(call: AttentionCall, config: TpuConfig, at: Callable[..., Any]) -> dict[str, Block | None]:
    """The blocks of what logits depend on besides q and k; None for what the call does not have. See `logit_arrays`.

    `at` makes an index map from a function of batch, head, block of q, block of k and number of contents.
    """
    block_q, block_k = config.block_q, config.block_k
    dense = _contents(call, _table(call, config)) is not None
    blocks: dict[str, Block | None] = dict.fromkeys(("bias", "contents", "q_ids", "kv_ids", "keep"))
    if call.bias is not None:
        own = tuple(size > 1 for size in call.bias.shape[:3])
        blocks["bias"] = Block(
            (None, None, block_k, block_q if own[2] else 1),
            jnp.float32,
            at(lambda b, h, i, j, c: (b if own[0] else 0, h if own[1] else 0, j, i if own[2] else 0)),
        )
    if dense:
        blocks["contents"] = Block((None, block_k, block_q), jnp.int8, at(lambda b, h, i, j, c: (c, 0, 0)))
    if call.q_segments is not None:
        blocks["q_ids"] = Block((None, 1, block_q), jnp.int32, at(lambda b, h, i, j, c: (b, 0, i)))
        blocks["kv_ids"] = Block((None, block_k, 1), jnp.int32, at(lambda b, h, i, j, c: (b, j, 0)))
    if call.keep is not None:
        each = tuple(size > 1 for size in call.keep.shape[:2])
        blocks["keep"] = Block(
            (None, None, block_k, block_q),
            jnp.int8,
            at(lambda b, h, i, j, c: (b if each[0] else 0, h if each[1] else 0, j, i)),
        )
    return blocks


def logit_arrays(call: AttentionCall, config: TpuConfig) -> dict[str, jax.Array]:
    """The arrays of `logit_blocks`: bias, contents of partial blocks, segments, mask array; transposed and padded."""
    block_q, block_k = config.block_q, config.block_k
    arrays = {}
    if call.bias is not None:
        bias = call.bias.astype(jnp.float32) * LOG2_E
        bias = pad_to(bias.swapaxes(2, 3), 2, block_k)  # [B or 1, H or 1, S, T or 1]
        arrays["bias"] = pad_to(bias, 3, block_q) if call.bias.shape[2] > 1 else bias
    contents = _contents(call, _table(call, config))
    if contents is not None:
        arrays["contents"] = jnp.asarray(contents.swapaxes(1, 2).astype(np.int8))  # [n, block_k, block_q]
    if call.q_segments is not None and call.kv_segments is not None:
        arrays["q_ids"] = pad_to(call.q_segments, 1, block_q)[:, None, :]  # [B, 1, T]
        arrays["kv_ids"] = pad_to(call.kv_segments, 1, block_k)[:, :, None]  # [B, S, 1]
    if call.keep is not None:
        keep = call.keep.astype(jnp.int8).swapaxes(2, 3)
        arrays["keep"] = pad_to(pad_to(keep, 2, block_k), 3, block_q)  # [B or 1, H or 1, S, T]
    return arrays


@dataclass(frozen=True)
class LogitRefs:
    """The refs of `logit_blocks`; None for what the call does not have."""

    bias: Any  # [block_k, block_q or 1]
    contents: Any  # [block_k, block_q]
    q_ids: Any  # [1, block_q]
    kv_ids: Any  # [block_k, 1]
    keep: Any  # [block_k, block_q]


@dataclass(frozen=True)
class Step:
    """The scalars of one step of a block list."""

    i: Any
    j: Any
    flags: Any

    @staticmethod
    def read(coordinates_ref: Any, flags_ref: Any, number: Any) -> "Step":
        coordinates = coordinates_ref[number]
        return Step(coordinates >> 16, coordinates & 0xFFFF, flags_ref[number])

    def has(self, flag: int) -> Any:
        return (self.flags & flag) != 0

    @property
    def kind(self) -> Any:
        return (self.flags >> KIND_SHIFT) & 3

    @property
    def tiles(self) -> tuple[Any, Any]:
        return (self.flags >> TILE_FIRST_SHIFT) & 63, (self.flags >> TILE_END_SHIFT) & 63

    @property
    def content(self) -> Any:
        return self.flags >> CONTENT_SHIFT


def logits_tile(
    tiling: Tiling, products: jax.Array, refs: LogitRefs, step: Step, keys: Any, queries: slice, *, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits in units of log 2, [tile_k, tile_q], from the products k q^T; and tanh where there is a soft cap."""
    call, slope = tiling.call, None
    if call.soft_cap is None:
        logits = products * (call.scale * LOG2_E)
    else:
        slope = jnp.tanh(products * (call.scale / call.soft_cap))
        logits = slope * (call.soft_cap * LOG2_E)
    if refs.bias is not None:
        logits = logits + (refs.bias[keys, queries] if refs.bias.shape[1] > 1 else refs.bias[keys, :])
    if masked:
        allowed = _allowed(tiling, refs, step, keys, queries)
        logits = jnp.where(allowed, logits, MASKED) if allowed is not None else logits
    return logits, slope


def _allowed(tiling: Tiling, refs: LogitRefs, step: Step, keys: Any, queries: slice) -> jax.Array | None:
    """Which pairs of a tile attend, [tile_k, tile_q]."""
    call, config = tiling.call, tiling.config
    conditions = []
    columns = step.j * config.block_k + keys.start + jax.lax.broadcasted_iota(jnp.int32, (config.tile_k, 1), 0)
    if call.mask is not None and call.mask.computable:
        rows = step.i * config.block_q + queries.start + jax.lax.broadcasted_iota(jnp.int32, (1, config.tile_q), 1)
        conditions.append(call.mask.keep(rows, columns, call.q_offset))
    if tiling.ragged_keys:
        conditions.append(jnp.broadcast_to(columns < call.k.shape[1], (config.tile_k, config.tile_q)))
    for ref in (refs.contents, refs.keep):
        if ref is not None:
            conditions.append(ref[keys, queries].astype(jnp.int32) != 0)
    if refs.q_ids is not None:
        conditions.append(refs.kv_ids[keys, :] == refs.q_ids[:, queries])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def for_tiles(tiling: Tiling, step: Step, units: Callable[[list[tuple[Any, slice]], bool], None]) -> None:
    """Calls `units` with (keys, queries) slices of the tiles of a step, and whether they need a mask.

    A full block is one call with all its tiles, so that products and exponentials of different tiles overlap. A partial
    block is a loop over the tiles of keys that are not empty. Both are loops whose counts are data, the first of one or
    none: what the schedule reader then shows is one pass of each.
    """
    config = tiling.config
    queries = [slice(start, start + config.tile_q) for start in range(0, config.block_q, config.tile_q)]
    num = config.block_k // config.tile_k

    def whole(index: Any, _: None) -> None:
        units([(slice(n * config.tile_k, (n + 1) * config.tile_k), c) for n in range(num) for c in queries], False)

    def masked(index: Any, _: None) -> None:
        keys = pl.ds(pl.multiple_of(index * config.tile_k, config.tile_k), config.tile_k)
        units([(keys, c) for c in queries], True)

    if tiling.only_full:
        whole(0, None)
        return
    if tiling.has_full:
        jax.lax.fori_loop(0, jnp.where(step.kind == FULL, 1, 0), whole, None)
    if tiling.has_partial:
        first, end = step.tiles
        jax.lax.fori_loop(first, jnp.where(step.kind == PARTIAL, end, first), masked, None)


def pipelined(
    units: list[Any],
    begin: Callable[[Any], tuple[Any, ...]],
    compute: Callable[..., tuple[Any, ...]],
    finish: Callable[..., None],
) -> None:
    """Takes each unit through three stages, in an order that overlaps them: the next unit's first stage is issued
    before this unit's second, and the last unit's third after that.

    The compiler keeps to the order in which products are issued, so that order is what hides one unit's exponentials
    behind another's products.
    """
    ahead: Any = begin(units[0])
    behind: Any = None
    for number, unit in enumerate(units):
        here = ahead
        if number + 1 < len(units):
            ahead = begin(units[number + 1])
        if behind is not None:
            finish(*behind)
        behind = (unit, *compute(unit, *here))
    finish(*behind)
