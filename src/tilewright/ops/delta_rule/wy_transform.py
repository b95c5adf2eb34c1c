"""One chunk of C tokens of the recurrence as matrix products (the WY / UT transform), as `xla` has it. The kernels of
`pallas_tpu` have the same algebra in another form (pallas_tpu/intra_chunk.py).

Let seg_ij = sum of g over j < t <= i, the log of the decay at i of what was written at j, and decay_ij = exp(seg_ij)
for i >= j, else 0. With the state S before the chunk, for n heads side by side:

    M_ij = scale (q_i . k_j) decay_ij,    L_ij = beta_i (k_i . k_j) decay_ij for i > j
    R = beta (v - into k S),              U = (I + L)^-1 R
    o = scale into q S + M U,             S' = across S + (onward k)^T U

where into_i = exp(sum of g to i), onward_j = exp(sum of g after j), across = exp(sum of all g). U holds the corrected
values that the recurrence would write token by token (fla: `v_new`). One gate per head scales rows of products; one
gate per channel (KDA) scales the operands, and (q_i . k_j) decay_ij becomes a product over channels of its own.

No exponent is positive unless a gate is, and none is a difference of two inexact sums: with gates of -1e4 such a
difference is off by 1e-3, and exp(-sum) overflows. One gate per head is split into a coarse part, whose sums are exact,
and a fine part, whose sums are small (gates.py). For one gate per channel the chunk is halved recursively (`halvings`):
for i in the second half of a block and j in its first, seg_ij is the sum from the middle to i plus the sum from j to
the middle. The middle is before i: no output depends on a later gate.

Packed sequences: `segments` counts the starts inside the chunk. Tokens of different segments do not see each other,
only tokens of segment 0 see S, and S' belongs to the last segment.

(I + L)^-1 is built from inverses of diagonal blocks, doubling their size: [[A, 0], [B, D]]^-1 has -D^-1 B A^-1 below
the diagonal. The Neumann series (I - L)(I + L^2)(I + L^4)... is shorter and wrong: with similar keys the powers of L
grow as binomial coefficients, 1e18 for 64 tokens, and cancel.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.chip import LANES
from tilewright.core.derivatives import with_derivatives
from tilewright.ops.delta_rule.matmul_precision import Form, MatmulPrecision, dot, multiply, split

_SUBSTITUTED = 8  # Tokens whose inverse is computed by substitution: the sublanes of a float32 tile.
_LOG_ZERO = -1e30  # Its exponential is 0.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """One gate per head: cumulative sums of its two parts inside the chunk (gates.py), as columns and as rows.

    Both have the same numbers. A kernel gets both, since it would need a transpose to make one from the other.
    """

    coarse_column: Any  # [C, n]
    fine_column: Any  # [C, n]
    coarse_row: Any  # [1, n C]
    fine_row: Any  # [1, n C]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """How many sequences have started in the chunk up to each token."""

    column: Any  # [C, 1] int32
    row: Any  # [1, n C] int32


@dataclass(frozen=True)
class Decay:
    """The factors that a gate multiplies by; None stands for exactly 1."""

    pairs: Any  # [C, n C], 0 above the diagonal
    into: Any  # [C, n]
    onward: Any  # [C, n]
    across: Any  # [1, n]


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def halvings(c: int) -> list[int]:
    """The sizes of the half blocks: C/2, ..., 2, 1."""
    return [c >> level for level in range(1, c.bit_length())]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """Ones and zeros that depend on C and n alone. A kernel reads them rather than recompute them for each chunk."""

    seen: Any  # [C, n C]: i >= j
    before: Any  # [C, n C]: i > j
    own: Any  # [m C, m C], for the m of the n matrices that share lanes: the diagonal blocks
    halves: Any  # For each of `halvings`, [C, n C]: i in the second half of a block and j in its first
    small: Any  # [C / 8, 1, n C]: the columns of each diagonal block of 8
    # For one gate per channel, else None:
    reach: Any  # For each of `halvings`, [C, C]: times g, the sum from the middle of a block to i, or from i to it
    upto: Any  # [C, C]: times g, the sum to i
    after: Any  # [C, C]: times g, the sum after i


@functools.cache
def masks(c: int, n: int, dtype: np.dtype, *, channels: bool) -> Masks:
    """Made by NumPy, once: they are constants of whatever is traced with them."""
    i, j = np.arange(c)[:, None], np.arange(n * c)[None, :] % c
    sharing = min(n, max(1, LANES // c))
    head = np.arange(sharing * c) // c

    def between(half: int) -> np.ndarray:
        return (i // (2 * half) == j // (2 * half)) & (i & half != 0) & (j & half == 0)

    made = {
        "seen": i >= j,
        "before": i > j,
        "own": head[:, None] == head[None, :],
        "halves": tuple(between(half) for half in halvings(c)),
        "small": j[None] // _SUBSTITUTED == np.arange(max(c // _SUBSTITUTED, 1))[:, None, None],
    }
    if channels:
        t = np.arange(c)[None, :]

        def reach(half: int) -> np.ndarray:
            middle = i // (2 * half) * (2 * half) + half
            return np.where(i >= middle, (t >= middle) & (t <= i), (t > i) & (t < middle))

        made |= {"reach": tuple(reach(half) for half in halvings(c)), "upto": t <= i, "after": t > i}
    ready = jax.tree.map(lambda mask: mask.astype(dtype), made)
    return Masks(**{"reach": None, "upto": None, "after": None, **ready})


def spread(column: jax.Array, width: int) -> jax.Array:
    """Broadcasts a scalar per row and head, [C, n], over the lanes of each head: [C, n width]."""
    c, n = column.shape
    return jnp.concatenate([jnp.broadcast_to(column[:, h : h + 1], (c, width)) for h in range(n)], axis=1)


def block_diagonal(x: jax.Array, n: int, own: jax.Array) -> jax.Array:
    """The block-diagonal [n R, n W] of n matrices side by side, [R, n W]. `own` masks those that share lanes."""
    if n == 1:
        return x
    rows, columns = x.shape
    sharing = own.shape[0] // rows if columns // n < LANES else 1
    wide = columns * sharing // n  # Columns of the matrices that share lanes.

    def row_of_blocks(index: int) -> jax.Array:
        block = x[:, index * wide : (index + 1) * wide]
        block = jnp.concatenate([block] * sharing, axis=0) * own if sharing > 1 else block
        zeros = jnp.zeros(block.shape, x.dtype)
        blocks = [block if other == index else zeros for other in range(n // sharing)]
        return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)

    return jnp.concatenate([row_of_blocks(index) for index in range(n // sharing)], axis=0)


def _of_head(x: jax.Array, head: int, n: int) -> jax.Array:
    width = x.shape[1] // n
    return x[:, head * width : (head + 1) * width]


@dataclass(frozen=True)
class Chunk:
    """The tokens of a chunk, n heads side by side, in float32."""

    q: Any  # [C, n K]
    k: Any  # [C, n K]
    beta: Any  # [C, n]
    g: Any  # [C, n K] for one gate per channel, [1, n C] for one gate per head, None for no gate
    gates: Gates | None  # For one gate per head.
    segments: Segments | None
    mask: Masks
    precision: MatmulPrecision

    def dot(self, a: jax.Array, b: jax.Array, form: Form) -> jax.Array:
        return dot(a, b, form, self.precision)

    @property
    def triangles(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.mask.seen, self.mask.before, self.mask.own

    @property
    def decay(self) -> Decay | None:
        """The decays of one gate per head, or of no gate; None for one gate per channel."""
        mask, segments = self.mask, self.segments
        if self.gates is not None:
            return Decay(*head_decay(self.g, self.gates, segments, self.triangles, self.precision))
        if self.g is not None:
            return None
        if segments is None:
            return Decay(mask.seen, None, None, None)
        pairs = jnp.where(same_segment(segments), mask.seen, 0.0)
        return Decay(pairs, *_segment_masks(segments, self.beta.shape[1], mask.seen.dtype))


# One gate per head.


def same_segment(segments: Segments) -> jax.Array:
    return segments.column == segments.row  # [C, n C]


def _segment_masks(segments: Segments, n: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """1 or 0, per head: whether a token sees the state before; the state after sees it; that sees the state before."""
    c = segments.column.shape[0]
    last = segments.column[c - 1 :, :]  # [1, 1]

    def per_head(column: jax.Array) -> jax.Array:
        return jnp.broadcast_to(column.astype(dtype), (column.shape[0], n))

    return per_head(segments.column == 0), per_head(segments.column == last), per_head(last == 0)


def _head_decay(
    g_row: jax.Array, gates: Gates, segments: Segments | None, triangles: Any, precision: MatmulPrecision
) -> tuple[jax.Array, ...]:
    """The fields of `Decay` for one gate per head, g_row [1, n C].

    Only g_row has a gradient; `gates` are sums of it, and `triangles` the masks seen, before and own. dg_t is the sum
    over everything that decays by g_t: pairs with j < t <= i, the state before the chunk as i >= t reads it, what j < t
    writes to the state after the chunk, and the state across the chunk.
    """
    del g_row, precision
    seen = triangles[0]
    c, n = gates.coarse_column.shape
    visible = seen > 0
    if segments is not None:
        visible = visible & same_segment(segments)
    seg = (spread(gates.coarse_column, c) - gates.coarse_row) + (spread(gates.fine_column, c) - gates.fine_row)
    pairs = jnp.exp(jnp.where(visible, seg, _LOG_ZERO))
    into = jnp.exp(gates.coarse_column + gates.fine_column)
    last_coarse, last_fine = gates.coarse_column[c - 1 :, :], gates.fine_column[c - 1 :, :]  # [1, n]
    onward = jnp.exp((last_coarse - gates.coarse_column) + (last_fine - gates.fine_column))
    across = into[c - 1 :, :]
    if segments is not None:
        same_into, same_onward, same_across = _segment_masks(segments, n, pairs.dtype)
        into, onward, across = into * same_into, onward * same_onward, across * same_across
    return pairs, into, onward, across


def _head_decay_forward(
    g_row: jax.Array, gates: Gates, segments: Segments | None, triangles: Any, precision: MatmulPrecision
) -> tuple[Any, Any]:
    decay = head_decay(g_row, gates, segments, triangles, precision)
    return decay, (decay, triangles)


def _head_decay_tangent(precision: MatmulPrecision, saved: Any, tangents: Any) -> tuple[jax.Array, ...]:
    ((pairs, into, onward, across), (seen, before, own)), (t_g,) = saved, tangents
    n = into.shape[1]

    def sums(x: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.sum(_of_head(x, h, n), axis=1, keepdims=True) for h in range(n)], axis=1)  # [C, n]

    upto, after = jnp.where(seen > 0, t_g, 0.0), jnp.where(seen > 0, 0.0, t_g)  # [C, n C]: of t <= i, and of t > i
    between = dot(upto, block_diagonal(before, n, own), "nn", precision)  # [C, n C]: the sum over j < t <= i
    return pairs * between, into * sums(upto), onward * sums(after), across * sums(t_g)


def _head_decay_backward(precision: MatmulPrecision, saved: Any, d_decay: Any) -> tuple[jax.Array]:
    (pairs, into, onward, across), (seen, before, own) = saved
    d_pairs, d_into, d_onward, d_across = d_decay
    c, n = into.shape
    strictly = pairs * d_pairs * before  # [C, n C]
    ones = block_diagonal(before, n, own)
    of_pairs = dot(strictly, ones, "nt", precision)  # [C, n C]: for row i, the sum over j < t
    of_into = spread(into * d_into, c)
    of_onward = spread(onward * d_onward, c)
    each = jnp.where(seen > 0, of_pairs + of_into, of_onward)  # i >= t
    of_across = spread(across * d_across, c)  # [1, n C]
    return (jnp.sum(each, axis=0, keepdims=True) + of_across,)


head_decay = with_derivatives(
    _head_decay,
    forward=_head_decay_forward,
    tangent=_head_decay_tangent,
    backward=_head_decay_backward,
    static_argnums=(4,),
)


# One gate per key channel.


def channel_scores(
    q: jax.Array, k: jax.Array, g: jax.Array, mask: Masks, n: int, precision: MatmulPrecision
) -> tuple[jax.Array, jax.Array]:
    """sum_d x_id k_jd exp(seg_ijd), [C, n C], for x = q, i >= j, and for x = k, i > j, from q, k and g [C, n K]."""
    c = q.shape[0]
    own = jnp.concatenate([jnp.sum(_of_head(q * k, h, n), axis=1, keepdims=True) for h in range(n)], axis=1)  # [C, n]
    of_q = spread(own, c) * (mask.seen - mask.before)
    of_k = jnp.zeros_like(of_q)
    for reach, half in zip(mask.reach, mask.halves, strict=True):
        left = jnp.exp(dot(reach, g, "nn", precision))  # [C, n K]
        k_left = k * left
        rows = jnp.concatenate([q * left, k_left], axis=0)  # [2 C, n K]
        both = dot(rows, block_diagonal(k_left, n, mask.own), "nt", precision)  # [2 C, n C]
        of_q = of_q + both[:c] * half
        of_k = of_k + both[c:] * half
    return of_q, of_k


# Every gate.


def inverses(lowers: list[jax.Array], mask: Masks, n: int, precision: MatmulPrecision) -> list[jax.Array]:
    """(I + L)^-1 of strictly lower triangular L, n of them side by side in each [C, n C].

    All of them advance together, level by level: each is a chain of products, and the chains hide each other's latency.
    """
    c = lowers[0].shape[0]
    found = [_small_inverses(lower, mask) for lower in lowers]
    for level, half in reversed([*enumerate(halvings(c))]):
        if half < _SUBSTITUTED:
            continue
        blocks = (c // (2 * half), 2, half, n * c)
        # Only the rows of the second half of each block change: each [C / 2, n C].
        seconds = [x.reshape(blocks)[:, 1].reshape(c // 2, n * c) for x in found]
        below = [split(block_diagonal(lower * mask.halves[level], n, mask.own), precision) for lower in lowers]
        # Each [C / 2, n C] [n C, n C].
        reached = [multiply(split(x, precision), b, "nn", precision) for x, b in zip(seconds, below, strict=True)]
        whole = [split(block_diagonal(x, n, mask.own), precision) for x in found]
        seconds = [
            second - multiply(split(r, precision), x, "nn", precision)
            for second, r, x in zip(seconds, reached, whole, strict=True)
        ]
        found = [
            jnp.stack([x.reshape(blocks)[:, 0], second.reshape(blocks[0], half, n * c)], axis=1).reshape(c, n * c)
            for x, second in zip(found, seconds, strict=True)
        ]
    return found


def _small_inverses(lower: jax.Array, mask: Masks) -> jax.Array:
    """The inverses of the diagonal blocks of 8, in place: [C, n C], zero elsewhere.

    All of them fit one [8, n C] array, each in its own columns, and one substitution inverts them all: row j times
    column j of its block is subtracted from the rows below. It is exact in float32, and needs no matrix unit.
    """
    c, width = lower.shape
    compact = jnp.sum(lower.reshape(c // _SUBSTITUTED, _SUBSTITUTED, width) * mask.small, axis=0)  # [8, n C]
    place = _iota((_SUBSTITUTED, width), 1) & (_SUBSTITUTED - 1)
    x = (_iota((_SUBSTITUTED, width), 0) == place).astype(lower.dtype)
    for j in range(_SUBSTITUTED - 1):
        column = jnp.where(place == j, compact, 0.0)
        # Broadcast over the 8 columns of its block: moved to the first of them, then copied from there.
        column = jnp.roll(column, width - j, 1) if j else column
        for distance in (1, 2, 4):
            column = column + jnp.roll(column, distance, 1)
        x = x - column * jnp.broadcast_to(x[j : j + 1], x.shape)
    return (x[None] * mask.small).reshape(c, width)


def channel_passage(chunk: Chunk, width: int) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """For one gate per channel: q and k as they read the state before, k as it writes the one after, and `across`."""
    (c, n), g = chunk.beta.shape, chunk.g
    into = jnp.exp(chunk.dot(chunk.mask.upto, g, "nn"))  # [C, n K]
    onward = jnp.exp(chunk.dot(chunk.mask.after, g, "nn"))  # [C, n K]
    every = jnp.ones((c, width), g.dtype)
    # Each [K, V], equal along V.
    across = [jnp.exp(chunk.dot(_of_head(g, h, n), every, "tn")) for h in range(n)]
    if chunk.segments is not None:
        last = chunk.segments.column[c - 1 :, :]  # [1, 1]
        into = jnp.where(chunk.segments.column == 0, into, 0.0)
        onward = jnp.where(chunk.segments.column == last, onward, 0.0)
        across = [jnp.where(last == 0, factor, 0.0) for factor in across]
    return chunk.q * into, chunk.k * into, chunk.k * onward, across
