"""Where the queries of each key head lie for the Hopper kernels of decoding, and how their results leave."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.hopper import few_rows, padded, store
from tilewright.ops.attention.decode.config import GPU_EIGHT, GPU_ROWS, gpu_tile_rows
from tilewright.ops.attention.gpu_tiles import LOG2_E, LOWEST

LINE_BYTES = 128  # Where a copy begins in shared memory that is no tile.

_LANES_A_ROW = 16
_MOST_CHANNELS_A_THREAD = 8  # 16 bytes of bfloat16, the widest load.


def tile_count(tokens: int, group: int) -> int:
    return -(-tokens * group // GPU_ROWS)


def eight_rows(width: int) -> Any:
    """A layout of [8, width]; the width is a multiple of 16."""
    channels = math.gcd(width // _LANES_A_ROW, _MOST_CHANNELS_A_THREAD)
    return few_rows(GPU_EIGHT, _LANES_A_ROW, channels)


class Rows:
    """Where the rows of each key head lie: its group's heads for one token, or tokens times heads, padded.

    Copies see the rows of a tile in eights: what begins inside of one ends with it, and what lies past the last whole one
    is not seen. So the queries of one token stay in place only where no group crosses from one eight to the next. A tile
    begins at a head's own rows, or earlier where the array ends: then it begins with rows of other heads.

    Results are `piece` rows at a time, own ones only: eight, or a group of fewer heads. Those leave through shared memory
    that is no tile, where a copy begins at a line: if the rows of groups do not, no tile begins earlier.
    """

    def __init__(self, tokens: int, heads: int, kv: int, row_bytes: int):
        """`row_bytes` is what a row of the output has."""
        self.tokens, self.heads, self.kv = tokens, heads, kv
        self.group = heads // kv
        self.count = tokens * self.group
        self.tiles = tile_count(tokens, self.group)
        self.tile_rows = gpu_tile_rows(self.count)
        self.in_place = tokens == 1 and (self.group % GPU_EIGHT == 0 or GPU_EIGHT % self.group == 0)
        self.stride = self.count if self.in_place else self.tiles * self.tile_rows
        self.piece = min(GPU_EIGHT, self.stride)
        self.written = self.kv * self.stride
        room = self.written if self.piece * row_bytes % LINE_BYTES == 0 else self.written - self.stride + self.tile_rows
        self.total = max(-(-room // GPU_EIGHT) * GPU_EIGHT, self.tile_rows)

    def first(self, kv: Any, n: Any) -> Any:
        """Of a key head's tile n, the first row."""
        return jnp.minimum(kv * self.stride + n * GPU_ROWS, self.total - self.tile_rows)

    def laid_out(self, array: jax.Array) -> jax.Array:
        """[B, T, H, ...] as [B, total, ...]."""
        (b, t, _), rest = array.shape[:3], array.shape[3:]
        if not self.in_place:
            array = jnp.moveaxis(array.reshape(b, t, self.kv, self.group, *rest), 1, 2)
            array = padded(array.reshape(b, self.kv, -1, *rest), 2, self.stride)
        array = array.reshape(b, -1, *rest)
        return padded(array, 1, self.total) if array.shape[1] < self.total else array

    def taken(self, array: jax.Array) -> jax.Array:
        """[B, written, ...] as [B, T, H, ...]."""
        b, rest = array.shape[0], array.shape[2:]
        if not self.in_place:
            array = array.reshape(b, self.kv, self.stride, *rest)[:, :, : self.count]
            array = jnp.moveaxis(array.reshape(b, self.kv, self.tokens, self.group, *rest), 1, 2)
        return array.reshape(b, self.tokens, self.heads, *rest)


def spread(vector: jax.Array, width: int, layout: Any) -> jax.Array:
    """[rows] as [rows, width]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (*vector.shape, width), [0]), layout)


def finished(
    sums: jax.Array, highest: jax.Array, total: jax.Array, sink: jax.Array | None, layout: Any
) -> tuple[jax.Array, jax.Array]:
    """Out [rows, channels] and logsumexp [rows] of sums that are not divided yet, their maximum and their total [rows]."""
    alpha = 1.0
    if sink is not None:
        sink = sink * LOG2_E
        over_all = jnp.maximum(highest, sink)
        alpha = jnp.exp2(highest - over_all)
        # A sink of -inf is none.
        total = total * alpha + jnp.where(sink > LOWEST, jnp.exp2(sink - over_all), 0.0)
        highest = over_all
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    out = sums * spread(alpha / safe, sums.shape[1], layout)
    return out, jnp.where(nothing, -jnp.inf, highest * (1.0 / LOG2_E) + jnp.log(safe))


def read_eight(ref: Any, width: int = _LANES_A_ROW) -> jax.Array:
    """Eight numbers, one for each row of [8, width]."""
    return plgpu.load(ref, layout=eight_rows(width).reduce(1), optimized=False)


def write_logsumexp(ref: Any, held: Any, piece: int) -> None:
    """The `piece` numbers that `held`, in shared memory, begins with, to `ref` in global memory.

    By plain stores: copies take 16 bytes or more.
    """
    if piece == GPU_EIGHT:
        store(ref, read_eight(held))
        return
    for n in range(piece):
        ref[n] = held[n]
