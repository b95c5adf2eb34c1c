"""Block lists of grouped products: which group and which block of rows a step of the grid works on.

Blocks of rows lie at multiples of block_m, wherever groups begin. A block that has rows of several groups is visited
once per group, one visit after the other, and a visit works on the rows [first, end) of its group. So cdiv(M, block_m)
blocks and G groups have at most cdiv(M, block_m) + G - 1 visits: the grid has that many, and those left over repeat the
blocks of the last visit, so that nothing is copied for them, and do nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

NAMES = ("group", "block", "source", "first", "end", "opens", "closes")
"""The arrays of a block list, each int32 [visits], in the order of the kernels' prefetched arguments:

group    the matrix of the visit. A visit without rows repeats the one before: it costs no copy.
block    its block of rows of the result.
source   the block of rows of x; that of the visit before where there are no rows.
first    the first row of its group, counted from the beginning of the block.
end      the end of its rows, counted so; 0 where it has none.
opens    1 at the first visit of what stays in VMEM: the block of y, or the group's dw.
closes   1 at the last such visit.
"""


def num_visits(m: int, groups: int, block_m: int) -> int:
    return pl.cdiv(m, block_m) + groups - 1


def visits_of_rows(starts: jax.Array, m: int, block_m: int) -> dict[str, jax.Array]:
    """The visits of y [M, N], from the starts of the groups [G + 1]: every block of rows has at least one."""
    blocks, groups = pl.cdiv(m, block_m), starts.shape[0] - 1
    nonempty = starts[1:] > starts[:-1]
    begin, counts = starts[:-1] // block_m, _blocks_of(starts, block_m)
    covered = (starts[-1:] + block_m - 1) // block_m  # [1]: the blocks that have rows of groups
    # What follows the last group is visited as a group of its own, without rows.
    begin, counts = jnp.concatenate([begin, covered]), jnp.concatenate([counts, blocks - covered])
    number, own, block = _enumerated(begin, counts, num_visits(m, groups, block_m))
    rest = own == groups
    last = jnp.max(jnp.where(nonempty, jnp.arange(groups, dtype=jnp.int32), 0))
    total = jnp.sum(counts, dtype=jnp.int32)
    return _visits(
        starts,
        block_m,
        number,
        total,
        jnp.where(rest, last, own),
        block,
        ~rest,
        block,
        jnp.where(rest, covered - 1, block),
    )


def visits_of_groups(starts: jax.Array, m: int, block_m: int) -> dict[str, jax.Array]:
    """The visits of dw [G, K, N]: every group has at least one."""
    groups = starts.shape[0] - 1
    nonempty = starts[1:] > starts[:-1]
    # An empty group takes the block of the row before it, which is in VMEM.
    begin = jnp.where(nonempty, starts[:-1], jnp.maximum(starts[:-1] - 1, 0)) // block_m
    counts = jnp.maximum(_blocks_of(starts, block_m), 1)
    number, own, block = _enumerated(begin, counts, num_visits(m, groups, block_m))
    return _visits(starts, block_m, number, jnp.sum(counts, dtype=jnp.int32), own, block, nonempty[own], own, block)


def _blocks_of(starts: jax.Array, block_m: int) -> jax.Array:
    """The number of blocks that have rows of each group, [G]."""
    begin, end = starts[:-1], starts[1:]
    return jnp.where(end > begin, (end - 1) // block_m - begin // block_m + 1, 0)


def _enumerated(begin: jax.Array, counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The numbers of the visits, and the group and the block of each: group g has `counts` blocks from `begin` on."""
    ends = jnp.cumsum(counts).astype(jnp.int32)
    number = jnp.arange(size, dtype=jnp.int32)
    repeated = jnp.minimum(number, ends[-1] - 1)
    own = jnp.searchsorted(ends, repeated, side="right").astype(jnp.int32)
    return number, own, begin[own] + repeated - (ends - counts)[own]


def _visits(
    starts: jax.Array,
    block_m: int,
    number: jax.Array,
    total: jax.Array,
    group: jax.Array,
    block: jax.Array,
    has_rows: jax.Array,
    stays: jax.Array,
    source: jax.Array,
) -> dict[str, jax.Array]:
    """`stays` numbers what a run of visits has in VMEM."""
    valid = number < total
    active, row = valid & has_rows, block * block_m
    changes = stays[1:] != stays[:-1]
    once = jnp.ones((1,), bool)
    arrays: tuple[Any, ...] = (
        group,
        block,
        jnp.maximum(source, 0),
        jnp.where(active, jnp.maximum(starts[group] - row, 0), 0),
        jnp.where(active, jnp.minimum(starts[group + 1] - row, block_m), 0),
        valid & jnp.concatenate([once, changes]),
        valid & (jnp.concatenate([changes, once]) | (number == total - 1)),
    )
    return {name: array.astype(jnp.int32) for name, array in zip(NAMES, arrays, strict=True)}
