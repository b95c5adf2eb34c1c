"""The delta rule and its relatives in plain JAX, by chunks: all matrix products, and memory that is linear in T.

The algebra of a chunk is that of wy_transform.py, with beta on the side of the keys that write and are compared with.
The corrected values u here lack the factor beta that U has there, and the gradient of beta is one sum. One block of
chunks is processed at a time: first the products of all its chunks together, then the state through them in order.
Blocks follow each other in a scan.

Only what needs the state goes from chunk to chunk, and it consists of plain products a b: what is multiplied transposed
is transposed before. Everything else is products of all chunks of a block at once. The backward is written by hand
where the state is involved, and is JAX's where it is not (`_operands`). All of it is plain JAX: in forward mode JAX
differentiates the forward pass, and where a gradient is differentiated again, the backward pass.

Memory: the forward saves the inputs and one state per block for the backward (4 K V bytes per 1,024 tokens and head).
The backward goes over the blocks from the last to the first, recomputes the chunks of a block, and takes the gradients
through them: what it needs beyond the gradients is of one block, whatever T is. CPUs run another program inside this
one, with other block sizes, which saves more: xla_cpu.py.

Query and key heads are not repeated for groups of value heads: what depends on q and k alone is computed once per
group.

T is padded to a multiple of a block with tokens that write nothing. The tail costs at most one block.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewright.core.axes import Size
from tilewright.core.call import Static, power_of_two
from tilewright.core.chip import Chip
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.delta_rule import xla_cpu
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleXlaForward
from tilewright.ops.delta_rule.gates import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.matmul_precision import MatmulPrecision, batched_dot, dot
from tilewright.ops.delta_rule.wy_transform import (
    Chunk,
    Gates,
    channel_passage,
    channel_scores,
    inverse,
    masks,
    same_segment,
)

_SMALLEST_CHUNK = 8
_CHUNK, _BLOCK_TOKENS = 64, 1024


def _heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleXlaForward:
    t = call.q.shape[1]
    on_cpu = chip.platform == "cpu"
    largest, tokens = (xla_cpu.CHUNK, xla_cpu.BLOCK_TOKENS) if on_cpu else (_CHUNK, _BLOCK_TOKENS)
    chunk = min(max(power_of_two(t), _SMALLEST_CHUNK), largest)
    return DeltaRuleXlaForward(chunk, min(tokens // chunk, -(-t // chunk)))


@dataclass(frozen=True)
class _Program:
    """What differs between platforms. The defaults are those of accelerators, where chunks stay stacked."""

    precision: MatmulPrecision
    inverse: Callable[[jax.Array], jax.Array]
    channel_operands: Callable[..., tuple[jax.Array, ...]] | None = None
    """The fields of `Operands` for one gate per channel; None computes them chunk by chunk, as for the other gates."""
    saves_solution: bool = False
    """Whether the forward saves the inverses, u and the scores of q, and the backward need not recompute them."""
    split: Callable[[Any], Any] = lambda stacked: stacked
    join: Callable[[Any], Any] = lambda chunks: chunks
    each: Callable[..., Any] = lambda function, *chunks: function(*chunks)
    scan: Callable[..., tuple[jax.Array, Any]] = jax.lax.scan

    def dot(self, a: jax.Array, b: jax.Array, form: Any = "nn") -> jax.Array:
        return batched_dot(a, b, form, self.precision)


def _program(chip: Chip, dtype: Any) -> _Program:
    if chip.platform == "cpu":
        chunks = (xla_cpu.split, xla_cpu.join, xla_cpu.each, xla_cpu.scan)
        return _Program(xla_cpu.PRECISION, xla_cpu.inverse, xla_cpu.channel_operands, True, *chunks)
    precision = MatmulPrecision.BF16X3_XLA if dtype == jnp.bfloat16 else MatmulPrecision.FLOAT32
    return _Program(precision, functools.partial(_inverse, precision=precision))


# Layout.


def _blocks(x: jax.Array, config: DeltaRuleXlaForward) -> jax.Array:
    """[B, T, ...] as [num_blocks, B, tokens, ...], to scan over.

    T is padded with zeros: tokens without key, value, gate and beta leave the state as it is, and start no segment.
    """
    b, t = x.shape[:2]
    tokens = config.chunk * config.block_chunks
    num_blocks = -(-t // tokens)
    x = jnp.pad(x, [(0, 0), (0, num_blocks * tokens - t)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(b, num_blocks, tokens, *x.shape[2:]), 1, 0)


def _unblock(x: jax.Array, t: Size) -> jax.Array:
    """The inverse of `_blocks`."""
    num, b, tokens = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(b, num * tokens, *x.shape[3:])[:, :t]


def _chunks(x: jax.Array, h: int, chunk: int) -> jax.Array:
    """[B, tokens, heads, ...] as [chunks, B, H, G, C, ...], where heads = H G."""
    b, tokens, heads = x.shape[:3]
    x = x.reshape(b, tokens // chunk, chunk, h, heads // h, *x.shape[3:])
    return jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))


def _unchunk(x: jax.Array) -> jax.Array:
    """The inverse of `_chunks`."""
    chunks, b, h, groups, c = x.shape[:5]
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))
    return x.reshape(b, chunks * c, h * groups, *x.shape[5:])


# Products that do not need the state.


@dataclass(frozen=True)
class Operands:
    """What a chunk multiplies the state with.

    u = (I + A)^-1 (v - k S), o = q S + N u, S' = across S + writes^T u, where q and k are the upper and the lower rows
    of `reads`, and N and A those of `scores`.
    """

    reads: Any  # [2 C, K]: into q, and below it into k
    writes: Any  # [C, K]: beta onward k
    across: Any  # [1, 1] or [K, 1]; None is 1
    scores: Any  # [2 C, C]: (q_i . k_j) decay_ij beta_j for i >= j, and below it (k_i . k_j) decay_ij beta_j for i > j


jax.tree_util.register_dataclass(Operands)


def _chunk_operands(q: Any, k: Any, g: Any, beta: Any, starts: Any, *, precision: MatmulPrecision) -> Operands:
    """The operands of one chunk and head: q and k [C, K], g [C] or [C, K], beta and starts [C]."""
    made = masks(q.shape[0], np.dtype(q.dtype), channels=g is not None and g.ndim == 2)
    mask = jax.tree.map(jnp.asarray, made)
    segments = None if starts is None else jnp.cumsum(starts, dtype=jnp.int32)
    gates = None
    if g is not None:
        g = jnp.maximum(g, LOWEST_GATE)
    if g is not None and g.ndim == 1:

        def sums(x: jax.Array) -> jax.Array:
            # A product: on a CPU what XLA makes of jnp.cumsum is computed again for each pair that reads it.
            return jax.lax.dot_general(x, mask.seen, (((0,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)

        gates = Gates(*coarse_and_fine(jax.lax.stop_gradient(g), sums))
    chunk = Chunk(q, k, g, gates, segments, mask, precision)
    decay = chunk.decay
    # The barrier: laid out once, and not again for each product that reads it.
    reads, writes, across = jax.lax.optimization_barrier(jnp.concatenate([q, k], axis=0)), beta[:, None] * k, None
    if decay is None:
        assert g is not None
        of_q, of_k = channel_scores(q, k, g, mask, precision)
        scores = jnp.concatenate([of_q, of_k], axis=0)  # [2 C, C]
        if segments is not None:
            scores = jnp.where(jnp.concatenate([same_segment(segments)] * 2, axis=0), scores, 0.0)
        scores = scores * beta[None, :]
        into_q, into_k, onward_k, across = channel_passage(chunk)
        reads, writes = jnp.concatenate([into_q, into_k], axis=0), beta[:, None] * onward_k
    else:
        pairs = jnp.concatenate([decay.pairs, decay.pairs * mask.before], axis=0)
        scores = dot(reads, writes, "nt", precision) * pairs  # [2 C, C]
        if decay.into is not None:
            reads = jnp.concatenate([decay.into] * 2, axis=0) * reads
            writes, across = decay.onward * writes, decay.across
    return Operands(reads, writes, across, scores)


def _operands(tokens: Any, starts: Any, *, chunk: int, program: _Program) -> Operands:
    """The operands of all chunks of a block, from [B, tokens, heads, ...]: leading axes [chunks, B, H, G]."""
    q, k, g, beta = tokens
    h, wide = q.shape[2], accumulator(q.dtype)
    q, k = _chunks(q, h, chunk).astype(wide), _chunks(k, h, chunk).astype(wide)
    g, beta = None if g is None else _chunks(g, h, chunk), _chunks(beta, h, chunk)
    starts = None if starts is None else _chunks(starts[:, :, None], 1, chunk)
    if g is not None and g.ndim == 6 and program.channel_operands is not None:
        return Operands(*program.channel_operands(q, k, g, beta, starts))
    one = functools.partial(_chunk_operands, precision=program.precision)
    # Groups innermost: what does not depend on the group is not computed again for it.
    over_groups = jax.vmap(one, in_axes=(None, None, 0, 0, None))
    over_heads = jax.vmap(over_groups, in_axes=(0, 0, 0, 0, None))
    over_chunks = jax.vmap(jax.vmap(over_heads))
    return over_chunks(q[:, :, :, 0], k[:, :, :, 0], g, beta, None if starts is None else starts[:, :, 0, 0])


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _inverted(lower: jax.Array, program: _Program) -> jax.Array:
    """(I + L)^-1, [..., C, C]. It is differentiated where a gradient is: the gradient itself does not go through it."""
    return program.inverse(lower)


@_inverted.defjvp
def _inverted_tangent(program: _Program, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (lower,), (d_lower,) = primals, tangents
    inverse = _inverted(lower, program)
    return inverse, -program.dot(inverse, program.dot(d_lower, inverse))


def _inverse(lower: jax.Array, precision: MatmulPrecision) -> jax.Array:
    """(I + L)^-1, [..., C, C], by the masks of wy_transform.py."""
    c = lower.shape[-1]
    mask = jax.tree.map(jnp.asarray, masks(c, np.dtype(lower.dtype), channels=False))
    flat = jax.vmap(lambda one: inverse(one, mask, precision))(lower.reshape(-1, c, c))
    return flat.reshape(lower.shape)


# The state through the chunks of a block.


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _decayed(across: Any, state: jax.Array) -> jax.Array:
    return state if across is None else across * state


def _state_passage(
    state: jax.Array, operands: Operands, inverse: jax.Array, v: jax.Array, program: _Program
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """The state [B, H, G, K, V] after the chunks; of each chunk q S, u, and, unless u is saved, the state before it."""
    c = v.shape[-2]

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        reads, writes, across, inverse, v = chunk
        found = program.dot(reads, state)  # [2 C, V]
        u = program.dot(inverse, v - found[..., c:, :])  # [C, V]
        before = None if program.saves_solution else state
        return _decayed(across, state) + program.dot(writes, u), (found[..., :c, :], u, before)

    # What is multiplied transposed is transposed before, for all chunks at once.
    chunks = program.split((operands.reads, _transposed(operands.writes), operands.across, inverse, v))
    after, found = program.scan(step, state, chunks)
    return after, *program.join(found)


def _states(state: jax.Array, operands: Operands, u: jax.Array, program: _Program) -> Any:
    """The states before each chunk, where u is known."""

    def step(state: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        writes, across, u = chunk
        return _decayed(across, state) + program.dot(writes, u), state

    return program.scan(step, state, program.split((_transposed(operands.writes), operands.across, u)))[1]


def _state_passage_backward(
    operands: Operands,
    inverse: jax.Array,
    read: jax.Array,
    states: Any,
    u: jax.Array,
    d_after: jax.Array,
    d_o: jax.Array,
    program: _Program,
) -> tuple[jax.Array, jax.Array, Operands]:
    """The gradients of the state before the chunks, of v, and of the operands; d_o [chunks, B, H, G, C, V]."""
    c = d_o.shape[-2]

    def step(d_after: jax.Array, chunk: Any) -> tuple[jax.Array, Any]:
        reads, writes, across, inverse, d_o, d_u = chunk
        d_v = program.dot(inverse, d_u + program.dot(writes, d_after))  # [C, V]
        both = jnp.concatenate([d_o, -d_v], axis=-2)
        return _decayed(across, d_after) + program.dot(reads, both), (d_after, both)

    def with_states(found: Any, state: jax.Array, chunk: Any) -> Any:
        (d_after, both), (u, across) = found, chunk
        d_across = None
        if across is not None:
            equal = tuple(axis for axis in (-2, -1) if across.shape[axis] == 1)
            d_across = jnp.sum(state * d_after, axis=equal, keepdims=True)
        d_reads = program.dot(both, state, "nt")  # [2 C, K]
        d_writes = program.dot(u, d_after, "nt")  # [C, K]
        d_scores = program.dot(both, u, "nt")  # [2 C, C]
        return -both[..., c:, :], Operands(d_reads, d_writes, d_across, d_scores)

    d_u = program.dot(read, d_o, "tn")  # [C, V]: from the outputs of the chunk itself.
    chunks = (_transposed(operands.reads), operands.writes, operands.across, _transposed(inverse), d_o, d_u)
    d_state, found = program.scan(step, d_after, program.split(chunks), reverse=True)
    gradients = program.each(with_states, found, states, program.split((u, operands.across)))
    return d_state, *program.join(gradients)


# All blocks.


def _forward(call: DeltaRuleCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], Any]:
    b, t, h, depth = call.q.shape
    hv, width = call.v.shape[2:]
    config, program = launch.config, _program(launch.chip, call.v.dtype)
    chunk = config.chunk

    def step(state: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        tokens, values, starts = block
        operands = _operands(tokens, starts, chunk=chunk, program=program)
        read, inverse = operands.scores[..., :chunk, :], _inverted(operands.scores[..., chunk:, :], program)
        values = _chunks(values, h, chunk).astype(state.dtype)
        after, of_q, u, _ = _state_passage(state, operands, inverse, values, program)
        o = call.scale * (of_q + program.dot(read, u))
        solution = (inverse, u, read) if program.saves_solution else None
        return after, (_unchunk(o.astype(call.v.dtype)), (state, solution) if save else None)

    tokens = (call.q, call.k, call.g, call.beta), call.v, call.resets
    blocks = jax.tree.map(lambda x: _blocks(x, config), tokens)
    state, (o, saved) = jax.lax.scan(step, call.initial_state.reshape(b, h, hv // h, depth, width), blocks)
    if save:
        states, solution = saved
        # The batch first: [B, num_blocks, H, G, K, V], and [B, num_blocks, chunks, H, G, C, ...].
        solution = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), solution)
        saved = jnp.moveaxis(states, 1, 0), solution, Static(config)
    return (_unblock(o, t), state.reshape(b, hv, depth, width)), saved


def _backward(call: DeltaRuleCall, saved: Any, cotangents: Any, launch: Launch) -> DeltaRuleCall:
    """From the inputs, the state before each block, and the solution of each chunk, or None to solve it again."""
    states, solution, config = saved[0], saved[1], saved[2].value
    states, solution = jnp.moveaxis(states, 0, 1), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), solution)
    d_o, d_state = cotangents
    program = _program(launch.chip, call.v.dtype)
    chunk, (_, t, h, _) = config.chunk, call.q.shape

    def step(d_after: jax.Array, block: Any) -> tuple[jax.Array, Any]:
        state, solution, tokens, values, starts, d_o = block
        operands, pullback = jax.vjp(lambda tokens: _operands(tokens, starts, chunk=chunk, program=program), tokens)
        if solution is None:
            inverse = _inverted(operands.scores[..., chunk:, :], program)
            values = _chunks(values, h, chunk).astype(state.dtype)
            _, _, u, states = _state_passage(state, operands, inverse, values, program)
            read = operands.scores[..., :chunk, :]
        else:
            inverse, u, read = solution
            states = _states(state, operands, u, program)
        d_o = call.scale * _chunks(d_o, h, chunk).astype(state.dtype)
        d_state, d_v, d_operands = _state_passage_backward(operands, inverse, read, states, u, d_after, d_o, program)
        return d_state, (*pullback(d_operands)[0], _unchunk(d_v.astype(call.v.dtype)))

    tokens = (call.q, call.k, call.g, call.beta), call.v if solution is None else None, call.resets, d_o
    blocks = jax.tree.map(lambda x: _blocks(x, config), tokens)
    d_state, gradients = jax.lax.scan(
        step, d_state.reshape(states.shape[1:]), (states, solution, *blocks), reverse=True
    )
    d_q, d_k, d_g, d_beta, d_v = jax.tree.map(lambda d: _unblock(d, t), gradients)
    d_state = d_state.reshape(call.initial_state.shape)
    return call.gradients(q=d_q, k=d_k, v=d_v, g=d_g, beta=d_beta, initial_state=d_state)


IMPLEMENTATION = Implementation(
    forward=Pass(_forward, config=DeltaRuleXlaForward, heuristic=_heuristic, saved=("B . H", "B . . H", "")),
    backward=Pass(
        _backward,
        reads=("q", "k", "v", "g", "beta", "resets"),
        follows_forward=True,
        differentiable=True,
        note="the chunks and blocks of the forward pass, which saved one state per block",
    ),
)
