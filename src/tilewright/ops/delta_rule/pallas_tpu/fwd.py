"""The forward kernel of the delta-rule family on TPUs. The package's docstring has the design."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.call import Static
from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.config import DeltaRuleTpuForward
from tilewright.ops.delta_rule.pallas_tpu.blocks import (
    Layout,
    cost,
    input_arrays,
    padded_state,
    pass_chunk,
    split_heads,
    unpadded_state,
    unsupported_reason,
)
from tilewright.ops.delta_rule.pallas_tpu.bwd import backward_heuristic, token_blocks
from tilewright.pallas.tpu.kernel import Kernel, Output


def _heuristic(chip: Chip, call: DeltaRuleCall) -> DeltaRuleTpuForward:
    # The heads that fit the backward kernel. On a v4 more would fit this one, and take longer: KDA with d128 in bfloat16
    # has an estimated floor of 2.08 ms with 2 heads and 2.5 ms with 4, by libtpu 0.0.50.1's schedules.
    return DeltaRuleTpuForward(*token_blocks(chip, call), backward_heuristic(chip, call).heads)


def _forward_kernel(
    *,
    # inputs
    initial_state_ref,  # [1, heads, K, V]
    # outputs
    o_ref,  # [1, block_t, heads * V]
    final_state_ref,  # [1, heads, K, V]
    block_states_ref,  # [1, 1, heads, K, V]: the states before the block, or None
    # scratch
    state_scratch,  # [heads, K, V]
    # static
    layout: Layout,
    # inputs: those of `Layout.input_blocks`
    **input_refs: Any,
):
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        state_scratch[...] = initial_state_ref[0]

    if block_states_ref is not None:
        block_states_ref[0, 0] = state_scratch[...]

    def one_chunk(index: jax.Array, carry: Any) -> Any:
        _, results = pass_chunk(input_refs, index, lambda head: state_scratch[head], layout, outputs=True)
        for pack, (o, after) in zip(layout.packs, results, strict=True):
            for head, state in zip(pack, after, strict=True):
                state_scratch[head] = state
            o_ref[0, layout.tokens_of(index), layout.value_lanes(pack)] = o.astype(o_ref.dtype)
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, one_chunk, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        final_state_ref[0] = state_scratch[...]


def _declaration(layout: Layout, *, save: bool) -> Kernel:
    b, hv, depth, width = layout.b, layout.hv, layout.depth, layout.width
    states = Output((b, layout.num_t, hv, depth, width), layout.block_states_block())
    return Kernel(
        name="delta_rule_forward",
        grid=layout.grid,
        inputs={**layout.input_blocks(), "initial_state": layout.state_block},
        outputs={
            "o": Output((b, layout.t, hv * width), layout.token_block(width, layout.call.v.dtype)),
            "final_state": Output((b, hv, depth, width), layout.state_block),
            "block_states": states if save else None,
        },
        scratch={"state_scratch": pltpu.VMEM((layout.heads, depth, width), jnp.float32)},
    )


def _layout(call: DeltaRuleCall, config: DeltaRuleTpuForward) -> Layout:
    return Layout(call, config.chunk, config.block_chunks, config.heads, config.side_by_side)


def _memory(call: DeltaRuleCall, launch: Launch) -> dict[str, int]:
    layout = _layout(call, launch.config)
    return {"forward": layout.vmem_bytes(_declaration(layout, save=True))}


def _forward(call: DeltaRuleCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Saves the state before each block, [B, num_t, HV, K, V]."""
    layout = _layout(call, launch.config)
    kernel = _declaration(layout, save=save)
    arrays = input_arrays(layout) | {"initial_state": padded_state(call.initial_state, layout)}
    outputs = kernel.run(
        functools.partial(_forward_kernel, layout=layout),
        arrays,
        chip=launch.chip,
        cost=cost(arrays, kernel, flops=layout.flops, transcendentals=layout.b * layout.t * layout.hv * layout.chunk),
    )
    o = split_heads(outputs["o"], layout, layout.hv, call.v.shape[3])
    saved = (outputs["block_states"], Static((layout.chunk, layout.block_chunks)))
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
