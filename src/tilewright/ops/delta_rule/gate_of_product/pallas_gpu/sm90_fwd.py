"""`kda_gate_of_product` as one Mosaic GPU kernel for Hopper: a product whose epilogue is the gate.

    z = x w + dt_bias        g = -exp(A_log) softplus(z), or lower_bound sigmoid(exp(A_log) z)

Floor: g is written once, 4 bytes per element; x and w are read once. For Kimi Linear, [16384, 128] x [128, 4096], that is
268 MB, 56 us at the 4.8 TB/s of an H200. Its instructions are close to that: with the 21 per element that the kernel has,
an H200 issues them in 48 us. It takes 106 us; XLA's two kernels, which write and read z besides, 179 us.

Blocking: the main loop of pallas/gpu/gemm.py. The epilogue stores a tile in parts of 64 columns through two buffers in
shared memory, while the next part is computed. A part lies in one head, so its rate is one number.

Numerics: float32 from the product's sums to g; the product is not rounded, so the error for Kimi Linear is 2.4e-7 where it
is 2.4e-3 with a product in bfloat16. softplus: see pallas/gpu/elementwise.py.

Tried on an H200 for Kimi Linear, tiles of 128 rows (columns of a tile / stages / band / cluster: us): 256/3/8/1: 106 (the
heuristic), 128/4/16/2: 106, 256/2/16/1: 109, 256/2/8/2: 112, 128/4/8/1: 116, 64/4/8/1: 122.

Limits: Hopper only. bfloat16 only. K a multiple of 64. An M that is no multiple of 8, or an R that is none of 64, costs
padded copies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.delta_rule.gate_of_product.call import GateOfProductCall
from tilewright.ops.delta_rule.gate_of_product.config import GateOfProductSm90Forward
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.elementwise import sigmoid, softplus
from tilewright.pallas.gpu.gemm import BAND, BLOCK_N, MEMORY_FIELDS, Gemm
from tilewright.pallas.gpu.kernel import aligned, aligned_size, smem_bytes, whole, whole_shape
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, load_along_columns
from tilewright.pallas.gpu.staging import WIDTH, Staging, staging_scratch, stored_columns

_STAGES = 3


def _unsupported_reason(call: GateOfProductCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    k = call.w.shape[-1]
    if k % WIDTH:
        return (
            f"K={k} must be a multiple of {WIDTH} (columns that are stored at a time); use implementation='reference'"
        )
    if 0 in call.sizes:
        return f"M, R, N = {call.sizes} must be 1 or more; use implementation='reference'"
    return None


def _heuristic(chip: Chip, call: GateOfProductCall) -> GateOfProductSm90Forward:
    m, _, n = call.sizes
    block_m, block_n = 64 if m <= 64 else 128, min(BLOCK_N, -(-n // WIDTH) * WIDTH)
    return GateOfProductSm90Forward(block_n, _STAGES, BAND, block_m=block_m)


def _gemm(call: GateOfProductCall, launch: Launch) -> Gemm:
    m, r, n = call.sizes
    return Gemm.of(launch.config, launch.chip, m=m, n=n, k=r, dtype=jnp.bfloat16)


def _kernel(
    *,
    # inputs
    x_ref,  # [m, r]
    w_ref,  # [r, n]
    rates_ref,  # [n / WIDTH, in whole tiles] float32: exp(A_log) of each part's head
    dt_bias_ref,  # [n, in whole tiles] float32
    # outputs
    g_ref,  # [m, n] float32
    # scratch
    g_smem,  # [consumers, BUFFERS, rows, WIDTH]
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    lower_bound: float | None,
):
    shape = (gemm.rows, WIDTH)

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        rows = pl.ds((i * gemm.consumers + consumer) * gemm.rows, gemm.rows)

        def finish(product: jax.Array) -> None:
            staging = Staging(g=g_smem.at[consumer])
            for start in stored_columns(gemm.width, gemm.n):
                column = j * gemm.width + start
                columns, rate = pl.ds(column, WIDTH), rates_ref[lax.div(column, jnp.int32(WIDTH))]
                z = product[:, start : start + WIDTH] + load_along_columns(dt_bias_ref.at[columns], shape)
                g = -rate * softplus(z, WGMMA) if lower_bound is None else lower_bound * sigmoid(rate * z, WGMMA)
                staging.store(g, g_ref.at[rows, columns], "g")
            staging.end()

        return finish

    gemm.main_loop(x_ref, w_ref, pipeline, epilogue)


def _forward(call: GateOfProductCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    gemm, (m, r, n) = _gemm(call, launch), call.sizes
    _, hv, k = call.w.shape
    rows, columns, depth = gemm.block_m, gemm.width, gemm.block_k
    rates = jnp.repeat(jnp.exp(call.A_log.astype(jnp.float32)), k // WIDTH)
    outputs = gemm.run(
        functools.partial(_kernel, gemm=gemm, lower_bound=call.lower_bound),
        name="kda_gate_of_product",
        inputs={
            "x": whole(aligned(call.x), rows, depth),
            "w": whole(aligned(call.w.reshape(r, n)), depth, columns),
            "rates": padded(rates, 0, columns // WIDTH),
            "dt_bias": padded(call.dt_bias.astype(jnp.float32).reshape(n), 0, columns),
        },
        outputs={"g": jax.ShapeDtypeStruct(whole_shape(aligned_size(m, n, jnp.bfloat16), rows, columns), jnp.float32)},
        scratch=staging_scratch(gemm.consumers, gemm.rows, g=jnp.float32),
    )
    return outputs["g"][:m, :n].reshape(m, hv, k), None


def _memory(call: GateOfProductCall, launch: Launch) -> dict[str, int]:
    gemm = _gemm(call, launch)
    staged = staging_scratch(gemm.consumers, gemm.rows, g=jnp.float32)
    return {"forward": smem_bytes({**staged, **gemm.scratch()})}


FORWARD = Pass(
    _forward,
    config=GateOfProductSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields=MEMORY_FIELDS,
)
