"""The backward of the delta rule and the gated delta rule on Hopper: two Mosaic GPU kernels. See pallas_gpu.py.

With E the errors v_t - k_t S_t that the tokens correct, X = (I + M diag(beta))^-1, M_ij = (k_i . k_j) decay_ij below the
diagonal, P_ij = (q_i . k_j) decay_ij on and below it, and a gate's into = exp G, onward = exp(G_C - G), across = exp G_C, a
chunk is

    E = X (v - into k S),    o = scale (into q S + P beta E),    S' = across S + (onward beta k)^T E

and its gradients are, with dS' that of the state after it,

    dE = scale beta P^T dO + onward beta k dS'        dv = X^T dE
    dS = across dS' + scale (into q)^T dO - (into k)^T dv                                          what is sequential
    Y_ij = scale (dO_i . E_j) decay_ij, i >= j        Z_ij = -(dv_i . E_j) decay_ij, i > j
    dq = scale into (dO S^T) + Y beta k
    dk = onward beta (E dS'^T) - into (dv S^T) + beta Y^T q + Z beta k + beta Z^T k
    dbeta_j = onward_j k_j . (E dS'^T)_j + sum_i (Y_ij (q_i . k_j) + Z_ij (k_i . k_j))

The gradient of G_i is what goes through exp(G_i) less what goes through exp(-G_i): rows of the pairs' sums less columns.

What the forward keeps, a chunk and head of K = V = 128 in bfloat16: the state before it (32 KB), E (16 KB) and X (16 KB);
q, k and v are 48 KB. Neither v nor o is read again. To make these anew would be the whole forward once more: its inverses
and its sequential part are half of forward and backward.

`_reverse_kernel` carries dS from the last chunk to the first, as the forward's `_state_kernel` does S, and writes dv and
each dS'. `_gradient_kernel` makes all else, all chunks at once.

Floor for K = V = D, a token and head in bfloat16: q, k, v, dO read and dq, dk, dv written, 14 D bytes. Here for D = 128:
forward, E and S written, 6 D more than without a backward; reverse, q, k, dO, X read (7 D), dv and dS' written (6 D);
gradients, q, k, dO, dv, E, S, dS' read (18 D), dq and dk written (4 D). That is 41 D, 4.1 GB for H96 T8192: one
millisecond of an H200. FLOPs of a chunk: 11 products of [64, 64, 128] in the reverse kernel, 14 in the other, 26 MFLOP.
One kernel for both would save S and dS' some 8 D of these 41, and make the sequential part twice as long.

Blocking. `_reverse_kernel`: as `_state_kernel`. `_gradient_kernel`: a thread block takes chunks of a query head one after
the other, of all value heads of its group, whose dq and dk it sums (between heads these are in a scratch of its own, which
stays in the L2 cache). Of its two warpgroups each has 64 key channels of dq and dk; one makes Y and the other Z, which both
need. Values stream past 64 channels at a time.

Numerics. Accumulators, decays and dS are float32. In the reverse kernel dS, dE and dv are operands of two halves, for their
errors would pass from chunk to chunk; P, X, and in the other kernel S are rounded once. Y, Z, E and dS' have two halves:
the gradients of gates and betas are sums of many terms of either sign.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tilewright.core.dispatch import Launch
from tilewright.core.hopper import (
    Accumulator,
    accumulate,
    hidden_zero,
    padded,
    product,
    products,
    quotient,
    tile,
    wait_for_products,
)
from tilewright.core.manual_axes import output_like
from tilewright.core.target import gpu_interpret_params
from tilewright.ops.delta_rule.config import GPU_TILE, PallasGpuConfig
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
    along_columns,
    along_rows,
    compiler_params,
    decay,
    halves,
    in_chunks,
    load_tile,
    load_turned,
    positions,
    turned,
    turned_states,
)

_STAGES = 2  # Of the ring of either kernel: the halves of dS' have the room of a third.
# Of 504 that three warpgroups may have together.
_STATE_REGISTERS, _SCORE_REGISTERS = 200, 104
_GRADIENT_REGISTERS, _FETCH_REGISTERS = 232, 40
_SIDES = 2  # Warpgroups of `_gradient_kernel` that compute: the one of Y and the one of Z.

# What `_gradient_kernel` sums over channels or tokens, a row each: k . (E dS'^T); columns of the pairs' sums; what goes
# through exp(G_i), rows of the pairs' sums among it; S . dS'. The last two are a gate's.
_ONTO, _COLUMNS, _ROWS, _STATES = range(4)


def _reverse_kernel(*refs: Any, chunks: int, group: int, warpgroups: int, scale: float, interpreted: bool):
    # inputs
    q_ref, k_ref, d_o_ref, x_ref, gates_ref, d_final_ref = refs[:6]
    # outputs
    d_v_ref, d_states_ref, d_initial_ref = refs[6:9]
    # scratch
    q_ring, k_ring, d_o_ring, x_ring, gate_ring, p_tile, d_state_tiles, arrived, consumed, p_made, p_used = refs[9:]

    b, hv, block = lax.axis_index("batch"), lax.axis_index("head"), lax.axis_index("values")
    warpgroup = lax.axis_index("warpgroup")
    h = lax.div(hv, jnp.int32(group))
    stages, depth = q_ring.shape[0], q_ring.shape[-1]

    def slot_of(step: Any) -> jax.Array:
        return lax.rem(step, jnp.int32(stages))

    def channels(of: Any) -> Any:
        return pl.ds((block * warpgroups + of) * GPU_TILE, GPU_TILE)

    def chunk_of(step: Any) -> tuple[Any, Any]:
        n = chunks - 1 - step
        return n, pl.ds(n * CHUNK, CHUNK)

    @pl.when(warpgroup == warpgroups)
    def _fetch_and_score():
        if warpgroups > 1:
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")

        def fetch(step: Any) -> None:
            slot = slot_of(step)
            n, tokens = chunk_of(step)
            for source, ring in (
                (k_ref.at[b, tokens, h], k_ring.at[slot]),
                (gates_ref.at[b, hv, n], gate_ring.at[slot]),
                (q_ref.at[b, tokens, h], q_ring.at[slot]),
                (x_ref.at[b, hv, tokens, pl.ds(0, CHUNK)], x_ring.at[slot]),
                *((d_o_ref.at[b, tokens, hv, channels(w)], d_o_ring.at[slot, w]) for w in range(warpgroups)),
            ):
                plgpu.copy_gmem_to_smem(source, ring, arrived.at[slot])

        ahead = stages - 1
        for step in range(min(ahead, chunks)):
            fetch(jnp.int32(step))

        def one_chunk(step: Any, carry: tuple[()]) -> tuple[()]:
            slot = slot_of(step)
            plgpu.barrier_wait(arrived.at[slot])
            i, j = positions()
            qk = product(
                SQUARE, lambda sum_: sum_.add(q_ring.at[slot], turned(k_ring.at[slot])), interpreted=interpreted
            )
            gates = gate_ring.at[slot]
            weights = qk * decay(gates, i, j) * along_columns(gates.at[BETA], SQUARE) * scale
            pl.when(step > 0)(lambda: plgpu.barrier_wait(p_used))
            p_tile[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.barrier_arrive(p_made)

            @pl.when(step + ahead < chunks)
            def _next():
                pl.when(step > 0)(lambda: plgpu.barrier_wait(consumed.at[slot_of(step + ahead)]))
                fetch(step + ahead)

            return carry

        lax.fori_loop(0, chunks, one_chunk, ())

    @pl.when(warpgroup < warpgroups)
    def _carry_the_gradient():
        if warpgroups > 1:
            plgpu.set_max_registers(_STATE_REGISTERS, action="increase")
        mine = channels(warpgroup)
        tile_shape, state_shape = (GPU_TILE, CHUNK), (GPU_TILE, depth)  # Transposed: a row is a value channel.
        # H200, H96 T8192: 0.63 ms, and 0.69 by bits, which are faster in every other kernel. Why is not known.
        split_in_two = functools.partial(halves, by_conversion=True)

        def one_chunk(step: Any, d_state: jax.Array) -> jax.Array:
            slot = slot_of(step)
            n, tokens = chunk_of(step)
            plgpu.barrier_wait(arrived.at[slot])
            keys, queries, d_o = k_ring.at[slot], q_ring.at[slot], d_o_ring.at[slot, warpgroup]
            gates = gate_ring.at[slot]
            after = split_in_two(d_state)  # [V, K]
            onto = product(tile_shape, lambda sum_: add_halves(sum_, after, turned(keys)), interpreted=interpreted)
            for half in range(HALVES):
                d_state_tiles[warpgroup, half] = after[half]
            plgpu.commit_smem()
            for half in range(HALVES):
                plgpu.copy_smem_to_gmem(d_state_tiles.at[warpgroup, half], d_states_ref.at[b, hv, n, half, mine])
            onto = onto * along_columns(gates.at[ONWARD], tile_shape)  # [V, C]
            plgpu.barrier_wait(p_made)
            (d_errors,) = accumulate((onto,), lambda sum_: sum_.add(turned(d_o), p_tile), interpreted=interpreted)
            plgpu.barrier_arrive(p_used)
            split = split_in_two(d_errors)
            d_v = product(tile_shape, lambda sum_: add_halves(sum_, split, x_ring.at[slot]), interpreted=interpreted)
            into = along_columns(gates.at[INTO], tile_shape)
            read = (load_turned(d_o) * (into * scale)).astype(jnp.bfloat16)
            erased = split_in_two(d_v * -into)

            def add(sum_: Accumulator) -> None:
                sum_.add(read, queries)
                add_halves(sum_, erased, keys)

            left = d_state * along_rows(gates.at[ACROSS], state_shape)
            (d_state,) = accumulate((left,), add, interpreted=interpreted)
            # The tile of dO has been read: dv goes out through it.
            turned(d_o)[...] = d_v.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(d_o, d_v_ref.at[b, tokens, hv, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(consumed.at[slot])
            return d_state

        d_state = plgpu.load(d_final_ref.at[b, hv, mine], layout=WGMMA, optimized=False)
        d_state = lax.fori_loop(0, chunks, one_chunk, d_state)
        plgpu.wait_smem_to_gmem(0)
        d_initial_ref[b, hv, mine, :] = d_state


def _gradient_kernel(
    *refs: Any, heads: tuple[int, int, int], chunks: int, scale: float, gated: bool, interpreted: bool
):
    # inputs
    q_ref, k_ref, d_o_ref, d_v_ref, errors_ref, states_ref, d_states_ref, gates_ref = refs[:8]
    # outputs
    d_q_ref, d_k_ref, rows_ref, held_ref = refs[8:12]
    # scratch
    qk_tiles, value_ring, error_ring, state_ring, d_state_ring, pair_tiles, gate_ring, row_tiles = refs[12:20]
    arrived, consumed, qk_arrived, qk_free, gates_arrived, gates_free, exchanged, finished = refs[20:]

    batches, h_count, group = heads
    stages, parts = state_ring.shape[:2]  # K is `parts` times 64 channels.
    tiles = d_v_ref.shape[-1] // GPU_TILE
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    side = lax.axis_index("warpgroup")
    items = batches * h_count * chunks
    count = lax.div(items - block + blocks - 1, jnp.int32(blocks))

    def place(index: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Of the block's work, by number: batch, query head, value head, chunk, and which of its group the head is."""
        number, member = quotient(index, group)
        rest, n = quotient(block + number * blocks, chunks)
        b, h = quotient(rest, h_count)
        return b, h, h * group + member, n, member

    def slot_of(step: Any, stages: int) -> Any:
        return lax.rem(step, jnp.int32(stages))

    @pl.when(side == _SIDES)
    def _fetch():
        plgpu.set_max_registers(_FETCH_REGISTERS, action="decrease")

        def one_head(index: Any, carry: tuple[()]) -> tuple[()]:
            b, h, hv, n, member = place(index)
            tokens = pl.ds(n * CHUNK, CHUNK)
            gate_slot = slot_of(index, 2)
            pl.when(index >= 2)(lambda: plgpu.barrier_wait(gates_free.at[gate_slot]))
            plgpu.copy_gmem_to_smem(gates_ref.at[b, hv, n], gate_ring.at[gate_slot], gates_arrived.at[gate_slot])
            for t in range(tiles):
                step = index * tiles + t
                slot = slot_of(step, stages)
                pl.when(step >= stages)(lambda slot=slot: plgpu.barrier_wait(consumed.at[slot]))
                mine = pl.ds(t * GPU_TILE, GPU_TILE)
                copies = [
                    (d_o_ref.at[b, tokens, hv, mine], value_ring.at[slot, 0]),
                    (d_v_ref.at[b, tokens, hv, mine], value_ring.at[slot, 1]),
                ]
                for half in range(HALVES):
                    copies.append((errors_ref.at[b, hv, n, half, mine], error_ring.at[slot, half]))
                for part in range(parts):
                    depth = pl.ds(part * GPU_TILE, GPU_TILE)
                    copies.append((states_ref.at[b, hv, n, mine, depth], state_ring.at[slot, part]))
                    for half in range(HALVES):
                        source = d_states_ref.at[b, hv, n, half, mine, depth]
                        copies.append((source, d_state_ring.at[slot, half, part]))
                for source, target in copies:
                    plgpu.copy_gmem_to_smem(source, target, arrived.at[slot])

            # Not before the values: those are needed first, and these wait for the chunk before to be done with.
            @pl.when(member == 0)
            def _queries_and_keys():
                pl.when(index > 0)(lambda: plgpu.barrier_wait(qk_free))
                for which, ref in enumerate((q_ref, k_ref)):
                    for part in range(parts):
                        source = ref.at[b, tokens, h, pl.ds(part * GPU_TILE, GPU_TILE)]
                        plgpu.copy_gmem_to_smem(source, qk_tiles.at[which, part], qk_arrived)

            return carry

        lax.fori_loop(0, count * group, one_head, ())

    @pl.when(side < _SIDES)
    def _compute():
        plgpu.set_max_registers(_GRADIENT_REGISTERS, action="increase")
        # With 64 key channels both warpgroups have the same ones, and the second one's sums are left out.
        part = side if parts > 1 else 0
        own = 1.0 if parts > 1 else jnp.where(side == 0, 1.0, 0.0)
        rows = row_tiles.at[side]

        def one_head(index: Any, carry: tuple[()]) -> tuple[()]:
            b, h, hv, n, member = place(index)
            tokens = pl.ds(n * CHUNK, CHUNK)
            zero = hidden_zero(index)
            queries, keys = qk_tiles.at[zero, part], qk_tiles.at[zero + 1, part]  # [C, 64]

            def add_values(read: Accumulator, back: Accumulator, onto: Accumulator, pairs: Accumulator) -> Any:
                state_products = []
                issued = 5 + HALVES  # By a round of the loop.
                for t in range(tiles):
                    slot = slot_of(index * tiles + t, stages) + zero
                    plgpu.barrier_wait(arrived.at[slot])
                    d_o, d_v, state = value_ring.at[slot, 0], value_ring.at[slot, 1], state_ring.at[slot, part]
                    errors, d_states = error_ring.at[slot], d_state_ring.at[slot]
                    read.add(d_o, state)  # [C, V] [V, K]
                    back.add(d_v, state)
                    onto.add(turned(errors.at[0]), d_states.at[0, part])
                    onto.add(turned(errors.at[0]), d_states.at[1, part])
                    onto.add(turned(errors.at[1]), d_states.at[0, part])
                    for half in range(HALVES):
                        pairs.add(value_ring.at[slot, side], errors.at[half])  # [C, V] [V, C]
                    if gated:
                        both = load_tile(state) * load_tile(d_states.at[0, part])
                        state_products.append(jnp.sum(both, axis=1))
                        if interpreted:  # A fence behind a plain read, as in `Accumulator.add`.
                            plgpu.commit_smem()
                    if t > 0:
                        wait_for_products(issued, interpreted=interpreted)
                        plgpu.barrier_arrive(consumed.at[slot_of(index * tiles + t - 1, stages)])
                wait_for_products(0, interpreted=interpreted)
                plgpu.barrier_arrive(consumed.at[slot_of(index * tiles + tiles - 1, stages)])
                return (functools.reduce(jnp.add, state_products),) if gated else ()

            read, back, onto, pairs, *state_products = products((SQUARE,) * 4, add_values, interpreted=interpreted)
            gate_slot = slot_of(index, 2)
            gates = gate_ring.at[gate_slot]
            plgpu.barrier_wait(gates_arrived.at[gate_slot])
            pl.when(member == 0)(lambda: plgpu.barrier_wait(qk_arrived))
            # The rows of the chunk before are out.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            # Through the states.
            into = along_rows(gates.at[INTO], SQUARE)
            read, back = read * (into * scale), back * into
            k_part = load_tile(keys)
            rows.at[_ONTO][...] = jnp.sum(k_part * onto, axis=1) * own
            d_q, d_k = read, onto * along_rows(gates.at[ONWARD], SQUARE) - back
            if group > 1:
                d_q, d_k = (
                    gradient + jnp.where(member > 0, plgpu.load(held, layout=WGMMA, optimized=False), 0.0)
                    for gradient, held in ((d_q, held_ref.at[block, side, 0]), (d_k, held_ref.at[block, side, 1]))
                )
            through_states = None
            if gated:
                through_states = jnp.sum(load_tile(queries) * read - k_part * back, axis=1) * own
                rows.at[_STATES][...] = state_products[0] * own

            # Between the tokens.
            def add_alike(sum_: Accumulator) -> None:
                for p in range(parts):
                    sum_.add(qk_tiles.at[side + zero, p], turned(qk_tiles.at[zero + 1, p]))

            alike = product(SQUARE, add_alike, interpreted=interpreted)  # q_i . k_j, or k_i . k_j
            i, j = positions()
            sign = jnp.where(side == 0, scale, -1.0)
            pairs = jnp.where(i - j >= side, pairs * decay(gates, i, j) * sign, 0.0)  # Y or Z.
            alike = alike * pairs
            beta = along_columns(gates.at[BETA], SQUARE)
            if through_states is not None:
                rows.at[_ROWS][...] = through_states + jnp.sum(alike * beta, axis=1)

            def add_pairs(d_q: Accumulator, d_k: Accumulator) -> None:
                y, z = pair_tiles.at[zero], pair_tiles.at[zero + 1]
                d_q.add(y, keys)
                d_k.add(turned(y), queries)
                d_k.add(z, keys)
                d_k.add(turned(z), keys)

            def both_have_read() -> None:
                plgpu.barrier_arrive(finished)
                plgpu.barrier_wait(finished)

            # One after the other: there is no room for a tile of each.
            for half, value in enumerate(halves(pairs * beta)):
                if half > 0:
                    both_have_read()
                pair_tiles[side] = value
                plgpu.commit_smem()
                plgpu.barrier_arrive(exchanged)
                plgpu.barrier_wait(exchanged)
                d_q, d_k = accumulate((d_q, d_k), add_pairs, interpreted=interpreted)
            plgpu.barrier_arrive(gates_free.at[gate_slot])

            def add_columns() -> None:
                rows.at[_COLUMNS][...] = jnp.sum(alike, axis=0)

            # Sums over rows pass between warps through memory that the warpgroups have in common: one after the other.
            pl.when(side == 0)(add_columns)
            both_have_read()  # The pairs, and queries and keys.
            pl.when(side == 1)(add_columns)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(rows, rows_ref.at[b, hv, n, side])

            def hold() -> None:
                for which, gradient in enumerate((d_q, d_k)):
                    held_ref[block, side, which] = gradient

            def store() -> None:
                # The tiles of queries and keys have been read: the gradients go out through them.
                queries[...] = d_q.astype(jnp.bfloat16)
                keys[...] = d_k.astype(jnp.bfloat16)
                plgpu.commit_smem()
                depth = pl.ds(part * GPU_TILE, GPU_TILE)
                plgpu.copy_smem_to_gmem(queries, d_q_ref.at[b, tokens, h, depth])
                plgpu.copy_smem_to_gmem(keys, d_k_ref.at[b, tokens, h, depth])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            last = group - 1
            if group > 1:
                pl.when(member < last)(hold)
            pl.when((member == last) & (side < parts))(store)
            pl.when(member == last)(lambda: plgpu.barrier_arrive(qk_free))
            return carry

        lax.fori_loop(0, count * group, one_head, ())
        plgpu.wait_smem_to_gmem(0)


