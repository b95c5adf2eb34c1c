"""`matmul` of few bfloat16 rows on Hopper, as decoding has them: the kernel of pallas/gpu/few_rows.py, and what follows it.

    z = x w        y = activation(z + bias) + residual

The kernel leaves a float32 sum per split of the contracted axis. XLA adds them up in order and applies what follows in the
same pass.
"""

from typing import Any

import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulSm90Forward
from tilewright.pallas.gpu.few_rows import TILE_ROWS, FewRows, chosen_tiles
from tilewright.pallas.gpu.gemm import BAND, BLOCK_N


def takes(call: MatmulCall, config: MatmulSm90Forward) -> bool:
    """Whether this kernel computes a call with a config."""
    return call.w_scales is None and config.block_m in TILE_ROWS


def heuristic(chip: Chip, call: MatmulCall) -> MatmulSm90Forward | None:
    """The config for a call of few rows; None for others."""
    m, k, n = call.sizes
    if call.w_scales is not None or m > TILE_ROWS[-1]:
        return None
    rows, stages, splits = chosen_tiles(chip, m, k, call.parts * n)
    return MatmulSm90Forward(BLOCK_N, stages, BAND, block_m=rows, splits=splits)


def _products(call: MatmulCall, launch: Launch) -> FewRows:
    (m, k, n), config = call.sizes, launch.config
    return FewRows(
        chip=launch.chip,
        m=m,
        k=k,
        columns=(call.parts * n,),
        rows=config.block_m,
        stages=config.stages,
        splits=config.splits,
        consumer_registers=config.consumer_registers,
        producer_registers=config.producer_registers,
    )


def memory(call: MatmulCall, launch: Launch) -> int:
    return _products(call, launch).memory


def forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    m, k, n = call.sizes
    sums = _products(call, launch).run(call.x, [call.w.reshape(k, call.parts * n)], name="matmul_few_rows")
    z = jnp.sum(sums, axis=0).reshape(m, call.parts, n)
    if call.bias is not None:
        z = z + call.bias.astype(jnp.float32)[None]
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    if call.residual is not None:
        y = y + call.residual.astype(jnp.float32)
    saved = z.astype(jnp.bfloat16) if save and call.activation is not None else None
    return y.astype(call.out_dtype), saved
