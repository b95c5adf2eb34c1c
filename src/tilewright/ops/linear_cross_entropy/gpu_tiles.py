"""Tiles of logits on Hopper: the product x w, which the forward and the backward kernel make alike and finish apart.

Blocking: a thread block stays on its multiprocessor and takes tile after tile [128, block_v] of the logits. Two warpgroups
have 64 rows of the tile each, in registers; a third copies steps of 64 of H into a ring in shared memory, and goes on with
the next tile while this one is finished. The two share the ring but do not meet: one multiplies while the other finishes.

Order: a band of block rows at a time, the vocabulary within it, the rows of the band innermost. So the tiles that run at
once share a few columns of w and a band of x, which stay in the L2; w is read from memory once for each band.

What lies past the end of w the copies fill with zeros. A tile is finished with care where that happens, or where a row has
its label: `special_tiles` says which. All others need neither masks nor comparisons.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, loop_with_sums, padded, quotient, tile
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.linear_cross_entropy.config import (
    GPU_BLOCK_H,
    GPU_BLOCK_N,
    GPU_ROWS,
    GPU_WIDTH,
    GPU_WORKERS,
    PallasGpuConfig,
)

# Of 504 that three warpgroups may have together. With 24 the copier spills where its loops have odd sizes.
_WORKER_REGISTERS, _COPIER_REGISTERS = 232, 40
LOG2_E = 1.4426950408889634
# Below any logit. Its products with log2(e) and its differences stay finite.
MASKED = -1e37


@dataclass(frozen=True)
class Tiles:
    """The tiles of logits that a kernel makes: num_n by num_v of them, and in which order."""

    num_n: int
    num_v: int
    steps: int
    """Products of a tile: H in parts of GPU_BLOCK_H."""
    block_v: int
    band: int
    stages: int
    pair: int
    """2: two thread blocks with neighbouring rows share what is read of w. 1: each reads its own."""
    programs: int
    interpreted: bool

    @staticmethod
    def of(launch: Launch, n: int, h: int, v: int) -> "Tiles":
        config: PallasGpuConfig = launch.config
        num_n, num_v = pl.cdiv(n, GPU_BLOCK_N), pl.cdiv(v, config.block_v)
        # The interpreter runs the blocks one after the other: two of them have all that many have. It has no copies to two.
        processors = 2 if launch.interpret else launch.chip.multiprocessors
        pair = 1 if launch.interpret or num_n % 2 else config.pair
        return Tiles(
            num_n,
            num_v,
            pl.cdiv(h, GPU_BLOCK_H),
            config.block_v,
            min(config.band, num_n),
            config.stages,
            pair,
            min((processors or pair) // pair * pair, num_n * num_v),
            launch.interpret is not None,
        )

    def locate(self, number: Any) -> tuple[Any, Any]:
        """The block of rows and the block of columns of a tile."""
        which, rest = quotient(number, self.band * self.num_v)
        first = which * self.band
        if self.num_n % self.band == 0:
            column, row = quotient(rest, self.band)
        else:
            rows = jnp.minimum(self.num_n - first, self.band)
            column, row = jax.lax.div(rest, rows), jax.lax.rem(rest, rows)
        return first + row, column

    def number(self, program: Any, done: Any) -> Any:
        """The tile that a program takes after it has done so many: those of a pair follow each other."""
        if self.pair == 1:
            return program + done * self.programs
        return program * self.pair + jax.lax.axis_index("peer") + done * self.programs

    def scratch(self, dtype: Any) -> tuple[Any, ...]:
        """The ring of x, the ring of w, and for each of their slots: it has arrived, it is free."""
        return (
            tile(self.stages, GPU_BLOCK_N, GPU_BLOCK_H, dtype=dtype),
            tile(self.stages, GPU_BLOCK_H, self.block_v, dtype=dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            # A slot is free once both of a pair have read theirs.
            plgpu.Barrier(num_arrivals=GPU_WORKERS, num_barriers=self.stages)
            if self.pair == 1
            else plgpu.ClusterBarrier(collective_axes=("peer",), num_arrivals=GPU_WORKERS, num_barriers=self.stages),
        )


def for_each_tile(
    tiles: Tiles,
    operands: tuple[Any, Any],
    ring: tuple[Any, ...],
    first_column: Any,
    finish: Callable[[Any, Any, Any], Callable[[jax.Array], None]],
) -> None:
    """The body of a kernel: makes this program's tiles and has each finished.

    `finish(worker, i, j)` is called before a tile is made, to begin reading what it will need. What it returns takes the
    worker's part of the tile, x w [GPU_ROWS, block_v] in float32, of block row i and columns first_column + j block_v.
    """
    x_ref, w_ref = operands  # [N, H], [H, V]
    x_ring, w_ring, arrived, free = ring
    worker, program = jax.lax.axis_index("worker"), jax.lax.axis_index("program")
    block_v = tiles.block_v
    share = "peer" if tiles.pair > 1 else None
    # As many tiles for both of a pair: the number of all is even, and so is the number of programs.
    mine = jax.lax.div(tiles.num_n * tiles.num_v - 1 - program * tiles.pair, jnp.int32(tiles.programs)) + 1

    def slot_of(number: Any) -> Any:
        return jax.lax.rem(number, jnp.int32(tiles.stages))

    @pl.when(worker < GPU_WORKERS)
    def _compute():
        plgpu.set_max_registers(_WORKER_REGISTERS, action="increase")
        rows = pl.ds(worker * GPU_ROWS, GPU_ROWS)

        def one_tile(done: Any, carry: tuple[()]) -> tuple[()]:
            finisher = finish(worker, *tiles.locate(tiles.number(program, done)))
            before = done * tiles.steps

            def step(n: Any, sums: tuple[Accumulator, ...]) -> None:
                (logits,) = sums
                slot = slot_of(before + n)
                plgpu.barrier_wait(arrived.at[slot])
                logits.add(x_ring.at[slot, rows], w_ring.at[slot])  # [GPU_ROWS, block_v]
                # The products of the step before are done, so its slot is free; those of this step run on.
                logits.wait(1)

                @pl.when(n > 0)
                def _free():
                    plgpu.barrier_arrive(free.at[slot_of(before + n - 1)])

            (logits,) = loop_with_sums(((GPU_ROWS, block_v),), [(0, tiles.steps, step)], interpreted=tiles.interpreted)
            plgpu.barrier_arrive(free.at[slot_of(before + tiles.steps - 1)])
            finisher(logits)
            return carry

        jax.lax.fori_loop(0, mine, one_tile, ())
        plgpu.wait_smem_to_gmem(0)

    @pl.when(worker == GPU_WORKERS)
    def _copy():
        plgpu.set_max_registers(_COPIER_REGISTERS, action="decrease")

        def one_tile(done: Any, carry: tuple[()]) -> tuple[()]:
            i, j = tiles.locate(tiles.number(program, done))
            x_rows = pl.ds(i * GPU_BLOCK_N, GPU_BLOCK_N)
            columns = pl.ds(first_column + j * block_v, block_v)

            def fetch(n: Any, carry: tuple[()]) -> tuple[()]:
                number = done * tiles.steps + n
                slot, part = slot_of(number), pl.ds(n * GPU_BLOCK_H, GPU_BLOCK_H)

                @pl.when(number >= tiles.stages)
                def _is_free():
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(x_ref.at[x_rows, part], x_ring.at[slot], arrived.at[slot])
                plgpu.copy_gmem_to_smem(
                    w_ref.at[part, columns], w_ring.at[slot], arrived.at[slot], collective_axes=share
                )
                return carry

            return jax.lax.fori_loop(0, tiles.steps, fetch, carry)

        jax.lax.fori_loop(0, mine, one_tile, ())
        if share:
            # The peer still says that it has read: a block must not end before.
            for slot in range(tiles.stages):
                pl.when(mine * tiles.steps > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))


def tile_kernel(
    body: Callable[..., None],
    tiles: Tiles,
    launch: Launch,
    *,
    out_type: Any,
    scratch_types: tuple[Any, ...],
    name: str,
    **static: Any,
) -> Callable[..., Any]:
    """A kernel of programs that stay, each with two warpgroups that compute and one that copies."""
    return plgpu.kernel(
        functools.partial(body, tiles=tiles, **static),
        out_type=out_type,
        grid=(tiles.programs // tiles.pair,),
        grid_names=("program",),
        **({"cluster": (tiles.pair,), "cluster_names": ("peer",)} if tiles.pair > 1 else {}),
        num_threads=GPU_WORKERS + 1,
        thread_name="worker",
        scratch_types=scratch_types,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=gpu_interpret_params(launch.interpret),
        kernel_name=name,
    )


def padded_operands(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Zeros to where the copies can go: N to whole blocks, H and V to whole rows of shared memory."""
    x = padded(padded(x, 0, GPU_BLOCK_N), 1, GPU_BLOCK_H)
    return x, padded(padded(w, 0, GPU_BLOCK_H), 1, GPU_WIDTH)


