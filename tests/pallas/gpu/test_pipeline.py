"""The pipeline object: a producer that runs ahead of two consumers, over more steps than there are stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.ops.contract import able_to_run
from tilewright.pallas.gpu.kernel import run_kernel
from tilewright.pallas.gpu.pipeline import Pipeline, pipeline_barriers

ROW = 128
CONSUMERS = 2


def _sum_kernel(*, x_ref, y_ref, x_smem, y_smem, full, empty, steps: int, stages: int, given: bool) -> None:
    """Each consumer sums the rows; the second doubles its sum."""
    warpgroup = lax.axis_index("warpgroup")
    pipeline = Pipeline(stages, full, empty)

    @pl.when(warpgroup < CONSUMERS)
    def _consume():
        def step(n, total):
            stage = pipeline.wait(n)
            total = total + x_smem[stage]
            plgpu.commit_smem()
            pipeline.release(n, stage=stage) if given else pipeline.release(n)
            return total

        total = lax.fori_loop(0, steps, step, jnp.zeros((ROW,), jnp.float32))
        staged = y_smem.at[warpgroup]
        staged[...] = total * (warpgroup + 1).astype(jnp.float32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, y_ref.at[warpgroup])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == CONSUMERS)
    def _produce():
        def step(n, carry):
            stage = pipeline.acquire(n)
            pipeline.copy(n, [(x_ref.at[n], x_smem.at[stage])], **({"stage": stage} if given else {}))
            return carry

        lax.fori_loop(0, steps, step, ())


@pytest.mark.parametrize(("steps", "stages", "given"), [(7, 3, False), (2, 4, True), (5, 1, False)])
def test_each_step_is_read_once_by_each_consumer(steps: int, stages: int, given: bool) -> None:
    x = jnp.arange(steps * ROW, dtype=jnp.float32).reshape(steps, ROW)
    with able_to_run("pallas_gpu"):
        y = run_kernel(
            lambda **refs: _sum_kernel(**refs, steps=steps, stages=stages, given=given),
            name="sum_rows",
            inputs={"x": x},
            outputs={"y": jax.ShapeDtypeStruct((CONSUMERS, ROW), jnp.float32)},
            scratch={
                "x_smem": plgpu.SMEM((stages, ROW), jnp.float32),
                "y_smem": plgpu.SMEM((CONSUMERS, ROW), jnp.float32),
                **pipeline_barriers(stages, copies=1, consumers=CONSUMERS),
            },
            grid={"row": 1},
            warpgroups=CONSUMERS + 1,
        )["y"]
        y = np.asarray(y)
    np.testing.assert_allclose(y, np.stack([np.sum(x, 0), 2 * np.sum(x, 0)]), rtol=1e-6)


def test_the_barriers_of_a_cluster_count_all_of_its_consumers() -> None:
    alone = pipeline_barriers(4, copies=2, consumers=2)
    assert list(alone) == ["full", "empty"]
    assert (alone["full"].num_arrivals, alone["empty"].num_arrivals) == (2, 2)
    shared = pipeline_barriers(4, copies=2, consumers=2, cluster_axis="peer")
    assert isinstance(shared["empty"], plgpu.ClusterBarrier)
    assert shared["empty"].collective_axes == ("peer",)
    assert shared["full"] == alone["full"]
