"""The backward kernel of the delta-rule family on TPUs: one pass over the sequence, from its end to its start.

The forward saves the state before each block. For a block the kernel has the forward's two loops over its chunks, which
recompute T, W, U and the states before the chunks, and leave them in VMEM (intra_chunk.py; U instead of outputs). A third
loop takes the gradient of the state backwards through the chunks, and leaves it, too. A fourth computes the gradients of
q, k, beta and the gates, which each chunk has by itself (gradients.py). As in the forward, the first and the fourth have
the work of several chunks in lock step, and are followed by loops for KDA's strong gates.

Floor: q, k, v, g, beta and do read once, their gradients written once. Here: that, the states before the blocks (4 K V
bytes per block_t tokens and head), and the gates per head and beta as rows.

Where a query head serves more value heads than a block has, its gradients are written in parts, and summed by XLA.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, MIB, Chip
from tilewright.core.dispatch import Unsupported
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleTpuBackward
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.matmul_precision import split
from tilewright.ops.delta_rule.pallas_tpu import gradients, intra_chunk
from tilewright.ops.delta_rule.pallas_tpu.blocks import (
    Layout,
    cost,
    input_arrays,
    merge_heads,
    padded_state,
    per_token,
    split_heads,
    unpadded_state,
    unsupported_reason,
)
from tilewright.ops.delta_rule.pallas_tpu.intra_chunk import (
    CHUNK,
    PAIR,
    Stages,
    beside,
    block_diagonal,
    deep_product,
    down_the_rows,
    from_words,
    in_words,
    result_of,
    side_by_side,
    wide_product,
    words_shape,
)
from tilewright.pallas.tpu.kernel import Block, Kernel, Output

_BLOCK_CHUNKS = 8
# KDA's code for strong gates makes it the kernel that compiles for longest: four heads more take half as long again.
_MOST_HEADS, _MOST_KDA_HEADS = 8, 4
_INTERLEAVE, _SHORT = 2, 8 * CHUNK
_SPILLED = 4  # Arrays [C, K] of float32 per chunk and head that registers do not hold.


def block_chunks_that_fit(chip: Chip, call: DeltaRuleCall) -> int:
    """Chunks per block, for both kernels: what fits this one, which needs more VMEM, with one head."""
    block_chunks = max(1, min(pl.cdiv(call.q.shape[1], CHUNK), _BLOCK_CHUNKS))
    while block_chunks > 1 and _vmem_bytes(_Backward(Layout(call, block_chunks, 1), 1)) > (chip.vmem_bytes or math.inf):
        block_chunks //= 2
    return block_chunks


def head_counts(call: DeltaRuleCall) -> Iterator[int]:
    """Heads per block to try, the most first. They share query heads evenly: whole groups, or parts of one."""
    hv = call.v.shape[2]
    group = hv // call.q.shape[2]
    most = _MOST_KDA_HEADS if call.gate == "channel" else _MOST_HEADS
    return (n for n in range(most, 1, -1) if hv % n == 0 and (n % group == 0 or group % n == 0))


def short(call: DeltaRuleCall) -> bool:
    """Whether a sequence is so short that its kernels had better compile soon: they do without interleaved chunks."""
    return call.q.shape[1] < _SHORT


def backward_heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleTpuBackward:
    """The most heads per block whose kernel fits the chip's VMEM; 1 if none does."""
    interleave = 1 if short(call) else _INTERLEAVE
    for heads in head_counts(call):
        config = DeltaRuleTpuBackward(heads, interleave)
        if _vmem_bytes(_expected(call, Launch(chip, config, None))) <= (chip.vmem_bytes or math.inf):
            return config
    return DeltaRuleTpuBackward(1, interleave)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """All that the kernel knows when it is traced."""

    layout: Layout
    interleave: int
    """Chunks whose work is interleaved."""

    @functools.cached_property
    def constants(self) -> dict[str, Any]:
        return gradients.constants(self.layout.gate, self.layout.precision)

    def scratch(self) -> dict[str, Any]:
        """What is kept of each chunk of a block between the loops, and the states and their gradients."""
        layout = self.layout
        depth, width, heads, terms = layout.depth, layout.width, layout.heads, layout.terms
        each = (layout.block_chunks, len(layout.pairs))

        def kept(*shape: int) -> Any:
            return pltpu.VMEM((*each, *shape), jnp.float32)

        def kept_terms(rows: int, lanes: int, each: tuple[int, ...] = each) -> Any:
            return pltpu.VMEM((*each, *words_shape(rows, lanes, terms)), jnp.uint32 if terms == 2 else jnp.float32)

        gate: dict[str, Any] = dict.fromkeys(
            ("reads", "sums", "across", "into", "pair_decays", "onward", "strength"), None
        )
        if layout.gate == "channel":
            gate["reads"] = kept_terms(2 * CHUNK, PAIR * depth)
            gate["sums"] = kept(CHUNK, PAIR * depth)
            gate["across"] = kept(1, PAIR * depth)
            gate["strength"] = None if layout.rounds_only else pltpu.SMEM((layout.block_chunks,), jnp.int32)
        elif layout.gate == "head":
            gate["into"] = kept(CHUNK, PAIR * LANES)
            gate["across"] = kept(1, PAIR * LANES)
            gate["pair_decays"] = kept(CHUNK, LANES)
            gate["onward"] = kept(1, LANES)
        return {f"{name}_scratch": buffer for name, buffer in gate.items()} | {
            "weights_scratch": kept_terms(2 * CHUNK + depth, LANES),
            "scores_scratch": kept(2 * CHUNK, LANES),
            "u_scratch": kept_terms(CHUNK, PAIR * width),
            "states_scratch": kept_terms(width, depth, (layout.block_chunks, heads)),
            "state_scratch": pltpu.VMEM((heads, depth, width), jnp.float32),
            "d_state_scratch": pltpu.VMEM((len(layout.pairs), width, PAIR * depth), jnp.float32),
            "after_scratch": kept_terms(width, PAIR * depth),
            "residual_scratch": kept_terms(CHUNK, PAIR * width),
            "d_across_scratch": kept(1, PAIR * depth),
        }


