"""`absorb_queries` and `expand_values` as a Mosaic GPU kernel for Hopper.

For each head, with the columns Wk and Wv of its keys and values,

    absorb_queries: y = [x[:, :C] Wk^T, x[:, C:]]        expand_values: y = x Wv

Floor: the columns of the weights read once, 2 R H C or 2 R H V bytes: 2.1 MB each for R 512, H 16 and C = V = 128, half a
microsecond at the 4.8 TB/s of an H200. What counts is the number of launches: XLA copies the weights of a layer out of
their stack, then the columns of keys and values out of these, and multiplies in one to three kernels.

Blocking: a thread block of one warpgroup for a head and 64 columns of y. It computes y^T = W^T x^T, so that the 64 rows
that wgmma takes are columns of y, and few rows of x waste little. All of the contracted axis is in shared memory at once:
one wait, one product. The weights are read as they lie. Where channels of x follow the product, one more thread block per
head copies them. A single row is loaded by threads: copies of tiles take whole eights of rows, and padding would be a
launch.

Numerics: float32 sums, rounded once. The same bits in every run.

Limits: Hopper only. bfloat16 only. Up to 64 rows; others than 1 and multiples of 8 are padded. C, R, X and what follows C
in x are multiples of 64.

Measured on an H200 in a model, H 16, R 512, C = V 128, E 64: queries 3.5 us at batch 64 and 2.3 us at batch 1, values 3.3
and 2.5 us.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode.pallas_gpu.rows import EIGHT, eight_rows
from tilewright.ops.attention.decode_latent_heads.call import LatentHeadsCall
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel, smem_bytes, tile
from tilewright.pallas.gpu.registers import opaque_zero, store, transposed
from tilewright.pallas.gpu.staging import store_transposed
from tilewright.pallas.gpu.wgmma import product

_COLUMNS = 64  # Of y per thread block: the rows of a wgmma product.
_MOST_ROWS = 64


def _unsupported_reason(call: LatentHeadsCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    b, (r, _, x), c = call.x.shape[0], call.kv_up.shape, call.key_dim
    if not 0 < b <= _MOST_ROWS:
        return f"B={b} must be from 1 to {_MOST_ROWS} (columns of a product); use implementation='reference'"
    sizes = {"R": r, "X": x, "key_dim": c, "channels past key_dim": call.x.shape[2] - c if call.side == "keys" else 0}
    for name, size in sizes.items():
        if size % _COLUMNS:
            return f"{name}={size} must be a multiple of {_COLUMNS} (rows of tiles); use implementation='reference'"
    return None


def _rows(call: LatentHeadsCall) -> int:
    """The rows of x as the product has them."""
    return -(-call.x.shape[0] // EIGHT) * EIGHT


def _scratch(call: LatentHeadsCall) -> dict[str, Any]:
    keys, r, dtype = call.side == "keys", call.kv_up.shape[0], call.x.dtype
    depth = call.key_dim if keys else r
    return {
        "w_smem": tile(*((_COLUMNS, depth) if keys else (depth, _COLUMNS)), dtype=dtype),
        "x_smem": tile(_rows(call), depth, dtype=dtype),
        "full": plgpu.Barrier(num_arrivals=1 if call.x.shape[0] == 1 else 2),
    }


def _kernel(
    *,
    # inputs
    x_ref,  # [B, H, J]
    w_ref,  # [R, H X]
    # outputs
    y_ref,  # [B, H M]
    # scratch
    w_smem,  # [64, C], or [R, 64] for values
    x_smem,  # [rows, C or R]
    full,
    # static
    call: LatentHeadsCall,
):
    keys, (r, _, per_head), c, width = call.side == "keys", call.kv_up.shape, call.key_dim, call.width
    (rows, depth), b = x_smem.shape, x_ref.shape[0]
    head, part = lax.axis_index("head"), lax.axis_index("part")
    column = part * _COLUMNS

    def row_of_x(first: int, channels: int) -> jax.Array:
        """Channels of the only row of x, repeated over eight rows."""
        layout = eight_rows(channels)
        row = plgpu.load(x_ref.at[0, head, pl.ds(first, channels)], layout=layout.reduce(0), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(row, (EIGHT, channels), [1]), layout)

    def multiply() -> None:
        if keys:
            source = w_ref.at[pl.ds(column, _COLUMNS), pl.ds(head * per_head, depth)]
        else:
            source = w_ref.at[:, pl.ds(head * per_head + c + column, _COLUMNS)]
        plgpu.copy_gmem_to_smem(source, w_smem, full)
        if b > 1:
            plgpu.copy_gmem_to_smem(x_ref.at[:, head, pl.ds(0, depth)], x_smem, full)
        else:
            store(x_smem, row_of_x(0, depth))
            plgpu.commit_smem()
        plgpu.barrier_wait(full)
        w = w_smem if keys else transposed(w_smem)  # [64, depth]
        y = product((_COLUMNS, rows), lambda sum_: sum_.add(w, transposed(x_smem)))
        # The tile has more rows than y where that has one: its first row is no constant, which would be checked.
        store_transposed(y, y_ref, opaque_zero(head), head * width + column, jnp.int32(0), jnp.int32(b))

    if not keys or width == r:
        multiply()
        return
    pl.when(column < r)(multiply)

    @pl.when(column >= r)
    def _copy_what_follows():
        channels = width - r
        target = pl.ds(head * width + r, channels)
        if b == 1:
            layout = eight_rows(channels).reduce(0)
            store(
                y_ref.at[0, target], plgpu.load(x_ref.at[0, head, pl.ds(c, channels)], layout=layout, optimized=False)
            )
            return
        layout, eights = eight_rows(channels), range(0, b, EIGHT)
        parts = [
            plgpu.load(x_ref.at[pl.ds(n, EIGHT), head, pl.ds(c, channels)], layout=layout, optimized=False)
            for n in eights
        ]
        for n, part in zip(eights, parts, strict=True):
            store(y_ref.at[pl.ds(n, EIGHT), target], part)


def _forward(call: LatentHeadsCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    """y [B, H, M]."""
    (b, h, _), r, width = call.x.shape, call.kv_up.shape[0], call.width
    x = call.x if b == 1 else padded(call.x, 0, EIGHT)
    shapes = call.with_arrays({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.given().items()})
    follows = call.side == "keys" and width > r
    columns = r if call.side == "keys" else width
    outputs = run_kernel(
        functools.partial(_kernel, call=shapes),
        name="absorb_queries" if call.side == "keys" else "expand_values",
        inputs={"x": x, "w": call.kv_up.reshape(r, -1)},
        outputs={"y": jax.ShapeDtypeStruct((x.shape[0], h * width), x.dtype)},
        scratch=_scratch(call),
        grid={"head": h, "part": columns // _COLUMNS + follows},
        params=compiler_params(automatic_barriers=True),
    )
    return outputs["y"][:b].reshape(b, h, width), None


FORWARD = Pass(
    _forward,
    unsupported_reason=_unsupported_reason,
    memory=lambda call, launch: {"product": smem_bytes(_scratch(call))},
    memory_fields="fewer rows",
)
