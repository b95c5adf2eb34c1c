"""One chunk of C tokens of the recurrence as matrix products (the WY / UT transform), as `xla` has it. The kernels of
`pallas_tpu` have the same algebra in another form (pallas_tpu/intra_chunk.py).

Let seg_ij = sum of g over j < t <= i, the log of the decay at i of what was written at j, and decay_ij = exp(seg_ij)
for i >= j, else 0. With the state S before the chunk, for one head:

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

from tilewright.core.derivatives import with_derivatives
from tilewright.ops.delta_rule.matmul_precision import Form, MatmulPrecision, dot, multiply, split

_SUBSTITUTED = 8  # Tokens whose inverse is computed by substitution: the sublanes of a float32 tile.
_LOG_ZERO = -1e30  # Its exponential is 0.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gates:
    """One gate per head: cumulative sums of its two parts inside the chunk (gates.py)."""

    coarse: Any  # [C]
    fine: Any  # [C]


@dataclass(frozen=True)
class Decay:
    """The factors that a gate multiplies by; None stands for exactly 1."""

    pairs: Any  # [C, C], 0 above the diagonal
    into: Any  # [C, 1]
    onward: Any  # [C, 1]
    across: Any  # [1, 1]


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def halvings(c: int) -> list[int]:
    """The sizes of the half blocks: C/2, ..., 2, 1."""
    return [c >> level for level in range(1, c.bit_length())]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """Ones and zeros that depend on C alone."""

    seen: Any  # [C, C]: i >= j
    before: Any  # [C, C]: i > j
    halves: Any  # For each of `halvings`, [C, C]: i in the second half of a block and j in its first
    small: Any  # [C / 8, 1, C]: the columns of each diagonal block of 8
    # For one gate per channel, else None:
    reach: Any  # For each of `halvings`, [C, C]: times g, the sum from the middle of a block to i, or from i to it
    upto: Any  # [C, C]: times g, the sum to i
    after: Any  # [C, C]: times g, the sum after i


@functools.cache
def masks(c: int, dtype: np.dtype, *, channels: bool) -> Masks:
    """Made by NumPy, once: they are constants of whatever is traced with them."""
    i, j = np.arange(c)[:, None], np.arange(c)[None, :]

    def between(half: int) -> np.ndarray:
        return (i // (2 * half) == j // (2 * half)) & (i & half != 0) & (j & half == 0)

    made = {
        "seen": i >= j,
        "before": i > j,
        "halves": tuple(between(half) for half in halvings(c)),
        "small": j[None] // _SUBSTITUTED == np.arange(max(c // _SUBSTITUTED, 1))[:, None, None],
    }
    if channels:

        def reach(half: int) -> np.ndarray:
            middle = i // (2 * half) * (2 * half) + half
            return np.where(i >= middle, (j >= middle) & (j <= i), (j > i) & (j < middle))

        made |= {"reach": tuple(reach(half) for half in halvings(c)), "upto": j <= i, "after": j > i}
    ready = jax.tree.map(lambda mask: mask.astype(dtype), made)
    return Masks(**{"reach": None, "upto": None, "after": None, **ready})


@dataclass(frozen=True)
class Chunk:
    """The tokens of a chunk and head, in float32."""

    q: Any  # [C, K]
    k: Any  # [C, K]
    g: Any  # [C, K] for one gate per channel, [C] for one gate per head, None for no gate
    gates: Gates | None  # For one gate per head.
    segments: Any  # [C] int32: how many sequences have started in the chunk up to each token; None for one sequence
    mask: Masks
    precision: MatmulPrecision

    def dot(self, a: jax.Array, b: jax.Array, form: Form) -> jax.Array:
        return dot(a, b, form, self.precision)

    @property
    def decay(self) -> Decay | None:
        """The decays of one gate per head, or of no gate; None for one gate per channel."""
        mask, segments = self.mask, self.segments
        if self.gates is not None:
            return Decay(*head_decay(self.g, self.gates, segments, (mask.seen, mask.before), self.precision))
        if self.g is not None:
            return None
        if segments is None:
            return Decay(mask.seen, None, None, None)
        pairs = jnp.where(same_segment(segments), mask.seen, 0.0)
        return Decay(pairs, *(seen.astype(mask.seen.dtype) for seen in _segment_masks(segments)))


# One gate per head.


def same_segment(segments: jax.Array) -> jax.Array:
    return segments[:, None] == segments[None, :]  # [C, C]


def _segment_masks(segments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether a token sees the state before; the state after sees it, each [C, 1]; that sees the state before, [1, 1]."""
    each = segments[:, None]
    last = each[-1:]
    return each == 0, each == last, last == 0


