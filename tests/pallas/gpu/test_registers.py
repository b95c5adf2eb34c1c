"""Ranges of columns, and whether something holds for a row, in the interpreter; tests/aot compiles what a GPU runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import tilewright
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.registers import ColumnRanges, any_row

SIDE = 64


def run(make: Any, *arrays: jax.Array, out: tuple[int, ...] = (SIDE, SIDE)) -> jax.Array:
    """What `make` returns of the arrays, in a kernel."""
    names = [f"x{number}" for number in range(len(arrays))]

    def body(*, y_ref: Any, y_smem: Any, **refs: Any) -> None:
        y_smem[...] = jnp.broadcast_to(make(*(refs[f"{name}_ref"][...] for name in names)), out).astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, y_ref)
        plgpu.wait_smem_to_gmem(0)

    with tilewright.interpret():
        return run_kernel(
            body,
            name="registers",
            inputs=dict(zip(names, arrays, strict=True)),
            outputs={"y": jax.ShapeDtypeStruct(out, jnp.float32)},
            scratch={"y_smem": plgpu.SMEM(out, jnp.float32)},
            grid={"block": 1},
        )["y"]


@pytest.mark.parametrize(("from_first", "to_last"), [(False, False), (True, False), (False, True)])
def test_ranges_keep_and_mark_their_columns(from_first: bool, to_last: bool) -> None:
    """Ranges that are empty, that end before they begin, and that reach past either side."""
    rng = np.random.default_rng(0)
    first, end = (jnp.asarray(rng.integers(-9, SIDE + 9, SIDE), jnp.int32) for _ in range(2))
    x = jnp.asarray(rng.normal(size=(SIDE, SIDE)), jnp.float32).at[3, 5].set(jnp.nan).at[:, -1].set(jnp.inf)

    def ranges(first: jax.Array, end: jax.Array) -> ColumnRanges:
        return ColumnRanges(None if from_first else first, None if to_last else end)

    columns = np.arange(SIDE)
    after = np.ones((SIDE, SIDE), bool) if from_first else columns >= np.asarray(first)[:, None]
    inside = after & (np.ones((SIDE, SIDE), bool) if to_last else columns < np.asarray(end)[:, None])
    assert 0 < inside.sum() < inside.size
    np.testing.assert_array_equal(run(lambda f, e: ranges(f, e).ones(), first, end), inside)
    np.testing.assert_array_equal(run(lambda f, e, x: ranges(f, e).keep(x), first, end, x), np.where(inside, x, 0))
    filled = run(lambda f, e, x: ranges(f, e).keep(x, otherwise=-2.5), first, end, x)
    np.testing.assert_array_equal(filled, np.where(inside, x, -2.5))


@pytest.mark.parametrize("row", [None, 0, 37, 63])
def test_one_row_is_any(row: int | None) -> None:
    x = jnp.zeros(SIDE) if row is None else jnp.zeros(SIDE).at[row].set(1.0)
    np.testing.assert_array_equal(run(lambda x: any_row(x > 0.5), x, out=(SIDE,)), float(row is not None))
