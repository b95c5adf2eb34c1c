"""What `xla` does otherwise on a CPU: it saves more, unrolls the chunks of a block, and has cheaper algebra for a
chunk.

2 cores of an aarch64 do 62 GFLOP/s in one large product. Products of these shapes reach 30 to 56, and XLA fuses nothing
into them, so each further pass over the operands of a chunk counts. Against that there are

- blocks of 64 tokens, whose chunks the program has one by one: the carry of a loop is copied in every iteration, and
  what is stacked over the chunks once more (`split`, `scan`);
- the corrected values, the inverses and the scores of q, which the forward saves for the backward: 4 V and 8 C bytes
  per token and head;
- barriers where XLA would compute an array again for each of its readers;
- an inverse without the masks that a matrix unit needs (`inverse`);
- one product per chunk for one gate per channel, as follows.

With A_i the sum of g over the tokens of the chunk to i, sum_d x_id k_jd exp(A_id - A_jd) is the product of x exp(A) and
k exp(-A), and x exp(A) is what reads the state too: the rows are anchored at the start of the chunk. The halvings of
wy_transform.py take one product per level, with operands of its own.

exp(-A_j) is large, and an error of A_j is an error of all that follows j in the chunk, however large A_j is. So g is
split into a multiple of 2^-14, whose sums are exact, and a rest below that, whose sum F is small: exp(A) = exp(sum of
the former) (1 + F + F^2 / 2) has the error of one exponential, whatever A is.

No gate has a part in q_i . k_i. It is kept out of the product, where the gradient of A_i would have it twice, with
opposite signs: with strong gates what rounding leaves of it would be more than the rest.

A row is anchored as long as no A of the chunk up to this row, in any channel, is beyond +-64: with 32 tokens, gates
down to
-2 on average. The other rows are computed by halvings, which do not run where a block has none. Which way a row takes
depends on the tokens up to it alone, and so does its result, to the bit.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.derivatives import with_derivatives
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.matmul_precision import MatmulPrecision, batched_dot
from tilewright.ops.delta_rule.wy_transform import Masks, channel_scores, masks

PRECISION = MatmulPrecision.FLOAT32_CPU
_dot = functools.partial(batched_dot, precision=PRECISION)

# The work inside a chunk grows with its length, and the work on the state falls. 64 tokens take 1.06 times as long as
# 32, and 16 take 1.13 (delta_rule, T4096, 4 heads of 128, float32, forward+backward, 2 cores of an aarch64).
CHUNK = 32
# Fewer chunks per block compile sooner, and fewer states are recomputed. Blocks of 128 tokens take 1.04 times as long
# as # 64, and 32 as long with half as much memory again (the same run).
BLOCK_TOKENS = 64

_SUBSTITUTED = 8  # Rows of the diagonal blocks that are inverted row by row; 4 and 16 take longer.
_COARSE = 2.0**14
# exp(64) is 6e27: it and its reciprocal leave a float32 product with ordinary numbers room on both sides.
_LIMIT = 64.0


# Chunks that the state goes through, as a list.


def split(stacked: Any) -> list[Any]:
    """The chunks of arrays that are stacked over them, as a list."""
    count = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]


def join(chunks: list[Any]) -> Any:
    """The inverse of `split`."""
    return jax.tree.map(lambda *x: jnp.stack(x), *chunks)


def each(function: Any, *chunks: list[Any]) -> list[Any]:
    return [function(*chunk) for chunk in zip(*chunks, strict=True)]


def scan(step: Any, state: jax.Array, chunks: list[Any], reverse: bool = False) -> tuple[jax.Array, list[Any]]:
    """`jax.lax.scan`, unrolled, with a barrier after each step."""
    results = []
    for chunk in reversed(chunks) if reverse else chunks:
        state, result = jax.lax.optimization_barrier(step(state, chunk))
        results.append(result)
    return state, results[::-1] if reverse else results


# (I + L)^-1.


def inverse(lower: jax.Array) -> jax.Array:
    """(I + L)^-1, [..., C, C], by blocks: a fifth of the time that it takes with the masks of wy_transform.py (32
    tokens, one core of an aarch64), and 0.6 of LAPACK's.

    The threads of LAPACK go on spinning when it is done, and keep XLA's from the cores.
    """
    c = lower.shape[-1]
    if c <= _SUBSTITUTED:
        return _substituted(lower)
    half = c // 2
    first, second = inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    below = _dot(second, _dot(lower[..., half:, :half], first, "nn"), "nn")
    return jnp.block([[first, jnp.zeros_like(first)], [-below, second]])


def _substituted(lower: jax.Array) -> jax.Array:
    """(I + L)^-1, row by row."""
    c = lower.shape[-1]

    def row(i: Any, x: jax.Array) -> jax.Array:
        factors = jax.lax.dynamic_index_in_dim(lower, i, axis=-2, keepdims=False)  # [..., C]
        found = jax.lax.dynamic_index_in_dim(x, i, axis=-2, keepdims=False) - jnp.sum(factors[..., None] * x, axis=-2)
        return jax.lax.dynamic_update_index_in_dim(x, found, i, axis=-2)

    index = jax.lax.broadcasted_iota(jnp.int32, lower.shape, lower.ndim - 2)
    identity = jnp.broadcast_to(jnp.eye(c, dtype=lower.dtype), lower.shape)
    first_two = identity - jnp.where(index == 1, lower, 0.0)
    return jax.lax.fori_loop(2, c, row, first_two)


# One gate per channel.


def channel_operands(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The fields of `xla.Operands` for all chunks at once, so that it is decided once whether any needs halvings.

    q and k are [chunks, B, H, 1, C, K], g [chunks, B, H, G, C, K], beta [chunks, B, H, G, C], starts
    [chunks, B, 1, 1, C].
    """
    g, chunk = jnp.maximum(g, LOWEST_GATE), g.shape[-2]
    mask = jax.tree.map(jnp.asarray, masks(chunk, np.dtype(q.dtype), channels=True))
    reads, writes, across, scores = _one_segment(q, k, g, beta, mask)
    if starts is not None:
        count = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
        column, row = count[..., None], count[..., None, :]
        last = column[..., chunk - 1 :, :]  # [1, 1]
        reads = jnp.where(_twice(column == 0), reads, 0.0)
        writes = jnp.where(column == last, writes, 0.0)
        across = jnp.where(last == 0, across, 0.0)
        scores = jnp.where(_twice(column == row), scores, 0.0)
    return reads, writes, across, scores


