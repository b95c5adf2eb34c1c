"""`matmul` of few bfloat16 rows on Hopper in one kernel: each thread block has all of the contracted axis, or each pair.

    y = activation(x w + bias)

Floor: every weight is read once, 2 K N bytes per part; with few rows nothing else matters. Here: that, and x once per tile,
from the L2 cache. No sums are written to memory, and nothing is left to add up.

Blocking: as in pallas/gpu/few_rows.py, z^T = w^T x^T. A tile has two blocks of 64 columns of w: the gates and the values of
the same 64 columns of y with swiglu, and otherwise neighbours. One consumer warpgroup has both sums in registers, so the
activation needs no exchange. A matrix has to have enough tiles: each is one thread block's, which takes a third of the
bandwidth of its multiprocessor when all of them stream from memory. So it is for wide matrices, and others are split.

Tiles of other widths (`tile_columns`) have not run on a GPU yet, so no heuristic takes them: they are right in the
interpreter, which exchanges the sums of a pair in another way, and compiled. 64 rows of x are the rows of a wgmma
instruction, so x is its left operand there, z = x w, and a block has any multiple of 16 columns. With two `splits`, a pair
of thread blocks has a tile: each contracts half of K, stores the sums of one half of each block's columns to the shared
memory of the other, and finishes the other half. With K 2048 and swiglu, tiles of 2 x 64 columns, of 2 x 48 columns, and of
2 x 96 columns for pairs

- are 96, 128 and 128 thread blocks on 132 multiprocessors for N 6144, and 84, 112 and 112 for N 5376;
- copy 512, 384 and 384 KB of w and 256, 256 and 128 KB of x to each multiprocessor, in pieces of 128, 32 and 64 bytes.
  Pallas multiplies operands of one swizzle only: the largest power of two that divides a row of a block, up to 128 bytes,
  which is the size of the pieces. Short ones may cost more than the balance gains. Weights in int4 took 22.6 us in pieces
  of 64 bytes and take 20.4 us in pieces of 128 (16 rows, [7168, 16384], H200);
- take 105, 80 and 122 registers and 192, 160 and 152 KB of shared memory in four stages (compiled for an H200 and an H100).
  A step of 128 of K has 16 wgmma instructions; pairs have steps of 64, with 8. No width spills, with or without pairs.

One consumer is enough: an instruction for 64 x 48 sums takes at least 28 clocks, in which 2 KB of x and 1.5 KB of w are
read from shared memory, and one for 64 x 96 takes 48. So a step takes about 450 or 390 clocks, while its weights, 24 KB,
arrive in about 1,200, at 1/128 of 4.8 TB/s.

A single row is not padded: copies of tiles take whole eights of rows, so x [1, k] is read as [8, k / 8]. For each of these
eight ranges of k only one row of the sums is of x. The sum over all ranges takes that row of each. Where x is the left
operand, it is padded.

Tried and dropped: pairs of thread blocks that share each copy of x by multicast. For 64 rows, K 2048 and swiglu it takes
14.2 us instead of 14.1 us with N 5376, and 16.2 us instead of 15.9 us with N 6144 (H200).

Limits: the residual is added by XLA.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.elementwise import activate
from tilewright.pallas.gpu.few_rows import TILE_COLUMNS
from tilewright.pallas.gpu.kernel import (
    aligned,
    compiler_params,
    interpreted,
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
    load_along_columns,
    load_along_rows,
    tile_of_zeros,
    transposed,
)
from tilewright.pallas.gpu.scheduler import RoundRobin, divmod_nonnegative
from tilewright.pallas.gpu.staging import store_rows, store_transposed
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate_in_loops

_BLOCKS = 2  # Of columns of w in a tile.
_DEPTH = 128  # Of the contracted axis, per step: 32 KB of weights in a tile of 128 columns.
_PEER = "peer"  # The axis of the thread blocks of a cluster.
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
    columns: int
    """Columns of w of a tile. Those that are not TILE_COLUMNS need 64 rows."""
    stages: int
    splits: int
    """Thread blocks that divide the contracted axis of a tile, where `rows_first`: 1 or 2."""

    @property
    def rows_first(self) -> bool:
        """Whether the kernel computes z = x w, not z^T."""
        return self.columns != TILE_COLUMNS

    @property
    def peers(self) -> int:
        """Thread blocks that compute a tile together."""
        return self.splits if self.rows_first else 1

    @property
    def block(self) -> int:
        """Columns of w of a block."""
        return self.columns // _BLOCKS

    @property
    def own(self) -> int:
        """Columns of a block that one of the peers finishes, once they have exchanged their sums."""
        return self.block // self.peers

    @property
    def width(self) -> int:
        """Columns of y of a tile."""
        return self.columns // self.parts

    @property
    def depth(self) -> int:
        """Channels that a step contracts."""
        return _DEPTH if self.columns <= TILE_COLUMNS else _DEPTH // 2

    @property
    def tiles(self) -> int:
        """Tiles of columns."""
        return pl.cdiv(self.n, self.width)

    @property
    def ranges(self) -> int:
        """The ranges of k that are summed apart: eight where x [1, k] is read as [8, k / 8]."""
        folded = self.m == 1 and self.k % (_EIGHT * _DEPTH) == 0 and not self.rows_first
        return _EIGHT if folded else 1

    @property
    def steps(self) -> int:
        """Steps of the loop over a thread block's part of each range."""
        return pl.cdiv(self.k, self.depth * self.ranges * self.peers)

    @property
    def programs(self) -> int:
        """Thread blocks, as many as run at once; or pairs of them, one per tile: peers exchange sums once."""
        tiles = self.tiles * pl.cdiv(self.m, self.rows)
        return tiles if self.peers > 1 else min(processors(self.chip), tiles)

    def scratch(self) -> dict[str, Any]:
        w = tile(self.stages, _BLOCKS, self.depth, self.block, dtype=jnp.bfloat16)
        # Pallas multiplies operands of one swizzle only, which is w's: it follows from the columns of a block.
        x = plgpu.SMEM((self.stages, self.rows, self.depth), jnp.bfloat16, transforms=w.transforms)
        scratch = {"pipeline": Pipeline.scratch(self.stages, consumers=1, copies=1 + _BLOCKS, w=w, x=x)}
        if self.peers == 1:
            return scratch | {"sums_smem": None, "arrived": None}
        if interpreted():
            return scratch | {"sums_smem": None, "arrived": plgpu.ClusterBarrier(collective_axes=(_PEER,))}
        sums = tile(_BLOCKS, self.rows, self.own, dtype=jnp.float32)
        return scratch | {"sums_smem": sums, "arrived": plgpu.Barrier(num_arrivals=_BLOCKS)}

    def sums(self) -> jax.ShapeDtypeStruct | None:
        """What peers exchange through global memory in the interpreter, which does not store to another block's own."""
        shape = (self.programs, self.peers, _BLOCKS, self.rows, self.own)
        return jax.ShapeDtypeStruct(shape, jnp.float32) if interpreted() and self.peers > 1 else None

    @property
    def memory(self) -> int:
        """Bytes of shared memory."""
        return smem_bytes(self.scratch())

    def run(
        self, x: jax.Array, w: jax.Array, bias: jax.Array | None, *, activation: str | None, out_dtype: Any, name: str
    ) -> jax.Array:
        """y [m, n]."""
        depth = self.steps * self.depth * self.peers
        x = x.reshape(_EIGHT, -1) if self.ranges > 1 else x
        n = self.n + self.n % 2 if self.rows_first else self.n  # Rows are stored by pairs of columns.
        outputs = run_kernel(
            functools.partial(_kernel, sizes=self, activation=activation),
            name=name,
            inputs={
                "x": whole(aligned(x), self.rows, depth),
                "w": whole(aligned(w.reshape(self.k, self.parts, self.n), 0), depth, 1, self.width),
                "bias": None if bias is None else padded(bias.astype(jnp.float32), 1, self.width),
            },
            outputs={
                "y": jax.ShapeDtypeStruct(whole_shape((self.m, n), 1, self.width), out_dtype),
                "sums": self.sums(),
            },
            scratch=self.scratch(),
            grid={"program": self.programs},
            cluster={_PEER: self.peers} if self.peers > 1 else None,
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
    sums_ref,  # [programs, peers, blocks, rows, own] float32, or None
    # scratch
    pipeline: Pipeline,
    sums_smem,  # [blocks, rows, own] float32, which the peer stores; or None
    arrived,  # A barrier: the peer's sums are there.
    # static
    sizes: WholeDepth,
    activation: str | None,
):
    parts, steps, rows_first = sizes.parts, sizes.steps, sizes.rows_first
    shape = (sizes.rows, sizes.block) if rows_first else (sizes.block, sizes.rows)
    finished = (sizes.rows, sizes.own) if rows_first else shape
    row_tiles, peers = pl.cdiv(sizes.m, sizes.rows), sizes.peers
    peer = lax.axis_index(_PEER) if peers > 1 else 0
    order = RoundRobin(sizes.tiles * row_tiles, lax.axis_size("program"), lax.axis_index("program"))

    def part_and_column(column: Any, block: int) -> tuple[int, Any]:
        """Where a block of a tile begins in w: its part, and its first column there."""
        return (block, column * sizes.width) if parts > 1 else (0, column * sizes.width + block * sizes.block)

    def in_tiles(of_one: Any) -> None:
        """Calls a function of a tile's column and row, and of the steps before it, for each tile of this thread block."""

        def body(done: Any, before: Any) -> Any:
            of_one(*divmod_nonnegative(order.tile(done), row_tiles), before)
            return before + sizes.ranges * steps

        lax.fori_loop(0, order.count, body, jnp.int32(0))

    def summed(before: Any) -> tuple[jax.Array, ...]:
        """z of the blocks of a tile, [rows, columns] each, or z^T."""

        def step(n: Any, sums: tuple[Accumulator, ...], first: Any) -> None:
            stage = pipeline.wait(first + n)
            for block, sum_ in enumerate(sums):
                x, w = pipeline.x.at[stage], pipeline.w.at[stage, block]
                sum_.add(x, w) if rows_first else sum_.add(transposed(w), transposed(x))
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

    def exchanged(z: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The sums of both peers, of the columns of each block that this one finishes: the left half, or the right.

        A thread block has waited for all that its peer stores there when it ends.
        """
        own, others = [], []
        for each in z:
            left, right = each[:, : sizes.own], each[:, sizes.own :]  # [rows, own]
            own.append(jnp.where(peer == 0, left, right))
            others.append(jnp.where(peer == 0, right, left))
        if sums_ref is not None:  # In the interpreter.
            pair = lax.axis_index("program")
            for block, sums in enumerate(others):
                sums_ref[pair, 1 - peer, block] = sums
            plgpu.barrier_arrive(arrived)
            plgpu.barrier_wait(arrived)
            return tuple(sums + sums_ref[pair, peer, block] for block, sums in enumerate(own))
        for block, sums in enumerate(others):
            to_peer = {"cluster_idx": 1 - peer, "cluster_dim": _PEER, "optimized": False}
            plgpu.async_store_smem(sums, sums_smem.at[block], arrived, **to_peer)
        plgpu.barrier_wait(arrived)
        received = [plgpu.load(sums_smem.at[block], layout=WGMMA, optimized=False) for block in range(_BLOCKS)]
        return tuple(map(jnp.add, own, received))

    def consume(column: Any, row: Any, before: Any) -> None:
        z = exchanged(summed(before)) if peers > 1 else summed(before)
        if bias_ref is not None:
            where = [part_and_column(column, block) for block in range(_BLOCKS)]
            biases = [bias_ref.at[part, pl.ds(first + peer * sizes.own, sizes.own)] for part, first in where]
            load = load_along_columns if rows_first else load_along_rows
            z = tuple(each + load(bias, finished) for each, bias in zip(z, biases, strict=True))
        store = store_rows if rows_first else store_transposed
        end = jnp.minimum(sizes.m - row * sizes.rows, sizes.rows)
        for block in range(0, _BLOCKS, parts):
            y = activate(activation, z[block : block + parts], WGMMA)
            _, first_column = part_and_column(column, block)
            store(y, y_ref, row * sizes.rows, first_column + peer * sizes.own, jnp.int32(0), end)

    def produce(column: Any, row: Any, before: Any) -> None:
        rows = pl.ds(row * sizes.rows, sizes.rows)

        def step(n: Any, carry: tuple[()]) -> tuple[()]:
            depth = pl.ds((peer * steps + n) * sizes.depth, sizes.depth)
            of_x = pl.ds(lax.rem(n, jnp.int32(steps)) * sizes.depth, sizes.depth) if sizes.ranges > 1 else depth
            stage = pipeline.acquire(before + n)
            copies = [(x_ref.at[rows, of_x], pipeline.x.at[stage])]
            for block in range(_BLOCKS):
                part, first = part_and_column(column, block)
                copies.append((w_ref.at[depth, part, pl.ds(first, sizes.block)], pipeline.w.at[stage, block]))
            pipeline.copy(before + n, copies, stage=stage)
            return carry

        lax.fori_loop(0, sizes.ranges * steps, step, ())

    warpgroup = lax.axis_index("warpgroup")
    pl.when(warpgroup == 0)(lambda: in_tiles(consume))
    pl.when(warpgroup == 1)(lambda: in_tiles(produce))
