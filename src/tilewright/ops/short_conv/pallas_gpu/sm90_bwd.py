"""The gradient of short convolution as a Mosaic GPU kernel for Hopper: each thread walks back along a run of tokens.

With p, w_k and the terms that are left out as in the forward kernel (sm90_fwd.py),

    d_t = dy_t act'(p_t)        dx_s = sum_k w_k d_{s+k}        dw_k = sum_t d_t x_{t-k}        dbias = sum_t d_t

With `normalize`, dy_t is first taken back through the division by the lengths of the heads (core/unit_length.py).

Floor: x and dy are read and dx is written once, 6 bytes per element, in about 28 instructions per element, and 41 with
`normalize`. The kernel moves that; at the ends of each run it reads W-1 tokens of x and dy after it and W-1 of x before it
a second time, from the L2 cache; and it writes W + 1 float32 rows per run for dw and dbias, which XLA adds up:
4 (W + 1) / (6 block_t) of the floor's bytes, twice.

Blocking: as in the forward kernel, but from the last token of a run to its first, so that the d that dx needs are in
registers. p is recomputed from the inputs of the walk: each step back needs one input more, x_{t-W+1}.

The sums of dw and dbias over a run stay in registers. Each thread block writes its own, and they are added up in the order
of the runs: the same bits in every run. The gradient of the state needs d of the first W-1 tokens only; the plain version
computes it. The gradient of the final state is added to the last W-1 rows of dx by the threads that stored them.

Measured on an H200, B4 T4096 D4096, silu: 106 us, where it took 114 us without the loads of the next tokens ahead; with
`normalize=128` 129 us, where it took 161 us without them and with 512 channels. The bytes alone take 94 us at 4.3 TB/s, and
with `normalize` the instructions as long. 512 channels there: 155 us with four tokens at a time, 140 us with two, 136 us
with eight.

Numerics: float32 throughout; dx is rounded once to x's dtype, its last rows twice, dw and dbias once after their last sum.

Tried and dropped: XLA adding the gradient of the final state to dx in place. For B = 1, XLA of jax 0.11.2 puts the kernel
and the update into one fusion, and fails ("DUS target must be a fusion parameter").
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.unit_length import pull_back
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.config import SM90_BLOCKS_D, ShortConvSm90Backward
from tilewright.ops.short_conv.final_state import d_final_reached, with_earlier_rows
from tilewright.ops.short_conv.pallas_gpu.sm90_fwd import (
    Filter,
    channels_per_block,
    own_block,
    unsupported_reason,
    where_reached,
)
from tilewright.ops.short_conv.xla import d_initial_state
from tilewright.pallas.gpu.elementwise import for_tokens, load, sigmoid, store
from tilewright.pallas.gpu.kernel import run_kernel

# Thread blocks that run on a multiprocessor at a time, by the registers that ptxas takes for W=4: 126 for 512 channels, 158
# with segments, 127 with heads and two tokens at a time, and 254 for 1,024 channels with heads.
_RESIDENT, _RESIDENT_WITH_SEGMENTS, _RESIDENT_WIDE = 4, 3, 2
_WIDE = SM90_BLOCKS_D[-1]
_SHORTEST, _LONGEST = 16, 512


def _heuristic(chip: Chip, call: ShortConvCall) -> ShortConvSm90Backward:
    """Runs so long that all thread blocks run at a time: each writes sums, so more of them would cost bytes.

    With heads the instructions count, and shuffles are a quarter of them: 8 channels per thread need half as many. With
    segments there are too few registers for that.
    """
    b, t, d = call.x.shape
    block_d, unroll = channels_per_block(call), ShortConvSm90Backward.unroll
    resident = _RESIDENT if call.reach is None else _RESIDENT_WITH_SEGMENTS
    if call.normalize is not None and call.reach is None:
        block_d, unroll = (_WIDE, unroll) if d % _WIDE == 0 else (block_d, unroll // 2)
    if block_d == _WIDE:
        resident = _RESIDENT_WIDE
    runs = resident * (chip.multiprocessors or 1) // (b * pl.cdiv(d, block_d))
    block_t = min(max(pl.cdiv(t, max(runs, 1)), _SHORTEST), _LONGEST)
    return ShortConvSm90Backward(pl.cdiv(block_t, unroll) * unroll, block_d, unroll)


def _kernel(
    *,
    # inputs
    x_ref,  # [B, T, D]
    w_ref,  # [W, D]
    bias_ref,  # [D], or None
    state_ref,  # [B, W-1, D], or None
    reach_ref,  # [B, T], or None
    dy_ref,  # [B, T, D]
    d_final_ref,  # [B, W-1, D]
    # outputs
    dx_ref,  # [B, T, D]
    sums_ref,  # [B, runs, W or W + 1, D] float32: dw by lag, then dbias
    # static
    activation: str | None,
    normalize: int | None,
    config: ShortConvSm90Backward,
):
    length = x_ref.shape[1]
    b, run, start, columns = own_block(x_ref, config.block_t, config.block_d)
    filter_ = Filter(x_ref, w_ref, bias_ref, state_ref, b, columns, config.block_d)
    layout, width = filter_.layout, filter_.width
    end = jnp.minimum(start + config.block_t, length)

    def reach_of(token: Any) -> Any:
        return None if reach_ref is None else reach_ref[b, token]

    def through_activation(window: tuple[jax.Array, ...], reach: Any, dy: jax.Array) -> jax.Array:
        """d of a token, the gradient of p, from its inputs by lag and dy in float32."""
        if activation is None and normalize is None:
            return dy
        y, slope = filter_.sum(window, reach), None
        if activation == "silu":
            s = sigmoid(y, layout)
            y = y * s
            slope = s + y * (1.0 - s)
        if normalize is not None:
            return pull_back(y, dy, filter_.sums_of_heads(normalize), slope)
        assert slope is not None
        return dy * slope

    def after_run() -> tuple[Any, Any, Any]:
        """The carry before the last token of the run: inputs, and d and reach of the W-1 tokens after the run.

        There is none after the last token; what is loaded in its place is not used.
        """
        inputs = {n: filter_.input(jnp.minimum(end + n, length - 1)) for n in range(-(width - 1), width - 1)}
        d, reaches = [], []
        for n in range(width - 1):
            token = jnp.minimum(end + n, length - 1)
            dy = filter_.wide(dy_ref.at[b, token, columns])
            one = through_activation(tuple(inputs[n - lag] for lag in range(width)), reach_of(token), dy)
            d.append(jnp.where(end + n < length, one, jnp.zeros_like(one)))
            reaches.append(reach_of(token))
        return tuple(inputs[-1 - lag] for lag in range(width - 1)), tuple(d), tuple(reaches)

    def inputs(done: Any, count: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        """The oldest x that each token needs, and its dy, [block_d] each."""
        rows = [end - 1 - done - n for n in range(count)]
        oldest = [filter_.load(row - (width - 1)) for row in rows]
        cotangents = [load(dy_ref.at[b, jnp.maximum(row, 0), columns], layout) for row in rows]
        return tuple(zip(oldest, cotangents, strict=True))

    def tokens(done: Any, loaded: tuple[tuple[jax.Array, jax.Array], ...], carry: Any) -> Any:
        window, later, reaches, sums = carry  # By lag; `later` has d of the tokens t + 1 to t + W-1.
        for n, (x, dy) in enumerate(loaded):
            row = end - 1 - done - n
            window = (*window, filter_.input(row - (width - 1), x))
            reach = reach_of(row)
            d = through_activation(window, reach, dy.astype(jnp.float32))
            dx = filter_.taps[0] * d
            for lag in range(1, width):
                dx = dx + filter_.taps[lag] * where_reached(reaches[lag - 1], lag, later[lag - 1])
            store(dx_ref.at[b, row, columns], dx.astype(dx_ref.dtype), layout)
            terms = [d * where_reached(reach, lag, window[lag]) for lag in range(width)]
            terms += [] if filter_.bias is None else [d]
            sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
            window, later, reaches = window[1:], (d, *later[:-1]), (reach, *reaches[:-1])
        return window, later, reaches, sums

    zeros = plgpu.layout_cast(jnp.zeros((config.block_d,), jnp.float32), layout)
    sums = (zeros,) * sums_ref.shape[2]
    carry = (*after_run(), sums)
    *_, sums = for_tokens(end - start, config.unroll, inputs, tokens, carry, ragged=length % config.unroll > 0)
    for row in range(max(length - (width - 1), 0), length):

        def add_final(row: int = row) -> None:
            own = dx_ref.at[b, row, columns]
            total = filter_.wide(own) + filter_.wide(d_final_ref.at[b, row - length + (width - 1), columns])
            store(own, total.astype(dx_ref.dtype), layout)

        pl.when((start <= row) & (row < end))(add_final)
    for n, total in enumerate(sums):
        store(sums_ref.at[b, run, n, columns], total, layout)


def _backward(
    call: ShortConvCall, saved: None, cotangents: tuple[jax.Array, jax.Array], launch: Launch
) -> ShortConvCall:
    config: ShortConvSm90Backward = launch.config
    (dy, d_final), width, (b, t, d) = cotangents, call.w.shape[0], call.x.shape
    d_final = d_final_reached(call, d_final)
    runs, has_bias = pl.cdiv(t, config.block_t), call.bias is not None
    outputs = run_kernel(
        functools.partial(_kernel, activation=call.activation, normalize=call.normalize, config=config),
        name="short_conv_backward",
        inputs={
            "x": call.x,
            "w": call.w,
            "bias": call.bias,
            "state": call.state,
            "reach": call.reach,
            "dy": dy,
            "d_final": d_final,
        },
        outputs={
            "dx": jax.ShapeDtypeStruct(call.x.shape, call.x.dtype),
            "sums": jax.ShapeDtypeStruct((b, runs, width + has_bias, d), jnp.float32),
        },
        scratch={},
        grid={"work": b * runs * (d // config.block_d)},
    )
    sums = jnp.sum(outputs["sums"].reshape(b * runs, width + has_bias, d), axis=0)  # [W or W + 1, D]
    d_state = with_earlier_rows(d_initial_state(call, dy), d_final, t)
    d_bias = sums[width] if has_bias else None
    return call.gradients(x=outputs["dx"], w=sums[:width][::-1], bias=d_bias, state=d_state)


BACKWARD = Pass(_backward, config=ShortConvSm90Backward, heuristic=_heuristic, unsupported_reason=unsupported_reason)
