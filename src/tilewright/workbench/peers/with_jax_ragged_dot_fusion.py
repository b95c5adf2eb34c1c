"""`jax.lax.ragged_dot` with XLA's flag for a grouped product in cuDNN, which the default lowering does not use.

cuDNN has to be recent enough: where it is not, XLA takes the dense product over every group all the same. The weight
gradient, whose groups lie along the contracted axis, always is that one.
"""

import jax

from tilewright.workbench.peers.with_cudnn import unavailable as unavailable
from tilewright.workbench.peers.with_jax_dot import grouped_by

DISTRIBUTIONS = ("jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
COMPILER_OPTIONS = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
OPS = {"grouped_matmul": grouped_by(jax.lax.ragged_dot)}
