"""DeltaNet: the delta rule without a gate, the baseline of the gated layers."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from tilewright.core.numerics import accumulator
from tilewright.layers.delta_layer import DeltaLayer, Heads
from tilewright.layers.layer import Leaf, norm_weights
from tilewright.ops.delta_rule.api import delta_rule
from tilewright.ops.delta_rule.step.api import delta_rule_step
from tilewright.ops.norm.api import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaNetWeights:
    """H heads, with K channels per key and V per value. The checkpoints are fla's, "model.layers.0.attn"."""

    q_proj: Leaf  # [D, H K]
    k_proj: Leaf  # [D, H K]
    v_proj: Leaf  # [D, H V]
    q_conv: Leaf  # [W, H K]
    k_conv: Leaf  # [W, H K]
    v_conv: Leaf  # [W, H V]
    beta_proj: Leaf  # [D, H], b_proj in fla's checkpoints
    norm: Leaf  # [V], o_norm
    o_proj: Leaf  # [H V, D]


@dataclass(frozen=True, kw_only=True)
class DeltaNet(DeltaLayer[DeltaNetWeights]):
    r"""DeltaNet.

    For tokens x:

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
        beta = sigmoid(x Wb), or 2 sigmoid(x Wb) with negative_eigenvalues
        o = delta_rule(q, k, v, beta)
        y = RMSNorm(o) Wo
    """

    weights = DeltaNetWeights
    op = delta_rule, delta_rule_step

    d_model: int
    num_heads: int
    key_dim: int
    """Channels per query or key head; from 16 to 256."""
    value_dim: int
    """Channels per value head; from 16 to 256."""
    conv_width: int = 4
    negative_eigenvalues: bool = False
    """Whether beta ranges up to 2, so that an update can negate a direction of the state instead of only erasing it."""
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_heads", "key_dim", "value_dim")
        self.check_heads("key_dim", "value_dim")

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.key_dim, self.value_dim)

    def gates(self, weights: DeltaNetWeights, projected: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        raw = projected["beta_proj"]
        beta = jax.nn.sigmoid(raw.astype(accumulator(raw.dtype)))  # [B, T, H]
        return (2 * beta if self.negative_eigenvalues else beta,)

    def normalised(
        self, weights: DeltaNetWeights, projected: Mapping[str, jax.Array], o: Float[Array, "B T H V"]
    ) -> jax.Array:
        return rms_norm(o, norm_weights(weights.norm, o), eps=self.eps)
