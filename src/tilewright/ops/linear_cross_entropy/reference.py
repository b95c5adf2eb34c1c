"""Linear cross entropy, plainly: all the logits, then their logsumexp. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.implementation import Implementation, Launch, Pass
from tilewright.core.numerics import accumulator, round_gradient
from tilewright.ops.linear_cross_entropy.call import LinearCrossEntropyCall


def _forward(call: LinearCrossEntropyCall, launch: Launch, *, save: bool) -> tuple[tuple[jax.Array, jax.Array], None]:
    """nll and logsumexp of each token."""
    x, w, soft_cap = call.x, call.w, call.soft_cap
    logits = jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulator(x.dtype))  # [..., V]
    logits = round_gradient(logits, x.dtype)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [...]
    label_logit = jnp.take_along_axis(logits, call.labels[..., None], axis=-1)[..., 0]  # [...]
    return (logsumexp - label_logit, logsumexp), None


IMPLEMENTATION = Implementation(forward=Pass(_forward))
