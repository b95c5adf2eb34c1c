"""`absorb_queries` and `expand_values` on GPUs: `sm90_fwd` for Hopper.

The gradient is that of the plain version: decoding seldom needs it.
"""

from tilewright.core.implementation import Implementation, gradient_of
from tilewright.ops.attention.decode_latent_heads import reference
from tilewright.ops.attention.decode_latent_heads.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = (
    Implementation(
        forward=FORWARD,
        backward=gradient_of("reference", reference.IMPLEMENTATION.forward),
        architecture=(9, 0),
        dtypes=("bfloat16",),
    ),
)
