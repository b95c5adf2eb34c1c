"""Gated DeltaNet of Qwen3-Next: a gated delta rule with one decay per head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.partitioning import explicit_axes, placed
from tilewright.layers.delta_layer import DeltaLayer, Heads, decay_parameters
from tilewright.layers.layer import Leaf, Parameter, Tensors, linear, norm, norm_weights, split_heads
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
class Qwen3NextGatedDeltaNet(DeltaLayer[Qwen3NextGatedDeltaNetWeights]):
    r"""Gated DeltaNet.

    For tokens x:

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
        g = -exp(A_log) softplus(x Wa + dt_bias);  beta = sigmoid(x Wb)
        o = gated_delta_rule(q, k, v, g, beta)
        y = (RMSNorm(o) * silu(x Wz)) Wo
    """

    weights = Qwen3NextGatedDeltaNetWeights
    quantizable = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
    packed_fields = (
        *("q_proj", "k_proj", "v_proj", "gate_proj", "beta_proj", "decay_proj"),
        *("q_conv", "k_conv", "v_conv"),
    )
    op = gated_delta_rule, gated_delta_rule_step

    d_model: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads: several value heads share each query and key head."""
    key_dim: int
    """Channels per query or key head; from 16 to 256."""
    value_dim: int
    """Channels per value head; from 16 to 256."""
    conv_width: int = 4
    separate: bool = False
    """Whether a checkpoint has separate projections (Qwen3.5: in_proj_qkv, in_proj_z, in_proj_b, in_proj_a), and not those
    packed by key head of Qwen3-Next."""
    eps: float = 1e-6

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        self.check_heads("key_dim", "value_dim")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads={self.num_value_heads} must be a multiple of num_key_heads={self.num_key_heads}, since "
                f"the same number of value heads share each key head; use "
                f"{-(-self.num_value_heads // self.num_key_heads) * self.num_key_heads}"
            )

    @property
    def heads(self) -> Heads:
        return Heads(self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)

    def parameters(self) -> dict[str, Parameter]:
        d, heads = self.d_model, self.heads
        return super().parameters() | {
            "decay_proj": linear("in_proj_ba", d, heads.value_heads, heads.value_heads),
            **decay_parameters(heads.value_heads),
            "gate_proj": linear("in_proj_qkvz", d, heads.values, heads.value_heads),
            "norm": norm("norm", heads.value_dim),
            "o_proj": linear("out_proj", heads.values, d, axes=("heads", "embed")),
        }

    def unpacked(self, checkpoint: Tensors) -> dict[str, jax.Array]:
        """Qwen3-Next packs the rows of its projections by key head: the query and key of the key head, then the values and
        the gates of its value heads; beta and decay likewise. Qwen3.5 has all queries, then all keys, then all values.
        """
        d, heads = self.d_model, self.heads
        if self.separate:
            qkv = checkpoint.array("in_proj_qkv.weight", (2 * heads.keys + heads.values, d))
            sizes = {"z": heads.values, "b": heads.value_heads, "a": heads.value_heads}
            rest = (checkpoint.array(f"in_proj_{name}.weight", (size, d)) for name, size in sizes.items())
            parts = *jnp.split(qkv, [heads.keys, 2 * heads.keys]), *rest
        else:
            per_group = self._rows_per_key_head()
            qkvz = checkpoint.array("in_proj_qkvz.weight", (heads.key_heads, sum(per_group), d))
            ba = checkpoint.array("in_proj_ba.weight", (heads.key_heads, 2 * heads.value_heads // heads.key_heads, d))
            parts = *jnp.split(qkvz, [sum(per_group[:n]) for n in (1, 2, 3)], axis=1), *jnp.split(ba, 2, axis=1)
        # The channels of the convolution are not packed by head: all queries, then all keys, then all values.
        filters = checkpoint.array("conv1d.weight", (2 * heads.keys + heads.values, self.conv_width)).T
        convolutions = jnp.split(filters, [heads.keys, 2 * heads.keys], axis=1)
        rows = [part.reshape(-1, d).T for part in parts]
        return dict(zip(self.packed_fields, (*rows, *convolutions), strict=True))

    def packed(self, weights: Qwen3NextGatedDeltaNetWeights) -> dict[str, Any]:
        heads = self.heads
        rows = [getattr(weights, name).T for name in self.packed_fields[:6]]
        filters = jnp.concatenate([getattr(weights, name) for name in self.packed_fields[6:]], axis=1).T
        tensors = {"conv1d.weight": filters[:, None]}
        if self.separate:
            named = dict(zip("zba", rows[3:], strict=True))
            return tensors | {
                "in_proj_qkv.weight": jnp.concatenate(rows[:3]),
                **{f"in_proj_{name}.weight": value for name, value in named.items()},
            }
        by_head = [part.reshape(heads.key_heads, -1, self.d_model) for part in rows]
        return tensors | {
            "in_proj_qkvz.weight": jnp.concatenate(by_head[:4], axis=1).reshape(-1, self.d_model),
            "in_proj_ba.weight": jnp.concatenate(by_head[4:], axis=1).reshape(-1, self.d_model),
        }

    def _rows_per_key_head(self) -> tuple[int, ...]:
        """Those of the query, the key, the values and their gates."""
        values = self.num_value_heads // self.num_key_heads * self.value_dim
        return self.key_dim, self.key_dim, values, values

    @property
    def projections(self) -> tuple[str, ...]:
        return (*super().projections, "decay_proj", "gate_proj")

    def gates(
        self, weights: Qwen3NextGatedDeltaNetWeights, projected: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        a = projected["decay_proj"]
        A_log, dt_bias = (placed(w, explicit_axes(a)[2:]) for w in (weights.A_log, weights.dt_bias))
        g = gdn_gate(a, A_log, dt_bias)  # [B, T, HV] float32
        return g, jax.nn.sigmoid(projected["beta_proj"].astype(g.dtype))  # [B, T, HV]

    def normalised(
        self, weights: Qwen3NextGatedDeltaNetWeights, projected: Mapping[str, jax.Array], o: Float[Array, "B T HV V"]
    ) -> jax.Array:
        gate = split_heads(projected["gate_proj"], self.num_value_heads)
        return gated_rms_norm(o, gate, norm_weights(weights.norm, o), activation="silu", eps=self.eps)
