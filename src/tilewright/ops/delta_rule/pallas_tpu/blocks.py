"""How the arrays of a call lie in HBM and VMEM for the TPU kernels, and back.

Heads lie side by side in the lanes: [B, T, H K], as the output of a projection does before its heads get an axis. A
block of [B, T, H, K] itself would have one head in its second-last axis, which a tile does not allow. K and V are
padded to whole lanes, and T to whole blocks.

Scalars per token and head come in two layouts. `columns` [B, groups, T, *] has a lane for each: beta, the sums of the
two parts of the gate, and the segment, to scale rows with. `rows` [B, groups, num_t, block_chunks, 1, *] has a row for
each chunk: the sums and the segment again, to take differences with. A group is the heads of one block.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES
from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.gates import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.matmul_precision import MatmulPrecision
from tilewright.ops.delta_rule.wy_transform import (
    Chunk,
    Gates,
    Masks,
    Segments,
    advance,
    inverses,
    masks,
    scores,
)
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, not_float64

_FLOAT32_BYTES = 4
# Arrays of a pair of heads, [C, 2 K] or [C, 2 V], that the algebra of a chunk keeps in VMEM beside blocks and scratch.
_TEMPORARIES = 32

Order = Callable[[Any], Any]
"""Maps the step of the last grid axis to the block of tokens that it processes."""


def unsupported_reason(call: DeltaRuleCall, launch: Launch) -> str | None:
    if (reason := not_float64(call.q)) is not None:
        return reason
    heads, h, hv = launch.config.heads, call.q.shape[2], call.v.shape[2]
    group = hv // h
    if hv % heads or (heads % group and group % heads):
        return (
            f"config.heads={heads} does not share {h} query heads and {hv} value heads evenly; use a divisor of "
            f"HV={hv} that is a multiple or a divisor of HV / H = {group}, or config=None"
        )
    return None


def _whole_lanes(width: int) -> int:
    return pl.cdiv(width, LANES) * LANES


@dataclass(frozen=True)
class Layout:
    """Sizes, and where everything is: all that a kernel knows when it is traced."""

    call: DeltaRuleCall
    chunk: int
    block_chunks: int
    heads: int
    """Value heads per block."""
    side_by_side: int
    """The most heads that go through their products side by side."""

    @property
    def b(self) -> int:
        return self.call.q.shape[0]

    @property
    def h(self) -> int:
        return self.call.q.shape[2]

    @property
    def hv(self) -> int:
        return self.call.v.shape[2]

    @property
    def depth(self) -> int:
        """K, padded."""
        return _whole_lanes(self.call.q.shape[3])

    @property
    def width(self) -> int:
        """V, padded."""
        return _whole_lanes(self.call.v.shape[3])

    @property
    def packed(self) -> bool:
        return self.call.resets is not None

    @property
    def precision(self) -> MatmulPrecision:
        return MatmulPrecision.BF16X3 if self.call.q.dtype == jnp.bfloat16 else MatmulPrecision.FLOAT32

    @property
    def block_t(self) -> int:
        return self.chunk * self.block_chunks

    @property
    def num_t(self) -> int:
        return pl.cdiv(self.call.q.shape[1], self.block_t)

    @property
    def t(self) -> int:
        """T, padded."""
        return self.num_t * self.block_t

    @property
    def groups(self) -> int:
        return self.hv // self.heads

    @property
    def shared(self) -> int:
        """Value heads that a query head serves."""
        return self.hv // self.h

    @property
    def query_heads(self) -> int:
        """Query heads per block."""
        return max(1, self.heads // self.shared)

    @property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """The heads of a block, as many side by side as divide them: 1, 2 or 4."""
        n = max(n for n in (1, 2, 4) if n <= self.side_by_side and self.heads % n == 0)
        return tuple(tuple(range(first, first + n)) for first in range(0, self.heads, n))

    @property
    def grid(self) -> dict[str, Axis]:
        return {
            "batch": Axis(self.b, "parallel"),
            "group": Axis(self.groups, "parallel"),
            "block": Axis(self.num_t),
        }

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass."""
        inside = self.chunk * (3 * self.depth + 2 * self.width)
        return self.b * self.t * self.hv * 2 * (inside + 3 * self.depth * self.width)

    def vmem_bytes(self, kernel: Kernel) -> int:
        """An estimate of the VMEM that a kernel of this layout needs."""
        work = _TEMPORARIES * self.chunk * 2 * max(self.depth, self.width) * _FLOAT32_BYTES
        return kernel.vmem_bytes(temporaries=work)

    def sequence_blocks(self, order: Order = lambda t: t) -> dict[str, Block | None]:
        """q, k, v and one gate per channel, with what a grid step (batch, group, step) sees of them."""
        dtype, whole = self.call.q.dtype, self.heads % self.shared == 0
        queries = Block(
            (1, self.block_t, self.query_heads * self.depth),
            dtype,
            lambda i, j, t: (i, order(t), j if whole else j * self.heads // self.shared),
        )
        return {
            "q": queries,
            "k": queries,
            "v": self.token_block(self.width, dtype, order),
            "g": self.token_block(self.depth, jnp.float32, order) if self.call.gate == "channel" else None,
        }

    def input_blocks(self, order: Order = lambda t: t) -> dict[str, Block | None]:
        """The inputs that the backward kernel shares with the forward pass."""
        columns = Block((1, 1, self.block_t, self.num_columns), jnp.float32, lambda i, j, t: (i, j, order(t), 0))
        blocks: dict[str, Block | None] = {
            **self.sequence_blocks(order),
            "columns": columns,
            "rows": self.rows_block(self.num_rows, order) if self.call.gate == "head" or self.packed else None,
        }
        for name in ("triangles", "own", "halves", "small", "reach", "passage"):
            mask = self.mask_arrays.get(name)
            # The same for every step: fetched once.
            blocks[name] = None if mask is None else Block(mask.shape, jnp.float32, _origin(mask.ndim))
        return blocks

    def token_block(self, width: int, dtype: Any, order: Order = lambda t: t) -> Block:
        """A block of [B, T, HV * width]."""
        return Block((1, self.block_t, self.heads * width), dtype, lambda i, j, t: (i, order(t), j))

    def rows_block(self, width: int, order: Order) -> Block:
        # A chunk is an axis of its own before the tiles: its index is not known when traced.
        shape = (1, 1, 1, self.block_chunks, 1, width)
        return Block(shape, jnp.float32, lambda i, j, t: (i, j, order(t), 0, 0, 0))

    @property
    def state_block(self) -> Block:
        """A block of [B, HV, K, V]."""
        return Block((1, self.heads, self.depth, self.width), jnp.float32, lambda i, j, t: (i, j, 0, 0))

    def block_states_block(self, order: Order = lambda t: t) -> Block:
        """A block of [B, num_t, HV, K, V]: the states before each block."""
        shape = (1, 1, self.heads, self.depth, self.width)
        return Block(shape, jnp.float32, lambda i, j, t: (i, order(t), j, 0, 0))

    @functools.cached_property
    def mask_arrays(self) -> dict[str, np.ndarray]:
        """The masks of a chunk, stacked where they have the same shape."""
        channels = self.call.gate == "channel"
        mask = masks(self.chunk, len(self.packs[0]), np.dtype(np.float32), channels=channels)
        arrays = {
            "triangles": np.stack([mask.seen, mask.before]),
            "own": mask.own,
            "halves": np.stack(mask.halves),
            "small": mask.small,
        }
        if channels:
            arrays |= {"reach": np.stack(mask.reach), "passage": np.stack([mask.upto, mask.after])}
        return arrays

    @property
    def num_columns(self) -> int:
        return self.heads * (3 if self.call.gate == "head" else 1) + self.packed

    @property
    def num_rows(self) -> int:
        return self.chunk * (self.heads * (2 if self.call.gate == "head" else 0) + len(self.packs[0]) * self.packed)

    def query_head(self, head: int) -> int:
        """The query head of value head `head`, both counted inside the block."""
        return head // self.shared if self.heads % self.shared == 0 else 0

    def tokens_of(self, index: Any) -> Any:
        return pl.ds(pl.multiple_of(index * self.chunk, self.chunk), self.chunk)

    def value_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.width, (pack[-1] + 1) * self.width)

    def key_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.depth, (pack[-1] + 1) * self.depth)


