"""`matmul` of few bfloat16 rows on Hopper, as decoding has them: one of two kernels, and what follows it.

    z = x w        y = activation(z + bias) + residual

Where the tiles of w keep the memory busy, sm90_whole_depth.py computes activation(z + bias) in one kernel. Otherwise the
contracted axis is split (pallas/gpu/few_rows.py): that kernel leaves a float32 sum per split, and XLA adds them up in order
and applies what follows in the same pass.
"""

from typing import Any

import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulSm90Forward
from tilewright.ops.matmul.pallas_gpu.sm90_whole_depth import WholeDepth
from tilewright.pallas.gpu.few_rows import TILE_COLUMNS, TILE_ROWS, FewRows, chosen_tiles
from tilewright.pallas.gpu.gemm import BAND, BLOCK_N
from tilewright.pallas.gpu.tile_config import registers_of

# The share of the multiprocessors that takes all of the memory's bandwidth: 64 bytes per clock are about 110 GB/s for each,
# and an H200 with 132 of them has 4.8 TB/s. An estimate, not a measurement.
_ENOUGH = 0.4


def takes(call: MatmulCall, config: MatmulSm90Forward) -> bool:
    """Whether this kernel computes a call with a config."""
    return call.w_scales is None and config.block_m in TILE_ROWS


def heuristic(chip: Chip, call: MatmulCall) -> MatmulSm90Forward | None:
    """The config for a call of few rows; None for others."""
    m, k, n = call.sizes
    if call.w_scales is not None or m > TILE_ROWS[-1]:
        return None
    rows, stages, splits = chosen_tiles(chip, m, k, call.parts * n)
    if call.activation is not None and _keeps_memory_busy(chip, call):
        splits = 1
    return MatmulSm90Forward(BLOCK_N, stages, BAND, block_m=rows, splits=splits)


def _keeps_memory_busy(chip: Chip, call: MatmulCall) -> bool:
    """Whether thread blocks with a whole tile of w each read it at the speed of the memory, the last ones too."""
    multiprocessors = chip.multiprocessors or 1
    last = -(-call.parts * call.sizes[2] // TILE_COLUMNS) % multiprocessors
    return last == 0 or last >= _ENOUGH * multiprocessors


def _whole_depth(call: MatmulCall, launch: Launch) -> WholeDepth:
    (m, k, n), config = call.sizes, launch.config
    return WholeDepth(chip=launch.chip, m=m, k=k, n=n, parts=call.parts, rows=config.block_m, stages=config.stages)


def _products(call: MatmulCall, launch: Launch) -> FewRows:
    (m, k, n), config = call.sizes, launch.config
    consumer, producer = registers_of(config)
    return FewRows(
        chip=launch.chip,
        m=m,
        k=k,
        columns=(call.parts * n,),
        rows=config.block_m,
        stages=config.stages,
        splits=config.splits,
        consumer_registers=consumer,
        producer_registers=producer,
    )


def memory(call: MatmulCall, launch: Launch) -> int:
    return max(_whole_depth(call, launch).memory, _products(call, launch).memory)


def forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    m, k, n = call.sizes
    if launch.config.splits == 1 and not (save and call.activation is not None):
        dtype = call.out_dtype if call.residual is None else jnp.float32
        options = {"activation": call.activation, "out_dtype": dtype, "name": "matmul_whole_depth"}
        y = _whole_depth(call, launch).run(call.x, call.w, call.bias, **options)
        if call.residual is not None:
            y = (y + call.residual.astype(jnp.float32)).astype(call.out_dtype)
        return y, None
    sums = _products(call, launch).run(call.x, [call.w.reshape(k, call.parts * n)], name="matmul_few_rows")
    z = jnp.sum(sums, axis=0).reshape(m, call.parts, n)
    if call.bias is not None:
        z = z + call.bias.astype(jnp.float32)[None]
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    if call.residual is not None:
        y = y + call.residual.astype(jnp.float32)
    saved = z.astype(jnp.bfloat16) if save and call.activation is not None else None
    return y.astype(call.out_dtype), saved
