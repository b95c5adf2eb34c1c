"""Kimi Delta Attention, the layer of Kimi Linear: a gated delta rule with one decay per key channel."""

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
from tilewright.ops.delta_rule.api import check_lower_bound, kda, kda_gate
from tilewright.ops.delta_rule.step.api import kda_step
from tilewright.ops.norm.api import gated_rms_norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KimiDeltaAttentionWeights:
    """H heads of K channels, for keys and values alike; R is the rank of the two gates."""

    q_proj: Leaf  # [D, H K]
    k_proj: Leaf  # [D, H K]
    v_proj: Leaf  # [D, H K]
    q_conv: Leaf  # [W, H K]
    k_conv: Leaf  # [W, H K]
    v_conv: Leaf  # [W, H K]
    decay_down: Leaf  # [D, R], f_a_proj in the checkpoints
    decay_up: Leaf  # [R, H K], f_b_proj
    A_log: Leaf  # [H]
    dt_bias: Leaf  # [H, K]
    beta_proj: Leaf  # [D, H], b_proj
    gate_down: Leaf  # [D, R], g_a_proj
    gate_up: Leaf  # [R, H K], g_b_proj
    norm: Leaf  # [K], o_norm
    o_proj: Leaf  # [H K, D]


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(DeltaLayer):
    r"""Kimi Delta Attention.

    q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
    g = -exp(A_log) softplus(x Wf_down Wf_up + dt_bias);  beta = sigmoid(x Wb)
    o = kda(q, k, v, g, beta)
    y = (RMSNorm(o) * sigmoid(x Wg_down Wg_up)) Wo
    """

    d_model: int
    num_heads: int
    head_dim: int
    """Channels per head, for keys and values alike; from 16 to 256."""
    conv_width: int = 4
    gate_rank: int | None = None
    """The rank of the two gates. Defaults to head_dim, as in Kimi Linear."""
    lower_bound: float | None = None
    """Where given, g = lower_bound sigmoid(exp(A_log) (x Wf_down Wf_up + dt_bias)): decays stay above
    exp(lower_bound)."""
    eps: float = 1e-5

    def __post_init__(self) -> None:
        check_sizes(self, "d_model", "num_heads", "head_dim", *(() if self.gate_rank is None else ("gate_rank",)))
        delta_state.check_conv_width(self.conv_width)
        delta_state.check_head_dims(head_dim=self.head_dim)
        check_lower_bound(self.lower_bound)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.head_dim)

    @property
    def rank(self) -> int:
        return self.head_dim if self.gate_rank is None else self.gate_rank

    def init(self, key: PRNGKeyArray, dtype: Any = jnp.float32) -> KimiDeltaAttentionWeights:
        """Random weights. A_log and dt_bias are always float32."""
        keys = iter(jax.random.split(key, 13))
        d, channels, rank = self.d_model, self.heads.keys, self.rank
        conv = [delta_state.draw_convolution(next(keys), self.conv_width, channels, dtype) for _ in range(3)]
        return KimiDeltaAttentionWeights(
            q_proj=draw_projection(next(keys), d, channels, dtype),
            k_proj=draw_projection(next(keys), d, channels, dtype),
            v_proj=draw_projection(next(keys), d, channels, dtype),
            q_conv=conv[0],
            k_conv=conv[1],
            v_conv=conv[2],
            decay_down=draw_projection(next(keys), d, rank, dtype),
            decay_up=draw_projection(next(keys), rank, channels, dtype),
            A_log=delta_state.draw_rate_log(next(keys), (self.num_heads,)),
            dt_bias=delta_state.draw_step_bias(next(keys), (self.num_heads, self.head_dim)),
            beta_proj=draw_projection(next(keys), d, self.num_heads, dtype),
            gate_down=draw_projection(next(keys), d, rank, dtype),
            gate_up=draw_projection(next(keys), rank, channels, dtype),
            norm=jnp.ones((self.head_dim,), dtype),
            o_proj=draw_projection(jax.random.fold_in(key, 1), channels, d, dtype),
        )

    def from_checkpoint(self, tensors: Mapping[str, Any], prefix: str = "") -> KimiDeltaAttentionWeights:
        """The weights under `prefix` ("model.layers.0.self_attn") of a Kimi Linear checkpoint, in its dtype."""
        checkpoint = Tensors(tensors, prefix)
        d, channels, rank, width = self.d_model, self.heads.keys, self.rank, self.conv_width
        return KimiDeltaAttentionWeights(
            q_proj=checkpoint.projection("q_proj", d, channels),
            k_proj=checkpoint.projection("k_proj", d, channels),
            v_proj=checkpoint.projection("v_proj", d, channels),
            q_conv=checkpoint.convolution("q_conv1d", channels, width),
            k_conv=checkpoint.convolution("k_conv1d", channels, width),
            v_conv=checkpoint.convolution("v_conv1d", channels, width),
            decay_down=checkpoint.projection("f_a_proj", d, rank),
            decay_up=checkpoint.projection("f_b_proj", rank, channels),
            A_log=checkpoint.array("A_log", (self.num_heads,)),
            dt_bias=checkpoint.array("dt_bias", (self.num_heads, self.head_dim)),
            beta_proj=checkpoint.projection("b_proj", d, self.num_heads),
            gate_down=checkpoint.projection("g_a_proj", d, rank),
            gate_up=checkpoint.projection("g_b_proj", rank, channels),
            norm=checkpoint.array("o_norm.weight", (self.head_dim,)),
            o_proj=checkpoint.projection("o_proj", channels, d),
        )

    def apply(
        self,
        weights: KimiDeltaAttentionWeights,
        x: Float[Array, "*tokens D"],
        state: DeltaState | None = None,
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], DeltaState]:
        """Returns y [B, T, D] and the state after x [B, T, D]: a whole sequence, a chunk of one, or a single token.

        With the `state` of an earlier call it continues from there. `segment_ids` [B, T] separates packed sequences;
        the given state belongs to the first token's segment. `implementation` is that of `kda`; the other ops, and the
        step of a single token, take the best that the device can run.
        """
        delta_state.check_input(self.heads, self.d_model, x, state)
        q, k, v, conv = delta_state.queries_keys_values(weights, self.heads, x, state, segment_ids)
        per_head = (*x.shape[:2], self.num_heads, self.head_dim)
        raw = project(project(x, weights.decay_down), weights.decay_up).reshape(per_head)
        g = kda_gate(raw, weights.A_log, weights.dt_bias, self.lower_bound)  # [B, T, H, K] float32
        beta = jax.nn.sigmoid(project(x, weights.beta_proj).astype(g.dtype))  # [B, T, H]
        o, memory = delta_state.recur(
            kda, kda_step, state, (q, k, v, g, beta), segment_ids=segment_ids, implementation=implementation
        )
        gate = project(project(x, weights.gate_down), weights.gate_up).reshape(per_head)
        o = gated_rms_norm(o, gate, weights.norm, activation="sigmoid", eps=self.eps)  # [B, T, H, K]
        y = project(o.reshape(*x.shape[:2], self.heads.values), weights.o_proj)
        return y, DeltaState(*conv, memory)
