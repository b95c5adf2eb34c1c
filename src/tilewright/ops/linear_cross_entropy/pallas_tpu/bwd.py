"""The backward of linear cross entropy on TPU where no exponentials are stored: dx and dw each recompute the logits.

With stored ones, see stored.py.

With p_nv = exp(a_nv - max_n) / total_n, the gradient of a logit is

    d_nv = (d_nll_n + d_logsumexp_n) p_nv - d_nll_n [v = label_n]        (times 1 - (a_nv / soft_cap)^2 under a cap)

and dx = d w^T, dw = x^T d. In the dx kernel a block of rows stays in VMEM and w streams past; in the dw kernel a block
of the vocabulary stays and x streams past. The four numbers that a row needs come as one array [N, 4]: (max, (d_nll +
d_logsumexp) / total, d_nll, label), the label as the bits of a float32, so that a block of rows is fetched with one
copy.

What blocks hold past the end of x or w may be anything, NaN too, and a product would spread it. So where a contracted
axis has a ragged last block, both of its operands are masked there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyTpuBackward
from tilewright.ops.linear_cross_entropy.pallas_tpu.fwd import (
    hidden_slices,
    largest_blocks,
    logits_tile,
    temporaries_bytes,
    unsupported_reason,
)
from tilewright.ops.linear_cross_entropy.pallas_tpu.stored import (
    fits_memory,
    gradients_of_stored,
    stored_blocks,
    stored_vmem_bytes,
)
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.gemm import for_row_tiles, up_to
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output

_ROW_ARRAYS = 6  # Values per row that the compiler may keep in VMEM: the four of `rows` apart, and their products.


def _d_logits(
    x_ref, w_ref, rows_ref, rows: Any, first_column: jax.Array, soft_cap: float | None, block_h: int
) -> jax.Array:
    """The gradient of a tile of logits, float32 [tile_n, block_v]."""
    logits = logits_tile(x_ref, w_ref, rows, soft_cap, block_h)
    per_row = rows_ref[rows, :]  # [tile_n, 4]
    highest, factor, label_factor = per_row[:, 0:1], per_row[:, 1:2], per_row[:, 2:3]  # each [tile_n, 1]
    label = jax.lax.bitcast_convert_type(per_row[:, 3:4], jnp.int32)
    column = first_column + jax.lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)  # [1, block_v]
    d_logits = factor * jnp.exp(logits - highest)
    d_logits = d_logits - jnp.where(column == label, label_factor, 0.0)
    if soft_cap is not None:
        d_logits = d_logits * (1.0 - jnp.square(logits * (1.0 / soft_cap)))
    return d_logits


def _dx_kernel(
    *,
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    rows_ref,  # [block_n, 4]
    # outputs
    dx_ref,  # [block_n, H]
    # scratch
    dx_scratch,  # [block_n, H] float32
    # static
    call: LinearCrossEntropyCall,
    config: LinearCrossEntropyTpuBackward,
):
    step, vocabulary, block_v = pl.program_id(1), call.w.shape[1], w_ref.shape[1]
    first = step * block_v

    @pl.when(step == 0)
    def _start():
        dx_scratch[...] = jnp.zeros_like(dx_scratch)

    def add_tile(rows: Any) -> None:
        d_logits = _d_logits(x_ref, w_ref, rows_ref, rows, first, call.soft_cap, config.block_h)  # [tile_n, block_v]
        if vocabulary % block_v:
            d_logits = up_to(vocabulary, d_logits, 1, first)
        d_logits = d_logits.astype(w_ref.dtype)
        for part in hidden_slices(w_ref.shape[0], config.block_h):
            w = w_ref[part, :]  # [block_h, block_v]
            if vocabulary % block_v:
                w = up_to(vocabulary, w, 1, first)
            dx_scratch[rows, part] += dot_f32(d_logits, w, (1, 1))  # [tile_n, block_h]

    for_row_tiles(x_ref.shape[0], config.tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        dx_ref[...] = dx_scratch[...].astype(dx_ref.dtype)


def _dw_kernel(
    *,
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    rows_ref,  # [block_n, 4]
    # outputs
    dw_ref,  # [H, block_v]
    # scratch
    dw_scratch,  # [H, block_v] float32
    # static
    call: LinearCrossEntropyCall,
    config: LinearCrossEntropyTpuBackward,
):
    step, num_rows, block_n, block_v = pl.program_id(1), call.x.shape[0], x_ref.shape[0], w_ref.shape[1]

    @pl.when(step == 0)
    def _start():
        dw_scratch[...] = jnp.zeros_like(dw_scratch)

    first_column = pl.program_id(0) * block_v

    def add_tile(rows: Any) -> None:
        first = step * block_n + rows.start
        # [tile_n, block_v]
        d_logits = _d_logits(x_ref, w_ref, rows_ref, rows, first_column, call.soft_cap, config.block_h)
        if num_rows % block_n:
            d_logits = up_to(num_rows, d_logits, 0, first)
        d_logits = d_logits.astype(x_ref.dtype)
        for part in hidden_slices(x_ref.shape[1], config.block_h):
            x = x_ref[rows, part]  # [tile_n, block_h]
            if num_rows % block_n:
                x = up_to(num_rows, x, 0, first)
            dw_scratch[part, :] += dot_f32(x, d_logits, (0, 0))  # [block_h, block_v]

    for_row_tiles(block_n, config.tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        dw_ref[...] = dw_scratch[...].astype(dw_ref.dtype)


def _declaration(call: LinearCrossEntropyCall, output: str, block_n: int, block_v: int) -> Kernel:
    """The kernel of `output`, "dx" or "dw": its grid is (what stays, what streams)."""
    (n, h), v, dtype = call.x.shape, call.w.shape[1], call.x.dtype
    rows_stay = output == "dx"

    def rows(columns: int, dtype: Any) -> Block:
        return Block((block_n, columns), dtype, lambda *index: (index[0 if rows_stay else 1], 0))

    vocabulary = Block((h, block_v), dtype, lambda *index: (0, index[1 if rows_stay else 0]))
    num_n, num_v = pl.cdiv(n, block_n), pl.cdiv(v, block_v)
    stays, streams = ({"row": num_n}, {"column": num_v}) if rows_stay else ({"column": num_v}, {"row": num_n})
    result = Output((n, h), rows(h, dtype)) if rows_stay else Output((h, v), vocabulary)
    return Kernel(
        name=f"linear_cross_entropy_{output}",
        grid={name: Axis(size, "parallel") for name, size in stays.items()}
        | {name: Axis(size) for name, size in streams.items()},
        inputs={"x": rows(h, dtype), "w": vocabulary, "rows": rows(4, jnp.float32)},
        outputs={output: result},
        scratch={f"{output}_scratch": pltpu.VMEM((block_n, h) if rows_stay else (h, block_v), jnp.float32)},
    )


def _memory(call: LinearCrossEntropyCall, launch: Launch) -> dict[str, int]:
    of_stored = {}
    if fits_memory(launch.chip, call):
        of_stored["stored"] = stored_vmem_bytes(call, launch.config)
    return _vmem_bytes(call, launch.config) | of_stored


def _vmem_bytes(call: LinearCrossEntropyCall, config: LinearCrossEntropyTpuBackward) -> dict[str, int]:
    blocks = {"dx": (config.block_n_dx, config.block_v_dx), "dw": (config.block_n_dw, config.block_v_dw)}

    def needed(output: str, block_n: int, block_v: int) -> int:
        temporaries = temporaries_bytes(call, block_n, block_v, config.tile_n, row_arrays=_ROW_ARRAYS)
        return _declaration(call, output, block_n, block_v).vmem_bytes(temporaries)

    return {output: needed(output, *sizes) for output, sizes in blocks.items()}


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropyTpuBackward:
    def needed(block_n: int, block_v: int, output: str) -> int:
        return _vmem_bytes(call, LinearCrossEntropyTpuBackward(block_n, block_v, block_n, block_v))[output]

    dx = largest_blocks(chip, call, functools.partial(needed, output="dx"), rows_stay=True)
    dw = largest_blocks(chip, call, functools.partial(needed, output="dw"), rows_stay=False)
    return LinearCrossEntropyTpuBackward(*dx, *dw, **(stored_blocks(chip, call) or {}))


def _backward(call: LinearCrossEntropyCall, saved: Any, cotangents: Any, launch: Launch) -> LinearCrossEntropyCall:
    # A part of a call that the compiler cut has nothing of its own stored.
    if saved.stored is not None and call.whole_v is None:
        return gradients_of_stored(call, saved, cotangents, launch)
    (highest, total, *_), (d_nll, d_logsumexp) = saved, cotangents
    x, w, config = call.x, call.w, launch.config
    (n, h), v = x.shape, w.shape[1]
    label_bits = jax.lax.bitcast_convert_type(call.labels, jnp.float32)
    rows = jnp.stack([highest, (d_nll + d_logsumexp) / total, d_nll, label_bits], axis=1)  # [N, 4]

    def run(output: str, body: Any, block_n: int, block_v: int, streamed: int, written: int) -> jax.Array:
        kernel = _declaration(call, output, block_n, block_v)
        refetched = next(iter(kernel.grid.values())).size * streamed
        return kernel.run(
            functools.partial(body, call=call, config=config),
            {"x": x, "w": w, "rows": rows},
            chip=launch.chip,
            cost=pl.CostEstimate(
                flops=4 * n * h * v,
                transcendentals=n * v,
                bytes_accessed=(refetched + 2 * written) * x.dtype.itemsize + 16 * n,
            ),
        )[output]

    dx = run("dx", _dx_kernel, config.block_n_dx, config.block_v_dx, streamed=h * v, written=n * h)
    dw = run("dw", _dw_kernel, config.block_n_dw, config.block_v_dw, streamed=n * h, written=h * v)
    return call.gradients(x=dx, w=dw)


BACKWARD = Pass(
    _backward,
    config=LinearCrossEntropyTpuBackward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=_memory,
    memory_fields="a smaller block_n or block_v of that kernel",
)
