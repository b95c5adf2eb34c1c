"""`delta_rule`, `gated_delta_rule` and `kda`: linear attention with a state that forgets and corrects itself.

The three differ in the gate alone: none, one per head, one per key channel. `gdn_gate` and `kda_gate` (gate/api.py) compute
the gates from the raw projections of a layer. Each op has a step that decodes one token: step/api.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import refuse_explicit
from tilewright.core.segments import check_segments, segment_starts
from tilewright.core.sequence_shards import shard_count, starts_in_shard
from tilewright.ops.delta_rule.arguments import LARGEST_WIDTH as LARGEST_WIDTH
from tilewright.ops.delta_rule.arguments import SMALLEST_WIDTH as SMALLEST_WIDTH
from tilewright.ops.delta_rule.arguments import (
    along,
    check_arrays,
    check_options,
    check_packed,
    given_arrays,
    normalized,
)
from tilewright.ops.delta_rule.arguments import check_lower_bound as check_lower_bound
from tilewright.ops.delta_rule.call import DeltaRuleCall
from tilewright.ops.delta_rule.context import run_on_shard
from tilewright.ops.delta_rule.packed import run_packed

_FAMILY = "tilewright.ops.delta_rule"
_IMPLEMENTATIONS = ("pallas_tpu", "pallas_gpu", "xla", "reference")

DELTA_RULE = register(Op(name="delta_rule", family=_FAMILY, implementations=_IMPLEMENTATIONS))
GATED_DELTA_RULE = register(Op(name="gated_delta_rule", family=_FAMILY, implementations=_IMPLEMENTATIONS))
KDA = register(Op(name="kda", family=_FAMILY, implementations=_IMPLEMENTATIONS))


def delta_rule(
    q: Float[Array, "*B T H K"],
    k: Float[Array, "*B T H K"],
    v: Float[Array, "*B T HV V"],
    beta: Float[Array, "*B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "*B HV K V"] | None = None,
    segment_ids: Int[Array, "*B T"] | None = None,
    cu_seqlens: Int[Array, " ends"] | None = None,
    normalize_qk: bool = False,
    axis_name: str | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B T HV V"], Float[Array, "*B HV K V"]]:
    r"""The delta rule (DeltaNet): for each key, the value that the state holds is corrected towards the token's value.

    For each value head, with S [K, V] starting at `initial_state`, token by token

        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Args:
      q: queries [B, T, H, K], float32 or bfloat16. All arrays may come without B.
      k: keys [B, T, H, K], of q's dtype. Their length should be about 1: `normalize_qk=True` sees to that.
      v: values [B, T, HV, V], of q's dtype. HV is a multiple of H; value head h reads query and key head h // (HV / H).
      beta: the strength of the correction, [B, T, HV], float32 or bfloat16.
      scale: the factor of the output; defaults to K**-0.5.
      initial_state: S before the first token, [B, HV, K, V] float32; defaults to zeros.
      segment_ids: [B, T] integers. Wherever they change along T, the state starts again from zeros: packed sequences do
      not
        see each other. `initial_state` belongs to the first token's segment, and the final state to the last token's.
      cu_seqlens: [N + 1] integers, ascending from 0 to T: sequence n is the tokens from cu_seqlens[n] to cu_seqlens[n + 1],
        of arrays without B, or with B = 1. Each has its own initial and final state: [N, HV, K, V], both. A sequence may be
        empty, and then its final state is its initial one. N is known when traced, the values need not be. Values that do
        not ascend from 0 to T are an error where they are known, and make every result NaN where they are traced. Up to
        three passes instead of one: packed.py says when.
      normalize_qk: divides each query and key by its length: x / sqrt(sum x^2 + 1e-6), rounded to its dtype.
      axis_name: inside `jax.shard_map`, the mesh axis that T is cut over, contiguously: the results are those of the whole
        sequence. `initial_state` is then the state before the first shard, and the final state that after the last, both
        the same on every shard. It takes three passes instead of one (docs/parallel.md).
      implementation: "pallas_tpu", "pallas_gpu" (Hopper), "xla" or "reference"; None takes the best that
        this device can run.
      config: block sizes: a config of `tilewright.configs`, or a forward and a backward one as a tuple.

    Returns:
      o [B, T, HV, V] in v's dtype, and the final state [B, HV, K, V] in float32, or [N, HV, K, V]. Gradients flow to every
      array and through both results. K and V from 16 to 256, any T.
    """
    return _run(
        DELTA_RULE,
        q,
        k,
        v,
        None,
        beta,
        scale,
        initial_state,
        segment_ids,
        cu_seqlens,
        normalize_qk,
        axis_name,
        implementation,
        config,
    )


def gated_delta_rule(
    q: Float[Array, "*B T H K"],
    k: Float[Array, "*B T H K"],
    v: Float[Array, "*B T HV V"],
    g: Float[Array, "*B T HV"],
    beta: Float[Array, "*B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "*B HV K V"] | None = None,
    segment_ids: Int[Array, "*B T"] | None = None,
    cu_seqlens: Int[Array, " ends"] | None = None,
    normalize_qk: bool = False,
    axis_name: str | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B T HV V"], Float[Array, "*B HV K V"]]:
    r"""The gated delta rule (Gated DeltaNet, Qwen3-Next): the delta rule on a state that decays.

    For each value head, with S [K, V] starting at `initial_state`, token by token

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    g, the log of the decay, is [B, T, HV], float32 or bfloat16, and should be <= 0; `gdn_gate` computes it. -1e4
    forgets everything. A positive g is allowed, and lets the state grow by exp(g): nothing is clipped.

    The other arguments and the results are those of `delta_rule`.
    """
    return _run(
        GATED_DELTA_RULE,
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        segment_ids,
        cu_seqlens,
        normalize_qk,
        axis_name,
        implementation,
        config,
    )


def kda(
    q: Float[Array, "*B T H K"],
    k: Float[Array, "*B T H K"],
    v: Float[Array, "*B T HV V"],
    g: Float[Array, "*B T HV K"],
    beta: Float[Array, "*B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "*B HV K V"] | None = None,
    segment_ids: Int[Array, "*B T"] | None = None,
    cu_seqlens: Int[Array, " ends"] | None = None,
    normalize_qk: bool = False,
    axis_name: str | None = None,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B T HV V"], Float[Array, "*B HV K V"]]:
    r"""Kimi Delta Attention: the delta rule on a state of which each key channel decays at a rate of its own.

    For each value head, with S [K, V] starting at `initial_state`, token by token

        S <- Diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    g, the logs of the decays, is [B, T, HV, K], float32 or bfloat16, and should be <= 0; `kda_gate` computes it. -1e4
    forgets the channel. A positive g is allowed, and lets a channel grow by exp(g): nothing is clipped.

    The other arguments and the results are those of `delta_rule`.
    """
    return _run(
        KDA,
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        segment_ids,
        cu_seqlens,
        normalize_qk,
        axis_name,
        implementation,
        config,
    )


def gdn_gate(
    a: Float[Array, "*tokens HV"], A_log: Float[Array, " HV"], dt_bias: Float[Array, " HV"]
) -> Float[Array, "*tokens HV"]:
    """The log-decay of `gated_delta_rule` from a raw projection: g = -exp(A_log) softplus(a + dt_bias), in float32."""
    _check_heads("a", a, A_log, dt_bias)
    statistics = accumulator(a.dtype)
    a, A_log, dt_bias = (x.astype(statistics) for x in (a, A_log, dt_bias))
    return -along(jnp.exp(A_log), a) * jax.nn.softplus(a + along(dt_bias, a))


def _run(
    op: Op,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None,
    initial_state: Any,
    segment_ids: Any,
    cu_seqlens: Any,
    normalize_qk: bool,
    axis_name: str | None,
    implementation: ImplementationName | None,
    config: Config | tuple[Config, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    arrays = given_arrays(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    check_options(scale, normalize_qk)
    if cu_seqlens is not None:
        if segment_ids is not None or axis_name is not None:
            other = "segment_ids" if segment_ids is not None else "axis_name"
            raise ValueError(f"cu_seqlens and {other} are both given; cu_seqlens says all of it: leave {other} out")
        states = arrays.pop("initial_state", None)
        check_arrays(op.name, arrays, time_axis=True)
        cu_seqlens = check_packed(jnp.asarray(cu_seqlens), arrays, states)
        return _run_packed(op, arrays, states, cu_seqlens, scale, normalize_qk, implementation, config)
    check_arrays(op.name, arrays, time_axis=True)
    if axis_name is not None:
        shard_count(op.name, axis_name)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        check_segments(segment_ids, arrays["v"].shape[:-2])
    unbatched = arrays["v"].ndim == 3
    if unbatched:
        arrays = {name: array[None] for name, array in arrays.items()}
        segment_ids = None if segment_ids is None else segment_ids[None]
    refuse_explicit(op.name, DeltaRuleCall, **arrays, segment_ids=segment_ids)
    if normalize_qk:
        arrays |= {"q": normalized(arrays["q"]), "k": normalized(arrays["k"])}
    b, t, hv, width = arrays["v"].shape
    depth = arrays["k"].shape[-1]
    statistics = accumulator(arrays["v"].dtype)
    state = arrays.get("initial_state", jnp.zeros((b, hv, depth, width), statistics)).astype(statistics)
    if t == 0:
        o, final_state = arrays["v"], state
    else:
        gate = arrays["g"].astype(statistics) if "g" in arrays else None
        resets = None if segment_ids is None else segment_starts(segment_ids)
        if segment_ids is not None and axis_name is not None:
            resets = starts_in_shard(segment_ids, axis_name)
        call = DeltaRuleCall(
            q=arrays["q"],
            k=arrays["k"],
            v=arrays["v"],
            g=gate,
            beta=arrays["beta"].astype(statistics),
            initial_state=state,
            resets=resets,
            scale=depth**-0.5 if scale is None else float(scale),
        )
        run = functools.partial(op.run, implementation=implementation)
        if axis_name is None:
            o, final_state = run(call, config=config)
        else:
            given, chosen = (functools.partial(run, config=each) for each in (config, None))
            o, final_state = run_on_shard(given, chosen, call, axis_name)
    return (o[0], final_state[0]) if unbatched else (o, final_state)


def _run_packed(
    op: Op,
    arrays: dict[str, jax.Array],
    states: jax.Array | None,
    cu_seqlens: jax.Array,
    scale: float | None,
    normalize_qk: bool,
    implementation: ImplementationName | None,
    config: Config | tuple[Config, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    """Packed sequences, each with its state [HV, K, V]."""
    unbatched = arrays["v"].ndim == 3
    if unbatched:
        arrays = {name: array[None] for name, array in arrays.items()}
    refuse_explicit(op.name, DeltaRuleCall, **arrays)
    if normalize_qk:
        arrays |= {"q": normalized(arrays["q"]), "k": normalized(arrays["k"])}
    _, t, hv, width = arrays["v"].shape
    depth = arrays["k"].shape[-1]
    statistics = accumulator(arrays["v"].dtype)
    if states is None:
        states = jnp.zeros((cu_seqlens.shape[0] - 1, hv, depth, width), statistics)
    states = states.astype(statistics)
    if t == 0:
        return (arrays["v"][0] if unbatched else arrays["v"]), states
    call = DeltaRuleCall(
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        g=arrays["g"].astype(statistics) if "g" in arrays else None,
        beta=arrays["beta"].astype(statistics),
        initial_state=jnp.zeros((1, hv, depth, width), statistics),  # Of one row; the sequences' are beside it.
        resets=None,
        scale=depth**-0.5 if scale is None else float(scale),
    )
    given, chosen = (functools.partial(op.run, implementation=implementation, config=each) for each in (config, None))
    o, final_states = run_packed(given, chosen, call, states, cu_seqlens)
    return (o[0] if unbatched else o), final_states


def _check_heads(name: str, x: jax.Array, A_log: jax.Array, dt_bias: jax.Array) -> None:
    for what, array in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x.ndim < 1 or array.shape != x.shape[-1:]:
            raise ValueError(
                f"{what} has shape {list(array.shape)} and {name} {list(x.shape)}; {what} must be [HV], the last axis of "
                f"{name}"
            )
