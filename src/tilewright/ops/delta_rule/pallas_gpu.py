"""The delta rule and the gated delta rule as Mosaic GPU kernels for Hopper: two forward kernels. The backward is `xla`'s.

With a chunk of C = 64 tokens, G the sums of the log-decays inside it, decay_ij = exp(G_i - G_j) and X = (I + L)^-1 for
L_ij = beta_i (k_i . k_j) decay_ij below the diagonal, a chunk is

    n = X diag(beta) (v - diag(exp G) k S)                                  the corrections, [C, V]
    o = scale (diag(exp G) q S + P n),   P_ij = (q_i . k_j) decay_ij        on and below the diagonal
    S <- exp(G_C) S + k^T diag(exp(G_C - G)) n

`_inverse_kernel` makes X diag(beta) of every chunk by itself, all chunks at once; `_state_kernel` carries S through them.

Floor for K = V = D, a token and head in bfloat16: q, k, v read and o written, 8 D bytes; 10.5 MFLOP a chunk of D = 128.
Here: k once more and X written and read, 6 D bytes more at D = 128. That is 14 D, 1.4 GB for H96 T8192: a third of a
millisecond of an H200. Products of rounded halves make it 20 MFLOP a chunk.

Blocking. `_inverse_kernel`: a warpgroup a chunk, three to a thread block. `_state_kernel`: a thread block for a head and up
to 128 value channels, the whole sequence. A warpgroup carries the transposed state [64 channels, K] of its channels in
registers, where it is the accumulator of one product and, rounded, the left operand of the next: nothing of the chain
k S, n, S passes through shared memory. One more warpgroup fetches chunks into a ring of three and makes P.

The inverse: of blocks of 2, by hand; then of blocks twice as large, five times: X - (X L X where i is in the second half of
such a block and j in its first). Blocks of tokens are merged, never powers of L summed: those overflow for like keys.

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
from tilewright.core.hopper import Accumulator, accumulate, not_hopper, padded, product, tile
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule import xla
from tilewright.ops.delta_rule.chunk import LOWEST_GATE, coarse_and_fine
from tilewright.ops.delta_rule.config import GPU_TILE, GPU_WIDEST_KEY, PallasGpuConfig, XlaConfig

Config = PallasGpuConfig
DTYPES = ("bfloat16",)

_CHUNK = 64
_STAGES = 3
_SIDE_BY_SIDE = 3
# Of 504 that three warpgroups may have together: the state and its halves are 128.
_STATE_REGISTERS, _FETCH_REGISTERS = 200, 104
_WGMMA = plgpu.Layout.WGMMA
_SQUARE = (_CHUNK, _CHUNK)
_NOTHING = -1e30  # Its exponential is 0.

# The rows of a chunk's gates: the two parts of G, beta, exp(G), exp(G_C - G), exp(G_C).
_COARSE, _FINE, _BETA, _INTO, _ONWARD, _ACROSS = range(6)
_GATE_ROWS = 6


def default_config(chip: Chip, q: Keys, k: Keys, v: Values, *rest: Any, scale: float) -> PallasGpuConfig:
    del k, rest, scale
    return PallasGpuConfig.for_shape(chip, q.shape[0], *v.shape[2:])


def unsupported_reason(
    launch: Launch, q: Keys, k: Keys, v: Values, g: Gate | None, *rest: Any, scale: float
) -> str | None:
    del k, v, g, rest, scale
    if (reason := not_hopper(launch.chip)) is not None:
        return reason
    if q.dtype != jnp.bfloat16:
        return (
            f"q is {jnp.dtype(q.dtype).name}, and it multiplies bfloat16 only (Hopper's matrix unit would round float32 to "
            f"10 bits); pass q, k and v as bfloat16, or use implementation='xla'"
        )
    if q.shape[-1] > GPU_WIDEST_KEY:
        return f"K={q.shape[-1]} must be {GPU_WIDEST_KEY} at most (the state is in registers); use implementation='xla'"
    return None


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x rounded to bfloat16, and the rest of it."""
    rounded = x.astype(jnp.bfloat16)
    return rounded, (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16)


