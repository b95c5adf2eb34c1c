"""`matmul_sum` on GPUs: `sm90_fwd` for Hopper. Its gradient is that of plain JAX, two products per pair."""

import dataclasses

from tilewright.core.implementation import Implementation
from tilewright.ops.matmul.sum import xla
from tilewright.ops.matmul.sum.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = (
    Implementation(
        forward=FORWARD,
        backward=dataclasses.replace(xla.BACKWARD, note="the gradient of implementation='xla'", differentiable=False),
        architecture=(9, 0),
        dtypes=("bfloat16",),
    ),
)
