"""`matmul` on Hopper: forward and both gradients of bfloat16 operands, and forward of operands of 8 bits.

    y = activation(x w + bias) + residual        dx = dz w^T        dw = x^T dz

Floor: 2 M K N FLOPs per product and part; x and w read once, y written once. Here: those FLOPs. The operands are read from
memory about once per band of block rows.

Blocking: the main loop of pallas/gpu/gemm.py, tiles of [block_m, block_n]. The epilogue adds the bias, applies the
activation in float32 and stores the tile in parts of 64 columns through two buffers in shared memory. With swiglu a tile
has half of its columns from the gates and half from the values, so both are in the same registers. Where a gradient will
be asked for, z = x w + bias is stored beside y, through the same buffers where it has the same dtype. With buffers of its
own there was room for three stages only, which costs 2 %, whether z was stored or not.

swiglu takes an exponential and a reciprocal per element (pallas/gpu/elementwise.py). At 16 per clock of a multiprocessor,
those of a tile of 128 x 256 take 2,048 clocks of the 115,000 that the product takes with K = 7,168. Measured on an H200 in
bfloat16, medians of queued calls, in three runs:
- 4096 x 7168 x (2 x 8192): 1.433, 1.405 and 1.444 ms, 0.950, 0.954 and 0.962 of cuBLAS's product and XLA's activation
  after it. The product alone: 1.452, 1.401 and 1.445 ms. Before, with 3 stages and eight FP32 instructions per element, of
  which four remain: 1.467 ms, 0.973.
- 8192 x 8192 x (2 x 4096): 1.619, 1.601 and 1.655 ms, 0.957, 0.960 and 0.967. The product alone: 1.623 and 1.635 ms in the
  first and the last. Before: 1.670 ms, 0.987.

Tried and dropped: the second consumer begins each tile one, two or three steps behind the first, so that their epilogues do
not coincide: 1.443, 1.445 and 1.455 ms where it takes 1.444 ms, and 3 to 6 % more for grouped products, whose tiles have
32 steps. Where the compiler takes the first steps out of the loop for that, it costs 9 %.

Edges: no size needs to be whole blocks. Copies fill with zeros past the end of an array and do not write there. Arrays
must be whole tiles of 8 rows of 128 bytes: an M that is no multiple of 8, or K and N of 64, cost padded copies.

Quantised weights with a float x: for up to 256 rows the kernel converts them (pallas/gpu/weight_only.py). For more they are
dequantised by XLA to bfloat16 first, which rounds each of them once and is a small part of the time.

Two quantised operands, int8 or float8: a step has 128 of K, and its products are scaled and added up in float32 registers
(`Gemm.main_loop`, `scale`), so a tile is 128 columns wide. One consumer scales while the tensor cores compute the products
of the others, so three consumers (block_m=192) keep them busier than two, and the heuristic takes them where the tiles of
192 rows do not lose more at the edges (`_tall_tiles`). Scales are read from the L2 cache a step ahead. w is read as [N, K],
which is how float8 is stored by `quantize`; other layouts cost a transposed copy.

Measured on an H200, 4096 x 7168 x 16384 in float8 with scales of 1 x 128 and 128 x 128: 0.832 ms (1,156 TFLOP/s), where
bfloat16 took 1.421 ms in the same run. Tried and dropped:
- With three consumers: 3 stages 0.961 ms, band 16 0.855 ms, a cluster of 2 0.854 ms.
- With two consumers: 0.901 ms; band 4 0.858 ms, band 16 0.870 ms, a cluster of 2 0.878 ms; 5 stages 1.227 ms and 6 stages
  1.167 ms.
- Two consumers that each have a product in flight while they scale the one before it: 0.939 ms. With that schedule, tiles
  of 192 columns in pieces of 64 or 96 were slower by 16 % and 9 %.
- A product in flight from one turn of the loop to the next: ptxas serialises it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.products import d_product, dequantized_weights
from tilewright.ops.matmul.call import MatmulCall
from tilewright.ops.matmul.config import MatmulSm90Backward, MatmulSm90Forward
from tilewright.ops.matmul.pallas_gpu import sm90_few_rows as few_rows
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu import weight_only
from tilewright.pallas.gpu.block_scales import DEPTH, BlockScale, refused_operands, scale_operands, scaled_at_end
from tilewright.pallas.gpu.elementwise import activate
from tilewright.pallas.gpu.gemm import (
    BAND,
    BLOCK_N,
    MEMORY_FIELDS,
    SCALED_BLOCK_N,
    SCALED_STAGES,
    STAGES,
    Gemm,
    largest_tile,
    scales_each_step,
)
from tilewright.pallas.gpu.kernel import aligned, aligned_size, smem_bytes, whole, whole_shape
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, load_along_columns, load_tile
from tilewright.pallas.gpu.staging import WIDTH, Staging, staging_scratch, stored_columns
from tilewright.pallas.gpu.swiglu_gradient import rounded_d_product
from tilewright.pallas.gpu.tile_config import TALL
from tilewright.pallas.gpu.wgmma import not_bfloat16

_CLUSTER = 2
# The time of a row of tiles with three consumers over that with two. In the product of the docstring, a thread block has up
# to 22 tiles of 192 rows in 0.832 ms, or 32 of 128 rows in 0.901 ms.
_TALL_COST = 0.9


def _kernel(
    *,
    # inputs
    a_ref,  # [m, k], or [k, m]
    b_ref,  # [k, n], [k, parts, n], or [n, k]
    bias_ref,  # [parts, n] float32, n in whole blocks
    residual_ref,  # [m, n]
    x_scales_ref,  # [KX, m], of quantised operands
    w_scales_ref,  # [KS, parts, NS]
    # outputs
    y_ref,  # [m, n]
    z_ref,  # [m, parts, n]
    # scratch
    y_smem,  # [consumers, BUFFERS, rows, WIDTH]
    z_smem,  # The same, or None where z shares those of y
    pipeline: Pipeline,
    # static
    gemm: Gemm,
    activation: str | None,
):
    shape = (gemm.rows, WIDTH)

    def epilogue(consumer: Any, i: Any, j: Any) -> Any:
        rows = pl.ds((i * gemm.consumers + consumer) * gemm.rows, gemm.rows)

        def finish(*products: jax.Array) -> None:
            staging = Staging(y=y_smem.at[consumer], z=(y_smem if z_smem is None else z_smem).at[consumer])
            for start in stored_columns(gemm.width, gemm.n):
                columns = pl.ds(j * gemm.width + start, WIDTH)
                z = tuple(product[:, start : start + WIDTH] for product in products)
                if bias_ref is not None:
                    z = tuple(
                        each + load_along_columns(bias_ref.at[part, columns], shape) for part, each in enumerate(z)
                    )
                if z_ref is not None:
                    for part, each in enumerate(z):
                        staging.store(each, z_ref.at[rows, part, columns], "z")
                y = activate(activation, z, WGMMA)
                if residual_ref is not None:
                    y = y + load_tile(residual_ref.at[rows, columns]).astype(jnp.float32)
                staging.store(y, y_ref.at[rows, columns], "y")
            staging.end()

        return finish

    def scale(consumer: Any, step: Any, i: Any, j: Any) -> Any:
        row = (i * gemm.consumers + consumer) * gemm.rows
        return BlockScale(gemm, x_scales_ref, w_scales_ref, step, row, j * gemm.width)

    gemm.main_loop(
        a_ref,
        b_ref,
        pipeline,
        epilogue,
        scale=None if x_scales_ref is None else scale,
        scale_at_end=scaled_at_end(gemm, x_scales_ref, w_scales_ref),
    )


def _gemm(launch: Launch, m: int, k: int, n: int, **options: Any) -> Gemm:
    return Gemm.of(launch.config, launch.chip, m=m, n=n, k=k, dtype=jnp.bfloat16, **options)


def _multiply(
    gemm: Gemm,
    a: jax.Array,
    b: jax.Array,
    out_dtype: Any,
    *,
    name: str,
    activation: str | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    scales: tuple[jax.Array, jax.Array] | None = None,
    z_dtype: Any = None,
) -> tuple[jax.Array, jax.Array | None]:
    """y [m, n], and z [m, parts, n] where `z_dtype` is given."""
    m, n, width = gemm.m, gemm.n, gemm.width
    depth, rows, columns = gemm.block_k, gemm.block_m, width
    a = whole(aligned(a), *((depth, rows) if gemm.a_transposed else (rows, depth)))
    if gemm.parts > 1 and gemm.b_transposed:
        b = whole(aligned(b), columns, depth)
    elif gemm.parts > 1:
        b = whole(aligned(b, rows=0), depth, 1, columns)
    else:
        b = whole(aligned(b), *((columns, depth) if gemm.b_transposed else (depth, columns)))
    m_out, n_out = aligned_size(m, n, jnp.bfloat16)
    y_shape = whole_shape((m_out, n_out), rows, columns)
    z_shape = whole_shape((m_out, gemm.parts, n_out), rows, 1, columns)
    outputs = gemm.run(
        functools.partial(_kernel, gemm=gemm, activation=activation),
        name=name,
        inputs={
            "a": a,
            "b": b,
            "bias": None if bias is None else padded(bias.astype(jnp.float32), 1, width),
            "residual": None if residual is None else whole(residual, rows, columns),
            **dict(zip(("x_scales", "w_scales"), scales or (None, None), strict=True)),
        },
        outputs={
            "y": jax.ShapeDtypeStruct(y_shape, out_dtype),
            "z": None if z_dtype is None else jax.ShapeDtypeStruct(z_shape, z_dtype),
        },
        scratch=staging_scratch(gemm.consumers, gemm.rows, y=out_dtype, z=z_dtype),
    )
    return outputs["y"][:m, :n], None if z_dtype is None else outputs["z"][:m, :, :n]


def _forward_gemm(call: MatmulCall, launch: Launch) -> Gemm:
    m, k, n = call.sizes
    if call.x_scales is None:
        return _gemm(launch, m, k, n, parts=call.parts)
    options = {"block_k": DEPTH, "b_transposed": True, "parts": call.parts}
    return Gemm.of(launch.config, launch.chip, m=m, n=n, k=k, dtype=call.x.dtype, **options)


def _operands(call: MatmulCall, gemm: Gemm) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """B, and the scales of quantised operands."""
    if call.x_scales is None or call.w_scales is None:
        w = dequantized_weights(call, jnp.bfloat16)
        return w.reshape(gemm.k, gemm.parts, gemm.n) if gemm.parts > 1 else w, None
    # [P, N, K]: how float8 weights are stored, and a copy where they are not. 8 bits are read in no other order.
    w = jnp.moveaxis(call.w, 0, 2)
    return w if gemm.parts > 1 else w[0], scale_operands(gemm, call.x_scales, call.w_scales)


def _adds_residual(call: MatmulCall, gemm: Gemm) -> bool:
    """Whether the kernel adds the residual. It loads that without regard for the end of the array."""
    return call.residual is not None and gemm.m % gemm.block_m == 0 and gemm.n % WIDTH == 0


def _kernel_dtype(call: MatmulCall, gemm: Gemm) -> Any:
    """The dtype of the kernel's y: float32 where a residual is still to be added."""
    return jnp.dtype(call.out_dtype if call.residual is None or _adds_residual(call, gemm) else jnp.float32)


