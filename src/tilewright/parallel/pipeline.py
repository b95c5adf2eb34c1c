"""A pipeline of stages over a mesh axis: the layers are cut over devices, and microbatches go through them.

The schedule is circular. S devices have `interleave` groups of layers each, device s the groups s, s + S, s + 2 S, ... A
microbatch visits the devices in turn, `interleave` times around. Device s works on its k-th pair (round, microbatch) in
step k + s, so that each step ends with one hop of all activations to the next device. With M microbatches and R rounds

    steps = R M + S - 1,  bubble = (S - 1) / (R M + S - 1)

and the same of the backward pass, which is the transpose of this loop, step by step in reverse. More microbatches or more
rounds make the bubble smaller. More microbatches are smaller products; more rounds have R times the hops, and move the
weights once per pass: arrays have their layers in order, contiguous over devices, and a device needs every S-th group. Each
group travels at most once, and its gradient back.

What a backward pass keeps is what it keeps without a pipeline, of all microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.parallel.mesh import MeshError

PIPELINE = "pipeline"
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
        if self.microbatches < 0 or self.interleave < 1:
            raise MeshError(
                f"microbatches={self.microbatches} must be 0 or more, and interleave={self.interleave} 1 or more"
            )

    def steps(self, stages: int) -> int:
        """The steps of a forward pass."""
        return self.interleave * self.microbatches + stages - 1

    def bubble(self, stages: int) -> float:
        """The fraction of its steps that a device does not work in."""
        return (stages - 1) / self.steps(stages)

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
    leaf = jax.tree.leaves(weights)[0]
    mesh = jax.typeof(leaf).sharding.mesh
    stages = mesh.shape[PIPELINE]
    pipeline.check_layers(leaf.shape[0], stages, f"the layers repeat {leaf.shape[0]} times in a row")
    run = jax.shard_map(
        lambda weights, x, beside: _on_device(stage, weights, x, beside, pipeline, stages),
        mesh=None if jax.sharding.get_abstract_mesh() == mesh else mesh,
        in_specs=(P(PIPELINE), P(PIPELINE), P(PIPELINE)),
        out_specs=(P(PIPELINE), P(None, PIPELINE)),
        axis_names={PIPELINE},
        # JAX 0.12 cannot differentiate a `shard_map` inside of one (the ops have theirs) where it keeps track of varying
        # axes. It is of use where something is replicated: here everything is cut.
        check_vma=False,
    )
    weights = jax.tree.map(lambda leaf: placed(leaf, [(PIPELINE,), *explicit_axes(leaf)[1:]]), weights)
    return run(weights, x, beside)


def _on_device(
    stage: Stage, weights: Any, x: jax.Array, beside: Any, pipeline: Pipeline, stages: int
) -> tuple[jax.Array, Any]:
    count, rounds = pipeline.microbatches, pipeline.interleave
    index = jax.lax.axis_index(PIPELINE)
    weights = jax.tree.map(lambda leaf: _dealt(leaf, stages, rounds), weights)  # [R, layers of a group, ...]
    x, beside = jax.tree.map(lambda leaf: _microbatches(leaf, stages, count), (x, beside))  # [M, rows, ...]
    only = jax.tree.map(lambda leaf: leaf[0], weights) if rounds == 1 else None
    to_next = [(source, (source + 1) % stages) for source in range(stages)]

    def kept(held: jax.Array, arrived: jax.Array, step: Any) -> jax.Array:
        """What comes around to the first device waits there, in the place of its microbatch."""
        place = (step - stages) % count
        before = jax.lax.dynamic_index_in_dim(held, place, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(held, jnp.where(step >= stages, arrived, before), place, 0)

    def body(carry: Any, step: jax.Array) -> Any:
        held, arrived = carry
        held = kept(held, arrived, step)
        pair = step - index  # Below 0 and from R M on, this device works on what nobody reads.
        first = jax.lax.dynamic_index_in_dim(held, step % count, 0, keepdims=False)
        # With one round they are the same in each step. A slice by an index of the loop is kept for each backward step.
        own = only if rounds == 1 else _item(weights, jnp.clip(pair // count, 0, rounds - 1))
        y, more = stage(own, jnp.where(index == 0, first, arrived), _item(beside, pair % count))
        return (held, jax.lax.ppermute(y, PIPELINE, to_next)), more

    steps = pipeline.steps(stages)
    # Real rows to begin with: their gradients are finite, and nothing comes of them.
    (held, arrived), more = jax.lax.scan(body, (x, x[0]), jnp.arange(steps, dtype=jnp.int32))
    x = kept(held, arrived, steps)  # All results, on the first device.
    return _rows_of(x, stages, count), jax.tree.map(lambda leaf: _layers_of(leaf, stages, count, rounds), more)


def _item(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, 0, keepdims=False), tree)


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


def _microbatches(x: jax.Array, stages: int, count: int) -> jax.Array:
    """The rows of this device [rows, ...] as the microbatches of all devices, [M, rows, ...]."""
    # A gather: all_gather and psum_scatter of arrays with Explicit axes cannot be lowered (JAX 0.12).
    x = _exchanged(jnp.broadcast_to(x[None], (stages, *x.shape)))
    # Other mesh axes cut the rows: each device has a part of every microbatch.
    return _joined(jnp.swapaxes(_split(x, 1, count // stages), 1, 2), 0)


def _rows_of(x: jax.Array, stages: int, count: int) -> jax.Array:
    """The first device's microbatches [M, rows, ...] as each device's rows: the way back from `_microbatches`."""
    x = _exchanged(jnp.swapaxes(_split(x, 0, count // stages), 1, 2))  # [S, rows, M / S, ...], of each device
    return _joined(x[0], 0)


def _layers_of(x: jax.Array, stages: int, count: int, rounds: int) -> jax.Array:
    """What the layers of this device gave in each step [steps, layers, rows, ...] as what all layers gave for its rows."""
    x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(PIPELINE), rounds * count, 0)  # Its own pairs.
    x = _split(_split(x, 0, count), 1, count // stages)  # [R, S, M / S, layers, rows, ...]
    x = _exchanged(jnp.swapaxes(x, 0, 1))  # [S, R, ...], of each device
    x = jnp.moveaxis(x, (1, 3, 4, 2), (0, 2, 3, 4))  # [R, S, layers, rows, M / S, ...]
    return _joined(_joined(_joined(x, 0), 0), 1)


def _dealt(leaf: jax.Array, stages: int, rounds: int) -> jax.Array:
    """The layers of this device [layers, ...], contiguous, as the groups that it works on, [R, layers of a group, ...]."""
    groups = _split(leaf, 0, leaf.shape[0] // rounds)
    if rounds == 1:
        return groups
    index, dealt = jax.lax.axis_index(PIPELINE), jnp.zeros_like(groups)
    for hop in _hops(stages, rounds):
        sent = [0] * stages
        for device, (source, turn) in enumerate(hop):
            sent[source] = (device + stages * turn) % rounds  # Where the source has that group.
        item = _item(groups, jnp.asarray(sent, jnp.int32)[index])
        item = jax.lax.ppermute(item, PIPELINE, [(source, device) for device, (source, _) in enumerate(hop)])
        turn = jnp.asarray([turn for _, turn in hop], jnp.int32)[index]
        dealt = jax.lax.dynamic_update_index_in_dim(dealt, item, turn, 0)
    return dealt


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
