"""How the arrays of a call lie in HBM and VMEM for the TPU kernels, and back.

Heads lie side by side in the lanes: [B, T, H K], as the output of a projection does before its heads get an axis. A
block of [B, T, H, K] itself would have one head in its second-last axis, which a tile does not allow. K and V are
padded to whole lanes, and T to whole blocks.

Scalars per token and head, which are beta and one gate per head, are rows of 128 numbers: a chunk of two heads, in the
order of the lanes that intra_chunk.py describes. A group is the heads of one block.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from tilewright.core.chip import LANES
from tilewright.core.implementation import Launch
from tilewright.ops.delta_rule.call import DeltaRuleCall, GateKind
from tilewright.ops.delta_rule.gates import LOWEST_GATE
from tilewright.ops.delta_rule.matmul_precision import MatmulPrecision
from tilewright.ops.delta_rule.pallas_tpu.intra_chunk import CHUNK, PAIR
from tilewright.pallas.tpu.kernel import Axis, Block, Kernel, not_float64

Order = Callable[[Any], Any]
"""Maps the step of the last grid axis to the block of tokens that it processes."""


def unsupported_reason(call: DeltaRuleCall, launch: Launch) -> str | None:
    if (reason := not_float64(call.q)) is not None:
        return reason
    heads, h, hv = launch.config.heads, call.q.shape[2], call.v.shape[2]
    group = hv // h
    if hv % heads or (heads % group and group % heads):
        return (
            f"config.heads={heads} does not share {h} query heads and {hv} value heads evenly; use a divisor of "
            f"HV={hv} that is a multiple or a divisor of HV / H = {group}, or config=None"
        )
    return None


def _whole_lanes(width: int) -> int:
    return pl.cdiv(width, LANES) * LANES


@dataclass(frozen=True)
class Layout:
    """Sizes, and where everything is: all that a kernel knows when it is traced."""

    call: DeltaRuleCall
    block_chunks: int
    heads: int
    """Value heads per block."""

    @property
    def b(self) -> int:
        return self.call.q.shape[0]

    @property
    def h(self) -> int:
        return self.call.q.shape[2]

    @property
    def hv(self) -> int:
        return self.call.v.shape[2]

    @property
    def depth(self) -> int:
        """K, padded."""
        return _whole_lanes(self.call.q.shape[3])

    @property
    def width(self) -> int:
        """V, padded."""
        return _whole_lanes(self.call.v.shape[3])

    @property
    def gate(self) -> GateKind:
        """A reset is a gate that forgets everything, so a call that has resets has a gate."""
        return "head" if self.call.resets is not None and self.call.gate == "none" else self.call.gate

    @property
    def precision(self) -> MatmulPrecision:
        return MatmulPrecision.BF16X3 if self.call.q.dtype == jnp.bfloat16 else MatmulPrecision.FLOAT32

    @property
    def terms(self) -> int:
        """The terms of a float32 operand."""
        return 2 if self.precision is MatmulPrecision.BF16X3 else 1

    @property
    def rounds_only(self) -> bool:
        """KDA in float32: a difference of two sums of gates is not exact enough, so every gate counts as strong."""
        return self.gate == "channel" and self.precision is MatmulPrecision.FLOAT32

    @property
    def block_t(self) -> int:
        return CHUNK * self.block_chunks

    @property
    def num_t(self) -> int:
        return pl.cdiv(self.call.q.shape[1], self.block_t)

    @property
    def t(self) -> int:
        """T, padded."""
        return self.num_t * self.block_t

    @property
    def groups(self) -> int:
        return self.hv // self.heads

    @property
    def shared(self) -> int:
        """Value heads that a query head serves."""
        return self.hv // self.h

    @property
    def query_heads(self) -> int:
        """Query heads per block."""
        return max(1, self.heads // self.shared)

    @property
    def pairs(self) -> tuple[tuple[int, ...], ...]:
        """The heads of a block, two at a time; the last alone if they are odd."""
        heads = range(self.heads)
        return tuple(tuple(heads[first : first + PAIR]) for first in heads[::PAIR])

    @property
    def grid(self) -> dict[str, Axis]:
        return {
            "batch": Axis(self.b, "parallel"),
            "group": Axis(self.groups, "parallel"),
            "block": Axis(self.num_t),
        }

    @property
    def flops(self) -> int:
        """The FLOPs of the forward pass."""
        inside = CHUNK * (3 * self.depth + 2 * self.width)
        return self.b * self.t * self.hv * 2 * (inside + 3 * self.depth * self.width)

    def sequence_blocks(self, order: Order = lambda t: t) -> dict[str, Block | None]:
        """q, k, v and one gate per channel, with what a grid step (batch, group, step) sees of them."""
        dtype, whole = self.call.q.dtype, self.heads % self.shared == 0
        queries = Block(
            (1, self.block_t, self.query_heads * self.depth),
            dtype,
            lambda i, j, t: (i, order(t), j if whole else j * self.heads // self.shared),
        )
        return {
            "q": queries,
            "k": queries,
            "v": self.token_block(self.width, dtype, order),
            "g": self.token_block(self.depth, jnp.float32, order) if self.call.gate == "channel" else None,
        }

    def token_block(self, width: int, dtype: Any, order: Order = lambda t: t) -> Block:
        """A block of [B, T, HV * width]."""
        return Block((1, self.block_t, self.heads * width), dtype, lambda i, j, t: (i, order(t), j))

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Beta, and one gate per head, of each pair of heads: [B, groups, num_t, block_chunks, pairs or 2 pairs, 128]."""
        rows = len(self.pairs) * (2 if self.gate == "head" else 1)
        return self.b, self.groups, self.num_t, self.block_chunks, rows, LANES

    def rows_block(self, order: Order = lambda t: t) -> Block:
        return Block((1, 1, 1, *self.rows_shape[3:]), jnp.float32, lambda i, j, t: (i, j, order(t), 0, 0, 0))

    @property
    def state_block(self) -> Block:
        """A block of [B, HV, K, V]."""
        return Block((1, self.heads, self.depth, self.width), jnp.float32, lambda i, j, t: (i, j, 0, 0))

    def block_states_block(self, order: Order = lambda t: t) -> Block:
        """A block of [B, num_t, HV, K, V]: the states before each block."""
        shape = (1, 1, self.heads, self.depth, self.width)
        return Block(shape, jnp.float32, lambda i, j, t: (i, order(t), j, 0, 0))

    def query_head(self, head: int) -> int:
        """The query head of value head `head`, both counted inside the block."""
        return head // self.shared if self.heads % self.shared == 0 else 0

    def tokens_of(self, index: Any) -> Any:
        return pl.ds(pl.multiple_of(index * CHUNK, CHUNK), CHUNK)

    def value_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.width, (pack[-1] + 1) * self.width)

    def key_lanes(self, pack: tuple[int, ...]) -> slice:
        return slice(pack[0] * self.depth, (pack[-1] + 1) * self.depth)


