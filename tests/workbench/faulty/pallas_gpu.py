"""A Mosaic GPU kernel that, with the fault "race", reads shared memory before the copy into it has arrived."""

import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.workbench.faulty.call import DoubleCall
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel


def _kernel(*, x_ref, y_ref, x_smem, full, fault):
    plgpu.copy_gmem_to_smem(x_ref, x_smem, full)
    if fault != "race":
        plgpu.barrier_wait(full)
    doubled = x_smem[...] + x_smem[...]
    if fault == "race":
        plgpu.barrier_wait(full)
    x_smem[...] = doubled
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_smem, y_ref)
    plgpu.wait_smem_to_gmem(0)


def _forward(call: DoubleCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    outputs = run_kernel(
        functools.partial(_kernel, fault=call.fault),
        name="double",
        inputs={"x": call.x},
        outputs={"y": jax.ShapeDtypeStruct(call.x.shape, call.x.dtype)},
        scratch={"x_smem": plgpu.SMEM(call.x.shape, call.x.dtype), "full": plgpu.Barrier()},
        grid={"block": 1},
        params=compiler_params(automatic_barriers=True, inferred_layouts=True),
    )
    return outputs["y"], None


def _backward(call: DoubleCall, saved: None, dy: Any, launch: Launch) -> DoubleCall:
    return call.gradients(x=2 * dy)


IMPLEMENTATION = Implementation(forward=Pass(_forward), backward=Pass(_backward), architecture=(9, 0))
