"""What is added to a training loss for the router's sake."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tilewright.core.numerics import accumulator
from tilewright.core.partitioning import placed
from tilewright.ops.moe.dispatch import count_sorted


def _counted(logits: Float[Array, "*tokens E"], mask: Bool[Array, "*tokens"] | None) -> Float[Array, "*tokens E"]:
    """The logits in float32, with zeros for the tokens that do not count: whatever they have, their gradient is 0."""
    logits = logits.astype(accumulator(logits.dtype))
    return logits if mask is None else jnp.where(mask[..., None], logits, jnp.zeros_like(logits))


def _mean(per_token: Float[Array, "*tokens E"], mask: Bool[Array, "*tokens"] | None) -> Float[Array, " E"]:
    """The mean over the tokens that count; 0 where none does."""
    axes = tuple(range(per_token.ndim - 1))
    if mask is None:
        return jnp.mean(per_token, axis=axes)
    kept = jnp.where(mask[..., None], per_token, jnp.zeros_like(per_token))
    return jnp.sum(kept, axis=axes) / jnp.maximum(jnp.sum(mask), 1).astype(per_token.dtype)


def load_balance_loss(
    logits: Float[Array, "*tokens E"],
    experts: Int[Array, "*tokens C"],
    scoring: str,
    mask: Bool[Array, "*tokens"] | None,
) -> Float[Array, ""]:
    num_experts, logits = logits.shape[-1], _counted(logits, mask)
    if 0 in logits.shape:
        return jnp.sum(logits)  # 0
    # Sigmoids divided by their sum, from logarithms: they may all underflow.
    scores = jax.nn.softmax(jax.nn.log_sigmoid(logits) if scoring == "sigmoid" else logits, axis=-1)
    # Every device counts the choices of all tokens: they are a few bytes per token, and a sort of sharded axes is none.
    experts = placed(experts, [()] * experts.ndim)
    count = jnp.asarray(experts.size // max(1, experts.shape[-1]), scores.dtype)
    if mask is not None:
        everywhere = placed(mask, [()] * mask.ndim)
        count = jnp.maximum(jnp.sum(everywhere), 1).astype(scores.dtype)
        experts = jnp.where(everywhere[..., None], experts, jnp.full_like(experts, num_experts))
    # Unsigned, as in `sort_by_expert`.
    counts = count_sorted(jnp.sort(experts.reshape(-1).astype(jnp.uint32)), num_experts)
    fraction = jax.lax.stop_gradient(counts.astype(scores.dtype) / count)
    return num_experts * jnp.sum(fraction * placed(_mean(scores, mask), [()]))


def z_loss(logits: Float[Array, "*tokens E"], mask: Bool[Array, "*tokens"] | None) -> Float[Array, ""]:
    logits = _counted(logits, mask)
    if 0 in logits.shape:
        return jnp.sum(logits)  # 0
    largest = jax.nn.logsumexp(logits, axis=-1)
    return _mean(jnp.square(largest)[..., None], mask)[0]
