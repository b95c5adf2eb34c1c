"""`short_conv` over a sequence that is cut over a mesh axis: each shard needs the W-1 inputs before its first token.

A device sends B (W-1) D numbers of x's dtype, and 4 B bytes of segment ids; and as much again for the final state, where
it is used.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.sequence_shards import from_earlier, varying


def state_before(
    x: Float[Array, "B T D"],
    initial_state: Float[Array, "B rows D"] | None,
    segment_ids: Int[Array, "B T"] | None,
    reach: Int[Array, "B T"] | None,
    width: int,
    axis_name: str,
) -> Float[Array, "B rows D"]:
    """The inputs before this shard's first token; zeros where they are of another segment.

    `reach` has for each token how many tokens before it are of its segment, at most W-1.
    """
    rows = width - 1
    if x.shape[1] < rows:
        raise ValueError(
            f"short_conv: a shard over axis_name={axis_name!r} has T={x.shape[1]} tokens, and needs W-1={rows} or more, "
            f"which the next shard reads; cut the sequence into fewer shards"
        )
    tail = x[:, x.shape[1] - rows :]  # [B, W-1, D]
    if reach is not None:
        back = jnp.arange(rows - 1, -1, -1)[None]  # How far each row is before the last token.
        tail = jnp.where((back <= reach[:, -1:])[..., None], tail, jnp.zeros_like(tail))
    before = from_earlier(tail, axis_name)
    if segment_ids is not None:
        same = from_earlier(segment_ids[:, -1], axis_name) == segment_ids[:, 0]  # [B]
        before = jnp.where(same[:, None, None], before, jnp.zeros_like(before))
    if initial_state is None:
        return before  # The first shard has zeros.
    return jnp.where(jax.lax.axis_index(axis_name) == 0, varying(initial_state, axis_name), before)
