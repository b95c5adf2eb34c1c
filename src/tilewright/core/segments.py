"""Packed sequences: several sequences in one row of a batch, distinguished by a segment id per token."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """True where a token's segment differs from the previous token's. Always False at the first token of a call."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))
