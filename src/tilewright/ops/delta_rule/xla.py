"""The delta rule and its relatives in plain JAX, by chunks: all matrix products, and memory that is linear in T.

The algebra of a chunk is that of chunk.py, with beta on the side of the keys that are written and compared with: E, the
errors that tokens correct, takes the place of U = beta E, and the gradient of beta is one sum. A block of chunks is
worked on at a time: their products all together, then the state through them in order. Blocks follow each other in a scan.

Only what needs the state goes from chunk to chunk, and it is made of plain products a b: what comes transposed is turned
before. The rest is products of all chunks of a block at once. The backward is written by hand where the state is, and is
JAX's where it is not (`_ready`).

Memory: the forward keeps one state a block for the backward (4 K V bytes for 1,024 tokens and a head), and the inputs. The
backward goes over the blocks from the last to the first, makes a block's chunks anew, and pulls the gradients through
them: what it needs beyond the gradients is of one block, whatever T is. On a CPU a block is 64 tokens, and the
forward keeps E, the inverses and the scores of q too, 4 V and 8 C bytes a token and head.

CPUs (2 cores of an aarch64 do 62 GFLOP/s in one large product): products of these shapes reach 30 to 56, and XLA
fuses nothing into them, so each further pass over a chunk's operands counts. What is here against that: chunks of a
block without a loop (`_apart`), barriers where XLA would make an array again for each that reads it, a gate a channel by
one product (anchored.py).

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
from tilewright.ops.delta_rule.anchored import channel_ready
from tilewright.ops.delta_rule.chunk import (
    LOWEST_GATE,
    Chunk,
    Gates,
    Runs,
    channel_passage,
    channel_scores,
    coarse_and_fine,
    decay_of,
    inverses,
    masks,
    same_run,
)
from tilewright.ops.delta_rule.config import XlaConfig
from tilewright.ops.delta_rule.products import Exactness, dot, times

Config = XlaConfig

_SUBSTITUTED = 8  # Rows of the diagonal blocks that a CPU inverts row by row; 4 and 16 take longer.


def default_config(chip: Chip, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float) -> XlaConfig:
    del k, v, g, rest, scale
    return XlaConfig.for_length(q.shape[1], chip)


def _exactness(dtype: Any, chip: Chip) -> Exactness:
    if chip.platform == "cpu":
        return Exactness.ON_CPU
    return Exactness.HIGH if dtype == jnp.bfloat16 else Exactness.HIGHEST


def _padded_length(t: int, config: XlaConfig) -> int:
    size = config.chunk * config.block_chunks
    return -(-t // size) * size


def _pad_time(x: jax.Array, t: int) -> jax.Array:
    """Zeros to length t: tokens without key, value, gate and beta, which leave the state as it is, and start no run."""
    return jnp.pad(x, [(0, 0), (0, t - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _blocks(x: jax.Array, config: XlaConfig) -> jax.Array:
    """[B, T, ...] as [num_blocks, B, tokens, ...]."""
    b, t = x.shape[:2]
    tokens = config.chunk * config.block_chunks
    return jnp.moveaxis(x.reshape(b, t // tokens, tokens, *x.shape[2:]), 1, 0)


def _unblock(x: jax.Array) -> jax.Array:
    """The way back from `_blocks`."""
    num, b, tokens = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(b, num * tokens, *x.shape[3:])


def _chunks(x: jax.Array, h: int, chunk: int) -> jax.Array:
    """[B, tokens, heads, ...] as [chunks, B, H, G, C, ...], heads = H G."""
    b, tokens, heads = x.shape[:3]
    x = x.reshape(b, tokens // chunk, chunk, h, heads // h, *x.shape[3:])
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))


def _unchunk(x: jax.Array) -> jax.Array:
    """The way back from `_chunks`."""
    chunks, b, h, groups, c = x.shape[:5]
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return x.reshape(b, chunks * c, h * groups, *x.shape[5:])


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A chunk before the state comes.

    E = (I + M)^-1 (v - k S), o = q S + N E, S' = across S + written^T E, where q and k are the upper and the lower half of
    `asked`, and N and M those of `scores`.
    """

    asked: Any  # [2 C, K]: into q, and below it into k
    written: Any  # [C, K]: beta onward k
    across: Any  # [1, 1] or [K, 1]; None is 1
    scores: Any  # [2 C, C]: (q_i . k_j) decay_ij beta_j for i >= j, and below it (k_i . k_j) decay_ij beta_j for i > j


jax.tree_util.register_dataclass(_Ready)


