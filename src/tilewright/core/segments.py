"""Packed sequences: several in a row of a batch, told apart by an id a token."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def segment_starts(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Each token whose segment is not that of the token before. Never the first: what came before the call is not known."""
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0)))
