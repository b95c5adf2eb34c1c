"""`grouped_matmul` as Mosaic TPU kernels: rows times their groups' matrices in fwd.py, which dx is too; dw in bwd.py."""

from tilewright.core.implementation import Implementation
from tilewright.ops.grouped_matmul.pallas_tpu.bwd import BACKWARD
from tilewright.ops.grouped_matmul.pallas_tpu.fwd import FORWARD

IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD)
