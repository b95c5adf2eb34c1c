"""How the arrays of the delta-rule family lie in HBM and VMEM for the TPU kernels, and back.

Heads lie side by side in the lanes: [B, T, H K], which a projection's output is before anyone gives its heads an axis. A
block of [B, T, H, K] itself would have one head in its second-last axis, which a tile does not allow. K and V are
padded to whole lanes, T to whole blocks.

What is one number a token and head comes in two ways. `columns` [B, groups, T, *] has a lane for each: beta, the sums of
the gate's two parts, and the run, to scale rows with. `rows` [B, groups, num_t, block_chunks, 1, *] has a row for each
chunk: the sums and the run again, to take differences with. A group is the heads of one block.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.core.manual_axes import vary_over, varying_axes
from tilewright.ops.delta_rule.chunk import LOWEST_GATE, Chunk, Gates, Masks, Runs, coarse_and_fine, halvings, masks
from tilewright.ops.delta_rule.config import PallasTpuConfig, lanes
from tilewright.ops.delta_rule.products import Exactness


@dataclass(frozen=True)
class Operands:
    """What an implementation is called with."""

    q: Any  # [B, T, H, K]
    k: Any  # [B, T, H, K]
    v: Any  # [B, T, HV, V]
    g: Any  # [B, T, HV] or [B, T, HV, K]
    beta: Any  # [B, T, HV]
    initial_state: Any  # [B, HV, K, V]
    resets: Any  # [B, T], or None


jax.tree_util.register_dataclass(Operands)


@dataclass(frozen=True)
class Layout:
    """Sizes, and where everything is: all that a kernel knows when traced."""

    b: int
    true_t: int
    h: int
    hv: int
    true_depth: int
    true_width: int
    chunk: int
    block_chunks: int
    heads: int
    gate: Literal["none", "head", "channel"]
    packed: bool
    how: Exactness
    side_by_side: int
    """How many heads go through their products side by side, at most."""
    keep: bool = False
    """Whether the forward keeps the state before each block."""

    @property
    def depth(self) -> int:
        return lanes(self.true_depth)

    @property
    def width(self) -> int:
        return lanes(self.true_width)

    @property
    def block_t(self) -> int:
        return self.chunk * self.block_chunks

    @property
    def num_t(self) -> int:
        return -(-self.true_t // self.block_t)

    @property
    def t(self) -> int:
        return self.num_t * self.block_t

    @property
    def groups(self) -> int:
        return self.hv // self.heads

    @property
    def shared(self) -> int:
        """Value heads a query head serves."""
        return self.hv // self.h

    @property
    def query_heads(self) -> int:
        """Query heads in a block."""
        return max(1, self.heads // self.shared)

    @property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """The heads of a block, as many side by side as divide them."""
        n = max(n for n in (1, 2, 4) if n <= self.side_by_side and self.heads % n == 0)
        return tuple(tuple(range(first, first + n)) for first in range(0, self.heads, n))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of a kernel's inputs, the states apart."""
        gate = ("g",) if self.gate == "channel" else ()
        rows = ("rows",) if self.gate == "head" or self.packed else ()
        levels = ("reach", "passage") if self.gate == "channel" else ()
        return ("q", "k", "v", *gate, "columns", *rows, "triangles", "own", "halves", "small", *levels)

    def spec(self, name: str, order: Callable[[Any], Any]) -> pl.BlockSpec:
        """The block of array `name` at grid position (batch, group, order(step))."""
        if name in ("q", "k"):
            whole = self.heads % self.shared == 0
            return pl.BlockSpec(
                (1, self.block_t, self.query_heads * self.depth),
                lambda i, j, t: (i, order(t), j if whole else j * self.heads // self.shared),
            )
        if name == "columns":
            return pl.BlockSpec((1, 1, self.block_t, self.num_columns), lambda i, j, t: (i, j, order(t), 0))
        if name == "rows":
            return self.rows_spec(self.num_rows, order)
        if name in ("triangles", "own", "halves", "small", "reach", "passage"):
            # The same for every block: fetched once.
            shape = self.mask_arrays[name].shape
            return pl.BlockSpec(shape, lambda i, j, t: (0,) * len(shape))
        each = {"v": self.width, "g": self.depth}[name]
        return pl.BlockSpec((1, self.block_t, self.heads * each), lambda i, j, t: (i, order(t), j))

    @property
    def mask_arrays(self) -> dict[str, np.ndarray]:
        """The masks of a chunk, stacked where they have one shape."""
        mask = masks(self.chunk, len(self.packs[0]), np.dtype(np.float32), channels=self.gate == "channel")
        arrays = {
            "triangles": np.stack([mask.seen, mask.before]),
            "own": mask.own,
            "halves": np.stack(mask.halves),
            "small": mask.small,
        }
        if self.gate == "channel":
            arrays |= {"reach": np.stack(mask.reach), "passage": np.stack([mask.upto, mask.after])}
        return arrays

    def rows_spec(self, width: int, order: Callable[[Any], Any]) -> pl.BlockSpec:
        # A chunk is an axis of its own before the tiles: its index is not known when traced.
        return pl.BlockSpec((1, 1, 1, self.block_chunks, 1, width), lambda i, j, t: (i, j, order(t), 0, 0, 0))

    @property
    def num_columns(self) -> int:
        return self.heads * (3 if self.gate == "head" else 1) + self.packed

    @property
    def num_rows(self) -> int:
        return self.chunk * (self.heads * (2 if self.gate == "head" else 0) + len(self.packs[0]) * self.packed)

    def query_head(self, head: int) -> int:
        """The query head of value head `head`, both counted inside the block."""
        return head // self.shared if self.heads % self.shared == 0 else 0

    def tokens_of(self, index: Any) -> Any:
        return pl.ds(pl.multiple_of(index * self.chunk, self.chunk), self.chunk)

    def value_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.width, (pack[-1] + 1) * self.width)

    def key_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.depth, (pack[-1] + 1) * self.depth)


