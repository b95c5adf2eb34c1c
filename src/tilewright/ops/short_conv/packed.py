"""`short_conv` over packed sequences that each have an initial and a final state.

In front of each sequence its W-1 inputs of before are inserted, on the device, since that is where the sequences' ends are
known. The op then runs on T + N (W - 1) tokens with a segment per sequence, and the final states are inputs, too: two
gathers of x more than without states.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.segments import are_ends


def run_packed(
    run: Callable[[jax.Array, jax.Array], jax.Array],
    x: Float[Array, "T D"],
    states: Float[Array, "N before D"],
    cu_seqlens: Int[Array, " ends"],
) -> tuple[Float[Array, "T D"], Float[Array, "N before D"]]:
    """The outputs [T, D] and the final states [N, W-1, D]; `run` takes inputs and segment ids, both without a batch.

    `cu_seqlens` ascends from 0 to T. Where it does not, all results are NaN.
    """
    t, (n, before, _) = x.shape[0], states.shape
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    number = jnp.arange(n, dtype=jnp.int32)
    ends_inserted = ends + (number + 1) * before  # [N], where each sequence ends with what is inserted
    place = jnp.arange(t + n * before, dtype=jnp.int32)
    sequence = jnp.minimum(jnp.sum(place[:, None] >= ends_inserted[None], axis=1, dtype=jnp.int32), n - 1)
    offset = place - starts[sequence] - sequence * before
    is_state = offset < before
    source = jnp.where(is_state, t + sequence * before + offset, starts[sequence] + offset - before)
    inserted = jnp.take(jnp.concatenate([x, states.reshape(n * before, -1)]), source, axis=0, mode="clip")
    y = run(inserted, sequence)
    token = jnp.arange(t, dtype=jnp.int32)
    own = jnp.minimum(jnp.sum(token[:, None] >= ends[None], axis=1, dtype=jnp.int32), n - 1)
    y = jnp.take(y, token + (own + 1) * before, axis=0, mode="clip")
    last = ends_inserted[:, None] - before + jnp.arange(before, dtype=jnp.int32)[None]
    final = jnp.take(inserted, last, axis=0, mode="clip")
    valid = are_ends(cu_seqlens, t)
    return jnp.where(valid, y, jnp.nan), jnp.where(valid, final, jnp.nan)
