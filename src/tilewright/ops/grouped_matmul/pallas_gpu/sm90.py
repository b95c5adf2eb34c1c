"""`grouped_matmul` on Hopper: forward and both gradients of bfloat16 operands, and forward of operands of 8 bits.

    y_m = activation(x_m w_g)        dx_m = dz_m w_g^T        dw_g: sm90_dw.py

Floor: 2 M K N FLOPs per product and part; x and every w_g read once, y written once. Here: the FLOPs of M + G block_m / 2
rows in the mean, since the last tile of a group is not full.

Blocking: the main loop of pallas/gpu/gemm.py with tiles that a small kernel lists from the sizes of the groups
(sm90_tiles.py): a tile begins where the one before it ends, and the first of a group up to seven rows before the group,
since copies begin at multiples of 8 rows. Its rows of other groups are multiplied too, with the wrong matrix, and not
stored. A tile without such rows is copied through shared memory; of the others each thread stores its own values
(`store_rows`). Rows past the last group have tiles of their own, whose main loop has no steps: they store zeros.

Where the sizes are wrong, y and both gradients are NaN (`poison`).

swiglu of 65,536 rows in 128 groups, [2048, 2 x 768], takes 0.790 ms on an H200, where the product alone takes 0.785 ms and
it took 0.816 ms with three stages and a slower activation (ops/matmul/pallas_gpu/sm90.py).

All sums are in one order: the same bits in every run.

Quantised weights with a float x: for up to 128 rows per group in the mean the kernel converts them
(pallas/gpu/weight_only.py). For more they are dequantised by XLA to bfloat16 first, which rounds each of them once. Two
quantised operands are multiplied as in ops/matmul/pallas_gpu/sm90.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.products import dequantized_weights
from tilewright.ops.grouped_matmul.blocks import most_tiles
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall, group_starts, poison
from tilewright.ops.grouped_matmul.config import GroupedMatmulSm90Backward, GroupedMatmulSm90Forward
from tilewright.ops.grouped_matmul.pallas_gpu.sm90_dw import dw_gemm, dw_scratch, weight_gradient
from tilewright.ops.grouped_matmul.pallas_gpu.sm90_tiles import row_tile_list
from tilewright.pallas.gpu import weight_only
from tilewright.pallas.gpu.block_scales import DEPTH, BlockScale, refused_operands, scale_operands, scaled_at_end
from tilewright.pallas.gpu.elementwise import activate
from tilewright.pallas.gpu.gemm import ALIGNMENT, BAND, BLOCK_N, MEMORY_FIELDS, STAGES, Gemm, Plan, largest_tile
from tilewright.pallas.gpu.kernel import aligned, aligned_size, smem_bytes, whole, whole_shape, with_rows_past_end
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.staging import WIDTH, Staging, staging_scratch, store_rows, stored_columns
from tilewright.pallas.gpu.swiglu_gradient import rounded_d_product
from tilewright.pallas.gpu.weight_only import GROUP, GROUP_END, GROUP_START, START


def _rows_kernel(
    *,
    # inputs
    x_ref,  # [M, K]
    w_ref,  # [G, K, n], [G, K, parts, n], or [G, n, K]
    tiles_ref,  # [4, tiles]
    count_ref,  # [128], all equal
    poison_ref,  # [128], all equal
    x_scales_ref,  # [KX, M], of quantised operands
    w_scales_ref,  # [G, KS, parts, NS]
    # outputs
    y_ref,  # [M, n]
    z_ref,  # [M, parts, n]
    # scratch
    y_smem,  # [consumers, BUFFERS, rows, WIDTH]
    z_smem,  # The same, or None where z shares those of y
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    groups: int,
    activation: str | None,
):
    """y, and dx: each tile has rows of one group."""
    columns = pl.cdiv(gemm.n, gemm.width)
    program, count = lax.axis_index("program"), count_ref[0]
    bad = poison_ref[0]

    def locate(done: Any) -> tuple[Any, ...]:
        number = program + done * gemm.blocks
        # Bands of row tiles go through all columns, as in `Banded`; the last band may have fewer.
        which, rest = divmod_nonnegative(number, gemm.band * columns)
        first = which * gemm.band
        height = jnp.minimum(count - first, gemm.band)
        row, column = first + lax.rem(rest, height), lax.div(rest, height)
        bounds = tiles_ref[GROUP_START, row], tiles_ref[GROUP_END, row]
        return tiles_ref[START, row], tiles_ref[GROUP, row], bounds, column

    def sources(step: Any, start: Any, group: Any, bounds: Any, column: Any) -> tuple[Any, list[Any]]:
        depth, own = pl.ds(step * gemm.block_k, gemm.block_k), pl.ds(column * gemm.width, gemm.width)
        a = x_ref.at[pl.ds(start, gemm.block_m), depth]
        if gemm.parts > 1 and gemm.b_transposed:
            return a, [w_ref.at[group, part, own, depth] for part in range(gemm.parts)]
        if gemm.parts > 1:
            return a, [w_ref.at[group, depth, part, own] for part in range(gemm.parts)]
        return a, [w_ref.at[group, own, depth] if gemm.b_transposed else w_ref.at[group, depth, own]]

    def epilogue(consumer: Any, start: Any, group: Any, bounds: Any, column: Any) -> Any:
        first_row = start + consumer * gemm.rows
        first, end = (jnp.clip(bound - first_row, 0, gemm.rows) for bound in bounds)  # Rows of the group.
        rows = pl.ds(first_row, gemm.rows)

        def parts_of(products: tuple[jax.Array, ...], begin: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            z = tuple(product[:, begin : begin + WIDTH] for product in products)
            y = activate(activation, z, WGMMA)
            return y + bad, z

        def store_all(products: tuple[jax.Array, ...]) -> None:
            staging = Staging(y=y_smem.at[consumer], z=(y_smem if z_smem is None else z_smem).at[consumer])
            for begin in stored_columns(gemm.width, gemm.n):
                y, z = parts_of(products, begin)
                at = pl.ds(column * gemm.width + begin, WIDTH)
                if z_ref is not None:
                    for part, each in enumerate(z):
                        staging.store(each, z_ref.at[rows, part, at], "z")
                staging.store(y, y_ref.at[rows, at], "y")
            staging.end()

        def store_some(products: tuple[jax.Array, ...]) -> None:
            for begin in stored_columns(gemm.width, gemm.n):
                y, z = parts_of(products, begin)
                at = column * gemm.width + begin
                if z_ref is not None:
                    for part, each in enumerate(z):
                        store_rows(each, z_ref.at[:, part], first_row, at, first, end)
                store_rows(y, y_ref, first_row, at, first, end)

        def finish(*products: jax.Array) -> None:
            count = end - first
            pl.when(count == gemm.rows)(lambda: store_all(products))
            pl.when((count > 0) & (count < gemm.rows))(lambda: store_some(products))

        return finish

    total = count * columns
    plan = Plan(
        count=lax.div(total - program + gemm.blocks - 1, jnp.int32(gemm.blocks)),
        locate=locate,
        sources=sources,
        steps=lambda start, group, bounds, column: jnp.where(group < groups, gemm.steps, 0),
    )

    def scale(consumer: Any, step: Any, start: Any, group: Any, bounds: Any, column: Any) -> Any:
        row = start + consumer * gemm.rows
        own = w_scales_ref.at[jnp.minimum(group, groups - 1)]  # Rows past the last group load scales, and use none.
        return BlockScale(gemm, x_scales_ref, own, step, row, column * gemm.width)

    gemm.main_loop(
        x_ref,
        w_ref,
        pipeline,
        epilogue,
        plan=plan,
        scale=None if x_scales_ref is None else scale,
        scale_at_end=scaled_at_end(gemm, x_scales_ref, w_scales_ref),
    )


def _multiply_rows(
    gemm: Gemm,
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    out_dtype: Any,
    *,
    name: str,
    activation: str | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    z_dtype: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """y [M, n], and z [M, parts, n] where `z_dtype` is given."""
    (m, n), depth, rows, columns = (gemm.m, gemm.n), gemm.block_k, gemm.block_m, gemm.width
    tiles, count, bad = row_tile_list(group_sizes, m, rows)
    x = with_rows_past_end(whole(aligned(x), depth), rows)
    if gemm.parts > 1 and gemm.b_transposed:
        w = whole(aligned(w), columns, depth)
    elif gemm.parts > 1:
        w = whole(aligned(w, rows=1), depth, 1, columns)
    else:
        w = whole(aligned(w), *((columns, depth) if gemm.b_transposed else (depth, columns)))
    m_out, n_out = aligned_size(m, n, jnp.bfloat16)
    outputs = gemm.run(
        functools.partial(_rows_kernel, gemm=gemm, groups=group_sizes.shape[0], activation=activation),
        name=name,
        inputs={
            "x": x,
            "w": w,
            "tiles": tiles,
            "count": count,
            "poison": bad,
            **dict(zip(("x_scales", "w_scales"), scales or (None, None), strict=True)),
        },
        outputs={
            "y": jax.ShapeDtypeStruct(whole_shape((m_out, n_out), 1, columns), out_dtype),
            "z": None
            if z_dtype is None
            else jax.ShapeDtypeStruct(whole_shape((m_out, gemm.parts, n_out), 1, 1, columns), z_dtype),
        },
        scratch=staging_scratch(gemm.consumers, gemm.rows, y=out_dtype, z=z_dtype),
    )
    return outputs["y"][:m, :n], None if z_dtype is None else outputs["z"][:m, :, :n]


def _rows_gemm(call: GroupedMatmulCall, launch: Launch, k: int, n: int, **options: Any) -> Gemm:
    """A product of the rows of x, or of dz, with the matrices of their groups."""
    groups, m, _, _ = call.sizes
    config, parts = launch.config, options.get("parts", 1)
    most = most_tiles(m, groups + 1, config.block_m, ALIGNMENT) * pl.cdiv(n, config.block_n // parts)
    # Adjacent tiles of rows may be of two groups, and share no columns of w then: `cluster` is for dw.
    options = {"dtype": jnp.bfloat16, "cluster": 1, **options}
    return Gemm.of(config, launch.chip, m=m, n=n, k=k, most_tiles=most, **options)


def _forward_gemm(call: GroupedMatmulCall, launch: Launch) -> Gemm:
    _, _, k, n = call.sizes
    if call.x_scales is None:
        return _rows_gemm(call, launch, k, n, parts=call.parts)
    options = {"block_k": DEPTH, "b_transposed": True, "parts": call.parts, "dtype": call.x.dtype}
    return _rows_gemm(call, launch, k, n, **options)


def _operands(call: GroupedMatmulCall, gemm: Gemm) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The matrices of the groups, and the scales of quantised operands."""
    groups, _, k, n = call.sizes
    if call.x_scales is None or call.w_scales is None:
        w = dequantized_weights(call, jnp.bfloat16)
        return w.reshape(groups, k, call.parts, n) if call.parts > 1 else w, None
    # [G, P, N, K]: how float8 weights are stored, and a copy where they are not. 8 bits are read in no other order.
    w = jnp.moveaxis(call.w, 1, 3)
    x_scales, w_scales = scale_operands(gemm, call.x_scales, call.w_scales)
    # A tile may begin at any row, and then reads scales past the end.
    return w if call.parts > 1 else w[:, 0], (jnp.pad(x_scales, ((0, 0), (0, gemm.block_m))), w_scales)


