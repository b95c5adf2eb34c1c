"""`decode_residual` as two Mosaic GPU kernels for Hopper: the product, and everything behind it.

    y = residual + x w        normed = y / sqrt(mean(y^2) + eps) (norm + norm_offset)

Floor: the weights read once, 2 F D bytes; for F 6144 and D 2048 that is 25 MB, 5.2 us at the 4.8 TB/s of an H200. What
counts beside it is the number of launches: in XLA's program the sums of the splits, the statistics and the norm are up to
three.

Blocking: the first kernel is pallas/gpu/few_rows.py, which leaves a float32 sum per split of F. In the second, a thread
block of one warpgroup has a row: it adds up the splits and the residual in order, takes the mean of the squares, and writes
y and its norm. It waits for the L2, so it loads several splits before it uses the first: as many as registers hold.

Tried and dropped: thread blocks beside these, and behind `decode_qkv`'s, that ask for the next weights
(`cp.async.bulk.prefetch.L2`). Qwen3-1.7B then took 1.733 ms a token at batch 1 instead of 1.690 ms, and 3.668 instead of
3.624 ms at batch 64 (H200, jax 0.11.2): the next product gained less than these kernels lost.

Numerics: float32 from the products' sums to the results, which are rounded once. The same bits in every run.

Limits: Hopper only. bfloat16 only. D a multiple of 128, up to 8,192. The weights are read once per 64 rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode_qkv.config import DecodeQkvSm90Forward
from tilewright.ops.attention.decode_residual.call import DecodeResidualCall
from tilewright.pallas.gpu.elementwise import LANES, THREADS, load, store
from tilewright.pallas.gpu.few_rows import FewRows, unpadded_tiles
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel

_MOST_CHANNELS_PER_VECTOR = 4  # 16 bytes of float32, the widest load.
_MOST_WIDTH = 8192  # 64 channels per thread.
_LOADED = 128  # float32 values of the splits that a thread holds at a time.


def _heuristic(chip: Chip, call: DecodeResidualCall) -> DecodeQkvSm90Forward:
    b, f = call.x.shape
    return DecodeQkvSm90Forward(*unpadded_tiles(chip, b, f, call.w.shape[1:]))


def _unsupported_reason(call: DecodeResidualCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    b, d = call.residual.shape
    if d % THREADS or not 0 < d <= _MOST_WIDTH:
        return (
            f"D={d} must be a multiple of {THREADS} (the threads that hold a row), up to {_MOST_WIDTH}; use "
            f"implementation='reference'"
        )
    if not b or not call.x.shape[1]:
        return f"B={b} and F={call.x.shape[1]} must be 1 or more; use implementation='reference'"
    return None


def _products(call: DecodeResidualCall, launch: Launch) -> FewRows:
    (m, k), config = call.x.shape, launch.config
    sizes = {"rows": config.block_b, "stages": config.stages, "splits": config.splits}
    return FewRows(chip=launch.chip, m=m, k=k, columns=(call.w.shape[1],), **sizes)


def _finish_kernel(
    *,
    # inputs
    z_ref,  # [splits, B, D] float32
    residual_ref,  # [B, D]
    norm_ref,  # [D]
    # outputs
    y_ref,  # [B, D]
    normed_ref,  # [B, D]
    # static
    eps: float,
    norm_offset: float,
):
    splits, _, d = z_ref.shape
    row, shape = pl.ds(lax.axis_index("row"), 1), (1, d)
    vector = math.gcd(d // THREADS, _MOST_CHANNELS_PER_VECTOR)
    layout = plgpu.Layout.TILED(
        plgpu.Tiling(((1, vector * THREADS), (vector * LANES,), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
    weights = plgpu.load(norm_ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)  # [D]
    y = load(residual_ref.at[row], layout).astype(jnp.float32)  # [1, D]
    at_a_time = max(1, _LOADED * THREADS // d)
    for first in range(0, splits, at_a_time):
        parts = [load(z_ref.at[n, row], layout) for n in range(first, min(first + at_a_time, splits))]  # [1, D]
        y = y + functools.reduce(jnp.add, parts)
    mean = jnp.sum(y * y, axis=1) * (1.0 / d)  # [1]
    scale = plgpu.layout_cast(lax.broadcast_in_dim(lax.rsqrt(mean + eps), shape, [0]), layout)
    weights = plgpu.layout_cast(lax.broadcast_in_dim(weights + norm_offset, shape, [1]), layout)
    store(y_ref.at[row], y.astype(y_ref.dtype), layout)
    store(normed_ref.at[row], (y * scale * weights).astype(normed_ref.dtype), layout)


def _forward(call: DecodeResidualCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """y and normed, [B, D]."""
    z = _products(call, launch).run(call.x, [call.w], name="decode_residual_products")
    result = jax.ShapeDtypeStruct(call.residual.shape, call.x.dtype)
    outputs = run_kernel(
        functools.partial(_finish_kernel, eps=call.eps, norm_offset=call.norm_offset),
        name="decode_residual",
        inputs={"z": z, "residual": call.residual, "norm": call.norm},
        outputs={"y": result, "normed": result},
        scratch={},
        grid={"row": call.residual.shape[0]},
        params=compiler_params(approximate_math=False),
    )
    return (outputs["y"], outputs["normed"]), None


FORWARD = Pass(
    _forward,
    config=DecodeQkvSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=lambda call, launch: {"products": _products(call, launch).memory},
    memory_fields="fewer stages",
)
