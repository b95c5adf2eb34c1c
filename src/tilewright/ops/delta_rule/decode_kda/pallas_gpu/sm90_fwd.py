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
   along the columns of a tile is used along the rows of another one. A warp has a sequence of its own where four of them
   are in the block, so that sums over a head need no other warp, and all of them wait for memory at the same time; with
   fewer, several warps compute the same. beta is computed here since Wb has one column per head, and the product takes
   tiles of 128.
2. The products with the second factors, which a thread block holds in registers, and their gates.
3. S, 64 KB per sequence: a bulk copy brings it to shared memory while the previous one is in registers. A warp has 32 rows
   of it, and a thread 4 adjacent columns of these. The sums over rows are inside a thread and then over 4 warps.

`rows` is such that all thread blocks run at once, two per multiprocessor: one waits for memory while the other computes.
Everything that a block reads once is loaded before its first barrier, and the first S is copied as soon as `layer` is
known.

All states are updated in place: under `donate_argnums` and in a loop nothing is copied. A layer outside of the stack is not
written.

Numerics: float32 from the products' sums to the results. Only y, and what convolutions keep of the token, are rounded, to
bfloat16. The sigmoids and the softplus are those of pallas/gpu/elementwise.py, within 2 or 3 units in the last place. The
order of sums is fixed: the same bits in every run.

Measured on an H200, H 16, D 2048, with cold caches: the second kernel takes 41.6 us at batch 64 (S alone 28), 14.4 at batch
16 and 7.7 at batch 1, where it is one chain of loads and arithmetic; the products 9.0, 8.3 and 8.5 us. With 2 or 8 rows
per thread block instead of 4 the second kernel takes 44.3 and 49.9 us at batch 64.

Tried and dropped: the sequences of a block one after the other in phase 1, each with loads of its
own, and the loads of norm and dt_bias where they are used: 46.4 us at batch 64 and 7.7 us at batch 1 for the second
kernel, in a model.

Limits: Hopper only. bfloat16 only. Up to 64 sequences. K = R = 128, D a multiple of 128.
"""

import functools
import math
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
_PRODUCTS = 5  # Vectors of a sequence and head that the first kernel computes.
_BLOCKS_PER_PROCESSOR = 2  # Registers and shared memory for a tile of 64 KB each.

_SQUARE = plgpu.Layout.TILED(
    plgpu.Tiling(((_HEAD, _HEAD), (_HEAD // _WARPS, _HEAD), (_VECTOR,))),
    warp_dims=(-5,),
    lane_dims=(-2,),
    vector_dim=-1,
)
"""[K, K]: 32 adjacent rows per warp, 4 adjacent columns per lane."""
_PER_ROW, _PER_COLUMN = _SQUARE.reduce(1), _SQUARE.reduce(0)


def _vectors(count: int) -> Any:
    """A layout of [count, K] for a count of 1, 2 or 4: a warp has one of the rows, 4 adjacent channels per lane."""
    own = () if count == 1 else (-3,)
    copies = () if count == _WARPS else (plgpu.Replicated(_WARPS // count),)
    tiling = plgpu.Tiling(((count, _HEAD), (_VECTOR,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(*own, *copies), lane_dims=(-2,), vector_dim=-1)


_VECTOR_OF_HEAD, _VECTOR_PER_WARP = _vectors(1), _vectors(_WARPS)
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


def _group(call: DecodeKdaCall, rows: int) -> int:
    """Sequences of a thread block whose vectors are computed at once, each by a warp of its own. They are in one stack."""
    return math.gcd(rows, call.memory.shape[1], _WARPS)


def _scratch(call: DecodeKdaCall, config: DecodeKdaSm90Forward) -> dict[str, Any]:
    """A memory, the vectors of each sequence that all warps need, and sums of splits."""
    vectors = ("q", "k", "v", "beta", "decay", "gate")
    sums = plgpu.SMEM((_PRODUCTS, _WARPS, _HEAD), jnp.float32)
    return {
        "memory_smem": plgpu.SMEM((_HEAD, _HEAD), jnp.float32),
        **{f"{name}_smem": plgpu.SMEM((config.rows, _HEAD), jnp.float32) for name in vectors},
        "beta_proj_smem": plgpu.SMEM(call.x.shape[1:], jnp.float32),
        # Each warp adds up some of the splits: for a single sequence, each would read all of them otherwise.
        "sums_smem": sums if config.rows == 1 and config.splits % _WARPS == 0 else None,
        "full": plgpu.Barrier(num_arrivals=1),
    }


def _along(vector: jax.Array, axis: int) -> jax.Array:
    """A vector along one axis of [K, K]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (_HEAD, _HEAD), [axis]), _SQUARE)


