"""A sequence that is cut contiguously over a mesh axis, inside `jax.shard_map`: what one shard has from the others.

Shard 0 has the first tokens. An op with `axis_name=` runs on the tokens of its shard, and these functions bring what came
before them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from tilewright.core.manual_axes import vary_over
from tilewright.core.segments import segment_starts


def shard_count(op: str, axis_name: Any) -> int:
    """The number of shards. An axis that is none of a `jax.shard_map` around the call is an error."""
    if not isinstance(axis_name, str):
        raise ValueError(f"{op}: axis_name={axis_name!r} must be the name of one mesh axis, which T is cut over")
    try:
        return jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{op}: axis_name={axis_name!r} is no axis of a jax.shard_map around this call; call {op} inside "
            f"jax.shard_map(..., axis_names={{{axis_name!r}}}), or leave axis_name out for a whole sequence"
        ) from None


def varying(x: Any, axis_name: str) -> Any:
    """An array that may be the same on every shard, as one that may differ."""
    return None if x is None else vary_over(x, frozenset({axis_name}))


def from_earlier(x: jax.Array, axis_name: str, distance: int = 1) -> jax.Array:
    """The array of the shard `distance` before this one; zeros where there is none."""
    count = jax.lax.axis_size(axis_name)
    pairs = [(source, source + distance) for source in range(count - distance)]
    return jax.lax.ppermute(varying(x, axis_name), axis_name, pairs)


def of_last(x: jax.Array, axis_name: str) -> jax.Array:
    """The last shard's array, on every shard."""
    last = jax.lax.axis_index(axis_name) == jax.lax.axis_size(axis_name) - 1
    return jax.lax.psum(jnp.where(last, x, jnp.zeros_like(x)), axis_name)


def starts_in_shard(segment_ids: Int[Array, "B T"], axis_name: str) -> Bool[Array, "B T"]:
    """`segment_starts` of a shard: the first token starts a segment where the shard before ends with another one."""
    before = from_earlier(segment_ids[:, -1], axis_name)  # [B]
    first = (before != segment_ids[:, 0]) & (jax.lax.axis_index(axis_name) > 0)
    return jnp.concatenate([first[:, None], segment_starts(segment_ids)[:, 1:]], axis=1)
