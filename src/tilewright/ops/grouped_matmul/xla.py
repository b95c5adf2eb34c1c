"""`grouped_matmul` in plain JAX: a scan over blocks of rows, each of one group (blocks.py), and hand-written gradients.

A step takes block_m rows and the matrix of their group, so the FLOPs are those of M + G block_m rows at most, and no
array has a size of M times G. Parts and columns stay two axes, so that the compiler can keep w [G, K, P, N] cut along
N; each part is a product of its own (CPUs have no bfloat16 product with an axis more). The gradient of w is accumulated
in float32 in the order of the rows: the same bits in every run.

Quantised operands: as in ops/matmul/xla.py. Scales per column are multiplied to the result; weights with scales along K
are dequantised to x's dtype, which rounds each once. Two quantised operands are dequantised to float32: exact, and slow.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.products import d_product, dequantized_parts, saved_dtype, weight_values
from tilewright.core.quantized import expanded_scales
from tilewright.ops.grouped_matmul.blocks import RowBlocks, row_blocks
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall, group_starts, poison
from tilewright.ops.grouped_matmul.config import GroupedMatmulXlaBackward, GroupedMatmulXlaForward
from tilewright.pallas.arrays import dot_f32

_LARGEST_BLOCK, _SMALLEST_BLOCK = 256, 8


def dequantized_rows(call: GroupedMatmulCall) -> jax.Array:
    """x [M, K], floating, scales included; float32 where it is quantised."""
    if call.x_scales is None:
        return call.x
    m, k = call.x.shape
    scales = expanded_scales(call.x_scales, (m, k))
    return call.x.astype(jnp.float32) * scales


def _weights_and_scales(call: GroupedMatmulCall, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """w [G, K, P, N] in `dtype`, and scales [G, 1, P, N] for the result where they are not in it."""
    if call.w_scales is None or call.w_scales.shape[1] > 1:
        return dequantized_parts(call, dtype), None
    values = weight_values(call)
    return values.astype(dtype), expanded_scales(call.w_scales, values.shape[2:])


def _blocks(call: GroupedMatmulCall, block_m: int) -> RowBlocks:
    m = call.x.shape[0]
    return row_blocks(group_starts(call.group_sizes, m), m, block_m)


def _taken(x: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows of x; zeros for those that are none."""
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _of_rows(blocks: RowBlocks, results: jax.Array) -> jax.Array:
    """[blocks, block_m, ...] as [M, ...]: zeros for rows past the last group."""
    own = results[blocks.block, blocks.place]
    inside = blocks.in_group.reshape(-1, *[1] * (own.ndim - 1))
    return jnp.where(inside, own, jnp.zeros_like(own))


def _forward(call: GroupedMatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    m = call.x.shape[0]
    x, blocks = dequantized_rows(call), _blocks(call, launch.config.block_m)
    w, scales = _weights_and_scales(call, x.dtype)

    def step(_: None, block: tuple[jax.Array, jax.Array]) -> tuple[None, Any]:
        group, rows = block
        own = _taken(x, rows)
        z = tuple(dot_f32(own, w[group, :, part], (1, 0)) for part in range(call.parts))  # each [block_m, N]
        if scales is not None:
            z = tuple(each * scales[group, :, part] for part, each in enumerate(z))
        y = activate(call.activation, z).astype(call.out_dtype)
        return None, (y, jnp.stack(z, axis=1).astype(saved_dtype(call)) if save and call.activation else None)

    _, (y, z) = jax.lax.scan(step, None, (blocks.group, blocks.rows))
    y = _of_rows(blocks, y) + poison(call.group_sizes, m).astype(call.out_dtype)
    return y, None if z is None else _of_rows(blocks, z)


def d_rows(call: GroupedMatmulCall, saved: Any, dy: jax.Array) -> jax.Array:
    """The gradient of z in x's dtype, [M, P N]."""
    return d_product(call, saved, dy).reshape(dy.shape[0], -1).astype(call.x.dtype)


def _backward(call: GroupedMatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> GroupedMatmulCall:
    if call.x_scales is not None:
        return call.gradients()
    dz = d_product(call, saved, dy).astype(call.x.dtype)  # [M, P, N]
    blocks, w = _blocks(call, launch.config.block_m), dequantized_parts(call, call.x.dtype)
    trains = call.w_scales is None

    def step(dw: jax.Array | None, block: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        group, rows = block
        own = _taken(dz, rows)
        if dw is not None:
            x = _taken(call.x, rows)
            dw = dw.at[group].add(jnp.stack([dot_f32(x, own[:, part], (0, 0)) for part in range(call.parts)], axis=1))
        dx = sum(dot_f32(own[:, part], w[group, :, part], (1, 1)) for part in range(call.parts))
        return dw, jnp.asarray(dx).astype(call.x.dtype)

    wrong = poison(call.group_sizes, call.x.shape[0])
    dw, dx = jax.lax.scan(step, jnp.full(w.shape, wrong) if trains else None, (blocks.group, blocks.rows))
    dx = _of_rows(blocks, dx) + wrong.astype(dx.dtype)
    return call.gradients(x=dx) if dw is None else call.gradients(x=dx, w=dw)


def _rows(chip: Chip, call: GroupedMatmulCall) -> int:
    """About the mean size of a group: half of a block is wasted per group."""
    groups, m, _, _ = call.sizes
    size = 1 << max(0, (m // max(1, groups)).bit_length() - 1)
    return min(max(size, _SMALLEST_BLOCK), _LARGEST_BLOCK)


IMPLEMENTATION = Implementation(
    forward=Pass(
        _forward,
        config=GroupedMatmulXlaForward,
        heuristic=lambda chip, call: GroupedMatmulXlaForward(_rows(chip, call)),
        saved="M . N",
    ),
    backward=Pass(
        _backward,
        config=GroupedMatmulXlaBackward,
        heuristic=lambda chip, call: GroupedMatmulXlaBackward(_rows(chip, call)),
    ),
)
