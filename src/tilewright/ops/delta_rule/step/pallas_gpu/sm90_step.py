"""One token of the delta rule as a Mosaic GPU kernel for Hopper, in place: one launch for the three ops.

For each value head, with S [K, V] and no decay, one decay per head or one per key channel,

    S <- Diag(exp(g)) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q

Floor: S read once and written once, 8 K V bytes per head; everything else is a hundredth of that. 131 KB for K = V = 128:
at the 4.2 TB/s that an H200 copies with, 1.0 us for 32 heads and 64 us for 64 times as many. The kernel moves that, and q,
k and g once per block of value channels, from the L2.

Blocking: a thread block takes all K of `block_v` value channels, so that nothing is summed across blocks. Its 128 threads
hold the tile in registers: 16 key channels side by side, and pieces of 16 bytes of each row (8 for 16 channels). A row of
32 channels is one line of the L2. All loads come before the first sum, so the thread waits for memory once. Sums over K are
inside a thread, then over 4 lanes, then over 4 warps through shared memory. A block has one warpgroup only, since the
scratch of such sums belongs to the whole block.

The result's state shares the buffer of the given state: under `donate_argnums` and in a loop the step happens in place.
Where the caller keeps the old state, XLA copies it first.

Numerics: float32 throughout, whatever the inputs; the order of the sums is fixed, so results are the same in every run.

Limits: Hopper only, though only its measurements are specific to Hopper. K and V are padded to multiples of 16; a state
that needs padding is copied there and back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.step.call import DeltaRuleStepCall
from tilewright.ops.delta_rule.step.config import DeltaRuleStepSm90Forward
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import run_in_place
from tilewright.pallas.gpu.registers import few_rows, store

_ROWS = 16  # Key channels that the 128 threads of a block hold side by side.
_LANES_PER_ROW = 8
_MOST_CHANNELS_PER_THREAD = 4  # 16 bytes, the widest load.
_NARROW, _BLOCK_V = 16, 32


def heuristic(chip: Chip, call: DeltaRuleStepCall) -> DeltaRuleStepSm90Forward:
    """The block that needs the least padding of V."""
    return DeltaRuleStepSm90Forward(_NARROW if -(-call.state.shape[3] // _NARROW) % 2 else _BLOCK_V)


def unsupported_reason(call: DeltaRuleStepCall, launch: Launch) -> str | None:
    if call.state.shape[0] == 0:
        return "B=0 leaves no block to launch; use implementation='reference'"
    return None


def _layout(block_v: int) -> Any:
    """[16, block_v] of a tile: a warp holds 4 rows, and 8 lanes hold a row."""
    channels = min(block_v // _LANES_PER_ROW, _MOST_CHANNELS_PER_THREAD)
    return few_rows(_ROWS, _LANES_PER_ROW, channels)


def _step_kernel(
    *,
    # inputs
    state_ref,  # [B, HV, K, V]
    q_ref,  # [B, H, K]
    k_ref,  # [B, H, K]
    v_ref,  # [B, HV, V]
    beta_ref,  # [B, HV]
    g_ref,  # [B, HV] or [B, HV, K], or None
    # outputs
    o_ref,  # [B, HV, V]
    new_state_ref,  # [B, HV, K, V], the buffer of the state
    # static
    block_v: int,
    group: int,
    scale: float,
):
    b, hv = lax.axis_index("batch"), lax.axis_index("head")
    h = lax.div(hv, jnp.int32(group))
    columns = pl.ds(lax.axis_index("values") * block_v, block_v)
    shape = (state_ref.shape[2], block_v)
    layout = _layout(block_v)

    def load(ref: Any, axis: int) -> jax.Array:
        """A vector along one axis of the tile, as float32."""
        return plgpu.load(ref, layout=layout.reduce(1 - axis), optimized=False).astype(jnp.float32)

    def spread(vector: jax.Array, axis: int) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), layout)

    state = plgpu.load(state_ref.at[b, hv, :, columns], layout=layout, optimized=False)  # [K, block_v]
    keys, queries, values = load(k_ref.at[b, h], 0), load(q_ref.at[b, h], 0), load(v_ref.at[b, hv, columns], 1)
    beta = beta_ref[b, hv]
    if g_ref is not None and len(g_ref.shape) == 2:
        state = state * jnp.exp(g_ref[b, hv])
    elif g_ref is not None:
        state = state * spread(jnp.exp(load(g_ref.at[b, hv], 0)), 0)
    wide_keys = spread(keys, 0)  # [K, block_v]
    predicted = jnp.sum(state * wide_keys, axis=0)  # [block_v], S^T k
    state = state + wide_keys * spread(beta * (values - predicted), 1)
    store(new_state_ref.at[b, hv, :, columns], state)
    o = jnp.sum(state * spread(queries, 0), axis=0)  # [block_v]
    store(o_ref.at[b, hv, columns], (o * scale).astype(o_ref.dtype))


def forward(call: DeltaRuleStepCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """o and the state after the token."""
    block_v = launch.config.block_v
    depth, width = call.state.shape[2:]
    # Channels of zeros add nothing.
    q, k, v = padded(call.q, 2, _ROWS), padded(call.k, 2, _ROWS), padded(call.v, 2, block_v)
    g = padded(call.g, 2, _ROWS) if call.g is not None and call.g.ndim == 3 else call.g
    b, hv = v.shape[:2]
    outputs, state = run_in_place(
        functools.partial(_step_kernel, block_v=block_v, group=hv // q.shape[1], scale=call.scale),
        name="delta_rule_step",
        state=padded(padded(call.state, 2, _ROWS), 3, block_v),
        inputs={"q": q, "k": k, "v": v, "beta": call.beta, "g": g},
        outputs={"o": jax.ShapeDtypeStruct(v.shape, v.dtype)},
        grid={"batch": b, "head": hv, "values": v.shape[2] // block_v},
    )
    return (outputs["o"][..., :width], state[:, :, :depth, :width]), None
