"""What the TPU kernels of attention share: how a call lies in memory, its work list, and tiles of logits.

Layout: [B, T, H, D] is taken as [B, T, H * D], whose blocks of D lanes are heads; a projection writes just that, so no
transpose is needed. D is padded to whole lanes, T and S to whole blocks.

Tiles are transposed, [keys, queries]. So the statistics of a query are a row of lanes: they are reduced over sublanes,
which takes no cross-lane unit, and stored without padding. Logits are in units of log 2, for exp2.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.core.chip import LANES
from tilewright.ops.attention.gradient import Operands, Settings
from tilewright.ops.attention.mask_algebra import EMPTY, FULL, PARTIAL, Grid, Mask
from tilewright.ops.attention.plan import (
    CONTENT_SHIFT,
    KIND_SHIFT,
    TILE_END_SHIFT,
    TILE_FIRST_SHIFT,
    WorkList,
    block_table,
    work_list,
)
from tilewright.ops.attention.reference import MASKED_BELOW

LOG2_E = math.log2(math.e)
# Far below MASKED_BELOW, where the maximum of a row begins: what is masked has a weight of 0 even in a row of nothing else.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
LOWEST = MASKED_BELOW * LOG2_E


def dot_f32(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A and b contracted over one axis each; accumulated in float32, and multiplied in it where they are float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def pad_to(array: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    return jnp.pad(array, [(0, missing if a == axis else 0) for a in range(array.ndim)])


def by_lanes(array: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] as [B, T, H * D], with D padded to whole lanes and T to whole blocks."""
    padded = pad_to(pad_to(array, 3, LANES), 1, block)
    return padded.reshape(*padded.shape[:2], -1)


def by_heads(array: jax.Array, t: int, h: int, d: int) -> jax.Array:
    """The other way round: [B, T, H * D] as [B, T, H, D], without the padding."""
    split = array.reshape(*array.shape[:2], h, -1)
    return split[:, :t, :, :d]


@dataclass(frozen=True)
class Tiling:
    """Blocks and tiles of one kernel, static."""

    t: int
    s: int
    block_q: int
    block_k: int
    tile_q: int
    tile_k: int
    settings: Settings
    has_full: bool
    """Whether any block may be full, so that it needs no mask."""
    has_partial: bool
    only_full: bool
    """Whether every step is a full block: then nothing stands under a condition."""

    @property
    def ragged_keys(self) -> bool:
        return self.s % self.block_k != 0


@dataclass(frozen=True)
class Extra:
    """An input that some calls have: its name in a kernel, the array, its block, and the block's index."""

    name: str
    array: jax.Array
    block: tuple[int | None, ...]
    index: Callable[[Any, Any, Any, Any, Any], tuple[Any, ...]]
    """From batch, head, block of q, block of k and number of contents."""


@dataclass(frozen=True)
class Work:
    """A work list for the chip, and which list a batch and a head have."""

    steps: WorkList
    per_batch: bool
    per_head: bool
    heads: int
    chunks: int
    """Lists that the keys are cut into."""

    def first_step(self, b: Any, h: Any, chunk: Any) -> Any:
        """Where the list of a batch, a head and a chunk begins."""
        number = (b if self.per_batch else 0) * (self.heads if self.per_head else 1) + (h if self.per_head else 0)
        return (number * self.chunks + chunk) * self.steps.steps


