"""What a chunk of 64 tokens needs before a state comes: scores, inverses and scaled operands, for the forward kernel.

The algebra is that of wy_transform.py with beta on the other side of the inverse. For a head with A_ij = (k_i . k_j)
decay_ij for i > j and M_ij = (q_i . k_j) decay_ij for i >= j, with b the diagonal matrix of beta, and S the state before:

    R = v - into k S,   U = (I + A b)^-1 R,   o = scale (into q S + M b U),   S' = across S + (onward k)^T b U

So beta scales columns, where it is a row that needs no broadcast over lanes. T = (I + A b)^-1 goes into what reads U,
which is independent of the state: with W = [M; (onward k)^T] b T, [o'; S''] = W R.

Two heads lie side by side. The 128 lanes of their [64, 64] matrices are ordered (half of the chunk, head, token of the
half), so that the [32, 32] blocks of the inverses of four heads fill whole registers.

Everything here is a generator that yields between its stages. `in_lock_step` runs many of them stage by stage: the
compiler keeps close to the order of the program, and fills the latency of one with the work of the others.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from tilewright.core.chip import LANES, SUBLANES
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.matmul_precision import Form, MatmulPrecision, multiply, split
from tilewright.ops.delta_rule.wy_transform import halvings

CHUNK = 64
_HALF = CHUNK // 2
PAIR = 2  # Heads that fill the lanes side by side.
_QUAD = LANES // _HALF  # Heads whose halves of a chunk fill the lanes.
_LOG_ZERO = -1e30  # Its exponential is 0.

MILD = 72.0
"""KDA: the most that the gates of a channel may add up to within a chunk, by magnitude, for scores from one product of
operands that are scaled by exp(sum) and exp(-sum). Both terms of such an operand are normal numbers."""
_IN_BLOCKS = 3  # The first of `halvings(CHUNK)` that is inside of blocks of 8.
_CLIPPED = 80.0  # Its exponential is finite.

Terms = tuple[jax.Array, ...]
Stages = Generator[None, None, Any]


def in_lock_step(stages: Sequence[Stages]) -> Stages:
    """Generators as one, whose stages are the stages of all of them, and whose result is the list of theirs."""
    results: list[Any] = [None] * len(stages)
    running = list(range(len(stages)))
    while running:
        for index in list(running):
            try:
                next(stages[index])
            except StopIteration as stop:
                results[index] = stop.value
                running.remove(index)
        yield
    return results


def result_of(stages: Stages) -> Any:
    while True:
        try:
            next(stages)
        except StopIteration as stop:
            return stop.value


def constants(gate: str, precision: MatmulPrecision) -> dict[str, np.ndarray]:
    """Masks and summing matrices, by name. Those that are operands of products are as precise as these."""
    lane = np.arange(LANES)
    head, token = lane % CHUNK // _HALF, lane // CHUNK * _HALF + lane % _HALF
    i, t = np.arange(CHUNK)[:, None], np.arange(CHUNK)[None, :]
    row, column = np.arange(_HALF)[:, None], lane[None, :] % _HALF
    narrow = jnp.bfloat16 if precision is MatmulPrecision.BF16X3 else jnp.float32

    def between(i: np.ndarray, j: np.ndarray, half: int) -> np.ndarray:
        """i is in the second half of a block, and j in its first."""
        return (i // (2 * half) == j // (2 * half)) & (i & half != 0) & (j & half == 0)

    def operand(mask: np.ndarray, axis: int) -> np.ndarray:
        """For a product with the terms of a matrix, which are concatenated."""
        return np.concatenate([mask] * (2 if precision is MatmulPrecision.BF16X3 else 1), axis=axis).astype(narrow)

    made: dict[str, np.ndarray] = {
        "triangles": np.stack([i >= token, i > token]).astype(np.float32),
        "quarters": np.stack([(lane // _HALF == n)[None] for n in range(_QUAD)]).astype(narrow),
        "heads": np.stack([(head == n)[None] for n in range(PAIR)]).astype(narrow),
        "levels": np.stack([between(row, column, half) for half in (16, 8)]).astype(np.float32),
        "small": (column[None] // SUBLANES == np.arange(_HALF // SUBLANES)[:, None, None]).astype(np.float32),
    }
    if gate == "head":
        same = head[:, None] == head[None, :]
        after = same & (token[:, None] > token[None, :])  # Sums after j, for each lane j.
        every = head[:, None] == lane[None, :] // CHUNK  # Sums of all, over half of the lanes for each head.
        made["after"] = operand(np.concatenate([after, every], axis=1), 0)
    if gate == "channel":

        def reach(half: int) -> np.ndarray:
            """Times g: the sum from the middle of a block to i, or from i to the middle."""
            middle = i // (2 * half) * (2 * half) + half
            return np.where(i >= middle, (t >= middle) & (t <= i), (t > i) & (t < middle))

        block = i // SUBLANES == t // SUBLANES
        each = [t <= i, block & (t <= i), t > i, *(reach(half) for half in halvings(CHUNK))]
        made["sums"] = operand(np.concatenate(each, axis=0), 1)
        made["blocks"] = (i // SUBLANES == token[None, :] // SUBLANES).astype(np.float32)
        made["halves"] = np.stack([between(i, token[None, :], half) for half in halvings(CHUNK)]).astype(np.float32)
    return made


# Products.


def _dot(a: jax.Array, b: jax.Array, form: Form, precision: MatmulPrecision) -> jax.Array:
    """A product of operands that are single terms."""
    return multiply((a,), (b,), form, precision)


def sums_of(count: int, x: jax.Array, masks: Mapping[str, Any], precision: MatmulPrecision) -> list[jax.Array]:
    """The first `count` kinds of sums of x over tokens, in one product.

    They are: up to a token; from the start of its block of 8; after it; and for each of `halvings` from the middle of its
    block, or to it.
    """
    rows = masks["sums"][: count * CHUNK, :]
    sums = _dot(rows, jnp.concatenate(split(x, precision), axis=0), "nn", precision)
    return [sums[n * CHUNK : (n + 1) * CHUNK] for n in range(count)]


def narrow_product(a: Terms, b: Terms, precision: MatmulPrecision) -> jax.Array:
    """a b where b is half as wide as an MXU, or a has few rows: hi and lo of a above each other, of b side by side."""
    rows, width = a[0].shape[0], b[0].shape[1]
    both = _dot(jnp.concatenate(a, axis=0), jnp.concatenate(b, axis=1), "nn", precision)
    total = both[:rows, :width]
    if len(a) == 2:
        total = total + both[rows:, :width]
    return total if len(b) == 1 else total + both[:rows, width:]


def side_by_side(x: jax.Array, precision: MatmulPrecision) -> jax.Array:
    """The terms of an operand as `deep_product` takes them."""
    return jnp.concatenate(split(x, precision), axis=1)


def deep_product(a: jax.Array, b: Terms, precision: MatmulPrecision) -> jax.Array:
    """a b, where a has hi and lo side by side, or one term, and b has one or two. b is [D, D]: two fill an MXU of 2 D."""
    depth, width = b[0].shape
    if len(b) == 1:
        return _dot(a, b[0] if a.shape[1] == depth else jnp.concatenate([b[0], b[0]], axis=0), "nn", precision)
    rows = jnp.concatenate(b, axis=1)
    if a.shape[1] > depth:
        rows = jnp.concatenate([rows, jnp.concatenate([b[0], jnp.zeros_like(b[0])], axis=1)], axis=0)
    both = _dot(a, rows, "nn", precision)
    return both[:, :width] + both[:, width:]


def wide_product(a: jax.Array, b: Terms, precision: MatmulPrecision) -> jax.Array:
    """a b, where a has hi and lo side by side, and b, [D, 2 D], fills an MXU's width."""
    if len(b) == 1:
        return _dot(a, b[0], "nn", precision)
    depth = b[0].shape[0]
    upper = _dot(a, jnp.concatenate([b[0], b[0]], axis=0), "nn", precision)
    return upper + _dot(a[:, :depth], b[1], "nn", precision)


