"""The blocks of a mask: which of them are empty, full or partial, and the list of blocks that a kernel visits.

`block_table` evaluates a mask once per grid of blocks: the kind of each block, and the contents of the partial ones,
with equal contents stored once. `block_list` turns the kinds into the steps of a kernel: the blocks that are not empty,
in order of the stationary block. Both depend on the mask alone, so they are made when a call is traced. Where segments
or a mask array change from call to call, `block_list` runs inside the program, over the same arrays in jax.

A step is two integers, which kernels receive as prefetched scalars:

    coordinates = block of q << 16 | block of k
    flags = FIRST | LAST | kind << 2 | first tile << 4 | end of tiles << 10 | contents << 16

FIRST and LAST mark the first and last step of a stationary block, where its accumulators start and its results are
written. A stationary block without work has one step of kind EMPTY, which writes its zeros. Tiles divide the streamed
block; those outside [first, end) are masked completely.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.axes import Size

EMPTY, PARTIAL, FULL = 0, 1, 2

FIRST, LAST = 1, 2
KIND_SHIFT, TILE_FIRST_SHIFT, TILE_END_SHIFT, CONTENT_SHIFT = 2, 4, 10, 16
MOST_TILES = 63
MOST_CONTENTS = 2**15 - 1
MOST_BLOCKS = 2**15 - 1
_ROWS_AT_A_TIME = 128


@dataclass(frozen=True)
class Grid:
    """T queries by S keys in blocks. The last block of an axis may be cut off by its end."""

    t: Size
    s: Size
    block_q: int
    block_k: int
    q_offset: int = 0

    @property
    def num_q(self) -> Size:
        return -(-self.t // self.block_q)

    @property
    def num_k(self) -> Size:
        return -(-self.s // self.block_k)

    def bounds(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """First and last row [num_q, 1], first and last column [1, num_k] of each block."""
        q_first = np.arange(self.num_q, dtype=np.int64)[:, None] * self.block_q
        k_first = np.arange(self.num_k, dtype=np.int64)[None, :] * self.block_k
        return (
            q_first,
            np.minimum(q_first + self.block_q, self.t) - 1,
            k_first,
            np.minimum(k_first + self.block_k, self.s) - 1,
        )


@runtime_checkable
class Predicate(Protocol):
    """What a block table needs of a mask (`tilewright.masks.algebra.Mask`, which documents the methods)."""

    def keep(self, rows: Any, columns: Any, q_offset: int = 0, head: int = 0) -> Any: ...

    def kinds(self, grid: Grid) -> np.ndarray: ...

    def signature(self, grid: Grid, head: int, i: int, j: int) -> Any: ...


@dataclass(frozen=True)
class BlockTable:
    """A mask over a grid of blocks."""

    grid: Grid
    kinds: np.ndarray
    """EMPTY, PARTIAL or FULL, [1 or heads, num_q, num_k]; exact."""
    content: np.ndarray
    """The index into `contents` of each partial block, [1 or heads, num_q, num_k]; 0 elsewhere."""
    contents: np.ndarray
    """The distinct partial blocks, [n, block_q, block_k] bool; False past the ends of the axes."""

    @property
    def kinds_to_the_end(self) -> np.ndarray:
        """`kinds`, where the last block of keys is partial if the keys end inside of it, instead of full."""
        if self.grid.s % self.grid.block_k == 0:
            return self.kinds
        last = self.kinds[:, :, -1:]
        return np.concatenate([self.kinds[:, :, :-1], np.where(last == FULL, PARTIAL, last)], axis=2)

    def every_content(self) -> tuple[np.ndarray, np.ndarray]:
        """`contents` and behind them a full and an empty block; and the index of each block's contents among these."""
        block, count = (1, *self.contents.shape[1:]), len(self.contents)
        which = np.where(self.kinds == FULL, count, np.where(self.kinds == EMPTY, count + 1, self.content))
        return np.concatenate([self.contents, np.ones(block, bool), np.zeros(block, bool)]), which

    @property
    def visited(self) -> int:
        """The number of blocks that are not empty, over all heads."""
        return int((self.kinds != EMPTY).sum())

    @property
    def density(self) -> float:
        """The share of the T x S pairs that attend."""
        q_first, q_last, k_first, k_last = self.grid.bounds()
        area = (q_last - q_first + 1) * (k_last - k_first + 1)  # [num_q, num_k]
        inside = self.contents.sum((1, 2)) if len(self.contents) else np.zeros(1, np.int64)
        kept = np.where(self.kinds == FULL, area[None], np.where(self.kinds == PARTIAL, inside[self.content], 0))
        return float(kept.sum()) / (self.kinds.shape[0] * self.grid.t * self.grid.s)

    def tiles(self, axis: Literal["q", "k"], tile: int) -> tuple[np.ndarray, np.ndarray]:
        """First and end of the tiles along an axis of each block that are not empty, [1 or heads, num_q, num_k]."""
        block = self.grid.block_q if axis == "q" else self.grid.block_k
        num = block // tile
        some = self.contents.any(2 if axis == "q" else 1)  # [n, block]
        some = some.reshape(len(some), num, tile).any(2)  # [n, tiles]
        if not len(some):
            some = np.ones((1, num), bool)
        first, end = some.argmax(1), num - some[:, ::-1].argmax(1)
        partial = self.kinds == PARTIAL
        return np.where(partial, first[self.content], 0), np.where(partial, end[self.content], num)


