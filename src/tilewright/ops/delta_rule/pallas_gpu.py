"""The delta rule and the gated delta rule as Mosaic GPU kernels for Hopper: two forward kernels. KDA has its own.

With a chunk of C = 64 tokens, G the sums of the log-decays inside it, decay_ij = exp(G_i - G_j),
M_ij = (k_i . k_j) decay_ij below the diagonal and P_ij = (q_i . k_j) decay_ij on and below it, a chunk is

    E = X (v - diag(exp G) k S),   X = (I + M diag(beta))^-1            the errors that the tokens correct, [C, V]
    o = scale (diag(exp G) q S + P diag(beta) E)
    S <- exp(G_C) S + k^T diag(beta exp(G_C - G)) E

`_inverse_kernel` makes X of every chunk by itself, all chunks at once; `_state_kernel` carries S through them. For a
backward (pallas_gpu_bwd.py) it also writes S before each chunk and E. With beta on this side of X, nothing there divides
by it.

Floor for K = V = D, a token and head in bfloat16: q, k, v read and o written, 8 D bytes; 10.5 MFLOP a chunk of D = 128.
Here: k once more and X written and read, 6 D bytes more at D = 128. That is 14 D, 1.4 GB for H96 T8192: a third of a
millisecond of an H200. Products of rounded halves make it 20 MFLOP a chunk.

Blocking. `_inverse_kernel`: a warpgroup a chunk, three to a thread block. `_state_kernel`: a thread block for a head and up
to 128 value channels, the whole sequence. A warpgroup carries the transposed state [64 channels, K] of its channels in
registers, where it is the accumulator of one product and, rounded, the left operand of the next: nothing of the chain
k S, E, S passes through shared memory. One more warpgroup fetches chunks into a ring of three and makes P.

Numerics. Accumulators, states and decays are float32. An operand of float32 is split into its bfloat16 and the rest; of
the four products of two such, the three large ones are taken. Only q S takes S rounded: it adds to o alone. Decays are
exp of sums of two parts of the gates, one exact and one small, as in chunk.py. A start of a segment is a decay to 0.

Limits: Hopper only. bfloat16 only. K up to 128: the state is in registers. K is padded to 64 or 128, V and T to multiples
of 64; each costs a copy where it is not whole.

By an H200 (driver 580.159.04, jax 0.11.2), tried and dropped, H96 T8192 D128:
- the inverse in the third warpgroup of `_state_kernel`: 2.4 ms. Ten products of one warpgroup follow each other, 18,000
  cycles a chunk; three chunks side by side hide each other's latency;
- q S of both halves of S, or both last products in flight at once: ptxas runs out of registers and puts a wait behind
  every instruction of the matrix unit (C7512), 0.78 -> 0.88 ms for the state;
- four warpgroups to a block of `_inverse_kernel`: registers spill, 0.56 against 0.51 ms.
With one warpgroup for the state (T32768 H4, 2.9 us a chunk), where registers would do: q S in flight beside what follows
it, both last products in flight at once, outputs that leave the ring a chunk later: 1.47 to 1.48 ms each, as without.
The inverse's five rounds one by one instead of in a loop: 0.51 against 0.46 ms (the instruction cache).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.axes import Gate, Keys, PerHead, Starts, State, Values
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, padded, product, refusal, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule import pallas_gpu_kda
from tilewright.ops.delta_rule.chunk import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.config import GPU_TILE, GPU_WIDEST_KEY, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_tiles import (
    ACROSS,
    BETA,
    CHUNK,
    GATE_ROWS,
    HALVES,
    INTO,
    ONWARD,
    SIDE_BY_SIDE,
    SQUARE,
    WGMMA,
    add_halves,
    add_split,
    along_columns,
    along_rows,
    compiler_params,
    decay,
    halves,
    in_chunks,
    invert,
    keep_halves,
    load_turned,
    per_chunk,
    positions,
    turned,
    turned_states,
)
from tilewright.ops.delta_rule.gradient import with_gradient
from tilewright.ops.delta_rule.pallas_gpu_bwd import backward

Config = PallasGpuConfig
DTYPES = ("bfloat16",)

# A ring of two leaves room for what a backward needs to be on its way out.
_STAGES, _STAGES_KEEPING = 3, 2
# Of 504 that three warpgroups may have together: the state and its halves are 128.
_STATE_REGISTERS, _FETCH_REGISTERS = 200, 104
_STATE_REGISTERS_KEEPING, _FETCH_REGISTERS_KEEPING = 208, 88


def default_config(chip: Chip, q: Keys, k: Keys, v: Values, *rest: Any, scale: float) -> PallasGpuConfig:
    del k, rest, scale
    return PallasGpuConfig.for_shape(chip, q.shape[0], *v.shape[2:])


def unsupported_reason(
    launch: Launch, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float
) -> str | None:
    del k, v, g, rest, scale
    if (reason := refusal(launch.chip, q)) is not None:
        return reason
    if q.shape[-1] > GPU_WIDEST_KEY:
        return f"K={q.shape[-1]} must be {GPU_WIDEST_KEY} at most (the state is in registers); use implementation='xla'"
    return None


def _inverse_kernel(*refs: Any, chunks: int, group: int, interpreted: bool):
    # inputs
    k_ref, gates_ref = refs[:2]
    # outputs
    x_ref = refs[2]
    # scratch
    k_tiles, gate_tiles, l_tiles, x_tiles, arrived = refs[3:]

    b, hv, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    n = lax.axis_index("chunk") * SIDE_BY_SIDE + warpgroup
    tokens = pl.ds(n * CHUNK, CHUNK)

    @pl.when(n < chunks)
    def _one_chunk():
        keys, gates = k_tiles.at[warpgroup], gate_tiles.at[warpgroup]  # [C, K], [GATE_ROWS, C]
        l_both, x_both = l_tiles.at[warpgroup], x_tiles.at[warpgroup]  # [2 C, C]
        ready = arrived.at[warpgroup]
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, lax.div(hv, jnp.int32(group))], keys, ready)
        plgpu.copy_gmem_to_smem(gates_ref.at[b, hv, n], gates, ready)
        plgpu.barrier_wait(ready)
        i, j = positions()
        alike = product(SQUARE, lambda sum_: sum_.add(keys, turned(keys)), interpreted=interpreted)  # [C, C]
        lower = jnp.where(i > j, alike * decay(gates, i, j) * along_columns(gates.at[BETA], SQUARE), 0.0)
        keep_halves(x_both, halves(invert(lower, i, j, l_both, x_both, interpreted=interpreted)))
        plgpu.commit_smem()
        for half in range(2):
            rows = pl.ds(half * CHUNK, CHUNK)
            plgpu.copy_smem_to_gmem(x_both.at[rows], x_ref.at[b, hv, tokens, rows])
        plgpu.wait_smem_to_gmem(0)


def _state_kernel(
    *refs: Any, chunks: int, kept_halves: int, group: int, warpgroups: int, scale: float, interpreted: bool
):
    # inputs
    q_ref, k_ref, v_ref, x_ref, gates_ref, initial_ref = refs[:6]
    # outputs
    o_ref, final_ref = refs[6:8]
    states_ref, errors_ref = refs[8:10] if kept_halves else (refs[0], refs[0])  # Without: not used.
    # scratch
    scratch = refs[10 if kept_halves else 8 :]
    q_ring, k_ring, v_ring, x_ring, gate_ring, p_tile, arrived, consumed, p_made, p_used = scratch[:10]
    state_tiles, error_tiles = scratch[10:] if kept_halves else (refs[0], refs[0])
    stages = q_ring.shape[0]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    warpgroup = lax.axis_index("warpgroup")
    h = lax.div(hv, jnp.int32(group))
    depth = q_ring.shape[-1]

    def slot_of(n: Any) -> jax.Array:
        return lax.rem(n, jnp.int32(stages))

    def channels(of: Any) -> Any:
        return pl.ds((block * warpgroups + of) * GPU_TILE, GPU_TILE)

    def tokens(n: Any) -> Any:
        return pl.ds(n * CHUNK, CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _fetch_and_score():
        if warpgroups > 1:
            plgpu.set_max_registers(_FETCH_REGISTERS_KEEPING if kept_halves else _FETCH_REGISTERS, action="decrease")

        def fetch(n: Any) -> None:
            slot = slot_of(n)
            for source, ring in (
                (k_ref.at[b, tokens(n), h], k_ring.at[slot]),
                (gates_ref.at[b, hv, n], gate_ring.at[slot]),
                (q_ref.at[b, tokens(n), h], q_ring.at[slot]),
                (x_ref.at[b, hv, tokens(n)], x_ring.at[slot]),
                *((v_ref.at[b, tokens(n), hv, channels(w)], v_ring.at[slot, w]) for w in range(warpgroups)),
            ):
                plgpu.copy_gmem_to_smem(source, ring, arrived.at[slot])

        ahead = stages - 1
        for n in range(min(ahead, chunks)):
            fetch(jnp.int32(n))

        def one_chunk(n: Any, carry: tuple[()]) -> tuple[()]:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            i, j = positions()
            qk = product(
                SQUARE, lambda sum_: sum_.add(q_ring.at[slot], turned(k_ring.at[slot])), interpreted=interpreted
            )
            gates = gate_ring.at[slot]
            split = halves(qk * decay(gates, i, j) * along_columns(gates.at[BETA], SQUARE))
            pl.when(n > 0)(lambda: plgpu.barrier_wait(p_used))
            for half, value in enumerate(split):
                p_tile[:, pl.ds(half * CHUNK, CHUNK)] = value
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_made)

            @pl.when(n + ahead < chunks)
            def _next():
                pl.when(n > 0)(lambda: plgpu.barrier_wait(consumed.at[slot_of(n + ahead)]))
                fetch(n + ahead)

            return carry

        lax.fori_loop(0, chunks, one_chunk, ())

    @pl.when(warpgroup < warpgroups)
    def _carry_the_state():
        if warpgroups > 1:
            plgpu.set_max_registers(_STATE_REGISTERS_KEEPING if kept_halves else _STATE_REGISTERS, action="increase")
        mine = channels(warpgroup)
        tile, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.
        first = pl.ds(0, CHUNK)

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            keys, queries, values = k_ring.at[slot], q_ring.at[slot], v_ring.at[slot, warpgroup]
            x_both, gates = x_ring.at[slot], gate_ring.at[slot]
            before = halves(state)  # [V, K]
            k_s = product(tile, lambda sum_: add_halves(sum_, before, turned(keys)), interpreted=interpreted)  # [V, C]
            q_s = product(tile, lambda sum_: sum_.add(before[0], turned(queries)), interpreted=interpreted)
            if kept_halves:
                state_tiles[warpgroup] = before[0]
            into = along_columns(gates.at[INTO], tile)
            wanted = halves(load_turned(values) - k_s * into)
            errors = product(
                tile,
                lambda sum_: add_split(sum_, wanted, turned(x_both), turned(x_both.at[:, first])),
                interpreted=interpreted,
            )
            split = halves(errors)
            if kept_halves:
                for half in range(kept_halves):
                    error_tiles[warpgroup, half] = split[half]
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(state_tiles.at[warpgroup], states_ref.at[b, hv, n, mine])
                for half in range(kept_halves):
                    plgpu.copy_smem_to_gmem(error_tiles.at[warpgroup, half], errors_ref.at[b, hv, n, half, mine])
            plgpu.barrier_wait(p_made)

            def add_p(sum_: Accumulator) -> None:
                add_split(sum_, split, turned(p_tile), turned(p_tile.at[:, first]))

            (o,) = accumulate((q_s * into,), add_p, interpreted=interpreted)
            plgpu.barrier_arrive(p_used)
            # v's tile has been read: o goes out through it.
            turned(values)[...] = (o * scale).astype(jnp.bfloat16)
            written = halves(errors * along_columns(gates.at[ONWARD], tile))
            left = state * along_rows(gates.at[ACROSS], state_shape)
            (state,) = accumulate((left,), lambda sum_: add_halves(sum_, written, keys), interpreted=interpreted)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(values, o_ref.at[b, tokens(n), hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return state

        state = plgpu.load(initial_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        state = lax.fori_loop(0, chunks, one_chunk, state)
        plgpu.wait_smem_to_gmem(0)
        final_ref[b, hv, mine, :] = state


def _gates(g: jax.Array | None, beta: jax.Array, resets: jax.Array | None) -> jax.Array:
    """The gates of each chunk, [B, HV, chunks, GATE_ROWS, C]. T is whole chunks."""
    beta = per_chunk(beta)
    if g is None and resets is None:
        nothing, one = jnp.zeros_like(beta), jnp.ones_like(beta)
        return jnp.stack([nothing, nothing, beta, one, beta, one], axis=3)
    g = jnp.zeros_like(beta) if g is None else per_chunk(jnp.maximum(g.astype(jnp.float32), LOWEST_GATE))
    if resets is not None:
        g = jnp.where(per_chunk(resets[:, :, None]) > 0, LOWEST_GATE, g)
    coarse, fine = coarse_and_fine(g, _sums)
    onward = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
    into = jnp.exp(coarse + fine)
    across = jnp.broadcast_to(into[..., -1:], into.shape)
    return jnp.stack([coarse, fine, beta, into, beta * jnp.exp(onward), across], axis=3)


def _sums(x: jax.Array) -> jax.Array:
    """Cumulative sums along the last axis as a product with ones: XLA's own of 96 x 8,192 gates take 0.2 ms of an H200."""
    ones = jnp.triu(jnp.ones((x.shape[-1], x.shape[-1]), x.dtype))
    return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype)


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    initial_state: jax.Array,
    resets: jax.Array | None,
    *,
    scale: float,
    launch: Launch,
    keep: bool,
) -> tuple[jax.Array, ...]:
    """o, the final state, and, to keep for a backward, what its arguments from x to errors are."""
    config: PallasGpuConfig = launch.config
    (_, true_t, _, true_depth), true_width = q.shape, v.shape[3]
    gates = _gates(
        None if g is None else in_chunks(g), in_chunks(beta), None if resets is None else in_chunks(resets)
    )  # [B, HV, chunks, rows, C]
    # Channels of zeros add nothing.
    q, k = (padded(in_chunks(x), 3, GPU_TILE) for x in (q, k))
    v = padded(in_chunks(v), 3, config.block_v)
    state = turned_states(initial_state, config.block_v)  # [B, HV, V, K]
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    chunks, group, warpgroups = t // CHUNK, hv // h, config.warpgroups
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {
        "compiler_params": compiler_params(),
        "interpret": gpu_interpret_params(launch.interpret),
        "thread_name": "warpgroup",
    }

    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)

    x = plgpu.kernel(
        functools.partial(_inverse_kernel, chunks=chunks, group=group, interpreted=interpreted),
        out_type=output_like((b, hv, t, 2 * CHUNK), jnp.bfloat16, k),
        scratch_types=[
            bfloat16_tile(SIDE_BY_SIDE, CHUNK, depth),
            plgpu.SMEM((SIDE_BY_SIDE, GATE_ROWS, CHUNK), jnp.float32),
            bfloat16_tile(SIDE_BY_SIDE, 2 * CHUNK, CHUNK),
            bfloat16_tile(SIDE_BY_SIDE, 2 * CHUNK, CHUNK),
            plgpu.Barrier(num_arrivals=2, num_barriers=SIDE_BY_SIDE),
        ],
        grid=(-(-chunks // SIDE_BY_SIDE), hv, b),
        grid_names=("chunk", "head", "batch"),
        num_threads=SIDE_BY_SIDE,
        kernel_name="delta_rule_inverses",
        **common,
    )(k, gates)
    out_type = [output_like(v.shape, jnp.bfloat16, v), output_like((b, hv, width, depth), jnp.float32, v)]
    kept_halves = HALVES if keep else 0
    stages = _STAGES_KEEPING if keep else _STAGES
    tiles_to_keep = []
    if keep:
        out_type.append(output_like((b, hv, chunks, width, depth), jnp.bfloat16, v))
        out_type.append(output_like((b, hv, chunks, kept_halves, width, CHUNK), jnp.bfloat16, v))
        tiles_to_keep.append(bfloat16_tile(warpgroups, GPU_TILE, depth))
        tiles_to_keep.append(bfloat16_tile(warpgroups, kept_halves, GPU_TILE, CHUNK))
    o, final, *kept = plgpu.kernel(
        functools.partial(
            _state_kernel,
            chunks=chunks,
            kept_halves=kept_halves,
            group=group,
            warpgroups=warpgroups,
            scale=scale,
            interpreted=interpreted,
        ),
        out_type=out_type,
        scratch_types=[
            bfloat16_tile(stages, CHUNK, depth),
            bfloat16_tile(stages, CHUNK, depth),
            bfloat16_tile(stages, warpgroups, CHUNK, GPU_TILE),
            bfloat16_tile(stages, CHUNK, 2 * CHUNK),
            plgpu.SMEM((stages, GATE_ROWS, CHUNK), jnp.float32),
            bfloat16_tile(CHUNK, 2 * CHUNK),
            plgpu.Barrier(num_arrivals=4 + warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=warpgroups),
            *tiles_to_keep,
        ],
        grid=(hv, width // config.block_v, b),
        grid_names=("head", "values", "batch"),
        num_threads=1 + warpgroups,
        kernel_name="delta_rule_states",
        **common,
    )(q, k, v, x, gates, state)
    final = jnp.swapaxes(final, 2, 3)[..., :true_depth, :true_width]
    return o[:, :true_t, :, :true_width], final, *((x, gates, *kept) if keep else ())


_delta_rule = with_gradient(_forward, backward)


def delta_rule_pallas_gpu(
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
    per_channel = g is not None and g.ndim == k.ndim
    run = pallas_gpu_kda.kda if per_channel else _delta_rule
    return run(q, k, v, g, beta, initial_state, resets, scale, launch)


gated_delta_rule_pallas_gpu = kda_pallas_gpu = delta_rule_pallas_gpu
