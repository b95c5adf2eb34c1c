"""A call of `delta_rule`, `gated_delta_rule` or `kda`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tilewright.core.axes import Gate, Keys, PerHead, Starts, State, Values
from tilewright.core.call import Call, array, option, power_of_two

GateKind = Literal["none", "head", "channel"]


class DeltaRuleCall(Call):
    """The delta rule on a state that decays by exp(g) per token. The outputs are o and the final state.

    g and beta are float32 whatever the dtype of q, k and v, and the state is too. `resets` is True where a packed
    sequence begins: the state before such a token is zeros.
    """

    independent = (("B",), ("H", "HV"))
    outputs = ("B T HV V", "B HV K V")
    arguments: ClassVar[Mapping[str, str]] = {"resets": "segment_ids B T"}
    exchanged = ("T",)

    q: Keys = array(batch=True)
    k: Keys = array(batch=True)
    v: Values = array(batch=True)
    g: Gate | None = array(batch=True)
    beta: PerHead = array(batch=True)
    initial_state: State = array(batch=True)
    resets: Starts | None = array(batch=True, differentiable=False)
    scale: float = option()

    @property
    def gate(self) -> GateKind:
        """What has a log-decay of its own: nothing (`delta_rule`), each value head, or each key channel (`kda`)."""
        if self.g is None:
            return "none"
        return "head" if len(self.g.shape) == 3 else "channel"

    def bucket(self) -> Mapping[str, Any]:
        b, t, h, k = self.q.shape
        hv, v = self.v.shape[2:]
        return {
            "dtype": self.v.dtype.name,
            "B": power_of_two(b),
            "T": power_of_two(t),
            "H": h,
            "HV": hv,
            "K": k,
            "V": v,
            "gate": self.gate,
            "resets": self.resets is not None,
        }
