"""Short convolution as Mosaic TPU kernels, one for the forward and one for the backward.

Below k is a lag, so w_k is the tap w[W-1-k]. For each channel, with terms left out where a token does not reach k back,

    p_t = bias + sum_k w_k x_{t-k}        y_t = act(p_t)
    d_t = dy_t act'(p_t)        dx_s = sum_k w_k d_{s+k}        dw_k = sum_t d_t x_{t-k}        dbias = sum_t d_t

Floor: some 20 FLOPs an element, so memory is what bounds it. Forward: x read and y written once. Backward: x and dy read
and dx written once. Both kernels move these bytes and few others: the backward reads the last 16 rows of each block of x
twice, and segments cost 512 bytes a token and block of channels (two small numbers, padded to a row of lanes).

Blocking: grid (num_d, B, num_t). Channels are in parallel; batch and time go in order, so that the sums for dw and dbias
stay in VMEM from the first block to the last. The forward goes through time upwards and carries the last 8 rows of x in
VMEM. The backward goes downwards and carries the first 8 rows of d, since dx needs the d that follow; what p needs of the
x before a block comes as a second, small block of x. Inside a block a loop over 128 channels holds a loop over tiles of
tile_t rows; the backward has two, one that makes d and one that uses it, so that neither waits for the other's latencies.

A tap is a shift of rows. 128 channels of a block are put into a float32 scratch of just these lanes, with the 8 rows beside
it; there rows follow each other in memory, so that a load may begin at any row, and a shift costs the vector units nothing.
These bound the backward: some 33 of their operations for a register of x, 4 of them a bundle.

The gradient of the state needs d of the first W-1 tokens only: it is the plain version's, of these tokens.

Edges: channels do not meet, so what a block holds past channel D stays there and is not written. Rows past T are never
written; in the backward x and dy are masked there, since d and dw would spread what they hold.

Numerics: everything in float32; y and dx rounded once to x's dtype, dw and dbias once after their last sum. The sigmoid of
bfloat16 inputs is made of a tanh, one operation for the unit of transcendentals and not two; it is off by a float32
rounding of 1, so the silu of -16 has no digits left, at 2e-6. float32 inputs get the logistic function itself.

Tried and dropped: shifts in registers, a rotation and a select for each shift and register. libtpu for a v6e scheduled 7.3
bundles a register forward and 13.5 backward (W=4, silu, bfloat16), where the copies take 4.4 and 6.6.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from tilewright.core.chip import LANES, ROW_TILE, SUBLANES, Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.short_conv.config import PallasTpuConfig
from tilewright.ops.short_conv.gradient import with_gradient
from tilewright.ops.short_conv.xla import backward as plain_backward

Config = PallasTpuConfig

# Tiles in a turn of the loop: with one, each waits for its own latencies.
_TILES_A_TURN = 8


def default_config(
    chip: Chip, x: jax.Array, w: jax.Array, bias: Any, state: Any, reach: Any, *, activation: str | None
) -> PallasTpuConfig:
    del bias, state, activation
    return PallasTpuConfig.for_shape(
        chip, x.shape[1], x.shape[2], w.shape[0], x.dtype.itemsize, segments=reach is not None
    )


def unsupported_reason(
    launch: Launch, x: jax.Array, w: jax.Array, bias: Any, state: Any, reach: Any, *, activation: str | None
) -> str | None:
    del bias, state, activation
    if x.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    return launch.config.misfit(launch.chip, w.shape[0], x.dtype.itemsize, segments=reach is not None)


def _one_plus_tanh(h: jax.Array, dtype: Any) -> jax.Array:
    """1 + tanh(h), which is 2 sigmoid(2 h): silu(2 h) = h (1 + tanh(h))."""
    return 2.0 * jax.nn.sigmoid(2.0 * h) if dtype == jnp.float32 else 1.0 + jnp.tanh(h)


def _filter(w_ref, bias_ref, columns: Any, activation: str | None) -> tuple[list[jax.Array], jax.Array | None]:
    """The taps of 128 channels by lag, and their bias, each [1, LANES]; halved for silu, which is made of p / 2."""
    scale, width = 0.5 if activation == "silu" else 1.0, w_ref.shape[0]
    taps = [scale * w_ref[width - 1 - lag : width - lag, columns].astype(jnp.float32) for lag in range(width)]
    return taps, None if bias_ref is None else scale * bias_ref[:, columns].astype(jnp.float32)


def _where_reached(reach: jax.Array | None, lag: int, rows: jax.Array) -> jax.Array:
    """The rows whose token sees a token `lag` away; zeros for the others. reach is [rows, 1]."""
    return rows if reach is None or lag == 0 else jnp.where(jnp.broadcast_to(reach, rows.shape) >= lag, rows, 0.0)


def _fold(rows: jax.Array) -> jax.Array:
    """The sum of rows by sublane: whole registers are added, with no reduction inside one."""
    return jnp.sum(rows.reshape(-1, SUBLANES, rows.shape[1]), axis=0)  # [SUBLANES, LANES]


def _for_channels(block_d: int, body: Callable[[Any], None]) -> None:
    """Call `body` with a slice of 128 channels at a time: in a loop, so that its code is there once."""

    def step(index: jax.Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * LANES, LANES), LANES))

    jax.lax.fori_loop(0, block_d // LANES, step, None)


def _for_tiles(block_t: int, tile_t: int, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """Call `body` with the first row of each tile of a block and what the call before returned.

    A few tiles a turn of the loop: one's latencies are hidden behind the next, and each is small enough for the registers.
    """
    tiles_a_turn = math.gcd(block_t // tile_t, _TILES_A_TURN)

    def turn(index: jax.Array, carry: Any) -> Any:
        first = pl.multiple_of(index * (tiles_a_turn * tile_t), tiles_a_turn * tile_t)
        for tile in range(tiles_a_turn):
            carry = body(first + tile * tile_t, carry)
        return carry

    return jax.lax.fori_loop(0, block_t // (tiles_a_turn * tile_t), turn, start)


def _at_lag(x_scratch, first: jax.Array, tile_t: int, lag: int, back: jax.Array | None) -> jax.Array:
    """x_{t-lag} of the rows t of a tile, 0 where t does not reach so far: [tile_t, LANES]."""
    return _where_reached(back, lag, x_scratch[pl.ds(SUBLANES + first - lag, tile_t), :])


def _sum_of_taps(
    x_scratch, first: jax.Array, tile_t: int, taps: list[jax.Array], bias: jax.Array | None, back: jax.Array | None
) -> jax.Array:
    """p of a tile, or p / 2 for silu: [tile_t, LANES]."""
    terms = [tap * _at_lag(x_scratch, first, tile_t, lag, back) for lag, tap in enumerate(taps)]
    return functools.reduce(jnp.add, terms if bias is None else [terms[0] + bias, *terms[1:]])


def _forward_kernel(
    # inputs
    x_ref,  # [block_t, block_d]
    before_ref,  # [SUBLANES, block_d], the state at the end
    w_ref,  # [W, block_d]
    bias_ref,  # [1, block_d], or None
    reach_ref,  # [block_t, 2], how many tokens each one sees back and ahead; or None
    # outputs
    y_ref,  # [block_t, block_d]
    # scratch
    carry_scratch,  # [SUBLANES, block_d] float32, the rows before this block
    x_scratch,  # [SUBLANES + block_t, LANES] float32, 128 channels of x and of the rows before it
    *,
    tile_t: int,
    activation: str | None,
):
    block_t = x_ref.shape[0]

    @pl.when(pl.program_id(2) == 0)
    def _start():
        carry_scratch[...] = before_ref[...].astype(jnp.float32)

    def channels(columns: Any) -> None:
        taps, bias = _filter(w_ref, bias_ref, columns, activation)
        x_scratch[:SUBLANES, :] = carry_scratch[:, columns]

        def tile(first: jax.Array, _: None) -> None:
            rows = pl.ds(first, tile_t)
            x_scratch[pl.ds(SUBLANES + first, tile_t), :] = x_ref[rows, columns].astype(jnp.float32)
            p = _sum_of_taps(x_scratch, first, tile_t, taps, bias, None if reach_ref is None else reach_ref[rows, 0:1])
            y = p * _one_plus_tanh(p, x_ref.dtype) if activation == "silu" else p
            y_ref[rows, columns] = y.astype(y_ref.dtype)

        _for_tiles(block_t, tile_t, tile, None)
        carry_scratch[:, columns] = x_scratch[block_t:, :]

    _for_channels(x_ref.shape[1], channels)


def _edge_arrays(
    x: jax.Array, bias: jax.Array | None, state: jax.Array | None, reach: jax.Array | None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The 8 rows before the first token [B, 8, D]; the bias [1, D]; how many tokens each sees back and ahead [B, T, 2]."""
    if state is None:
        before = jnp.zeros((x.shape[0], SUBLANES, x.shape[2]), x.dtype)
    else:
        before = jnp.pad(state, ((0, 0), (SUBLANES - state.shape[1], 0), (0, 0)))
    bias_row = None if bias is None else bias[None, :]
    return before, bias_row, None if reach is None else jnp.stack([reach, _ahead(reach)], axis=-1)