def _for_each(mask: jax.Array, like: jax.Array) -> jax.Array:
    """A copy of the matrix for each chunk and head of [..., C, K]."""
    return jnp.broadcast_to(mask, (*like.shape[:-2], *mask.shape))


def _twice(x: jax.Array) -> jax.Array:
    """For the rows of q, and for those of k below them."""
    return jnp.concatenate([x, x], axis=-2)


def _plain_exponentials(g: jax.Array, upto: jax.Array, after: jax.Array) -> tuple[jax.Array, ...]:
    """exp(A); exp(-A), of no A below the limit; exp of the sum after a token; and [..., C, 1], how many rows up to each
    are beyond the limit: rows with none are anchored.
    """
    # By way of integers: a CPU does that in two instructions, and jnp.round in a call for each number.
    coarse = (g * _COARSE).astype(jnp.int32).astype(g.dtype) / _COARSE
    to = _for_each(upto, g)
    sums, rest = _dot(to, coarse, "nn"), _dot(to, g - coarse, "nn")  # [C, K]
    beyond = jnp.max(jnp.abs(sums), axis=-1, keepdims=True) > _LIMIT
    count = _dot(to, beyond.astype(g.dtype), "nn")
    anchored = count == 0.0
    # The barriers: computed once, and not again for each reader.
    up = jax.lax.optimization_barrier(jnp.exp(sums) * (1.0 + rest + 0.5 * rest * rest))
    down = jax.lax.optimization_barrier(1.0 / jnp.maximum(up, math.exp(-_LIMIT)))

    def corrected(onward: jax.Array) -> jax.Array:
        return jnp.where(anchored[..., -1:, :], onward, jnp.exp(_dot(_for_each(after, g), g, "nn")))

    onward = jax.lax.cond(jnp.all(anchored), lambda onward: onward, corrected, down * up[..., -1:, :])
    return up, down, onward, count


def _exponentials_forward(g: jax.Array, upto: jax.Array, after: jax.Array) -> tuple[Any, Any]:
    up, down, onward, count = _exponentials(g, upto, after)
    return (up, down, onward, count), (up, down, onward, upto, after)


def _exponentials_tangent(saved: Any, tangents: Any) -> tuple[jax.Array, ...]:
    (up, down, onward, upto, after), (t_g,) = saved, tangents
    t_upto, t_after = _dot(_for_each(upto, up), t_g, "nn"), _dot(_for_each(after, up), t_g, "nn")  # [C, K]
    return up * t_upto, -down * t_upto, onward * t_after, jnp.zeros_like(up[..., :1])


