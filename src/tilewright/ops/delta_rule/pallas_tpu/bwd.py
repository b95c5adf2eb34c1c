"""The backward kernel of the delta-rule family on TPUs: one pass over the sequence, from its end to its start.

The forward saves the state before each block. For a block the kernel first goes forwards, recomputing the states before
its chunks and the inverses, and leaves them in VMEM; then backwards, chunk by chunk, taking do and the gradient of the
state through the algebra of wy_transform.py. The gradient is jax.vjp of that algebra, traced inside the kernel:
products have hand-written gradients (matmul_precision.py), and so have the inverse and the decays, so that what is
traced is what one would write.

Floor: q, k, v, g, beta and do read once, their gradients written once. Here: that, the states before the blocks (4 K V
bytes per block_t tokens and head), and the gates once more as rows and columns. Products: the scores and inverses of a
chunk once, its state passage once forwards and, of the forward's products, twice as many backwards.

Where a query head serves more value heads than a block has, its gradients are written in parts, and summed by XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import MIB, Chip
from tilewright.core.dispatch import Unsupported
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleTpuBackward
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.pallas_tpu.blocks import (
    Layout,
    chunk_of,
    cost,
    input_arrays,
    merge_heads,
    padded_state,
    pass_chunk,
    split_heads,
    unpadded_state,
    unsupported_reason,
)
from tilewright.ops.delta_rule.pallas_tpu.intra_chunk import CHUNK
from tilewright.ops.delta_rule.wy_transform import Chunk, advance, scores
from tilewright.pallas.tpu.kernel import Block, Kernel, Output

_BLOCK_CHUNKS, _MOST_HEADS = 8, 4


def block_chunks_that_fit(chip: Chip, call: DeltaRuleCall) -> int:
    """Chunks per block, for both kernels: what fits this one, which needs more VMEM, with one head."""
    block_chunks = max(1, min(pl.cdiv(call.q.shape[1], CHUNK), _BLOCK_CHUNKS))
    while block_chunks > 1 and _vmem_bytes(Layout(call, CHUNK, block_chunks, 1, 1)) > (chip.vmem_bytes or math.inf):
        block_chunks //= 2
    return block_chunks


def head_counts(call: DeltaRuleCall) -> Iterator[int]:
    """Heads per block to try, the most first. They share query heads evenly: whole groups, or parts of one."""
    hv = call.v.shape[2]
    group = hv // call.q.shape[2]
    return (n for n in range(_MOST_HEADS, 1, -1) if hv % n == 0 and (n % group == 0 or group % n == 0))


def backward_heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleTpuBackward:
    """The most heads per block whose kernel fits the chip's VMEM; 1 if none does."""
    for heads in head_counts(call):
        config = DeltaRuleTpuBackward(heads)
        if _vmem_bytes(_expected_layout(call, Launch(chip, config, None))) <= (chip.vmem_bytes or math.inf):
            return config
    return DeltaRuleTpuBackward(1)


def _expected_layout(call: DeltaRuleCall, launch: Launch) -> Layout:
    """The layout with the blocks that the forward takes without a config."""
    block_chunks = block_chunks_that_fit(launch.chip, call)
    return Layout(call, CHUNK, block_chunks, launch.config.heads, launch.config.side_by_side)


