"""Packed sequences: several sequences in one row of a batch, distinguished by a segment id per token, or by their ends."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from tilewright.core.arguments import shown
from tilewright.core.axes import Size


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a token's segment differs from the previous token's. Always False at the first token of a call."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))


def check_segments(segment_ids: jax.Array, tokens: Sequence[Size]) -> None:
    """Raises unless there is an integer for each of the tokens, [B, T] or [T]."""
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(
            f"segment_ids has dtype {segment_ids.dtype.name}; segment_ids must be integers: "
            f"pass segment_ids.astype(jnp.int32)"
        )
    if segment_ids.shape != tuple(tokens):
        letters = "[B, T]" if len(tokens) == 2 else "[T]"
        raise ValueError(
            f"segment_ids is {shown(segment_ids)}; it must be {letters} = {list(tokens)}, one id for each token: use "
            f"jnp.broadcast_to where all sequences are split alike"
        )


def checked_cu_seqlens(
    cu_seqlens: jax.Array, name: str, x: jax.Array, t: Size, *, batched: bool
) -> Int[Array, " ends"]:
    """The ends of packed sequences as int32; raises where they cannot be those of x, which has t tokens.

    `name` is that of x in the caller's signature.

    Values that are traced are not known here: `are_ends` says on the device whether they are right.
    """
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer) or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens is {shown(cu_seqlens)}; it must be [N + 1] integers, 0 and where each of N sequences ends"
        )
    if batched and x.shape[0] != 1:
        raise ValueError(
            f"{name} is {shown(x)} and cu_seqlens is given; packed sequences lie in one row, B=1: reshape to "
            f"[1, B T, ...], and let cu_seqlens count over all rows"
        )
    if not isinstance(cu_seqlens, Tracer):
        known = np.asarray(cu_seqlens)
        if known[0] != 0 or known[-1] != t or (np.diff(known) < 0).any():
            raise ValueError(f"cu_seqlens={known.tolist()} must ascend from 0 to T={t}; neighbours may be equal")
    return cu_seqlens.astype(jnp.int32)


def are_ends(cu_seqlens: Int[Array, " ends"], t: Size) -> Bool[Array, ""]:
    """Whether cu_seqlens ascends from 0 to t."""
    return (cu_seqlens[0] == 0) & (cu_seqlens[-1] == t) & jnp.all(cu_seqlens[1:] >= cu_seqlens[:-1])
