"""Attention over a sequence that is cut over a mesh axis (context parallelism), in two ways.

**Over heads.** Every device gets the whole sequence of H / n heads, attends, and gives the outputs back: all-to-alls, there
and back. Any mask works, and causal work is balanced. It needs KV to be a multiple of n. A device sends

    (n - 1) / n  of  B T/n (H (D + Dv) + KV (D + Dv))  numbers, and 4 B T/n (n - 1) bytes of segment ids.

**Ring.** Keys and values go around the devices, n - 1 hops. Each device attends to the block that it has while the next one
is on its way, and partial results are merged by their logsumexp. A device sends (n - 1) B T/n KV (D + Dv) numbers, and
4 (n - 1) B T/n bytes of segment ids.

Causal work of contiguous shards is uneven: the last shard attends to everything. So the sequence is dealt out anew inside:
it has 2 n chunks, and device i works on the chunks i and 2 n - 1 - i. Of a block of keys from device j < i both chunks see
the first half, and of one from j > i the second chunk sees all: half a block of work each time, on every device. Dealing
sends B T/n (H D + KV (D + Dv)) numbers there, and B T/n H Dv back. A T/n that is odd has no halves: there the devices keep
their shards, blocks after a shard are skipped, and the last device does about twice the work of the mean.

The backward pass of the ring keeps q, k, v and the results of the shard alone. The blocks go around again, each with its
gradients in float32, which take one hop more to come home; scores of a block are recomputed there, so that its forward pass
runs a second time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilewright.core.numerics import accumulator
from tilewright.core.sequence_shards import varying

Attend = Callable[..., tuple[jax.Array, jax.Array]]
"""(q, k, v, (q ids, kv ids) or None, causal) -> out [B, T, H, Dv], logsumexp [B, T, H]."""


def attend_over_heads(
    attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, causal: bool, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """Attention of whole sequences and a part of the heads, [B, T/n, H, D] -> [B, T/n, H, Dv]."""
    q, k, v = (varying(x, axis_name) for x in (q, k, v))
    q, k, v = (jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True) for x in (q, k, v))  # [B, T, H / n, D]
    whole = [jax.lax.all_gather(varying(x, axis_name), axis_name, axis=1, tiled=True) for x in ids or ()]
    out, logsumexp = attend(q, k, v, tuple(whole) if whole else None, causal)
    return (
        jax.lax.all_to_all(out, axis_name, 1, 2, tiled=True),
        jax.lax.all_to_all(logsumexp, axis_name, 1, 2, tiled=True),
    )


class _Region(NamedTuple):
    """The queries and keys of a pair of blocks that see each other: [first, end)."""

    q: tuple[int, int]
    k: tuple[int, int]


class _Block(NamedTuple):
    """What goes around."""

    k: Any
    v: Any
    ids: Any


def attend_in_ring(
    attend: Attend, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, causal: bool, axis_name: str
) -> tuple[jax.Array, jax.Array]:
    """Attention of this shard's queries to the keys of all shards."""
    q, k, v = (varying(x, axis_name) for x in (q, k, v))
    q_ids, kv_ids = (varying(x, axis_name) for x in ids) if ids is not None else (None, None)
    t, s = q.shape[1], k.shape[1]
    dealt = causal and t % 2 == 0
    whole = _Region((0, t), (0, s))
    if not causal:
        before, after = whole, whole
    elif dealt:
        before, after = _Region((0, t), (0, s // 2)), _Region((t // 2, t), (0, s))
    else:
        before, after = whole, None
    if dealt:
        q, k, v = (_deal(x, axis_name) for x in (q, k, v))
        q_ids, kv_ids = (None if x is None else _deal(x, axis_name) for x in (q_ids, kv_ids))
    ring = _Ring(attend, whole, before, after, causal, axis_name)
    out, logsumexp = ring(q, _Block(k, v, kv_ids), q_ids)
    return (_collect(out, axis_name), _collect(logsumexp, axis_name)) if dealt else (out, logsumexp)


class _Ring(NamedTuple):
    attend: Attend
    own: _Region
    before: _Region
    """What is seen of a block that comes from an earlier shard,"""
    after: _Region | None
    """and from a later one."""
    causal: bool
    axis_name: str

    def __call__(self, q: jax.Array, block: _Block, q_ids: Any) -> tuple[jax.Array, jax.Array]:
        @jax.custom_vjp
        def attended(q: jax.Array, k: jax.Array, v: jax.Array, q_ids: Any, kv_ids: Any) -> Any:
            return self._forward(q, _Block(k, v, kv_ids), q_ids)

        def saved(q: jax.Array, k: jax.Array, v: jax.Array, q_ids: Any, kv_ids: Any) -> Any:
            results = attended(q, k, v, q_ids, kv_ids)
            return results, (q, _Block(k, v, kv_ids), q_ids, results)

        def gradients(kept: Any, cotangents: Any) -> Any:
            q, block, q_ids, results = kept
            return *self._backward(q, block, q_ids, results, cotangents), None, None

        attended.defvjp(saved, gradients)
        return attended(q, block.k, block.v, q_ids, block.ids)

    def _next(self, tree: Any) -> Any:
        count = jax.lax.axis_size(self.axis_name)
        pairs = [(source, (source + 1) % count) for source in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis_name, pairs), tree)

    def _by_origin(self, hop: Any, work: Callable[[_Region | None], Any]) -> Any:
        """`work` on what is seen of the block that has made `hop` hops."""
        if self.before == self.after:
            return work(self.before)
        earlier = jax.lax.axis_index(self.axis_name) >= hop
        return jax.lax.cond(earlier, lambda: work(self.before), lambda: work(self.after))

    def _around(self, block: _Block, carried: Any, work: Callable[[Any, _Block, Any], Any]) -> Any:
        """`work(hop, block, carried)` for each block that comes, the next one being sent meanwhile."""
        count = jax.lax.axis_size(self.axis_name)
        if count > 2:

            def body(carry: Any, hop: jax.Array) -> Any:
                block, carried = carry
                return (self._next(block), work(hop, block, carried)), None

            hops = jnp.arange(1, count - 1, dtype=jnp.int32)
            (block, carried), _ = jax.lax.scan(body, (block, carried), hops)
        return work(count - 1, block, carried) if count > 1 else carried

    def _forward(self, q: jax.Array, block: _Block, q_ids: Any) -> tuple[jax.Array, jax.Array]:
        arrived = self._next(block) if jax.lax.axis_size(self.axis_name) > 1 else block
        out, logsumexp = self._part(self.own, q, block, q_ids, causal=self.causal)

        def work(hop: Any, block: _Block, carried: Any) -> Any:
            part = self._by_origin(hop, lambda region: self._part(region, q, block, q_ids, causal=False))
            return _merged(carried, part)

        out, logsumexp = self._around(arrived, (out, logsumexp), work)
        return out.astype(q.dtype), logsumexp

    def _part(
        self, region: _Region | None, q: jax.Array, block: _Block, q_ids: Any, *, causal: bool
    ) -> tuple[jax.Array, jax.Array]:
        """The results of a region in float32; zeros and -inf for queries that are not in it."""
        wide = accumulator(q.dtype)
        if region is None:
            b, t, h, _ = q.shape
            out, logsumexp = jnp.zeros((b, t, h, block.v.shape[3]), wide), jnp.full((b, t, h), -jnp.inf, wide)
            return varying(out, self.axis_name), varying(logsumexp, self.axis_name)
        out, logsumexp = self._attend(region, causal, q_ids, block.ids, *_cut(region, q, block.k, block.v))
        first = region.q[0]
        return (
            jnp.pad(out.astype(wide), ((0, 0), (first, 0), (0, 0), (0, 0))),
            jnp.pad(logsumexp, ((0, 0), (first, 0), (0, 0)), constant_values=-jnp.inf),
        )

    def _attend(self, region: _Region, causal: bool, q_ids: Any, kv_ids: Any, *operands: jax.Array) -> Any:
        ids = None if q_ids is None else (_rows(q_ids, region.q), _rows(kv_ids, region.k))
        return self.attend(*operands, ids, causal)

    def _backward(self, q: jax.Array, block: _Block, q_ids: Any, results: Any, cotangents: Any) -> Any:
        out, logsumexp = results
        d_out, d_logsumexp = (x.astype(accumulator(q.dtype)) for x in cotangents)
        # out is the sum of w_r out_r with w_r = exp(logsumexp_r - logsumexp): the cotangents of each part.
        through = jnp.sum(out.astype(d_out.dtype) * d_out, axis=-1)  # [B, T, H]

        def gradients(region: _Region | None, block: _Block, *, causal: bool) -> Any:
            wide = accumulator(q.dtype)
            if region is None:
                zeros = (jnp.zeros(x.shape, wide) for x in (q, block.k, block.v))
                return tuple(varying(x, self.axis_name) for x in zeros)
            attend = functools.partial(self._attend, region, causal, q_ids, block.ids)
            (part, part_sum), pullback = jax.vjp(attend, *_cut(region, q, block.k, block.v))
            given, own, after, total = (_rows(x, region.q) for x in (d_out, d_logsumexp, through, logsumexp))
            share = jnp.where(part_sum == -jnp.inf, 0.0, jnp.exp(part_sum - jnp.where(total == -jnp.inf, 0.0, total)))
            of_part = jnp.sum(part.astype(wide) * given, axis=-1)
            pulled = pullback(
                (
                    (share[..., None] * given).astype(part.dtype),
                    (share * (of_part - after + own)).astype(part_sum.dtype),
                )
            )
            rows = (region.q, region.k, region.k)
            return tuple(
                _padded(x.astype(wide), at, whole.shape[1])
                for x, at, whole in zip(pulled, rows, (q, block.k, block.v), strict=True)
            )

        several = jax.lax.axis_size(self.axis_name) > 1
        arrived = self._next(block) if several else block
        d_q, *d_block = gradients(self.own, block, causal=self.causal)

        def work(hop: Any, block: _Block, carried: Any) -> Any:
            d_q, d_block = carried
            d_block = self._next(d_block)
            own_q, *own = self._by_origin(hop, lambda region: gradients(region, block, causal=False))
            return d_q + own_q, tuple(map(jnp.add, d_block, own))

        d_q, d_block = self._around(arrived, (d_q, tuple(d_block)), work)
        d_k, d_v = self._next(d_block) if several else d_block
        return d_q.astype(q.dtype), d_k.astype(block.k.dtype), d_v.astype(block.v.dtype)


def _rows(x: jax.Array, rows: tuple[int, int]) -> jax.Array:
    return x[:, rows[0] : rows[1]]


def _cut(region: _Region, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    return _rows(q, region.q), _rows(k, region.k), _rows(v, region.k)


def _padded(x: jax.Array, rows: tuple[int, int], length: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (rows[0], length - rows[1]), *((0, 0),) * (x.ndim - 2)))


def _merged(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The results over the keys of two parts."""
    largest = jnp.maximum(one[1], other[1])
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)  # No key at all.
    weights = [jnp.exp(part[1] - largest) for part in (one, other)]
    total = weights[0] + weights[1]
    shares = [jnp.where(total > 0, weight / jnp.where(total > 0, total, 1.0), 0.0)[..., None] for weight in weights]
    out = shares[0] * one[0] + shares[1] * other[0]
    return out, largest + jnp.log(total)


def _targets(count: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Where the first and the second half of each device's shard are worked on: chunk c on device min(c, 2 n - 1 - c)."""
    chunks = [(2 * device, 2 * device + 1) for device in range(count)]
    halves = [[(chunk // 2, min(chunk, 2 * count - 1 - chunk)) for chunk in half] for half in zip(*chunks, strict=True)]
    return halves[0], halves[1]


def _deal(x: jax.Array, axis_name: str) -> jax.Array:
    """A contiguous shard [B, T/n, ...] as the chunks i and 2 n - 1 - i of the sequence."""
    half = x.shape[1] // 2
    first, second = _targets(jax.lax.axis_size(axis_name))
    even = jax.lax.ppermute(x[:, :half], axis_name, first)  # Chunk i or 2 n - 1 - i, whichever is even.
    odd = jax.lax.ppermute(x[:, half:], axis_name, second)
    is_even = jax.lax.axis_index(axis_name) % 2 == 0
    return jnp.where(is_even, jnp.concatenate([even, odd], axis=1), jnp.concatenate([odd, even], axis=1))


def _collect(x: jax.Array, axis_name: str) -> jax.Array:
    """The inverse of `_deal`."""
    half = x.shape[1] // 2
    is_even = jax.lax.axis_index(axis_name) % 2 == 0
    low, high = x[:, :half], x[:, half:]
    first, second = ([(to, source) for source, to in each] for each in _targets(jax.lax.axis_size(axis_name)))
    even = jax.lax.ppermute(jnp.where(is_even, low, high), axis_name, first)
    odd = jax.lax.ppermute(jnp.where(is_even, high, low), axis_name, second)
    return jnp.concatenate([even, odd], axis=1)