def _backward_kernel(
    *,
    # inputs
    block_states_ref,  # [1, 1, heads, K, V]: the states before the block
    d_o_ref,  # [1, block_t, heads * V]
    d_final_state_ref,  # [1, heads, K, V]
    # outputs
    d_q_ref,  # [1, block_t, query_heads * K]
    d_k_ref,  # [1, block_t, query_heads * K]
    d_v_ref,  # [1, block_t, heads * V]
    d_beta_ref,  # [1, 1, block_t, heads]
    d_g_ref,  # [1, 1, 1, block_chunks, 1, heads * C] or [1, block_t, heads * K], or None
    d_initial_state_ref,  # [1, heads, K, V]
    # scratch
    d_state_scratch,  # [heads, K, V]
    state_scratch,  # [block_chunks + 1, heads, K, V]: the states before each chunk, and after the last
    inverse_scratch,  # [block_chunks, packs, C, n C]
    # static
    layout: Layout,
    # inputs: those of `Layout.input_blocks`
    **input_refs: Any,
):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        d_state_scratch[...] = d_final_state_ref[0]

    state_scratch[0] = block_states_ref[0, 0]

    packs = layout.packs

    def forwards(index: jax.Array, carry: Any) -> Any:
        """Recomputes the states before each chunk, and the inverses."""
        inverted, results = pass_chunk(input_refs, index, lambda head: state_scratch[index, head], layout)
        for position, (pack, after) in enumerate(zip(packs, results, strict=True)):
            inverse_scratch[index, position] = inverted[position]
            for head, state in zip(pack, after, strict=True):
                state_scratch[index + 1, head] = state
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, forwards, None)

    def backwards(reverse: jax.Array, carry: Any) -> Any:
        index = layout.block_chunks - 1 - reverse
        tokens = layout.tokens_of(index)
        # All loads before all stores, as in `pass_chunk`.
        chunks = [chunk_of(input_refs, index, pack, layout, upcast=True) for pack in packs]
        before = [tuple(state_scratch[index, head] for head in pack) for pack in packs]
        inverted = [inverse_scratch[index, position] for position in range(len(packs))]
        d_o = [d_o_ref[0, tokens, layout.value_lanes(pack)].astype(jnp.float32) for pack in packs]  # each [C, n V]
        d_after = [tuple(d_state_scratch[head] for head in pack) for pack in packs]

        def forward(states: Any, differentiated: Any, chunk: Chunk, inverted: jax.Array) -> Any:
            given = dataclasses.replace(chunk, **differentiated)
            decay = given.decay
            return advance(states, given, decay, *scores(given, decay), inverted)

        gradients = []
        for states, chunk, inverse, d_out, d_states in zip(before, chunks, inverted, d_o, d_after, strict=True):
            differentiated = {name: getattr(chunk, name) for name in ("q", "k", "v", "beta", "g")}
            _, pullback = jax.vjp(functools.partial(forward, chunk=chunk, inverted=inverse), states, differentiated)
            gradients.append(pullback((d_out, d_states)))

        d_queries: list[tuple[Any, list[Any]]] = [(ref, [None] * layout.query_heads) for ref in (d_q_ref, d_k_ref)]
        for pack, (d_before, d) in zip(packs, gradients, strict=True):
            for head, d_state in zip(pack, d_before, strict=True):
                d_state_scratch[head] = d_state
            for position, head in enumerate(pack):
                lanes, at = layout.key_lanes((position,)), layout.query_head(head)
                for (_, totals), part in zip(d_queries, (d["q"], d["k"]), strict=True):
                    totals[at] = part[:, lanes] if totals[at] is None else totals[at] + part[:, lanes]
            d_v_ref[0, tokens, layout.value_lanes(pack)] = d["v"].astype(d_v_ref.dtype)
            d_beta_ref[0, 0, tokens, pack[0] : pack[-1] + 1] = d["beta"]
            if layout.call.gate == "head":
                lanes = slice(pack[0] * layout.chunk, (pack[-1] + 1) * layout.chunk)
                d_g_ref[0, 0, 0, index, :, lanes] = d["g"]
            elif layout.call.gate == "channel":
                d_g_ref[0, tokens, layout.key_lanes(pack)] = d["g"]
        for ref, totals in d_queries:
            for head, total in enumerate(totals):
                ref[0, tokens, layout.key_lanes((head,))] = total.astype(ref.dtype)
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, backwards, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        d_initial_state_ref[0] = d_state_scratch[...]


