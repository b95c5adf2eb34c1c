"""The shared parts of the delta-rule layers: the state, and queries, keys and values through short convolutions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.layers.projection import Leaf, check_batch, check_tokens, project
from tilewright.ops.delta_rule.api import LARGEST_WIDTH, SMALLEST_WIDTH
from tilewright.ops.short_conv.api import MAX_WIDTH, MIN_WIDTH, short_conv, short_conv_step

# The ranges of the initial time steps and rates A of the gates, as in Mamba 2 and Gated DeltaNet.
_SHORTEST_STEP, _LONGEST_STEP = 1e-3, 1e-1
_SLOWEST_RATE, _FASTEST_RATE = 1.0, 16.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaState:
    """What a delta-rule layer carries from one call to the next. Its size does not depend on the tokens read."""

    q_conv: Leaf  # [B, W-1, H K], the last inputs of the convolution, in the dtype of the activations
    k_conv: Leaf  # [B, W-1, H K]
    v_conv: Leaf  # [B, W-1, HV V]
    memory: Leaf  # [B, HV, K, V] float32


@dataclass(frozen=True)
class Heads:
    """The sizes of a delta-rule layer's heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """The channels of the queries, and of the keys, over all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The channels of the values, over all heads."""
        return self.value_heads * self.value_dim


class DeltaLayer:
    """Base of the delta-rule layers: they have `heads` and a `conv_width`, and carry a `DeltaState`."""

    conv_width: int

    @property
    def heads(self) -> Heads:
        raise NotImplementedError

    def initial_state(self, batch: int, *, capacity: int | None = None, dtype: Any = jnp.float32) -> DeltaState:
        """The state before the first token, for activations of `dtype`. It serves any number of tokens."""
        del capacity  # For attention layers: a caller need not know which kind of layer it has.
        heads, conv_tokens = self.heads, self.conv_width - 1
        queries, values = (jnp.zeros((batch, conv_tokens, channels), dtype) for channels in (heads.keys, heads.values))
        memory = jnp.zeros((batch, heads.value_heads, heads.key_dim, heads.value_dim), jnp.float32)
        return DeltaState(queries, queries, values, memory)


def check_conv_width(width: int) -> None:
    if not isinstance(width, int) or not MIN_WIDTH <= width <= MAX_WIDTH:
        raise ValueError(f"conv_width={width!r} must be an integer from {MIN_WIDTH} to {MAX_WIDTH}; models use 4")


def check_head_dims(**dims: int) -> None:
    """Checks head widths against the range that the delta-rule ops take."""
    for name, value in dims.items():
        if not SMALLEST_WIDTH <= value <= LARGEST_WIDTH:
            raise ValueError(
                f"{name}={value} must be from {SMALLEST_WIDTH} to {LARGEST_WIDTH}, the widths that the delta-rule ops "
                f"take; use more heads of fewer channels, or fewer heads of more"
            )


def check_input(heads: Heads, d_model: int, x: jax.Array, state: DeltaState | None) -> None:
    check_tokens(x, d_model)
    if state is None:
        return
    check_batch(state, state.memory, x)
    want = (heads.value_heads, heads.key_dim, heads.value_dim)
    if state.memory.shape[1:] != want:
        raise ValueError(
            f"state.memory is {list(state.memory.shape)}; for this layer it must be [B, HV, K, V] = "
            f"{[x.shape[0], *want]}: pass the state that this layer returned, or None to begin"
        )


def queries_keys_values(
    weights: Any,
    heads: Heads,
    x: Float[Array, "B T D"],
    state: DeltaState | None,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """q and k [B, T, H, K], v [B, T, HV, V], and the states of the three convolutions. A single token takes the
    step.
    """
    conv_states = (None, None, None) if state is None else (state.q_conv, state.k_conv, state.v_conv)
    q, q_last = _convolved(x, weights.q_proj, weights.q_conv, conv_states[0], segment_ids)
    k, k_last = _convolved(x, weights.k_proj, weights.k_conv, conv_states[1], segment_ids)
    v, v_last = _convolved(x, weights.v_proj, weights.v_conv, conv_states[2], segment_ids)
    per_key, per_value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    leading = x.shape[:2]
    q, k, v = q.reshape(*leading, *per_key), k.reshape(*leading, *per_key), v.reshape(*leading, *per_value)
    return q, k, v, (q_last, k_last, v_last)


def _convolved(
    x: Float[Array, "B T D"],
    projection: Float[Array, "D E"],
    filters: Float[Array, "W E"],
    conv_state: Float[Array, "B W-1 E"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """silu(conv(x projection)), and the convolution's state after it."""
    y = project(x, projection)
    filters = filters.astype(y.dtype)
    conv_state = None if conv_state is None else conv_state.astype(y.dtype)
    if x.shape[1] != 1:
        return short_conv(y, filters, activation="silu", initial_state=conv_state, segment_ids=segment_ids)
    if conv_state is None:
        conv_state = jnp.zeros((y.shape[0], filters.shape[0] - 1, y.shape[2]), y.dtype)
    y_t, last = short_conv_step(conv_state, y[:, 0], filters, activation="silu")
    return y_t[:, None], last


def recur(
    op: Callable[..., Any],
    step: Callable[..., Any],
    state: DeltaState | None,
    inputs: tuple[jax.Array, ...],
    *,
    segment_ids: Int[Array, "B T"] | None,
    implementation: ImplementationName | None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"]]:
    """The delta rule over (q, k, v, gates): outputs, and the memory after them. A single token takes the step."""
    memory = None if state is None else state.memory
    if inputs[0].shape[1] != 1:
        return op(
            *inputs,
            initial_state=memory,
            segment_ids=segment_ids,
            normalize_qk=True,
            implementation=implementation,
        )
    q, v = inputs[0], inputs[2]
    if memory is None:
        memory = jnp.zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), jnp.float32)
    o, memory = step(memory, *(x[:, 0] for x in inputs), normalize_qk=True)
    return o[:, None], memory


def draw_convolution(key: PRNGKeyArray, width: int, channels: int, dtype: Any) -> Float[Array, "W D"]:
    """Uniform in [-W ** -0.5, W ** -0.5]."""
    bound = width**-0.5
    return jax.random.uniform(key, (width, channels), jnp.float32, -bound, bound).astype(dtype)


def draw_rate_log(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """A_log of a gate: the rate A is uniform in [1, 16]. Always float32, since its exponential is taken."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, _SLOWEST_RATE, _FASTEST_RATE))


def draw_step_bias(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """dt_bias of a gate: its softplus is a time step, log-uniform in [0.001, 0.1]. Always float32."""
    low, high = jnp.log(_SHORTEST_STEP), jnp.log(_LONGEST_STEP)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return step + jnp.log(-jnp.expm1(-step))  # The inverse of softplus.
