"""A TPU kernel that copies by hand: with "race" it reads before the copy is done, with "scratch" what was never written."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.workbench.faulty.config import NoConfig as Config
from tilewright.core.dispatch import Launch
from tilewright.core.target import tpu_interpret_params


def default_config(chip, x, *, fault):
    return Config()


def _kernel(x_hbm, out_ref, copied_scratch, unwritten_scratch, semaphore, *, fault):
    copy = pltpu.make_async_copy(x_hbm, copied_scratch, semaphore)
    copy.start()
    if fault != "race":
        copy.wait()
    out_ref[...] = 2 * copied_scratch[...]
    if fault == "race":
        copy.wait()
    if fault == "scratch":
        out_ref[...] += 0 * unwritten_scratch[...]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _double(x, fault, launch):
    block = pltpu.VMEM(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, fault=fault),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[block, block, pltpu.SemaphoreType.DMA],
        interpret=tpu_interpret_params(launch.interpret),
    )(x)


_double.defvjp(lambda x, fault, launch: (_double(x, fault, launch), None), lambda fault, launch, _, dy: (2 * dy,))


def double_pallas_tpu(x: jax.Array, *, fault: str | None, launch: Launch) -> jax.Array:
    """2 x, or not."""
    return _double(x, fault, launch)