def _forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves z where there is an activation."""
    if few_rows.takes(call, launch.config):
        return few_rows.forward(call, launch, save=save)
    if weight_only.converts(call, launch.config):
        return _with_converted_weights(call, launch, save=save)
    gemm = _forward_gemm(call, launch)
    w, scales = _operands(call, gemm)
    fused = _adds_residual(call, gemm)
    y, z = _multiply(
        gemm,
        call.x,
        w,
        _kernel_dtype(call, gemm),
        name="matmul_forward",
        activation=call.activation,
        bias=call.bias,
        residual=call.residual if fused else None,
        scales=scales,
        z_dtype=jnp.bfloat16 if save and call.activation is not None else None,
    )
    if call.residual is not None and not fused:
        y = (y + call.residual.astype(jnp.float32)).astype(call.out_dtype)
    return y, z


def _with_converted_weights(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """The forward pass of quantised weights and few rows: one group of all rows."""
    m, rows = call.x.shape[0], launch.config.block_m
    start = jnp.arange(0, m, rows, dtype=jnp.int32)
    zero = jnp.zeros_like(start)
    tiles = jnp.stack([start, zero, zero, jnp.full_like(start, m)])
    y, z = weight_only.multiply(
        call,
        launch,
        tiles,
        jnp.full((1,), start.shape[0], jnp.int32),
        call.out_dtype if call.residual is None else jnp.float32,
        name="matmul_forward",
        save=save,
        bias=None if call.bias is None else call.bias.astype(jnp.float32),
    )
    if call.residual is not None:
        y = (y + call.residual.astype(jnp.float32)).astype(call.out_dtype)
    return y, z


def _gradient_gemms(call: MatmulCall, launch: Launch) -> tuple[Gemm, Gemm]:
    """The products dx = dz w^T and dw = x^T dz."""
    m, k, n = call.sizes
    columns = call.parts * n
    return _gemm(launch, m, columns, k, b_transposed=True), _gemm(launch, k, m, columns, a_transposed=True)


def _backward(call: MatmulCall, saved: Any, dy: jax.Array, launch: Launch) -> MatmulCall:
    if call.x_scales is not None:  # Operands of 8 bits have no gradient.
        return _epilogue_gradients(call, saved, dy)
    for_x, for_w = _gradient_gemms(call, launch)
    dz, w = rounded_d_product(call, saved, dy), dequantized_weights(call, jnp.bfloat16)
    gradients: dict[str, Any] = {"x": _multiply(for_x, dz, w, jnp.bfloat16, name="matmul_dx")[0]}
    if call.w_scales is None:
        dw, _ = _multiply(for_w, call.x, dz, jnp.bfloat16, name="matmul_dw")
        gradients["w"] = dw.reshape(call.w.shape)
    return _epilogue_gradients(call, saved, dy, **gradients)


def _epilogue_gradients(call: MatmulCall, saved: Any, dy: jax.Array, **gradients: Any) -> MatmulCall:
    if call.bias is not None:
        gradients["bias"] = jnp.sum(d_product(call, saved, dy), axis=0)
    if call.residual is not None:
        gradients["residual"] = dy
    return call.gradients(**gradients)


def _forward_memory(call: MatmulCall, launch: Launch) -> dict[str, int]:
    if few_rows.takes(call, launch.config):
        return {"forward": few_rows.memory(call, launch)}
    if weight_only.converts(call, launch.config):
        return {"forward": weight_only.of_call(call, launch).memory}
    gemm = _forward_gemm(call, launch)
    z_dtype = None if call.activation is None else jnp.bfloat16
    staged = staging_scratch(gemm.consumers, gemm.rows, y=_kernel_dtype(call, gemm), z=z_dtype)
    return {"forward": smem_bytes({**staged, **gemm.scratch()})}


def _backward_memory(call: MatmulCall, launch: Launch) -> dict[str, int]:
    gemms = dict(zip(("dx", "dw"), _gradient_gemms(call, launch), strict=True))
    return {
        name: smem_bytes({**staging_scratch(gemm.consumers, gemm.rows, y=jnp.bfloat16), **gemm.scratch()})
        for name, gemm in gemms.items()
    }


def _tall_tiles(chip: Chip, call: MatmulCall) -> MatmulSm90Forward | None:
    """The config with three consumers, for products that are scaled each step; None where two are faster."""
    m, _, n = call.sizes
    config = MatmulSm90Forward(SCALED_BLOCK_N, SCALED_STAGES, BAND, block_m=TALL)
    # With fewer stages it is slower. A residual that the kernel cannot add makes y float32, which leaves no room for them.
    if not scales_each_step(call) or _forward_memory(call, Launch(chip, config, None))["forward"] > (
        chip.smem_bytes or 0
    ):
        return None

    def rows_in_turn(block_m: int) -> int:
        """The rows that the thread block with most tiles computes."""
        tiles = pl.cdiv(m, block_m) * pl.cdiv(call.parts * n, SCALED_BLOCK_N)
        return pl.cdiv(tiles, chip.multiprocessors or 1) * block_m

    return config if _TALL_COST * rows_in_turn(TALL) < rows_in_turn(2 * WIDTH) else None


def _heuristic(chip: Chip, call: MatmulCall) -> MatmulSm90Forward:
    m, _, _ = call.sizes
    few_or_tall = few_rows.heuristic(chip, call) or _tall_tiles(chip, call)
    return few_or_tall or largest_tile(
        MatmulSm90Forward,
        chip,
        lambda config: _forward_memory(call, Launch(chip, config, None)),
        call,
        rows_per_group=m,
        # Thread blocks that scale each step wait for each other longer than a shared copy saves.
        cluster=1 if scales_each_step(call) else _CLUSTER,
    )


def _refused(call: MatmulCall, launch: Launch) -> str | None:
    few = few_rows.takes(call, launch.config)
    return not_bfloat16(call.x, ("x", "w")) if few else refused_operands(call, launch.config, parts=call.parts)


FORWARD = Pass(
    _forward,
    config=MatmulSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_refused,
    memory=_forward_memory,
    memory_fields=MEMORY_FIELDS,
    saved="*tokens . N",
)
BACKWARD = Pass(
    _backward,
    config=MatmulSm90Backward,
    heuristic=lambda chip, call: MatmulSm90Backward(BLOCK_N, STAGES, BAND, cluster=_CLUSTER),
    unsupported_reason=lambda call, launch: refused_operands(call, launch.config),
    memory=_backward_memory,
    memory_fields=MEMORY_FIELDS,
)
