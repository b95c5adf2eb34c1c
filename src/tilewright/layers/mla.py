"""Multi-head latent attention of Kimi Linear: keys and values from one small latent per token, which is all that is kept.

The cache of a token is its latent of R channels and E channels that all heads share, instead of keys and values of every
head. Whole sequences and chunks expand the latents to keys and values. A single token is decoded in the absorbed form:
queries go through the keys' expansion, and outputs through the values', so that attention runs on the latents themselves,
with one key head of R + E channels.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.dispatch import ImplementationName
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.core.quantized import QuantizedArray, dequantize
from tilewright.layers.attention import (
    StackedCache,
    array_of,
    attend_over,
    cache_positions,
    check_room,
    held,
    numbered_segments,
    written,
)
from tilewright.layers.layer import (
    Layer,
    Leaf,
    Parameter,
    Residual,
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
from tilewright.ops.attention.decode_latent.api import decode_latent_attention, has_kernel
from tilewright.ops.attention.decode_latent_heads.api import absorb_queries, expand_values, has_kernels
from tilewright.ops.attention.decode_latent_qkv.api import decode_latent_qkv
from tilewright.ops.attention.decode_latent_qkv.api import has_kernel as has_projections
from tilewright.ops.norm.api import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentState:
    """The latents of the tokens read so far."""

    caches: ClassVar[tuple[str, ...]] = ("latents",)
    """Those with an axis of tokens. In a fixed cache each may be a `StackedCache`."""

    latents: Leaf  # [B, S, R + E], normalised; None after packed sequences, which are not continued
    length: Leaf  # int32, or [B], the number of tokens in the cache; None in a grown one, which holds S
    next_length: Leaf = None  # length + 1, where a loop over layers has it, so that none of them computes it again

    def with_capacity(self, capacity: int) -> "LatentState":
        """Converts a grown cache to a fixed one with room for `capacity` tokens in total."""
        length = self.latents.shape[1]
        room = ((0, 0), (0, capacity - length), (0, 0))
        return LatentState(jnp.pad(self.latents, room), jnp.asarray(length, jnp.int32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LatentAttentionWeights:
    """H heads of C + E channels for queries and keys, of which E are shared by the keys of all heads, and V for values."""

    q_proj: Leaf  # [D, H (C + E)]
    kv_down: Leaf  # [D, R + E], kv_a_proj_with_mqa in the checkpoints
    kv_norm: Leaf  # [R], kv_a_layernorm
    kv_up: Leaf  # [R, H (C + V)], kv_b_proj
    o_proj: Leaf  # [H V, D]


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Layer[LatentAttentionWeights]):
    r"""Causal attention from latents.

    For tokens x:

        c, e = norm(x Wdown);  k = [c Wup_k, e], v = c Wup_v;  q = x Wq
        y = (softmax(q k^T / sqrt(C + E)) v) Wo, causal

    No positions: Kimi Linear leaves them to its delta layers.
    """

    weights = LatentAttentionWeights
    state = LatentState
    quantizable = ("q_proj", "kv_down", "kv_up", "o_proj")

    d_model: int
    num_heads: int
    latent_dim: int
    """R, `kv_lora_rank`."""
    key_dim: int
    """C, the channels of a head's keys that are its own (`qk_nope_head_dim`)."""
    shared_key_dim: int
    """E, those that all heads share (`qk_rope_head_dim`)."""
    value_dim: int
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_heads", "latent_dim", "key_dim", "shared_key_dim", "value_dim")

    def parameters(self) -> dict[str, Parameter]:
        """With the names of Kimi Linear's checkpoints ("model.layers.3.self_attn")."""
        d, h, r = self.d_model, self.num_heads, self.latent_dim
        return {
            "q_proj": linear("q_proj", d, h * (self.key_dim + self.shared_key_dim), h),
            "kv_down": linear("kv_a_proj_with_mqa", d, r + self.shared_key_dim),
            "kv_norm": norm("kv_a_layernorm", r),
            "kv_up": linear("kv_b_proj", r, h * (self.key_dim + self.value_dim), h),
            "o_proj": linear("o_proj", h * self.value_dim, d, axes=("heads", "embed")),
        }

    def initial_state(
        self, batch: int, *, capacity: int, dtype: Any = jnp.float32, like: tuple[Any, Any] | None = None
    ) -> LatentState:
        """A cache with room for `capacity` tokens; `like` shards it, as in `Attention.initial_state`."""
        shape = (batch, capacity, self.latent_dim + self.shared_key_dim)
        return placed_state(LatentState(jnp.zeros(shape, dtype), jnp.zeros((), jnp.int32)), self.apply, like)

    def apply(
        self,
        weights: Any,
        x: Float[Array, "*tokens D"],
        state: Any = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], LatentState]:
        """Returns y [B, T, D] and the cache after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        Without a state the returned cache is a grown one, of the tokens of x. `segment_ids` [B, T] separates packed
        sequences, of calls without a state, and leaves no cache. `implementation` is that of `flash_attention`. Where an
        Explicit mesh axis cuts x along T, y is cut alike, and the cache has whole sequences.
        """
        self.check_tokens(x)
        self.check_weights(weights)
        context = self.check_shardings(weights, x, state)
        b, t, _ = x.shape
        if (
            segment_ids is None
            and isinstance(state, LatentState)
            and (token := self._token(weights, x, state)) is not None
        ):
            self._check_state(state, x)
            o, after = self._decoded(weights, token, state)
            return project(o.reshape(b, t, self.num_heads * self.value_dim), weights.o_proj), after
        q, latents = self._projected(weights, x)
        if state is None:
            k, v = self._expanded(weights, latents)
            runs = numbered_segments(segment_ids, x)
            if context is None:
                o = flash_attention(q, k, v, causal=True, segment_ids=runs, implementation=implementation)
            else:
                o = attend_over(context, q, k, v, runs, implementation)
            after = LatentState(placed(latents, [explicit_axes(x)[0], (), ()]) if runs is None else None, None)
        else:
            if segment_ids is not None:
                raise ValueError("LatentAttention takes segment_ids without a state only; pass one sequence per row")
            if isinstance(state, LatentState) and state.latents is None:
                raise ValueError(
                    "this state is that after packed sequences (segment_ids), which LatentAttention does not continue; "
                    "read the last sequence by itself"
                )
            self._check_state(state, x)
            o, after = self._attend_cache(weights, q, latents, state, implementation)
        assert isinstance(o, jax.Array)
        y = project(o.reshape(b, t, self.num_heads * self.value_dim), weights.o_proj)
        return placed(y, explicit_axes(x)), after

    def can_decode(self, weights: Any, x: jax.Array, state: Any, residual: Residual) -> bool:
        return self._token(weights, x, state) is not None and residual.takes(weights.o_proj)

    def decode(
        self, weights: Any, x: Float[Array, "B 1 D"], state: Any, residual: Residual
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], LatentState]:
        """See `Layer.decode`."""
        token = self._token(weights, x, state)
        assert token is not None
        o, after = self._decoded(weights, token, state)
        return *residual.plus(o.reshape(*o.shape[:2], self.num_heads * self.value_dim), weights.o_proj), after

    def _token(self, weights: Any, x: jax.Array, state: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments of `decode_latent_qkv` for a single token over its fixed cache, where it and attention over the
        latents have kernels.
        """
        if x.shape[1] != 1 or state is None or state.latents is None or state.length is None:
            return None
        stacked = isinstance(state.latents, StackedCache)
        cache = array_of(state.latents)
        projections = weights.q_proj, weights.kv_down
        if any(isinstance(each, QuantizedArray) or each.dtype != x.dtype for each in (*projections, cache)):
            return None
        if any(any(explicit_axes(leaf)) for leaf in jax.tree.leaves((weights, x, state))):
            return None
        q_proj = weights.q_proj.reshape(self.d_model, self.num_heads, -1)
        lengths = jnp.broadcast_to(state.length, x.shape[:1])
        arguments = (x[:, 0], q_proj, weights.kv_down, norm_weights(weights.kv_norm, x), cache, lengths)
        options = {"layer": state.latents.layer if stacked else None, "eps": self.eps}
        # Only shapes are looked at.
        q = jnp.zeros((x.shape[0], self.num_heads, cache.shape[-1]), x.dtype)
        held_there = self._has_kernel(q, held(state.latents), lengths)
        return (arguments, options) if held_there and has_projections(*arguments, **options) else None

    def _decoded(
        self, weights: Any, token: tuple[tuple[Any, ...], dict[str, Any]], state: LatentState
    ) -> tuple[Float[Array, "B 1 H V"], LatentState]:
        """Attention of a single token over its fixed cache, and the cache.

        Past the capacity nothing is written, and `decode_latent_attention` gives NaN.
        """
        arguments, options = token
        q, latents = decode_latent_qkv(*arguments, **options)
        if isinstance(state.latents, StackedCache):
            latents = StackedCache(latents, state.latents.layer)
        length = state.length + 1 if state.next_length is None else state.next_length
        o = self._absorbed(weights, q[:, None], held(latents), jnp.broadcast_to(length, q.shape[:1]))
        return o, LatentState(latents, length)

    def _check_state(self, state: Any, x: jax.Array) -> None:
        capacity = state.latents.shape[1] if isinstance(state, LatentState) else 0
        self.check_state(state, x, latents=(capacity, self.latent_dim + self.shared_key_dim))
        check_room(state.length, capacity, x.shape[1])

    def _projected(
        self, weights: Any, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T H K"], Float[Array, "B T L"]]:
        """The queries [B, T, H, C + E] and the latents [B, T, R + E] of tokens."""
        q, down = project_each(x, [weights.q_proj, weights.kv_down])
        q, r = split_heads(q, self.num_heads), self.latent_dim
        latent = rms_norm(down[..., :r], norm_weights(weights.kv_norm, x), eps=self.eps)
        return q, jnp.concatenate([latent, down[..., r:]], axis=-1)

    def _expanded(self, weights: Any, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, S, H, C + E] and values [B, S, H, V] of latents [B, S, R + E]."""
        b, s, _ = latents.shape
        h, r = self.num_heads, self.latent_dim
        own = split_heads(project(latents[..., :r], weights.kv_up), h)  # [B, S, H, C + V]
        shared = jnp.broadcast_to(latents[:, :, None, r:], (b, s, h, self.shared_key_dim))
        shared = placed(shared, explicit_axes(own))
        return jnp.concatenate([own[..., : self.key_dim], shared], axis=-1), own[..., self.key_dim :]

    def _attend_cache(
        self, weights: Any, q: jax.Array, latents: jax.Array, state: LatentState, implementation: Any
    ) -> tuple[jax.Array, LatentState]:
        if state.length is None:
            raise ValueError("this state is a grown one, which a call without a state returned; use initial_state(...)")
        b, t = q.shape[:2]
        cache, length = written(state.latents, latents, state.length), state.length + t
        after = LatentState(cache, length)
        cache = held(cache).astype(q.dtype)
        capacity = cache.shape[1]
        if t == 1:  # Past the capacity it is NaN already.
            return self._absorbed(weights, q, cache, jnp.broadcast_to(length, (b,))), after
        k, v = self._expanded(weights, cache)
        positions = jnp.broadcast_to(cache_positions(state.length, t), (b, t))
        slots = jnp.arange(capacity, dtype=jnp.int32)
        seen = slots[None, None] <= positions[:, :, None]  # [B, T, S]
        o = flash_attention(q, k, v, mask=seen[:, None], implementation=implementation)
        assert isinstance(o, jax.Array)
        fits = jnp.broadcast_to(length <= capacity, (b,))[:, None, None, None]
        return jnp.where(fits, o, jnp.nan), after

    def _absorbed(self, weights: Any, q: jax.Array, cache: jax.Array, lengths: jax.Array) -> jax.Array:
        """The outputs of one token per row, from attention over the latents."""
        r, c = self.latent_dim, self.key_dim
        kv_up = weights.kv_up
        kv_up = dequantize(kv_up, q.dtype) if isinstance(kv_up, QuantizedArray) else kv_up.astype(q.dtype)
        # Gathered where it is sharded over the axis of the batch (FSDP).
        kv_up = placed(kv_up, [(), explicit_axes(q)[2]])
        up = kv_up.reshape(r, self.num_heads, c + self.value_dim)
        in_kernels = self._has_head_kernels(q[:, 0], up)
        precision = None if q.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
        if in_kernels:
            queries = absorb_queries(q[:, 0], up, key_dim=c)[:, None]  # [B, 1, H, R + E]
        else:
            own = jnp.einsum("bthc,rhc->bthr", q[..., :c], up[..., :c], precision=precision)
            queries = jnp.concatenate([own, q[..., c:]], axis=-1)
        if self._has_kernel(queries[:, 0], cache, lengths):
            o = decode_latent_attention(queries[:, 0], cache, lengths, value_dim=r, scale=self._scale)[:, None]
        else:
            keys = cache[:, :, None]  # [B, S, 1, R + E]
            o = decode_attention(queries, keys, keys[..., :r], lengths, scale=self._scale)
            assert isinstance(o, jax.Array)
        if in_kernels:
            return expand_values(o[:, 0], up, key_dim=c)[:, None]
        return jnp.einsum("bthr,rhv->bthv", o, up[..., c:], precision=precision)

    @property
    def _scale(self) -> float:
        return (self.key_dim + self.shared_key_dim) ** -0.5

    def _has_kernel(self, q: Float[Array, "B H L"], cache: Float[Array, "B S L"], lengths: Int[Array, " B"]) -> bool:
        """Whether a kernel attends to the latents themselves."""
        if q.dtype != cache.dtype or any(any(explicit_axes(array)) for array in (q, cache)):
            return False
        return has_kernel(q, cache, lengths, value_dim=self.latent_dim, scale=self._scale)

    def _has_head_kernels(self, q: Float[Array, "B H K"], up: Float[Array, "R H X"]) -> bool:
        """Whether kernels multiply the heads' queries and outputs with parts of the expansion."""
        if any(any(explicit_axes(array)) for array in (q, up)):
            return False
        o = jnp.zeros((*q.shape[:2], self.latent_dim), q.dtype)  # Only its shape is looked at.
        return has_kernels(q, o, up, key_dim=self.key_dim)