def layout_of(operands: Operands, config: PallasTpuConfig, *, side_by_side: int, keep: bool) -> Layout:
    b, t, h, depth = operands.q.shape
    hv, width = operands.v.shape[2:]
    gate = "none" if operands.g is None else "head" if operands.g.ndim == 3 else "channel"
    how = Exactness.SPLIT if operands.q.dtype == jnp.bfloat16 else Exactness.HIGHEST
    packed = operands.resets is not None
    sizes = (b, t, h, hv, depth, width, config.chunk, config.block_chunks, config.heads)
    return Layout(*sizes, gate, packed, how, side_by_side, keep)


def side_by_side(x: jax.Array, layout: Layout, width: int) -> jax.Array:
    """[B, T, heads, D] as [B, T, heads * width], padded with zeros."""
    b, t, heads, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, layout.t - t), (0, 0), (0, width - d)))
    return x.reshape(b, layout.t, heads * width)


def apart(x: jax.Array, layout: Layout, heads: int, d: int) -> jax.Array:
    """The way back from `side_by_side`."""
    b = x.shape[0]
    return x.reshape(b, layout.t, heads, -1)[:, : layout.true_t, :, :d]


def padded_state(state: jax.Array, layout: Layout) -> jax.Array:
    missing = (layout.depth - layout.true_depth, layout.width - layout.true_width)
    return jnp.pad(state, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))


