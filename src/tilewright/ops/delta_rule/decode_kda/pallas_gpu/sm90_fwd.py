"""`decode_kda` as two Mosaic GPU kernels for Hopper: the product with the five large weights, and everything behind it.

For each sequence and head, with the token's x and S [K, K],

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k divided by their lengths
    g = kda_gate(x Wf_down Wf_up, A_log, dt_bias);  beta = sigmoid(x Wb)
    S <- Diag(exp(g)) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)
    y = o / sqrt(mean(o^2) + eps) * norm * sigmoid(x Wg_down Wg_up)

Floor: the weights read once, 2 D (3 H K + 2 R + H) + 4 R H K bytes, and S read and written, 8 K^2 bytes per sequence and
head. For D 2048, H 16 and K = R = 128 that is 27 MB and 2 MB at batch 1, 6.1 us at the 4.8 TB/s of an H200, and 27 MB and
134 MB at batch 64, 34 us. What counts beside it at batch 1 is the number of launches: XLA's program has about 30.

Blocking: the first kernel is pallas/gpu/few_rows.py with the weights of q, k, v and the first factors of decays and gates,
which leaves a float32 sum per split of D. In the second, a thread block of one warpgroup has one head of `rows` sequences,
so that both second factors, 64 KB of a head, are read once for them. It goes through three phases, each for all of its
sequences:

1. The vectors of a head: sums of splits, convolutions, lengths, beta. They go to shared memory, since what is computed
   along the columns of a tile is used along the rows of another one. Every warp computes them, so that sums over a head
   need no other warp. beta is computed here since Wb has one column per head, and the product takes tiles of 128.
2. The products with the second factors, which a thread block holds in registers, and their gates.
3. S, 64 KB per sequence: a bulk copy brings it to shared memory while the previous one is in registers. A warp has 32 rows
   of it, and a thread 4 adjacent columns of these. The sums over rows are inside a thread and then over 4 warps.

`rows` is such that all thread blocks run at once, two per multiprocessor: one waits for memory while the other computes.

All states are updated in place: under `donate_argnums` and in a loop nothing is copied. A layer outside of the stack is not
written.

Numerics: float32 from the products' sums to the results. Only y, and what convolutions keep of the token, are rounded, to
bfloat16. The sigmoids and the softplus are those of pallas/gpu/elementwise.py, within 2 or 3 units in the last place. The
order of sums is fixed: the same bits in every run.

Limits: Hopper only. bfloat16 only. Up to 64 sequences. K = R = 128, D a multiple of 128.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.chip import Chip
from tilewright.core.implementation import Launch, Pass
from tilewright.core.unit_length import unit_length
from tilewright.ops.delta_rule.decode_kda.call import DecodeKdaCall
from tilewright.ops.delta_rule.decode_kda.config import DecodeKdaSm90Forward
from tilewright.pallas.gpu.elementwise import LANES, THREADS, load, sigmoid, softplus, store
from tilewright.pallas.gpu.few_rows import TILE_ROWS, FewRows, unpadded_tiles
from tilewright.pallas.gpu.kernel import compiler_params, run_kernel, smem_bytes
from tilewright.pallas.gpu.scheduler import divmod_nonnegative

_HEAD = 128
"""Channels of a head, and the rank of the gates: the threads of a block, or 4 channels for each lane of a warp."""
_WARPS = THREADS // LANES
_VECTOR = _HEAD // LANES  # Channels of a thread: 16 bytes of float32, the widest access.
_BLOCKS_PER_PROCESSOR = 2  # Registers and shared memory for a tile of 64 KB each.

_SQUARE = plgpu.Layout.TILED(
    plgpu.Tiling(((_HEAD, _HEAD), (_HEAD // _WARPS, _HEAD), (_VECTOR,))),
    warp_dims=(-5,),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""[K, K]: 32 adjacent rows per warp, 4 adjacent columns per lane."""
