"""What a step would take: its memory, and a floor of its time."""

import functools
import math
from dataclasses import dataclass
from typing import Any

from tilewright.core.chip import Chip
from tilewright.parallel.pipeline import PIPELINE
from tilewright.plan.place import Place
from tilewright.plan.program import Work
from tilewright.plan.step import Step

_COUNTED_AS = "v6e"
"""The chip whose kernels say how many FLOPs an op is. Those for GPUs do not, and an op is as many on both."""


@dataclass(frozen=True)
class Estimate:
    """One step on one place, from its trace."""

    step: Step
    place: Place
    work: Work

    @property
    def bytes(self) -> float:
        return self.work.peak_bytes

    @property
    def fits(self) -> bool:
        return self.bytes <= self.place.usable_bytes

    @property
    def compute_s(self) -> float:
        chip = self.place.chip
        peak = chip.flops_per_s(self.step.dtype) or chip.flops_per_s("bfloat16")
        return self.work.flops / peak if peak else math.nan

    @property
    def pipeline(self) -> dict[str, Any] | None:
        """How the rows of a step go through the stages of a pipeline, and the part of their steps that is a bubble.

        `microbatches` are those of all accumulated batches, which follow each other. Devices compute in a bubble, too, so
        that `compute_s` has it.
        """
        if (own := self.step.stages) is None:
            return None
        stages, batches = self.step.sizes[PIPELINE], self.step.accumulate
        steps = {"stages": stages, "microbatches": batches * own.microbatches, "interleave": own.interleave}
        return {**steps, "steps": own.steps(stages, batches), "bubble": own.bubble(stages, batches)}

    @property
    def hbm_s(self) -> float:
        rate = self.place.chip.bytes_per_s
        return self.work.hbm_bytes / rate if rate else math.nan

    @functools.cached_property
    def links(self) -> dict[str, tuple[float, float]]:
        """The bytes that a device sends, and the seconds that they take, by the mesh axes of a collective."""
        rates = self.place.bytes_per_s(self.step.sizes)
        found: dict[str, tuple[float, float]] = {}
        for each in self.work.collectives:
            axes = [axis for axis in each.axes if axis in rates]
            if not axes:
                continue
            on_torus = self.place.chip.platform == "tpu"
            rate = sum(rates[axis] for axis in axes) if on_torus else min(rates[axis] for axis in axes)
            size, seconds = found.get(" x ".join(axes), (0.0, 0.0))
            found[" x ".join(axes)] = size + each.bytes, seconds + each.bytes / rate
        return found

    @property
    def links_s(self) -> float:
        return sum(seconds for _, seconds in self.links.values())

    @property
    def floor_s(self) -> float:
        """With all exchanges behind the work."""
        return max(self.compute_s, self.hbm_s, self.links_s)

    @property
    def apart_s(self) -> float:
        """With no exchange behind the work."""
        return max(self.compute_s, self.hbm_s) + self.links_s

    @property
    def bound(self) -> str:
        times = {"compute": self.compute_s, "HBM": self.hbm_s, "links": self.links_s}
        return max(times, key=lambda name: times[name])

    def to_dict(self) -> dict[str, Any]:
        """As JSON. Everything in it is an estimate."""
        step, work = self.step, self.work
        return {
            "mesh": step.sizes,
            "remat": step.remat,
            "microbatches": step.accumulate,
            "pipeline": self.pipeline,
            "rows_per_device": step.rows,
            "fits": self.fits,
            "bytes": round(self.bytes),
            "usable_bytes": self.place.usable_bytes,
            "memory": {kind: round(size) for kind, size in work.memory().items()},
            "largest": [
                {"name": each.name, "shape": each.shape, "bytes": round(each.bytes), "kind": each.kind}
                for each in work.buffers[:20]
            ],
            "flops": work.flops,
            "hbm_bytes": work.hbm_bytes,
            "collectives": [
                {"kind": each.kind, "axes": list(each.axes), "count": each.count, "bytes_sent": round(each.bytes)}
                for each in work.collectives
            ],
            "compute_s": self.compute_s,
            "hbm_s": self.hbm_s,
            "links_s": self.links_s,
            "floor_s": self.floor_s,
            "without_overlap_s": self.apart_s,
            "bound": self.bound,
            "notes": list(work.notes),
        }


def estimate(step: Step, place: Place) -> Estimate:
    """Traces a step, and estimates it. Nothing is compiled."""
    step.check()
    return Estimate(step, place, _work(step, place.chip))


@functools.lru_cache(maxsize=64)
def _work(step: Step, chip: Chip) -> Work:
    work = step.work(chip)
    if chip.platform == "tpu":
        return work
    counted = step.work(Chip.named(_COUNTED_AS))
    return Work(counted.flops, counted.hbm_bytes, work.collectives, work.buffers, counted.notes)