def _per_head(x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """[B, T, HV], padded, as columns [B, groups, T, heads] and as rows [B, groups, num_t, block_chunks, 1, heads * C]."""
    b = x.shape[0]
    x = x.reshape(b, layout.num_t, layout.block_chunks, layout.chunk, layout.groups, layout.heads)
    columns = jnp.moveaxis(x, 4, 1).reshape(b, layout.groups, layout.t, layout.heads)
    rows = jnp.moveaxis(x, (4, 5, 3), (1, 4, 5))
    return columns, rows.reshape(b, layout.groups, layout.num_t, layout.block_chunks, 1, -1)


def prepare(operands: Operands, layout: Layout) -> dict[str, jax.Array]:
    """The arrays of a kernel, by name; `initial_state` among them."""
    b, t = layout.b, layout.t

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, t - x.shape[1])] + [(0, 0)] * (x.ndim - 2))

    arrays = {
        "q": side_by_side(operands.q, layout, layout.depth),
        "k": side_by_side(operands.k, layout, layout.depth),
        "v": side_by_side(operands.v, layout, layout.width),
        "initial_state": padded_state(operands.initial_state, layout),
    }
    columns, rows = [_per_head(padded(operands.beta), layout)[0]], []
    if operands.g is not None:
        g = padded(jnp.maximum(operands.g, LOWEST_GATE))
        if layout.gate == "channel":
            arrays["g"] = side_by_side(g, layout, layout.depth)
        else:
            parts = coarse_and_fine(g.reshape(b, -1, layout.chunk, layout.hv), functools.partial(jnp.cumsum, axis=2))
            for part in parts:
                column, row = _per_head(part.reshape(b, t, layout.hv), layout)
                columns.append(column)
                rows.append(row)
    if operands.resets is not None:
        starts = padded(operands.resets).reshape(b, -1, layout.chunk)
        runs = jnp.cumsum(starts, axis=2, dtype=jnp.int32).astype(jnp.float32)
        columns.append(jnp.broadcast_to(runs.reshape(b, 1, t, 1), (b, layout.groups, t, 1)))
        each = runs.reshape(b, 1, layout.num_t, layout.block_chunks, 1, layout.chunk)
        each = jnp.tile(each, (1, layout.groups, 1, 1, 1, len(layout.packs[0])))
        rows.append(each)
    arrays["columns"] = jnp.concatenate(columns, axis=-1)
    if rows:
        arrays["rows"] = jnp.concatenate(rows, axis=-1)
    # Inside shard_map a kernel's operands vary alike.
    axes = varying_axes(operands.v)
    return arrays | {name: vary_over(jnp.asarray(mask), axes) for name, mask in layout.mask_arrays.items()}


def _masks_of(ref: dict[str, Any], layout: Layout) -> Masks:
    levels = range(len(halvings(layout.chunk)))
    reach = upto = after = None
    if layout.gate == "channel":
        reach = tuple(ref["reach"][level] for level in levels)
        upto, after = ref["passage"][0], ref["passage"][1]
    seen, before = ref["triangles"][0], ref["triangles"][1]
    halves = tuple(ref["halves"][level] for level in levels)
    return Masks(seen, before, ref["own"][...], halves, ref["small"][...], reach, upto, after)


def chunk_of(ref: dict[str, Any], index: Any, pack: tuple[int, ...], layout: Layout, *, widen: bool) -> Chunk:
    """Chunk `index` of a block, the heads of `pack` side by side, from the kernel's refs.

    With `widen` q, k and v are float32, as their gradients are to be. Without, they are as they came, unless a gate scales
    them: then a product takes them as they are.
    """
    tokens, n = layout.tokens_of(index), len(pack)

    def of_queries(name: str) -> jax.Array:
        heads = [layout.query_head(head) for head in pack]
        parts = [ref[name][0, tokens, layout.key_lanes((head,))] for head in heads]  # each [C, K]
        joined = parts[0] if n == 1 else jnp.concatenate(parts, axis=1)  # [C, n K]
        return joined.astype(jnp.float32) if widen or layout.gate == "channel" else joined

    columns = ref["columns"][0, 0, tokens, :]  # [C, num_columns]

    def column(kind: int) -> jax.Array:
        start = kind * layout.heads + pack[0]
        return columns[:, start : start + n]  # [C, n]

    def row(start: int) -> jax.Array:
        return ref["rows"][0, 0, 0, index, :, start : start + n * layout.chunk]  # [1, n C]

    gates = runs = g = None
    if layout.gate == "head":
        sums = [row(kind * layout.heads * layout.chunk + pack[0] * layout.chunk) for kind in (0, 1)]
        gates = Gates(column(1), column(2), *sums)
        g = sums[0]  # What its gradient is taken with respect to: the value is not used.
    elif layout.gate == "channel":
        g = ref["g"][0, tokens, layout.key_lanes(pack)]  # [C, n K]
    if layout.packed:
        last = layout.num_columns - 1
        start = layout.num_rows - n * layout.chunk
        runs = Runs(columns[:, last : last + 1].astype(jnp.int32), row(start).astype(jnp.int32))
    v = ref["v"][0, tokens, layout.value_lanes(pack)]  # [C, n V]
    v = v.astype(jnp.float32) if widen else v
    return Chunk(of_queries("q"), of_queries("k"), v, column(0), g, gates, runs, _masks_of(ref, layout))