@functools.lru_cache(maxsize=16)
def block_table(mask: Predicate | None, grid: Grid) -> BlockTable:
    """The blocks of a mask. Partial blocks with equal signatures are evaluated once."""
    if mask is None:
        kinds = np.full((1, grid.num_q, grid.num_k), FULL, np.int8)
        return BlockTable(grid, kinds, np.zeros(kinds.shape, np.int32), np.zeros((0, grid.block_q, grid.block_k), bool))
    kinds = np.array(mask.kinds(grid))
    content = np.zeros(kinds.shape, np.int32)
    contents: list[np.ndarray] = []
    by_bytes: dict[bytes, int] = {}
    by_signature: dict[Any, tuple[int, int]] = {}
    for head, i, j in zip(*np.nonzero(kinds == PARTIAL), strict=True):
        head, i, j = int(head), int(i), int(j)
        rows, columns = min(grid.block_q, grid.t - i * grid.block_q), min(grid.block_k, grid.s - j * grid.block_k)
        signature = (mask.signature(grid, head, i, j), rows, columns)
        if signature not in by_signature:
            block = np.zeros((grid.block_q, grid.block_k), bool)
            # A few rows at a time: the positions of a whole block would take eight times the memory of its mask.
            for start in range(0, rows, _ROWS_AT_A_TIME):
                some = np.arange(start, min(start + _ROWS_AT_A_TIME, rows), dtype=np.int32)[:, None]
                block[some[:, 0], :columns] = mask.keep(
                    i * grid.block_q + some,
                    j * grid.block_k + np.arange(columns, dtype=np.int32)[None, :],
                    grid.q_offset,
                    head,
                )
            inside = block[:rows, :columns]
            kind = FULL if inside.all() else PARTIAL if inside.any() else EMPTY
            number = 0
            if kind == PARTIAL:
                number = by_bytes.setdefault(np.packbits(block).tobytes(), len(contents))
                if number == len(contents):
                    contents.append(block)
            by_signature[signature] = (kind, number)
        kinds[head, i, j], content[head, i, j] = by_signature[signature]
    stacked = np.stack(contents) if contents else np.zeros((0, grid.block_q, grid.block_k), bool)
    return BlockTable(grid, kinds, content, stacked)


def segment_kinds(q_segments: jax.Array, kv_segments: jax.Array, grid: Grid) -> jax.Array:
    """Kinds of blocks by segment ids [B, T] and [B, S], in jax: [B, num_q, num_k]. Disjoint ranges of ids are empty."""
    q_ids, kv_ids = _id_blocks(q_segments, grid.block_q), _id_blocks(kv_segments, grid.block_k)
    q_least, q_most = (f(q_ids, axis=2)[:, :, None] for f in (jnp.min, jnp.max))
    k_least, k_most = (f(kv_ids, axis=2)[:, None, :] for f in (jnp.min, jnp.max))
    one = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    apart = (q_most < k_least) | (k_most < q_least)
    return jnp.where(apart, EMPTY, jnp.where(one, FULL, PARTIAL))


