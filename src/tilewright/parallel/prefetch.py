"""Layers in a loop whose backward pass gathers weights one repeat ahead: FSDP with prefetch.

A compiler runs the gathers of a loop's body beside the products that do not need them, and starts none before the body
begins: every repeat waits for the weights that it reads first. Forward these are few, the projections of a mixer. Backward
they are most of a layer, those of its MLP. Here the backward loop carries them, gathered: while it differentiates repeat i,
those of repeat i - 1 are gathered.

JAX would differentiate a loop by a loop of its own, so the backward pass is written here. What is saved of a repeat is what
a policy of `jax.checkpoint` says, and never a gathered weight. The gradients of the weights are scattered to where their
shards are.

- Memory: what is carried, once more than without prefetch. What a policy saves is saved per repeat, also where it is the
  same in all of them.
- Exchanges: what is carried is gathered once more than there are repeats. The first repeat has none before it, and gathers
  its own again, since a branch would keep the exchange from running beside the layers.
- It has no forward-mode derivative, and no second one.

Tried and dropped: carrying weights in the forward loop as well. XLA for GPUs then schedules the other gathers of the body
after the carried ones. Of the 386 MB of a layer, 101 MB are gathered beside a product, and 336 MB were (docs/measurements).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from tilewright.core.call import Static
from tilewright.core.partitioning import explicit_axes, placed

FSDP = "fsdp"

Repeat = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""(weights of the layers of one repeat, x, what is beside x) -> x after them, and something more."""


@dataclass(frozen=True)
class _Pullback:
    """How `jax.vjp`'s function of one repeat is rebuilt from what was saved of it."""

    tree: Any
    """Its structure as a pytree, whose leaves are what it saves."""
    given_again: tuple[int | None, ...]
    """For each of these leaves, its place among the arrays that the backward pass has anyway; None where it is saved."""
    types: tuple[Any, ...]
    """Of what a repeat gives beside x."""
    outputs: Any
    """The structure of that."""


def can_prefetch(stacks: Any, x: jax.Array) -> bool:
    """Whether weights [repeats, ...] are cut over "fsdp", and the rows of x too, which then need them whole."""
    leaves = jax.tree.leaves(stacks)
    is_cut = any(FSDP in axes for leaf in leaves for axes in explicit_axes(leaf))
    return is_cut and FSDP in explicit_axes(x)[0] and leaves[0].shape[0] > 1


def run_prefetched(
    repeat: Repeat, stacks: Any, x: jax.Array, beside: Any, *, first: Any, policy: Any
) -> tuple[jax.Array, Any]:
    """x after all repeats, and what each gives beside it, stacked.

    Args:
      repeat: one repeat.
      stacks: weights [repeats, ...], cut over "fsdp" and maybe other Explicit mesh axes.
      x: [B, ...], whose rows are cut over "fsdp".
      beside: arrays that every repeat gets and that have no gradient, such as segment ids; or None.
      first: the weights that the backward pass of a repeat reads first, which are gathered ahead: booleans, a prefix of the
        tree of `stacks`.
      policy: of `jax.checkpoint`, for each repeat.
    """
    leaves, tree = jax.tree.flatten(stacks)
    count = leaves[0].shape[0]
    chosen = zip(leaves, jax.tree.leaves(jax.tree.broadcast(first, stacks)), strict=True)
    ahead = [place for place, (leaf, is_first) in enumerate(chosen) if is_first and _whole_axes(leaf) is not None]

    def looped(stacks: list[jax.Array], x: jax.Array, run: Callable[[list[jax.Array], jax.Array], Any]) -> Any:
        return jax.lax.scan(lambda x, shards: run([_whole(shard) for shard in shards], x), x, stacks)

    def primal(stacks: list[jax.Array], x: jax.Array, beside: Any) -> tuple[jax.Array, Any]:
        return looped(stacks, x, lambda weights, x: repeat(tree.unflatten(weights), x, beside))

    def forward(stacks: list[Any], x: Any, beside: Any) -> tuple[Any, Any]:
        wanted = [place for place, leaf in enumerate(stacks) if leaf.perturbed]
        stacks, x, beside = jax.tree.map(lambda leaf: leaf.value, (stacks, x, beside))
        kept = jax.checkpoint(repeat, policy=policy, prevent_cse=False)

        def run(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
            def of_wanted(chosen: list[jax.Array], x: jax.Array) -> tuple[jax.Array, Any]:
                return kept(tree.unflatten(_merged(wanted, chosen, weights)), x, beside)

            (x, more), pullback = jax.vjp(of_wanted, [weights[place] for place in wanted], x)
            return x, (more, _saved(pullback, [*weights, *jax.tree.leaves(beside)], more))

        x, (more, saved) = looped(stacks, x, run)
        return (x, more), (stacks, beside, saved, Static(tuple(wanted)))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, jax.Array, None]:
        stacks, beside, saved, wanted = kept
        dx, d_more = cotangents
        dx = _zeros(dx.aval) if isinstance(dx, SymbolicZero) else dx
        d_more = [None if isinstance(each, SymbolicZero) else each for each in jax.tree.leaves(d_more)]

        def gathered(index: Any) -> list[jax.Array]:
            index = jnp.maximum(index, 0)
            return [_whole(jax.lax.dynamic_index_in_dim(stacks[place], index, 0, keepdims=False)) for place in ahead]

        def step(carry: Any, given: Any) -> Any:
            (dx, early), (index, shards, saved, d_more) = carry, given
            preceding = gathered(index - 1)
            rest = [None if place in ahead else _whole(shard) for place, shard in enumerate(shards)]
            again = [*_merged(ahead, early, rest), *jax.tree.leaves(beside)]
            gradients, dx = _pulled_back(saved, again, dx, d_more)
            pairs = zip(gradients, wanted.value, strict=True)
            return (dx, preceding), [placed(own, explicit_axes(shards[place])) for own, place in pairs]

        given = jnp.arange(count, dtype=jnp.int32), stacks, saved, d_more
        (dx, _), gradients = jax.lax.scan(step, (dx, gathered(count - 1)), given, reverse=True)
        return _merged(wanted.value, gradients, [None] * len(stacks)), dx, None

    loop = jax.custom_vjp(primal)
    loop.defvjp(forward, backward, symbolic_zeros=True)
    return loop(leaves, x, beside)


