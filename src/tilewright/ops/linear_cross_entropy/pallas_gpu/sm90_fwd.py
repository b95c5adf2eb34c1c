"""The forward of linear cross entropy on Hopper, and what the backward shares with it.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, with or without a soft cap:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: forward 2 N H V FLOPs, x and w read once, 16 N bytes written. Backward 4 N H V FLOPs (dx, dw) with what the
forward stored, x and w read, dx and dw written once. Here: those FLOPs, and 2 N H V more for columns that were not stored.
Forward: x and w are read from memory about once per band of rows, and 12 bytes are written per row and tile of block_v
columns.

Blocking: the GEMM main loop (pallas/gpu/gemm.py) computes tiles of logits in registers. The epilogue reduces each row
of a tile to its max, its sum of exp(logit - max) and, where the tile has it, the label's logit. XLA joins these over
the tiles, always in the same order. The logits never leave the multiprocessor. Only tiles in which a row has its label,
or that reach past the end of the vocabulary, need comparisons and masks; `special_tiles` says which.

Stored exponentials: where a gradient is asked for, the epilogue also writes exp(logit - m) of the first `stored_v`
columns, 2 bytes each, with m the row's max in the tile. The backward then needs no logits. Per logit that is 4 bytes more
(2 written here, 2 read in the backward) for 2 H FLOPs less: 0.9 ps for 6.3 ps at H = 2,048 and the rates of an H200
(4.3 TB/s, 650 TFLOP/s), even at H = 300. H200, N8192 H2048 V151936, forward and backward: 23.6 ms; nothing stored, 31.8 ms.

Why not the gradients themselves: they need the row's sum over the whole vocabulary, and the cotangents. Blocks of rows,
each with its gradients taken in the forward, would serve only losses whose cotangents are known there (sums and means),
and dw would be a float32 sum over the blocks: 4 H V bytes that each block reads and writes, more memory than 2 N V where
N is less than 2 H.

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. N is padded to 128, H and V to 64; each costs a copy where it
is not whole. For V = 50,257 and H = 768 that is 77 MB of w, read and written.

Numerics: logits, statistics and accumulators in float32. The max is kept in units of log 2, so that the exponential of
a difference is a multiply-add and the hardware's power of 2, accurate to 2 units in the last place. The max and the sum
are saved for the backward rather than their logsumexp: at logits of 1,000 a float32 logsumexp is off by 6e-5, and
exp(logit - logsumexp) would be off by that factor. Exponentials are stored as square roots, in float16: these have 11
bits down to exp(-40) of the tile's max, where a bfloat16 exponential has 8. The gradients are rounded to bfloat16 from
them. The gradient of a label is the difference of two numbers that may be close, so it is computed from float32 alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.call import Static
from tilewright.core.chip import MIB, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropySm90Forward
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics, StoredExponentials
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.kernel import aligned_size, smem_bytes, whole_shape
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import LOG2_E, along_rows, column_indices, load_row_vector, store, tile_of_zeros
from tilewright.pallas.gpu.staging import WIDTH, Staging, staging_scratch
from tilewright.pallas.gpu.wgmma import not_bfloat16

# The heuristic's: the widest tile, and as many stages as fit beside it.
BLOCK_V, STAGES, BAND = 256, 4, 16
MEMORY_FIELDS = "a smaller block_v or stages"
# What a forward pass stores for the backward, at most: all of it for N8192 V151936 (2.3 GiB).
_STORED_BYTES = 2560 * MIB
STORED_DTYPE = jnp.bfloat16
"""The dtype of the array of stored exponentials, which are the bits of float16: the gradients go into the same memory."""
ROOT_OF_MAX = 2.0**15
"""What is stored for the largest logit of a row in a tile; float16 ends at 65,504."""

# Less than any logit; its products with log2(e) and its differences stay finite.
_MASKED = -1e37
# What a tile gives for each row: its max, the sum of exp(logit - max), and the label's logit, where the tile has it.
_HIGHEST, _TOTAL, _LABEL = range(3)
_STATISTICS = 3
_LOG2_ROOT = 15.0  # log2(ROOT_OF_MAX)


def unsupported_reason(call: LinearCrossEntropyCall, launch: Launch) -> str | None:
    return not_bfloat16(call.x, ("x", "w"))


def logits_gemm(call: LinearCrossEntropyCall, launch: Launch, columns: int) -> Gemm:
    """The product x w for `columns` columns of the vocabulary."""
    (n, h), config = call.x.shape, launch.config
    return Gemm(
        chip=launch.chip,
        m=n,
        n=columns,
        k=h,
        dtype=call.x.dtype,
        block_n=config.block_v,
        stages=config.stages,
        band=config.band,
        cluster=config.cluster,
        consumer_registers=config.consumer_registers,
        producer_registers=config.producer_registers,
    )


def special_tiles(labels: jax.Array, v: int, rows: int, block_v: int) -> jax.Array:
    """Which tiles [rows, block_v] need comparisons or masks: int32 [N / rows, num_v], for N a multiple of rows.

    Those in which a row has its label, and those that reach past the end of the vocabulary.
    """
    num_v = pl.cdiv(v, block_v)
    blocks = jnp.arange(labels.shape[0], dtype=jnp.int32) // rows
    special = jnp.zeros((labels.shape[0] // rows, num_v), jnp.int32)
    if v % block_v:
        special = special.at[:, -1].set(1)
    return special.at[blocks, labels // block_v].set(1)


def capped(products: jax.Array, soft_cap: float | None) -> tuple[jax.Array, float, jax.Array | None]:
    """The logits; the factor to units of log 2, for the multiply-add with the max; and tanh, or None."""
    if soft_cap is None:
        return products, LOG2_E, None
    # tanh from an exponential: the hardware's own is accurate to 11 bits only.
    grown = jnp.exp2(products * (2 * LOG2_E / soft_cap))
    tanh = 1.0 - 2.0 / (1.0 + grown)
    return tanh * (soft_cap * LOG2_E), 1.0, tanh


def _forward_kernel(
    *,
    # inputs
    x_ref,  # [N, H]
    w_ref,  # [H, V]
    labels_ref,  # [N]
    special_ref,  # [N / rows, num_v]
    # outputs
    statistics_ref,  # [num_v, _STATISTICS, N]
    roots_ref,  # [N, W], or None
    # scratch
    roots_smem,  # [consumers, BUFFERS, rows, WIDTH], or None
    pipeline: Pipeline,  # the GEMM's
    # static
    gemm: Gemm,
    call: LinearCrossEntropyCall,
):
    shape, v = (gemm.rows, gemm.block_n), call.w.shape[1]

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        block = i * gemm.consumers + consumer
        rows = pl.ds(block * gemm.rows, gemm.rows)
        special = special_ref[block, j]

        def write(which: int, values: jax.Array) -> None:
            store(statistics_ref.at[j, which, rows], values)

        def reduce(products: jax.Array, *, masked: bool) -> None:
            logits, factor, _ = capped(products, call.soft_cap)
            if masked:
                column = column_indices(shape, j * gemm.block_n)
                is_label = column == along_rows(load_row_vector(labels_ref.at[rows]), shape)
                write(_LABEL, jnp.sum(jnp.where(is_label, logits, 0.0), axis=1) * factor)
                logits = jnp.where(column < v, logits, _MASKED)
            highest = jnp.max(logits, axis=1) * factor
            write(_HIGHEST, highest)
            if roots_ref is None:
                write(_TOTAL, jnp.sum(jnp.exp2(logits * factor - along_rows(highest, shape)), axis=1))
            else:
                write(_TOTAL, store_roots(logits, factor, highest, masked=masked))

        def store_roots(logits: jax.Array, factor: float, highest: jax.Array, *, masked: bool) -> jax.Array:
            """Stores a tile of square roots, and returns the sums of their squares."""
            part_shape, stored_v = (gemm.rows, WIDTH), roots_ref.shape[1]
            # Tiles past the last stored column; of the vocabulary's last tile, parts past its end.
            past_end = stored_v < v or (masked and stored_v % gemm.block_n != 0)
            offset = along_rows(highest * 0.5 - _LOG2_ROOT, part_shape)
            staging, squares = Staging(roots=roots_smem.at[consumer]), tile_of_zeros(part_shape)
            for start in range(0, gemm.block_n, WIDTH):
                part = logits[:, start : start + WIDTH]
                root = jnp.exp2(part * (0.5 * factor) - offset)
                squares = squares + root * root
                if call.soft_cap is not None:
                    tanh = part * (factor / (LOG2_E * call.soft_cap))
                    # Masked columns have no slope.
                    root = root * jnp.sqrt(jnp.maximum(1.0 - tanh * tanh, 0.0))
                first = j * gemm.block_n + start

                def store_part(root: jax.Array = root, first: Any = first) -> None:
                    bits = jax.lax.bitcast_convert_type(root.astype(jnp.float16), STORED_DTYPE)
                    staging.store(bits, roots_ref.at[rows, pl.ds(first, WIDTH)], "roots")

                if past_end:
                    pl.when(first < stored_v)(store_part)
                else:
                    store_part()
            staging.end()
            if past_end:
                # As many parts may have been left out, so the next tile may begin with the buffer of the last copy.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return jnp.sum(squares, axis=1) * (1.0 / ROOT_OF_MAX**2)

        def finish(products: jax.Array) -> None:
            pl.when(special == 0)(lambda: reduce(products, masked=False))
            pl.when(special != 0)(lambda: reduce(products, masked=True))

        return finish

    gemm.main_loop(x_ref, w_ref, pipeline, epilogue)


def _scratch(gemm: Gemm, stored_v: int) -> dict[str, Any]:
    return staging_scratch(gemm.consumers, gemm.rows, roots=STORED_DTYPE if stored_v else None)


def _memory(call: LinearCrossEntropyCall, launch: Launch) -> dict[str, int]:
    gemm = logits_gemm(call, launch, call.w.shape[1])
    return {"forward": smem_bytes({**_scratch(gemm, launch.config.stored_v), **gemm.scratch()}, reductions=True)}


def _stored_columns(v: int, config: LinearCrossEntropySm90Forward) -> int:
    """The columns of the array of stored exponentials for a vocabulary of `v`."""
    return min(aligned_size(1, v, STORED_DTYPE)[1], config.stored_v)


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves what the backward computes probabilities from: max (in units of log 2) and sum exp(logit - max)."""
    n, v = call.x.shape[0], call.w.shape[1]
    config: LinearCrossEntropySm90Forward = launch.config
    gemm = logits_gemm(call, launch, v)
    labels = padded(call.labels, 0, gemm.block_m)
    x, w = gemm.pad(call.x, call.w)
    shape = (gemm.tiles.columns, _STATISTICS, x.shape[0])
    stored_v = _stored_columns(v, config) if save and call.whole_v is None else 0
    roots_shape = whole_shape((aligned_size(n, stored_v, STORED_DTYPE)[0], stored_v), gemm.block_m, WIDTH)
    results = gemm.run(
        functools.partial(_forward_kernel, gemm=gemm, call=call),
        name="linear_cross_entropy_forward",
        inputs={"x": x, "w": w, "labels": labels, "special": special_tiles(labels, v, gemm.rows, gemm.block_n)},
        outputs={
            "statistics": jax.ShapeDtypeStruct(shape, jnp.float32),
            "roots": jax.ShapeDtypeStruct(roots_shape, STORED_DTYPE) if stored_v else None,
        },
        scratch=_scratch(gemm, stored_v),
    )
    statistics = results["statistics"][:, :, :n]
    highest = jnp.max(statistics[:, _HIGHEST], axis=0)  # [N]
    total = jnp.sum(statistics[:, _TOTAL] * jnp.exp2(statistics[:, _HIGHEST] - highest[None]), axis=0)  # [N]
    # Tiles without a row's label leave this undefined, so only the label's tile is read.
    label_logit = statistics[labels[:n] // gemm.block_n, _LABEL, jnp.arange(n, dtype=jnp.int32)]  # [N]
    log_total = jnp.log(total)
    stored = None
    if stored_v:
        of_blocks = statistics[: pl.cdiv(stored_v, gemm.block_n), _HIGHEST].T  # [N, blocks]
        stored = StoredExponentials(results["roots"][:n], of_blocks, label_logit, Static(gemm.block_n))
    elif save and call.whole_v is not None and config.stored_v:
        # The backward of a part does not read these, so they are made only where it is compiled by itself.
        whole_v = _stored_columns(call.whole_v, config)
        roots = jnp.zeros((n, whole_v), STORED_DTYPE)
        of_blocks = jnp.zeros((n, pl.cdiv(whole_v, gemm.block_n)), jnp.float32)
        stored = StoredExponentials(roots, of_blocks, jnp.zeros((n,), jnp.float32), Static(gemm.block_n))
    outputs = (highest - label_logit) / LOG2_E + log_total, highest / LOG2_E + log_total
    return outputs, RowStatistics(highest, total, Static(LOG2_E), stored)


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropySm90Forward:
    n, v = call.x.shape[0], call.w.shape[1]
    most = _STORED_BYTES // (n * BLOCK_V * jnp.dtype(STORED_DTYPE).itemsize)
    return LinearCrossEntropySm90Forward(BLOCK_V, STAGES, BAND, stored_v=min(most, pl.cdiv(v, BLOCK_V)) * BLOCK_V)


FORWARD = Pass(
    _forward,
    saved="*tokens",
    config=LinearCrossEntropySm90Forward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=_memory,
    memory_fields=MEMORY_FIELDS,
)
