"""A pipeline of stages over a mesh axis: the layers are cut over devices, and microbatches go through them.

The schedule is circular. S devices have `interleave` groups of layers each, device s the groups s, s + S, s + 2 S, ... A
microbatch visits the devices in turn, `interleave` times around. Microbatches go in blocks of S: all rounds of one block,
then those of the next. So the pairs (round, microbatch) follow each other without waiting: what comes around to the first
device is what it works on next. Device s works on the k-th pair in step k + s, and each step ends with one hop of all
activations to the next device. With M microbatches and R rounds

    steps = R M + S - 1,  bubble = (S - 1) / (R M + S - 1)

and the same of the backward pass, which is the transpose of this loop, step by step in reverse. More microbatches or more
rounds make the bubble smaller. More microbatches are smaller products; more rounds have R times the hops, and move the
weights once per pass: arrays have their layers in order, contiguous over devices, and a device needs every S-th group. Each
group travels at most once, and its gradient back.

What the backward pass of `run_stages` keeps is what it keeps without a pipeline, of all microbatches. The batches of a step
that accumulates gradients go through the stages in one stream (parallel/stream.py), where that is bounded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tilewright.core.arguments import is_integer
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.parallel.mesh import MeshError

PIPELINE = "pipeline"
CUT = P(PIPELINE)
"""An array whose first axis is cut over the stages."""
_DEFAULT_MICROBATCHES = 4
"""Per stage, at most: a bubble of less than a fifth."""

Stage = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""(the weights of some layers [layers, ...], x [rows, ...], what is beside x) -> x after them, and for each of these layers
and each row something more, [layers, rows, ...]."""


