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

from tilewright.core.chip import LANES, Chip
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
    Grid,
    block_list,
    block_table,
    segment_kinds,
)
from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import AttentionTpuBackward, AttentionTpuForward
from tilewright.ops.attention.softmax_rows import LOG2_E, MASKED
from tilewright.pallas.arrays import padded
from tilewright.pallas.tpu.kernel import Block

TpuConfig = AttentionTpuForward | AttentionTpuBackward

# The part of scalar memory that a block list may take; it also holds the kernel's own scalars.
_LIST_BYTES = 768 * 1024
# The compiler takes VMEM of its own, for spills and for tiles that live between passes.
_VMEM_SHARE = 0.8
_WIDE_MXU = 256


def whole_lanes(width: int) -> int:
    """A width padded to whole lanes."""
    return -(-width // LANES) * LANES


def by_lanes(array: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] as [B, T, H * D], with D padded to whole lanes and T to whole blocks."""
    whole = padded(padded(array, 3, LANES), 1, block)
    return whole.reshape(*whole.shape[:2], -1)


def by_heads(array: jax.Array, t: int, h: int, d: int) -> jax.Array:
    """The inverse of `by_lanes`: [B, T, H * D] as [B, T, H, D], without the padding."""
    split = array.reshape(*array.shape[:2], h, -1)
    return split[:, :t, :, :d]


def largest_blocks(
    chip: Chip, call: AttentionCall, config_of: Callable[..., Any], vmem_bytes: Callable[[Any], int]
) -> Any:
    """The config with the largest blocks that leave little of T and S over and fit VMEM; with the smallest if none does.

    `config_of` takes block_q, block_k, tile_q and tile_k. Blocks have up to 1,024 queries and keys where the MXU is wide:
    it waits for the exponentials, so it gets many tiles per step to overlap. A narrow one is busy with fewer, and its
    code for a tile is twice as long.
    """
    wide = chip.mxu_size == _WIDE_MXU and max(call.q.shape[3], call.v.shape[3]) <= 256 and call.q.dtype.itemsize == 2
    largest = 1024 if wide else 512
    while True:
        block_q, block_k = (_even_block(array.shape[1], largest) for array in (call.q, call.k))
        config = config_of(block_q, block_k, _tile_of(block_q, 256), _tile_of(block_k, 512))
        if vmem_bytes(config) <= vmem_budget(chip) or largest == LANES:
            return config
        largest //= 2


def vmem_budget(chip: Chip) -> float:
    return _VMEM_SHARE * (chip.vmem_bytes or 0)


def _even_block(length: int, largest: int) -> int:
    """The size of equal blocks, a multiple of the lanes and `largest` at most, that leave little of a length over."""
    count = -(-length // largest)
    return -(-length // (count * LANES)) * LANES


def _tile_of(block: int, largest: int) -> int:
    """The largest multiple of the lanes that divides the block, `largest` at most."""
    return next(size for size in range(min(block, largest), 0, -LANES) if block % size == 0)


class Plan:
    """The blocks that a kernel visits: lists of steps, one per batch, head and chunk of keys, or shared by them.

    A block of queries is stationary. All but `block_list` and `arrays` follow from the shapes and the mask of a call.
    """

    def __init__(self, call: AttentionCall, config: TpuConfig):
        self.call, self.config = call, config
        self.grid = grid = Grid(call.q.shape[1], call.k.shape[1], config.block_q, config.block_k, call.q_offset)
        self.table = block_table(call.mask, grid)
        self.dynamic = call.q_segments is not None or call.keep is not None
        self.ragged_keys = grid.s % grid.block_k != 0
        self.kinds = kinds = self.table.kinds_to_the_end  # [1 or heads, num_q, num_k]
        # Whether any block may be full, so that it needs no mask, or partial.
        self.has_full = bool((self.table.kinds == FULL).any())
        self.has_partial = self.dynamic or bool((kinds == PARTIAL).any())
        # Whether partial blocks are read, because the mask is not computed from positions.
        self.dense = call.mask is not None and not call.mask.computable and len(self.table.contents) > 0
        chunk_k = getattr(config, "chunk_k", None)
        self.blocks_in_chunk = grid.num_k if chunk_k is None else chunk_k // grid.block_k
        starts = range(0, grid.num_k, self.blocks_in_chunk)
        self.chunks = len(starts)
        # The longest list that these kinds allow, with a step for each block of queries without work.
        each = [np.maximum((kinds[:, :, n : n + self.blocks_in_chunk] != EMPTY).sum(2), 1).sum(1) for n in starts]
        self.steps = int(np.max(each))
        keep_shape = (1, 1) if call.keep is None else call.keep.shape[:2]
        self.per_batch = (call.q.shape[0] if call.q_segments is not None else keep_shape[0]) > 1
        self.per_head = max(kinds.shape[0], keep_shape[1]) > 1

    @property
    def lists(self) -> int:
        b, _, h, _ = self.call.q.shape
        return (b if self.per_batch else 1) * (h if self.per_head else 1) * self.chunks

    def misfit(self) -> str | None:
        """Why the block list does not fit scalar memory, with the way out; or None."""
        size, blocks = 8 * self.lists * self.steps, max(self.grid.num_q, self.grid.num_k)
        if size <= _LIST_BYTES and blocks <= MOST_BLOCKS and len(self.table.contents) <= MOST_CONTENTS:
            return None
        return (
            f"its block list of {self.lists} x {self.steps:,} steps needs {size / 1024:,.0f} KiB of scalar memory, and may "
            f"have {_LIST_BYTES / 1024:.0f}; use a larger block_q and block_k, or implementation='xla'"
        )

    def read(self, b: Any, h: Any, chunk: Any, n: Any, coordinates_ref: Any, flags_ref: Any) -> "Step":
        """Step n of the list of a batch, a head and a chunk."""
        heads = self.call.q.shape[2] if self.per_head else 1
        number = (b if self.per_batch else 0) * heads + (h if self.per_head else 0)
        number = (number * self.chunks + chunk) * self.steps + n
        coordinates = coordinates_ref[number]
        return Step(coordinates >> 16, coordinates & 0xFFFF, flags_ref[number])

    @functools.cached_property
    def block_list(self) -> BlockList:
        # A full block that something else cuts, the end of the keys or segments, has contents of ones.
        content = self.table.every_content()[1] if self.dense else np.zeros_like(self.table.content)
        tables: list[Any] = [self.kinds, content, *self.table.tiles("k", self.config.tile_k)]
        if self.dynamic:
            found = self._kinds_at_run_time()  # [B or 1, H or 1, num_q, num_k]
            every = [found, *(jnp.broadcast_to(jnp.asarray(a, jnp.int32)[None], found.shape) for a in tables[1:])]
            tables = [a.reshape(-1, *a.shape[2:]) for a in every]
        return block_list(*map(self._by_chunks, tables), stationary="q", most=self.steps)

    @property
    def only_full(self) -> bool:
        """Whether every step is a full block: then nothing is under a condition."""
        return not self.dynamic and bool(((self.block_list.flags >> KIND_SHIFT) & 3 == FULL).all())

    def _by_chunks(self, array: Any) -> Any:
        """[lists, num_q, num_k] as [lists * chunks, num_q, blocks]: the last chunk is filled up with empty blocks."""
        missing = self.chunks * self.blocks_in_chunk - array.shape[2]
        if self.chunks == 1 and not missing:
            return array
        xp = np if isinstance(array, np.ndarray) else jnp
        whole = xp.pad(array, ((0, 0), (0, 0), (0, missing)))
        split = whole.reshape(*array.shape[:2], self.chunks, self.blocks_in_chunk).swapaxes(1, 2)
        return split.reshape(-1, array.shape[1], self.blocks_in_chunk)

    def _kinds_at_run_time(self) -> jax.Array:
        """Kinds of blocks with segments and a mask array taken into account: [B or 1, H or 1, num_q, num_k]."""
        call, grid, found = self.call, self.grid, jnp.asarray(self.kinds, jnp.int32)[None]
        if call.q_segments is not None and call.kv_segments is not None:
            found = jnp.minimum(found, segment_kinds(call.q_segments, call.kv_segments, grid)[:, None])
        if call.keep is not None:
            keep = padded(padded(call.keep, 2, grid.block_q), 3, grid.block_k)
            shape = (*keep.shape[:2], grid.num_q, grid.block_q, grid.num_k, grid.block_k)
            some, every = (f(keep.reshape(shape), axis=(3, 5)) for f in (jnp.any, jnp.all))
            found = jnp.minimum(found, jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)))
        return found

    def logit_blocks(self, at: Callable[..., Any]) -> dict[str, Block | None]:
        """The blocks of what logits depend on besides q and k; None for what the call does not have. See `arrays`.

        `at` makes an index map from a function of batch, head, block of q, block of k and number of contents.
        """
        call, block_q, block_k = self.call, self.config.block_q, self.config.block_k
        blocks: dict[str, Block | None] = dict.fromkeys(("bias", "contents", "q_ids", "kv_ids", "keep"))
        if call.bias is not None:
            own = tuple(size > 1 for size in call.bias.shape[:3])
            blocks["bias"] = Block(
                (None, None, block_k, block_q if own[2] else 1),
                jnp.float32,
                at(lambda b, h, i, j, c: (b if own[0] else 0, h if own[1] else 0, j, i if own[2] else 0)),
            )
        if self.dense:
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

    def arrays(self) -> dict[str, jax.Array]:
        """What both kernels take: the block list, q, k and v, and the arrays of `logit_blocks`, transposed and padded."""
        call, block_q, block_k = self.call, self.config.block_q, self.config.block_k
        arrays = {
            "coordinates": jnp.asarray(self.block_list.coordinates),
            "flags": jnp.asarray(self.block_list.flags),
            "q": by_lanes(call.q, block_q),
            "k": by_lanes(call.k, block_k),
            "v": by_lanes(call.v, block_k),
        }
        if call.bias is not None:
            bias = call.bias.astype(jnp.float32) * LOG2_E
            bias = padded(bias.swapaxes(2, 3), 2, block_k)  # [B or 1, H or 1, S, T or 1]
            arrays["bias"] = padded(bias, 3, block_q) if call.bias.shape[2] > 1 else bias
        if self.dense:
            contents = self.table.every_content()[0][:-1]  # No block that is visited is empty.
            arrays["contents"] = jnp.asarray(contents.swapaxes(1, 2).astype(np.int8))  # [n, block_k, block_q]
        if call.q_segments is not None and call.kv_segments is not None:
            arrays["q_ids"] = padded(call.q_segments, 1, block_q)[:, None, :]  # [B, 1, T]
            arrays["kv_ids"] = padded(call.kv_segments, 1, block_k)[:, :, None]  # [B, S, 1]
        if call.keep is not None:
            keep = call.keep.astype(jnp.int8).swapaxes(2, 3)
            arrays["keep"] = padded(padded(keep, 2, block_k), 3, block_q)  # [B or 1, H or 1, S, T]
        return arrays


@dataclass(frozen=True)
class LogitRefs:
    """The refs of `Plan.logit_blocks`; None for what the call does not have."""

    bias_ref: Any  # [block_k, block_q or 1]
    contents_ref: Any  # [block_k, block_q]
    q_ids_ref: Any  # [1, block_q]
    kv_ids_ref: Any  # [block_k, 1]
    keep_ref: Any  # [block_k, block_q]


@dataclass(frozen=True)
class Step:
    """The scalars of one step of a block list."""

    i: Any
    j: Any
    flags: Any

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
    plan: Plan, products: jax.Array, refs: LogitRefs, step: Step, keys: Any, queries: slice, *, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits in units of log 2, [tile_k, tile_q], from the products k q^T; and tanh where there is a soft cap."""
    call, slope = plan.call, None
    if call.soft_cap is None:
        logits = products * (call.scale * LOG2_E)
    else:
        slope = jnp.tanh(products * (call.scale / call.soft_cap))
        logits = slope * (call.soft_cap * LOG2_E)
    if refs.bias_ref is not None:
        logits = logits + (refs.bias_ref[keys, queries] if refs.bias_ref.shape[1] > 1 else refs.bias_ref[keys, :])
    if masked:
        allowed = _allowed(plan, refs, step, keys, queries)
        logits = jnp.where(allowed, logits, MASKED) if allowed is not None else logits
    return logits, slope


def _allowed(plan: Plan, refs: LogitRefs, step: Step, keys: Any, queries: slice) -> jax.Array | None:
    """Which pairs of a tile attend, [tile_k, tile_q]."""
    call, config = plan.call, plan.config
    conditions = []
    columns = step.j * config.block_k + keys.start + jax.lax.broadcasted_iota(jnp.int32, (config.tile_k, 1), 0)
    if call.mask is not None and call.mask.computable:
        rows = step.i * config.block_q + queries.start + jax.lax.broadcasted_iota(jnp.int32, (1, config.tile_q), 1)
        conditions.append(call.mask.keep(rows, columns, call.q_offset))
    if plan.ragged_keys:
        conditions.append(jnp.broadcast_to(columns < call.k.shape[1], (config.tile_k, config.tile_q)))
    for ref in (refs.contents_ref, refs.keep_ref):
        if ref is not None:
            conditions.append(ref[keys, queries].astype(jnp.int32) != 0)
    if refs.q_ids_ref is not None:
        conditions.append(refs.kv_ids_ref[keys, :] == refs.q_ids_ref[:, queries])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def key_tile(start: Any, size: int) -> Any:
    """The slice of a tile of keys, whose start may be known only at run time."""
    return slice(start, start + size) if isinstance(start, int) else pl.ds(pl.multiple_of(start, size), size)


def query_tiles(config: TpuConfig) -> list[slice]:
    """The tiles of a block of queries."""
    return [slice(start, start + config.tile_q) for start in range(0, config.block_q, config.tile_q)]


def for_tiles(
    plan: Plan,
    step: Step,
    units: Callable[[list[tuple[Any, slice]], bool], None],
    full_block: Callable[[], None] | None = None,
) -> None:
    """Calls `units` with (keys, queries) slices of the tiles of a step, and whether they need a mask.

    A full block is one call with all its tiles, so that products and exponentials of different tiles overlap; or it is a
    call of `full_block`, where that is given. A partial block is a loop over the tiles of keys that are not empty. Both are
    loops whose counts are data, the first of one or none: what the schedule reader then shows is one pass of each.
    """
    config = plan.config
    queries = query_tiles(config)

    def whole(index: Any, _: None) -> None:
        if full_block is not None:
            full_block()
            return
        starts = range(0, config.block_k, config.tile_k)
        units([(key_tile(start, config.tile_k), c) for start in starts for c in queries], False)

    def masked(index: Any, _: None) -> None:
        units([(key_tile(index * config.tile_k, config.tile_k), c) for c in queries], True)

    if plan.only_full:
        whole(0, None)
        return
    if plan.has_full:
        jax.lax.fori_loop(0, jnp.where(step.kind == FULL, 1, 0), whole, None)
    if plan.has_partial:
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
