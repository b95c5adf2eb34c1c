"""The kernel of rows times weights on TPU: y = activation(x w + bias) + residual, and dx = dz w^T.

Floor: 2 M K P N FLOPs; x, w and the residual read once, y written once (and z, where it is saved for the backward).
Here: grid (num_m, num_n, num_k), K in order. x is read num_n times and w num_m times; x once where K is one block, and
w once where N is, too. Blocks are chosen by that traffic, the cycles of the MXU and the VMEM (pallas/tpu/gemm.py).

Blocking: the accumulator [P, block_m, block_n] stays in VMEM while K streams past; where K is one block there is none.
With swiglu a step computes both parts of a tile of columns: they are two blocks of one w [K, 2 N] (two arrays, which XLA
copies, where block_n does not divide N). The product of a block is unrolled (tile_m rows of it, in a loop, on chips with
128-wide MXUs); the epilogue is a loop over a few rows.

Edges: what blocks hold past the end of an array is undefined. Along K both operands are masked there; rows past M and
columns past N are never written.

Quantised operands: see pallas/tpu/gemm.py. float8 weights are stored by columns (core/quantized.py), so their blocks
are [block_n, block_k]: XLA's exchange of the axes in the call and the one here cancel. Scales [KS, P, NS] are expanded
to one per column before the kernel: 4 bytes per column and block of scales. The partial sums of a scale's block of K
are products of that depth, so that blocks of 128 fill half of a 256-wide MXU. Scales along K whose blocks are not
multiples of 128 are not in the kernel: XLA dequantises w first, which rounds each weight once.

Numerics: accumulation in float32, and in int32 for int8 x int8 without scales along K (exact up to K = 133,000).
float32 operands are multiplied in float32 (six passes of the MXU). float8 x float8 is converted to bfloat16 on chips
without a float8 unit: exact.

Tried and dropped, with libtpu's schedule for v6e and blocks of 1024 x 1024 x 512, for which the MXU needs 2,048 cycles
per step: a loop over 256 rows of the block, 3,148 bundles per step instead of 2,368; an accumulator that is zeroed under
a condition, 513 bundles more at the first step of K, where the select of today costs none.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.core.products import saved_dtype
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulTpuForward
from tilewright.pallas.tpu.gemm import (
    Factors,
    Work,
    block_reason,
    column_parts,
    dequantized_note,
    epilogue_rows,
    float_passes,
    for_row_tiles,
    ranked_blocks,
    tile_rows,
)
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output, block_pass


@dataclass(frozen=True)
class RowProduct:
    """What the kernel computes: static."""

    m: int
    n: int
    factors: Factors
    out_dtype: Any
    name: str = "matmul_forward"
    activation: str | None = None
    parts: int = 1
    saved_dtype: Any = None
    """Of z, where it is saved; else None."""
    bias_dtype: Any = None
    residual_dtype: Any = None

    @property
    def work(self) -> Work:
        y_itemsize = jnp.dtype(self.out_dtype).itemsize
        y_itemsize += 0 if self.residual_dtype is None else jnp.dtype(self.residual_dtype).itemsize
        y_itemsize += 0 if self.saved_dtype is None else self.parts * jnp.dtype(self.saved_dtype).itemsize
        return Work(
            m=self.m,
            n=self.n,
            k=self.factors.k,
            parts=self.parts,
            x_itemsize=jnp.dtype(self.factors.x_dtype).itemsize,
            w_itemsize=self.factors.w_itemsize,
            y_itemsize=y_itemsize,
            passes=float_passes(self.factors.multiplied),
        )


def _row_product_kernel(
    *,
    # inputs
    x_ref,  # [block_m, block_k]
    w0_ref,  # [block_k, block_n]; [block_n, block_k] where w is transposed; int4: [block_k / 2, block_n]
    w1_ref,  # the same columns of the second part, or None
    bias_ref,  # [P, block_n] or None
    residual_ref,  # [block_m, block_n] or None
    x_scales_ref,  # [block_m, KX] or None
    w_scales_ref,  # [P, KS, block_n] or None
    # outputs
    y_ref,  # [block_m, block_n]
    z_ref,  # [P, block_m, block_n] or None
    # scratch
    z_scratch,  # [P, block_m, block_n] float32 or int32; None where K is one block and there is no epilogue
    # static
    product: RowProduct,
    tile_m: int,
):
    step, num_k, factors = pl.program_id(2), pl.num_programs(2), product.factors
    (block_m, block_k), block_n = x_ref.shape, y_ref.shape[1]
    weights = (w0_ref, w1_ref)[: product.parts]
    one_block = block_k >= factors.k

    def scales_of(part: int) -> Any:
        return None if w_scales_ref is None else w_scales_ref.at[part]

    def row_scales(rows: Any) -> Any:
        return None if x_scales_ref is None else x_scales_ref[rows, :]  # [rows, KX]

    def multiply(rows: Any) -> None:
        x = x_ref[rows, :]  # [tile_m, block_k]
        for part, w_ref in enumerate(weights):
            z = factors.product(x, w_ref, block_k, step, row_scales(rows), scales_of(part))  # [tile_m, block_n]
            if z_scratch is None:
                y_ref[rows, :] = z.astype(y_ref.dtype)
            elif one_block:
                z_scratch[part, rows, :] = z
            else:
                # The first step overwrites what the scratch held. A condition on the block would drain the MXU.
                before = z_scratch[part, rows, :]
                z_scratch[part, rows, :] = z + jnp.where(step == 0, jnp.zeros_like(before), before)

    for_row_tiles(block_m, tile_m, multiply)

    def finish(rows: Any) -> None:
        parts = []
        for part in range(product.parts):
            z = factors.scaled(z_scratch[part, rows, :], row_scales(rows), scales_of(part))  # [rows, block_n]
            if bias_ref is not None:
                z = z + bias_ref[part : part + 1, :].astype(jnp.float32)  # [1, block_n]
            if z_ref is not None:
                z_ref[part, rows, :] = z.astype(z_ref.dtype)
            parts.append(z)
        y = activate(product.activation, tuple(parts))  # [rows, block_n]
        if residual_ref is not None:
            y = y + residual_ref[rows, :].astype(jnp.float32)
        y_ref[rows, :] = y.astype(y_ref.dtype)

    if z_scratch is not None:
        rows = epilogue_rows(block_m, product.parts * block_n)
        pl.when(step == num_k - 1)(lambda: for_row_tiles(block_m, rows, finish))


def declaration(product: RowProduct, config: MatmulTpuForward, offsets: tuple[int, ...] = (0, 0)) -> Kernel:
    """The kernel. `offsets`: the first block of columns of each part of w."""
    factors, parts = product.factors, product.parts
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k

    def weights(part: int) -> Block | None:
        if part >= parts:
            return None
        first = offsets[part]
        return Block(factors.w_block(block_k, block_n), factors.w_stored, lambda i, j, k: factors.w_index(k, first + j))

    def result(dtype: Any) -> Block:
        return Block((block_m, block_n), dtype, lambda i, j, k: (i, j))

    plain = product.activation is product.bias_dtype is product.residual_dtype is None and not factors.w_scales
    one_block = block_k >= factors.k
    every_part = Block((parts, block_m, block_n), product.saved_dtype, lambda i, j, k: (0, i, j))
    return Kernel(
        name=product.name,
        grid={
            "row": Axis(pl.cdiv(product.m, block_m), "parallel"),
            "column": Axis(pl.cdiv(product.n, block_n), "parallel"),
            "k": Axis(pl.cdiv(factors.k, block_k)),
        },
        inputs={
            "x": Block((block_m, block_k), factors.x_dtype, lambda i, j, k: (i, k)),
            "w0": weights(0),
            "w1": weights(1),
            "bias": None
            if product.bias_dtype is None
            else Block((parts, block_n), product.bias_dtype, lambda i, j, k: (0, j)),
            "residual": None if product.residual_dtype is None else result(product.residual_dtype),
            "x_scales": None
            if not factors.x_scales
            else Block((block_m, factors.x_scales), jnp.float32, lambda i, j, k: (i, 0)),
            "w_scales": None
            if not factors.w_scales
            else Block((parts, factors.w_scales, block_n), jnp.float32, lambda i, j, k: (0, 0, j)),
        },
        outputs={
            "y": Output((product.m, product.n), result(product.out_dtype)),
            "z": None if product.saved_dtype is None else Output((parts, product.m, product.n), every_part),
        },
        scratch={
            "z_scratch": None if one_block and plain else pltpu.VMEM((parts, block_m, block_n), factors.accumulator),
        },
    )


def vmem_bytes(product: RowProduct, config: MatmulTpuForward) -> int:
    tile = min(config.tile_m, config.block_m)
    return declaration(product, config).vmem_bytes(product.factors.temporaries(tile, config.block_n, config.block_k))


def multiply_rows(product: RowProduct, arrays: dict[str, Any], config: MatmulTpuForward, chip: Chip) -> dict[str, Any]:
    """Runs the kernel. `arrays["w"]` has the parts of w along its columns: [K, P N], or [P N, K] where it is transposed."""
    factors = product.factors
    w, offsets = column_parts(arrays["w"], 0 if factors.w_transposed else 1, product.parts, config.block_n)
    kernel = declaration(product, config, tuple(offsets))
    given = {**arrays, **{f"w{part}": each for part, each in enumerate(w)}}
    blocks = (config.block_m, config.block_n, config.block_k)
    return kernel.run(
        functools.partial(_row_product_kernel, product=product, tile_m=min(config.tile_m, config.block_m)),
        given,
        chip=chip,
        cost=pl.CostEstimate(
            flops=2 * product.m * factors.k * product.parts * product.n,
            transcendentals=0 if product.activation in (None, "relu") else product.m * product.n,
            bytes_accessed=int(product.work.bytes(blocks)),
        ),
    )


def _row_product(call: MatmulCall, chip: Chip, *, save: bool) -> RowProduct:
    m, _, n = call.sizes
    return RowProduct(
        m=m,
        n=n,
        factors=Factors.of(call, chip),
        out_dtype=call.out_dtype,
        activation=call.activation,
        parts=call.parts,
        saved_dtype=saved_dtype(call) if save and call.activation else None,
        bias_dtype=None if call.bias is None else call.bias.dtype,
        residual_dtype=None if call.residual is None else call.residual.dtype,
    )


def _forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    product = _row_product(call, launch.chip, save=save)
    w, scales = product.factors.operands(call)
    arrays = {
        "x": call.x,
        "w": w,
        "bias": call.bias,
        "residual": call.residual,
        "x_scales": call.x_scales,
        "w_scales": scales,
    }
    outputs = multiply_rows(product, arrays, launch.config, launch.chip)
    z = outputs["z"]
    # The kernel writes whole parts: [M, P, N] would have P, padded to a tile, among its last two axes.
    return outputs["y"], None if z is None else jnp.moveaxis(z, 0, 1)


def row_candidates(chip: Chip, product: RowProduct) -> Iterator[MatmulTpuForward]:
    for block_m, block_n, block_k in ranked_blocks(chip, product.work, product.factors):
        yield MatmulTpuForward(block_m, block_n, block_k, tile_rows(chip, block_m))


def _candidates(config: type[MatmulTpuForward], chip: Chip, call: MatmulCall) -> Iterator[MatmulTpuForward]:
    return row_candidates(chip, _row_product(call, chip, save=True))


def _unsupported_reason(call: MatmulCall, launch: Launch) -> str | None:
    factors = _row_product(call, launch.chip, save=True).factors
    return block_reason(call.x, factors, launch.config.block_k, launch.chip)


FORWARD = block_pass(
    _forward,
    MatmulTpuForward,
    "forward",
    lambda call, launch: declaration(_row_product(call, launch.chip, save=True), launch.config),
    _candidates,
    temporaries=lambda call, launch: _row_product(call, launch.chip, save=True).factors.temporaries(
        min(launch.config.tile_m, launch.config.block_m), launch.config.block_n, launch.config.block_k
    ),
    unsupported_reason=_unsupported_reason,
    memory_fields="a smaller block_m, block_n or block_k",
    saved="*tokens . N",
    note=dequantized_note,
)
