"""`kda_gate` on GPUs: plain JAX forward, which XLA makes one kernel of, and `sm90_bwd` for Hopper.

Forward mode and second derivatives are those of the plain version.
"""

import dataclasses

from tilewright.core.implementation import Implementation
from tilewright.ops.delta_rule.gate import reference
from tilewright.ops.delta_rule.gate.pallas_gpu.sm90_bwd import BACKWARD, unsupported_reason

FORWARD = dataclasses.replace(
    reference.IMPLEMENTATION.forward, unsupported_reason=unsupported_reason, note="plain JAX, one kernel by XLA"
)
IMPLEMENTATION = (Implementation(FORWARD, BACKWARD, architecture=(9, 0), dtypes=("bfloat16",)),)
