"""cuDNN's attention as JAX calls it: `jax.nn.dot_product_attention(implementation="cudnn")`.

It can return the logsumexp, but rounded to the inputs' dtype and without a gradient, so that output is left out.
"""

from tilewright.core.target import default_device
from tilewright.workbench.peers.with_jax_nn import attention

DISTRIBUTIONS = ("jax", "jaxlib", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
OUTPUTS = {"flash_attention": ("out",)}


def unavailable() -> str | None:
    device = default_device()
    return None if device.platform in ("gpu", "cuda") else f"it needs an NVIDIA GPU, and this is a {device.platform}"


OPS = {"flash_attention": attention("cudnn")}
