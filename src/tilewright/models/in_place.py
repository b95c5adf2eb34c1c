"""Runs of blocks whose states are updated in place: prompts that are read in chunks, and decoding.

A scan would write every cache anew. Here a loop carries stacks of states, of which each layer updates its part.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.layers.attention import StackedCache, layer_of
from tilewright.models.block import Block, BlockWeights, Run, applied, decoded
from tilewright.ops.attention.decode_layers.api import decode_layers
from tilewright.ops.norm.api import rms_norm

_MOST_UNROLLED = 4
"""Blocks of a turn of the loop over layers, where a token is computed by kernels. A turn costs about 2 us on an H200, next
to 55 us for a block of Qwen3-1.7B. With 7 of its blocks a turn, 64 rows take as long; with all 28, 1 % longer."""


def run_in_place(
    run: Run, weights: Any, x: jax.Array, stacks: Any, segment_ids: jax.Array | None
) -> tuple[jax.Array, Any]:
    """x after the blocks of a run, and their states, which are updated in place.

    A scan would write every cache anew. Here the loop's own counter picks the layer: XLA then passes a kernel the part of a
    stack that it reads, and copies it where the index is anything else.
    """

    def body(carry: Any) -> Any:
        index, x, stacks = carry
        stacks = list(stacks)
        for position, block in enumerate(run.pattern):
            own = jax.tree.map(lambda leaf: layer_of(leaf, index), weights[position])
            x, stacks[position] = _apply_in_place(block, own, x, stacks[position], index, segment_ids)
        return index + 1, x, tuple(stacks)

    _, x, stacks = jax.lax.while_loop(lambda carry: carry[0] < run.count, body, (jnp.int32(0), x, stacks))
    return x, stacks


def _apply_in_place(
    block: Block, weights: BlockWeights, x: jax.Array, stack: Any, index: Any, segment_ids: jax.Array | None
) -> tuple[jax.Array, Any]:
    """x after a block, and the stack of its states with this layer's updated."""
    caches = getattr(stack, "caches", ())
    leaves = _given(stack)
    before = {
        name: StackedCache(leaf, index) if name in caches else layer_of(leaf, index) for name, leaf in leaves.items()
    }
    x, state, _ = applied(block, weights, x, dataclasses.replace(stack, **before), segment_ids)
    after = {
        name: getattr(state, name).stack
        if name in caches
        else jax.lax.dynamic_update_index_in_dim(leaf, getattr(state, name), index, 0, allow_negative_indices=False)
        for name, leaf in leaves.items()
    }
    return x, dataclasses.replace(stack, **after)


def _given(state: Any) -> dict[str, Any]:
    """The arrays of a state that are not None, by name."""
    return {name: leaf for name, leaf in vars(state).items() if leaf is not None}


def decode_in_one_kernel(run: Run, weights: Any, x: jax.Array, stacks: Any) -> tuple[jax.Array, Any] | None:
    """`run_in_place` for a token, where a kernel computes all blocks of a run; None where there is none."""
    (block, *others), (stack, *_) = run.pattern, stacks
    if x.shape[1] != 1 or others or getattr(stack, "length", None) is None:
        return None
    arguments = block.decode_layers_arguments(weights[0], x, stack)
    if arguments is None:
        return None
    y, keys, values = decode_layers(**arguments)
    return y[:, None], (dataclasses.replace(stack, keys=keys, values=values, length=stack.length + 1),)


def blocks_that_decode(
    run: Run, weights: Any, x: jax.Array, stacks: Any, last_norm: tuple[float, float]
) -> tuple[bool, ...]:
    """For each block of a run, whether it has the kernels of `Block.decode` for a token per row.

    None has them where the norm of a block differs in its eps and offset from that behind the last one (`last_norm`): each
    block computes the norm of the next one.
    """

    def of_block(block: Block, weights: BlockWeights, stack: Any) -> bool:
        if hasattr(stack, "caches") and stack.length is None:
            return False
        # Only shapes are looked at: the first layer's parts are not computed.
        own, state = jax.tree.map(lambda leaf: layer_of(leaf, 0), (weights, stack))
        return block.can_decode(own, x, state)

    norms = {(block.eps, block.norm_offset) for block in run.pattern}
    if x.shape[1] != 1 or norms != {last_norm}:
        return (False,) * len(run.pattern)
    return tuple(map(of_block, run.pattern, weights, stacks))


