"""`short_conv`: a depthwise causal convolution over a few tokens, and `short_conv_step` for one token at a time."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, is_integer, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import axes_named, explicit_axes, placed, refuse_explicit, run_on_parts
from tilewright.core.quantized import as_array
from tilewright.core.segments import check_segments, checked_cu_seqlens
from tilewright.core.sequence_shards import of_last, shard_count
from tilewright.core.unit_length import heads_of_unit_length
from tilewright.ops.short_conv.call import ShortConvCall
from tilewright.ops.short_conv.context import state_before
from tilewright.ops.short_conv.packed import run_packed

MIN_WIDTH, MAX_WIDTH = 2, 8
_ACTIVATIONS = (None, "silu")

Activation = Literal["silu"] | None

OP = register(
    Op(
        name="short_conv",
        family="tilewright.ops.short_conv",
        implementations=("pallas_tpu", "pallas_gpu", "xla", "reference"),
    )
)


def short_conv(
    x: Float[Array, "*B T D"],
    w: Float[Array, "W D"],
    *,
    bias: Float[Array, " D"] | None = None,
    activation: Activation = None,
    normalize: int | None = None,
    initial_state: Float[Array, "*B W-1 D"] | None = None,
    segment_ids: Int[Array, "*B T"] | None = None,
    cu_seqlens: Int[Array, " ends"] | None = None,
    axis_name: str | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B W-1 D"]]:
    r"""A depthwise causal convolution over time, with bias and activation, and the state that the next call starts
    from.

    For each token t and channel d

        y_td = act(bias_d + sum_{i=0}^{W-1} w_id x_{t-(W-1)+i, d})

    so w[W-1] multiplies the token itself and w[0] the oldest. Before the first token comes `initial_state`, or zeros. With
    `normalize`, each group h of so many neighbouring channels, a head, is then divided by its length:

        y_td <- y_td / sqrt(sum_{e in h} y_te^2 + 1e-6)

    Args:
      x: [B, T, D], or [T, D] without a batch; float32 or bfloat16. T may be anything, including 0.
      w: [W, D], 2 <= W <= 8, of x's dtype or float32. Its gradient has its dtype.
      bias: [D], of x's dtype or float32, or None.
      activation: None or "silu".
      normalize: the channels of a head, which divide D; None for no normalisation. Sums are float32, and y is rounded once.
        Delta-rule layers normalise queries and keys so. Over a mesh axis, channels can be cut into whole heads only.
      initial_state: [B, W-1, D] of x's dtype: the W-1 inputs before the first token, oldest first; None for zeros.
      segment_ids: [B, T] integers, for several sequences packed into a row. No tap reaches across a change of id, not
        even to an equal id before it. `initial_state` belongs to the first token's segment. Only changes inside a call are
        seen.
      cu_seqlens: [N + 1] integers, ascending from 0 to T: sequence n is the tokens from cu_seqlens[n] to cu_seqlens[n + 1],
        of an x without B, or with B = 1. Each has its own initial and final state: [N, W-1, D], both. Sequences may be
        empty. Values that do not ascend from 0 to T are an error where they are known, and make every result NaN where they
        are traced.
      axis_name: inside `jax.shard_map`, the mesh axis that T is cut over, contiguously: the results are those of the whole
        sequence. `initial_state` is then that before the first shard, and final_state that after the last, both the same
        on every shard.
      implementation: "pallas_tpu", "pallas_gpu", "xla" or "reference"; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      y [B, T, D] and final_state [B, W-1, D], both of x's dtype. final_state holds the last W-1 inputs, oldest first;
      where T < W-1 it begins with the end of initial_state. With segment_ids it holds inputs of the last token's
      segment only, and zeros before them. Where the next call takes it as its initial_state, the two calls equal one
      long call. With segment_ids that holds where the second call continues the last segment of the first; where it
      begins another one, pass None (or, row by row, `jnp.where(same[:, None, None], final_state, 0)`).
    """
    x, w = as_array("x", x), as_array("w", w)
    bias = None if bias is None else as_array("bias", bias)
    initial_state = None if initial_state is None else as_array("initial_state", initial_state)
    segment_ids = None if segment_ids is None else jnp.asarray(segment_ids)
    if x.ndim not in (2, 3):
        raise ValueError(f"x is {shown(x)}; it must be [B, T, D] or [T, D]: reshape it to that")
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: pass x.astype(jnp.bfloat16)")
    _validate_filter(x, w, bias, activation)
    _validate_heads(normalize, x=x, w=w, bias=bias, initial_state=initial_state)
    if cu_seqlens is not None:
        if segment_ids is not None or axis_name is not None:
            other = "segment_ids" if segment_ids is not None else "axis_name"
            raise ValueError(f"cu_seqlens and {other} are both given; cu_seqlens says all of it: leave {other} out")
        options = {"activation": activation, "normalize": normalize, "implementation": implementation, "config": config}
        return _packed(x, w, initial_state, jnp.asarray(cu_seqlens), bias=bias, **options)
    _validate_state("initial_state", initial_state, x, (*x.shape[:-2], w.shape[0] - 1, x.shape[-1]))
    if segment_ids is not None:
        check_segments(segment_ids, x.shape[:-1])

    batched = x.ndim == 3
    if not batched:
        x = x[None]
        initial_state, segment_ids = (None if a is None else a[None] for a in (initial_state, segment_ids))
    batch, length, d = x.shape
    refuse_explicit("short_conv", ShortConvCall, x=x, w=w, bias=bias, segment_ids=segment_ids)
    if axis_name is not None:
        shard_count("short_conv", axis_name)
    if batch and length:
        reach = None if segment_ids is None else _reach(segment_ids, w.shape[0])
        if axis_name is not None:
            initial_state = state_before(x, initial_state, segment_ids, reach, w.shape[0], axis_name)
        heads = None if normalize is None else jnp.zeros((d // normalize,), jnp.int32)
        call = ShortConvCall(x=x, w=w, bias=bias, state=initial_state, reach=reach, heads=heads, activation=activation)
        y, final_state = OP.run(call, implementation=implementation, config=config)
        final_state = final_state if axis_name is None else of_last(final_state, axis_name)
    else:
        y = x
        final_state = jnp.zeros((batch, w.shape[0] - 1, d), x.dtype) if initial_state is None else initial_state
    return (y, final_state) if batched else (y[0], final_state[0])


def _packed(
    x: jax.Array,
    w: jax.Array,
    states: jax.Array | None,
    cu_seqlens: jax.Array,
    *,
    bias: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """`short_conv` of packed sequences with a state each."""
    cu_seqlens = checked_cu_seqlens(cu_seqlens, "x", x, x.shape[-2], batched=x.ndim == 3)
    shape = (cu_seqlens.shape[0] - 1, w.shape[0] - 1, x.shape[-1])
    _validate_state("initial_state", states, x, shape)
    rows = x if x.ndim == 3 else x[None]
    refuse_explicit("short_conv", ShortConvCall, x=rows, w=w, bias=bias)
    if states is not None and any(axes := explicit_axes(states)[:2]):
        raise ValueError(
            f"short_conv: initial_state is sharded over {axes_named(axes[0] + axes[1])} along its axis "
            f"{'N' if axes[0] else 'W-1'}, of [N, W-1, D], and with cu_seqlens short_conv can be cut along D only; pass "
            f"jax.sharding.reshard(initial_state, ...) without it"
        )
    over = next((axes[-1] for a in (x, w, bias, states) if a is not None and any(axes := explicit_axes(a))), ())

    def run(x: jax.Array, w: jax.Array, bias: jax.Array | None, states: Any, ends: jax.Array) -> tuple[Any, Any]:
        def convolve(inputs: jax.Array, segment_ids: jax.Array) -> jax.Array:
            return short_conv(inputs, w, bias=bias, segment_ids=segment_ids, **options)[0]

        before = jnp.zeros((*shape[:2], x.shape[-1]), x.dtype) if states is None else states
        y, final = run_packed(convolve, x.reshape(x.shape[-2:]), before, ends)
        return y.reshape(x.shape), final

    if not over:
        return run(x, w, bias, states, cu_seqlens)
    # Channels are independent: on an Explicit mesh axis each device has the sequences of its own.
    every = (a if a is None else placed(a, [()] * (a.ndim - 1) + [over]) for a in (x, w, bias, states))
    return run_on_parts(run, (*every, cu_seqlens), (P(*[None] * (x.ndim - 1), over), P(None, None, over)))


def short_conv_step(
    state: Float[Array, "*B W-1 D"],
    x_t: Float[Array, "*B D"],
    w: Float[Array, "W D"],
    *,
    bias: Float[Array, " D"] | None = None,
    activation: Activation = None,
    normalize: int | None = None,
) -> tuple[Float[Array, "*B D"], Float[Array, "*B W-1 D"]]:
    r"""`short_conv` for one token: its output, and the state for the next.

        y_d = act(bias_d + w_{W-1,d} x_d + sum_{i=0}^{W-2} w_id state_id)

    With `normalize`, each head of so many channels is then divided by its length, as `short_conv` does.

    Args:
      state: [B, W-1, D], or [W-1, D] without a batch: the inputs before this token, oldest first, as `short_conv`
      returns
        them; zeros at the start.
      x_t: [B, D] or [D], of the state's dtype.
      w: [W, D], of x_t's dtype or float32.
      bias: [D], or None.
      activation: None or "silu".
      normalize: the channels of a head, which divide D; None for no normalisation.

    Returns:
      y_t, of x_t's shape and dtype, and the new state: the old one without its oldest input, and with x_t.
    """
    state, x_t, w = jnp.asarray(state), jnp.asarray(x_t), jnp.asarray(w)
    bias = None if bias is None else jnp.asarray(bias)
    if x_t.ndim not in (1, 2) or x_t.dtype.name not in FLOATING:
        raise ValueError(f"x_t is {shown(x_t)}; it must be [B, D] or [D] of float32 or bfloat16: one token")
    _validate_filter(x_t, w, bias, activation, name="x_t")
    _validate_heads(normalize, x_t=x_t, w=w, bias=bias, state=state)
    _validate_state("state", state, x_t, (*x_t.shape[:-1], w.shape[0] - 1, x_t.shape[-1]))
    wide = accumulator(x_t.dtype)
    window = jnp.concatenate([state, x_t[..., None, :]], axis=-2)  # [B, W, D]
    # Axes of 1, which JAX broadcasts: under Explicit mesh axes it would gather what a `broadcast_to` is summed over.
    filters = w.astype(wide) if x_t.ndim == 1 else w.astype(wide)[None]  # [1, W, D]
    y = jnp.sum(window.astype(wide) * filters, axis=-2)  # [B, D]
    if bias is not None:
        y = y + (bias.astype(wide) if x_t.ndim == 1 else bias.astype(wide)[None])
    if activation == "silu":
        y = jax.nn.silu(y)
    if normalize is not None:
        y = heads_of_unit_length(y, normalize)
    return y.astype(x_t.dtype), window[..., 1:, :]


def _reach(segment_ids: jax.Array, width: int) -> jax.Array:
    """How many tokens each token may look back, at most W-1: [B, T] int32. The state belongs to the first segment."""
    length = segment_ids.shape[1]
    first = jnp.broadcast_to(segment_ids[:, :1], (segment_ids.shape[0], width - 1))
    before = jnp.concatenate([first, segment_ids], axis=1)  # [B, W-1 + T]
    same = (before[:, 1:] == before[:, :-1]).astype(jnp.int32)  # [B, W-2 + T]: same id as the token before
    connected = jnp.ones_like(segment_ids, jnp.int32)  # [B, T]
    reach = jnp.zeros_like(connected)
    for lag in range(width - 1):
        start = width - 2 - lag
        connected = connected * same[:, start : start + length]
        reach = reach + connected
    return reach


def _validate_filter(x: jax.Array, w: jax.Array, bias: jax.Array | None, activation: Any, *, name: str = "x") -> None:
    d = x.shape[-1]
    if d < 1:
        raise ValueError(f"{name} is {shown(x)}; D must be at least 1: pass an {name} with channels")
    if w.ndim != 2:
        raise ValueError(f"w is {shown(w)}; it must be [W, D], a row for each tap: w[:, 0, :] if it has an axis of 1")
    if w.shape[1] != d:
        transposed = w.shape[0] == d and MIN_WIDTH <= w.shape[1] <= MAX_WIDTH
        remedy = "it looks transposed: pass w.T" if transposed else f"pass a w with {d} columns"
        raise ValueError(
            f"w is {shown(w)} and {name} is {shown(x)}; the last axis of w must be that of {name} (D={d}); {remedy}"
        )
    if not MIN_WIDTH <= w.shape[0] <= MAX_WIDTH:
        raise ValueError(
            f"w is {shown(w)}, of width W={w.shape[0]}; the width must be {MIN_WIDTH} to {MAX_WIDTH}: "
            f"use jax.lax.conv_general_dilated for a longer filter, and a product for a single tap"
        )
    for argument, array in (("w", w), ("bias", bias)):
        if array is not None and array.dtype not in (x.dtype, jnp.float32):
            raise ValueError(
                f"{argument} has dtype {array.dtype.name} and {name} has {x.dtype.name}; {argument} must have "
                f"{name}'s dtype or float32: pass {argument}.astype({name}.dtype)"
            )
    if bias is not None and bias.shape != (d,):
        raise ValueError(f"bias is {shown(bias)} and {name} is {shown(x)}; bias must be [D], here [{d}]; None for none")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r} is not an activation of short_conv; use None or 'silu', and apply others to y"
        )


def _validate_heads(normalize: Any, **arrays: jax.Array | None) -> None:
    """Checks that the channels, and each device's part of them on an Explicit mesh axis, are whole heads."""
    if normalize is None:
        return
    name, x = next((name, x) for name, x in arrays.items() if x is not None)
    d = x.shape[-1]
    if not is_integer(normalize) or normalize < 1:
        raise ValueError(
            f"normalize={normalize!r} must be the number of channels of a head, a positive integer; use 128 for heads of "
            f"128 channels, or None for no normalisation"
        )
    if d % normalize:
        raise ValueError(
            f"{name} is {shown(x)}, of D={d} channels, and normalize={normalize} must divide D, since D is a number of "
            f"heads of so many channels; pass the channels of one head, and inside shard_map cut channels between heads"
        )
    for argument, array in arrays.items():
        over = () if array is None else explicit_axes(array)[-1]
        parts = math.prod(jax.typeof(array).sharding.mesh.shape[axis] for axis in over)
        if d // normalize % parts:
            raise ValueError(
                f"{argument} is sharded over {axes_named(over)} along its axis D, into {parts} parts, and "
                f"normalize={normalize} makes {d // normalize} heads of D={d}, which must be whole on each device; use a "
                f"mesh whose axis divides them, or pass jax.sharding.reshard({argument}, ...) without it"
            )


def _validate_state(name: str, state: jax.Array | None, x: jax.Array, shape: tuple[int, ...]) -> None:
    if state is None:
        return
    if state.shape != shape:
        raise ValueError(
            f"{name} is {shown(state)} and x is {shown(x)}; {name} must be {list(shape)}: the W-1 inputs before the "
            f"first token, oldest first, with x's batch and channels"
        )
    if state.dtype != x.dtype:
        raise ValueError(
            f"{name} has dtype {state.dtype.name} and x has {x.dtype.name}; {name} holds inputs, so it must have their "
            f"dtype: pass {name}.astype(x.dtype)"
        )
