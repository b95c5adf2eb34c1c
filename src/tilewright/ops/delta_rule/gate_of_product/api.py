"""`kda_gate_of_product`: the log-decays of KDA, with the product that they are computed from."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.arguments import check_operands
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.ops.delta_rule.arguments import check_decays
from tilewright.ops.delta_rule.gate_of_product.call import GateOfProductCall

OP = register(
    Op(
        name="kda_gate_of_product",
        family="tilewright.ops.delta_rule.gate_of_product",
        implementations=("pallas_gpu", "reference"),
    )
)


def kda_gate_of_product(
    x: Float[Array, "*tokens R"],
    w: Float[Array, "R HV K"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    lower_bound: float | None = None,
    *,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens HV K"]:
    r"""The log-decays of `kda` from a product: `kda_gate(x w, A_log, dt_bias, lower_bound)`, in float32.

        g = -exp(A_log) softplus(x w + dt_bias)

    With a lower bound, g = lower_bound sigmoid(exp(A_log) (x w + dt_bias)).

    It is for inference on a Hopper GPU, where one kernel computes both, and the product is neither rounded nor written to
    memory. Elsewhere, and for training, use `jnp.dot` and `kda_gate`: plain JAX multiplies float32 here, and the gradient
    computes the product again. `KimiDeltaAttention` chooses between them.

    Args:
      x: [..., R], float32 or bfloat16.
      w: [R, HV, K], of x's dtype.
      A_log: [HV], the logs of the heads' rates, float32 or bfloat16.
      dt_bias: [HV, K], float32 or bfloat16.
      lower_bound: at least -5 and negative, or None.
      implementation: "pallas_gpu" (Hopper, bfloat16, K a multiple of 64) or "reference", plain JAX; None takes the best
        that this device can run.
      config: block sizes: a config of `tilewright.configs`.

    Returns:
      g [..., HV, K] in float32. Gradients flow to every array.
    """
    call = _call(x, w, A_log, dt_bias, lower_bound)
    return OP.run(call, implementation=implementation, config=config)


def has_kernel(x: Any, w: Any, A_log: Any, dt_bias: Any, lower_bound: float | None = None) -> bool:
    """Whether a call of `kda_gate_of_product` with these arguments takes a kernel on this device."""
    return OP.takes_kernel(_call(x, w, A_log, dt_bias, lower_bound))


def _call(x: Any, w: Any, A_log: Any, dt_bias: Any, lower_bound: float | None) -> GateOfProductCall:
    x, w, A_log, dt_bias = map(jnp.asarray, (x, w, A_log, dt_bias))
    check_operands(x, w)
    check_decays("x w", (*x.shape[:-1], *w.shape[1:]), A_log, dt_bias, lower_bound)
    bound = None if lower_bound is None else float(lower_bound)
    return GateOfProductCall(x=x, w=w, A_log=A_log, dt_bias=dt_bias, lower_bound=bound)
