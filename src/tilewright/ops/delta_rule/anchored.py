"""A gate a key channel on a CPU: the scores of a chunk by one product.

With A_i the sum of g over the tokens of the chunk to i, sum_d x_id k_jd exp(A_id - A_jd) is a product of x exp(A) and
k exp(-A), and x exp(A) is what meets the state too. The halvings of chunk.py take a product for each level, with operands
of its own.

exp(-A_j) is large, and what is wrong in A_j is wrong in all that follows j in the chunk, however large A_j is. So g is
written as a multiple of 2^-14, whose sums are exact, and a rest below that, whose sum F is small: exp(A) = exp(sum of the
former) (1 + F + F^2 / 2) has the error of one exponential, whatever A is.

No gate has a part in q_i . k_i. It is kept out of the product, where the gradient of A_i would have it twice, with opposite
signs: with strong gates what rounding leaves of it would be more than the rest.

A row is anchored so while no A of the chunk to this row, in any channel, is beyond +-64: with 32 tokens, gates down to -2
in the mean. The other rows are made by halvings, which are not run where a block has none. Which way a row takes depends
on the tokens up to it alone, and so does its result, to the bit.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.ops.delta_rule.chunk import Masks, channel_scores
from tilewright.ops.delta_rule.products import Exactness, times

_COARSE = 2.0**14
# exp(64) is 6e27: it and its reciprocal leave a float32 product with ordinary numbers room on both sides.
_LIMIT = 64.0


def _for_all(mask: jax.Array, like: jax.Array) -> jax.Array:
    """A matrix for each chunk and head of [..., C, K]."""
    return jnp.broadcast_to(mask, (*like.shape[:-2], *mask.shape))


def _twice(x: jax.Array) -> jax.Array:
    """For the rows of q, and those of k below them."""
    return jnp.concatenate([x, x], axis=-2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _exponentials(g: jax.Array, upto: jax.Array, after: jax.Array, how: Exactness) -> tuple[jax.Array, ...]:
    """exp(A); exp(-A), of no A below the limit; exp of the sum after a token; whether a row is anchored, [..., C, 1]."""
    # By way of integers, which a CPU does in two instructions, and jnp.round in a call for each number.
    coarse = (g * _COARSE).astype(jnp.int32).astype(g.dtype) / _COARSE
    to = _for_all(upto, g)
    sums, rest = times(to, coarse, "nn", how), times(to, g - coarse, "nn", how)  # [C, K]
    beyond = jnp.max(jnp.abs(sums), axis=-1, keepdims=True) > _LIMIT
    anchored = times(to, beyond.astype(g.dtype), "nn", how) == 0.0
    # The barriers: made once, and not again for each that reads it.
    up = jax.lax.optimization_barrier(jnp.exp(sums) * (1.0 + rest + 0.5 * rest * rest))
    down = jax.lax.optimization_barrier(1.0 / jnp.maximum(up, math.exp(-_LIMIT)))

    def mended(onward: jax.Array) -> jax.Array:
        return jnp.where(anchored[..., -1:, :], onward, jnp.exp(times(_for_all(after, g), g, "nn", how)))

    onward = jax.lax.cond(jnp.all(anchored), lambda onward: onward, mended, down * up[..., -1:, :])
    return up, down, onward, anchored


def _keep_exponentials(g: jax.Array, upto: jax.Array, after: jax.Array, how: Exactness) -> tuple[Any, Any]:
    up, down, onward, anchored = _exponentials(g, upto, after, how)
    return (up, down, onward, anchored), (up, down, onward, upto, after)


def _pull_exponentials(how: Exactness, saved: Any, d: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    up, down, onward, upto, after = saved
    d_up, d_down, d_onward, _ = d
    # However `onward` was made, here it is of the sum after a token: a difference of sums to tokens would not be exact.
    d_sums = jnp.concatenate([up * d_up - down * d_down, onward * d_onward], axis=-2)  # [2 C, K]
    d_g = times(_for_all(jnp.concatenate([upto.T, after.T], axis=1), up), d_sums, "nn", how)  # [C, K]
    return d_g, jnp.zeros_like(upto), jnp.zeros_like(after)


_exponentials.defvjp(_keep_exponentials, _pull_exponentials)


def _anchored(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks, how: Exactness) -> Any:
    """What `channel_ready` returns, with scores of the anchored rows alone; and which those are."""
    up, down, onward, anchored = _exponentials(g, mask.upto, mask.after, how)
    asked = jax.lax.optimization_barrier(jnp.concatenate([q * up, k * up], axis=-2))  # [2 C, K]
    weighted = beta[..., None] * k  # [C, K]
    before = _for_all(jnp.concatenate([mask.before] * 2, axis=0) > 0, g)  # [2 C, C]
    # Not by a factor of 0: above the diagonal there may be anything.
    scores = jnp.where(before & _twice(anchored), times(asked, weighted * down, "nt", how), 0.0)
    # Beta not inside the sum: XLA's CPU backend adds up a product of three in an order that depends on the batch.
    itself = (jnp.sum(q * k, axis=-1) * beta)[..., None] * _for_all(mask.seen - mask.before, g)  # [C, C]
    scores = scores + jnp.concatenate([itself, jnp.zeros_like(itself)], axis=-2)
    return (asked, weighted * onward, up[..., -1, :, None], scores), anchored


def _by_halvings(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks, how: Exactness) -> jax.Array:
    """The scores of all rows, but for those of a token with itself."""

    def chunk(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
        of_q, of_k = channel_scores(q, k, g, mask, 1, how)
        return jnp.concatenate([of_q * mask.before, of_k], axis=0) * beta[None, :]

    for _ in g.shape[:-2]:
        chunk = jax.vmap(chunk)
    return chunk(jnp.broadcast_to(q, g.shape), jnp.broadcast_to(k, g.shape), g, beta)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def channel_ready(
    q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks, how: Exactness
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """asked [2 C, K], written [C, K], across [K, 1] and scores [2 C, C] of chunks of one run, as `_Ready` has them.

    q and k are [chunks, B, H, 1, C, K], g [chunks, B, H, G, C, K], beta [chunks, B, H, G, C].
    """
    return _keep(q, k, g, beta, mask, how)[0]


def _keep(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, mask: Masks, how: Exactness) -> tuple[Any, Any]:
    def fast(q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array) -> Any:
        return _anchored(q, k, g, beta, mask, how)

    def mended(scores: jax.Array) -> jax.Array:
        return scores + jnp.where(_twice(anchored), 0.0, _by_halvings(q, k, g, beta, mask, how))

    (*ready, scores), pull, anchored = jax.vjp(fast, q, k, g, beta, has_aux=True)
    scores = jax.lax.cond(jnp.all(anchored), lambda scores: scores, mended, scores)
    return (*ready, scores), (pull, anchored, (q, k, g, beta), mask)


def _pull(how: Exactness, saved: Any, d_ready: Any) -> tuple[Any, ...]:
    pull, anchored, arguments, mask = saved

    def mended(gradients: Any) -> Any:
        pull = jax.vjp(lambda q, k, g, beta: _by_halvings(q, k, g, beta, mask, how), *arguments)[1]
        return jax.tree.map(jnp.add, gradients, pull(jnp.where(_twice(anchored), 0.0, d_ready[-1])))

    gradients = jax.lax.cond(jnp.all(anchored), lambda gradients: gradients, mended, pull(d_ready))
    return *gradients, jax.tree.map(jnp.zeros_like, mask)


channel_ready.defvjp(_keep, _pull)
