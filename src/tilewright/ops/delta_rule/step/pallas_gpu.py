"""One token of the delta rule as a Mosaic GPU kernel for Hopper, in place: one launch for the three ops.

For each value head, with S [K, V] and a decay of none, one number or one a key channel,

    S <- Diag(exp(g)) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q

Floor: S read once and written once, 8 K V bytes a head; all else is a hundredth of that. 131 KB for K = V = 128: at the
4.2 TB/s that an H200 copies with, 1.0 us for 32 heads and 64 us for 64 times as many. Here: that, and q, k and g once for
each block of value channels, from the L2.

Blocking: a thread block takes all K of `block_v` value channels, so that nothing is summed across blocks. Its 128 threads
hold the tile in registers: 16 key channels side by side, and of each row pieces of 16 bytes (8 for 16 channels). A row of
32 channels is one line of the L2. Every load stands before the first sum: what waits for memory does so once. Sums over K
are inside a thread, then over 4 lanes, then over 4 warps through shared memory; of those the block has one warpgroup only,
since the scratch of such sums is the whole block's.

The state's buffer is the result's: under `donate_argnums` and in a loop the step happens in place. Where the caller keeps
the old state, XLA copies it first.

Numerics: float32 throughout, whatever the inputs; the sums in an order of their own, the same in every run.

Limits: Hopper only, though nothing in it but its measurements is Hopper's. K and V are padded to multiples of 16, which
copies a state that is not whole there and back. The gradient is that of the plain step: decoding seldom asks for it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from tilewright.core.axes import State
from tilewright.core.batching import folded
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import few_rows, not_hopper, padded, store, updated_in_place
from tilewright.core.manual_axes import output_like
from tilewright.ops.delta_rule.step.config import GPU_ROWS, PallasGpuConfig
from tilewright.ops.delta_rule.step.reference import delta_rule_step_reference

Config = PallasGpuConfig

_LANES_A_ROW = 8
_MOST_CHANNELS_A_THREAD = 4  # 16 bytes, the widest load.


def default_config(chip: Chip, state: State, *rest: Any, scale: float) -> PallasGpuConfig:
    del chip, rest, scale
    return PallasGpuConfig.for_shape(state.shape[3])


def unsupported_reason(launch: Launch, state: State, *rest: Any, scale: float) -> str | None:
    del rest, scale
    if (reason := not_hopper(launch.chip, "reference")) is not None:
        return reason
    if state.shape[0] == 0:
        return "B=0 leaves no block to launch; use implementation='reference'"
    return None


def _layout(block_v: int) -> Any:
    """[16, block_v] of a tile: a warp has 4 rows, a row 8 lanes."""
    channels = min(block_v // _LANES_A_ROW, _MOST_CHANNELS_A_THREAD)
    return few_rows(GPU_ROWS, _LANES_A_ROW, channels)


def _step_kernel(*refs: Any, block_v: int, group: int, scale: float):
    # inputs
    state_ref, q_ref, k_ref, v_ref, beta_ref = refs[:5]  # [B, HV, K, V], [B, H, K] twice, [B, HV, V], [B, HV]
    g_ref = refs[5] if len(refs) == 8 else None  # [B, HV] or [B, HV, K]
    # outputs
    o_ref, after_ref = refs[-2:]  # [B, HV, V], [B, HV, K, V]: the state's own buffer

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
    seen = jnp.sum(state * wide_keys, axis=0)  # [block_v]
    state = state + wide_keys * spread(beta * (values - seen), 1)
    store(after_ref.at[b, hv, :, columns], state)
    o = jnp.sum(state * spread(queries, 0), axis=0)  # [block_v]
    store(o_ref.at[b, hv, columns], (o * scale).astype(o_ref.dtype))


def _forward(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    *,
    scale: float,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    config: PallasGpuConfig = launch.config
    depth, width = state.shape[2:]
    # Channels of zeros add nothing.
    state = padded(padded(state, 2, GPU_ROWS), 3, config.block_v)
    q, k, v = padded(q, 2, GPU_ROWS), padded(k, 2, GPU_ROWS), padded(v, 2, config.block_v)
    gates = [] if g is None else [padded(g, 2, GPU_ROWS) if g.ndim == 3 else g]
    b, hv = v.shape[:2]
    o, after = updated_in_place(
        functools.partial(_step_kernel, block_v=config.block_v, group=hv // q.shape[1], scale=scale),
        state,
        (q, k, v, beta, *gates),
        out_type=output_like(v.shape, v.dtype, v),
        grid={"batch": b, "head": hv, "values": v.shape[2] // config.block_v},
        interpret=launch.interpret,
        name="delta_rule_step",
    )
    return o[..., :width], after[:, :, :depth, :width]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _step(
    state: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    o, after = folded(functools.partial(_forward, scale=scale, launch=launch), state, q, k, v, g, beta)
    return o, after


def _keep(*arguments: Any) -> tuple[Any, Any]:
    return _step(*arguments), arguments[:6]


def _pull(scale: float, launch: Launch, saved: Any, cotangents: Any) -> Any:
    del launch
    _, pullback = jax.vjp(functools.partial(delta_rule_step_reference, scale=scale), *saved)
    return pullback(cotangents)


_step.defvjp(_keep, _pull)


def delta_rule_step_pallas_gpu(
    state: State,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
    beta: Float[Array, "B HV"],
    *,
    scale: float,
    launch: Launch,
) -> tuple[Float[Array, "B HV V"], State]:
    """All three steps: by the gate, none, one a head or one a key channel. The output, and the state after the token."""
    return _step(state, q, k, v, g, beta, scale, launch)


gated_delta_rule_step_pallas_gpu = kda_step_pallas_gpu = delta_rule_step_pallas_gpu