def score_product(rows: Terms, keys: Terms, precision: MatmulPrecision) -> jax.Array:
    """rows keys^T of two heads side by side, [R, 128] in the order of the lanes; rows [R, 2 K], keys [64, 2 K]."""
    count = rows[0].shape[0]
    diagonal = jnp.concatenate([block_diagonal(term) for term in keys], axis=0)
    both = _dot(jnp.concatenate(rows, axis=0), diagonal, "nt", precision)
    total = both[:count, :LANES]
    if len(rows) == 2:
        total = total + both[count:, :LANES]
    return total if len(keys) == 1 else total + both[:count, LANES:]


# Operands in VMEM.


def words_shape(rows: int, lanes: int, terms: int) -> tuple[int, int]:
    """The shape that `in_words` gives [rows, lanes] of each of `terms` terms, side by side."""
    return rows // terms, terms * lanes


def in_words(x: jax.Array) -> jax.Array:
    """bfloat16 as words of two rows each, for scratch: [R, D] as [R / 2, D]. float32 stays as it is.

    A register has 16 rows of bfloat16, and a tile of bfloat16 in VMEM has 8: what is loaded from it for the vector units
    is put together from two halves.
    """
    return pltpu.bitcast(x, jnp.uint32) if x.dtype == jnp.bfloat16 else x


