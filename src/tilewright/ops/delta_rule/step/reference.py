"""One token of the delta rule in plain JAX: what the family's oracle scans with. XLA reads the state two or three times."""

from jaxtyping import Array, Float

from tilewright.core.axes import State
from tilewright.ops.delta_rule.reference import step


def delta_rule_step_reference(
    state: State,
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None,
    beta: Float[Array, "B HV"],
    *,
    scale: float,
) -> tuple[Float[Array, "B HV V"], State]:
    """All three steps: by the gate, none, one a head or one a key channel. The output, and the state after the token."""
    after, o = step(state, q, k, v, g, beta, None, scale=scale)
    return o, after


gated_delta_rule_step_reference = kda_step_reference = delta_rule_step_reference
