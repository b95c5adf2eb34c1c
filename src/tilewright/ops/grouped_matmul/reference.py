"""`grouped_matmul`, plainly: every row times its group's matrix, group by group. The oracle of the family."""

from typing import Any

import jax
import jax.numpy as jnp

from tilewright.core.activation import activate
from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.manual_axes import vary_over, varying_axes
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.core.products import weight_values
from tilewright.core.quantized import expanded_scales
from tilewright.ops.grouped_matmul.call import GroupedMatmulCall, group_starts, poison


def _forward(call: GroupedMatmulCall, launch: Launch, *, save: bool) -> tuple[Any, None]:
    exact = accumulator(call.x.dtype if call.x_scales is None else call.x_scales.dtype)
    (m, k), n = call.x.shape, call.w.shape[-1]
    x, w = call.x.astype(exact), weight_values(call).astype(exact)
    if call.x_scales is not None:
        x = x * expanded_scales(call.x_scales.astype(exact), (m, k))
    if call.w_scales is not None:
        scales = expanded_scales(jnp.moveaxis(call.w_scales, 2, 1).astype(exact), (k, n))
        w = w * jnp.moveaxis(scales, 1, 2)  # [G, K, P, N]
    # Factors of 1 or NaN: where the sizes are wrong, gradients are NaN too.
    wrong = poison(call.group_sizes, m).astype(exact)
    x, w = x * (1 + wrong), w * (1 + wrong)
    starts, row = group_starts(call.group_sizes, m), jnp.arange(m, dtype=jnp.int32)

    def step(z: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        w, start, end = group
        inside = (row >= start) & (row < end)
        # Masked here too: in the gradient of w the zeros of other rows would meet their NaNs.
        rows = jnp.where(inside[:, None], x, 0)
        own = jnp.einsum("mk,kpn->mpn", rows, w, precision=jax.lax.Precision.HIGHEST)
        own = own if call.x_scales is not None else round_gradient(own, call.x.dtype)
        return jnp.where(inside[:, None, None], own, z), None

    zeros = vary_over(jnp.zeros((m, call.parts, n), exact), varying_axes(x, w))
    z, _ = jax.lax.scan(step, zeros, (w, starts[:-1], starts[1:]))
    y = activate(call.activation, tuple(z[:, part] for part in range(call.parts)))
    y = y + wrong
    return y.astype(jnp.promote_types(call.out_dtype, exact) if exact == jnp.float64 else call.out_dtype), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
