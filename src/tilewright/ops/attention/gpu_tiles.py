"""What the GPU kernels of attention share: how a call lies in memory, the blocks that each block visits, and masks.

A thread block of the grid keeps one block of queries (forward) or of keys (backward) and visits blocks of the other. Which
ones is a row of a table in device memory: full blocks first, then partial ones. So a kernel is two loops, the first
without a mask, and nothing is fetched or computed for an empty block. The copying warpgroup reads the table some steps
ahead of the products, so that its latency is hidden. Rows with the most work start first: what is left at the end of a
grid is then short.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.hopper import padded, quotient, truncated
from tilewright.ops.attention.config import GPU_WIDTH
from tilewright.ops.attention.gradient import Operands, Settings
from tilewright.ops.attention.mask_algebra import EMPTY, FULL, PARTIAL, Both, Either, Grid, Mask, Not
from tilewright.ops.attention.plan import block_table
from tilewright.ops.attention.reference import MASKED_BELOW

LOG2_E = math.log2(math.e)
# Far below MASKED_BELOW, where the maximum of a row begins: what is masked has a weight of 0 even in a row of nothing else.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
LOWEST = MASKED_BELOW * LOG2_E
_LEAST_FACTOR = 2.0**-20
# Registers of a thread: 2 x 128 x 240 + 128 x 24 of the 65,536 that a multiprocessor has.
WORKER_REGISTERS, COPIER_REGISTERS = 240, 24


def padded_heads(array: jax.Array, block: int) -> jax.Array:
    """[B, T, H, D] with T in whole blocks and D in whole swizzled rows."""
    return padded(padded(array, 3, GPU_WIDTH), 1, block)


@dataclass(frozen=True)
class Plan:
    """What one kernel visits; static."""

    t: int
    s: int
    block_q: int
    block_k: int
    settings: Settings
    names: tuple[str, ...]
    """Of the arrays that the kernel reads besides its operands, in order."""
    rows: int
    """Blocks that stay, of a list."""
    longest: int
    """The most blocks that one of them visits."""
    per_batch: bool
    has_full: bool
    has_partial: bool

    @property
    def ragged_keys(self) -> bool:
        return self.s % self.block_k != 0

    def row(self, refs: dict[str, Any], b: Any, rank: Any) -> "Row":
        """The row of work of a batch that has this rank: the block that stays, and what it visits."""
        stays = refs["order"][rank]
        place = (b * self.rows + stays) if self.per_batch else stays
        return Row(refs, stays, place * self.longest, refs["counts"][2 * place], refs["counts"][2 * place + 1])

    def row_of_keys(self, refs: dict[str, Any], number: Any, kv_heads: int, together: int) -> tuple[Any, Any, "Row"]:
        """A thread block's batch, key head and row, by number: so many heads run side by side before others come."""
        which, rest = quotient(number, self.rows * together)
        rank, rest = quotient(rest, together)
        b, kv = quotient(which * together + rest, kv_heads)
        return b, kv, self.row(refs, b, rank)

    def loops(self, row: "Row", group: int, step: Callable[..., None]) -> list[tuple[Any, Any, Callable[..., None]]]:
        """Of the steps of a row and a group of heads, as (first, end, body): those without a mask, those with one."""
        full_steps, loops = row.full * group, []
        if self.has_full:
            loops.append((0, full_steps, functools.partial(step, masked=False)))
        if self.has_partial:
            first = full_steps if self.has_full else 0
            loops.append((first, row.total * group, functools.partial(step, masked=True)))
        return loops


@dataclass(frozen=True)
class Row:
    """The scalars of one block that stays."""

    refs: dict[str, Any]
    stays: Any
    first: Any
    full: Any
    """Blocks that need no mask; they come first."""
    total: Any

    def block(self, n: Any) -> Any:
        return self.refs["blocks"][self.first + n]

    def content(self, n: Any) -> Any:
        return self.refs["content"][self.first + n]

    def of_group(self, number: Any, kv: Any, group: int) -> tuple[Any, Any]:
        """The query head and the place in the row of a step: full blocks of all heads of a group, then partial ones."""
        if group == 1:
            return kv, number
        full = number < self.full * group
        count = jnp.where(full, self.full, self.total - self.full)
        inside = jnp.where(full, number, number - self.full * group)
        g = jax.lax.div(inside, count)
        return kv * group + g, jnp.where(full, 0, self.full) + inside - g * count


