"""Products of few bfloat16 rows with weights of 8 or 4 bits on Hopper, converted on the way to the tensor cores.

    y_t = activation(x_t w_g + bias)        for the rows t of group g; one group for a plain product

Floor: every weight that has a row is read once, in 8 or 4 bits; with few rows nothing else matters. Here: that, and x once
per 128 columns, from the L2 cache.

Blocking: y^T = w^T x^T. A tile has 128 columns of w and T rows of x. The weights are the left operand: a consumer warpgroup
reads those of its 64 columns from shared memory into registers, converts them to bfloat16 with a few instructions for two
of them at a time, and multiplies with the rows of x, which stay in shared memory. So no converted weight goes through
shared memory, and few rows waste little. A step has 128 bytes of each column: 128 weights of 8 bits, 256 of 4.

Order of the contracted axis: a thread reads four adjacent bytes of a column, and the tensor cores expect two pairs of
adjacent values at places 8 apart. The order does not matter as long as both operands have the same, so x is rearranged
instead (`_arranged`); for 4 bits, whose bytes hold two values, the even places of 128 come before the odd ones.

Scales per column are multiplied to the sums; those that differ along K to the sums of each 128 values.

w lies column by column in memory (`QuantizedArray.layout` "column_major").
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import (
    compiler_params,
    interpreted,
    processors,
    run_kernel,
    smem_bytes,
    tile,
    whole,
    whole_shape,
    with_rows_past_end,
)
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    along_rows,
    load_row_vector,
    tile_of_zeros,
    transposed,
)
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.staging import store_transposed
from tilewright.pallas.gpu.wgmma import Accumulator, with_accumulators

DEPTH = 128
"""Values of the contracted axis that share a scale."""
TILE_ROWS = (16, 32, 64)
"""The rows of x that a tile may have."""

STAGES = 8
"""What heuristics take: as many as fit, up to this."""

_MOST_ROWS = 128  # More are better multiplied with weights that were converted before.
_TILE_ROWS = 8  # Of a swizzled tile: where copies begin and end.
_BYTES = 128  # Of a column of w, per step.
_TOGETHER, _FEW_ROWS = 2, 32  # Steps in a turn of the loop, where they divide those of K, for so many rows.
_ROWS = 64  # Columns of w per consumer warpgroup: the rows of a wgmma instruction.
_CONSUMERS = 2
_COLUMNS = _CONSUMERS * _ROWS
_REGISTERS = 216, 56  # Per thread of a consumer and of the producer.

# What the kernel reads of a tile: its first row, and the group, with its first row and its end.
START, GROUP, GROUP_START, GROUP_END = range(4)


@dataclass(frozen=True, kw_only=True)
class WeightOnly:
    """A product x [M, K] w [G, K, P, N] of stored weights, and how a kernel computes it."""

    chip: Chip
    stored: str
    """"int8", "int4", "float8_e4m3fn" or "float8_e5m2"."""
    n: int
    k: int
    parts: int
    rows: int
    """Rows of x per tile."""
    stages: int

    @property
    def per_byte(self) -> int:
        """Values per byte, and so many times 128 values per step."""
        return 2 if self.stored == "int4" else 1

    @property
    def depth(self) -> int:
        """Values of the contracted axis per step."""
        return _BYTES * self.per_byte

    @property
    def steps(self) -> int:
        return self.k // self.depth

    def scratch(self) -> dict[str, Pipeline]:
        weights = tile(self.stages, self.parts, self.per_byte, _COLUMNS, _BYTES // self.per_byte, dtype=jnp.int8)
        x = tile(self.stages, self.rows, self.depth, dtype=jnp.bfloat16)
        copies = 1 + self.parts * self.per_byte
        return {"pipeline": Pipeline.scratch(self.stages, consumers=_CONSUMERS, copies=copies, w=weights, x=x)}

    @property
    def memory(self) -> int:
        return smem_bytes(self.scratch())

    def run(
        self,
        x: jax.Array,  # [M, K] bfloat16
        w: jax.Array,  # [G, P, N, KB], as it lies in memory, int8 or float8
        scales: jax.Array,  # [G, KS, P, NS]
        tiles: jax.Array,  # int32 [4, tiles]: `START`, a multiple of 8, and so on
        count: jax.Array,  # [1], of the tiles
        out_dtype: Any,
        *,
        name: str,
        activation: str | None,
        bias: jax.Array | None = None,  # [P, N] float32
        poison: jax.Array | None = None,  # [1], added to y
    ) -> jax.Array:
        """y [M, N]. Rows that are in no tile are undefined."""
        m = x.shape[0]
        outputs = run_kernel(
            functools.partial(_kernel, product=self, activation=activation),
            name=name,
            inputs={
                "x": with_rows_past_end(padded(_arranged(x, self.per_byte), 0, _TILE_ROWS), self.rows),
                "w": whole(lax.bitcast_convert_type(w, jnp.int8), _COLUMNS, _BYTES),
                "scales": padded(scales, 3, _COLUMNS) if scales.shape[3] == self.n else scales,
                "tiles": tiles,
                "count": count,
                "bias": None if bias is None else padded(bias, 1, _COLUMNS),
                "poison": poison,
            },
            outputs={"y": jax.ShapeDtypeStruct(whole_shape((m, self.n), 1, _COLUMNS), out_dtype)},
            scratch=self.scratch(),
            grid={"program": min(processors(self.chip), tiles.shape[1] * pl.cdiv(self.n, _COLUMNS))},
            warpgroups=_CONSUMERS + 1,
            params=compiler_params(automatic_barriers=True),
        )
        return outputs["y"][:m, : self.n]


def converts(call: Any, config: Any) -> bool:
    """Whether a call of products (core/products.py) with this config has weights that the kernel converts."""
    return call.x_scales is None and call.w_scales is not None and config.block_m in TILE_ROWS and not refused(call)


def tile_rows(call: Any, rows: int) -> int:
    """The rows of a tile for a call with quantised weights and so many rows in a group; 128, of weights that are converted
    before, for many.
    """
    if rows > _MOST_ROWS or refused(call):
        return 128
    return next((each for each in TILE_ROWS if rows <= each), TILE_ROWS[-1])


def refused(call: Any) -> str | None:
    """Why the kernel cannot convert the weights of a call of products; or None."""
    k, n, (depths, _, columns) = call.x.shape[-1], call.w.shape[-1], call.w_scales.shape[-3:]
    depth = _BYTES * (2 if call.w_dtype == "int4" else 1)
    if k % depth or n % _TILE_ROWS:
        return f"K={k} and N={n} must be multiples of {depth} and {_TILE_ROWS}"
    if depths not in (1, k // DEPTH) or columns not in (n, n // DEPTH if n % DEPTH == 0 else n):
        return f"the scales of w must be per column, or per {DEPTH} of K and per column or {DEPTH} columns"
    return None


def of_call(call: Any, launch: Launch, *, parts: int | None = None) -> WeightOnly:
    """The product of a call. With `parts` = 1 gates and values are columns of one product."""
    own, n = int(call.parts), int(call.w.shape[-1])
    parts = own if parts is None else parts
    return WeightOnly(
        chip=launch.chip,
        stored=call.w_dtype,
        n=n * own // parts,
        k=call.x.shape[-1],
        parts=parts,
        rows=launch.config.block_m,
        stages=launch.config.stages,
    )


def multiply(
    call: Any,
    launch: Launch,
    tiles: jax.Array,
    count: jax.Array,
    out_dtype: Any,
    *,
    name: str,
    save: bool,
    bias: jax.Array | None = None,
    poison: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """y [M, N] of a call, and z [M, P, N] where it is to be saved. It is computed alone then, without the activation."""
    w, scales = call.w, call.w_scales
    w, scales = (w, scales) if w.ndim == 4 else (w[None], scales[None])
    w = jnp.moveaxis(w, 1, 3)  # [G, P, N, KB]
    run = functools.partial(WeightOnly.run, x=call.x, tiles=tiles, count=count, name=name, poison=poison)
    if not (save and call.activation):
        product = of_call(call, launch)
        return run(product, w=w, scales=scales, out_dtype=out_dtype, activation=call.activation, bias=bias), None
    product = of_call(call, launch, parts=1)
    w = w.reshape(w.shape[0], 1, product.n, w.shape[3])
    scales = scales.reshape(*scales.shape[:2], 1, -1)
    bias = None if bias is None else bias.reshape(1, -1)
    z = run(product, w=w, scales=scales, out_dtype=jnp.float32, activation=None, bias=bias)
    z = z.reshape(z.shape[0], call.parts, -1)
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    return y.astype(out_dtype), z.astype(jnp.bfloat16)


def _arranged(x: jax.Array, per_byte: int) -> jax.Array:
    """x [M, K] in the order in which the products contract it; see the module."""
    m, k = x.shape
    # [M, groups, byte of 4, pair, value of pair], with the values of a byte apart.
    x = x.reshape(m, k // (16 * per_byte), 4, 2, 2, per_byte)
    if per_byte == 1:
        return x[..., 0].transpose(0, 1, 3, 2, 4).reshape(m, k)
    groups = DEPTH // (16 * per_byte)  # Of 16 bytes, per 128 values.
    x = x.reshape(m, k // DEPTH, groups, 4, 2, 2, per_byte)
    return x.transpose(0, 1, 6, 2, 4, 3, 5).reshape(m, k)


def _kernel(
    *,
    # inputs
    x_ref,  # [M, K]
    w_ref,  # [G, P, N, KB]
    scales_ref,  # [G, KS, P, NS]
    tiles_ref,  # [4, tiles]
    count_ref,  # [1]
    bias_ref,  # [P, N]
    poison_ref,  # [1]
    # outputs
    y_ref,  # [M, N]
    # scratch
    pipeline: Pipeline,
    # static
    product: WeightOnly,
    activation: str | None,
):
    columns, shape = pl.cdiv(product.n, _COLUMNS), (_ROWS, product.rows)
    warpgroup, program, blocks = lax.axis_index("warpgroup"), lax.axis_index("program"), lax.axis_size("program")
    count = lax.div(count_ref[0] * columns - program + blocks - 1, jnp.int32(blocks))

    def locate(done: Any) -> tuple[Any, Any]:
        """The tile of rows and the block of columns. The rows of a group follow each other: they share its weights."""
        return divmod_nonnegative(program + done * blocks, columns)

    def has_weights(group: Any) -> Any:
        """The steps of a tile: none for the rows past the last group, which are zeros."""
        return jnp.where(group < w_ref.shape[0], product.steps, 0)

    @pl.when(warpgroup < _CONSUMERS)
    def _consume():
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        own = pl.ds(warpgroup * _ROWS, _ROWS)

        def one_tile(done: Any, before: Any) -> Any:
            row, column = locate(done)
            start, group = tiles_ref[START, row], tiles_ref[GROUP, row]
            first_column = column * _COLUMNS + warpgroup * _ROWS
            steps = has_weights(group)

            def scale(of: Any, depth: Any, part: int) -> jax.Array:
                """One per column of w, which is a row of the tile."""
                if scales_ref.shape[-1] >= product.n:
                    return load_row_vector(scales_ref.at[of, depth, part, pl.ds(first_column, _ROWS)])
                return scales_ref[of, depth, part, lax.div(first_column, jnp.int32(DEPTH))]

            def scaled(x: jax.Array, by: jax.Array | None) -> jax.Array:
                return x if by is None else x * (along_rows(by, shape) if by.ndim else by)

            per_step, blocked = product.per_byte, scales_ref.shape[1] > 1

            def several(first: Any, totals: tuple[jax.Array, ...], *, count: int) -> tuple[jax.Array, ...]:
                """So many steps: the weights of the next 128 values are converted while the last ones are multiplied."""
                work = [(n, each, part) for n in range(count) for each in range(per_step) for part in parts]
                scales = [
                    scale(group, (first + n) * per_step + each, part) if blocked else None for n, each, part in work
                ]

                def run(*sums: Accumulator) -> tuple[jax.Array, ...]:
                    results, stages = list(totals), {}

                    def issue(i: int) -> None:
                        n, each, part = work[i]
                        if n not in stages:
                            stages[n] = pipeline.wait(before + first + n)
                        place = each * DEPTH
                        # [64, 128], or two of [64, 64]
                        for a in _converted(pipeline.w.at[stages[n], part, each, own], product.stored):
                            depth = a.shape[1]
                            sums[i].add(a, transposed(pipeline.x.at[stages[n], :, pl.ds(place, depth)]))
                            place += depth

                    issue(0)
                    for i, (n, each, part) in enumerate(work):
                        if i + 1 < len(work):
                            issue(i + 1)
                        x = sums[i].read(in_flight=0 if i + 1 == len(work) else per_step)
                        if (each, part) == (per_step - 1, parts[-1]):
                            pipeline.release(before + first + n)
                        results[part] = results[part] + scaled(x, scales[i])
                    return tuple(results)

                return with_accumulators((shape,) * len(work), run)

            parts = range(product.parts)
            count = 1 if product.steps % _TOGETHER or product.rows > _FEW_ROWS else _TOGETHER
            zeros = tuple(tile_of_zeros(shape) for _ in parts)
            z = lax.fori_loop(
                0, lax.div(steps, jnp.int32(count)), lambda i, z: several(i * count, z, count=count), zeros
            )
            if not blocked:
                last = jnp.minimum(group, w_ref.shape[0] - 1)  # For the rows of no group.
                z = tuple(scaled(each, scale(last, 0, part)) for part, each in enumerate(z))
            if bias_ref is not None:
                columns_of_w = pl.ds(first_column, _ROWS)
                z = tuple(
                    each + along_rows(load_row_vector(bias_ref.at[part, columns_of_w]), shape)
                    for part, each in enumerate(z)
                )
            y = activate(activation, z)
            if poison_ref is not None:
                y = y + poison_ref[0]
            bounds = (tiles_ref[GROUP_START, row], tiles_ref[GROUP_END, row])
            first, end = (jnp.clip(bound - start, 0, product.rows) for bound in bounds)
            store_transposed(y, y_ref, start, first_column, first, end)
            return before + steps

        lax.fori_loop(0, count, one_tile, jnp.int32(0))

    @pl.when(warpgroup == _CONSUMERS)
    def _produce():
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")

        def one_tile(done: Any, before: Any) -> Any:
            row, column = locate(done)
            start, group = tiles_ref[START, row], tiles_ref[GROUP, row]
            steps, own = has_weights(group), pl.ds(column * _COLUMNS, _COLUMNS)

            def step(n: Any, carry: tuple[()]) -> tuple[()]:
                number = before + n
                stage = pipeline.acquire(number)
                size = _BYTES // product.per_byte
                weights = [
                    (
                        w_ref.at[group, part, own, pl.ds(n * _BYTES + each * size, size)],
                        pipeline.w.at[stage, part, each],
                    )
                    for part in range(product.parts)
                    for each in range(product.per_byte)
                ]
                rows = x_ref.at[pl.ds(start, product.rows), pl.ds(n * product.depth, product.depth)]
                pipeline.copy(number, [*weights, (rows, pipeline.x.at[stage])], stage=stage)
                return carry

            lax.fori_loop(0, steps, step, ())
            return before + steps

        lax.fori_loop(0, count, one_tile, jnp.int32(0))


# Four adjacent bytes of a column in a thread, in 16 bytes of 8 columns. Products have two values where this has four.
_STORED = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 16), (16, 16), (8, 16), (4,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
)


def _converted(ref: Any, stored: str) -> list[jax.Array]:
    """The weights of 64 columns in shared memory, [64, bytes] int8, as bfloat16 [64, bytes] in the products' layout.

    For 4 bits: the low halves of the bytes, then the high ones. The order of the bytes is that of `_arranged`.
    """
    if interpreted():
        return [_reordered(values) for values in _plain_values(ref[...], stored)]
    values = plgpu.load(ref, layout=_STORED, optimized=False)
    shape = plgpu.ShapeDtypeStruct(ref.shape, jnp.dtype(jnp.bfloat16), layout=WGMMA)

    def convert(pairs: Any) -> jax.Array:
        def body(_: Any, given: Any) -> Any:
            registers = np.empty(mosaic.WGMMA_LAYOUT.registers_shape(tuple(ref.shape)), dtype=object)
            for place, register in np.ndenumerate(given.registers):
                for pair, bits in enumerate(pairs(_as_int32(register))):
                    registers[(place[0], 2 * place[1] + pair, *place[2:])] = _as_bfloat16(bits)
            return mosaic.FragmentedArray(_registers=registers, _layout=mosaic.WGMMA_LAYOUT, _is_signed=None)

        return plgpu.inline_mgpu(arg_types=(_STORED,), return_type=shape)(body)(values)

    if stored == "int4":
        return [convert(functools.partial(_int4_pairs, shift=shift)) for shift in (0, 4)]
    return [convert(_int8_pairs if stored == "int8" else functools.partial(_float8_pairs, stored=stored))]


def _plain_values(stored_bytes: jax.Array, stored: str) -> list[jax.Array]:
    if stored == "int4":
        return [((stored_bytes << 4) >> 4).astype(jnp.bfloat16), (stored_bytes >> 4).astype(jnp.bfloat16)]
    if stored == "int8":
        return [stored_bytes.astype(jnp.bfloat16)]
    return [lax.bitcast_convert_type(stored_bytes, jnp.dtype(stored)).astype(jnp.bfloat16)]


def _reordered(values: jax.Array) -> jax.Array:
    rows, columns = values.shape
    return values.reshape(rows, columns // 16, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(rows, columns)


# Each of these takes four bytes in 32 bits, and returns two pairs of bfloat16 in 32 bits each.


def _int8_pairs(word: Any) -> list[Any]:
    """0x4300 is 128 and its last seven bits count ones, so a byte b >= 0 in them is 128 + b.

    The sign bit of b falls into the exponent, where it makes 256 of 128: subtracting that leaves b.
    """
    text = """{
        .reg .b32 placed, magnitude, offset;
        prmt.b32 placed, $1, 0x43434343, SELECTOR;
        and.b32 magnitude, placed, 0xff7fff7f;
        and.b32 offset, placed, 0xff80ff80;
        sub.rn.bf16x2 $0, magnitude, offset;
    }"""
    return [_assembly(text.replace("SELECTOR", f"0x4{2 * pair + 1}4{2 * pair}"), word) for pair in range(2)]


def _int4_pairs(word: Any, shift: int) -> list[Any]:
    """Four bits v with their sign bit flipped are v + 8 without a sign, and 0x4300 with them is 136 + v."""
    text = """{
        .reg .b32 halves, flipped, placed, offset;
        shr.b32 halves, $1, SHIFT;
        lop3.b32 flipped, halves, 0x0f0f0f0f, 0x08080808, 0x6a;
        prmt.b32 placed, flipped, 0x43434343, SELECTOR;
        mov.b32 offset, 0x43084308;
        sub.rn.bf16x2 $0, placed, offset;
    }""".replace("SHIFT", str(shift))
    return [_assembly(text.replace("SELECTOR", f"0x4{2 * pair + 1}4{2 * pair}"), word) for pair in range(2)]


def _float8_pairs(word: Any, stored: str) -> list[Any]:
    """The byte's exponent in bfloat16's place has another bias: a power of two sets it right, for subnormals, too."""
    shift, mask, power = (
        (4, "0x07f007f0", "0x7b807b80") if stored == "float8_e4m3fn" else (3, "0x0fe00fe0", "0x77807780")
    )
    text = """{
        .reg .b32 placed, shifted, magnitude, signed, power;
        prmt.b32 placed, $1, 0, SELECTOR;
        shr.b32 shifted, placed, SHIFT;
        and.b32 magnitude, shifted, MASK;
        lop3.b32 signed, placed, 0x80008000, magnitude, 0xea;
        mov.b32 power, POWER;
        mul.rn.bf16x2 $0, signed, power;
    }"""
    text = text.replace("SHIFT", str(shift)).replace("MASK", mask).replace("POWER", power)
    return [_assembly(text.replace("SELECTOR", f"0x{2 * pair + 1}4{2 * pair}4"), word) for pair in range(2)]


def _assembly(text: str, word: Any) -> Any:
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [word], text, "=r,r")


def _as_int32(register: Any) -> Any:
    words = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), register)
    return vector.extract(words, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))


def _as_bfloat16(bits: Any) -> Any:
    words = vector.broadcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(32)), bits)
    return vector.bitcast(ir.VectorType.get((2,), ir.BF16Type.get()), words)
