"""The forward of linear cross entropy on Hopper, and what the backward shares with it.

For rows n and vocabulary v, a_nv = sum_h x_nh w_hv, with or without a soft cap:

    logsumexp_n = log sum_v exp(a_nv)        nll_n = logsumexp_n - a_n[label_n]

Floor: forward 2 N H V FLOPs, x and w read once, 16 N bytes written. Backward 6 N H V FLOPs (the logits recomputed, dx,
dw), x and w read, dx and dw written once. Here: those FLOPs. Forward: x and w are read from memory about once per band
of rows, and 12 bytes are written per row and tile of block_v columns.

Blocking: the GEMM main loop (pallas/gpu/gemm.py) computes tiles of logits in registers. The epilogue reduces each row
of a tile to its max, its sum of exp(logit - max) and, where the tile has it, the label's logit. XLA joins these over
the tiles, always in the same order. The logits never leave the multiprocessor. Only tiles in which a row has its label,
or that reach past the end of the vocabulary, need comparisons and masks; `special_tiles` says which.

Limits: Hopper only (wgmma, bulk copies). bfloat16 only. N is padded to 128, H and V to 64; each costs a copy where it
is not whole. For V = 50,257 and H = 768 that is 77 MB of w, read and written.

Numerics: logits, statistics and accumulators in float32. The max is kept in units of log 2, so that the exponential of
a difference is a multiply-add and the hardware's power of 2, accurate to 2 units in the last place. The max and the sum
are saved for the backward rather than their logsumexp: at logits of 1,000 a float32 logsumexp is off by 6e-5, and
exp(logit - logsumexp) would be off by that factor.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.call import Static
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropySm90Forward
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.kernel import smem_bytes
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import LOG2_E, along_rows, column_indices, load_row_vector
from tilewright.pallas.gpu.wgmma import not_bfloat16

# The heuristic's: the widest tile, and as many stages as fit beside it.
BLOCK_V, STAGES, BAND = 256, 4, 16
MEMORY_FIELDS = "a smaller block_v or stages"

# Less than any logit; its products with log2(e) and its differences stay finite.
_MASKED = -1e37
# What a tile gives for each row: its max, the sum of exp(logit - max), and the label's logit, where the tile has it.
_HIGHEST, _TOTAL, _LABEL = range(3)
_STATISTICS = 3


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
    # scratch
    statistics_smem,  # [consumers, _STATISTICS, rows]
    pipeline: Pipeline,  # the GEMM's
    # static
    gemm: Gemm,
    call: LinearCrossEntropyCall,
):
    shape = (gemm.rows, gemm.block_n)

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        block = i * gemm.consumers + consumer
        rows = pl.ds(block * gemm.rows, gemm.rows)
        special = special_ref[block, j]
        staged = statistics_smem.at[consumer]

        def reduce(products: jax.Array, *, masked: bool) -> None:
            logits, factor, _ = capped(products, call.soft_cap)
            if masked:
                column = column_indices(shape, j * gemm.block_n)
                is_label = column == along_rows(load_row_vector(labels_ref.at[rows]), shape)
                staged[_LABEL] = jnp.sum(jnp.where(is_label, logits, 0.0), axis=1) * factor
                logits = jnp.where(column < call.w.shape[1], logits, _MASKED)
            highest = jnp.max(logits, axis=1) * factor
            staged[_HIGHEST] = highest
            staged[_TOTAL] = jnp.sum(jnp.exp2(logits * factor - along_rows(highest, shape)), axis=1)

        def finish(products: jax.Array) -> None:
            # The copies of the previous tile have read the staging buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(special == 0)(lambda: reduce(products, masked=False))
            pl.when(special != 0)(lambda: reduce(products, masked=True))
            plgpu.commit_smem()
            for n in range(_STATISTICS):
                plgpu.copy_smem_to_gmem(staged.at[n], statistics_ref.at[j, n, rows])

        return finish

    gemm.main_loop(x_ref, w_ref, pipeline, epilogue)


def _scratch(gemm: Gemm) -> dict[str, Any]:
    return {"statistics_smem": plgpu.SMEM((gemm.consumers, _STATISTICS, gemm.rows), jnp.float32)}


def _memory(call: LinearCrossEntropyCall, launch: Launch) -> dict[str, int]:
    gemm = logits_gemm(call, launch, call.w.shape[1])
    return {"forward": smem_bytes({**_scratch(gemm), **gemm.scratch()}, reductions=True)}


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves what the backward computes probabilities from: max (in units of log 2) and sum exp(logit - max)."""
    n, v = call.x.shape[0], call.w.shape[1]
    gemm = logits_gemm(call, launch, v)
    labels = padded(call.labels, 0, gemm.block_m)
    x, w = gemm.pad(call.x, call.w)
    shape = (gemm.tiles.columns, _STATISTICS, x.shape[0])
    statistics = gemm.run(
        functools.partial(_forward_kernel, gemm=gemm, call=call),
        name="linear_cross_entropy_forward",
        inputs={"x": x, "w": w, "labels": labels, "special": special_tiles(labels, v, gemm.rows, gemm.block_n)},
        outputs={"statistics": jax.ShapeDtypeStruct(shape, jnp.float32)},
        scratch=_scratch(gemm),
    )["statistics"][:, :, :n]
    highest = jnp.max(statistics[:, _HIGHEST], axis=0)  # [N]
    total = jnp.sum(statistics[:, _TOTAL] * jnp.exp2(statistics[:, _HIGHEST] - highest[None]), axis=0)  # [N]
    # Tiles without a row's label leave this undefined, so only the label's tile is read.
    label_logit = statistics[labels[:n] // gemm.block_n, _LABEL, jnp.arange(n, dtype=jnp.int32)]  # [N]
    log_total = jnp.log(total)
    return ((highest - label_logit) / LOG2_E + log_total, highest / LOG2_E + log_total), RowStatistics(
        highest, total, Static(LOG2_E)
    )


def _heuristic(chip: Chip, call: LinearCrossEntropyCall) -> LinearCrossEntropySm90Forward:
    return LinearCrossEntropySm90Forward(BLOCK_V, STAGES, BAND)


FORWARD = Pass(
    _forward,
    saved="*tokens",
    config=LinearCrossEntropySm90Forward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=_memory,
    memory_fields=MEMORY_FIELDS,
)