def _head_decay(
    g: jax.Array, gates: Gates, segments: jax.Array | None, triangles: Any, precision: MatmulPrecision
) -> tuple[jax.Array, ...]:
    """The fields of `Decay` for one gate per head, g [C].

    Only g has a gradient; `gates` are sums of it, and `triangles` the masks seen and before. dg_t is the sum over
    everything that decays by g_t: pairs with j < t <= i, the state before the chunk as i >= t reads it, what j < t
    writes to the state after the chunk, and the state across the chunk.
    """
    del g, precision
    visible = triangles[0] > 0
    if segments is not None:
        visible = visible & same_segment(segments)
    coarse, fine = gates.coarse[:, None], gates.fine[:, None]  # [C, 1]
    seg = (coarse - gates.coarse[None, :]) + (fine - gates.fine[None, :])
    pairs = jnp.exp(jnp.where(visible, seg, _LOG_ZERO))
    into = jnp.exp(coarse + fine)
    onward = jnp.exp((coarse[-1:] - coarse) + (fine[-1:] - fine))
    across = into[-1:]
    if segments is not None:
        same_into, same_onward, same_across = (seen.astype(pairs.dtype) for seen in _segment_masks(segments))
        into, onward, across = into * same_into, onward * same_onward, across * same_across
    return pairs, into, onward, across


def _head_decay_forward(
    g: jax.Array, gates: Gates, segments: jax.Array | None, triangles: Any, precision: MatmulPrecision
) -> tuple[Any, Any]:
    decay = head_decay(g, gates, segments, triangles, precision)
    return decay, (decay, triangles)


def _head_decay_tangent(precision: MatmulPrecision, saved: Any, tangents: Any) -> tuple[jax.Array, ...]:
    ((pairs, into, onward, across), (seen, before)), (t_g,) = saved, tangents
    t_g = t_g[None, :]
    upto, after = jnp.where(seen > 0, t_g, 0.0), jnp.where(seen > 0, 0.0, t_g)  # [C, C]: of t <= i, and of t > i
    between = dot(upto, before, "nn", precision)  # [C, C]: the sum over j < t <= i

    def sums(x: jax.Array) -> jax.Array:
        return jnp.sum(x, axis=1, keepdims=True)

    return pairs * between, into * sums(upto), onward * sums(after), across * sums(t_g)


def _head_decay_backward(precision: MatmulPrecision, saved: Any, d_decay: Any) -> tuple[jax.Array]:
    (pairs, into, onward, across), (seen, before) = saved
    d_pairs, d_into, d_onward, d_across = d_decay
    strictly = pairs * d_pairs * before  # [C, C]
    of_pairs = dot(strictly, before, "nt", precision)  # [C, C]: for row i, the sum over j < t
    each = jnp.where(seen > 0, of_pairs + into * d_into, onward * d_onward)  # i >= t
    return (jnp.sum(each, axis=0) + (across * d_across)[0],)


head_decay = with_derivatives(
    _head_decay,
    forward=_head_decay_forward,
    tangent=_head_decay_tangent,
    backward=_head_decay_backward,
    static_argnums=(4,),
)


# One gate per key channel.


