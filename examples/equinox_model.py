"""Tilewright's ops in Equinox: modules, `eqx.filter_jit`, `eqx.filter_value_and_grad`, an optax optimizer, and a mesh.

    pip install equinox optax
    python examples/equinox_model.py

The model and the text are those of plain_jax.py: bytes, one layer of a gated delta rule, one of attention. Modules are
written for one sequence [T, D], as Equinox does it, and mapped over the batch: under `jax.vmap` an op is one larger call.
The batch is cut over all devices there are; JAX_NUM_CPU_DEVICES=4 makes four out of a CPU.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tilewright

VOCAB, D, H, K = 256, 64, 2, 32  # bytes, channels, heads, channels of a head
BATCH, T = 8, 64
OPTIMIZER = optax.adam(1e-2)


class Heads(eqx.Module):
    """A norm and a projection to q, k and v, each [T, H, K]."""

    scale: jax.Array
    qkv: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        self.scale = jnp.ones(D)
        self.qkv = eqx.nn.Linear(D, 3 * H * K, use_bias=False, key=key)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        h = tilewright.rms_norm(x, self.scale)
        return h, [each.reshape(-1, H, K) for each in jnp.split(jax.vmap(self.qkv)(h), 3, axis=-1)]


class DeltaLayer(eqx.Module):
    """Gated DeltaNet without its convolutions."""

    heads: Heads
    gates: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        heads, gates, out = jax.random.split(key, 3)
        self.heads = Heads(heads)
        self.gates = eqx.nn.Linear(D, 2 * H, key=gates)
        self.out = eqx.nn.Linear(H * K, D, use_bias=False, key=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        h, (q, k, v) = self.heads(x)
        g, beta = jnp.split(jax.vmap(self.gates)(h), 2, axis=-1)  # [T, H]
        o, _ = tilewright.gated_delta_rule(q, k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta), normalize_qk=True)
        return x + jax.vmap(self.out)(o.reshape(-1, H * K))


class AttentionLayer(eqx.Module):
    """Causal softmax attention."""

    heads: Heads
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        heads, out = jax.random.split(key)
        self.heads = Heads(heads)
        self.out = eqx.nn.Linear(H * K, D, use_bias=False, key=out)

    def __call__(self, x: jax.Array) -> jax.Array:
        _, (q, k, v) = self.heads(x)
        return x + jax.vmap(self.out)(tilewright.flash_attention(q, k, v, causal=True).reshape(-1, H * K))


class Model(eqx.Module):
    """The bytes of one row to the mean cross entropy of the next byte."""

    embedding: jax.Array
    layers: list[eqx.Module]
    scale: jax.Array
    head: jax.Array

    def __init__(self, key: jax.Array):
        embedding, delta, attention, head = jax.random.split(key, 4)
        self.embedding = jax.random.normal(embedding, (VOCAB, D)) * VOCAB**-0.5
        self.layers = [DeltaLayer(delta), AttentionLayer(attention)]
        self.scale = jnp.ones(D)
        self.head = jax.random.normal(head, (D, VOCAB)) * D**-0.5

    def loss(self, ids: jax.Array) -> jax.Array:
        x = self.embedding[ids[:-1]]  # [T, D]
        for layer in self.layers:
            x = layer(x)
        return tilewright.linear_cross_entropy(tilewright.rms_norm(x, self.scale), self.head, ids[1:], reduction="mean")


@eqx.filter_jit
def train_step(model: Model, state: optax.OptState, ids: jax.Array) -> tuple[Model, optax.OptState, jax.Array]:
    def loss_of(model: Model) -> jax.Array:
        return jax.vmap(model.loss)(ids).mean()

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    updates, state = OPTIMIZER.update(gradients, state, model)
    return eqx.apply_updates(model, updates), state, loss


def batches(steps: int) -> list[np.ndarray]:
    """Rows of T + 1 bytes of this file, [BATCH, T + 1] per step."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - T, (steps, BATCH))
    return [np.stack([text[start : start + T + 1] for start in row]) for row in starts]


def main(steps: int = 30) -> list[float]:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    model = eqx.filter_shard(Model(jax.random.key(0)), whole)
    state = eqx.filter_shard(OPTIMIZER.init(eqx.filter(model, eqx.is_array)), whole)
    losses = []
    for ids in batches(steps):
        model, state, loss = train_step(model, state, jax.device_put(ids, rows))
        losses.append(float(loss))
    print(f"Equinox on {jax.device_count()} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    return losses


if __name__ == "__main__":
    main()
