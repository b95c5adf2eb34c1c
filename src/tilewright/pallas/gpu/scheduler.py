"""Tile schedulers of persistent kernels: which tile a thread block takes next, and where that tile lies."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def divmod_nonnegative(a: Any, b: int) -> tuple[Any, Any]:
    """Quotient and remainder of integers that are not negative. `//` and `%` would look at signs."""
    return lax.div(a, jnp.int32(b)), lax.rem(a, jnp.int32(b))


@dataclass(frozen=True)
class RoundRobin:
    """Tiles 0 to `tiles` - 1: block i of `blocks` takes i, i + blocks, i + 2 blocks and so on."""

    tiles: int
    blocks: Any
    block: Any
    """This thread block's number."""

    @property
    def count(self) -> jax.Array:
        """How many tiles this thread block takes."""
        return lax.div(self.tiles - self.block + self.blocks - 1, jnp.int32(self.blocks))

    def tile(self, n: Any) -> Any:
        """The n-th tile of this thread block."""
        return self.block + n * self.blocks


@dataclass(frozen=True)
class Banded:
    """Tiles of a matrix product, `rows` by `columns` of them, in an order that keeps operands in the L2 cache.

    A band of `band` block rows goes through all block columns, its rows innermost: the tiles that run at the same time
    share a few block columns of the right operand and a band of the left one.
    """

    rows: int
    columns: int
    band: int

    def coordinates(self, number: Any) -> tuple[Any, Any]:
        """The block row and block column of a tile."""
        which, rest = divmod_nonnegative(number, self.band * self.columns)
        first = which * self.band
        if self.rows % self.band == 0:
            column, row = divmod_nonnegative(rest, self.band)
        else:
            height = jnp.minimum(self.rows - first, self.band)
            column, row = lax.div(rest, height), lax.rem(rest, height)
        return first + row, column