def special_tiles(labels: jax.Array, v: int, block_v: int) -> jax.Array:
    """Which tiles [GPU_ROWS, block_v] are to be finished with care, [N / GPU_ROWS, num_v]. N is whole blocks.

    Those in which a row has its label, and those that reach past the end of the vocabulary.
    """
    num_v = pl.cdiv(v, block_v)
    blocks = jnp.arange(labels.shape[0], dtype=jnp.int32) // GPU_ROWS
    special = jnp.zeros((labels.shape[0] // GPU_ROWS, num_v), jnp.int32)
    if v % block_v:
        special = special.at[:, -1].set(1)
    return special.at[blocks, labels // block_v].set(1)


def capped(products: jax.Array, soft_cap: float | None) -> tuple[jax.Array, float, jax.Array | None]:
    """Logits, the factor that turns them into units of log 2 (in the multiply-add with the maximum), and tanh, if any."""
    if soft_cap is None:
        return products, LOG2_E, None
    # tanh from an exponential: the hardware's own is good to 11 bits only.
    grown = jnp.exp2(products * (2 * LOG2_E / soft_cap))
    slope = 1.0 - 2.0 / (1.0 + grown)
    return slope * (soft_cap * LOG2_E), 1.0, slope


def columns_of(shape: tuple[int, int], first: Any) -> jax.Array:
    """The column of the vocabulary that each element of a tile is in."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)


def of_row(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.lax.broadcast_in_dim(values, shape, [0])


def load_rows(ref: Any) -> jax.Array:
    """Numbers of a warpgroup's rows, [GPU_ROWS]."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
