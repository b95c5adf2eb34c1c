"""Linear cross entropy as Mosaic GPU kernels, for Hopper: sm90_fwd.py and sm90_bwd.py."""

from tilewright.core.implementation import Implementation
from tilewright.ops.linear_cross_entropy.pallas_gpu.sm90_bwd import BACKWARD
from tilewright.ops.linear_cross_entropy.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD, architecture=(9, 0), dtypes=("bfloat16",))
