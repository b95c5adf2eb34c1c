"""What to do where a device ran out of memory: what was largest, and which other ways to run the step would fit."""

import json
import math
from typing import Any

import jax

from tilewright.core.chip import Chip
from tilewright.core.target import default_device
from tilewright.models.config import Config
from tilewright.parallel.pipeline import Pipeline
from tilewright.plan.estimate import Estimate, estimate
from tilewright.plan.place import Place
from tilewright.plan.search import search
from tilewright.plan.step import Step, ordered
from tilewright.workbench.figures import memory, seconds

_LESS = 0.8
"""Where the estimate is that it fits, or the memory is not known: the share of the estimate that others may need."""
_NAMED = 3


class OutOfMemory(RuntimeError):
    """A device ran out of memory. The text has what was largest and what would fit."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a device's that has no memory left, when it runs or when it compiles."""
    text = str(error)
    of_device = isinstance(error, jax.errors.JaxRuntimeError) or type(error).__name__ == "XlaRuntimeError"
    return of_device and ("RESOURCE_EXHAUSTED" in text or "CompileTimeHbmOom" in text) and "vmem" not in text.lower()


def advise(step: Step, *, tries: int = 4, same_mesh: bool = False) -> str:
    """One message about a step that ran out of memory on the devices that are here."""
    place = _here(step.num_devices)
    first = estimate(step, place)
    known = place.usable_bytes > 0
    limit = min(first.bytes * _LESS, place.usable_bytes) if known else first.bytes * _LESS
    held = f"of {memory(place.usable_bytes)}" if known else "and what the device has is not known"
    message = f"out of memory: the step needs about {memory(first.bytes)} {held} by estimate; {_largest(first)}"
    searched = Estimate(first.step, place.with_memory(int(limit)), first.work)
    found = search(searched, tries=tries, wanted=_NAMED, same_mesh=same_mesh)
    if found:
        ways = "; ".join(_way(each, step) for each in found)
        return f"{message}. What would fit: {ways}. `tilewright plan` compiles them without the device"
    fewer = "fewer rows or a shorter cache" if step.decode else "fewer or shorter rows"
    return f"{message}. No other remat policy, microbatches or mesh of these devices fits; use {fewer}, or more devices"


def advise_training(config: Any) -> str:
    """One message about the step of a `TrainConfig` that ran out of memory."""
    return advise(_training_step(config))


def _training_step(config: Any) -> Step:
    table, train = config.model, config.train
    values = table.config if table.config is not None else Config.read(table.path).values
    sizes = {} if config.mesh is None else dict(vars(config.mesh))
    others = math.prod(size for size in sizes.values() if size != -1)
    mesh = {axis: jax.device_count() // others if size == -1 else size for axis, size in sizes.items()}
    return Step(
        json.dumps(values),
        train.batch_size * train.accumulate,
        config.data.seq_len,
        ordered(mesh),
        train.remat,
        train.accumulate,
        train.dtype,
        pipeline=Pipeline(**vars(config.pipeline)),
        lora=config.lora,
    )


def _here(devices: int) -> Place:
    """The devices of this process, as a place. Without a figure for their memory it has none."""
    device = default_device()
    chip = Chip.of(device)
    stats = device.memory_stats() or {} if hasattr(device, "memory_stats") else {}
    usable = int(stats.get("bytes_limit") or chip.usable_bytes or 0)
    shape = (devices,) if chip.platform == "tpu" else (1, 1, devices)
    return Place(chip, (1,) * (chip.links // 2 - len(shape)) + shape, usable)


def _largest(found: Estimate) -> str:
    kinds = sorted(found.work.memory().items(), key=lambda item: -item[1])
    each = found.work.buffers[0]
    named = ", ".join(f"{kind} {memory(size)}" for kind, size in kinds[:_NAMED])
    return f"{named}; the largest buffer is {each.name} {each.shape}, {memory(each.bytes)}"


def _way(found: Estimate, asked: Step) -> str:
    """What to change, what it needs, and the time that it costs, where that is known."""
    step = found.step
    changed = [step.named()] if step.mesh != asked.mesh else []
    if step.remat != asked.remat:
        changed.append(f"remat={step.remat}")
    if step.accumulate != asked.accumulate:
        changed.append(f"{step.accumulate} microbatches of {step.batch // step.accumulate} rows")
    time = "" if math.isnan(found.apart_s) else f", about {seconds(found.apart_s)}"
    return f"{' and '.join(changed)} ({memory(found.bytes)}{time})"
