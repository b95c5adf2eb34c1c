"""The gradients of gates and betas on Hopper, one gate per head, from the sums of the gradients' kernel.

With decay_out = exp(G_C - G), and rows, columns and states as in `SumRow`,

    dbeta_j = decay_out_j k_j . (u dS'^T)_j + columns_j
    dG_i = rows_i - beta_i dbeta_i, and at the last token what goes through exp(G_C) besides
    dg_j = sum of dG_i over i >= j: a gate is in the sums of its token and of all later ones

A chunk is a row of a tile, a token a column, and a thread block has 64 chunks, as in the kernel of the gates. With 16 / 32
heads it takes 8.3 us for T8192 and 12.8 us for B4 T4096 (H200). XLA makes 19 small kernels of it.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import sums_over_tokens, total_over_tokens
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    SQUARE,
    WARPS,
    Row,
    bfloat16_tile,
    float32_array,
    positions,
)
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import WGMMA, store


class SumRow:
    """What the gradients' kernel sums over channels or tokens, in rows: k . (u dS'^T); columns of the pairs' sums, a row
    for each warp; what goes through exp(G_i), rows of the pairs' sums included; S . dS'. The last two are for a gate.
    """

    K_U_DS, COLUMNS, ROWS, STATES = 0, 1, 1 + WARPS, 2 + WARPS

    @staticmethod
    def count(*, gated: bool) -> int:
        return 3 + WARPS if gated else 1 + WARPS


def _kernel(
    *,
    # inputs
    sums_ref,  # [chunks, parts, SumRow.count, C]
    gates_ref,  # [chunks, Row.COUNT, C]
    # outputs
    d_beta_ref,  # [chunks, C]
    d_g_ref,  # [chunks, C], or None
    # scratch
    ones,  # [C, C], or None
):
    """The gradients of 64 chunks."""
    chunks = pl.ds(lax.axis_index("block") * CHUNK, CHUNK)

    def gate(row: int) -> jax.Array:
        return plgpu.load(gates_ref.at[chunks, row], layout=WGMMA, optimized=False)

    def summed(first: int, count: int = 1) -> jax.Array:
        places = itertools.product(range(sums_ref.shape[1]), range(first, first + count))
        every = (plgpu.load(sums_ref.at[chunks, *place], layout=WGMMA, optimized=False) for place in places)
        return functools.reduce(jnp.add, every)

    i, j = positions()
    is_last = j == CHUNK - 1
    coarse, fine = gate(Row.COARSE), gate(Row.FINE)
    all_coarse, all_fine = (total_over_tokens(jnp.where(is_last, sum_, 0.0)) for sum_ in (coarse, fine))
    through_end = jnp.exp((all_coarse - coarse) + (all_fine - fine)) * summed(SumRow.K_U_DS)
    d_beta = through_end + summed(SumRow.COLUMNS, WARPS)
    store(d_beta_ref.at[chunks], d_beta)
    if d_g_ref is None:
        return
    ones[...] = jnp.where(i >= j, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()
    beta = gate(Row.BETA)
    through_all = total_over_tokens(beta * through_end + gate(Row.DECAY_ALL) * summed(SumRow.STATES))
    d_sums = summed(SumRow.ROWS) - beta * d_beta + jnp.where(is_last, through_all, 0.0)
    store(d_g_ref.at[chunks], sums_over_tokens(d_sums, ones))


def gate_gradients(sums: jax.Array, gates: jax.Array, *, gated: bool) -> tuple[jax.Array, jax.Array | None]:
    """dbeta and dg, [B, HV, chunks, C] each. `sums` [B, HV, chunks, parts, SumRow.count, C] are added up over the parts."""
    leading = gates.shape[:3]
    chunks = math.prod(leading)

    def by_chunk(x: jax.Array) -> jax.Array:
        return padded(x.reshape(-1, *x.shape[3:]), 0, CHUNK)

    blocks = pl.cdiv(chunks, CHUNK)
    gradient = float32_array(blocks * CHUNK, CHUNK)
    outputs = run_kernel(
        _kernel,
        name="delta_rule_gate_gradients",
        inputs={"sums": by_chunk(sums), "gates": by_chunk(gates)},
        outputs={"d_beta": gradient, "d_g": gradient if gated else None},
        scratch={"ones": bfloat16_tile(*SQUARE) if gated else None},
        grid={"block": blocks},
    )
    d_beta, d_g = (x if x is None else x[:chunks].reshape(*leading, CHUNK) for x in outputs.values())
    assert d_beta is not None
    return d_beta, d_g