def padded_tokens(x: jax.Array, layout: Layout) -> jax.Array:
    """[B, T, ...] padded with zeros to whole blocks of tokens."""
    return jnp.pad(x, [(0, 0), (0, layout.t - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def merge_heads(x: jax.Array, layout: Layout, width: int) -> jax.Array:
    """[B, T, heads, D] as [B, T, heads * width], padded with zeros."""
    b, t, heads, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, layout.t - t), (0, 0), (0, width - d)))
    return x.reshape(b, layout.t, heads * width)


def split_heads(x: jax.Array, layout: Layout, heads: int, d: int) -> jax.Array:
    """The inverse of `merge_heads`."""
    return x.reshape(x.shape[0], layout.t, heads, -1)[:, : layout.call.q.shape[1], :, :d]


def padded_state(state: jax.Array, layout: Layout) -> jax.Array:
    missing = (layout.depth - state.shape[2], layout.width - state.shape[3])
    return jnp.pad(state, ((0, 0), (0, 0), (0, missing[0]), (0, missing[1])))


def unpadded_state(state: jax.Array, layout: Layout) -> jax.Array:
    return state[:, :, : layout.call.q.shape[3], : layout.call.v.shape[3]]


def _rows(x: jax.Array, layout: Layout) -> jax.Array:
    """A scalar per token and head, [B, T, HV], as [B, groups, num_t, block_chunks, pairs, 128] in the lanes' order."""
    pairs = len(layout.pairs)
    x = padded_tokens(x, layout)
    x = x.reshape(layout.b, layout.num_t, layout.block_chunks, 2, CHUNK // 2, layout.groups, layout.heads)
    x = jnp.pad(x, [(0, 0)] * 6 + [(0, PAIR * pairs - layout.heads)])
    x = x.reshape(*x.shape[:-1], pairs, PAIR)
    return jnp.transpose(x, (0, 5, 1, 2, 6, 3, 7, 4)).reshape(*x.shape[:1], layout.groups, *x.shape[1:3], pairs, LANES)


def per_token(rows: jax.Array, layout: Layout) -> jax.Array:
    """The inverse of `_rows`: [B, T, HV]."""
    pairs = len(layout.pairs)
    x = rows.reshape(layout.b, layout.groups, layout.num_t, layout.block_chunks, pairs, 2, PAIR, CHUNK // 2)
    x = jnp.transpose(x, (0, 2, 3, 5, 7, 1, 4, 6)).reshape(layout.b, layout.t, layout.groups, PAIR * pairs)
    return x[..., : layout.heads].reshape(layout.b, layout.t, layout.hv)[:, : layout.call.q.shape[1]]


def input_arrays(layout: Layout) -> dict[str, jax.Array]:
    """q, k, v, g and rows as both kernels take them."""
    call = layout.call
    arrays = {
        "q": merge_heads(call.q, layout, layout.depth),
        "k": merge_heads(call.k, layout, layout.depth),
        "v": merge_heads(call.v, layout, layout.width),
    }
    rows, g = [_rows(call.beta, layout)], call.g
    if call.resets is not None:
        g = jnp.zeros_like(call.beta) if g is None else g
        starts = call.resets[:, :, None] if g.ndim == call.resets.ndim + 1 else call.resets[:, :, None, None]
        g = jnp.where(starts, LOWEST_GATE, g)
    if g is not None and layout.gate == "head":
        rows.append(_rows(jnp.maximum(g, LOWEST_GATE), layout))
    elif g is not None:
        arrays["g"] = merge_heads(g, layout, layout.depth)
    return arrays | {"rows": jnp.concatenate(rows, axis=-2)}


def cost(arrays: Mapping[str, jax.Array], kernel: Kernel, *, flops: int, transcendentals: int) -> pl.CostEstimate:
    """Each array and each output passes through memory once."""
    outputs = [output for output in kernel.outputs.values() if output is not None]
    written = sum(int(np.prod(output.shape)) * jnp.dtype(output.block.dtype).itemsize for output in outputs)
    read = sum(x.size * x.dtype.itemsize for x in arrays.values())
    return pl.CostEstimate(flops=flops, transcendentals=transcendentals, bytes_accessed=read + written)
