"""The schedule of a pipeline's stages: results as of a loop over the layers, its steps, and what is refused."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tilewright.parallel import MeshError, Pipeline, make_mesh
from tilewright.parallel.pipeline import _hops, run_stages
from tilewright.parallel.stream import StagedLoss, streamed_gradients

LAYERS, ROWS, WIDTH = 12, 16, 3


def stage(weights: Any, x: jax.Array, shift: Any) -> Any:
    """Layers x -> tanh(x w + shift), each of which gives the sums of its rows, too."""

    def layer(x: jax.Array, w: jax.Array) -> Any:
        x = jnp.tanh(x * w[None] + shift[:, None])
        return x, jnp.sum(x, axis=1)

    return jax.lax.scan(layer, x, weights)


def loss(run: Any, weights: jax.Array, x: jax.Array, shift: jax.Array) -> Any:
    x, sums = run(weights, x, shift)  # [B, D], [layers, B]
    factors = jnp.arange(1.0, 1.0 + LAYERS)[:, None] * jnp.arange(1.0, 1.0 + ROWS)[None]
    return jnp.sum(jnp.square(x)) + jnp.sum(sums * factors), (x, sums)


@pytest.mark.parametrize(
    ("stages", "microbatches", "interleave"), [(2, 4, 1), pytest.param(4, 4, 3, marks=pytest.mark.slow)]
)
def test_results_are_those_of_a_loop_over_the_layers(stages: int, microbatches: int, interleave: int) -> None:
    rng = np.random.default_rng(0)
    weights, x, shift = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((LAYERS, WIDTH), (ROWS, WIDTH), ROWS)
    )
    want = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(stage, weights, x, shift)
    mesh = make_mesh(pipeline=stages, data=-1)
    pipeline = Pipeline(microbatches, interleave)

    def run(weights: Any, x: Any, shift: Any) -> Any:
        return run_stages(stage, weights, x, shift, pipeline)

    rows = P(("pipeline", "data"))
    given = [
        jax.device_put(each, NamedSharding(mesh, spec))
        for each, spec in ((weights, P("pipeline")), (x, rows), (shift, rows))
    ]
    with jax.set_mesh(mesh):
        traced = jax.jit(lambda *given: jax.value_and_grad(loss, (1, 2, 3), has_aux=True)(run, *given)).trace(*given)
        got = traced.lower().compile()(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # The loops of both passes have as many steps as are counted, of which a device works in R M.
    steps = interleave * microbatches + stages - 1
    loops = [int(length) for length in re.findall(r"\blength=(\d+)", str(traced.jaxpr))]
    assert loops.count(steps) == 2
    assert pipeline.bubble(stages) == pytest.approx(1 - interleave * microbatches / steps)


def before(outside: Any, batch: Any) -> Any:
    x = batch["x"] * outside["scale"][None]
    return x, batch["shift"], (jnp.sum(x, axis=1), jnp.arange(x.shape[1]))


def after(outside: Any, x: jax.Array, sums: jax.Array, others: Any, batch: Any) -> Any:
    factors = jnp.arange(1.0, 1.0 + sums.shape[0])[:, None] * batch["shift"][None]
    objective = jnp.sum(jnp.square(x) * outside["head"][None]) + jnp.sum(sums * factors)
    return objective + jnp.sum(jnp.square(others[0])), {"last": jnp.sum(x)}


def summed(outside: Any, weights: Any, batches: Any) -> Any:
    """The objective of all batches, on one device."""

    def one(batch: Any) -> Any:
        x, shift, others = before(outside, batch)
        return after(outside, *stage(weights, x, shift), others, batch)

    return jax.tree.map(jnp.sum, jax.lax.map(one, batches))


def traced_stream(mesh: Any, pipeline: Pipeline, batches: int, rows: int, width: int, layers: int = LAYERS) -> Any:
    """The traced gradients of several batches, and their arguments."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    outside = {"scale": drawn(width), "head": drawn(width)}
    given = outside, drawn(layers, width), {"x": drawn(batches, rows, width), "shift": drawn(batches, rows)}
    specs = P(), P("pipeline"), P(None, ("pipeline", "data"))
    placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(given, specs, strict=True)]

    def gradients(outside: Any, weights: Any, batches: Any) -> Any:
        return streamed_gradients(StagedLoss(before, stage, after), outside, weights, (0,), batches, pipeline)

    with jax.set_mesh(mesh):
        return jax.jit(gradients).trace(*placed), given, placed


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches", "interleave", "batches"), [(2, 4, 1, 3), (4, 4, 3, 5)])
def test_batches_that_follow_each_other_give_the_sums_of_one_device(
    stages: int, microbatches: int, interleave: int, batches: int
) -> None:
    pipeline = Pipeline(microbatches, interleave)
    mesh = make_mesh(pipeline=stages, data=-1)
    traced, given, placed = traced_stream(mesh, pipeline, batches, ROWS, WIDTH)
    got = traced.lower().compile()(*placed)
    (objective, parts), (outside, weights) = jax.jit(jax.value_and_grad(summed, (0, 1), has_aux=True))(*given)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves((objective, parts, outside, weights)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))
    # The first batch forward, pairs of steps for all others, and the last batch backward.
    pairs, layers = interleave * microbatches, LAYERS // (stages * interleave)
    loops = [int(length) for length in re.findall(r"\blength=(\d+)", str(traced.jaxpr))]
    assert sorted(loop for loop in loops if loop != layers) == sorted(
        [pairs + stages - 1, *([batches - 1] if batches - 1 != layers else []), pairs, pairs + stages - 1]
    )
    steps = pairs + stages - 1 + (batches - 1) * pairs
    assert pipeline.steps(stages, batches) == steps
    assert pipeline.bubble(stages, batches) == pytest.approx((stages - 1) / steps)


