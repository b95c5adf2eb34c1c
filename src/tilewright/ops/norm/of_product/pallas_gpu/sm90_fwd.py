"""`gated_rms_norm_of_product` as one Mosaic GPU kernel for Hopper: a product whose epilogue is the norm and its gate.

    y = o / sqrt(mean(o^2) + eps) * norm * act(x w)

Floor: 2 M K N FLOPs; o is read and y written once, 4 bytes per element, and x and w once. The two kernels that it takes
the place of write and read the gate besides, 4 bytes more. With K = 128 (Kimi Linear, [16384, 128] x [128, 4096]) a tile is
all epilogue: 268 MB of o and y, 56 us at the 4.8 TB/s of an H200, against 3 us of products at its peak. It takes 78 us, and
the two kernels 137 us. With K = 2048 (the full gate of Qwen3-Next) it is all product: the epilogue of one consumer runs
beside the product of the other, 403 us against 419 us of the two kernels.

Blocking: the main loop of pallas/gpu/gemm.py. A tile has one or two heads of 128 columns, so that the gates of a head's row
lie in four lanes of a warp, with the row of o that they gate. The producer copies o a head and consumer at a time, [64,
128], into buffers of their own (`Gemm.main_loop`, `fetch`), up to `heads` of them per consumer: that is tiles ahead where K
is short. A consumer loads a head in the layout of products, sums its squares over the four lanes, and puts y where o was,
from where it is copied to memory. So y needs no shared memory of its own, which two heads per tile would not leave. The
buffers of a tile are released at its end, when the copies have read them.

Numerics: float32 from the product's sums to y, which is rounded once; the gate is not rounded. The sigmoid and the square
root are approximate, to about 2 units in the last place of float32.

Tried on an H200 for [16384, K] x [K, 4096], tiles of 128 rows (columns of a tile / stages / cluster / heads: us):
- K = 128: 256/2/1/4: 78 (the heuristic), 256/2/2/4: 78, 128/4/1/2: 80, 128/2/1/4 with a band of 16: 81, 128/3/2/3: 82,
  256/3/1/2: 88.
- K = 2048: 256/3/1/2: 403 (the heuristic), 256/3/2/2: 423, 128 columns: 435, 256 with 2 stages and 4 heads: 595.
- The layer of Qwen3-Next, whose gate has full rank: 2.24 ms with this kernel, 2.17 ms with the two. So it has the two.

Limits: Hopper only. bfloat16 only. D = 128. An M that is no multiple of 8, or a K that is none of 64, costs padded copies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.norm.of_product.call import NormOfProductCall
from tilewright.ops.norm.of_product.config import HEAD, NormOfProductSm90Forward
from tilewright.pallas.gpu.elementwise import sigmoid
from tilewright.pallas.gpu.gemm import BAND, Gemm
from tilewright.pallas.gpu.kernel import aligned, aligned_size, smem_bytes, tile, whole, whole_shape
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, along_rows, load_along_columns, upcast

_SHORT = 256  # Up to this K a tile is all epilogue: o needs more of the shared memory than the operands.


def _unsupported_reason(call: NormOfProductCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    d = call.o.shape[-1]
    if d != HEAD:
        return f"D={d} must be {HEAD} (the columns of a tile are whole heads); use implementation='reference'"
    if 0 in call.sizes:
        return f"M, K, N = {call.sizes} must be 1 or more; use implementation='reference'"
    return None


def _heuristic(chip: Chip, call: NormOfProductCall) -> NormOfProductSm90Forward:
    """Two heads per tile. Where a tile is all epilogue, shared memory has the heads of two tiles, and otherwise more of the
    operands.
    """
    m, k, n = call.sizes
    stages, heads = (2, 4) if k <= _SHORT else (3, 2)
    block_m, block_n = 64 if m <= 64 else 128, HEAD if n <= HEAD else 2 * HEAD
    return NormOfProductSm90Forward(block_n, stages, BAND, block_m=block_m, heads=heads)


def _gemm(call: NormOfProductCall, launch: Launch) -> Gemm:
    m, k, n = call.sizes
    return Gemm.of(launch.config, launch.chip, m=m, n=n, k=k, dtype=jnp.bfloat16)


def _scratch(gemm: Gemm, config: NormOfProductSm90Forward) -> dict[str, Pipeline]:
    """Heads of o, [rows, HEAD] each. Those of a consumer have numbers that are its own modulo the consumers."""
    stages = gemm.consumers * config.heads
    return {
        "heads": Pipeline.scratch(stages, consumers=1, copies=1, o=tile(stages, gemm.rows, HEAD, dtype=jnp.bfloat16))
    }


def _kernel(
    *,
    # inputs
    x_ref,  # [m, k]
    w_ref,  # [k, n]
    o_ref,  # [m, n]
    norm_ref,  # [HEAD] float32
    # outputs
    y_ref,  # [m, n]
    # scratch
    heads: Pipeline,
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    activation: str,
    eps: float,
):
    shape, count = (gemm.rows, HEAD), min(gemm.width, gemm.n) // HEAD

    def place(consumer: Any, i: Any, j: Any, head: int) -> tuple[Any, Any]:
        """The rows of a consumer and the columns of a head of a tile."""
        rows = pl.ds((i * gemm.consumers + consumer) * gemm.rows, gemm.rows)
        return rows, pl.ds(j * gemm.width + head * HEAD, HEAD)

    def fetch(number: Any, i: Any, j: Any) -> None:
        for head in range(count):
            for consumer in range(gemm.consumers):
                buffer = (number * count + head) * gemm.consumers + consumer
                heads.fetch(buffer, o=o_ref.at[place(consumer, i, j, head)])

    def epilogue(consumer: Any, i: Any, j: Any, number: Any) -> Any:
        own = [(number * count + head) * gemm.consumers + consumer for head in range(count)]

        def finish(product: jax.Array) -> None:
            for head in range(count):
                buffer = heads.o.at[heads.wait(own[head])]
                o = upcast(plgpu.load(buffer, layout=WGMMA))  # [rows, HEAD]
                scale = lax.rsqrt(jnp.sum(o * o, axis=1) * (1.0 / HEAD) + eps)  # [rows]
                gate = product[:, head * HEAD : (head + 1) * HEAD]
                gated = o * along_rows(scale, shape) * load_along_columns(norm_ref, shape) * sigmoid(gate, WGMMA)
                y = gated * gate if activation == "silu" else gated
                buffer[...] = y.astype(buffer.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(buffer, y_ref.at[place(consumer, i, j, head)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for one in own:
                heads.release(one)

        return finish

    gemm.main_loop(x_ref, w_ref, pipeline, epilogue, fetch=fetch)


def _forward(call: NormOfProductCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    gemm, (m, k, n) = _gemm(call, launch), call.sizes
    rows, columns, depth = gemm.block_m, gemm.width, gemm.block_k
    shape = whole_shape(aligned_size(m, n, jnp.bfloat16), rows, columns)
    outputs = gemm.run(
        functools.partial(_kernel, gemm=gemm, activation=call.activation, eps=call.eps),
        name="gated_rms_norm_of_product",
        inputs={
            "x": whole(aligned(call.x), rows, depth),
            "w": whole(aligned(call.w.reshape(k, n)), depth, columns),
            "o": whole(aligned(call.o.reshape(m, n)), rows, columns),
            "norm": call.norm.astype(jnp.float32),
        },
        outputs={"y": jax.ShapeDtypeStruct(shape, jnp.bfloat16)},
        scratch=_scratch(gemm, launch.config),
    )
    return outputs["y"][:m, :n].reshape(call.o.shape), None


def _memory(call: NormOfProductCall, launch: Launch) -> dict[str, int]:
    gemm = _gemm(call, launch)
    return {"forward": smem_bytes({**_scratch(gemm, launch.config), **gemm.scratch()}, reductions=True)}


FORWARD = Pass(
    _forward,
    config=NormOfProductSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="a smaller block_n, stages or heads",
)
