"""Gated DeltaNet of Qwen3-Next: a gated delta rule with one decay per head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.layers import delta_state
from tilewright.layers.delta_state import DeltaLayer, DeltaState, Heads
from tilewright.layers.projection import Leaf, Tensors, check_sizes, draw_projection, project
from tilewright.ops.delta_rule.api import gated_delta_rule, gdn_gate
from tilewright.ops.delta_rule.step.api import gated_delta_rule_step
from tilewright.ops.norm.api import gated_rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Qwen3NextGatedDeltaNetWeights:
    """H key heads of K channels, HV value heads of V channels."""

    q_proj: Leaf  # [D, H K]
    k_proj: Leaf  # [D, H K]
    v_proj: Leaf  # [D, HV V]
    q_conv: Leaf  # [W, H K]
    k_conv: Leaf  # [W, H K]
    v_conv: Leaf  # [W, HV V]
    decay_proj: Leaf  # [D, HV], the `a` half of in_proj_ba in the checkpoints
    A_log: Leaf  # [HV]
    dt_bias: Leaf  # [HV]
    beta_proj: Leaf  # [D, HV], the `b` half of in_proj_ba
    gate_proj: Leaf  # [D, HV V], the `z` part of in_proj_qkvz
    norm: Leaf  # [V]
    o_proj: Leaf  # [HV V, D], out_proj


@dataclass(frozen=True, kw_only=True)
class Qwen3NextGatedDeltaNet(DeltaLayer):
    r"""Gated DeltaNet.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
    g = -exp(A_log) softplus(x Wa + dt_bias);  beta = sigmoid(x Wb)
    o = gated_delta_rule(q, k, v, g, beta)
    y = (RMSNorm(o) * silu(x Wz)) Wo
    """

    d_model: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads: several value heads share each query and key head."""
    key_dim: int
    """Channels per query or key head; from 16 to 256."""
    value_dim: int
    """Channels per value head; from 16 to 256."""
    conv_width: int = 4
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        delta_state.check_conv_width(self.conv_width)
        delta_state.check_head_dims(key_dim=self.key_dim, value_dim=self.value_dim)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of num_key_heads={self.num_key_heads}, since "
                f"the same number of value heads share each key head; use "
                f"{-(-self.num_value_heads // self.num_key_heads) * self.num_key_heads}"
            )

    @property
    def heads(self) -> Heads:
        return Heads(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> Qwen3NextGatedDeltaNetWeights:
        """Random weights. A_log and dt_bias are always float32."""
        keys = iter(jax.random.split(key, 12))
        d, heads, width = self.d_model, self.heads, self.conv_width
        return Qwen3NextGatedDeltaNetWeights(
            q_proj=draw_projection(next(keys), d, heads.keys, dtype),
            k_proj=draw_projection(next(keys), d, heads.keys, dtype),
            v_proj=draw_projection(next(keys), d, heads.values, dtype),
            q_conv=delta_state.draw_convolution(next(keys), width, heads.keys, dtype),
            k_conv=delta_state.draw_convolution(next(keys), width, heads.keys, dtype),
            v_conv=delta_state.draw_convolution(next(keys), width, heads.values, dtype),
            decay_proj=draw_projection(next(keys), d, heads.value_heads, dtype),
            A_log=delta_state.draw_rate_log(next(keys), (heads.value_heads,)),
            dt_bias=delta_state.draw_step_bias(next(keys), (heads.value_heads,)),
            beta_proj=draw_projection(next(keys), d, heads.value_heads, dtype),
            gate_proj=draw_projection(next(keys), d, heads.values, dtype),
            norm=jnp.ones((self.value_dim,), dtype),
            o_proj=draw_projection(next(keys), heads.values, d, dtype),
        )

    def from_checkpoint(self, tensors: Mapping[str, Any], prefix: str = "") -> Qwen3NextGatedDeltaNetWeights:
        """The weights under `prefix` ("model.layers.0.linear_attn") of a Qwen3-Next checkpoint, in its dtype.

        The checkpoint packs the rows of its projections by key head: the query and key of the key head, then the values
        and the gates of its value heads; beta and decay likewise. They are separated here, once.
        """
        checkpoint = Tensors(tensors, prefix)
        d, heads, width = self.d_model, self.heads, self.conv_width
        heads_per_key = heads.value_heads // heads.key_heads
        per_group = (heads.key_dim, heads.key_dim, heads_per_key * self.value_dim, heads_per_key * self.value_dim)
        qkvz = checkpoint.array("in_proj_qkvz.weight", (heads.key_heads, sum(per_group), d))
        ba = checkpoint.array("in_proj_ba.weight", (heads.key_heads, 2 * heads_per_key, d))
        q, k, v, z = jnp.split(qkvz, [sum(per_group[:n]) for n in (1, 2, 3)], axis=1)
        b, a = jnp.split(ba, 2, axis=1)
        # The channels of the convolution are not packed by head: all queries, then all keys, then all values.
        filters = checkpoint.convolution("conv1d", 2 * heads.keys + heads.values, width)
        q_conv, k_conv, v_conv = jnp.split(filters, [heads.keys, 2 * heads.keys], axis=1)
        return Qwen3NextGatedDeltaNetWeights(
            q_proj=q.reshape(-1, d).T,
            k_proj=k.reshape(-1, d).T,
            v_proj=v.reshape(-1, d).T,
            q_conv=q_conv,
            k_conv=k_conv,
            v_conv=v_conv,
            decay_proj=a.reshape(-1, d).T,
            A_log=checkpoint.array("A_log", (heads.value_heads,)),
            dt_bias=checkpoint.array("dt_bias", (heads.value_heads,)),
            beta_proj=b.reshape(-1, d).T,
            gate_proj=z.reshape(-1, d).T,
            norm=checkpoint.array("norm.weight", (self.value_dim,)),
            o_proj=checkpoint.projection("out_proj", heads.values, d),
        )

    def apply(
        self,
        weights: Qwen3NextGatedDeltaNetWeights,
        x: Float[Array, "*tokens D"],
        state: DeltaState | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Returns y [B, T, D] and the state after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        With the `state` of an earlier call it continues from there. `segment_ids` [B, T] separates packed sequences;
        the given state belongs to the first token's segment. `implementation` is that of `gated_delta_rule`; the other
        ops, and the step of a single token, take the best that the device can run.
        """
        delta_state.check_input(self.heads, self.d_model, x, state)
        q, k, v, conv = delta_state.queries_keys_values(weights, self.heads, x, state, segment_ids)
        g = gdn_gate(project(x, weights.decay_proj), weights.A_log, weights.dt_bias)  # [B, T, HV] float32
        beta = jax.nn.sigmoid(project(x, weights.beta_proj).astype(g.dtype))  # [B, T, HV]
        o, memory = delta_state.recur(
            gated_delta_rule,
            gated_delta_rule_step,
            state,
            (q, k, v, g, beta),
            segment_ids=segment_ids,
            implementation=implementation,
        )
        gate = project(x, weights.gate_proj).reshape(o.shape)
        o = gated_rms_norm(o, gate, weights.norm, activation="silu", eps=self.eps)  # [B, T, HV, V]
        y = project(o.reshape(*x.shape[:2], self.heads.values), weights.o_proj)
        return y, DeltaState(*conv, memory)
