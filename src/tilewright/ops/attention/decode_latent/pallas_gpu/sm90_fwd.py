"""Attention of one token per sequence over a cache of latents, as a Mosaic GPU kernel for Hopper.

For each sequence and head, an online softmax over the latents c_s up to the length, which are keys and values at once:

    a_s = log2(e) scale q . c_s      out = sum_s 2^(a_s - m) c_s[:R] / sum_s 2^(a_s - m)      m = max_s a_s

Floor: the latents up to the length, read once: 2 S D bytes per sequence in bfloat16. For B64 S1040 D576 these are 77 MB,
16 us at an H200's 4.8 TB/s, 18 us at the 4.2 TB/s that it copies with. FLOPs: 2 S (D + R) per sequence and head, 2.3
GFLOP there with 16 heads.

Blocking: a thread block of one warpgroup for a sequence, a tile of up to 32 heads and one of `splits` parts of the
latents. Both products are transposed, so that the 64 rows that wgmma takes are filled by keys and by channels, and heads
are its columns, 8 or more:

    logits^T [64 keys, heads] = C Q^T              C [64, D] as it lies in shared memory
    out^T    [R, heads]      += C[:, :R]^T P^T     the same tile as a transposed left operand

With 16 heads, queries as the rows would be three quarters padding, and their accumulator of [64, 512] would need two
warpgroups. Here a tile of 64 latents is 68 instructions of 64 x 16 x 16, bound by the read of the left operand from shared
memory: about 1,100 cycles, next to 3,600 in which a multiprocessor receives its share of the next tile. So one warpgroup
copies and multiplies in turn, as in `decode_attention`: full barriers and no empty ones. The weights go through shared
memory, since a right operand has to be there. The maximum over the keys is one over warps as well; the totals stay in the
threads that have their keys until the end.

With several splits a second kernel combines them (decode/pallas_gpu/combine.py): two launches instead of one. More than
32 heads are tiles of heads, whose thread blocks are neighbours and read the same latents, all but one from the L2.

Edges: the cache may hold anything past the length. Logits are masked there, and latents are replaced by zeros, since 0
times NaN is NaN. Copies past the end of the cache read zeros. A length out of range is taken for 0, and its total for NaN.

Numerics: logits, statistics and accumulators in float32. Weights are rounded to bfloat16 for the second product, as in
flash_attention. The sums of a split are written as a bf16x2 split, 16 bits of mantissa. Results are the same in every run.

Limits: Hopper only. bfloat16 only. H a multiple of 8; D and R multiples of 64; R up to 512 (registers); two stages of 64
latents have to fit the shared memory, which D 576 does. A cache whose room is no multiple of 8 is padded, which copies it.

Measured on an H200 in a model, H16 S1040 D576: 25.4 us at batch 64 (3.0 TB/s) and 5.2 us at batch 1, and 2.2 and 1.8 us to
combine splits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.attention.decode.config import SM90_MOST_SPLITS
from tilewright.ops.attention.decode.pallas_gpu.combine import choose_splits, combine_scratch, combine_splits
from tilewright.ops.attention.decode.pallas_gpu.rows import EIGHT, Rows
from tilewright.ops.attention.decode_latent.call import DecodeLatentCall
from tilewright.ops.attention.decode_latent.config import DecodeLatentSm90Forward
from tilewright.ops.attention.pallas_gpu.tiles import scaled_logits
from tilewright.ops.attention.softmax_rows import LOWEST, MASKED
from tilewright.pallas.gpu.kernel import aligned, compiler_params, run_kernel, smem_bytes, tile, whole
from tilewright.pallas.gpu.registers import WGMMA, row_indices, split_hi_lo, tile_of_zeros, transposed
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.staging import clear_rows
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, not_bfloat16, product

_KEYS = 64  # Of a block: the rows of a wgmma product.
_MOST_HEADS = 32  # Of a tile: with R = 512 its accumulator has 128 registers per thread.
_WIDEST_VALUES = 512
_STAGES = 2
_WIDE_COMBINE, _NARROW_COMBINE = 128, 32  # Value channels of a thread block of the combine kernel.


def _rows(call: DecodeLatentCall) -> Rows:
    row_bytes = call.value_dim * call.q.dtype.itemsize
    return Rows(tokens=1, heads=call.q.shape[1], kv=1, row_bytes=row_bytes, most=_MOST_HEADS)


def _heuristic(chip: Chip, call: DecodeLatentCall) -> DecodeLatentSm90Forward:
    """The splits that fill the GPU with a thread block per multiprocessor, and a combine kernel that does, too."""
    rows, slots = _rows(call), chip.multiprocessors or 132
    items, blocks = call.q.shape[0] * rows.tiles, -(-call.latents.shape[1] // _KEYS)
    most = min(SM90_MOST_SPLITS, blocks, max(1, 4 * slots // items))
    splits = choose_splits(items, blocks, slots, most)
    wide = call.q.shape[0] * (rows.written // EIGHT) * (call.value_dim // _WIDE_COMBINE) >= slots
    return DecodeLatentSm90Forward(_STAGES, splits, combine_block_v=_WIDE_COMBINE if wide else _NARROW_COMBINE)


def _unsupported_reason(call: DecodeLatentCall, launch: Launch) -> str | None:
    if (reason := not_bfloat16(call.q, ("q", "latents"))) is not None:
        return reason
    (_, h, d), r = call.q.shape, call.value_dim
    if h % EIGHT:
        return f"H={h} must be a multiple of {EIGHT} (columns of a product); use implementation='xla'"
    if d % _KEYS or r % _KEYS:
        return f"D={d} and value_dim={r} must be multiples of {_KEYS} (rows of a product); use implementation='xla'"
    if r > _WIDEST_VALUES:
        return f"value_dim={r} must be {_WIDEST_VALUES} at most (registers of a warpgroup); use implementation='xla'"
    return None


def _decode_scratch(call: DecodeLatentCall, config: DecodeLatentSm90Forward) -> dict[str, Any]:
    d, r, dtype, heads = call.q.shape[2], call.value_dim, call.q.dtype, _rows(call).tile_rows
    return {
        "q_smem": tile(heads, d, dtype=dtype),
        "values_smem": tile(config.stages, _KEYS, r, dtype=dtype),
        "others_smem": tile(config.stages, _KEYS, d - r, dtype=dtype) if d > r else None,
        "weights_smem": tile(heads, _KEYS, dtype=dtype),
        "statistics_smem": plgpu.SMEM((2, heads), jnp.float32),
        "q_full": plgpu.Barrier(),
        "full": plgpu.Barrier(num_arrivals=2 if d > r else 1, num_barriers=config.stages),
    }


def _memory(call: DecodeLatentCall, launch: Launch) -> dict[str, int]:
    config = launch.config
    combine = combine_scratch(_rows(call), call.value_dim, config.combine_block_v, call.q.dtype)
    return {
        "decode": smem_bytes(_decode_scratch(call, config), reductions=True),
        "combine": smem_bytes(combine),
    }


def _decode_kernel(
    *,
    # inputs
    q_ref,  # [B, H, D]
    latents_ref,  # [B, S, D]
    lengths_ref,  # [B]
    # outputs
    out_ref,  # [B, H, R]; with several splits, their sums [B, 1, tiles, splits, hi and lo, heads, R]
    statistics_ref,  # None; with several splits, maximum and total [B, 1, tiles, splits, 2, heads]
    # scratch
    q_smem,  # [heads, D]
    values_smem,  # [stages, _KEYS, R], the channels of the latents that are values
    others_smem,  # [stages, _KEYS, D - R], the other channels, or None
    weights_smem,  # [heads, _KEYS]
    statistics_smem,  # [2, heads]
    q_full,
    full,
    # static
    call: DecodeLatentCall,
    rows: Rows,
    config: DecodeLatentSm90Forward,
):
    (d, r), stages, heads = (call.q.shape[2], call.value_dim), config.stages, rows.tile_rows
    shape = _KEYS, heads
    # The channels of a latent, as the two buffers have them.
    parts = [(values_smem, pl.ds(0, r))] + ([] if others_smem is None else [(others_smem, pl.ds(r, d - r))])
    rest, n_tile = divmod_nonnegative(lax.axis_index("work"), rows.tiles)
    b, split = divmod_nonnegative(rest, config.splits)
    length = lengths_ref[b]
    in_range = (length >= 0) & (length <= call.latents.shape[1])
    length = jnp.where(in_range, length, 0)
    blocks = lax.div(length + (_KEYS - 1), jnp.int32(_KEYS))
    begin, end = (lax.div(blocks * part, jnp.int32(config.splits)) for part in (split, split + 1))
    count = end - begin

    def stage_of(n: Any) -> Any:
        return lax.rem(n, jnp.int32(stages))

    def fetch(n: Any) -> None:
        stage, keys = stage_of(n), pl.ds((begin + n) * _KEYS, _KEYS)
        for smem, channels in parts:
            plgpu.copy_gmem_to_smem(latents_ref.at[b, keys, channels], smem.at[stage], full.at[stage])

    # The queries come first: their copy does not wait for the length.
    first_head = rows.first(0, n_tile)
    plgpu.copy_gmem_to_smem(q_ref.at[b, pl.ds(first_head, heads)], q_smem, q_full)
    for n in range(stages):
        pl.when(n < count)(functools.partial(fetch, jnp.int32(n)))
    plgpu.barrier_wait(q_full)

    def along_heads(vector: jax.Array, like: jax.Array) -> jax.Array:
        """A vector with one element per head, repeated over the rows of a tile."""
        return lax.broadcast_in_dim(vector, like.shape, [1])

    def step(n: Any, carry: Any) -> Any:
        acc, highest, totals = carry
        stage, start = stage_of(n), (begin + n) * _KEYS
        plgpu.barrier_wait(full.at[stage])
        (values,) = clear_rows([values_smem.at[stage]], 0, length - start)  # [_KEYS, R]

        def multiply(sum_: Accumulator) -> None:
            for smem, channels in parts:
                sum_.add(smem.at[stage], transposed(q_smem.at[:, channels]))

        logits = product(shape, multiply)
        logits, factor, _ = scaled_logits(logits, call)
        logits = jnp.where(row_indices(shape) + start < length, logits, MASKED / max(factor, 1.0))
        new_highest = jnp.maximum(highest, jnp.max(logits, axis=0) * factor)
        alpha = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(logits * factor - along_heads(new_highest, logits))
        totals = totals * along_heads(alpha, totals) + weights
        transposed(weights_smem)[...] = weights.astype(weights_smem.dtype)
        plgpu.commit_smem()
        acc = acc * along_heads(alpha, acc)
        (acc,) = accumulate((acc,), lambda sum_: sum_.add(transposed(values), transposed(weights_smem)))
        pl.when(n + stages < count)(lambda: fetch(n + stages))
        return acc, new_highest, totals

    highest = plgpu.layout_cast(jnp.full((heads,), LOWEST, jnp.float32), WGMMA.reduce(0))
    initial = tile_of_zeros((r, heads)), highest, tile_of_zeros(shape)
    acc, highest, totals = lax.fori_loop(0, count, step, initial)
    total = jnp.sum(totals, axis=0) + jnp.where(in_range, 0.0, jnp.nan)

    # All copies have been used: the results are written through the first stage.
    def staged(n: int) -> Any:
        return values_smem.at[0, pl.ds(n * heads, heads)]

    if config.splits > 1:
        part = (b, 0, n_tile, split)
        sums = split_hi_lo(acc)
        for n, value in enumerate(sums):
            transposed(staged(n))[...] = value
        for n, value in enumerate((highest, total)):
            statistics_smem[n] = value
        plgpu.commit_smem()
        for n in range(len(sums)):
            plgpu.copy_smem_to_gmem(staged(n), out_ref.at[*part, n])
            plgpu.copy_smem_to_gmem(statistics_smem.at[n], statistics_ref.at[*part, n])
        plgpu.wait_smem_to_gmem(0)
        return

    out = acc * along_heads(1.0 / jnp.where(total == 0, 1.0, total), acc)
    transposed(staged(0))[...] = out.astype(values_smem.dtype)
    plgpu.commit_smem()
    for n in range(0, heads, EIGHT):
        head = n_tile * rows.most + n

        def write(head: Any = head) -> None:
            own = values_smem.at[0, pl.ds(head - first_head, EIGHT)]
            plgpu.copy_smem_to_gmem(own, out_ref.at[b, pl.ds(head, EIGHT)])

        if rows.heads % heads == 0:
            write()
        else:
            pl.when(head < rows.heads)(write)  # The last tile begins with heads of the one before.
    plgpu.wait_smem_to_gmem(0)


def _forward(call: DecodeLatentCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    """out [B, H, R]; lengths may be out of range."""
    config: DecodeLatentSm90Forward = launch.config
    (b, h, _), dtype, rows, split = call.q.shape, call.q.dtype, _rows(call), config.splits > 1
    struct = jax.ShapeDtypeStruct
    part = (b, 1, rows.tiles, config.splits, 2, rows.tile_rows)
    outputs = run_kernel(
        functools.partial(_decode_kernel, call=call, rows=rows, config=config),
        name="decode_latent_attention",
        inputs={
            "q": call.q,
            # Copies past the end of S read zeros.
            "latents": whole(aligned(call.latents), _KEYS, 1),
            "lengths": call.lengths,
        },
        outputs={
            "out": struct((*part, call.value_dim) if split else (b, h, call.value_dim), dtype),
            "statistics": struct(part, jnp.float32) if split else None,
        },
        scratch=_decode_scratch(call, config),
        grid={"work": b * config.splits * rows.tiles},
        params=compiler_params(automatic_barriers=True),
    )
    if not split:
        return outputs["out"], None
    sizes = {"at_a_time": config.combine_splits, "block_v": config.combine_block_v}
    out, _ = combine_splits(outputs["out"], outputs["statistics"], None, rows, **sizes)
    return out, None


FORWARD = Pass(
    _forward,
    config=DecodeLatentSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="fewer stages",
)
