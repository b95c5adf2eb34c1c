"""Every value, state and gradient that fla's recurrent references gave, on the plain implementations and the TPU kernel.

The files in tests/golden/ops were made by fla-core 0.6.0 in float32; the loss is sum(o do) + sum(final_state dfinal_state).
"""

import contextlib
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core.dispatch import find_op
from tilewright.workbench.check import needs_interpreter

GOLDEN = Path(__file__).parent.parent.parent / "golden" / "ops"
FILES = sorted(
    path.stem for path in GOLDEN.glob("*.npz") if path.stem.split("-")[0] in ("delta_rule", "gated_delta_rule", "kda")
)
# Both sides are float32, and chunks add in another order than tokens: relative to the largest value.
TOLERANCE = 3e-6


# The files that interpreters run; the contract holds them to the reference on more.
INTERPRETED = ("gva", "strong_gate")
PAIRS = [
    (name, implementation)
    for name, implementation in itertools.product(FILES, ("pallas_tpu", "xla", "reference"))
    if name.endswith(INTERPRETED) or not needs_interpreter(implementation)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "implementation"), PAIRS)
def test_values_states_and_gradients(name: str, implementation: str) -> None:
    with np.load(GOLDEN / f"{name}.npz") as stored:
        golden = dict(stored)
    function = find_op(name.split("-")[0]).function
    inputs = {key: jnp.asarray(golden[key]) for key in ("q", "k", "v", "g", "beta", "initial_state") if key in golden}

    @jax.jit
    def run(inputs, d_o, d_state):
        results, pull = jax.vjp(lambda given: function(**given, implementation=implementation), inputs)
        (gradients,) = pull((d_o, d_state))
        return results, gradients

    with tilewright.interpret(plain=True) if needs_interpreter(implementation) else contextlib.nullcontext():
        (o, state), gradients = run(inputs, golden["do"], golden["dfinal_state"])
    got = {"o": o, "final_state": state, **{f"d{key}": value for key, value in gradients.items()}}
    assert {key for key in golden if key[0] == "d" and key not in ("do", "dfinal_state")} <= set(got)
    for key, value in got.items():
        error = np.max(np.abs(np.asarray(value) - golden[key])) / np.max(np.abs(golden[key]))
        assert error < TOLERANCE, f"{key}: {error:.2g} of the largest value"


def test_all_fifteen_files_are_here() -> None:
    assert len(FILES) == 15
