"""Linear cross entropy as Mosaic TPU kernels: one for the forward in fwd.py, two for the backward in bwd.py."""

from tilewright.core.implementation import Implementation
from tilewright.ops.linear_cross_entropy.pallas_tpu.bwd import BACKWARD
from tilewright.ops.linear_cross_entropy.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