def _origin(rank: int) -> Callable[..., tuple[int, ...]]:
    return lambda i, j, t: (0,) * rank


def padded_tokens(x: jax.Array, layout: Layout) -> jax.Array:
    """[B, T, ...] padded with zeros to whole blocks of tokens."""
    return jnp.pad(x, [(0, 0), (0, layout.t - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def merge_heads(x: jax.Array, layout: Layout, width: int) -> jax.Array:
    """[B, T, heads, D] as [B, T, heads * width], padded with zeros."""
    b, t, heads, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, layout.t - t), (0, 0), (0, width - d)))
    return x.reshape(b, layout.t, heads * width)


def split_heads(x: jax.Array, layout: Layout, heads: int, d: int) -> jax.Array:
    """The inverse of `merge_heads`."""
    return x.reshape(x.shape[0], layout.t, heads, -1)[:, : layout.call.q.shape[1], :, :d]


def padded_state(state: jax.Array, layout: Layout) -> jax.Array:
    missing = (layout.depth - state.shape[2], layout.width - state.shape[3])
    return jnp.pad(state, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))


def unpadded_state(state: jax.Array, layout: Layout) -> jax.Array:
    return state[:, :, : layout.call.q.shape[3], : layout.call.v.shape[3]]


def _per_head(x: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """A padded scalar [B, T, HV] as columns [B, groups, T, heads], and as rows [B, groups, num_t, block_chunks, 1, *]."""
    b = x.shape[0]
    x = x.reshape(b, layout.num_t, layout.block_chunks, layout.chunk, layout.groups, layout.heads)
    columns = jnp.moveaxis(x, 4, 1).reshape(b, layout.groups, layout.t, layout.heads)
    rows = jnp.moveaxis(x, (4, 5, 3), (1, 4, 5))
    return columns, rows.reshape(b, layout.groups, layout.num_t, layout.block_chunks, 1, -1)


def input_arrays(layout: Layout) -> dict[str, jax.Array]:
    """The arrays of `Layout.input_blocks`, by name."""
    call, b, t = layout.call, layout.b, layout.t
    arrays = {
        "q": merge_heads(call.q, layout, layout.depth),
        "k": merge_heads(call.k, layout, layout.depth),
        "v": merge_heads(call.v, layout, layout.width),
    }
    columns, rows = [_per_head(padded_tokens(call.beta, layout), layout)[0]], []
    if call.g is not None:
        g = padded_tokens(jnp.maximum(call.g, LOWEST_GATE), layout)
        if call.gate == "channel":
            arrays["g"] = merge_heads(g, layout, layout.depth)
        else:
            parts = coarse_and_fine(g.reshape(b, -1, layout.chunk, layout.hv), functools.partial(jnp.cumsum, axis=2))
            for part in parts:
                column, row = _per_head(part.reshape(b, t, layout.hv), layout)
                columns.append(column)
                rows.append(row)
    if call.resets is not None:
        starts = padded_tokens(call.resets, layout).reshape(b, -1, layout.chunk)
        segments = jnp.cumsum(starts, axis=2, dtype=jnp.int32).astype(jnp.float32)
        columns.append(jnp.broadcast_to(segments.reshape(b, 1, t, 1), (b, layout.groups, t, 1)))
        each = segments.reshape(b, 1, layout.num_t, layout.block_chunks, 1, layout.chunk)
        each = jnp.tile(each, (1, layout.groups, 1, 1, 1, len(layout.packs[0])))
        rows.append(each)
    arrays["columns"] = jnp.concatenate(columns, axis=-1)
    if rows:
        arrays["rows"] = jnp.concatenate(rows, axis=-1)
    return arrays | {name: jnp.asarray(mask) for name, mask in layout.mask_arrays.items()}


def cost(arrays: Mapping[str, jax.Array], kernel: Kernel, *, flops: int, transcendentals: int) -> pl.CostEstimate:
    """Each array and each output passes through memory once."""
    outputs = [output for output in kernel.outputs.values() if output is not None]
    written = sum(int(np.prod(output.shape)) * jnp.dtype(output.block.dtype).itemsize for output in outputs)
    read = sum(x.size * x.dtype.itemsize for x in arrays.values())
    return pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=read + written)


