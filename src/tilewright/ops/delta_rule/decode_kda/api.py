"""`decode_kda`: one token per sequence of Kimi Delta Attention, all but its output projection."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tilewright.core.arguments import FLOATING, check_eps, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.stacked_call import check_layer
from tilewright.ops.delta_rule.arguments import check_lower_bound
from tilewright.ops.delta_rule.decode_kda.call import DecodeKdaCall

OP = register(
    Op(
        name="decode_kda",
        family="tilewright.ops.delta_rule.decode_kda",
        implementations=("pallas_gpu", "reference"),
    )
)

_FLOAT32 = ("A_log", "dt_bias", "norm")  # Weights of a floating dtype of their own.


def decode_kda(
    x: Float[Array, "B D"],
    q_proj: Float[Array, "D H K"],
    k_proj: Float[Array, "D H K"],
    v_proj: Float[Array, "D H K"],
    q_conv: Float[Array, "W H K"],
    k_conv: Float[Array, "W H K"],
    v_conv: Float[Array, "W H K"],
    decay_down: Float[Array, "D R"],
    decay_up: Float[Array, "R H K"],
    A_log: Float[Array, " H"] | Float[Array, "H K"],
    dt_bias: Float[Array, "H K"],
    beta_proj: Float[Array, "D H"],
    gate_down: Float[Array, "D R"],
    gate_up: Float[Array, "R H K"],
    norm: Float[Array, " K"],
    q_state: Float[Array, "*L B W-1 H K"],
    k_state: Float[Array, "*L B W-1 H K"],
    v_state: Float[Array, "*L B W-1 H K"],
    memory: Float[Array, "*L B H K K"],
    *,
    layer: Int[Array, ""] | int | None = None,
    lower_bound: float | None = None,
    eps: float = 1e-5,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> tuple[Float[Array, "B H K"], Array, Array, Array, Array]:
    r"""One token per sequence of Kimi Delta Attention, up to its output projection, and the states after it.

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k divided by their lengths, per head
        g = kda_gate(x Wf_down Wf_up, A_log, dt_bias, lower_bound);  beta = sigmoid(x Wb)
        S <- Diag(exp(g)) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q / sqrt(K)
        y = o / sqrt(mean(o^2) + eps) * norm * sigmoid(x Wg_down Wg_up)

    The layer's output is y times its output projection (`decode_residual`). The convolutions are those of
    `short_conv_step`, and S is the memory of `kda_step`.

    Args:
      x: one token per sequence [B, D], float32 or bfloat16.
      q_proj: [D, H, K], of x's dtype.
      k_proj: [D, H, K].
      v_proj: [D, H, K].
      q_conv: the filters of the queries' convolution, [W, H, K], of x's dtype; the last tap is the token's.
      k_conv: [W, H, K].
      v_conv: [W, H, K].
      decay_down: [D, R], the first factor of the decays' projection, of x's dtype.
      decay_up: [R, H, K], the second one.
      A_log: [H], or [H, K] where rates differ between channels; floating.
      dt_bias: [H, K], floating.
      beta_proj: [D, H], of x's dtype.
      gate_down: [D, R], the first factor of the gates' projection, of x's dtype.
      gate_up: [R, H, K], the second one.
      norm: [K], the weights of the RMS norm of each head, floating.
      q_state: the inputs of the queries' convolution before this token, oldest first, [B, W-1, H, K], of x's dtype; or a
        stack of several layers' states [L, B, W-1, H, K], as the other states then are.
      k_state: [B, W-1, H, K].
      v_state: [B, W-1, H, K].
      memory: S before the token, [B, H, K, K] float32.
      layer: the layer of a stack, an integer; a stack needs it. Where a traced one is outside of the stack, no state
        changes, and the outputs are those of the nearest layer.
      lower_bound: of the decays, as in `kda_gate`; at least -5 and negative, or None.
      eps: added to the mean of the squares; a number.
      implementation: "pallas_gpu" (Hopper, bfloat16), which updates the states in place, or "reference", plain JAX; None
        takes the best that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      y [B, H, K] of x's dtype, and q_state, k_state, v_state and memory after the token. Gradients flow to every array.
    """
    arrays = {
        "x": x,
        "q_proj": q_proj,
        "k_proj": k_proj,
        "v_proj": v_proj,
        "q_conv": q_conv,
        "k_conv": k_conv,
        "v_conv": v_conv,
        "decay_down": decay_down,
        "decay_up": decay_up,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "beta_proj": beta_proj,
        "gate_down": gate_down,
        "gate_up": gate_up,
        "norm": norm,
        "q_state": q_state,
        "k_state": k_state,
        "v_state": v_state,
        "memory": memory,
    }
    call = _call(**arrays, layer=layer, lower_bound=lower_bound, eps=eps)
    if 0 in (*call.q_proj.shape, *call.q_state.shape, *call.decay_down.shape):
        implementation, config = "reference", None
    y, *states = OP.run(call, implementation=implementation, config=config)
    if layer is None:
        states = [jnp.squeeze(state, 0) for state in states]
    q_after, k_after, v_after, memory_after = states
    return y, q_after, k_after, v_after, memory_after


def has_kernel(**arguments: Any) -> bool:
    """Whether `decode_kda` of these arguments is a kernel on this device. For layers, which do without it otherwise."""
    return OP.takes_kernel(_call(**arguments))


def _call(*, layer: Any = None, lower_bound: Any = None, eps: Any = 1e-5, **given: Any) -> DecodeKdaCall:
    arrays = {name: jnp.asarray(array) for name, array in given.items()}
    _validate(arrays, layer)
    check_lower_bound(lower_bound)
    check_eps(eps)
    stacked = arrays["memory"].ndim == 5
    if not stacked:
        arrays |= {name: jnp.expand_dims(arrays[name], 0) for name in DecodeKdaCall.stacks}
    return DecodeKdaCall(
        **arrays,
        layer=jnp.asarray(layer, jnp.int32) if stacked else None,
        lower_bound=None if lower_bound is None else float(lower_bound),
        eps=float(eps),
    )


def _validate(arrays: dict[str, jax.Array], layer: Any) -> None:
    x, q_proj, q_conv, decay_down = (arrays[name] for name in ("x", "q_proj", "q_conv", "decay_down"))
    if x.ndim != 2 or x.dtype.name not in FLOATING:
        raise ValueError(
            f"x is {shown(x)}; it must be [B, D] of float32 or bfloat16, one token per sequence: pass x[:, 0]"
        )
    if q_proj.ndim != 3 or q_proj.shape[0] != x.shape[1]:
        raise ValueError(
            f"q_proj is {shown(q_proj)} and x has D={x.shape[1]}; it must be [D, H, K]: pass q_proj.reshape(D, H, K)"
        )
    if q_conv.ndim != 3 or q_conv.shape[0] < 2:
        raise ValueError(
            f"q_conv is {shown(q_conv)}; it must be [W, H, K] with a W of 2 or more: pass q_conv.reshape(W, H, K)"
        )
    if decay_down.ndim != 2:
        raise ValueError(f"decay_down is {shown(decay_down)}; it must be [D, R]")
    (b, d), (_, h, k), width, rank = x.shape, q_proj.shape, q_conv.shape[0], decay_down.shape[1]
    wanted = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ("[D, H, K]", (d, h, k))),
        **dict.fromkeys(("q_conv", "k_conv", "v_conv"), ("[W, H, K]", (width, h, k))),
        **dict.fromkeys(("decay_down", "gate_down"), ("[D, R]", (d, rank))),
        **dict.fromkeys(("decay_up", "gate_up"), ("[R, H, K]", (rank, h, k))),
        "A_log": ("[H, K]", (h, k)) if arrays["A_log"].ndim == 2 else ("[H]", (h,)),
        "dt_bias": ("[H, K]", (h, k)),
        "beta_proj": ("[D, H]", (d, h)),
        "norm": ("[K]", (k,)),
    }
    for name, (letters, shape) in wanted.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} is {shown(arrays[name])}; it must be {letters} = {list(shape)}")
    _validate_states(arrays, layer, (b, width - 1, h, k), (b, h, k, k))
    for name, array in arrays.items():
        if name in _FLOAT32:
            if array.dtype.name not in FLOATING:
                raise ValueError(
                    f"{name} is {shown(array)}; it must be float32 or bfloat16: pass {name}.astype(jnp.float32)"
                )
        elif name != "memory" and array.dtype != x.dtype:
            raise ValueError(
                f"{name} has dtype {array.dtype.name} and x {x.dtype.name}; they must be equal: pass {name}.astype(x.dtype)"
            )


def _validate_states(
    arrays: dict[str, jax.Array], layer: Any, inputs: tuple[int, ...], square: tuple[int, ...]
) -> None:
    """`inputs` and `square`: the shapes of a convolution's state and of the memory, without layers."""
    memory = arrays["memory"]
    if memory.ndim not in (4, 5) or memory.shape[-4:] != square:
        raise ValueError(
            f"memory is {shown(memory)}; it must be [B, H, K, K] = {list(square)}, or a stack of layers [L, B, H, K, K]"
        )
    if memory.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"memory has dtype {memory.dtype.name}; it must be float32: pass memory.astype(jnp.float32)")
    leading = memory.shape[:-4]
    for name in ("q_state", "k_state", "v_state"):
        if arrays[name].shape != (*leading, *inputs):
            letters = "[L, B, W-1, H, K]" if leading else "[B, W-1, H, K]"
            raise ValueError(
                f"{name} is {shown(arrays[name])} and memory is {shown(memory)}; {name} must be {letters} = "
                f"{[*leading, *inputs]}"
            )
    check_layer(layer, "memory", memory, "[L, B, H, K, K]", "single layer's states take None")
