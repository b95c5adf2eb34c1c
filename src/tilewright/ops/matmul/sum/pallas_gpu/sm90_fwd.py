"""`matmul_sum` as one Mosaic GPU kernel for Hopper: a product whose contracted axis goes through several pairs of arrays.

    y = x0 w0^T + x1 w1^T + ...

Floor: 2 M N (K0 + K1 + ...) FLOPs; every x_i and w_i is read once, and y is written once. As products of their own that XLA
adds up, each is written to memory and read again, rounded to bfloat16: 4 M N bytes more per pair. For the gradient of the x
[16384, 2048] of a Gated DeltaNet layer, with weights of 2048, 2048, 4096, 4096, 32 and 32 columns, the addition takes 113
us on an H200, and the two thin products 25 us each; for Kimi Delta Attention ([16384, 2304]; three of 4096 columns, and
128, 128 and 32) 126 and 80 us.

Blocking: the main loop of pallas/gpu/gemm.py with tiles of [block_m, block_n] of y. The steps of a tile go through all
pairs in turn, 64 of a K at a time, so the sums stay in registers from the first pair to the last. The producer picks the
arrays of a step; consumers do not see where a pair ends. With a cluster, two thread blocks share the copies of the w_i.

Pairs whose K is no multiple of 64 are put side by side first, with zeros behind the last of them: a row of an array that is
copied to a swizzled tile must be whole 128 bytes. Two of 32 columns are one step then.

Numerics: one float32 sum over all pairs, in an order that is always the same; rounded once.

Limits: Hopper only. bfloat16 only. An M that is no multiple of 8 costs padded copies of every x_i, and an N that is none of
those of every w_i. No gradient kernels: the gradient of this op is XLA's products.

On an H200 these two gradients of x take 1,012 us (819 TFLOP/s) and 1,164 us (816 TFLOP/s) with the default config; other
tile widths, stages, clusters and bands take 1,016 to 1,144 and 1,172 to 1,522. The gradients of a Gated DeltaNet layer take
5.866 ms on the device where they took 6.028 with XLA's products and additions, those of Kimi Delta Attention 8.990 where
they took 9.120.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.matmul.sum.call import MatmulSumCall
from tilewright.ops.matmul.sum.config import MatmulSumSm90Forward
from tilewright.pallas.gpu.gemm import BAND, BLOCK_N, MEMORY_FIELDS, STAGES, Gemm
from tilewright.pallas.gpu.kernel import aligned, aligned_size, smem_bytes, whole, whole_shape
from tilewright.pallas.gpu.pipeline import OneOfSeveral, Pipeline
from tilewright.pallas.gpu.staging import WIDTH, Staging, staging_scratch, stored_columns
from tilewright.pallas.gpu.wgmma import not_bfloat16

_DEPTH = 64  # Of a K, per step: a row of a swizzled tile.
_CLUSTER = 2


def _unsupported_reason(call: MatmulSumCall, launch: Launch) -> str | None:
    if 0 in (*call.sizes, *call.depths):
        return f"M, N = {call.sizes} and K = {call.depths} must be 1 or more; use implementation='reference'"
    return not_bfloat16(call.x0, ("x0", "every other array"))


def _heuristic(chip: Chip, call: MatmulSumCall) -> MatmulSumSm90Forward:
    m, n = call.sizes
    block_m, block_n = 64 if m <= 64 else 128, min(BLOCK_N, -(-n // WIDTH) * WIDTH)
    return MatmulSumSm90Forward(block_n, STAGES, BAND, block_m=block_m, cluster=_CLUSTER)


def _steps(call: MatmulSumCall) -> list[int]:
    """The steps of each pair; those of thin ones are together, and last."""
    thin = sum(depth for depth in call.depths if depth % _DEPTH)
    return [depth // _DEPTH for depth in call.depths if depth % _DEPTH == 0] + ([pl.cdiv(thin, _DEPTH)] if thin else [])


def _operands(call: MatmulSumCall) -> list[tuple[jax.Array, jax.Array]]:
    """The pairs as the kernel reads them, in the order of `_steps`."""
    even = [pair for pair in call.pairs if pair[0].shape[1] % _DEPTH == 0]
    thin = [pair for pair in call.pairs if pair[0].shape[1] % _DEPTH]
    if thin:
        x, w = (jnp.concatenate(arrays, axis=1) for arrays in zip(*thin, strict=True))
        even.append((x, w))
    return [(aligned(x), aligned(w)) for x, w in even]


def _gemm(call: MatmulSumCall, launch: Launch) -> Gemm:
    (m, n), k = call.sizes, sum(_steps(call)) * _DEPTH
    options = {"block_k": _DEPTH, "b_transposed": True}
    return Gemm.of(launch.config, launch.chip, m=m, n=n, k=k, dtype=jnp.bfloat16, **options)


def _kernel(
    *,
    # outputs
    y_ref,  # [m, n]
    # scratch
    y_smem,  # [consumers, BUFFERS, rows, WIDTH]
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    steps: list[int],
    **refs,  # inputs: x0_ref [m, K0], w0_ref [n, K0] and so on
):
    bounds = list(itertools.pairwise([0, *itertools.accumulate(steps)]))

    def sources(step: Any, i: Any, j: Any) -> tuple[Any, list[Any]]:
        rows, columns = pl.ds(i * gemm.block_m, gemm.block_m), pl.ds(j * gemm.width, gemm.width)
        of_x, of_w = [], []
        for number, (first, end) in enumerate(bounds):
            is_taken = len(bounds) == 1 or (step >= first) & (step < end)
            depth = pl.ds((step - first) * gemm.block_k, gemm.block_k)
            of_x.append((is_taken, refs[f"x{number}_ref"].at[rows, depth]))
            of_w.append((is_taken, refs[f"w{number}_ref"].at[columns, depth]))
        return of_x, [of_w]

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        rows = pl.ds((i * gemm.consumers + consumer) * gemm.rows, gemm.rows)

        def finish(y: jax.Array) -> None:
            staging = Staging(y=y_smem.at[consumer])
            for start in stored_columns(gemm.width, gemm.n):
                columns = pl.ds(j * gemm.width + start, WIDTH)
                staging.store(y[:, start : start + WIDTH], y_ref.at[rows, columns], "y")
            staging.end()

        return finish

    gemm.main_loop(None, None, OneOfSeveral.of(pipeline), epilogue, sources=sources)


def _forward(call: MatmulSumCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    gemm, (m, n) = _gemm(call, launch), call.sizes
    rows, columns, depth = gemm.block_m, gemm.width, gemm.block_k
    inputs = {}
    for number, (x, w) in enumerate(_operands(call)):
        inputs |= {f"x{number}": whole(x, rows, depth), f"w{number}": whole(w, columns, depth)}
    shape = whole_shape(aligned_size(m, n, jnp.bfloat16), rows, columns)
    outputs = gemm.run(
        functools.partial(_kernel, gemm=gemm, steps=_steps(call)),
        name="matmul_sum",
        inputs=inputs,
        outputs={"y": jax.ShapeDtypeStruct(shape, jnp.bfloat16)},
        scratch=staging_scratch(gemm.consumers, gemm.rows, y=jnp.bfloat16),
    )
    return outputs["y"][:m, :n], None


def _memory(call: MatmulSumCall, launch: Launch) -> dict[str, int]:
    gemm = _gemm(call, launch)
    staged = staging_scratch(gemm.consumers, gemm.rows, y=jnp.bfloat16)
    return {"forward": smem_bytes({**staged, **gemm.scratch()})}


FORWARD = Pass(
    _forward,
    config=MatmulSumSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields=MEMORY_FIELDS,
)