def decode_in_place(
    run: Run, weights: Any, x: jax.Array, stacks: Any, norm: jax.Array, decodes: tuple[bool, ...]
) -> tuple[jax.Array, jax.Array, Any]:
    """`run_in_place` for one token per row, in fewer kernels: x, its norm with the weights `norm`, and the states.

    The kernel that ends a block computes the norm that the next block begins with. A block that does not decode so
    (`decodes`) is applied, and `rms_norm` computes the norm behind it. The blocks that do update the caches of their
    states, or all arrays of a state that has no caches. Their lengths are taken from the first layer of a stack, since all
    have read the same tokens, and are counted outside of the loop. A turn of it is several repeats.
    """
    weights = [
        dataclasses.replace(own, mixer=block.mixer.decode_weights(own.mixer)) if is_decoded else own
        for block, own, is_decoded in zip(run.pattern, weights, decodes, strict=True)
    ]
    following = [own.mixer_norm for own in weights[1:]]
    others = weights[0].mixer_norm[1:]
    dtype = jnp.promote_types(others.dtype, norm.dtype)
    following.append(jnp.concatenate([others.astype(dtype), norm[None].astype(dtype)]))
    most = max(1, _MOST_UNROLLED // len(run.pattern))
    repeats = max(n for n in range(1, min(most, run.count) + 1) if run.count % n == 0)  # Of a turn.
    first = run.pattern[0]
    normalised = functools.partial(rms_norm, eps=first.eps, offset=first.norm_offset)

    def updated(stack: Any, is_decoded: bool) -> dict[str, Any]:
        """The arrays of a stack that the loop carries."""
        return {
            name: leaf
            for name, leaf in _given(stack).items()
            if not is_decoded or name in getattr(stack, "caches", (name,))
        }

    def lengths(stack: Any) -> dict[str, Any]:
        """The length of a state that has one, before the token and behind it."""
        if not hasattr(stack, "length"):
            return {}
        length = stack.length[0]
        return {"length": length, **({"next_length": length + 1} if hasattr(stack, "next_length") else {})}

    known = [lengths(stack) if is_decoded else {} for stack, is_decoded in zip(stacks, decodes, strict=True)]

    def turn(carry: Any) -> Any:
        begin, x, normed, every = carry
        every = list(every)
        for n, (position, block) in itertools.product(range(repeats), enumerate(run.pattern)):
            own, behind = jax.tree.map(
                functools.partial(layer_of, layer=begin + n), (weights[position], following[position])
            )
            if decodes[position]:
                parts = {name: StackedCache(stack, begin + n) for name, stack in every[position].items()}
                before = dataclasses.replace(stacks[position], **known[position], **parts)
                x, normed, after = decoded(block, own, x, normed, before, behind)
                every[position] = {name: getattr(after, name).stack for name in parts}
            else:
                stack = dataclasses.replace(stacks[position], **every[position])
                x, stack = _apply_in_place(block, own, x, stack, begin + n, None)
                normed, every[position] = normalised(x, behind), _given(stack)
        return begin + repeats, x, normed, tuple(every)

    carried = tuple(map(updated, stacks, decodes))
    start = jnp.int32(0), x, normalised(x, weights[0].mixer_norm[0]), carried
    _, x, normed, carried = jax.lax.while_loop(lambda carry: carry[0] < run.count, turn, start)
    states = [
        dataclasses.replace(stack, **({"length": stack.length + 1} if own else {}), **after)
        for stack, own, after in zip(stacks, known, carried, strict=True)
    ]
    return x, normed, tuple(states)
