"""What lengths and pages that are out of range give, for implementations that check them outside of their kernel."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Launch
from tilewright.ops.attention.decode.call import DecodeCall

Outputs = tuple[jax.Array, jax.Array]
"""out [B, T, H, Dv] and logsumexp [B, T, H]."""


def within_bounds(run: Callable[[DecodeCall, Launch], Outputs]) -> Callable[..., tuple[Outputs, None]]:
    """Returns a forward pass that calls `run` with pages of the pool and lengths from 0 to the room only.

    A sequence with another length gives NaN. `pallas_gpu` checks inside its kernel: the lengths before it and the factor
    after it would be a launch each.
    """

    def forward(call: DecodeCall, launch: Launch, *, save: bool) -> tuple[Outputs, None]:
        in_range = (call.lengths >= 0) & (call.lengths <= call.room)
        bounded = {"lengths": jnp.where(in_range, call.lengths, 0)}
        if call.page_table is not None:
            bounded["page_table"] = jnp.clip(call.page_table, 0, call.k.shape[0] - 1)
        out, logsumexp = run(call.with_arrays(bounded), launch)
        factor = jnp.where(in_range, 1.0, jnp.nan)
        out = out * factor.astype(out.dtype)[:, None, None, None]
        return (out, logsumexp + (factor - 1.0).astype(logsumexp.dtype)[:, None, None]), None

    return forward