def _ahead(reach: jax.Array) -> jax.Array:
    """How many of the next tokens see this one: token s + k does where it reaches k back, and then all between do."""
    length, ahead = reach.shape[1], jnp.zeros_like(reach)
    for lag in range(1, min(SUBLANES, length)):
        sees = (reach[:, lag:] >= lag).astype(reach.dtype)  # [B, T - lag]
        ahead = ahead + jnp.pad(sees, ((0, 0), (0, lag)))
    return ahead


def _forward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    reach: jax.Array | None,
    *,
    activation: str | None,
    launch: Launch,
) -> jax.Array:
    (batch, length, d), width = x.shape, w.shape[0]
    config: PallasTpuConfig = launch.config
    block_t, block_d = config.block_t, config.block_d
    before, bias_row, sees = _edge_arrays(x, bias, state, reach)
    block_of_x = pl.BlockSpec((None, block_t, block_d), lambda j, b, t: (b, t, j))
    in_specs = [
        block_of_x,
        pl.BlockSpec((None, SUBLANES, block_d), lambda j, b, t: (b, 0, j)),
        pl.BlockSpec((width, block_d), lambda j, b, t: (0, j)),
        None if bias is None else pl.BlockSpec((1, block_d), lambda j, b, t: (0, j)),
        None if sees is None else pl.BlockSpec((None, block_t, 2), lambda j, b, t: (b, t, 0)),
    ]
    return pl.pallas_call(
        functools.partial(_forward_kernel, tile_t=min(config.tile_t, block_t), activation=activation),
        out_shape=output_like(x.shape, x.dtype, x),
        grid=(pl.cdiv(d, block_d), batch, pl.cdiv(length, block_t)),
        in_specs=in_specs,
        out_specs=block_of_x,
        scratch_shapes=[
            pltpu.VMEM((SUBLANES, block_d), jnp.float32),
            pltpu.VMEM((SUBLANES + block_t, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * width * x.size,
            transcendentals=x.size if activation else 0,
            bytes_accessed=2 * x.size * x.dtype.itemsize,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="short_conv_forward",
    )(x, before, w, bias_row, sees)


def _backward_kernel(
    # inputs
    x_ref,  # [block_t, block_d]
    halo_ref,  # [ROW_TILE, block_d], the rows of x before this block; of no use in the first one
    before_ref,  # [SUBLANES, block_d], the state at the end
    w_ref,  # [W, block_d]
    bias_ref,  # [1, block_d], or None
    reach_ref,  # [block_t, 2], how many tokens each one sees back and ahead; or None
    dy_ref,  # [block_t, block_d]
    # outputs
    dx_ref,  # [block_t, block_d]
    sums_ref,  # [W + 1, SUBLANES, block_d] float32: dw of each lag and dbias, both doubled for silu
    # scratch
    carry_scratch,  # [SUBLANES, block_d] float32, d of the rows after this block
    x_scratch,  # [SUBLANES + block_t, LANES] float32, 128 channels of x and of the rows before it
    d_scratch,  # [block_t + SUBLANES, LANES] float32, 128 channels of d and of the rows after it
    *,
    tile_t: int,
    activation: str | None,
    length: int,
):
    batch, step = pl.program_id(1), pl.program_id(2)
    block = pl.num_programs(2) - 1 - step
    block_t, width = x_ref.shape[0], w_ref.shape[0]
    num_sums = width + (bias_ref is not None)

    @pl.when((batch == 0) & (step == 0))
    def _start_sums():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    @pl.when(step == 0)
    def _start():
        carry_scratch[...] = jnp.zeros_like(carry_scratch)

    def channels(columns: Any) -> None:
        taps, bias = _filter(w_ref, bias_ref, columns, activation)
        halo = halo_ref[:, columns].astype(jnp.float32)[ROW_TILE - SUBLANES :]  # [SUBLANES, LANES]
        x_scratch[:SUBLANES, :] = jnp.where(block == 0, before_ref[:, columns].astype(jnp.float32), halo)
        d_scratch[block_t:, :] = carry_scratch[:, columns]

        def first_pass(first: jax.Array, _: None) -> None:
            """D of a tile."""
            rows = pl.ds(first, tile_t)
            x = x_ref[rows, columns].astype(jnp.float32)  # [tile_t, LANES]
            d = dy_ref[rows, columns].astype(jnp.float32)
            if length % block_t:
                row = block * block_t + first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
                x, d = jnp.where(row < length, x, 0.0), jnp.where(row < length, d, 0.0)
            x_scratch[pl.ds(SUBLANES + first, tile_t), :] = x
            if activation == "silu":
                back = None if reach_ref is None else reach_ref[rows, 0:1]  # [tile_t, 1]
                p = _sum_of_taps(x_scratch, first, tile_t, taps, bias, back)
                # Twice the slope of silu; dx gets it with halved taps.
                twice = _one_plus_tanh(p, x_ref.dtype)
                d = d * (twice * (1.0 + p * (2.0 - twice)))
            d_scratch[rows, :] = d

        def second_pass(first: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Dx of a tile, and its terms of dw by lag and of dbias."""
            rows = pl.ds(first, tile_t)
            back = ahead = None
            if reach_ref is not None:
                back, ahead = reach_ref[rows, 0:1], reach_ref[rows, 1:2]  # [tile_t, 1]
            d = d_scratch[rows, :]  # [tile_t, LANES]
            dx = taps[0] * d
            for lag in range(1, width):
                dx = dx + taps[lag] * _where_reached(ahead, lag, d_scratch[pl.ds(first + lag, tile_t), :])
            dx_ref[rows, columns] = dx.astype(dx_ref.dtype)
            terms = [_fold(d * _at_lag(x_scratch, first, tile_t, lag, back)) for lag in range(width)]
            terms += [] if bias is None else [_fold(d)]
            return tuple(total + term for total, term in zip(sums, terms, strict=True))

        _for_tiles(block_t, tile_t, first_pass, None)
        sums = tuple(sums_ref[index, :, columns] for index in range(num_sums))
        sums = _for_tiles(block_t, tile_t, second_pass, sums)
        carry_scratch[:, columns] = d_scratch[:SUBLANES, :]
        for index in range(num_sums):
            sums_ref[index, :, columns] = sums[index]

    _for_channels(x_ref.shape[1], channels)


def _backward(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    state: jax.Array | None,
    reach: jax.Array | None,
    dy: jax.Array,
    *,
    activation: str | None,
    launch: Launch,
) -> tuple[Any, Any, Any, Any]:
    (batch, length, d), width = x.shape, w.shape[0]
    config: PallasTpuConfig = launch.config
    block_t, block_d = config.block_t, config.block_d
    num_t = pl.cdiv(length, block_t)
    before, bias_row, sees = _edge_arrays(x, bias, state, reach)

    def halo(j: Any, b: Any, t: Any) -> tuple[Any, Any, Any]:
        return b, jnp.maximum((num_t - 1 - t) * (block_t // ROW_TILE) - 1, 0), j

    block_of_x = pl.BlockSpec((None, block_t, block_d), lambda j, b, t: (b, num_t - 1 - t, j))
    dx, sums = pl.pallas_call(
        functools.partial(_backward_kernel, tile_t=min(config.tile_t, block_t), activation=activation, length=length),
        out_shape=(
            output_like(x.shape, x.dtype, x),
            output_like((width + 1, SUBLANES, d), jnp.float32, x),
        ),
        grid=(pl.cdiv(d, block_d), batch, num_t),
        in_specs=[
            block_of_x,
            pl.BlockSpec((None, ROW_TILE, block_d), halo),
            pl.BlockSpec((None, SUBLANES, block_d), lambda j, b, t: (b, 0, j)),
            pl.BlockSpec((width, block_d), lambda j, b, t: (0, j)),
            None if bias is None else pl.BlockSpec((1, block_d), lambda j, b, t: (0, j)),
            None if sees is None else pl.BlockSpec((None, block_t, 2), lambda j, b, t: (b, num_t - 1 - t, 0)),
            block_of_x,
        ],
        out_specs=(
            block_of_x,
            pl.BlockSpec((width + 1, SUBLANES, block_d), lambda j, b, t: (0, 0, j)),
        ),
        scratch_shapes=[
            pltpu.VMEM((SUBLANES, block_d), jnp.float32),
            pltpu.VMEM((SUBLANES + block_t, LANES), jnp.float32),
            pltpu.VMEM((block_t + SUBLANES, LANES), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=6 * width * x.size,
            transcendentals=x.size if activation else 0,
            bytes_accessed=3 * x.size * x.dtype.itemsize,
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="short_conv_backward",
    )(x, x, before, w, bias_row, sees, dy)
    sums = jnp.sum(sums, axis=1) * (0.5 if activation == "silu" else 1.0)  # [W + 1, D]
    dw = sums[:width][::-1].astype(w.dtype)
    d_bias = None if bias is None else sums[width].astype(bias.dtype)
    d_state = None
    if state is not None:
        first = slice(0, width - 1)
        reach = None if reach is None else reach[:, first]
        *_, d_state = plain_backward(
            x[:, first], w, bias, state, reach, dy[:, first], activation=activation, launch=None
        )
    return dx, dw, d_bias, d_state


_short_conv = with_gradient(_forward, _backward)


def short_conv_pallas_tpu(
    x: Float[Array, "B T D"],
    w: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    state: Float[Array, "B W-1 D"] | None,
    reach: Int[Array, "B T"] | None,
    *,
    activation: str | None,
    launch: Launch,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """y and the final state; a token t looks back reach_t tokens, or W-1 where reach is None."""
    return _short_conv(x, w, bias, state, reach, activation, launch)
