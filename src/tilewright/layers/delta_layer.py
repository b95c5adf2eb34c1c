"""The delta-rule layers' base: their state, and all but the gates and the norm of the outputs."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.core.partitioning import explicit_axes, placed, run_on_parts
from tilewright.layers.layer import (
    Layer,
    Leaf,
    Parameter,
    linear,
    norm,
    placed_state,
    project,
    project_each,
    split_heads,
)
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


class DeltaLayer[W](Layer[W]):
    """Base of the delta-rule layers."""

    state = DeltaState
    op: ClassVar[tuple[Callable[..., Any], Callable[..., Any]]]
    """The delta rule of whole sequences, and its step."""
    conv_width: int

    @property
    def heads(self) -> Heads:
        raise NotImplementedError

    @property
    def projections(self) -> tuple[str, ...]:
        """The weights that x is multiplied by."""
        return ("q_proj", "k_proj", "v_proj", "beta_proj")

    def projected(self, weights: Any, x: Float[Array, "B T D"]) -> dict[str, jax.Array]:
        """x [B, T, D] times each of `projections`, by name."""
        names = self.projections
        return dict(zip(names, project_each(x, [getattr(weights, name) for name in names]), strict=True))

    def gates(self, weights: Any, projected: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The log-decays, where the delta rule takes any, and beta, both in float32."""
        raise NotImplementedError

    def normalised(self, weights: Any, projected: Mapping[str, jax.Array], o: Float[Array, "B T HV V"]) -> jax.Array:
        """The norm of the outputs, times their gate, if they have one."""
        raise NotImplementedError

    def parameters(self) -> dict[str, Parameter]:
        """Those that all delta-rule layers have, with the names of fla's and Kimi Linear's checkpoints."""
        heads = self.heads
        keys, values = (heads.keys, heads.key_heads), (heads.values, heads.value_heads)
        channels = {"q": keys, "k": keys, "v": values}
        return {
            **{f"{of}_proj": linear(f"{of}_proj", self.d_model, *count) for of, count in channels.items()},
            **{
                f"{of}_conv": _convolution(f"{of}_conv1d", self.conv_width, count)
                for of, (count, _) in channels.items()
            },
            "beta_proj": linear("b_proj", self.d_model, heads.value_heads, heads.value_heads),
            "norm": norm("o_norm", heads.value_dim),
            "o_proj": linear("o_proj", heads.values, self.d_model, axes=("heads", "embed")),
        }

    def initial_state(
        self, batch: int, *, capacity: int | None = None, dtype: Any = jnp.float32, like: tuple[Any, Any] | None = None
    ) -> DeltaState:
        """The state before the first token, for activations of `dtype`. It serves any number of tokens.

        `like`: the weights and an x [B, T, D] of the calls to come. The state then is sharded over Explicit mesh axes as
        these calls return it, which the carry of `jax.lax.scan` has to be.
        """
        del capacity  # For attention layers: a caller need not know which kind of layer it has.
        shapes = self._state_shapes()
        dtypes = {name: jnp.float32 if name == "memory" else dtype for name in shapes}
        zeros = {name: jnp.zeros((batch, *shape), dtypes[name]) for name, shape in shapes.items()}
        return placed_state(DeltaState(**zeros), self.apply, like)

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the state's fields, without B."""
        heads, before = self.heads, self.conv_width - 1
        keys, values = (before, heads.keys), (before, heads.values)
        memory = (heads.value_heads, heads.key_dim, heads.value_dim)
        return {"q_conv": keys, "k_conv": keys, "v_conv": values, "memory": memory}

    def apply(
        self,
        weights: Any,
        x: Float[Array, "*tokens D"],
        state: Any = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Returns y [B, T, D] and the state after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        With the `state` of an earlier call it continues from there. `segment_ids` [B, T] separates packed sequences;
        the given state belongs to the first token's segment. `implementation` is that of the delta rule; the other ops,
        and the step of a single token, take the best that the device can run.

        Where an Explicit mesh axis cuts x along T, y is cut alike, and the state is that after the whole sequence.
        """
        self.check_tokens(x)
        self.check_weights(weights)
        context = self.check_shardings(weights, x, state)
        if state is None:
            state = DeltaState(None, None, None, None)
        else:
            self.check_state(state, x, **self._state_shapes())
        (b, t, _), heads = x.shape, self.heads
        if segment_ids is not None and context is not None:
            segment_ids = placed(segment_ids, explicit_axes(x)[:2])
        projected = self.projected(weights, x)
        convolve = functools.partial(_convolved, segment_ids=segment_ids, context=context)
        q, q_conv = convolve(projected["q_proj"], weights.q_conv, state.q_conv, unit_heads=heads.key_heads)
        k, k_conv = convolve(projected["k_proj"], weights.k_conv, state.k_conv, unit_heads=heads.key_heads)
        v, v_conv = convolve(projected["v_proj"], weights.v_conv, state.v_conv)
        q, k = (split_heads(keys, heads.key_heads) for keys in (q, k))  # [B, T, H, K]
        inputs = (q, k, split_heads(v, heads.value_heads), *self.gates(weights, projected))
        sequence, step = self.op
        if context is not None:

            def on_part(segment_ids: Any, *inputs: jax.Array) -> Any:
                options = {"segment_ids": segment_ids, "implementation": implementation}
                return sequence(*inputs, axis_name=context, **options)

            batch, _, over, _ = explicit_axes(inputs[2])
            outputs = P(batch, context, over, None), P(batch, over, None, None)
            o, memory = run_on_parts(on_part, (segment_ids, *inputs), outputs)
        elif t != 1:
            options = {"segment_ids": segment_ids, "implementation": implementation}
            o, memory = sequence(*inputs, initial_state=state.memory, **options)
        else:
            before = state.memory
            if before is None:
                before = jnp.zeros((b, heads.value_heads, heads.key_dim, heads.value_dim), jnp.float32)
            o, memory = step(before, *(array[:, 0] for array in inputs))
            o = o[:, None]
        o = self.normalised(weights, projected, o)  # [B, T, HV, V]
        y = placed(project(o.reshape(b, t, heads.values), weights.o_proj), explicit_axes(x))
        return y, DeltaState(q_conv, k_conv, v_conv, memory)

    def check_heads(self, *widths: str) -> None:
        """Checks the width of the convolutions, and the named widths of heads, against what the ops take."""
        width = self.conv_width
        if not isinstance(width, int) or not MIN_WIDTH <= width <= MAX_WIDTH:
            raise ValueError(f"conv_width={width!r} must be an integer from {MIN_WIDTH} to {MAX_WIDTH}; models use 4")
        for name in widths:
            if not SMALLEST_WIDTH <= getattr(self, name) <= LARGEST_WIDTH:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be from {SMALLEST_WIDTH} to {LARGEST_WIDTH}, the widths that the "
                    f"delta-rule ops take; use more heads of fewer channels, or fewer heads of more"
                )


def _convolved(
    y: Float[Array, "B T E"],
    filters: Float[Array, "W E"],
    conv_state: Float[Array, "B W-1 E"] | None,
    *,
    segment_ids: Int[Array, "B T"] | None,
    context: str | None,
    unit_heads: int | None = None,
) -> tuple[Float[Array, "B T E"], Float[Array, "B W-1 E"]]:
    """silu(conv(y)), and the convolution's state after it. A single token takes the step.

    `unit_heads`: the heads that the channels are, each of which is then divided by its length; None for none.
    """
    over = explicit_axes(y)
    if unit_heads == 1:  # A head is normalised as a whole, so its channels are gathered, as `split_heads` does.
        over = [*over[:2], ()]
        y = placed(y, over)
    normalize = None if unit_heads is None else y.shape[2] // unit_heads
    options: Any = {"activation": "silu", "normalize": normalize}
    filters = placed(filters.astype(y.dtype), [(), over[2]])
    conv_state = None if conv_state is None else placed(conv_state.astype(y.dtype), over)
    if context is not None:

        def on_part(y: jax.Array, filters: jax.Array, segment_ids: Any) -> Any:
            return short_conv(y, filters, segment_ids=segment_ids, axis_name=context, **options)

        return run_on_parts(on_part, (y, filters, segment_ids), (P(*over), P(over[0], None, over[2])))
    if y.shape[1] != 1:
        return short_conv(y, filters, initial_state=conv_state, segment_ids=segment_ids, **options)
    if conv_state is None:
        conv_state = placed(jnp.zeros((y.shape[0], filters.shape[0] - 1, y.shape[2]), y.dtype), over)
    y_t, last = short_conv_step(conv_state, y[:, 0], filters, **options)
    return y_t[:, None], last


def _convolution(name: str, width: int, channels: int) -> Parameter:
    """Filters [W, channels], uniform in [-W ** -0.5, W ** -0.5]. A checkpoint has them as [channels, 1, W]."""

    def draw(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.uniform(key, shape, jnp.float32, -(width**-0.5), width**-0.5)

    return Parameter((width, channels), draw, f"{name}.weight", transposed=True, axes=(None, "heads"))


def decay_parameters(heads: int, *per_head: int) -> dict[str, Parameter]:
    """A_log [heads] and dt_bias [heads, ...] of a gate. They are float32, since their exponentials are taken.

    The rate exp(A_log) is uniform in [1, 16]. The softplus of dt_bias is a time step, log-uniform in [0.001, 0.1].
    """

    def rate_log(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, jnp.float32, _SLOWEST_RATE, _FASTEST_RATE))

    def step_bias(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
        low, high = jnp.log(_SHORTEST_STEP), jnp.log(_LONGEST_STEP)
        step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
        return step + jnp.log(-jnp.expm1(-step))  # The inverse of softplus.

    return {
        "A_log": Parameter((heads,), rate_log, "A_log", float32=True),
        "dt_bias": Parameter((heads, *per_head), step_bias, "dt_bias", float32=True),
    }
