"""`short_conv` on GPUs, one file per architecture and direction."""

from tilewright.core.implementation import Implementation
from tilewright.ops.short_conv.pallas_gpu.sm90_bwd import BACKWARD
from tilewright.ops.short_conv.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = (Implementation(FORWARD, BACKWARD, architecture=(9, 0), dtypes=("bfloat16",)),)
