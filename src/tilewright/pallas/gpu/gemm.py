"""The main loop of a matrix product on Hopper: a persistent, warp-specialised kernel with an epilogue.

    gemm = Gemm(chip=chip, m=m, n=n, k=k, dtype=a.dtype, block_n=256, stages=4, band=16, cluster=2)
    a, b = gemm.pad(a, b)
    outputs = gemm.run(
        functools.partial(_scaled_kernel, gemm=gemm),
        name="scaled",
        inputs={"a": a, "b": b, "scale": scale},
        outputs={"c": jax.ShapeDtypeStruct((m, n), jnp.float32)},
        scratch={"c_smem": ...},
    )

The body hands A, B and the pipeline to `main_loop`:

    def _scaled_kernel(*, a_ref, b_ref, scale_ref, c_ref, c_smem, pipeline, gemm):
        def epilogue(consumer, i, j):
            ...  # Start the loads that finishing the tile needs.
            return finish  # Takes this consumer's part of the tile, in float32.

        gemm.main_loop(a_ref, b_ref, pipeline, epilogue)

Blocking: a thread block stays on its multiprocessor and computes tile after tile, [block_m, block_n], of C = A B. Each
consumer warpgroup has block_m / consumers rows of the tile in registers. The producer warpgroup copies blocks of
block_k columns of A and rows of B into the stages of a pipeline in shared memory, and goes on with the next tile while
this one is finished. The consumers share the stages but do not synchronise: one multiplies while another is in its
epilogue.

Order: see `Banded`. The thread blocks of a cluster have adjacent block rows and the same block column; each copies a
part of the block of B, which the hardware multicasts to all of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import compiler_params, interpreted, processors, run_kernel, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.scheduler import Banded
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate_in_loops

Epilogue = Callable[[Any, Any, Any], Callable[[jax.Array], None]]
"""(consumer, block row, block column) -> a function of the consumer's part of the tile, float32 [rows, block_n]."""

