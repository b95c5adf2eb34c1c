"""Linear cross entropy, plainly: all the logits, then their logsumexp. The oracle of the family."""

import jax
import jax.numpy as jnp

from tilewright.core.axes import PerRow, RowLabels, Rows, Unembedding
from tilewright.core.numerics import accumulator, round_gradient


def linear_cross_entropy_reference(
    x: Rows, w: Unembedding, labels: RowLabels, *, soft_cap: float | None
) -> tuple[PerRow, PerRow]:
    """Negative log likelihood and logsumexp of each row; labels are in [0, V)."""
    logits = jnp.dot(x, w, precision=jax.lax.Precision.HIGHEST, preferred_element_type=accumulator(x.dtype))  # [N, V]
    logits = round_gradient(logits, x.dtype)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logsumexp = jax.nn.logsumexp(logits, axis=-1)  # [N]
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]  # [N]
    return logsumexp - label_logit, logsumexp
