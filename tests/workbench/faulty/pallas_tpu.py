"""A TPU kernel that copies its input itself.

With the fault "race" it reads its scratch before the copy is done; with "scratch" it reads scratch that was never written.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.workbench.faulty.call import DoubleCall
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, Output


def _kernel(*, x_ref, y_ref, copied, unwritten, semaphore, fault):
    copy = pltpu.make_async_copy(x_ref, copied, semaphore)
    copy.start()
    if fault != "race":
        copy.wait()
    y_ref[...] = 2 * copied[...]
    if fault == "race":
        copy.wait()
    if fault == "scratch":
        y_ref[...] += 0 * unwritten[...]


def _forward(call: DoubleCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    shape, dtype = call.x.shape, call.x.dtype
    kernel = Kernel(
        name="double",
        grid={"all": Axis(1)},
        inputs={"x": Block(shape, dtype, memory=pl.ANY)},
        outputs={"y": Output(shape, Block(shape, dtype, lambda i: (0, 0)))},
        scratch={
            "copied": pltpu.VMEM(shape, dtype),
            "unwritten": pltpu.VMEM(shape, dtype),
            "semaphore": pltpu.SemaphoreType.DMA,
        },
    )
    outputs = kernel.run(functools.partial(_kernel, fault=call.fault), {"x": call.x}, chip=launch.chip)
    return outputs["y"], None


def _backward(call: DoubleCall, saved: None, dy: Any, launch: Launch) -> DoubleCall:
    return call.gradients(x=2 * dy)


IMPLEMENTATION = Implementation(forward=Pass(_forward), backward=Pass(_backward))