def plan_work(
    operands: Operands, settings: Settings, blocks: tuple[int, int], tiles: tuple[int, int], chunk_k: int | None = None
) -> tuple[Tiling, Work, list[Extra]]:
    """The work of a kernel in which a block of queries stays, and the inputs that its masks and bias need."""
    (t, h), s = operands.q.shape[1:3], operands.k.shape[1]
    (block_q, block_k), (tile_q, tile_k) = blocks, tiles
    grid = Grid(t, s, block_q, block_k, settings.q_offset)
    table = block_table(settings.mask, grid)
    kinds, content = table.kinds, table.content
    tile_first, tile_end = table.tiles("k", tile_k)
    dense = settings.mask is not None and not settings.mask.computable and len(table.contents) > 0
    contents = np.concatenate([table.contents, np.ones((1, block_q, block_k), bool)]) if dense else None
    # A full block that something else cuts, the end of the keys or segments, has contents of ones.
    content = np.where(kinds == FULL, len(table.contents), content) if dense else np.zeros_like(content)
    if s % block_k:
        last = kinds[:, :, -1:]
        kinds = np.concatenate([kinds[:, :, :-1], np.where(last == FULL, PARTIAL, last)], axis=2)

    per_head, per_batch = kinds.shape[0] > 1, False
    dynamic = operands.q_segments is not None or operands.keep is not None
    arrays: list[Any] = [kinds, content, tile_first, tile_end]  # each [1 or heads, num_q, num_k]
    steps_at_most = None
    if dynamic:
        steps_at_most = int(_steps(kinds, grid.num_k if chunk_k is None else chunk_k // block_k))
        kinds = _kinds_at_run_time(operands, jnp.asarray(kinds, jnp.int32), grid)  # [B or 1, H or 1, num_q, num_k]
        per_batch, per_head = kinds.shape[0] > 1, kinds.shape[1] > 1
        shape = kinds.shape
        arrays = [jnp.broadcast_to(jnp.asarray(a, jnp.int32)[None], shape).reshape(-1, *shape[2:]) for a in arrays[1:]]
        arrays = [kinds.reshape(-1, *shape[2:]), *arrays]
    chunks = 1
    if chunk_k is not None:
        arrays, chunks = _by_chunks(arrays, chunk_k // block_k)
    steps = work_list(*arrays, stays="q", most=steps_at_most)
    work = Work(steps, per_batch, per_head, h, chunks)
    tiling = Tiling(
        t,
        s,
        block_q,
        block_k,
        tile_q,
        tile_k,
        settings,
        has_full=bool((table.kinds == FULL).any()),
        has_partial=dynamic or bool((arrays[0] == PARTIAL).any()),
        only_full=not dynamic and bool(((steps.flags >> KIND_SHIFT) & 3 == FULL).all()),
    )
    return tiling, work, _extras(operands, tiling, contents)


def _steps(kinds: np.ndarray, blocks: int) -> int:
    """The longest list that the static kinds allow, with a step for each block of queries without work."""
    pieces = [kinds[:, :, start : start + blocks] for start in range(0, kinds.shape[2], blocks)]
    return max(int(np.maximum((piece != EMPTY).sum(2), 1).sum(1).max()) for piece in pieces)


def _by_chunks(arrays: list[Any], blocks: int) -> tuple[list[Any], int]:
    """[lists, num_q, num_k] as [lists * chunks, num_q, blocks]: the keys cut into chunks, the last filled with nothing."""
    chunks = -(-arrays[0].shape[2] // blocks)
    cut = []
    for array in arrays:
        xp = np if isinstance(array, np.ndarray) else jnp
        padded = xp.pad(array, ((0, 0), (0, 0), (0, chunks * blocks - array.shape[2])))
        split = padded.reshape(*array.shape[:2], chunks, blocks).swapaxes(1, 2)
        cut.append(split.reshape(-1, array.shape[1], blocks))
    return cut, chunks


def _kinds_at_run_time(operands: Operands, kinds: jax.Array, grid: Grid) -> jax.Array:
    """Kinds of blocks with segments and a mask array taken into account: [B or 1, H or 1, num_q, num_k]."""
    found = kinds[None]
    if operands.q_segments is not None and operands.kv_segments is not None:
        q_ids = _edge_blocks(operands.q_segments, grid.block_q)
        kv_ids = _edge_blocks(operands.kv_segments, grid.block_k)
        q_least, q_most = (f(q_ids, axis=2)[:, None, :, None] for f in (jnp.min, jnp.max))
        k_least, k_most = (f(kv_ids, axis=2)[:, None, None, :] for f in (jnp.min, jnp.max))
        one = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
        apart = (q_most < k_least) | (k_most < q_least)
        found = jnp.minimum(found, jnp.where(apart, EMPTY, jnp.where(one, FULL, PARTIAL)))
    if operands.keep is not None:
        keep = pad_to(pad_to(operands.keep, 2, grid.block_q), 3, grid.block_k)
        shape = (*keep.shape[:2], grid.num_q, grid.block_q, grid.num_k, grid.block_k)
        some, every = (f(keep.reshape(shape), axis=(3, 5)) for f in (jnp.any, jnp.all))
        found = jnp.minimum(found, jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY)))
    return found


def _edge_blocks(ids: jax.Array, block: int) -> jax.Array:
    """[B, T] as [B, num, block], the last id repeated past the end."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return padded.reshape(ids.shape[0], -1, block)


def _extras(operands: Operands, tiling: Tiling, contents: np.ndarray | None) -> list[Extra]:
    block_q, block_k = tiling.block_q, tiling.block_k
    found = []
    if operands.bias is not None:
        bias = operands.bias.astype(jnp.float32) * LOG2_E
        bias = pad_to(bias.swapaxes(2, 3), 2, block_k)  # [B or 1, H or 1, S, T or 1]
        own = tuple(size > 1 for size in (bias.shape[0], bias.shape[1], operands.bias.shape[2]))
        bias = pad_to(bias, 3, block_q) if own[2] else bias
        found.append(
            Extra(
                "bias",
                bias,
                (None, None, block_k, block_q if own[2] else 1),
                lambda b, h, i, j, c: (b if own[0] else 0, h if own[1] else 0, j, i if own[2] else 0),
            )
        )
    if contents is not None:
        blocks = jnp.asarray(contents.swapaxes(1, 2).astype(np.int8))  # [n, block_k, block_q]
        found.append(Extra("contents", blocks, (None, block_k, block_q), lambda b, h, i, j, c: (c, 0, 0)))
    if operands.q_segments is not None and operands.kv_segments is not None:
        q_ids = pad_to(operands.q_segments, 1, block_q)[:, None, :]  # [B, 1, T]
        kv_ids = pad_to(operands.kv_segments, 1, block_k)[:, :, None]  # [B, S, 1]
        found.append(Extra("q_ids", q_ids, (None, 1, block_q), lambda b, h, i, j, c: (b, 0, i)))
        found.append(Extra("kv_ids", kv_ids, (None, block_k, 1), lambda b, h, i, j, c: (b, j, 0)))
    if operands.keep is not None:
        keep = operands.keep.astype(jnp.int8).swapaxes(2, 3)
        keep = pad_to(pad_to(keep, 2, block_k), 3, block_q)  # [B or 1, H or 1, S, T]
        each = tuple(size > 1 for size in keep.shape[:2])
        found.append(
            Extra(
                "keep",
                keep,
                (None, None, block_k, block_q),
                lambda b, h, i, j, c: (b if each[0] else 0, h if each[1] else 0, j, i),
            )
        )
    return found


@dataclass(frozen=True)
class Step:
    """The scalars of one step of a work list."""

    i: Any
    j: Any
    flags: Any

    @staticmethod
    def read(place_ref: Any, flags_ref: Any, number: Any) -> "Step":
        place = place_ref[number]
        return Step(place >> 16, place & 0xFFFF, flags_ref[number])

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
    tiling: Tiling, products: jax.Array, extras: dict[str, Any], step: Step, keys: Any, queries: slice, *, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits in units of log 2, [tile_k, tile_q], from the products k q^T; and tanh where there is a soft cap."""
    settings = tiling.settings
    slope = None
    if settings.soft_cap is None:
        logits = products * (settings.scale * LOG2_E)
    else:
        slope = jnp.tanh(products * (settings.scale / settings.soft_cap))
        logits = slope * (settings.soft_cap * LOG2_E)
    if "bias" in extras:
        bias_ref = extras["bias"]
        logits = logits + (bias_ref[keys, queries] if bias_ref.shape[1] > 1 else bias_ref[keys, :])
    if masked:
        allowed = _allowed(tiling, extras, step, keys, queries)
        logits = jnp.where(allowed, logits, MASKED) if allowed is not None else logits
    return logits, slope


def _allowed(tiling: Tiling, extras: dict[str, Any], step: Step, keys: Any, queries: slice) -> jax.Array | None:
    """Which pairs of a tile attend, [tile_k, tile_q]."""
    conditions = []
    columns = step.j * tiling.block_k + keys.start + jax.lax.broadcasted_iota(jnp.int32, (tiling.tile_k, 1), 0)
    mask: Mask | None = tiling.settings.mask
    if mask is not None and mask.computable:
        rows = step.i * tiling.block_q + queries.start + jax.lax.broadcasted_iota(jnp.int32, (1, tiling.tile_q), 1)
        conditions.append(mask.keep(rows, columns, tiling.settings.q_offset))
    if tiling.ragged_keys:
        conditions.append(jnp.broadcast_to(columns < tiling.s, (tiling.tile_k, tiling.tile_q)))
    for name in ("contents", "keep"):
        if name in extras:
            conditions.append(extras[name][keys, queries].astype(jnp.int32) != 0)
    if "q_ids" in extras:
        conditions.append(extras["kv_ids"][keys, :] == extras["q_ids"][:, queries])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def for_tiles(tiling: Tiling, step: Step, units: Callable[[list[tuple[Any, slice]], bool], None]) -> None:
    """Call `units` with (keys, queries) slices of the tiles of a step, and whether they need a mask.

    A full block is one call with all its tiles, so that products and exponentials of different tiles overlap. A partial
    block is a loop over the tiles of keys that are not empty. Both are loops whose counts are data, the first of one or
    none: what the schedule reader then shows is one pass of each.
    """
    chunks = [slice(start, start + tiling.tile_q) for start in range(0, tiling.block_q, tiling.tile_q)]
    num = tiling.block_k // tiling.tile_k

    def whole(index: Any, _: None) -> None:
        del index
        units([(slice(n * tiling.tile_k, (n + 1) * tiling.tile_k), c) for n in range(num) for c in chunks], False)

    def masked(index: Any, _: None) -> None:
        keys = pl.ds(pl.multiple_of(index * tiling.tile_k, tiling.tile_k), tiling.tile_k)
        units([(keys, c) for c in chunks], True)

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
    """Each unit through three stages, in an order that overlaps them: the next one's first, the last one's third.

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
