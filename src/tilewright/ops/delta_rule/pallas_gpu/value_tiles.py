"""The pipeline of the gradients' kernels on Hopper: dO, dv, u, S and dS' of a chunk, 64 value channels at a time."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tilewright.ops.delta_rule.config import DeltaRuleSm90Backward
from tilewright.ops.delta_rule.pallas_gpu.tiles import HI_LO, SQUARE, TILE, Sizes, bfloat16_tile
from tilewright.pallas.gpu.pipeline import Pipeline
from tilewright.pallas.gpu.registers import transposed
from tilewright.pallas.gpu.wgmma import Accumulator, products, wait_for_products

SIDES = 2
"""Consumer warpgroups: the one of Y and the one of Z."""


@dataclass(frozen=True)
class ValueTiles:
    """The stages, each with a tile of value channels."""

    pipeline: Pipeline
    tiles: int
    """Tiles of value channels per chunk."""
    depth_tiles: int

    @staticmethod
    def scratch(sizes: Sizes, config: DeltaRuleSm90Backward) -> Pipeline:
        stages, depth_tiles = config.gradient_stages, sizes.depth_tiles
        return Pipeline.scratch(
            stages,
            copies=2 + HI_LO + depth_tiles * (1 + HI_LO),
            consumers=SIDES,
            values=bfloat16_tile(stages, 2, *SQUARE),  # [2, C, V]: dO, dv
            u=bfloat16_tile(stages, HI_LO, *SQUARE),  # [2, V, C]
            states=bfloat16_tile(stages, depth_tiles, *SQUARE),  # [depth_tiles, V, K]
            d_states=bfloat16_tile(stages, HI_LO, depth_tiles, *SQUARE),  # [2, depth_tiles, V, K]
        )

    def copy(self, index: Any, t: int, where: tuple[Any, Any, Any, Any], refs: tuple[Any, Any, Any, Any, Any]) -> None:
        """Copies the t-th tile of this thread block's index-th chunk, `where`: batch, value head, chunk and tokens."""
        (b, hv, n, tokens), (d_o_ref, d_v_ref, u_ref, states_ref, d_states_ref), to = where, refs, self.pipeline
        step, mine = index * self.tiles + t, pl.ds(t * TILE, TILE)
        stage = to.acquire(step)
        copies = [
            (d_o_ref.at[b, tokens, hv, mine], to.values.at[stage, 0]),
            (d_v_ref.at[b, tokens, hv, mine], to.values.at[stage, 1]),
            *((u_ref.at[b, hv, n, part, mine], to.u.at[stage, part]) for part in range(HI_LO)),
        ]
        for d in range(self.depth_tiles):
            keys = pl.ds(d * TILE, TILE)
            copies.append((states_ref.at[b, hv, n, mine, keys], to.states.at[stage, d]))
            for part in range(HI_LO):
                copies.append((d_states_ref.at[b, hv, n, part, mine, keys], to.d_states.at[stage, part, d]))
        to.copy(step, copies, stage=stage)

    def rounds(self) -> list[range]:
        """The tiles of a chunk, as many at a time as are in shared memory together."""
        stages = self.pipeline.stages
        return [range(first, min(first + stages, self.tiles)) for first in range(0, self.tiles, stages)]

    def wait(self, index: Any, t: int, zero: Any) -> "ValueTile":
        """The t-th tile of the index-th chunk, once it is there."""
        tiles = self.pipeline
        stage = tiles.stage(index * self.tiles + t) + zero
        tiles.wait(index, stage=stage)
        return ValueTile(tiles.values.at[stage], tiles.u.at[stage], tiles.states.at[stage], tiles.d_states.at[stage])

    def release(self, index: Any, t: int) -> None:
        self.pipeline.release(index * self.tiles + t)

    def products(
        self, index: Any, zero: Any, d: Any, side: Any, state_product: Callable[[Any, Any], jax.Array] | None
    ) -> tuple[jax.Array, ...]:
        """dO S^T, dv S^T and u dS'^T [C, 64] of the d-th key channels; dO u^T or dv u^T [C, C], by side.

        They are followed by the sum of `state_product(S, dS')`, where that is given. All run at once, and each tile is
        released when the next one's products are under way.
        """

        def add_values(do_s: Accumulator, dv_s: Accumulator, u_ds: Accumulator, pairs: Accumulator) -> Any:
            sums = []
            issued = 5 + HI_LO  # By an iteration.
            for t in range(self.tiles):
                tile = self.wait(index, t, zero)
                state = tile.states.at[d]
                do_s.add(tile.values.at[0], state)  # [C, V] [V, K]
                dv_s.add(tile.values.at[1], state)
                tile.add_u_d_states(u_ds, d)
                tile.add_pairs(pairs, side)
                if state_product is not None:
                    sums.append(state_product(state, tile.d_states.at[0, d]))
                if t > 0:
                    wait_for_products(issued)
                    self.release(index, t - 1)
            wait_for_products(0)
            self.release(index, self.tiles - 1)
            return (functools.reduce(jnp.add, sums),) if sums else ()

        return products((SQUARE,) * 4, add_values)


@dataclass(frozen=True)
class ValueTile:
    """64 value channels of a chunk."""

    values: Any  # [2, C, V]: dO, dv
    u: Any  # [2, V, C]
    states: Any  # [depth_tiles, V, K]
    d_states: Any  # [2, depth_tiles, V, K]

    def add_u_d_states(self, u_ds: Accumulator, d: Any) -> None:
        """u dS'^T, by the d-th key channels."""
        for u, d_states in ((0, 0), (0, 1), (1, 0)):  # Lo times lo is below the rounding of hi times lo.
            u_ds.add(transposed(self.u.at[u]), self.d_states.at[d_states, d])  # [C, V] [V, K]

    def add_pairs(self, pairs: Accumulator, side: Any) -> None:
        """dO u^T or dv u^T."""
        for part in range(HI_LO):
            pairs.add(self.values.at[side], self.u.at[part])  # [C, V] [V, C]
