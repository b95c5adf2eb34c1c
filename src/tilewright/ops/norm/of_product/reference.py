"""`gated_rms_norm_of_product` in plain JAX: a product in float32, and the plain `gated_rms_norm`. The family's oracle."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.norm import reference
from tilewright.ops.norm.call import NormCall
from tilewright.ops.norm.of_product.call import NormOfProductCall


def _forward(call: NormOfProductCall, launch: Launch, *, save: bool) -> tuple[jax.Array, None]:
    x, w = (array.astype(accumulator(call.x.dtype)) for array in (call.x, call.w))
    product = jnp.einsum("...k,khd->...hd", x, w, precision=jax.lax.Precision.HIGHEST)
    options = {"eps": call.eps, "offset": 0.0, "centered": False, "activation": call.activation}
    norm = NormCall(x=call.o, gate=round_gradient(product, call.x.dtype), w=call.norm, bias=None, **options)
    return reference.IMPLEMENTATION.forward.run(norm, launch, save=save)


IMPLEMENTATION = Implementation(forward=Pass(_forward))