def _masks_of(refs: Mapping[str, Any], layout: Layout) -> Masks:
    def each(name: str) -> tuple[Any, ...]:
        """The masks of a stack, or None for each of two where the gate needs none."""
        ref = refs[f"{name}_ref"]
        return (None, None) if ref is None else tuple(ref[n] for n in range(ref.shape[0]))

    reach, (upto, after) = each("reach"), each("passage")
    (seen, before), halves = each("triangles"), each("halves")
    return Masks(seen, before, refs["own_ref"][...], halves, refs["small_ref"][...], reach, upto, after)


def chunk_of(refs: Mapping[str, Any], index: Any, pack: tuple[int, ...], layout: Layout, *, upcast: bool) -> Chunk:
    """Chunk `index` of a block, the heads of `pack` side by side, from the refs of `Layout.input_blocks`.

    With `upcast` q, k and v are float32, as their gradients should be. Otherwise they keep their dtype, in which a
    product takes them, unless a gate per channel scales them.
    """
    tokens, n, gate = layout.tokens_of(index), len(pack), layout.call.gate

    def of_queries(ref: Any) -> jax.Array:
        heads = [layout.query_head(head) for head in pack]
        parts = [ref[0, tokens, layout.key_lanes((head,))] for head in heads]  # each [C, K]
        joined = parts[0] if n == 1 else jnp.concatenate(parts, axis=1)  # [C, n K]
        return joined.astype(jnp.float32) if upcast or gate == "channel" else joined

    columns = refs["columns_ref"][0, 0, tokens, :]  # [C, num_columns]

    def column(kind: int) -> jax.Array:
        start = kind * layout.heads + pack[0]
        return columns[:, start : start + n]  # [C, n]

    def row(start: int) -> jax.Array:
        return refs["rows_ref"][0, 0, 0, index, :, start : start + n * layout.chunk]  # [1, n C]

    gates = segments = g = None
    if gate == "head":
        sums = [row(kind * layout.heads * layout.chunk + pack[0] * layout.chunk) for kind in (0, 1)]
        gates = Gates(column(1), column(2), *sums)
        g = sums[0]  # What its gradient is taken with respect to: the value is not used.
    elif gate == "channel":
        g = refs["g_ref"][0, tokens, layout.key_lanes(pack)]  # [C, n K]
    if layout.packed:
        last = layout.num_columns - 1
        start = layout.num_rows - n * layout.chunk
        segments = Segments(columns[:, last : last + 1].astype(jnp.int32), row(start).astype(jnp.int32))
    v = refs["v_ref"][0, tokens, layout.value_lanes(pack)]  # [C, n V]
    v = v.astype(jnp.float32) if upcast else v
    q, k = of_queries(refs["q_ref"]), of_queries(refs["k_ref"])
    return Chunk(q, k, v, column(0), g, gates, segments, _masks_of(refs, layout), layout.precision, layout.call.scale)


def pass_chunk(
    refs: Mapping[str, Any], index: Any, state: Callable[[int], jax.Array], layout: Layout
) -> tuple[list[jax.Array], list[tuple[jax.Array, ...]]]:
    """Takes the states of all heads of a block, `state(head)`, through chunk `index`, without outputs.

    Returns the inverse and the states after the chunk, for each pack. All packs advance together, stage by stage, and
    nothing is stored: a store keeps the scheduler from moving later loads before it, and with them all that the next
    heads could do while these wait for their products.
    """
    packs = layout.packs
    chunks = [chunk_of(refs, index, pack, layout, upcast=False) for pack in packs]
    before = [tuple(state(head) for head in pack) for pack in packs]
    decays = [chunk.decay for chunk in chunks]
    matrices = [scores(chunk, decay) for chunk, decay in zip(chunks, decays, strict=True)]
    inverted = inverses([m[1] for m in matrices], chunks[0].mask, len(packs[0]), layout.precision, pltpu.roll)
    erase = [m[1] for m in matrices]
    given = zip(before, chunks, decays, [None] * len(packs), erase, inverted, strict=True)
    return inverted, [advance(*one)[1] for one in given]
