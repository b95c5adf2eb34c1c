"""What a kernel visits: the blocks of a mask, and the list of work that is prefetched as scalars.

`block_table` looks at a mask once for each grid: which blocks are empty, full or partial, and the contents of the
partial ones, each different one once. `work_list` turns kinds of blocks into the steps of a kernel: only blocks that are
not empty, in order of the block that stays. Both are of the mask alone, so they are made when a call is traced; where
segments or a mask array change from call to call, `work_list` runs inside of the program, over the same arrays in jax.

A step is two integers, `place` and `flags`:

    place = block of q << 16 | block of k
    flags = FIRST | LAST | kind << 2 | first tile << 4 | end of tiles << 10 | contents << 16

FIRST and LAST are of the block that stays: its accumulators begin and its results are written there. A block that stays
and has no work keeps one step, of kind EMPTY, that writes its zeros. Tiles are the parts of the block that streams; those
outside of [first, end) have nothing to attend to.
"""

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.ops.attention.mask_algebra import EMPTY, FULL, PARTIAL, Grid, Mask

FIRST, LAST = 1, 2
KIND_SHIFT, TILE_FIRST_SHIFT, TILE_END_SHIFT, CONTENT_SHIFT = 2, 4, 10, 16
MOST_TILES = 63
MOST_CONTENTS = 2**15 - 1
MOST_BLOCKS = 2**15 - 1
_ROWS_AT_A_TIME = 128


@dataclass(frozen=True)
class BlockTable:
    """A mask over a grid of blocks."""

    grid: Grid
    kinds: np.ndarray
    """EMPTY, PARTIAL or FULL, [1 or heads, num_q, num_k]; exact."""
    content: np.ndarray
    """Which of `contents` a partial block has, [1 or heads, num_q, num_k]; 0 elsewhere."""
    contents: np.ndarray
    """The different partial blocks, [n, block_q, block_k] bool; False past the ends of the axes."""

    @property
    def visited(self) -> int:
        """Blocks that are not empty, over all heads."""
        return int((self.kinds != EMPTY).sum())

    @property
    def density(self) -> float:
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
def block_table(mask: Mask | None, grid: Grid) -> BlockTable:
    """The blocks of a mask. Of partial blocks that are alike by their signature one is looked at."""
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
            # Some rows at a time: a whole block of positions would be eight times its mask.
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


@dataclass(frozen=True)
class WorkList:
    """The steps of a kernel, flat: [lists * steps]. A list is for one head, or batch and head, or for all."""

    place: Any
    flags: Any
    steps: int
    """Of each list."""


def work_list(
    kinds: Any, content: Any, tile_first: Any, tile_end: Any, *, stays: Literal["q", "k"], most: int | None = None
) -> WorkList:
    """The steps for each list of blocks [lists, num_q, num_k], in order of the block that stays; numpy or jax.

    `most` bounds the steps where the kinds are known only at run time.
    """
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    lists = kinds.shape[0]
    flat = [_in_order(xp.asarray(a), stays) for a in (kinds, content, tile_first, tile_end)]
    kind, content, tile_first, tile_end = (xp.broadcast_to(a, (lists, *a.shape[1:])) for a in flat)
    # Every block that stays has a step, if only an empty one.
    idle = xp.logical_not(xp.any(kind != EMPTY, axis=2))  # [lists, stays]
    first_of_row = xp.arange(kind.shape[2]) == 0
    visited = (kind != EMPTY) | (idle[:, :, None] & first_of_row[None, None, :])
    visited = visited.reshape(lists, -1)
    count = xp.sum(visited, axis=1, keepdims=True)  # [lists, 1]
    steps = most if most is not None else int(count.max())
    order = xp.argsort(xp.logical_not(visited), axis=1, stable=True)[:, :steps]
    number = xp.arange(steps)[None, :]
    live = number < count  # [lists, steps]
    # Steps past the end stay where the list ended: nothing is fetched for them.
    last = xp.take_along_axis(order, xp.minimum(count - 1, steps - 1), axis=1)
    order = xp.where(live, order, last)

    streams = kind.shape[2]
    row, column = order // streams, order % streams
    new_row = xp.concatenate([xp.ones_like(live[:, :1]), row[:, 1:] != row[:, :-1]], axis=1)
    end_of_row = xp.concatenate([row[:, 1:] != row[:, :-1], xp.ones_like(live[:, :1])], axis=1)
    end_of_row = end_of_row | (number == count - 1)

    def picked(array: Any) -> Any:
        return xp.take_along_axis(array.reshape(lists, -1), order, axis=1)

    kind_here = xp.where(live, picked(kind), EMPTY)
    # A step without contents of its own keeps those that are there already, so that none are fetched for it.
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
    q_block, k_block = (row, column) if stays == "q" else (column, row)
    place = (q_block << 16) | k_block
    return WorkList(place.astype(np.int32).reshape(-1), flags.astype(np.int32).reshape(-1), steps)


def _in_order(array: Any, stays: str) -> Any:
    return array if stays == "q" else array.swapaxes(1, 2)


def _running_max(xp: ModuleType, array: Any) -> Any:
    return np.maximum.accumulate(array, axis=1) if xp is np else jax.lax.cummax(array, axis=1)
