"""Rows in blocks of one size, each of one group, although the sizes of groups are known only on the device.

A group of s rows has ceil(s / block_m) blocks, so M rows of G groups have at most M // block_m + G of them: that many are
computed, and those past the last group's are empty.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tilewright.core.axes import Size
from tilewright.ops.grouped_matmul.call import sums_before


@dataclass(frozen=True)
class RowBlocks:
    """Where the blocks lie, as arrays on the device."""

    group: jax.Array
    """int32 [blocks]: the group of each block; G - 1 for empty ones."""
    rows: jax.Array
    """int32 [blocks, block_m]: the rows of each block; M, which is no row, past the end of its group."""
    block: jax.Array
    """int32 [M]: the block that a row is in; 0 for rows past the last group."""
    place: jax.Array
    """int32 [M]: the position of a row in its block."""
    in_group: jax.Array
    """bool [M]: whether a row belongs to a group."""


class RowTiles(NamedTuple):
    """Blocks of rows as arrays on the device; those past the last one are of the last group."""

    group: jax.Array
    """int32 [blocks]"""
    start: jax.Array
    """int32 [blocks]: the first row of each. With an alignment it may be a row of the group before."""
    first: jax.Array
    """int32 [G + 1]: the first block of each group, and the number of all."""


def most_tiles(m: Size, groups: int, block_m: int, alignment: int = 1) -> Size:
    """The blocks that m rows of so many groups can have."""
    return (m + (alignment - 1) * groups) // block_m + groups


def row_tiles(bounds: jax.Array, m: Size, block_m: int, alignment: int = 1) -> RowTiles:
    """The blocks of groups that end where the next one begins: `bounds` [G + 1], ascending, at most m.

    The first block of a group begins at the last multiple of `alignment` that is not after its first row.
    """
    groups = bounds.shape[0] - 1
    begins = bounds[:-1] // alignment * alignment
    counts = jnp.where(bounds[1:] > bounds[:-1], (bounds[1:] - begins + block_m - 1) // block_m, 0)  # [G]
    first = sums_before(counts)  # [G + 1]
    number = jnp.arange(most_tiles(m, groups, block_m, alignment), dtype=jnp.int32)
    # All are compared: a binary search is a loop of small kernels on a GPU.
    group = jnp.searchsorted(first[1:], number, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    return RowTiles(group, begins[group] + (number - first[group]) * block_m, first)


def row_blocks(starts: jax.Array, m: Size, block_m: int) -> RowBlocks:
    """The blocks of groups that begin at `starts` [G + 1]."""
    groups, tiles = starts.shape[0] - 1, row_tiles(starts, m, block_m)
    # A block past the last one begins past the end of the last group, so it has no rows.
    rows = tiles.start[:, None] + jnp.arange(block_m, dtype=jnp.int32)[None]
    rows = jnp.where(rows < starts[tiles.group + 1][:, None], rows, m)
    row = jnp.arange(m, dtype=jnp.int32)
    of_row = jnp.searchsorted(starts[1:], row, side="right").astype(jnp.int32)
    in_group, of_row = of_row < groups, jnp.minimum(of_row, groups - 1)
    offset = jnp.where(in_group, row - starts[of_row], 0)
    block = jnp.where(in_group, tiles.first[of_row] + offset // block_m, 0)
    return RowBlocks(tiles.group, rows, block, offset % block_m, in_group)