def channel_scores(
    q: jax.Array, k: jax.Array, g: jax.Array, mask: Masks, precision: MatmulPrecision
) -> tuple[jax.Array, jax.Array]:
    """sum_d x_id k_jd exp(seg_ijd), [C, C], for x = q, i >= j, and for x = k, i > j, from q, k and g [C, K]."""
    c = q.shape[0]
    of_q = jnp.sum(q * k, axis=1, keepdims=True) * (mask.seen - mask.before)
    of_k = jnp.zeros_like(of_q)
    for reach, half in zip(mask.reach, mask.halves, strict=True):
        left = jnp.exp(dot(reach, g, "nn", precision))  # [C, K]
        k_left = k * left
        rows = jnp.concatenate([q * left, k_left], axis=0)  # [2 C, K]
        both = dot(rows, k_left, "nt", precision)  # [2 C, C]
        of_q = of_q + both[:c] * half
        of_k = of_k + both[c:] * half
    return of_q, of_k


# Every gate.


def inverse(lower: jax.Array, mask: Masks, precision: MatmulPrecision) -> jax.Array:
    """(I + L)^-1 of a strictly lower triangular L, [C, C]."""
    c = lower.shape[0]
    found = _small_inverses(lower, mask)
    for level, half in reversed([*enumerate(halvings(c))]):
        if half < _SUBSTITUTED:
            continue
        blocks = (c // (2 * half), 2, half, c)
        # Only the rows of the second half of each block change: [C / 2, C].
        second = found.reshape(blocks)[:, 1].reshape(c // 2, c)
        below = split(lower * mask.halves[level], precision)
        reached = multiply(split(second, precision), below, "nn", precision)  # [C / 2, C] [C, C]
        second = second - multiply(split(reached, precision), split(found, precision), "nn", precision)
        first = found.reshape(blocks)[:, 0]
        found = jnp.stack([first, second.reshape(first.shape)], axis=1).reshape(c, c)
    return found


def _small_inverses(lower: jax.Array, mask: Masks) -> jax.Array:
    """The inverses of the diagonal blocks of 8, in place: [C, C], zero elsewhere.

    All of them fit one [8, C] array, each in its own columns, and one substitution inverts them all: row j times
    column j of its block is subtracted from the rows below. It is exact in float32, and needs no matrix unit.
    """
    c = lower.shape[0]
    compact = jnp.sum(lower.reshape(c // _SUBSTITUTED, _SUBSTITUTED, c) * mask.small, axis=0)  # [8, C]
    place = _iota((_SUBSTITUTED, c), 1) & (_SUBSTITUTED - 1)
    x = (_iota((_SUBSTITUTED, c), 0) == place).astype(lower.dtype)
    for j in range(_SUBSTITUTED - 1):
        column = jnp.where(place == j, compact, 0.0)
        # Broadcast over the 8 columns of its block: moved to the first of them, then copied from there.
        column = jnp.roll(column, c - j, 1) if j else column
        for distance in (1, 2, 4):
            column = column + jnp.roll(column, distance, 1)
        x = x - column * jnp.broadcast_to(x[j : j + 1], x.shape)
    return (x[None] * mask.small).reshape(c, c)


def channel_passage(chunk: Chunk) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For one gate per channel: q and k as they read the state before, k as it writes the one after, and `across`."""
    g = chunk.g
    into = jnp.exp(chunk.dot(chunk.mask.upto, g, "nn"))  # [C, K]
    onward = jnp.exp(chunk.dot(chunk.mask.after, g, "nn"))  # [C, K]
    across = jnp.exp(chunk.dot(g, jnp.ones((g.shape[0], 1), g.dtype), "tn"))  # [K, 1]
    if chunk.segments is not None:
        same_into, same_onward, same_across = _segment_masks(chunk.segments)
        into = jnp.where(same_into, into, 0.0)
        onward = jnp.where(same_onward, onward, 0.0)
        across = jnp.where(same_across, across, 0.0)
    return chunk.q * into, chunk.k * into, chunk.k * onward, across
