"""The delta rule, the gated delta rule and KDA as Mosaic GPU kernels for Hopper.

With chunks of C = 64 tokens, G the sums of the log-decays inside a chunk, decay_ij = exp(G_i - G_j), A_ij = (k_i . k_j)
decay_ij beta_j below the diagonal and P_ij = (q_i . k_j) decay_ij on and below it, a chunk is

    u = (I + A)^-1 (v - diag(exp G) k S)                the corrected values of the tokens, [C, V]
    o = scale (diag(exp G) q S + P diag(beta) u)
    S <- exp(G_C) S + k^T diag(beta exp(G_C - G)) u

With one gate per channel (KDA), decays are inside the sums over channels (sm90_scores.py). With beta on this side of
(I + A)^-1, the backward never divides by it. The stages, each with its own docstring:

    forward     gates                  sm90_gates.py       the decays of each chunk (one gate per head)
                intra-chunk            sm90_inverse.py     (I + A)^-1 (one gate per head)
                                       sm90_scores.py      (I + A)^-1, P and scaled operands (one gate per channel)
                state passage          sm90_states.py      S through the chunks, and o; in splits of T: split_t.py
                                       sm90_narrow_states.py   the same, for few heads with one gate each
    backward    reverse passage        sm90_reverse.py     dS through the chunks, and dv
                gradients              sm90_gradients.py, sm90_channel_gradients.py
                gradients of gates     sm90_gate_gradients.py   (one gate per head)

For the backward, the forward saves per chunk and head of K = V = 128: the state before it (32 KB), u (32 KB) and
(I + A)^-1 (16 KB), and for KDA P beta, q_in, k_in (16 KB each) and k_out (32 KB): 160 KB, 2 GB for H96 T8192. q, k and
v are 48 KB, KDA's g 32 KB. Neither v nor o is read again. With `parts` in the forward's config it saves next to nothing,
and the backward computes the forward again, one part of the sequence after another (in_parts.py).

Floor for K = V = D, in bytes per token and head (bfloat16, KDA's g in float32), and what these kernels move at D = 128:

                    floor                                           here
    forward         8 D: q, k, v read, o written                    14 D: k once more, (I + A)^-1 written and read
                                                                    8 D more to save u and S
    forward, KDA    12 D: and g                                     38 D: scaled operands, (I + A)^-1 and P
    backward        14 D: q, k, v, dO read, dq, dk, dv written      45 D: reverse 17 D, gradients 28 D
    backward, KDA   22 D: and g, dg                                 88 D: reverse 20 D, products 36 D, pairs 32 D

For H96 T8192, the forward's 14 D are 1.4 GB or 0.3 ms of an H200, saving and backward 53 D, 5.3 GB or 1.1 ms. KDA's
forward is 3.8 GB or 0.9 ms, its backward 8.9 GB or 2 ms. FLOPs per chunk of D = 128: 10.5 MFLOP forward, 20 MFLOP with
bf16x3 products; backward 11 products of [64, 64, 128] in the reverse kernel and 14 in the other, 26 MFLOP. One kernel
for both would save reading S and writing and reading dS', and make the sequential part twice as long.

Numerics: accumulators, states, their gradients and decays are float32. A float32 operand is split into bf16x2, and a
product of two such is bf16x3. Only q S takes S rounded: it adds to o alone. Decays of one gate per head are exp of sums
of two parts of the gates, one exact and one small (gates.py). The stages' docstrings say what else is rounded.

Limits: Hopper only, bfloat16 only, K up to 128 (the state is in registers). K is padded to 64 or 128, V and T to
multiples of 64; each padding costs a copy.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from tilewright.core.chip import Chip
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import (
    SM90_NARROW,
    SM90_STATES,
    DeltaRuleSm90Backward,
    DeltaRuleSm90Forward,
)
from tilewright.ops.delta_rule.pallas_gpu import (
    in_parts,
    sm90_channel_gradients,
    sm90_gradients,
    sm90_inverse,
    sm90_reverse,
    sm90_scores,
    sm90_states,
    split_t,
)
from tilewright.ops.delta_rule.pallas_gpu.sm90_channel_gradients import channel_gate_gradients
from tilewright.ops.delta_rule.pallas_gpu.sm90_gates import channel_gates, head_gates
from tilewright.ops.delta_rule.pallas_gpu.sm90_gradients import head_gate_gradients
from tilewright.ops.delta_rule.pallas_gpu.sm90_inverse import inverses
from tilewright.ops.delta_rule.pallas_gpu.sm90_reverse import pass_gradients
from tilewright.ops.delta_rule.pallas_gpu.sm90_scores import scores
from tilewright.ops.delta_rule.pallas_gpu.sm90_states import pass_states
from tilewright.ops.delta_rule.pallas_gpu.tiles import (
    TILE,
    Sizes,
    from_transposed,
    in_chunks,
    padded_keys,
    per_chunk,
    per_token,
    transposed_states,
)
from tilewright.pallas.arrays import padded
from tilewright.pallas.gpu.kernel import smem_bytes
from tilewright.pallas.gpu.wgmma import not_bfloat16

_LARGEST_KEY = 128
# Tokens of a split, and splits of a sequence, below which the second pass costs more than it saves.
_LEAST_SPLIT_TOKENS, _LEAST_SPLITS = 512, 3
_BY_HEAD, _BY_TOKEN = ("gates", "inverse", "decay", "p", "states", "u"), ("q_in", "k_in", "k_out", "starts", "v")
_SAVED_AXES = dict.fromkeys(_BY_HEAD, "B HV") | dict.fromkeys(_BY_TOKEN, "B . HV")


def _forward_unsupported_reason(call: DeltaRuleCall, launch: Launch) -> str | None:
    if call.gate == "channel" and launch.config.block_v == SM90_NARROW:
        return f"block_v={SM90_NARROW} is for one gate per head; use block_v={TILE}"
    return in_parts.unsupported_reason(call, launch.config.parts) or _unsupported_reason(call, launch)


def _unsupported_reason(call: DeltaRuleCall, launch: Launch) -> str | None:
    if (reason := not_bfloat16(call.q)) is not None:
        return reason
    if (k := call.q.shape[-1]) > _LARGEST_KEY:
        return f"K={k} must be {_LARGEST_KEY} at most (the state is in registers); use implementation='xla'"
    if call.v.size == 0:
        return f"v is {list(call.v.shape)}, and there is nothing to launch for; use implementation='xla'"
    return None


def _forward_heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleSm90Forward:
    """Thread blocks that fill the chip about once: narrow ones where wide ones are few, or splits of the sequence."""
    (b, t), (hv, v) = call.q.shape[:2], call.v.shape[2:]
    tiles = pl.cdiv(v, TILE)
    widest = min(tiles, SM90_STATES)
    blocks = b * hv * pl.cdiv(tiles, widest)
    if chip.multiprocessors is None or 2 * blocks > chip.multiprocessors:
        return DeltaRuleSm90Forward(block_v=TILE * widest)
    splits = min(chip.multiprocessors // max(b * hv * tiles, 1), t // _LEAST_SPLIT_TOKENS)
    if splits >= _LEAST_SPLITS:
        return DeltaRuleSm90Forward(block_v=TILE, splits=splits)
    narrow = call.gate != "channel" and b * hv * tiles * TILE // SM90_NARROW <= chip.multiprocessors
    return DeltaRuleSm90Forward(block_v=SM90_NARROW if narrow else TILE)


def _backward_heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleSm90Backward:
    """The forward's blocks. With one gate per head, the gradients' kernel spills less with more registers, and a narrow
    block has room for a third stage: 1.18 -> 1.09 ms for both passes of T8192 with 16 / 32 heads (H200).
    """
    block_v = max(_forward_heuristic(chip, call).block_v, TILE)
    if call.gate == "channel":
        return DeltaRuleSm90Backward(block_v)
    return DeltaRuleSm90Backward(block_v, stages=3 if block_v == TILE else 2, gradient_registers=240)


def _forward_memory(call: DeltaRuleCall, launch: Launch) -> dict[str, int]:
    config: DeltaRuleSm90Forward = launch.config
    sizes, per_channel = Sizes.of(call, config.block_v), call.gate == "channel"
    chunk = sm90_scores.scratch(config.score_chunks) if per_channel else sm90_inverse.scratch(sizes)
    return {
        "score" if per_channel else "inverse": smem_bytes(chunk),
        "split start": smem_bytes(split_t.scratch(sizes.depth)),
        **sm90_states.memory(call, config),
    }


def _forward(call: DeltaRuleCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], Any]:
    config: DeltaRuleSm90Forward = launch.config
    if config.parts > 1:
        return in_parts.forward(call, launch, _forward, save=save)
    sizes, (t, width) = Sizes.of(call, config.block_v), (call.v.shape[1], call.v.shape[3])
    q, k = padded_keys(call.q), padded_keys(call.k)
    v = padded(in_chunks(call.v), 3, max(config.block_v, TILE))
    if call.gate == "channel":
        beta = per_chunk(in_chunks(call.beta))
        chunks = scores(q, k, channel_gates(call), beta, sizes, launch)
        operands = _in_order(chunks | {"v": v}, "q_in", "k_in", "k_out", "v", "inverse", "p", "decay")
    else:
        gates = head_gates(call)
        chunks = {"inverse": inverses(k, gates, sizes), "gates": gates}
        operands = {"q": q, "k": k, "v": v, **chunks}
    outputs = pass_states(call, launch, operands, save=save)
    saved = chunks | {"states": outputs["states"], "u": outputs["u"]} if save else None
    return (outputs["o"][:, :t, :, :width], from_transposed(outputs["final"], call)), saved


def _backward_memory(call: DeltaRuleCall, launch: Launch) -> dict[str, int]:
    config: DeltaRuleSm90Backward = launch.config
    sizes, kernels = Sizes.of(call, config.block_v), {"reverse": sm90_reverse.scratch(call, config)}
    if call.gate == "channel":
        kernels["product"] = sm90_channel_gradients.products_scratch(sizes, config)
        kernels["pair"] = sm90_channel_gradients.pairs_scratch()
    else:
        kernels["gradient"] = sm90_gradients.scratch(sizes, config, gated=call.g is not None)
    return {name: smem_bytes(scratch) for name, scratch in kernels.items()}


def _backward(call: DeltaRuleCall, saved: dict[str, jax.Array], cotangents: Any, launch: Launch) -> DeltaRuleCall:
    if "starts" in saved:
        return in_parts.backward(
            call, saved, cotangents, launch, again=functools.partial(_saved_again, launch), run=_backward
        )
    config: DeltaRuleSm90Backward = launch.config
    (t, depth), width = (call.q.shape[1], call.q.shape[3]), call.v.shape[3]
    # Each pass pads V to whole blocks of its own. What is beyond the narrower one is zeros in the other.
    tiles = min(Sizes.of(call, config.block_v).width, saved["states"].shape[3]) // TILE
    q, k = padded_keys(call.q), padded_keys(call.k)
    d_o = padded(in_chunks(cotangents[0]), 3, config.block_v)
    d_final = transposed_states(cotangents[1], config.block_v)
    if call.gate == "channel":
        operands = _in_order(saved | {"d_o": d_o}, "q_in", "k_in", "k_out", "d_o", "inverse", "p", "decay")
    else:
        operands = {"q": q, "k": k, "d_o": d_o, "inverse": saved["inverse"], "gates": saved["gates"]}
    passed = pass_gradients(call, launch, operands, d_final)
    values = _in_order({"d_o": d_o, **saved, **passed}, "d_o", "d_v", "u", "states", "d_states")
    if call.gate == "channel":
        keys = {"q": q, "k": k, "g": channel_gates(call), "beta": per_chunk(in_chunks(call.beta))}
        d_q, d_k, d_beta, d_g = channel_gate_gradients(call, launch, keys, values, saved["decay"], tiles)
        d_g = d_g[:, :t, :, :depth]
    else:
        inputs = {"q": q, "k": k, **values, "gates": saved["gates"]}
        d_q, d_k, d_beta, d_g = head_gate_gradients(call, launch, inputs, tiles)
        d_g = None if d_g is None else per_token(d_g, t)
    if d_g is not None and call.resets is not None:
        starts = call.resets.astype(bool).reshape(*call.resets.shape, *(1,) * (d_g.ndim - 2))
        d_g = jnp.where(starts, 0.0, d_g)
    return call.gradients(
        q=d_q[:, :t, :, :depth],
        k=d_k[:, :t, :, :depth],
        v=passed["d_v"][:, :t, :, :width],
        g=d_g,
        beta=per_token(d_beta, t),
        initial_state=from_transposed(passed["d_initial"], call),
    )


def _saved_again(launch: Launch, call: DeltaRuleCall) -> dict[str, jax.Array]:
    """What the forward of a call saves, computed in its backward."""
    chip = launch.chip
    return _forward(call, Launch(chip, _forward_heuristic(chip, call), launch.interpret), save=True)[1]


def _in_order(arrays: dict[str, jax.Array], *names: str) -> dict[str, jax.Array]:
    return {name: arrays[name] for name in names}


IMPLEMENTATION = Implementation(
    forward=Pass(
        run=_forward,
        saved=_SAVED_AXES,
        config=DeltaRuleSm90Forward,
        heuristic=_forward_heuristic,
        unsupported_reason=_forward_unsupported_reason,
        memory=_forward_memory,
        memory_fields="fewer stages or score_chunks, or block_v=64",
    ),
    backward=Pass(
        run=_backward,
        config=DeltaRuleSm90Backward,
        heuristic=_backward_heuristic,
        unsupported_reason=_unsupported_reason,
        memory=_backward_memory,
        memory_fields="fewer stages or gradient_stages, or block_v=64",
        reads=("q", "k", "g", "beta", "resets"),
    ),
    architecture=(9, 0),
    dtypes=("bfloat16",),
)
