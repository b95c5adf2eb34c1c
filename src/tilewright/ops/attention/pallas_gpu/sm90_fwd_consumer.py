"""The consumer warpgroups of attention's forward kernel on Hopper (sm90_fwd.py).

A consumer computes 64 queries of each tile. It visits blocks of keys from the end of their row in the table: partial
ones first. The product of the queries with block n's keys is issued together with that of block n - 1's weights with
its values: the tensor cores have both queued up.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.ops.attention.call import AttentionCall
from tilewright.ops.attention.config import SM90_ROWS, AttentionSm90Forward
from tilewright.ops.attention.pallas_gpu.tiles import Row, Tables, TileScheduler, scaled_logits
from tilewright.ops.attention.softmax_rows import LOG2_E, LOWEST
from tilewright.pallas.gpu.kernel import interpreted
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import WGMMA, along_rows, transposed
from tilewright.pallas.gpu.wgmma import Accumulator, accumulate, product


def _accumulate_beside(
    initial: tuple[jax.Array, ...], add: Callable[..., tuple[jax.Array, ...]], like: tuple[jax.ShapeDtypeStruct, ...]
) -> tuple[jax.Array, ...]:
    """As `accumulate`, where `add` returns tiles and vectors with one element per row, whose shapes are `like`."""
    if interpreted():
        return accumulate(initial, add)

    def begin(refs: Any) -> None:
        returned = add(*(Accumulator(ref) for ref in refs[: len(initial)]))
        for ref, value in zip(refs[len(initial) :], returned, strict=True):
            ref[...] = value

    # The refs of what is returned are registers, too, and have to start with something.
    blank = (
        plgpu.layout_cast(jnp.zeros(one.shape, one.dtype), WGMMA if len(one.shape) > 1 else WGMMA.reduce(1))
        for one in like
    )
    results: Any = pl.run_state(begin)((*(plgpu.WGMMAAccumulatorRef.init(value) for value in initial), *blank))
    return tuple(results)


@dataclass(frozen=True)
class Turns:
    """A token that the consumers pass around: the one that has it issues its products, then hands it on.

    So the products of one consumer run while another computes its softmax, and no softmax waits for the end of another.
    """

    barriers: Any  # One per consumer, on which the consumer before it arrives; None: there is no token.
    warpgroup: Any
    consumers: int

    def wait(self) -> None:
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.warpgroup])

    def hand_on(self) -> None:
        if self.barriers is not None:
            following = jnp.where(self.warpgroup == self.consumers - 1, 0, self.warpgroup + 1)
            plgpu.barrier_arrive(self.barriers.at[following])

    def begin(self) -> None:
        """Gives the token to the first consumer."""
        pl.when(self.warpgroup == self.consumers - 1)(self.hand_on)

    def end(self) -> None:
        """The first consumer takes back the token, which the last one has handed on."""
        pl.when(self.warpgroup == 0)(self.wait)


@dataclass(frozen=True)
class Tiles:
    """The tiles of a thread block: for each, the batch, the query head and the row of the table."""

    scheduler: TileScheduler
    tables: Tables
    block: Any

    @property
    def count(self) -> Any:
        return self.tables.tile_counts_ref[self.block]

    def load(self, m: Any) -> tuple[Any, Any, Any]:
        """The number, the full blocks and all blocks of tile m, as a loop carries them; past the last one, any tile."""
        most = self.tables.tiles_ref.shape[0] // self.tables.tile_counts_ref.shape[0]
        number = self.tables.tiles_ref[self.block * most + jnp.minimum(m, most - 1)]
        _, _, row = self.scheduler.row_of_queries(self.tables, number)
        return number, row.full, row.total

    def place(self, loaded: tuple[Any, Any, Any]) -> tuple[Any, Any, Row]:
        number, *counts = loaded
        return self.scheduler.row_of_queries(self.tables, number, tuple(counts))


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup: 64 queries of each tile of its thread block."""

    call: AttentionCall
    config: AttentionSm90Forward
    tiles: Tiles
    warpgroup: Any
    turns: Turns
    kv: Pipeline
    q_ref: Any
    sinks_ref: Any
    out_ref: Any
    statistics_ref: Any
    q_tile: Any  # [64, D]
    q_full: Any
    out_tile: Any  # [64, Dv], or None where the output takes the place of the queries
    statistics_tile: Any  # [2, 64]

    def rows(self, row: Row) -> Any:
        return pl.ds(self.first_query(row), SM90_ROWS)

    def first_query(self, row: Row) -> Any:
        return row.stationary * row.scheduler.block_q + self.warpgroup * SM90_ROWS

    def fetch_queries(self, loaded: tuple[Any, Any, Any]) -> None:
        b, h, row = self.tiles.place(loaded)
        plgpu.copy_gmem_to_smem(self.q_ref.at[b, self.rows(row), h], self.q_tile, self.q_full)

    def run(self) -> None:
        self.turns.begin()
        first = self.tiles.load(0)
        self.fetch_queries(first)
        jax.lax.fori_loop(0, self.tiles.count, self.attend, (jnp.int32(0), first))
        self.turns.end()
        plgpu.wait_smem_to_gmem(0)

    def attend(self, m: Any, carry: Any) -> Any:
        """Tile m. The pipeline has gone `base` steps before it."""
        base, loaded = carry
        # Loaded long before they are needed.
        coming = self.tiles.load(m + 1)

        def fetch_coming() -> None:
            pl.when(m + 1 < self.tiles.count)(lambda: self.fetch_queries(coming))

        place = self.tiles.place(loaded)
        *_, row = place
        carry = self.first_block(base, place)
        # Partial blocks come first, so block 0 is masked wherever one is.
        end, scheduler = row.total, row.scheduler
        if scheduler.has_partial:
            end = jnp.maximum(row.total - row.full, 1) if scheduler.has_full else row.total
            carry = jax.lax.fori_loop(1, end, functools.partial(self.block, base, row, masked=True), carry)
        if scheduler.has_full:
            first = end if scheduler.has_partial else 1
            carry = jax.lax.fori_loop(first, row.total, functools.partial(self.block, base, row, masked=False), carry)
        if self.out_tile is not None:
            fetch_coming()
        self.store(place, *self.last_block(base + row.total - 1, carry))
        if self.out_tile is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_coming()
        return base + row.total, coming

    def first_block(self, base: Any, place: tuple[Any, Any, Row]) -> Any:
        """The softmax of block 0: an accumulator of zeros, the weights of block 0, and the statistics."""
        _, h, row = place
        row_max, total = LOWEST, 0.0
        if self.sinks_ref is not None:
            # A sink counts as a key that was visited first and has no value.
            sink = self.sinks_ref[h] * LOG2_E
            row_max, total = jnp.maximum(sink, LOWEST), jnp.where(sink > LOWEST, 1.0, 0.0)
        row_max, total = (
            plgpu.layout_cast(jnp.full((SM90_ROWS,), value, jnp.float32), WGMMA.reduce(1)) for value in (row_max, total)
        )
        keys, values = self.kv.group("k"), self.kv.group("v")
        stage = keys.stage(base)
        plgpu.barrier_wait(self.q_full)
        keys.wait(base, stage=stage)
        self.turns.wait()

        def multiply(products: Accumulator) -> None:
            products.add(self.q_tile, transposed(self.kv.k.at[stage]))  # [64, block_k]
            self.turns.hand_on()

        logits = product((SM90_ROWS, self.config.block_k), multiply)
        keys.release(base, stage=stage)
        masked = row.scheduler.has_partial
        row_max, total, _, weights = self.softmax(jnp.int32(0), row, logits, (row_max, total), masked=masked)
        if self.config.overlap:
            values.wait(base, stage=stage)
        acc = plgpu.layout_cast(jnp.zeros((SM90_ROWS, self.kv.v.shape[-1]), jnp.float32), WGMMA)
        return acc, weights.astype(self.kv.v.dtype), (row_max, total)

    def softmax(self, n: Any, row: Row, logits: jax.Array, statistics: Any, *, masked: bool) -> tuple[jax.Array, ...]:
        """The statistics with block n included, the factor for what was accumulated before, and n's weights."""
        row_max, total = statistics
        logits, factor, _ = scaled_logits(logits, self.call)
        if masked:
            index = row.total - 1 - n
            logits = row.masked(
                logits,
                factor,
                row.content(index),
                first_q=self.first_query(row),
                first_k=row.block(index) * self.config.block_k,
                part=(pl.ds(self.warpgroup * SM90_ROWS, SM90_ROWS),),
            )
        new_max = jnp.maximum(row_max, jnp.max(logits, axis=1) * factor)
        alpha = jnp.exp2(row_max - new_max)
        weights = jnp.exp2(logits * factor - along_rows(new_max, logits.shape))
        return new_max, total * alpha + jnp.sum(weights, axis=1), alpha, weights

    def block(self, base: Any, row: Row, n: Any, carry: Any, *, masked: bool) -> Any:
        """The products of block n and of the weights of block n - 1 at once: the tensor cores do not wait between."""
        block_k, overlap = self.config.block_k, self.config.overlap
        keys, values = self.kv.group("k"), self.kv.group("v")
        stage, before = keys.stage(base + n), values.stage(base + n - 1)
        acc, weights, statistics = jax.lax.optimization_barrier(carry)
        if not overlap:
            values.wait(base + n - 1, stage=before)
        keys.wait(base + n, stage=stage)
        self.turns.wait()

        def multiply(out: Accumulator, products: Accumulator) -> None:
            out.add(weights, self.kv.v.at[before])  # [64, Dv]
            products.add(self.q_tile, transposed(self.kv.k.at[stage]))  # [64, block_k]
            self.turns.hand_on()

        def multiply_beside(out: Accumulator, products: Accumulator) -> tuple[jax.Array, ...]:
            products.add(self.q_tile, transposed(self.kv.k.at[stage]))  # [64, block_k]
            out.add(weights, self.kv.v.at[before])  # [64, Dv]
            logits = products.read(1)
            keys.release(base + n, stage=stage)
            softened = jax.lax.optimization_barrier(self.softmax(n, row, logits, statistics, masked=masked))
            # ptxas would move the wait for the product with the values before all of this. It does not move it across
            # a loop, which waiting for the copy of this block's values is.
            values.wait(base + n, stage=stage)
            return softened

        no_logits = plgpu.layout_cast(jnp.zeros((SM90_ROWS, block_k), jnp.float32), WGMMA)
        if overlap:
            vector, square = (
                jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((SM90_ROWS,), (SM90_ROWS, block_k))
            )
            acc, _, row_max, total, alpha, weights = _accumulate_beside(
                (acc, no_logits), multiply_beside, (vector, vector, vector, square)
            )
            values.release(base + n - 1, stage=before)
        else:
            acc, logits = accumulate((acc, no_logits), multiply)
            values.release(base + n - 1, stage=before)
            keys.release(base + n, stage=stage)
            row_max, total, alpha, weights = self.softmax(n, row, logits, statistics, masked=masked)
        return acc * along_rows(alpha, acc.shape), weights.astype(self.kv.v.dtype), (row_max, total)

    def last_block(self, step: Any, carry: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The accumulator with the last block's weights, and the statistics."""
        acc, weights, (row_max, total) = carry
        values = self.kv.group("v")
        stage = values.stage(step)
        if not self.config.overlap:
            values.wait(step, stage=stage)
        self.turns.wait()

        def multiply(out: Accumulator) -> None:
            out.add(weights, self.kv.v.at[stage])  # [64, Dv]
            self.turns.hand_on()

        (acc,) = accumulate((acc,), multiply)
        values.release(step, stage=stage)
        return acc, row_max, total

    def store(self, place: tuple[Any, Any, Row], acc: jax.Array, row_max: jax.Array, total: jax.Array) -> None:
        """Begins to copy the output and the statistics of a tile to global memory."""
        b, h, row = place
        out_tile = self.q_tile if self.out_tile is None else self.out_tile
        inverse = 1.0 / jnp.where(total == 0.0, 1.0, total)
        if self.out_tile is not None:
            # The copies of the tile before.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_tile[...] = (acc * along_rows(inverse, acc.shape)).astype(self.out_ref.dtype)
        self.statistics_tile[0] = row_max
        self.statistics_tile[1] = total
        plgpu.commit_smem()
        rows = self.rows(row)
        plgpu.copy_smem_to_gmem(out_tile, self.out_ref.at[b, rows, h])
        for n in range(2):
            plgpu.copy_smem_to_gmem(self.statistics_tile.at[n], self.statistics_ref.at[b, h, n, rows])
