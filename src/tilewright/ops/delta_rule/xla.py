"""The delta rule and its relatives in plain JAX, by chunks: all matrix products, and memory that is linear in T.

The algebra of a chunk is in chunk.py. A block of chunks is worked on at a time: their products all together, then the
state through them in order. Blocks follow each other in a scan.

Memory: the forward keeps one state a block for the backward (4 K V bytes for 1,024 tokens and a head), and the inputs. The
backward goes over the blocks from the last to the first, makes a block's chunks anew, and pulls the gradients through
them: what it needs beyond the gradients is of one block, whatever T is.

Query and key heads are not repeated for groups of value heads: what depends on q and k alone is made once a group.

T is padded to a multiple of a block with tokens that write nothing. The tail costs at most one block.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.axes import Gate, Keys, PerHead, Starts, State, Values
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.numerics import accumulator
from tilewright.ops.delta_rule.chunk import (
    LOWEST_GATE,
    Chunk,
    Gates,
    Masks,
    Runs,
    advance,
    coarse_and_fine,
    decay_of,
    inverses,
    masks,
    scores,
)
from tilewright.ops.delta_rule.config import XlaConfig
from tilewright.ops.delta_rule.products import Exactness

Config = XlaConfig


def default_config(chip: Chip, q: Keys, *rest: Any, scale: float) -> XlaConfig:
    del rest, scale
    return XlaConfig.for_length(q.shape[1], chip)


def _exactness(dtype: Any) -> Exactness:
    return Exactness.HIGH if dtype == jnp.bfloat16 else Exactness.HIGHEST


def _padded_length(t: int, config: XlaConfig) -> int:
    size = config.chunk * config.block_chunks
    return -(-t // size) * size


def _pad_time(x: jax.Array, t: int) -> jax.Array:
    """Zeros to length t: tokens without key, value, gate and beta, which leave the state as it is, and start no run."""
    return jnp.pad(x, [(0, 0), (0, t - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _blocks(x: jax.Array, h: int, config: XlaConfig) -> jax.Array:
    """[B, T, heads, ...] as [num_blocks, B, H, G, block_chunks, C, ...], heads = H G."""
    b, t, heads = x.shape[:3]
    c, chunks = config.chunk, config.block_chunks
    x = x.reshape(b, t // (c * chunks), chunks, c, h, heads // h, *x.shape[3:])
    return jnp.moveaxis(x, (1, 0, 4, 5, 2, 3), (0, 1, 2, 3, 4, 5))


def _unblock(x: jax.Array) -> jax.Array:
    """The way back from `_blocks`."""
    num, b, h, groups, chunks, c = x.shape[:6]
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4, 5), (1, 0, 4, 5, 2, 3))
    return x.reshape(b, num * chunks * c, h * groups, *x.shape[6:])


def _inverse(lower: jax.Array, mask: Masks, how: Exactness, on_cpu: bool) -> jax.Array:
    if not on_cpu:
        return inverses([lower], mask, 1, how)[0]
    # LAPACK's substitution takes a quarter of the time of the products (64 tokens, 2 cores of an aarch64).
    identity = jnp.eye(lower.shape[0], dtype=lower.dtype)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True, unit_diagonal=True)


def _one_head(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    starts: jax.Array | None,
    *,
    scale: float,
    how: Exactness,
    on_cpu: bool,
) -> tuple[jax.Array, jax.Array]:
    """The chunks of a block, one head: q [chunks, C, K], ..., state [K, V] -> the state after them, o [chunks, C, V]."""
    made = masks(q.shape[1], 1, np.dtype(state.dtype), channels=g is not None and g.ndim == 3)
    mask = jax.tree.map(jnp.asarray, made)

    def chunk_of(q: Any, k: Any, v: Any, g: Any, beta: Any, starts: Any) -> Chunk:
        runs = gates = None
        if starts is not None:
            count = jnp.cumsum(starts, dtype=jnp.int32)
            runs = Runs(count[:, None], count[None, :])
        if g is not None:
            g = jnp.maximum(g, LOWEST_GATE)
        if g is not None and g.ndim == 1:
            coarse, fine = coarse_and_fine(jax.lax.stop_gradient(g), functools.partial(jnp.cumsum, axis=0))
            gates = Gates(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
            g = g[None, :]
        return Chunk(q, k, v, beta[:, None], g, gates, runs, None)

    def within(chunk: Chunk) -> Any:
        chunk = dataclasses.replace(chunk, mask=mask)
        decay = decay_of(chunk, how)
        read, erase = scores(chunk, decay, scale=scale, how=how)
        inverted = _inverse(jax.lax.stop_gradient(erase), mask, how, on_cpu)
        return decay, read, erase, inverted

    def onward(state: jax.Array, given: Any) -> tuple[jax.Array, jax.Array]:
        chunk, decay, read, erase, inverted = given
        chunk = dataclasses.replace(chunk, mask=mask)
        o, (after,) = advance((state,), chunk, decay, read, erase, inverted, scale=scale, how=how)
        return after, o

    chunks = jax.vmap(chunk_of)(q, k, v, g, beta, starts)
    return jax.lax.scan(onward, state, (chunks, *jax.vmap(within)(chunks)))


def _block(state: jax.Array, tokens: Any, *, scale: float, dtype: Any, on_cpu: bool) -> tuple[jax.Array, jax.Array]:
    """One block of all heads: state [B, H, G, K, V] -> the state after it, o [B, H, G, chunks, C, V]."""
    q, k, v, g, beta, starts = tokens
    wide = accumulator(dtype)
    one = functools.partial(_one_head, scale=scale, how=_exactness(dtype), on_cpu=on_cpu)
    # Groups innermost: what does not depend on the group is not made again for it.
    over_groups = jax.vmap(one, in_axes=(0, None, None, 0, 0, 0, None))
    over_heads = jax.vmap(over_groups, in_axes=(0, 0, 0, 0, 0, 0, None))
    over_batch = jax.vmap(over_heads)
    state, o = over_batch(
        state,
        q[:, :, 0].astype(wide),
        k[:, :, 0].astype(wide),
        v.astype(wide),
        g,
        beta,
        None if starts is None else starts[:, 0, 0],
    )
    return state, o.astype(dtype)


def _in_blocks(q: Any, k: Any, v: Any, g: Any, beta: Any, resets: Any, config: XlaConfig) -> Any:
    """The arguments as blocks, to scan over."""
    h = q.shape[2]
    padded = _padded_length(q.shape[1], config)

    def blocks(x: jax.Array, heads: int) -> jax.Array:
        return _blocks(_pad_time(x, padded), heads, config)

    return (
        blocks(q, h),
        blocks(k, h),
        blocks(v, h),
        None if g is None else blocks(g, h),
        blocks(beta, h),
        None if resets is None else blocks(resets[:, :, None], 1),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    (o, final_state), _ = _forward(q, k, v, g, beta, initial_state, resets, scale, launch)
    return o, final_state


def _forward(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]

    def step(state: jax.Array, tokens: Any) -> tuple[jax.Array, Any]:
        after, o = _block(state, tokens, scale=scale, dtype=v.dtype, on_cpu=launch.chip.platform == "cpu")
        return after, (o, state)

    tokens = _in_blocks(q, k, v, g, beta, resets, launch.config)
    state, (o, states) = jax.lax.scan(step, initial_state.reshape(b, h, hv // h, depth, width), tokens)
    results = _unblock(o)[:, :t], state.reshape(b, hv, depth, width)
    return results, (q, k, v, g, beta, initial_state, resets, states)


def backward(scale: float, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, g, beta, initial_state, resets, states = saved
    d_o, d_state = cotangents
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    q_blocks, k_blocks, v_blocks, g_blocks, beta_blocks, start_blocks = _in_blocks(
        q, k, v, g, beta, resets, launch.config
    )
    d_o_blocks = _blocks(_pad_time(d_o, _padded_length(t, launch.config)), h, launch.config)

    def step(d_state: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        state, q, k, v, g, beta, starts, d_o = block

        def forward(state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
            return _block(
                state, (q, k, v, g, beta, starts), scale=scale, dtype=v.dtype, on_cpu=launch.chip.platform == "cpu"
            )

        _, pull = jax.vjp(forward, state, q, k, v, g, beta)
        d_before, *d_tokens = pull((d_state, d_o))
        return d_before, d_tokens

    d_state, (d_q, d_k, d_v, d_g, d_beta) = jax.lax.scan(
        step,
        d_state.reshape(b, h, hv // h, depth, width),
        (states, q_blocks, k_blocks, v_blocks, g_blocks, beta_blocks, start_blocks, d_o_blocks),
        reverse=True,
    )
    gradients = [None if d is None else _unblock(d)[:, :t] for d in (d_q, d_k, d_v, d_g, d_beta)]
    return *gradients, d_state.reshape(initial_state.shape), None


_chunked.defvjp(_forward, backward)


def delta_rule_xla(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gate | None,
    beta: PerHead,
    initial_state: State,
    resets: Starts | None,
    *,
    scale: float,
    launch: Launch,
) -> tuple[Values, State]:
    """All three ops: by the gate, none, one a head or one a key channel."""
    return _chunked(q, k, v, g, beta, initial_state, resets, scale, launch)


gated_delta_rule_xla = kda_xla = delta_rule_xla
