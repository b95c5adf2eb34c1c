"""The list of the tiles of rows of grouped products, made on the device by one small kernel.

The tiles of a group of rows [lower, upper) begin at the last multiple of `alignment` that is not after `lower`, and have
block_m rows each. An empty group has none. Rows past the last group are a group of their own, number G.

Blocking: each thread has one tile. All threads go through the groups in order and add up the rows and the tiles before
each group. A tile takes the bounds of every group whose first tile is not after it, so those of its own group remain. The
threads exchange nothing. A thread block has 128 tiles, and each of them repeats the sums.

From XLA the list is about eight kernels, 10 us beside products of 40 to 90 us (H200; 512 rows, 128 groups, K 2048, N 768).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.grouped_matmul.blocks import most_tiles
from tilewright.pallas.gpu.elementwise import THREADS
from tilewright.pallas.gpu.gemm import ALIGNMENT
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.weight_only import GROUP, GROUP_END, GROUP_START, START

# Groups whose sizes are loaded at a time, while those before them are added up. With 128 groups the kernel takes 6.9 us by
# 8 groups, 5.7 us by 16 and 4.2 us by 32 (H200).
_TOGETHER = 32
_LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)


def row_tile_list(
    group_sizes: jax.Array, m: int, block_m: int, alignment: int = ALIGNMENT
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The tiles of m rows in groups: int32 [4, tiles] (`START` and so on); their number; and the poison.

    `block_m` and `alignment` are powers of two. The last two results are [128], all elements equal. Tiles past that number
    are of group G. The poison is float32, as that of call.py: NaN where sizes are negative or sum past m, else 0.
    """
    blocks = pl.cdiv(most_tiles(m, group_sizes.shape[0] + 1, block_m, alignment), THREADS)
    outputs = run_kernel(
        functools.partial(_tiles_kernel, m=m, block_m=block_m, alignment=alignment),
        name="grouped_matmul_tiles",
        inputs={"sizes": group_sizes.astype(jnp.int32)},
        outputs={
            "tiles": jax.ShapeDtypeStruct((4, blocks * THREADS), jnp.int32),
            "count": jax.ShapeDtypeStruct((THREADS,), jnp.int32),
            "poison": jax.ShapeDtypeStruct((THREADS,), jnp.float32),
        },
        scratch={},
        grid={"block": blocks},
    )
    return outputs["tiles"], outputs["count"], outputs["poison"]


def _tiles_kernel(
    *,
    # inputs
    sizes_ref,  # [G]
    # outputs
    tiles_ref,  # [4, tiles]
    count_ref,  # [128]
    poison_ref,  # [128]
    # static
    m: int,
    block_m: int,
    alignment: int,
):
    groups, block = sizes_ref.shape[0], lax.axis_index("block")
    number = block * THREADS + plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=_LAYOUT)

    def everywhere(x: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.broadcast_to(x, (THREADS,)), _LAYOUT)

    def with_group(group: Any, lower: Any, upper: Any, first: Any, fields: Any) -> tuple[Any, Any]:
        """The first tile of the next group, and the fields of the tiles after this group, whose first tile is `first`.

        Until all groups are done, the field START has the first tile of the group.
        """
        rows = upper - (lower & -alignment) + (block_m - 1)
        count = lax.shift_right_logical(rows, jnp.int32(block_m.bit_length() - 1))
        own = {START: first, GROUP: group, GROUP_START: lower, GROUP_END: upper}
        fields = tuple(jnp.where(number >= first, everywhere(own[name]), fields[name]) for name in range(len(own)))
        return first + jnp.where(upper > lower, count, 0), fields

    def next_group(group: Any, size: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """`total`: the rows of the groups before, m + 1 for more than m. So no sum overflows. `lower`: at most m."""
        total, lower, smallest, first, fields = state
        following = jnp.minimum(total + jnp.clip(size, 0, m + 1), m + 1)
        upper = jnp.minimum(following, m)
        return following, upper, jnp.minimum(smallest, size), *with_group(group, lower, upper, first, fields)

    def sizes_from(group: Any) -> tuple[Any, ...]:
        return tuple(sizes_ref[group + each] for each in range(together))

    def several(turn: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        sizes, state = carry
        # Past the end: the last ones, of which those that no turn has had remain.
        following = sizes_from(jnp.minimum((turn + 1) * together, groups - together))
        for each, size in enumerate(sizes):
            state = next_group(turn * together + each, size, state)
        return following, state

    together = min(groups, _TOGETHER)
    zero, (turns, rest) = jnp.int32(0), divmod(groups, together)
    state = zero, zero, zero, zero, (everywhere(zero),) * 4
    sizes, state = lax.fori_loop(0, turns, several, (sizes_from(zero), state))
    for each, size in enumerate(sizes[together - rest :]):
        state = next_group(jnp.int32(turns * together + each), size, state)
    total, lower, smallest, first, fields = state
    count, fields = with_group(jnp.int32(groups), lower, jnp.int32(m), first, fields)

    own = pl.ds(block * THREADS, THREADS)
    begin = (fields[GROUP_START] & -alignment) + (number - fields[START]) * block_m
    for name, field in enumerate(fields):
        tiles_ref[name, own] = begin if name == START else field

    @pl.when(block == 0)
    def _once():
        wrong = (smallest < 0) | (total > m)
        count_ref[...] = everywhere(count)
        poison_ref[...] = everywhere(jnp.where(wrong, jnp.float32(jnp.nan), jnp.float32(0.0)))
