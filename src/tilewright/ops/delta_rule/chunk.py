"""One chunk of C tokens of the recurrence, as matrix products: the algebra that `xla` and `pallas_tpu` share.

Let seg_ij = sum of g over j < t <= i, the log of what is left at i of what was written at j, and decay_ij = exp(seg_ij)
for i >= j, else 0. With the state S before the chunk, for n heads side by side:

    M_ij = scale (q_i . k_j) decay_ij,    L_ij = beta_i (k_i . k_j) decay_ij for i > j
    R = beta (v - into k S),              U = (I + L)^-1 R
    o = scale into q S + M U,             S' = across S + (onward k)^T U

where into_i = exp(sum of g to i), onward_j = exp(sum of g after j), across = exp(sum of all g). U holds the corrections
that the recurrence would write, token by token. A gate a head scales rows of products; a gate a channel (KDA) scales
the operands, and (q_i . k_j) decay_ij becomes a product over channels of its own.

No exponent is positive unless a gate is, and none is a difference of two inexact sums: with gates of -1e4 such a difference
is off by 1e-3, and exp(-sum) overflows. For one gate a head, g is written as a coarse part, a multiple of 1/16, whose sums
are exact, and a fine part, whose sums are small (`coarse_and_fine`). For a gate a channel the chunk is halved again and
again (`halvings`): for i in the second half of a block and j in its first, seg_ij is the sum from the middle to i plus the
sum from j to the middle. The middle is before i: no output depends on a later gate.

Packed sequences: `runs` counts the starts inside the chunk. Tokens of different runs do not see each other, only tokens
of run 0 see S, and S' is of the last run.

(I + L)^-1 is built from inverses of diagonal blocks, twice as large each time: [[A, 0], [B, D]]^-1 has -D^-1 B A^-1 below.
The Neumann series (I - L)(I + L^2)(I + L^4)... is shorter and wrong: with like keys the powers of L grow as binomial
coefficients, 1e18 for 64 tokens, and cancel. The gradient does not go through it: U = (I + L)^-1 R has dR = (I + L)^-T dU
and dL = -dR U^T.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.chip import LANES
from tilewright.ops.delta_rule.products import Exactness, dot, multiply, split

Roll = Callable[[jax.Array, int, int], jax.Array]

_COARSE = 16.0
_SMALL = 8  # Tokens whose inverse is made by substitution: the rows of a float32 tile.
_NOTHING = -1e30  # Its exponential is 0.
# exp(-16384) is 0 in float64 too: a lower gate is this one. Sums of 64 coarse parts are exact to here.
LOWEST_GATE = -16384.0


@dataclass(frozen=True)
class Gates:
    """One gate a head: cumulative sums of its two parts inside the chunk, as columns and as rows.

    They are of the same numbers. A kernel gets both, since turning one into the other costs it a transpose.
    """

    coarse_column: Any  # [C, n]
    fine_column: Any  # [C, n]
    coarse_row: Any  # [1, n C]
    fine_row: Any  # [1, n C]


@dataclass(frozen=True)
class Runs:
    """How many sequences have started in the chunk up to each token."""

    column: Any  # [C, 1] int32
    row: Any  # [1, n C] int32


jax.tree_util.register_dataclass(Gates)
jax.tree_util.register_dataclass(Runs)


@dataclass(frozen=True)
class Decay:
    """What is left of what: None is everything, exactly 1."""

    pairs: Any  # [C, n C], 0 above the diagonal
    into: Any  # [C, n]
    onward: Any  # [C, n]
    across: Any  # [1, n]


jax.tree_util.register_dataclass(Decay)


def coarse_and_fine(g: jax.Array, sums: Callable[[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Cumulative sums of the two parts of g. Sums of the coarse part are exact; those of the fine part are below C / 32."""
    coarse = jnp.round(g * _COARSE) / _COARSE
    return sums(coarse), sums(g - coarse)


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def halvings(c: int) -> list[int]:
    """The sizes of the half blocks: C/2, ..., 2, 1."""
    return [c >> level for level in range(1, c.bit_length())]


