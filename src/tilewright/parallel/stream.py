"""Gradients of several batches in one stream through the stages of a pipeline: the memory of 1F1B, and one bubble per step.

A step that accumulates gradients has A batches of M microbatches. Here the backward pass of a batch runs beside the forward
pass of the next one. In the numbering of parallel/pipeline.py, with pairs counted through all batches, device s works on
pair k in forward step k + s, and on the k-th backward pair in backward step k + S - 1 - s. The backward line goes from the
last device to the first, and takes the rounds of a block of microbatches in reverse.

    R M + S - 1 forward steps                     the first batch, and the beginning of the second
    A - 1 times: the head of batch i, then        what is after the stages, and the loss: forward and backward
        R M times a forward and a backward step
    the head of the last batch
    R M + S - 1 backward steps

    forward steps = backward steps = R M A + S - 1,  bubble = (S - 1) / (R M A + S - 1)

- Memory: what the backward pass keeps of R M + (R + 1) S - 1 pairs, whatever A is. A batch has R M pairs: with one round
  and M = S this is that of three batches, with M = 4 S of one and a half. Rows before and after the stages are kept of two.
- What a step keeps is what `jax.vjp` of the stage saves, so that policies of `jax.checkpoint` mean what they mean
  elsewhere. Weights are not kept, nor what depends on them alone, such as a slice: it is computed again.
- What is before the stages runs forward a second time for its backward pass.
- With R > 1 weights travel once, and their gradients back once.
- Gradients are summed in float32.
- In bubble steps devices work on rows that are real or zeros, and nothing of their results reaches a sum.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.parallel.pipeline import (
    CUT,
    PIPELINE,
    Line,
    Pipeline,
    Schedule,
    Stage,
    advanced,
    begun,
    by_round,
    dealt,
    item,
    layers_of,
    microbatches_of,
    over_stages,
    own_pairs,
    rows_of,
    schedule_of,
    staged,
    with_item,
)

_LAYERS = P(None, PIPELINE)
"""[layers, rows, ...]"""


@dataclass(frozen=True)
class StagedLoss:
    """The objective of a batch, with the stages in its middle."""

    before: Callable[[Any, Any], tuple[jax.Array, Any, Any]]
    """(weights outside of the stages, a batch) -> x [B, ...], what is beside it, and others that `after` needs."""
    stage: Stage
    after: Callable[[Any, jax.Array, Any, Any, Any], tuple[jax.Array, Any]]
    """(weights outside, x, what the layers of the stages gave beside it [layers, B, ...], others, a batch) -> the
    objective, and its parts."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """What a device has between two batches."""

    forward: Line
    backward: Line
    saved: Any
    """What the backward pass needs of each pair, [pairs, ...]; the pairs take turns."""
    given: Any
    """What the layers gave beside x in the last R M + S - 1 forward steps, [steps, layers, rows, ...]."""
    d_given: Any
    """Its cotangents, for the pairs of two batches, of those leaves that have any."""
    sums: list[Any]
    """The gradients of the weights, [R, layers of a group, ...]."""


class _Differentiated:
    """A stage and its backward pass, traced once: what is between them are arrays that a loop can keep."""

    def __init__(self, stage: Stage, tree: Any, wanted: tuple[int, ...], weights: list[Any], x: Any, beside: Any):
        """`weights` are the leaves of `tree`, for some layers. `wanted` are the places of those that have gradients."""
        treedef: Any = None

        def run(weights: list[Any], x: Any, beside: Any) -> Any:
            nonlocal treedef

            def of_wanted(own: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
                return stage(tree.unflatten(merged(wanted, own, weights)), x, beside)

            (x, given), pullback = jax.vjp(of_wanted, [weights[place] for place in wanted], x)
            residuals, treedef = jax.tree.flatten(pullback)
            return (x, given), residuals

        self._forward, shapes = jax.make_jaxpr(run, return_shape=True)(weights, x, beside)
        self._treedef, (results, residuals) = treedef, shapes
        self._results = jax.tree.structure(results)
        self._types = [jax.typeof(leaf) for leaf in jax.tree.leaves(results)]
        self._derived = [self._is_derived(place, len(weights)) for place in range(len(residuals))]
        """Of each residual, whether it depends on the weights alone."""
        used = [False] * len(self._types) + self._derived
        derived, self._inputs = dce_jaxpr(self._forward.jaxpr, used)
        self._derive = jaxpr_as_fun(self._forward.replace(jaxpr=derived))
        self.saved = [leaf for leaf, is_derived in zip(residuals, self._derived, strict=True) if not is_derived]
        """The shapes of what is saved."""

    def _is_derived(self, place: int, num_weights: int) -> bool:
        outputs = [at == len(self._types) + place for at in range(len(self._forward.jaxpr.outvars))]
        return not any(dce_jaxpr(self._forward.jaxpr, outputs)[1][num_weights:])

    def forward(self, weights: list[Any], x: jax.Array, beside: Any) -> tuple[jax.Array, Any, list[jax.Array]]:
        """x after the stage, what its layers gave, and what is saved."""
        found = jaxpr_as_fun(self._forward)(*weights, x, *jax.tree.leaves(beside))
        x, given = self._results.unflatten(found[: len(self._types)])
        residuals = zip(found[len(self._types) :], self._derived, strict=True)
        return x, given, [leaf for leaf, is_derived in residuals if not is_derived]

    def backward(self, weights: list[Any], saved: list[Any], dx: jax.Array, d_given: list[Any]) -> Any:
        """The gradients of the weights that are wanted, and of x. `d_given` is of the leaves that have cotangents."""
        inputs = [own for own, is_used in zip(weights, self._inputs, strict=False) if is_used]
        derived, kept, own = iter(self._derive(*inputs)), iter(saved), iter([dx, *d_given])
        pullback = self._treedef.unflatten([next(derived) if each else next(kept) for each in self._derived])
        cotangents = [next(own) if _is_float(of) else np.zeros(of.shape, jax.dtypes.float0) for of in self._types]
        return pullback(self._results.unflatten(cotangents))


class _Stages:
    """The passes through the stages, on one device along the pipeline's axis."""

    def __init__(self, stage: Stage, tree: Any, wanted: tuple[int, ...], schedule: Schedule, batches: int):
        self.stage, self.tree, self.wanted, self.schedule, self.batches = stage, tree, wanted, schedule, batches
        self.pairs, self.ahead = schedule.pairs, schedule.pairs + schedule.stages - 1
        """`ahead`: by how many steps the forward pass is ahead of the backward pass."""
        self.slots = Pipeline(schedule.microbatches, schedule.rounds).kept(schedule.stages)
        self.differentiated: Any = None
        """The stage, from the first trace of it."""

    def begin(self, stacks: list[jax.Array], first: Any, second: Any) -> Any:
        """The first batch forward, and the beginning of the second one: (x, beside) of each."""
        weights = [dealt(leaf, self.schedule) for leaf in stacks]
        of_round = by_round(weights)
        batches = [microbatches_of(each, self.schedule) for each in (first, second)]
        held = jax.tree.map(lambda *each: jnp.concatenate(each), *batches)  # [2 M, rows, ...]
        line = begun(held)
        self.differentiated = _Differentiated(self.stage, self.tree, self.wanted, of_round(0), *line.arrived)

        def body(carry: Any, step: jax.Array) -> Any:
            line, slots = carry
            line, (given, saved) = self._forward(of_round, line, step)
            return (line, self._kept(slots, saved, step)), given

        saved = self.differentiated.saved
        slots = [_zeros((self.slots, *leaf.shape), leaf.dtype, [(), *explicit_axes(leaf)]) for leaf in saved]
        (line, slots), given = jax.lax.scan(body, (line, slots), jnp.arange(self.ahead, dtype=jnp.int32))
        state = _State(
            forward=line,
            backward=begun(jnp.zeros_like(held[0])),
            saved=slots,
            given=given,
            d_given=[
                _zeros((2 * self.pairs, *leaf.shape[1:]), leaf.dtype, explicit_axes(leaf)) for leaf in _floats(given)
            ],
            sums=[_zeros(weights[at].shape, jnp.float32, explicit_axes(weights[at])) for at in self.wanted],
        )
        return weights, state, *self._results(state, 0)

    def advance(self, number: Any, weights: Any, state: Any, entered: Any, dx: jax.Array, d_given: Any) -> Any:
        """Batch `number` backward, and the next one forward.

        Args:
          number: of the batch whose cotangents are given, counted from 0.
          weights: of `begin`.
          state: before it.
          entered: (x, beside) of batch `number` + 2.
          dx: the cotangent of what the stages gave for the batch.
          d_given: those of what their layers gave beside it.

        Returns:
          the state, what the stages gave for batch `number` + 1, and the cotangent of x of batch `number` - 1.
        """
        of_round = by_round(weights)
        state = self._turned(number, state, dx, d_given)
        entered = microbatches_of(entered, self.schedule)
        forward = Line(_with_batch(state.forward.held, entered, number), state.forward.arrived)

        def body(carry: Any, step: jax.Array) -> Any:
            forward, backward, slots, sums = carry
            forward, (given, saved) = self._forward(of_round, forward, step + self.ahead)
            slots = self._kept(slots, saved, step + self.ahead)
            backward, sums = self._backward(of_round, backward, slots, state.d_given, sums, step)
            return (forward, backward, slots, sums), given

        steps = number * self.pairs + jnp.arange(self.pairs, dtype=jnp.int32)
        carry = forward, state.backward, state.saved, state.sums
        (forward, backward, slots, sums), given = jax.lax.scan(body, carry, steps)
        given = jax.tree.map(lambda old, new: jnp.concatenate([old[self.pairs :], new]), state.given, given)
        state = dataclasses.replace(state, forward=forward, backward=backward, saved=slots, given=given, sums=sums)
        return state, *self._results(state, number + 1), self._entry(state, number - 1)

    def end(self, weights: Any, state: Any, dx: jax.Array, d_given: Any) -> Any:
        """The last batch backward: the cotangents of x of the last two batches, and the gradients of the weights."""
        of_round, last = by_round(weights), self.batches - 1
        state = self._turned(last, state, dx, d_given)

        def body(carry: Any, step: jax.Array) -> Any:
            backward, sums = carry
            return self._backward(of_round, backward, state.saved, state.d_given, sums, step), None

        steps = last * self.pairs + jnp.arange(self.ahead, dtype=jnp.int32)
        (backward, sums), _ = jax.lax.scan(body, (state.backward, state.sums), steps)
        state = dataclasses.replace(state, backward=backward)
        gradients = [_transposed(lambda leaf: dealt(leaf, self.schedule), _contiguous(own), own) for own in sums]
        return self._entry(state, last - 1), self._entry(state, last), gradients

    def _turned(self, number: Any, state: _State, dx: jax.Array, d_given: list[jax.Array]) -> _State:
        """The state with the cotangents of a batch."""
        held = _with_batch(state.backward.held, microbatches_of(dx, self.schedule), number)
        pairs = [own[: self.pairs] for own in _floats(state.given)]
        own = [
            _transposed(lambda leaf: layers_of(leaf, self.schedule), like, each)
            for like, each in zip(pairs, d_given, strict=True)
        ]
        d_given = _with_batch(state.d_given, own, number)
        return dataclasses.replace(state, backward=Line(held, state.backward.arrived), d_given=d_given)

    def _forward(self, of_round: Any, line: Line, step: jax.Array) -> tuple[Line, Any]:
        """The line after a step, and what the layers gave, and what is saved of it."""

        def work(arrived: Any, pair: jax.Array) -> Any:
            x, beside = arrived
            x, given, saved = self.differentiated.forward(of_round(self.schedule.at(pair)[1]), x, beside)
            return (x, beside), (given, saved)

        return advanced(line, step, work, self.schedule)

    def _kept(self, slots: list[jax.Array], saved: list[jax.Array], step: jax.Array) -> list[jax.Array]:
        return with_item(slots, saved, (step - jax.lax.axis_index(PIPELINE)) % self.slots)

    def _backward(
        self, of_round: Any, line: Line, slots: Any, d_given: Any, sums: list[jax.Array], step: jax.Array
    ) -> tuple[Line, list[jax.Array]]:
        """The line after a step, and the sums of the gradients of the weights."""
        schedule = self.schedule

        def work(dx: jax.Array, pair: jax.Array) -> Any:
            is_real = (pair >= 0) & (pair < self.batches * self.pairs)
            pair = jnp.maximum(pair, 0)  # Before it, nothing was saved.
            turn = schedule.at(pair)[1]
            back = schedule.rounds - 1 - turn
            pair = pair + (back - turn) * schedule.stages  # Its number in the forward pass.
            saved, cotangents = item(slots, pair % self.slots), item(d_given, pair % (2 * self.pairs))
            gradients, dx = self.differentiated.backward(of_round(back), saved, dx, cotangents)
            found = [_added(total, each, is_real) for total, each in zip(item(sums, back), gradients, strict=True)]
            return dx, with_item(sums, found, back)

        return advanced(line, step, work, schedule, backward=True)

    def _results(self, state: _State, number: Any) -> tuple[jax.Array, Any]:
        """What the stages gave for a batch."""
        x = rows_of(_batch(state.forward.held[0], number), self.schedule)
        return x, layers_of(jax.tree.map(lambda leaf: own_pairs(leaf, self.schedule), state.given), self.schedule)

    def _entry(self, state: _State, number: Any) -> jax.Array:
        """The cotangent of what a batch gave to the stages."""
        return rows_of(_batch(state.backward.held, number), self.schedule, first=self.schedule.stages - 1)


