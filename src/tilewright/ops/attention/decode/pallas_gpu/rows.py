"""Where the queries of each key head lie for the Hopper kernels of decoding, and how their results are written."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.decode.call import DecodeCall
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.registers import few_rows, store

ROWS = 64  # Of a wgmma product: the fewest there are.
EIGHT = 8  # Rows that a tile in shared memory is made of.
LINE_BYTES = 128  # The alignment of copies to and from shared memory that is no tile.
LEAST_WIDTH = 16  # Of a head: the depth of one wgmma instruction. Others are padded to a multiple.

_LANES_PER_ROW = 16
_MOST_CHANNELS_PER_THREAD = 8  # 16 bytes of bfloat16, the widest load.


def eight_rows(width: int) -> Any:
    """A layout of [8, width]; the width is a multiple of 16."""
    channels = math.gcd(width // _LANES_PER_ROW, _MOST_CHANNELS_PER_THREAD)
    return few_rows(EIGHT, _LANES_PER_ROW, channels)


class Rows:
    """Where the rows of each key head lie: its group's heads for one token, or tokens times heads, padded.

    Copies see the rows of a tile in eights: a copy that begins inside an eight ends with it, and rows past the last whole
    eight are not seen. So the queries of one token stay in place only where no group crosses from one eight to the next. A
    tile begins at a head's own rows, or earlier where the array ends: then it begins with rows of other heads.

    Results are written `piece` rows at a time, own rows only: eight, or a group of fewer heads. Smaller pieces are written
    through shared memory that is no tile, where a copy begins at a line: if the rows of groups do not, no tile begins
    earlier.
    """

    def __init__(self, *, tokens: int, heads: int, kv: int, row_bytes: int, most: int = ROWS):
        """`row_bytes` are those of a row of the output, and `most` the rows of a tile at most."""
        self.tokens, self.heads, self.kv, self.most = tokens, heads, kv, most
        self.group = heads // kv
        self.count = self.tokens * self.group
        self.tiles = -(-self.count // most)
        self.tile_rows = min(most, -(-self.count // EIGHT) * EIGHT)
        self.in_place = self.tokens == 1 and (self.group % EIGHT == 0 or EIGHT % self.group == 0)
        self.stride = self.count if self.in_place else self.tiles * self.tile_rows
        self.piece = min(EIGHT, self.stride)
        self.written = self.kv * self.stride
        room = self.written if self.piece * row_bytes % LINE_BYTES == 0 else self.written - self.stride + self.tile_rows
        self.total = max(-(-room // EIGHT) * EIGHT, self.tile_rows)

    @classmethod
    def of(cls, call: DecodeCall) -> "Rows":
        """The rows of a call of `decode_attention`."""
        width = -(-call.v.shape[3] // LEAST_WIDTH) * LEAST_WIDTH
        (_, tokens, heads, _), kv = call.q.shape, call.k.shape[2]
        return cls(tokens=tokens, heads=heads, kv=kv, row_bytes=width * call.q.dtype.itemsize)

    def first(self, kv: Any, n: Any) -> Any:
        """The first row of tile n of a key head."""
        return jnp.minimum(kv * self.stride + n * self.most, self.total - self.tile_rows)

    def laid_out(self, array: jax.Array) -> jax.Array:
        """[B, T, H, ...] as [B, total, ...]."""
        (b, t, _), rest = array.shape[:3], array.shape[3:]
        if not self.in_place:
            array = jnp.moveaxis(array.reshape(b, t, self.kv, self.group, *rest), 1, 2)
            array = padded(array.reshape(b, self.kv, -1, *rest), 2, self.stride)
        array = array.reshape(b, -1, *rest)
        return padded(array, 1, self.total) if array.shape[1] < self.total else array

    def restored(self, array: jax.Array) -> jax.Array:
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
    sums: jax.Array, row_max: jax.Array, total: jax.Array, sink: jax.Array | None, layout: Any
) -> tuple[jax.Array, jax.Array]:
    """out [rows, channels] and logsumexp [rows], from sums that are not divided yet, their maximum and total [rows]."""
    alpha = 1.0
    if sink is not None:
        sink = sink * LOG2_E
        over_all = jnp.maximum(row_max, sink)
        alpha = jnp.exp2(row_max - over_all)
        # A sink of -inf is none.
        total = total * alpha + jnp.where(sink > LOWEST, jnp.exp2(sink - over_all), 0.0)
        row_max = over_all
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    out = sums * spread(alpha / safe, sums.shape[1], layout)
    return out, jnp.where(nothing, -jnp.inf, row_max * (1.0 / LOG2_E) + jnp.log(safe))


def load_eight(ref: Any, width: int = _LANES_PER_ROW) -> jax.Array:
    """Eight numbers, one per row of [8, width]."""
    return plgpu.load(ref, layout=eight_rows(width).reduce(1), optimized=False)


def store_logsumexp(ref: Any, smem: Any, piece: int) -> None:
    """Writes the first `piece` numbers of `smem` to `ref` with plain stores: copies take 16 bytes or more."""
    if piece == EIGHT:
        store(ref, load_eight(smem))
        return
    for n in range(piece):
        ref[n] = smem[n]
