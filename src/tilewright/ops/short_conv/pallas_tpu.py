"""Short convolution as Mosaic TPU kernels, one for the forward and one for the backward.

Below, k is a lag, so w_k is the tap w[W-1-k]. For each channel, leaving out the terms where a token does not reach k
back,

    p_t = bias + sum_k w_k x_{t-k}        y_t = act(p_t)
    d_t = dy_t act'(p_t)        dx_s = sum_k w_k d_{s+k}        dw_k = sum_t d_t x_{t-k}        dbias = sum_t d_t

With `normalize`, y_t is then divided by its length in each head, and dy_t is taken back through that before the activation
(core/unit_length.py). The loops take 128 channels at a time, so a head lies inside the lanes of a register, and its sums
are reductions over lanes.

Floor: some 20 FLOPs per element, so memory is the bound. Forward: x read and y written once. Backward: x and dy read
and dx written once. Both kernels move these bytes and few others: the backward reads the last 16 rows of each block of
x twice, and segments cost 512 bytes per token and block of channels (two small numbers, padded to a row of lanes).

Blocking: grid (num_d, B, num_t). Channels run in parallel; batch and time go in order, so that the sums for dw and
dbias stay in VMEM from the first block to the last. The forward goes through time upwards and carries the last 8 rows
of x in VMEM. The backward goes downwards and carries the first 8 rows of d, since dx needs the d that follow; the x
before a block, which p needs, comes as a second, small block of x. Inside a block, a loop over 128 channels holds a
loop over tiles of tile_t rows; the backward has two such loops, one that computes d and one that uses it, so that
neither waits for the other's latencies.

A tap is a shift of rows. 128 channels of a block are copied into a float32 scratch of just these lanes, with the 8 rows
beside it. There, rows follow each other in memory, so a load may begin at any row, and a shift costs the vector units
nothing. The vector units bound the backward: some 33 of their operations per register of x, at 4 per bundle.

The gradient of the state needs d of the first W-1 tokens only: it is computed by the plain version, for these tokens.

Edges: channels do not interact, so what a block holds past channel D stays there and is not written. Rows past T are
never written; the backward masks x and dy there, since d and dw would spread their values.

Numerics: everything in float32; y and dx are rounded once to x's dtype, dw and dbias once after their last sum. The
sigmoid of bfloat16 inputs is computed from a tanh, one operation of the transcendental unit instead of two; its error
is a float32 rounding of 1, so the silu of -16, 2e-6, has no correct digits. float32 inputs use the logistic function
itself.

Limits: `normalize` divides 128.

Tried and dropped:
- shifts in registers, a rotation and a select per shift and register. libtpu for a v6e scheduled 7.3 bundles per
  register forward and 13.5 backward (W=4, silu, bfloat16), where the copies take 4.4 and 6.6.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, MIB, ROW_TILE, SUBLANES, Chip
from tilewright.core.implementation import Implementation, Launch
from tilewright.core.unit_length import pull_back, unit_length
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.config import ShortConvTpuBackward, ShortConvTpuForward
from tilewright.ops.short_conv.final_state import final_state, with_final_state
from tilewright.ops.short_conv.xla import d_initial_state
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, block_pass, not_float64

# Largest first. At 1 MiB a block's copy outweighs the fixed cost of a grid step; that is a guess until timed on a chip.
_TOKENS = (1024, 512, 256, 128, 64, 32, 16)
_CHANNELS = 1024
_BLOCK_BYTES = 1 * MIB


def _unsupported_reason(call: ShortConvCall, launch: Launch) -> str | None:
    if call.normalize is not None and LANES % call.normalize:
        return (
            f"normalize={call.normalize} must divide {LANES} (a head lies inside the lanes of a register); use "
            f"implementation='xla'"
        )
    return not_float64(call.x)


def _candidates(kind: Any, chip: Chip, call: ShortConvCall) -> Iterator[Any]:
    """Blocks that are worth their size, the largest first, with a row of blocks for each TensorCore."""
    _, length, d = call.x.shape
    block_d = min(_CHANNELS, -(-d // (LANES * chip.cores_per_device)) * LANES)
    largest = _BLOCK_BYTES // (block_d * call.x.dtype.itemsize)
    for block_t in _TOKENS:
        if (block_t <= largest and block_t < length + ROW_TILE) or block_t == _TOKENS[-1]:
            yield kind(block_t, block_d)


def _one_plus_tanh(h: jax.Array, dtype: Any) -> jax.Array:
    """1 + tanh(h), which is 2 sigmoid(2 h): silu(2 h) = h (1 + tanh(h))."""
    return 2.0 * jax.nn.sigmoid(2.0 * h) if dtype == jnp.float32 else 1.0 + jnp.tanh(h)


def _filter(w_ref, bias_ref, columns: Any, activation: str | None) -> tuple[list[jax.Array], jax.Array | None]:
    """The taps of 128 channels by lag, and their bias, each [1, LANES]; halved for silu, which takes p / 2."""
    scale, width = 0.5 if activation == "silu" else 1.0, w_ref.shape[0]
    taps = [scale * w_ref[width - 1 - lag : width - lag, columns].astype(jnp.float32) for lag in range(width)]
    return taps, None if bias_ref is None else scale * bias_ref[:, columns].astype(jnp.float32)


def _sums_of_heads(rows: jax.Array, size: int) -> jax.Array:
    """The sum of each `size` neighbouring lanes, repeated over them: [rows, LANES], or [rows, 1] for all lanes."""
    if size == LANES:
        return jnp.sum(rows, axis=1, keepdims=True)
    head = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1) // size
    total = jnp.zeros_like(rows)
    for n in range(LANES // size):
        own = jnp.sum(jnp.where(head == n, rows, 0.0), axis=1, keepdims=True)  # [rows, 1]
        total = jnp.where(head == n, own, total)
    return total


def _where_reached(reach: jax.Array | None, lag: int, rows: jax.Array) -> jax.Array:
    """The rows whose token sees a token `lag` away; zeros for the others. reach is [rows, 1]."""
    return rows if reach is None or lag == 0 else jnp.where(jnp.broadcast_to(reach, rows.shape) >= lag, rows, 0.0)


def _fold(rows: jax.Array) -> jax.Array:
    """The sum of rows by sublane: whole registers are added, with no reduction inside one."""
    return jnp.sum(rows.reshape(-1, SUBLANES, rows.shape[1]), axis=0)  # [SUBLANES, LANES]


def _for_channels(block_d: int, body: Callable[[Any], None]) -> None:
    """Calls `body` with each slice of 128 channels: in a loop, so that its code is there once."""

    def step(index: jax.Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * LANES, LANES), LANES))

    jax.lax.fori_loop(0, block_d // LANES, step, None)


def _for_tiles(block_t: int, tile_t: int, unroll: int, body: Callable[[jax.Array, Any], Any], start: Any = None) -> Any:
    """Calls `body` with the first row of each tile of a block and what the previous call returned.

    An iteration of the loop takes several tiles: the latencies of one are hidden behind the next, and each is small
    enough for the registers.
    """
    unroll = math.gcd(block_t // tile_t, unroll)

    def iteration(index: jax.Array, carry: Any) -> Any:
        first = pl.multiple_of(index * (unroll * tile_t), unroll * tile_t)
        for tile in range(unroll):
            carry = body(first + tile * tile_t, carry)
        return carry

    return jax.lax.fori_loop(0, block_t // (unroll * tile_t), iteration, start)


def _at_lag(x_scratch, first: jax.Array, tile_t: int, lag: int, back: jax.Array | None) -> jax.Array:
    """x_{t-lag} for the rows t of a tile, 0 where t does not reach that far: [tile_t, LANES]."""
    return _where_reached(back, lag, x_scratch[pl.ds(SUBLANES + first - lag, tile_t), :])


def _sum_of_taps(
    x_scratch, first: jax.Array, tile_t: int, taps: list[jax.Array], bias: jax.Array | None, back: jax.Array | None
) -> jax.Array:
    """p of a tile, or p / 2 for silu: [tile_t, LANES]."""
    terms = [tap * _at_lag(x_scratch, first, tile_t, lag, back) for lag, tap in enumerate(taps)]
    return functools.reduce(jnp.add, terms if bias is None else [terms[0] + bias, *terms[1:]])


def _forward_kernel(
    *,
    # inputs
    x_ref,  # [block_t, block_d]
    before_ref,  # [SUBLANES, block_d], the rows before the first token: the state is the last of them
    w_ref,  # [W, block_d]
    bias_ref,  # [1, block_d], or None
    reach_ref,  # [block_t, 2], how many tokens each one sees back and ahead; or None
    # outputs
    y_ref,  # [block_t, block_d]
    # scratch
    carry_scratch,  # [SUBLANES, block_d] float32, the rows before this block
    x_scratch,  # [SUBLANES + block_t, LANES] float32, 128 channels of x and of the rows before it
    # static
    activation: str | None,
    normalize: int | None,
    tile_t: int,
    unroll: int,
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
            if normalize is not None:
                y = unit_length(y, functools.partial(_sums_of_heads, size=normalize))
            y_ref[rows, columns] = y.astype(y_ref.dtype)

        _for_tiles(block_t, tile_t, unroll, tile)
        carry_scratch[:, columns] = x_scratch[block_t:, :]

    _for_channels(x_ref.shape[1], channels)


def _edge_arrays(call: ShortConvCall) -> dict[str, Any]:
    """The 8 rows before the first token [B, 8, D]; the bias [1, D]; how many tokens each sees back and ahead."""
    x, reach = call.x, call.reach
    if call.state is None:
        before = jnp.zeros((x.shape[0], SUBLANES, x.shape[2]), x.dtype)
    else:
        before = jnp.pad(call.state, ((0, 0), (SUBLANES - call.state.shape[1], 0), (0, 0)))
    return {
        "before": before,
        "bias": None if call.bias is None else call.bias[None, :],
        "reach": None if reach is None else jnp.stack([reach, _ahead(reach)], axis=-1),
    }


def _ahead(reach: jax.Array) -> jax.Array:
    """How many of the next tokens see this one: token s + k does where it reaches k back, and then all between do."""
    length, ahead = reach.shape[1], jnp.zeros_like(reach)
    for lag in range(1, min(SUBLANES, length)):
        sees = (reach[:, lag:] >= lag).astype(reach.dtype)  # [B, T - lag]
        ahead = ahead + jnp.pad(sees, ((0, 0), (0, lag)))
    return ahead


def _grid(call: ShortConvCall, config: Any) -> dict[str, Axis]:
    batch, length, d = call.x.shape
    return {
        "channels": Axis(pl.cdiv(d, config.block_d), "parallel"),
        "batch": Axis(batch),
        "time": Axis(pl.cdiv(length, config.block_t)),
    }


def _input_blocks(call: ShortConvCall, config: Any, order: Callable[[Any], Any]) -> dict[str, Any]:
    """The inputs that both kernels have. `order` maps a step in time to its block of tokens."""
    block_t, block_d, dtype, bias, reach = config.block_t, config.block_d, call.x.dtype, call.bias, call.reach
    reached = None if reach is None else Block((None, block_t, 2), reach.dtype, lambda j, b, t: (b, order(t), 0))
    return {
        "x": Block((None, block_t, block_d), dtype, lambda j, b, t: (b, order(t), j)),
        "before": Block((None, SUBLANES, block_d), dtype, lambda j, b, t: (b, 0, j)),
        "w": Block((call.w.shape[0], block_d), call.w.dtype, lambda j, b, t: (0, j)),
        "bias": None if bias is None else Block((1, block_d), bias.dtype, lambda j, b, t: (0, j)),
        "reach": reached,
    }


def _scratch(config: Any, *names: str) -> dict[str, Any]:
    """`carry_scratch`, and one for 128 channels of a block and of 8 rows beside it, for each name."""
    channels = pltpu.VMEM((SUBLANES + config.block_t, LANES), jnp.float32)
    return {"carry_scratch": pltpu.VMEM((SUBLANES, config.block_d), jnp.float32), **dict.fromkeys(names, channels)}


def _forward_declaration(call: ShortConvCall, launch: Launch) -> Kernel:
    inputs = _input_blocks(call, launch.config, lambda t: t)
    return Kernel(
        name="short_conv_forward",
        grid=_grid(call, launch.config),
        inputs=inputs,
        outputs={"y": Output(call.x.shape, inputs["x"])},
        scratch=_scratch(launch.config, "x_scratch"),
    )


def _cost(call: ShortConvCall, *, flops: int, passes: int) -> pl.CostEstimate:
    """`flops` per tap and element; `passes` over arrays of x's size."""
    x = call.x
    return pl.CostEstimate(
        flops=flops * call.w.shape[0] * x.size,
        transcendentals=x.size if call.activation else 0,
        bytes_accessed=passes * x.size * x.dtype.itemsize,
    )