def from_words(x: jax.Array) -> jax.Array:
    """The inverse of `in_words`."""
    return pltpu.bitcast(x, jnp.bfloat16) if x.dtype == jnp.uint32 else x


# Two heads side by side.


def beside(parts: list[jax.Array]) -> jax.Array:
    """The matrices of two heads side by side, or of one head beside zeros."""
    return jnp.concatenate(parts if len(parts) == PAIR else [*parts, jnp.zeros_like(parts[0])], axis=1)


def down_the_rows(row: jax.Array, width: int) -> jax.Array:
    """[1, D] as [D, width], equal along each row."""
    depth = row.shape[1]
    column = jnp.broadcast_to(row, (SUBLANES, depth)).T[:, :1]
    return jnp.broadcast_to(column, (depth, width))


def stacked(x: jax.Array) -> jax.Array:
    """[64, 2 W] as [128, W], in the order of the lanes."""
    width = x.shape[1] // PAIR
    halves = (x[:_HALF], x[_HALF:])
    return jnp.concatenate([half[:, h * width : (h + 1) * width] for half in halves for h in range(PAIR)], axis=0)


def unstacked(x: jax.Array) -> jax.Array:
    """The inverse of `stacked`: [128, W] in the order of the lanes as [64, 2 W]."""
    halves = (x[:CHUNK], x[CHUNK:])
    return jnp.concatenate(
        [jnp.concatenate([half[h * _HALF : (h + 1) * _HALF] for half in halves], axis=0) for h in range(PAIR)], axis=1
    )


def block_diagonal(x: jax.Array) -> jax.Array:
    """[64, 2 W] as [128, 2 W] with zeros where row and column are of different heads; rows in the order of the lanes."""
    width = x.shape[1] // PAIR
    zeros = jnp.zeros((_HALF, width), x.dtype)

    def part(half: jax.Array, head: int) -> jax.Array:
        own = half[:, head * width : (head + 1) * width]
        return jnp.concatenate([own, zeros] if head == 0 else [zeros, own], axis=1)

    return jnp.concatenate([part(half, head) for half in (x[:_HALF], x[_HALF:]) for head in range(PAIR)], axis=0)


def _swapped(x: jax.Array) -> jax.Array:
    """The two halves of the lanes swapped."""
    return pltpu.roll(x, CHUNK, 1)


