"""Packed sequences with an initial and a final state each, against each sequence alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops.contract import able_to_run
from tilewright import short_conv

LENGTHS = (3, 0, 1, 9, 2)
ENDS = np.cumsum((0, *LENGTHS)).astype(np.int32)
N, T, W, D = len(LENGTHS), sum(LENGTHS), 4, 24


def draw() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "x": jax.random.normal(keys[0], (T, D)),
        "w": jax.random.normal(keys[1], (W, D)),
        "bias": jax.random.normal(keys[2], (D,)),
        "initial_state": jax.random.normal(keys[3], (N, W - 1, D)),
    }


def alone(arrays: dict[str, Any]) -> tuple[Any, Any]:
    """Each sequence behind its state, as the definition says."""
    outputs, finals = [], []
    for n, length in enumerate(LENGTHS):
        inputs = jnp.concatenate([arrays["initial_state"][n], arrays["x"][ENDS[n] : ENDS[n + 1]]])
        taps = [inputs[i : i + length] * arrays["w"][i][None] for i in range(W)]
        outputs.append(jax.nn.silu(sum(taps) + arrays["bias"][None]))
        finals.append(inputs[length:])
    return jnp.concatenate(outputs), jnp.stack(finals)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas_tpu", "xla", "reference"])
def test_each_sequence_is_as_it_is_alone(implementation: str) -> None:
    """Values, final states and every gradient; sequences of 0, 1 and odd lengths."""
    arrays = draw()
    cotangents = jax.tree.map(jnp.cos, (arrays["x"], arrays["initial_state"]))

    @jax.jit
    def run(arrays: Any, ends: Any) -> Any:
        results, pullback = jax.vjp(
            lambda arrays: short_conv(**arrays, activation="silu", cu_seqlens=ends, implementation=implementation),
            arrays,
        )
        return results, pullback(cotangents)

    with able_to_run(implementation, plain=True):
        got = run(arrays, jnp.asarray(ENDS))
    want, pullback = jax.vjp(alone, arrays)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves((want, pullback(cotangents))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_channels_that_are_sharded_stay_where_they_are() -> None:
    """Under an Explicit mesh axis, values and gradients; a state that is on every device is accepted."""
    arrays, mesh = draw(), jax.make_mesh((2,), ("y",), axis_types=(AxisType.Explicit,))

    @jax.jit
    def run(arrays: Any) -> Any:
        results, pullback = jax.vjp(lambda arrays: short_conv(**arrays, activation="silu", cu_seqlens=ENDS), arrays)
        return results, pullback(jax.tree.map(jnp.cos, results))

    want = run(arrays)
    with jax.set_mesh(mesh):
        got = run({**arrays, "x": jax.device_put(arrays["x"], NamedSharding(mesh, P(None, "y")))})
        cut = jax.device_put(arrays["initial_state"][:4], NamedSharding(mesh, P("y")))
        with pytest.raises(ValueError, match=r"initial_state is sharded .* along its axis N, of \[N, W-1, D\]"):
            short_conv(arrays["x"], arrays["w"], initial_state=cut, cu_seqlens=ENDS[[0, 1, 2, 3, 5]])
    (y, final), (gradients,) = got
    assert [x.sharding.spec for x in (y, final, gradients["x"])] == [P(None, "y"), P(None, None, "y"), P(None, "y")]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-5)


def test_what_is_refused() -> None:
    arrays = draw()
    with pytest.raises(ValueError, match=r"cu_seqlens=\[1, 15\] must ascend from 0 to T=15"):
        short_conv(arrays["x"], arrays["w"], cu_seqlens=np.array([1, 15]))
    with pytest.raises(ValueError, match=r"initial_state is .*; initial_state must be \[1, 3, 24\]"):
        short_conv(**arrays, cu_seqlens=np.array([0, 15]))
    with pytest.raises(ValueError, match="cu_seqlens and segment_ids are both given"):
        short_conv(**arrays, cu_seqlens=ENDS, segment_ids=np.zeros(T, np.int32))
    ends = jnp.asarray([0, 3, 2, 15, 15, 15])
    y, final_state = jax.jit(lambda ends: short_conv(**arrays, cu_seqlens=ends, implementation="reference"))(ends)
    assert np.isnan(y).all()
    assert np.isnan(final_state).all()
