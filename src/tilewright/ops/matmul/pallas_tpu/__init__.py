"""`matmul` as Mosaic TPU kernels: rows times weights in fwd.py, which dx is too; dw in bwd.py."""

from tilewright.core.implementation import Implementation
from tilewright.ops.matmul.pallas_tpu.bwd import BACKWARD
from tilewright.ops.matmul.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
