"""The delta rule and the gated delta rule as Mosaic GPU kernels for Hopper: three forward kernels. KDA has its own.

With a chunk of C = 64 tokens, G the sums of the log-decays inside it, decay_ij = exp(G_i - G_j),
M_ij = (k_i . k_j) decay_ij below the diagonal and P_ij = (q_i . k_j) decay_ij on and below it, a chunk is

    E = X (v - diag(exp G) k S),   X = (I + M diag(beta))^-1            the errors that the tokens correct, [C, V]
    o = scale (diag(exp G) q S + P diag(beta) E)
    S <- exp(G_C) S + k^T diag(beta exp(G_C - G)) E

`_gates_kernel` makes G, exp(G) and so on of every chunk, 64 chunks at a time: sums of gates are products of the matrix unit
with ones. `_inverse_kernel` makes X of every chunk by itself, all chunks at once; `_state_kernel` carries S through them.
For a backward (pallas_gpu_bwd.py) it also writes S before each chunk and E. With beta on this side of X, nothing there
divides by it.

Floor for K = V = D, a token and head in bfloat16: q, k, v read and o written, 8 D bytes; 10.5 MFLOP a chunk of D = 128.
Here: k once more and X written and read, 6 D bytes more at D = 128. That is 14 D, 1.4 GB for H96 T8192: a third of a
millisecond of an H200. Products of rounded halves make it 20 MFLOP a chunk.

Blocking. `_inverse_kernel`: a thread block, of one warpgroup, for a chunk. `_state_kernel`: a thread block for a head and
up to 128 value channels, the whole sequence. A warpgroup carries the transposed state [64 channels, K] of its channels in
registers, where it is the accumulator of one product and, rounded, the left operand of the next: nothing of the chain
k S, E, S passes through shared memory. Copies of S and E go there for the warpgroups that write outputs: one beside two
states, or, beside one, two that take chunks in turns. These make P, and fetch chunks into a ring of two.

Numerics. Accumulators, states and decays are float32. An operand of float32 is split into its bfloat16 and the rest; of
the four products of two such, the three large ones are taken. Only q S takes S rounded: it adds to o alone. Decays are
exp of sums of two parts of the gates, one exact and one small, as in chunk.py. A start of a segment is a decay to 0.

Limits: Hopper only. bfloat16 only. K up to 128: the state is in registers. K is padded to 64 or 128, V and T to multiples
of 64; each costs a copy where it is not whole.

By an H200 (driver 580.159.04, jax 0.11.2, H96 T8192 D128 unless said), tried and dropped:
- the inverse in `_state_kernel`, by the warpgroup that fetches: 2.4 ms in all. Its products follow each other; three chunks
  side by side hide each other's latency;
- the inverse by products of two halves throughout, 30 instead of 18: 0.46 ms, then 0.32. Of these 0.16 are for its operands
  and the copies. Three warpgroups to a thread block, 0.37; four, registers spill, 0.39. With rounding back and forth as in
  `gpu_tiles.widened` it is 0.26;
- the inverse's rounds one by one instead of in a loop: a tenth more (the instruction cache);
- q S and P E by the warpgroup that carries the state: 1.49 ms for the states of T32768 H4, now 1.40. Without any outputs it
  would be 1.12, and there 0.33 are for the second halves of S and of E, 0.29 for k S, 0.23 for k^T E, and 0.39 for what is
  left with no product at all;
- one warpgroup for the outputs beside one state: 1.49 ms, as it then is what the state waits for. So it is beside two, for
  8 % of the state's time; there are no registers for a second;
- gates by XLA, which has no sums of 64 in one kernel: 31 us of small kernels where `_gates_kernel` and two transposes take
  16, and a product whose tuning was 2 s of the first call;
- gates in the inverse's kernel, with blocks that stay and ask for the keys of their next chunk early: 0.31 ms, as it has a
  third more instructions, and the blocks of a multiprocessor hide each other's copies as it is;
- a barrier before and behind each store, products in flight beside others, outputs a chunk later: no difference.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.axes import Gate, Keys, PerHead, Starts, State, Values
from tilewright.core.chip import Chip
from tilewright.core.dispatch import Launch
from tilewright.core.hopper import Accumulator, accumulate, hidden_zero, padded, product, refusal, store, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule import pallas_gpu_kda
from tilewright.ops.delta_rule.chunk import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.config import GPU_TILE, GPU_WIDEST_KEY, PallasGpuConfig
from tilewright.ops.delta_rule.gpu_parts import Columns, Parts, carry_in_parts
from tilewright.ops.delta_rule.gpu_tiles import (
    ACROSS,
    BETA,
    CHUNK,
    COARSE,
    FINE,
    GATE_ROWS,
    HALVES,
    INTO,
    ONWARD,
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
    widened,
)
from tilewright.ops.delta_rule.gradient import with_gradient
from tilewright.ops.delta_rule.pallas_gpu_bwd import backward

Config = PallasGpuConfig
DTYPES = ("bfloat16",)

_STAGES = 2  # Chunks on chip.
_WARPGROUPS = 3  # Of a thread block that writes outputs.
# Of a warpgroup with a state and of the one that fetches, where only the ends of parts are asked for.
_END_REGISTERS = 240, 24


class _Roles(NamedTuple):
    """Warpgroups of a thread block: those that carry a state of 64 channels, and those that write outputs, in turns."""

    states: int
    outputs: int

    # Of 504 that three warpgroups may have together: the state and its halves are 128.
    @property
    def state_registers(self) -> int:
        return 192 if self.states > 1 else 216

    @property
    def output_registers(self) -> int:
        return 120 if self.states > 1 else 144


def default_config(chip: Chip, q: Keys, k: Keys, v: Values, *rest: Any, scale: float) -> PallasGpuConfig:
    del k, rest, scale
    return PallasGpuConfig.for_shape(chip, *q.shape[:2], *v.shape[2:])


def unsupported_reason(
    launch: Launch, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float
) -> str | None:
    del k, v, g, rest, scale
    if (reason := refusal(launch.chip, q)) is not None:
        return reason
    if q.shape[-1] > GPU_WIDEST_KEY:
        return f"K={q.shape[-1]} must be {GPU_WIDEST_KEY} at most (the state is in registers); use implementation='xla'"
    return None


def _gates_kernel(*refs: Any, gated: bool, interpreted: bool):
    """The gates of 64 chunks: a chunk is a row of a tile, a token a column."""
    # inputs, [chunks, C]
    beta_ref = refs[0]
    g_ref = refs[1] if gated else None
    # outputs
    gates_ref = refs[1 + gated]  # [chunks, GATE_ROWS, C]
    # scratch
    ones = refs[2 + gated]  # [C, C]

    rows = pl.ds(lax.axis_index("block") * CHUNK, CHUNK)

    def read(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[rows], layout=WGMMA, optimized=False)

    def constant(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full(SQUARE, value, jnp.float32), WGMMA)

    def write(row: int, value: jax.Array) -> None:
        store(gates_ref.at[rows, row], value)

    beta = read(beta_ref)
    write(BETA, beta)
    if g_ref is None:
        for row, value in ((COARSE, constant(0.0)), (FINE, constant(0.0)), (INTO, constant(1.0))):
            write(row, value)
        write(ONWARD, beta)
        write(ACROSS, constant(1.0))
        return
    i, j = positions()
    ones[...] = jnp.where(i <= j, 1.0, 0.0).astype(jnp.bfloat16)
    plgpu.commit_smem()

    def sums(x: jax.Array) -> jax.Array:
        """Of each token and those before it. Three numbers of bfloat16 have all of one of float32."""
        first = x.astype(jnp.bfloat16)

        def add(sum_: Accumulator) -> None:
            for piece in (first, *halves(x - widened(first))):
                sum_.add(piece, ones)

        return product(SQUARE, add, interpreted=interpreted)

    def totals(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(jnp.sum(x, axis=1), SQUARE, [0])

    g = jnp.maximum(read(g_ref), LOWEST_GATE)
    (coarse, fine), (all_coarse, all_fine) = (coarse_and_fine(g, function) for function in (sums, totals))
    write(COARSE, coarse)
    write(FINE, fine)
    write(INTO, jnp.exp(coarse + fine))
    write(ONWARD, beta * jnp.exp((all_coarse - coarse) + (all_fine - fine)))
    write(ACROSS, jnp.exp(all_coarse + all_fine))


def _inverse_kernel(*refs: Any, group: int, interpreted: bool):
    # inputs
    k_ref, gates_ref = refs[:2]
    # outputs
    x_ref = refs[2]
    # scratch
    keys, gates, l_both, x_both, arrived = refs[3:]  # [C, K], [GATE_ROWS, C], [2 C, C] twice

    b, hv, n = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("chunk")
    tokens = pl.ds(n * CHUNK, CHUNK)
    plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, lax.div(hv, jnp.int32(group))], keys, arrived)
    plgpu.copy_gmem_to_smem(gates_ref.at[b, hv, n], gates, arrived)
    plgpu.barrier_wait(arrived)
    i, j = positions()
    alike = product(SQUARE, lambda sum_: sum_.add(keys, turned(keys)), interpreted=interpreted)  # [C, C]
    lower = jnp.where(i > j, alike * decay(gates, i, j) * along_columns(gates.at[BETA], SQUARE), 0.0)
    keep_halves(x_both, halves(invert(lower, i, j, l_both, x_both, interpreted=interpreted)))
    plgpu.commit_smem()
    for half in range(2):
        rows = pl.ds(half * CHUNK, CHUNK)
        plgpu.copy_smem_to_gmem(x_both.at[rows], x_ref.at[b, hv, tokens, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _state_kernel(
    *refs: Any, parts: Parts, ends: bool, keep: bool, group: int, roles: _Roles, scale: float, interpreted: bool
):
    """The state through the chunks of a part. For its `ends`: of values and of the identity, and no outputs."""
    # inputs
    q_ref, k_ref, v_ref, x_ref, gates_ref, initial_ref = refs[:6]
    # outputs
    o_ref, final_ref = end_ref, transition_ref = refs[6:8]
    states_ref, errors_ref = refs[8:10] if keep else (refs[0], refs[0])  # Without: not used.
    # scratch
    q_ring, k_ring, v_ring, x_ring, gate_ring, state_tiles, error_tiles, out_tiles, *barriers = refs[
        10 if keep else 8 :
    ]
    arrived, consumed, state_made, state_used, errors_made, errors_used = barriers
    states, outputs = roles

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    part, warpgroup = lax.axis_index("part"), lax.axis_index("warpgroup")
    h = lax.div(hv, jnp.int32(group))
    begin, count = parts.range_of(part)
    depth = q_ring.shape[-1]

    def slot_of(n: Any) -> jax.Array:
        return lax.rem(n, jnp.int32(_STAGES))

    def columns(of: Any) -> Columns:
        return Columns(block * states + of, v_ref.shape[3] // GPU_TILE)

    def tokens(n: Any) -> Any:
        return pl.ds((begin + n) * CHUNK, CHUNK)

    def between(state: Any, n: Any) -> Any:
        """Of barriers between a warpgroup with a state and the one that writes the outputs of a chunk, which one."""
        return state * outputs + lax.rem(n, jnp.int32(outputs))

    busy = columns(0).needed(part) if ends else True

    @pl.when((warpgroup >= states) & busy)
    def _fetch_and_write_outputs():
        plgpu.set_max_registers(_END_REGISTERS[1] if ends else roles.output_registers, action="decrease")
        mine = warpgroup - states

        def fetch(n: Any) -> None:
            slot = slot_of(n)
            for source, ring in (
                (k_ref.at[b, tokens(n), h], k_ring.at[slot]),
                (gates_ref.at[b, hv, begin + n], gate_ring.at[slot]),
                *((v_ref.at[b, tokens(n), hv, columns(w).channels], v_ring.at[slot, w]) for w in range(states)),
                (x_ref.at[b, hv, tokens(n)], x_ring.at[slot]),
                *(() if ends else ((q_ref.at[b, tokens(n), h], q_ring.at[slot]),)),
            ):
                plgpu.copy_gmem_to_smem(source, ring, arrived.at[slot])

        def first_fetch(n: Any) -> None:
            pl.when(n < count)(lambda: fetch(n))

        for number in range(_STAGES // outputs):
            first_fetch(mine + number * outputs)

        def write_outputs(n: Any) -> None:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            queries, gates = q_ring.at[slot], gate_ring.at[slot]
            i, j = positions()
            i = i + hidden_zero(n)
            qk = product(SQUARE, lambda sum_: sum_.add(queries, turned(k_ring.at[slot])), interpreted=interpreted)
            p = halves(qk * decay(gates, i, j) * along_columns(gates.at[BETA], SQUARE))
            into = along_rows(gates.at[INTO], SQUARE)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def one_tile(w: Any, carry: tuple[()]) -> tuple[()]:
                out, both = out_tiles.at[mine * states + w], between(w, n)
                plgpu.barrier_wait(state_made.at[both])
                q_s = product(
                    SQUARE, lambda sum_: sum_.add(queries, turned(state_tiles.at[w])), interpreted=interpreted
                )
                plgpu.barrier_arrive(state_used.at[both])
                plgpu.barrier_wait(errors_made.at[both])

                def add_p(sum_: Accumulator) -> None:
                    add_halves(sum_, p, turned(error_tiles.at[w, 0]))
                    sum_.add(p[0], turned(error_tiles.at[w, 1]))

                (o,) = accumulate((q_s * into,), add_p, interpreted=interpreted)
                plgpu.barrier_arrive(errors_used.at[both])
                out[...] = (o * scale).astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out, o_ref.at[b, tokens(n), hv, columns(w).channels])
                return carry

            lax.fori_loop(0, states, one_tile, ())

        def one_chunk(number: Any, carry: tuple[()]) -> tuple[()]:
            n = number * outputs + mine
            if not ends:
                write_outputs(n)
            plgpu.barrier_wait(consumed.at[slot_of(n)])
            pl.when(n + _STAGES < count)(lambda: fetch(n + _STAGES))
            return carry

        lax.fori_loop(0, lax.div(count - mine + (outputs - 1), jnp.int32(outputs)), one_chunk, ())
        plgpu.wait_smem_to_gmem(0)

    @pl.when((warpgroup < states) & busy)
    def _carry_the_state():
        plgpu.set_max_registers(_END_REGISTERS[0] if ends else roles.state_registers, action="increase")
        carried = columns(warpgroup)
        mine = carried.channels
        tile, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.
        first = pl.ds(0, CHUNK)

        def wait_for_outputs(used: Any, n: Any) -> None:
            pl.when(n >= 0)(lambda: plgpu.barrier_wait(used.at[between(warpgroup, jnp.maximum(n, 0))]))

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            state_tile, error_tile = (tiles.at[warpgroup + hidden_zero(n)] for tiles in (state_tiles, error_tiles))
            keys, values = k_ring.at[slot], v_ring.at[slot, warpgroup]
            x_both, gates = x_ring.at[slot], gate_ring.at[slot]
            if keep:
                pl.when(n > 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
            before = halves(state)  # [V, K]

            def add_k_s(sum_: Accumulator) -> None:
                add_halves(sum_, before, turned(keys))
                if ends:
                    return
                wait_for_outputs(state_used, n - 1)
                state_tile[...] = before[0]
                plgpu.commit_smem()
                plgpu.barrier_arrive(state_made.at[between(warpgroup, n)])

            k_s = product(tile, add_k_s, interpreted=interpreted)  # [V, C]
            v = load_turned(values)
            wanted = halves((carried.of_values(v) if ends else v) - k_s * along_columns(gates.at[INTO], tile))
            errors = product(
                tile,
                lambda sum_: add_split(sum_, wanted, turned(x_both), turned(x_both.at[:, first])),
                interpreted=interpreted,
            )
            if not ends:
                wait_for_outputs(errors_used, n - 1)
                for half, value in enumerate(halves(errors)):
                    error_tile[half] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(errors_made.at[between(warpgroup, n)])
            if keep:
                plgpu.copy_smem_to_gmem(state_tile, states_ref.at[b, hv, begin + n, mine])
                for half in range(HALVES):
                    plgpu.copy_smem_to_gmem(error_tile.at[half], errors_ref.at[b, hv, begin + n, half, mine])
            written = halves(errors * along_columns(gates.at[ONWARD], tile))
            left = state * along_rows(gates.at[ACROSS], state_shape)
            (state,) = accumulate((left,), lambda sum_: add_halves(sum_, written, keys), interpreted=interpreted)
            plgpu.barrier_arrive(consumed.at[slot])
            return state

        def through(state: jax.Array) -> jax.Array:
            return lax.fori_loop(0, count, one_chunk, state)

        if ends:
            state = through(carried.first_state(initial_ref.at[b, hv, 0], part, depth))
            carried.keep_end(state, end_ref.at[b, hv, part], transition_ref.at[b, hv, part], state_tiles.at[warpgroup])
            return
        state = through(plgpu.load(initial_ref.at[b, hv, part, mine], layout=WGMMA, optimized=False))
        for used in (state_used, errors_used):
            wait_for_outputs(used, jnp.asarray(count - 1, jnp.int32))

        @pl.when(part == parts.count - 1)
        def _last():
            final_ref[b, hv, mine, :] = state

        if keep:
            plgpu.wait_smem_to_gmem(0)


def _gates(g: jax.Array | None, beta: jax.Array, resets: jax.Array | None, common: dict[str, Any]) -> jax.Array:
    """The gates of each chunk, [B, HV, chunks, GATE_ROWS, C]."""
    if resets is not None:
        g = jnp.where(resets[:, :, None], LOWEST_GATE, jnp.zeros_like(beta) if g is None else g)
    given = [per_chunk(in_chunks(x)) for x in (beta, g) if x is not None]  # [B, HV, chunks, C]
    leading = given[0].shape[:3]
    flat = [padded(x.reshape(-1, CHUNK), 0, CHUNK) for x in given]
    gates = plgpu.kernel(
        functools.partial(_gates_kernel, gated=g is not None, interpreted=common["interpret"] is not None),
        out_type=output_like((flat[0].shape[0], GATE_ROWS, CHUNK), jnp.float32, beta),
        scratch_types=[tile(*SQUARE, dtype=jnp.bfloat16)],
        grid=(flat[0].shape[0] // CHUNK,),
        grid_names=("block",),
        kernel_name="delta_rule_gates",
        **common,
    )(*flat)
    return gates[: math.prod(leading)].reshape(*leading, GATE_ROWS, CHUNK)


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
    # Channels of zeros add nothing.
    q, k = (padded(in_chunks(x), 3, GPU_TILE) for x in (q, k))
    v = padded(in_chunks(v), 3, config.block_v)
    states = turned_states(initial_state, config.block_v)[:, :, None]  # [B, HV, parts, V, K]
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    chunks, group = t // CHUNK, hv // h
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {"compiler_params": compiler_params(), "interpret": gpu_interpret_params(launch.interpret)}
    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)
    gates = _gates(g, beta, resets, common)

    x = plgpu.kernel(
        functools.partial(_inverse_kernel, group=group, interpreted=interpreted),
        out_type=output_like((b, hv, t, 2 * CHUNK), jnp.bfloat16, k),
        scratch_types=[
            bfloat16_tile(CHUNK, depth),
            plgpu.SMEM((GATE_ROWS, CHUNK), jnp.float32),
            bfloat16_tile(2 * CHUNK, CHUNK),
            bfloat16_tile(2 * CHUNK, CHUNK),
            plgpu.Barrier(num_arrivals=2),
        ],
        grid=(chunks, hv, b),
        grid_names=("chunk", "head", "batch"),
        kernel_name="delta_rule_inverses",
        **common,
    )(k, gates)

    def carry(parts: Parts, states: jax.Array, out_type: list[Any], *, warpgroups: int, ends: bool) -> Any:
        roles = _Roles(warpgroups, 1 if ends else _WARPGROUPS - warpgroups)
        body = functools.partial(
            _state_kernel,
            parts=parts,
            ends=ends,
            keep=keep and not ends,
            group=group,
            roles=roles,
            scale=scale,
            interpreted=interpreted,
        )
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=[
                bfloat16_tile(_STAGES, CHUNK, depth),
                bfloat16_tile(_STAGES, CHUNK, depth),
                bfloat16_tile(_STAGES, roles.states, CHUNK, GPU_TILE),
                bfloat16_tile(_STAGES, CHUNK, 2 * CHUNK),
                plgpu.SMEM((_STAGES, GATE_ROWS, CHUNK), jnp.float32),
                bfloat16_tile(roles.states, GPU_TILE, depth),
                bfloat16_tile(roles.states, HALVES, GPU_TILE, CHUNK),
                bfloat16_tile(roles.outputs * roles.states, CHUNK, GPU_TILE),
                plgpu.Barrier(num_arrivals=(3 if ends else 4) + roles.states, num_barriers=_STAGES),
                plgpu.Barrier(num_arrivals=roles.states, num_barriers=_STAGES),
                *(plgpu.Barrier(num_arrivals=1, num_barriers=roles.states * roles.outputs) for _ in range(4)),
            ],
            grid=(hv, (width + (depth if ends else 0)) // (roles.states * GPU_TILE), parts.count, b),
            grid_names=("head", "values", "part", "batch"),
            num_threads=sum(roles),
            thread_name="warpgroup",
            kernel_name="delta_rule_ends" if ends else "delta_rule_states",
            **common,
        )(q, k, v, x, gates, states)

    o, final, *kept = carry_in_parts(carry, states, v, chunks, launch, keep=keep)
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
