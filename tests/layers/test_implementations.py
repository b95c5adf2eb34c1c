"""One layer of each kind with each implementation of its op within the 2x rule: values, and with `xla` every gradient.

The gradients of kernels are tested with the ops; in the interpreters they would take minutes here.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.contract import able_to_run, assert_close, implementations
from tilewright.core.numerics import accumulator
from tilewright.layers import MLP, Attention, KimiDeltaAttention, LatentAttention, MoE, Qwen3NextGatedDeltaNet

D, T = 32, 12
LAYERS: dict[str, Any] = {
    "kda": KimiDeltaAttention(d_model=D, num_heads=1, head_dim=16),
    "gdn": Qwen3NextGatedDeltaNet(d_model=D, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16),
    "gated attention": Attention(d_model=D, num_heads=2, num_kv_heads=1, head_dim=16, gated=True, rope_fraction=0.5),
    "mla": LatentAttention(d_model=D, num_heads=2, latent_dim=16, key_dim=16, shared_key_dim=16, value_dim=16),
    "mlp": MLP(d_model=D, hidden_dim=64),
    "moe": MoE(d_model=D, num_experts=4, experts_per_token=2, expert_dim=32, shared_dim=32),
}


def run(name: str, implementation: str, *, gradients: bool) -> Any:
    """The outputs of a layer, and the gradients of its tokens and weights."""
    if not gradients:
        return jax.jit(lambda weights, x: {"y": LAYERS[name].apply(weights, x, implementation=implementation)[0]})

    def both(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = LAYERS[name].apply(weights, x, implementation=implementation)
            wide = accumulator(y.dtype)
            return jnp.sum(y.astype(wide) * jnp.cos(jnp.arange(y.size, dtype=wide)).reshape(y.shape)), y

        (d_weights, d_x), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)
        return {"y": y, "d x": d_x, **{f"d {n}": g for n, g in vars(d_weights).items() if g is not None}}

    return jax.jit(both)


@functools.cache
def expected(name: str, dtype: str, *, gradients: bool) -> tuple[Any, Any, Any, Any]:
    """Weights and tokens, and the results of the reference in `dtype` and in float64."""
    weights = LAYERS[name].init(jax.random.key(0), dtype)
    x = jax.random.normal(jax.random.key(1), (1, T, D)).astype(dtype)
    reference = run(name, "reference", gradients=gradients)
    plain = jax.tree.map(lambda value: np.asarray(value.astype(dtype), np.float32), reference(weights, x))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf).astype(np.float64)), (weights, x))
        return weights, x, plain, jax.tree.map(np.asarray, reference(*wide))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@implementations("pallas_tpu", "pallas_gpu", "xla")
def test_a_layer_is_as_exact_as_its_plain_version(name: str, implementation: str) -> None:
    gradients = implementation == "xla"
    weights, x, plain, oracle = expected(name, "float32" if gradients else "bfloat16", gradients=gradients)
    with able_to_run(implementation, plain=True):
        got = run(name, implementation, gradients=gradients)(weights, x)
    for quantity, value in got.items():
        assert_close(value, plain[quantity], oracle[quantity], f"{name} {implementation} {quantity}")
