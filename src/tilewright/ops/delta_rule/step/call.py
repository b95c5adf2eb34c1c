"""A call of one of the steps: `delta_rule_step`, `gated_delta_rule_step` or `kda_step`."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from tilewright.core.axes import State
from tilewright.core.call import Call, array, option, power_of_two


class DeltaRuleStepCall(Call):
    """One token of the delta rule. The outputs are o and the state after the token.

    g is None, one log-decay per value head, or one per key channel (`kda_step`). The state, g and beta are float32.
    """

    independent = (("B",), ("H", "HV"))
    outputs = ("B HV V", "B HV K V")

    state: State = array(batch=True)
    q: Float[Array, "B H K"] = array(batch=True)
    k: Float[Array, "B H K"] = array(batch=True)
    v: Float[Array, "B HV V"] = array(batch=True)
    g: Float[Array, "B HV"] | Float[Array, "B HV K"] | None = array(batch=True)
    beta: Float[Array, "B HV"] = array(batch=True)
    scale: float = option()

    def bucket(self) -> Mapping[str, Any]:
        b, hv, k, v = self.state.shape
        gate = "none" if self.g is None else "head" if len(self.g.shape) == 2 else "channel"
        sizes = {"B": power_of_two(b), "H": self.q.shape[1], "HV": hv, "K": k, "V": v}
        return {"dtype": self.v.dtype.name, **sizes, "gate": gate}