def _gate_gradients(sums: jax.Array, gates: jax.Array, *, gated: bool) -> tuple[jax.Array, jax.Array | None]:
    """d beta and d g, [B, HV, chunks, C] each, from the sums of `_gradient_kernel`."""
    coarse, fine, beta = (gates[..., row, :] for row in (COARSE, FINE, BETA))
    onward = jnp.exp((coarse[..., -1:] - coarse) + (fine[..., -1:] - fine))
    onto = onward * sums[..., _ONTO, :]
    d_beta = onto + sums[..., _COLUMNS, :]
    if not gated:
        return d_beta, None
    d_sums = sums[..., _ROWS, :] - beta * d_beta
    last = jnp.sum(beta * onto + gates[..., ACROSS, :] * sums[..., _STATES, :], axis=-1, keepdims=True)
    d_sums = d_sums + jnp.where(jnp.arange(CHUNK) == CHUNK - 1, last, 0.0)
    # A gate is in the sums of its token and all later ones.
    ones = jnp.tril(jnp.ones(SQUARE, d_sums.dtype))
    return d_beta, jnp.matmul(d_sums, ones, precision=lax.Precision.HIGHEST, preferred_element_type=d_sums.dtype)


def backward(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array | None,
    beta: jax.Array,
    resets: jax.Array | None,
    x: jax.Array,
    gates: jax.Array,
    states: jax.Array,
    errors: jax.Array,
    d_o: jax.Array,
    d_final: jax.Array,
    *,
    scale: float,
    launch: Launch,
) -> tuple[Any, ...]:
    """The gradients of q, k, v, g, beta and the initial state. x, gates, states and errors are what the forward kept."""
    config: PallasGpuConfig = launch.config
    (_, true_t, h, true_depth), true_width = q.shape, d_o.shape[3]
    b, hv, chunks, width, depth = states.shape
    t, group, warpgroups = chunks * CHUNK, hv // h, config.warpgroups
    gated = g is not None
    q, k = (padded(in_chunks(array), 3, GPU_TILE) for array in (q, k))
    d_o = padded(in_chunks(d_o), 3, config.block_v)
    d_state = turned_states(d_final, config.block_v)  # [B, HV, V, K]
    interpreted = launch.interpret is not None
    common: dict[str, Any] = {
        "compiler_params": compiler_params(barriers=True),
        "interpret": gpu_interpret_params(launch.interpret),
        "thread_name": "warpgroup",
    }
    bfloat16_tile = functools.partial(tile, dtype=jnp.bfloat16)
    d_v, d_states, d_initial = plgpu.kernel(
        functools.partial(
            _reverse_kernel, chunks=chunks, group=group, warpgroups=warpgroups, scale=scale, interpreted=interpreted
        ),
        out_type=[
            output_like(d_o.shape, jnp.bfloat16, d_o),
            output_like((b, hv, chunks, HALVES, width, depth), jnp.bfloat16, d_o),
            output_like((b, hv, width, depth), jnp.float32, d_o),
        ],
        scratch_types=[
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, CHUNK, depth),
            bfloat16_tile(_STAGES, warpgroups, CHUNK, GPU_TILE),
            bfloat16_tile(_STAGES, *SQUARE),
            plgpu.SMEM((_STAGES, GATE_ROWS, CHUNK), jnp.float32),
            bfloat16_tile(*SQUARE),
            bfloat16_tile(warpgroups, HALVES, GPU_TILE, depth),
            plgpu.Barrier(num_arrivals=4 + warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=warpgroups),
        ],
        grid=(hv, width // config.block_v, b),
        grid_names=("head", "values", "batch"),
        num_threads=1 + warpgroups,
        kernel_name="delta_rule_reverse",
        **common,
    )(q, k, d_o, x, gates, d_state)
    parts = depth // GPU_TILE
    # In the interpreter two: a block is to have several chunks there, too.
    blocks = min(b * h * chunks, 2 if interpreted else launch.chip.multiprocessors or 1)
    row_count = 4 if gated else 2
    both = functools.partial(plgpu.Barrier, num_arrivals=_SIDES)
    d_q, d_k, sums, _ = plgpu.kernel(
        functools.partial(
            _gradient_kernel, heads=(b, h, group), chunks=chunks, scale=scale, gated=gated, interpreted=interpreted
        ),
        out_type=[
            output_like(q.shape, jnp.bfloat16, d_o),
            output_like(q.shape, jnp.bfloat16, d_o),
            output_like((b, hv, chunks, _SIDES, row_count, CHUNK), jnp.float32, d_o),
            # What a block has of dq and dk between the heads of a group: in registers it would not fit beside the rest.
            output_like((blocks if group > 1 else 1, _SIDES, 2, *SQUARE), jnp.float32, d_o),
        ],
        scratch_types=[
            bfloat16_tile(2, parts, *SQUARE),
            bfloat16_tile(_STAGES, 2, *SQUARE),
            bfloat16_tile(_STAGES, HALVES, *SQUARE),
            bfloat16_tile(_STAGES, parts, *SQUARE),
            bfloat16_tile(_STAGES, HALVES, parts, *SQUARE),
            bfloat16_tile(_SIDES, *SQUARE),
            plgpu.SMEM((2, GATE_ROWS, CHUNK), jnp.float32),
            plgpu.SMEM((_SIDES, row_count, CHUNK), jnp.float32),
            plgpu.Barrier(num_arrivals=2 + HALVES + parts * (1 + HALVES), num_barriers=_STAGES),
            both(num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=2 * parts),
            both(),
            plgpu.Barrier(num_arrivals=1, num_barriers=2),
            both(num_barriers=2),
            both(),
            both(),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=1 + _SIDES,
        kernel_name="delta_rule_gradients",
        **common,
    )(q, k, d_o, d_v, errors, states, d_states, gates)

    def by_token(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(b, hv, t), 1, 2)[:, :true_t]

    d_beta, d_g = _gate_gradients(jnp.sum(sums, axis=3), gates, gated=gated)
    if g is not None and d_g is not None:
        d_g = by_token(d_g)
        if resets is not None:
            d_g = jnp.where(resets[:, :, None].astype(bool), 0.0, d_g)
        d_g = d_g.astype(g.dtype)
    d_initial = jnp.swapaxes(d_initial, 2, 3)[..., :true_depth, :true_width]
    d_q, d_k = (array[:, :true_t, :, :true_depth] for array in (d_q, d_k))
    return d_q, d_k, d_v[:, :true_t, :, :true_width], d_g, by_token(d_beta).astype(beta.dtype), d_initial
