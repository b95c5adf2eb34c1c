"""The backward of linear cross entropy on Hopper: one chunk of the vocabulary at a time, in three products.

    g_nv = (d_nll_n + d_logsumexp_n) p_nv - d_nll_n [v = label_n], times the slope of the soft cap
    p_nv = exp(a_nv) / sum        dx = g w^T        dw = x^T g

A kernel recomputes a chunk's logits (as sm90_fwd.py) and writes their gradients, [N, chunk_v] in bfloat16. From these,
XLA's own matrix products compute the chunk's columns of dw, which are then complete, and a term of dx, in float32.

Why the gradients of a chunk are stored: a kernel that kept them on the multiprocessor would need the logits twice, once
for dx and once for dw, or would accumulate one of the two through memory: 8 N H V FLOPs instead of 6, a quarter of the
total time. Writing the chunk and reading it twice moves 6 bytes per element, which costs 6 H FLOPs: at H = 2,048 and
the rates of an H200, 8 % of the time of its products, and hidden behind them except for the writes.

Memory beyond inputs and gradients: 2 N chunk_v bytes, a chunk's columns of w and of dw, and dx in float32 (4 N H
bytes).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import MIB, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropySm90Backward
from tilewright.ops.linear_cross_entropy.pallas_gpu.sm90_fwd import (
    BAND,
    BLOCK_V,
    MEMORY_FIELDS,
    STAGES,
    capped,
    logits_gemm,
    special_tiles,
    unsupported_reason,
)
from tilewright.pallas.arrays import dot_f32, padded
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.kernel import smem_bytes, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import along_rows, column_indices, load_row_vector

# What the kernel reads of a row: its max, (d_nll + d_logsumexp) / total, and d_nll.
_HIGHEST, _FACTOR, _LABEL_FACTOR = range(3)
# A tile is written in parts of this many columns, a row of a swizzled buffer, through two buffers per consumer.
_WIDTH = 64
_BUFFERS = 2

# The gradients of a chunk of logits. It bounds the temporary memory: in total under 1 GiB for N8192 H4096.
_CHUNK_BYTES = 320 * MIB
# Block columns that fill 132 multiprocessors evenly, in the kernel (64 block rows) and in dw (H=2048: 16 blocks).
_FULL_WAVE = 33


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropySm90Backward:
    """The tile of the forward, and chunks that fill the GPU with at most 320 MiB of gradients."""
    n, v = call.x.shape[0], call.w.shape[1]
    rows, blocks = pl.cdiv(n, Gemm.block_m) * Gemm.block_m, pl.cdiv(v, BLOCK_V)
    most = max(1, _CHUNK_BYTES // (rows * BLOCK_V * jnp.dtype(jnp.bfloat16).itemsize))
    if _FULL_WAVE < most < blocks:
        most -= most % _FULL_WAVE
    return LinearCrossEntropySm90Backward(BLOCK_V, STAGES, BAND, min(most, blocks) * BLOCK_V)


def _gradient_kernel(
    *,
    # inputs
    x_ref,  # [N, H]
    w_ref,  # [H, V]
    labels_ref,  # [N]
    special_ref,  # [N / rows, V / block_v]
    factors_ref,  # [3, N]
    first_block_ref,  # [1]: the chunk's first block column
    # outputs
    gradients_ref,  # [N, chunk_v]
    # scratch
    staged_smem,  # [consumers, _BUFFERS, rows, _WIDTH]
    pipeline: Pipeline,  # the GEMM's
    # static
    gemm: Gemm,
    call: LinearCrossEntropyCall,
):
    shape = (gemm.rows, _WIDTH)
    block_v, width = gemm.block_n, gradients_ref.shape[1]
    first_block = first_block_ref[0]

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        block = i * gemm.consumers + consumer
        rows = pl.ds(block * gemm.rows, gemm.rows)
        special = special_ref[block, first_block + j]
        highest, factor = (load_row_vector(factors_ref.at[which, rows]) for which in (_HIGHEST, _FACTOR))

        def differentiate(products: jax.Array, *, masked: bool) -> None:
            label: Any = None
            label_factor: Any = None
            if masked:
                label, label_factor = (
                    along_rows(load_row_vector(ref), shape)
                    for ref in (labels_ref.at[rows], factors_ref.at[_LABEL_FACTOR, rows])
                )
            parts = block_v // _WIDTH
            # A chunk has whole parts, not whole blocks; the last block of the vocabulary is special if it is not whole.
            ragged = masked and width % block_v != 0
            for part in range(parts):

                def one_part(part: int = part) -> None:
                    columns = slice(part * _WIDTH, (part + 1) * _WIDTH)
                    logits, per_nat, tanh = capped(products[:, columns], call.soft_cap)
                    gradient = along_rows(factor, shape) * jnp.exp2(logits * per_nat - along_rows(highest, shape))
                    if masked:
                        column = column_indices(shape, (first_block + j) * block_v + part * _WIDTH)
                        gradient = gradient - jnp.where(column == label, label_factor, 0.0)
                        # Past the end a logit is 0, which may be far above the max.
                        gradient = jnp.where(column < call.w.shape[1], gradient, 0.0)
                    if tanh is not None:
                        gradient = gradient * (1.0 - tanh * tanh)
                    staged = staged_smem.at[consumer, part % _BUFFERS]
                    # The copy of the part before the previous one has read this buffer.
                    plgpu.wait_smem_to_gmem(_BUFFERS - 1, wait_read_only=True)
                    staged[...] = gradient.astype(gradients_ref.dtype)
                    plgpu.commit_smem()
                    at = pl.ds(j * block_v + part * _WIDTH, _WIDTH)
                    plgpu.copy_smem_to_gmem(staged, gradients_ref.at[rows, at])

                if ragged:
                    pl.when(j * block_v + part * _WIDTH < width)(one_part)
                else:
                    one_part()
            if ragged or parts % _BUFFERS:
                # The next tile begins with the buffer that this one may have ended with.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def finish(products: jax.Array) -> None:
            pl.when(special == 0)(lambda: differentiate(products, masked=False))
            pl.when(special != 0)(lambda: differentiate(products, masked=True))

        return finish

    gemm.main_loop(x_ref, w_ref, pipeline, epilogue, first_column=first_block * block_v)


def _scratch(gemm: Gemm) -> dict[str, Any]:
    return {"staged_smem": tile(gemm.consumers, _BUFFERS, gemm.rows, _WIDTH, dtype=gemm.dtype)}


def _memory(call: LinearCrossEntropyCall, launch: Launch) -> dict[str, int]:
    gemm = logits_gemm(call, launch, launch.config.chunk_v)
    return {"backward": smem_bytes({**_scratch(gemm), **gemm.scratch()})}


def _backward(call: LinearCrossEntropyCall, saved: Any, cotangents: Any, launch: Launch) -> LinearCrossEntropyCall:
    (highest, total, _), (d_nll, d_logsumexp) = saved, cotangents
    (n, h), v = call.x.shape, call.w.shape[1]
    config: LinearCrossEntropySm90Backward = launch.config
    whole = logits_gemm(call, launch, v)
    labels = padded(call.labels, 0, whole.block_m)
    special = special_tiles(labels, v, whole.rows, whole.block_n)
    # Padded rows have a factor of 0.
    factors = padded(jnp.stack([highest, (d_nll + d_logsumexp) / total, d_nll]), 1, whole.block_m)  # [3, N]
    x, w = whole.pad(call.x, call.w)

    def add_chunk(first_block: Any, width: int, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dx, dw = sums  # [N, H] float32, [H, V]
        gemm = logits_gemm(call, launch, width)
        gradients = gemm.run(
            functools.partial(_gradient_kernel, gemm=gemm, call=call),
            name="linear_cross_entropy_backward",
            inputs={
                "x": x,
                "w": w,
                "labels": labels,
                "special": special,
                "factors": factors,
                "first_block": jnp.reshape(first_block, (1,)),
            },
            outputs={"gradients": jax.ShapeDtypeStruct((x.shape[0], width), x.dtype)},
            scratch=_scratch(gemm),
        )["gradients"]  # [N, width]
        start = first_block * config.block_v
        w_chunk = jax.lax.dynamic_slice_in_dim(w, start, width, axis=1)  # [H, width]
        dw_chunk = dot_f32(x, gradients, (0, 0)).astype(x.dtype)  # [H, width]
        dw = jax.lax.dynamic_update_slice_in_dim(dw, dw_chunk, start, axis=1)
        return dx + dot_f32(gradients, w_chunk, (1, 1)), dw

    # A loop: each chunk's gradients reuse the memory of the last ones, and at most two kernels are compiled.
    sums = (jnp.zeros(x.shape, jnp.float32), jnp.zeros(w.shape, w.dtype))
    chunks, rest = divmod(w.shape[1], config.chunk_v)
    blocks = jnp.int32(config.chunk_v // config.block_v)
    if chunks:
        sums = jax.lax.fori_loop(0, chunks, lambda n, sums: add_chunk(n * blocks, config.chunk_v, sums), sums)
    if rest:
        sums = add_chunk(chunks * blocks, rest, sums)
    dx, dw = sums
    return call.gradients(x=dx[:n, :h], w=dw[:h, :v])


BACKWARD = Pass(
    _backward,
    config=LinearCrossEntropySm90Backward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=_memory,
    memory_fields=MEMORY_FIELDS,
)