@pytest.mark.slow
def test_the_memory_of_a_stream_does_not_grow_with_its_batches() -> None:
    def temporary(batches: int) -> int:
        """Of 4 stages with 4 layers each, in bytes; a batch has 4 microbatches of 8 rows."""
        traced, *_ = traced_stream(make_mesh(pipeline=4), Pipeline(4), batches, 4 * 8, 256, layers=16)
        return traced.lower().compile().memory_analysis().temp_size_in_bytes

    pair = 4 * 8 * 256 * 4
    """What is kept of a microbatch on one device, at least: the results of four layers."""
    few, many = temporary(4), temporary(16)
    assert few > Pipeline(4).kept(4) * pair == 11 * pair
    assert many < few + pair
    assert many < (64 + 3) * pair / 2  # All of these microbatches in one batch keep those of all steps.


def test_every_group_of_layers_travels_once() -> None:
    for stages, rounds in ((2, 2), (3, 2), (4, 2), (4, 6), (5, 4), (8, 3)):
        received: list[set[int]] = [set() for _ in range(stages)]
        for hop in _hops(stages, rounds):
            assert sorted(source for source, _ in hop) == list(range(stages))
            for device, (source, turn) in enumerate(hop):
                assert (device + stages * turn) // rounds == source
                received[device].add(turn)
        assert received == [set(range(rounds))] * stages


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            Pipeline(3),
            r"^microbatches=3 with pipeline=2 and a batch of 8 rows on each pipeline: the stages must divide the "
            r"microbatches, and the microbatches these rows; use microbatches=2$",
        ),
        (Pipeline(12), r"^microbatches=12 with pipeline=2 .* use microbatches=8$"),
        (
            Pipeline(4, 4),
            r"^the layers repeat 12 times in a row; pipeline=2 with interleave=4 needs a multiple of 8, and the nearest "
            r"that works is interleave=3$",
        ),
    ],
)
def test_what_does_not_divide_is_an_error_with_the_numbers(pipeline: Pipeline, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        pipeline.of_rows(ROWS, 4, 2).check_layers(12, 2, "the layers repeat 12 times in a row")


@pytest.mark.parametrize(("given", "told"), [((True,), "microbatches=True"), ((2, 0), "interleave=0")])
def test_sizes_are_integers(given: Any, told: str) -> None:
    with pytest.raises(MeshError, match=f"^{told} must be an integer, . or more$"):
        Pipeline(*given)


def test_microbatches_by_default() -> None:
    assert [Pipeline().of_rows(rows, 4, 2).microbatches for rows in (4, 8, 12, 20, 32)] == [2, 4, 6, 2, 8]