def _of_head(vector: jax.Array) -> jax.Array:
    """A vector per column as [1, K]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (1, _HEAD), [1]), _VECTOR_OF_HEAD)


def _sums(x: jax.Array) -> jax.Array:
    """The sums of the rows of [1, K], [2, K] or [4, K], along them."""
    return plgpu.layout_cast(lax.broadcast_in_dim(jnp.sum(x, axis=1), x.shape, [0]), _vectors(x.shape[0]))


def _finish_kernel(
    *,
    # inputs
    z_ref,  # [splits, B, 3 H + 2, K] float32: the products, those of the first factors at the end
    x_ref,  # [B, D]
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
    beta_proj_smem,  # [D]
    sums_smem,  # [5, 4, K], or None: a warp's sums of splits
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
    group = _group(call, rows)
    vectors = _vectors(group)

    def each_row(body: Callable[[Any], None], step: int = 1) -> None:
        """Calls the body with the number of each sequence of this thread block, or of the first one of each `step`."""
        if rows == step:
            body(0)
            return

        def turn(n: Any, carry: tuple[()]) -> tuple[()]:
            body(n * step)
            return carry

        lax.fori_loop(0, lax.div(jnp.minimum(rows, b - first), step), turn, ())

    def place(row: Any) -> tuple[Any, Any]:
        """The layer and the row of a sequence in the stacks."""
        joined, at = divmod_nonnegative(first + row, memory_ref.shape[1])
        return joined * call.layers + nearest, at

    def fetch(row: Any) -> None:
        plgpu.copy_gmem_to_smem(memory_ref.at[(*place(row), head)], memory_smem, full)

    def of_row(ref: Any, row: Any, layout: Any) -> jax.Array:
        """A vector in shared memory."""
        return plgpu.load(ref.at[row], layout=layout, optimized=False)

    def products_of(row: Any) -> tuple[list[list[jax.Array]], jax.Array]:
        """Parts of the sums of a group's five products, [group, K] each, and x, [group, D]."""
        slots = head, heads + head, 2 * heads + head, 3 * heads, 3 * heads + 1
        own_rows = pl.ds(first + row, group)
        x = load(x_ref.at[own_rows], vectors)
        if sums_smem is None:
            return [[load(z_ref.at[n, own_rows, slot], vectors) for n in range(splits)] for slot in slots], x
        quarters = [pl.ds(n, _WARPS) for n in range(0, splits, _WARPS)]
        return [[load(z_ref.at[n, first + row, slot], _VECTOR_PER_WARP) for n in quarters] for slot in slots], x

    def inputs_of(row: Any) -> list[list[jax.Array]]:
        """What each convolution has of the tokens before, [group, K] for each of W-1."""
        refs = q_state_ref, k_state_ref, v_state_ref
        return [[load(tap_of(ref, row, tap), vectors) for tap in range(width - 1)] for ref in refs]

    def of_group(vector: jax.Array) -> jax.Array:
        """A vector [K] as float32 for each sequence of a group."""
        wide = vector.astype(jnp.float32)
        return plgpu.layout_cast(lax.broadcast_in_dim(wide, (group, _HEAD), [1]), vectors)

    def tap_of(ref: Any, row: Any, tap: int) -> Any:
        of_layer, at = place(row)
        return ref.at[of_layer, pl.ds(at, group), tap, head]

    # Loads come before the first use of one, and those that do not wait for `layer` before those that do.
    vector = functools.partial(load, layout=_VECTOR_OF_HEAD)
    first_products = products_of(0) if rows == group else None
    beta_proj = load(beta_proj_ref.at[:, own], _COLUMN).astype(jnp.float32)  # [D, 1]
    filters = [
        [load(ref.at[tap, head], vectors.reduce(0)) for tap in range(width)]  # [K] each
        for ref in (q_conv_ref, k_conv_ref, v_conv_ref)
    ]
    per_column = functools.partial(plgpu.load, layout=_PER_COLUMN, optimized=False)
    bias = per_column(dt_bias_ref.at[head]).astype(jnp.float32)  # [K]
    logs = A_log_ref[head] if len(A_log_ref.shape) == 1 else per_column(A_log_ref.at[head])
    norm = vector(norm_ref).astype(jnp.float32)  # [1, K]
    fetch(0)
    decay_up, gate_up = (load(ref.at[:, head], _SQUARE) for ref in (decay_up_ref, gate_up_ref))  # [R, K]
    if first_products is not None and sums_smem is not None:
        for n, each in enumerate(first_products[0]):
            store(sums_smem.at[n], functools.reduce(jnp.add, each), _VECTOR_PER_WARP)
    store(beta_proj_smem, jnp.sum(beta_proj, axis=1), _COLUMN.reduce(1))
    plgpu.commit_smem()
    first_inputs = inputs_of(0) if rows == group else None

    def compute_vectors(row: Any) -> None:
        parts, x = first_products or products_of(row)
        inputs = first_inputs or inputs_of(row)
        if sums_smem is not None:
            parts = [[vector(sums_smem.at[n, pl.ds(warp, 1)]) for warp in range(_WARPS)] for n in range(_PRODUCTS)]
        *projected, decay, gate = (functools.reduce(jnp.add, each) for each in parts)  # [group, K] each
        convolved = []
        for new, before, own_filters in zip(projected, inputs, filters, strict=True):
            taps = [*(each.astype(jnp.float32) for each in before), new]
            y = functools.reduce(jnp.add, [tap * of_group(each) for tap, each in zip(taps, own_filters, strict=True)])
            convolved.append(y * sigmoid(y, vectors))
        q, k, v = convolved
        q, k = unit_length(q, _sums) * _HEAD**-0.5, unit_length(k, _sums)
        weights = plgpu.load(beta_proj_smem, layout=vectors.reduce(0), optimized=False)  # [D]
        weights = plgpu.layout_cast(lax.broadcast_in_dim(weights, x.shape, [1]), vectors)
        beta = jnp.sum(x.astype(jnp.float32) * weights, axis=1)  # [group]
        beta = sigmoid(plgpu.layout_cast(lax.broadcast_in_dim(beta, q.shape, [0]), vectors), vectors)
        refs = q_smem, k_smem, v_smem, beta_smem, decay_smem, gate_smem
        for ref, value in zip(refs, (q, k, v, beta, decay, gate), strict=True):
            store(ref.at[pl.ds(row, group)], value, vectors)
        # Every warp has read the inputs of the convolutions before one of them writes.
        plgpu.commit_smem()

        @pl.when(is_there)
        def _():
            refs = q_state_ref, k_state_ref, v_state_ref
            for ref, new, before in zip(refs, projected, inputs, strict=True):
                for tap, value in enumerate((*before[1:], new.astype(ref.dtype))):
                    store(tap_of(ref, row, tap), value, vectors)

    each_row(compute_vectors, group)
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
            "x": call.x,
            **{name: getattr(call, name) for name in ("q_conv", "k_conv", "v_conv", "decay_up", "A_log", "dt_bias")},
            "beta_proj": call.beta_proj,
            "gate_up": call.gate_up,
            "norm": call.norm.reshape(1, channels),
            "layer": None if call.layer is None else call.layer.reshape(1),
            **states,
        },
        outputs={"y": jax.ShapeDtypeStruct((b, heads, channels), call.x.dtype)},
        scratch=_scratch(call, launch.config),
        grid={"head": heads, "row": pl.cdiv(b, rows)},
        params=compiler_params(approximate_math=False),
    )
    return (outputs["y"], *(jax.freeze(state) for state in states.values())), None


def _memory(call: DecodeKdaCall, launch: Launch) -> dict[str, int]:
    return {
        "products": _products(call, launch).memory,
        "decode": smem_bytes(_scratch(call, launch.config), reductions=True),
    }


FORWARD = Pass(
    _forward,
    config=DecodeKdaSm90Forward,
    heuristic=_heuristic,
    unsupported_reason=_unsupported_reason,
    memory=_memory,
    memory_fields="fewer stages or rows",
)
