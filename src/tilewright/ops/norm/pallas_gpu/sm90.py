"""`gated_rms_norm` as Mosaic GPU kernels for Hopper, one for the forward and one for the backward.

For a row x of D columns, with a = act(gate),

    r = 1 / sqrt(mean(x^2) + eps)        xhat = x r        y = xhat w a
    g = dy a w        dx = r (g - xhat mean(g xhat))        dw = sum_rows dy a xhat        dgate = dy xhat w act'(gate)

Floor: forward, x and gate are read and y is written once, 6 bytes per element; backward, x, gate and dy are read and dx and
dgate are written once, 10 bytes. Some 15 and 30 instructions per element are less than the multiprocessors issue in the
time of these bytes. The kernels move that and, backward, float32 sums of dw for each thread block, below 2 percent for
heads of 128, which XLA adds up.

Blocking: a tile is `block_n` whole rows in the registers of one warpgroup, in vectors of 8 columns: 16 bytes per access.
4, 8, 16 or 32 lanes of a warp hold a row of 32, 64, 128 or a multiple of 256 columns, and sum it by shuffles; four warps
hold a row of more than 1,024, or one of 512 or 1,024 where the rows are not a multiple of four, and sum it through shared
memory. All loads of a tile come before the first sum, so a thread waits for memory once; several thread blocks per
multiprocessor hide each other's latencies. Forward, a thread block has one tile. Backward, it has every n-th tile, for n
thread blocks, and keeps its sums over rows in registers; each is written once, and they are added up in order: the same
bits in every run.

The statistics are recomputed in the backward kernel, which reads x anyway.

Numerics: float32 throughout; y, dx and dgate are rounded once, dw once after its last sum. The sigmoid and the square root
are approximate, to about 2 units in the last place of float32.

Limits: Hopper only, though only its block sizes are specific to Hopper. bfloat16 x. D is 32, 64, 128, a multiple of 256 up
to 1,024, or a multiple of 512 up to 4,096; and the rows fill whole tiles, of 32 rows for D=32, 8 for D=128.

Left to XLA: `rms_norm` and `layer_norm`, which XLA fuses with the residual sum before them or the rotation behind them.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.norm.call import NormCall
from tilewright.ops.norm.config import NormSm90Backward, NormSm90Forward
from tilewright.pallas.gpu.elementwise import THREADS, VECTOR, load, sigmoid, store
from tilewright.pallas.gpu.kernel import processors, run_kernel
from tilewright.pallas.gpu.registers import few_rows
from tilewright.pallas.gpu.scheduler import RoundRobin

_WARPS, _LANES = 4, 32
_NARROW = tuple(VECTOR * lanes for lanes in (4, 8, 16))  # Rows of a part of a warp.
_WARP_COLUMNS, _WARPGROUP_COLUMNS = VECTOR * _LANES, VECTOR // 2 * THREADS
_MOST_PER_WARP = 1024
_MOST = 4096  # 32 columns per thread; with 64, ptxas spills registers of the backward kernel.
_FORWARD_ELEMENTS, _BACKWARD_ELEMENTS = 16, 8  # Of a tile of several rows, per thread.
# Thread blocks of the backward kernel that run on a multiprocessor at a time, by the elements of a tile per thread.
_RESIDENT = {8: 5, 16: 3, 32: 2}


def _rows(call: NormCall) -> tuple[int, int]:
    """N and D of x as rows [N, D]."""
    return math.prod(call.x.shape[:-1]), call.x.shape[-1]


def _rows_at_a_time(n: int, d: int) -> int | None:
    """The rows that the warpgroup holds side by side; None for a D that it cannot hold."""
    if d in _NARROW:
        return _WARPS * _LANES * VECTOR // d
    if d % _WARP_COLUMNS == 0 and d <= _MOST_PER_WARP and (n % _WARPS == 0 or d % _WARPGROUP_COLUMNS):
        return _WARPS
    return 1 if d % _WARPGROUP_COLUMNS == 0 else None


def _layout(n: int, d: int) -> Any:
    """Of a tile of rows."""
    rows = _rows_at_a_time(n, d)
    assert rows is not None
    if rows > _WARPS:
        return few_rows(rows, _LANES * _WARPS // rows, VECTOR)
    vector = math.gcd(d // THREADS, VECTOR) if rows == 1 else VECTOR
    tiles = ((1, vector * THREADS), (vector * _LANES,), (vector,)) if rows == 1 else ((rows, _WARP_COLUMNS), (VECTOR,))
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _unsupported_reason(call: NormCall, launch: Launch) -> str | None:
    n, d = _rows(call)
    dtype, block_n, rows = call.x.dtype.name, launch.config.block_n, _rows_at_a_time(n, d)
    if dtype != "bfloat16":
        return f"x has dtype {dtype} and the GPU kernels take bfloat16; use x.astype(jnp.bfloat16), or implementation='xla'"
    if rows is None or d > _MOST:
        return (
            f"D={d} must be 32, 64, 128 or a multiple of {_WARP_COLUMNS}, above {_MOST_PER_WARP} of {_WARPGROUP_COLUMNS}, "
            f"up to {_MOST} (rows are whole in registers); use implementation='xla'"
        )
    if n % rows:
        return f"the {n} rows of x must be a multiple of {rows}, which a thread block holds; use implementation='xla'"
    if block_n % rows or n % block_n:
        return f"block_n={block_n} must divide the {n} rows of x and be a multiple of {rows}; use block_n={rows}"
    return None


def _block_n(call: NormCall, elements: int) -> int:
    """The most rows of which a thread holds up to this many elements, and that divide the rows of x."""
    n, d = _rows(call)
    rows = _rows_at_a_time(n, d) or 1
    return rows * next((k for k in (8, 4, 2) if n % (k * rows) == 0 and k * rows * d <= elements * THREADS), 1)


def _forward_heuristic(chip: Chip, call: NormCall) -> NormSm90Forward:
    return NormSm90Forward(_block_n(call, _FORWARD_ELEMENTS))


def _backward_heuristic(chip: Chip, call: NormCall) -> NormSm90Backward:
    block_n = _block_n(call, _BACKWARD_ELEMENTS)
    elements = pl.cdiv(block_n * call.x.shape[-1], THREADS)
    return NormSm90Backward(block_n, next((count for most, count in _RESIDENT.items() if elements <= most), 1))


class _Tile:
    """A tile of rows in registers, and the weights that are repeated over its rows."""

    def __init__(self, call: NormCall, block_n: int):
        n, self.d = _rows(call)
        self.call, self.shape, self.layout = call, (block_n, self.d), _layout(n, self.d)

    def load(self, ref: Any, rows: Any) -> jax.Array:
        return load(ref.at[rows], self.layout)  # [block_n, D]

    def weights(self, ref: Any) -> jax.Array:
        """One number per column, repeated over the rows."""
        vector = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False).astype(jnp.float32)  # [D]
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, self.shape, [1]), self.layout)

    def row_mean(self, values: jax.Array) -> jax.Array:
        """The mean of each row, repeated over the columns."""
        mean = jnp.sum(values, axis=1) * (1.0 / self.d)  # [block_n]
        return plgpu.layout_cast(lax.broadcast_in_dim(mean, self.shape, [0]), self.layout)

    def normalised(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """xhat and r."""
        x = x.astype(jnp.float32)
        scale = lax.rsqrt(self.row_mean(x * x) + self.call.eps)
        return x * scale, scale

    def activated(self, gate: jax.Array) -> tuple[jax.Array, jax.Array]:
        """act(gate) and its slope."""
        gate = gate.astype(jnp.float32)
        s = sigmoid(gate, self.layout)
        return (gate * s, s * (1.0 + gate * (1.0 - s))) if self.call.activation == "silu" else (s, s * (1.0 - s))


def _forward_kernel(
    *,
    # inputs
    x_ref,  # [N, D]
    gate_ref,  # [N, D]
    w_ref,  # [D]
    # outputs
    y_ref,  # [N, D]
    # static
    call: NormCall,
    config: NormSm90Forward,
):
    tile = _Tile(call, config.block_n)
    rows = pl.ds(lax.axis_index("tile") * config.block_n, config.block_n)
    x, gate = tile.load(x_ref, rows), tile.load(gate_ref, rows)
    xhat, _ = tile.normalised(x)
    y = xhat * tile.weights(w_ref) * tile.activated(gate)[0]
    store(y_ref.at[rows], y.astype(y_ref.dtype), tile.layout)


def _backward_kernel(
    *,
    # inputs
    x_ref,  # [N, D]
    gate_ref,  # [N, D]
    w_ref,  # [D]
    dy_ref,  # [N, D]
    # outputs
    dx_ref,  # [N, D]
    d_gate_ref,  # [N, D]
    dw_ref,  # [thread blocks, block_n, D] float32
    # static
    call: NormCall,
    config: NormSm90Backward,
):
    tile, block = _Tile(call, config.block_n), lax.axis_index("block")
    order = RoundRobin(x_ref.shape[0] // config.block_n, lax.axis_size("block"), block)
    w = tile.weights(w_ref)

    def step(n: Any, dw: jax.Array) -> jax.Array:
        rows = pl.ds(order.tile(n) * config.block_n, config.block_n)
        x, gate, dy = (tile.load(ref, rows) for ref in (x_ref, gate_ref, dy_ref))
        (xhat, scale), dy = tile.normalised(x), dy.astype(jnp.float32)
        activated, slope = tile.activated(gate)
        store(d_gate_ref.at[rows], (dy * slope * (xhat * w)).astype(d_gate_ref.dtype), tile.layout)
        d = dy * activated
        g = d * w
        dx = scale * (g - xhat * tile.row_mean(g * xhat))
        store(dx_ref.at[rows], dx.astype(dx_ref.dtype), tile.layout)
        return dw + d * xhat

    zeros = plgpu.layout_cast(jnp.zeros(tile.shape, jnp.float32), tile.layout)
    store(dw_ref.at[block], lax.fori_loop(0, order.count, step, zeros), tile.layout)


def _forward(call: NormCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    config: NormSm90Forward = launch.config
    assert call.gate is not None
    n, d = _rows(call)
    outputs = run_kernel(
        functools.partial(_forward_kernel, call=call, config=config),
        name="gated_rms_norm_forward",
        inputs={"x": call.x.reshape(n, d), "gate": call.gate.reshape(n, d), "w": call.w},
        outputs={"y": jax.ShapeDtypeStruct((n, d), call.x.dtype)},
        scratch={},
        grid={"tile": n // config.block_n},
    )
    return outputs["y"].reshape(call.x.shape), None


def _backward(call: NormCall, saved: None, dy: jax.Array, launch: Launch) -> NormCall:
    config: NormSm90Backward = launch.config
    assert call.gate is not None
    n, d = _rows(call)
    blocks = min(n // config.block_n, processors(launch.chip) * config.blocks)
    outputs = run_kernel(
        functools.partial(_backward_kernel, call=call, config=config),
        name="gated_rms_norm_backward",
        inputs={"x": call.x.reshape(n, d), "gate": call.gate.reshape(n, d), "w": call.w, "dy": dy.reshape(n, d)},
        outputs={
            "dx": jax.ShapeDtypeStruct((n, d), call.x.dtype),
            "d_gate": jax.ShapeDtypeStruct((n, d), call.gate.dtype),
            "dw": jax.ShapeDtypeStruct((blocks, config.block_n, d), jnp.float32),
        },
        scratch={},
        grid={"block": blocks},
    )
    return call.gradients(
        x=outputs["dx"].reshape(call.x.shape),
        gate=outputs["d_gate"].reshape(call.x.shape),
        w=jnp.sum(outputs["dw"].reshape(-1, d), axis=0),
        bias=None,
    )


FORWARD = Pass(
    _forward,
    config=NormSm90Forward,
    heuristic=_forward_heuristic,
    unsupported_reason=_unsupported_reason,
)
BACKWARD = Pass(
    _backward,
    config=NormSm90Backward,
    heuristic=_backward_heuristic,
    unsupported_reason=_unsupported_reason,
)
