"""Attention as Mosaic TPU kernels: the forward in fwd.py, the backward in bwd.py, what they share in tiles.py."""

from tilewright.core.implementation import Implementation
from tilewright.ops.attention.pallas_tpu.bwd import BACKWARD
from tilewright.ops.attention.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
