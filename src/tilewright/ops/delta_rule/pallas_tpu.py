"""The delta rule and its relatives as Mosaic TPU kernels: the forward one here, the backward one in pallas_tpu_bwd.py.

The algebra of a chunk is chunk.py's, the same that `xla` runs; one kernel serves the three ops. What a gate costs is paid
by the op that has it: without a gate a head's decays are a mask, and only a gate a channel (KDA) scales operands.

Floor: q, k, v, g and beta read once, o written once: 8 D bytes a token and head in bfloat16 for K = V = D (KDA: 4 D more).
Here: that, and the gates once more, as rows and as columns (512 bytes a token for the columns of a block's heads: they
are padded to whole lanes). FLOPs a token and head: 2 C (2 K + 2 V) inside a chunk of C, 6 K V for the state, and the
inverse.

Blocking: grid (B, HV / heads, num_t), the first two in parallel, time in order. A block is 8 chunks of 64 tokens of up to 4
heads. The states [heads, K, V] stay in VMEM scratch for the whole sequence. Heads go side by side in the lanes, so that
the [64, 64] matrices of two fill a register; products of such are with block-diagonal matrices.

Numerics: states, decays, inverses and accumulators in float32. float32 inputs are multiplied in float32 (six passes). On
bfloat16 inputs a product of float32 operands is of their halves, hi hi + lo hi + hi lo, side by side along the depth; a
v6e, 256 deep, does two terms of depth 128 at once.

Limits: K and V are padded to multiples of 128. VMEM bounds heads and chunks of a block; `unsupported_reason` says.

What bounds it, by libtpu 0.0.50.1's schedule for a v6e (K = V = 128, H16, T8192, bfloat16): not one unit, but phases that
follow each other: lanes spread out for the gates and keys transposed (both XLUs full), the decays and scores (VALUs
full), the chain of six products of the inverse (all waiting). MXUs are a quarter busy and VALUs 29 %. To overlap the
inverse of the next chunk with the state passage of this one is what is left to do; keys are transposed twice, too.

Tried, in bundles for one chunk of one head by the same schedule:
- the inverse by products alone, from single tokens up: 774. Ten products follow each other, and the masks of each level
  were made from iotas each time. Blocks of 8 by one substitution for all heads, and masks read from VMEM: 594;
- all loads of a step before all its stores, so that heads may overlap: 562;
- eight heads in a block, four side by side: 501, and twice the code, which doubles the time to compile it;
- a Neumann series for the inverse: shorter, and wrong for like keys (chunk.py).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.axes import Gate, Keys, PerHead, Starts, State, Values
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.manual_axes import output_like
from tilewright.core.target import tpu_interpret_params
from tilewright.ops.delta_rule.chunk import advance, decay_of, inverses, scores
from tilewright.ops.delta_rule.config import PallasTpuConfig
from tilewright.ops.delta_rule.pallas_tpu_blocks import Layout, Operands, apart, chunk_of, layout_of, prepare
from tilewright.ops.delta_rule.pallas_tpu_bwd import backward

Config = PallasTpuConfig

_SIDE_BY_SIDE = 4


def default_config(
    chip: Chip, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float
) -> PallasTpuConfig:
    del k, rest, scale
    _, t, h, depth = q.shape
    hv, width = v.shape[2:]
    channel_gate = g is not None and g.ndim == 4
    return PallasTpuConfig.for_shape(chip, t, h, hv, depth, width, q.dtype.itemsize, channel_gate=channel_gate)


def unsupported_reason(
    launch: Launch, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float
) -> str | None:
    del k, rest, scale
    if q.dtype == jnp.float64:
        return "float64 has no TPU kernel; use float32 or bfloat16, or implementation='xla'"
    config: PallasTpuConfig = launch.config
    h, hv = q.shape[2], v.shape[2]
    group = hv // h
    if hv % config.heads or (config.heads % group and group % config.heads):
        return (
            f"config.heads={config.heads} does not share {h} query heads and {hv} value heads evenly; use a divisor of "
            f"HV={hv} that is a multiple or a divisor of HV / H = {group}, or config=None"
        )
    channel_gate = g is not None and g.ndim == 4
    return config.misfit(launch.chip, q.shape[-1], v.shape[-1], q.dtype.itemsize, channel_gate=channel_gate)


def _forward_kernel(*refs: Any, layout: Layout, scale: float):
    names = (
        *layout.inputs,
        "initial_state",
        "o",
        "final_state",
        *(("starts",) if layout.keep else ()),
        "state_scratch",
    )
    ref = dict(zip(names, refs, strict=True))
    state_scratch = ref["state_scratch"]  # [heads, K, V]
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _start():
        state_scratch[...] = ref["initial_state"][0]

    if layout.keep:
        ref["starts"][0, 0] = state_scratch[...]

    def one_chunk(index: jax.Array, carry: Any) -> Any:
        # All loads before all stores: a store keeps the scheduler from moving later loads before it, and with them all that
        # the next heads could do while these wait for their products.
        packs = layout.packs
        chunks = [chunk_of(ref, index, pack, layout, widen=False) for pack in packs]
        before = [tuple(state_scratch[head] for head in pack) for pack in packs]
        decays = [decay_of(chunk, layout.how) for chunk in chunks]
        matrices = [scores(c, d, scale=scale, how=layout.how) for c, d in zip(chunks, decays, strict=True)]
        inverted = inverses([m[1] for m in matrices], chunks[0].mask, len(packs[0]), layout.how, pltpu.roll)
        results = [
            advance(*given, scale=scale, how=layout.how)
            for given in zip(before, chunks, decays, *zip(*matrices, strict=True), inverted, strict=True)
        ]
        for pack, (o, after) in zip(packs, results, strict=True):
            for head, state in zip(pack, after, strict=True):
                state_scratch[head] = state
            ref["o"][0, layout.tokens_of(index), layout.value_lanes(pack)] = o.astype(ref["o"].dtype)
        return carry

    jax.lax.fori_loop(0, layout.block_chunks, one_chunk, None)

    @pl.when(step == pl.num_programs(2) - 1)
    def _finish():
        ref["final_state"][0] = state_scratch[...]


def _forward(operands: Operands, scale: float, launch: Launch, keep: bool) -> tuple[Any, ...]:
    """o, the final state, and with `keep` the state before each block: [B, num_t, HV, K, V]."""
    layout = layout_of(operands, launch.config, side_by_side=_SIDE_BY_SIDE, keep=keep)
    arrays = prepare(operands, layout)
    b, num_t, hv = layout.b, layout.num_t, layout.hv
    depth, width, heads = layout.depth, layout.width, layout.heads
    like = operands.v
    state_shape = (b, hv, depth, width)
    state_spec = pl.BlockSpec((1, heads, depth, width), lambda i, j, t: (i, j, 0, 0))
    out_shape = [
        output_like((b, layout.t, hv * width), like.dtype, like),
        output_like(state_shape, jnp.float32, like),
    ]
    out_specs = [layout.spec("v", lambda t: t), state_spec]
    if keep:
        out_shape.append(output_like((b, num_t, hv, depth, width), jnp.float32, like))
        out_specs.append(pl.BlockSpec((1, 1, heads, depth, width), lambda i, j, t: (i, t, j, 0, 0)))
    c = launch.config.chunk
    flops = b * layout.t * hv * 2 * (c * (3 * depth + 2 * width) + 3 * depth * width)
    results = pl.pallas_call(
        functools.partial(_forward_kernel, layout=layout, scale=scale),
        out_shape=out_shape,
        grid=(b, hv // heads, num_t),
        in_specs=[*(layout.spec(name, lambda t: t) for name in layout.inputs), state_spec],
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((heads, depth, width), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=launch.chip.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=b * layout.t * hv * c,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays.values(), *out_shape)),
        ),
        interpret=tpu_interpret_params(launch.interpret),
        name="delta_rule_forward",
    )(*(arrays[name] for name in layout.inputs), arrays["initial_state"])
    o, final_state = results[:2]
    return (
        apart(o, layout, hv, layout.true_width),
        final_state[:, :, : layout.true_depth, : layout.true_width],
        *results[2:],
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _delta_rule(operands: Operands, scale: float, launch: Launch) -> tuple[jax.Array, jax.Array]:
    o, final_state = _forward(operands, scale, launch, keep=False)
    return o, final_state


def _keep(operands: Operands, scale: float, launch: Launch) -> tuple[Any, Any]:
    o, final_state, starts = _forward(operands, scale, launch, keep=True)
    return (o, final_state), (operands, starts)


def _pull(scale: float, launch: Launch, saved: Any, cotangents: Any) -> tuple[Operands]:
    operands, starts = saved
    return (backward(operands, starts, *cotangents, scale=scale, launch=launch),)


_delta_rule.defvjp(_keep, _pull)


def delta_rule_pallas_tpu(
    q: Keys,
    k: Keys,
    v: Values,
    g: Gate | None,
    beta: PerHead,
    initial_state: State,
    resets: Starts | None,
    *,
    scale: float,
    launch: Launch,
) -> tuple[Values, State]:
    """All three ops: by the gate, none, one a head or one a key channel."""
    return _delta_rule(Operands(q, k, v, g, beta, initial_state, resets), scale, launch)


gated_delta_rule_pallas_tpu = kda_pallas_tpu = delta_rule_pallas_tpu
