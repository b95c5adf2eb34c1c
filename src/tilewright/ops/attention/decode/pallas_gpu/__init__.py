"""Attention over a cache on GPUs: `sm90_fwd` for Hopper.

The gradient is that of the xla version: decoding is not trained through.
"""

from tilewright.core.implementation import Implementation, Pass, gradient_of
from tilewright.ops.attention.decode import xla
from tilewright.ops.attention.decode.config import DecodeSm90Forward
from tilewright.ops.attention.decode.pallas_gpu import sm90_fwd

IMPLEMENTATION = Implementation(
    forward=Pass(
        sm90_fwd.forward,
        config=DecodeSm90Forward,
        heuristic=sm90_fwd.heuristic,
        unsupported_reason=sm90_fwd.unsupported_reason,
        memory=sm90_fwd.memory,
        memory_fields="fewer stages or a smaller block_k",
    ),
    backward=gradient_of("xla", xla.IMPLEMENTATION.forward),
    architecture=(9, 0),
    dtypes=("bfloat16",),
)
