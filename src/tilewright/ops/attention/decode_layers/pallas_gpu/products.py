"""The four products of a layer in `decode_layers`, each with what it needs of the phase before it.

The scale of a norm is applied behind the product: a block then needs only its own part of x before it multiplies, and the
sums of squares of all parts come with the results.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.decode_layers.pallas_gpu.block import Block
from tilewright.ops.attention.decode_layers.pallas_gpu.exchange import Words, publish_column_sums, publish_sum, received
from tilewright.ops.attention.decode_layers.pallas_gpu.plan import (
    CHANNELS,
    COLUMNS,
    CONSUMERS,
    DEPTH,
    HEADS,
    WARPS,
    Plan,
)
from tilewright.ops.attention.decode_layers.pallas_gpu.threads import (
    PER_ROW,
    ROWS,
    TILE,
    along,
    store_warp_reduced,
    store_warp_sums,
    strided,
    upcast,
)
from tilewright.pallas.gpu.elementwise import THREADS, load, sigmoid, store
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_PUBLISHER = CONSUMERS - 1  # Of a sum of squares. Others publish the first sums of the product.


def total(values: list[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, values)


def rounded(value: jax.Array) -> jax.Array:
    return value.astype(jnp.bfloat16).astype(jnp.float32)


def squares_of(block: Block, phase: str, layout: Any, shape: tuple[int, ...]) -> Words:
    """The sums of squares of the norm before a product."""
    name = f"{phase}_squares"
    copies, splits = block.plan.mail[name][1]
    own = block.mail(name, splits, lax.rem(block.number, jnp.int32(copies)), 0)
    return Words([own], layout, shape, "same", splits)


def norm_scale(plan: Plan, squares: list[jax.Array]) -> jax.Array:
    return lax.rsqrt(total(squares) * (1.0 / plan.d) + plan.eps)


def load_norm(block: Block, ref: Any, layer: Any) -> jax.Array:
    """The weights of a norm for the warpgroup's segment of x."""
    return load(ref.at[layer, pl.ds(block.x_start, block.plan.segment)], strided(block.plan.segment))


def completed(block: Block, x: jax.Array, phase: str, tag: Any) -> jax.Array:
    """The warpgroup's segment of x with the sums of a product's splits."""
    plan = block.plan
    refs = [block.mail(phase, plan.segment, n, block.x_start) for n in range(plan.product(phase).splits)]
    words = Words(refs, strided(plan.segment), (plan.segment,), "vector", plan.segment // THREADS)
    ((*parts,),) = received([words], tag)
    return x.astype(jnp.float32) + total(parts)


def _put_normed(block: Block, y: jax.Array, norm: jax.Array) -> None:
    """Writes y times the weights of its norm to the inputs of the next product, and sums of squares per warp."""
    plan, layout = block.plan, strided(block.plan.segment)
    weights = norm.astype(jnp.float32)
    weights = weights + plan.norm_offset if plan.norm_offset else weights
    store_warp_reduced(block.refs.few_smem.at[0, block.own_warps], y * y, layout=layout)

    def put() -> None:
        store(block.refs.inputs_smem.at[pl.ds(block.x_place, plan.segment)], y * weights, layout)

    put() if plan.holders == CONSUMERS else pl.when(block.warpgroup < plan.holders)(put)
    block.meet()


def _multiply(block: Block, phase: str, first_input: Any, target: Callable[[Any], Any]) -> None:
    """The block's part of a product with `inputs_smem`. 64 sums are published to target(piece) for each piece.

    The consumers take tiles in turn, without tensor cores: a product with one row has two operations per weight.
    """
    refs, product, start = block.refs, block.plan.product(phase), block.first_stage(phase)

    def step(stage: Any, t: Any, acc: jax.Array) -> jax.Array:
        first = first_input + t * DEPTH
        for row in range(0, DEPTH, ROWS):
            w = upcast(load(refs.ring.at[stage, pl.ds(row, ROWS)], TILE))  # [ROWS, COLUMNS]
            own = plgpu.load(refs.inputs_smem.at[pl.ds(first + row, ROWS)], layout=PER_ROW, optimized=False)
            acc = acc + w * along(own)
        return acc

    def sums_of(piece: Any, _: Any) -> None:
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), TILE)
        acc = block.for_own_stages(start + piece * product.tiles, product.tiles, step, zeros)
        store_warp_sums(refs.warps_smem.at[piece, block.own_warps], acc)

    sums_of(0, None) if product.pieces == 1 else lax.fori_loop(0, product.pieces, sums_of, None)
    block.meet()
    piece = 0 if product.pieces == 1 else block.warpgroup

    @pl.when(block.warpgroup < product.pieces)
    def _() -> None:
        publish_column_sums(target(piece), refs.warps_smem.at[piece], block.tag())


def _publish_squares(block: Block, phase: str, warps: Any) -> None:
    """Publishes the sum of squares of the block's rows of a product, which these warps have."""
    group, split = block.part_of(phase)

    @pl.when(block.warpgroup == _PUBLISHER)
    def _() -> None:
        own = block.mail(f"{phase}_squares", 1, group, split)
        publish_sum(own, block.refs.few_smem.at[0, warps], block.tag())


