"""The norms as Mosaic TPU kernels: one for the forward and one for the backward, for all three.

For a row x of D columns, with v = offset + w, a = act(gate) (1 without a gate) and m = mean(x) (0 where not centered)

    r = 1 / sqrt(mean((x - m)^2) + eps)        xhat = (x - m) r        y = (xhat v + bias) a
    g = dy a v        dx = r (g - mean(g) [if centered] - xhat mean(g xhat))
    dw = sum_rows dy a xhat        dbias = sum_rows dy a        dgate = dy (xhat v) act'(gate)

Floor: some 10 to 30 FLOPs an element, so memory is what bounds it. Forward: x and gate read and y written once. Backward:
x, gate and dy read, dx and dgate written once. Both kernels move these bytes and no others of that size: w, and the sums
for dw and dbias, stay in VMEM.

The statistics are made anew in the backward. It reads x anyway, so that costs no byte. To keep r would cost the forward a
write and the backward a read of 4 bytes a row at best; as [N, 1] it is padded to 512 bytes a row, four times the 128
columns of a bfloat16 head.

Blocking: a block is block_n whole rows; a loop inside takes tile_n of them at a time. A tile goes by twice (centered:
thrice), in chunks of columns: once to sum, once to use the sums. Chunks are loaded again rather than kept: a wide tile does
not fit the registers, and a load is cheaper than a spill. A tile of one chunk stays in registers. Forward: grid (num_n,),
in parallel. Backward: grid (parts, steps): a part is a run of blocks whose sums stay in VMEM, so its steps go in order; the
parts go in parallel, one for each TensorCore. Sums over rows are kept per sublane, [8, D], and joined after the kernel.

Narrow rows: D=64 and D=32 would leave the rest of 128 lanes empty, in HBM too, where an array [N, 64] takes the bytes of
[N, 128]. So heads lie side by side: [..., H, D] is seen as [N, H D], as the projection before it made it, where H D is a
multiple of 128; else as [N D / 128, 128], where that is whole; and only else as [N, D]. Each group of D lanes then has
sums of its own, by a masked reduction for each group.

Limits: rows are whole in a block, so VMEM bounds D; `unsupported_reason` says where. Any N and D: what a block holds past
the last row is not defined, may be NaN, and never reaches a result: it is not written, and masked in the sums over rows.

Numerics: everything in float32; y, dx and dgate rounded once to their dtypes, dw and dbias once after their last sum. The
variance of a layer norm is the mean of squares about the mean, not the difference of two means.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from tilewright.core.chip import LANES, SUBLANES, Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.norm.config import PallasTpuConfig
from tilewright.ops.norm.gradient import Norm, with_gradient

Config = PallasTpuConfig
X = Float[Array, "*tokens D"]
Weights = Float[Array, " D"]

_CHUNK = 4 * LANES  # Columns of a wide row that are taken at a time.
_NARROW = (32, 64)  # Widths of which several share the lanes.
_WIDEST_SHARED_ROW = 16384


def default_config(
    chip: Chip, x: X, gate: X | None, w: Weights, bias: Weights | None, *, norm: Norm
) -> PallasTpuConfig:
    del w, bias, norm
    return PallasTpuConfig.for_shape(chip, *_rows_shape(x.shape), x.dtype.itemsize, _itemsize(gate))


def unsupported_reason(
    launch: Launch, x: X, gate: X | None, w: Weights, bias: Weights | None, *, norm: Norm
) -> str | None:
    del w, bias, norm
    if x.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    return launch.config.misfit(launch.chip, _rows_shape(x.shape)[1], x.dtype.itemsize, _itemsize(gate))


def _itemsize(array: Any) -> int:
    return 0 if array is None else array.dtype.itemsize


def _rows_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns that a kernel sees of an array [..., D]: columns are D, or several D side by side."""
    *leading, d = shape
    n = math.prod(leading)
    if d in _NARROW:
        heads = leading[-1] if len(leading) > 1 else 1
        if heads * d % LANES == 0 and heads * d <= _WIDEST_SHARED_ROW:
            return n // heads, heads * d
        if n * d % LANES == 0:
            return n * d // LANES, LANES
    return n, d