def streamed_gradients(
    loss: StagedLoss, outside: Any, stacks: Any, wanted: tuple[int, ...], batches: Any, pipeline: Pipeline
) -> tuple[jax.Array, Any, Any, list[jax.Array]]:
    """The sums over several batches, two or more: of the objective, its parts, and its gradients, in float32.

    Args:
      loss: of a batch.
      outside: the weights outside of the stages that have gradients.
      stacks: the weights of the stages [layers, ...], cut over the mesh axis "pipeline".
      wanted: the places of those leaves of `stacks` that have gradients.
      batches: arrays [A, ...].
      pipeline: with a number of microbatches (`Pipeline.of_rows`).

    Returns:
      the objective, its parts, the gradients of `outside`, and a list of those of the leaves that are wanted.
    """
    count = jax.tree.leaves(batches)[0].shape[0]
    stacks, tree = jax.tree.flatten(staged(stacks))
    schedule = schedule_of(stacks, pipeline)
    stages = _Stages(loss.stage, tree, wanted, schedule, count)

    def entered(number: Any) -> tuple[Any, Any]:
        x, beside, others = loss.before(outside, item(batches, jnp.clip(number, 0, count - 1)))
        return (x, beside), others

    def left(number: Any, x: jax.Array, given: Any, others: Any) -> Any:
        """The head of a batch: its objective, parts and gradients, and its cotangents."""
        parts, whole = jax.tree.flatten((given, others))

        def head(outside: Any, x: jax.Array, floats: list[jax.Array]) -> Any:
            given, others = whole.unflatten(_with_floats(parts, floats))
            return loss.after(outside, x, given, others, item(batches, number))

        objective, pullback, aux = jax.vjp(head, outside, x, _floats(parts), has_aux=True)
        d_outside, dx, d_floats = pullback(jnp.ones_like(objective))
        split = len(_floats(given))
        return (objective, aux, d_outside), dx, d_floats[:split], d_floats[split:]

    def entry(number: Any, dx: jax.Array, d_others: list[jax.Array]) -> Any:
        """The gradients of what is before the stages."""

        def run(outside: Any) -> tuple[jax.Array, list[jax.Array]]:
            x, _, others = loss.before(outside, item(batches, jnp.clip(number, 0, count - 1)))
            return x, _floats(others)

        return jax.vjp(run, outside)[1]((dx, d_others))[0]

    def added(totals: Any, found: Any, is_real: Any = True) -> Any:
        return jax.tree.map(lambda total, own: _added(total, own, is_real), totals, found)

    begin = over_stages(stages.begin, schedule, in_specs=(CUT, CUT, CUT), out_specs=(CUT, CUT, CUT, _LAYERS))
    (first, others), (second, next_others) = entered(0), entered(1)
    weights, state, x, given = begin(stacks, first, second)
    advance = over_stages(
        stages.advance, schedule, in_specs=(P(), CUT, CUT, CUT, CUT, _LAYERS), out_specs=(CUT, CUT, _LAYERS, CUT)
    )

    def body(carry: Any, number: jax.Array) -> Any:
        totals, state, x, given, others, next_others, d_before = carry
        found, dx, d_given, d_others = left(number, x, given, others)
        totals = added(totals, found)
        following, last_others = entered(number + 2)
        state, x, given, dx = advance(number, weights, state, following, dx, d_given)
        totals = (*totals[:2], added(totals[2], entry(number - 1, dx, d_before), number > 0))
        return (totals, state, x, given, next_others, last_others, d_others), None

    shapes = jax.eval_shape(lambda x, given, others: left(0, x, given, others)[0], x, given, others)
    totals = jax.tree.map(lambda of: _zeros(of.shape, jnp.float32, explicit_axes(of)), shapes)
    d_before = [jnp.zeros_like(each) for each in _floats(others)]
    carry = totals, state, x, given, others, next_others, d_before
    carry, _ = jax.lax.scan(body, carry, jnp.arange(count - 1, dtype=jnp.int32))
    totals, state, x, given, others, _, d_before = carry
    found, dx, d_given, d_others = left(count - 1, x, given, others)
    totals = added(totals, found)
    end = over_stages(stages.end, schedule, in_specs=(CUT, CUT, CUT, _LAYERS), out_specs=(CUT, CUT, CUT))
    *entries, gradients = end(weights, state, dx, d_given)
    objective, parts, sums = totals
    for number, dx, own in zip((count - 2, count - 1), entries, (d_before, d_others), strict=True):
        sums = added(sums, entry(number, dx, own))
    return objective, parts, sums, gradients


