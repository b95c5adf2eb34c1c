"""The backward kernel of the delta-rule family: one pass over the sequence, from its end to its start.

The forward keeps the state before each block. For a block the kernel goes forth once, making the states before its chunks
and the inverses anew, and leaves them in VMEM; then back, chunk by chunk, pulling do and the state's gradient through the
algebra of chunk.py. The pulling is jax.vjp of that algebra, traced inside the kernel: products have hand-written
gradients (products.py), and so have the inverse and the decays (chunk.py), so what is traced is what one would write.

Floor: q, k, v, g, beta and do read once, their gradients written once. Here: that, the states before the blocks (4 K V
bytes for block_t tokens and a head), and the gates once more as rows and columns. Products: the scores and inverses of a
chunk once, its state passage once forth and, of the forward's products, twice as many back.

Where a query head serves more value heads than a block holds, its gradients are written in parts, and summed by XLA.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.delta_rule.chunk import LOWEST_GATE, Chunk, advance, decay_of, inverses, scores
from tilewright.ops.delta_rule.pallas_tpu_blocks import (
    Layout,
    Operands,
    apart,
    chunk_of,
    layout_of,
    padded_state,
    prepare,
    side_by_side,
)

# Twice the forward's would quadruple a product of which only the diagonal blocks count.
_SIDE_BY_SIDE = 2


def _backward_kernel(*refs: Any, layout: Layout, scale: float):
    names = (
        # inputs
        *layout.inputs,
        "starts",  # [1, 1, heads, K, V]: the states before the block
        "d_o",  # [1, block_t, heads * V]
        "d_final_state",  # [1, heads, K, V]
        # outputs
        "d_q",  # [1, block_t, query_heads * K]
        "d_k",
        "d_v",  # [1, block_t, heads * V]
        "d_beta",  # [1, 1, block_t, heads]
        *(("d_g",) if layout.gate != "none" else ()),
        "d_initial_state",  # [1, heads, K, V]
        # scratch
        "d_state_scratch",  # [heads, K, V]
        "state_scratch",  # [block_chunks + 1, heads, K, V]: the states before each chunk, and after the last
        "inverse_scratch",  # [block_chunks, packs, C, n C]
    )
    ref = dict(zip(names, refs, strict=True))
    d_state_scratch, state_scratch = ref["d_state_scratch"], ref["state_scratch"]
    inverse_scratch = ref["inverse_scratch"]
    step = pl.program_id(2)
    how = layout.how

    @pl.when(step == 0)
    def _start():
        d_state_scratch[...] = ref["d_final_state"][0]

    state_scratch[0] = ref["starts"][0, 0]

    packs, n = layout.packs, len(layout.packs[0])

    # As in the forward kernel, all loads of a step come before all its stores.
    def forth(index: jax.Array, carry: Any) -> Any:
        """The states before each chunk, and the inverses, once more."""
        chunks = [chunk_of(ref, index, pack, layout, widen=False) for pack in packs]
        before = [tuple(state_scratch[index, head] for head in pack) for pack in packs]
        decays = [decay_of(chunk, how) for chunk in chunks]
        erase = [scores(c, d, scale=scale, how=how)[1] for c, d in zip(chunks, decays, strict=True)]
        inverted = inverses(erase, chunks[0].mask, n, how, pltpu.roll)
        results = [
            advance(s, c, d, None, e, i, scale=scale, how=how)[1]
            for s, c, d, e, i in zip(before, chunks, decays, erase, inverted, strict=True)
        ]
        for position, (pack, after) in enumerate(zip(packs, results, strict=True)):
            inverse_scratch[index, position] = inverted[position]
            for head, state in zip(pack, after, strict=True):
                state_scratch[index + 1, head] = state
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, forth, None)

    def back(reverse: jax.Array, carry: Any) -> Any:
        index = layout.block_chunks - 1 - reverse
        tokens = layout.tokens_of(index)
        chunks = [chunk_of(ref, index, pack, layout, widen=True) for pack in packs]
        before = [tuple(state_scratch[index, head] for head in pack) for pack in packs]
        inverted = [inverse_scratch[index, position] for position in range(len(packs))]
        d_o = [ref["d_o"][0, tokens, layout.value_lanes(pack)].astype(jnp.float32) for pack in packs]  # each [C, n V]
        d_after = [tuple(d_state_scratch[head] for head in pack) for pack in packs]

        def forward(states: Any, differentiated: Any, chunk: Chunk, inverted: jax.Array) -> Any:
            q, k, v, beta, g = differentiated
            given = dataclasses.replace(chunk, q=q, k=k, v=v, beta=beta, g=g)
            decay = decay_of(given, how)
            read, erase = scores(given, decay, scale=scale, how=how)
            return advance(states, given, decay, read, erase, inverted, scale=scale, how=how)

        gradients = []
        for states, chunk, inverse, d_out, d_states in zip(before, chunks, inverted, d_o, d_after, strict=True):
            differentiated = (chunk.q, chunk.k, chunk.v, chunk.beta, chunk.g)
            _, pull = jax.vjp(functools.partial(forward, chunk=chunk, inverted=inverse), states, differentiated)
            gradients.append(pull((d_out, d_states)))

        d_queries: dict[str, list[Any]] = {name: [None] * layout.query_heads for name in ("d_q", "d_k")}
        for pack, (d_before, (d_q, d_k, d_v, d_beta, d_g)) in zip(packs, gradients, strict=True):
            for head, d_state in zip(pack, d_before, strict=True):
                d_state_scratch[head] = d_state
            for place, head in enumerate(pack):
                lanes, at = layout.key_lanes((place,)), layout.query_head(head)
                for name, part in (("d_q", d_q), ("d_k", d_k)):
                    so_far = d_queries[name][at]
                    d_queries[name][at] = part[:, lanes] if so_far is None else so_far + part[:, lanes]
            ref["d_v"][0, tokens, layout.value_lanes(pack)] = d_v.astype(ref["d_v"].dtype)
            ref["d_beta"][0, 0, tokens, pack[0] : pack[-1] + 1] = d_beta
            if layout.gate == "head":
                lanes = slice(pack[0] * layout.chunk, (pack[-1] + 1) * layout.chunk)
                ref["d_g"][0, 0, 0, index, :, lanes] = d_g
            elif layout.gate == "channel":
                ref["d_g"][0, tokens, layout.key_lanes(pack)] = d_g
        for name, totals in d_queries.items():
            for head, total in enumerate(totals):
                ref[name][0, tokens, layout.key_lanes((head,))] = total.astype(ref[name].dtype)
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, back, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        ref["d_initial_state"][0] = d_state_scratch[...]


def backward(
    operands: Operands, starts: jax.Array, d_o: jax.Array, d_final_state: jax.Array, *, scale: float, launch: Launch
) -> Operands:
    """The gradient of every operand, given the states before each block [B, num_t, HV, K, V]."""
    layout = layout_of(operands, launch.config, side_by_side=_SIDE_BY_SIDE, keep=True)
    arrays = prepare(operands, layout)
    b, num_t, hv = layout.b, layout.num_t, layout.hv
    depth, width, heads = layout.depth, layout.width, layout.heads
    like = operands.v
    # Where a query head serves more value heads than a block has, its gradient comes in parts, and is summed outside.
    parts = max(1, layout.shared // heads)
    of_queries = operands.q.dtype if parts == 1 else jnp.float32

    def order(t: Any) -> Any:
        return num_t - 1 - t

    state_spec = pl.BlockSpec((1, heads, depth, width), lambda i, j, t: (i, j, 0, 0))
    starts_spec = pl.BlockSpec((1, 1, heads, depth, width), lambda i, j, t: (i, order(t), j, 0, 0))
    query_lanes = layout.query_heads * depth
    query_spec = pl.BlockSpec((1, layout.block_t, query_lanes), lambda i, j, t: (i, order(t), j))
    queries = output_like((b, layout.t, layout.groups * query_lanes), of_queries, like)
    out = {
        "d_q": (queries, query_spec),
        "d_k": (queries, query_spec),
        "d_v": (output_like((b, layout.t, hv * width), like.dtype, like), layout.spec("v", order)),
        "d_beta": (
            output_like((b, layout.groups, layout.t, heads), jnp.float32, like),
            pl.BlockSpec((1, 1, layout.block_t, heads), lambda i, j, t: (i, j, order(t), 0)),
        ),
    }
    if layout.gate == "head":
        lanes = heads * layout.chunk
        out["d_g"] = (
            output_like((b, layout.groups, num_t, layout.block_chunks, 1, lanes), jnp.float32, like),
            layout.rows_spec(lanes, order),
        )
    elif layout.gate == "channel":
        out["d_g"] = (output_like((b, layout.t, hv * depth), jnp.float32, like), layout.spec("g", order))
    out["d_initial_state"] = (output_like((b, hv, depth, width), jnp.float32, like), state_spec)

    c, n = layout.chunk, len(layout.packs[0])
    inputs = [arrays[name] for name in layout.inputs]
    given = [*inputs, starts, side_by_side(d_o, layout, width), padded_state(d_final_state, layout)]
    out_shape = [shape for shape, _ in out.values()]
    results = pl.pallas_call(
        functools.partial(_backward_kernel, layout=layout, scale=scale),
        out_shape=out_shape,
        grid=(b, layout.groups, num_t),
        in_specs=[
            *(layout.spec(name, order) for name in layout.inputs),
            starts_spec,
            layout.spec("v", order),
            state_spec,
        ],
        out_specs=[spec for _, spec in out.values()],
        scratch_shapes=[
            pltpu.VMEM((heads, depth, width), jnp.float32),
            pltpu.VMEM((layout.block_chunks + 1, heads, depth, width), jnp.float32),
            pltpu.VMEM((layout.block_chunks, len(layout.packs), c, n * c), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=b * layout.t * hv * 6 * (c * (3 * depth + 2 * width) + 3 * depth * width),
            transcendentals=2 * b * layout.t * hv * c,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*given, *out_shape)),
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="delta_rule_backward",
    )(*given)
    d = dict(zip(out, results, strict=True))

    def of_query_heads(x: jax.Array) -> jax.Array:
        x = apart(x, layout, layout.h * parts, layout.true_depth)
        if parts > 1:
            x = jnp.sum(x.reshape(b, layout.true_t, layout.h, parts, layout.true_depth), axis=3)
        return x.astype(operands.q.dtype)

    d_beta = jnp.moveaxis(d["d_beta"], 1, 2).reshape(b, layout.t, hv)[:, : layout.true_t]
    d_g: Any = None
    if layout.gate == "head":
        d_g = d["d_g"].reshape(b, layout.groups, num_t, layout.block_chunks, heads, c)
        d_g = jnp.moveaxis(d_g, (1, 4, 5), (4, 5, 3)).reshape(b, layout.t, hv)[:, : layout.true_t]
    elif layout.gate == "channel":
        d_g = apart(d["d_g"], layout, hv, layout.true_depth)
    if operands.g is not None and d_g is not None:
        # The kernel saw no gate below the lowest.
        d_g = jnp.where(operands.g < LOWEST_GATE, 0.0, d_g)
    return Operands(
        of_query_heads(d["d_q"]),
        of_query_heads(d["d_k"]),
        apart(d["d_v"], layout, hv, layout.true_width),
        d_g,
        d_beta,
        d["d_initial_state"][:, :, : layout.true_depth, : layout.true_width],
        None if operands.resets is None else np.zeros(operands.resets.shape, jax.dtypes.float0),
    )
