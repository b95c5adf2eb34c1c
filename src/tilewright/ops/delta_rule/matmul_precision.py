"""Matrix products of float32 operands at the precision that the dtype of the inputs and the platform ask for.

The operands of a chunk are float32, but for bfloat16 inputs the matrix unit should multiply bfloat16.
`MatmulPrecision.BF16X3` splits a float32 operand into two bfloat16 parts, x = hi + lo, and computes hi*hi + lo*hi +
hi*lo:
16 bits of each operand, where bfloat16 alone has 8. An operand that holds bfloat16 values already (a query, a key) has
no lo. The terms are concatenated along the contracted axis, so that a unit 256 deep does two terms of depth 128 at
once.
"""

import enum
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tilewright.core.chip import LANES
from tilewright.core.derivatives import with_derivatives

Form = Literal["nn", "nt", "tn"]
"""a b, a b^T, or a^T b."""

_CONTRACT = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class MatmulPrecision(enum.Enum):
    """How products of float32 operands are computed."""

    FLOAT32 = "in float32"
    BF16X3_XLA = "as three products of bfloat16, by XLA"
    FLOAT32_CPU = "in float32, with a^T b as a product with a copy of a^T, at which XLA's CPU backend is faster"
    BF16X3 = "as up to three products of bfloat16, concatenated along the contracted axis"


def _dot(a: jax.Array, b: jax.Array, form: Form, precision: MatmulPrecision) -> jax.Array:
    """The product of two matrices, by `form`."""
    return multiply(split(a, precision), split(b, precision), form, precision)


def _dot_forward(a: jax.Array, b: jax.Array, form: Form, precision: MatmulPrecision) -> tuple[Any, Any]:
    return dot(a, b, form, precision), (a, b)


def _dot_tangent(form: Form, precision: MatmulPrecision, saved: Any, tangents: Any) -> jax.Array:
    (a, b), (t_a, t_b) = saved, tangents
    return dot(t_a, b, form, precision) + dot(a, t_b, form, precision)


def _dot_backward(form: Form, precision: MatmulPrecision, saved: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    if form == "nn":
        return _dot(d, b, "nt", precision), _dot(a, d, "tn", precision)
    if form == "nt":
        return _dot(d, b, "nn", precision), _dot(d, a, "tn", precision)
    return _dot(b, d, "nt", precision), _dot(a, d, "nn", precision)


dot = with_derivatives(
    _dot, forward=_dot_forward, tangent=_dot_tangent, backward=_dot_backward, differentiable=2, static_argnums=(2, 3)
)


def split(x: jax.Array, precision: MatmulPrecision) -> tuple[jax.Array, ...]:
    """The terms whose sum stands for x in a product: x itself, or hi and lo."""
    if precision is not MatmulPrecision.BF16X3:
        return (x,)
    hi = x.astype(jnp.bfloat16)
    if x.dtype == jnp.bfloat16:
        return (hi,)
    return hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)


def multiply(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...], form: Form, precision: MatmulPrecision) -> jax.Array:
    """The product of two sums of terms, without lo*lo."""
    if precision is MatmulPrecision.FLOAT32_CPU and form == "tn":
        # The barrier keeps XLA from turning this back into a^T b.
        return multiply((jax.lax.optimization_barrier(a[0].T),), b, "nn", precision)
    axes = _CONTRACT[form]
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    if precision is not MatmulPrecision.BF16X3:
        high = precision is MatmulPrecision.BF16X3_XLA
        xla_precision = jax.lax.Precision.HIGH if high else jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(a[0], b[0], dimensions, precision=xla_precision, preferred_element_type=a[0].dtype)
    pairs = [(a[0], b[0]), *((lo, b[0]) for lo in a[1:]), *((a[0], lo) for lo in b[1:])]
    # Concatenated only where that moves nothing between lanes.
    if a[0].shape[axes[0]] % LANES == 0 and len(pairs) > 1:
        sides = zip(*pairs, strict=True)
        pairs = [tuple(jnp.concatenate(side, axis=axis) for side, axis in zip(sides, axes, strict=True))]
    products = [jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32) for x, y in pairs]
    return functools.reduce(jnp.add, products)


def batched_dot(a: jax.Array, b: jax.Array, form: Form, precision: MatmulPrecision) -> jax.Array:
    """`dot` over the last two axes. Differentiable."""
    product = functools.partial(dot, form=form, precision=precision)
    for _ in a.shape[2:]:
        product = jax.vmap(product)
    return product(a, b)
