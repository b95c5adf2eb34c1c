"""Calls, configs and the wrapper that makes implementations differentiable and batch-aware, on an op made for it."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright import configs
from tilewright.core.call import Call, Static, array, option, power_of_two
from tilewright.core.config import Config
from tilewright.core.dispatch import Op, noting_decisions
from tilewright.core.implementation import Implementation, Launch, Pass


class ScaledCall(Call):
    """y = factor * x * w, with x [B, D] and w [D]."""

    x: Any = array(batch=True)
    w: Any = array()
    mask: Any = array(batch=True, differentiable=False)
    factor: float = option()

    def bucket(self) -> Mapping[str, Any]:
        return {"dtype": self.x.dtype.name, "B": power_of_two(self.x.shape[0]), "mask": self.mask is not None}


class ScaledForward(Config):
    block_b: int

    def __post_init__(self) -> None:
        self.check_integers("block_b", multiple=8, why="sublanes")


class ScaledBackward(Config):
    block_b: int


@dataclasses.dataclass(frozen=True)
class ScaledOp(Op):
    """An op whose `xla` notes what it was run with, and whose backward may refuse."""

    seen: list[Any] = dataclasses.field(default_factory=list, compare=False)
    number: int = dataclasses.field(default_factory=itertools.count().__next__)  # Decisions are cached by op.
    refuses: bool = False

    def architectures(self, implementation: str) -> tuple[Implementation, ...]:
        def plain(call: ScaledCall, launch: Launch, *, save: bool) -> Any:
            return call.factor * call.x * call.w[None, :], None

        def forward(call: ScaledCall, launch: Launch, *, save: bool) -> Any:
            self.seen.append(("forward", call.x.shape, launch.config))
            return plain(call, launch, save=False)[0], (jnp.sum(call.x, axis=1), Static("kept")) if save else None

        def backward(call: ScaledCall, saved: Any, dy: Any, launch: Launch) -> ScaledCall:
            assert isinstance(call.w, jax.ShapeDtypeStruct)  # It is not among what this pass reads.
            assert saved[1] == Static("kept")
            self.seen.append(("backward", call.x.shape, launch.config))
            # Without w, this is the gradient where w is one.
            return call.gradients(x=call.factor * dy, w=jnp.sum(call.factor * dy * call.x, axis=0))

        def for_batch(config: type[Config]) -> Any:
            return lambda chip, call: config(block_b=8 * call.x.shape[0])

        if implementation == "reference":
            return (Implementation(Pass(plain)),)
        refused = "it has no gradient; use implementation='reference'" if self.refuses else None
        return (
            Implementation(
                Pass(forward, ScaledForward, for_batch(ScaledForward)),
                Pass(
                    backward,
                    ScaledBackward,
                    for_batch(ScaledBackward),
                    unsupported_reason=lambda call, launch: refused,
                    reads=("x",),
                ),
            ),
        )

    def __call__(self, x: Any, w: Any, *, implementation: str | None = None, config: Any = None) -> Any:
        return self.run(ScaledCall(x=x, w=w, mask=None, factor=3.0), implementation=implementation, config=config)


def op(**more: Any) -> ScaledOp:
    return ScaledOp("scaled", "none", ("xla", "reference"), **more)


X, ONES = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)


def loss(scaled: ScaledOp, **options: Any) -> Any:
    return lambda x, w: jnp.sum(jnp.sin(scaled(x, w, **options)))


def expected(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.sin(3.0 * x * w[None, :]))


def test_both_passes_run_with_configs_of_their_own() -> None:
    scaled = op()
    got = jax.grad(loss(scaled, config=ScaledBackward(block_b=40)), (0, 1))(X, ONES)
    for one, other in zip(got, jax.grad(expected, (0, 1))(X, ONES), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert scaled.seen == [
        ("forward", (2, 3), ScaledForward(block_b=16)),
        ("backward", (2, 3), ScaledBackward(block_b=40)),
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_vmapped_calls_are_one_larger_call(nested: bool) -> None:
    """Run once, decided once, with the config of the larger batch; forward alone."""
    scaled = op()
    function, sizes = jax.vmap(lambda x: scaled(x, ONES)), (5,)
    if nested:
        function, sizes = jax.vmap(function), (4, 5)
    x = jax.random.normal(jax.random.key(0), (*sizes, 2, 3))
    with noting_decisions() as decisions:
        got = jax.jit(function)(x)
    np.testing.assert_allclose(got, 3.0 * x, rtol=1e-6)
    batch = 2 * int(np.prod(sizes))
    assert [seen for seen in scaled.seen if seen[1] != (2, 3)][-1:] == [
        ("forward", (batch, 3), ScaledForward(block_b=8 * batch))
    ]
    assert [decision.configs["forward"] for decision in decisions] == [ScaledForward(block_b=8 * batch)]


def test_gradients_of_vmapped_calls() -> None:
    """Of x alone the backward is one larger call too. Weights need a gradient per call, and get one."""
    scaled = op()
    x = jax.random.normal(jax.random.key(0), (5, 2, 3))
    got = jax.vmap(jax.grad(loss(scaled), (0, 1)), (0, None))(x, ONES)
    want = jax.vmap(jax.grad(expected, (0, 1)), (0, None))(x, ONES)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_weights_that_differ_from_call_to_call_are_not_merged() -> None:
    scaled = op()
    x, w = jax.random.normal(jax.random.key(0), (5, 2, 3)), jnp.arange(15.0).reshape(5, 3)
    np.testing.assert_allclose(jax.vmap(scaled)(x, w), 3.0 * x * w[:, None, :], rtol=1e-6)
    assert {shape for _, shape, _ in scaled.seen} == {(2, 3)}


def test_a_backward_that_refuses_is_never_replaced_in_silence() -> None:
    """Named, it runs forward and refuses the gradient. Not named, another implementation takes both passes."""
    scaled = op(refuses=True)
    np.testing.assert_allclose(scaled(X, ONES, implementation="xla"), 3.0 * X)
    told = r"scaled: implementation='xla' cannot differentiate this call: it has no gradient; use implementation='ref"
    with pytest.raises(tilewright.Unsupported, match=told):
        jax.grad(loss(scaled, implementation="xla"))(X, ONES)
    decision = scaled.decide(ScaledCall(x=X, w=ONES, mask=None, factor=3.0))
    assert "backward: cannot run: it has no gradient" in str(decision)
    scaled.seen.clear()
    with noting_decisions() as decisions:
        got = jax.grad(loss(scaled))(X, ONES)
    np.testing.assert_allclose(got, jax.grad(expected)(X, ONES), rtol=1e-6)
    assert [decision.implementation for decision in decisions] == ["reference"]
    assert decisions[0].rejected == {"xla": "it has no gradient; use implementation='reference'"}
    assert not scaled.seen


def test_a_call_is_a_pytree_of_its_arrays() -> None:
    call = ScaledCall(x=X, w=ONES, mask=None, factor=3.0)
    assert call.bucket_key == "dtype=float32 B=2"
    assert list(call.given()) == ["x", "w"]
    assert [leaf.shape for leaf in jax.tree.leaves(call)] == [(2, 3), (3,)]
    assert jax.tree.map(lambda x: x + 1, call).factor == 3.0
    with pytest.raises(TypeError, match=r"\['mask'\] are not differentiable arrays of ScaledCall"):
        call.gradients(mask=X)
    with pytest.raises(dataclasses.FrozenInstanceError):
        call.factor = 4.0  # type: ignore[misc]


def test_configs_that_break_a_rule_are_refused_when_built() -> None:
    told = r"block_b=20 must be a positive multiple of 8 \(sublanes\); use 16$"
    with pytest.raises(ValueError, match=told):
        ScaledForward(block_b=20)
    with pytest.raises(
        TypeError, match=r"config=.*ScaledForward.* is not a config that rms_norm takes; configs: NormTpuF"
    ):
        tilewright.rms_norm(X, ONES, config=ScaledForward(block_b=8))


def test_json_that_is_no_config_is_refused() -> None:
    with pytest.raises(ValueError, match=r"config='Fast' is not a config of tilewright; see tilewright.configs"):
        configs.from_json('{"config": "Fast"}')
    with pytest.raises(ValueError, match=r"NormTpuForward has no field 'block_q'; its fields are block_n, tile_n"):
        configs.from_json('{"config": "NormTpuForward", "block_q": 8}')


def test_every_config_is_named_after_its_backend_and_direction() -> None:
    found = [name for name, kind in vars(configs).items() if isinstance(kind, type) and issubclass(kind, Config)]
    for name in set(found) - {"Config"}:
        assert name.endswith(("Forward", "Backward"))
        assert any(backend in name for backend in ("Tpu", "Sm90", "Xla"))
