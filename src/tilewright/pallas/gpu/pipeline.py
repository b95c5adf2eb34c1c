"""A pipeline of stages in shared memory: a producer warpgroup copies ahead of the consumer warpgroups.

Each stage has a full barrier, which the copies into it arrive on, and an empty barrier, which each consumer arrives on
once it has read the stage. A step n of the loop uses stage n modulo the number of stages; the phase of a barrier
follows from that.

A kernel's scratch declares a pipeline with its buffers as one entry, and the kernel's body receives the `Pipeline`:

    scratch={"x": Pipeline.scratch(stages, consumers=2, copies=2, left=tile(stages, 64, 64, dtype=dtype), right=...)}

    stage = x.wait(n)
    sum_.add(x.left.at[stage], x.right.at[stage])
    x.release(n)

JAX's `emit_pipeline_warp_specialized` is the same with one loop of one kind of step. The kernels here begin the copies
of the next tile while this one is finished, or have consumers that meet in between, so they keep their own loops and
share this object.
"""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@functools.partial(jax.tree_util.register_dataclass, data_fields=("full", "buffers", "empty"), meta_fields=("stages",))
@dataclass(frozen=True)
class Pipeline:
    """The stages of a kernel's loop, and their barriers and buffers: declarations in its scratch, refs in its body."""

    stages: int
    """Where a method takes `stage` beside a step n, it is the stage of n, for a caller that has it."""
    full: Any
    empty: Any
    buffers: OrderedDict[str, Any]
    """By name; attributes of the pipeline, too."""

    @classmethod
    def scratch(
        cls,
        stages: int,
        *,
        consumers: int,
        copies: int | Mapping[str, int],
        cluster_axis: str | None = None,
        **buffers: Any,
    ) -> "Pipeline":
        """Declares a pipeline. A buffer may be None, or a barrier.

        `copies` are the copies into a stage; by name, they are groups with barriers of their own (see `group`).
        `consumers` are the warpgroups that read it. `cluster_axis` names the axis of the thread blocks of a cluster,
        where they multicast copies to each other: a stage is then empty once the consumers of all have read theirs.
        """
        arrivals: dict[str, Any] = {"num_arrivals": consumers, "num_barriers": stages}
        if cluster_axis:
            empty: Any = plgpu.ClusterBarrier(collective_axes=(cluster_axis,), **arrivals)
        else:
            empty = plgpu.Barrier(**arrivals)
        groups = copies if isinstance(copies, int) else OrderedDict(copies)
        full = jax.tree.map(lambda count: plgpu.Barrier(num_arrivals=count, num_barriers=stages), groups)
        return cls(stages, full, jax.tree.map(lambda _: empty, groups), OrderedDict(buffers))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.buffers:
            raise AttributeError(f"the pipeline has no {name}; its buffers are {', '.join(self.buffers)}")
        return self.buffers[name]

    def group(self, name: str) -> "Pipeline":
        """The same stages and buffers, with the barriers of one group of copies."""
        return Pipeline(self.stages, self.full[name], self.empty[name], self.buffers)

    def stage(self, n: Any) -> Any:
        """The stage that step n uses."""
        return lax.rem(n, jnp.int32(self.stages))

    # The producer's side.

    def acquire(self, n: Any, *, stage: Any = None) -> Any:
        """Waits until the consumers have read the stage of step n, and returns it. The first steps find it empty."""
        stage = self.stage(n) if stage is None else stage
        pl.when(n >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[stage]))
        return stage

    def copy(self, n: Any, copies: Iterable[tuple[Any, Any]], *, stage: Any = None, **options: Any) -> None:
        """Copies (source in global memory, destination in shared memory) that arrive on step n's full barrier."""
        full = self.full.at[self.stage(n) if stage is None else stage]
        for source, destination in copies:
            plgpu.copy_gmem_to_smem(source, destination, full, **options)

    def fetch(self, n: Any, *, stage: Any = None, **sources: Any) -> None:
        """Copies sources in global memory to this step's stage of the buffers of their names, once it is empty."""
        stage = self.acquire(n, stage=stage)
        self.copy(n, [(source, self.buffers[name].at[stage]) for name, source in sources.items()], stage=stage)

    # The consumers' side.

    def wait(self, n: Any, *, stage: Any = None) -> Any:
        """Waits until the copies of step n have arrived, and returns its stage."""
        stage = self.stage(n) if stage is None else stage
        plgpu.barrier_wait(self.full.at[stage])
        return stage

    def release(self, n: Any, *, stage: Any = None) -> None:
        """Tells the producer that this warpgroup has read the stage of step n."""
        plgpu.barrier_arrive(self.empty.at[self.stage(n) if stage is None else stage])


class OneOfSeveral(Pipeline):
    """A pipeline that takes for a source of a copy a list of pairs (whether it is that one, the ref) as well."""

    @classmethod
    def of(cls, pipeline: Pipeline) -> "OneOfSeveral":
        """The same stages, barriers and buffers."""
        return cls(pipeline.stages, pipeline.full, pipeline.empty, pipeline.buffers)

    def copy(self, n: Any, copies: Iterable[tuple[Any, Any]], **options: Any) -> None:
        for source, destination in copies:
            for is_taken, ref in source if isinstance(source, list) else [(True, source)]:
                copy = functools.partial(super().copy, n, [(ref, destination)], **options)
                copy() if is_taken is True else pl.when(is_taken)(copy)