def plan_visits(
    operands: Operands, settings: Settings, blocks: tuple[int, int], stays: Literal["q", "k"]
) -> tuple[Plan, list[jax.Array]]:
    """What a kernel visits, and the arrays that tell it, in the order of `Plan.names`."""
    t, s = operands.q.shape[1], operands.k.shape[1]
    grid = Grid(t, s, *blocks, settings.q_offset)
    table = block_table(settings.mask, grid)
    kinds = table.kinds[0]  # [num_q, num_k]
    dynamic = operands.q_segments is not None
    idle = bool((kinds == EMPTY).all(1 if stays == "q" else 0).any())
    # Contents of partial blocks; of none, where a row may have nothing to do.
    dense = settings.mask is not None and not settings.mask.computable and (len(table.contents) > 0 or idle or dynamic)
    contents = None
    content = table.content[0]
    if dense:
        # A full block that something else cuts, the end of the keys or segments, has contents of ones.
        contents = np.concatenate([table.contents, np.ones((1, *blocks), bool), np.zeros((1, *blocks), bool)])
        one_of = np.array([len(table.contents) + 1, 0, len(table.contents)])  # For EMPTY, PARTIAL and FULL.
        content = np.where(kinds == PARTIAL, content, one_of[kinds])
    if s % grid.block_k:
        kinds = np.concatenate([kinds[:, :-1], np.where(kinds[:, -1:] == FULL, PARTIAL, kinds[:, -1:])], axis=1)

    found: Any = kinds[None]  # [1 or B, num_q, num_k]
    if dynamic:
        found = _kinds_with_segments(operands, jnp.asarray(kinds, jnp.int32)[None], grid)
    xp: Any = jnp if dynamic else np
    content = np.broadcast_to(content[None], found.shape)
    if stays == "k":
        kinds, found, content = kinds.T, found.swapaxes(1, 2), content.swapaxes(1, 2)
    # A row without work visits one block, of which the mask leaves nothing: the kernels have no special case for it.
    kinds, found = _never_idle(kinds), _never_idle(found)
    longest = max(1, int((kinds != EMPTY).sum(1).max()))
    # Full ones first, partial ones behind them, empty ones at the end; each kind in order.
    by_kind = xp.where(found == FULL, 0, xp.where(found == PARTIAL, 1, 2))
    visited = xp.argsort(by_kind, axis=2, stable=True)[:, :, :longest]
    full, some = (xp.sum(a, axis=2) for a in (found == FULL, found != EMPTY))
    arrays = {
        "order": np.argsort(-(kinds != EMPTY).sum(1), kind="stable"),
        "counts": xp.stack([full, some], axis=2),
        "blocks": visited,
    }
    if dense:
        arrays["content"] = xp.take_along_axis(xp.asarray(content), visited, axis=2)
    flat = {name: jnp.asarray(array).astype(jnp.int32).reshape(-1) for name, array in arrays.items()}
    if contents is not None:
        contents = contents if stays == "q" else contents.swapaxes(1, 2)
        flat["contents"] = jnp.asarray(contents.astype(np.int8))  # [n, block_q, block_k], or the other way round.
    if operands.q_segments is not None and operands.kv_segments is not None:
        flat["q_ids"] = padded(operands.q_segments, 1, grid.block_q)  # [B, T]
        flat["kv_ids"] = padded(operands.kv_segments, 1, grid.block_k)  # [B, S]
    plan = Plan(
        t,
        s,
        *blocks,
        settings=settings,
        names=tuple(flat),
        rows=kinds.shape[0],
        longest=longest,
        per_batch=dynamic and operands.q.shape[0] > 1,
        has_full=bool((kinds == FULL).any()),
        has_partial=dynamic or bool((kinds == PARTIAL).any()),
    )
    return plan, list(flat.values())


def _kinds_with_segments(operands: Operands, kinds: jax.Array, grid: Grid) -> jax.Array:
    """Kinds of blocks [B, num_q, num_k]: blocks whose segments do not meet are empty."""
    assert operands.q_segments is not None
    assert operands.kv_segments is not None
    q_ids = _edge_blocks(operands.q_segments, grid.block_q)
    kv_ids = _edge_blocks(operands.kv_segments, grid.block_k)
    q_least, q_most = (f(q_ids, axis=2)[:, :, None] for f in (jnp.min, jnp.max))
    k_least, k_most = (f(kv_ids, axis=2)[:, None, :] for f in (jnp.min, jnp.max))
    one = (q_least == q_most) & (k_least == k_most) & (q_least == k_least)
    apart = (q_most < k_least) | (k_most < q_least)
    return jnp.minimum(kinds, jnp.where(apart, EMPTY, jnp.where(one, FULL, PARTIAL)))


def _never_idle(kinds: Any) -> Any:
    """The kinds [..., rows, blocks], where the first block of a row without work is taken for partial."""
    xp: Any = jnp if isinstance(kinds, jax.Array) else np
    first = (xp.arange(kinds.shape[-1]) == 0).reshape((1,) * (kinds.ndim - 1) + (-1,))
    idle = xp.all(kinds == EMPTY, axis=-1, keepdims=True) & first
    return xp.where(idle, PARTIAL, kinds)


