"""Inside a chunk, one gate per head: the (I + A)^-1 of the WY transform.

A_ij = (k_i . k_j) decay_ij beta_j below the diagonal. A thread block of one warpgroup per chunk, all chunks at once.
`invert` is KDA's, too (sm90_scores.py).

On an H200 (driver 580.159.04, jax 0.11.2), H96 T8192 D128, it takes 0.175 ms, before 0.255 ms: the first three of six
steps in the registers of each warp, 0.200 ms; two instructions fewer for each pair of numbers that is split (`upcast`),
which also leaves registers for four thread blocks to a multiprocessor instead of three, the rest.

Tried and dropped, on an H200 (driver 580.159.04, jax 0.11.2, H96 T8192 D128):
- the inverse in the state kernel, by the warpgroups that copy: 2.4 ms for the whole forward. The products of an inverse
  depend on each other; three chunks side by side hide each other's latency;
- bf16x2 products throughout, 30 instead of 18: 0.46 ms, then 0.32 ms. Of these, 0.16 ms are for the operands and the
  copies. With three warpgroups per thread block 0.37 ms; with four, registers spill, 0.39 ms. With `upcast` instead of
  conversions it is 0.26 ms;
- Newton's steps unrolled instead of in a loop: a tenth more (the instruction cache);
- the gates in this kernel, with persistent thread blocks that copy the keys of their next chunk early: 0.31 ms. It has
  a third more instructions, and the thread blocks of a multiprocessor already hide each other's copies.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    CHUNK,
    HI,
    LO,
    SQUARE,
    Row,
    Sizes,
    bfloat16_array,
    bfloat16_tile,
    decay,
    float32_buffer,
    positions,
    query_head,
    store_hi_lo,
)
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import (
    WGMMA,
    load_along_columns,
    side_by_side,
    split_hi_lo,
    tile_of_zeros,
    transposed,
    upcast,
)
from tilewright.pallas.gpu.warp_mma import add_block_products
from tilewright.pallas.gpu.wgmma import accumulate, product

_BLOCK = 16  # Rows of a warp: blocks of as many tokens are inverted in its registers.
_BLOCKS = (CHUNK, _BLOCK)


def invert(
    lower: jax.Array,
    i: jax.Array,
    j: jax.Array,
    lower_hi_lo: Any,
    inverse_tiles: Any,
    widen: Callable[[jax.Array], jax.Array] = upcast,
) -> jax.Array:
    """(I + A)^-1 of a strictly lower triangular A [C, C]; the two tiles [2 C, C] are scratch. `widen`: `split_hi_lo`.

    Blocks of 2 tokens are inverted directly. Then X <- X + (I - X (I + A)) X, Newton's step, six times, with X and the
    bracket rounded. The bracket is taken inside of blocks that double each time: the X A term alone merges two blocks,
    and the rest corrects the rounding of the steps before. Blocks of tokens are merged, never powers of A summed: those
    overflow where keys are alike. The steps up to blocks of 16 are products of 16 by 16, each warp by itself: the same
    values, without the zeros.
    """
    split = functools.partial(split_hi_lo, widen=widen)
    # i xor j is less than 2^level where i and j are in the same block of 2^level.
    apart = lax.bitwise_xor(i, j)
    one = jnp.where(apart == 0, 1.0, 0.0)
    store_hi_lo(lower_hi_lo, split(-one - lower))
    x = _invert_blocks(lower, widen)
    # On the diagonal X (I + A) is 1 to the bit, so nothing is missing there.
    apart = jnp.where(apart == 0, CHUNK * CHUNK, apart)

    def step(level: Any, x: jax.Array) -> jax.Array:
        rounded = x.astype(jnp.bfloat16)
        # The tiles alternate: a warp may still multiply by the other one while the next warp writes this one.
        x_tile = inverse_tiles.at[pl.ds(lax.rem(level, jnp.int32(2)) * CHUNK, CHUNK)]
        x_tile[...] = rounded
        plgpu.commit_smem()
        twice = jnp.concatenate([rounded, rounded], axis=1)
        missing = product(SQUARE, lambda sum_: sum_.add(twice, lower_hi_lo))
        # The compiler would select after the rounding, and then round element by element (`upcast`).
        missing = lax.optimization_barrier(jnp.where(apart < lax.shift_left(1, level), missing, 0.0))
        missing = missing.astype(jnp.bfloat16)
        x = widen(rounded)
        (x,) = accumulate((x,), lambda sum_: sum_.add(missing, x_tile))
        return x

    # A loop, not unrolled: the code would not stay in the instruction cache.
    x = lax.fori_loop(_BLOCK.bit_length(), CHUNK.bit_length() + 1, step, x)
    plgpu.commit_smem()  # Other warps may still be multiplying: the tiles are written again only after this.
    return x


def _invert_blocks(lower: jax.Array, widen: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The inverses of I + A's diagonal blocks of 16 tokens, and zeros beside them, [C, C]."""
    row, column = (plgpu.broadcasted_iota(jnp.int32, _BLOCKS, axis, layout=WGMMA) for axis in (0, 1))
    block, apart = lax.div(row, jnp.int32(_BLOCK)), lax.bitwise_xor(lax.rem(row, jnp.int32(_BLOCK)), column)
    parts = [lower[:, first : first + _BLOCK] for first in range(0, CHUNK, _BLOCK)]
    own = parts[0]  # [C, 16]: the block of each row's own tokens.
    for number, part in enumerate(parts[1:], 1):
        own = jnp.where(block == number, part, own)
    diagonal = apart == 0
    erased = split_hi_lo(jnp.where(diagonal, -1.0, -own), widen=widen)
    x = jnp.where(diagonal, 1.0, jnp.where(apart == 1, -own, 0.0))
    nothing = tile_of_zeros(_BLOCKS)
    for level in range(2, _BLOCK.bit_length()):
        rounded = x.astype(jnp.bfloat16)
        missing = nothing
        for part in erased:
            missing = add_block_products(missing, rounded, part)
        inside = (apart < (1 << level)) & (apart > 0)
        missing = lax.optimization_barrier(jnp.where(inside, missing, 0.0)).astype(jnp.bfloat16)
        x = add_block_products(widen(rounded), missing, rounded)
    return side_by_side(tuple(jnp.where(block == number, x, 0.0) for number in range(len(parts))))


