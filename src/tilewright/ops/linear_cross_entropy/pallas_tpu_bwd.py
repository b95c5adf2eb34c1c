"""The backward kernels of linear cross entropy on TPU: dx and dw, each with the logits made anew. See pallas_tpu.py.

With p_nv = exp(a_nv - max_n) / total_n, the gradient of a logit is

    d_nv = (d_nll_n + d_logsumexp_n) p_nv - d_nll_n [v = label_n]        (times 1 - (a_nv / soft_cap)^2 under a cap)

and dx = d w^T, dw = x^T d. The dx kernel keeps a block of rows and lets w stream past; the dw kernel keeps a block of the
vocabulary and lets x stream past. The four numbers a row needs come as one array [N, 4]: (max, (d_nll +
d_logsumexp) / total, d_nll, label), the label as a float32's bits, so that a block of rows fetches them at once.

What blocks hold past the end of x or w may be anything, NaN too, and a product would spread it. So where a contracted axis
has a ragged last block, both of its operands are masked there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.linear_cross_entropy.config import PallasTpuConfig


def dot_f32(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """A and b contracted over one axis each; accumulated in float32, and multiplied in it where they are float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def for_row_tiles(block_n: int, tile_n: int, body: Callable[[Any], None]) -> None:
    """Call `body` with a slice for each tile of rows of a block: in a loop, so that its code is there once."""
    if block_n <= tile_n:
        body(slice(0, block_n))
        return

    def step(index: jax.Array, _: None) -> None:
        body(pl.ds(pl.multiple_of(index * tile_n, tile_n), tile_n))

    jax.lax.fori_loop(0, block_n // tile_n, step, None)


def hidden_slices(h: int, block_h: int) -> list[slice]:
    """H in slices of block_h, the last one shorter where it does not divide."""
    return [slice(start, min(start + block_h, h)) for start in range(0, h, block_h)]


def logits_tile(x_ref, w_ref, rows: Any, soft_cap: float | None, block_h: int) -> jax.Array:
    """The logits of a tile of rows against a block of the vocabulary: [tile_n, block_v]."""
    products = (dot_f32(x_ref[rows, part], w_ref[part, :], (1, 0)) for part in hidden_slices(x_ref.shape[1], block_h))
    logits = functools.reduce(jnp.add, products)
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits * (1.0 / soft_cap))


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


def _below(first: jax.Array, shape: tuple[int, ...], axis: int, end: int) -> jax.Array:
    """Which elements of a block that begins at `first` lie before `end` along `axis`."""
    return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis) < end