def _forward(call: GroupedMatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    name = "grouped_matmul_forward"
    if weight_only.converts(call, launch.config):
        rows = launch.config.block_m
        tiles, count, bad = row_tile_list(call.group_sizes, call.x.shape[0], rows, weight_only.alignment(rows))
        return weight_only.multiply(call, launch, tiles, count, call.out_dtype, name=name, save=save, poison=bad)
    gemm = _forward_gemm(call, launch)
    w, scales = _operands(call, gemm)
    return _multiply_rows(
        gemm,
        call.x,
        w,
        call.group_sizes,
        call.out_dtype,
        name=name,
        activation=call.activation,
        scales=scales,
        z_dtype=jnp.bfloat16 if save and call.activation is not None else None,
    )


def _dx_gemm(call: GroupedMatmulCall, launch: Launch) -> Gemm:
    """dz w^T of the rows of each group."""
    _, _, k, n = call.sizes
    return _rows_gemm(call, launch, call.parts * n, k, b_transposed=True)


def _backward(call: GroupedMatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> GroupedMatmulCall:
    if call.x_scales is not None:  # Operands of 8 bits have no gradient.
        return call.gradients()
    dz, w = rounded_d_product(call, saved, dy), dequantized_weights(call, jnp.bfloat16)
    dx, _ = _multiply_rows(_dx_gemm(call, launch), dz, w, call.group_sizes, jnp.bfloat16, name="grouped_matmul_dx")
    if call.w_scales is not None:
        return call.gradients(x=dx)
    m = call.x.shape[0]
    starts, bad = group_starts(call.group_sizes, m), poison(call.group_sizes, m)
    dw = weight_gradient(dw_gemm(call, launch), call.x, dz, starts, bad)
    return call.gradients(x=dx, w=dw.reshape(call.w.shape))


def _forward_memory(call: GroupedMatmulCall, launch: Launch) -> dict[str, int]:
    if weight_only.converts(call, launch.config):
        return {"forward": weight_only.of_call(call, launch).memory}
    gemm = _forward_gemm(call, launch)
    z_dtype = None if call.activation is None else jnp.bfloat16
    return {
        "forward": smem_bytes(
            {**staging_scratch(gemm.consumers, gemm.rows, y=call.out_dtype, z=z_dtype), **gemm.scratch()}
        )
    }


def _backward_memory(call: GroupedMatmulCall, launch: Launch) -> dict[str, int]:
    for_x, for_w = _dx_gemm(call, launch), dw_gemm(call, launch)
    return {
        "dx": smem_bytes({**staging_scratch(for_x.consumers, for_x.rows, y=jnp.bfloat16), **for_x.scratch()}),
        "dw": smem_bytes({**dw_scratch(for_w), **for_w.scratch()}),
    }


def _heuristic(chip: Chip, call: GroupedMatmulCall) -> GroupedMatmulSm90Forward:
    return largest_tile(
        GroupedMatmulSm90Forward,
        chip,
        lambda config: _forward_memory(call, Launch(chip, config, None)),
        call,
        rows_per_group=-(-call.sizes[1] // max(1, call.sizes[0])),
    )


FORWARD = Pass(
    _forward,
    config=GroupedMatmulSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=lambda call, launch: refused_operands(call, launch.config, parts=call.parts),
    memory=_forward_memory,
    memory_fields=MEMORY_FIELDS,
    saved="M . N",
)
BACKWARD = Pass(
    _backward,
    config=GroupedMatmulSm90Backward,
    heuristic=lambda chip, call: GroupedMatmulSm90Backward(BLOCK_N, STAGES, BAND, cluster=2),
    unsupported_reason=lambda call, launch: refused_operands(call, launch.config),
    memory=_backward_memory,
    memory_fields=MEMORY_FIELDS,
)