def _spans(columns: int, d: int) -> list[list[slice]]:
    """The columns in chunks, those that share sums together."""
    if columns != d:
        return [[slice(start, start + LANES)] for start in range(0, columns, LANES)]
    return [[slice(start, min(start + _CHUNK, d)) for start in range(0, d, _CHUNK)]]


def _weight_columns(columns: slice, weights: int) -> slice:
    """Where the weights of a chunk are: rows of several groups have the weights of 128 lanes once."""
    return slice(columns.start % weights, columns.start % weights + columns.stop - columns.start)


def _row_mean(chunks: list[jax.Array], d: int) -> jax.Array:
    """The mean over d columns of each row: [tile_n, 1], or of each group of d lanes [tile_n, LANES]."""
    if chunks[0].shape[1] == LANES != d and d in _NARROW:
        (values,) = chunks
        lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        mean = jnp.zeros_like(values)
        for start in range(0, LANES, d):
            group = (lane >= start) & (lane < start + d)
            total = jnp.sum(jnp.where(group, values, 0.0), axis=1, keepdims=True)  # [tile_n, 1]
            mean = jnp.where(group, total, mean)
        return mean * (1.0 / d)
    # Whole registers are added first, so that a row has one reduction across lanes.
    whole, rest = [], []
    for chunk in chunks:
        starts = range(0, chunk.shape[1] // LANES * LANES, LANES)
        whole += [chunk[:, start : start + LANES] for start in starts]
        if chunk.shape[1] % LANES:
            rest.append(chunk[:, len(starts) * LANES :])
    parts = ([functools.reduce(jnp.add, whole)] if whole else []) + rest
    return functools.reduce(jnp.add, [jnp.sum(part, axis=1, keepdims=True) for part in parts]) * (1.0 / d)


def _activated(gate: jax.Array, activation: str | None) -> tuple[jax.Array, jax.Array]:
    """act(gate) and its slope."""
    s = jax.nn.sigmoid(gate)
    return (gate * s, s * (1.0 + gate * (1.0 - s))) if activation == "silu" else (s, s * (1.0 - s))


def _for_row_tiles(block_n: int, tile_n: int, body: Callable[[Any], None]) -> None:
    """Call `body` with the first row of each tile of a block: in a loop, so that its code is there once."""

    def step(index: jax.Array, _: None) -> None:
        body(pl.multiple_of(index * tile_n, tile_n))

    jax.lax.fori_loop(0, block_n // tile_n, step, None)


def _once(load: Callable[[slice], Any], span: list[slice]) -> Callable[[slice], Any]:
    """`load`, with its result kept in registers where a span is a single chunk."""
    if len(span) > 1:
        return load
    (columns,) = span
    kept = load(columns)
    return lambda _: kept


def _forward_kernel(
    # inputs
    x_ref,  # [block_n, C], where C is D, or several D
    gate_ref,  # [block_n, C], or None
    w_ref,  # [1, D or LANES]
    bias_ref,  # [1, D or LANES], or None
    # outputs
    y_ref,  # [block_n, C]
    *,
    d: int,
    tile_n: int,
    norm: Norm,
):
    def tile(first: jax.Array) -> None:
        rows = pl.ds(first, tile_n)
        for span in _spans(x_ref.shape[1], d):
            load = _once(lambda columns: x_ref[rows, columns].astype(jnp.float32), span)  # [tile_n, chunk]
            mean = _row_mean([load(columns) for columns in span], d) if norm.centered else None

            def centred(columns: slice, load=load, mean=mean) -> jax.Array:
                return load(columns) if mean is None else load(columns) - mean

            scale = jax.lax.rsqrt(_row_mean([jnp.square(centred(columns)) for columns in span], d) + norm.eps)
            for columns in span:
                of_weights = _weight_columns(columns, w_ref.shape[1])
                w = w_ref[:, of_weights].astype(jnp.float32) + norm.offset  # [1, chunk]
                y = centred(columns) * scale * w
                if bias_ref is not None:
                    y = y + bias_ref[:, of_weights].astype(jnp.float32)
                if gate_ref is not None:
                    y = y * _activated(gate_ref[rows, columns].astype(jnp.float32), norm.activation)[0]
                y_ref[rows, columns] = y.astype(y_ref.dtype)

    _for_row_tiles(x_ref.shape[0], tile_n, tile)


def _weight_row(weights: jax.Array | None, d: int, columns: int) -> jax.Array | None:
    """[1, D]; where a row has several groups, repeated over 128 lanes."""
    if weights is None or columns == d:
        return None if weights is None else weights[None, :]
    return jnp.tile(weights, LANES // d)[None, :]


def _forward(
    x: jax.Array, gate: jax.Array | None, w: jax.Array, bias: jax.Array | None, norm: Norm, launch: Launch
) -> jax.Array:
    (n, columns), d, config = _rows_shape(x.shape), x.shape[-1], launch.config
    block_n = config.block_n
    block_of_rows = pl.BlockSpec((block_n, columns), lambda i: (i, 0))
    w_row, bias_row = (_weight_row(weights, d, columns) for weights in (w, bias))
    assert w_row is not None
    whole = pl.BlockSpec(w_row.shape, lambda i: (0, 0))
    y = pl.pallas_call(
        functools.partial(_forward_kernel, d=d, tile_n=min(config.tile_n, block_n), norm=norm),
        out_shape=output_like((n, columns), x.dtype, x),
        grid=(pl.cdiv(n, block_n),),
        in_specs=[
            block_of_rows,
            None if gate is None else block_of_rows,
            whole,
            None if bias is None else whole,
        ],
        out_specs=block_of_rows,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=8 * x.size,
            transcendentals=x.size // d + (0 if gate is None else x.size),
            bytes_accessed=x.size * (2 * x.dtype.itemsize + _itemsize(gate)),
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name=f"{_name(norm)}_forward",
    )(x.reshape(n, columns), None if gate is None else gate.reshape(n, columns), w_row, bias_row)
    return y.reshape(x.shape)


def _name(norm: Norm) -> str:
    return "layer_norm" if norm.centered else "gated_rms_norm" if norm.activation else "rms_norm"


def _backward_kernel(
    # inputs
    x_ref,  # [block_n, C], where C is D, or several D
    gate_ref,  # [block_n, C], or None
    w_ref,  # [1, D or LANES]
    dy_ref,  # [block_n, C]
    # outputs
    dx_ref,  # [block_n, C]
    d_gate_ref,  # [block_n, C], or None
    dw_ref,  # [SUBLANES, D or LANES] float32, of this part; it stays in VMEM from the part's first step to its last
    d_bias_ref,  # [SUBLANES, D or LANES] float32, or None
    *,
    d: int,
    num_rows: int,
    masked: bool,
    tile_n: int,
    norm: Norm,
):
    part, step = pl.program_id(0), pl.program_id(1)
    block_n = x_ref.shape[0]
    first_row = (part * pl.num_programs(1) + step) * block_n

    @pl.when(step == 0)
    def _start():
        for sum_ref in (dw_ref, d_bias_ref):
            if sum_ref is not None:
                sum_ref[...] = jnp.zeros_like(sum_ref)

    def tile(first: jax.Array) -> None:
        rows = pl.ds(first, tile_n)

        def add_rows(sum_ref: Any, columns: slice, terms: jax.Array) -> None:
            if masked:
                # Rows past the end are replaced, not multiplied by zero: they may hold NaN.
                row = first_row + first + jax.lax.broadcasted_iota(jnp.int32, terms.shape, 0)
                terms = jnp.where(row < num_rows, terms, 0.0)
            folded = jnp.sum(terms.reshape(-1, SUBLANES, terms.shape[1]), axis=0)  # [SUBLANES, chunk]
            sum_ref[:, _weight_columns(columns, sum_ref.shape[1])] += folded

        def load(columns: slice) -> Any:
            """x, dy, act(gate) and its slope, and the gradient g of xhat: each [tile_n, chunk]."""
            x = x_ref[rows, columns].astype(jnp.float32)
            dy = dy_ref[rows, columns].astype(jnp.float32)
            activated = slope = None
            w = w_ref[:, _weight_columns(columns, w_ref.shape[1])].astype(jnp.float32) + norm.offset  # [1, chunk]
            if gate_ref is not None:
                activated, slope = _activated(gate_ref[rows, columns].astype(jnp.float32), norm.activation)
            d_scaled = dy if activated is None else dy * activated
            return x, dy, slope, w, d_scaled, d_scaled * w

        for span in _spans(x_ref.shape[1], d):
            loaded = _once(load, span)
            mean = _row_mean([loaded(columns)[0] for columns in span], d) if norm.centered else None

            def centred(columns: slice, loaded=loaded, mean=mean) -> Any:
                x, *others, g = loaded(columns)
                return (x if mean is None else x - mean), *others, g

            squares, products, gradients = [], [], []
            for columns in span:
                x, *_, g = centred(columns)
                squares.append(jnp.square(x))
                products.append(g * x)
                gradients.append(g)
            scale = jax.lax.rsqrt(_row_mean(squares, d) + norm.eps)
            along = scale * (scale * (scale * _row_mean(products, d)))
            level = scale * _row_mean(gradients, d) if norm.centered else None
            for columns in span:
                x, dy, slope, w, d_scaled, g = centred(columns)
                dx = scale * g - along * x
                dx = dx if level is None else dx - level
                dx_ref[rows, columns] = dx.astype(dx_ref.dtype)
                xhat = x * scale
                add_rows(dw_ref, columns, d_scaled * xhat)
                if d_bias_ref is not None:
                    add_rows(d_bias_ref, columns, d_scaled)
                if d_gate_ref is not None:
                    d_gate_ref[rows, columns] = (dy * slope * (xhat * w)).astype(d_gate_ref.dtype)

    _for_row_tiles(block_n, tile_n, tile)


def _backward(
    x: jax.Array,
    gate: jax.Array | None,
    w: jax.Array,
    bias: jax.Array | None,
    dy: jax.Array,
    norm: Norm,
    launch: Launch,
) -> tuple[Any, Any, Any, Any]:
    (n, columns), d, config = _rows_shape(x.shape), x.shape[-1], launch.config
    block_n = config.block_n
    num_n = pl.cdiv(n, block_n)
    steps = pl.cdiv(num_n, launch.chip.cores_per_device)
    parts = pl.cdiv(num_n, steps)  # Each has a block at least.
    w_row = _weight_row(w, d, columns)
    assert w_row is not None

    def rows(part: Any, step: Any) -> tuple[Any, Any]:
        # Where the parts do not divide the blocks, the last part ends with its last block again: its dx is the same once
        # more, and for dw every row of it is past the end.
        return jnp.minimum(part * steps + step, num_n - 1), 0

    block_of_rows = pl.BlockSpec((block_n, columns), rows)
    sums = pl.BlockSpec((None, SUBLANES, w_row.shape[1]), lambda part, step: (part, 0, 0))
    sums_shape = output_like((parts, SUBLANES, w_row.shape[1]), jnp.float32, x)
    dx, d_gate, dw, d_bias = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            d=d,
            num_rows=n,
            masked=parts * steps * block_n != n,
            tile_n=min(config.tile_n, block_n),
            norm=norm,
        ),
        out_shape=(
            output_like((n, columns), x.dtype, x),
            None if gate is None else output_like((n, columns), gate.dtype, x),
            sums_shape,
            None if bias is None else sums_shape,
        ),
        grid=(parts, steps),
        in_specs=[
            block_of_rows,
            None if gate is None else block_of_rows,
            pl.BlockSpec(w_row.shape, lambda part, step: (0, 0)),
            block_of_rows,
        ],
        out_specs=(
            block_of_rows,
            None if gate is None else block_of_rows,
            sums,
            None if bias is None else sums,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=20 * x.size,
            transcendentals=x.size // d + (0 if gate is None else x.size),
            bytes_accessed=x.size * (3 * x.dtype.itemsize + 2 * _itemsize(gate)),
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name=f"{_name(norm)}_backward",
    )(x.reshape(n, columns), None if gate is None else gate.reshape(n, columns), w_row, dy.reshape(n, columns))

    def over_rows(sums: jax.Array | None, weights: jax.Array | None) -> jax.Array | None:
        if sums is None or weights is None:
            return None
        return jnp.sum(sums.reshape(-1, d), axis=0).astype(weights.dtype)

    return (
        dx.reshape(x.shape),
        None if gate is None else d_gate.reshape(x.shape),
        over_rows(dw, w),
        over_rows(d_bias, bias),
    )


_with_gradient = with_gradient(_forward, _backward)


def _norm(x: X, gate: X | None, w: Weights, bias: Weights | None, *, norm: Norm, launch: Launch) -> X:
    return _with_gradient(x, gate, w, bias, norm, launch)


rms_norm_pallas_tpu = layer_norm_pallas_tpu = gated_rms_norm_pallas_tpu = _norm
