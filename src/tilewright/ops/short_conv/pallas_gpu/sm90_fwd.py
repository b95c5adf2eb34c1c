"""Short convolution as a Mosaic GPU kernel for Hopper: each thread walks along a run of tokens.

For each channel, with w_k the tap of lag k (w[W-1-k]) and without the terms that a token does not reach,

    p_t = bias + sum_k w_k x_{t-k}        y_t = act(p_t)

Floor: x is read and y is written once, 4 bytes per element; 12 instructions per element, two of them on the special
function unit for silu, are half of what the multiprocessors can issue in the time of these bytes. The kernel moves the
floor's bytes, and reads the W-1 tokens before each run a second time, from the L2 cache.

Blocking: a thread block of one warpgroup takes `block_t` tokens of `block_d` channels, and each thread block_d / 128
neighbouring channels: 8 bytes for 512. The thread keeps the taps and the last W-1 inputs in registers and walks along the
tokens, `unroll` of them at a time, and loads the next ones before it computes these (without that, 75 us became 80 us with
`normalize`, and 71 us 75 us; B4 T4096 D4096, H200). Neither shared memory nor barriers are used: several thread blocks per
multiprocessor hide each other's latencies. Neighbouring thread blocks take neighbouring channels.

Segments: `reach` is one number per token, equal for all threads of a block, and selects the taps.

Heads: with `normalize`, y_t is divided by its length in each head (core/unit_length.py). A head lies inside a warp, which
sums its squares by shuffles: 5 for a head of 128 channels in a block of 512. It takes 6 instructions per element more.

Numerics: float32 throughout; y is rounded once. The sigmoid uses the approximate reciprocal, the lengths the approximate
square root.

Limits: Hopper only, though only its block sizes are specific to Hopper. bfloat16. D is a multiple of 256. `normalize` is a
power of two from 8 to 256, and D a multiple of four heads, one for each warp.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.unit_length import unit_length
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.config import SM90_BLOCKS_D, ShortConvSm90Forward
from tilewright.ops.short_conv.final_state import final_state
from tilewright.pallas.gpu.elementwise import LANES, THREADS, for_tokens, load, sigmoid, store, sums_of_neighbours
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

# With 512 channels and W=4, ptxas takes 80 registers, so 6 thread blocks run on a multiprocessor at a time; with 1,024
# channels 3. The last thread blocks leave multiprocessors idle: there are at least four times as many as run at a time.
_BLOCK_D = 512
_BLOCKS_T = (32, 16)
_BLOCKS_PER_MULTIPROCESSOR = 28
_WARPS = THREADS // LANES
# A thread has 8 channels at most, and a warp 256.
_HEADS = (8, 16, 32, 64, 128, 256)


def unsupported_reason(call: ShortConvCall, launch: Launch) -> str | None:
    dtype, d, least = call.x.dtype.name, call.x.shape[2], SM90_BLOCKS_D[0]
    if dtype != "bfloat16":
        return f"x has dtype {dtype} and the GPU kernels take bfloat16; use x.astype(jnp.bfloat16), or implementation='xla'"
    if d % least:
        return f"D={d} must be a multiple of {least} (two channels for each of 128 threads); use implementation='xla'"
    if call.normalize is not None and (reason := _heads_refused(call.normalize, d, launch.config.block_d)) is not None:
        return reason
    if d % launch.config.block_d:
        return f"D={d} must be a multiple of block_d={launch.config.block_d}; use block_d={SM90_BLOCKS_D[0]}"
    return None


def _heads_refused(size: int, d: int, block_d: int) -> str | None:
    """Why the warps of a thread block cannot hold whole heads of `size` channels; None where they can."""
    if size not in _HEADS:
        sizes = ", ".join(map(str, _HEADS))
        return f"normalize={size} must be one of {sizes} (a head lies inside a warp); use implementation='xla'"
    least = _WARPS * size
    if d % least:
        return f"D={d} must be a multiple of {least}, {_WARPS} heads of normalize={size} channels; use implementation='xla'"
    if block_d < least:
        return f"block_d={block_d} must be {least} or more for normalize={size}, {_WARPS} heads; use block_d={least}"
    return None


def channels_per_block(call: ShortConvCall) -> int:
    usual = SM90_BLOCKS_D[0] if call.x.shape[2] % _BLOCK_D else _BLOCK_D
    least = max(usual, _WARPS * (call.normalize or 1))
    return next((size for size in SM90_BLOCKS_D if size >= least), usual)


def _heuristic(chip: Chip, call: ShortConvCall) -> ShortConvSm90Forward:
    """Runs that are long beside the W-1 tokens before them, and short enough to give each multiprocessor several."""
    b, t, d = call.x.shape
    block_d = channels_per_block(call)
    enough = _BLOCKS_PER_MULTIPROCESSOR * (chip.multiprocessors or 1)
    longest = (size for size in _BLOCKS_T if b * pl.cdiv(t, size) * pl.cdiv(d, block_d) >= enough)
    return ShortConvSm90Forward(next(longest, _BLOCKS_T[-1]), block_d)


def own_block(x_ref: Any, block_t: int, block_d: int) -> tuple[Any, Any, Any, Any]:
    """The sequence of this thread block, its run of tokens, the run's first token, and its channels."""
    rest, channel = divmod_nonnegative(lax.axis_index("work"), x_ref.shape[2] // block_d)
    b, run = divmod_nonnegative(rest, pl.cdiv(x_ref.shape[1], block_t))
    return b, run, run * block_t, pl.ds(channel * block_d, block_d)


class Filter:
    """The taps and the bias of a block of channels, in registers, and the inputs that they are applied to."""

    def __init__(self, x_ref: Any, w_ref: Any, bias_ref: Any, state_ref: Any, b: Any, columns: Any, block_d: int):
        self.width, self.b, self.columns = w_ref.shape[0], b, columns
        self.layout = plgpu.Layout.WG_STRIDED((block_d,), vec_size=block_d // THREADS)
        self._x_ref, self._state_ref = x_ref, state_ref
        self.taps = [self.wide(w_ref.at[self.width - 1 - lag, columns]) for lag in range(self.width)]  # [block_d] each
        self.bias = None if bias_ref is None else self.wide(bias_ref.at[columns])

    def wide(self, ref: Any) -> jax.Array:
        return load(ref, self.layout).astype(jnp.float32)

    def load(self, token: Any) -> jax.Array:
        """x of a token, for `input`; of some other one where there is none."""
        return load(self._x_ref.at[self.b, jnp.maximum(token, 0), self.columns], self.layout)

    def input(self, token: Any, loaded: jax.Array | None = None) -> jax.Array:
        """x of a token, or of one before the first the state or zeros, [block_d] float32; from `load` where it is given."""
        x = (self.load(token) if loaded is None else loaded).astype(jnp.float32)
        before = jnp.zeros_like(x)
        if self._state_ref is not None:
            row = jnp.clip(token + (self.width - 1), 0, self.width - 2)
            before = self.wide(self._state_ref.at[self.b, row, self.columns])
        return jnp.where(token < 0, before, x)

    def sums_of_heads(self, size: int) -> Callable[[jax.Array], jax.Array]:
        """A function that adds up each head of `size` channels of an array like x."""
        return functools.partial(sums_of_neighbours, size=size, layout=self.layout)

    def sum(self, window: tuple[jax.Array, ...], reach: Any) -> jax.Array:
        """p of a token, from the inputs by lag and how many tokens it reaches back; None for all."""
        total = self.taps[0] * window[0]
        for lag in range(1, self.width):
            total = total + self.taps[lag] * where_reached(reach, lag, window[lag])
        return total if self.bias is None else total + self.bias


def where_reached(reach: Any, lag: int, value: jax.Array) -> jax.Array:
    """The value where a token reaches `lag` tokens back, zeros elsewhere; never a product with zero, since x may be NaN."""
    return value if reach is None or lag == 0 else jnp.where(reach >= lag, value, jnp.zeros_like(value))


def _kernel(
    *,
    # inputs
    x_ref,  # [B, T, D]
    w_ref,  # [W, D]
    bias_ref,  # [D], or None
    state_ref,  # [B, W-1, D], or None
    reach_ref,  # [B, T], or None
    # outputs
    y_ref,  # [B, T, D]
    # static
    activation: str | None,
    normalize: int | None,
    config: ShortConvSm90Forward,
):
    length = x_ref.shape[1]
    b, _, start, columns = own_block(x_ref, config.block_t, config.block_d)
    filter_ = Filter(x_ref, w_ref, bias_ref, state_ref, b, columns, config.block_d)

    def inputs(done: Any, count: int) -> tuple[jax.Array, ...]:
        rows = [jnp.minimum(start + done + n, length - 1) for n in range(count)]
        return tuple(load(x_ref.at[b, row, columns], filter_.layout) for row in rows)  # [block_d] each

    def tokens(done: Any, loaded: tuple[jax.Array, ...], window: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for n, x in enumerate(loaded):
            row = start + done + n
            window = (x.astype(jnp.float32), *window)
            p = filter_.sum(window, None if reach_ref is None else reach_ref[b, row])
            y = p * sigmoid(p, filter_.layout) if activation == "silu" else p
            y = y if normalize is None else unit_length(y, filter_.sums_of_heads(normalize))
            store(y_ref.at[b, row, columns], y.astype(y_ref.dtype), filter_.layout)
            window = window[:-1]
        return window

    window = tuple(filter_.input(start - lag) for lag in range(1, filter_.width))
    count = jnp.minimum(length - start, config.block_t)
    for_tokens(count, config.unroll, inputs, tokens, window, ragged=length % config.unroll > 0)


def _forward(call: ShortConvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and the final state."""
    config: ShortConvSm90Forward = launch.config
    b, t, d = call.x.shape
    outputs = run_kernel(
        functools.partial(_kernel, activation=call.activation, normalize=call.normalize, config=config),
        name="short_conv_forward",
        inputs={"x": call.x, "w": call.w, "bias": call.bias, "state": call.state, "reach": call.reach},
        outputs={"y": jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)},
        scratch={},
        grid={"work": b * pl.cdiv(t, config.block_t) * (d // config.block_d)},
    )
    return (outputs["y"], final_state(call)), None


FORWARD = Pass(_forward, config=ShortConvSm90Forward, heuristic=_heuristic, unsupported_reason=unsupported_reason)