def _lower_half() -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1) < CHUNK


# Scores.


def head_sums(gates: Sequence[jax.Array], masks: Mapping[str, Any], precision: MatmulPrecision) -> list[jax.Array]:
    """The sums of one gate per head for `head_gated`, [64, 2 * 128] each, from the gates [1, 128] of pairs of heads.

    Row i has the sum of the gates after the token of each lane up to token i, and beside it the sum of all up to i. The
    sums of all pairs of heads are one product, whose weights are pushed once.
    """
    seen = masks["triangles"][0]
    rows = jnp.concatenate([side_by_side(seen * g, precision) for g in gates], axis=0)
    sums = _dot(rows, masks["after"][...], "nn", precision)
    return [sums[n * CHUNK : (n + 1) * CHUNK] for n in range(len(gates))]


def head_gated(
    q: jax.Array,
    k: jax.Array,
    sums: jax.Array | None,
    beta: jax.Array,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
) -> Stages:
    """One gate per head, whose `head_sums` these are, or none. q and k are [64, 2 K].

    Returns M b, A b, (onward k)^T b, each with 128 lanes; M above A, without beta; and into [64, 2 * 128], across
    [1, 2 * 128], the decays of pairs of tokens [64, 128], and onward [1, 128], or None where there is no gate.
    Every decay is the exponential of a sum of gates, never of a difference of two sums.
    """
    seen, before = masks["triangles"][0], masks["triangles"][1]
    pairs, onward, into, across = seen, None, None, None
    both = score_product((jnp.concatenate([q, k], axis=0),), (k,), precision)  # [128, 128]
    yield
    if sums is not None:
        pairs = jnp.exp(jnp.where(seen > 0, sums[:, :LANES], _LOG_ZERO))
        decayed = jnp.exp(sums[:, LANES:])  # Each head's over half of the lanes.
        onward = jnp.exp(sums[CHUNK - 1 :, :LANES])
        yield
        other, lower = _swapped(decayed), _lower_half()
        into = jnp.concatenate([jnp.where(lower, decayed, other), jnp.where(lower, other, decayed)], axis=1)
        across = into[CHUNK - 1 :]
    yield
    read = both[:CHUNK] * pairs
    erase = both[CHUNK:] * (pairs * before)
    written = stacked(k).T.astype(jnp.float32) * (beta if onward is None else beta * onward)  # [K, 128]
    plain = jnp.concatenate([read, erase], axis=0)
    return read * beta, erase * beta, written, plain, into, across, None if sums is None else pairs, onward


def channel_gated(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
    *,
    finite: bool,
) -> Stages:
    """One gate per channel, g [64, 2 K], that is mild: sums of up to `MILD` by magnitude. q and k are [64, 2 K].

    Returns M b, A b and (onward k)^T b, each with 128 lanes; M above A without beta; into q above into k, in terms;
    across [1, 2 K]; the sums of gates up to each token; and the largest sum of magnitudes of a channel's gates, [1, 1].
    If that is more than `MILD`, the first four are wrong, and those of `strongly_gated` are right. With `finite`, A b is
    then 0: its inverse is computed together with that of another chunk, which NaNs would reach.
    """
    g = jnp.maximum(g, LOWEST_GATE)
    (sums,) = sums_of(1, g, masks, precision)  # [64, 2 K]
    strongest = jnp.max(jnp.sum(jnp.abs(g), axis=0, keepdims=True), axis=1, keepdims=True)
    yield
    up, down = jnp.exp(sums), jnp.exp(-sums)
    k = k.astype(jnp.float32)
    q_up, k_up, k_down = q.astype(jnp.float32) * up, k * up, k * down
    yield
    rows = split(jnp.concatenate([q_up, k_up], axis=0), precision)
    both = score_product(rows, split(k_down, precision), precision)  # [128, 128]
    across = jnp.exp(sums[CHUNK - 1 :])
    yield
    read, erase = lower_triangles(both, masks)
    if finite:
        erase = jnp.where(strongest <= MILD, erase, 0.0)
    written = stacked(k_down * across).T * beta  # [K, 128]
    plain = jnp.concatenate([read, erase], axis=0)
    return read * beta, erase * beta, written, plain, rows, across, sums, strongest


