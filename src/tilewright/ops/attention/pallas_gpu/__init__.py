"""Attention as Mosaic GPU kernels for Hopper (sm90): the forward in sm90_fwd.py, the backward in sm90_bwd.py for heads
of up to 128 and in sm90_bwd_wide.py for wider ones, what they share in tiles.py.
"""

from tilewright.core.implementation import Implementation
from tilewright.ops.attention.pallas_gpu.sm90_bwd import BACKWARD
from tilewright.ops.attention.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD, architecture=(9, 0), dtypes=("bfloat16",))
