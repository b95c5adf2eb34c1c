"""The GEMM main loop by itself: a product with a trivial epilogue, and how its tiles are shared out."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.ops.contract import able_to_run
from tilewright.core.chip import Chip
from tilewright.pallas.gpu.gemm import Gemm
from tilewright.pallas.gpu.kernel import smem_bytes, tile

H200 = Chip.named("h200")


def slow(*values: object) -> object:
    """Parameters of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _product_kernel(*, a_ref, b_ref, bias_ref, c_ref, c_smem, pipeline, gemm: Gemm, first_column: int) -> None:
    """C = A B + bias, the bias one number per tile, which the epilogue loads before the tile is computed."""

    def epilogue(consumer, i, j):
        bias = bias_ref[i, j]

        def finish(product) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged = c_smem.at[consumer]
            staged[...] = product + bias
            plgpu.commit_smem()
            rows = pl.ds((i * gemm.consumers + consumer) * gemm.rows, gemm.rows)
            plgpu.copy_smem_to_gmem(staged, c_ref.at[rows, pl.ds(j * gemm.block_n, gemm.block_n)])

        return finish

    gemm.main_loop(a_ref, b_ref, pipeline, epilogue, first_column=first_column)


def multiply(gemm: Gemm, a: jax.Array, b: jax.Array, bias: jax.Array, first_column: int = 0) -> jax.Array:
    a_whole, b_whole = gemm.pad(a, b)
    rows, columns = gemm.tiles.rows * gemm.block_m, gemm.tiles.columns * gemm.block_n
    c = gemm.run(
        functools.partial(_product_kernel, gemm=gemm, first_column=first_column),
        name="product",
        inputs={"a": a_whole, "b": b_whole, "bias": bias},
        outputs={"c": jax.ShapeDtypeStruct((rows, columns), jnp.float32)},
        scratch={"c_smem": tile(gemm.consumers, gemm.rows, gemm.block_n, dtype=jnp.float32)},
    )["c"]
    return c[: gemm.m, : gemm.n]


@pytest.mark.parametrize(
    ("m", "n", "k", "fields"),
    [
        # Three block rows in bands of two, three block columns, more steps than stages, ragged edges.
        slow(300, 150, 200, {"block_n": 64, "stages": 2, "band": 2}),
        # One tile, one step, stages that are never used.
        slow(5, 7, 9, {"block_n": 128, "stages": 4, "band": 16, "cluster": 2}),
        # One consumer, and more stages than the steps of a tile.
        slow(128, 128, 128, {"block_n": 64, "stages": 3, "band": 4, "block_m": 64, "consumers": 1}),
    ],
)
def test_a_product_with_an_epilogue(m: int, n: int, k: int, fields: dict) -> None:
    gemm = Gemm(chip=H200, m=m, n=n, k=k, dtype=jnp.bfloat16, **fields)
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.normal(keys[0], (m, k)).astype(jnp.bfloat16)
    b = jax.random.normal(keys[1], (k, n)).astype(jnp.bfloat16)
    bias = jax.random.normal(keys[2], (gemm.tiles.rows, gemm.tiles.columns))
    with able_to_run("pallas_gpu"):
        c = np.asarray(jax.jit(functools.partial(multiply, gemm))(a, b, bias))
    each = jnp.repeat(jnp.repeat(bias, gemm.block_m, axis=0), gemm.block_n, axis=1)[:m, :n]
    expected = jnp.dot(a, b, preferred_element_type=jnp.float32, precision="highest") + each
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


def test_the_columns_may_begin_inside_b() -> None:
    gemm = Gemm(chip=H200, m=64, n=100, k=64, dtype=jnp.bfloat16, block_n=64, stages=2, band=1)
    keys = jax.random.split(jax.random.key(1), 2)
    a = jax.random.normal(keys[0], (64, 64)).astype(jnp.bfloat16)
    b = jax.random.normal(keys[1], (64, 292)).astype(jnp.bfloat16)
    bias = jnp.zeros((gemm.tiles.rows, gemm.tiles.columns))
    with able_to_run("pallas_gpu"):
        c = np.asarray(jax.jit(functools.partial(multiply, gemm, first_column=192))(a, b, bias))
    expected = jnp.dot(a, b, preferred_element_type=jnp.float32, precision="highest")[:, 192:]
    np.testing.assert_allclose(c, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("m", "n", "band", "cluster", "peers"),
    [(300, 700, 2, 1, 1), (1024, 1000, 4, 2, 2), (128, 64, 16, 2, 1), (640, 300, 16, 2, 1), (768, 300, 4, 2, 2)],
)
def test_every_tile_is_computed_once_and_a_cluster_shares_its_columns(
    m: int, n: int, band: int, cluster: int, peers: int
) -> None:
    gemm = Gemm(chip=H200, m=m, n=n, k=64, dtype=jnp.bfloat16, block_n=128, stages=2, band=band, cluster=cluster)
    assert gemm.peers == peers
    tiles, every = gemm.tiles, gemm.tiles.rows * gemm.tiles.columns
    taken = [tuple(map(int, tiles.coordinates(jnp.int32(number)))) for number in range(every)]
    assert sorted(taken) == list(itertools.product(range(tiles.rows), range(tiles.columns)))
    assert every % gemm.peers == gemm.blocks % gemm.peers == 0
    assert all(taken[t][1] == taken[t + gemm.peers - 1][1] for t in range(0, every, gemm.peers))


def test_shared_memory_is_that_of_the_declared_scratch() -> None:
    gemm = Gemm(chip=H200, m=1024, n=1024, k=64, dtype=jnp.bfloat16, block_n=256, stages=4, band=8, cluster=2)
    scratch = gemm.scratch()
    assert list(scratch) == ["pipeline"]
    assert list(scratch["pipeline"].buffers) == ["a", "b"]
    assert isinstance(scratch["pipeline"].empty, plgpu.ClusterBarrier)
    # Stages of 128 x 64 and 64 x 256 bfloat16, 16 + 32 KiB; two barriers per stage.
    assert smem_bytes(scratch) == 4 * 48 * 1024 + 2 * 4 * 8


def test_a_cluster_lowers_without_a_gpu() -> None:
    struct = jax.ShapeDtypeStruct
    gemm = Gemm(chip=H200, m=512, n=512, k=256, dtype=jnp.bfloat16, block_n=128, stages=4, band=4, cluster=2)
    arrays = struct((512, 256), "bfloat16"), struct((256, 512), "bfloat16"), struct((4, 4), "float32")
    lowered = jax.jit(functools.partial(multiply, gemm)).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 1
