"""Linear cross entropy in plain JAX, one block of the vocabulary at a time: the logits never exist as a whole.

Forward: for each block of rows, a scan over blocks of the vocabulary with an online logsumexp. Backward: for each block
of the vocabulary, the logits are recomputed, and their gradient is used twice: for the block's columns of dw, which
are then complete, and for a term of dx.

Floor: 2 N H V FLOPs forward; backward 6 N H V (the logits recomputed, dx, dw). w is read once per block of rows.
Memory beyond inputs and gradients: a few tiles [block_n, block_v] in float32, and dx in float32 (4 N H bytes) while it
is summed. dw needs no float32 copy, since each of its columns is summed over all rows at once: that is why the
vocabulary is the outer loop.

Any V: the last block starts at V - block_v, and the columns it shares with the block before are masked. Padding w
instead would copy it. Rows are padded to a multiple of block_n, which costs at most one block.

Numerics: float32 inputs are multiplied in float32 (Precision.HIGHEST), on TPUs and GPUs too. The max and
sum exp(logit - max) of a row are saved for the backward rather than their logsumexp: at logits of 1,000 a float32
logsumexp is off by 6e-5, and exp(logit - logsumexp) would be off by that factor.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.axes import Unembedding
from tilewright.core.chip import LANES, MIB
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall
from tilewright.ops.linear_cross_entropy.config import LinearCrossEntropyXlaBackward, LinearCrossEntropyXlaForward
from tilewright.ops.linear_cross_entropy.vocabulary import RowStatistics
from tilewright.pallas.arrays import padded

# A tile of logits, float32. It bounds the temporary memory. H200, N8192 H2048 V151936 bf16, forward and backward:
# 64 MiB 41.4 ms, 128 MiB 41.1 ms, 256 MiB 40.6 ms, 512 MiB 41.6 ms; half the rows at the same size 46.4 ms.
_TILE_BYTES = 128 * MIB
_MAX_ROWS = 8192
_FLOAT32_BYTES = 4


def _tile(call: LinearCrossEntropyCall) -> tuple[int, int]:
    """Rows and columns of a tile: as few blocks of rows as there can be, all alike, and the columns that then fit."""
    n, v = call.x.shape[0], call.w.shape[1]
    block_n = -(-n // -(-n // _MAX_ROWS))
    columns = _TILE_BYTES // (_FLOAT32_BYTES * block_n)
    return block_n, min(v, max(columns // LANES * LANES, LANES))


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a and b contracted over one axis each, accumulated in float32 at least."""
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=accumulator(a.dtype),
    )


