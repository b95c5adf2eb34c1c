"""Attention over a cache of latents on GPUs: `sm90_fwd` for Hopper.

The gradient is that of the xla version: decoding is not trained through.
"""

from tilewright.core.implementation import Implementation, gradient_of
from tilewright.ops.attention.decode_latent import xla
from tilewright.ops.attention.decode_latent.pallas_gpu.sm90_fwd import FORWARD

BACKWARD = gradient_of("xla", xla.IMPLEMENTATION.forward)
IMPLEMENTATION = Implementation(forward=FORWARD, backward=BACKWARD, architecture=(9, 0), dtypes=("bfloat16",))
