"""A call of `decode_kda`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from tilewright.core.call import array, option, power_of_two
from tilewright.core.stacked_call import StackedCall


class DecodeKdaCall(StackedCall):
    """One token of each sequence through a KDA layer, up to its output projection.

    The outputs are what that projection reads, and the states: the inputs of the three convolutions, and the memory.
    """

    independent = (("B", "N"), ("H",))
    outputs = ("B H K", "L N W-1 H K", "L N W-1 H K", "L N W-1 H K", "L N H K K")
    stacks = ("q_state", "k_state", "v_state", "memory")
    arguments: ClassVar[Mapping[str, str]] = {
        "q_state": "q_state L B W-1 H K",
        "k_state": "k_state L B W-1 H K",
        "v_state": "v_state L B W-1 H K",
        "memory": "memory L B H K K",
    }

    x: Float[Array, "B D"] = array(batch=True)
    q_proj: Float[Array, "D H K"] = array()
    k_proj: Float[Array, "D H K"] = array()
    v_proj: Float[Array, "D H K"] = array()
    q_conv: Float[Array, "W H K"] = array()
    k_conv: Float[Array, "W H K"] = array()
    v_conv: Float[Array, "W H K"] = array()
    decay_down: Float[Array, "D R"] = array()
    decay_up: Float[Array, "R H K"] = array()
    A_log: Float[Array, " H"] | Float[Array, "H K"] = array()
    dt_bias: Float[Array, "H K"] = array()
    beta_proj: Float[Array, "D H"] = array()
    gate_down: Float[Array, "D R"] = array()
    gate_up: Float[Array, "R H K"] = array()
    norm: Float[Array, " K"] = array()
    q_state: Float[Array, "L N W-1 H K"] = array()
    k_state: Float[Array, "L N W-1 H K"] = array()
    v_state: Float[Array, "L N W-1 H K"] = array()
    memory: Float[Array, "L N H K K"] = array()
    layer: Int[Array, ""] | None = array(differentiable=False)
    lower_bound: float | None = option()
    eps: float = option()

    def bucket(self) -> Mapping[str, Any]:
        (b, d), (_, h, k), r, w = self.x.shape, self.q_proj.shape, self.decay_down.shape[1], self.q_conv.shape[0]
        sizes = {"B": power_of_two(b), "D": d, "H": h, "K": k, "R": r, "W": w}
        return {"dtype": self.x.dtype.name, **sizes, "bounded": self.lower_bound is not None}