def lower_triangles(both: jax.Array, masks: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The scores of q for i >= j and those of k for i > j, zero elsewhere, from both stacked: [2 C, ...]."""
    # What is not seen may be infinite: it is selected, not multiplied by 0.
    read = jnp.where(masks["triangles"][0] > 0, both[:CHUNK], 0.0)
    return read, jnp.where(masks["triangles"][1] > 0, both[CHUNK:], 0.0)


def strongly_gated(
    q: jax.Array,
    k: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    masks: Mapping[str, Any],
    precision: MatmulPrecision,
    *,
    any_gate: bool,
) -> Stages:
    """`channel_gated` for stronger gates, with a product for each of the `halvings` of the chunk.

    Scores in the diagonal blocks of 8 tokens are one product, as those of a mild chunk are: its operands are scaled by
    sums from the start of their block. With `any_gate` rows where these sums exceed `MILD` get three more products, for
    halves of 4, 2 and 1 tokens. No exponent is positive there unless a gate is.

    How a row is computed depends on the gates up to it alone, and a row up to which the chunk is mild has the scores of
    `channel_gated`, to the bit: no output depends on a later gate. In float32 every row gets all products.

    Returns what `channel_gated` does; the last is the largest sum of magnitudes within a block of 8.
    """
    seen, before = masks["triangles"][0], masks["triangles"][1]
    g = jnp.maximum(g, LOWEST_GATE)
    exact = precision is MatmulPrecision.FLOAT32
    levels = list(enumerate(halvings(CHUNK)))
    levels = levels if any_gate else levels[:_IN_BLOCKS]
    sums, from_block, after, *reach = sums_of(3 + len(levels), g, masks, precision)
    onward = jnp.exp(after)
    # The decay of a token to itself is 1.
    itself = score_product((q,), (k,), precision) * (seen - before) if any_gate else None
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    written = stacked(k * onward).T * beta
    into = jnp.exp(sums)
    passing = split(jnp.concatenate([q * into, k * into], axis=0), precision)
    yield

    def from_start(sums: jax.Array) -> jax.Array:
        """Scores [128, 128] by the sums since a start."""
        clipped = jnp.minimum(jnp.maximum(sums, -_CLIPPED), _CLIPPED)
        up, down = jnp.exp(clipped), jnp.exp(-clipped)
        rows = split(jnp.concatenate([q * up, k * up], axis=0), precision)
        return score_product(rows, split(k * down, precision), precision)

    def halved(level: int, half: int) -> jax.Array:
        """Scores [128, 128] of tokens in the second half of a block with those in its first; 0 elsewhere."""
        left = jnp.exp(reach[level])  # [64, 2 K]
        k_left, blocks = k * left, (CHUNK // (2 * half), 2, half)
        aligned = half >= SUBLANES

        def second(x: jax.Array) -> jax.Array:
            return x.reshape(*blocks, x.shape[1])[:, 1].reshape(_HALF, x.shape[1]) if aligned else x

        def placed(x: jax.Array) -> jax.Array:
            if not aligned:
                return x
            x = x.reshape(blocks[0], half, x.shape[1])
            return jnp.stack([jnp.zeros_like(x), x], axis=1).reshape(CHUNK, x.shape[2])

        rows = split(jnp.concatenate([second(q) * second(left), second(k_left)], axis=0), precision)
        both = score_product(rows, split(k_left, precision), precision)
        count, mask = both.shape[0] // 2, masks["halves"][level]
        return jnp.concatenate([placed(both[:count]) * mask, placed(both[count:]) * mask], axis=0)

    largest = upto = None
    both = jnp.zeros((2 * CHUNK, LANES), jnp.float32)
    if itself is not None:
        both = jnp.concatenate([itself, jnp.zeros_like(itself)], axis=0)
        for level, half in levels[_IN_BLOCKS:]:
            both = both + halved(level, half)
            yield
    if not exact:
        in_block = from_start(from_block)
        upto, magnitude = sums_of(2, jnp.abs(g), masks, precision)
        largest = jnp.max(jnp.max(magnitude, axis=0, keepdims=True), axis=1, keepdims=True)
        in_block = jnp.where(_mild_rows(magnitude), in_block, both) if any_gate else in_block
        blocks = jnp.concatenate([masks["blocks"][...]] * 2, axis=0)
        both = jnp.where(blocks > 0, in_block, 0.0)
        yield
    for level, half in levels[:_IN_BLOCKS]:
        both = both + halved(level, half)
        yield
    if upto is not None:
        # Sums of magnitudes have 16 bits of each gate, hence a margin: a chunk that is mild has mild rows only.
        both = jnp.where(_mild_rows(upto), from_start(sums), both)
        yield
    read, erase = lower_triangles(both, masks)
    plain = jnp.concatenate([read, erase], axis=0)
    return read * beta, erase * beta, written, plain, passing, jnp.exp(sums[CHUNK - 1 :]), sums, largest


def _mild_rows(magnitude: jax.Array) -> jax.Array:
    """[128, 128], for q and for k: whether the sums of magnitudes [64, 2 K] in a row's head are those of mild gates."""
    width = magnitude.shape[1] // PAIR
    largest = [jnp.max(magnitude[:, h * width : (h + 1) * width], axis=1, keepdims=True) for h in range(PAIR)]
    lane = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1)
    strongest = jnp.where((lane & _HALF) == 0, *(jnp.broadcast_to(x, (CHUNK, LANES)) for x in largest))
    return jnp.concatenate([strongest, strongest], axis=0) <= MILD + 1