@dataclass(frozen=True)
class Masks:
    """Ones and zeros that depend on C and n alone. A kernel reads them rather than making them anew for each chunk."""

    seen: Any  # [C, n C]: i >= j
    before: Any  # [C, n C]: i > j
    own: Any  # [m C, m C], for the m of the n matrices that share lanes: the diagonal blocks
    halves: Any  # For each of `halvings`, [C, n C]: i in the second half of a block and j in its first
    small: Any  # [C / 8, 1, n C]: the columns of each diagonal block of 8
    # For a gate a channel, else None:
    reach: Any  # For each of `halvings`, [C, C]: times g, the sum from the middle of a block to i, or from i to it
    upto: Any  # [C, C]: times g, the sum to i
    after: Any  # [C, C]: times g, the sum after i


jax.tree_util.register_dataclass(Masks)


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
        "small": j[None] // _SMALL == np.arange(max(c // _SMALL, 1))[:, None, None],
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
    """[C, n], a number a row and head, over the lanes of each head: [C, n width]."""
    c, n = column.shape
    return jnp.concatenate([jnp.broadcast_to(column[:, h : h + 1], (c, width)) for h in range(n)], axis=1)


def block_diagonal(x: jax.Array, n: int, own: jax.Array) -> jax.Array:
    """[R, n W], n matrices side by side, as the block-diagonal [n R, n W]. `own` is for those that share lanes."""
    if n == 1:
        return x
    rows, columns = x.shape
    sharing = own.shape[0] // rows if columns // n < LANES else 1
    wide = columns * sharing // n  # Of the matrices that share lanes.

    def row_of_blocks(place: int) -> jax.Array:
        part = x[:, place * wide : (place + 1) * wide]
        part = jnp.concatenate([part] * sharing, axis=0) * own if sharing > 1 else part
        none = jnp.zeros(part.shape, x.dtype)
        blocks = [part if other == place else none for other in range(n // sharing)]
        return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1)

    return jnp.concatenate([row_of_blocks(place) for place in range(n // sharing)], axis=0)


def _of_head(x: jax.Array, head: int, n: int) -> jax.Array:
    width = x.shape[1] // n
    return x[:, head * width : (head + 1) * width]


# One gate a head.


def same_run(runs: Runs) -> jax.Array:
    return runs.column == runs.row  # [C, n C]


def _run_masks(runs: Runs, n: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """1 or 0: whether a token sees the state before the chunk, whether the state after it sees the token, or the state."""
    c = runs.column.shape[0]
    last = runs.column[c - 1 :, :]  # [1, 1]

    def per_head(column: jax.Array) -> jax.Array:
        return jnp.broadcast_to(column.astype(dtype), (column.shape[0], n))

    return per_head(runs.column == 0), per_head(runs.column == last), per_head(last == 0)


def ungated_decay(mask: Masks, n: int, runs: Runs | None) -> Decay:
    if runs is None:
        return Decay(mask.seen, None, None, None)
    return Decay(jnp.where(same_run(runs), mask.seen, 0.0), *_run_masks(runs, n, mask.seen.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def head_decay(
    g_row: jax.Array, gates: Gates, runs: Runs | None, triangles: Any, how: Exactness
) -> tuple[jax.Array, ...]:
    """pairs, into, onward, across of one gate a head, g_row [1, n C].

    Only g_row has a gradient; `gates` are sums of it, and `triangles` the masks seen, before and own. dg_t is the sum over
    everything that passes over t: pairs with j < t <= i, what comes from before the chunk to i >= t, what goes from
    j < t onward, and what passes across.
    """
    del g_row, how
    seen = triangles[0]
    c, n = gates.coarse_column.shape
    visible = seen > 0
    if runs is not None:
        visible = visible & same_run(runs)
    seg = (spread(gates.coarse_column, c) - gates.coarse_row) + (spread(gates.fine_column, c) - gates.fine_row)
    pairs = jnp.exp(jnp.where(visible, seg, _NOTHING))
    into = jnp.exp(gates.coarse_column + gates.fine_column)
    last_coarse, last_fine = gates.coarse_column[c - 1 :, :], gates.fine_column[c - 1 :, :]  # [1, n]
    onward = jnp.exp((last_coarse - gates.coarse_column) + (last_fine - gates.fine_column))
    across = into[c - 1 :, :]
    if runs is not None:
        same_into, same_onward, same_across = _run_masks(runs, n, pairs.dtype)
        into, onward, across = into * same_into, onward * same_onward, across * same_across
    return pairs, into, onward, across


def _keep_head_decay(
    g_row: jax.Array, gates: Gates, runs: Runs | None, triangles: Any, how: Exactness
) -> tuple[Any, Any]:
    decay = head_decay(g_row, gates, runs, triangles, how)
    return decay, (decay, gates, runs, triangles)


def _pull_head_decay(how: Exactness, saved: Any, d_decay: Any) -> tuple[jax.Array, Any, Any, Any]:
    (pairs, into, onward, across), gates, runs, (seen, before, own) = saved
    d_pairs, d_into, d_onward, d_across = d_decay
    c, n = into.shape
    strictly = pairs * d_pairs * before  # [C, n C]
    ones = block_diagonal(before, n, own)
    passing = dot(strictly, ones, "nt", how, "b")  # [C, n C]: of row i, the sum over j < t
    from_before = spread(into * d_into, c)
    gone_on = spread(onward * d_onward, c)
    each = jnp.where(seen > 0, passing + from_before, gone_on)  # i >= t
    all_across = spread(across * d_across, c)  # [1, n C]
    d_g = jnp.sum(each, axis=0, keepdims=True) + all_across
    nothing = jax.tree.map(jnp.zeros_like, (gates, (seen, before, own)))
    return d_g, nothing[0], None if runs is None else jax.tree.map(_no_gradient, runs), nothing[1]


def _no_gradient(x: jax.Array) -> Any:
    return np.zeros(x.shape, jax.dtypes.float0)


head_decay.defvjp(_keep_head_decay, _pull_head_decay)


# One gate a key channel.


def channel_scores(
    q: jax.Array, k: jax.Array, g: jax.Array, mask: Masks, n: int, how: Exactness
) -> tuple[jax.Array, jax.Array]:
    """sum_d x_id k_jd exp(seg_ijd), [C, n C], for x = q with i >= j and for x = k with i > j. q, k and g are [C, n K]."""
    c = q.shape[0]
    own = jnp.concatenate([jnp.sum(_of_head(q * k, h, n), axis=1, keepdims=True) for h in range(n)], axis=1)  # [C, n]
    of_q = spread(own, c) * (mask.seen - mask.before)
    of_k = jnp.zeros_like(of_q)
    for level in range(len(halvings(c))):
        left = jnp.exp(dot(mask.reach[level], g, "nn", how, "a"))  # [C, n K]
        k_left = k * left
        rows = jnp.concatenate([q * left, k_left], axis=0)  # [2 C, n K]
        both = dot(rows, block_diagonal(k_left, n, mask.own), "nt", how)  # [2 C, n C]
        of_q = of_q + both[:c] * mask.halves[level]
        of_k = of_k + both[c:] * mask.halves[level]
    return of_q, of_k


# Every gate.


def inverses(lowers: list[jax.Array], mask: Masks, n: int, how: Exactness, roll: Roll = jnp.roll) -> list[jax.Array]:
    """(I + L)^-1 of strictly lower triangular L, n of them side by side in each [C, n C].

    Step by step for all of them: each is a chain of products, and the chains hide each other's latency.
    """
    c = lowers[0].shape[0]
    found = [_small_inverses(lower, mask, roll) for lower in lowers]
    for level, half in reversed([*enumerate(halvings(c))]):
        if half < _SMALL:
            continue
        blocks = (c // (2 * half), 2, half, n * c)
        # Of each block of two halves the second's rows change: each [C / 2, n C].
        seconds = [x.reshape(blocks)[:, 1].reshape(c // 2, n * c) for x in found]
        below = [split(block_diagonal(lower * mask.halves[level], n, mask.own), how) for lower in lowers]  # [n C, n C]
        reached = [multiply(split(x, how), b, "nn", how) for x, b in zip(seconds, below, strict=True)]  # [C / 2, n C]
        whole = [split(block_diagonal(x, n, mask.own), how) for x in found]
        seconds = [
            second - multiply(split(r, how), x, "nn", how) for second, r, x in zip(seconds, reached, whole, strict=True)
        ]
        found = [
            jnp.stack([x.reshape(blocks)[:, 0], second.reshape(blocks[0], half, n * c)], axis=1).reshape(c, n * c)
            for x, second in zip(found, seconds, strict=True)
        ]
    return found


def _small_inverses(lower: jax.Array, mask: Masks, roll: Roll) -> jax.Array:
    """The inverses of the diagonal blocks of 8, in place: [C, n C], zero elsewhere.

    All of them fit one [8, n C] array, each in the columns it has anyway, and one substitution inverts them all: row j,
    times column j of its block, is taken from the rows below. It is exact in float32, and needs no matrix unit.
    """
    c, width = lower.shape
    compact = jnp.sum(lower.reshape(c // _SMALL, _SMALL, width) * mask.small, axis=0)  # [8, n C]
    place = _iota((_SMALL, width), 1) & (_SMALL - 1)
    x = (_iota((_SMALL, width), 0) == place).astype(lower.dtype)
    for j in range(_SMALL - 1):
        column = jnp.where(place == j, compact, 0.0)
        # Over the 8 columns of its block: to the first of them, and from there on.
        column = roll(column, width - j, 1) if j else column
        for distance in (1, 2, 4):
            column = column + roll(column, distance, 1)
        x = x - column * jnp.broadcast_to(x[j : j + 1], x.shape)
    return (x[None] * mask.small).reshape(c, width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def solve(lower: jax.Array, inverted: jax.Array, r: jax.Array, triangles: Any, n: int, how: Exactness) -> jax.Array:
    """U with (I + L) U = R, given the inverse. [C, n V]. Gradients go to L and R."""
    del lower
    return dot(inverted, block_diagonal(r, n, triangles[2]), "nn", how)


def _keep_solve(
    lower: jax.Array, inverted: jax.Array, r: jax.Array, triangles: Any, n: int, how: Exactness
) -> tuple[Any, Any]:
    u = solve(lower, inverted, r, triangles, n, how)
    return u, (inverted, u, triangles)


def _pull_solve(n: int, how: Exactness, saved: Any, d_u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    inverted, u, (seen, before, own) = saved
    c = u.shape[0]
    crossed = dot(inverted, d_u, "tn", how)  # [n C, n V], of which the diagonal blocks count
    d_r = jnp.concatenate([_of_head(crossed[h * c : (h + 1) * c], h, n) for h in range(n)], axis=1)  # [C, n V]
    d_lower = -dot(d_r, block_diagonal(u, n, own), "nt", how) * before  # [C, n C]
    return d_lower, jnp.zeros_like(inverted), d_r, jax.tree.map(jnp.zeros_like, (seen, before, own))


solve.defvjp(_keep_solve, _pull_solve)


@dataclass(frozen=True)
class Chunk:
    """The tokens of a chunk, n heads side by side: float32; where no gradient is taken, q, k and v may be as they came."""

    q: Any  # [C, n K]
    k: Any  # [C, n K]
    v: Any  # [C, n V]
    beta: Any  # [C, n]
    g: Any  # [C, n K] for a gate a channel, [1, n C] for a gate a head, None for none
    gates: Gates | None  # Of a gate a head.
    runs: Runs | None
    mask: Any  # Masks


jax.tree_util.register_dataclass(Chunk)


def _triangles(mask: Masks) -> tuple[jax.Array, jax.Array, jax.Array]:
    return mask.seen, mask.before, mask.own


def decay_of(chunk: Chunk, how: Exactness) -> Decay | None:
    """The decays of a gate a head, or of none; None for a gate a channel."""
    if chunk.g is None:
        return ungated_decay(chunk.mask, chunk.beta.shape[1], chunk.runs)
    if chunk.gates is not None:
        return Decay(*head_decay(chunk.g, chunk.gates, chunk.runs, _triangles(chunk.mask), how))
    return None


def scores(chunk: Chunk, decay: Decay | None, *, scale: float, how: Exactness) -> tuple[jax.Array, jax.Array]:
    """M and L of a chunk, each [C, n C]."""
    q, k, (c, n) = chunk.q, chunk.k, chunk.beta.shape
    if decay is not None:
        both = dot(jnp.concatenate([q, k], axis=0), block_diagonal(k, n, chunk.mask.own), "nt", how, "ab")  # [2 C, n C]
        of_q, of_k = both[:c] * decay.pairs, both[c:] * decay.pairs
    else:
        assert chunk.g is not None
        of_q, of_k = channel_scores(q, k, chunk.g, chunk.mask, n, how)
        if chunk.runs is not None:
            same = same_run(chunk.runs)
            of_q, of_k = jnp.where(same, of_q, 0.0), jnp.where(same, of_k, 0.0)
    return scale * of_q, spread(chunk.beta, c) * of_k * chunk.mask.before


def advance(
    states: tuple[jax.Array, ...],
    chunk: Chunk,
    decay: Decay | None,
    read: jax.Array | None,
    erase: jax.Array,
    inverted: jax.Array,
    *,
    scale: float,
    how: Exactness,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """The outputs [C, n V] and the states after the chunk, from the n states [K, V] before it, M, L and (I + L)^-1.

    Without M there are no outputs.
    """
    c, n = chunk.beta.shape
    width = chunk.v.shape[1] // n
    q, k, written, narrow = chunk.q, chunk.k, chunk.k, "a"
    across: list[Any] = [None] * n
    if decay is None:
        assert chunk.g is not None
        q, k, written, across = channel_passage(chunk, n, width, how)
        narrow = ""
    elif decay.across is not None:
        across = [decay.across[:, h : h + 1] for h in range(n)]

    asked = k if read is None else jnp.concatenate([q, k], axis=0)  # [C or 2 C, n K]
    found = jnp.concatenate(
        [dot(_of_head(asked, h, n), states[h], "nn", how, narrow) for h in range(n)], axis=1
    )  # [C or 2 C, n V]
    of_k = found[-c:]
    if decay is not None and decay.into is not None:
        of_k = spread(decay.into, width) * of_k
    asked_for = spread(chunk.beta, width) * (chunk.v.astype(of_k.dtype) - of_k)
    corrections = solve(erase, inverted, asked_for, _triangles(chunk.mask), n, how)  # [C, n V]
    o = None
    if read is not None:
        of_q = scale * found[:c]
        if decay is not None and decay.into is not None:
            of_q = spread(decay.into, width) * of_q
        o = of_q + dot(read, block_diagonal(corrections, n, chunk.mask.own), "nn", how, "d")
    if decay is not None and decay.onward is not None:
        corrections = spread(decay.onward, width) * corrections
    after = []
    for h, (state, kept) in enumerate(zip(states, across, strict=True)):
        update = dot(_of_head(written, h, n), _of_head(corrections, h, n), "tn", how, narrow)  # [K, V]
        after.append((state if kept is None else kept * state) + update)
    return o, tuple(after)


def channel_passage(
    chunk: Chunk, n: int, width: int, how: Exactness
) -> tuple[jax.Array, jax.Array, jax.Array, list[jax.Array]]:
    """For a gate a channel: q and k as the state before the chunk meets them, k as that after it does, and `across`."""
    c, g = chunk.q.shape[0], chunk.g
    assert g is not None
    into = jnp.exp(dot(chunk.mask.upto, g, "nn", how, "a"))  # [C, n K]
    onward = jnp.exp(dot(chunk.mask.after, g, "nn", how, "a"))  # [C, n K]
    every = jnp.ones((c, width), g.dtype)
    across = [jnp.exp(dot(_of_head(g, h, n), every, "tn", how, "b")) for h in range(n)]  # each [K, V], alike along V
    if chunk.runs is not None:
        last = chunk.runs.column[c - 1 :, :]  # [1, 1]
        into = jnp.where(chunk.runs.column == 0, into, 0.0)
        onward = jnp.where(chunk.runs.column == last, onward, 0.0)
        across = [jnp.where(last == 0, kept, 0.0) for kept in across]
    return chunk.q * into, chunk.k * into, chunk.k * onward, across
