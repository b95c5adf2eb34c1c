"""What is the Hopper kernels' own: tiles that are not the default ones, and the order of dw's tiles."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.configs import GroupedMatmulSm90Backward, GroupedMatmulSm90Forward
from tilewright.core.chip import Chip
from tilewright.core.dispatch import ImplementationName
from tilewright.ops.grouped_matmul.blocks import row_tiles
from tilewright.ops.grouped_matmul.call import MOST_MASKED, group_starts, poison
from tilewright.ops.grouped_matmul.pallas_gpu.sm90_dw import TileOrder, largest_first
from tilewright.ops.grouped_matmul.pallas_gpu.sm90_tiles import row_tile_list
from tilewright.pallas.gpu.gemm import ALIGNMENT, Gemm, Plan


@pytest.mark.slow
@pytest.mark.parametrize("block_n", [64, 192])
def test_gradients_in_tiles_whose_parts_two_consumers_do_not_share_evenly(block_n: int) -> None:
    """Rows of other groups are cleared in the tile, and nothing beside it: past its end is another one."""
    for_x, for_w, for_dy = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(for_x, (100, 128), jnp.bfloat16)
    w = jax.random.normal(for_w, (3, 128, 256), jnp.bfloat16)
    dy = jax.random.normal(for_dy, (100, 256), jnp.bfloat16)
    config = GroupedMatmulSm90Backward(block_n, 2, 4)

    def gradients(implementation: ImplementationName) -> tuple[jax.Array, jax.Array]:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            own = config if implementation == "pallas_gpu" else None
            return tilewright.grouped_matmul(x, w, jnp.array([37, 0, 50]), implementation=implementation, config=own)

        return jax.vjp(product, x, w)[1](dy)

    with tilewright.interpret():
        got = gradients("pallas_gpu")
    for one, other in zip(got, gradients("xla"), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=1e-2)


def taken(order: TileOrder) -> list[list[tuple[int, ...]]]:
    """For each thread block, its tiles in turn: (group, row, column). Those of a cluster follow each other."""
    waves = -(-order.groups * order.rows * order.columns // (order.clusters * order.peers))
    # Arrays of one size, so that every order takes the same compiled operations.
    cluster, peer, done = np.unravel_index(np.arange(8192), (8192, order.peers, waves))
    done, cluster, peer = (jnp.asarray(each, jnp.int32) for each in (done, cluster, peer))
    tiles = np.stack([*order.coordinates(done, cluster, peer), order.count(cluster)], axis=-1)
    own = tiles[: order.clusters * order.peers * waves].reshape(-1, waves, 4).tolist()
    return [[tuple(tile) for *tile, count in each[: each[0][-1]]] for each in own]


@pytest.mark.parametrize(
    "order",
    [
        TileOrder(128, 16, 3, 66, 2),
        TileOrder(8, 32, 28, 66, 2),
        TileOrder(
            5, 3, 7, 132, 1
        ),  # Fewer tiles than processors: 105 thread blocks, as `Gemm.blocks` has it, and more.
        TileOrder(5, 3, 7, 105, 1),
        TileOrder(1, 2, 1, 1, 2),
        TileOrder(1, 1, 1, 1, 1),
        TileOrder(3, 2, 5, 4, 2),  # Four waves, the last of them not full and backwards.
        TileOrder(3, 5, 5, 10, 1),
    ],
)
def test_each_tile_of_dw_is_computed_once_and_a_cluster_shares_its_columns(order: TileOrder) -> None:
    each = taken(order)
    every = itertools.product(range(order.groups), range(order.rows), range(order.columns))
    assert sorted(itertools.chain(*each)) == list(every)
    for first, second in zip(each[:: order.peers], each[order.peers - 1 :: order.peers], strict=True):
        assert [(group, row + order.peers - 1, column) for group, row, column in first] == second


@pytest.mark.parametrize("empty", [False, True])
def test_thread_blocks_have_about_as_many_steps_of_dw_each(empty: bool) -> None:
    """Sizes that differ by a factor of twenty: the busiest thread block has 2 to 4 % more than the mean, not 12 %."""
    sizes = np.random.default_rng(0).exponential(size=128) + 0.3
    sizes = np.where(np.arange(128) % 3 == 1, 0, sizes) if empty else sizes
    starts = group_starts(jnp.array(sizes / sizes.sum() * 65536, jnp.int32), 65536)

    groups = np.asarray(largest_first(starts))
    assert (np.diff(groups[1] - groups[0]) <= 0).all()
    steps = np.where(groups[1] > groups[0], -(-(groups[1] - groups[0] // 8 * 8) // 64), 0)
    each = [sum(steps[group] for group, _, _ in tiles) for tiles in taken(TileOrder(128, 16, 3, 66, 2))]
    assert max(each) < 1.05 * np.mean(each)


def test_groups_in_descending_order_of_size() -> None:
    """The first row, the end and the number of each; equal ones in their order. Many groups are sorted, not masked."""
    starts = jnp.array([0, 3, 3, 10, 13, 20], jnp.int32)
    assert largest_first(starts).tolist() == [[3, 13, 0, 10, 3], [10, 20, 3, 13, 3], [2, 4, 0, 3, 1]]
    more = jnp.arange(MOST_MASKED + 2, dtype=jnp.int32)
    assert largest_first(more.at[-1].add(5))[:, :2].tolist() == [
        [MOST_MASKED, 0],
        [MOST_MASKED + 6, 1],
        [MOST_MASKED, 0],
    ]


def test_rows_of_groups_are_not_shared_by_a_cluster() -> None:
    """Two tiles of rows may be of two groups. A plan that does not know of clusters would leave out half of its tiles."""
    with pytest.raises(ValueError, match=r"cluster=2 must be 1: adjacent tiles .* use cluster=1"):
        GroupedMatmulSm90Forward(256, 4, 8, cluster=2)
    assert "cluster" not in GroupedMatmulSm90Forward.choices
    gemm = Gemm(
        chip=Chip.named("h200"), m=256, n=256, k=64, dtype=jnp.bfloat16, block_n=256, stages=4, band=2, cluster=2
    )
    plan = Plan(count=1, locate=lambda done: (), sources=lambda step: (None, []), steps=lambda: 1)
    with pytest.raises(ValueError, match="use cluster=1"):
        gemm.main_loop(None, None, gemm.scratch()["pipeline"], lambda consumer: None, plan=plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "m", "block_m", "alignment"),
    [
        ([5, 0, 17, 3, 0], 40, 16, ALIGNMENT),  # Empty groups, and rows past the last one.
        ([50, -20, 0], 40, 16, ALIGNMENT),  # Past the rows, and below zero.
        pytest.param([30, 0, 11], 40, 64, ALIGNMENT, marks=pytest.mark.slow),
        pytest.param([7], 7, 16, ALIGNMENT, marks=pytest.mark.slow),
        pytest.param([0, 0], 12, 32, ALIGNMENT, marks=pytest.mark.slow),
        # Not a whole number of turns of the loop.
        pytest.param(np.random.default_rng(0).integers(0, 9, 37).tolist(), 200, 32, ALIGNMENT, marks=pytest.mark.slow),
        pytest.param(np.random.default_rng(0).integers(0, 9, 128).tolist(), 600, 16, ALIGNMENT, marks=pytest.mark.slow),
        ([3, 0, 17, 8, 1], 40, 8, 1),  # Tiles that begin at any row.
    ],
)
def test_the_list_of_tiles_is_that_of_plain_operations(sizes: list[int], m: int, block_m: int, alignment: int) -> None:
    given = jnp.array(sizes, jnp.int32)
    bounds = jnp.append(group_starts(given, m), m)
    want = row_tiles(bounds, m, block_m, alignment)
    fields = jnp.stack([want.start, want.group, bounds[want.group], bounds[want.group + 1]])
    with tilewright.interpret():
        tiles, count, bad = row_tile_list(given, m, block_m, alignment)
    np.testing.assert_array_equal(tiles[:, : fields.shape[1]], fields)
    assert set(count.tolist()) == {int(want.first[-1])}
    np.testing.assert_array_equal(bad, np.full(bad.shape, poison(given, m)))


def test_sizes_whose_sum_overflows_list_no_row_twice() -> None:
    with tilewright.interpret():
        tiles, count, bad = row_tile_list(jnp.array([2**31 - 1, 2**31 - 1], jnp.int32), 100, 16)
    assert count[0] == 7
    assert tiles[:, :7].tolist() == [list(range(0, 112, 16)), [0] * 7, [0] * 7, [100] * 7]
    assert np.isnan(bad).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "block", "activation"),
    [
        ("int4", (128, 1), "swiglu"),
        ("int4", None, None),
        ("int8", (128, 128), None),
        ("float8_e4m3fn", (128, 1), "silu"),
    ],
)
def test_converted_weights_with_tiles_of_eight_rows(dtype: str, block: Any, activation: Any) -> None:
    """They begin at any row, and are multiplied by single warps. A group has two of them, one none, and rows are left."""
    sizes = jnp.array([3, 0, 9, 1, 8, 5], jnp.int32)
    x = jax.random.normal(jax.random.key(0), (30, 512)).astype(jnp.bfloat16)
    w = tilewright.quantize(jax.random.normal(jax.random.key(1), (6, 512, 256)) / 512**0.5, dtype, block=block)
    config = GroupedMatmulSm90Forward(128, 4, 4, block_m=8)

    def product(implementation: ImplementationName, config: Any = None) -> jax.Array:
        return tilewright.grouped_matmul(
            x, w, sizes, activation=activation, implementation=implementation, config=config, out_dtype=jnp.float32
        )

    with tilewright.interpret():
        got = product("pallas_gpu", config)
    np.testing.assert_allclose(got, product("reference"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("rows", "block_m"), [(512, 8), (1024, 16), (3072, 32), (12_800, 64)])
def test_converted_weights_have_tiles_for_groups_above_the_mean(rows: int, block_m: int) -> None:
    w = jax.eval_shape(lambda: tilewright.quantize(jnp.zeros((128, 2048, 768)), "int4", block=(128, 1)))
    x, sizes = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((128,), jnp.int32)
    with tilewright.target("h200"):
        (decision,) = tilewright.explain(tilewright.grouped_matmul, x, w, sizes).decisions
    assert decision.forward.config.block_m == block_m