# Inverses.


def inverses(first: jax.Array, second: jax.Array, masks: Mapping[str, Any], precision: MatmulPrecision) -> Stages:
    """(I + L)^-1 of the strictly lower triangular L of four heads, two side by side in each [64, 128]. Returns the same."""
    lower = _lower_half()
    # Each [64, 128], the lanes in four quarters, one per head: the columns of the first, and of the second half.
    left = jnp.where(lower, first, _swapped(second))
    right = jnp.where(lower, _swapped(first), second)
    blocks = (left[:_HALF], right[_HALF:])
    found = yield from _diagonal_inverses(blocks, masks, precision)
    diagonal = tuple(_four_diagonal(term, masks) for term in split(left[_HALF:], precision))
    reached = narrow_product(split(found[1], precision), diagonal, precision)
    yield
    diagonal = tuple(_four_diagonal(term, masks) for term in split(found[0], precision))
    below = -narrow_product(split(reached, precision), diagonal, precision)
    yield
    left = jnp.concatenate([found[0], below], axis=0)
    right = jnp.concatenate([jnp.zeros_like(below), found[1]], axis=0)
    return jnp.where(lower, left, _swapped(right)), jnp.where(lower, _swapped(left), right)


def _four_diagonal(x: jax.Array, masks: Mapping[str, Any]) -> jax.Array:
    """[32, 128] of four heads as their block diagonal [128, 128]."""
    return jnp.concatenate([x * masks["quarters"][n] for n in range(_QUAD)], axis=0)


