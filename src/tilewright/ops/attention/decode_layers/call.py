"""A call of `decode_layers`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float, Int

from tilewright.core.call import Call, array, option, power_of_two
from tilewright.ops.rope.api import Scaling


class DecodeLayersCall(Call):
    """One token of each sequence through L layers. The outputs are the token behind them and both stacks of caches.

    No array has the batch in front, since caches are stacks of layers: calls under `jax.vmap` run one by one.
    """

    independent = (("B",),)
    outputs = ("B D", "L B S KV C", "L B S KV C")

    x: Float[Array, "B D"] = array()
    mixer_norm: Float[Array, "L D"] = array()
    q_proj: Float[Array, "L D H C"] = array()
    k_proj: Float[Array, "L D KV C"] = array()
    v_proj: Float[Array, "L D KV C"] = array()
    o_proj: Float[Array, "L H C D"] = array()
    mlp_norm: Float[Array, "L D"] = array()
    gate_up: Float[Array, "L D 2 F"] = array()
    down: Float[Array, "L F D"] = array()
    keys: Float[Array, "L B S KV C"] = array()
    values: Float[Array, "L B S KV C"] = array()
    lengths: Int[Array, " B"] = array(differentiable=False)
    q_norm: Float[Array, "L C"] | None = array()
    k_norm: Float[Array, "L C"] | None = array()
    eps: float = option()
    norm_offset: float = option()
    theta: float | None = option()
    scaling: Scaling | None = option()
    rotary_dim: int = option()

    def bucket(self) -> Mapping[str, Any]:
        (layers, b, s, kv, c), (_, d, h, _), f = self.keys.shape, self.q_proj.shape, self.down.shape[1]
        sizes = {"B": power_of_two(b), "S": power_of_two(s), "L": layers, "D": d, "H": h, "KV": kv, "C": c, "F": f}
        return {"dtype": self.x.dtype.name, **sizes}