def _backward_kernel(
    *,
    # inputs
    q_ref,  # [1, block_t, query_heads * K]
    k_ref,  # [1, block_t, query_heads * K]
    v_ref,  # [1, block_t, heads * V]
    g_ref,  # [1, block_t, heads * K], or None
    rows_ref,  # [1, 1, 1, block_chunks, pairs or 2 pairs, 128]: beta, and one gate per head
    block_states_ref,  # [1, 1, heads, K, V]: the states before the block
    d_o_ref,  # [1, block_t, heads * V]
    d_final_state_ref,  # [1, 1, pairs, V, 2 K]
    # outputs
    d_q_ref,  # [1, block_t, query_heads * K]
    d_k_ref,  # [1, block_t, query_heads * K]
    d_v_ref,  # [1, block_t, heads * V]
    d_g_ref,  # [1, block_t, heads * K], or None
    d_rows_ref,  # [1, 1, 1, block_chunks, pairs or 2 pairs, 128]
    d_initial_state_ref,  # [1, 1, pairs, V, 2 K]
    # scratch, of each chunk and pair of heads of the block; terms of an operand lie side by side, as `in_words` stores them
    reads_scratch,  # [2 C, terms * 2 K]: q above k, as they read the state, for one gate per channel; or None
    sums_scratch,  # [C, 2 K]: of one gate per channel up to each token, or None
    across_scratch,  # [1, 2 K], or [1, 2 * 128] for one gate per head, or None
    into_scratch,  # [C, 2 * 128] for one gate per head, or None
    pair_decays_scratch,  # [C, 128] for one gate per head, or None
    onward_scratch,  # [1, 128] for one gate per head, or None
    strength_scratch,  # [block_chunks] in SMEM: whether the gates per channel of a chunk are strong; or None
    weights_scratch,  # [2 C + K, terms * 128]: the outputs' part of W, T, and the state's part of W
    scores_scratch,  # [2 C, 128]: M above A
    u_scratch,  # [C, terms * 2 V]
    states_scratch,  # [V, terms * K] per chunk and head: the states before, transposed
    state_scratch,  # [heads, K, V]: the states
    d_state_scratch,  # [pairs, V, 2 K]: their gradients
    after_scratch,  # [V, terms * 2 K]: `gradients.Reversed`
    residual_scratch,  # [C, terms * 2 V]
    d_across_scratch,  # [1, 2 K]
    # static
    backward: _Backward,
    # inputs: `_Backward.constants`
    **constant_refs: Any,
):
    layout = backward.layout
    precision, pairs, gate, terms = layout.precision, layout.pairs, layout.gate, layout.terms
    masks: Mapping[str, Any] = {name.removesuffix("_ref"): ref for name, ref in constant_refs.items()}
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        d_state_scratch[...] = d_final_state_ref[0, 0]

    def of_queries(ref: Any, index: Any, pair: tuple[int, ...]) -> jax.Array:
        tokens = layout.tokens_of(index)
        return beside([ref[0, tokens, layout.key_lanes((layout.query_head(head),))] for head in pair])  # [C, 2 K]

    def of_values(ref: Any, index: Any, pair: tuple[int, ...]) -> jax.Array:
        tokens = layout.tokens_of(index)
        return beside([ref[0, tokens, layout.value_lanes((head,))] for head in pair])  # [C, 2 V]

    def gates_of(index: Any, pair: tuple[int, ...]) -> jax.Array:
        tokens = layout.tokens_of(index)
        return beside([g_ref[0, tokens, layout.key_lanes((head,))] for head in pair])  # [C, 2 K]

    def beta_of(index: Any, number: int) -> jax.Array:
        return rows_ref[0, 0, 0, index, number : number + 1, :]  # [1, 128]

    # The loops over what does not depend on the state.

    def scores(indices: list[Any], *, strong: bool) -> list[Any]:
        """The stages of the scores of each pair of heads of each chunk."""
        each = [(index, number, pair) for index in indices for number, pair in enumerate(pairs)]
        queries = [(of_queries(q_ref, index, pair), of_queries(k_ref, index, pair)) for index, _, pair in each]
        betas = [beta_of(index, number) for index, number, _ in each]
        if gate == "channel":
            gates = [gates_of(index, pair) for index, _, pair in each]
            given = [(*both, g, beta) for both, g, beta in zip(queries, gates, betas, strict=True)]
            if strong:
                return gradients.strong_scores(given, masks, precision)
            finite = intra_chunk.inverts_chunks_together(len(pairs))
            return [intra_chunk.channel_gated(*one, masks, precision, finite=finite) for one in given]
        sums: list[Any] = [None] * len(each)
        if gate == "head":
            rows = [(index, len(pairs) + number) for index, number, _ in each]
            gates = [rows_ref[0, 0, 0, index, row : row + 1, :] for index, row in rows]  # [1, 128]
            sums = intra_chunk.head_sums(gates, masks, precision)
        return [
            intra_chunk.head_gated(*both, x, beta, masks, precision)
            for both, x, beta in zip(queries, sums, betas, strict=True)
        ]

    def keep(index: Any, results: list[Any], *, strong: bool) -> None:
        """Stores what the other loops need of a chunk."""
        strongest = []
        for number, (weights, plain, *others) in enumerate(results):
            weights_scratch[index, number], scores_scratch[index, number] = in_words(weights), plain
            if gate == "head":
                into_scratch[index, number], across_scratch[index, number] = others[:2]
                pair_decays_scratch[index, number], onward_scratch[index, number] = others[2:]
            elif gate == "channel":
                reads, across_scratch[index, number], sums_scratch[index, number], largest = others
                reads_scratch[index, number] = in_words(jnp.concatenate(reads, axis=1))
                strongest.append(largest)
        if strength_scratch is not None and not strong:
            largest = jnp.max(functools.reduce(jnp.maximum, strongest))
            strength_scratch[index] = jnp.where(largest <= intra_chunk.MILD, 0, 1)

    def inside(together: int, strong: bool, group: jax.Array, carry: Any) -> Any:
        indices = [group * together + n for n in range(together)]
        results = result_of(intra_chunk.weights(scores(indices, strong=strong), masks, precision, with_inverse=True))
        for n, index in enumerate(indices):
            keep(index, results[n * len(pairs) : (n + 1) * len(pairs)], strong=strong)
        return carry

    def for_chunks(body: Any, together: int) -> None:
        """`body(together, strong, group, carry)` for so many chunks together, and for each with strong gates again."""
        if not layout.rounds_only:
            jax.lax.fori_loop(0, layout.block_chunks // together, functools.partial(body, together, False), None)
        if gate != "channel":
            return

        def again(index: jax.Array, carry: Any) -> Any:
            if strength_scratch is None:
                return body(1, True, index, carry)

            @pl.when(strength_scratch[index] == 1)
            def _strong() -> None:
                body(1, True, index, carry)

            return carry

        jax.lax.fori_loop(0, layout.block_chunks, again, None)

    for_chunks(inside, backward.interleave)

    # The states before each chunk, and the corrected values.

    state_scratch[...] = block_states_ref[0, 0]

    def forwards(index: jax.Array, carry: Any) -> Any:
        states = [state_scratch[head] for head in range(layout.heads)]
        parts = [split(state, precision) for state in states]

        def reads(head: int) -> jax.Array:
            """k as it reads the state, [C, terms * K]."""
            if reads_scratch is None:
                return k_ref[0, layout.tokens_of(index), layout.key_lanes((layout.query_head(head),))]
            own = gradients.terms_of(from_words(reads_scratch[index, head // PAIR])[CHUNK:], terms)
            return jnp.concatenate([x[:, layout.key_lanes((head % PAIR,))] for x in own], axis=1)

        of_k = [deep_product(reads(head), part, precision) for head, part in enumerate(parts)]  # [C, V]
        both = []
        for number, pair in enumerate(pairs):
            found = beside([of_k[head] for head in pair])
            if gate == "head":
                found = found * gradients.over_lanes(into_scratch[index, number], layout.width)
            residual = of_values(v_ref, index, pair).astype(jnp.float32) - found  # [C, 2 V]
            diagonal = tuple(block_diagonal(term) for term in split(residual, precision))
            both.append(
                wide_product(from_words(weights_scratch[index, number])[CHUNK:], diagonal, precision)
            )  # [C + K, 2 V]
        after = []
        for head, state in enumerate(states):
            update = both[head // PAIR][CHUNK:, layout.value_lanes((head % PAIR,))]  # [K, V]
            if gate == "channel":
                row = across_scratch[index, head // PAIR][:, layout.key_lanes((head % PAIR,))]
                state = down_the_rows(row, layout.width) * state
            elif gate == "head":
                lanes = across_scratch[index, head // PAIR][:, head % PAIR * LANES : (head % PAIR + 1) * LANES]
                state = jnp.concatenate([lanes] * (layout.width // LANES), axis=1) * state
            after.append(state + update)
        for head, (part, state) in enumerate(zip(parts, after, strict=True)):
            states_scratch[index, head] = in_words(jnp.concatenate([x.T for x in part], axis=1))
            state_scratch[head] = state
        for number, x in enumerate(both):
            u_scratch[index, number] = in_words(side_by_side(x[:CHUNK], precision))
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, forwards, None)

    # The gradients of the states.

    def backwards(reverse: jax.Array, carry: Any) -> Any:
        index = layout.block_chunks - 1 - reverse
        stages = []
        for number, pair in enumerate(pairs):
            across = None if across_scratch is None else across_scratch[index, number]
            if reads_scratch is not None:
                reads = gradients.terms_of(from_words(reads_scratch[index, number]), terms)
            else:
                across = None if across is None else gradients.over_lanes(across, layout.depth)
                reads = (jnp.concatenate([of_queries(ref, index, pair) for ref in (q_ref, k_ref)], axis=0),)
            stages.append(
                gradients.reverse(
                    after=d_state_scratch[number],
                    d_o=of_values(d_o_ref, index, pair),
                    weights=from_words(weights_scratch[index, number]),
                    reads=reads,
                    states=[gradients.terms_of(from_words(states_scratch[index, head]), terms) for head in pair],
                    across=across,
                    into=None if into_scratch is None else into_scratch[index, number],
                    masks=masks,
                    precision=precision,
                    scale=layout.call.scale,
                )
            )
        results = result_of(intra_chunk.in_lock_step(stages))
        for number, (pair, found) in enumerate(zip(pairs, results, strict=True)):
            d_state_scratch[number], d_across_scratch[index, number] = found.before, found.across
            after_scratch[index, number] = in_words(jnp.concatenate(found.after, axis=1))
            residual_scratch[index, number] = in_words(jnp.concatenate(found.residual, axis=1))
            # The first term is the residual, rounded to the dtype of the inputs.
            d_v_ref[0, layout.tokens_of(index), layout.value_lanes(pair)] = found.residual[0][
                :, : len(pair) * layout.width
            ]
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, backwards, None)

    # The other gradients.

    def given(index: Any, number: int) -> Stages:
        found = yield from gradients.from_states(
            after=gradients.terms_of(from_words(after_scratch[index, number]), terms),
            residual=gradients.terms_of(from_words(residual_scratch[index, number]), terms),
            d_o=of_values(d_o_ref, index, pairs[number]),
            u=gradients.terms_of(from_words(u_scratch[index, number]), terms),
            states=[gradients.terms_of(from_words(states_scratch[index, head]), terms) for head in pairs[number]],
            into=None if into_scratch is None else into_scratch[index, number],
            precision=precision,
            scale=layout.call.scale,
        )
        return gradients.Given(
            q=of_queries(q_ref, index, pairs[number]),
            k=of_queries(k_ref, index, pairs[number]),
            beta=beta_of(index, number),
            scores=scores_scratch[index, number],
            d_across=d_across_scratch[index, number],
            z=found.z,
            d_reads=found.reads,
            d_onward=found.onward,
        )

    def stages_of(index: Any, number: int) -> Stages:
        own = yield from given(index, number)
        if gate == "channel":
            sums, across = sums_scratch[index, number], across_scratch[index, number]
            reads = gradients.terms_of(from_words(reads_scratch[index, number]), terms)
            return (yield from gradients.channel_gradients(own, sums, reads, across, masks, precision))
        decays = onward = None
        if gate == "head":
            decays, onward = pair_decays_scratch[index, number], onward_scratch[index, number]
        return (yield from gradients.head_gradients(own, decays, onward, masks, precision))

    def write(index: Any, results: list[Any]) -> None:
        tokens = layout.tokens_of(index)
        d_queries: list[tuple[Any, list[Any]]] = [(ref, [None] * layout.query_heads) for ref in (d_q_ref, d_k_ref)]
        for number, (pair, (d_q, d_k, d_g, d_beta)) in enumerate(zip(pairs, results, strict=True)):
            for position, head in enumerate(pair):
                lanes, at = layout.key_lanes((position,)), layout.query_head(head)
                for (_, totals), part in zip(d_queries, (d_q, d_k), strict=True):
                    totals[at] = part[:, lanes] if totals[at] is None else totals[at] + part[:, lanes]
            d_rows_ref[0, 0, 0, index, number : number + 1, :] = d_beta
            if gate == "head":
                row = len(pairs) + number
                d_rows_ref[0, 0, 0, index, row : row + 1, :] = d_g
            elif gate == "channel":
                d_g_ref[0, tokens, layout.key_lanes(pair)] = d_g[:, : len(pair) * layout.depth]
        for ref, totals in d_queries:
            for head, total in enumerate(totals):
                ref[0, tokens, layout.key_lanes((head,))] = total.astype(ref.dtype)

    def own_gradients(together: int, strong: bool, group: jax.Array, carry: Any) -> Any:
        indices = [group * together + n for n in range(together)]
        if strong:
            (index,) = indices
            own = result_of(intra_chunk.in_lock_step([given(index, number) for number in range(len(pairs))]))
            each = [(one, gates_of(index, pair)) for one, pair in zip(own, pairs, strict=True)]
            write(index, gradients.strong_gradients(each, masks, precision))
            return carry
        stages = [stages_of(index, number) for index in indices for number in range(len(pairs))]
        results = result_of(intra_chunk.in_lock_step(stages))
        for n, index in enumerate(indices):
            write(index, results[n * len(pairs) : (n + 1) * len(pairs)])
        return carry

    # Its products do not follow each other in long chains: four pairs of heads hide their latency.
    for_chunks(own_gradients, math.gcd(backward.interleave, 1 if len(pairs) >= 4 else 2))

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        d_initial_state_ref[0, 0] = d_state_scratch[...]


def _parts(layout: Layout) -> int:
    """The parts that the gradient of a query head comes in, where it serves more value heads than a block has."""
    return max(1, layout.shared // layout.heads)


def _declaration(backward: _Backward) -> Kernel:
    layout = backward.layout
    call, b, num_t, hv = layout.call, layout.b, layout.num_t, layout.hv
    depth, width, pairs = layout.depth, layout.width, len(layout.pairs)
    query_lanes = layout.query_heads * depth

    def order(t: Any) -> Any:
        return num_t - 1 - t

    values = layout.token_block(width, call.v.dtype, order)
    query_dtype = call.q.dtype if _parts(layout) == 1 else jnp.float32
    query_block = Block((1, layout.block_t, query_lanes), query_dtype, lambda i, j, t: (i, order(t), j))
    queries = Output((b, layout.t, layout.groups * query_lanes), query_block)
    d_g = Output((b, layout.t, hv * depth), layout.token_block(depth, jnp.float32, order))
    d_states = Block((1, 1, pairs, width, PAIR * depth), jnp.float32, lambda i, j, t: (i, j, 0, 0, 0))
    return Kernel(
        name="delta_rule_backward",
        grid=layout.grid,
        inputs={
            **layout.sequence_blocks(order),
            "rows": layout.rows_block(order),
            "block_states": layout.block_states_block(order),
            "d_o": values,
            "d_final_state": d_states,
            **{name: Block(x.shape, x.dtype) for name, x in backward.constants.items()},
        },
        outputs={
            "d_q": queries,
            "d_k": queries,
            "d_v": Output((b, layout.t, hv * width), values),
            "d_g": d_g if layout.gate == "channel" else None,
            "d_rows": Output(layout.rows_shape, layout.rows_block(order)),
            "d_initial_state": Output((b, layout.groups, pairs, width, PAIR * depth), d_states),
        },
        scratch=backward.scratch(),
    )


def _vmem_bytes(backward: _Backward) -> int:
    layout = backward.layout
    work = _SPILLED * backward.interleave * layout.heads * CHUNK * max(layout.depth, layout.width) * 4
    return _declaration(backward).vmem_bytes(temporaries=work)


def _planned(call: DeltaRuleCall, block_chunks: int, config: DeltaRuleTpuBackward) -> _Backward:
    return _Backward(Layout(call, block_chunks, config.heads), math.gcd(block_chunks, config.interleave))


def _expected(call: DeltaRuleCall, launch: Launch) -> _Backward:
    """With the blocks that the forward takes without a config."""
    return _planned(call, block_chunks_that_fit(launch.chip, call), launch.config)


def _transposed_states(state: jax.Array, layout: Layout) -> jax.Array:
    """[B, HV, K, V] as [B, groups, pairs, V, 2 K]."""
    pairs = len(layout.pairs)
    x = padded_state(state, layout).reshape(layout.b, layout.groups, layout.heads, layout.depth, layout.width)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, PAIR * pairs - layout.heads), (0, 0), (0, 0)))
    x = x.reshape(layout.b, layout.groups, pairs, PAIR, layout.depth, layout.width)
    return jnp.transpose(x, (0, 1, 2, 5, 3, 4)).reshape(layout.b, layout.groups, pairs, layout.width, -1)


def _states(x: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `_transposed_states`."""
    pairs = len(layout.pairs)
    x = x.reshape(layout.b, layout.groups, pairs, layout.width, PAIR, layout.depth)
    x = jnp.transpose(x, (0, 1, 2, 4, 5, 3)).reshape(layout.b, layout.groups, -1, layout.depth, layout.width)
    x = x[:, :, : layout.heads].reshape(layout.b, layout.hv, layout.depth, layout.width)
    return unpadded_state(x, layout)


def _backward(call: DeltaRuleCall, saved: Any, cotangents: Any, launch: Launch) -> DeltaRuleCall:
    """From the states before each block, [B, num_t, HV, K, V]."""
    block_states, block_chunks = saved[0], saved[1].value
    d_o, d_final_state = cotangents
    backward = _planned(call, block_chunks, launch.config)
    layout = backward.layout
    b, hv, t = layout.b, layout.hv, call.q.shape[1]
    kernel = _declaration(backward)
    needed, limit = _vmem_bytes(backward), launch.chip.vmem_bytes
    if limit is not None and needed > limit:  # The forward's config was given: dispatch could not know its blocks.
        raise Unsupported(
            f"the backward kernel needs about {pl.cdiv(needed, MIB)} MiB of VMEM for the blocks of {block_chunks} chunks "
            f"of {CHUNK} tokens that the forward saved states for, with {launch.config}, and a {launch.chip.name} has "
            f"{limit // MIB}; use fewer block_chunks in DeltaRuleTpuForward, fewer heads, or implementation='xla'"
        )
    arrays = input_arrays(layout) | {
        "block_states": block_states,
        "d_o": merge_heads(d_o, layout, layout.width),
        "d_final_state": _transposed_states(d_final_state, layout),
        **{name: jnp.asarray(x) for name, x in backward.constants.items()},
    }
    exponentials = {"none": 0, "head": 2 * CHUNK, "channel": 4 * layout.depth}[layout.gate]
    d = kernel.run(
        functools.partial(_backward_kernel, backward=backward),
        arrays,
        chip=launch.chip,
        cost=cost(arrays, kernel, flops=3 * layout.flops, transcendentals=b * layout.t * hv * exponentials),
    )

    def of_query_heads(x: jax.Array) -> jax.Array:
        h, parts, depth = layout.h, _parts(layout), call.q.shape[3]
        x = split_heads(x, layout, h * parts, depth)
        return x if parts == 1 else jnp.sum(x.reshape(b, t, h, parts, depth), axis=3)

    pairs, d_g = len(layout.pairs), None
    if call.gate == "head":
        d_g = per_token(d["d_rows"][..., pairs:, :], layout)
    elif call.gate == "channel":
        d_g = split_heads(d["d_g"], layout, hv, call.q.shape[3])
    if call.g is not None and d_g is not None:
        # The kernel saw no gate below the lowest, and that one in place of a gate before which the state is reset.
        unseen = call.g < LOWEST_GATE
        if call.resets is not None:
            unseen = unseen | (call.resets[:, :, None] if call.gate == "head" else call.resets[:, :, None, None])
        d_g = jnp.where(unseen, 0.0, d_g)
    return call.gradients(
        q=of_query_heads(d["d_q"]),
        k=of_query_heads(d["d_k"]),
        v=split_heads(d["d_v"], layout, hv, call.v.shape[3]),
        g=d_g,
        beta=per_token(d["d_rows"][..., :pairs, :], layout),
        initial_state=_states(d["d_initial_state"], layout),
    )


BACKWARD = Pass(
    _backward,
    config=DeltaRuleTpuBackward,
    heuristic=backward_heuristic,
    unsupported_reason=unsupported_reason,
    memory=lambda call, launch: {"backward": _vmem_bytes(_expected(call, launch))},
    memory_fields="fewer heads",
    reads=("q", "k", "v", "g", "beta", "resets"),
    follows_forward=True,
    note="block_chunks of the forward, which saved one state per block",
)
