"""`decode_layers` as one persistent Mosaic GPU kernel for Hopper: all layers of a decoder for one token.

For each layer, with the token at position p = length,

    n = norm(x);  q, k, v = rope(norm(n Wq)), rope(norm(n Wk)), n Wv;  keys[p], values[p] <- k, v
    x = x + softmax(q keys^T / sqrt(C)) values Wo
    n = norm(x);  x = x + (silu(n Wgate) * (n Wup)) Wdown

Floor: every weight read once, 2 L D (2 H C + 2 KV C + 3 F) bytes; for Qwen3-1.7B (28 layers, D 2048, H 16, KV 8, C 128,
F 6144) 2.82 GB, 587 us at the 4.8 TB/s of an H200, and 4 L KV C bytes per token in the cache, 25 us for 1,024 of them.

Blocking: one thread block per multiprocessor, and every block has a fixed part of each product (plan.py): some columns, in
pieces of 64, and some rows, in tiles of [128, 64], whose rows are whole cache lines. The producer warpgroup copies tiles
into a pipeline of stages in the order in which they are used, over all phases and layers, as fast as stages are emptied:
weights depend on nothing, so copies go on while the consumers of all blocks wait for each other. The cache is read through
the same stages, 32 keys and values at a time. A layer has five phases; with the parts of a block for Qwen3-1.7B:

    qkv      x, and n = norm(x); n Wq, n Wk and n Wv     128 columns, 1/4 of the rows
    attend   q and k, the new entries of the cache        one KV head, 1/16 of the tiles of its cache
    o        combines the 16 key splits; o Wo             64 columns, 1/4 of the rows
    gate_up  x, and n = norm(x); n Wgate and n Wup        192 columns, 1/2 of the rows
    down     h = silu(gate) * up; h Wdown                 64 columns, 1/4 of the rows

A phase leaves a float32 sum per split, and the blocks that need it wait for each of these words (exchange.py) and add them
up, in order. x is never in global memory: each block adds the sums of `o` and `down` to its own part, which is in the
registers of the consumers. Results are the same bits in every run. Both caches are updated in place.

Numerics: x, the token's heads, the output of attention and h are rounded to bfloat16, as in the separate kernels; what
enters a norm, its result and the weights of the softmax are float32. The token behind a full cache is not written, and x is
NaN then. An infinite number becomes NaN.

Limits: Hopper only. bfloat16 only. One sequence. Two query heads per KV head, of 128 channels, with norms of queries and
keys, all channels rotated. Sizes that a plan can divide: Qwen3-0.6B's and Qwen3-1.7B's. All thread blocks have to be
resident at once, so there are at most as many as the chip has multiprocessors; where another persistent kernel holds some
of them (MPS), a block gives up each wait after about 0.2 s, and results are NaN.

Measured on an H200: 865 us for the 28 layers of Qwen3-1.7B behind 1,024 tokens, and 1.059 ms for a whole step, 70.0 % of
the bandwidth, where separate kernels take 1.635 ms. Qwen3-0.6B: 460 us for the layers by wall time, 0.576 ms for a step.
Errors against float32 are 1.2 to 1.3 times those of plain JAX in bfloat16.

Tried and dropped, microseconds per token for the layers of Qwen3-1.7B by wall time, where the kernel takes 887:

- Blocks that meet at a counter after each phase: 1,081; with 2 or 3 stages in flight 961 and 967. The release fence before
  the counter waits for all copies that are under way.
- Tagged words, but one copy of those that many blocks read: 1,161, and 1,065 with the copies. One hot line took 4,000
  cycles.
- All 12 stages in flight: 945; 5: 932; 3: 979, before the following two.
- The token's heads in float32 in shared memory, and four sums over lanes instead of one that transposes: 979 instead of
  920.
- All words of a warp polled from the start, and not its first one alone: 920 instead of 897.
- Asking the L2 cache for tiles of gate_up ahead of their copies: 1,003.
- One arrival per warp, instead of one per thread, when a stage is emptied: 981.
- Polling with acquire loads instead of relaxed ones: the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.implementation import Launch, Pass
from tilewright.core.manual_axes import vary_alike
from tilewright.ops.attention.decode_layers.call import DecodeLayersCall
from tilewright.ops.attention.decode_layers.pallas_gpu import products
from tilewright.ops.attention.decode_layers.pallas_gpu.attention import attend
from tilewright.ops.attention.decode_layers.pallas_gpu.block import STAGES, Block, Refs, produce
from tilewright.ops.attention.decode_layers.pallas_gpu.plan import (
    CHANNELS,
    COLUMNS,
    CONSUMERS,
    DEPTH,
    HEADS,
    KEYS,
    PHASES,
    WARPS,
    Plan,
    plan_for,
)
from tilewright.ops.attention.decode_layers.pallas_gpu.threads import strided
from tilewright.ops.rope.api import rope_tables
from tilewright.pallas.gpu.elementwise import load, store
from tilewright.pallas.gpu.kernel import compiler_params, interpreted, run_kernel, smem_bytes

_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 112, 32


def _plan(call: DecodeLayersCall, launch: Launch) -> Plan | None:
    layers, d, kv, _ = call.k_proj.shape
    return plan_for(
        layers=layers,
        d=d,
        kv=kv,
        hidden=call.down.shape[1],
        capacity=call.keys.shape[2],
        eps=call.eps,
        norm_offset=call.norm_offset,
        multiprocessors=None if launch.interpret is not None else launch.chip.multiprocessors or 0,
    )


def _unsupported_reason(call: DecodeLayersCall, launch: Launch) -> str | None:
    remedy = "use implementation='reference'"
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; {remedy}"
    b, (_, d, h, c), kv = call.x.shape[0], call.q_proj.shape, call.k_proj.shape[2]
    if b != 1:
        return f"B={b} must be 1 (one token, whose products need no tensor cores); {remedy}"
    if c != CHANNELS or h != HEADS * kv:
        return f"H={h}, KV={kv} and C={c} must be {HEADS} KV query heads of {CHANNELS} channels; {remedy}"
    if call.q_norm is None or call.k_norm is None:
        return f"q_norm or k_norm is None, and it normalises queries and keys; {remedy}"
    if call.theta is not None and call.rotary_dim != c:
        return f"rotary_dim={call.rotary_dim} must be C={c} (both halves of a head rotate); {remedy}"
    if call.keys.shape[2] % KEYS:
        return f"S={call.keys.shape[2]} must be a multiple of {KEYS} (keys of a copy); {remedy}"
    if launch.interpret is None and launch.chip.multiprocessors is None:
        return f"how many multiprocessors the chip has is not known, and all thread blocks must be resident; {remedy}"
    if _plan(call, launch) is None:
        return (
            f"D={d}, KV={kv} and F={call.down.shape[1]} cannot be divided between the {launch.chip.multiprocessors} "
            f"multiprocessors: all thread blocks must be resident and have equal parts of each product; {remedy}"
        )
    return None


def _kernel(*, plan: Plan, phases: tuple[str, ...], completes: bool, **arguments: Any) -> None:
    """`phases` of all layers. With `completes`, x is completed with the last product of the last one."""
    refs = Refs(**arguments)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _() -> None:
        refs.length_smem[0] = refs.length_ref[0]
        plgpu.barrier_arrive(refs.ready)

    plgpu.barrier_wait(refs.ready)
    here = functools.partial(Block.at, refs, plan, phases)

    def consume(layer: Any, carry: Any) -> Any:
        (x, mixer_norm), block = carry, here(layer)
        mlp_norm = mixer_norm if "o" in phases else products.load_norm(block, refs.mlp_norm_ref, layer)
        for phase in phases:
            if phase == "qkv":
                x = products.qkv(block, x, mixer_norm)
            elif phase == "attend":
                attend(block)
            elif phase == "o":
                products.o(block)
                # The weights of the next norm are loaded before the block waits for its input.
                mlp_norm = products.load_norm(block, refs.mlp_norm_ref, layer)
            elif phase == "gate_up":
                x = products.gate_up(block, x, mlp_norm)
            else:
                products.down(block)
                following = jnp.minimum(layer + 1, plan.layers - 1)
                mixer_norm = products.load_norm(block, refs.mixer_norm_ref, following)
        return x, mixer_norm

    @pl.when(lax.axis_index("warpgroup") < CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        block, layout = here(jnp.int32(0)), strided(plan.segment)
        x = load(refs.x_ref.at[pl.ds(block.x_start, plan.segment)], layout)
        norm = products.load_norm(block, refs.mixer_norm_ref, jnp.int32(0))
        if phases:
            x, norm = lax.fori_loop(0, plan.layers, consume, (x, norm))
        block = here(jnp.int32(plan.layers - 1))
        if completes:
            x = products.completed(block, x, "down", block.tag()).astype(jnp.bfloat16)
        writes = (block.part_of("gate_up")[0] == 0) & (block.warpgroup < plan.holders)
        pl.when(writes)(lambda: store(refs.new_x_ref.at[pl.ds(block.x_start, plan.segment)], x, layout))

    @pl.when(lax.axis_index("warpgroup") == CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
        if phases:
            lax.fori_loop(0, plan.layers, lambda layer, _: produce(here(layer)), None)


def _scratch(plan: Plan) -> dict[str, Any]:
    return {
        "ring": plgpu.SMEM((STAGES, DEPTH, COLUMNS), jnp.bfloat16),
        "full": plgpu.Barrier(num_arrivals=DEPTH // KEYS, num_barriers=STAGES),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=STAGES),
        "inputs_smem": plgpu.SMEM((plan.most_inputs,), jnp.float32),
        "warps_smem": plgpu.SMEM((CONSUMERS, CONSUMERS * WARPS, COLUMNS), jnp.float32),
        "heads_smem": plgpu.SMEM((HEADS + 2, CHANNELS), jnp.bfloat16),
        "length_smem": plgpu.SMEM((1,), jnp.int32),
        "ready": plgpu.Barrier(num_arrivals=1),
        "few_smem": plgpu.SMEM((2 * HEADS, CONSUMERS * WARPS), jnp.float32),
        "meeting": plgpu.Barrier(num_arrivals=CONSUMERS) if interpreted() else None,
    }


def _memory(call: DecodeLayersCall, launch: Launch) -> dict[str, int]:
    plan = _plan(call, launch)
    assert plan is not None
    return {"decode_layers": smem_bytes(_scratch(plan))}


def _launched(
    plan: Plan,
    x: jax.Array,
    token: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    state: dict[str, jax.Array],
    phases: tuple[str, ...] = PHASES,
    *,
    completes: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """x [D] and the state after a launch of the kernel."""
    refs = {name: jax.new_ref(value) for name, value in state.items()}
    outputs = run_kernel(
        functools.partial(_kernel, plan=plan, phases=phases, completes=completes),
        name="decode_layers",
        inputs={"x": x, **token, **weights, **refs},
        outputs={"new_x": jax.ShapeDtypeStruct((plan.d,), x.dtype)},
        scratch=_scratch(plan),
        grid={"program": plan.blocks},
        warpgroups=CONSUMERS + 1,
        params=compiler_params(approximate_math=True),
    )
    return outputs["new_x"], {name: jax.freeze(ref) for name, ref in refs.items()}


def _launched_by_phase(
    plan: Plan,
    x: jax.Array,
    token: dict[str, jax.Array],
    weights: dict[str, jax.Array],
    state: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`_launched` for the interpreter, which runs blocks one after another: a launch for each phase of each layer."""
    of_layer = Plan(**{**vars(plan), "layers": 1})

    def layer(carry: Any, own: Any) -> Any:
        (x, mail), (weights, caches) = carry, own
        weights, caches = ({name: value[None] for name, value in each.items()} for each in (weights, caches))
        state = {**caches, "mail": mail}
        for phase in PHASES:
            x, state = _launched(of_layer, x, token, weights, state, (phase,), completes=False)
        mail = state.pop("mail")
        return (x, mail), {name: value[0] for name, value in state.items()}

    mail, caches = state["mail"], {name: value for name, value in state.items() if name != "mail"}
    (x, mail), caches = lax.scan(layer, (x, mail), (weights, caches))
    first = {name: value[:1] for name, value in (weights | caches).items()}
    own = {name: first[name] for name in weights}, {name: first[name] for name in caches} | {"mail": mail}
    x, _ = _launched(of_layer, x, token, *own, (), completes=True)
    return x, {**caches, "mail": mail}


