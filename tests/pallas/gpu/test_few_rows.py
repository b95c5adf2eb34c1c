"""Products of few rows in the interpreter: one matrix and several, rows in and out of whole eights, splits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tests.ops.composition import able_to_run
from tilewright.core.chip import Chip
from tilewright.pallas.gpu.few_rows import FewRows, chosen_tiles


def products(m, k, columns, rows=16, splits=2):
    return FewRows(chip=Chip.named("h200"), m=m, k=k, columns=columns, rows=rows, stages=2, splits=splits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "k", "columns", "rows", "splits"),
    [
        (3, 300, (256, 128, 128), 16, 2),  # Tiles of three matrices, and a depth that the splits do not divide.
        (17, 256, (128, 256), 32, 1),
        (5, 128, (72,), 16, 1),  # A matrix that is no whole tile.
        (1, 1024, (128,), 16, 8),  # One row as eight.
        (1, 2048, (128, 128), 16, 16),  # The same, two splits for each of the eight.
    ],
)
def test_the_sums_of_the_splits_are_the_products(m, k, columns, rows, splits):
    x = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    weights = [jax.random.normal(jax.random.key(n + 1), (k, size), jnp.bfloat16) for n, size in enumerate(columns)]
    product = products(m, k, columns, rows, splits)
    with able_to_run("pallas_gpu"):
        z = jax.jit(lambda x, *w: product.run(x, w, name="few_rows"))(x, *weights)
    assert z.shape == (splits, m, sum(columns))
    want = np.concatenate([np.asarray(x, np.float32) @ np.asarray(w, np.float32) for w in weights], axis=1)
    np.testing.assert_allclose(jnp.sum(z, axis=0), want, rtol=1e-5, atol=1e-4)


def test_one_row_is_not_padded_where_it_is_read_as_eight():
    def padded(product):
        with tilewright.target("h200"):
            x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((product.m, 1024), (1024, 128)))
            return " pad[" in str(jax.make_jaxpr(lambda x, w: product.run(x, [w], name="few_rows"))(x, w))

    assert products(1, 1024, (128,), splits=8).folded
    assert not padded(products(1, 1024, (128,), splits=8))
    assert padded(products(1, 1024, (128,), splits=4))
    assert padded(products(3, 1024, (128,), splits=8))
    assert not padded(products(8, 1024, (128,), splits=8))


def test_tiles_of_all_matrices_count_when_the_splits_are_chosen():
    """An H200 has 132 multiprocessors: 32 tiles in four splits fill it, and 16 in eight."""
    assert [chosen_tiles(Chip.named("h200"), m, 2048, n) for m, n in ((1, 4096), (20, 2048))] == [
        (16, 5, 4),
        (32, 5, 8),
    ]
