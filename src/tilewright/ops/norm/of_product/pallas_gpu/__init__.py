"""`gated_rms_norm_of_product` on GPUs: `sm90_fwd` for Hopper.

The gradient is that of the plain version, which saves nothing and computes the product again: layers that are
differentiated have the two steps instead.
"""

from tilewright.core.implementation import Implementation, gradient_of
from tilewright.ops.norm.of_product import reference
from tilewright.ops.norm.of_product.pallas_gpu.sm90_fwd import FORWARD

IMPLEMENTATION = (
    Implementation(
        forward=FORWARD,
        backward=gradient_of("reference", reference.IMPLEMENTATION.forward),
        architecture=(9, 0),
        dtypes=("bfloat16",),
    ),
)
