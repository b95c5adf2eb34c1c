"""Kimi Delta Attention, the layer of Kimi Linear: a gated delta rule with one decay per key channel."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tilewright.core.derivatives import forward_only
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.core.quantized import QuantizedArray
from tilewright.layers.attention import StackedCache, array_of
from tilewright.layers.delta_layer import DeltaLayer, DeltaState, Heads, decay_parameters
from tilewright.layers.layer import Leaf, Parameter, Residual, linear, norm_weights, project, split_heads
from tilewright.ops.delta_rule.api import check_lower_bound, kda
from tilewright.ops.delta_rule.decode_kda.api import decode_kda
from tilewright.ops.delta_rule.decode_kda.api import has_kernel as decode_has_kernel
from tilewright.ops.delta_rule.gate.api import kda_gate
from tilewright.ops.delta_rule.gate_of_product.api import has_kernel as gate_has_kernel
from tilewright.ops.delta_rule.gate_of_product.api import kda_gate_of_product
from tilewright.ops.delta_rule.step.api import kda_step
from tilewright.ops.norm.api import gated_rms_norm
from tilewright.ops.norm.of_product.api import gated_rms_norm_of_product
from tilewright.ops.norm.of_product.api import has_kernel as norm_has_kernel

_TOKENS = 8  # Rows of a swizzled tile on a GPU: for other numbers of tokens the kernels copy their arrays.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KimiDeltaAttentionWeights:
    """H heads of K channels, for keys and values alike; R is the rank of the gates."""

    q_conv: Leaf  # [W, H K]
    k_conv: Leaf  # [W, H K]
    v_conv: Leaf  # [W, H K]
    q_proj: Leaf  # [D, H K]
    k_proj: Leaf  # [D, H K]
    v_proj: Leaf  # [D, H K]
    decay_down: Leaf  # [D, R], f_a_proj in the checkpoints
    decay_up: Leaf  # [R, H K], f_b_proj
    A_log: Leaf  # [H]
    dt_bias: Leaf  # [H, K]
    beta_proj: Leaf  # [D, H], b_proj
    gate_down: Leaf = None  # [D, R], g_a_proj
    gate_up: Leaf = None  # [R, H K], g_b_proj
    norm: Leaf = None  # [K], o_norm
    o_proj: Leaf = None  # [H K, D]
    gate_proj: Leaf = None  # [D, H K], g_proj, in place of gate_down and gate_up where the gate has full rank


@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(DeltaLayer[KimiDeltaAttentionWeights]):
    r"""Kimi Delta Attention.

    For tokens x:

        q, k, v = silu(conv(x Wq)), silu(conv(x Wk)), silu(conv(x Wv));  q, k normalised to length 1 per head
        g = -exp(A_log) softplus(x Wf_down Wf_up + dt_bias);  beta = sigmoid(x Wb)
        o = kda(q, k, v, g, beta)
        y = (RMSNorm(o) * sigmoid(x Wg_down Wg_up)) Wo

    With `full_rank_gate`, as in Kimi-K3, one matrix Wg takes the place of Wg_down Wg_up.
    """

    weights = KimiDeltaAttentionWeights
    quantizable = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj")
    packed_fields = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")
    op = kda, kda_step

    d_model: int
    num_heads: int
    head_dim: int
    """Channels per head, for keys and values alike; from 16 to 256."""
    conv_width: int = 4
    gate_rank: int | None = None
    """The rank of the two gates. Defaults to head_dim, as in Kimi Linear."""
    full_rank_gate: bool = False
    """Whether the gate of the outputs is one matrix, `g_proj` in the checkpoints."""
    lower_bound: float | None = None
    """Where given, g = lower_bound sigmoid(exp(A_log) (x Wf_down Wf_up + dt_bias)): decays stay above
    exp(lower_bound)."""
    eps: float = 1e-5

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "num_heads", "head_dim", *(() if self.gate_rank is None else ("gate_rank",)))
        self.check_heads("head_dim")
        check_lower_bound(self.lower_bound)

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_heads, self.head_dim, self.head_dim)

    def parameters(self) -> dict[str, Parameter]:
        d, channels = self.d_model, self.heads.keys
        rank = self.head_dim if self.gate_rank is None else self.gate_rank
        return super().parameters() | {
            "decay_down": linear("f_a_proj", d, rank),
            "decay_up": linear("f_b_proj", rank, channels, self.num_heads),
            **decay_parameters(self.num_heads, self.head_dim),
            **self._gate_parameters(rank),
        }

    def _gate_parameters(self, rank: int) -> dict[str, Parameter]:
        d, channels = self.d_model, self.heads.keys
        if self.full_rank_gate:
            return {"gate_proj": linear("g_proj", d, channels, self.num_heads)}
        return {
            "gate_down": linear("g_a_proj", d, rank),
            "gate_up": linear("g_b_proj", rank, channels, self.num_heads),
        }

    def packed(self, weights: KimiDeltaAttentionWeights) -> dict[str, Any]:
        """A checkpoint has an axis more: filters [channels, 1, W], and A_log [1, 1, H, 1]."""
        return {
            **{f"{of}_conv1d.weight": getattr(weights, f"{of}_conv").T[:, None] for of in "qkv"},
            "A_log": weights.A_log[None, None, :, None],
            "dt_bias": weights.dt_bias.reshape(-1),
        }

    @property
    def projections(self) -> tuple[str, ...]:
        return (*super().projections, "decay_down", "gate_proj" if self.full_rank_gate else "gate_down")

    def gates(self, weights: KimiDeltaAttentionWeights, projected: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        def steps(x: jax.Array, w: Any, A_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
            raw = split_heads(project(x, w), self.num_heads)  # [B, T, H, K]
            over = explicit_axes(raw)[2]
            return kda_gate(raw, placed(A_log, [over]), placed(dt_bias, [over, ()]), self.lower_bound)

        options = {"lower_bound": self.lower_bound}
        arrays = {
            "x": projected["decay_down"],
            "w": weights.decay_up,
            "A_log": weights.A_log,
            "dt_bias": weights.dt_bias,
        }
        g = self._of_product(kda_gate_of_product, gate_has_kernel, steps, options, arrays)  # [B, T, H, K] float32
        return g, jax.nn.sigmoid(projected["beta_proj"].astype(g.dtype))  # [B, T, H]

    def normalised(
        self, weights: KimiDeltaAttentionWeights, projected: Mapping[str, jax.Array], o: Float[Array, "B T H K"]
    ) -> jax.Array:
        options: Any = {"activation": "sigmoid", "eps": self.eps}
        norm = norm_weights(weights.norm, o)

        def gated(o: jax.Array, gate: jax.Array, norm: jax.Array) -> jax.Array:
            return gated_rms_norm(o, split_heads(gate, self.num_heads), norm, **options)

        def steps(o: jax.Array, x: jax.Array, w: Any, norm: jax.Array) -> jax.Array:
            return gated(o, project(x, w), norm)

        if self.full_rank_gate:  # One kernel gains nothing there (ops/norm/of_product).
            return gated(o, projected["gate_proj"], norm)
        arrays = {"o": o, "x": projected["gate_down"], "w": weights.gate_up, "norm": norm}
        return self._of_product(gated_rms_norm_of_product, norm_has_kernel, steps, options, arrays)

    def can_decode(self, weights: Any, x: jax.Array, state: Any, residual: Residual) -> bool:
        return self._token(weights, x, state) is not None and residual.takes(weights.o_proj)

    def decode(
        self, weights: Any, x: Float[Array, "B 1 D"], state: Any, residual: Residual
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], DeltaState]:
        """See `Layer.decode`. The arrays of the state are `StackedCache`s, or those of a single layer."""
        token = self._token(weights, x, state)
        assert token is not None
        y, *after = decode_kda(**token)
        arrays = [
            each.reshape(array_of(before).shape) for each, before in zip(after, vars(state).values(), strict=True)
        ]
        if token["layer"] is not None:
            arrays = [StackedCache(stack, token["layer"]) for stack in arrays]
        y = y.reshape(*x.shape[:2], self.heads.values)
        return *residual.plus(y, weights.o_proj), DeltaState(*arrays)

    def decode_weights(self, weights: KimiDeltaAttentionWeights) -> KimiDeltaAttentionWeights:
        """Rates per channel. XLA passes a kernel the part of a stack that it reads where that begins at a multiple of 128
        bytes, and copies it otherwise, in a launch of its own: such as one rate per head, of fewer than 32 heads.
        """
        rates = jnp.broadcast_to(weights.A_log[..., None], weights.dt_bias.shape)
        return dataclasses.replace(weights, A_log=rates)

    def _token(self, weights: Any, x: jax.Array, state: Any) -> dict[str, Any] | None:
        """The arguments of `decode_kda` for a single token, where it has a kernel for it."""
        if x.shape[1] != 1 or state is None or self.full_rank_gate:
            return None
        if any(isinstance(each, QuantizedArray) for each in vars(weights).values()):
            return None
        if any(any(explicit_axes(leaf)) for leaf in jax.tree.leaves((weights, x, state))):
            return None
        layer = state.memory.layer if isinstance(state.memory, StackedCache) else None

        def by_head(array: jax.Array) -> jax.Array:
            return array.reshape(*array.shape[:-1], self.num_heads, self.head_dim)

        names = ("q_proj", "k_proj", "v_proj", "q_conv", "k_conv", "v_conv", "decay_up", "gate_up")
        whole = ("decay_down", "A_log", "dt_bias", "beta_proj", "gate_down", "norm")
        arguments = {
            "x": x[:, 0],
            **{name: by_head(getattr(weights, name)) for name in names},
            **{name: getattr(weights, name) for name in whole},
            **{f"{of}_state": by_head(array_of(getattr(state, f"{of}_conv"))) for of in "qkv"},
            "memory": array_of(state.memory),
            "layer": layer,
            "lower_bound": self.lower_bound,
            "eps": self.eps,
        }
        alike = (*names, "decay_down", "beta_proj", "gate_down", "q_state", "k_state", "v_state")
        if any(arguments[name].dtype != x.dtype for name in alike):
            return None
        return arguments if decode_has_kernel(**arguments) else None

    def _of_product(
        self,
        op: Callable[..., jax.Array],
        has_kernel: Callable[..., bool],
        steps: Callable[..., jax.Array],
        options: dict[str, Any],
        arrays: dict[str, Any],
    ) -> jax.Array:
        """A product x w of low rank and what follows it: by `op`, one kernel, where that is faster than `steps`.

        It is not where it is differentiated; nor for single tokens, whose products have kernels of their own; nor for
        numbers of tokens that the kernel would pad. Quantised weights and arrays on Explicit mesh axes take `steps`, too.
        """
        x, w = arrays["x"], arrays["w"]
        if isinstance(w, QuantizedArray) or any(any(explicit_axes(array)) for array in arrays.values()):
            return steps(**arrays)

        def of_heads(given: dict[str, Any]) -> dict[str, Any]:
            heads = given["w"].astype(x.dtype).reshape(w.shape[0], self.num_heads, self.head_dim)
            return given | {"w": heads} | options

        batch, tokens, _ = x.shape
        if not has_kernel(**of_heads(arrays)) or tokens == 1 or batch * tokens % _TOKENS:
            return steps(**arrays)
        return forward_only(lambda given: op(**of_heads(given)), lambda given: steps(**given))(arrays)