def _row_blocks(block_n: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Each array [N, ...] as [num_n, block_n, ...], padded with zeros."""
    return tuple(padded(a, 0, block_n).reshape(-(-a.shape[0] // block_n), block_n, *a.shape[1:]) for a in arrays)


def _vocabulary_block(w: Unembedding, index: jax.Array, block_v: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Block `index` of w [H, block_v], its first column, and which columns no earlier block has [1, block_v]."""
    wanted = index * block_v
    start = jnp.minimum(wanted, w.shape[1] - block_v)
    block = jax.lax.dynamic_slice_in_dim(w, start, block_v, axis=1)  # [H, block_v]
    fresh = start + jnp.arange(block_v, dtype=jnp.int32)[None, :] >= wanted
    return block, start, fresh


def _logits(x: jax.Array, w: jax.Array, soft_cap: float | None) -> jax.Array:
    logits = _dot(x, w, (1, 0))  # [block_n, block_v]
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _is_label(labels: jax.Array, start: jax.Array, block_v: int) -> jax.Array:
    return labels[:, None] == start + jnp.arange(block_v, dtype=jnp.int32)[None, :]  # [block_n, block_v]


def _block_n(config: Any, n: Any) -> int:
    """Rows of a block: no more than there are, where their number is known (`jax.export` may leave it symbolic)."""
    return min(config.block_n, n) if isinstance(n, int) else config.block_n


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[Any, Any]:
    """Saves the max and sum exp(logit - max) of each row, which give the backward the probabilities."""
    x, w, labels, soft_cap = call.x, call.w, call.labels, call.soft_cap
    n, v = x.shape[0], w.shape[1]
    block_n, block_v = _block_n(launch.config, n), min(launch.config.block_v, v)
    num_v = -(-v // block_v)
    accumulate = accumulator(x.dtype)

    def rows(block: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        x_block, label_block = block  # [block_n, H], [block_n]

        def step(carry: Any, index: jax.Array) -> tuple[Any, None]:
            highest, total, label_logit = carry  # each [block_n]
            w_block, start, fresh = _vocabulary_block(w, index, block_v)
            logits = _logits(x_block, w_block, soft_cap)  # [block_n, block_v]
            label_here = _is_label(label_block, start, block_v) & fresh
            label_logit = label_logit + jnp.sum(jnp.where(label_here, logits, 0.0), axis=1)
            logits = jnp.where(fresh, logits, -jnp.inf)
            new_highest = jnp.maximum(highest, jnp.max(logits, axis=1))
            total = total * jnp.exp(highest - new_highest) + jnp.sum(jnp.exp(logits - new_highest[:, None]), axis=1)
            return (new_highest, total, label_logit), None

        zero = jnp.zeros((block_n,), accumulate)
        start = (zero - jnp.inf, zero, zero)
        (highest, total, label_logit), _ = jax.lax.scan(step, start, jnp.arange(num_v, dtype=jnp.int32))
        return label_logit, highest, total

    label_logit, highest, total = (
        stacked.reshape(-1)[:n] for stacked in _map_blocks(rows, _row_blocks(block_n, x, labels))
    )
    log_total = jnp.log(total)
    return ((highest - label_logit) + log_total, highest + log_total), RowStatistics(highest, total)


def _map_blocks(function: Callable[[Any], Any], blocks: tuple[jax.Array, ...]) -> Any:
    """`lax.map`, without a loop around a single block."""
    if blocks[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], function(tuple(b[0] for b in blocks)))
    return jax.lax.map(function, blocks)


def _backward(call: LinearCrossEntropyCall, saved: Any, cotangents: Any, launch: Launch) -> LinearCrossEntropyCall:
    """The gradient of a logit is (d_nll + d_logsumexp) p - d_nll [label], times the slope of the soft cap."""
    x, w, labels, soft_cap = call.x, call.w, call.labels, call.soft_cap
    (highest, total, *_), (d_nll, d_logsumexp) = saved, cotangents
    (n, h), v = x.shape, w.shape[1]
    block_n, block_v = _block_n(launch.config, n), min(launch.config.block_v, v)
    num_v = -(-v // block_v)
    blocks = _row_blocks(block_n, x, labels, highest, (d_nll + d_logsumexp) / total, d_nll)
    accumulate = highest.dtype

    def vocabulary_step(carry: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[Any, None]:
        dx, dw = carry  # [num_n, block_n, H] float32, [H, V]
        w_block, start, fresh = _vocabulary_block(w, index, block_v)

        def rows_step(dw_block: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            x_block, label_block, highest_block, factor, label_factor, dx_block = block
            logits = _logits(x_block, w_block, soft_cap)  # [block_n, block_v]
            d_logits = factor[:, None] * jnp.exp(logits - highest_block[:, None])
            d_logits = d_logits - jnp.where(_is_label(label_block, start, block_v), label_factor[:, None], 0.0)
            if soft_cap is not None:
                d_logits = d_logits * (1.0 - jnp.square(logits / soft_cap))
            d_logits = d_logits.astype(x.dtype)  # [block_n, block_v]
            # Columns of dw that two blocks share are computed in full by both; dx must count them once.
            dw_block = dw_block + _dot(x_block, d_logits, (0, 0))  # [H, block_v]
            d_fresh = jnp.where(fresh, d_logits, jnp.zeros_like(d_logits))
            return dw_block, dx_block + _dot(d_fresh, w_block, (1, 1))  # [block_n, H]

        dw_block, dx = jax.lax.scan(rows_step, jnp.zeros((h, block_v), accumulate), (*blocks, dx))
        dw = jax.lax.dynamic_update_slice_in_dim(dw, dw_block.astype(w.dtype), start, axis=1)
        return (dx, dw), None

    start = (jnp.zeros(blocks[0].shape, accumulate), jnp.zeros(w.shape, w.dtype))
    (dx, dw), _ = jax.lax.scan(vocabulary_step, start, jnp.arange(num_v, dtype=jnp.int32))
    return call.gradients(x=dx.reshape(-1, h)[:n], w=dw)


IMPLEMENTATION = Implementation(
    forward=Pass(
        _forward,
        config=LinearCrossEntropyXlaForward,
        heuristic=lambda chip, call: LinearCrossEntropyXlaForward(*_tile(call)),
        saved="*tokens",
    ),
    backward=Pass(
        _backward,
        config=LinearCrossEntropyXlaBackward,
        heuristic=lambda chip, call: LinearCrossEntropyXlaBackward(*_tile(call)),
    ),
)
