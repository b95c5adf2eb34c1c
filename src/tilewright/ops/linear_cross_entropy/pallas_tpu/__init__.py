"""Linear cross entropy as Mosaic TPU kernels: the forward in fwd.py, the backward in stored.py (one kernel, from what the
forward stored) and in bwd.py (two, which recompute the logits).
"""

from tilewright.core.implementation import Implementation
from tilewright.ops.linear_cross_entropy.pallas_tpu.bwd import BACKWARD
from tilewright.ops.linear_cross_entropy.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
