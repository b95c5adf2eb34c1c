"""Products of few bfloat16 rows with weights of 8 or 4 bits on Hopper, converted on the way to the tensor cores.

    y_t = activation(x_t w_g + bias)        for the rows t of group g; one group for a plain product

Floor: every weight that has a row is read once, in 8 or 4 bits; with few rows nothing else matters. Here: that, and x once
per 128 columns, from the L2 cache.

Blocking: y^T = w^T x^T. A tile has 128 columns of w and T rows of x. The weights are the left operand: a consumer warpgroup
reads those of its 64 columns from shared memory into registers, converts them to bfloat16 with a few instructions for two
of them at a time (stored_weights.py), and multiplies with the rows of x, which stay in shared memory. So no converted
weight goes through shared memory, and few rows waste little. A step has 128 bytes of each column: 128 weights of 8 bits,
256 of 4.

Sliced K: a consumer waits for shared memory, for its conversions and for the tensor cores in turn, so two of them leave
most of the time unused. Up to 32 rows of all parts, two slices of two consumers each share a tile: one takes the even
steps, the other the odd ones. Each has stages of its own, since a warpgroup has to see every use of a barrier that it waits
for. At the end of a tile the second slice hands its sums over through shared memory, and the first one adds them, so the
order is always the same. Wider tiles would leave multiprocessors idle. More rows need the registers of two consumers.

Eight rows: a wgmma instruction has to be waited for, by all four warps, and begins once all of its weights are converted.
For tiles of 8 rows each warp multiplies by itself (pallas/gpu/warp_mma.py), so the compiler interleaves conversions and
products, and no warp waits for another. x is read by plain loads and lies in memory in their order, [K / 32, M, 32], so
such tiles begin at any row. A step takes 218 instructions where that of wgmma takes 267, with 16 rows.

Scales per column are multiplied to the sums; those that differ along K to the sums of each 128 values. They are copied with
the weights of their step where they differ from column to column, too, and loaded a step ahead where they do not.

Instructions of the loop per weight and thread, with 16 rows: 2.1 for 4 bits, 2.3 for int8 and 3.4 for float8. At 4.8 TB/s
(H200) a step may take some 750 clocks, in which a scheduler issues 530 instructions for 4 bits, 300 for int8 and 430 for
float8.

Measured on an H200, the kernel alone, with its share of 4.8 TB/s:
- 512 rows in 128 groups, w [2048, 768], tiles of 8 rows: int4 31.0 us (71 %), int8 50.9 us (81 %), float8 52.5 us (79 %).
  With tiles of 16 rows: 32.7 us, 52.0 us and 53.3 us.
- 16 rows, w [7168, 16384]: int4 20.4 us (64 %), int8 32.0 us (76 %), float8 32.5 us (75 %). One row, in a tile of 8: int4
  19.1 us (68 %), in one of 16 20.4 us.
- 64 rows, w [7168, 16384] (one slice): int4 28.5 us (45 %), int8 35.1 us (70 %), float8 40.9 us (60 %).
The groups with int4 miss 75 %, which is 29.1 us. The times with bfloat16 and int8 differ by their bytes at 4.58 TB/s, and
6 to 7 us of both depend on no bytes; the bytes of int4 would take 29.3 us like that. 756 tiles are 5.7 per multiprocessor,
and some have 6.

Tried and dropped:
- Single warps with 16 rows: int4 32.8 us for the groups, 20.7 to 21.5 us with [7168, 16384], and int8 32.3 us with that.
- Two copies of 64 bytes of each column per step for int4, not one of 128: 31.9 to 33.5 us with 8 rows, 34.0 us with 16.
- 4, 6 and 8 stages: 30.7, 31.0 and 31.0 us. Ten, with copies of 64 bytes: 33.5 us where 6 took 31.9 us.
- One slice for 16 rows, int4 36.9 us and 23.9 us; with two slices, converting the weights of the next product of a step
  while the last is in flight: the same time. With one slice that is worth 2.6 us (int4, 64 rows).
- x rearranged by two transpositions: XLA takes 20 us for them, and 2.7 us for one.

w lies column by column in memory (`QuantizedArray.layout` "column_major").
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.activation import activate
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu import elementwise
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
    load_tile,
    store,
    tile_of_zeros,
    transposed,
)
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.staging import store_transposed
from tilewright.pallas.gpu.stored_weights import DEPTH, arranged, converted, loaded_bytes, unit
from tilewright.pallas.gpu.warp_mma import CHUNK, product_with_rows
from tilewright.pallas.gpu.wgmma import Accumulator, with_accumulators

TILE_ROWS = (8, 16, 32, 64)
"""The rows of x that a tile may have."""

STAGES = 8
"""What heuristics take: as many as fit, up to this."""

_SPARE = 4  # Of 128 groups of 4 rows in the mean, 3 have more than 8.
_MOST_ROWS = 128  # More are better multiplied with weights that were converted before.
_EIGHT = 8  # Rows of a swizzled tile: where copies begin and end. Tiles of so many are multiplied by single warps.
_BYTES = 128  # Of a column of w, per step.
_SLICED_ROWS = 32  # Of all parts: more take too many registers for four consumer warpgroups.
_COLUMNS = 128  # Of w per tile: 64 per consumer warpgroup, the rows of a wgmma instruction.
# By slices: per thread of a consumer, and of the producer. Together they are at most what the thread block begins with: 168
# for each thread of three warpgroups, 96 of five.
_REGISTERS = {1: (216, 56), 2: (112, 32)}

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
    """Of all slices together."""
    scales_in_stages: bool
    """Whether scales differ both along K and from column to column: they are copied with the weights then."""

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

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies by itself. See the module."""
        return self.rows == _EIGHT

    @property
    def slices(self) -> int:
        """Slices of the contracted axis: each has consumer warpgroups, stages and sums of its own. See the module."""
        return 2 if self.rows * self.parts <= _SLICED_ROWS else 1

    @property
    def registers(self) -> tuple[int, int]:
        return _REGISTERS[self.slices]

    @property
    def ahead(self) -> int:
        """Products in flight while weights are converted. Where K is divided, other consumers have theirs in flight."""
        return 1 if self.slices == 1 else 0

    def scratch(self) -> dict[str, Any]:
        stages, members = -(-self.stages // self.slices) * self.slices, _members()
        buffers = {
            "w": tile(stages, self.parts, _COLUMNS, _BYTES, dtype=jnp.int8),
            "x": plgpu.SMEM((stages, self.depth // CHUNK, self.rows, CHUNK), jnp.bfloat16)
            if self.by_warps
            else tile(stages, self.rows, self.depth, dtype=jnp.bfloat16),
        }
        if self.scales_in_stages:
            buffers["scales"] = plgpu.SMEM((stages, self.per_byte, self.parts, _COLUMNS), jnp.float32)
        copies = len(buffers) - 1 + self.parts
        sliced, one_each = self.slices > 1, plgpu.Barrier(num_arrivals=1, num_barriers=members)
        return {
            "pipeline": Pipeline.scratch(stages, consumers=members, copies=copies, **buffers),
            "sums_smem": plgpu.SMEM((members, self.parts, _COLUMNS // members, self.rows), jnp.float32)
            if sliced
            else None,
            "sums_full": one_each if sliced else None,
            "sums_empty": one_each if sliced else None,
        }

    @property
    def memory(self) -> int:
        return smem_bytes(self.scratch())

    def run(
        self,
        x: jax.Array,  # [M, K] bfloat16
        w: jax.Array,  # [G, P, N, KB], as it lies in memory, int8 or float8
        scales: jax.Array,  # [G, KS, P, NS]
        tiles: jax.Array,  # int32 [4, tiles]: `START`, a multiple of `alignment(rows)`, and so on
        count: jax.Array,  # [1] or more, all equal: the tiles
        out_dtype: Any,
        *,
        name: str,
        activation: str | None,
        bias: jax.Array | None = None,  # [P, N] float32
        poison: jax.Array | None = None,  # [1] or more, all equal: added to y
    ) -> jax.Array:
        """y [M, N]. Rows that are in no tile are undefined."""
        m = x.shape[0]
        outputs = run_kernel(
            functools.partial(_kernel, product=self, activation=activation),
            name=name,
            inputs={
                "x": arranged(with_rows_past_end(padded(x, 0, _EIGHT), self.rows), self.per_byte, self.by_warps),
                "w": whole(lax.bitcast_convert_type(w, jnp.int8), _COLUMNS, _BYTES),
                "scales": self._readable(scales),
                "tiles": tiles,
                "count": count,
                "bias": None if bias is None else padded(bias, 1, _COLUMNS),
                "poison": poison,
            },
            outputs={"y": jax.ShapeDtypeStruct(whole_shape((m, self.n), 1, _COLUMNS), out_dtype)},
            scratch=self.scratch(),
            grid={"program": min(processors(self.chip), tiles.shape[1] * pl.cdiv(self.n, _COLUMNS))},
            warpgroups=self.slices * _members() + 1,
            params=compiler_params(),
        )
        return outputs["y"][:m, : self.n]

    def _readable(self, scales: jax.Array) -> jax.Array:
        """Loads of scales read whole tiles; copies do not need that."""
        if self.scales_in_stages:
            return whole(scales, _COLUMNS)
        return padded(scales, 3, _COLUMNS) if scales.shape[3] == self.n else scales


def _members() -> int:
    """Consumer warpgroups of a slice. One does the same in the interpreter, which has four threads for all warpgroups."""
    return 1 if interpreted() else 2


def converts(call: Any, config: Any) -> bool:
    """Whether a call of products (core/products.py) with this config has weights that the kernel converts."""
    return call.x_scales is None and call.w_scales is not None and config.block_m in TILE_ROWS and not refused(call)


def alignment(rows: int) -> int:
    """Tiles of so many rows begin at multiples of this."""
    return 1 if rows == _EIGHT else _EIGHT


def tile_rows(call: Any, rows: int) -> int:
    """The rows of a tile for a call with quantised weights and so many rows, in groups in the mean; 128, of weights that
    are converted before, for many.
    """
    if rows > _MOST_ROWS or refused(call):
        return 128
    grouped = call.w.ndim == 4

    def spare(tile: int) -> int:
        """For groups larger than the mean; where tiles begin at multiples of 8, for the rows before a group's first."""
        return max(_SPARE, alignment(tile) - 1) if grouped else 0

    return next((each for each in TILE_ROWS if rows + spare(each) <= each), TILE_ROWS[-1])


def refused(call: Any) -> str | None:
    """Why the kernel cannot convert the weights of a call of products; or None."""
    k, n, (depths, _, columns) = call.x.shape[-1], call.w.shape[-1], call.w_scales.shape[-3:]
    depth = _BYTES * (2 if call.w_dtype == "int4" else 1)
    if k % depth or n % _EIGHT:
        return f"K={k} and N={n} must be multiples of {depth} and {_EIGHT}"
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
        scales_in_stages=call.w_scales.shape[-3] > 1 and call.w_scales.shape[-1] == n,
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


@dataclass(frozen=True)
class _OwnStages(Pipeline):
    """The stages of a pipeline from `first` on, which one slice of the consumers reads."""

    first: Any = 0

    @classmethod
    def of(cls, pipeline: Pipeline, part: Any, slices: int) -> "_OwnStages":
        stages = pipeline.stages // slices
        return cls(stages, pipeline.full, pipeline.empty, pipeline.buffers, first=part * stages)

    def stage(self, n: Any) -> Any:
        return self.first + super().stage(n)


def _kernel(
    *,
    # inputs
    x_ref,  # [M, K], or in chunks (warp_mma.py)
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
    sums_smem,  # [members, P, columns of a member, rows]
    sums_full,  # [members]
    sums_empty,  # [members]
    # static
    product: WeightOnly,
    activation: str | None,
):
    columns, slices, members, parts = pl.cdiv(product.n, _COLUMNS), product.slices, _members(), range(product.parts)
    width = _COLUMNS // members
    shape = (width, product.rows)
    warpgroup, program, blocks = lax.axis_index("warpgroup"), lax.axis_index("program"), lax.axis_size("program")
    groups, per_step = w_ref.shape[0], product.per_byte
    blocked, per_column = scales_ref.shape[1] > 1, scales_ref.shape[-1] >= product.n

    def own_tiles() -> Any:
        """The number of this thread block's tiles, loaded."""
        return lax.div(count_ref[0] * columns - program + blocks - 1, jnp.int32(blocks))

    def locate(done: Any) -> tuple[Any, Any]:
        """The tile of rows and the block of columns. The rows of a group follow each other: they share its weights."""
        return divmod_nonnegative(program + done * blocks, columns)

    @pl.when(warpgroup < slices * members)
    def _consume():
        plgpu.set_max_registers(product.registers[0], action="increase")
        part_of_k, member = divmod_nonnegative(warpgroup, members)
        stages = _OwnStages.of(pipeline, part_of_k, slices)
        own = pl.ds(member * width, width)
        own_steps = lax.div(product.steps - part_of_k + slices - 1, jnp.int32(slices))

        def one_tile(done: Any, before: Any) -> Any:
            row, column = locate(done)
            group = tiles_ref[GROUP, row]
            first_column = column * _COLUMNS + member * width
            with_weights = jnp.minimum(group, groups - 1)  # For the rows of no group, which have no steps.
            steps = jnp.where(group < groups, own_steps, 0)

            def scale(depth: Any, part: int) -> jax.Array:
                """From global memory: one per column of w, which is a row of the tile, or one for all of them."""
                if per_column:
                    return load_row_vector(scales_ref.at[with_weights, depth, part, pl.ds(first_column, width)])
                return scales_ref[with_weights, depth, part, lax.div(first_column, jnp.int32(DEPTH))]

            def scaled(x: jax.Array, by: jax.Array) -> jax.Array:
                return x * (along_rows(by, shape) if by.ndim else by)

            work = [(each, part) for each in range(per_step) for part in parts]

            def scales_of(step: Any) -> tuple[jax.Array, ...]:
                """Those of a step of this slice that are not in its stage; of the last one, past that."""
                if not blocked or product.scales_in_stages:
                    return ()
                depth = jnp.minimum(step * slices + part_of_k, product.steps - 1) * per_step
                return tuple(scale(depth + each, part) for each, part in work)

            def stored_weights(stage: Any) -> list[jax.Array]:
                """Of each part, [64, bytes] int8."""
                return [loaded_bytes(pipeline.w.at[stage, part, own]) for part in parts]

            def one_step(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                """Products of 128 values each: the weights of the next ones are converted while the last are multiplied."""
                totals, loaded = carry

                def issue(i: int, stage: Any, weights: list[jax.Array], total: Accumulator) -> jax.Array | None:
                    """Begins a product, and returns its scales."""
                    each, part = work[i]
                    a = converted(weights[part], product.stored, each)  # [64, 128]
                    total.add(a, transposed(pipeline.x.at[stage, :, pl.ds(each * DEPTH, DEPTH)]))
                    if product.scales_in_stages:
                        return _scales_in_stage(pipeline.scales.at[stage, each, part, own])
                    return loaded[i] if blocked else None

                def run(*sums: Accumulator) -> tuple[jax.Array, ...]:
                    results, scales, stage = list(totals), [], stages.wait(before + n)
                    weights = stored_weights(stage)
                    for i, (_, part) in enumerate(work):
                        for following in range(len(scales), min(i + 1 + product.ahead, len(work))):
                            scales.append(issue(following, stage, weights, sums[following]))
                        x, by = sums[i].read(in_flight=len(scales) - i - 1), scales[i]
                        if i + 1 == len(work):
                            stages.release(before + n, stage=stage)
                        results[part] = results[part] + (x if by is None else scaled(x, by))
                    return tuple(results)

                # The next scales are loaded into the registers of those that were used: no move waits for them.
                return with_accumulators((shape,) * len(work), run), scales_of(n + 1)

            def one_step_by_warps(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                """The same by single warps: the compiler interleaves conversions and products."""
                totals, loaded = carry
                results, stage = list(totals), stages.wait(before + n)
                weights = stored_weights(stage)
                for i, (each, part) in enumerate(work):
                    a = converted(weights[part], product.stored, each)  # [64, 128]
                    chunks = pl.ds(each * (DEPTH // CHUNK), DEPTH // CHUNK)
                    x = product_with_rows(a, pipeline.x.at[stage, chunks])  # [64, rows]
                    by = loaded[i] if loaded else None
                    if product.scales_in_stages:
                        by = _scales_in_stage(pipeline.scales.at[stage, each, part, own])
                    results[part] = results[part] + (x if by is None else scaled(x, by))
                stages.release(before + n, stage=stage)
                return tuple(results), scales_of(n + 1)

            at_end = [None if blocked else scale(0, part) for part in parts]
            zeros = tuple(tile_of_zeros(shape) for _ in parts)
            step = one_step_by_warps if product.by_warps else one_step
            z, _ = lax.fori_loop(0, steps, step, (zeros, scales_of(0)))

            def finish(z: tuple[jax.Array, ...], place: tuple[Any, ...], bad: Any) -> None:
                start, *bounds = place
                of_converted = unit(product.stored)
                factors = [of_converted if by is None else by * of_converted for by in at_end]
                z = tuple(scaled(each, jnp.asarray(by)) for each, by in zip(z, factors, strict=True))
                if bias_ref is not None:
                    biases = (load_row_vector(bias_ref.at[part, pl.ds(first_column, width)]) for part in parts)
                    z = tuple(each + along_rows(bias, shape) for each, bias in zip(z, biases, strict=True))
                y = elementwise.activate(activation, z, WGMMA)
                if bad is not None:
                    y = y + bad
                first, end = (jnp.clip(bound - start, 0, product.rows) for bound in bounds)
                store_transposed(y, y_ref, start, first_column, first, end)

            def needed_at_end() -> tuple[Any, Any]:
                place = tuple(tiles_ref[field, row] for field in (START, GROUP_START, GROUP_END))
                return place, None if poison_ref is None else poison_ref[0]

            if slices == 1:
                finish(z, *needed_at_end())
                return before + steps

            @pl.when(part_of_k > 0)
            def _hand_over():
                pl.when(done > 0)(lambda: plgpu.barrier_wait(sums_empty.at[member]))
                for part, each in enumerate(z):
                    store(sums_smem.at[member, part], each)
                plgpu.barrier_arrive(sums_full.at[member])

            @pl.when(part_of_k == 0)
            def _add_and_finish():
                loaded = needed_at_end()  # While the other slice ends.
                plgpu.barrier_wait(sums_full.at[member])
                others = [load_tile(sums_smem.at[member, part]) for part in parts]
                plgpu.barrier_arrive(sums_empty.at[member])
                finish(tuple(each + other for each, other in zip(z, others, strict=True)), *loaded)

            return before + steps

        lax.fori_loop(0, own_tiles(), one_tile, jnp.int32(0))

    @pl.when(warpgroup == slices * members)
    def _produce():
        plgpu.set_max_registers(product.registers[1], action="decrease")
        whole_turns, rest = divmod(product.steps, slices)

        def place_of(done: Any) -> tuple[Any, Any]:
            row = jnp.minimum(locate(done)[0], tiles_ref.shape[1] - 1)
            return tiles_ref[START, row], tiles_ref[GROUP, row]

        def one_tile(done: Any, carry: tuple[Any, tuple[Any, Any]]) -> tuple[Any, tuple[Any, Any]]:
            """`carry`: the tiles before this one that have weights, and this tile's place."""
            (before, (start, group)), following = carry, place_of(done + 1)
            _, column = locate(done)
            own = pl.ds(column * _COLUMNS, _COLUMNS)

            def step(turn: Any, part_of_k: int) -> None:
                stages = _OwnStages.of(pipeline, part_of_k, slices)
                number, n = before * (whole_turns + (part_of_k < rest)) + turn, turn * slices + part_of_k
                stage = stages.acquire(number)
                copies = [
                    (w_ref.at[group, part, own, pl.ds(n * _BYTES, _BYTES)], pipeline.w.at[stage, part])
                    for part in parts
                ]
                rows, depth = pl.ds(start, product.rows), product.depth
                if product.by_warps:
                    source = x_ref.at[pl.ds(n * (depth // CHUNK), depth // CHUNK), rows]
                else:
                    source = x_ref.at[rows, pl.ds(n * depth, depth)]
                copies.append((source, pipeline.x.at[stage]))
                if product.scales_in_stages:
                    depths = pl.ds(n * per_step, per_step)
                    copies.append((scales_ref.at[group, depths, :, own], pipeline.scales.at[stage]))
                stages.copy(number, copies, stage=stage)

            def one_turn(turn: Any, carry: tuple[()]) -> tuple[()]:
                for part_of_k in range(slices):
                    step(turn, part_of_k)
                return carry

            has_weights = group < groups
            lax.fori_loop(0, jnp.where(has_weights, whole_turns, 0), one_turn, ())
            for part_of_k in range(rest):
                pl.when(has_weights)(functools.partial(step, jnp.int32(whole_turns), part_of_k))
            return before + has_weights.astype(jnp.int32), following

        first = place_of(jnp.int32(0))  # Loaded together with the number of tiles.
        lax.fori_loop(0, own_tiles(), one_tile, (jnp.int32(0), first))


def _scales_in_stage(ref: Any) -> jax.Array:
    """The scales of a warpgroup's columns."""
    scales = load_row_vector(ref)
    if interpreted():
        # It wants a fence between a plain read of a stage and the next copy to it, as in `Accumulator.add`.
        plgpu.commit_smem()
    return scales
