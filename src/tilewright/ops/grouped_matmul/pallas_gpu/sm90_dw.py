"""The weight gradient of `grouped_matmul` on Hopper, of bfloat16 operands.

    dw_g = sum over rows m of g of x_m^T dz_m

Floor: 2 M K N FLOPs; x and dz read once, dw [G, K, N] written once: 940 MB for 8 groups of K 4096 and N 14336, a seventh of
the time of 8192 rows on an H200. Here: the FLOPs of M + G * 64 / 2 rows in the mean, since the last step of a group is not
full: 3 % more for groups of 1,024 rows, 6 % for 512.

Blocking: a tile [block_m, block_n] of [K, N] of one group has as many steps as the group has blocks of 64 rows, counted on
the device: 16 steps for 1,024 rows, 8 for 512. So what happens between tiles counts, and the loops are not those of
pallas/gpu/gemm.py, although tiles, stages and clusters are:

- A group begins and ends at any row, and copies begin at multiples of 8. In the first and the last step of a tile, rows of
  other groups are set to zero in shared memory, in both operands: a zero times another group's infinity would not be zero.
  Each consumer clears its own columns of x and all of dz. The other one writes the same zeros to dz, so they need not wait
  for each other, and one goes on multiplying while the other stores its part of a tile.
- The place of the next tile is loaded from global memory while this one is computed.
- Groups are taken in descending order of their sizes, and every second wave of tiles backwards (`TileOrder`): the thread
  blocks end at about the same time. Steps of the busiest one over the mean, for 128 groups of exponentially distributed
  sizes: 1.02, where the order of the groups has 1.12.
- Two thread blocks with adjacent rows of dw share the copies of dz (`cluster`). They have one group, so equal steps.

Groups without rows store zeros. Where the sizes are wrong, dw is NaN (`bad`). All sums are in one order: the same bits in
every run.

Measured on an H200 (jax 0.11.2), TFLOP/s, for sizes from a Dirichlet distribution, equal sizes, and exponential ones:

    |                                       | [8192, 4096] x [8, 4096, 14336] | [65536, 2048] x [128, 2048, 768] |
    |---------------------------------------|---------------------------------|----------------------------------|
    | this                                  | 645, 700, 647                   | 533, 570, 536                    |
    | torch._grouped_mm                     | 579, 600, 593                   | 407, 442, 407                    |

Tried and dropped, same columns:

- Zeros by a load, a selection and a store for 8 rows at a time, then a barrier of both consumers (the main loop of gemm.py,
  with no other of the above): 535, 643, 539; 405, 541, 382. With the zeros as here: 627, 661, 622; 497, 570, 485.
- The groups in their own order: 621, 605, 630; 500, 583, 474. Sorted by `lax.sort`, several kernels: -; 475, 542, 508.
- No clusters: -; 509, 562, 521.
- In the last step, as many products of 16 rows as it needs, from Mosaic's own operations: 652, 666, 652; 546, 567, 539. One
  or two percent more for unequal sizes, up to five less for equal ones, and functions that are not public.
- That, and two parts of a tile stored per fence: 625, 650, 636; 505, 541, 528.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch
from tilewright.ops.grouped_matmul.call import MOST_MASKED, GroupedMatmulCall
from tilewright.pallas.gpu.gemm import ALIGNMENT, CLUSTER, Gemm
from tilewright.pallas.gpu.kernel import aligned, aligned_size, whole, whole_shape, with_rows_past_end
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import transposed
from tilewright.pallas.gpu.scheduler import divmod_nonnegative
from tilewright.pallas.gpu.staging import WIDTH, Staging, clear_rows, staging_scratch, stored_columns
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate_in_loops

# The rows of the list of groups.
_START, _END, _GROUP = range(3)


def largest_first(starts: jax.Array) -> jax.Array:
    """int32 [3, G]: the first row, the end and the number of each group, in descending order of their sizes.

    Sums over masks are two kernels on a GPU, where sorting is several (see `sums_before`).
    """
    number = jnp.arange(starts.shape[0] - 1, dtype=jnp.int32)
    groups, sizes = jnp.stack([starts[:-1], starts[1:], number]), jnp.diff(starts)  # [3, G], [G]
    if number.shape[0] > MOST_MASKED:
        return groups[:, jnp.argsort(-sizes)]
    larger, equal = sizes[None] > sizes[:, None], sizes[None] == sizes[:, None]  # [G, G]
    rank = jnp.sum(larger | equal & (number[None] < number[:, None]), axis=1, dtype=jnp.int32)
    has_rank = rank[None] == number[:, None]  # [G, G]
    return jnp.sum(jnp.where(has_rank[None], groups[:, None], 0), axis=2, dtype=jnp.int32)


@dataclass(frozen=True)
class TileOrder:
    """The order of the tiles of dw: `rows` by `columns` of them for each group, shared out over clusters of `peers` thread
    blocks each. `peers` divides `rows`, and there are at least as many tiles as thread blocks.

    The tiles of a group follow each other, its rows innermost, so that x and dz of a few groups stay in the L2 cache. Those
    of a cluster have one group and one column. Each wave, one tile per thread block, goes the other way than that before
    it: where groups descend in size, the cluster that had the largest tiles of one wave has the smallest of the next.
    """

    groups: int
    rows: int
    columns: int
    clusters: int
    peers: int

    def count(self, cluster: Any) -> Any:
        """How many tiles each thread block of a cluster takes."""
        waves, rest = divmod(self.groups * self.rows * self.columns // self.peers, self.clusters)
        return waves + (self._place(waves, cluster) < rest).astype(jnp.int32)

    def coordinates(self, done: Any, cluster: Any, peer: Any) -> tuple[Any, Any, Any]:
        """The group, counted in the order of the list, the block row and the block column of the tile after so many."""
        number = (done * self.clusters + self._place(done, cluster)) * self.peers + peer
        group, rest = divmod_nonnegative(number, self.rows * self.columns)
        column, row = divmod_nonnegative(rest, self.rows)
        return group, row, column

    def _place(self, wave: Any, cluster: Any) -> Any:
        """The place of a cluster in a wave."""
        return jnp.where((wave & 1) == 1, self.clusters - 1 - cluster, cluster)


@dataclass(frozen=True)
class _Rows:
    """The rows of a group, in steps. The first step begins up to seven rows before the group."""

    start: Any
    end: Any
    block_k: int

    def first(self, step: Any) -> Any:
        """The first row of a step."""
        return self.start - lax.rem(self.start, jnp.int32(ALIGNMENT)) + step * self.block_k

    @property
    def steps(self) -> Any:
        steps = lax.div(self.end - self.first(0) + self.block_k - 1, jnp.int32(self.block_k))
        return jnp.where(self.end > self.start, steps, 0)


def _dw_kernel(
    *,
    # inputs
    x_ref,  # [M, K]
    dz_ref,  # [M, columns]
    groups_ref,  # [3, G]
    poison_ref,  # [1]
    # outputs
    dw_ref,  # [G, K, columns]
    # scratch
    dw_smem,  # [consumers, BUFFERS, rows, WIDTH]
    pipeline: Pipeline,
    # static
    gemm: Gemm,
):
    """Each tile is of one group, and is summed over its rows."""
    tiles, peers = gemm.tiles, gemm.peers
    order = TileOrder(groups_ref.shape[1], tiles.rows, tiles.columns, gemm.blocks // peers, peers)
    cluster, peer = lax.axis_index("program"), lax.axis_index(CLUSTER) if peers > 1 else 0
    warpgroup, bad, count = lax.axis_index("warpgroup"), poison_ref[0], order.count(cluster)

    def locate(done: Any) -> tuple[Any, ...]:
        slot, row, column = order.coordinates(done, cluster, peer)
        return groups_ref[_START, slot], groups_ref[_END, slot], groups_ref[_GROUP, slot], row, column

    def for_each_tile(body: Callable[..., None]) -> Any:
        """Calls `body` with the steps before each tile, the rows of its group, the group, and its row and column. Returns
        the number of all steps.
        """

        def one_tile(done: Any, carry: Any) -> Any:
            before, start, end, *where = carry
            following = locate(jnp.minimum(done + 1, count - 1))
            rows = _Rows(start, end, gemm.block_k)
            body(before, rows, *where)
            return (before + rows.steps, *following)

        return lax.fori_loop(0, count, one_tile, (jnp.int32(0), *locate(jnp.int32(0))))[0]

    @pl.when(warpgroup < gemm.consumers)
    def _consume():
        plgpu.set_max_registers(gemm.consumer_registers, action="increase")
        own_rows = pl.ds(warpgroup * gemm.rows, gemm.rows)

        def one_tile(before: Any, rows: _Rows, group: Any, row: Any, column: Any) -> None:
            def step(n: Any, sums: tuple[Accumulator, ...], *, edge: bool = False) -> None:
                stage = pipeline.wait(before + n)
                x, dz = pipeline.a.at[stage, :, own_rows], pipeline.b.at[stage]
                if edge:
                    x, dz = clear_rows([x, dz], rows.start - rows.first(n), rows.end - rows.first(n))
                sums[0].add(transposed(x), dz)  # [rows, block_n]
                # The products of the previous step are done, so its stage is released; those of this step run on.
                sums[0].wait(1)
                pl.when(n > 0)(lambda: pipeline.release(before + n - 1))

            # Loops of their own: a branch in each step costs a fifth of the speed.
            at_edge, steps = functools.partial(step, edge=True), rows.steps
            first, last = jnp.minimum(steps, 1), jnp.maximum(steps - 1, 1)
            loops = [(0, first, at_edge), (1, last, step), (last, steps, at_edge)]
            (product,) = accumulate_in_loops(((gemm.rows, gemm.block_n),), loops)
            pl.when(steps > 0)(lambda: pipeline.release(before + steps - 1))
            staging = Staging(dw=dw_smem.at[warpgroup])
            into = dw_ref.at[group, pl.ds((row * gemm.consumers + warpgroup) * gemm.rows, gemm.rows)]
            for begin in stored_columns(gemm.block_n, gemm.n):
                at = pl.ds(column * gemm.block_n + begin, WIDTH)
                staging.store(product[:, begin : begin + WIDTH] + bad, into.at[:, at], "dw")
            staging.end()

        for_each_tile(one_tile)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == gemm.consumers)
    def _produce():
        plgpu.set_max_registers(gemm.producer_registers, action="decrease")

        def one_tile(before: Any, rows: _Rows, group: Any, row: Any, column: Any) -> None:
            def step(n: Any, carry: tuple[()]) -> tuple[()]:
                depth = pl.ds(rows.first(n), gemm.block_k)
                x = x_ref.at[depth, pl.ds(row * gemm.block_m, gemm.block_m)]
                dz = dz_ref.at[depth, pl.ds(column * gemm.block_n, gemm.block_n)]
                gemm.copy(pipeline, before + n, x, [dz])
                return carry

            lax.fori_loop(0, rows.steps, step, ())

        gemm.wait_for_peers(pipeline, for_each_tile(one_tile))


def dw_gemm(call: GroupedMatmulCall, launch: Launch) -> Gemm:
    """x^T dz of each group."""
    groups, m, k, n = call.sizes
    config, columns = launch.config, call.parts * n
    most = groups * pl.cdiv(k, config.block_m) * pl.cdiv(columns, config.block_n)
    return Gemm.of(config, launch.chip, m=k, n=columns, k=m, dtype=jnp.bfloat16, a_transposed=True, most_tiles=most)


def dw_scratch(gemm: Gemm) -> dict[str, Any]:
    """What the kernel needs beside the scratch of the product."""
    return staging_scratch(gemm.consumers, gemm.rows, dw=jnp.bfloat16)


def weight_gradient(gemm: Gemm, x: jax.Array, dz: jax.Array, starts: jax.Array, bad: jax.Array) -> jax.Array:
    """dw [G, K, columns]. `bad` is added to all of it."""
    groups, k, columns = starts.shape[0] - 1, gemm.m, gemm.n
    x = with_rows_past_end(whole(aligned(x), gemm.block_m), gemm.block_k)
    dz = with_rows_past_end(whole(aligned(dz), gemm.block_n), gemm.block_k)
    shape = whole_shape((groups, *aligned_size(k, columns, jnp.bfloat16)), gemm.block_m, gemm.block_n)
    dw = gemm.run(
        functools.partial(_dw_kernel, gemm=gemm),
        name="grouped_matmul_dw",
        inputs={"x": x, "dz": dz, "groups": largest_first(starts), "poison": bad.reshape(1)},
        outputs={"dw": jax.ShapeDtypeStruct(shape, jnp.bfloat16)},
        scratch=dw_scratch(gemm),
        automatic_barriers=False,
    )["dw"]
    return dw[:, :k, :columns]
