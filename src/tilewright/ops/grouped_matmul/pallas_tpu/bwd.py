"""The gradients of `grouped_matmul` on TPU: dx by the forward's kernel, and dw by its own.

    dx_m = dz_m w_g^T [M, K], contracted over P N        dw_g = x^T dz over the rows of group g: [G, K, P N]

Floor of each: 2 M K P N FLOPs, operands read once, results written once. dx contracts the last axes of dz and w, and dw
the first axes of x and dz: neither makes a transposed copy in HBM.

dw: grid (num_k, num_n, visits). A block [block_k, block_n] of a group's dw is accumulated in float32 in VMEM over the
visits of the group (visits.py), in order, so that every run has the same bits; x is read num_n times and dz num_k times.
Every group has a visit: that of an empty one writes zeros. Where the sizes are wrong, both gradients are NaN (`poison`).

Edges: dw contracts rows, and a block has rows of other groups, so both x and dz are masked with a select: a NaN of
another group times 0 would be NaN. dx is masked when it is stored, and both of its operands along a ragged P N.

dz and quantised weights: as in ops/matmul/pallas_tpu/bwd.py.

Tried and dropped (libtpu's schedule for v6e, tiles of 256 x 2048 x 768): an accumulator that is zeroed at a group's
first visit, about 770 bundles per group, where the select in the group's tiles adds 57 to the 1,960 of each.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.products import dequantized_weights
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall, group_starts, poison
from tilewright.ops.grouped_matmul.config import GroupedMatmulTpuBackward, GroupedMatmulTpuForward
from tilewright.ops.grouped_matmul.pallas_tpu.fwd import (
    GroupedProduct,
    declaration,
    for_group_tiles,
    multiply_groups,
    row_candidates,
    rows_inside,
    temporaries,
)
from tilewright.ops.grouped_matmul.pallas_tpu.visits import NAMES, num_visits, visits_of_groups
from tilewright.ops.grouped_matmul.xla import d_rows
from tilewright.pallas.arrays import dot_f32
from tilewright.pallas.tpu.gemm import Factors, GroupedWork, float_passes, ranked_grouped_blocks
from tilewright.pallas.tpu.kernel import VMEM_SHARE, Axis, Block, Kernel, Output, not_float64, padded_bytes


def _dw_kernel(
    *,
    # prefetched: see visits.py
    group_ref,
    block_ref,
    source_ref,
    first_ref,
    end_ref,
    opens_ref,
    closes_ref,
    poison_ref,  # [1] float32
    # inputs
    x_ref,  # [block_m, block_k]
    dz_ref,  # [block_m, block_n]
    # outputs
    dw_ref,  # [block_k, block_n]
    # scratch
    dw_scratch,  # [block_k, block_n] float32
    # static
    tile_m: int,
):
    visit = pl.program_id(2)
    first, end, opens, closes = first_ref[visit], end_ref[visit], opens_ref[visit] == 1, closes_ref[visit] == 1

    def add(begin: Any, rows: Any) -> None:
        x, dz = x_ref[rows, :], dz_ref[rows, :]  # [tile_m, block_k], [tile_m, block_n]
        x = jnp.where(rows_inside(x.shape, begin, first, end), x, jnp.zeros_like(x))
        dz = jnp.where(rows_inside(dz.shape, begin, first, end), dz, jnp.zeros_like(dz))
        # The group's first tile overwrites what the scratch held.
        before = dw_scratch[...]
        before = jnp.where(opens & (begin <= first), jnp.zeros_like(before), before)
        dw_scratch[...] = before + dot_f32(x, dz, (0, 0))  # [block_k, block_n]

    for_group_tiles(first, end, tile_m, add)

    @pl.when(closes & (end > 0))
    def _close():
        dw_ref[...] = (dw_scratch[...] + poison_ref[0]).astype(dw_ref.dtype)

    @pl.when(closes & (end == 0))
    def _empty_group():
        dw_ref[...] = jnp.full(dw_ref.shape, poison_ref[0], jnp.float32).astype(dw_ref.dtype)


def _dw_declaration(call: GroupedMatmulCall, config: GroupedMatmulTpuBackward) -> Kernel:
    (groups, m, k, n), dtype = call.sizes, call.x.dtype
    n = call.parts * n
    block_m, block_k, block_n = config.block_m_dw, config.block_k_dw, config.block_n_dw
    result = Block((None, block_k, block_n), call.w.dtype, lambda i, j, visit, group, *_: (group[visit], i, j))
    return Kernel(
        name="grouped_matmul_dw",
        grid={
            "row": Axis(pl.cdiv(k, block_k), "parallel"),
            "column": Axis(pl.cdiv(n, block_n), "parallel"),
            "visit": Axis(num_visits(m, groups, block_m)),
        },
        prefetched=(*NAMES, "poison"),
        inputs={
            "x": Block((block_m, block_k), dtype, lambda i, j, visit, group, block, *_: (block[visit], i)),
            "dz": Block((block_m, block_n), dtype, lambda i, j, visit, group, block, *_: (block[visit], j)),
        },
        outputs={"dw": Output((groups, k, n), result)},
        scratch={"dw_scratch": pltpu.VMEM((block_k, block_n), jnp.float32)},
    )


def _dx_product(call: GroupedMatmulCall) -> GroupedProduct:
    (groups, m, k, n), dtype = call.sizes, call.x.dtype
    factors = Factors(k=call.parts * n, x_dtype=dtype, w_dtype=dtype.name, multiplied=dtype, w_transposed=True)
    return GroupedProduct(groups=groups, m=m, n=k, factors=factors, out_dtype=dtype, name="grouped_matmul_dx")


def _dx_config(config: GroupedMatmulTpuBackward) -> GroupedMatmulTpuForward:
    return GroupedMatmulTpuForward(config.block_m_dx, config.block_k_dx, config.block_n_dx, config.tile_m_dx)


def _dx_bytes(call: GroupedMatmulCall, config: GroupedMatmulTpuForward) -> int:
    product = _dx_product(call)
    return declaration(product, config).vmem_bytes(temporaries(product, config))


def _dw_bytes(call: GroupedMatmulCall, config: GroupedMatmulTpuBackward) -> int:
    """VMEM of the dw kernel: masked operands, and x transposed."""
    tile, dtype = min(config.tile_m_dw, config.block_m_dw), call.x.dtype
    masked = padded_bytes((tile, config.block_k_dw), dtype) + padded_bytes((tile, config.block_n_dw), dtype)
    return _dw_declaration(call, config).vmem_bytes(masked + padded_bytes((config.block_k_dw, tile), dtype))


def _dw_work(call: GroupedMatmulCall) -> GroupedWork:
    (groups, m, k, n), size = call.sizes, call.x.dtype.itemsize
    return GroupedWork(
        groups=groups,
        m=m,
        n=call.parts * n,
        k=k,
        x_itemsize=size,
        w_itemsize=size,
        y_itemsize=size,
        passes=float_passes(call.x.dtype),
        contracts_rows=True,
    )


def _memory(call: GroupedMatmulCall, config: GroupedMatmulTpuBackward) -> dict[str, int]:
    if call.x_scales is not None:
        return {}
    needed = {"dx": _dx_bytes(call, _dx_config(config))}
    return needed if call.w_scales is not None else {**needed, "dw": _dw_bytes(call, config)}


def _heuristic(chip: Chip, call: GroupedMatmulCall) -> GroupedMatmulTpuBackward:
    limit, work = VMEM_SHARE * (chip.vmem_bytes or 0), _dw_work(call)

    def dw_configs(dx: GroupedMatmulTpuForward) -> Iterator[GroupedMatmulTpuBackward]:
        for block_m, block_n, block_k in ranked_grouped_blocks(chip, work):
            yield GroupedMatmulTpuBackward(
                *(dx.block_m, dx.block_n, dx.block_k, dx.tile_m),
                *(block_m, block_k, block_n, work.tile(block_m)),
            )

    *_, smallest = candidates = list(row_candidates(chip, _dx_product(call)))
    dx = next((each for each in candidates if _dx_bytes(call, each) <= limit), smallest)
    *_, smallest = candidates = list(dw_configs(dx))
    return next((each for each in candidates if _dw_bytes(call, each) <= limit), smallest)


def _backward(call: GroupedMatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> GroupedMatmulCall:
    if call.x_scales is not None:
        return call.gradients()
    config, chip, (_, m, k, n) = launch.config, launch.chip, call.sizes
    dz = d_rows(call, saved, dy)  # [M, P N]
    arrays = {"x": dz, "w": dequantized_weights(call, call.x.dtype)}
    wrong = poison(call.group_sizes, m)
    dx = multiply_groups(_dx_product(call), arrays, call.group_sizes, wrong, _dx_config(config), chip)["y"]
    if call.w_scales is not None:
        return call.gradients(x=dx)
    visits = visits_of_groups(group_starts(call.group_sizes, m), m, config.block_m_dw)
    blocks = (config.block_m_dw, config.block_n_dw, config.block_k_dw)
    dw = _dw_declaration(call, config).run(
        functools.partial(_dw_kernel, tile_m=min(config.tile_m_dw, config.block_m_dw)),
        {"x": call.x, "dz": dz, **visits, "poison": wrong.reshape(1)},
        chip=chip,
        cost=pl.CostEstimate(
            flops=2 * m * k * call.parts * n,
            transcendentals=0,
            bytes_accessed=int(_dw_work(call).bytes(blocks)),
        ),
    )["dw"]
    return call.gradients(x=dx, w=dw.reshape(call.w.shape))


BACKWARD = Pass(
    _backward,
    config=GroupedMatmulTpuBackward,
    heuristic=_heuristic,
    unsupported_reason=lambda call, launch: not_float64(call.x),
    memory=lambda call, launch: _memory(call, launch.config),
    memory_fields="smaller blocks of that kernel",
    note=lambda call: "" if call.w_scales is None else "w is dequantised before the kernel",
)