def _exponentials_backward(saved: Any, d: Any) -> tuple[jax.Array]:
    up, down, onward, upto, after = saved
    d_up, d_down, d_onward, _ = d
    # However `onward` was computed, here it is of the sum after a token: a difference of two sums would not be exact.
    d_sums = jnp.concatenate([up * d_up - down * d_down, onward * d_onward], axis=-2)  # [2 C, K]
    return (_dot(_for_each(jnp.concatenate([upto.T, after.T], axis=1), up), d_sums, "nn"),)  # [C, K]


_exponentials = with_derivatives(
    _plain_exponentials,
    forward=_exponentials_forward,
    tangent=_exponentials_tangent,
    backward=_exponentials_backward,
)


def _anchored(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks) -> Any:
    """What `_one_segment` returns, with scores of the anchored rows alone; and which rows those are."""
    up, down, onward, count = _exponentials(g, mask.upto, mask.after)
    anchored = count == 0.0
    reads = jax.lax.optimization_barrier(jnp.concatenate([q * up, k * up], axis=-2))  # [2 C, K]
    weighted = beta[..., None] * k  # [C, K]
    before = _for_each(jnp.concatenate([mask.before] * 2, axis=0) > 0, g)  # [2 C, C]
    # Selected, not multiplied by 0: above the diagonal there may be anything.
    scores = jnp.where(before & _twice(anchored), _dot(reads, weighted * down, "nt"), 0.0)
    # Beta not inside the sum: XLA's CPU backend adds up a product of three in an order that depends on the batch.
    diagonal = (jnp.sum(q * k, axis=-1) * beta)[..., None] * _for_each(mask.seen - mask.before, g)  # [C, C]
    scores = scores + jnp.concatenate([diagonal, jnp.zeros_like(diagonal)], axis=-2)
    return (reads, weighted * onward, up[..., -1, :, None], scores), anchored


def _by_halvings(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks) -> jax.Array:
    """The scores of all rows, without those of a token with itself."""

    def chunk(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
        of_q, of_k = channel_scores(q, k, g, mask, PRECISION)
        return jnp.concatenate([of_q * mask.before, of_k], axis=0) * beta[None, :]

    for _ in g.shape[:-2]:
        chunk = jax.vmap(chunk)
    return chunk(jnp.broadcast_to(q, g.shape), jnp.broadcast_to(k, g.shape), g, beta)


def _plain_one_segment(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks) -> tuple[jax.Array, ...]:
    """`channel_operands` of chunks without starts: reads [2 C, K], writes [C, K], across [K, 1] and scores [2 C, C]."""
    (*others, scores), anchored = _anchored(q, k, g, beta, mask)
    return *others, _every_row(scores, anchored, (q, k, g, beta), mask)


def _every_row(scores: jax.Array, anchored: jax.Array, arguments: Any, mask: Masks) -> jax.Array:
    """The scores, with those of the rows that are not anchored."""

    def corrected(scores: jax.Array) -> jax.Array:
        return scores + jnp.where(_twice(anchored), 0.0, _by_halvings(*arguments, mask=mask))

    return jax.lax.cond(jnp.all(anchored), lambda scores: scores, corrected, scores)


def _one_segment_forward(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks
) -> tuple[tuple[jax.Array, ...], Any]:
    arguments = (q, k, g, beta)
    (*others, scores), pullback, anchored = jax.vjp(functools.partial(_anchored, mask=mask), *arguments, has_aux=True)
    return (*others, _every_row(scores, anchored, arguments, mask)), (pullback, anchored, arguments, mask)


def _one_segment_tangent(saved: Any, tangents: Any) -> tuple[jax.Array, ...]:
    *_, arguments, mask = saved
    return jax.jvp(functools.partial(_plain_one_segment, mask=mask), arguments, tangents)[1]


def _one_segment_backward(saved: Any, d: Any) -> tuple[Any, ...]:
    pullback, anchored, arguments, mask = saved

    def corrected(gradients: Any) -> Any:
        pullback = jax.vjp(functools.partial(_by_halvings, mask=mask), *arguments)[1]
        return jax.tree.map(jnp.add, gradients, pullback(jnp.where(_twice(anchored), 0.0, d[-1])))

    return jax.lax.cond(jnp.all(anchored), lambda gradients: gradients, corrected, pullback(d))


_one_segment = with_derivatives(
    _plain_one_segment,
    forward=_one_segment_forward,
    tangent=_one_segment_tangent,
    backward=_one_segment_backward,
    differentiable=4,
)
