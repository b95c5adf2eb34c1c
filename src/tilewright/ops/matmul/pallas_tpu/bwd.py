"""The gradients of `matmul` on TPU: dx by the forward's kernel, and dw by its own.

    dx = dz w^T [M, K], contracted over P N        dw = x^T dz [K, P N], contracted over M

Floor of each: 2 M K P N FLOPs, both operands read once, the result written once. Neither makes a transposed copy in
HBM: dx contracts the last axes of dz and w, and dw the first axes of x and dz. Blocks are chosen as in fwd.py. In dw a
block [block_k, block_n] of the result stays in VMEM while the rows stream past; x is read num_n times and dz num_k
times.

dz, the gradient of z, is elementwise: XLA computes it from z, which the forward saved, and dy, and rounds it to x's
dtype. The bias's gradient sums it before it is rounded.

Edges: rows of x and dz past M are masked in dw, since NaN times 0 is NaN; so are both operands past P N in dx.

Quantised w: dx takes the weights dequantised by XLA to x's dtype, which rounds each of them once and writes them once to
HBM. A quantised x has no gradient.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, ROW_TILE, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.products import d_product, dequantized_weights
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulTpuBackward, MatmulTpuForward
from tilewright.ops.matmul.pallas_tpu.fwd import RowProduct, multiply_rows, row_candidates, vmem_bytes
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.gemm import Factors, Work, float_passes, for_row_tiles, ranked_blocks, tile_rows, up_to
from tilewright.pallas.tpu.kernel import VMEM_SHARE, Axis, Block, Kernel, Output, not_float64, padded_bytes


def _dw_kernel(
    *,
    # inputs
    x_ref,  # [block_m, block_k]
    dz_ref,  # [block_m, block_n]
    # outputs
    dw_ref,  # [block_k, block_n]
    # scratch
    dw_scratch,  # [block_k, block_n] float32, or None where M is one block
    # static
    m: int,
    tile_k: int,
):
    step, block_m = pl.program_id(2), x_ref.shape[0]
    left = m - step * block_m
    dz = dz_ref[...]  # [block_m, block_n]
    dz = up_to(left, dz, 0) if m % block_m else dz

    def multiply(columns: Any) -> None:
        x = x_ref[:, columns]  # [block_m, tile_k]
        x = up_to(left, x, 0) if m % block_m else x
        product = dot_f32(x, dz, (0, 0))  # [tile_k, block_n]
        if dw_scratch is None:
            dw_ref[columns, :] = product.astype(dw_ref.dtype)
            return
        before = dw_scratch[columns, :]
        dw_scratch[columns, :] = product + jnp.where(step == 0, jnp.zeros_like(before), before)

    for_row_tiles(x_ref.shape[1], tile_k, multiply)

    if dw_scratch is not None:

        @pl.when(step == pl.num_programs(2) - 1)
        def _finish():
            dw_ref[...] = dw_scratch[...].astype(dw_ref.dtype)


def _dw_declaration(call: MatmulCall, config: MatmulTpuBackward) -> Kernel:
    (m, k, n), dtype = call.sizes, call.x.dtype
    n = call.parts * n
    block_m, block_k, block_n = config.block_m_dw, config.block_k_dw, config.block_n_dw
    return Kernel(
        name="matmul_dw",
        grid={
            "row": Axis(pl.cdiv(k, block_k), "parallel"),
            "column": Axis(pl.cdiv(n, block_n), "parallel"),
            "m": Axis(pl.cdiv(m, block_m)),
        },
        inputs={
            "x": Block((block_m, block_k), dtype, lambda i, j, step: (step, i)),
            "dz": Block((block_m, block_n), dtype, lambda i, j, step: (step, j)),
        },
        outputs={"dw": Output((k, n), Block((block_k, block_n), call.w.dtype, lambda i, j, step: (i, j)))},
        scratch={"dw_scratch": None if block_m >= m else pltpu.VMEM((block_k, block_n), jnp.float32)},
    )


def _dx_product(call: MatmulCall) -> RowProduct:
    (m, k, n), dtype = call.sizes, call.x.dtype
    factors = Factors(k=call.parts * n, x_dtype=dtype, w_dtype=dtype.name, multiplied=dtype, w_transposed=True)
    return RowProduct(m=m, n=k, factors=factors, out_dtype=dtype, name="matmul_dx")


def _dx_config(config: MatmulTpuBackward) -> MatmulTpuForward:
    return MatmulTpuForward(config.block_m_dx, config.block_k_dx, config.block_n_dx, config.tile_m_dx)


def _dw_work(call: MatmulCall) -> Work:
    (m, k, n), size = call.sizes, call.x.dtype.itemsize
    passes = float_passes(call.x.dtype)
    return Work(m=k, n=call.parts * n, k=m, x_itemsize=size, w_itemsize=size, y_itemsize=size, passes=passes)


def _dw_bytes(call: MatmulCall, config: MatmulTpuBackward) -> int:
    """VMEM of the dw kernel: masked operands, and tile_k columns of x transposed."""
    block_m, dtype = config.block_m_dw, call.x.dtype
    tile = min(config.tile_k_dw, config.block_k_dw)
    temporaries = padded_bytes((tile, block_m), dtype)
    if call.x.shape[0] % block_m:
        temporaries += padded_bytes((block_m, tile), dtype) + padded_bytes((block_m, config.block_n_dw), dtype)
    return _dw_declaration(call, config).vmem_bytes(temporaries)


def _memory(call: MatmulCall, config: MatmulTpuBackward) -> dict[str, int]:
    if call.x_scales is not None:
        return {}
    needed = {"dx": vmem_bytes(_dx_product(call), _dx_config(config))}
    return needed if call.w_scales is not None else {**needed, "dw": _dw_bytes(call, config)}


def _heuristic(chip: Chip, call: MatmulCall) -> MatmulTpuBackward:
    limit = VMEM_SHARE * (chip.vmem_bytes or 0)
    product = _dx_product(call)

    def dw_configs(dx: MatmulTpuForward) -> Iterator[MatmulTpuBackward]:
        for block_k, block_n, block_m in ranked_blocks(chip, _dw_work(call), multiples=(LANES, LANES, ROW_TILE)):
            yield MatmulTpuBackward(
                *(dx.block_m, dx.block_n, dx.block_k, dx.tile_m),
                *(block_k, block_n, block_m, tile_rows(chip, block_k)),
            )

    *_, smallest = candidates = list(row_candidates(chip, product))
    dx = next((each for each in candidates if vmem_bytes(product, each) <= limit), smallest)
    *_, smallest = candidates = list(dw_configs(dx))
    return next((each for each in candidates if _dw_bytes(call, each) <= limit), smallest)


def _backward(call: MatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> MatmulCall:
    config, chip = launch.config, launch.chip
    m, k, n = call.sizes
    dz = d_product(call, saved, dy)  # [M, P, N]
    gradients: dict[str, Any] = {}
    if call.x_scales is None:
        rows = dz.reshape(m, -1).astype(call.x.dtype)  # [M, P N]
        arrays = {"x": rows, "w": dequantized_weights(call, call.x.dtype)}
        gradients["x"] = multiply_rows(_dx_product(call), arrays, _dx_config(config), chip)["y"]
        if call.w_scales is None:
            tile_k = min(config.tile_k_dw, config.block_k_dw)
            blocks = (config.block_k_dw, config.block_n_dw, config.block_m_dw)
            dw = _dw_declaration(call, config).run(
                functools.partial(_dw_kernel, m=m, tile_k=tile_k),
                {"x": call.x, "dz": rows},
                chip=chip,
                cost=pl.CostEstimate(
                    flops=2 * m * k * call.parts * n,
                    transcendentals=0,
                    bytes_accessed=int(_dw_work(call).bytes(blocks)),
                ),
            )["dw"]
            gradients["w"] = dw.reshape(call.w.shape)
    if call.bias is not None:
        gradients["bias"] = jnp.sum(dz, axis=0)
    if call.residual is not None:
        gradients["residual"] = dy
    return call.gradients(**gradients)


BACKWARD = Pass(
    _backward,
    config=MatmulTpuBackward,
    heuristic=_heuristic,
    unsupported_reason=lambda call, launch: not_float64(call.x),
    memory=lambda call, launch: _memory(call, launch.config),
    memory_fields="smaller blocks of that kernel",
    note=lambda call: "" if call.w_scales is None else "w is dequantised before the kernel",
)
