"""The backward of linear cross entropy on Hopper: two products with what the forward stored, three without.

    g_nv = (d_nll_n + d_logsumexp_n) p_nv - d_nll_n [v = label_n], times the slope of the soft cap
    p_nv = exp(a_nv) / sum        dx = g w^T        dw = x^T g

Columns whose exponentials the forward stored (`StoredExponentials`): a kernel overwrites them with g in bfloat16, and two
of XLA's matrix products compute dx and dw from it: 4 N H V FLOPs, and 4 bytes per logit read and written before them. H200,
N8192 H2048 V151936: 1.27 ms for that kernel (3.9 TB/s), 6.6 ms for dx, 6.5 ms for dw.

All other columns, one chunk at a time: a kernel recomputes a chunk's logits (as sm90_fwd.py) and writes their gradients,
[N, chunk_v] in bfloat16. From these, XLA's own matrix products compute the chunk's columns of dw, which are then complete,
and a term of dx, in float32: 6 N H V FLOPs.

Why a kernel of its own overwrites the exponentials: XLA gives the result of such a pass a second array, since it does not
reuse one of several outputs of a kernel; in a loop over parts it does, but copies each part first.

Why the gradients of a chunk are in memory: a kernel that kept them on the multiprocessor would need the logits twice, once
for dx and once for dw, or would accumulate one of the two through memory: 8 N H V FLOPs instead of 6, a quarter of the
total time. Writing the chunk and reading it twice moves 6 bytes per element, which costs 6 H FLOPs: at H = 2,048 and
the rates of an H200, 8 % of the time of its products, and hidden behind them except for the writes.

Memory beyond inputs and gradients: dx in float32 (4 N H bytes); what was stored, 2 N stored_v bytes; for other columns
2 N chunk_v bytes, and a chunk's columns of w and of dw.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    ROOT_OF_MAX,
    STAGES,
    capped,
    logits_gemm,
    special_tiles,
    unsupported_reason,
)
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics
from tilewright.pallas.arrays import dot_f32, padded
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.kernel import run_in_place, smem_bytes, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import LOG2_E, along_rows, column_indices, few_rows, load_row_vector, store

# What the kernel reads of a row: its max, (d_nll + d_logsumexp) / total, and d_nll.
_HIGHEST, _FACTOR, _LABEL_FACTOR = range(3)
# A tile is written in parts of this many columns, a row of a swizzled buffer, through two buffers per consumer.
_WIDTH = 64
_BUFFERS = 2

# The gradients of a chunk of logits. It bounds the temporary memory: in total under 1 GiB for N8192 H4096.
_CHUNK_BYTES = 320 * MIB
# Block columns that fill 132 multiprocessors evenly, in the kernel (64 block rows) and in dw (H=2048: 16 blocks).
_FULL_WAVE = 33
# The kernel that overwrites exponentials with gradients: rows and columns of a tile, elements that a thread loads at a
# time, threads of a warpgroup, and thread blocks per row of tiles. Several of these share a multiprocessor.
_ROWS, _COLUMNS, _VECTOR, _THREADS, _PARTS = 64, 128, 8, 128, 16


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


def _overwrite_kernel(
    *,
    # inputs
    state_ref,  # [N, W], the stored exponentials
    scale_ref,  # [blocks, N]
    labels_ref,  # [N]
    of_label_ref,  # [N]: the gradient of the label's logit
    # outputs
    new_state_ref,  # [N, W], the gradients: the memory of state_ref
    # static
    width: int,
    block_v: int,
):
    shape, layout = (_ROWS, width), few_rows(_THREADS * _VECTOR // width, width // _VECTOR, _VECTOR)
    rows, part = pl.ds(lax.axis_index("row") * _ROWS, _ROWS), lax.axis_index("part")
    tiles, parts = state_ref.shape[1] // width, lax.axis_size("part")

    def load(ref: Any) -> jax.Array:
        """A number per row of the tile, along its columns."""
        vector = plgpu.load(ref.at[rows], layout=layout.reduce(1), optimized=False)
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [0]), layout)

    label, of_label = load(labels_ref), load(of_label_ref)

    def one_tile(done: Any, carry: tuple[()]) -> tuple[()]:
        first = (part + done * parts) * width
        at = (rows, pl.ds(first, width))
        bits = plgpu.load(state_ref.at[at], layout=layout, optimized=False)
        scale = load(scale_ref.at[lax.div(first, jnp.int32(block_v))])
        root = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * (1.0 / ROOT_OF_MAX)
        column = first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
        gradient = jnp.where(column == label, of_label, root * root * scale)
        store(new_state_ref.at[at], gradient.astype(new_state_ref.dtype))
        return carry

    lax.fori_loop(0, lax.div(tiles - 1 - part, jnp.int32(parts)) + 1, one_tile, ())


def _gradients_of_stored(
    call: LinearCrossEntropyCall, saved: RowStatistics, factor: jax.Array, label_factor: jax.Array, columns: int
) -> jax.Array:
    """The gradients of the first `columns` logits, from their stored exponentials: bfloat16, rows as they are padded."""
    stored = saved.stored
    assert stored is not None
    block_v = stored.block_v.value
    # A label's gradient is a difference, so its exponential is not taken from what was rounded.
    of_label = factor * jnp.exp2(stored.label_logit - saved.highest) - label_factor  # [N]
    if call.soft_cap is not None:
        of_label = of_label * (1.0 - jnp.square(stored.label_logit * (1.0 / (LOG2_E * call.soft_cap))))
    scale = (factor[:, None] * jnp.exp2(stored.highest - saved.highest[:, None])).T  # [blocks, N]
    roots = padded(stored.roots[:, :columns], 0, Gemm.block_m)
    width = math.gcd(_COLUMNS, block_v, columns)
    _, gradients = run_in_place(
        functools.partial(_overwrite_kernel, width=width, block_v=block_v),
        name="linear_cross_entropy_gradients",
        state=roots,
        inputs={
            "scale": padded(scale, 1, Gemm.block_m),
            "labels": padded(call.labels, 0, Gemm.block_m),
            "of_label": padded(of_label, 0, Gemm.block_m),
        },
        outputs={},
        grid={"row": roots.shape[0] // _ROWS, "part": min(_PARTS, columns // width)},
    )
    return gradients


def _backward(
    call: LinearCrossEntropyCall, saved: RowStatistics, cotangents: Any, launch: Launch
) -> LinearCrossEntropyCall:
    d_nll, d_logsumexp = cotangents
    (n, h), v = call.x.shape, call.w.shape[1]
    config: LinearCrossEntropySm90Backward = launch.config
    whole = logits_gemm(call, launch, v)
    x, w = whole.pad(call.x, call.w)
    factor = (d_nll + d_logsumexp) / saved.total  # [N]
    # A part of a call that the compiler cut has nothing of its own there.
    columns = 0 if saved.stored is None or call.whole_v is not None else saved.stored.roots.shape[1]
    if columns < w.shape[1]:
        columns -= columns % config.block_v
    gradients = _gradients_of_stored(call, saved, factor, d_nll, columns) if columns else None  # [N, columns]
    if gradients is not None and columns == w.shape[1]:
        # dw has as many tiles as fill the GPU, so no product is cut along N: it is rounded once.
        dw = lax.dot_general(x, gradients, (((0,), (0,)), ((), ())), preferred_element_type=w.dtype)  # [H, V]
        return call.gradients(x=dot_f32(gradients, w, (1, 1))[:n, :h], w=dw[:h, :v])

    labels = padded(call.labels, 0, whole.block_m)
    special = special_tiles(labels, v, whole.rows, whole.block_n)
    # Padded rows have a factor of 0.
    factors = padded(jnp.stack([saved.highest, factor, d_nll]), 1, whole.block_m)  # [3, N]

    def add_products(
        gradients: jax.Array, start: Any, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        dx, dw = sums  # [N, H] float32, [H, V]
        w_chunk = lax.dynamic_slice_in_dim(w, start, gradients.shape[1], axis=1)  # [H, width]
        dw_chunk = dot_f32(x, gradients, (0, 0)).astype(x.dtype)  # [H, width]
        dw = lax.dynamic_update_slice_in_dim(dw, dw_chunk, start, axis=1)
        return dx + dot_f32(gradients, w_chunk, (1, 1)), dw

    def add_chunk(first_block: Any, width: int, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
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
        return add_products(gradients, first_block * config.block_v, sums)

    # A loop: each chunk's gradients reuse the memory of the last ones, and at most two kernels are compiled.
    sums = (jnp.zeros(x.shape, jnp.float32), jnp.zeros(w.shape, w.dtype))
    if gradients is not None:
        sums = add_products(gradients, 0, sums)
    chunks, rest = divmod(w.shape[1] - columns, config.chunk_v)
    first, blocks = jnp.int32(columns // config.block_v), jnp.int32(config.chunk_v // config.block_v)
    if chunks:
        sums = lax.fori_loop(0, chunks, lambda n, sums: add_chunk(first + n * blocks, config.chunk_v, sums), sums)
    if rest:
        sums = add_chunk(first + chunks * blocks, rest, sums)
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