def _turned(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _add_split(accumulator: Accumulator, x: tuple[jax.Array, jax.Array], both: Any, rounded: Any) -> None:
    """Add x y, both split: `both` is a tile of y's halves, one below the other, `rounded` of the first alone."""
    accumulator.add(jnp.concatenate([x[0], x[0]], axis=1), both)  # [64, 2 C] [2 C, n]
    accumulator.add(x[1], rounded)  # [64, C] [C, n]


def _along_rows(ref: Any, shape: tuple[int, int]) -> jax.Array:
    """A vector of the shape's first axis, repeated along the second."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=_WGMMA.reduce(1), optimized=False), shape, [0])


def _along_columns(ref: Any, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(plgpu.load(ref, layout=_WGMMA.reduce(0), optimized=False), shape, [1])


def _positions() -> tuple[jax.Array, jax.Array]:
    i, j = (plgpu.broadcasted_iota(jnp.int32, _SQUARE, axis, layout=_WGMMA) for axis in (0, 1))
    return i, j  # [C, C] each


def _decay(gates: Any, i: jax.Array, j: jax.Array) -> jax.Array:
    """exp(G_i - G_j) where i >= j, else 0."""
    coarse, fine = (
        _along_rows(gates.at[part], _SQUARE) - _along_columns(gates.at[part], _SQUARE) for part in (_COARSE, _FINE)
    )
    return jnp.exp(jnp.where(i >= j, coarse + fine, _NOTHING))  # [C, C]


def _inverse_kernel(*refs: Any, chunks: int, group: int, interpreted: bool):
    # inputs
    k_ref, gates_ref = refs[:2]
    # outputs
    x_ref = refs[2]
    # scratch
    k_tiles, gate_tiles, l_tiles, x_tiles, arrived = refs[3:]

    b, hv, warpgroup = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("warpgroup")
    n = lax.axis_index("chunk") * _SIDE_BY_SIDE + warpgroup
    tokens = pl.ds(n * _CHUNK, _CHUNK)
    first = pl.ds(0, _CHUNK)

    @pl.when(n < chunks)
    def _one_chunk():
        keys, gates = k_tiles.at[warpgroup], gate_tiles.at[warpgroup]  # [C, K], [_GATE_ROWS, C]
        l_both, x_both = l_tiles.at[warpgroup], x_tiles.at[warpgroup]  # [2 C, C]
        ready = arrived.at[warpgroup]
        plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, lax.div(hv, jnp.int32(group))], keys, ready)
        plgpu.copy_gmem_to_smem(gates_ref.at[b, hv, n], gates, ready)
        plgpu.barrier_wait(ready)
        i, j = _positions()

        def keep(both: Any, halves: tuple[jax.Array, jax.Array]) -> None:
            for half, value in enumerate(halves):
                both[pl.ds(half * _CHUNK, _CHUNK)] = value

        alike = product(_SQUARE, lambda sum_: sum_.add(keys, _turned(keys)), interpreted=interpreted)  # [C, C]
        lower = jnp.where(i > j, alike * _decay(gates, i, j) * _along_rows(gates.at[_BETA], _SQUARE), 0.0)
        keep(l_both, _halves(lower))
        # i xor j is in [2^level, 2^(level+1)) where i and j are in different halves of a block of 2^(level+1).
        apart = lax.bitwise_xor(i, j)
        x = jnp.where(i == j, 1.0, 0.0) - jnp.where(apart == 1, lower, 0.0)
        for level in range(1, _CHUNK.bit_length() - 1):
            halves = _halves(x)
            keep(x_both, halves)
            plgpu.commit_smem()

            def add_x_l(sum_: Accumulator, halves: Any = halves) -> None:
                _add_split(sum_, halves, l_both, l_both.at[first])

            x_l = _halves(product(_SQUARE, add_x_l, interpreted=interpreted))

            def add_x_l_x(sum_: Accumulator, x_l: Any = x_l) -> None:
                _add_split(sum_, x_l, x_both, x_both.at[first])

            x_l_x = product(_SQUARE, add_x_l_x, interpreted=interpreted)
            x = x - jnp.where(lax.shift_right_logical(apart, level) == 1, x_l_x, 0.0)
        keep(x_both, _halves(x * _along_columns(gates.at[_BETA], _SQUARE)))
        plgpu.commit_smem()
        for half in range(2):
            rows = pl.ds(half * _CHUNK, _CHUNK)
            plgpu.copy_smem_to_gmem(x_both.at[rows], x_ref.at[b, hv, tokens, rows])
        plgpu.wait_smem_to_gmem(0)


def _state_kernel(
    *refs: Any, chunks: int, chunks_a_block: int, group: int, warpgroups: int, scale: float, interpreted: bool
):
    # inputs
    q_ref, k_ref, v_ref, x_ref, gates_ref, initial_ref = refs[:6]
    # outputs
    o_ref, final_ref, *starts_ref = refs[6:-10]
    # scratch
    q_ring, k_ring, v_ring, x_ring, gate_ring, p_tile, arrived, consumed, p_made, p_used = refs[-10:]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    warpgroup = lax.axis_index("warpgroup")
    h = lax.div(hv, jnp.int32(group))
    depth = q_ring.shape[-1]

    def slot_of(n: Any) -> jax.Array:
        return lax.rem(n, jnp.int32(_STAGES))

    def channels(of: Any) -> Any:
        return pl.ds((block * warpgroups + of) * GPU_TILE, GPU_TILE)

    def tokens(n: Any) -> Any:
        return pl.ds(n * _CHUNK, _CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _fetch_and_score():
        if warpgroups > 1:
            plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

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

        ahead = _STAGES - 1
        for n in range(min(ahead, chunks)):
            fetch(jnp.int32(n))

        def one_chunk(n: Any, carry: tuple[()]) -> tuple[()]:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            i, j = _positions()
            qk = product(
                _SQUARE, lambda sum_: sum_.add(q_ring.at[slot], _turned(k_ring.at[slot])), interpreted=interpreted
            )
            halves = _halves(qk * _decay(gate_ring.at[slot], i, j))
            pl.when(n > 0)(lambda: plgpu.barrier_wait(p_used))
            for half, value in enumerate(halves):
                p_tile[:, pl.ds(half * _CHUNK, _CHUNK)] = value
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
            plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        mine = channels(warpgroup)
        tile, state_shape = (GPU_TILE, _CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.
        first = pl.ds(0, _CHUNK)

        def one_chunk(n: Any, state: jax.Array) -> jax.Array:
            slot = slot_of(n)
            plgpu.barrier_wait(arrived.at[slot])
            keys, queries, values = k_ring.at[slot], q_ring.at[slot], v_ring.at[slot, warpgroup]
            x_both, gates = x_ring.at[slot], gate_ring.at[slot]
            if starts_ref:

                @pl.when(lax.rem(n, jnp.int32(chunks_a_block)) == 0)
                def _keep():
                    starts_ref[0][b, hv, lax.div(n, jnp.int32(chunks_a_block)), mine, :] = state

            rounded, rest = _halves(state)  # [V, K]

            def add_k_s(sum_: Accumulator) -> None:
                sum_.add(rounded, _turned(keys))
                sum_.add(rest, _turned(keys))

            k_s = product(tile, add_k_s, interpreted=interpreted)  # [V, C]
            q_s = product(tile, lambda sum_: sum_.add(rounded, _turned(queries)), interpreted=interpreted)
            into = _along_columns(gates.at[_INTO], tile)
            v = plgpu.load(_turned(values), layout=_WGMMA, optimized=False).astype(jnp.float32)
            wanted = _halves(v - k_s * into)
            corrections = product(
                tile,
                lambda sum_: _add_split(sum_, wanted, _turned(x_both), _turned(x_both.at[:, first])),
                interpreted=interpreted,
            )
            split = _halves(corrections)
            plgpu.barrier_wait(p_made)

            def add_p(sum_: Accumulator) -> None:
                _add_split(sum_, split, _turned(p_tile), _turned(p_tile.at[:, first]))

            (o,) = accumulate((q_s * into,), (), add_p, interpreted=interpreted)
            plgpu.barrier_arrive(p_used)
            # v's tile has been read: o goes out through it.
            _turned(values)[...] = (o * scale).astype(jnp.bfloat16)
            written = _halves(corrections * _along_columns(gates.at[_ONWARD], tile))

            def add_k(sum_: Accumulator) -> None:
                sum_.add(written[0], keys)
                sum_.add(written[1], keys)

            kept = state * _along_rows(gates.at[_ACROSS], state_shape)
            (state,) = accumulate((kept,), (), add_k, interpreted=interpreted)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(values, o_ref.at[b, tokens(n), hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return state

        state = plgpu.load(initial_ref.at[b, hv, mine], layout=_WGMMA, optimized=False)
        state = lax.fori_loop(0, chunks, one_chunk, state)
        plgpu.wait_smem_to_gmem(0)
        final_ref[b, hv, mine, :] = state


def _gates(g: jax.Array | None, beta: jax.Array, resets: jax.Array | None) -> jax.Array:
    """The gates of each chunk, [B, HV, chunks, _GATE_ROWS, C]. T is whole chunks."""

    def by_chunk(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.astype(jnp.float32), 1, 2).reshape(x.shape[0], x.shape[2], -1, _CHUNK)

    beta = by_chunk(beta)
    if g is None and resets is None:
        nothing, one = jnp.zeros_like(beta), jnp.ones_like(beta)
        return jnp.stack([nothing, nothing, beta, one, one, one], axis=3)
    g = jnp.zeros_like(beta) if g is None else by_chunk(jnp.maximum(g.astype(jnp.float32), LOWEST_GATE))
    if resets is not None:
        g = jnp.where(by_chunk(resets[:, :, None]) > 0, LOWEST_GATE, g)
    coarse, fine = coarse_and_fine(g, _sums)
    onward = (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)
    into = jnp.exp(coarse + fine)
    across = jnp.broadcast_to(into[..., -1:], into.shape)
    return jnp.stack([coarse, fine, beta, into, jnp.exp(onward), across], axis=3)


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
    tokens_a_block: int | None,
) -> tuple[jax.Array, ...]:
    """o, the final state, and, given `tokens_a_block`, the state before each so many tokens, [B, HV, num, K, V]."""
    config: PallasGpuConfig = launch.config
    true_t, true_depth, true_width = *q.shape[1:4:2], v.shape[3]
    time = functools.partial(padded, axis=1, multiple=_CHUNK)
    # Tokens of zeros leave the state as it is; channels of zeros add nothing.
    gates = _gates(
        None if g is None else time(g), time(beta), None if resets is None else time(resets)
    )  # [B, HV, chunks, rows, C]
    q, k = (padded(time(x), 3, GPU_TILE) for x in (q, k))
    v = padded(time(v), 3, config.block_v)
    state = padded(padded(jnp.swapaxes(initial_state, 2, 3), 2, config.block_v), 3, GPU_TILE)  # [B, HV, V, K]
    b, t, h, depth = q.shape
    hv, width = v.shape[2:]
    chunks, group, warpgroups = t // _CHUNK, hv // h, config.warpgroups
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {
        # Layouts follow from the operands; to infer them takes minutes for kernels such as these.
        "compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        "interpret": gpu_interpret_params(launch.interpret),
        "thread_name": "warpgroup",
    }

    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)

    x = plgpu.kernel(
        functools.partial(_inverse_kernel, chunks=chunks, group=group, interpreted=interpreted),
        out_type=output_like((b, hv, t, 2 * _CHUNK), jnp.bfloat16, k),
        scratch_types=[
            bfloat16_tile(_SIDE_BY_SIDE, _CHUNK, depth),
            plgpu.SMEM((_SIDE_BY_SIDE, _GATE_ROWS, _CHUNK), jnp.float32),
            bfloat16_tile(_SIDE_BY_SIDE, 2 * _CHUNK, _CHUNK),
            bfloat16_tile(_SIDE_BY_SIDE, 2 * _CHUNK, _CHUNK),
            plgpu.Barrier(num_arrivals=2, num_barriers=_SIDE_BY_SIDE),
        ],
        grid=(-(-chunks // _SIDE_BY_SIDE), hv, b),
        grid_names=("chunk", "head", "batch"),
        num_threads=_SIDE_BY_SIDE,
        **common,
    )(k, gates)
    out_type = [output_like(v.shape, jnp.bfloat16, v), output_like((b, hv, width, depth), jnp.float32, v)]
    if tokens_a_block is not None:
        out_type.append(output_like((b, hv, -(-true_t // tokens_a_block), width, depth), jnp.float32, v))
    o, final, *starts = plgpu.kernel(
        functools.partial(
            _state_kernel,
            chunks=chunks,
            chunks_a_block=max(1, (tokens_a_block or _CHUNK) // _CHUNK),
            group=group,
            warpgroups=warpgroups,
            scale=scale,
            interpreted=interpreted,
        ),
        out_type=out_type,
        scratch_types=[
            bfloat16_tile(_STAGES, _CHUNK, depth),
            bfloat16_tile(_STAGES, _CHUNK, depth),
            bfloat16_tile(_STAGES, warpgroups, _CHUNK, GPU_TILE),
            bfloat16_tile(_STAGES, _CHUNK, 2 * _CHUNK),
            plgpu.SMEM((_STAGES, _GATE_ROWS, _CHUNK), jnp.float32),
            bfloat16_tile(_CHUNK, 2 * _CHUNK),
            plgpu.Barrier(num_arrivals=4 + warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(hv, width // config.block_v, b),
        grid_names=("head", "values", "batch"),
        num_threads=1 + warpgroups,
        **common,
    )(q, k, v, x, gates, state)
    states = [jnp.swapaxes(s, -1, -2)[..., :true_depth, :true_width] for s in (final, *starts)]
    return o[:, :true_t, :, :true_width], *states


def _folded(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, **how: Any
) -> tuple[jax.Array, ...]:
    """`_forward`, which `jax.vmap` turns into a larger batch: a kernel of Mosaic GPU has no rule of its own for it."""
    arrays = (q, k, v, g, beta, initial_state, resets)

    @jax.custom_batching.custom_vmap
    def run(*arrays: Any) -> tuple[jax.Array, ...]:
        return _forward(*arrays, **how)

    @run.def_vmap
    def _(axis_size: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
        def fold(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        given = [None if x is None else fold(x, is_batched) for x, is_batched in zip(arrays, batched, strict=True)]
        results = _folded(*given, **how)
        return tuple(x.reshape(axis_size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    return run(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
) -> tuple[jax.Array, jax.Array]:
    o, final = _folded(q, k, v, g, beta, initial_state, resets, scale=scale, launch=launch, tokens_a_block=None)
    return o, final


def _xla_launch(t: int, launch: Launch) -> Launch:
    return Launch(launch.chip, XlaConfig.for_length(t, launch.chip), None)


def _keep(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, resets: Any, scale: float, launch: Launch
) -> tuple[Any, Any]:
    """The states that the backward of `xla` starts its blocks from come from the kernel."""
    blocks: XlaConfig = _xla_launch(q.shape[1], launch).config
    o, final, starts = _folded(
        q,
        k,
        v,
        g,
        beta,
        initial_state,
        resets,
        scale=scale,
        launch=launch,
        tokens_a_block=blocks.chunk * blocks.block_chunks,
    )
    return (o, final), (q, k, v, g, beta, initial_state, resets, starts)


def _pull(scale: float, launch: Launch, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    *operands, starts = saved
    q = operands[0]
    b, hv, num, depth, width = starts.shape
    h = q.shape[2]
    states = jnp.moveaxis(starts.reshape(b, h, hv // h, num, depth, width), 3, 0)
    return xla.backward(scale, _xla_launch(q.shape[1], launch), (*operands, states, None), cotangents)


_delta_rule.defvjp(_keep, _pull)


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
    """Both ops: without a gate, or with one a head."""
    return _delta_rule(q, k, v, g, beta, initial_state, resets, scale, launch)


gated_delta_rule_pallas_gpu = delta_rule_pallas_gpu
