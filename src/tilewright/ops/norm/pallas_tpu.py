"""The norms as Mosaic TPU kernels: one for the forward and one for the backward, for all three.

For a row x of D columns, with v = offset + w, a = act(gate) (1 without a gate) and m = mean(x) (0 where not centered)

    r = 1 / sqrt(mean((x - m)^2) + eps)        xhat = (x - m) r        y = (xhat v + bias) a
    g = dy a v        dx = r (g - mean(g) [if centered] - xhat mean(g xhat))
    dw = sum_rows dy a xhat        dbias = sum_rows dy a        dgate = dy (xhat v) act'(gate)

Floor: some 10 to 30 FLOPs an element, so memory is what bounds it. Forward: x and gate read and y written once.
Backward:
x, gate and dy read, dx and dgate written once. Both kernels move these bytes and no others of that size: w, and the
sums for dw and dbias, stay in VMEM.

The statistics are recomputed in the backward. It reads x anyway, so that costs no byte. To keep r would cost the
forward a write and the backward a read of 4 bytes a row at best; as [N, 1] it is padded to 512 bytes a row, four times
the 128 columns of a bfloat16 head.

Blocking: a block is block_n whole rows; a loop inside takes tile_n of them at a time. A tile goes by twice (centered:
thrice), in chunks of columns: once to sum, once to use the sums. Chunks are loaded again rather than kept: a wide tile
does not fit the registers, and a load is cheaper than a spill. A tile of one chunk stays in registers. Forward: grid
(num_n,), in parallel. Backward: grid (parts, steps): a part is a run of blocks whose sums stay in VMEM, so its steps go
in order; the parts go in parallel, one for each TensorCore. Sums over rows are kept per sublane, [8, D], and joined
after the kernel.

Narrow rows: D=64 and D=32 would leave the rest of 128 lanes empty, in HBM too, where an array [N, 64] takes the bytes
of [N, 128]. So heads lie side by side: [..., H, D] is seen as [N, H D], as the projection before it made it, where H D
is a multiple of 128; else as [N D / 128, 128], where that is whole; and only else as [N, D]. Each group of D lanes then
has sums of its own, by a masked reduction for each group.

Limits: rows are whole in a block, so VMEM bounds D; `unsupported_reason` says where. Any N and D: what a block holds
past the last row is not defined, may be NaN, and never reaches a result: it is not written, and masked in the sums over
rows.

Numerics: everything in float32; y, dx and dgate rounded once to their dtypes, dw and dbias once after their last sum.
The variance of a layer norm is the mean of squares about the mean, not the difference of two means.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tilewright.core.chip import LANES, MIB, ROW_TILE, SUBLANES, Chip
from tilewright.core.implementation import Implementation, Launch
from tilewright.ops.norm.call import NormCall
from tilewright.ops.norm.config import NormTpuBackward, NormTpuForward
from tilewright.ops.norm.xla import activate
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, block_pass

_CHUNK = 4 * LANES  # Columns of a wide row that are taken at a time.
_NARROW = (32, 64)  # Widths of which several share the lanes.
_WIDEST_SHARED_ROW = 16384

# Block sizes to choose from, largest first. At 1 MiB the copy of a block outweighs the fixed cost of a grid step; that
# is a guess until it is timed on a chip.
_ROWS = (4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
_BLOCK_BYTES = 1 * MIB
_TILE_ELEMENTS = 32768  # 32 registers of float32, of the 64 there are.
_FLOAT32_BYTES = 4


def _candidates(kind: Any, chip: Chip, call: NormCall) -> Iterator[Any]:
    """Blocks that are worth their size, the largest first."""
    n, columns = _rows_shape(call.x.shape)
    padded = -(-columns // LANES) * LANES
    tile_n = next((size for size in _ROWS if size * padded <= _TILE_ELEMENTS), ROW_TILE)
    for block_n in _ROWS:
        if (block_n < n + ROW_TILE and block_n * padded * call.x.dtype.itemsize <= _BLOCK_BYTES) or block_n == _ROWS[
            -1
        ]:
            yield kind(block_n, min(tile_n, block_n))


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
    *,
    # inputs
    x_ref,  # [block_n, C], where C is D, or several D
    gate_ref,  # [block_n, C], or None
    w_ref,  # [1, D or LANES]
    bias_ref,  # [1, D or LANES], or None
    # outputs
    y_ref,  # [block_n, C]
    # static
    call: NormCall,
    tile_n: int,
):
    d = call.x.shape[-1]

    def tile(first: jax.Array) -> None:
        rows = pl.ds(first, tile_n)
        for span in _spans(x_ref.shape[1], d):
            load = _once(lambda columns: x_ref[rows, columns].astype(jnp.float32), span)  # [tile_n, chunk]
            mean = _row_mean([load(columns) for columns in span], d) if call.centered else None

            def centred(columns: slice, load=load, mean=mean) -> jax.Array:
                return load(columns) if mean is None else load(columns) - mean

            scale = jax.lax.rsqrt(_row_mean([jnp.square(centred(columns)) for columns in span], d) + call.eps)
            for columns in span:
                of_weights = _weight_columns(columns, w_ref.shape[1])
                w = w_ref[:, of_weights].astype(jnp.float32) + call.offset  # [1, chunk]
                y = centred(columns) * scale * w
                if bias_ref is not None:
                    y = y + bias_ref[:, of_weights].astype(jnp.float32)
                if gate_ref is not None:
                    y = y * activate(gate_ref[rows, columns].astype(jnp.float32), call.activation)[0]
                y_ref[rows, columns] = y.astype(y_ref.dtype)

    _for_row_tiles(x_ref.shape[0], tile_n, tile)


def _weight_row(weights: jax.Array | None, columns: int) -> jax.Array | None:
    """[1, D]; where a row has several groups, repeated over 128 lanes."""
    if weights is None or columns == weights.shape[0]:
        return None if weights is None else weights[None, :]
    return jnp.tile(weights, LANES // weights.shape[0])[None, :]


def _name(call: NormCall) -> str:
    return "layer_norm" if call.centered else "gated_rms_norm" if call.activation else "rms_norm"


def _blocks(call: NormCall, block_n: int, number: Callable[..., Any]) -> tuple[Callable[[Any], Any], ...]:
    """The block of an array of rows, and of one of weights; None for None. `number` is the block's, from grid indices."""
    columns, d = _rows_shape(call.x.shape)[1], call.x.shape[-1]
    width = d if columns == d else LANES

    def rows(array: Any) -> Block | None:
        return None if array is None else Block((block_n, columns), array.dtype, lambda *grid: (number(*grid), 0))

    def weights(array: Any) -> Block | None:
        return None if array is None else Block((1, width), array.dtype, lambda *grid: (0, 0))

    return rows, weights


