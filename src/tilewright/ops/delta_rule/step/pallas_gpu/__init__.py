"""One token of the delta rule on GPUs, for the three ops: `sm90_step` for Hopper.

The gradient is that of the plain step: decoding seldom needs it.
"""

from tilewright.core.implementation import Implementation, Pass, gradient_of
from tilewright.ops.delta_rule.step import reference
from tilewright.ops.delta_rule.step.config import DeltaRuleStepSm90Forward
from tilewright.ops.delta_rule.step.pallas_gpu import sm90_step

IMPLEMENTATION = Implementation(
    forward=Pass(
        sm90_step.forward,
        config=DeltaRuleStepSm90Forward,
        heuristic=sm90_step.heuristic,
        unsupported_reason=sm90_step.unsupported_reason,
    ),
    backward=gradient_of("reference", reference.IMPLEMENTATION.forward),
    architecture=(9, 0),
)
