"""The TPU kernels of `grouped_matmul` beyond the op's contract: block lists, several blocks, NaN of other groups."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.configs import GroupedMatmulTpuBackward, GroupedMatmulTpuForward
from tilewright.core.chip import CHIPS, Chip
from tilewright.core.dispatch import ImplementationName, find_op
from tilewright.ops.grouped_matmul.call import group_starts
from tilewright.ops.grouped_matmul.pallas_tpu.visits import num_visits, visits_of_groups, visits_of_rows

TPUS = tuple(chip for chip in CHIPS if chip.platform == "tpu")
SIZES = (
    [37, 0, 0, 5, 64, 22],
    [0, 0, 0, 0, 0, 128],
    [0, 0, 0, 0, 0, 0],
    [130, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 1],
    [31, 1, 32, 64, 1, 1],
    [0, 40, 0, 0, 88, 0],
)
M, BLOCK_M = 130, 32


def _visits(of: Any, sizes: list[int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    starts = group_starts(jnp.asarray(sizes, jnp.int32), M)
    visits = {name: np.asarray(array) for name, array in jax.jit(of, static_argnums=(1, 2))(starts, M, BLOCK_M).items()}
    assert {array.shape for array in visits.values()} == {(num_visits(M, len(sizes), BLOCK_M),)}
    return visits, np.asarray(starts)


def _rows_of_groups(visits: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """(group, row) of every row that a visit works on."""
    found = []
    for group, block, first, end in zip(*(visits[name] for name in ("group", "block", "first", "end")), strict=True):
        assert 0 <= first <= end <= BLOCK_M or end == 0
        found += [(int(group), int(block * BLOCK_M + row)) for row in range(first, end)]
    return found


def test_rows_are_visited_once_by_their_group() -> None:
    for of, sizes in itertools.product((visits_of_rows, visits_of_groups), SIZES):
        visits, starts = _visits(of, sizes)
        expected = [(group, row) for group in range(len(sizes)) for row in range(starts[group], starts[group + 1])]
        assert _rows_of_groups(visits) == expected


def test_every_block_and_every_group_opens_and_closes_once() -> None:
    """What stays in VMEM is visited in one run, and no step after it changes the block that is written."""
    blocks = ((visits_of_rows, "block", -(-M // BLOCK_M)), (visits_of_groups, "group", len(SIZES[0])))
    for (of, stays, count), sizes in itertools.product(blocks, SIZES):
        visits, _ = _visits(of, sizes)
        assert visits[stays][visits["opens"] == 1].tolist() == list(range(count))
        assert visits[stays][visits["closes"] == 1].tolist() == list(range(count))
        assert (np.diff(visits[stays]) >= 0).all()


def test_empty_groups_cost_no_copy() -> None:
    """The matrices of empty groups are not among those that are fetched, nor is x for rows past the last group."""
    rows, starts = _visits(visits_of_rows, [0, 40, 0, 0, 8, 0])
    assert set(rows["group"].tolist()) == {1, 4}
    assert rows["source"].max() == (starts[-1] - 1) // BLOCK_M
    groups, _ = _visits(visits_of_groups, [0, 40, 0, 0, 8, 0])
    assert groups["block"].max() == (starts[-1] - 1) // BLOCK_M


CONFIG = (GroupedMatmulTpuForward(32, 128, 128, 16), GroupedMatmulTpuBackward(32, 128, 128, 16, 32, 128, 128, 16))


@pytest.mark.slow
def test_several_blocks_of_every_axis_and_nan_of_other_groups() -> None:
    """All rows but those of group 2 are NaN, past the last group too: its results, and empty groups', have none."""
    sizes, own = jnp.asarray([19, 0, 20, 9, 0], jnp.int32), slice(19, 39)
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = jax.random.normal(keys[0], (60, 136)), jax.random.normal(keys[2], (60, 200))
    w = jax.random.normal(keys[1], (5, 136, 400)) / 12
    others = jnp.full((60, 1), jnp.nan).at[own].set(0.0)

    def run(implementation: ImplementationName, config: Any, x: jax.Array, dy: jax.Array) -> Any:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return tilewright.grouped_matmul(
                x, w, sizes, activation="swiglu", implementation=implementation, config=config
            )

        y, pull_back = jax.vjp(product, x, w)
        dx, dw = pull_back(dy)
        return {"y": y[own], "dx": dx[own], "dw": dw[2], "empty dw": dw[1], "past the groups": y[48:]}

    plain = run("xla", None, x, dy)
    with tilewright.interpret():
        got = run("pallas_tpu", CONFIG, x + others, dy + others)
    for name, expected in plain.items():
        assert jnp.max(jnp.abs(got[name] - expected)) <= 2e-5 * jnp.max(jnp.abs(expected)), name


@pytest.mark.slow
def test_wrong_sizes_make_every_row_nan() -> None:
    x, w = jnp.ones((40, 128)), jnp.ones((2, 128, 128))
    with tilewright.interpret():
        run = jax.jit(lambda sizes: tilewright.grouped_matmul(x, w, sizes, implementation="pallas_tpu"))
        assert jnp.isnan(run(jnp.asarray([30, 30], jnp.int32))).all()
        right = run(jnp.asarray([10, 20], jnp.int32))
    np.testing.assert_array_equal(right[:30], 128.0)
    np.testing.assert_array_equal(right[30:], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_large_cases_have_blocks_that_fit(chip: Chip) -> None:
    op = find_op("grouped_matmul")
    for name in ("mixtral", "qwen3_moe_swiglu", "decode_int4", "qwen3_moe_float8"):
        case = op.case(name)
        with tilewright.target(chip):
            explanation = tilewright.explain("grouped_matmul", **case.structs("bfloat16"), **case.options)
        (decision,) = explanation.decisions
        assert decision.implementation == "pallas_tpu", name
        assert decision.backward.refusal is None, name