def _chunk_ready(q: Any, k: Any, g: Any, beta: Any, starts: Any, *, how: Exactness) -> _Ready:
    """A chunk of one head: q and k [C, K], g [C] or [C, K], beta and starts [C]."""
    made = masks(q.shape[0], 1, np.dtype(q.dtype), channels=g is not None and g.ndim == 2)
    mask = jax.tree.map(jnp.asarray, made)
    runs = gates = None
    if starts is not None:
        count = jnp.cumsum(starts, dtype=jnp.int32)
        runs = Runs(count[:, None], count[None, :])
    if g is not None:
        g = jnp.maximum(g, LOWEST_GATE)
    if g is not None and g.ndim == 1:

        def sums(x: jax.Array) -> jax.Array:
            # A product: what a CPU makes of jnp.cumsum is done again for each pair that reads it.
            return jax.lax.dot_general(x, mask.seen, (((0,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)

        coarse, fine = coarse_and_fine(jax.lax.stop_gradient(g), sums)
        gates = Gates(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
        g = g[None, :]
    chunk = Chunk(q, k, None, beta[:, None], g, gates, runs, mask)
    decay = decay_of(chunk, how)
    # The barrier: laid out once, and not again for each product that reads it.
    asked, written, across = jax.lax.optimization_barrier(jnp.concatenate([q, k], axis=0)), beta[:, None] * k, None
    if decay is None:
        assert g is not None
        of_q, of_k = channel_scores(q, k, g, mask, 1, how)
        scores = jnp.concatenate([of_q, of_k], axis=0)  # [2 C, C]
        if runs is not None:
            scores = jnp.where(jnp.concatenate([same_run(runs)] * 2, axis=0), scores, 0.0)
        scores = scores * beta[None, :]
        into_q, into_k, onward_k, (across,) = channel_passage(chunk, 1, 1, how)
        asked, written = jnp.concatenate([into_q, into_k], axis=0), beta[:, None] * onward_k
    else:
        pairs = jnp.concatenate([decay.pairs, decay.pairs * mask.before], axis=0)
        scores = dot(asked, written, "nt", how) * pairs  # [2 C, C]
        if decay.into is not None:
            asked = jnp.concatenate([decay.into] * 2, axis=0) * asked
            written, across = decay.onward * written, decay.across
    return _Ready(asked, written, across, scores)


def _ready(tokens: Any, starts: Any, *, chunk: int, how: Exactness) -> _Ready:
    """All chunks of a block, from [B, tokens, heads, ...]: leading axes [chunks, B, H, G]."""
    q, k, g, beta = tokens
    h, wide = q.shape[2], accumulator(q.dtype)
    if g is not None and g.ndim == 4 and how is Exactness.ON_CPU:
        return _channel_ready_on_cpu(tokens, starts, chunk=chunk)
    one = functools.partial(_chunk_ready, how=how)
    # Groups innermost: what does not depend on the group is not made again for it.
    over_groups = jax.vmap(one, in_axes=(None, None, 0, 0, None))
    over_heads = jax.vmap(over_groups, in_axes=(0, 0, 0, 0, None))
    over_chunks = jax.vmap(jax.vmap(over_heads))

    def chunks(x: jax.Array, heads: int) -> jax.Array:
        return _chunks(x, heads, chunk)

    return over_chunks(
        chunks(q, h)[:, :, :, 0].astype(wide),
        chunks(k, h)[:, :, :, 0].astype(wide),
        None if g is None else chunks(g, h),
        chunks(beta, h),
        None if starts is None else chunks(starts[:, :, None], 1)[:, :, 0, 0],
    )


def _channel_ready_on_cpu(tokens: Any, starts: Any, *, chunk: int) -> _Ready:
    """`_ready` for a gate a channel: all chunks at once, so that it is one question whether any needs to be halved."""
    q, k, g, beta = tokens
    h, wide = q.shape[2], accumulator(q.dtype)
    q, k = _chunks(q, h, chunk).astype(wide), _chunks(k, h, chunk).astype(wide)
    g = jnp.maximum(_chunks(g, h, chunk), LOWEST_GATE)
    mask = jax.tree.map(jnp.asarray, masks(chunk, 1, np.dtype(wide), channels=True))
    asked, written, across, scores = channel_ready(q, k, g, _chunks(beta, h, chunk), mask, Exactness.ON_CPU)
    if starts is not None:
        count = jnp.cumsum(_chunks(starts[:, :, None], 1, chunk), axis=-1, dtype=jnp.int32)  # [chunks, B, 1, 1, C]
        column, row = count[..., None], count[..., None, :]
        last = column[..., chunk - 1 :, :]  # [1, 1]
        asked = jnp.where(jnp.concatenate([column == 0] * 2, axis=-2), asked, 0.0)
        written = jnp.where(column == last, written, 0.0)
        across = jnp.where(last == 0, across, 0.0)
        scores = jnp.where(jnp.concatenate([column == row] * 2, axis=-2), scores, 0.0)
    return _Ready(asked, written, across, scores)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _inverse(lower: jax.Array, how: Exactness) -> jax.Array:
    """(I + L)^-1, [..., C, C], built as chunk.py says."""
    c = lower.shape[-1]
    if how is not Exactness.ON_CPU:
        mask = jax.tree.map(jnp.asarray, masks(c, 1, np.dtype(lower.dtype), channels=False))
        flat = jax.vmap(lambda one: inverses([one], mask, 1, how)[0])(lower.reshape(-1, c, c))
        return flat.reshape(lower.shape)
    # Blocks without the masks that a matrix unit is fed with: a fifth of the time (32 tokens, a core of an aarch64), and
    # 0.6 of LAPACK's. The threads of LAPACK go on spinning when it is done, and keep XLA's from the cores.
    if c <= _SUBSTITUTED:
        return _substituted(lower)
    half = c // 2
    first, second = _inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]), how)
    below = times(second, times(lower[..., half:, :half], first, "nn", how), "nn", how)
    return jnp.block([[first, jnp.zeros_like(first)], [-below, second]])


def _substituted(lower: jax.Array) -> jax.Array:
    """(I + L)^-1, row by row."""
    c = lower.shape[-1]

    def row(i: Any, x: jax.Array) -> jax.Array:
        factors = jax.lax.dynamic_index_in_dim(lower, i, axis=-2, keepdims=False)  # [..., C]
        found = jax.lax.dynamic_index_in_dim(x, i, axis=-2, keepdims=False) - jnp.sum(factors[..., None] * x, axis=-2)
        return jax.lax.dynamic_update_index_in_dim(x, found, i, axis=-2)

    place = jax.lax.broadcasted_iota(jnp.int32, lower.shape, lower.ndim - 2)
    identity = jnp.broadcast_to(jnp.eye(c, dtype=lower.dtype), lower.shape)
    first_two = identity - jnp.where(place == 1, lower, 0.0)
    return jax.lax.fori_loop(2, c, row, first_two)


def _kept(across: Any, state: jax.Array) -> jax.Array:
    return state if across is None else across * state


def _pass_on(
    state: jax.Array, ready: _Ready, inverted: jax.Array, v: jax.Array, how: Exactness
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """The state [B, H, G, K, V] after the chunks; q S and E of each, and the state before it (on a CPU None: `_states`)."""
    c = v.shape[-2]
    keep = how is not Exactness.ON_CPU

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        asked, written, across, inverted, v = chunk
        found = times(asked, state, "nn", how)  # [2 C, V]
        error = times(inverted, v - found[..., c:, :], "nn", how)  # [C, V]
        kept = state if keep else None
        return _kept(across, state) + times(written, error, "nn", how), (found[..., :c, :], error, kept)

    # What is multiplied transposed is turned before, all chunks at once.
    chunks = _apart((ready.asked, _transposed(ready.written), ready.across, inverted, v), how)
    after, found = _scan(step, state, chunks, how)
    return after, *_together(found, how)


def _states(state: jax.Array, ready: _Ready, errors: jax.Array, how: Exactness) -> Any:
    """The states before each chunk, where E is known."""

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        written, across, error = chunk
        return _kept(across, state) + times(written, error, "nn", how), state

    return _scan(step, state, _apart((_transposed(ready.written), ready.across, errors), how), how)[1]


def _pull_back(
    ready: _Ready,
    inverted: jax.Array,
    read: jax.Array,
    states: Any,
    errors: jax.Array,
    d_after: jax.Array,
    d_o: jax.Array,
    how: Exactness,
) -> tuple[jax.Array, jax.Array, _Ready]:
    """The gradients of the state before the chunks, of v, and of the chunks; d_o [chunks, B, H, G, C, V]."""
    c = d_o.shape[-2]

    def step(d_after: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        asked, written, across, inverted, d_o, d_error = chunk
        d_v = times(inverted, d_error + times(written, d_after, "nn", how), "nn", how)  # [C, V]
        both = jnp.concatenate([d_o, -d_v], axis=-2)
        return _kept(across, d_after) + times(asked, both, "nn", how), (d_after, both)

    def with_states(pulled: Any, state: jax.Array, chunk: Any) -> Any:
        (d_after, both), (error, across) = pulled, chunk
        d_across = None
        if across is not None:
            alike = tuple(axis for axis in (-2, -1) if across.shape[axis] == 1)
            d_across = jnp.sum(state * d_after, axis=alike, keepdims=True)
        d_asked = times(both, state, "nt", how)  # [2 C, K]
        d_written = times(error, d_after, "nt", how)  # [C, K]
        d_scores = times(both, error, "nt", how)  # [2 C, C]
        return -both[..., c:, :], _Ready(d_asked, d_written, d_across, d_scores)

    d_error = times(read, d_o, "tn", how)  # [C, V]: what comes from the chunk's own outputs.
    chunks = (_transposed(ready.asked), ready.written, ready.across, _transposed(inverted), d_o, d_error)
    d_state, pulled = _scan(step, d_after, _apart(chunks, how), how, reverse=True)
    of_states = _each(with_states, how, pulled, states, _apart((errors, ready.across), how))
    return d_state, *_together(of_states, how)


# Chunks that the state goes through. On a CPU they are a list, and the program has each of them: a loop's carry is copied
# in every round, and what is stacked over the chunks once more. Elsewhere they are stacked.


def _apart(stacked: Any, how: Exactness) -> Any:
    if how is not Exactness.ON_CPU:
        return stacked
    count = jax.tree.leaves(stacked)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(count)]


def _together(chunks: Any, how: Exactness) -> Any:
    return chunks if how is not Exactness.ON_CPU else jax.tree.map(lambda *x: jnp.stack(x), *chunks)


def _each(function: Any, how: Exactness, *chunks: Any) -> Any:
    return (
        function(*chunks) if how is not Exactness.ON_CPU else [function(*chunk) for chunk in zip(*chunks, strict=True)]
    )


def _scan(step: Any, state: jax.Array, chunks: Any, how: Exactness, reverse: bool = False) -> tuple[jax.Array, Any]:
    if how is not Exactness.ON_CPU:
        return jax.lax.scan(step, state, chunks, reverse=reverse)
    results = []
    for chunk in reversed(chunks) if reverse else chunks:
        state, result = jax.lax.optimization_barrier(step(state, chunk))
        results.append(result)
    return state, results[::-1] if reverse else results


def _in_blocks(tokens: Any, config: XlaConfig) -> Any:
    """Arrays [B, T, ...] as blocks, to scan over."""

    def blocks(x: jax.Array) -> jax.Array:
        return _blocks(_pad_time(x, _padded_length(x.shape[1], config)), config)

    return jax.tree.map(blocks, tokens)


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
    how = _exactness(v.dtype, launch.chip)

    chunk = launch.config.chunk

    def step(state: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        tokens, values, starts = block
        ready = _ready(tokens, starts, chunk=chunk, how=how)
        inverted = _inverse(ready.scores[..., chunk:, :], how)
        after, of_q, errors, _ = _pass_on(state, ready, inverted, _chunks(values, h, chunk).astype(state.dtype), how)
        o = scale * (of_q + times(ready.scores[..., :chunk, :], errors, "nn", how))
        return after, (
            _unchunk(o.astype(v.dtype)),
            state,
            (inverted, errors, ready.scores[..., :chunk, :]) if how is Exactness.ON_CPU else None,
        )

    blocks = _in_blocks(((q, k, g, beta), v, resets), launch.config)
    state, (o, states, solved) = jax.lax.scan(step, initial_state.reshape(b, h, hv // h, depth, width), blocks)
    results = _unblock(o)[:, :t], state.reshape(b, hv, depth, width)
    return results, (q, k, v, g, beta, initial_state, resets, states, solved)


def backward(scale: float, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    """The gradients, from the arguments, the state before each block, and what was solved there: None to solve it again."""
    q, k, v, g, beta, initial_state, resets, states, solved = saved
    d_o, d_state = cotangents
    how = _exactness(v.dtype, launch.chip)
    chunk, h = launch.config.chunk, q.shape[2]

    def step(d_after: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        state, solved, tokens, values, starts, d_o = block
        ready, pull = jax.vjp(lambda tokens: _ready(tokens, starts, chunk=chunk, how=how), tokens)
        if solved is None:
            inverted = _inverse(ready.scores[..., chunk:, :], how)
            values = _chunks(values, h, chunk).astype(state.dtype)
            _, _, errors, states = _pass_on(state, ready, inverted, values, how)
            read = ready.scores[..., :chunk, :]
        else:
            inverted, errors, read = solved
            states = _states(state, ready, errors, how)
        d_o = scale * _chunks(d_o, h, chunk).astype(state.dtype)
        d_state, d_v, d_ready = _pull_back(ready, inverted, read, states, errors, d_after, d_o, how)
        return d_state, (*pull(d_ready)[0], _unchunk(d_v.astype(v.dtype)))

    blocks = _in_blocks(((q, k, g, beta), None if solved is not None else v, resets, d_o), launch.config)
    d_state, gradients = jax.lax.scan(step, d_state.reshape(states.shape[1:]), (states, solved, *blocks), reverse=True)
    d_q, d_k, d_g, d_beta, d_v = jax.tree.map(lambda d: _unblock(d)[:, : q.shape[1]], gradients)
    return d_q, d_k, d_v, d_g, d_beta, d_state.reshape(initial_state.shape), None


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