@dataclass(frozen=True)
class Pipeline:
    """How a batch goes through the stages."""

    microbatches: int = 0
    """A multiple of the stages. 0: four per stage, or as many as rows can be cut into."""
    interleave: int = 1
    """The groups of layers that each device has, R above."""

    def __post_init__(self) -> None:
        for name, least in (("microbatches", 0), ("interleave", 1)):
            value: Any = getattr(self, name)
            if not is_integer(value) or value < least:
                raise MeshError(f"{name}={value!r} must be an integer, {least} or more")

    def steps(self, stages: int, batches: int = 1) -> int:
        """The steps of a forward pass of so many batches, one after the other."""
        return batches * self.interleave * self.microbatches + stages - 1

    def bubble(self, stages: int, batches: int = 1) -> float:
        """The fraction of its steps that a device does not work in."""
        return (stages - 1) / self.steps(stages, batches)

    def kept(self, stages: int) -> int:
        """The pairs that a device keeps activations of where several batches follow each other (parallel/stream.py).

        A batch has R M pairs. When the first device works backward on a pair, it is a batch and 2 (S - 1) pairs further
        forward; and in the first round, which is the last one backward, (R - 1) S pairs more.
        """
        return self.interleave * self.microbatches + (self.interleave + 1) * stages - 1

    def of_rows(self, rows: int, parts: int, stages: int) -> "Pipeline":
        """This one with its microbatches as a number, for a batch of `rows` that is cut over `parts` devices in all."""
        per_device = rows // parts
        if not self.microbatches:
            most = max(n for n in range(1, _DEFAULT_MICROBATCHES + 1) if per_device % n == 0)
            return Pipeline(stages * most, self.interleave)
        nearest = min(
            (n for n in range(1, per_device + 1) if per_device % n == 0),
            key=lambda n: (abs(n * stages - self.microbatches), n),
        )
        if self.microbatches % stages or per_device % (self.microbatches // stages):
            raise MeshError(
                f"microbatches={self.microbatches} with {PIPELINE}={stages} and a batch of {rows * stages // parts} rows "
                f"on each pipeline: the stages must divide the microbatches, and the microbatches these rows; use "
                f"microbatches={nearest * stages}"
            )
        return self

    def check_layers(self, repeats: int, stages: int, words: str) -> None:
        """Raises where `repeats` cannot be cut into equal groups; `words` say what is repeated."""
        groups = stages * self.interleave
        if repeats % groups:
            rounds = [n for n in range(1, repeats // stages + 1) if repeats % (stages * n) == 0]
            nearest = min(rounds, key=lambda n: (abs(n - self.interleave), n)) if rounds else 1
            raise MeshError(
                f"{words}; {PIPELINE}={stages} with interleave={self.interleave} needs a multiple of {groups}, and the "
                f"nearest that works is interleave={nearest}"
            )


def is_staged(weights: Any) -> bool:
    """Whether stacked weights [layers, ...] are cut over the pipeline's axis, which is an Explicit one."""
    return any(PIPELINE in explicit_axes(leaf)[0] for leaf in jax.tree.leaves(weights))


def run_stages(stage: Stage, weights: Any, x: jax.Array, beside: Any, pipeline: Pipeline) -> tuple[jax.Array, Any]:
    """x after all layers, and what each layer gives beside it, [layers, rows, ...].

    Args:
      stage: runs some layers.
      weights: of all layers, [layers, ...], cut over the mesh axis "pipeline" along the first axis.
      x: [B, ...], whose rows are cut over "pipeline" first; other Explicit mesh axes stay as they are.
      beside: arrays [B, ...] that go with the rows of x through all layers, such as segment ids; or None.
      pipeline: with a number of microbatches (`Pipeline.of_rows`).
    """
    schedule = schedule_of(weights, pipeline)

    def on_device(weights: Any, x: jax.Array, beside: Any) -> tuple[jax.Array, Any]:
        of_round = by_round(jax.tree.map(lambda leaf: dealt(leaf, schedule), weights))

        def work(given: Any, pair: jax.Array) -> Any:
            x, beside = given
            x, more = stage(of_round(schedule.at(pair)[1]), x, beside)
            return (x, beside), more

        def body(line: Line, step: jax.Array) -> Any:
            return advanced(line, step, work, schedule)

        steps = jnp.arange(schedule.pairs + schedule.stages - 1, dtype=jnp.int32)
        line, more = jax.lax.scan(body, begun(microbatches_of((x, beside), schedule)), steps)
        more = jax.tree.map(lambda leaf: own_pairs(leaf, schedule), more)
        return rows_of(line.held[0], schedule), layers_of(more, schedule)

    run = over_stages(on_device, schedule, in_specs=(CUT, CUT, CUT), out_specs=(CUT, P(None, PIPELINE)))
    return run(staged(weights), x, beside)


@dataclass(frozen=True)
class Schedule:
    """Who works on what, and when. Microbatches and pairs are counted through all batches that follow each other."""

    mesh: Any
    stages: int
    microbatches: int
    """Of a batch."""
    rounds: int

    @property
    def pairs(self) -> int:
        """Of a batch."""
        return self.rounds * self.microbatches

    def at(self, pair: Any) -> tuple[Any, Any]:
        """The microbatch of a pair, and how often it has gone around."""
        block, place = pair // (self.rounds * self.stages), pair % (self.rounds * self.stages)
        return block * self.stages + place % self.stages, place // self.stages


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Line:
    """What a device has of the microbatches that go from device to device, each leaf [rows, ...]."""

    held: Any
    """[microbatches, rows, ...], on the first device: what has not begun, and in its place what has gone around R times."""
    arrived: Any
    """What came from the device before."""


def schedule_of(weights: Any, pipeline: Pipeline) -> Schedule:
    """The schedule for weights [layers, ...] that are cut over the pipeline's axis."""
    leaf = jax.tree.leaves(weights)[0]
    mesh = jax.typeof(leaf).sharding.mesh
    stages = mesh.shape[PIPELINE]
    pipeline.check_layers(leaf.shape[0], stages, f"the layers repeat {leaf.shape[0]} times in a row")
    return Schedule(mesh, stages, pipeline.microbatches, pipeline.interleave)


def staged(weights: Any) -> Any:
    """Weights [layers, ...] whose first axis is cut over the pipeline's axis alone."""
    return jax.tree.map(lambda leaf: placed(leaf, [(PIPELINE,), *explicit_axes(leaf)[1:]]), weights)


def over_stages(function: Callable[..., Any], schedule: Schedule, *, in_specs: Any, out_specs: Any) -> Any:
    """The function on each device along the pipeline's axis. Other Explicit mesh axes stay in the types of its arrays."""
    return jax.shard_map(
        function,
        mesh=None if jax.sharding.get_abstract_mesh() == schedule.mesh else schedule.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={PIPELINE},
        # JAX 0.12 cannot differentiate a `shard_map` inside of one (the ops have theirs) where it keeps track of varying
        # axes. It is of use where something is replicated: here everything is cut.
        check_vma=False,
    )


def begun(held: Any) -> Line:
    """The line before its first step."""
    # Real rows to begin with: their gradients are finite, and nothing comes of them.
    return Line(held, jax.tree.map(lambda leaf: leaf[0], held))


def advanced(
    line: Line,
    step: jax.Array,
    work: Callable[[Any, jax.Array], tuple[Any, Any]],
    schedule: Schedule,
    *,
    backward: bool = False,
) -> tuple[Line, Any]:
    """The line after a step, and what `work` gives beside what it sends on.

    Args:
      line: before it. There is room for one batch, or for several that take turns.
      step: its number.
      work: (what arrived, the number of its pair) -> what goes to the next device, and something more. Where the number is
        below 0, or not below that of all pairs, nobody reads the results.
      schedule: of the devices.
      backward: the line goes from the last device to the first.
    """
    stages, index = schedule.stages, jax.lax.axis_index(PIPELINE)
    index = stages - 1 - index if backward else index
    room = jax.tree.leaves(line.held)[0].shape[0]
    microbatch, turn = schedule.at(step - index)
    is_first = (index == 0) & (turn == 0)
    fresh = item(line.held, microbatch % room)
    given = jax.tree.map(lambda one, other: jnp.where(is_first, one, other), fresh, line.arrived)
    result, more = work(given, step - index)
    to_next = [(source, (source + (-1 if backward else 1)) % stages) for source in range(stages)]
    arrived = jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, PIPELINE, to_next), result)
    # What the first device got is of the last one.
    complete = step - (stages - 1)
    microbatch, turn = schedule.at(complete)
    is_result = (complete >= 0) & (turn == schedule.rounds - 1)
    before = item(line.held, microbatch % room)
    after = jax.tree.map(lambda one, other: jnp.where(is_result, one, other), arrived, before)
    return Line(with_item(line.held, after, microbatch % room), arrived), more


def by_round(weights: Any) -> Callable[[Any], Any]:
    """The weights of each round, of [R, layers of a group, ...]."""
    if jax.tree.leaves(weights)[0].shape[0] == 1:
        # The same in each step. A slice by an index of the loop would be kept for each backward step.
        only = jax.tree.map(lambda leaf: leaf[0], weights)
        return lambda turn: only
    return lambda turn: item(weights, turn)


def item(tree: Any, at: Any) -> Any:
    """One item along the first axis of each array."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False), tree)


def with_item(tree: Any, own: Any, at: Any) -> Any:
    """The arrays with one item along their first axes replaced."""
    return jax.tree.map(lambda leaf, one: jax.lax.dynamic_update_index_in_dim(leaf, one, at, 0), tree, own)


def _exchanged(x: jax.Array) -> jax.Array:
    """[S, ...], an item for each device, as an item from each device: an all-to-all.

    It is made of S - 1 hops, which send what an `all_to_all` sends. XLA would gather what that is given over the other mesh
    axes that cut it.
    """
    stages, index, found = x.shape[0], jax.lax.axis_index(PIPELINE), x
    for hop in range(1, stages):
        item = jax.lax.dynamic_index_in_dim(x, (index + hop) % stages, 0, keepdims=False)
        item = jax.lax.ppermute(item, PIPELINE, [(source, (source + hop) % stages) for source in range(stages)])
        found = jax.lax.dynamic_update_index_in_dim(found, item, (index - hop) % stages, 0)
    return found


def _split(x: jax.Array, axis: int, inner: int) -> jax.Array:
    """An axis as two, the second of size `inner`. Explicit mesh axes stay with the first."""
    shape, over = list(x.shape), explicit_axes(x)
    shape[axis : axis + 1], over[axis : axis + 1] = [shape[axis] // inner, inner], [over[axis], ()]
    return jax.lax.reshape(x, shape, out_sharding=P(*over))


def _joined(x: jax.Array, axis: int) -> jax.Array:
    """An axis and the next one as one. Explicit mesh axes are those of the first."""
    shape, over = list(x.shape), explicit_axes(x)
    shape[axis : axis + 2], over[axis : axis + 2] = [shape[axis] * shape[axis + 1]], [over[axis]]
    return jax.lax.reshape(x, shape, out_sharding=P(*over))


def microbatches_of(tree: Any, schedule: Schedule) -> Any:
    """The rows of this device [rows, ...] as the microbatches of all devices, [M, rows, ...].

    Each block of S microbatches has one of each device. Other mesh axes cut the rows: they have a part of every microbatch.
    """

    def gathered(x: jax.Array) -> jax.Array:
        # A gather: all_gather and psum_scatter of arrays with Explicit axes cannot be lowered (JAX 0.12).
        x = _exchanged(jnp.broadcast_to(x[None], (schedule.stages, *x.shape)))
        x = _split(x, 1, schedule.microbatches // schedule.stages)  # [S, rows, M / S, ...]
        return _joined(jnp.moveaxis(x, 2, 0), 0)

    return jax.tree.map(gathered, tree)


def rows_of(x: jax.Array, schedule: Schedule, first: int = 0) -> jax.Array:
    """The first device's microbatches [M, rows, ...] as each device's rows: the way back from `microbatches_of`."""
    x = _exchanged(jnp.moveaxis(_split(x, 0, schedule.stages), 0, 2))  # [S, rows, M / S, ...], of each device
    return _joined(x[first], 0)


def own_pairs(x: jax.Array, schedule: Schedule) -> jax.Array:
    """The pairs of a batch, of this device's steps [R M + S - 1, ...]."""
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(PIPELINE), schedule.pairs, 0)


