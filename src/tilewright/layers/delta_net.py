"""DeltaNet: the delta rule without a gate, the baseline of the gated layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.core.numerics import accumulator
from tilewright.layers import delta_state
from tilewright.layers.delta_state import DeltaLayer, DeltaState, Heads
from tilewright.layers.projection import Leaf, Tensors, check_sizes, draw_projection, project
from tilewright.ops.delta_rule.api import delta_rule
from tilewright.ops.delta_rule.step.api import delta_rule_step
from tilewright.ops.norm.api import rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeltaNetWeights:
    """H heads, with K channels per key and V per value."""

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
class DeltaNet(DeltaLayer):
    r"""DeltaNet.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
    beta = sigmoid(x Wb), or 2 sigmoid(x Wb) with negative_eigenvalues
    o = delta_rule(q, k, v, beta)
    y = RMSNorm(o) Wo
    """

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
        check_sizes(self, "d_model", "num_heads", "key_dim", "value_dim")
        delta_state.check_conv_width(self.conv_width)
        delta_state.check_head_dims(key_dim=self.key_dim, value_dim=self.value_dim)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.key_dim, self.value_dim)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> DeltaNetWeights:
        """Random weights."""
        keys = iter(jax.random.split(key, 8))
        d, heads, width = self.d_model, self.heads, self.conv_width
        return DeltaNetWeights(
            q_proj=draw_projection(next(keys), d, heads.keys, dtype),
            k_proj=draw_projection(next(keys), d, heads.keys, dtype),
            v_proj=draw_projection(next(keys), d, heads.values, dtype),
            q_conv=delta_state.draw_convolution(next(keys), width, heads.keys, dtype),
            k_conv=delta_state.draw_convolution(next(keys), width, heads.keys, dtype),
            v_conv=delta_state.draw_convolution(next(keys), width, heads.values, dtype),
            beta_proj=draw_projection(next(keys), d, self.num_heads, dtype),
            norm=jnp.ones((self.value_dim,), dtype),
            o_proj=draw_projection(next(keys), heads.values, d, dtype),
        )

    def from_checkpoint(self, tensors: Mapping[str, Any], prefix: str = "") -> DeltaNetWeights:
        """The weights under `prefix` ("model.layers.0.attn") of a DeltaNet checkpoint as fla names them, in its
        dtype.
        """
        checkpoint = Tensors(tensors, prefix)
        d, heads, width = self.d_model, self.heads, self.conv_width
        return DeltaNetWeights(
            q_proj=checkpoint.projection("q_proj", d, heads.keys),
            k_proj=checkpoint.projection("k_proj", d, heads.keys),
            v_proj=checkpoint.projection("v_proj", d, heads.values),
            q_conv=checkpoint.convolution("q_conv1d", heads.keys, width),
            k_conv=checkpoint.convolution("k_conv1d", heads.keys, width),
            v_conv=checkpoint.convolution("v_conv1d", heads.values, width),
            beta_proj=checkpoint.projection("b_proj", d, self.num_heads),
            norm=checkpoint.array("o_norm.weight", (self.value_dim,)),
            o_proj=checkpoint.projection("o_proj", heads.values, d),
        )

    def apply(
        self,
        weights: DeltaNetWeights,
        x: Float[Array, "*tokens D"],
        state: DeltaState | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Returns y [B, T, D] and the state after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        With the `state` of an earlier call it continues from there. `segment_ids` [B, T] separates packed sequences;
        the given state belongs to the first token's segment. `implementation` is that of `delta_rule`; the other ops,
        and the step of a single token, take the best that the device can run.
        """
        delta_state.check_input(self.heads, self.d_model, x, state)
        q, k, v, conv = delta_state.queries_keys_values(weights, self.heads, x, state, segment_ids)
        beta = jax.nn.sigmoid(project(x, weights.beta_proj).astype(accumulator(x.dtype)))  # [B, T, H]
        beta = 2 * beta if self.negative_eigenvalues else beta
        o, memory = delta_state.recur(
            delta_rule, delta_rule_step, state, (q, k, v, beta), segment_ids=segment_ids, implementation=implementation
        )
        o = rms_norm(o, weights.norm, eps=self.eps)  # [B, T, H, V]
        y = project(o.reshape(*x.shape[:2], self.heads.values), weights.o_proj)
        return y, DeltaState(*conv, memory)
