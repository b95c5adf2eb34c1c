"""The delta rules over packed sequences that each have an initial and a final state.

Sequences lie one after the other in one row, and where each begins is known on the device only. They are brought into rows
of `L` tokens, each of one sequence, padded with tokens that change nothing: at most `(T + N (L - 1)) // L` rows, whatever
the lengths are. The op then runs on these rows as on any batch.

- With L = T every sequence is one row, and the op runs once, on N T tokens. That is taken for few sequences, and where T is
  small, as in decoding.
- Otherwise a sequence may go on in the next row. The state after a row is linear in the state before it, S_end = A S + b:
  A [K, K] is the end state of the same keys, gates and betas with values of 0 that begins with the identity, and b the one
  that begins with zeros, both from the op itself. A scan over the rows gives each the state that it begins with, and a
  third pass the outputs. That is three passes over T + N L tokens at most.

`gather`s bring tokens to their rows and outputs back, and gradients go the same ways.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tilewright.core.axes import Size
from tilewright.core.call import power_of_two
from tilewright.core.segments import are_ends
from tilewright.ops.delta_rule.call import DeltaRuleCall

Run = Callable[[DeltaRuleCall], tuple[jax.Array, jax.Array]]
# The shortest rows are one chunk of the kernels. Longer ones than the longest save little: a state per row.
_SHORTEST_ROW, _LONGEST_ROW = 64, 512
_PASSES = 3


def row_tokens(t: Size, sequences: int) -> int:
    """L, the tokens of a row, for `sequences` with t tokens in all. Where t is symbolic (`jax.export`), L is not t."""
    if not isinstance(t, int):
        return _LONGEST_ROW
    pieces = min(max(power_of_two(t // (4 * sequences)), _SHORTEST_ROW), _LONGEST_ROW)
    return t if sequences * t <= _PASSES * (t + sequences * pieces) else pieces


@dataclass(frozen=True)
class Rows:
    """Where the tokens of N sequences lie in M rows of L tokens."""

    tokens: jax.Array  # [M, L] int32, the token at each place
    is_token: jax.Array  # [M, L], False for padding
    sequence: jax.Array  # [M] int32
    is_first: jax.Array  # [M], whether the row begins its sequence
    place: jax.Array  # [T] int32, where each token is among the M L places
    last: jax.Array  # [N] int32, the last row of each sequence
    is_empty: jax.Array  # [N]

    @staticmethod
    def of(cu_seqlens: jax.Array, t: Size, length: int) -> "Rows":
        n = cu_seqlens.shape[0] - 1
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
        until = jnp.cumsum(
            (ends - starts + length - 1) // length, dtype=jnp.int32
        )  # [N], rows up to each sequence's end
        first = jnp.concatenate([jnp.zeros((1,), jnp.int32), until])
        row = jnp.arange((t + n * (length - 1)) // length, dtype=jnp.int32)
        # Sequences that end before it; the last rows may be nobody's.
        sequence = jnp.minimum(jnp.sum(row[:, None] >= until[None], axis=1, dtype=jnp.int32), n - 1)
        begin = starts[sequence] + (row - first[sequence]) * length
        tokens = begin[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        is_token = (tokens < ends[sequence][:, None]) & (row < until[-1])[:, None]
        token = jnp.arange(t, dtype=jnp.int32)
        own = jnp.minimum(jnp.sum(token[:, None] >= ends[None], axis=1, dtype=jnp.int32), n - 1)
        place = first[own] * length + token - starts[own]  # The rows of a sequence lie one after the other.
        return Rows(tokens, is_token, sequence, row == first[sequence], place, until - 1, starts == ends)

    def take(self, x: jax.Array) -> jax.Array:
        """The rows [M, L, ...] of x [1, T, ...], padded with zeros."""
        found = jnp.take(x[0], self.tokens, axis=0, mode="clip")
        mask = self.is_token.reshape(*self.is_token.shape, *(1,) * (x.ndim - 2))
        return jnp.where(mask, found, jnp.zeros_like(found))

    def put_back(self, x: jax.Array) -> jax.Array:
        """The inverse of `take`."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.place, axis=0, mode="clip")[None]


def run_packed(
    run: Run, transition: Run, call: DeltaRuleCall, initial: jax.Array, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The outputs [1, T, HV, V], and the final states [N, HV, K, V].

    Args:
      run: runs a call.
      transition: runs the call of another shape that A comes from.
      call: one row of packed tokens. Its initial state is not read.
      initial: the state before each sequence, [N, HV, K, V].
      cu_seqlens: [N + 1] int32, ascending from 0 to T. Where it is not, all results are NaN.
    """
    t = call.v.shape[1]
    length = row_tokens(t, initial.shape[0])
    rows = Rows.of(cu_seqlens, t, length)
    arrays = {name: rows.take(x) for name, x in call.given().items() if name != "initial_state"}
    own = jnp.take(initial, rows.sequence, axis=0)  # [M, HV, K, V]
    packed = call.with_arrays({**arrays, "initial_state": own})
    if not isinstance(t, int) or length < t:
        packed = packed.with_arrays({"initial_state": _starts(run, transition, packed, rows)})
    o, ends = run(packed)
    per_sequence = rows.is_empty[:, None, None, None]
    final = jnp.where(per_sequence, initial, jnp.take(ends, rows.last, axis=0, mode="clip"))
    valid = are_ends(cu_seqlens, t)
    return jnp.where(valid, rows.put_back(o), jnp.nan), jnp.where(valid, final, jnp.nan)


def _starts(run: Run, transition: Run, call: DeltaRuleCall, rows: Rows) -> jax.Array:
    """The state that each row begins with, [M, HV, K, V]. That of the call is its sequence's."""
    m, length, _, depth = call.k.shape
    hv, dtype = call.v.shape[2], call.initial_state.dtype
    identity = jnp.broadcast_to(jnp.eye(depth, dtype=dtype)[None, None], (m, hv, depth, depth))
    still = {"v": jnp.zeros((m, length, hv, depth), call.v.dtype), "initial_state": identity}
    across = transition(call.with_arrays(still))[1]
    is_first = rows.is_first[:, None, None, None]
    known = jnp.where(is_first, call.initial_state, jnp.zeros_like(call.initial_state))
    ends = run(call.with_arrays({"initial_state": known}))[1]
    # A first row's end is known; what its sequence had before it is another's.
    across = jnp.where(is_first, jnp.zeros_like(across), across)

    def step(state: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        across, end, known, is_first = row
        after = jnp.matmul(across, state, precision=jax.lax.Precision.HIGHEST) + end
        return after, jnp.where(is_first, known, state)

    return jax.lax.scan(step, jnp.zeros_like(known[0]), (across, ends, known, rows.is_first))[1]