def layers_of(tree: Any, schedule: Schedule) -> Any:
    """What the layers of this device gave for each pair [R M, layers, rows, ...] as what all layers gave for its rows."""

    def exchanged(x: jax.Array) -> jax.Array:
        x = _split(_split(x, 0, schedule.stages), 0, schedule.rounds)  # [M / S, R, S, layers, rows, ...]
        x = _exchanged(jnp.moveaxis(x, 2, 0))  # [S, M / S, R, layers, rows, ...], of each device
        x = jnp.moveaxis(x, (2, 0, 3, 4, 1), (0, 1, 2, 3, 4))  # [R, S, layers, rows, M / S, ...]
        return _joined(_joined(_joined(x, 0), 0), 1)

    return jax.tree.map(exchanged, tree)


def dealt(leaf: jax.Array, schedule: Schedule) -> jax.Array:
    """The layers of this device [layers, ...], contiguous, as the groups that it works on, [R, layers of a group, ...]."""
    stages, rounds = schedule.stages, schedule.rounds
    groups = _split(leaf, 0, leaf.shape[0] // rounds)
    if rounds == 1:
        return groups
    index, received = jax.lax.axis_index(PIPELINE), jnp.zeros_like(groups)
    for hop in _hops(stages, rounds):
        sent = [0] * stages
        for device, (source, turn) in enumerate(hop):
            sent[source] = (device + stages * turn) % rounds  # Where the source has that group.
        one = item(groups, jnp.asarray(sent, jnp.int32)[index])
        one = jax.lax.ppermute(one, PIPELINE, [(source, device) for device, (source, _) in enumerate(hop)])
        turn = jnp.asarray([turn for _, turn in hop], jnp.int32)[index]
        received = with_item(received, one, turn)
    return received


def _hops(stages: int, rounds: int) -> list[list[tuple[int, int]]]:
    """The groups that travel at once: for each hop and device, where its group comes from, and the round of that group.

    Device d needs the groups d + S r, for all rounds r, and group g lies on device g // R. Each hop is a permutation of the
    devices, a perfect matching between those that need a group and those that have it: every device needs R groups and has
    R groups, so that there are R matchings that share no group.
    """
    left = [{turn: (device + stages * turn) // rounds for turn in range(rounds)} for device in range(stages)]
    hops = []
    for _ in range(rounds):
        taken: dict[int, tuple[int, int]] = {}
        for device in range(stages):
            assert _match(device, left, taken, set())
        hop = [(0, 0)] * stages
        for source, (device, turn) in taken.items():
            hop[device] = (source, turn)
            del left[device][turn]
        hops.append(hop)
    return hops


def _match(device: int, left: list[dict[int, int]], taken: dict[int, tuple[int, int]], seen: set[int]) -> bool:
    """Finds a source for a device, by an augmenting path: devices that have one may take another.

    `left` has the source of each round for each device, and `taken` the device and the round of each source.
    """
    for turn, source in left[device].items():
        if source in seen:
            continue
        seen.add(source)
        if source not in taken or _match(taken[source][0], left, taken, seen):
            taken[source] = (device, turn)
            return True
    return False
