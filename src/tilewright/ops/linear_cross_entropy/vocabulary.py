"""Linear cross entropy where the vocabulary is cut over devices: each has some columns of w, and all of x.

The statistics of a row are those of its parts, as for the blocks of a kernel: the largest logit m, the sum of
exp(logit - m), and the label's logit, which one part has. Two maxima and two sums per row go over the network.

Exponentials that a part stores for the backward (`StoredExponentials`, `StoredBits`) stay on its device. Where the
compiler cuts a call, what is saved has the shape that the whole call saves, which a part's exponentials do not have:
there the backward recomputes all logits.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tilewright.core.call import Static


class StoredExponentials(NamedTuple):
    """exp(logit - m) of the first W columns, as a forward pass stores them for the backward.

    m is the largest logit of the row in a block of columns, in units of log 2.
    """

    roots: jax.Array
    """[N, W]: the square root of exp(logit - m) times the slope of the soft cap, times a power of 2. The bits of float16 in
    an array of bfloat16."""
    highest: jax.Array
    """[N, blocks]: m."""
    label_logit: jax.Array
    """[N]: the label's logit, in units of log 2."""
    block_v: Static
    """The columns of a block."""


class StoredBits(NamedTuple):
    """exp(logit - m) of all columns, as the TPU's forward pass stores them for the backward.

    m is the largest logit of the row up to and including the block of columns.
    """

    bits: jax.Array
    """int32 [N, W / 2], where W is V in whole blocks: the exponentials, times the slope of the soft cap, two per word."""
    highest: jax.Array
    """[N, columns]: m, in the order that the kernels of both passes agree on."""
    label_logit: jax.Array
    """[N]: the label's logit."""
    block_v: Static
    """The columns of a block."""


class RowStatistics(NamedTuple):
    """What a forward pass saves of each row: m and sum exp(logit - m), from which the probabilities follow."""

    highest: jax.Array
    """m, times `per_nat`."""
    total: jax.Array
    per_nat: Static = Static(1.0)
    """The unit of `highest`: log2(e) where exponentials are powers of 2."""
    stored: Any = None
    """`StoredExponentials` (Hopper), `StoredBits` (TPU), or None."""


@dataclass(frozen=True)
class VocabularyShard:
    """One device's part of a call, inside `shard_map` over the mesh axes `axes`."""

    call: Any
    """The part. A label that another part has is 0 here."""
    has_label: jax.Array
    axes: tuple[str, ...]

    @property
    def compiled_call(self) -> Any:
        return dataclasses.replace(self.call, whole_v=self.call.w.shape[1] * jax.lax.axis_size(self.axes))

    @classmethod
    def of(cls, call: Any, axes: tuple[str, ...]) -> "VocabularyShard":
        size = call.w.shape[1]
        labels = call.labels - size * jax.lax.axis_index(axes).astype(call.labels.dtype)
        has_label = (labels >= 0) & (labels < size)
        return cls(call.with_arrays({"labels": jnp.where(has_label, labels, 0)}), has_label, axes)

    def combine(self, outputs: Any, saved: RowStatistics | None) -> tuple[Any, Any]:
        nll, logsumexp = outputs
        label_logit = jax.lax.psum(jnp.where(self.has_label, logsumexp - nll, 0.0), self.axes)
        whole = self._log_total(logsumexp)
        if saved is None:
            return (whole - label_logit, whole), None
        highest = jax.lax.pmax(saved.highest, self.axes)
        rescaled = saved.total * jnp.exp((saved.highest - highest) / saved.per_nat.value)
        return (whole - label_logit, whole), saved._replace(highest=highest, total=jax.lax.psum(rescaled, self.axes))

    def _log_total(self, logsumexp: jax.Array) -> jax.Array:
        # pmax has no gradient, and needs none: the result does not depend on it.
        highest = jax.lax.pmax(jax.lax.stop_gradient(logsumexp), self.axes)
        return highest + jnp.log(jax.lax.psum(jnp.exp(logsumexp - highest), self.axes))

    def cotangents(self, cotangents: Any) -> Any:
        """Where the label is elsewhere, the loss changes through logsumexp only."""
        d_nll, d_logsumexp = cotangents
        here = jnp.where(self.has_label, d_nll, 0.0)
        return here, d_logsumexp + (d_nll - here)