def _id_blocks(ids: jax.Array, block: int) -> jax.Array:
    """[B, T] as [B, num, block], with the last id repeated past the end."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return padded.reshape(ids.shape[0], -1, block)


@dataclass(frozen=True)
class BlockList:
    """The steps of a kernel, flat: [lists * steps]. There is one list per head, per batch and head, or for all."""

    coordinates: Any
    flags: Any
    steps: int
    """The steps of each list."""


def block_list(
    kinds: Any, content: Any, tile_first: Any, tile_end: Any, *, stationary: Literal["q", "k"], most: int | None = None
) -> BlockList:
    """The steps for each table of blocks [lists, num_q, num_k], in order of the stationary block; numpy or jax.

    `most` bounds the steps where the kinds are known only at run time.
    """
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    lists = kinds.shape[0]
    flat = [_in_order(xp.asarray(a), stationary) for a in (kinds, content, tile_first, tile_end)]
    kind, content, tile_first, tile_end = (xp.broadcast_to(a, (lists, *a.shape[1:])) for a in flat)
    # Every stationary block has a step, an empty one where it has no work.
    idle = xp.logical_not(xp.any(kind != EMPTY, axis=2))  # [lists, stationary]
    first_of_row = xp.arange(kind.shape[2]) == 0
    visited = (kind != EMPTY) | (idle[:, :, None] & first_of_row[None, None, :])
    visited = visited.reshape(lists, -1)
    count = xp.sum(visited, axis=1, keepdims=True)  # [lists, 1]
    steps = most if most is not None else int(count.max())
    order = xp.argsort(xp.logical_not(visited), axis=1, stable=True)[:, :steps]
    number = xp.arange(steps)[None, :]
    live = number < count  # [lists, steps]
    # Steps past the end repeat the last block of the list: nothing is fetched for them.
    last = xp.take_along_axis(order, xp.minimum(count - 1, steps - 1), axis=1)
    order = xp.where(live, order, last)

    streamed = kind.shape[2]
    row, column = order // streamed, order % streamed
    new_row = xp.concatenate([xp.ones_like(live[:, :1]), row[:, 1:] != row[:, :-1]], axis=1)
    end_of_row = xp.concatenate([row[:, 1:] != row[:, :-1], xp.ones_like(live[:, :1])], axis=1)
    end_of_row = end_of_row | (number == count - 1)

    def picked(array: Any) -> Any:
        return xp.take_along_axis(array.reshape(lists, -1), order, axis=1)

    kind_here = xp.where(live, picked(kind), EMPTY)
    # A step without contents of its own names those of the step before it, so that none are fetched.
    source = xp.where(kind_here == PARTIAL, xp.broadcast_to(number, kind_here.shape), 0)
    source = _running_max(xp, source)
    contents = xp.take_along_axis(xp.where(kind_here == PARTIAL, picked(content), 0), source, axis=1)
    flags = (
        xp.where(live & new_row, FIRST, 0)
        | xp.where(live & end_of_row, LAST, 0)
        | (kind_here.astype(np.int32) << KIND_SHIFT)
        | (picked(tile_first).astype(np.int32) << TILE_FIRST_SHIFT)
        | (picked(tile_end).astype(np.int32) << TILE_END_SHIFT)
        | (contents.astype(np.int32) << CONTENT_SHIFT)
    )
    q_block, k_block = (row, column) if stationary == "q" else (column, row)
    coordinates = (q_block << 16) | k_block
    return BlockList(coordinates.astype(np.int32).reshape(-1), flags.astype(np.int32).reshape(-1), steps)


def _in_order(array: Any, stationary: str) -> Any:
    return array if stationary == "q" else array.swapaxes(1, 2)


def _running_max(xp: ModuleType, array: Any) -> Any:
    return np.maximum.accumulate(array, axis=1) if xp is np else jax.lax.cummax(array, axis=1)
