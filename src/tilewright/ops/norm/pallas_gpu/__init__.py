"""`gated_rms_norm` on GPUs, one file per architecture."""

from tilewright.core.implementation import Implementation
from tilewright.ops.norm.pallas_gpu.sm90 import BACKWARD, FORWARD

IMPLEMENTATION = (Implementation(FORWARD, BACKWARD, architecture=(9, 0), dtypes=("bfloat16",)),)
