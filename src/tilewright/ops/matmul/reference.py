"""`matmul`, plainly: dequantised operands and one product. The oracle of the family."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.core.products import weight_values
from tilewright.core.quantized import expanded_scales
from tilewright.ops.matmul.call import MatmulCall


def _forward(call: MatmulCall, launch: Launch, *, save: bool) -> tuple[Any, None]:
    exact = accumulator(call.x.dtype if call.x_scales is None else call.x_scales.dtype)
    x, w = call.x.astype(exact), weight_values(call).astype(exact)
    if call.x_scales is not None:
        x = x * expanded_scales(call.x_scales[..., None, :].astype(exact), (1, x.shape[-1]))[..., 0, :]
    if call.w_scales is not None:
        scales = expanded_scales(jnp.moveaxis(call.w_scales, 1, 0).astype(exact), (w.shape[0], w.shape[2]))
        w = w * jnp.moveaxis(scales, 0, 1)  # [K, P, N]
    z = jnp.einsum("...k,kpn->...pn", x, w, precision=jax.lax.Precision.HIGHEST)
    z = z if call.x_scales is not None else round_gradient(z, call.x.dtype)
    if call.bias is not None:
        z = z + jnp.broadcast_to(call.bias.astype(exact), z.shape)
    y = activate(call.activation, tuple(z[..., part, :] for part in range(call.parts)))
    y = y if call.residual is None else y + call.residual.astype(exact)
    return y.astype(jnp.promote_types(call.out_dtype, exact) if exact == jnp.float64 else call.out_dtype), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
