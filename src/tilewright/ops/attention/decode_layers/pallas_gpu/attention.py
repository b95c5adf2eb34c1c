"""The phase `attend` of `decode_layers`: the token's queries, key and value, and attention over a part of the keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.decode_layers.pallas_gpu.block import Block
from tilewright.ops.attention.decode_layers.pallas_gpu.exchange import LOWEST, Words, publish_attention, received
from tilewright.ops.attention.decode_layers.pallas_gpu.plan import CHANNELS, COLUMNS, HEADS, KEYS, WARPS
from tilewright.ops.attention.decode_layers.pallas_gpu.products import norm_scale, squares_of, total
from tilewright.ops.attention.decode_layers.pallas_gpu.threads import (
    PER_COLUMN,
    PER_ROW,
    ROWS,
    TILE,
    along,
    largest_of,
    store_four_warp_sums,
    store_warp_reduced,
    strided,
    upcast,
)
from tilewright.pallas.gpu.elementwise import LANES, load, store
from tilewright.pallas.gpu.registers import LOG2_E
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_MASKED = 2 * LOWEST
_HALVES = (0, COLUMNS)
_HEADS = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS, COLUMNS), (COLUMNS // LANES,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
"""Half of the channels of four heads, one per warp: two query heads, the key and the value."""


def attend(block: Block) -> None:
    """Attention of two query heads over the block's keys: a softmax for each row of a tile, joined at the end.

    The token's own key and value are taken from shared memory, so the producer may read the cache before they are
    written.
    """
    refs, warpgroup = block.refs, block.warpgroup
    pl.when(warpgroup == 0)(lambda: _token_heads(block))
    block.meet()
    carry = block.for_own_stages(block.first_stage("attend"), block.key_tiles, *_softmax(block))
    for n, (largest, _, _) in enumerate(carry):
        store_warp_reduced(refs.few_smem.at[n, block.own_warps], largest, over="max")
    block.meet()
    scaled = []
    for n, (largest, weights, sums) in enumerate(carry):
        scale = jnp.exp2(largest - largest_of(refs.few_smem.at[n]))
        store_warp_reduced(refs.few_smem.at[HEADS + n, block.own_warps], weights * scale)
        scaled += [each * along(scale) for each in sums]
    store_four_warp_sums(refs.warps_smem.at[:, block.own_warps], scaled)
    block.meet()
    # Each consumer publishes half of a head, and every other copy of its logsumexp.
    n, half = divmod_nonnegative(warpgroup, 2)
    copies, stride = block.plan.o.groups // 2, 2 * block.plan.key_splits
    publish_attention(
        block.mail("attend", COLUMNS, block.kv_head, block.key_split, n, half * COLUMNS),
        block.mail("logsumexp", (copies - 1) * stride + 1, block.kv_head, n, half, block.key_split),
        refs.warps_smem.at[warpgroup],
        refs.few_smem.at[n],
        refs.few_smem.at[HEADS + n],
        block.tag(),
        copies=copies,
        stride=stride,
    )
    # The block that has read the tile of the token's place writes it, behind that.
    tile = lax.div(block.position, jnp.int32(KEYS))
    writes = block.fits & (block.key_split == lax.rem(tile, jnp.int32(block.plan.key_splits)))
    pl.when(writes & (warpgroup == 1))(lambda: _write_token(block, refs.keys_ref, HEADS))
    pl.when(writes & (warpgroup == 2))(lambda: _write_token(block, refs.values_ref, HEADS + 1))


def _token_heads(block: Block) -> None:
    """Writes the token's queries, key and value to shared memory, by one warpgroup: a head per warp."""
    refs, plan, shape, splits = block.refs, block.plan, (WARPS, COLUMNS), block.plan.qkv.splits
    halves = [pl.ds(half, COLUMNS) for half in _HALVES]
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_HEADS)

    def along_columns(ref: Any) -> jax.Array:
        own = plgpu.load(ref, layout=_HEADS.reduce(0), optimized=False).astype(jnp.float32)
        return plgpu.layout_cast(lax.broadcast_in_dim(own, shape, [1]), _HEADS)

    def weights_of(ref: Any, half: Any) -> jax.Array:
        weights = along_columns(ref.at[block.layer, half])
        return weights + plan.norm_offset if plan.norm_offset else weights

    norms = [[weights_of(ref, half) for ref in (refs.q_norm_ref, refs.k_norm_ref)] for half in halves]
    cos, sin = along_columns(refs.cos_ref), along_columns(refs.sin_ref)
    size = (WARPS - 1) * CHANNELS + COLUMNS
    own = [block.mail("qkv", size, n, block.kv_head, 0, half) for half in _HALVES for n in range(splits)]
    words = [Words(own, _HEADS, shape, "rows", COLUMNS // LANES), squares_of(block, "qkv", _HEADS, shape)]
    parts, squares = received(words, block.tag())  # [4, 64] each
    scale = norm_scale(plan, squares)
    plain = [total(each) * scale for each in (parts[:splits], parts[splits:])]
    of_heads = total([jnp.sum(part * part, axis=1) for part in plain])  # [4]
    of_heads = lax.rsqrt(of_heads * (1.0 / CHANNELS) + plan.eps)
    of_heads = plgpu.layout_cast(lax.broadcast_in_dim(of_heads, shape, [0]), _HEADS)
    one, other = (part * of_heads * jnp.where(row < HEADS, *norm) for part, norm in zip(plain, norms, strict=True))
    rotated = [one * cos - other * sin, other * cos + one * sin]
    for half, new, old in zip(halves, rotated, plain, strict=True):
        store(refs.heads_smem.at[:, half], jnp.where(row <= HEADS, new, old).astype(jnp.bfloat16), _HEADS)


def _write_token(block: Block, cache_ref: Any, row: int) -> None:
    """Writes the token's entry of a cache."""
    layout = strided(CHANNELS)
    entry = load(block.refs.heads_smem.at[row], layout)
    store(cache_ref.at[block.layer, block.position, block.kv_head], entry, layout)


def _softmax(block: Block) -> tuple[Any, Any]:
    """The step over a tile of keys, and what it starts with: for each query head the largest logit, the sum of the weights
    [ROWS], and the weighted sums of both halves of the values [ROWS, COLUMNS].

    The token itself is in the first row of one consumer.
    """
    refs, key_split = block.refs, block.key_split

    def of_head(n: int) -> list[jax.Array]:
        """Both halves of a head, repeated over the rows."""
        each = [
            plgpu.load(refs.heads_smem.at[n, pl.ds(half, COLUMNS)], layout=PER_COLUMN, optimized=False)
            for half in _HALVES
        ]
        return [upcast(along(half, axis=1)) for half in each]

    queries, key, value = [of_head(n) for n in range(HEADS)], of_head(HEADS), of_head(HEADS + 1)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    factor = CHANNELS**-0.5 * LOG2_E

    def logits_of(query: list[jax.Array], keys: list[jax.Array]) -> jax.Array:
        return jnp.sum(query[0] * keys[0] + query[1] * keys[1], axis=1) * factor  # [ROWS]

    def step(stage: Any, t: Any, carry: Any) -> Any:
        first_key = block.first_key(t)
        for first in range(0, KEYS, ROWS):

            def part(n: int, first: int = first) -> jax.Array:
                return upcast(load(refs.ring.at[stage, pl.ds(n * KEYS + first, ROWS)], TILE))

            keep = first_key + first + row < block.position
            keys = [part(0), part(1)]
            logits = [jnp.where(keep, logits_of(query, keys), _MASKED) for query in queries]
            largest = [jnp.maximum(old, new) for (old, _, _), new in zip(carry, logits, strict=True)]
            scales = [jnp.exp2(old - new) for (old, _, _), new in zip(carry, largest, strict=True)]
            weights = [jnp.exp2(each - new) for each, new in zip(logits, largest, strict=True)]
            sums: list[list[jax.Array]] = [[] for _ in range(HEADS)]
            for half in range(2):
                # What is behind the last token may be anything, NaN as well.
                v = jnp.where(along(keep), part(2 + half), 0.0)
                for n in range(HEADS):
                    sums[n].append(carry[n][2][half] * along(scales[n]) + along(weights[n]) * v)
            carry = tuple((largest[n], carry[n][1] * scales[n] + weights[n], tuple(sums[n])) for n in range(HEADS))
        return carry

    is_own = (row == 0) & (key_split == 0) & (block.warpgroup == 0)
    start = []
    for query in queries:
        largest = jnp.where(is_own, logits_of(query, key), LOWEST)
        weights = jnp.where(is_own, 1.0, 0.0)
        start.append((largest, weights, tuple(along(weights) * half for half in value)))
    return step, tuple(start)