def merged(places: Any, own: list[Any], others: list[Any]) -> list[Any]:
    """`others`, with `own` at these places."""
    at = dict(zip(places, own, strict=True))
    return [at.get(place, other) for place, other in enumerate(others)]


def _added(total: jax.Array, own: jax.Array, is_real: Any) -> jax.Array:
    """A sum with one more summand, unless that is of a bubble and may be no number."""
    return jnp.where(is_real, total + own.astype(total.dtype), total)


def _transposed(function: Callable[[jax.Array], jax.Array], like: jax.Array, cotangent: jax.Array) -> jax.Array:
    """The transpose of a linear function of an array like this one."""
    return jax.vjp(function, like)[1](cotangent)[0]


def _contiguous(own: jax.Array) -> jax.Array:
    """[R, layers of a group, ...] as something [layers, ...]."""
    _, *axes = explicit_axes(own)
    return _zeros((own.shape[0] * own.shape[1], *own.shape[2:]), own.dtype, axes)


def _batch(held: jax.Array, number: Any) -> jax.Array:
    """A batch of two that take turns [2 n, ...]."""
    size = held.shape[0] // 2
    return jax.lax.dynamic_slice_in_dim(held, number % 2 * size, size, 0)


def _with_batch(tree: Any, own: Any, number: Any) -> Any:
    """Two batches that take turns, with one in its place."""
    return jax.tree.map(
        lambda held, one: jax.lax.dynamic_update_slice_in_dim(held, one, number % 2 * one.shape[0], 0), tree, own
    )


def _is_float(of: Any) -> bool:
    return jnp.issubdtype(of.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    """The leaves that have cotangents."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _with_floats(leaves: list[Any], floats: list[Any]) -> list[Any]:
    own = iter(floats)
    return [next(own) if _is_float(leaf) else leaf for leaf in leaves]


def _zeros(shape: tuple[int, ...], dtype: Any, axes: Any) -> jax.Array:
    return placed(jnp.zeros(shape, dtype), axes)