_PER_ROW, _PER_COLUMN = _SQUARE.reduce(1), _SQUARE.reduce(0)
_VECTOR_OF_HEAD = plgpu.Layout.TILED(
    plgpu.Tiling(((1, _HEAD), (_VECTOR,))),
    warp_dims=(plgpu.Replicated(_WARPS),),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""[1, K]: every warp has all of it, 4 adjacent channels per lane."""
_COLUMN = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS, 1), (LANES, 1))),
    warp_dims=(-4,),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""[D, 1]: an element per thread, and so on."""


def _heuristic(chip: Chip, call: DecodeKdaCall) -> DecodeKdaSm90Forward:
    (b, d), h = call.x.shape, call.q_proj.shape[1]
    rows = -(-b * h // (_BLOCKS_PER_PROCESSOR * (chip.multiprocessors or 1)))
    return DecodeKdaSm90Forward(*unpadded_tiles(chip, b, d, _columns(call)), rows)


def _unsupported_reason(call: DecodeKdaCall, launch: Launch) -> str | None:
    (b, d), (_, _, k), r = call.x.shape, call.q_proj.shape, call.decay_down.shape[1]
    if call.x.dtype != jnp.bfloat16:
        return f"x is {call.x.dtype.name}, and it multiplies bfloat16 only; use implementation='reference'"
    if not 0 < b <= TILE_ROWS[-1]:
        return f"B={b} must be from 1 to {TILE_ROWS[-1]} (the weights are read once); use implementation='reference'"
    if (k, r) != (_HEAD, _HEAD):
        return f"K={k} and R={r} must be {_HEAD} (the channels of four warps); use implementation='reference'"
    if d % THREADS:
        return f"D={d} must be a multiple of {THREADS} (the threads of a block); use implementation='reference'"
    return None


def _columns(call: DecodeKdaCall) -> tuple[int, ...]:
    (_, h, k), r = call.q_proj.shape, call.decay_down.shape[1]
    return (h * k,) * 3 + (r,) * 2


def _products(call: DecodeKdaCall, launch: Launch) -> FewRows:
    (m, k), config = call.x.shape, launch.config
    sizes = {"rows": config.block_b, "stages": config.stages, "splits": config.splits}
    return FewRows(chip=launch.chip, m=m, k=k, columns=_columns(call), **sizes)


def _scratch(rows: int) -> dict[str, Any]:
    """A memory, and the vectors of each sequence that all warps need."""
    vectors = ("q", "k", "v", "beta", "decay", "gate")
    return {
        "memory_smem": plgpu.SMEM((_HEAD, _HEAD), jnp.float32),
        **{f"{name}_smem": plgpu.SMEM((rows, _HEAD), jnp.float32) for name in vectors},
        "full": plgpu.Barrier(num_arrivals=1),
    }


def _along(vector: jax.Array, axis: int) -> jax.Array:
    """A vector along one axis of [K, K]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (_HEAD, _HEAD), [axis]), _SQUARE)


def _of_head(vector: jax.Array) -> jax.Array:
    """A vector per column as [1, K]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (1, _HEAD), [1]), _VECTOR_OF_HEAD)


def _sums(x: jax.Array) -> jax.Array:
    """The sum of [1, K], along it."""
    return plgpu.layout_cast(lax.broadcast_in_dim(jnp.sum(x, axis=1), x.shape, [0]), _VECTOR_OF_HEAD)


