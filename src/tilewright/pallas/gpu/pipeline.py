"""A pipeline of stages in shared memory: a producer warpgroup copies ahead of the consumer warpgroups.

Each stage has a full barrier, which the copies into it arrive on, and an empty barrier, which each consumer arrives on
once it has read the stage. A step n of the loop uses stage n modulo the number of stages; the phase of a barrier
follows from that.

JAX's `emit_pipeline_warp_specialized` is the same with one loop of one kind of step. The kernels here begin the copies
of the next tile while this one is finished, or have consumers that meet in between, so they keep their own loops and
share this object.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def pipeline_barriers(stages: int, *, copies: int, consumers: int, cluster_axis: str | None = None) -> dict[str, Any]:
    """The barriers of a pipeline, for a kernel's scratch: `full` and `empty`.

    `copies` are the copies into a stage; `consumers` are the warpgroups that read it. `cluster_axis` names the axis of
    the thread blocks of a cluster, where they multicast copies to each other: a stage is then empty once the consumers
    of all of them have read theirs.
    """
    empty: dict[str, Any] = {"num_arrivals": consumers, "num_barriers": stages}
    return {
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.ClusterBarrier(collective_axes=(cluster_axis,), **empty)
        if cluster_axis
        else plgpu.Barrier(**empty),
    }


@dataclass(frozen=True)
class Pipeline:
    """The stages of a kernel's loop, and their barriers (refs)."""

    stages: int
    full: Any
    empty: Any

    def stage(self, n: Any) -> Any:
        """The stage that step n uses."""
        return lax.rem(n, jnp.int32(self.stages))

    # The producer's side.

    def acquire(self, n: Any, *, stage: Any = None) -> Any:
        """Waits until the stage of step n has been read by its consumers. The first steps find it empty. `stage` is
        that of step n, where the caller has it.
        """
        stage = self.stage(n) if stage is None else stage
        pl.when(n >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        return stage

    def copy(self, n: Any, copies: Iterable[tuple[Any, Any]], *, stage: Any = None, **options: Any) -> None:
        """Copies (source in global memory, destination in shared memory) for step n; they arrive on its full
        barrier. `stage` is that of step n, where the caller has it.
        """
        full = self.full.at[self.stage(n) if stage is None else stage]
        for source, destination in copies:
            plgpu.copy_gmem_to_smem(source, destination, full, **options)

    # The consumers' side.

    def wait(self, n: Any, *, stage: Any = None) -> Any:
        """Waits until the copies of step n have arrived, and returns its stage, which may be given as `stage`."""
        stage = self.stage(n) if stage is None else stage
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, n: Any, *, stage: Any = None) -> None:
        """Tells the producer that this warpgroup has read the stage of step n, which may be given as `stage`."""
        plgpu.barrier_arrive(self.empty.at[self.stage(n) if stage is None else stage])