def _keep(mask: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(mask, values, jnp.zeros_like(values))


def _dx_kernel(
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    rows_ref,  # [block_n, 4]
    # outputs
    dx_ref,  # [block_n, H]
    # scratch
    dx_scratch,  # [block_n, H] float32
    *,
    vocabulary: int,
    soft_cap: float | None,
    block_h: int,
    tile_n: int,
):
    step = pl.program_id(1)
    block_v = w_ref.shape[1]
    first = step * block_v

    @pl.when(step == 0)
    def _start():
        dx_scratch[...] = jnp.zeros_like(dx_scratch)

    def add_tile(rows: Any) -> None:
        d_logits = _d_logits(x_ref, w_ref, rows_ref, rows, first, soft_cap, block_h)  # [tile_n, block_v]
        if vocabulary % block_v:
            d_logits = _keep(_below(first, d_logits.shape, 1, vocabulary), d_logits)
        d_logits = d_logits.astype(w_ref.dtype)
        for part in hidden_slices(w_ref.shape[0], block_h):
            w = w_ref[part, :]  # [block_h, block_v]
            if vocabulary % block_v:
                w = _keep(_below(first, w.shape, 1, vocabulary), w)
            dx_scratch[rows, part] += dot_f32(d_logits, w, (1, 1))  # [tile_n, block_h]

    for_row_tiles(x_ref.shape[0], tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        dx_ref[...] = dx_scratch[...].astype(dx_ref.dtype)


def _dw_kernel(
    # inputs
    x_ref,  # [block_n, H]
    w_ref,  # [H, block_v]
    rows_ref,  # [block_n, 4]
    # outputs
    dw_ref,  # [H, block_v]
    # scratch
    dw_scratch,  # [H, block_v] float32
    *,
    num_rows: int,
    soft_cap: float | None,
    block_h: int,
    tile_n: int,
):
    step = pl.program_id(1)
    block_n, block_v = x_ref.shape[0], w_ref.shape[1]

    @pl.when(step == 0)
    def _start():
        dw_scratch[...] = jnp.zeros_like(dw_scratch)

    first_column = pl.program_id(0) * block_v

    def add_tile(rows: Any) -> None:
        first = step * block_n + rows.start
        d_logits = _d_logits(x_ref, w_ref, rows_ref, rows, first_column, soft_cap, block_h)  # [tile_n, block_v]
        if num_rows % block_n:
            d_logits = _keep(_below(first, d_logits.shape, 0, num_rows), d_logits)
        d_logits = d_logits.astype(x_ref.dtype)
        for part in hidden_slices(x_ref.shape[1], block_h):
            x = x_ref[rows, part]  # [tile_n, block_h]
            if num_rows % block_n:
                x = _keep(_below(first, x.shape, 0, num_rows), x)
            dw_scratch[part, :] += dot_f32(x, d_logits, (0, 0))  # [block_h, block_v]

    for_row_tiles(block_n, tile_n, add_tile)

    @pl.when(step == pl.num_programs(1) - 1)
    def _finish():
        dw_ref[...] = dw_scratch[...].astype(dw_ref.dtype)


def backward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    highest: jax.Array,
    total: jax.Array,
    d_nll: jax.Array,
    d_logsumexp: jax.Array,
    *,
    soft_cap: float | None,
    launch: Launch,
) -> tuple[jax.Array, jax.Array]:
    """dx [N, H] and dw [H, V]."""
    (n, h), v = x.shape, w.shape[1]
    config: PallasTpuConfig = launch.config
    label_bits = jax.lax.bitcast_convert_type(labels, jnp.float32)
    rows = jnp.stack([highest, (d_nll + d_logsumexp) / total, d_nll, label_bits], axis=1)  # [N, 4]

    def call(body, name: str, grid: tuple[int, int], blocks: tuple[int, int], rows_axis: int, out_shape, acc_shape):
        """A kernel over (what stays, what streams); `rows_axis` is the grid axis that walks over the rows."""
        block_n, block_v = blocks

        def block_of_rows(*index: Any) -> tuple[Any, Any]:
            return index[rows_axis], 0

        def block_of_vocabulary(*index: Any) -> tuple[Any, Any]:
            return 0, index[1 - rows_axis]

        refetched = grid[0] * (h * v if rows_axis == 0 else n * h)
        return pl.pallas_call(
            functools.partial(body, soft_cap=soft_cap, block_h=config.block_h, tile_n=config.tile_n),
            out_shape=output_like(out_shape, x.dtype, x),
            grid=grid,
            in_specs=[
                pl.BlockSpec((block_n, h), block_of_rows),
                pl.BlockSpec((h, block_v), block_of_vocabulary),
                pl.BlockSpec((block_n, 4), block_of_rows),
            ],
            out_specs=pl.BlockSpec(acc_shape, block_of_rows if rows_axis == 0 else block_of_vocabulary),
            scratch_shapes=[pltpu.VMEM(acc_shape, jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
            ),
            cost_estimate=pl.CostEstimate(
                flops=4 * n * h * v,
                transcendentals=n * v,
                bytes_accessed=(refetched + 2 * (n * h if rows_axis == 0 else h * v)) * x.dtype.itemsize + 16 * n,
            ),
            interpret=tpu_interpret_params(launch.interpret),
            name=name,
        )(x, w, rows)

    block_n, block_v = config.block_n_dx, config.block_v_dx
    dx = call(
        functools.partial(_dx_kernel, vocabulary=v),
        "linear_cross_entropy_dx",
        (pl.cdiv(n, block_n), pl.cdiv(v, block_v)),
        (block_n, block_v),
        0,
        (n, h),
        (block_n, h),
    )
    block_n, block_v = config.block_n_dw, config.block_v_dw
    dw = call(
        functools.partial(_dw_kernel, num_rows=n),
        "linear_cross_entropy_dw",
        (pl.cdiv(v, block_v), pl.cdiv(n, block_n)),
        (block_n, block_v),
        1,
        (h, v),
        (h, block_v),
    )
    return dx, dw
