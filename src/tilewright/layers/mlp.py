"""The feed-forward layer of Qwen3, and of Kimi Linear's first layers: swiglu."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from tilewright.core.dispatch import ImplementationName
from tilewright.core.partitioning import explicit_axes, placed
from tilewright.core.quantized import QuantizedArray
from tilewright.layers.layer import (
    Layer,
    Leaf,
    Parameter,
    Residual,
    Tensors,
    linear,
    project,
    quantized_weight,
    side_by_side,
)
from tilewright.ops.matmul.api import matmul


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MLPWeights:
    """F hidden channels. Both may be `QuantizedArray`s, gate_up of [D, 2 F] then."""

    gate_up: Leaf  # [D, 2, F], gates and values
    down: Leaf  # [F, D]


@dataclass(frozen=True, kw_only=True)
class MLP(Layer[MLPWeights]):
    """y = (silu(x Wgate) * (x Wup)) Wdown."""

    weights = MLPWeights
    packed_fields = ("gate_up",)
    quantizable = ("down",)

    d_model: int
    hidden_dim: int

    def __post_init__(self) -> None:
        self.check_sizes("d_model", "hidden_dim")

    def parameters(self) -> dict[str, Parameter]:
        d, f = self.d_model, self.hidden_dim

        def draw(key: PRNGKeyArray, shape: tuple[int, ...]) -> jax.Array:
            return d**-0.5 * jax.random.normal(key, shape, jnp.float32)

        return {
            "gate_up": Parameter((d, 2, f), draw, "gate_proj.weight", axes=("embed", None, "mlp")),
            "down": linear("down_proj", f, d, axes=("mlp", "embed")),
        }

    def unpacked(self, checkpoint: Tensors) -> dict[str, jax.Array]:
        """A checkpoint has gates and values apart."""
        shape = (self.hidden_dim, self.d_model)
        gate, up = (checkpoint.array(f"{name}_proj.weight", shape).T for name in ("gate", "up"))
        return {"gate_up": jnp.stack([gate, up], axis=1)}

    def packed(self, weights: MLPWeights) -> dict[str, Any]:
        return {f"{name}_proj.weight": weights.gate_up[:, n].T for n, name in enumerate(("gate", "up"))}

    def quantized(self, weights: MLPWeights, dtype: str) -> MLPWeights:
        """Gates and values are quantised side by side, [D, 2 F]."""
        gate_up = side_by_side("gate_up", weights.gate_up)
        return MLPWeights(*(quantized_weight(w, dtype) for w in (gate_up, weights.down)))

    def check_weights(self, weights: Any) -> None:
        """Raises where the weights are not this layer's. Quantised gates and values are [D, 2 F]."""
        if isinstance(weights, MLPWeights) and isinstance(weights.gate_up, QuantizedArray):
            d, columns = weights.gate_up.shape
            weights = replace(weights, gate_up=jax.ShapeDtypeStruct((d, 2, columns // 2), jnp.int8))
        super().check_weights(weights)

    def apply(
        self,
        weights: Any,
        x: Float[Array, "*tokens D"],
        state: None = None,
        *,
        implementation: ImplementationName | None = None,
    ) -> tuple[Float[Array, "B T D"], None]:
        """Returns y [B, T, D], and None: tokens do not meet. `implementation` is that of `matmul`."""
        self.check_tokens(x)
        self.check_weights(weights)
        w = weights.gate_up if isinstance(weights.gate_up, QuantizedArray) else weights.gate_up.astype(x.dtype)
        if not isinstance(w, QuantizedArray):
            # On Explicit mesh axes D is gathered (FSDP), and F stays sharded.
            *tokens, _ = explicit_axes(x)
            over = tuple(axis for axis in explicit_axes(w)[2] if not any(axis in each for each in tokens))
            x_whole, w = placed(x, [*tokens, ()]), placed(w, [(), (), over])
        else:
            x_whole = x
        h = matmul(x_whole, w, activation="swiglu", implementation=implementation)  # [B, T, F]
        return placed(project(h, weights.down), explicit_axes(x)), None

    def can_decode(self, weights: Any, x: jax.Array, state: None, residual: Residual) -> bool:
        gate_up = weights.gate_up
        is_plain = not isinstance(gate_up, QuantizedArray) and gate_up.dtype == x.dtype
        return is_plain and x.shape[1] == 1 and residual.takes(weights.down)

    def decode(
        self, weights: Any, x: Float[Array, "B 1 D"], state: None, residual: Residual
    ) -> tuple[Float[Array, "B 1 D"], Float[Array, "B 1 D"], None]:
        """See `Layer.decode`."""
        h = matmul(x, weights.gate_up, activation="swiglu")  # [B, 1, F]
        return *residual.plus(h, weights.down), None

    def decode_layers_arguments(self, weights: Any, state: Any) -> dict[str, Any] | None:
        own = {"gate_up": weights.gate_up, "down": weights.down}
        return None if any(isinstance(each, QuantizedArray) for each in own.values()) else own