def _edge_blocks(ids: jax.Array, block: int) -> jax.Array:
    """[B, T] as [B, num, block], the last id repeated past the end."""
    ends = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % block)), mode="edge")
    return ends.reshape(ids.shape[0], -1, block)


def plain_factor(settings: Settings) -> float | None:
    """What turns products into logits in units of log 2, where a factor does.

    The maximum is taken before it, and so is the mask: both need one that is positive and not tiny.
    """
    factor = settings.scale * LOG2_E
    return factor if settings.soft_cap is None and factor >= _LEAST_FACTOR else None


def scaled_logits(products: jax.Array, settings: Settings) -> tuple[jax.Array, float, jax.Array | None]:
    """Logits, the factor that turns them into units of log 2 (in the multiply-add with the maximum), and tanh, if any."""
    if (plain := plain_factor(settings)) is not None:
        return products, plain, None
    factor = settings.scale * LOG2_E
    if settings.soft_cap is None:
        return products * factor, 1.0, None
    # tanh from an exponential: the hardware's own is good to 11 bits only.
    grown = jnp.exp2(products * (2 * factor / settings.soft_cap))
    slope = 1.0 - 2.0 / (1.0 + grown)
    return slope * (settings.soft_cap * LOG2_E), 1.0, slope


def allowed(
    plan: Plan,
    refs: dict[str, Any],
    b: Any,
    content: Any,
    rows: tuple[Any, int],
    columns: tuple[Any, int],
    *,
    transposed: bool,
    part: tuple[Any, ...],
) -> jax.Array | None:
    """Which pairs of a tile attend: [queries, keys], or transposed.

    `rows` and `columns` are the first query and key and how many; `part` is where the tile lies in the block that stays,
    and in the other, if it has not all of it.
    """
    (first_q, num_q), (first_k, num_k) = rows, columns
    shape = (num_k, num_q) if transposed else (num_q, num_k)
    q_axis, k_axis = (1, 0) if transposed else (0, 1)
    layout = plgpu.Layout.WGMMA
    keys = first_k + plgpu.broadcasted_iota(jnp.int32, shape, k_axis, layout=layout)
    conditions = []
    mask = plan.settings.mask
    if mask is not None and mask.computable:
        queries = first_q + plgpu.broadcasted_iota(jnp.int32, shape, q_axis, layout=layout)
        conditions.append(_keep(mask, queries, keys, plan.settings.q_offset))
    if plan.ragged_keys:
        conditions.append(keys < plan.s)
    if "contents" in refs:
        values = plgpu.load(refs["contents"].at[(content, *part)], layout=layout, optimized=False)
        conditions.append(values.astype(jnp.int32) != 0)
    if "q_ids" in refs:
        # Ids along the rows of a tile and along its columns have layouts of their own.
        of_axis = (layout.reduce(1), layout.reduce(0))
        q_ids = plgpu.load(refs["q_ids"].at[b, pl.ds(first_q, num_q)], layout=of_axis[q_axis], optimized=False)
        kv_ids = plgpu.load(refs["kv_ids"].at[b, pl.ds(first_k, num_k)], layout=of_axis[k_axis], optimized=False)
        q_ids = jax.lax.broadcast_in_dim(q_ids, shape, [q_axis])
        kv_ids = jax.lax.broadcast_in_dim(kv_ids, shape, [k_axis])
        conditions.append(q_ids == kv_ids)
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


def add_to_sums(dq: jax.Array, factors: Any, through: Any, target: Any, some: Any, *, interpreted: bool) -> None:
    """Where there are some, add a tile of dq to the sums in memory, as integers: times a factor a row, `through` a tile."""
    to_fixed = plgpu.load(factors, layout=plgpu.Layout.WGMMA.reduce(1))
    fixed = truncated(dq * jax.lax.broadcast_in_dim(to_fixed, dq.shape, [0]), interpreted=interpreted)
    # The copy of the tile before has read it.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    through[...] = fixed
    plgpu.commit_smem()

    @pl.when(some)
    def _add():
        plgpu.copy_smem_to_gmem(through, target, reduction_op=None if interpreted else "add")


def _keep(mask: Mask, queries: jax.Array, keys: jax.Array, q_offset: int) -> jax.Array:
    """The predicate of a mask. `~` of booleans in registers is not lowered (jax 0.12): a choice is."""
    if isinstance(mask, Both):
        return _keep(mask.left, queries, keys, q_offset) & _keep(mask.right, queries, keys, q_offset)
    if isinstance(mask, Either):
        return _keep(mask.left, queries, keys, q_offset) | _keep(mask.right, queries, keys, q_offset)
    if isinstance(mask, Not):
        return jnp.where(_keep(mask.mask, queries, keys, q_offset), False, True)
    return mask.keep(queries, keys, q_offset)
