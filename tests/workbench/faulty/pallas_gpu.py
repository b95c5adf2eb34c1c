"""A Mosaic GPU kernel that with "race" reads shared memory before its copy has arrived."""

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.workbench.faulty.config import NoConfig as Config
from tilewright.core.dispatch import Launch
from tilewright.core.target import gpu_interpret_params


def default_config(chip, x, *, fault):
    return Config()


def _kernel(x_gmem, out_gmem, x_smem, barrier, *, fault):
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    if fault != "race":
        plgpu.barrier_wait(barrier)
    doubled = x_smem[...] + x_smem[...]
    if fault == "race":
        plgpu.barrier_wait(barrier)
    x_smem[...] = doubled
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(x_smem, out_gmem)
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _double(x, fault, launch):
    return plgpu.kernel(
        functools.partial(_kernel, fault=fault),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()],
        grid=(1,),
        grid_names=("block",),
        interpret=gpu_interpret_params(launch.interpret),
    )(x)


_double.defvjp(lambda x, fault, launch: (_double(x, fault, launch), None), lambda fault, launch, _, dy: (2 * dy,))


def double_pallas_gpu(x: jax.Array, *, fault: str | None, launch: Launch) -> jax.Array:
    """2 x, or not."""
    return _double(x, fault, launch)