def _inverse_kernel(
    *,
    # inputs
    k_ref,  # [B, T, H, K]
    gates_ref,  # [B, HV, chunks, Row.COUNT, C]
    # outputs
    inverse_ref,  # [B, HV, T, 2 C]: hi and lo side by side
    # scratch
    keys,  # [C, K]
    gates,  # [Row.COUNT, C]
    lower_hi_lo, inverse_hi_lo,  # [2 C, C]
    full,
    # static
    group: int,
):  # fmt: skip
    b, hv, n = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("chunk")
    tokens = pl.ds(n * CHUNK, CHUNK)
    plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, query_head(hv, group)], keys, full)
    plgpu.copy_gmem_to_smem(gates_ref.at[b, hv, n], gates, full)
    plgpu.barrier_wait(full)
    i, j = positions()
    kk = product(SQUARE, lambda sum_: sum_.add(keys, transposed(keys)))  # [C, C]
    lower = jnp.where(i > j, kk * decay(gates, i, j) * load_along_columns(gates.at[Row.BETA], SQUARE), 0.0)
    store_hi_lo(inverse_hi_lo, split_hi_lo(invert(lower, i, j, lower_hi_lo, inverse_hi_lo)))
    plgpu.commit_smem()
    for part in (HI, LO):
        plgpu.copy_smem_to_gmem(inverse_hi_lo.at[part], inverse_ref.at[b, hv, tokens, part])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def scratch(sizes: Sizes) -> dict[str, Any]:
    return {
        "keys": bfloat16_tile(CHUNK, sizes.depth),
        "gates": float32_buffer(Row.COUNT, CHUNK),
        "lower_hi_lo": bfloat16_tile(2 * CHUNK, CHUNK),
        "inverse_hi_lo": bfloat16_tile(2 * CHUNK, CHUNK),
        "full": plgpu.Barrier(num_arrivals=2),
    }


def inverses(k: jax.Array, gates: jax.Array, sizes: Sizes) -> jax.Array:
    """(I + A)^-1 of every chunk, [B, HV, T, 2 C] bfloat16: hi and lo side by side."""
    return run_kernel(
        functools.partial(_inverse_kernel, group=sizes.group),
        name="delta_rule_inverses",
        inputs={"k": k, "gates": gates},
        outputs={"inverse": bfloat16_array(sizes.b, sizes.hv, sizes.t, 2 * CHUNK)},
        scratch=scratch(sizes),
        grid={"chunk": sizes.chunks, "head": sizes.hv, "batch": sizes.b},
    )["inverse"]
