"""A TPU kernel that copies its input itself.

With the fault "race" it reads its scratch before the copy is done; with "scratch" it reads scratch that was never written.
With "sum" it adds up x twice in a block of its output instead, over an axis of the grid that is marked parallel; "sum in
order" has that axis marked arbitrary, and no fault. With "carried" a step reads scratch that another parallel step wrote.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
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


def _sum_kernel(*, x_ref, y_ref, carried):
    @pl.when(pl.program_id(1) == 0)
    def _start():
        y_ref[...] = jnp.zeros_like(y_ref)

    y_ref[...] += x_ref[...]


def _carried_kernel(*, x_ref, y_ref, carried):
    @pl.when(pl.program_id(0) == 0)
    def _start():
        carried[...] = jnp.full_like(carried, 2)

    y_ref[...] = carried[...] * x_ref[...]


def _in_steps(call: DoubleCall, launch: Launch) -> tuple[jax.Array, None]:
    (n, d), dtype = call.x.shape, call.x.dtype
    rows = Block((n // 2, d), dtype, lambda row, step: (row, 0))
    carried = call.fault == "carried"
    step = Axis(1 if carried else 2, "arbitrary" if call.fault == "sum in order" else "parallel")
    kernel = Kernel(
        name="double_in_steps",
        grid={"row": Axis(2, "parallel"), "step": step},
        inputs={"x": rows},
        outputs={"y": Output((n, d), rows)},
        scratch={"carried": pltpu.VMEM((n // 2, d), dtype)},
    )
    return kernel.run(_carried_kernel if carried else _sum_kernel, {"x": call.x}, chip=launch.chip)["y"], None


def _forward(call: DoubleCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    if call.fault in ("sum", "carried", "sum in order"):
        return _in_steps(call, launch)
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