def _diagonal_inverses(blocks: Sequence[jax.Array], masks: Mapping[str, Any], precision: MatmulPrecision) -> Stages:
    """The inverses of blocks of 32, each [32, 128] of four heads. wy_transform.py has the same for other layouts.

    Blocks of 8 are inverted by one substitution for all: row j times column j is subtracted from the rows below.
    """
    small, width = masks["small"][...], len(blocks) * LANES
    parts = (_HALF // SUBLANES, SUBLANES, LANES)
    compact = jnp.concatenate([jnp.sum(block.reshape(parts) * small, axis=0) for block in blocks], axis=1)  # [8, width]
    place = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 1) & (SUBLANES - 1)
    columns = []
    for j in range(SUBLANES - 1):
        column = jnp.where(place == j, compact, 0.0)
        # Broadcast over the 8 columns of its block: moved to the first of them, then copied from there.
        column = pltpu.roll(column, width - j, 1) if j else column
        for distance in (1, 2, 4):
            column = column + pltpu.roll(column, distance, 1)
        columns.append(column)
    yield
    x = (jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, width), 0) == place).astype(jnp.float32)
    for j, column in enumerate(columns):
        x = x - column * jnp.broadcast_to(x[j : j + 1], x.shape)
    found = [(x[None, :, n * LANES : (n + 1) * LANES] * small).reshape(_HALF, LANES) for n in range(len(blocks))]
    yield
    for level, half in ((1, 8), (0, 16)):
        halves = (_HALF // (2 * half), 2, half, LANES)
        # Only the rows of the second half of each block change: each [16, 128].
        seconds = [x.reshape(halves)[:, 1].reshape(_HALF // 2, LANES) for x in found]
        below = masks["levels"][level]
        diagonals = [tuple(_four_diagonal(term, masks) for term in split(block * below, precision)) for block in blocks]
        reached = [narrow_product(split(x, precision), b, precision) for x, b in zip(seconds, diagonals, strict=True)]
        yield
        diagonals = [tuple(_four_diagonal(term, masks) for term in split(x, precision)) for x in found]
        seconds = [
            x - narrow_product(split(r, precision), b, precision)
            for x, r, b in zip(seconds, reached, diagonals, strict=True)
        ]
        yield
        found = [
            jnp.stack([x.reshape(halves)[:, 0], y.reshape(halves[0], half, LANES)], axis=1).reshape(_HALF, LANES)
            for x, y in zip(found, seconds, strict=True)
        ]
    return found


# All of it.


def inverts_chunks_together(pairs: int) -> bool:
    """Whether `weights` inverts the matrices of two chunks together, if each has so many pairs of heads."""
    return pairs % 2 == 1


def weights(
    scores: Sequence[Stages], masks: Mapping[str, Any], precision: MatmulPrecision, *, with_inverse: bool = False
) -> Stages:
    """For the `scores` of each pair of heads and chunk: W = [M; (onward k)^T] b T as `wide_product` takes it, and what
    else they return. With `with_inverse`, T stands between the two parts of W.
    """
    found = yield from in_lock_step(scores)
    erases = [one[1] for one in found]
    if len(erases) % 2:
        erases.append(jnp.zeros_like(erases[0]))
    inverted = yield from in_lock_step(
        [inverses(erases[n], erases[n + 1], masks, precision) for n in range(0, len(erases), 2)]
    )
    inverted = [x for two in inverted for x in two]
    results = []
    for (read, _, written, *others), t in zip(found, inverted, strict=False):
        diagonal = tuple(two_diagonal(term, masks) for term in split(t, precision))
        rows = side_by_side(jnp.concatenate([read, written], axis=0), precision)
        w = deep_product(rows, diagonal, precision)
        results.append((jnp.concatenate([w[:CHUNK], t, w[CHUNK:]], axis=0) if with_inverse else w, *others))
    yield
    return [(side_by_side(w, precision), *others) for w, *others in results]


def two_diagonal(x: jax.Array, masks: Mapping[str, Any]) -> jax.Array:
    """[64, 128] of two heads as [128, 128] with zeros where row and lane are of different heads, both in one order."""
    halves = (x[:_HALF], x[_HALF:])
    return jnp.concatenate([half * masks["heads"][n] for half in halves for n in range(PAIR)], axis=0)
