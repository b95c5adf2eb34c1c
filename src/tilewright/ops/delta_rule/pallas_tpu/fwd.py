"""The forward kernel of the delta-rule family on TPUs. The package's docstring has the design."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.call import Static
from tilewright.core.chip import LANES, Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleTpuForward
from tilewright.ops.delta_rule.matmul_precision import split
from tilewright.ops.delta_rule.pallas_tpu import intra_chunk
from tilewright.ops.delta_rule.pallas_tpu.blocks import (
    Layout,
    cost,
    input_arrays,
    padded_state,
    split_heads,
    unpadded_state,
    unsupported_reason,
)
from tilewright.ops.delta_rule.pallas_tpu.bwd import block_chunks_that_fit, head_counts, short
from tilewright.ops.delta_rule.pallas_tpu.intra_chunk import CHUNK, PAIR, beside, down_the_rows
from tilewright.pallas.tpu.kernel import Block, Kernel, Output

_INTERLEAVED_HEADS = 16  # Heads times chunks whose work is interleaved: more compile for longer.
_SPILLED = (
    4  # Arrays [C, K] of float32 per chunk and head that registers do not hold: libtpu reports 3.8 for KDA on a v4.
)
# How strong the gates per channel of a chunk are: more than `intra_chunk.MILD` over its tokens; over 8 of them.
_MILD, _STRONG, _EXTREME = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class _Forward:
    """All that the kernel knows when it is traced."""

    layout: Layout
    interleave: int
    """Chunks whose work is interleaved."""

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        return intra_chunk.constants(self.layout.gate, self.layout.precision)

    def scratch(self) -> dict[str, Any]:
        """What is kept of each chunk of a block between the two loops, and the states."""
        layout, chunks, pairs = self.layout, self.layout.block_chunks, len(self.layout.pairs)
        depth, width, heads = layout.depth, layout.width, layout.heads
        operand = jnp.bfloat16 if layout.terms == 2 else jnp.float32
        reads = into = across = strength = None
        if layout.gate == "channel":
            reads = pltpu.VMEM((chunks, heads, 2 * CHUNK, layout.terms * depth), operand)
            across = pltpu.VMEM((chunks, heads, depth, width), jnp.float32)
            strength = None if layout.rounds_only else pltpu.SMEM((chunks,), jnp.int32)
        elif layout.gate == "head":
            into = pltpu.VMEM((chunks, pairs, CHUNK, PAIR * LANES), jnp.float32)
            across = pltpu.VMEM((chunks, pairs, 1, PAIR * LANES), jnp.float32)
        return {
            "state_scratch": pltpu.VMEM((heads, depth, width), jnp.float32),
            "weights_scratch": pltpu.VMEM((chunks, pairs, CHUNK + depth, layout.terms * LANES), operand),
            "reads_scratch": reads,
            "into_scratch": into,
            "across_scratch": across,
            "strength_scratch": strength,
        }


def _if_mild(strongest: list[jax.Array], mild: int, otherwise: int) -> jax.Array:
    """`mild` if none of the sums [1, 1] is above `intra_chunk.MILD`."""
    return jnp.where(jnp.max(functools.reduce(jnp.maximum, strongest)) <= intra_chunk.MILD, mild, otherwise)


def _forward_kernel(
    *,
    # inputs
    q_ref,  # [1, block_t, query_heads * K]
    k_ref,  # [1, block_t, query_heads * K]
    v_ref,  # [1, block_t, heads * V]
    g_ref,  # [1, block_t, heads * K], or None
    rows_ref,  # [1, 1, 1, block_chunks, pairs or 2 pairs, 128]: beta, and one gate per head
    initial_state_ref,  # [1, heads, K, V]
    # outputs
    o_ref,  # [1, block_t, heads * V]
    final_state_ref,  # [1, heads, K, V]
    block_states_ref,  # [1, 1, heads, K, V]: the states before the block, or None
    # scratch, of each chunk of the block
    state_scratch,  # [heads, K, V]: the states
    weights_scratch,  # [block_chunks, pairs, C + K, terms * 128]
    reads_scratch,  # [block_chunks, heads, 2 C, terms * K], or None
    into_scratch,  # [block_chunks, pairs, C, 2 * 128], or None
    across_scratch,  # [block_chunks, heads, K, V] or [block_chunks, pairs, 1, 2 * 128], or None
    strength_scratch,  # [block_chunks] in SMEM: `_STRONG`, `_EXTREME` or neither; or None
    # static
    forward: _Forward,
    # inputs: `_Forward.constants`
    **constant_refs: Any,
):
    layout, precision, pairs = forward.layout, forward.layout.precision, forward.layout.pairs
    masks: Mapping[str, Any] = {name.removesuffix("_ref"): ref for name, ref in constant_refs.items()}
    width = layout.width
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        state_scratch[...] = initial_state_ref[0]

    if block_states_ref is not None:
        block_states_ref[0, 0] = state_scratch[...]

    def of_queries(ref: Any, tokens: Any, pair: tuple[int, ...]) -> jax.Array:
        return beside([ref[0, tokens, layout.key_lanes((layout.query_head(head),))] for head in pair])  # [C, 2 K]

    def scores(indices: list[Any], strength: int) -> list[Any]:
        """The stages of the scores of each pair of heads of each chunk."""
        each = [(index, number, pair) for index in indices for number, pair in enumerate(pairs)]
        sums: list[Any] = [None] * len(each)
        if layout.gate == "head":
            rows = [(index, len(pairs) + number) for index, number, _ in each]
            gates = [rows_ref[0, 0, 0, index, row : row + 1, :] for index, row in rows]  # [1, 128]
            sums = intra_chunk.head_sums(gates, masks, precision)
        stages = []
        for (index, number, pair), of_pair in zip(each, sums, strict=True):
            tokens = layout.tokens_of(index)
            q, k = of_queries(q_ref, tokens, pair), of_queries(k_ref, tokens, pair)
            beta = rows_ref[0, 0, 0, index, number : number + 1, :]  # [1, 128]
            if layout.gate == "channel":
                g = beside([g_ref[0, tokens, layout.key_lanes((head,))] for head in pair])  # [C, 2 K]
                given = (q, k, g, beta, masks, precision)
                if strength == _MILD:
                    stages.append(
                        intra_chunk.channel_gated(*given, finite=intra_chunk.inverts_chunks_together(len(pairs)))
                    )
                else:
                    stages.append(intra_chunk.strongly_gated(*given, any_gate=strength == _EXTREME))
            else:
                stages.append(intra_chunk.head_gated(q, k, of_pair, beta, masks, precision))
        return stages

    def keep(index: Any, results: list[Any]) -> None:
        """Stores what the state passage needs of a chunk."""
        strongest = []
        for number, (pair, (weights, _, *others)) in enumerate(zip(pairs, results, strict=True)):
            weights_scratch[index, number] = weights
            if layout.gate == "head":
                into_scratch[index, number], across_scratch[index, number], *_ = others
            elif layout.gate == "channel":
                reads, across, _, largest = others
                strongest.append(largest)
                for position, head in enumerate(pair):
                    lanes = layout.key_lanes((position,))
                    reads_scratch[index, head] = jnp.concatenate([term[:, lanes] for term in reads], axis=1)
                    across_scratch[index, head] = down_the_rows(across[:, lanes], width)
        if strength_scratch is not None:
            strength_scratch[index] = _if_mild(strongest, _MILD, _STRONG)

    def inside(group: jax.Array, carry: Any) -> Any:
        """What does not depend on the state, of chunks that are worked on together."""
        indices = [group * forward.interleave + n for n in range(forward.interleave)]
        strength = _EXTREME if layout.rounds_only else _MILD
        results = intra_chunk.result_of(intra_chunk.weights(scores(indices, strength), masks, precision))
        for n, index in enumerate(indices):
            keep(index, results[n * len(pairs) : (n + 1) * len(pairs)])
        return carry

    jax.lax.fori_loop(0, layout.block_chunks // forward.interleave, inside, None)

    if strength_scratch is not None:

        def again(strength: int, together: int, group: jax.Array, carry: Any) -> Any:
            """Replaces W of those of the chunks that are worked on together whose gates are as strong as that."""
            indices = [group * together + n for n in range(together)]
            found = functools.reduce(jnp.maximum, [jnp.where(strength_scratch[n] == strength, 1, 0) for n in indices])

            @pl.when(found == 1)
            def _some():
                results = intra_chunk.result_of(intra_chunk.weights(scores(indices, strength), masks, precision))
                for n, index in enumerate(indices):
                    own = results[n * len(pairs) : (n + 1) * len(pairs)]

                    # A chunk's bits depend on no other chunk.
                    @pl.when(strength_scratch[index] == strength)
                    def _this(index: Any = index, own: list[Any] = own) -> None:
                        for number, (weights, *_) in enumerate(own):
                            weights_scratch[index, number] = weights
                        if strength == _STRONG:
                            strength_scratch[index] = _if_mild([largest for *_, largest in own], _STRONG, _EXTREME)

            return carry

        # Extreme gates are found among the strong ones.
        for strength, together in ((_STRONG, math.gcd(forward.interleave, 2)), (_EXTREME, 1)):
            repeat = functools.partial(again, strength, together)
            jax.lax.fori_loop(0, layout.block_chunks // together, repeat, None)

    def passage(index: jax.Array, carry: Any) -> Any:
        """Takes the states through a chunk. All heads advance together, and nothing is stored before all is loaded."""
        tokens = layout.tokens_of(index)
        states = [state_scratch[head] for head in range(layout.heads)]

        def reads(head: int) -> jax.Array:
            if reads_scratch is not None:
                return reads_scratch[index, head]
            lanes = layout.key_lanes((layout.query_head(head),))
            return jnp.concatenate([q_ref[0, tokens, lanes], k_ref[0, tokens, lanes]], axis=0)  # [2 C, K]

        def over_values(ref: Any, head: int) -> jax.Array:
            """[R, 128] of a head as [R, V], for one gate per head."""
            decay = ref[index, head // PAIR, :, slice(head % PAIR * LANES, (head % PAIR + 1) * LANES)]
            return jnp.concatenate([decay] * (width // LANES), axis=1)

        found = [
            intra_chunk.deep_product(reads(head), split(state, precision), precision)  # [2 C, V]
            for head, state in enumerate(states)
        ]
        of_q, of_k = [x[:CHUNK] for x in found], [x[CHUNK:] for x in found]
        if layout.gate == "head":
            into = [over_values(into_scratch, head) for head in range(layout.heads)]
            of_q = [x * decay for x, decay in zip(of_q, into, strict=True)]
            of_k = [x * decay for x, decay in zip(of_k, into, strict=True)]
        both = []
        for number, pair in enumerate(pairs):
            v = [v_ref[0, tokens, layout.value_lanes((head,))].astype(jnp.float32) for head in pair]
            residual = beside([x - of_k[head] for head, x in zip(pair, v, strict=True)])  # [C, 2 V]
            diagonal = tuple(intra_chunk.block_diagonal(term) for term in split(residual, precision))
            both.append(intra_chunk.wide_product(weights_scratch[index, number], diagonal, precision))  # [C + K, 2 V]
        after = []
        for head, state in enumerate(states):
            update = both[head // PAIR][CHUNK:, layout.value_lanes((head % PAIR,))]  # [K, V]
            if layout.gate == "channel":
                state = across_scratch[index, head] * state
            elif layout.gate == "head":
                state = over_values(across_scratch, head) * state
            after.append(state + update)
        for head, state in enumerate(after):
            state_scratch[head] = state
            o = of_q[head] + both[head // PAIR][:CHUNK, layout.value_lanes((head % PAIR,))]
            o_ref[0, tokens, layout.value_lanes((head,))] = (layout.call.scale * o).astype(o_ref.dtype)
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, passage, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        final_state_ref[0] = state_scratch[...]


def _declaration(forward: _Forward, *, save: bool) -> Kernel:
    layout = forward.layout
    b, hv, depth, width = layout.b, layout.hv, layout.depth, layout.width
    states = Output((b, layout.num_t, hv, depth, width), layout.block_states_block())
    return Kernel(
        name="delta_rule_forward",
        grid=layout.grid,
        inputs={
            **layout.sequence_blocks(),
            "rows": layout.rows_block(),
            "initial_state": layout.state_block,
            **{name: Block(x.shape, x.dtype) for name, x in forward.constants.items()},
        },
        outputs={
            "o": Output((b, layout.t, hv * width), layout.token_block(width, layout.call.v.dtype)),
            "final_state": Output((b, hv, depth, width), layout.state_block),
            "block_states": states if save else None,
        },
        scratch=forward.scratch(),
    )


def _planned(call: DeltaRuleCall, config: DeltaRuleTpuForward) -> _Forward:
    layout = Layout(call, config.block_chunks, config.heads)
    return _Forward(layout, math.gcd(config.block_chunks, config.interleave))


def _vmem_bytes(forward: _Forward) -> int:
    layout = forward.layout
    work = _SPILLED * forward.interleave * layout.heads * CHUNK * max(layout.depth, layout.width) * 4
    return _declaration(forward, save=True).vmem_bytes(temporaries=work)


def _heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleTpuForward:
    """The blocks of tokens that fit the backward kernel, and the most heads per block that fit this one."""
    block_chunks = block_chunks_that_fit(chip, call)

    def interleave(heads: int) -> int:
        return 1 if short(call) else 4 if 4 * heads <= _INTERLEAVED_HEADS else 2

    for heads in head_counts(call):
        config = DeltaRuleTpuForward(block_chunks, heads, interleave(heads))
        if _vmem_bytes(_planned(call, config)) <= (chip.vmem_bytes or math.inf):
            return config
    return DeltaRuleTpuForward(block_chunks, 1, interleave(1))


def _memory(call: DeltaRuleCall, launch: Launch) -> dict[str, int]:
    return {"forward": _vmem_bytes(_planned(call, launch.config))}


def _forward(call: DeltaRuleCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Saves the state before each block, [B, num_t, HV, K, V]."""
    forward = _planned(call, launch.config)
    layout = forward.layout
    kernel = _declaration(forward, save=save)
    arrays = input_arrays(layout) | {
        "initial_state": padded_state(call.initial_state, layout),
        **{name: jnp.asarray(x) for name, x in forward.constants.items()},
    }
    exponentials = {"none": 0, "head": 2 * CHUNK, "channel": 2 * layout.depth}[layout.gate]
    outputs = kernel.run(
        functools.partial(_forward_kernel, forward=forward),
        arrays,
        chip=launch.chip,
        cost=cost(arrays, kernel, flops=layout.flops, transcendentals=layout.b * layout.t * layout.hv * exponentials),
    )
    o = split_heads(outputs["o"], layout, layout.hv, call.v.shape[3])
    saved = (outputs["block_states"], Static(layout.block_chunks))
    return (o, unpadded_state(outputs["final_state"], layout)), saved


FORWARD = Pass(
    _forward,
    saved=("B . HV", ""),
    config=DeltaRuleTpuForward,
    heuristic=_heuristic,
    unsupported_reason=unsupported_reason,
    memory=_memory,
    memory_fields="fewer heads or block_chunks",
)
