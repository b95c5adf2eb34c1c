"""Other ways to run a step that does not fit: remat policies, microbatches and meshes, ranked by estimated time.

Tracing one way takes seconds and there may be hundreds. So they are tried in the order of a guess, and what is learnt from
one is used for the others: with the same remat policy and the same parts along `tensor` and `expert`, what is not state
grows with the tokens of a device.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from tilewright.models.train_config import REMAT
from tilewright.parallel.mesh import MeshError
from tilewright.parallel.pipeline import PIPELINE
from tilewright.plan.estimate import Estimate, estimate
from tilewright.plan.place import Place
from tilewright.plan.step import AXES, Step

# FLOPs of a step beside those without recomputation, as a guess that only orders what is tried.
_RECOMPUTED = {"none": 1.0, "ops": 1.1, "dots": 1.1, "full": 1.33}
# What a policy keeps of what "none" keeps, at least: a guess for ways that nothing like them was traced of yet.
_LEAST_KEPT = {"none": 1.0, "ops": 0.3, "dots": 0.2, "full": 0.05}
_MOST_MICROBATCHES = 64
_MARGIN = 1.1
"""What is predicted to need more than this much of the memory is not traced."""


def meshes(devices: int, axes: tuple[str, ...] = AXES) -> Iterator[dict[str, int]]:
    """Every way to arrange devices along the axes of a model."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            for rest in meshes(devices // size, axes[1:]):
                yield {axes[0]: size, **rest}


def alternatives(step: Step, *, same_mesh: bool = False) -> list[Step]:
    """Every other way to run a step that is valid."""
    found = []
    # The stages of a pipeline stay as they were asked for: what they cost depends on how rows go through them, too.
    stages = step.sizes.get(PIPELINE, 1)
    axes = tuple(axis for axis in AXES if axis != PIPELINE and not (step.decode and axis == "context"))
    others = ({**mesh, PIPELINE: stages} for mesh in meshes(step.num_devices // stages, axes))
    sizes = [step.sizes] if same_mesh else list(others)
    policies = ("none",) if step.decode else REMAT
    counts = [1] if step.decode else [n for n in _powers(_MOST_MICROBATCHES) if step.batch % n == 0]
    if step.accumulate not in counts:
        counts.append(step.accumulate)
    for mesh, accumulate in itertools.product(sizes, counts):
        other = dataclasses.replace(step.on(mesh), accumulate=accumulate)
        try:
            other.check()
        except MeshError:
            continue
        if step.decode and other.rows > other.batch // other.sizes.get("data", 1):
            continue  # Rows that `data` does not divide stay whole: its devices would do the same work.
        found += [dataclasses.replace(other, remat=remat) for remat in policies]
    return [other for other in found if other != step]


def search(
    first: Estimate,
    *,
    tries: int = 10,
    wanted: int = 5,
    same_mesh: bool = False,
    watch: Callable[[Step], None] = lambda step: None,
) -> list[Estimate]:
    """Ways to run the step of `first` that fit, the fastest first.

    Args:
      first: a step that does not fit.
      tries: how many ways are traced at most.
      wanted: after so many that fit, the search ends.
      same_mesh: whether only remat policies and microbatches are tried.
      watch: called with each way before it is traced.
    """
    place = first.place
    known: dict[tuple[str, int, int], tuple[float, int]] = {}

    def learn(each: Estimate) -> None:
        known[_bucket(each.step)] = max(0.0, each.bytes - each.step.state_bytes()), each.step.tokens_at_once

    def predicted(step: Step) -> float:
        """At least what is state; and where a like step was traced, what that had beside."""
        if (like := known.get(_bucket(step))) is not None:
            return step.state_bytes() + like[0] * step.tokens_at_once / like[1]
        # Of another policy it may be little. With more parts along `tensor` and `expert` it is divided by them at most.
        like = known.get(_bucket(first.step), (0.0, 1))
        parts = _parts_beside(step) / _parts_beside(first.step)
        share = _LEAST_KEPT[step.remat] / _LEAST_KEPT[first.step.remat]
        return step.state_bytes() + min(share, 1.0) * like[0] * step.tokens_at_once / like[1] / max(parts, 1.0)

    learn(first)
    waiting = sorted(alternatives(first.step, same_mesh=same_mesh), key=lambda step: _guess(step, place))
    fitting: list[Estimate] = []
    for _ in range(tries):
        limit = _MARGIN * place.usable_bytes
        chosen = next((step for step in waiting if predicted(step) <= limit), None)
        if chosen is None:
            break
        waiting.remove(chosen)
        watch(chosen)
        tried = estimate(chosen, place)
        learn(tried)
        if tried.fits:
            fitting.append(tried)
            # Ways that only need less memory and more time are of no use beside this one.
            waiting = [step for step in waiting if not _is_slower(step, chosen)]
            if len(fitting) == wanted:
                break
    return sorted(fitting, key=lambda each: 0.0 if math.isnan(each.apart_s) else each.apart_s)


def _bucket(step: Step) -> tuple[str, int, int]:
    return step.remat, step.sizes.get("tensor", 1), step.sizes.get("expert", 1)


def _parts_beside(step: Step) -> int:
    return step.sizes.get("tensor", 1) * step.sizes.get("expert", 1)


def _is_slower(step: Step, than: Step) -> bool:
    """Whether a step is another one with more recomputation or more microbatches."""
    same = step.mesh == than.mesh
    return same and step.accumulate >= than.accumulate and _RECOMPUTED[step.remat] >= _RECOMPUTED[than.remat]


def _powers(most: int) -> Iterator[int]:
    return itertools.takewhile(lambda n: n <= most, (1 << n for n in itertools.count()))


def _guess(step: Step, place: Place) -> float:
    """A time, for the order in which ways are tried: model FLOPs, gathered weights, and summed activations."""
    from tilewright.models.training import flops_per_token

    architecture, sizes = step.architecture, step.sizes
    passes = 1.0 / 3.0 if step.decode else _RECOMPUTED[step.remat]
    tokens = step.batch * (1 if step.decode else step.tokens)
    flops = passes * flops_per_token(architecture, step.tokens) * tokens / step.num_devices
    peak = place.chip.flops_per_s("bfloat16") or 1.0
    rates = place.bytes_per_s(sizes)
    gathers = 1 if step.decode else 4 * step.accumulate
    rows = tokens / math.prod(size for name, size in sizes.items() if name != "tensor")
    activations = len(architecture.blocks) * 2 * 2 * rows * architecture.d_model
    links = 0.0
    for axis, rate in rates.items():
        # Sums of activations over `tensor`, and over `context` the exchange of keys and values, of about half of that.
        share = {"tensor": 4, "context": 2}.get(axis, 0) * activations * (sizes[axis] - 1) / sizes[axis]
        weights = 0.0 if axis in ("tensor", PIPELINE) else (gathers if axis == "fsdp" else 2) * step.weight_bytes()
        links += (share + weights * (sizes[axis] - 1)) / rate
    return flops / peak + links
