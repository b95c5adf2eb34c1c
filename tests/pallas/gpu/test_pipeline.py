"""The pipeline object: a producer that runs ahead of two consumers, over more steps than there are stages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.ops.contract import able_to_run
from tilewright.pallas.gpu.kernel import run_kernel, smem_bytes
from tilewright.pallas.gpu.pipeline import Pipeline

ROW = 128
CONSUMERS = 2


def _pipeline(stages: int) -> Pipeline:
    return Pipeline.scratch(stages, consumers=CONSUMERS, copies=1, x=plgpu.SMEM((stages, ROW), jnp.float32))


def _sum_kernel(*, x_ref, y_ref, pipeline: Pipeline, y_smem, steps: int, given: bool) -> None:
    """Each consumer sums the rows; the second doubles its sum."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < CONSUMERS)
    def _consume():
        def step(n, total):
            stage = pipeline.wait(n)
            total = total + pipeline.x[stage]
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
            pipeline.copy(n, [(x_ref.at[n], pipeline.x.at[stage])], **({"stage": stage} if given else {}))
            return carry

        lax.fori_loop(0, steps, step, ())


@pytest.mark.parametrize(("steps", "stages", "given"), [(7, 3, False), (2, 4, True), (5, 1, False)])
def test_each_step_is_read_once_by_each_consumer(steps: int, stages: int, given: bool) -> None:
    x = jnp.arange(steps * ROW, dtype=jnp.float32).reshape(steps, ROW)
    with able_to_run("pallas_gpu"):
        y = run_kernel(
            lambda **refs: _sum_kernel(**refs, steps=steps, given=given),
            name="sum_rows",
            inputs={"x": x},
            outputs={"y": jax.ShapeDtypeStruct((CONSUMERS, ROW), jnp.float32)},
            scratch={
                "pipeline": _pipeline(stages),
                "y_smem": plgpu.SMEM((CONSUMERS, ROW), jnp.float32),
            },
            grid={"row": 1},
            warpgroups=CONSUMERS + 1,
        )["y"]
        y = np.asarray(y)
    np.testing.assert_allclose(y, np.stack([np.sum(x, 0), 2 * np.sum(x, 0)]), rtol=1e-6)


def test_the_barriers_of_a_cluster_count_all_of_its_consumers() -> None:
    alone = Pipeline.scratch(4, copies=2, consumers=2)
    assert [leaf.num_arrivals for leaf in jax.tree.leaves(alone)] == [2, 2]
    shared = Pipeline.scratch(4, copies=2, consumers=2, cluster_axis="peer")
    assert isinstance(shared.empty, plgpu.ClusterBarrier)
    assert shared.empty.collective_axes == ("peer",)
    assert shared.full == alone.full


def test_a_pipeline_is_one_entry_of_a_scratch() -> None:
    # Each buffer is aligned to 1,024 bytes; two barriers per stage.
    assert smem_bytes({"x": _pipeline(3), "y": None}) == 2048 + 2 * 3 * 8
    groups = Pipeline.scratch(2, consumers=2, copies={"k": 1, "v": 3}, k=plgpu.SMEM((2, ROW), jnp.float32), v=None)
    assert [barrier.num_arrivals for barrier in groups.full.values()] == [1, 3]
    assert groups.group("v").full.num_arrivals == 3
    assert groups.v is None
    with pytest.raises(AttributeError, match="its buffers are k, v"):
        _ = groups.w
