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

Operands may lie transposed in memory (`a_transposed`, `b_transposed`): the tensor cores read either order of 16-bit
values from shared memory, so a gradient needs no transposed copy. With `parts` = 2 a tile is two tiles of half the
columns, from B [k, 2, n]: the gates and the values of swiglu, which an epilogue needs at the same place.

By default the tiles are all of C. `main_loop` takes a `Plan` of other ones, as grouped products have. Their copies begin at
multiples of ALIGNMENT rows: a swizzled tile in shared memory is made of blocks of that many rows, and the hardware fills a
block that begins elsewhere with zeros. (The interpreter does not show that.)
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu import weight_only
from tilewright.pallas.gpu.kernel import compiler_params, interpreted, processors, run_kernel, tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import side_by_side, tile_of_zeros, transposed
from tilewright.pallas.gpu.scheduler import Banded
from tilewright.pallas.gpu.tile_config import GemmTiles, registers_of
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate_in_loops, with_accumulators

BLOCK_N, STAGES, BAND = 256, 4, 8
"""What heuristics take: the widest tile, as many stages as fit beside it, and block rows whose operands stay in the L2."""
SCALED_BLOCK_N, SCALED_STAGES = 128, 4  # Scaled sums have registers of their own, so the tile is half as wide.
MEMORY_FIELDS = "a smaller block_n or stages"

Epilogue = Callable[..., Callable[..., None]]
"""(consumer, block row, block column), or (consumer, *place) of a `Plan` -> a function of the consumer's part of the tile:
one float32 array [rows, block_n / parts] for each of the parts. With a `fetch` it takes the tile's number behind these."""

ALIGNMENT = 8
"""The row of an array at which a copy of a swizzled tile begins is a multiple of this."""

CLUSTER = "peer"
"""The axis of the thread blocks of a cluster."""

