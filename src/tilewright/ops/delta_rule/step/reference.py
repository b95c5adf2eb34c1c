"""One token of the delta rule in plain JAX: the step that the family's oracle scans with. XLA reads the state two or three
times.
"""

import jax

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.ops.delta_rule.reference import step
from tilewright.ops.delta_rule.step.call import DeltaRuleStepCall


def _forward(call: DeltaRuleStepCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """o and the state after the token."""
    state, o = step(call.state, call.q, call.k, call.v, call.g, call.beta, None, scale=call.scale)
    return (o, state), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
