"""`decode_qkv` as two Mosaic GPU kernels for Hopper: the product with all three weights, and everything behind it.

For each sequence, with its token x at position p = length,

    q, k = rope(norm(x Wq), p), rope(norm(x Wk), p);  v = x Wv;  keys[p], values[p] <- k, v

Floor: the weights read once, 2 D (H + 2 KV) C bytes; everything else is small: for D 2048, H 16, KV 8 and C 128, 16.8 MB,
3.5 us at the 4.8 TB/s of an H200. What counts beside it is the number of launches. In XLA's program there were ten: three
products, the statistics of two norms, the rest of the queries' norm with their rotation, and a slice and a write per cache.

Blocking: the first kernel is pallas/gpu/few_rows.py with three weights, which leaves a float32 sum per split of D. In the
second, a thread block of one warpgroup has four heads of one sequence, each warp one of them: it loads all splits before it
adds the first, since it waits for the L2, and the statistics of a head are sums over the lanes of its warp. A thread holds
the same channels of both halves of a head, which are the pairs that a rotation takes.

Both caches are updated in place: under `donate_argnums` and in a loop nothing is copied. A token that does not fit its
cache, or a layer outside of the stack, is not written.

Numerics: float32 from the products' sums to the results, which are rounded once. The angle of a pair is p f modulo a turn.
It is computed in integers: f in turns, times 2^32, is rounded to 32 bits, so that p f modulo 2^32 is exact, and p times
what the rounding left out is added in float32.

Limits: Hopper only. bfloat16 only. Up to 64 sequences. H and KV multiples of 4, and of C both the rotated half and what is
not rotated multiples of 32.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode_qkv.call import DecodeQkvCall
from tilewright.ops.attention.decode_qkv.config import DecodeQkvSm90Forward
from tilewright.ops.rope.api import Scaling, attention_factor, frequencies
from tilewright.pallas.gpu.elementwise import LANES
from tilewright.pallas.gpu.few_rows import TILE_ROWS, FewRows, unpadded_tiles
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel
from tilewright.pallas.gpu.registers import store
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_HEADS = 4  # Of a thread block: one per warp.
_MOST_CHANNELS_PER_THREAD = 4  # 16 bytes of float32, the widest load.
_WHOLE = 64  # Copies of weights see D in whole rows of 128 bytes.


def _pieces(call: DecodeQkvCall) -> list[tuple[int, int]]:
    """The first channel and the width of the parts of a head: the two halves that rotate, and the rest."""
    c, half = call.q_proj.shape[2], 0 if call.theta is None else call.rotary_dim // 2
    return [piece for piece in ((0, half), (half, half), (2 * half, c - 2 * half)) if piece[1]]


def _heuristic(chip: Chip, call: DecodeQkvCall) -> DecodeQkvSm90Forward:
    b, d = call.x.shape
    return DecodeQkvSm90Forward(*unpadded_tiles(chip, b, d, _columns(call)))


def _unsupported_reason(call: DecodeQkvCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    (b, d), (_, h, c), kv = call.x.shape, call.q_proj.shape, call.k_proj.shape[1]
    if not 0 < b <= TILE_ROWS[-1]:
        return f"B={b} must be from 1 to {TILE_ROWS[-1]} (the weights are read once); use implementation='reference'"
    if d % _WHOLE:
        return f"D={d} must be a multiple of {_WHOLE} (rows of copies); use implementation='reference'"
    if h % _HEADS or kv % _HEADS:
        return f"H={h} and KV={kv} must be multiples of {_HEADS} (one head per warp); use implementation='reference'"
    if any(width % LANES for _, width in _pieces(call)) or c % LANES:
        return (
            f"C={c} with rotary_dim={call.rotary_dim} must have halves and a rest of multiples of {LANES} channels (the "
            f"lanes of a warp); use implementation='reference'"
        )
    return None


def _columns(call: DecodeQkvCall) -> tuple[int, ...]:
    return tuple(w.shape[1] * w.shape[2] for w in (call.q_proj, call.k_proj, call.v_proj))


def _products(call: DecodeQkvCall, launch: Launch) -> FewRows:
    (m, k), config = call.x.shape, launch.config
    sizes = {"rows": config.block_b, "stages": config.stages, "splits": config.splits}
    return FewRows(chip=launch.chip, m=m, k=k, columns=_columns(call), **sizes)


def angle_tables(rotary_dim: int, theta: float, scaling: Scaling | None) -> tuple[np.ndarray, np.ndarray]:
    """The frequency of each pair in turns per position, times 2^32 and rounded, as int32; and what that leaves, in radians.

    Modulo 2^32 a product with a position is exact, and int32 is the part of a turn from -1/2 to 1/2.
    """
    turns = frequencies(rotary_dim, theta, scaling) / (2 * math.pi)
    whole = np.round(turns * 2.0**32)
    rest = (turns - whole * 2.0**-32) * (2 * math.pi)
    return (whole.astype(np.int64) % 2**32).astype(np.uint32).view(np.int32), rest.astype(np.float32)


def _layout(channels: int) -> Any:
    """A layout of [heads, width]: a warp per head, and `channels` adjacent elements per thread. Wider ones repeat that."""
    tiling = plgpu.Tiling(((_HEADS, LANES * channels), (channels,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _finish_kernel(
    *,
    # inputs
    z_ref,  # [splits, B, H + 2 KV, C] float32
    lengths_ref,  # [B]
    layer_ref,  # [1], or None
    q_norm_ref,  # [C], or None
    k_norm_ref,  # [C], or None
    whole_ref,  # [rotary_dim / 2] int32, the frequencies of `angle_tables`, or None
    rest_ref,  # [rotary_dim / 2], or None
    keys_ref,  # [L, N, S, KV, C], updated in place
    values_ref,  # [L, N, S, KV, C], updated in place
    # outputs
    q_ref,  # [B, H, C]
    # static
    call: DecodeQkvCall,
):
    splits, heads, kv = z_ref.shape[0], call.q_proj.shape[1], call.k_proj.shape[1]
    channels, pieces = call.q_proj.shape[2], _pieces(call)
    per_thread = math.gcd(*(width for _, width in pieces)) // LANES
    layout = _layout(math.gcd(per_thread, _MOST_CHANNELS_PER_THREAD))
    b, first_head = lax.axis_index("batch"), lax.axis_index("heads") * _HEADS
    position = lengths_ref[b]

    def load(ref: Any, which: Any) -> jax.Array:
        return plgpu.load(ref, layout=which, optimized=False)

    def spread(vector: jax.Array, width: int, axis: int) -> jax.Array:
        """A vector along one axis of [heads, width]."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, (_HEADS, width), [axis]), layout)

    def summed() -> list[jax.Array]:
        """The pieces of four heads, [heads, width] each. All loads come before the first sum."""
        own = pl.ds(first_head, _HEADS)
        parts = [[load(z_ref.at[n, b, own, pl.ds(*piece)], layout) for n in range(splits)] for piece in pieces]
        return [functools.reduce(jnp.add, each) for each in parts]

    def normed(parts: Sequence[jax.Array], w_ref: Any) -> Sequence[jax.Array]:
        if w_ref is None:
            return parts
        squares = functools.reduce(jnp.add, [jnp.sum(part * part, axis=1) for part in parts])  # [heads]
        scale = lax.rsqrt(squares * (1.0 / channels) + call.eps)
        weights = [load(w_ref.at[pl.ds(*piece)], layout.reduce(0)).astype(jnp.float32) for piece in pieces]
        return [
            part * spread(scale, part.shape[1], 0) * spread(w + call.norm_offset, part.shape[1], 1)
            for part, w in zip(parts, weights, strict=True)
        ]

    def rotated(parts: Sequence[jax.Array]) -> Sequence[jax.Array]:
        if whole_ref is None:
            return parts
        one, other, *unchanged = parts
        width, factor = one.shape[1], attention_factor(call.scaling)
        turned = (load(whole_ref, layout.reduce(0)) * position).astype(jnp.float32) * (2 * math.pi * 2.0**-32)
        angle = turned + load(rest_ref, layout.reduce(0)) * position.astype(jnp.float32)  # [width]
        cos, sin = (spread(table * factor, width, 1) for table in (jnp.cos(angle), jnp.sin(angle)))
        return [one * cos - other * sin, other * cos + one * sin, *unchanged]

    def write(ref: Any, parts: Sequence[jax.Array]) -> None:
        """Stores the parts to [heads, C]."""
        for piece, part in zip(pieces, parts, strict=True):
            store(ref.at[:, pl.ds(*piece)], part.astype(ref.dtype))

    def write_token(cache_ref: Any, head: Any, parts: Sequence[jax.Array]) -> None:
        joined, row = divmod_nonnegative(b, cache_ref.shape[1])
        layer = jnp.int32(0) if layer_ref is None else layer_ref[0]
        fits = (position >= 0) & (position < cache_ref.shape[2]) & (layer >= 0) & (layer < call.layers)

        @pl.when(fits)
        def _():
            write(cache_ref.at[joined * call.layers + layer, row, position, pl.ds(head, _HEADS)], parts)

    @pl.when(first_head < heads)
    def _queries():
        write(q_ref.at[b, pl.ds(first_head, _HEADS)], rotated(normed(summed(), q_norm_ref)))

    @pl.when((first_head >= heads) & (first_head < heads + kv))
    def _keys():
        write_token(keys_ref, first_head - heads, rotated(normed(summed(), k_norm_ref)))

    @pl.when(first_head >= heads + kv)
    def _values():
        write_token(values_ref, first_head - heads - kv, summed())