def _forward_declaration(call: NormCall, launch: Launch) -> Kernel:
    shape, block_n = _rows_shape(call.x.shape), launch.config.block_n
    rows, weights = _blocks(call, block_n, lambda i: i)
    return Kernel(
        name=f"{_name(call)}_forward",
        grid={"row": Axis(pl.cdiv(shape[0], block_n), "parallel")},
        inputs={"x": rows(call.x), "gate": rows(call.gate), "w": weights(call.w), "bias": weights(call.bias)},
        outputs={"y": Output(shape, rows(call.x))},
    )


def _tile_bytes(call: NormCall, launch: Launch) -> int:
    """A tile of a block in float32, which the compiler keeps in VMEM between passes."""
    columns = -(-_rows_shape(call.x.shape)[1] // LANES) * LANES
    return min(launch.config.tile_n, launch.config.block_n) * columns * _FLOAT32_BYTES


def _run(
    kernel: Kernel, body: Callable[..., None], call: NormCall, launch: Launch, *, flops: int, passes: int, **rows: Any
) -> dict[str, Any]:
    """Runs a kernel on the arrays of a call and on others of x's shape. `flops` are per element; `passes` are over arrays
    of x's dtype, and one fewer over arrays of the gate's.
    """
    x, shape, config = call.x, _rows_shape(call.x.shape), launch.config
    arrays = {name: _as_rows(array, shape) for name, array in {"x": x, "gate": call.gate, **rows}.items()}
    gate_bytes = 0 if call.gate is None else call.gate.dtype.itemsize
    return kernel.run(
        functools.partial(body, call=call, tile_n=min(config.tile_n, config.block_n)),
        arrays | {"w": _weight_row(call.w, shape[1]), "bias": _weight_row(call.bias, shape[1])},
        chip=launch.chip,
        cost=pl.CostEstimate(
            flops=flops * x.size,
            transcendentals=x.size // x.shape[-1] + (0 if call.gate is None else x.size),
            bytes_accessed=x.size * (passes * x.dtype.itemsize + (passes - 1) * gate_bytes),
        ),
    )


def _as_rows(array: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    return None if array is None else array.reshape(shape)


def _forward(call: NormCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    outputs = _run(_forward_declaration(call, launch), _forward_kernel, call, launch, flops=8, passes=2)
    return outputs["y"].reshape(call.x.shape), None


def _backward_kernel(
    *,
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
    # static
    call: NormCall,
    num_rows: int,
    masked: bool,
    tile_n: int,
):
    d = call.x.shape[-1]
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
            w = w_ref[:, _weight_columns(columns, w_ref.shape[1])].astype(jnp.float32) + call.offset  # [1, chunk]
            if gate_ref is not None:
                activated, slope = activate(gate_ref[rows, columns].astype(jnp.float32), call.activation)
            d_scaled = dy if activated is None else dy * activated
            return x, dy, slope, w, d_scaled, d_scaled * w

        for span in _spans(x_ref.shape[1], d):
            loaded = _once(load, span)
            mean = _row_mean([loaded(columns)[0] for columns in span], d) if call.centered else None

            def centred(columns: slice, loaded=loaded, mean=mean) -> Any:
                x, *others, g = loaded(columns)
                return (x if mean is None else x - mean), *others, g

            squares, products, gradients = [], [], []
            for columns in span:
                x, *_, g = centred(columns)
                squares.append(jnp.square(x))
                products.append(g * x)
                gradients.append(g)
            scale = jax.lax.rsqrt(_row_mean(squares, d) + call.eps)
            along = scale * (scale * (scale * _row_mean(products, d)))
            level = scale * _row_mean(gradients, d) if call.centered else None
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


def _parts(call: NormCall, launch: Launch) -> tuple[int, int]:
    """The parts of the backward's grid, each with at least one block, and the steps of each."""
    num_n = pl.cdiv(_rows_shape(call.x.shape)[0], launch.config.block_n)
    steps = pl.cdiv(num_n, launch.chip.cores_per_device)
    return pl.cdiv(num_n, steps), steps


def _backward_declaration(call: NormCall, launch: Launch) -> Kernel:
    shape, d, block_n = _rows_shape(call.x.shape), call.x.shape[-1], launch.config.block_n
    parts, steps = _parts(call, launch)
    num_n, width = pl.cdiv(shape[0], block_n), d if shape[1] == d else LANES
    # Where the parts do not divide the blocks, the last part repeats its last block: that writes the same dx again, and
    # for dw every row of it is past the end.
    rows, weights = _blocks(call, block_n, lambda part, step: jnp.minimum(part * steps + step, num_n - 1))
    block = Block((None, SUBLANES, width), jnp.float32, lambda part, step: (part, 0, 0))
    sums = Output((parts, SUBLANES, width), block)
    return Kernel(
        name=f"{_name(call)}_backward",
        grid={"part": Axis(parts, "parallel"), "step": Axis(steps)},
        inputs={"x": rows(call.x), "gate": rows(call.gate), "w": weights(call.w), "dy": rows(call.x)},
        outputs={
            "dx": Output(shape, rows(call.x)),
            "d_gate": None if call.gate is None else Output(shape, rows(call.gate)),
            "dw": sums,
            "d_bias": None if call.bias is None else sums,
        },
    )


def _backward(call: NormCall, saved: None, dy: jax.Array, launch: Launch) -> NormCall:
    (parts, steps), num_rows = _parts(call, launch), _rows_shape(call.x.shape)[0]
    masked = parts * steps * launch.config.block_n != num_rows
    body = functools.partial(_backward_kernel, num_rows=num_rows, masked=masked)
    outputs = _run(_backward_declaration(call, launch), body, call, launch, flops=20, passes=3, dy=dy)

    def over_rows(sums: jax.Array | None) -> jax.Array | None:
        return None if sums is None else jnp.sum(sums.reshape(-1, call.x.shape[-1]), axis=0)

    return call.gradients(
        x=outputs["dx"].reshape(call.x.shape),
        gate=_as_rows(outputs["d_gate"], call.x.shape),
        w=over_rows(outputs["dw"]),
        bias=over_rows(outputs["d_bias"]),
    )


_pass = functools.partial(block_pass, candidates=_candidates, memory_fields="a smaller block_n")
IMPLEMENTATION = Implementation(
    forward=_pass(_forward, NormTpuForward, "forward", _forward_declaration, temporaries=_tile_bytes),
    backward=_pass(
        _backward,
        NormTpuBackward,
        "backward",
        _backward_declaration,
        temporaries=lambda call, launch: 2 * _tile_bytes(call, launch),
    ),
)