_ROWS = 64  # Of a wgmma instruction.
_ROW_BYTES = 128  # A row of a swizzled tile in shared memory.


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """A product A [m, k] times B [k, n], or B [k, parts, n], and how a kernel on this chip computes it."""

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
    """Thread blocks that share the copies of B. It is 1 where it does not divide the block rows of `m`."""
    block_m: int = 128
    block_k: int = 64
    consumers: int = 2
    """Consumer warpgroups; each has block_m / consumers rows of a tile, a multiple of 64."""
    consumer_registers: int = 232
    producer_registers: int = 40
    a_transposed: bool = False
    """Whether A is [k, m] in memory."""
    b_transposed: bool = False
    """Whether B is [n, k] in memory, or [parts, n, k]."""
    most_tiles: int | None = None
    """The tiles that a `Plan` has at most; None for those of `tiles`."""
    parts: int = 1
    """The parts of B [k, parts, n]; a tile has block_n / parts columns of each."""

    @staticmethod
    def of(config: GemmTiles, chip: Chip, *, m: int, n: int, k: int, dtype: Any, **options: Any) -> "Gemm":
        """The product of these sizes with the tiles of a config. Options come before its fields."""
        given = {name: getattr(config, name) for name in ("block_m", "block_n", "stages", "band", "cluster")}
        given["consumer_registers"], given["producer_registers"] = registers_of(config)
        return Gemm(chip=chip, m=m, n=n, k=k, dtype=dtype, consumers=config.block_m // _ROWS, **given | options)

    @property
    def rows(self) -> int:
        """Rows of a tile per consumer."""
        return self.block_m // self.consumers

    @property
    def steps(self) -> int:
        """Steps of the main loop per tile."""
        return pl.cdiv(self.k, self.block_k)

    @property
    def width(self) -> int:
        """Columns of each part of a tile."""
        return self.block_n // self.parts

    @property
    def sum_dtype(self) -> Any:
        return jnp.int32 if jnp.issubdtype(self.dtype, jnp.integer) else jnp.float32

    @property
    def tiles(self) -> Banded:
        num_m = pl.cdiv(self.m, self.block_m)
        return Banded(num_m, pl.cdiv(self.n, self.width), min(self.band, num_m))

    @property
    def peers(self) -> int:
        """The thread blocks of a cluster. The interpreter has no multicast, so they are single there."""
        return 1 if interpreted() or self.tiles.rows % self.cluster else self.cluster

    @property
    def blocks(self) -> int:
        """Thread blocks: as many as run at once, in whole clusters, or fewer for fewer tiles."""
        tiles = self.most_tiles or self.tiles.rows * self.tiles.columns
        return min(processors(self.chip) // self.peers * self.peers, tiles)

    def scratch(self) -> dict[str, Pipeline]:
        """What the kernel's scratch ends with: the pipeline, by that name."""
        a = (self.block_k, self.block_m) if self.a_transposed else (self.block_m, self.block_k)
        b = (self.width, self.block_k) if self.b_transposed else (self.block_k, self.width)
        pipeline = Pipeline.scratch(
            self.stages,
            consumers=self.consumers,
            copies=1 + self.parts,
            cluster_axis=CLUSTER if self.peers > 1 else None,
            a=tile(self.stages, *a, dtype=self.dtype),
            b=tile(self.stages, *([self.parts] if self.parts > 1 else []), *b, dtype=self.dtype),
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
        automatic_barriers: bool = True,
    ) -> dict[str, Any]:
        """Runs a kernel whose body calls `main_loop`, or has a loop of its own. `scratch` is what the epilogue needs."""
        return run_kernel(
            body,
            name=name,
            inputs=inputs,
            outputs=outputs,
            scratch={**scratch, **self.scratch()},
            grid={"program": self.blocks // self.peers},
            cluster={CLUSTER: self.peers} if self.peers > 1 else None,
            warpgroups=self.consumers + 1,
            params=compiler_params(automatic_barriers=automatic_barriers),
        )

    def plan(self, a_ref: Any, b_ref: Any, first_column: Any = 0) -> "Plan":
        """The tiles of A B in banded order. `first_column` is the column of B that the product begins with."""
        program, tiles, peers = lax.axis_index("program"), self.tiles, self.peers
        # The thread blocks of a cluster have equally many tiles: the number of all tiles and that of all thread blocks
        # are multiples of the cluster's size.
        count = lax.div(tiles.rows * tiles.columns - 1 - program * peers, jnp.int32(self.blocks)) + 1

        def locate(done: Any) -> tuple[Any, Any]:
            """Those of a cluster follow each other."""
            if peers == 1:
                return tiles.coordinates(program + done * self.blocks)
            return tiles.coordinates(program * peers + lax.axis_index(CLUSTER) + done * self.blocks)

        def sources(step: Any, i: Any, j: Any) -> tuple[Any, list[Any]]:
            rows, depth = pl.ds(i * self.block_m, self.block_m), pl.ds(step * self.block_k, self.block_k)
            a = a_ref.at[depth, rows] if self.a_transposed else a_ref.at[rows, depth]
            columns = pl.ds(first_column + j * self.width, self.width)
            if self.parts > 1:
                parts = range(self.parts)
                return a, [
                    b_ref.at[part, columns, depth] if self.b_transposed else b_ref.at[depth, part, columns]
                    for part in parts
                ]
            return a, [b_ref.at[columns, depth] if self.b_transposed else b_ref.at[depth, columns]]

        return Plan(count=count, locate=locate, sources=sources, steps=lambda i, j: self.steps)

    def main_loop(
        self,
        a_ref: Any,
        b_ref: Any,
        pipeline: Pipeline,
        epilogue: Epilogue,
        *,
        first_column: Any = 0,
        sources: Callable[..., tuple[Any, list[Any]]] | None = None,
        plan: "Plan | None" = None,
        scale: "Scale | None" = None,
        scale_at_end: bool = False,
        fetch: Callable[..., None] | None = None,
    ) -> None:
        """Computes this thread block's tiles: those of `plan`, or of the whole product from `first_column` on.

        `sources` says where the blocks of a step lie in memory (see `Plan.sources`), for operands that are not one array
        each, with the tiles of the whole product.

        With `scale` the products of each step are scaled and added up in float32 registers, for operands of 8 bits: the
        tensor cores add float8 products with about 14 bits only, so a step of 128 is as far as they should go. With
        `scale_at_end` the sums are scaled, once: for int8, whose sums are exact, and scales that do not differ along k.

        `epilogue(consumer, i, j)` is called before the tile of block row i and block column j is computed, so that its
        loads run meanwhile. What it returns takes this consumer's rows of the tile, float32 [rows, width] per part.

        `fetch(number, i, j)` is called by the producer once it has issued the copies of a tile's operands, the `number`-th
        tile of this thread block: it copies what the epilogue reads into a pipeline of the kernel's own. The consumers are
        `stages` steps behind, so it may wait for buffers that the previous tile's epilogue releases.
        """
        if plan is not None and self.cluster > 1:
            raise ValueError("a plan numbers thread blocks, not clusters of them; use cluster=1")
        warpgroup, rows = lax.axis_index("warpgroup"), self.rows
        plan = self.plan(a_ref, b_ref, first_column) if plan is None else plan
        plan = plan if sources is None else dataclasses.replace(plan, sources=sources)

        @pl.when(warpgroup < self.consumers)
        def _consume():
            plgpu.set_max_registers(self.consumer_registers, action="increase")
            own_rows = pl.ds(warpgroup * rows, rows)

            def one_tile(done: Any, before: Any) -> Any:
                where = plan.locate(done)
                number = () if fetch is None else (done,)
                finish, steps = epilogue(warpgroup, *where, *number), plan.steps(*where)

                def step(n: Any, sums: tuple[Accumulator, ...]) -> None:
                    stage = pipeline.wait(before + n)
                    a = pipeline.a.at[stage, :, own_rows] if self.a_transposed else pipeline.a.at[stage, own_rows]
                    for part, sum_ in enumerate(sums):
                        b = pipeline.b.at[(stage, part) if self.parts > 1 else stage]
                        # [rows, width]
                        sum_.add(transposed(a) if self.a_transposed else a, transposed(b) if self.b_transposed else b)
                    # The products of the previous step are done, so its stage is released; those of this step run on.
                    sums[0].wait(self.parts)
                    pl.when(n > 0)(lambda: pipeline.release(before + n - 1))

                if scale is not None and not scale_at_end:
                    finish(*self._scaled_sums(pipeline, scale, before, steps, warpgroup, where))
                    return before + steps
                shapes = ((rows, self.width),) * self.parts
                sums = accumulate_in_loops(shapes, [(0, steps, step)], self.sum_dtype)
                last = before + steps - 1
                if isinstance(steps, int):
                    pipeline.release(last)
                else:
                    pl.when(steps > 0)(lambda: pipeline.release(last))
                if scale is not None:
                    once = scale(warpgroup, 0, *where)
                    apply = functools.partial(once.apply, once.factors(once.load()))
                    sums = tuple(apply(part, 0, sum_.astype(jnp.float32)) for part, sum_ in enumerate(sums))
                finish(*sums)
                return before + steps

            lax.fori_loop(0, plan.count, one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.consumers)
        def _produce():
            plgpu.set_max_registers(self.producer_registers, action="decrease")

            def one_tile(done: Any, before: Any) -> Any:
                where = plan.locate(done)
                steps = plan.steps(*where)

                def step(n: Any, carry: tuple[()]) -> tuple[()]:
                    self.copy(pipeline, before + n, *plan.sources(n, *where))
                    return carry

                lax.fori_loop(0, steps, step, ())
                if fetch is not None:
                    fetch(done, *where)
                return before + steps

            self.wait_for_peers(pipeline, lax.fori_loop(0, plan.count, one_tile, jnp.int32(0)))

    def copy(self, pipeline: Pipeline, number: Any, a: Any, b: list[Any]) -> None:
        """The producer's part of a step: copies blocks of A and of each part of B, once their stage is empty."""
        stage = pipeline.stage(number)
        pipeline.acquire(number, stage=stage)
        pipeline.copy(number, [(a, pipeline.a.at[stage])], stage=stage)
        into = [pipeline.b.at[(stage, part) if self.parts > 1 else stage] for part in range(self.parts)]
        shared = CLUSTER if self.peers > 1 else None
        pipeline.copy(number, zip(b, into, strict=True), stage=stage, collective_axes=shared)

    def wait_for_peers(self, pipeline: Pipeline, steps: Any) -> None:
        """The producer's end, after so many steps: the other thread blocks of its cluster have read what it copied. They
        arrive on its barriers, so it must not end before.
        """
        for stage in range(self.stages if self.peers > 1 else 0):
            pl.when(steps > stage)(lambda stage=stage: plgpu.barrier_wait(pipeline.empty.at[stage]))

    def _scaled_sums(
        self, pipeline: Pipeline, scale: "Scale", before: Any, steps: Any, warpgroup: Any, where: tuple[Any, ...]
    ) -> tuple[jax.Array, ...]:
        """The sums over all steps of this consumer's rows, each step's products scaled: float32 [rows, width] per part.

        A consumer has the products of one step in flight. While it scales and adds them, the tensor cores compute those of
        the other consumers. The wait for the next stage stands between the products and their scaling on purpose: the
        compiler moves nothing across it, and would otherwise place the loads of scales, and the wait for them, before the
        products. The scales of the next step are loaded while this one's are used.
        """
        own_rows = pl.ds(warpgroup * self.rows, self.rows)
        # The products in flight and all sums have to fit into registers; 64 columns are in one block of scales.
        shape = (self.rows, self.width if self.block_n <= SCALED_BLOCK_N else 64)
        cuts = self.width // shape[1]
        pieces = [(part, cut) for part in range(self.parts) for cut in range(cuts)]
        ahead = min(len(pieces), 2)

        def wait_for(step: Any) -> None:
            @pl.when(step < steps)
            def _wait() -> None:
                pipeline.wait(before + step)

        def step(n: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            """Computes step n, whose stage is full. `carry` has the totals, and what was loaded of the scales of step n."""
            (totals, loaded), stage, of_step = carry, pipeline.stage(before + n), scale(warpgroup, n, *where)

            def run(*sums: Accumulator) -> tuple[Any, Any]:
                def issue(i: int) -> None:
                    part, cut = pieces[i]
                    b = pipeline.b.at[stage, part] if self.parts > 1 else pipeline.b.at[stage]
                    columns = pl.ds(cut * shape[1], shape[1])
                    sums[i].add(pipeline.a.at[stage, own_rows], transposed(b.at[columns]))  # [rows, columns]

                for i in range(ahead):
                    issue(i)
                wait_for(n + 1)
                factors = of_step.factors(loaded)
                following = scale(warpgroup, jnp.minimum(n + 1, steps - 1), *where).load()
                results = list(totals)
                for i, (part, cut) in enumerate(pieces):
                    product = sums[i].read(in_flight=min(ahead, len(pieces) - i) - 1)
                    if i + ahead < len(pieces):
                        issue(i + ahead)
                    if i + 1 == len(pieces):
                        pipeline.release(before + n)
                    results[i] = results[i] + of_step.apply(factors, part, cut * shape[1], product.astype(jnp.float32))
                return tuple(results), following

            return with_accumulators((shape,) * len(pieces), run, self.sum_dtype)

        wait_for(0)
        carry = tuple(tile_of_zeros(shape) for _ in pieces), scale(warpgroup, jnp.int32(0), *where).load()
        totals, _ = lax.fori_loop(0, steps, step, carry)
        return tuple(side_by_side(totals[part * cuts : (part + 1) * cuts]) for part in range(self.parts))


class StepScale(Protocol):
    """The scales of one step's products, in three stages, so that a kernel can place the loads before the products."""

    def load(self) -> Any:
        """Returns the scales in registers: a pytree of arrays."""
        ...

    def factors(self, loaded: Any, /) -> Any:
        """Returns what `apply` multiplies by, computed from what `load` returned."""
        ...

    def apply(self, factors: Any, part: int, first: int, x: jax.Array, /) -> jax.Array:
        """Returns the products x of a part from its column `first` on, float32 [rows, columns], times their scales."""
        ...


Scale = Callable[..., StepScale]
"""(consumer, step, *place) -> the scales of that step of the tile."""


def scales_each_step(call: Any) -> bool:
    """Whether the products of a call (core/products.py) are scaled step by step: both operands are quantised, and it is not
    int8 with scales that do not differ along k, whose sums are exact and are scaled once.
    """
    if call.x_scales is None:
        return False
    return not (call.w_dtype == "int8" and call.x_scales.shape[-1] == call.w_scales.shape[-3] == 1)


def largest_tile(
    config: type[Any],
    chip: Chip,
    memory: Callable[[Any], Mapping[str, int]],
    call: Any,
    *,
    rows_per_group: int,
    **fields: Any,
) -> Any:
    """The config with the widest tile and the most stages whose kernels fit, for a call of products (core/products.py).

    `memory`: the shared memory of the kernels with a config.
    """
    block_n, most = (SCALED_BLOCK_N, SCALED_STAGES) if scales_each_step(call) else (BLOCK_N, STAGES)
    block_m = 64 if rows_per_group <= 64 else 128
    if call.x_scales is None and call.w_scales is not None:
        block_m, most = weight_only.tile_rows(call, rows_per_group), weight_only.STAGES
    chosen = None
    for stages in range(most, 1, -1):
        chosen = config(block_n, stages, BAND, block_m=block_m, **fields)
        if max(memory(chosen).values()) <= (chip.smem_bytes or 0):
            break
    return chosen


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tiles that a thread block computes, as functions of what it has done. What `locate` returns is passed on.

    A caller's plan numbers thread blocks, not clusters of them: its `Gemm` has a `cluster` of 1, or half of the tiles would
    be left out.
    """

    count: Any
    """The number of tiles of this thread block."""
    locate: Callable[[Any], tuple[Any, ...]]
    """The place of the tile after so many others."""
    sources: Callable[..., tuple[Any, list[Any]]]
    """(step, *place) -> the blocks of A and of each part of B in global memory."""
    steps: Callable[..., Any]
    """(*place) -> the steps of the main loop; a number, or a value on the device."""
