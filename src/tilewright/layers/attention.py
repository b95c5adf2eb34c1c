"""Softmax attention of Qwen3 and Qwen3-Next: grouped-query heads, query and key norms, RoPE, an output gate.

The state is a cache of keys and values, of one of two kinds:

- **grown**, from a call with state=None: it holds exactly the tokens that were read, and each call returns a longer
  one. It allocates nothing beyond the keys and values that were computed anyway, so it is free in training. Its shape
  changes from call to call, so it cannot be carried by `scan`.
- **fixed**, from `initial_state(batch, capacity=...)` or from a grown cache's `with_capacity(...)`: it has room for
  `capacity` tokens and one shape for all calls, for decoding under `jit` and `scan`. A token past the end is an error
  where the length is known; under `jit` its output is NaN.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tilewright.core.axes import Size
from tilewright.core.dispatch import ImplementationName
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import explicit_axes, placed, run_on_parts
from tilewright.core.quantized import QuantizedArray
from tilewright.core.segments import check_segments, segment_starts
from tilewright.layers.layer import (
    Layer,
    Leaf,
    Parameter,
    Residual,
    Tensors,
    linear,
    norm,
    norm_weights,
    placed_state,
    project,
    project_each,
    split_heads,
)
from tilewright.ops.attention.api import flash_attention
from tilewright.ops.attention.decode.api import decode_attention
from tilewright.ops.attention.decode_qkv.api import decode_qkv, has_kernel
from tilewright.ops.norm.api import rms_norm
from tilewright.ops.rope.api import Scaling, apply_rope


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedCache:
    """One layer's fixed cache as a part of the stack of several layers' caches.

    New entries are written into the stack itself, so that a scan over layers that carries the stack copies no cache.
    """

    stack: Leaf  # [L, B, S, ...]
    layer: Leaf  # int32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionState:
    """The keys and values of the tokens read so far."""

    caches: ClassVar[tuple[str, ...]] = ("keys", "values")
    """Those with an axis of tokens. In a fixed cache each may be a `StackedCache`."""

    keys: Leaf  # [B, S, KV, C], rotated
    values: Leaf  # [B, S, KV, C]
    first: Leaf = None  # [B] int32, where the last token's segment starts; None where no segments were given
    length: Leaf = None  # int32, or [B], the number of tokens in a fixed cache; None in a grown cache, which holds S
    next_length: Leaf = None  # length + 1, where a loop over layers has it, so that none of them computes it again

    def with_capacity(self, capacity: int) -> "AttentionState":
        """Converts a grown cache to a fixed one with room for `capacity` tokens in total."""
        length = self.keys.shape[1]
        if self.length is not None:
            raise ValueError(f"this cache is already a fixed one, with room for {length} tokens; use it as it is")
        if capacity < length:
            raise ValueError(
                f"capacity={capacity} is less than the {length} tokens in the cache; use at least {length}"
            )
        room = ((0, 0), (0, capacity - length), (0, 0), (0, 0))
        return AttentionState(
            keys=jnp.pad(self.keys, room),
            values=jnp.pad(self.values, room),
            first=self.first,
            length=jnp.asarray(length, jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionWeights:
    """H query heads and KV key and value heads of C channels each."""

    q_proj: Leaf  # [D, H C]
    k_proj: Leaf  # [D, KV C]
    v_proj: Leaf  # [D, KV C]
    o_proj: Leaf  # [H C, D]
    q_norm: Leaf = None  # [C], with qk_norm
    k_norm: Leaf = None  # [C], with qk_norm
    gate_proj: Leaf = None  # [D, H C], where gated


@dataclass(frozen=True, kw_only=True)
class Attention(Layer[AttentionWeights]):
    r"""Causal softmax attention.

    For tokens x:

        q, k = rope(norm(x Wq)), rope(norm(x Wk));  v = x Wv
        o = softmax(q k^T / sqrt(C)) v, causal
        y = o Wo, or (o * sigmoid(x Wg)) Wo where gated
    """

    weights = AttentionWeights
    state = AttentionState
    quantizable = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")

    d_model: int
    num_heads: int
    num_kv_heads: int
    """A divisor of num_heads: num_heads / num_kv_heads query heads share each key and value head."""
    head_dim: int
    rope_theta: float | None = 10_000.0
    """The base of the RoPE frequencies; None for no RoPE."""
    rope_scaling: Scaling | None = None
    """`Linear`, `Llama3` or `Yarn` of tilewright.ops.rope.api, for longer contexts; None for none."""
    rope_fraction: float = 1.0
    """The fraction of a head's channels that RoPE rotates, counted from the first; 0.25 in Qwen3-Next."""
    qk_norm: bool = True
    """RMSNorm of each query and key head."""
    norm_offset: float = 0.0
    """Added to the norms' weights; 1 in Qwen3-Next, whose weights are centred at 0."""
    gated: bool = False
    """Whether the output is multiplied by sigmoid(x Wg), as in Qwen3-Next."""
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}, since the same number "
                f"of query heads share each key head; use num_kv_heads=1, {self.num_heads}, or a divisor between"
            )
        if self.rope_theta is not None and self.rope_theta <= 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be positive; use 10_000.0, or None for no rope")
        if not 0 < self.rope_fraction <= 1 or self.rotated % 2:
            raise ValueError(
                f"rope_fraction={self.rope_fraction} of head_dim={self.head_dim} is {self.rotated} channels; it must be an "
                f"even number of them, since they rotate in pairs: use 1.0, or rope_theta=None for no rope"
            )

    @property
    def rotated(self) -> int:
        """The number of channels of a head that RoPE rotates."""
        return int(self.head_dim * self.rope_fraction)

    def parameters(self) -> dict[str, Parameter]:
        """With the names of Qwen3's and Qwen3-Next's checkpoints ("model.layers.3.self_attn")."""
        d, queries, values = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return {
            "q_proj": linear("q_proj", d, queries, self.num_heads),
            "k_proj": linear("k_proj", d, values, self.num_kv_heads),
            "v_proj": linear("v_proj", d, values, self.num_kv_heads),
            "o_proj": linear("o_proj", queries, d, axes=("heads", "embed")),
            **{name: norm(name, self.head_dim, 1.0 - self.norm_offset) for name in norms},
            **({"gate_proj": linear("q_proj", d, queries, self.num_heads)} if self.gated else {}),
        }

    def unpacked(self, checkpoint: Tensors) -> dict[str, jax.Array]:
        """In a gated checkpoint, q_proj has for each head the rows of its query, then those of its gate."""
        if not self.gated:
            return {}
        packed = checkpoint.array("q_proj.weight", (self.num_heads, 2, self.head_dim, self.d_model))
        return {name: packed[:, n].reshape(-1, self.d_model).T for n, name in enumerate(("q_proj", "gate_proj"))}

    def packed(self, weights: AttentionWeights) -> dict[str, Any]:
        if not self.gated:
            return {}
        parts = [getattr(weights, name).T.reshape(self.num_heads, self.head_dim, -1) for name in self.packed_fields]
        return {"q_proj.weight": jnp.stack(parts, axis=1).reshape(-1, self.d_model)}

    @property
    def packed_fields(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("q_proj", "gate_proj") if self.gated else ()

    def initial_state(
        self, batch: int, *, capacity: int | None = None, dtype: Any = jnp.float32, like: tuple[Any, Any] | None = None
    ) -> AttentionState:
        """A fixed cache with room for `capacity` tokens, for activations of `dtype`.

        `like`: the weights and an x [B, T, D] of the calls to come. The cache then is sharded over Explicit mesh axes as
        these calls return it, which the carry of `jax.lax.scan` has to be.
        """
        if capacity is None:
            raise ValueError(
                "capacity=None: a fixed cache of keys and values needs its number of tokens; pass capacity=..., or begin "
                "with state=None for a cache that grows"
            )
        shape = (batch, capacity, self.num_kv_heads, self.head_dim)
        # A buffer each: a state is donated as a whole.
        state = AttentionState(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), length=jnp.zeros((), jnp.int32))
        return placed_state(state, self.apply, like)

    def apply(
        self,
        weights: Any,
        x: Float[Array, "*tokens D"],
        state: Any = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], AttentionState]:
        """Returns y [B, T, D] and the cache after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        With the `state` of an earlier call it continues from there; without one, the returned cache is a grown one (see
        this module). `segment_ids` [B, T] separates packed sequences; the given state belongs to the first token's
        segment. RoPE positions count all tokens of a row, since only their differences matter. `implementation` is that
        of `flash_attention`; the other ops, and the step of a single token, take the best that the device can run.

        Where an Explicit mesh axis cuts x along T, y is cut alike, and the cache has whole sequences.
        """
        self.check_tokens(x)
        self.check_weights(weights)
        context = self.check_shardings(weights, x, state)
        b, t, _ = x.shape
        if state is not None:
            self._check_state(state, x)
        if segment_ids is None and (token := self._token(weights, x, state)) is not None:
            o, after = self._decoded(*token, state)
            return self._projected(weights, self._gate(weights, x), o, x), after
        length = 0 if state is None else state.keys.shape[1] if state.length is None else state.length
        positions = cache_positions(length, t)  # [T], or [B, T]

        q, k, v, *gate = project_each(x, [getattr(weights, name) for name in self._projections])

        def heads(y: jax.Array, norm: Any, count: int) -> jax.Array:
            y = split_heads(y, count)
            if self.qk_norm:
                y = rms_norm(y, norm_weights(norm, y), eps=self.eps, offset=self.norm_offset)
            if self.rope_theta is None:
                return y
            options = {"theta": self.rope_theta, "scaling": self.rope_scaling, "rotary_dim": self.rotated}
            return apply_rope(y, positions, **options)

        q = heads(q, weights.q_norm, self.num_heads)  # [B, T, H, C]
        k = heads(k, weights.k_norm, self.num_kv_heads)  # [B, T, KV, C]
        v = split_heads(v, self.num_kv_heads)
        # On Explicit mesh axes, which JAX does not join, the segments are where x is.
        batch = explicit_axes(x)[0]
        if state is not None and state.first is not None:
            state = replace(state, first=placed(state.first, [batch]))
        runs = numbered_segments(segment_ids, x)
        if context is not None:
            o = attend_over(context, q, k, v, runs, implementation)
            keys, values = (placed(each, [batch, (), *explicit_axes(each)[2:]]) for each in (k, v))
            first = None
            if runs is not None:
                first = _segment_starts(runs, positions, placed(jnp.zeros((b,), jnp.int32), [batch]))[:, -1]
            after = AttentionState(keys, values, first)
        elif state is None or state.length is None:
            o, after = _attend_grown(q, k, v, state, runs, implementation)
        else:
            o, after = _attend_fixed(q, k, v, state, positions, runs, implementation)
        return self._projected(weights, gate[0] if gate else None, o, x), after

    def can_decode(self, weights: Any, x: jax.Array, state: Any, residual: Residual) -> bool:
        return self._token(weights, x, state) is not None and residual.takes(weights.o_proj)

    def decode(
        self, weights: Any, x: Float[Array, "B 1 D"], state: Any, residual: Residual
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], AttentionState]:
        """See `Layer.decode`."""
        token = self._token(weights, x, state)
        assert token is not None
        o, after = self._decoded(*token, state)
        return *residual.plus(self._gated(self._gate(weights, x), o), weights.o_proj), after

    def decode_layers_arguments(self, weights: Any, state: Any) -> dict[str, Any] | None:
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        if (
            self.gated
            or state.first is not None
            or any(isinstance(vars(weights)[name], QuantizedArray) for name in names)
        ):
            return None
        q, k, v, o = (vars(weights)[name] for name in names)
        heads = {name: w.reshape(*w.shape[:2], -1, self.head_dim) for name, w in zip(names, (q, k, v), strict=False)}
        return {
            **heads,
            "o_proj": o.reshape(o.shape[0], self.num_heads, self.head_dim, self.d_model),
            "keys": state.keys,
            "values": state.values,
            **self._decode_options(weights),
        }

    def _decode_options(self, weights: Any) -> dict[str, Any]:
        """How the ops that decode normalise and rotate heads."""
        return {
            "q_norm": weights.q_norm,
            "k_norm": weights.k_norm,
            "eps": self.eps,
            "norm_offset": self.norm_offset,
            "theta": self.rope_theta,
            "scaling": self.rope_scaling,
            "rotary_dim": self.rotated,
        }

    @property
    def _projections(self) -> tuple[str, ...]:
        """The weights that x is multiplied by."""
        return ("q_proj", "k_proj", "v_proj", *(("gate_proj",) if self.gated else ()))

    def _gate(self, weights: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T E"] | None:
        return project(x, weights.gate_proj) if self.gated else None

    def _projected(
        self, weights: Any, gate: Float[Array, "B T E"] | None, o: Float[Array, "B T H C"], x: Float[Array, "B T D"]
    ) -> Float[Array, "B T D"]:
        """What attention gives as the layer's output, sharded as x is."""
        return placed(project(self._gated(gate, o), weights.o_proj), explicit_axes(x))

    def _gated(self, gate: Float[Array, "B T E"] | None, o: Float[Array, "B T H C"]) -> Float[Array, "B T E"]:
        """What attention gives with its heads side by side, times the sigmoid of the gate, if there is one."""
        o = o.reshape(*o.shape[:2], self.num_heads * self.head_dim)
        if gate is None:
            return o
        dtype = gate.dtype
        gate = jax.nn.sigmoid(placed(gate, explicit_axes(o)).astype(accumulator(dtype)))
        return (o.astype(gate.dtype) * gate).astype(dtype)

    def _token(self, weights: Any, x: jax.Array, state: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of `decode_qkv` for a single token over its fixed cache, where it has a kernel for it."""
        if x.shape[1] != 1 or state is None or state.length is None or state.first is not None:
            return None
        stacked, projections = isinstance(state.keys, StackedCache), (weights.q_proj, weights.k_proj, weights.v_proj)
        caches = [array_of(cache) for cache in (state.keys, state.values)]
        if any(isinstance(each, QuantizedArray) or each.dtype != x.dtype for each in (*projections, *caches)):
            return None
        if any(any(explicit_axes(leaf)) for leaf in jax.tree.leaves((weights, x, state))):
            return None
        projections = [w.reshape(self.d_model, -1, self.head_dim) for w in projections]
        arguments = (x[:, 0], *projections, *caches, jnp.broadcast_to(state.length, x.shape[:1]))
        options = {"layer": state.keys.layer if stacked else None, **self._decode_options(weights)}
        return (arguments, options) if has_kernel(*arguments, **options) else None

    def _decoded(
        self, arguments: tuple[Any, ...], options: dict[str, Any], state: Any
    ) -> tuple[Float[Array, "B T H C"], AttentionState]:
        """Attention of a single token over its fixed cache, and the cache.

        Past the capacity nothing is written, and `decode_attention` gives NaN.
        """
        q, keys, values = decode_qkv(*arguments, **options)
        if isinstance(state.keys, StackedCache):
            keys, values = (StackedCache(stack, state.keys.layer) for stack in (keys, values))
        length = state.length + 1 if state.next_length is None else state.next_length
        after = AttentionState(keys, values, None, length)
        o = decode_attention(q[:, None], held(keys), held(values), jnp.broadcast_to(after.length, q.shape[:1]))
        assert isinstance(o, jax.Array)
        return o, after

    def _check_state(self, state: Any, x: jax.Array) -> None:
        capacity = state.keys.shape[1] if isinstance(state, AttentionState) else 0
        slots = (capacity, self.num_kv_heads, self.head_dim)
        self.check_state(state, x, keys=slots, values=slots)
        check_room(state.length, capacity, x.shape[1])


def numbered_segments(segment_ids: Any, x: jax.Array) -> Int[Array, "B T"] | None:
    """The segments of each row of x [B, T, D], numbered in order: an id that occurs again later is another segment.

    On Explicit mesh axes the rows are where those of x are, and whole.
    """
    if segment_ids is None:
        return None
    segment_ids = jnp.asarray(segment_ids)
    check_segments(segment_ids, x.shape[:2])
    segment_ids = placed(segment_ids, [explicit_axes(x)[0], ()])
    return jnp.cumsum(segment_starts(segment_ids), axis=1, dtype=jnp.int32)


def attend_over(
    context: str,
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T KV C"],
    v: Float[Array, "B T KV V"],
    segment_ids: Int[Array, "B T"] | None,
    implementation: ImplementationName | None,
) -> Float[Array, "B T H V"]:
    """Causal attention of sequences that an Explicit mesh axis cuts. `segment_ids` differ between all segments of a row."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any) -> Any:
        options: Any = {"axis_name": context, "implementation": implementation}
        return flash_attention(q, k, v, causal=True, segment_ids=segment_ids, **options)

    axes = explicit_axes(q)
    segment_ids = None if segment_ids is None else placed(segment_ids, axes[:2])
    return run_on_parts(attend, (q, k, v, segment_ids), P(*axes))


def check_room(length: Any, capacity: Size, t: Size) -> None:
    """Raises where t more tokens do not fit a fixed cache that holds `length`; a grown one has None, and takes any."""
    if length is None:
        return
    # A traced length is not known here; the outputs of tokens past the end are then NaN.
    held = 0 if isinstance(length, Tracer) else int(jnp.max(length))
    if held + t > capacity:
        raise ValueError(
            f"state has room for {capacity} tokens, holds {held}, and x has T={t} more; make it larger with "
            f"initial_state(batch, capacity={held + t}) or more"
        )


def cache_positions(length: Any, t: Size) -> Int[Array, "*rows T"]:
    """The positions of t tokens behind `length` others: [T], or [B, T] where rows have lengths of their own."""
    steps = jnp.arange(t, dtype=jnp.int32)
    return length[:, None] + steps[None] if jnp.ndim(length) == 1 else length + steps


def written(cache: Any, new: Float[Array, "B T *C"], length: Any) -> Any:
    """The cache [B, S, ...] with new entries behind the `length` that it holds, or behind a length per row.

    On Explicit mesh axes, which JAX does not join, it is where the new entries are.
    """
    if isinstance(cache, StackedCache):
        b, t = new.shape[:2]
        rows = jnp.arange(b, dtype=jnp.int32)[:, None]
        at = jnp.broadcast_to(cache_positions(length, t), (b, t))
        new = new.astype(cache.stack.dtype)
        stack = cache.stack.at[cache.layer, rows, at].set(new, mode="drop", unique_indices=True)
        return StackedCache(stack, cache.layer)
    cache, new = placed(cache, explicit_axes(new)), new.astype(cache.dtype)
    if jnp.ndim(length) == 1:
        return jax.vmap(lambda row, own, at: jax.lax.dynamic_update_slice_in_dim(row, own, at, 0))(cache, new, length)
    return jax.lax.dynamic_update_slice_in_dim(cache, new, length, 1)


def array_of(cache: Any) -> jax.Array:
    """A cache's array: the stack of several layers' caches, or its own."""
    return cache.stack if isinstance(cache, StackedCache) else cache


def held(cache: Any) -> Float[Array, "B S *C"]:
    """The entries of a cache."""
    return layer_of(cache.stack, cache.layer) if isinstance(cache, StackedCache) else cache


def layer_of(stack: jax.Array, layer: Any) -> jax.Array:
    """One layer's part of stacked arrays."""
    return jax.lax.dynamic_index_in_dim(stack, layer, 0, keepdims=False, allow_negative_indices=False)


def _segment_starts(
    runs: Int[Array, "B T"], positions: Int[Array, "*rows T"], first: Int[Array, " B"]
) -> Int[Array, "B T"]:
    """For each token the position where its segment starts; the first segment started at `first`."""
    positions = positions if positions.ndim == 2 else positions[None]
    # Placed, since positions that need no broadcast, of one row, would decide where the result lies.
    positions = placed(jnp.broadcast_to(positions, runs.shape), explicit_axes(runs))
    own = jnp.where(segment_starts(runs), positions, -1)
    latest = jax.lax.cummax(own, axis=1)
    return jnp.where(latest < 0, jnp.broadcast_to(first[:, None], runs.shape), latest)


def _attend_grown(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T KV C"],
    v: Float[Array, "B T KV C"],
    state: AttentionState | None,
    runs: Int[Array, "B T"] | None,
    implementation: ImplementationName | None,
) -> tuple[Float[Array, "B T H C"], AttentionState]:
    """Attends to the grown cache followed by the new keys. The mask is static, apart from segments."""
    b, t = q.shape[:2]
    length = 0 if state is None else state.keys.shape[1]
    first = None if state is None else state.first
    if state is not None:
        keys, values = placed(state.keys, explicit_axes(k)), placed(state.values, explicit_axes(v))
        k = jnp.concatenate([keys.astype(k.dtype), k], axis=1)  # [B, S + T, KV, C]
        v = jnp.concatenate([values.astype(v.dtype), v], axis=1)
    segments = None
    if runs is not None or first is not None:
        batch = explicit_axes(q)[0]
        runs = placed(jnp.zeros((b, t), jnp.int32), [batch, ()]) if runs is None else runs
        first = placed(jnp.zeros((b,), jnp.int32), [batch]) if first is None else first
        # The last segment in the cache continues as the first of this call; the tokens before it are not visible.
        slots = jnp.arange(length, dtype=jnp.int32)
        before = jnp.where(slots[None] >= first[:, None], 0, -1)  # [B, S]
        segments = (runs, jnp.concatenate([before, runs], axis=1))
        if t:
            first = _segment_starts(runs, length + jnp.arange(t, dtype=jnp.int32), first)[:, -1]
    o = flash_attention(q, k, v, causal=True, q_offset=length, segment_ids=segments, implementation=implementation)
    assert isinstance(o, jax.Array)
    return o, AttentionState(k, v, first)


def _attend_fixed(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T KV C"],
    v: Float[Array, "B T KV C"],
    state: AttentionState,
    positions: Int[Array, "*rows T"],
    runs: Int[Array, "B T"] | None,
    implementation: ImplementationName | None,
) -> tuple[Float[Array, "B T H C"], AttentionState]:
    """Writes the new keys and values behind those in the cache, and attends to the slots that are filled."""
    b, t = q.shape[:2]
    capacity = state.keys.shape[1]
    if t == 0:
        return q, state
    keys = written(state.keys, k, state.length)  # [B, S, KV, C]
    values = written(state.values, v, state.length)
    length = state.length + t
    after = AttentionState(keys, values, state.first, length)
    keys, values = held(keys).astype(q.dtype), held(values).astype(q.dtype)
    if t == 1 and state.first is None:
        lengths = jnp.broadcast_to(length, (b,))
        o = decode_attention(q, keys, values, lengths)
        assert isinstance(o, jax.Array)
    else:
        first = placed(jnp.zeros((b,), jnp.int32), explicit_axes(q)[:1]) if state.first is None else state.first
        starts = jnp.broadcast_to(first[:, None], (b, t)) if runs is None else _segment_starts(runs, positions, first)
        slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]  # [1, 1, S]
        last = positions if positions.ndim == 2 else positions[None]  # [B or 1, T]
        seen = (slots >= starts[:, :, None]) & (slots <= last[:, :, None])  # [B, T, S]
        o = flash_attention(q, keys, values, mask=seen[:, None], implementation=implementation)
        assert isinstance(o, jax.Array)
        if runs is not None or state.first is not None:
            after = replace(after, first=starts[:, -1])
    # dynamic_update_slice clamps the start of a slice that does not fit, which would give wrong outputs: return NaN.
    fits = jnp.broadcast_to(length <= capacity, (b,))[:, None, None, None]
    return jnp.where(fits, o, jnp.nan), after