def _finish_kernel(
    *,
    # inputs
    z_ref,  # [splits, B, 3 H + 2, K] float32: the products, those of the first factors at the end
    x_ref,  # [B, D, 1]
    q_conv_ref,  # [W, H, K]
    k_conv_ref,  # [W, H, K]
    v_conv_ref,  # [W, H, K]
    decay_up_ref,  # [R, H, K]
    A_log_ref,  # [H], or [H, K]
    dt_bias_ref,  # [H, K]
    beta_proj_ref,  # [D, H]
    gate_up_ref,  # [R, H, K]
    norm_ref,  # [1, K]
    layer_ref,  # [1], or None
    q_state_ref,  # [L, N, W-1, H, K], updated in place
    k_state_ref,  # [L, N, W-1, H, K], updated in place
    v_state_ref,  # [L, N, W-1, H, K], updated in place
    memory_ref,  # [L, N, H, K, K], updated in place
    # outputs
    y_ref,  # [B, H, K]
    # scratch
    memory_smem,  # [K, K]
    q_smem,  # [rows, K]
    k_smem,  # [rows, K]
    v_smem,  # [rows, K]
    beta_smem,  # [rows, K], equal along K
    decay_smem,  # [rows, K]: what is multiplied with decay_up, and then the decays themselves
    gate_smem,  # [rows, K]: likewise with gate_up
    full,
    # static
    call: DecodeKdaCall,
    rows: int,
):
    splits, b = z_ref.shape[:2]
    width, heads, _ = q_conv_ref.shape
    head, first = lax.axis_index("head"), lax.axis_index("row") * rows
    own = pl.ds(head, 1)
    layer = jnp.int32(0) if layer_ref is None else layer_ref[0]
    is_there, nearest = (layer >= 0) & (layer < call.layers), jnp.clip(layer, 0, call.layers - 1)

    def each_row(body: Callable[[Any], None]) -> None:
        """Calls the body with the number of each sequence of this thread block."""
        if rows == 1:
            body(0)
            return

        def step(row: Any, carry: tuple[()]) -> tuple[()]:
            body(row)
            return carry

        lax.fori_loop(0, jnp.minimum(rows, b - first), step, ())

    def place(row: Any) -> tuple[Any, Any]:
        """The layer and the row of a sequence in the stacks."""
        joined, at = divmod_nonnegative(first + row, memory_ref.shape[1])
        return joined * call.layers + nearest, at

    def fetch(row: Any) -> None:
        plgpu.copy_gmem_to_smem(memory_ref.at[(*place(row), head)], memory_smem, full)

    def of_row(ref: Any, row: Any, layout: Any) -> jax.Array:
        """A vector in shared memory."""
        return plgpu.load(ref.at[row], layout=layout, optimized=False)

    fetch(0)
    # Loads that do not wait for each other come before the first use of one.
    vector = functools.partial(load, layout=_VECTOR_OF_HEAD)
    decay_up, gate_up = (load(ref.at[:, head], _SQUARE) for ref in (decay_up_ref, gate_up_ref))  # [R, K]
    beta_proj = load(beta_proj_ref.at[:, own], _COLUMN).astype(jnp.float32)  # [D, 1]
    convolutions = [
        (state_ref, [vector(conv_ref.at[tap, own]).astype(jnp.float32) for tap in range(width)])  # [1, K] each
        for state_ref, conv_ref in ((q_state_ref, q_conv_ref), (k_state_ref, k_conv_ref), (v_state_ref, v_conv_ref))
    ]

    def compute_vectors(row: Any) -> None:
        slots = head, heads + head, 2 * heads + head, 3 * heads, 3 * heads + 1
        parts = [[vector(z_ref.at[n, first + row, pl.ds(slot, 1)]) for n in range(splits)] for slot in slots]
        inputs = [
            [vector(state_ref.at[(*place(row), tap, own)]) for tap in range(width - 1)] for state_ref, _ in convolutions
        ]
        x = load(x_ref.at[first + row], _COLUMN).astype(jnp.float32)  # [D, 1]
        *projected, decay, gate = (functools.reduce(jnp.add, each) for each in parts)  # [1, K] each
        convolved = []
        for new, before, (_, filters) in zip(projected, inputs, convolutions, strict=True):
            taps = [*(each.astype(jnp.float32) for each in before), new]
            y = functools.reduce(jnp.add, [tap * filter_ for tap, filter_ in zip(taps, filters, strict=True)])
            convolved.append(y * sigmoid(y, _VECTOR_OF_HEAD))
        q, k, v = convolved
        q, k = unit_length(q, _sums) * _HEAD**-0.5, unit_length(k, _sums)
        beta = lax.broadcast_in_dim(jnp.sum(x * beta_proj, axis=0), (1, _HEAD), [0])
        beta = sigmoid(plgpu.layout_cast(beta, _VECTOR_OF_HEAD), _VECTOR_OF_HEAD)
        refs = q_smem, k_smem, v_smem, beta_smem, decay_smem, gate_smem
        for ref, value in zip(refs, (q, k, v, beta, decay, gate), strict=True):
            store(ref.at[pl.ds(row, 1)], value, _VECTOR_OF_HEAD)
        # Every warp has read the inputs of the convolutions before one of them writes.
        plgpu.commit_smem()

        @pl.when(is_there)
        def _():
            for new, before, (state_ref, _) in zip(projected, inputs, convolutions, strict=True):
                for tap, value in enumerate((*before[1:], new.astype(state_ref.dtype))):
                    store(state_ref.at[(*place(row), tap, own)], value, _VECTOR_OF_HEAD)

    each_row(compute_vectors)
    per_column = functools.partial(plgpu.load, layout=_PER_COLUMN, optimized=False)
    bias = per_column(dt_bias_ref.at[head]).astype(jnp.float32)  # [K]
    logs = A_log_ref[head] if len(A_log_ref.shape) == 1 else per_column(A_log_ref.at[head])
    rate = jnp.exp(logs.astype(jnp.float32))

    def product(smem: Any, row: Any, up: jax.Array) -> jax.Array:
        return jnp.sum(up.astype(jnp.float32) * _along(of_row(smem, row, _PER_ROW), 0), axis=0)  # [K]

    def compute_decay(row: Any) -> None:
        z = product(decay_smem, row, decay_up) + bias
        bound = call.lower_bound
        g = -rate * softplus(z, _PER_COLUMN) if bound is None else bound * sigmoid(rate * z, _PER_COLUMN)
        store(decay_smem.at[row], jnp.exp(g), _PER_COLUMN)

    def compute_gate(row: Any) -> None:
        store(gate_smem.at[row], sigmoid(product(gate_smem, row, gate_up), _PER_COLUMN), _PER_COLUMN)

    each_row(compute_decay)
    each_row(compute_gate)
    plgpu.commit_smem()
    norm = vector(norm_ref).astype(jnp.float32)  # [1, K]

    def update_memory(row: Any) -> None:
        keys = _along(of_row(k_smem, row, _PER_ROW), 0)  # [K, K]
        decays = _along(of_row(decay_smem, row, _PER_ROW), 0)
        values, beta = (of_row(ref, row, _PER_COLUMN) for ref in (v_smem, beta_smem))  # [K]
        plgpu.barrier_wait(full)
        memory = plgpu.load(memory_smem, layout=_SQUARE, optimized=False) * decays  # [K, K]
        seen = jnp.sum(memory * keys, axis=0)  # [K], S^T k
        if rows > 1:
            plgpu.commit_smem()  # All warps have read their part.
            pl.when((row + 1 < rows) & (first + row + 1 < b))(lambda: fetch(row + 1))
        memory = memory + keys * _along(beta * (values - seen), 1)
        pl.when(is_there)(lambda: store(memory_ref.at[(*place(row), head)], memory, _SQUARE))
        o = _of_head(jnp.sum(memory * _along(of_row(q_smem, row, _PER_ROW), 0), axis=0))  # [1, K]
        o = o * lax.rsqrt(_sums(o * o) * (1.0 / _HEAD) + call.eps)
        gate = _of_head(of_row(gate_smem, row, _PER_COLUMN))  # [1, K]
        store(y_ref.at[first + row, own], (o * norm * gate).astype(y_ref.dtype), _VECTOR_OF_HEAD)

    each_row(update_memory)