def _saved(pullback: Any, again: list[Any], more: Any) -> Any:
    """What `_pulled_back` needs of `jax.vjp`'s function, but for the arrays that it gets again."""
    residuals, tree = jax.tree.flatten(pullback)
    places = {id(leaf): place for place, leaf in enumerate(again)}
    given_again = tuple(places.get(id(leaf)) for leaf in residuals)
    outputs, output_tree = jax.tree.flatten(more)
    how = _Pullback(tree, given_again, tuple(jax.typeof(leaf) for leaf in outputs), output_tree)
    return [leaf for leaf, place in zip(residuals, given_again, strict=True) if place is None], Static(how)


def _pulled_back(saved: Any, again: list[Any], dx: jax.Array, d_more: list[Any]) -> tuple[list[jax.Array], jax.Array]:
    """The gradients of a repeat's weights and of its input. None in `d_more` is a cotangent of zeros."""
    own, how = iter(saved[0]), saved[1].value
    residuals = [next(own) if place is None else again[place] for place in how.given_again]
    cotangents = [_zeros(of) if given is None else given for of, given in zip(how.types, d_more, strict=True)]
    return jax.tree.unflatten(how.tree, residuals)((dx, jax.tree.unflatten(how.outputs, cotangents)))


def _merged(places: Any, own: list[Any], others: list[Any]) -> list[Any]:
    """`others`, with `own` at these places."""
    at = dict(zip(places, own, strict=True))
    return [at.get(place, other) for place, other in enumerate(others)]


def _whole_axes(leaf: jax.Array) -> list[tuple[str, ...]] | None:
    """The mesh axes of a weight without "fsdp"; None where it is not cut over it."""
    axes = explicit_axes(leaf)
    whole = [tuple(axis for axis in each if axis != FSDP) for each in axes]
    return None if whole == axes else whole


def _whole(leaf: jax.Array) -> jax.Array:
    """A weight that is not cut over "fsdp"; other mesh axes stay."""
    axes = _whole_axes(leaf)
    return leaf if axes is None else placed(leaf, axes)


def _zeros(of: Any) -> Any:
    """A cotangent of zeros for a value of this type."""
    if not jnp.issubdtype(of.dtype, jnp.inexact):
        return np.zeros(of.shape, jax.dtypes.float0)
    like = jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=of.sharding)
    return placed(jnp.zeros(of.shape, of.dtype), explicit_axes(like))