def _forward(
    call: DecodeLayersCall, launch: Launch, *, save: bool
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
    """x [1, D] and both caches."""
    plan = _plan(call, launch)
    assert plan is not None
    layers, d, _, c = call.q_proj.shape
    fits = (call.lengths >= 0) & (call.lengths < plan.capacity)  # [1]
    if call.theta is None:
        cos, sin = jnp.ones((c // 2,), jnp.float32), jnp.zeros((c // 2,), jnp.float32)
    else:
        tables = rope_tables(call.lengths, c, theta=call.theta, scaling=call.scaling)
        cos, sin = (table[0] for table in tables)
    token = {
        "length": jnp.where(fits, call.lengths, plan.capacity),
        "cos": jnp.where(jnp.broadcast_to(fits, cos.shape), cos, jnp.nan),
        "sin": sin,
    }
    weights = {
        "mixer_norm": call.mixer_norm,
        "mlp_norm": call.mlp_norm,
        "q_norm": call.q_norm,
        "k_norm": call.k_norm,
        **{name: getattr(call, name).reshape(layers, d, -1) for name in ("q_proj", "k_proj", "v_proj", "gate_up")},
        "o_proj": call.o_proj.reshape(layers, -1, d),
        "down": call.down,
    }
    mail, _ = vary_alike(jnp.zeros((plan.words,), jnp.float32), call.x)
    state = {"keys": call.keys[:, 0], "values": call.values[:, 0], "mail": mail}
    x, state = (_launched_by_phase if interpreted() else _launched)(plan, call.x[0], token, weights, state)
    return (x[None], state["keys"][:, None], state["values"][:, None]), None


FORWARD = Pass(_forward, unsupported_reason=_unsupported_reason, memory=_memory)
