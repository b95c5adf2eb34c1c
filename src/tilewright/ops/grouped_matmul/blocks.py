"""Rows in blocks of one size, each of one group, although the sizes of groups are known only on the device.

A group of s rows has ceil(s / block_m) blocks, so M rows of G groups have at most M // block_m + G of them: that many are
computed, and those past the last group's are empty.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


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
    """int32 [blocks]: the first row of each."""
    end: jax.Array
    """int32 [blocks]: the end of its group."""
    first: jax.Array
    """int32 [G + 1]: the first block of each group, and the number of all."""


def row_tiles(bounds: jax.Array, m: int, block_m: int) -> RowTiles:
    """The blocks of groups that end where the next one begins: `bounds` [G + 1], ascending, at most m."""
    groups = bounds.shape[0] - 1
    counts = (bounds[1:] - bounds[:-1] + block_m - 1) // block_m  # [G]
    first = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts).astype(jnp.int32)])  # [G + 1]
    number = jnp.arange(m // block_m + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(first[1:], number, side="right").astype(jnp.int32), groups - 1)
    return RowTiles(group, bounds[group] + (number - first[group]) * block_m, bounds[group + 1], first)


def row_blocks(starts: jax.Array, m: int, block_m: int) -> RowBlocks:
    """The blocks of groups that begin at `starts` [G + 1]."""
    groups, tiles = starts.shape[0] - 1, row_tiles(starts, m, block_m)
    # A block past the last one begins past the end of the last group, so it has no rows.
    rows = tiles.start[:, None] + jnp.arange(block_m, dtype=jnp.int32)[None]
    rows = jnp.where(rows < tiles.end[:, None], rows, m)
    row = jnp.arange(m, dtype=jnp.int32)
    of_row = jnp.searchsorted(starts[1:], row, side="right").astype(jnp.int32)
    in_group, of_row = of_row < groups, jnp.minimum(of_row, groups - 1)
    offset = jnp.where(in_group, row - starts[of_row], 0)
    block = jnp.where(in_group, tiles.first[of_row] + offset // block_m, 0)
    return RowBlocks(tiles.group, rows, block, offset % block_m, in_group)