def _parts(layout: Layout) -> int:
    """The parts that the gradient of a query head comes in, where it serves more value heads than a block has."""
    return max(1, layout.shared // layout.heads)


def _declaration(layout: Layout) -> Kernel:
    call, b, num_t, hv = layout.call, layout.b, layout.num_t, layout.hv
    depth, width, heads, chunk = layout.depth, layout.width, layout.heads, layout.chunk
    query_lanes = layout.query_heads * depth

    def order(t: Any) -> Any:
        return num_t - 1 - t

    values = layout.token_block(width, call.v.dtype, order)
    query_dtype = call.q.dtype if _parts(layout) == 1 else jnp.float32
    query_block = Block((1, layout.block_t, query_lanes), query_dtype, lambda i, j, t: (i, order(t), j))
    queries = Output((b, layout.t, layout.groups * query_lanes), query_block)
    d_g = None
    if call.gate == "head":
        shape = (b, layout.groups, num_t, layout.block_chunks, 1, heads * chunk)
        d_g = Output(shape, layout.rows_block(heads * chunk, order))
    elif call.gate == "channel":
        d_g = Output((b, layout.t, hv * depth), layout.token_block(depth, jnp.float32, order))
    d_beta = Block((1, 1, layout.block_t, heads), jnp.float32, lambda i, j, t: (i, j, order(t), 0))
    packs, n = len(layout.packs), len(layout.packs[0])
    return Kernel(
        name="delta_rule_backward",
        grid=layout.grid,
        inputs={
            **layout.input_blocks(order),
            "block_states": layout.block_states_block(order),
            "d_o": values,
            "d_final_state": layout.state_block,
        },
        outputs={
            "d_q": queries,
            "d_k": queries,
            "d_v": Output((b, layout.t, hv * width), values),
            "d_beta": Output((b, layout.groups, layout.t, heads), d_beta),
            "d_g": d_g,
            "d_initial_state": Output((b, hv, depth, width), layout.state_block),
        },
        scratch={
            "d_state_scratch": pltpu.VMEM((heads, depth, width), jnp.float32),
            "state_scratch": pltpu.VMEM((layout.block_chunks + 1, heads, depth, width), jnp.float32),
            "inverse_scratch": pltpu.VMEM((layout.block_chunks, packs, chunk, n * chunk), jnp.float32),
        },
    )


def _vmem_bytes(layout: Layout) -> int:
    return layout.vmem_bytes(_declaration(layout))


def _backward(call: DeltaRuleCall, saved: Any, cotangents: Any, launch: Launch) -> DeltaRuleCall:
    """From the states before each block, [B, num_t, HV, K, V]."""
    block_states, (chunk, block_chunks) = saved[0], saved[1].value
    d_o, d_final_state = cotangents
    layout = Layout(call, chunk, block_chunks, launch.config.heads, launch.config.side_by_side)
    b, num_t, hv, heads, t = layout.b, layout.num_t, layout.hv, layout.heads, call.q.shape[1]
    kernel = _declaration(layout)
    needed, limit = layout.vmem_bytes(kernel), launch.chip.vmem_bytes
    if limit is not None and needed > limit:  # The forward's config was given: dispatch could not know its blocks.
        raise Unsupported(
            f"the backward kernel needs about {pl.cdiv(needed, MIB)} MiB of VMEM for the blocks of {block_chunks} chunks "
            f"of {chunk} tokens that the forward saved states for, with {launch.config}, and a {launch.chip.name} has "
            f"{limit // MIB}; use fewer block_chunks in DeltaRuleTpuForward, fewer heads, or implementation='xla'"
        )
    arrays = input_arrays(layout) | {
        "block_states": block_states,
        "d_o": merge_heads(d_o, layout, layout.width),
        "d_final_state": padded_state(d_final_state, layout),
    }
    d = kernel.run(
        functools.partial(_backward_kernel, layout=layout),
        arrays,
        chip=launch.chip,
        cost=cost(arrays, kernel, flops=3 * layout.flops, transcendentals=2 * b * layout.t * hv * chunk),
    )

    def of_query_heads(x: jax.Array) -> jax.Array:
        h, parts, depth = layout.h, _parts(layout), call.q.shape[3]
        x = split_heads(x, layout, h * parts, depth)
        return x if parts == 1 else jnp.sum(x.reshape(b, t, h, parts, depth), axis=3)

    d_g = None
    if call.gate == "head":
        d_g = d["d_g"].reshape(b, layout.groups, num_t, block_chunks, heads, chunk)
        d_g = jnp.moveaxis(d_g, (1, 4, 5), (4, 5, 3)).reshape(b, layout.t, hv)[:, :t]
    elif call.gate == "channel":
        d_g = split_heads(d["d_g"], layout, hv, call.q.shape[3])
    if call.g is not None and d_g is not None:
        # The kernel saw no gate below the lowest.
        d_g = jnp.where(call.g < LOWEST_GATE, 0.0, d_g)
    return call.gradients(
        q=of_query_heads(d["d_q"]),
        k=of_query_heads(d["d_k"]),
        v=split_heads(d["d_v"], layout, hv, call.v.shape[3]),
        g=d_g,
        beta=jnp.moveaxis(d["d_beta"], 1, 2).reshape(b, layout.t, hv)[:, :t],
        initial_state=unpadded_state(d["d_initial_state"], layout),
    )


BACKWARD = Pass(
    _backward,
    config=DeltaRuleTpuBackward,
    heuristic=backward_heuristic,
    unsupported_reason=unsupported_reason,
    memory=lambda call, launch: {"backward": _vmem_bytes(_expected_layout(call, launch))},
    memory_fields="fewer heads",
    reads=("q", "k", "v", "g", "beta", "resets"),
    follows_forward=True,
    note="chunk and block_chunks of the forward, which saved one state per block",
)
