"""The delta rules over a sequence that is cut over a mesh axis (context parallelism).

The state after a shard is linear in the state before it, S_end = A S_start + b. A [K, K] is the end state of the same
keys, gates and betas with values of 0 that begins with the identity, and b the end state that begins with zeros: both come
from the op itself. The pairs (A, b) are combined over the shards in ceil(log2 n) exchanges, and one more gives each shard
the state that it starts from. Nothing that is sent grows with T.

Bytes that a device sends forward, with B, HV, K and V of its part of the call, all in float32:

    4 B HV K (V (ceil(log2 n) + 1) + K (ceil(log2 n) - 1)),  and 4 B for segment ids

and the sum of the final state, 4 B HV K V, where it is used. The cost is three passes of the op instead of one: A, with
V = K, then b, and then the outputs from the right state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.sequence_shards import from_earlier, of_last, varying
from tilewright.ops.delta_rule.call import DeltaRuleCall

Run = Callable[[DeltaRuleCall], tuple[jax.Array, jax.Array]]


def run_on_shard(run: Run, transition: Run, call: DeltaRuleCall, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """The outputs of this shard, and the final state of the whole sequence, on every shard.

    Args:
      run: runs a call.
      transition: runs the call of another shape that A comes from.
      call: the tokens of this shard; its initial state is the whole sequence's, and counts on the first shard.
      axis_name: the mesh axis.
    """
    call = call.with_arrays({name: varying(x, axis_name) for name, x in call.given().items()})
    if jax.lax.axis_size(axis_name) > 1:
        call = call.with_arrays({"initial_state": _start(run, transition, call, axis_name)})
    o, end = run(call)
    return o, of_last(end, axis_name)


def _start(run: Run, transition: Run, call: DeltaRuleCall, axis_name: str) -> jax.Array:
    """The state that this shard starts from, [B, HV, K, V]."""
    count, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    b, t, _, depth = call.k.shape
    hv, dtype = call.v.shape[2], call.initial_state.dtype

    identity = jnp.broadcast_to(jnp.eye(depth, dtype=dtype)[None, None], (b, hv, depth, depth))
    still = {"v": jnp.zeros((b, t, hv, depth), call.v.dtype), "initial_state": identity}
    a = transition(call.with_arrays({name: varying(x, axis_name) for name, x in still.items()}))[1]
    # The first shard knows its state: what it passes on does not depend on any other.
    known = jnp.where(index == 0, call.initial_state, jnp.zeros_like(call.initial_state))
    end = run(call.with_arrays({"initial_state": known}))[1]
    distance = 1
    while distance < count:
        has = index >= distance
        end = jnp.where(has, _product(a, from_earlier(end, axis_name, distance)) + end, end)
        if 2 * distance < count:
            a = jnp.where(has, _product(a, from_earlier(a, axis_name, distance)), a)
        distance *= 2
    return jnp.where(index == 0, call.initial_state, from_earlier(end, axis_name))


def _product(a: jax.Array, b: Any) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
