"""`decode_latent_qkv` as two Mosaic GPU kernels for Hopper: the product with both weights, and everything behind it.

For each sequence, with its token x at position p = length,

    q = x Wq;  c, e = x Wdown;  latents[p] <- [c / sqrt(mean(c^2) + eps) norm, e]

Floor: the weights read once, 2 D (H C + K) bytes; for D 2048, H 16, C 192 and K 576 these are 15 MB, 3.1 us at the 4.8 TB/s
of an H200. What counts beside it is the number of launches. XLA's program has a dozen: two products, the sums of their
splits, a scatter, and the constants that it takes from memory. It also computes the mean again for every channel that it
writes, since it fuses the norm into the scatter (seen in the optimised program for 64 rows, jax 0.12).

Blocking: the first kernel is pallas/gpu/few_rows.py with both weights, which leaves a float32 sum per split of D. In the
second, a thread block of one warpgroup has the latent of a sequence, or up to 1,024 channels of its queries. It loads all
splits before it adds the first, since it waits for the L2. The channels of a latent that are not normalised are few: each
warp adds up all of them, and all write the same.

The cache is updated in place: under `donate_argnums` and in a loop nothing is copied. A token that does not fit its cache,
or a layer outside of the stack, is not written.

Numerics: float32 from the products' sums to the results, which are rounded once. The same bits in every run.

Limits: Hopper only. bfloat16 only. Up to 64 sequences. D a multiple of 64, H C and N multiples of 128, N up to 1,024, and
K - N a multiple of 32, up to 256.

Measured on an H200 in a model, D 2048, H 16, C 192, K 576: the products take 6.7 us at batch 64 and 5.8 us at batch 1, the
second kernel 2.0 and 1.6 us.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode_latent_qkv.call import DecodeLatentQkvCall
from tilewright.ops.attention.decode_qkv.config import DecodeQkvSm90Forward
from tilewright.pallas.gpu.elementwise import LANES, THREADS, load, store
from tilewright.pallas.gpu.few_rows import TILE_ROWS, FewRows, unpadded_tiles
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel
from tilewright.pallas.gpu.registers import store as store_replicated
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_MOST_CHANNELS_PER_VECTOR = 4  # 16 bytes of float32, the widest load.
_MOST_WIDTH = 1024  # Channels of a thread block: 8 per thread and split.
_MOST_OTHERS = 256
_WHOLE = 64  # Copies of weights see D in whole rows of 128 bytes.


def _columns(call: DecodeLatentQkvCall) -> tuple[int, int]:
    """Those of the queries, which are whole tiles of the product, and those of the latent behind them."""
    return call.q_proj.shape[1] * call.q_proj.shape[2], call.kv_down.shape[1]


def _heuristic(chip: Chip, call: DecodeLatentQkvCall) -> DecodeQkvSm90Forward:
    b, d = call.x.shape
    return DecodeQkvSm90Forward(*unpadded_tiles(chip, b, d, _columns(call)))


def _unsupported_reason(call: DecodeLatentQkvCall, launch: Launch) -> str | None:
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    (b, d), (queries, k), n = call.x.shape, _columns(call), call.norm.shape[0]
    if not 0 < b <= TILE_ROWS[-1]:
        return f"B={b} must be from 1 to {TILE_ROWS[-1]} (the weights are read once); use implementation='reference'"
    if d % _WHOLE:
        return f"D={d} must be a multiple of {_WHOLE} (rows of copies); use implementation='reference'"
    if queries % THREADS or n % THREADS or n > _MOST_WIDTH:
        return (
            f"H C={queries} and N={n} must be multiples of {THREADS} (the threads that hold them), and N up to "
            f"{_MOST_WIDTH}; use implementation='reference'"
        )
    if (k - n) % LANES or k - n > _MOST_OTHERS:
        return (
            f"K - N={k - n} must be a multiple of {LANES} (the lanes of a warp), up to {_MOST_OTHERS}; use "
            f"implementation='reference'"
        )
    return None


def _products(call: DecodeLatentQkvCall, launch: Launch) -> FewRows:
    (m, k), config = call.x.shape, launch.config
    sizes = {"rows": config.block_b, "stages": config.stages, "splits": config.splits}
    return FewRows(chip=launch.chip, m=m, k=k, columns=_columns(call), **sizes)


def _finish_kernel(
    *,
    # inputs
    z_ref,  # [splits, B, H C + K] float32
    lengths_ref,  # [B]
    layer_ref,  # [1], or None
    norm_ref,  # [N]
    latents_ref,  # [L, N, S, K], updated in place
    # outputs
    q_ref,  # [B, H C]
    # static
    call: DecodeLatentQkvCall,
    width: int,
):
    splits, (queries, k), n = z_ref.shape[0], _columns(call), call.norm.shape[0]
    b, part = lax.axis_index("batch"), lax.axis_index("part")
    row = pl.ds(b, 1)

    def vector(channels: int, threads: int) -> int:
        return math.gcd(channels // threads, _MOST_CHANNELS_PER_VECTOR)

    def of_all_threads(channels: int) -> Any:
        """A layout of [1, channels]."""
        each = vector(channels, THREADS)
        tiling = plgpu.Tiling(((1, each * THREADS), (each * LANES,), (each,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

    def of_each_warp(channels: int) -> Any:
        """A layout of [channels], the same in every warp."""
        each = vector(channels, LANES)
        tiling = plgpu.Tiling(((THREADS // LANES, each * LANES), (each,)))
        return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1).reduce(0)

    def summed(first: Any, channels: int) -> jax.Array:
        """The sum of the splits, [1, channels]. All loads come before the first sum."""
        layout, columns = of_all_threads(channels), pl.ds(first, channels)
        return functools.reduce(jnp.add, [load(z_ref.at[s, row, columns], layout) for s in range(splits)])

    @pl.when(part * width < queries)
    def _queries():
        first = part * width
        store(q_ref.at[row, pl.ds(first, width)], summed(first, width).astype(q_ref.dtype), of_all_threads(width))

    @pl.when(part * width >= queries)
    def _latent():
        position, layer = lengths_ref[b], jnp.int32(0) if layer_ref is None else layer_ref[0]
        joined, own = divmod_nonnegative(b, latents_ref.shape[1])
        layout, shape = of_all_threads(n), (1, n)
        c = summed(queries, n)
        weights = plgpu.load(norm_ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)  # [N]
        mean = jnp.sum(c * c, axis=1) * (1.0 / n)  # [1]
        scale = plgpu.layout_cast(lax.broadcast_in_dim(lax.rsqrt(mean + call.eps), shape, [0]), layout)
        c = c * scale * plgpu.layout_cast(lax.broadcast_in_dim(weights, shape, [1]), layout)
        fits = (position >= 0) & (position < latents_ref.shape[2]) & (layer >= 0) & (layer < call.layers)

        @pl.when(fits)
        def _():
            target = latents_ref.at[joined * call.layers + layer, own]  # [S, K]
            store(target.at[pl.ds(position, 1), pl.ds(0, n)], c.astype(target.dtype), layout)
            if k > n:
                others = of_each_warp(k - n)
                parts = [
                    plgpu.load(z_ref.at[s, b, pl.ds(queries + n, k - n)], layout=others, optimized=False)
                    for s in range(splits)
                ]
                e = functools.reduce(jnp.add, parts).astype(target.dtype)
                store_replicated(target.at[position, pl.ds(n, k - n)], e)


def _forward(call: DecodeLatentQkvCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """The queries [B, H, C] and the cache."""
    (b, d), (queries, _) = call.x.shape, _columns(call)
    weights = [call.q_proj.reshape(d, -1), call.kv_down]
    z = _products(call, launch).run(call.x, weights, name="decode_latent_qkv_products")
    width, latents = math.gcd(queries, _MOST_WIDTH), jax.new_ref(call.latents)
    # The body has the sizes of the call, and no array of it: a kernel captures none.
    shapes = call.with_arrays({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.given().items()})
    outputs = run_kernel(
        functools.partial(_finish_kernel, call=shapes, width=width),
        name="decode_latent_qkv",
        inputs={
            "z": z,
            "lengths": call.lengths,
            "layer": None if call.layer is None else call.layer.reshape(1),
            "norm": call.norm,
            "latents": latents,
        },
        outputs={"q": jax.ShapeDtypeStruct((b, queries), call.x.dtype)},
        scratch={},
        grid={"part": queries // width + 1, "batch": b},
        params=compiler_params(approximate_math=False),
    )
    return (outputs["q"].reshape(b, *call.q_proj.shape[1:]), jax.freeze(latents)), None


FORWARD = Pass(
    _forward,
    config=DecodeQkvSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=lambda call, launch: {"products": _products(call, launch).memory},
    memory_fields="fewer stages",
)
