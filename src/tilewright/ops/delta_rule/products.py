"""Matrix products of a chunk, and how exact they are.

A chunk's operands are float32, but on bfloat16 inputs a matrix unit is to multiply bfloat16. `Exactness.SPLIT` writes a
float32 operand as a sum of two bfloat16 ones, x = hi + lo, and multiplies hi hi + lo hi + hi lo: sixteen bits of either
operand, where bfloat16 alone has eight. An operand that holds bfloat16 values already (a query, a key) needs no lo. The
terms are laid side by side along the axis that is summed over, so a unit 256 deep does two terms of depth 128 at once.
"""

import enum
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from tilewright.core.chip import LANES

Form = Literal["nn", "nt", "tn"]
"""a b, a b^T, or a^T b."""

_CONTRACT = {"nn": (1, 0), "nt": (1, 1), "tn": (0, 0)}


class Exactness(enum.Enum):
    """How products of float32 operands are made."""

    HIGHEST = "as float32"
    HIGH = "as three products of bfloat16, by XLA"
    ON_CPU = "as float32, and a^T b as a product with a copy of a^T, which XLA's CPU backend is faster at"
    SPLIT = "as up to three products of bfloat16, laid side by side"


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def dot(a: jax.Array, b: jax.Array, form: Form, how: Exactness, narrow: str = "") -> jax.Array:
    """A product of two matrices, by `form`. `narrow` names what holds bfloat16 values on bfloat16 inputs.

    It is made of the letters a, b, and d for the gradient of the result.
    """
    return _product(a, b, form, how, "a" in narrow, "b" in narrow)


def _keep(a: jax.Array, b: jax.Array, form: Form, how: Exactness, narrow: str) -> tuple[jax.Array, Any]:
    return dot(a, b, form, how, narrow), (a, b)


def _pull(form: Form, how: Exactness, narrow: str, saved: Any, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = saved
    a_is, b_is, d_is = (letter in narrow for letter in "abd")
    if form == "nn":
        return _product(d, b, "nt", how, d_is, b_is), _product(a, d, "tn", how, a_is, d_is)
    if form == "nt":
        return _product(d, b, "nn", how, d_is, b_is), _product(d, a, "tn", how, d_is, a_is)
    return _product(b, d, "nt", how, b_is, d_is), _product(a, d, "nn", how, a_is, d_is)


dot.defvjp(_keep, _pull)


def _product(a: jax.Array, b: jax.Array, form: Form, how: Exactness, a_narrow: bool, b_narrow: bool) -> jax.Array:
    return multiply(split(a, how, a_narrow), split(b, how, b_narrow), form, how)


def split(x: jax.Array, how: Exactness, narrow: bool = False) -> tuple[jax.Array, ...]:
    """The terms whose sum stands for x in a product: itself, or hi and lo."""
    if how is not Exactness.SPLIT:
        return (x,)
    hi = x.astype(jnp.bfloat16)
    if narrow or x.dtype == jnp.bfloat16:
        return (hi,)
    return hi, (x - hi.astype(jnp.float32)).astype(jnp.bfloat16)


def multiply(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...], form: Form, how: Exactness) -> jax.Array:
    """The product of two sums of terms; lo times lo is left out."""
    if how is Exactness.ON_CPU and form == "tn":
        # The barrier keeps XLA from making it a^T b again.
        return multiply((jax.lax.optimization_barrier(a[0].T),), b, "nn", how)
    axes = _CONTRACT[form]
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    if how is not Exactness.SPLIT:
        precision = jax.lax.Precision.HIGH if how is Exactness.HIGH else jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(a[0], b[0], dimensions, precision=precision, preferred_element_type=a[0].dtype)
    pairs = [(a[0], b[0]), *((lo, b[0]) for lo in a[1:]), *((a[0], lo) for lo in b[1:])]
    # Side by side only where that moves nothing between lanes.
    if a[0].shape[axes[0]] % LANES == 0 and len(pairs) > 1:
        sides = zip(*pairs, strict=True)
        pairs = [tuple(jnp.concatenate(side, axis=axis) for side, axis in zip(sides, axes, strict=True))]
    products = [jax.lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32) for x, y in pairs]
    return functools.reduce(jnp.add, products)


def times(a: jax.Array, b: jax.Array, form: Form, how: Exactness) -> jax.Array:
    """Products of the last two axes; differentiable."""
    product = functools.partial(dot, form=form, how=how)
    for _ in a.shape[2:]:
        product = jax.vmap(product)
    return product(a, b)
