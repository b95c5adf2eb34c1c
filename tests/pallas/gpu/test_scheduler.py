"""Tile schedulers: every tile is taken once, in the order that they promise."""

import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.pallas.gpu.scheduler import Banded, RoundRobin, divmod_nonnegative


def order(banded: Banded) -> list[tuple[int, int]]:
    rows, columns = banded.coordinates(jnp.arange(banded.rows * banded.columns, dtype=jnp.int32))
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(rows=st.integers(1, 20), columns=st.integers(1, 12), band=st.integers(1, 20))
def test_banded_takes_each_tile_once_band_after_band(rows: int, columns: int, band: int) -> None:
    taken = order(Banded(rows, columns, min(band, rows)))
    assert sorted(taken) == list(itertools.product(range(rows), range(columns)))
    # Bands in order, their columns in order, rows innermost.
    band = min(band, rows)
    assert taken == sorted(taken, key=lambda tile: (tile[0] // band, tile[1], tile[0]))


def test_banded_with_a_last_band_that_is_shorter() -> None:
    assert order(Banded(3, 2, 2)) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(tiles=st.integers(1, 50), blocks=st.integers(1, 12))
def test_round_robin_takes_each_tile_once(tiles: int, blocks: int) -> None:
    taken = []
    for block in range(blocks):
        scheduler = RoundRobin(tiles, blocks, jnp.int32(block))
        taken += [int(scheduler.tile(n)) for n in range(int(scheduler.count))]
    assert sorted(taken) == list(range(tiles))


def test_divmod() -> None:
    quotient, remainder = divmod_nonnegative(jnp.int32(17), 5)
    assert (int(quotient), int(remainder)) == (3, 2)