def _forward(call: DecodeQkvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    """The queries [B, H, C] and both caches."""
    (b, d), (_, heads, channels), kv = call.x.shape, call.q_proj.shape, call.k_proj.shape[1]
    weights = [w.reshape(d, -1) for w in (call.q_proj, call.k_proj, call.v_proj)]
    z = _products(call, launch).run(call.x, weights, name="decode_qkv_products")
    tables: tuple[Any, Any] = (None, None)
    if call.theta is not None:
        whole, rest = angle_tables(call.rotary_dim, call.theta, call.scaling)
        tables = jnp.asarray(whole), jnp.asarray(rest)
    keys, values = jax.new_ref(call.keys), jax.new_ref(call.values)
    # The body has the sizes of the call, and no array of it: a kernel captures none.
    shapes = call.with_arrays({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.given().items()})
    outputs = run_kernel(
        functools.partial(_finish_kernel, call=shapes),
        name="decode_qkv",
        inputs={
            "z": z.reshape(-1, b, heads + 2 * kv, channels),
            "lengths": call.lengths,
            "layer": None if call.layer is None else call.layer.reshape(1),
            "q_norm": call.q_norm,
            "k_norm": call.k_norm,
            "whole": tables[0],
            "rest": tables[1],
            "keys": keys,
            "values": values,
        },
        outputs={"q": jax.ShapeDtypeStruct((b, heads, channels), call.x.dtype)},
        scratch={},
        grid={"heads": (heads + 2 * kv) // _HEADS, "batch": b},
        params=compiler_params(approximate_math=False),
    )
    return (outputs["q"], jax.freeze(keys), jax.freeze(values)), None


FORWARD = Pass(
    _forward,
    config=DecodeQkvSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=lambda call, launch: {"products": _products(call, launch).memory},
    memory_fields="fewer stages",
)