def _forward(call: DecodeKdaCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, ...], None]:
    """y [B, H, K], the states of the three convolutions, and the memory."""
    (b, d), (_, heads, channels), rows = call.x.shape, call.q_proj.shape, launch.config.rows
    weights = [w.reshape(d, -1) for w in (call.q_proj, call.k_proj, call.v_proj)]
    z = _products(call, launch).run(call.x, [*weights, call.decay_down, call.gate_down], name="decode_kda_products")
    states = {name: jax.new_ref(getattr(call, name)) for name in call.stacks}
    # The body has the sizes of the call, and no array of it: a kernel captures none.
    shapes = call.with_arrays({name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in call.given().items()})
    outputs = run_kernel(
        functools.partial(_finish_kernel, call=shapes, rows=rows),
        name="decode_kda",
        inputs={
            "z": z.reshape(-1, b, 3 * heads + 2, channels),
            "x": call.x.reshape(b, d, 1),
            **{name: getattr(call, name) for name in ("q_conv", "k_conv", "v_conv", "decay_up", "A_log", "dt_bias")},
            "beta_proj": call.beta_proj,
            "gate_up": call.gate_up,
            "norm": call.norm.reshape(1, channels),
            "layer": None if call.layer is None else call.layer.reshape(1),
            **states,
        },
        outputs={"y": jax.ShapeDtypeStruct((b, heads, channels), call.x.dtype)},
        scratch=_scratch(rows),
        grid={"head": heads, "row": pl.cdiv(b, rows)},
        params=compiler_params(approximate_math=False),
    )
    return (outputs["y"], *(jax.freeze(state) for state in states.values())), None


def _memory(call: DecodeKdaCall, launch: Launch) -> dict[str, int]:
    return {
        "products": _products(call, launch).memory,
        "decode": smem_bytes(_scratch(launch.config.rows), reductions=True),
    }


FORWARD = Pass(
    _forward,
    config=DecodeKdaSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="fewer stages or rows",
)
