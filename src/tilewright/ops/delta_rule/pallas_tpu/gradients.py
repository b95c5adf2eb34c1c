"""The gradients of a chunk of 64 tokens, for the backward kernel. intra_chunk.py has the forward's algebra and layouts.

For a head with the gradients do of the outputs and dS' of the state after the chunk, and W = [M; (onward k)^T] b T:

    dR = W^T [scale do; dS'],     dv = dR
    dS = across dS' + scale (into q)^T do - (into k)^T dR

The first three results of the chunk are one product [M; A; (onward k)^T] b U, where A b U stands for R - U. Hence

    [dM; dA; d(onward k)^T] = Z b,   Z = [scale do; -dR; dS'] U^T,   dbeta = the sums over columns of Z [M; A; (onward k)^T]

(the last product elementwise), and no gradient goes through the inverse. From the state come d(into q) = scale do S^T and
d(into k) = -dR S^T.

The gradient of the state is transposed, [V, K], two heads side by side, so that dR is too: then W, q and k are operands
as they are, decays of tokens and of channels are rows, and of all operands do and dR alone are transposed. `reverse` has
what one chunk passes to the one before it, dR and dS, and `from_states` the other products with S, dS' and U. The gradients
of q, k and the gates follow from Z for each chunk by itself:

    one gate per head    dq and dk from Z times decays; dg_t sums all that decays by g_t, and nothing that cancels
    one per channel      of mild gates: M = (q exp(a)) (k exp(-a))^T for the sums a, so da = q dq + k (dk as it reads - dk
                         as it is written), and dg sums da from t on. There a pair of tokens j >= t cancels, to the 16
                         bits of a bf16x3 product; pairs of a token with itself are left out.
    strong gates         a product and its gradients for each of `halvings`, down to single tokens: a loop, whose code is
                         that of one halving.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.core.chip import LANES
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.matmul_precision import MatmulPrecision, multiply, split
from tilewright.ops.delta_rule.pallas_tpu import intra_chunk
from tilewright.ops.delta_rule.pallas_tpu.intra_chunk import (
    CHUNK,
    PAIR,
    Stages,
    Terms,
    block_diagonal,
    deep_product,
    down_the_rows,
    in_lock_step,
    narrow_product,
    result_of,
    side_by_side,
    stacked,
    two_diagonal,
    unstacked,
)
from tilewright.ops.delta_rule.wy_transform import halvings

_HALF = CHUNK // 2
_UPTO, _AFTER, _REACH = 0, 2, 3  # Kinds of `intra_chunk.sums_of`.


def constants(gate: str, precision: MatmulPrecision) -> dict[str, np.ndarray]:
    """Those of the forward, and the transposed sums."""
    made = intra_chunk.constants(gate, precision)
    terms = 2 if precision is MatmulPrecision.BF16X3 else 1
    if gate == "head":
        lane = np.arange(LANES)
        head, token = lane % CHUNK // _HALF, lane // CHUNK * _HALF + lane % _HALF
        earlier = (head[:, None] == head[None, :]) & (token[:, None] < token[None, :])
        made["earlier"] = np.concatenate([earlier] * terms, axis=0).astype(made["heads"].dtype)
    if gate == "channel":
        sums = made["sums"].reshape(-1, CHUNK, terms * CHUNK)[:, :, :CHUNK]
        made["back"] = np.concatenate([np.swapaxes(sums, 1, 2)] * terms, axis=2)
    return made


def terms_of(x: jax.Array, count: int) -> Terms:
    """The terms that lie side by side."""
    width = x.shape[1] // count
    return tuple(x[:, n * width : (n + 1) * width] for n in range(count))


def _of_head(x: jax.Array, head: int) -> jax.Array:
    width = x.shape[1] // PAIR
    return x[:, head * width : (head + 1) * width]


def over_lanes(x: jax.Array, width: int) -> jax.Array:
    """[R, 2 * 128], equal along each head's lanes, as [R, 2 width]."""
    return jnp.concatenate([_of_head(x, h) for h in range(PAIR) for _ in range(width // LANES)], axis=1)


def _by_head(first: jax.Array, second: jax.Array) -> jax.Array:
    """[R, 128] with what the lanes of each head are to have."""
    shape = (max(first.shape[0], second.shape[0]), LANES)
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.where((lane & _HALF) == 0, jnp.broadcast_to(first, shape), jnp.broadcast_to(second, shape))


def _as_row(first: jax.Array, second: jax.Array, masks: Mapping[str, Any]) -> jax.Array:
    """Two columns, [64, 1] or equal along 128 lanes, as a row [1, 128] in the order of the lanes."""
    return _diagonal(_by_head(first, second), masks)


def _diagonal(x: jax.Array, masks: Mapping[str, Any]) -> jax.Array:
    """The diagonals of two matrices [64, 128] as a row [1, 128]."""
    return jnp.sum(x * (masks["triangles"][0] - masks["triangles"][1]), axis=0, keepdims=True)


def _sum_of(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over each head's lanes, [R, 1] each."""
    return tuple(jnp.sum(_of_head(x, h), axis=1, keepdims=True) for h in range(PAIR))  # type: ignore[return-value]


def _sum_back(kind: Any, x: jax.Array, masks: Mapping[str, Any], precision: MatmulPrecision) -> jax.Array:
    """The gradient of the kind of sums whose gradient is x: [64, 2 K]."""
    return multiply((masks["back"][kind],), (jnp.concatenate(split(x, precision), axis=0),), "nn", precision)


def _column(row: jax.Array) -> jax.Array:
    """[1, 128] in the order of the lanes as [64, 2 * 128], equal along each head's lanes."""
    return unstacked(down_the_rows(row, LANES))


def _columns(row: jax.Array, width: int) -> jax.Array:
    """[1, 128] in the order of the lanes as [64, 2 width], equal along each head's lanes."""
    return over_lanes(_column(row), width)


@dataclass(frozen=True)
class Reversed:
    """What `reverse` finds of a chunk of two heads."""

    before: jax.Array  # [V, 2 K]: the gradient of the state before it, transposed
    after: Terms  # [V, 2 K]: the gradient of the state after it, in terms
    residual: Terms  # [64, 2 V]: dR, in terms
    across: jax.Array  # [1, 2 K]: across S dS', summed over V


def reverse(
    after: jax.Array,
    d_o: jax.Array,
    weights: jax.Array,
    reads: Terms,
    states: Sequence[Terms],
    across: jax.Array | None,
    into: jax.Array | None,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
    scale: float,
) -> Stages:
    """Takes the gradient of the state after a chunk, [V, 2 K], to the one before it.

    `weights` are those of `intra_chunk.weights` with the inverse, [128 + K, 128] in terms. `reads` is q above k as they
    read the state, [128, 2 K]; `states` are each head's state before, [V, K]. `into` [64, 2 * 128] is for one gate per
    head, where `reads` are q and k themselves.
    """
    count = weights.shape[1] // LANES
    pushed, d_o_t = split(after, precision), stacked(d_o).T  # [V, 2 K], [V, 128]
    parts = terms_of(weights, count)
    onward = tuple(jnp.concatenate([w[2 * CHUNK :] * masks["heads"][h] for h in range(PAIR)], axis=0) for w in parts)
    from_o = narrow_product((d_o_t,), tuple(two_diagonal(w[:CHUNK], masks) for w in parts), precision)
    residual_t = narrow_product(pushed, onward, precision) + scale * from_o  # [V, 128]
    yield
    before = after if across is None else across * after
    if len(reads) == 1:
        # One product whose weights are q above k, which are pushed once for hi and lo of what they are multiplied with.
        # do times a power of two keeps its 8 bits; the rest of the scale goes to the product.
        rest = math.frexp(scale)[0] or 1.0
        left, right = (scale / rest) * d_o_t.astype(jnp.float32), (-1 / rest) * residual_t
        if into is not None:
            row = _as_row(_of_head(into, 0), _of_head(into, 1), masks)
            left, right = left * row, right * row
        keys = jnp.concatenate([block_diagonal(reads[0][:CHUNK]), block_diagonal(reads[0][CHUNK:])], axis=0)
        rows = split(jnp.concatenate([left, right], axis=1), precision)
        before = before + rest * narrow_product(rows, (keys,), precision)
    else:
        from_q = multiply((d_o_t,), tuple(block_diagonal(x[:CHUNK]) for x in reads), "nn", precision)
        from_k = multiply(
            split(residual_t, precision), tuple(block_diagonal(x[CHUNK:]) for x in reads), "nn", precision
        )
        before = before + scale * from_q - from_k
    yield
    residual = split(unstacked(residual_t.T), precision)  # [64, 2 V]
    kept = []
    for h, state in enumerate(states):
        whole = functools.reduce(jnp.add, [x.astype(jnp.float32) for x in state])
        kept.append(jnp.sum(whole * _of_head(after, h), axis=0, keepdims=True))  # [1, K]
    if len(kept) < PAIR:
        kept.append(jnp.zeros_like(kept[0]))
    total = jnp.concatenate(kept, axis=1)
    return Reversed(before, pushed, residual, total if across is None else across * total)


@dataclass(frozen=True)
class FromStates:
    """What `from_states` finds of a chunk of two heads."""

    z: jax.Array  # [128, 128]: the rows of Z of M, above those of A
    reads: jax.Array  # [128, 2 K]: the gradient of into q, above that of into k, from the state; for one gate per head
    # of q and of k
    onward: jax.Array  # [64, 2 K]: that of onward k, without beta


def from_states(
    after: Terms,
    residual: Terms,
    d_o: jax.Array,
    u: Terms,
    states: Sequence[Terms],
    into: jax.Array | None,
    precision: MatmulPrecision,
    scale: float,
) -> Stages:
    """The products of a chunk with its states and their gradients, which are those of `Reversed`. `u` is [64, 2 V]."""
    diagonal = jnp.concatenate([block_diagonal(x) for x in u], axis=0)  # [terms * 128, 2 V]
    both = multiply((jnp.concatenate([d_o, *residual], axis=0),), (diagonal,), "nt", precision)
    of_o, of_r = both[:CHUNK, :LANES], both[CHUNK : 2 * CHUNK, :LANES]
    if len(u) == 2:
        of_o, of_r = of_o + both[:CHUNK, LANES:], of_r + both[CHUNK : 2 * CHUNK, LANES:] + both[2 * CHUNK :, :LANES]
    yield
    found, written = [], []
    for h, state in enumerate(states):
        own = [_of_head(x, h) for x in residual]
        upper = [_of_head(d_o, h), *(jnp.zeros_like(x) for x in own[1:])]
        rows = jnp.concatenate([jnp.concatenate(upper, axis=1), jnp.concatenate(own, axis=1)], axis=0)
        found.append(deep_product(rows, state, precision))  # [128, K]
        own_u = jnp.concatenate([_of_head(x, h) for x in u], axis=1)
        written.append(deep_product(own_u, tuple(_of_head(x, h) for x in after), precision))  # [64, K]
    yield
    if len(states) < PAIR:
        found, written = ([*x, jnp.zeros_like(x[0])] for x in (found, written))
    both = jnp.concatenate(found, axis=1)
    of_q, of_k = scale * both[:CHUNK], -both[CHUNK:]
    if into is not None:
        decay = over_lanes(into, of_q.shape[1] // PAIR)
        of_q, of_k = decay * of_q, decay * of_k
    return FromStates(
        jnp.concatenate([scale * of_o, -of_r], axis=0),
        jnp.concatenate([of_q, of_k], axis=0),
        jnp.concatenate(written, axis=1),
    )


def _products(weighted: jax.Array, rows: Terms, keys: Terms, precision: MatmulPrecision) -> Stages:
    """The gradients of rows and keys, [128, 2 K] and [64, 2 K], if `weighted` [128, 128] is that of rows keys^T."""
    of_rows = multiply(split(weighted, precision), tuple(block_diagonal(x) for x in keys), "nn", precision)
    turned = unstacked(weighted.T)  # [64, 2 * 128]
    yield
    of_keys = [
        deep_product(side_by_side(_of_head(turned, h), precision), tuple(_of_head(x, h) for x in rows), precision)
        for h in range(PAIR)
    ]
    return of_rows, jnp.concatenate(of_keys, axis=1)


@dataclass(frozen=True)
class Given:
    """What the gradients of q, k, beta and the gates of a chunk of two heads are computed from."""

    q: jax.Array  # [64, 2 K]
    k: jax.Array  # [64, 2 K]
    beta: jax.Array  # [1, 128]
    scores: jax.Array  # [128, 128]: M above A
    d_across: jax.Array  # `Reversed.across`
    # From `FromStates`:
    z: jax.Array
    d_reads: jax.Array
    d_onward: jax.Array


def head_gradients(
    given: Given,
    pairs: jax.Array | None,
    onward: jax.Array | None,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
) -> Stages:
    """dq, dk [64, 2 K], dg and dbeta [1, 128], of one gate per head or none (then dg is None).

    `pairs` and `onward` are what `intra_chunk.head_gated` returns.
    """
    seen, before = masks["triangles"][0], masks["triangles"][1]
    decay = seen if pairs is None else pairs
    q, k, z, beta, scores = given.q, given.k, given.z, given.beta, given.scores
    depth = k.shape[1] // PAIR
    weighted = z * beta
    shares = scores * z  # [128, 128]
    of_scores = _products(
        weighted * jnp.concatenate([decay, decay * before], axis=0),
        (jnp.concatenate([q, k], axis=0),),
        (k,),
        precision,
    )
    of_reads, of_keys = yield from of_scores
    column = _column(beta if onward is None else beta * onward)
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    read = given.d_reads + of_reads
    d_k = read[CHUNK:] + of_keys + over_lanes(column, depth) * given.d_onward
    of_written = _by_head(*_sum_of(k * given.d_onward))  # [64, 128]
    total = _diagonal(of_written, masks)
    d_beta = jnp.sum(shares, axis=0, keepdims=True) + (total if onward is None else total * onward)
    yield
    d_g = None
    if pairs is not None:
        between = side_by_side((shares[:CHUNK] + shares[CHUNK:]) * beta, precision)
        of_pairs = multiply((between,), (masks["earlier"][...],), "nn", precision)  # Row i: the sum over j < t.
        of_into = _by_head(*_sum_of(q * given.d_reads[:CHUNK] + k * given.d_reads[CHUNK:]))
        of_onward = of_written * _by_head(_of_head(column, 0), _of_head(column, 1))
        each = jnp.where(seen > 0, of_pairs + of_into, of_onward)
        d_g = jnp.sum(each, axis=0, keepdims=True) + _by_head(*_sum_of(given.d_across))
    return read[:CHUNK], d_k, d_g, d_beta


def _own(weighted: jax.Array, width: int, masks: Mapping[str, Any]) -> jax.Array:
    """The diagonals of two matrices [64, 128], [64, width] over each head's lanes: a token's own q . k, which no gate
    decays.
    """
    itself = weighted * (masks["triangles"][0] - masks["triangles"][1])
    heads = [itself * masks["heads"][h].astype(jnp.float32) for h in range(PAIR)]
    each = [jnp.broadcast_to(jnp.sum(x, axis=1, keepdims=True), (CHUNK, width // PAIR)) for x in heads]
    return jnp.concatenate(each, axis=1)


def channel_gradients(
    given: Given,
    sums: jax.Array,
    reads: Terms,
    across: jax.Array,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
) -> Stages:
    """dq, dk, dg [64, 2 K] and dbeta [1, 128], of one mild gate per channel.

    `sums`, `reads` and `across` are what `intra_chunk.channel_gated` returns.
    """
    before = masks["triangles"][1]
    z, beta, scores = given.z, given.beta, given.scores
    q, k = given.q.astype(jnp.float32), given.k.astype(jnp.float32)
    depth = k.shape[1] // PAIR
    up, down = jnp.exp(sums), jnp.exp(-sums)
    k_down = k * down
    weighted = z * (jnp.concatenate([before, before], axis=0) * beta)
    own = _own(z[:CHUNK] * beta, k.shape[1], masks)
    yield
    of_reads, of_keys = yield from _products(weighted, reads, split(k_down, precision), precision)
    d_onward = across * given.d_onward
    written, column = k_down * d_onward, _columns(beta, depth)
    d_beta = jnp.sum(scores * z, axis=0, keepdims=True) + _as_row(*_sum_of(written), masks)
    tail = jnp.sum(column * written, axis=0, keepdims=True) + given.d_across
    yield
    read = given.d_reads + of_reads
    d_q, d_read = up * read[:CHUNK], up * read[CHUNK:]
    d_write = down * (of_keys + column * d_onward)
    d_g = _sum_back(_UPTO, q * d_q + k * (d_read - d_write), masks, precision) + tail
    return d_q + own * k, d_read + d_write + own * q, d_g, d_beta


def _reach(level: Any, g: Terms, masks: Mapping[str, Any], precision: MatmulPrecision) -> jax.Array:
    """The sums of gates from the middle of a block of a halving, or to it, [64, 2 K]."""
    rows = masks["sums"][pl.ds(pl.multiple_of((level + _REACH) * CHUNK, CHUNK), CHUNK), :]
    return multiply((rows,), (jnp.concatenate(g, axis=0),), "nn", precision)


def _done(result: Any) -> Stages:
    yield
    return result


def strong_scores(
    pairs: Sequence[tuple[jax.Array, jax.Array, jax.Array, jax.Array]],
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
) -> list[Stages]:
    """What `intra_chunk.channel_gated` returns, for any gates, from q, k, g and beta of each pair of heads.

    The forward has the same halvings one after the other (`intra_chunk.strongly_gated`). Here they are a loop: it is the
    kernel with more code, and a loop compiles sooner.
    """
    itself = masks["triangles"][0] - masks["triangles"][1]
    started, rows = [], []
    for q, k, g, _ in pairs:
        own = intra_chunk.score_product((q,), (k,), precision) * itself
        started.append(jnp.concatenate([own, jnp.zeros_like(own)], axis=0))
        terms = split(jnp.maximum(g, LOWEST_GATE), precision)
        rows.append((q.astype(jnp.float32), k.astype(jnp.float32), terms))

    def halving(row: tuple[jax.Array, jax.Array, Terms], total: jax.Array, level: Any) -> Stages:
        q, k, g = row
        left = jnp.exp(_reach(level, g, masks, precision))
        yield
        k_left, half = k * left, masks["halves"][level]
        keys = split(k_left, precision)
        both = intra_chunk.score_product(split(jnp.concatenate([q * left, k_left], axis=0), precision), keys, precision)
        yield
        return total + both * jnp.concatenate([half, half], axis=0)

    def each(level: Any, totals: list[jax.Array]) -> list[jax.Array]:
        stages = [halving(row, total, level) for row, total in zip(rows, totals, strict=True)]
        return result_of(in_lock_step(stages))

    done = jax.lax.fori_loop(0, len(halvings(CHUNK)), each, started)
    results = []
    for both, (q, k, _), (_, _, g, beta) in zip(done, rows, pairs, strict=True):
        sums, _, after = intra_chunk.sums_of(3, jnp.maximum(g, LOWEST_GATE), masks, precision)
        read, erase = intra_chunk.lower_triangles(both, masks)
        written = stacked(k * jnp.exp(after)).T * beta
        into = jnp.exp(sums)
        reads = split(jnp.concatenate([q * into, k * into], axis=0), precision)
        plain = jnp.concatenate([read, erase], axis=0)
        results.append(_done((read * beta, erase * beta, written, plain, reads, into[CHUNK - 1 :], sums, None)))
    return results


def strong_gradients(
    pairs: Sequence[tuple[Given, jax.Array]],
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
) -> list[tuple[jax.Array, jax.Array, jax.Array, jax.Array]]:
    """What `channel_gradients` returns, for any gates g [64, 2 K], for each pair of heads.

    No exponent is positive unless a gate is, and no two terms cancel.
    """
    before = masks["triangles"][1]
    started, rows, d_betas = [], [], []
    for given, gates in pairs:
        z, beta, scores = given.z, given.beta, given.scores
        q, k = given.q.astype(jnp.float32), given.k.astype(jnp.float32)
        g = jnp.maximum(gates, LOWEST_GATE)
        sums, _, after = intra_chunk.sums_of(3, g, masks, precision)
        into, onward, column = jnp.exp(sums), jnp.exp(after), _columns(beta, k.shape[1] // PAIR)
        written = k * onward * given.d_onward
        weighted = z * (jnp.concatenate([before, before], axis=0) * beta)
        d_beta = jnp.sum(scores * z, axis=0, keepdims=True) + _as_row(*_sum_of(written), masks)
        of_q, of_k = into * given.d_reads[:CHUNK], into * given.d_reads[CHUNK:]
        d_g = _sum_back(_UPTO, q * of_q + k * of_k, masks, precision)
        d_g = d_g + _sum_back(_AFTER, column * written, masks, precision) + given.d_across
        own = _own(z[:CHUNK] * beta, k.shape[1], masks)
        started.append((of_q + own * k, of_k + column * onward * given.d_onward + own * q, d_g))
        rows.append((q, k, split(g, precision), weighted))
        d_betas.append(d_beta)

    def halving(row: tuple[jax.Array, jax.Array, Terms, jax.Array], totals: Any, level: Any) -> Stages:
        q, k, g, weighted = row
        left = jnp.exp(_reach(level, g, masks, precision))
        half = masks["halves"][level]
        k_left = k * left
        yield
        of_reads, of_keys = yield from _products(
            weighted * jnp.concatenate([half, half], axis=0),
            split(jnp.concatenate([q * left, k_left], axis=0), precision),
            split(k_left, precision),
            precision,
        )
        of_q, of_k = left * of_reads[:CHUNK], left * (of_reads[CHUNK:] + of_keys)
        yield
        d_q, d_k, d_g = totals
        d_g = d_g + _sum_back(level + _REACH, q * of_q + k * of_k, masks, precision)
        return d_q + of_q, d_k + of_k, d_g

    def each(level: Any, totals: list[Any]) -> list[Any]:
        stages = [halving(row, total, level) for row, total in zip(rows, totals, strict=True)]
        return result_of(in_lock_step(stages))

    done = jax.lax.fori_loop(0, len(halvings(CHUNK)), each, started)
    return [(*total, d_beta) for total, d_beta in zip(done, d_betas, strict=True)]
