"""`kda_gate`: the log-decays of KDA from a raw projection."""

from jaxtyping import Array, Float

from tilewright.core.arguments import FLOATING, shown
from tilewright.core.config import Config
from tilewright.core.dispatch import ImplementationName, Op, register
from tilewright.core.quantized import as_array
from tilewright.ops.delta_rule.arguments import check_decays
from tilewright.ops.delta_rule.gate.call import KdaGateCall

OP = register(
    Op(name="kda_gate", family="tilewright.ops.delta_rule.gate", implementations=("pallas_gpu", "reference")),
)


def kda_gate(
    x: Float[Array, "*tokens HV K"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, "HV K"],
    lower_bound: float | None = None,
    *,
    implementation: ImplementationName | None = None,
    config: Config | tuple[Config, ...] | None = None,
) -> Float[Array, "*tokens HV K"]:
    r"""The log-decays of `kda` from a raw projection, in float32.

        g = -exp(A_log) softplus(x + dt_bias)

    With a lower bound, g = lower_bound sigmoid(exp(A_log) (x + dt_bias)), which keeps g between lower_bound and 0.

    Args:
      x: [..., HV, K], float32 or bfloat16.
      A_log: [HV], the logs of the heads' rates, float32 or bfloat16.
      dt_bias: [HV, K], float32 or bfloat16.
      lower_bound: at least -5 and negative, or None.
      implementation: "pallas_gpu" (Hopper, bfloat16 x, HV K a multiple of 256), whose gradient is one kernel, or
        "reference", plain JAX; None takes the best that this device can run.
      config: block sizes of the gradient: a config of `tilewright.configs`.

    Returns:
      g [..., HV, K] in float32. Gradients flow to every array, in every mode. They are computed from the three arrays
      again: nothing else is kept for them.
    """
    x, A_log, dt_bias = (as_array(*given) for given in (("x", x), ("A_log", A_log), ("dt_bias", dt_bias)))
    if x.dtype.name not in FLOATING:
        raise ValueError(f"x is {shown(x)}; it must be float32 or bfloat16: pass x.astype(jnp.float32)")
    check_decays("x", x.shape, A_log, dt_bias, lower_bound)
    bound = None if lower_bound is None else float(lower_bound)
    call = KdaGateCall(x=x, A_log=A_log, dt_bias=dt_bias, lower_bound=bound)
    if implementation is None and config is None and call.symbolic_sizes():
        implementation = "reference"  # The forward pass is the same, and what is exported has no gradient.
    return OP.run(call, implementation=implementation, config=config)