def qkv(block: Block, x: jax.Array, norm: jax.Array) -> jax.Array:
    """Completes x with the product of the layer before, and multiplies its norm with the weights of q, k and v."""
    plan, product = block.plan, block.plan.qkv
    y = completed(block, x, "down", block.tag(before=True))
    _put_normed(block, y, norm)
    _, split = block.part_of("qkv")
    place = lax.rem(split, jnp.int32(product.splits // plan.gate_up.splits))  # In the block's part of x.
    warps = product.own_rows // plan.segment * WARPS
    _publish_squares(block, "qkv", pl.ds(place * warps, warps))

    def target(piece: Any) -> Any:
        """Query heads come two per KV head, behind them the keys and then the values of the KV heads."""
        head, first = divmod_nonnegative(block.column_of("qkv", piece), CHANNELS)
        is_query, is_key = head < plan.heads, head < plan.heads + plan.kv
        kv = jnp.where(is_query, lax.div(head, jnp.int32(HEADS)), lax.rem(head, jnp.int32(plan.kv)))
        row = jnp.where(is_query, lax.rem(head, jnp.int32(HEADS)), jnp.where(is_key, HEADS, HEADS + 1))
        return block.mail("qkv", COLUMNS, split, kv, row, first)

    _multiply(block, "qkv", place * product.own_rows, target)
    return y.astype(jnp.bfloat16)


def o(block: Block) -> None:
    """Combines the key splits of the block's heads, one per consumer, and multiplies them with the output projection."""
    heads, (_, split) = block.plan.o.tiles, block.part_of("o")
    own = functools.partial(_combine, block, split * heads + block.warpgroup)
    own() if heads == CONSUMERS else pl.when(block.warpgroup < heads)(own)
    block.meet()
    _multiply(block, "o", 0, lambda piece: block.mail("o", COLUMNS, split, block.column_of("o", piece)))


def _combine(block: Block, head: Any) -> None:
    """Writes one head's attention to the inputs of the product."""
    kv_head, n = divmod_nonnegative(head, HEADS)
    group, _ = block.part_of("o")
    splits, layout = range(block.plan.key_splits), strided(CHANNELS)
    logs = [block.mail("logsumexp", 4, kv_head, n, group, split) for split in splits[::4]]
    parts = [block.mail("attend", CHANNELS, kv_head, split, n, 0) for split in splits]
    logs, parts = received(
        [Words(logs, layout, (CHANNELS,), "same", 4), Words(parts, layout, (CHANNELS,), "vector", 1)], block.tag()
    )
    largest = functools.reduce(jnp.maximum, logs)
    weights = [jnp.exp2(log - largest) for log in logs]
    of_all = total(weights)
    out = total([weight * part for weight, part in zip(weights, parts, strict=True)]) / of_all
    store(block.refs.inputs_smem.at[pl.ds(block.warpgroup * CHANNELS, CHANNELS)], rounded(out), layout)


def gate_up(block: Block, x: jax.Array, norm: jax.Array) -> jax.Array:
    """Completes x with attention, and multiplies its norm with the weights of gates and values."""
    y = completed(block, x, "o", block.tag())
    _put_normed(block, y, norm)
    _publish_squares(block, "gate_up", pl.ds(0, block.plan.holders * WARPS))
    _, split = block.part_of("gate_up")
    _multiply(
        block, "gate_up", 0, lambda piece: block.mail("gate_up", COLUMNS, split, block.column_of("gate_up", piece))
    )
    return y.astype(jnp.bfloat16)


def down(block: Block) -> None:
    """Computes the block's rows of h = silu(gate) * up, and multiplies them with the last weight of the layer."""
    _, split = block.part_of("down")
    rounds, rest = divmod(block.plan.down.tiles, CONSUMERS)  # Of chunks of 128 elements of h, one per consumer.
    if rounds:
        _activate(block, [block.warpgroup * rounds + n for n in range(rounds)])
    if rest:
        chunk = rounds * CONSUMERS + block.warpgroup
        pl.when(block.warpgroup < rest)(functools.partial(_activate, block, [chunk]))
    block.meet()
    _multiply(block, "down", 0, lambda piece: block.mail("down", COLUMNS, split, block.column_of("down", piece)))


def _activate(block: Block, chunks: list[Any]) -> None:
    """Writes chunks of h to the inputs of the product."""
    plan, layout, shape, splits = block.plan, strided(THREADS), (THREADS,), block.plan.gate_up.splits
    start = block.part_of("down")[1] * plan.down.own_rows
    refs = [
        block.mail("gate_up", THREADS, n, first + start + chunk * THREADS)
        for chunk in chunks
        for first in (0, plan.hidden)
        for n in range(splits)
    ]
    words = [Words(refs, layout, shape, "vector", 1), squares_of(block, "gate_up", layout, shape)]
    parts, squares = received(words, block.tag())
    scale = norm_scale(plan, squares)
    for n, chunk in enumerate(chunks):
        gate, up = (total(parts[(2 * n + which) * splits :][:splits]) * scale for which in range(2))
        h = gate * sigmoid(gate, layout) * up
        store(block.refs.inputs_smem.at[pl.ds(chunk * THREADS, THREADS)], rounded(h), layout)
