"""`delta_rule_step`, `gated_delta_rule_step` and `kda_step`: one token of each sequence, and the state after it."""

from typing import Any

import jax
from jaxtyping import Array, Float

from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.numerics import accumulator
from tilewright.ops.delta_rule.arguments import check_arrays, check_options, given_arrays, normalized
from tilewright.ops.delta_rule.step.call import DeltaRuleStepCall

_FAMILY = "tilewright.ops.delta_rule.step"
_IMPLEMENTATIONS = ("pallas_gpu", "reference")

DELTA_RULE = register(Op(name="delta_rule_step", family=_FAMILY, implementations=_IMPLEMENTATIONS))
GATED_DELTA_RULE = register(Op(name="gated_delta_rule_step", family=_FAMILY, implementations=_IMPLEMENTATIONS))
KDA = register(Op(name="kda_step", family=_FAMILY, implementations=_IMPLEMENTATIONS))


def delta_rule_step(
    state: Float[Array, "*B HV K V"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B HV V"],
    beta: Float[Array, "*B HV"],
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B HV V"], Float[Array, "*B HV K V"]]:
    r"""One token of `delta_rule`, for decoding: its output, and the state after it.

        S <- S + beta k (v - S^T k)^T
        o = scale S^T q

    Args:
      state: S before the token, [B, HV, K, V] float32. All arrays may come without B. On a GPU, donate it or carry it in a
        loop: then the step happens in place. Otherwise XLA copies it first, which takes as long as the step.
      q: queries [B, H, K], float32 or bfloat16.
      k: keys [B, H, K], of q's dtype.
      v: values [B, HV, V], of q's dtype. HV is a multiple of H; value head h reads query and key head h // (HV / H).
      beta: the strength of the correction, [B, HV], float32 or bfloat16.
      scale: the factor of the output; defaults to K**-0.5.
      normalize_qk: divides each query and key by its length, as `delta_rule` does.
      implementation: "pallas_gpu" (Hopper) or "reference", plain JAX; None takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      o [B, HV, V] in v's dtype, and the state [B, HV, K, V] in float32. Gradients flow to every array and through both.
    """
    return _run(DELTA_RULE, state, q, k, v, None, beta, scale, normalize_qk, implementation, config)


def gated_delta_rule_step(
    state: Float[Array, "*B HV K V"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B HV V"],
    g: Float[Array, "*B HV"],
    beta: Float[Array, "*B HV"],
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B HV V"], Float[Array, "*B HV K V"]]:
    r"""One token of `gated_delta_rule`: `delta_rule_step` on a state that decays first, S <- exp(g) S.

    g is [B, HV], float32 or bfloat16. The other arguments and the results are those of `delta_rule_step`.
    """
    return _run(GATED_DELTA_RULE, state, q, k, v, g, beta, scale, normalize_qk, implementation, config)


def kda_step(
    state: Float[Array, "*B HV K V"],
    q: Float[Array, "*B H K"],
    k: Float[Array, "*B H K"],
    v: Float[Array, "*B HV V"],
    g: Float[Array, "*B HV K"],
    beta: Float[Array, "*B HV"],
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "*B HV V"], Float[Array, "*B HV K V"]]:
    r"""One token of `kda`: `delta_rule_step` on a state whose key channels decay first, S <- Diag(exp(g)) S.

    g is [B, HV, K], float32 or bfloat16. The other arguments and the results are those of `delta_rule_step`.
    """
    return _run(KDA, state, q, k, v, g, beta, scale, normalize_qk, implementation, config)


def _run(
    op: Op,
    state: Any,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None,
    normalize_qk: bool,
    implementation: ImplementationName | None,
    config: Config | tuple[Config, ...] | None,
) -> tuple[jax.Array, jax.Array]:
    arrays = given_arrays(q=q, k=k, v=v, g=g, beta=beta, state=state)
    check_options(scale, normalize_qk)
    check_arrays(op.name, arrays, time_axis=False)
    unbatched = arrays["v"].ndim == 2
    if unbatched:
        arrays = {name: array[None] for name, array in arrays.items()}
    if normalize_qk:
        arrays |= {"q": normalized(arrays["q"]), "k": normalized(arrays["k"])}
    statistics = accumulator(arrays["v"].dtype)
    gate = arrays["g"].astype(statistics) if "g" in arrays else None
    call = DeltaRuleStepCall(
        state=arrays["state"].astype(statistics),
        q=arrays["q"],
        k=arrays["k"],
        v=arrays["v"],
        g=gate,
        beta=arrays["beta"].astype(statistics),
        scale=arrays["k"].shape[-1] ** -0.5 if scale is None else float(scale),
    )
    o, new_state = op.run(call, implementation=implementation, config=config)
    return (o[0], new_state[0]) if unbatched else (o, new_state)