def _static(call: ShortConvCall, config: Any) -> dict[str, Any]:
    return {
        "activation": call.activation,
        "normalize": call.normalize,
        "tile_t": min(config.tile_t, config.block_t),
        "unroll": config.unroll,
    }


def _forward(call: ShortConvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and the final state."""
    outputs = _forward_declaration(call, launch).run(
        functools.partial(_forward_kernel, **_static(call, launch.config)),
        {"x": call.x, "w": call.w, **_edge_arrays(call)},
        chip=launch.chip,
        cost=_cost(call, flops=2, passes=2),
    )
    return (outputs["y"], final_state(call)), None


def _backward_kernel(
    *,
    # inputs
    x_ref,  # [block_t, block_d]
    halo_ref,  # [ROW_TILE, block_d], the rows of x before this block; not used in the first one
    before_ref,  # [SUBLANES, block_d], the rows before the first token: the state is the last of them
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
    # static
    activation: str | None,
    normalize: int | None,
    tile_t: int,
    unroll: int,
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
            """Computes d of a tile."""
            rows = pl.ds(first, tile_t)
            x = x_ref[rows, columns].astype(jnp.float32)  # [tile_t, LANES]
            d = dy_ref[rows, columns].astype(jnp.float32)
            if length % block_t:
                row = block * block_t + first + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
                x, d = jnp.where(row < length, x, 0.0), jnp.where(row < length, d, 0.0)
            x_scratch[pl.ds(SUBLANES + first, tile_t), :] = x
            if activation is not None or normalize is not None:
                back = None if reach_ref is None else reach_ref[rows, 0:1]  # [tile_t, 1]
                p = _sum_of_taps(x_scratch, first, tile_t, taps, bias, back)
                y, slope = p, None
                if activation == "silu":
                    # Twice the slope of silu; the taps that dx multiplies it with are halved.
                    twice = _one_plus_tanh(p, x_ref.dtype)
                    y, slope = p * twice, twice * (1.0 + p * (2.0 - twice))
                if normalize is not None:
                    d = pull_back(y, d, functools.partial(_sums_of_heads, size=normalize), slope)
                elif slope is not None:
                    d = d * slope
            d_scratch[rows, :] = d

        def second_pass(first: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            """Computes dx of a tile, and adds its terms to dw, by lag, and to dbias."""
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

        _for_tiles(block_t, tile_t, unroll, first_pass)
        sums = tuple(sums_ref[index, :, columns] for index in range(num_sums))
        sums = _for_tiles(block_t, tile_t, unroll, second_pass, sums)
        carry_scratch[:, columns] = d_scratch[:SUBLANES, :]
        for index in range(num_sums):
            sums_ref[index, :, columns] = sums[index]

    _for_channels(x_ref.shape[1], channels)


def _backward_declaration(call: ShortConvCall, launch: Launch) -> Kernel:
    config, width = launch.config, call.w.shape[0]
    block_t, block_d, num_t = config.block_t, config.block_d, pl.cdiv(call.x.shape[1], config.block_t)

    def halo(j: Any, b: Any, t: Any) -> tuple[Any, Any, Any]:
        return b, jnp.maximum((num_t - 1 - t) * (block_t // ROW_TILE) - 1, 0), j

    inputs = _input_blocks(call, config, lambda t: num_t - 1 - t)
    tokens, before = inputs["x"], Block((None, ROW_TILE, block_d), call.x.dtype, halo)
    sums = Block((width + 1, SUBLANES, block_d), jnp.float32, lambda j, b, t: (0, 0, j))
    return Kernel(
        name="short_conv_backward",
        grid=_grid(call, config),
        inputs={"x": tokens, "halo": before, **inputs, "dy": tokens},
        outputs={
            "dx": Output(call.x.shape, tokens),
            "sums": Output((width + 1, SUBLANES, call.x.shape[2]), sums),
        },
        scratch=_scratch(config, "x_scratch", "d_scratch"),
    )


def _backward(
    call: ShortConvCall, saved: None, cotangents: tuple[jax.Array, jax.Array], launch: Launch
) -> ShortConvCall:
    (dy, d_final), width = cotangents, call.w.shape[0]
    outputs = _backward_declaration(call, launch).run(
        functools.partial(_backward_kernel, length=call.x.shape[1], **_static(call, launch.config)),
        {"x": call.x, "halo": call.x, "w": call.w, "dy": dy, **_edge_arrays(call)},
        chip=launch.chip,
        cost=_cost(call, flops=6, passes=3),
    )
    sums = jnp.sum(outputs["sums"], axis=1) * (0.5 if call.activation == "silu" else 1.0)  # [W + 1, D]
    gradients = call.gradients(x=outputs["dx"], w=sums[:width][::-1], bias=sums[width], state=d_initial_state(call, dy))
    return with_final_state(call, gradients, d_final)


_pass = functools.partial(
    block_pass,
    candidates=_candidates,
    unsupported_reason=_unsupported_reason,
    memory_fields="a smaller block_t or block_d",
)
IMPLEMENTATION = Implementation(
    forward=_pass(_forward, ShortConvTpuForward, "forward", _forward_declaration),
    backward=_pass(_backward, ShortConvTpuBackward, "backward", _backward_declaration),
)
