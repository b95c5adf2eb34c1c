"""cuBLAS through JAX: `jnp.dot` with XLA's Triton products turned off."""

from tilewright.workbench.peers.with_cudnn import unavailable as unavailable
from tilewright.workbench.peers.with_jax_dot import matmul

DISTRIBUTIONS = ("jax", "jaxlib", "nvidia-cublas", "nvidia-cublas-cu12")
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
OPS = {"matmul": matmul}