_CLUSTER = "peer"  # The axis of the thread blocks of a cluster.
_OPERANDS = 2  # The copies into a stage: a block of A and one of B.
_ROW_BYTES = 128  # A row of a swizzled tile in shared memory.


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A product A [m, k] times B [k, n], and how a kernel on this chip computes it."""

    chip: Chip
    m: int
    n: int
    k: int
    dtype: Any
    block_n: int
    """Columns of a tile: a multiple of 64, at most 256."""
    stages: int
    """Blocks of A and B in shared memory."""
    band: int
    """Block rows that go through all block columns together; a multiple of `cluster`."""
    cluster: int = 1
    """Thread blocks that share the copies of B. An `m` whose block rows it does not divide has none that do."""
    block_m: int = 128
    block_k: int = 64
    consumers: int = 2
    """Consumer warpgroups; each has block_m / consumers rows of a tile, a multiple of 64."""
    consumer_registers: int = 232
    producer_registers: int = 40

    @property
    def rows(self) -> int:
        """Rows of a tile per consumer."""
        return self.block_m // self.consumers

    @property
    def steps(self) -> int:
        """Steps of the main loop per tile."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def tiles(self) -> Banded:
        num_m = pl.cdiv(self.m, self.block_m)
        return Banded(num_m, pl.cdiv(self.n, self.block_n), min(self.band, num_m))

    @property
    def peers(self) -> int:
        """The thread blocks of a cluster. The interpreter has no multicast, so they are single there."""
        return 1 if interpreted() or self.tiles.rows % self.cluster else self.cluster

    @property
    def blocks(self) -> int:
        """Thread blocks: as many as run at once, in whole clusters, or fewer for fewer tiles."""
        return min(processors(self.chip) // self.peers * self.peers, self.tiles.rows * self.tiles.columns)

    def scratch(self) -> dict[str, Pipeline]:
        """What the kernel's scratch ends with: the pipeline, by that name."""
        pipeline = Pipeline.scratch(
            self.stages,
            consumers=self.consumers,
            copies=_OPERANDS,
            cluster_axis=_CLUSTER if self.peers > 1 else None,
            a=tile(self.stages, self.block_m, self.block_k, dtype=self.dtype),
            b=tile(self.stages, self.block_k, self.block_n, dtype=self.dtype),
        )
        return {"pipeline": pipeline}

    def pad(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A and B with zeros behind them: m and k to whole blocks, n to whole rows of shared memory.

        The copies fill what a block of B has past that with zeros.
        """
        a = padded(padded(a, 0, self.block_m), 1, self.block_k)
        return a, padded(padded(b, 0, self.block_k), 1, _ROW_BYTES // jnp.dtype(self.dtype).itemsize)

    def run(
        self,
        body: Callable[..., None],
        *,
        name: str,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        scratch: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Runs a kernel whose body calls `main_loop`. `scratch` is what the epilogue needs."""
        return run_kernel(
            body,
            name=name,
            inputs=inputs,
            outputs=outputs,
            scratch={**scratch, **self.scratch()},
            grid={"program": self.blocks // self.peers},
            cluster={_CLUSTER: self.peers} if self.peers > 1 else None,
            warpgroups=self.consumers + 1,
            params=compiler_params(automatic_barriers=True),
        )

    def main_loop(
        self, a_ref: Any, b_ref: Any, pipeline: Pipeline, epilogue: Epilogue, *, first_column: Any = 0
    ) -> None:
        """Computes this thread block's tiles. `first_column` is the column of B that the product begins with.

        `epilogue(consumer, i, j)` is called before the tile of block row i and block column j is computed, so that its
        loads run meanwhile. What it returns takes this consumer's rows of the tile, float32 [rows, block_n].
        """
        warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
        tiles, steps, peers, rows = self.tiles, self.steps, self.peers, self.rows
        # The thread blocks of a cluster have equally many tiles: the number of all tiles and that of all thread blocks
        # are multiples of the cluster's size.
        count = lax.div(tiles.rows * tiles.columns - 1 - program * peers, jnp.int32(self.blocks)) + 1

        def coordinates(done: Any) -> tuple[Any, Any]:
            """The tile that this thread block computes after `done` others. Those of a cluster follow each other."""
            if peers == 1:
                return tiles.coordinates(program + done * self.blocks)
            return tiles.coordinates(program * peers + lax.axis_index(_CLUSTER) + done * self.blocks)

        @pl.when(warpgroup < self.consumers)
        def _consume():
            plgpu.set_max_registers(self.consumer_registers, action="increase")
            own_rows = pl.ds(warpgroup * rows, rows)

            def one_tile(done: Any, carry: tuple[()]) -> tuple[()]:
                finish = epilogue(warpgroup, *coordinates(done))
                before = done * steps

                def step(n: Any, sums: tuple[Accumulator, ...]) -> None:
                    (sum_,) = sums
                    stage = pipeline.wait(before + n)
                    sum_.add(pipeline.a.at[stage, own_rows], pipeline.b.at[stage])  # [rows, block_n]
                    # The products of the previous step are done, so its stage is released; those of this step run on.
                    sum_.wait(1)
                    pl.when(n > 0)(lambda: pipeline.release(before + n - 1))

                (product,) = accumulate_in_loops(((rows, self.block_n),), [(0, steps, step)])
                pipeline.release(before + steps - 1)
                finish(product)
                return carry

            lax.fori_loop(0, count, one_tile, ())
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.consumers)
        def _produce():
            plgpu.set_max_registers(self.producer_registers, action="decrease")
            shared = _CLUSTER if peers > 1 else None

            def one_tile(done: Any, carry: tuple[()]) -> tuple[()]:
                i, j = coordinates(done)
                a_rows = pl.ds(i * self.block_m, self.block_m)
                b_columns = pl.ds(first_column + j * self.block_n, self.block_n)

                def step(n: Any, carry: tuple[()]) -> tuple[()]:
                    number = done * steps + n
                    stage, part = pipeline.stage(number), pl.ds(n * self.block_k, self.block_k)
                    a, b = a_ref.at[a_rows, part], b_ref.at[part, b_columns]
                    pipeline.acquire(number, stage=stage)
                    pipeline.copy(number, [(a, pipeline.a.at[stage])], stage=stage)
                    pipeline.copy(number, [(b, pipeline.b.at[stage])], stage=stage, collective_axes=shared)
                    return carry

                return lax.fori_loop(0, steps, step, carry)

            lax.fori_loop(0, count, one_tile, ())
            if peers > 1:
                # The other thread blocks of the cluster arrive on these barriers, so this one must not end before.
                for stage in range(self.stages):
                    pl.when(count * steps > stage)(lambda stage=stage: plgpu.barrier_wait(pipeline.empty.at[stage]))
