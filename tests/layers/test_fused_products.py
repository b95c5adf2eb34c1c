"""Kimi Delta Attention on a Hopper GPU: when its gates are one kernel with their products."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilewright
from tilewright.core.quantized import quantize
from tilewright.layers import KimiDeltaAttention, kimi_delta_attention

D, T = 256, 128
KDA = KimiDeltaAttention(d_model=D, num_heads=4, head_dim=128)
FULL_RANK = KimiDeltaAttention(d_model=D, num_heads=4, head_dim=128, full_rank_gate=True, lower_bound=-5.0)
NARROW = KimiDeltaAttention(d_model=D, num_heads=4, head_dim=32)
GATE, NORM, SEPARATE_NORM = "kda_gate_of_product", "gated_rms_norm_of_product", "gated_rms_norm"


def kernels(one: KimiDeltaAttention, *, tokens: int = T, quantized: bool = False, grad: bool = False) -> set[str]:
    """Those of the three ops that take a kernel in a layer, traced for an H200."""

    def weights() -> Any:
        drawn = one.init(jax.random.key(0), jnp.bfloat16)
        changed = {name: quantize(getattr(drawn, name), "int8") for name in ("decay_up", "gate_up") if quantized}
        return dataclasses.replace(drawn, **changed)

    def run(weights: Any, x: jax.Array) -> Any:
        y = one.apply(weights, x)[0]
        return jnp.sum(y.astype(jnp.float32))

    given = jax.eval_shape(weights), jax.ShapeDtypeStruct((2, tokens, D), jnp.bfloat16)
    with tilewright.target("h200"):
        decisions = tilewright.explain(jax.grad(run) if grad else run, *given).decisions
    return {one.op for one in decisions if one.implementation == "pallas_gpu"} & {GATE, NORM, SEPARATE_NORM}


@pytest.mark.parametrize(
    ("one", "options", "fused"),
    [
        (KDA, {}, {GATE, NORM}),
        (FULL_RANK, {}, {GATE, SEPARATE_NORM}),
        (KDA, {"tokens": 1}, {SEPARATE_NORM}),
        (KDA, {"tokens": 129}, {SEPARATE_NORM}),
        (KDA, {"quantized": True}, {SEPARATE_NORM}),
        (KDA, {"grad": True}, {SEPARATE_NORM}),
    ],
)
def test_which_products_are_computed_with_what_follows_them(one, options, fused) -> None:
    assert kernels(one, **options) == fused


@pytest.mark.slow
def test_a_mapped_layer_has_a_gradient() -> None:
    weights = jax.eval_shape(lambda: KDA.init(jax.random.key(0), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((3, 1, 128, D), jnp.bfloat16)

    def run(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.vmap(lambda x: KDA.apply(weights, x)[0])(x).astype(jnp.float32))

    with tilewright.target("h200"):
        d_weights, dx = jax.eval_shape(jax.grad(run, (0, 1)), weights, x)
        assert jax.eval_shape(KDA.apply, weights, jax.ShapeDtypeStruct((0, 128, D), jnp.bfloat16))[0].shape == (
            0,
            128,
            D,
        )
    assert (jax.tree.structure(d_weights), dx.shape) == (jax.tree.structure(weights), x.shape)


def test_the_ops_have_the_values_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ops' plain implementations, which a layer takes where it is told that there are kernels."""
    rng, structs = np.random.default_rng(0), jax.eval_shape(NARROW.init, jax.random.key(0))
    weights = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), structs)
    x, o = (rng.standard_normal(shape, np.float32) for shape in ((2, 4, D), (2, 4, NARROW.num_heads, NARROW.head_dim)))

    def run(weights: Any, x: jax.Array, o: jax.Array) -> Any:
        projected = NARROW.projected(weights, x)
        return NARROW.gates(weights, projected)[0], NARROW.normalised(weights, projected, o)

    want = jax.jit(run)(weights, x, o)
    for name in ("gate_has_kernel", "norm_has_kernel"):
        monkeypatch.setattr(kimi_delta_attention, name, lambda **_: True)
    assert {decision.op for decision in tilewright.explain(run, weights, x, o).decisions} == {GATE, NORM}
    got = jax.jit(lambda *given: run(*given))(weights, x, o)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)


def test_a_differentiated_layer_has_the_kernel_of_the_gates_gradient() -> None:
    """And not where its channels do not fill the kernel's tiles."""

    def ops(one: KimiDeltaAttention) -> dict[str, str]:
        weights = jax.eval_shape(lambda: one.init(jax.random.key(0), jnp.bfloat16))
        x = jax.ShapeDtypeStruct((2, T, D), jnp.bfloat16)

        def loss(weights: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(one.apply(weights, x)[0].astype(jnp.float32))

        with tilewright.target("h200"):
            decisions = tilewright.explain(jax.grad(loss), weights, x).decisions
        return {decision.op: decision.implementation for decision in decisions}

    assert ops(KDA)["kda_gate"] == "pallas_gpu"
    assert ops(NARROW)["kda_gate"] == "reference"
