"""`matmul` of few bfloat16 rows on Hopper in one kernel: each thread block has all of the contracted axis.

    y = activation(x w + bias)

Floor: every weight is read once, 2 K N bytes per part; with few rows nothing else matters. Here: that, and x once per tile,
from the L2 cache. No sums are written to memory, and nothing is left to add up.

Blocking: as in pallas/gpu/few_rows.py, z^T = w^T x^T. A tile has two blocks of 64 columns of w: the gates and the values of
the same 64 columns of y with swiglu, and otherwise neighbours. One consumer warpgroup has both sums in registers, so the
activation needs no exchange. A matrix has to have enough tiles: each is one thread block's, which takes a third of the
bandwidth of its multiprocessor when all of them stream from memory. So it is for wide matrices, and others are split.

A single row is not padded: copies of tiles take whole eights of rows, so x [1, k] is read as [8, k / 8]. For each of these
eight ranges of k only one row of the sums is of x. The sum over all ranges takes that row of each.

Tried and dropped, on an H200 with 64 rows, K 2048 and swiglu:

- pairs of thread blocks that share each copy of x by multicast: 14.2 us instead of 14.1 us with N 5376, and 16.2 us
  instead of 15.9 us with N 6144.
- tiles of other widths, meant to leave fewer multiprocessors idle, with x as the left operand. With N 5376 and N 6144, and
  weights out of cold memory, this kernel takes 13.6 and 15.0 us; tiles of 64 columns take 20.6 and 21.4 us, of 96 columns
  24.6 and 27.0 us, and pairs of thread blocks that each contract half of K and exchange their sums 16.8 and 18.1 us (192
  columns) or 30.0 and 31.4 us (160 columns). Copies are in pieces of 128 bytes here, 64 bytes with 64 or 192 columns and 32
  bytes with 96 or 160, for operands have one swizzle; the shorter the pieces, the slower the tiles.
- two splits of 128 columns, added up by XLA: 18.3 and 19.6 us.

Limits: the residual is added by XLA.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.elementwise import activate
from tilewright.pallas.gpu.kernel import (
    aligned,
    compiler_params,
    processors,
    run_kernel,
    smem_bytes,
    tile,
    whole,
    whole_shape,
)
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import (
    WGMMA,
    along_rows,
    column_indices,
    load_along_rows,
    tile_of_zeros,
    transposed,
)
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.staging import store_transposed
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate_in_loops

_BLOCKS = 2  # Of columns of w in a tile.
_COLUMNS = 64  # Of a block: the rows of a wgmma instruction.
_DEPTH = 128  # Of the contracted axis, per step: 32 KB of weights.
_EIGHT = 8  # Rows that a tile in shared memory is made of.


@dataclass(frozen=True, kw_only=True)
class WholeDepth:
    """activation(x [m, k] times w [k, parts n] + bias), and how a kernel on this chip computes it."""

    chip: Chip
    m: int
    k: int
    n: int
    parts: int
    """2 for swiglu, whose w has gates in its first n columns and values in the others."""
    rows: int
    """Rows of x of a tile: 16, 32 or 64."""
    stages: int

    @property
    def width(self) -> int:
        """Columns of y of a tile."""
        return _BLOCKS * _COLUMNS // self.parts

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return pl.cdiv(self.n, self.width)

    @property
    def ranges(self) -> int:
        """The ranges of k that are summed apart: eight where x [1, k] is read as [8, k / 8]."""
        return _EIGHT if self.m == 1 and self.k % (_EIGHT * _DEPTH) == 0 else 1

    @property
    def steps(self) -> int:
        """Steps of the loop over each range."""
        return pl.cdiv(self.k, _DEPTH * self.ranges)

    def scratch(self) -> dict[str, Pipeline]:
        pipeline = Pipeline.scratch(
            self.stages,
            consumers=1,
            copies=1 + _BLOCKS,
            w=tile(self.stages, _BLOCKS, _DEPTH, _COLUMNS, dtype=jnp.bfloat16),
            x=tile(self.stages, self.rows, _DEPTH, dtype=jnp.bfloat16),
        )
        return {"pipeline": pipeline}

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return smem_bytes(self.scratch())

    def run(
        self, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, activation: str | None, out_dtype: Any, name: str
    ) -> jax.Array:
        """y [m, n]."""
        depth = self.steps * _DEPTH
        x = x.reshape(_EIGHT, -1) if self.ranges > 1 else x
        outputs = run_kernel(
            functools.partial(_kernel, sizes=self, activation=activation),
            name=name,
            inputs={
                "x": whole(aligned(x), self.rows, depth),
                "w": whole(aligned(w.reshape(self.k, self.parts, self.n), 0), depth, 1, self.width),
                "bias": None if bias is None else padded(bias.astype(jnp.float32), 1, self.width),
            },
            outputs={"y": jax.ShapeDtypeStruct(whole_shape((self.m, self.n), 1, self.width), out_dtype)},
            scratch=self.scratch(),
            grid={"program": min(processors(self.chip), self.tiles * pl.cdiv(self.m, self.rows))},
            warpgroups=2,
            params=compiler_params(automatic_barriers=True),
        )
        return outputs["y"][: self.m, : self.n]


def _kernel(
    *,
    # inputs
    x_ref,  # [M, K], or [8, K / 8]
    w_ref,  # [K, parts, N]
    bias_ref,  # [parts, N] float32, N in whole tiles; or None
    # outputs
    y_ref,  # [M, N]
    # scratch
    pipeline: Pipeline,
    # static
    sizes: WholeDepth,
    activation: str | None,
):
    shape, parts, steps = (_COLUMNS, sizes.rows), sizes.parts, sizes.steps
    row_tiles = pl.cdiv(sizes.m, sizes.rows)
    order = RoundRobin(sizes.tiles * row_tiles, lax.axis_size("program"), lax.axis_index("program"))

    def part_and_column(column: Any, block: int) -> tuple[int, Any]:
        """Where a block of a tile begins in w: its part, and its first column there."""
        return (block, column * sizes.width) if parts > 1 else (0, column * sizes.width + block * _COLUMNS)

    def in_tiles(of_one: Any) -> None:
        """Calls a function of a tile's column and row, and of the steps before it, for each tile of this thread block."""

        def body(done: Any, before: Any) -> Any:
            of_one(*divmod_nonnegative(order.tile(done), row_tiles), before)
            return before + sizes.ranges * steps

        lax.fori_loop(0, order.count, body, jnp.int32(0))

    def summed(before: Any) -> tuple[jax.Array, ...]:
        """z^T of the blocks of a tile, [64, rows] each."""

        def step(n: Any, sums: tuple[Accumulator, ...], first: Any) -> None:
            stage = pipeline.wait(first + n)
            for block, sum_ in enumerate(sums):
                sum_.add(transposed(pipeline.w.at[stage, block]), transposed(pipeline.x.at[stage]))
            # The products of the previous step are done, so its stage is released; those of this step run on.
            sums[0].wait(_BLOCKS)
            pl.when(n > 0)(lambda: pipeline.release(first + n - 1))

        def of_range(number: Any) -> tuple[jax.Array, ...]:
            first = before + number * steps
            sums = accumulate_in_loops((shape,) * _BLOCKS, [(0, steps, functools.partial(step, first=first))])
            pipeline.release(first + steps - 1)
            return sums

        if sizes.ranges == 1:
            return of_range(0)

        def take_own(number: Any, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            own = column_indices(shape, 0) == number
            return tuple(jnp.where(own, new, old) for new, old in zip(of_range(number), totals, strict=True))

        totals = lax.fori_loop(0, sizes.ranges, take_own, (tile_of_zeros(shape),) * _BLOCKS)
        return tuple(along_rows(jnp.sum(total, axis=1), shape) for total in totals)

    def consume(column: Any, row: Any, before: Any) -> None:
        z = summed(before)
        if bias_ref is not None:
            where = [part_and_column(column, block) for block in range(_BLOCKS)]
            biases = [bias_ref.at[part, pl.ds(first, _COLUMNS)] for part, first in where]
            z = tuple(each + load_along_rows(bias, shape) for each, bias in zip(z, biases, strict=True))
        end = jnp.minimum(sizes.m - row * sizes.rows, sizes.rows)
        for block in range(0, _BLOCKS, parts):
            y = activate(activation, z[block : block + parts], WGMMA)
            _, first_column = part_and_column(column, block)
            store_transposed(y, y_ref, row * sizes.rows, first_column, jnp.int32(0), end)

    def produce(column: Any, row: Any, before: Any) -> None:
        rows = pl.ds(row * sizes.rows, sizes.rows)

        def step(n: Any, carry: tuple[()]) -> tuple[()]:
            depth = pl.ds(n * _DEPTH, _DEPTH)
            of_x = pl.ds(lax.rem(n, jnp.int32(steps)) * _DEPTH, _DEPTH) if sizes.ranges > 1 else depth
            stage = pipeline.acquire(before + n)
            copies = [(x_ref.at[rows, of_x], pipeline.x.at[stage])]
            for block in range(_BLOCKS):
                part, first = part_and_column(column, block)
                copies.append((w_ref.at[depth, part, pl.ds(first, _COLUMNS)], pipeline.w.at[stage, block]))
            pipeline.copy(before + n, copies, stage=stage)
            return carry

        lax.fori_loop(0, sizes.ranges * steps, step, ())

    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(lambda: in_tiles(consume))
    pl.when(warpgroup == 1)(lambda: in_tiles(produce))
